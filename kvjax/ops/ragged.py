"""Attention for a whole serving step, prompts in chunks beside sequences that decode: `ragged_paged_attention`."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.cache import KVCache, as_seen_here
from kvjax.kernels import attention as kernel
from kvjax.ops import prompts, select, softmax
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    LAYERS_OWN,
    Window,
    as_lengths,
    as_sinks,
    as_sm_scale,
    as_soft_cap,
    as_window,
    check_array,
    check_cache,
    check_devices,
    reach_of,
)
from kvjax.ops.attention import attended, attention_mosaic, invariant_batch, why_not_mosaic
from kvjax.ops.gather import as_sequences, in_one_layer, own_sequences
from kvjax.ops.rows import why_not_whole_elements
from kvjax.ops.softmax import attend_pages
from kvjax.ops.values import check_query_lens, is_checked
from kvjax.partition import Signature
from kvjax.spec import AttentionSpec, as_bool, as_int

MAX_DECODE_Q_LEN = 8
"""Query tokens of a sequence up to which the decode kernel is the way, unless a caller says so otherwise."""

TILE_ROWS = 64
"""Rows of one sequence that XLA attends with at once: the more there are, the less often its pages are decoded, and
the more rows are idle for a sequence that has fewer."""


@overload
def ragged_paged_attention(
    query: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    layer: ArrayLike | None = ...,
    k_scale: ArrayLike | None = ...,
    v_scale: ArrayLike | None = ...,
    sm_scale: float | None = ...,
    sliding_window: Window = ...,
    logits_soft_cap: float | None = ...,
    sinks: ArrayLike | None = ...,
    return_lse: Literal[False] = ...,
    batch_invariant: bool = ...,
    max_q_len: int | None = ...,
    max_prompts: int | None = ...,
    decode_q_len: int | None = ...,
    implementation: str | None = ...,
) -> jax.Array: ...


@overload
def ragged_paged_attention(
    query: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    layer: ArrayLike | None = ...,
    k_scale: ArrayLike | None = ...,
    v_scale: ArrayLike | None = ...,
    sm_scale: float | None = ...,
    sliding_window: Window = ...,
    logits_soft_cap: float | None = ...,
    sinks: ArrayLike | None = ...,
    return_lse: Literal[True],
    batch_invariant: bool = ...,
    max_q_len: int | None = ...,
    max_prompts: int | None = ...,
    decode_q_len: int | None = ...,
    implementation: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


def ragged_paged_attention(
    query: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    layer: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sm_scale: float | None = None,
    sliding_window: Window = LAYERS_OWN,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    decode_q_len: int | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the last tokens of each sequence over its cached tokens, of each sequence as many as it has.

    Sequence `i` has the rows `cu_q_lens[i]:cu_q_lens[i + 1]` of the query, which are its last tokens: row `j` of them
    stands at position `seq_lens[i] - q_len_i + j`, and sees what it would in `paged_attention`; write their keys and
    values first. Names and meaning are those of ragged paged attention on TPUs.

    A row that sees nothing is 0, and its log-sum-exp is its sink, or -inf; so are rows of no sequence, from
    `cu_q_lens[-1]` on. Of a sequence without query rows nothing is read.

    `max_q_len`, `max_prompts` and `decode_q_len` say what a compiled program is made for. The kernels serve no row
    beyond them: it comes out as one that sees nothing. XLA serves all rows, whatever they say. The
    defaults serve every call, at a cost: docs/attention.md.

    Args:
      query: `[num_tokens, num_heads, head_size]`; float32, float16 or bfloat16. `num_heads` is a multiple of
        `num_kv_heads`, and neighbouring query heads share a KV head.
      cache: the layer's cache, or that of several layers.
      block_table: int32 `[num_seqs, max_blocks]`, the pages of each sequence.
      seq_lens: int32 `[num_seqs]`, tokens of each sequence, those of the query included.
      cu_q_lens: int32 `[num_seqs + 1]`, the first row of each sequence, and the end of the last one's; 0 first, and
        none less than the one before it.
      layer: in a cache of several layers the number of the layer to read; as for `paged_attention`.
      k_scale: the decode scale that the keys were written with, where it is not the cache's; by default that, or 1.
      v_scale: the same for the values.
      sm_scale: factor on the logits, a Python number; by default `1 / sqrt(head_size)`.
      sliding_window: tokens that a row sees, its own included: an int, or an int32 scalar that may be traced, which
        XLA serves, and with which a row sees nothing where it is below 1; None for no window. By default the layer's.
      logits_soft_cap: what no logit exceeds, a positive Python number; None for no cap.
      sinks: float32 `[num_heads]`, a logit of each head in units of the natural exponential, neither scaled nor capped;
        -inf for none.
      return_lse: whether to return the log-sum-exp too.
      batch_invariant: whether a sequence's results are to have the same bits whatever else is in the batch, for the
        same `max_q_len` and `decode_q_len`. The kernels promise that of sequences that decode alone.
      max_q_len: most query tokens of a sequence, a Python int; by default `num_tokens`. 1 is decode.
      max_prompts: most sequences with more query tokens than `decode_q_len`, a Python int; by default as many as can be
        in `num_tokens`.
      decode_q_len: most query tokens of a sequence that is attended to as one that decodes, each in rows for so many; a
        Python int, by default `max_q_len` if that is at most 8, else 1.
      implementation: `"mosaic"`, the kernels and cuDNN, or `"xla"`; `None` chooses.

    Returns:
      `[num_tokens, num_heads, head_size_v]` of `query`'s dtype. With `return_lse` a pair of this and the natural
      logarithm of each softmax's denominator, the sink included: float32 `[num_tokens, num_heads]`.

    Raises:
      KVCacheValueError, KVCacheTypeError: a shape, dtype, scale, window, cap, sink or number that does not fit, naming
        it.
      UnsupportedError: the implementation asked for cannot serve this call.
    """
    check_cache(cache)
    cache = as_seen_here(cache)
    spec = cache.spec
    dims = [("num_tokens", None), ("num_heads", None), ("head_size", spec.head_size)]
    check_array("query", query, dims, INPUT_DTYPES)
    query = jnp.asarray(query)
    num_tokens, num_heads, _ = query.shape
    sinks = as_sinks(sinks, num_heads, spec)
    check_devices(cache, query=query, sinks=sinks, cu_q_lens=cu_q_lens, sliding_window=sliding_window)
    check_array("block_table", block_table, [("num_seqs", None), ("max_blocks", None)], INDEX_DTYPES)
    num_seqs = np.shape(block_table)[0]
    check_array("cu_q_lens", cu_q_lens, [("num_seqs + 1", num_seqs + 1)], INDEX_DTYPES)
    batch_invariant = as_bool("batch_invariant", batch_invariant)
    numbers = max_q_len, max_prompts, decode_q_len
    buckets = _as_buckets(num_tokens, num_seqs, *numbers, batch_invariant=batch_invariant)
    if is_checked():
        check_query_lens(cu_q_lens, num_tokens, **buckets)
    bounds = as_lengths(cu_q_lens)
    if bounds.dtype != jnp.int32:
        bounds = jnp.clip(bounds, 0, np.iinfo(np.int32).max).astype(jnp.int32)
    window, window_array = as_window(sliding_window, spec)
    reach = reach_of((window, window_array), bounds[1:] - bounds[:-1], num_tokens)
    sequences = as_sequences(cache, block_table, seq_lens, layer, k_scale, v_scale, last_tokens=reach)
    decode = buckets["decode_q_len"]
    prompts_vary = batch_invariant and buckets["max_prompts"] > 0
    sizes = None
    if batch_invariant:
        # As `_ragged_mosaic` packs rows: with a window, each row is a sequence.
        decode_rows = (num_seqs, decode) if window is None else (num_seqs * decode, 1)
        sizes = invariant_batch(cache, (*decode_rows, *query.shape[1:]), np.shape(block_table)[1])
    candidates = _candidates(jnp.dtype(query.dtype), window_array is None, prompts_vary, sizes)
    serve = select.choose("ragged_paged_attention", implementation, candidates, cache)
    attended, lse = serve(
        cache,
        query,
        *sequences[:2],
        bounds[:-1],
        bounds[1:],
        *sequences[2:],
        sinks,
        window_array,
        **buckets,
        sm_scale=as_sm_scale(sm_scale, spec),
        window=window,
        logits_soft_cap=as_soft_cap(logits_soft_cap),
        batch_invariant=batch_invariant,
    )
    # Of each share of the blocks: a row is one sequence's, and so one share's, and to all others sees nothing.
    attended, lse = (
        (attended[0], lse[0]) if attended.shape[0] == 1 else (jnp.sum(attended, axis=0), jnp.max(lse, axis=0))
    )
    return (attended, lse) if return_lse else attended


