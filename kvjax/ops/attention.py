"""`paged_attention`: attention of each sequence's last tokens over a paged cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.cache import KVCache, local_view
from kvjax.kernels import attention as kernel
from kvjax.kernels import mla
from kvjax.kernels.target import Target
from kvjax.ops import select
from kvjax.ops.arguments import (
    INPUT_DTYPES,
    OF_LAYER,
    Window,
    as_sinks,
    as_window,
    check_array,
    check_cache,
    check_devices,
    check_keys_and_values,
    reach_of,
)
from kvjax.ops.gather import Stored, as_sequences, in_one_layer, own_sequences
from kvjax.ops.options import Given, as_bool, as_sm_scale, as_soft_cap
from kvjax.ops.route import INT32_MAX, Query, route
from kvjax.ops.softmax import attend_pages, one_by_one
from kvjax.ops.trees import as_tree_mask, tree_words
from kvjax.partition import Signature, partition_of
from kvjax.spec import AttentionSpec


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `paged_attention` that do not change the type of its result."""

    layer: ArrayLike | None
    k_scale: ArrayLike | None
    v_scale: ArrayLike | None
    sm_scale: float | None
    sliding_window: Window
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    tree_mask: ArrayLike | None
    batch_invariant: bool
    implementation: str | None


@overload
def paged_attention(
    query: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...


@overload
def paged_attention(
    query: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    query: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
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
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of each sequence's last tokens over its cached tokens: grouped-query, softmax in float32.

    Row `j` of `q_len` is at position `seq_lens - q_len + j` and attends to every token up to its own, so the query
    tokens are causal among themselves: write their keys and values first. With a window of W it attends to the last W
    of these, its own included. The logit of a token is `query . key * sm_scale`; with a soft cap,
    `cap * tanh(logit / cap)` of that. A sink is one more logit in the softmax's denominator, without a value.

    A row that attends to nothing, for example of a sequence shorter than `q_len`, is 0, and its log-sum-exp is its
    sink, or -inf. Tokens outside every row's reach may hold anything, NaN included, and so may block table entries past
    the sequence's length or before its window. Any other entry that is not a block of the cache counts as missing
    tokens.

    Args:
      query: `[num_seqs, num_heads, head_size]`, one token per sequence, or `[num_seqs, q_len, num_heads, head_size]`;
        float32, float16 or bfloat16. `num_heads` is a multiple of `num_kv_heads`; neighbouring query heads share a
        KV head.
      cache: the layer's cache, or that of several layers.
      block_table: int32 `[num_seqs, max_blocks]`, the pages of each sequence.
      seq_lens: int32 `[num_seqs]`, tokens of each sequence, those of the query included.
      layer: the layer to read in a cache of several, an int or an int32 scalar that may be traced. An array out of
        range masks all tokens. None for a cache of one layer.
      k_scale: the decode scale that the keys were written with, if not the cache's; default: the cache's, or 1.
      v_scale: the same for the values.
      sm_scale: factor on the logits, a Python number; default `1 / sqrt(head_size)`.
      sliding_window: tokens that a row attends to, its own included: an int; an int32 scalar that may be traced (XLA
        only; below 1 it masks all tokens); or None for no window. Default: the layer's.
      logits_soft_cap: bound on the magnitude of logits, a positive Python number; None for no cap.
      sinks: float32 `[num_heads]`, one logit per head in natural-log units, neither scaled nor capped; -inf for none.
      tree_mask: bool `[num_seqs, q_len, q_len]`, or `[q_len, q_len]` for all sequences: whether query token `j` sees
        query token `i`. For drafts that are a tree, parents before their children: a draft sees its ancestors and
        itself. Later tokens are never seen, whatever the mask says. A row's position for a window is `seq_lens - q_len`
        plus its depth in the tree, the number of query tokens before it that it sees. None: each sees all before it.
      return_lse: whether to return the log-sum-exp too.
      batch_invariant: whether a sequence's results have the same bits whatever the rest of the batch and its size;
        docs/attention.md states the cost.
      implementation: `"mosaic"`, `"xla"`, or `None` to choose.

    Returns:
      `[num_seqs, num_heads, head_size_v]` or `[num_seqs, q_len, num_heads, head_size_v]`, of `query`'s dtype. With
      `return_lse`, a pair of this and the natural logarithm of each softmax's denominator, the sink included: float32,
      of the same shape without `head_size_v`. `merge_attention_states` takes such pairs.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype, scale, window, cap or sink; the message names it.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    check_keys_and_values("paged_attention", cache.spec, "mla_paged_attention")
    cache = local_view(cache)
    spec = cache.spec
    dims: list[tuple[str, int | None]] = [("num_seqs", None), ("num_heads", None), ("head_size", spec.head_size)]
    if np.ndim(query) == 4:
        dims.insert(1, ("q_len", None))
    check_array("query", query, dims, INPUT_DTYPES)
    query = jnp.asarray(query)
    sinks = as_sinks(sinks, query.shape[-2], spec)
    q_len = 1 if query.ndim == 3 else query.shape[1]
    tree = None if tree_mask is None else as_tree_mask(tree_mask, len(query), ("q_len", q_len))
    check_devices(cache, query=query, sinks=sinks, sliding_window=sliding_window, tree_mask=tree_mask)
    return attend_last_tokens(
        "paged_attention",
        cache,
        (query,),
        (block_table, seq_lens, Stored(layer, k_scale, v_scale)),
        (sinks, tree),
        Given(
            as_sm_scale(sm_scale, spec.head_size),
            sliding_window,
            logits_soft_cap,
            return_lse,
            batch_invariant,
            implementation,
        ),
    )


def attend_last_tokens(
    operation: str,
    cache: KVCache,
    query: tuple[jax.Array, ...],
    read: tuple[ArrayLike, ArrayLike, Stored],
    others: tuple[jax.Array | None, jax.Array | None],
    given: Given,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns what `operation`, `paged_attention` or `mla_paged_attention`, does, for a checked query.

    The query's parts lie next to each other in a row. `read` holds the block table, the lengths, and the layer and
    scales to read with; `others` the checked sinks and tree mask.
    """
    (block_table, seq_lens, stored), (sinks, mask) = read, others
    is_one_token = query[0].ndim == 3
    # XLA removes a concatenation that the kernel's caller splits again, unless a reshape lies between the two.
    parts = [part[:, None] if is_one_token else part for part in query]
    rows = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    num_seqs, q_len = rows.shape[:2]
    window, window_array = as_window(given.sliding_window, cache.spec)
    reach = reach_of((window, window_array), q_len, q_len)
    sequences = as_sequences(cache, block_table, seq_lens, stored, num_seqs, last_tokens=reach)
    batch_invariant = as_bool("batch_invariant", given.batch_invariant)
    return_lse = as_bool("return_lse", given.return_lse)
    sizes = invariant_batch(cache, rows.shape, np.shape(block_table)[1]) if batch_invariant else None
    num_rows = q_len * rows.shape[2] if cache.spec.is_mla else None
    asked = Query(
        jnp.dtype(rows.dtype),
        is_window_static=window_array is None,
        invariant=sizes,
        rows=num_rows,
        is_indexable=is_indexable(cache, num_seqs * q_len, rows.shape[2], np.shape(block_table)),
    )
    serve = select.choose(operation, given.implementation, _candidates(asked), cache)
    attended, lse = serve(
        cache,
        rows,
        *sequences,
        sinks,
        None if mask is None else tree_words(mask, window if window_array is None else window_array),
        window_array,
        softmax=kernel.Softmax(
            sm_scale=given.sm_scale,
            window=window,
            logits_soft_cap=as_soft_cap(given.logits_soft_cap),
            batch_invariant=batch_invariant,
        ),
    )
    if is_one_token:
        attended, lse = attended[:, 0], lse[:, 0]
    return (attended, lse) if return_lse else attended


def _attention_xla(
    cache: KVCache, query: jax.Array, *arrays: jax.Array | None, softmax: kernel.Softmax
) -> tuple[jax.Array, jax.Array]:
    """Attends in XLA. The reference for every implementation's arguments, results and numerics.

    Args:
      cache: one device's cache or its share of one.
      query: `[num_seqs, q_len, num_heads, head_size]`.
      arrays: those of `kernel.ReadArrays`, scales `[]` or, for fp8, `[num_kv_heads, 1]`, and the window: int32
        `[]`, at least 0, instead of that of `softmax`; None to use that, as kernels require.
      softmax: the options, a window from 1 to `MAX_WINDOW`. With `batch_invariant` sequences are attended to one at a
        time.

    Returns:
      `[num_seqs, q_len, num_heads, head_size_v]` of the query's dtype and float32 `[num_seqs, q_len, num_heads]`.
    """
    read, softmax = as_read(arrays, softmax)
    cache, block_table = in_one_layer(cache, read.layer, read.block_table)
    q_len = query.shape[1]
    positions = jnp.maximum(read.seq_lens, 0)[:, None] - q_len + jnp.arange(q_len)[None, :]

    def attend(
        query: jax.Array, block_table: jax.Array, seq_lens: jax.Array, positions: jax.Array, *tree: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        own = read._replace(block_table=block_table, seq_lens=seq_lens, tree=tree[0] if tree else None)
        return attend_pages(cache, query, positions, own, softmax)

    trees = () if read.tree is None else (read.tree,)
    sequences = query, block_table, read.seq_lens, positions, *trees
    attended, lse = one_by_one(attend, sequences) if softmax.batch_invariant else attend(*sequences)
    return attended.astype(query.dtype), lse


def as_read(arrays: Sequence[Any], softmax: kernel.Softmax) -> tuple[kernel.ReadArrays, kernel.Softmax]:
    """Returns the arrays of an implementation, the last of which is a window on the device, and the options with it."""
    *read, window = arrays
    return kernel.ReadArrays(*read), softmax if window is None else softmax._replace(window=window)


def own_query_sequences(
    spec: AttentionSpec, first_block: jax.Array, num_blocks: int, query: jax.Array, *args: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns arguments that start with a query, a block table and lengths, in a share's numbering."""
    return query, *own_sequences(spec, first_block, num_blocks, *args[:2]), *args[2:]


def attention_mosaic(
    cache: KVCache, query: jax.Array, *arrays: jax.Array | None, softmax: kernel.Softmax
) -> tuple[jax.Array, jax.Array]:
    """Attends with the decode kernel; returns what `_attention_xla` does."""
    read, _ = as_read(arrays, softmax)
    if not query.size or not read.block_table.size:  # nothing to launch, or no pages to read
        return _attention_xla(cache, query, *arrays, softmax=softmax)
    decode = mla.decode if cache.spec.is_mla else kernel.decode
    return decode(query, cache.kv, read, cache.spec, softmax, num_layers=cache.num_layers or 1)


def attended(cache: KVCache, query: jax.Array, *_: Any, **__: Any) -> Any:
    """Returns the types of the outputs and the log-sum-exps."""
    rows = query.shape[:-1]
    out = jax.ShapeDtypeStruct((*rows, cache.spec.head_size_v), query.dtype)
    return out, jax.ShapeDtypeStruct(rows, np.dtype(np.float32))


def invariant_batch(cache: KVCache, query_shape: tuple[int, ...], max_blocks: int) -> kernel.BatchSizes:
    """Returns the sizes of a batch-invariant call, for one device's share of the sequences."""
    num_seqs, q_len, num_heads, _ = query_shape
    if cache.sharding is not None:
        num_seqs //= partition_of(cache.spec, cache.sharding, cache.num_layers).num_block_shares
    return kernel.BatchSizes(num_seqs, q_len, num_heads // cache.spec.num_kv_heads, max_blocks)


def is_indexable(cache: KVCache, num_rows: int, num_heads: int, table: tuple[int, ...]) -> bool:
    """Returns `Query.is_indexable` of a call with so many rows of a query, for one device's share of the heads."""
    spec = cache.spec
    num_heads //= spec.num_kv_heads // cache.local_spec.num_kv_heads
    elements = num_rows * num_heads * max(spec.head_size, spec.head_size_v)
    return max(elements, math.prod(table), table[1] * spec.block_size) <= INT32_MAX


def why_no_kernels(query: Query, spec: AttentionSpec, target: Target | None) -> str | None:
    """Returns why kernels cannot serve a call over caches of a spec; None if they can."""
    return route(spec, query, target).why_no_kernels


@functools.lru_cache(maxsize=1024)
def _candidates(query: Query) -> select.Candidates:
    return select.Candidates(
        parameters=("cache", "query", *kernel.ReadArrays._fields, "sliding_window"),
        xla=_attention_xla,
        mosaic=attention_mosaic,
        results=attended,
        why_not_mosaic=functools.partial(why_no_kernels, query),
        differentiable=frozenset({"query", "sinks"}),
        signature=Signature(
            arguments=(
                "sequences queries heads head_size",
                "sequences blocks_in_order",
                "sequences",
                "",
                "heads",
                "heads",
                "heads",
                "sequences queries words",
                "",
            ),
            results=("sequences queries heads head_size", "sequences queries heads"),
            own=own_query_sequences,
        ),
    )
