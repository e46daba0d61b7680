"""Decode attention over a paged cache: `paged_attention`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.cache import KVCache, as_seen_here
from kvjax.errors import KVCacheTypeError, KVCacheValueError
from kvjax.ops import select
from kvjax.ops.arguments import INPUT_DTYPES, check_array, check_cache, check_devices
from kvjax.ops.gather import as_sequences, gather_xla, own_sequences
from kvjax.partition import Signature
from kvjax.spec import AttentionSpec


def paged_attention(
    query: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of one query token a sequence over that sequence's cached tokens, grouped-query, softmax in float32.

    The query stands at position `seq_lens - 1`: write its own key and value first.

    Args:
      query: `[num_seqs, num_heads, head_size]`, float32, float16 or bfloat16; `num_heads` a multiple of
        `num_kv_heads`, neighbouring query heads sharing a KV head.
      cache: the layer's cache.
      block_table: int32 `[num_seqs, max_blocks]`, the pages of each sequence.
      seq_lens: int32 `[num_seqs]`, tokens of each sequence; the result is zero where it is 0.
      k_scale: the decode scale that the keys were written with.
      v_scale: the decode scale that the values were written with.
      sm_scale: factor on the logits, by default `1 / sqrt(head_size)`.
      sliding_window: tokens that the query sees, its own included; by default the layer's own window.
      implementation: `"xla"`, or `None` to choose.

    Returns:
      `[num_seqs, num_heads, head_size_v]` of `query`'s dtype.

    Raises:
      KVCacheValueError, KVCacheTypeError: a shape, dtype, scale or window that does not fit, naming it.
      UnsupportedError: the implementation asked for cannot serve this call.
    """
    check_cache(cache)
    cache = as_seen_here(cache)
    spec = cache.spec
    check_array("query", query, [("num_seqs", None), ("num_heads", None), ("head_size", spec.head_size)], INPUT_DTYPES)
    check_devices(cache, query=query)
    query = jnp.asarray(query)
    if query.shape[1] % spec.num_kv_heads or not query.shape[1]:
        raise KVCacheValueError(
            f"query: got num_heads={query.shape[1]}, expected a multiple of num_kv_heads={spec.num_kv_heads}"
        )
    sequences = as_sequences(cache, block_table, seq_lens, k_scale, v_scale, num_seqs=query.shape[0])
    window = spec.sliding_window if sliding_window is None else sliding_window
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise KVCacheTypeError(
            f"sliding_window: got {window!r} of type {type(window).__name__}, expected an int or None"
        )
    if window is not None and window <= 0:
        raise KVCacheValueError(f"sliding_window: got {window}, expected a positive int or None")
    factor = 1.0 / math.sqrt(spec.head_size) if sm_scale is None else sm_scale
    serve = select.choose("paged_attention", implementation, _IMPLEMENTATIONS, cache)
    attended: jax.Array = serve(cache, query, *sequences, factor, window=window)
    return attended


def _attention_xla(
    cache: KVCache,
    query: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    sm_scale: float,
    *,
    window: int | None,
) -> jax.Array:
    keys, values = gather_xla(cache, block_table, seq_lens, k_scale, v_scale, dtype=np.dtype(np.float32))
    num_seqs, num_heads, head_size = query.shape
    num_kv_heads = cache.spec.num_kv_heads
    grouped = query.astype(jnp.float32).reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_size)
    lens = seq_lens[:, None]
    position = jnp.arange(keys.shape[1])
    seen = position < lens
    if window is not None:
        seen &= position >= lens - window
    # What is not seen may be anything, and a weight of 0 makes 0 of a number only.
    values = jnp.where(seen[:, :, None, None], values, 0.0)
    seen = seen[:, None, None, :]
    logits = jnp.einsum("shgd,sthd->shgt", grouped, keys, precision="highest") * sm_scale
    logits = jnp.where(seen, logits, -jnp.inf)
    # A sequence that sees nothing has no largest logit: subtract 0, and divide its zero weights by 1.
    largest = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = weights / jnp.where(total == 0.0, 1.0, total)
    attended = jnp.einsum("shgt,sthd->shgd", probabilities, values, precision="highest")
    return attended.reshape(num_seqs, num_heads, cache.spec.head_size_v).astype(query.dtype)


def _own_sequences(
    spec: AttentionSpec, first_block: jax.Array, num_blocks: int, query: jax.Array, *args: jax.Array
) -> tuple[jax.Array, ...]:
    return query, *own_sequences(spec, first_block, num_blocks, *args[:2]), *args[2:]


_IMPLEMENTATIONS = select.Candidates(
    xla=_attention_xla,
    signature=Signature(
        arguments=("sequences heads head_size", "sequences blocks_in_order", "sequences", "heads", "heads", ""),
        results="sequences heads head_size",
        own=_own_sequences,
    ),
)