def _as_buckets(
    num_tokens: int,
    num_seqs: int,
    max_q_len: Any,
    max_prompts: Any,
    decode_q_len: Any,
    *,
    batch_invariant: bool = False,
) -> dict[str, int]:
    """The numbers that a program is made for, each as small as the others allow.

    With `batch_invariant` the number of tokens, which is the batch's, limits none that are given.
    """
    longest = num_tokens if max_q_len is None else as_int("max_q_len", max_q_len, least=1)
    longest = longest if batch_invariant else min(longest, num_tokens)
    if decode_q_len is None:
        decode = longest if longest <= MAX_DECODE_Q_LEN else 1
    else:
        decode = min(as_int("decode_q_len", decode_q_len, least=1), max(longest, 1))
    prompts = min(num_seqs, num_seqs if batch_invariant else num_tokens // (decode + 1)) if longest > decode else 0
    if max_prompts is not None:
        prompts = min(as_int("max_prompts", max_prompts, least=0), prompts)
    return {"max_q_len": longest, "max_prompts": prompts, "decode_q_len": decode}


class Rows(NamedTuple):
    """What the rows of a query are, `[num_tokens]` each: of which sequence, and whether of any."""

    seq: jax.Array
    is_any: jax.Array

    @classmethod
    def of(cls, num_tokens: int, q_starts: jax.Array, q_ends: jax.Array) -> Rows:
        """Of sequences `[num_seqs]`, in order, which need not begin at 0."""
        token = jnp.arange(num_tokens)
        seq = jnp.sum(token[:, None] >= q_ends[None, :], axis=1, dtype=jnp.int32)
        seq = jnp.minimum(seq, q_ends.shape[0] - 1)
        return cls(seq, (token >= q_starts[seq]) & (token < q_ends[seq]))


def _nothing(query: jax.Array, sinks: jax.Array | None, head_size_v: int) -> tuple[jax.Array, jax.Array]:
    """The results of rows that see nothing."""
    num_tokens, num_heads, _ = query.shape
    lse = jnp.broadcast_to(softmax.sinks_of_heads(sinks, num_heads)[None], (num_tokens, num_heads))
    return jnp.zeros((num_tokens, num_heads, head_size_v), query.dtype), lse


def _ragged_xla(
    cache: KVCache,
    query: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    q_starts: jax.Array,
    q_ends: jax.Array,
    layer: jax.Array | None,
    k_scale: jax.Array,
    v_scale: jax.Array,
    sinks: jax.Array | None,
    window_array: jax.Array | None,
    *,
    max_q_len: int,
    max_prompts: int,
    decode_q_len: int,
    **static: Any,
) -> tuple[jax.Array, jax.Array]:
    """What every implementation takes, checked, and returns; and the reference of its numbers.

    The rows of a sequence are taken in tiles of neighbours, of which some attend at once, one lot after the other.

    Args:
      cache: one device's cache or share of it.
      query: `[num_tokens, num_heads, head_size]`, the rows of sequences of other shares among them.
      block_table: int32 `[num_seqs, max_blocks]`, of any numbers: entries outside the cache hold no tokens.
      seq_lens: int32 `[num_seqs]`, of any numbers: below 0 is 0.
      q_starts: int32 `[num_seqs]`, the first row of each sequence, in order.
      q_ends: likewise the row after the last.
      layer: int32 `[]`, of any number: one out of range holds no tokens. None for a cache of one layer.
      k_scale: float32 `[]` or, for fp8, `[num_kv_heads, 1]`.
      v_scale: likewise.
      sinks: float32 `[num_heads]`, -inf where there is none; None for none at all.
      window_array: int32 `[]`, at least 0, instead of `static`'s `window`; None where that holds, as in every kernel.
      max_q_len: as `ragged_paged_attention` takes them, here and below; no row depends on them in XLA.
      max_prompts: of these sequences.
      decode_q_len: at most `max_q_len`.
      static: `sm_scale`, `window`, `logits_soft_cap` and `batch_invariant`, as `paged_attention`'s implementations take
        them.

    Returns:
      `[1, num_tokens, num_heads, head_size_v]` of the query's dtype and float32 `[1, num_tokens, num_heads]`. The first
      dimension is that of the shares of the cache's blocks.
    """
    num_tokens, num_seqs = query.shape[0], block_table.shape[0]
    nothing = _nothing(query, sinks, cache.spec.head_size_v)
    if not query.size or not num_seqs:
        return nothing[0][None], nothing[1][None]
    cache, block_table = in_one_layer(cache, layer, block_table)
    if window_array is not None:
        static["window"] = window_array
    size = min(1 << (max_q_len - 1).bit_length(), TILE_ROWS)
    at_once = 1 if static["batch_invariant"] else TILE_ROWS // size
    num_tiles = (jnp.maximum(q_ends - q_starts, 0) + size - 1) // size
    last_tile = jnp.cumsum(num_tiles)
    first_tile = last_tile - num_tiles

    def attend_tiles(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        tile = first + jnp.arange(at_once)
        seq = jnp.sum(tile[:, None] >= last_tile[None, :], axis=1, dtype=jnp.int32)
        seq = jnp.minimum(seq, num_seqs - 1)
        row = (q_starts[seq] + (tile - first_tile[seq]) * size)[:, None] + jnp.arange(size)[None, :]
        is_row = (row >= 0) & (row < jnp.minimum(q_ends[seq], num_tokens)[:, None])
        position = jnp.where(is_row, jnp.maximum(seq_lens[seq], 0)[:, None] - (q_ends[seq][:, None] - row), -1)
        rows = query[jnp.clip(row, 0, num_tokens - 1)]
        sequences = block_table[seq], seq_lens[seq], position
        out, lse = attend_pages(cache, rows, *sequences, k_scale, v_scale, sinks, **static)
        return out.astype(query.dtype), lse

    # A sequence ends with a tile that may have one row only.
    most_tiles = (num_tokens + num_seqs * (size - 1)) // size
    out, lse = lax.map(attend_tiles, jnp.arange(0, most_tiles, at_once))
    rows = Rows.of(num_tokens, q_starts, q_ends)
    place = first_tile[rows.seq] * size + jnp.arange(num_tokens) - q_starts[rows.seq]
    return _where(rows.is_any, (lax.collapse(out, 0, 3), lax.collapse(lse, 0, 3)), place, nothing)


def _where(
    condition: jax.Array, found: tuple[jax.Array, ...], place: jax.Array, otherwise: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """For each row what was found at its place, where the condition holds; of one share."""
    out, lse = (
        jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x[jnp.clip(place, 0, x.shape[0] - 1)], other)[None]
        for x, other in zip(found, otherwise, strict=True)
    )
    return out, lse


def _ragged_mosaic(
    cache: KVCache,
    query: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    q_starts: jax.Array,
    q_ends: jax.Array,
    layer: jax.Array | None,
    k_scale: jax.Array,
    v_scale: jax.Array,
    sinks: jax.Array | None,
    window_array: jax.Array | None,
    *,
    max_q_len: int,
    max_prompts: int,
    decode_q_len: int,
    **static: Any,
) -> tuple[jax.Array, jax.Array]:
    """What `_ragged_xla` returns: short sequences by the decode kernel, all others as `prompts` has it.

    Both are of static shapes, and which sequence belongs to which is decided by arithmetic on the device: to the decode
    kernel a sequence that is not its own is an empty one.
    """
    num_tokens, num_seqs = query.shape[0], block_table.shape[0]
    arrays = layer, k_scale, v_scale, sinks, window_array
    if not query.size or not block_table.size:
        return _ragged_xla(
            *(cache, query, block_table, seq_lens, q_starts, q_ends, *arrays),
            max_q_len=max_q_len, max_prompts=max_prompts, decode_q_len=decode_q_len, **static,
        )  # fmt: skip
    q_lens = jnp.maximum(q_ends - q_starts, 0)
    is_short = q_lens <= decode_q_len
    rows = Rows.of(num_tokens, q_starts, q_ends)
    from_end = q_ends[rows.seq] - jnp.arange(num_tokens)

    own_lens = jnp.where(is_short & (q_lens > 0), seq_lens, 0)
    from_last = jnp.arange(-decode_q_len, 0)[None, :]
    packed = query[jnp.clip(q_ends[:, None] + from_last, 0, num_tokens - 1)]
    # Rows of other sequences would have a say in how this one's are rounded.
    packed = jnp.where((q_lens[:, None] + from_last >= 0)[..., None, None], packed, jnp.zeros((), packed.dtype))
    if static["window"] is None or decode_q_len == 1:
        decoded = attention_mosaic(cache, packed, block_table, own_lens, *arrays, **static)
    else:
        # A row that a sequence has not would reach further back than those that it has, to what may be NaN there.
        lens = jnp.where(q_lens[:, None] + from_last >= 0, own_lens[:, None] + 1 + from_last, 0)
        table = jnp.repeat(block_table, decode_q_len, axis=0)
        rows_of_one = packed.reshape(-1, 1, *query.shape[1:])
        decoded = attention_mosaic(cache, rows_of_one, table, lens.reshape(-1), *arrays, **static)
    place = rows.seq * decode_q_len + decode_q_len - from_end
    found = lax.collapse(decoded[0], 0, 2), lax.collapse(decoded[1], 0, 2)
    short = _where(rows.is_any & is_short[rows.seq], found, place, _nothing(query, sinks, cache.spec.head_size_v))
    if not max_prompts:
        return short

    rank = jnp.cumsum(~is_short) - 1
    (chosen,) = jnp.nonzero(~is_short, size=max_prompts, fill_value=num_seqs)
    cache, block_table = in_one_layer(cache, layer, block_table)
    sequences = prompts.Sequences(
        block_table.at[chosen].get(mode="fill", fill_value=-1),
        jnp.maximum(seq_lens, 0).at[chosen].get(mode="fill", fill_value=0),
        q_ends.at[chosen].get(mode="fill", fill_value=0),
        q_lens.at[chosen].get(mode="fill", fill_value=0),
    )
    numbers = {name: static[name] for name in ("sm_scale", "window", "logits_soft_cap")}
    out, lse, first = prompts.attend(cache, query, sequences, k_scale, v_scale, sinks, max_q_len=max_q_len, **numbers)
    num_rows, rank = out.shape[1], rank[rows.seq]
    prompt = jnp.clip(rank, 0, max_prompts - 1)
    position = jnp.maximum(seq_lens[rows.seq], 0) - from_end
    row = position - first[prompt]
    is_long = rows.is_any & ~is_short[rows.seq] & (rank < max_prompts)
    is_long &= (position >= 0) & (row >= 0) & (row < num_rows)
    found = lax.collapse(out, 0, 2), lax.collapse(lse, 0, 2)
    return _where(is_long, found, prompt * num_rows + row, (short[0][0], short[1][0]))


def _attended(*args: Any, **static: Any) -> Any:
    """The types of `_ragged_xla`'s results."""
    return tuple(jax.ShapeDtypeStruct((1, *result.shape), result.dtype) for result in attended(*args, **static))


def _own_sequences(
    spec: AttentionSpec, first_block: jax.Array, num_blocks: int, query: jax.Array, *args: jax.Array
) -> tuple[jax.Array, ...]:
    return query, *own_sequences(spec, first_block, num_blocks, *args[:2]), *args[2:]


def _why_not_mosaic(
    query_dtype: np.dtype[Any],
    is_window_static: bool,
    prompts_vary: bool,
    sizes: kernel.BatchSizes | None,
    cache: KVCache,
) -> str | None:
    if prompts_vary:
        return (
            "cuDNN promises no bits, and serves sequences of more than decode_q_len query tokens; with"
            " batch_invariant=True it takes max_prompts=0"
        )
    return why_not_mosaic(query_dtype, is_window_static, sizes, cache) or why_not_whole_elements(cache)


@functools.cache
def _candidates(
    query_dtype: np.dtype[Any], is_window_static: bool, prompts_vary: bool, sizes: kernel.BatchSizes | None
) -> select.Candidates:
    sequences = ("sequences blocks_in_order", "sequences", "sequences", "sequences")
    return select.Candidates(
        xla=_ragged_xla,
        mosaic=_ragged_mosaic,
        results=_attended,
        why_not_mosaic=functools.partial(_why_not_mosaic, query_dtype, is_window_static, prompts_vary, sizes),
        differentiable=frozenset({"query", "sinks"}),
        signature=Signature(
            arguments=("tokens heads head_size", *sequences, "", "heads", "heads", "heads", ""),
            results=("blocks tokens heads head_size", "blocks tokens heads"),
            own=_own_sequences,
        ),
    )
