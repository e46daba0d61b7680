"""`ragged_paged_attention`: attention for a whole serving step, chunked prefills and decodes together."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.cache import KVCache, local_view
from kvjax.kernels import attention as kernel
from kvjax.ops import prompts, select
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    OF_LAYER,
    Window,
    as_lengths,
    as_sinks,
    as_window,
    check_array,
    check_cache,
    check_devices,
    check_keys_and_values,
    reach_of,
)
from kvjax.ops.attention import (
    AttentionOptions,
    attended,
    invariant_batch,
    is_indexable,
    own_query_sequences,
    why_no_kernels,
)
from kvjax.ops.gather import Stored, as_sequences, in_one_layer
from kvjax.ops.options import Given, Limits, as_bool, as_limits, as_sm_scale, as_soft_cap, buckets
from kvjax.ops.ragged_kernels import StaticOptions, StepRows, as_read_of_step, decode_rows, with_prompts
from kvjax.ops.route import Query, check_query_quantization
from kvjax.ops.softmax import InFp8, attend_pages
from kvjax.ops.trees import as_tree_mask, words_of_rows
from kvjax.ops.value_checks import check_query_lens, is_checked
from kvjax.partition import Signature


class RaggedOptions(AttentionOptions, total=False):
    """Keyword arguments of `ragged_paged_attention` that do not change the type of its result."""

    max_q_len: int | None
    max_prompts: int | None
    decode_q_len: int | None
    query_quantization: bool


@overload
def ragged_paged_attention(
    query: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[RaggedOptions],
) -> jax.Array: ...


@overload
def ragged_paged_attention(
    query: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[RaggedOptions],
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
    sliding_window: Window = OF_LAYER,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    decode_q_len: int | None = None,
    query_quantization: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of each sequence's last tokens over its cached tokens, with a query length per sequence.

    Sequence `i` has the rows `cu_q_lens[i]:cu_q_lens[i + 1]` of the query, its last tokens. Row `j` of them is at
    position `seq_lens[i] - q_len_i + j` and attends to what it would in `paged_attention`: write their keys and values
    first. Names and meaning are those of ragged paged attention on TPUs.

    A row that attends to nothing is 0, and its log-sum-exp is its sink, or -inf; so are rows past `cu_q_lens[-1]`.
    Sequences without query rows are not read.

    `max_q_len`, `max_prompts` and `decode_q_len` are the static sizes that a program is compiled for. The kernels
    return a row beyond them as one that attends to nothing; XLA serves all rows. The defaults serve every call, at a
    cost: docs/attention.md.

    Args:
      query: `[num_tokens, num_heads, head_size]`; float32, float16 or bfloat16. `num_heads` is a multiple of
        `num_kv_heads`; neighbouring query heads share a KV head.
      cache: the layer's cache, or that of several layers.
      block_table: int32 `[num_seqs, max_blocks]`, the pages of each sequence.
      seq_lens: int32 `[num_seqs]`, tokens of each sequence, those of the query included.
      cu_q_lens: int32 `[num_seqs + 1]`, cumulative query lengths: starts with 0 and never decreases.
      layer: the layer to read in a cache of several, as in `paged_attention`.
      k_scale: the decode scale that the keys were written with, if not the cache's; default: the cache's, or 1.
      v_scale: the same for the values.
      sm_scale: factor on the logits, a Python number; default `1 / sqrt(head_size)`.
      sliding_window: tokens that a row attends to, its own included: an int; an int32 scalar that may be traced (XLA
        only; below 1 it masks all tokens); or None for no window. Default: the layer's.
      logits_soft_cap: bound on the magnitude of logits, a positive Python number; None for no cap.
      sinks: float32 `[num_heads]`, one logit per head in natural-log units, neither scaled nor capped; -inf for none.
      tree_mask: bool `[num_seqs, decode_q_len, decode_q_len]`, or `[decode_q_len, decode_q_len]` for all sequences:
        whether query token `j` of a sequence sees its query token `i`, both counted from its first, as in
        `paged_attention`. It is for sequences of at most `decode_q_len` query tokens, by default as many as the mask
        has; shorter ones use its first rows and columns. Prompts, which have more query tokens, are causal.
      return_lse: whether to return the log-sum-exp too.
      batch_invariant: whether a sequence's results have the same bits whatever the rest of the batch, for the same
        `max_q_len` and `decode_q_len`. Where no prompt kernel serves prompts, XLA then serves the call.
      max_q_len: most query tokens of a sequence, a Python int; default `num_tokens`. 1 is decode.
      max_prompts: most sequences with more query tokens than `decode_q_len`, a Python int; default: as many as
        `num_tokens` can hold.
      decode_q_len: most query tokens of a sequence that takes the decode path, which pads each to this many rows; a
        Python int, default that of `tree_mask`, else `max_q_len` if that is at most 8, else 1. With 0 no sequence does,
        and a sequence of one query token counts towards `max_prompts`.
      query_quantization: whether attention to prompts (sequences with more query tokens than `decode_q_len`) uses fp8
        products: query, weights, and elements of NVFP4 are rounded to e4m3, 3 bits after the leading one. Supported for
        caches of fp8_e4m3 and NVFP4, also with keys of one and values of the other, and head sizes of 32, 64, 96 and
        128. docs/attention.md has its error and its time.
      implementation: `"mosaic"` (the kernels; an online softmax for prompts that none serves), `"xla"`, or `None` to
        choose.

    Returns:
      `[num_tokens, num_heads, head_size_v]` of `query`'s dtype. With `return_lse`, a pair of this and the natural
      logarithm of each softmax's denominator, the sink included: float32 `[num_tokens, num_heads]`.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype, scale, window, cap, sink or number; the message
        names it.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    check_keys_and_values("ragged_paged_attention", cache.spec, "mla_ragged_paged_attention")
    cache = local_view(cache)
    spec = cache.spec
    dims = [("num_tokens", None), ("num_heads", None), ("head_size", spec.head_size)]
    check_array("query", query, dims, INPUT_DTYPES)
    query = jnp.asarray(query)
    sinks = as_sinks(sinks, query.shape[1], spec)
    check_devices(
        cache, query=query, sinks=sinks, cu_q_lens=cu_q_lens, sliding_window=sliding_window, tree_mask=tree_mask
    )
    return attend_ragged(
        "ragged_paged_attention",
        cache,
        query,
        (block_table, seq_lens, cu_q_lens, Stored(layer, k_scale, v_scale)),
        (sinks, tree_mask),
        Given(
            as_sm_scale(sm_scale, spec.head_size),
            sliding_window,
            logits_soft_cap,
            return_lse,
            batch_invariant,
            implementation,
            query_quantization,
        ),
        as_limits(max_q_len, max_prompts, decode_q_len),
    )


class Prepared(NamedTuple):
    """A checked call.

    Attributes:
      arrays: those that an implementation takes after the cache and the query.
      options: its options.
    """

    arrays: tuple[jax.Array | None, ...]
    options: StaticOptions


def attend_ragged(
    operation: str,
    cache: KVCache,
    query: jax.Array,
    read: tuple[ArrayLike, ArrayLike, ArrayLike, Stored],
    others: tuple[jax.Array | None, ArrayLike | None],
    given: Given,
    limits: Limits,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns what `operation`, `ragged_paged_attention` or that of MLA, does, for a checked query.

    `read` holds the block table, the lengths, the cumulative query lengths, and the layer and scales to read with;
    `others` the checked sinks and the tree mask; `limits` are checked.
    """
    return_lse = as_bool("return_lse", given.return_lse)
    call = prepared(cache, query, read, others, given, limits)
    serve = select.choose(operation, given.implementation, _candidates(call.options.query), cache)
    out, lse = of_all_shares(*serve(cache, query, *call.arrays, options=call.options))
    return (out, lse) if return_lse else out


def of_all_shares(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the results of all shares of a cache's blocks.

    A row's sequence is in one share; in the others the row attends to nothing.
    """
    return (out[0], lse[0]) if out.shape[0] == 1 else (jnp.sum(out, axis=0), jnp.max(lse, axis=0))


def prepared(
    cache: KVCache,
    query: jax.Array,
    read: tuple[ArrayLike, ArrayLike, ArrayLike, Stored],
    others: tuple[jax.Array | None, ArrayLike | None],
    given: Given,
    limits: Limits,
) -> Prepared:
    """Checks a call; its arguments are those of `attend_ragged`."""
    (block_table, seq_lens, cu_q_lens, stored), (sinks, tree_mask) = read, others
    num_tokens = query.shape[0]
    check_array("block_table", block_table, [("num_seqs", None), ("max_blocks", None)], INDEX_DTYPES)
    num_seqs = np.shape(block_table)[0]
    check_array("cu_q_lens", cu_q_lens, [("num_seqs + 1", num_seqs + 1)], INDEX_DTYPES)
    batch_invariant = as_bool("batch_invariant", given.batch_invariant)
    mask = None
    if tree_mask is not None:
        mask = as_tree_mask(tree_mask, num_seqs, ("decode_q_len", limits.decode_q_len))
        limits = limits._replace(decode_q_len=mask.shape[-1])
    sizes = buckets(limits, num_tokens, num_seqs, batch_invariant=batch_invariant)
    if is_checked():
        check_query_lens(cu_q_lens, num_tokens, **sizes._asdict())
    bounds = as_lengths(cu_q_lens)
    window, window_array = as_window(given.sliding_window, cache.spec)
    reach = reach_of((window, window_array), bounds[1:] - bounds[:-1], num_tokens)
    sequences = as_sequences(cache, block_table, seq_lens, stored, last_tokens=reach)
    decode, tree = sizes.decode_q_len, None
    if mask is not None and decode:
        restricts = window if window_array is None else window_array
        tree = words_of_rows(mask[:, :decode, :decode], bounds[:-1], bounds[1:], num_tokens, restricts)
    # As `decode_rows` packs rows: with a window, each row is a sequence.
    decode_shape = (num_seqs, decode) if window is None or tree is not None else (num_seqs * decode, 1)
    batch = None
    if batch_invariant:
        batch = invariant_batch(cache, (*decode_shape, *query.shape[1:]), np.shape(block_table)[1])
    rows = decode_shape[1] * query.shape[1] if cache.spec.is_mla else None
    table = decode_shape[0], np.shape(block_table)[1]
    asked = Query(
        jnp.dtype(query.dtype),
        given.sm_scale > 0,
        window_array is None,
        sizes.max_prompts > 0,
        batch,
        rows,
        is_indexable=is_indexable(cache, max(num_tokens, num_seqs * decode), query.shape[1], table),
    )
    query_quantization = check_query_quantization(given.query_quantization, cache.spec, asked)
    asked = asked._replace(query_quantization=query_quantization)
    softmax = kernel.Softmax(
        sm_scale=given.sm_scale,
        window=window,
        logits_soft_cap=as_soft_cap(given.logits_soft_cap),
        batch_invariant=batch_invariant,
        tree_tokens=None if tree is None else decode,
        query_quantization=query_quantization,
    )
    arrays = *sequences[:2], bounds[:-1], bounds[1:], *sequences[2:], sinks, tree, window_array
    return Prepared(arrays, StaticOptions(sizes, softmax, asked))


def ragged_xla(
    cache: KVCache, query: jax.Array, *arrays: jax.Array | None, options: StaticOptions
) -> tuple[jax.Array, jax.Array]:
    """Attends in XLA. The reference for every implementation's arguments, results and numerics.

    The rows of each sequence are split into tiles; a loop processes a fixed number of tiles at a time.

    Args:
      cache: one device's cache or its share of one.
      query: `[num_tokens, num_heads, head_size]`, including rows of sequences of other shares.
      arrays: those of `paged_attention`'s implementations, the tree's `[num_tokens, ...]`, and, after the block table
        and the lengths, int32 `[num_seqs]`: the first row of each sequence, in order, and the row after the last.
      options: the call's; no result depends on its `limits`, but for which rows are those of prompts.

    Returns:
      `[1, num_tokens, num_heads, head_size_v]` of the query's dtype and float32 `[1, num_tokens, num_heads]`. The first
      dimension is that of the shares of the cache's blocks.
    """
    read, q_starts, q_ends, softmax = as_read_of_step(arrays, options.softmax)
    nothing = prompts.of_no_tokens(query, read.sinks, cache.spec.head_size_v)
    if not query.size or not len(read.block_table):
        return nothing[0][None], nothing[1][None]
    cache, block_table = in_one_layer(cache, read.layer, read.block_table)

    def attend_tile(tile: prompts.RowTile) -> tuple[jax.Array, jax.Array]:
        lens = read.seq_lens[tile.seq]
        position = jnp.where(tile.is_row, jnp.maximum(lens, 0)[:, None] - tile.from_end, -1)
        own = read._replace(block_table=block_table[tile.seq], seq_lens=lens)
        if read.tree is not None:
            row = q_ends[tile.seq][:, None] - tile.from_end
            own = own._replace(tree=read.tree[jnp.clip(row, 0, len(read.tree) - 1)])
        in_fp8 = None
        if softmax.query_quantization:
            q_lens = (q_ends - q_starts)[tile.seq]
            first = jnp.zeros_like(lens) if softmax.window is None else lens - q_lens - (softmax.window - 1)
            in_fp8 = InFp8(q_lens > options.limits.decode_q_len, jnp.maximum(first, 0))
        return attend_pages(cache, tile.query, position, own, softmax, in_fp8)

    bounds, longest = (q_starts, q_ends), options.limits.max_q_len
    out, lse = prompts.by_tiles(attend_tile, query, bounds, nothing, longest, batch_invariant=softmax.batch_invariant)
    return out[None], lse[None]


def _ragged_mosaic(
    cache: KVCache, query: jax.Array, *arrays: jax.Array | None, options: StaticOptions
) -> tuple[jax.Array, jax.Array]:
    """Attends with the kernels; returns what `ragged_xla` does."""
    read, q_starts, q_ends, softmax = as_read_of_step(arrays, options.softmax)
    if not query.size or not read.block_table.size:
        return ragged_xla(cache, query, *arrays, options=options)
    step = StepRows.of(len(query), q_starts, q_ends, options.limits.decode_q_len)
    decoded = decode_rows(cache, query, read, step, softmax) if step.decode_q_len else None
    out, lse = with_prompts(cache, query, read, step, decoded, options)
    return out[None], lse[None]


def _attended(*args: Any, **static: Any) -> Any:
    """Returns the types of `ragged_xla`'s results."""
    return tuple(jax.ShapeDtypeStruct((1, *result.shape), result.dtype) for result in attended(*args, **static))


@functools.lru_cache(maxsize=1024)
def _candidates(query: Query) -> select.Candidates:
    sequences = ("sequences blocks_in_order", "sequences", "sequences", "sequences")
    names = "query", "block_table", "seq_lens", "q_starts", "q_ends", *kernel.ReadArrays._fields[2:]
    return select.Candidates(
        parameters=("cache", *names, "sliding_window"),
        xla=ragged_xla,
        mosaic=_ragged_mosaic,
        results=_attended,
        why_not_mosaic=functools.partial(why_no_kernels, query),
        differentiable=frozenset({"query", "sinks"}),
        signature=Signature(
            arguments=("tokens heads head_size", *sequences, "", "heads", "heads", "heads", "tokens words", ""),
            results=("blocks tokens heads head_size", "blocks tokens heads"),
            own=own_query_sequences,
        ),
    )
