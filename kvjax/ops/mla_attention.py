"""`mla_paged_attention` and `mla_ragged_paged_attention`: attention over latents (MLA).

Attention of one KV head: keys are latents followed by rope keys, values are latents. Queries are absorbed: the model
multiplies queries without positions by the part of `kv_b_proj` that maps latents to keys, and results by the part that
maps latents to values.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.cache import KVCache, local_view
from kvjax.errors import KVCacheTypeError, KVCacheValueError
from kvjax.ops.arguments import (
    INPUT_DTYPES,
    OF_LAYER,
    Window,
    check_array,
    check_cache,
    check_devices,
    check_latents,
)
from kvjax.ops.attention import attend_last_tokens
from kvjax.ops.gather import Stored
from kvjax.ops.options import Given, as_float, as_limits
from kvjax.ops.ragged import attend_ragged


class MLAOptions(TypedDict, total=False):
    """Keyword arguments of `mla_paged_attention` that do not change the type of its result."""

    layer: ArrayLike | None
    scale: ArrayLike | None
    sliding_window: Window
    logits_soft_cap: float | None
    batch_invariant: bool
    implementation: str | None


class MLARaggedOptions(MLAOptions, total=False):
    """Keyword arguments of `mla_ragged_paged_attention` that do not change the type of its result."""

    max_q_len: int | None


@overload
def mla_paged_attention(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    sm_scale: float,
    return_lse: Literal[False] = ...,
    **options: Unpack[MLAOptions],
) -> jax.Array: ...


@overload
def mla_paged_attention(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    sm_scale: float,
    return_lse: Literal[True],
    **options: Unpack[MLAOptions],
) -> tuple[jax.Array, jax.Array]: ...


def mla_paged_attention(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    sm_scale: float,
    layer: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    sliding_window: Window = OF_LAYER,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of each sequence's last tokens over its cached latents; softmax in float32.

    The logit of a token is `(q_nope . latent + q_pe . rope_key) * sm_scale`, and the result is the mean of the latents
    with the softmax's weights. Rows, windows, soft caps, masks and the results of rows without tokens are as in
    `paged_attention`: write the tokens of the query first.

    Args:
      q_nope: `[num_seqs, num_heads, kv_lora_rank]`, one token per sequence, or `[num_seqs, q_len, num_heads,
        kv_lora_rank]`; float32, float16 or bfloat16. Queries without positions, multiplied by `W_UK`.
      q_pe: likewise with `qk_rope_head_dim`, of `q_nope`'s dtype, rotated.
      cache: the layer's cache of an `MLAAttentionSpec`, or that of several layers.
      block_table: int32 `[num_seqs, max_blocks]`, the pages of each sequence.
      seq_lens: int32 `[num_seqs]`, tokens of each sequence, those of the query included.
      sm_scale: factor on the logits, a Python number: the model's, usually `(qk_nope_head_dim + qk_rope_head_dim) **
        -0.5`, with YaRN times the square of its `mscale`. It does not follow from the sizes of the cache.
      layer: the layer to read in a cache of several, an int or an int32 scalar that may be traced. An array out of
        range masks all tokens. None for a cache of one layer.
      scale: the decode scale that the tokens were written with, if not the cache's; default: the cache's `k_scale`, or
        1.
      sliding_window: tokens that a row attends to, its own included: an int; an int32 scalar that may be traced; or
        None for no window. Default: the layer's.
      logits_soft_cap: bound on the magnitude of logits, a positive Python number; None for no cap.
      return_lse: whether to return the log-sum-exp too.
      batch_invariant: whether a sequence's results have the same bits whatever the rest of the batch and its size.
      implementation: `"mosaic"`, `"xla"`, or `None` to choose.

    Returns:
      `q_nope`'s shape and dtype: latents, which `W_UV` maps to values. With `return_lse`, a pair of this and the
      natural logarithm of each softmax's denominator: float32, of the same shape without `kv_lora_rank`.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype, scale, window or cap; the message names it. Also for
        a cache of keys and values.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    rows = ["num_seqs", "q_len"] if np.ndim(q_nope) == 4 else ["num_seqs"]
    cache, query = _as_query("mla_paged_attention", cache, q_nope, q_pe, rows)
    check_devices(cache, scale=scale, sliding_window=sliding_window)
    return attend_last_tokens(
        "mla_paged_attention",
        cache,
        query,
        (block_table, seq_lens, Stored(layer, scale, None)),
        (None, None),
        Given(_as_sm_scale(sm_scale), sliding_window, logits_soft_cap, return_lse, batch_invariant, implementation),
    )


@overload
def mla_ragged_paged_attention(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    sm_scale: float,
    return_lse: Literal[False] = ...,
    **options: Unpack[MLARaggedOptions],
) -> jax.Array: ...


@overload
def mla_ragged_paged_attention(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    sm_scale: float,
    return_lse: Literal[True],
    **options: Unpack[MLARaggedOptions],
) -> tuple[jax.Array, jax.Array]: ...


def mla_ragged_paged_attention(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    sm_scale: float,
    layer: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    sliding_window: Window = OF_LAYER,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    max_q_len: int | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of each sequence's last tokens over its cached latents, with a query length per sequence.

    Sequence `i` has the rows `cu_q_lens[i]:cu_q_lens[i + 1]` of the query, its last tokens. Rows are those of
    `ragged_paged_attention`, all else is as in `mla_paged_attention`.

    Args:
      q_nope: `[num_tokens, num_heads, kv_lora_rank]`.
      q_pe: `[num_tokens, num_heads, qk_rope_head_dim]` of `q_nope`'s dtype.
      cache: as in `mla_paged_attention`, and so are `block_table`, `seq_lens` and the options.
      block_table: int32 `[num_seqs, max_blocks]`.
      seq_lens: int32 `[num_seqs]`.
      cu_q_lens: int32 `[num_seqs + 1]`, cumulative query lengths: starts with 0 and never decreases.
      sm_scale: factor on the logits.
      layer: the layer to read in a cache of several.
      scale: the decode scale of the tokens.
      sliding_window: tokens that a row attends to.
      logits_soft_cap: bound on the magnitude of logits.
      return_lse: whether to return the log-sum-exp too.
      batch_invariant: as there, for the same `max_q_len`.
      max_q_len: most query tokens of a sequence, a Python int; default `num_tokens`.
      implementation: `"mosaic"`, `"xla"`, or `None` to choose.

    Returns:
      `q_nope`'s shape and dtype. With `return_lse`, a pair of this and float32 `[num_tokens, num_heads]`.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `mla_paged_attention`.
    """
    cache, parts = _as_query("mla_ragged_paged_attention", cache, q_nope, q_pe, ["num_tokens"])
    check_devices(cache, scale=scale, cu_q_lens=cu_q_lens, sliding_window=sliding_window)
    return attend_ragged(
        "mla_ragged_paged_attention",
        cache,
        jnp.concatenate(parts, axis=-1),
        (block_table, seq_lens, cu_q_lens, Stored(layer, scale, None)),
        (None, None),
        Given(_as_sm_scale(sm_scale), sliding_window, logits_soft_cap, return_lse, batch_invariant, implementation),
        as_limits(max_q_len, None, None),
    )


def _as_query(
    operation: str, cache: KVCache, q_nope: Any, q_pe: Any, rows: list[str]
) -> tuple[KVCache, tuple[jax.Array, jax.Array]]:
    """Returns the cache where it is traced and the parts of its keys' query, `[*rows, num_heads, part]`."""
    check_cache(cache)
    check_latents(operation, cache.spec)
    cache = local_view(cache)
    rank, rope = cache.spec.part_sizes
    dims: list[tuple[str, int | None]] = [(name, None) for name in (*rows, "num_heads")]
    check_array("q_nope", q_nope, [*dims, ("kv_lora_rank", rank)], INPUT_DTYPES)
    q_nope = jnp.asarray(q_nope)
    if not q_nope.shape[-2]:
        raise KVCacheValueError(f"q_nope: got shape {q_nope.shape}, expected at least one head")
    sizes = [(name, size) for (name, _), size in zip(dims, q_nope.shape, strict=False)]
    check_array("q_pe", q_pe, [*sizes, ("qk_rope_head_dim", rope)], [q_nope.dtype])
    check_devices(cache, q_nope=q_nope, q_pe=q_pe)
    return cache, (q_nope, jnp.asarray(q_pe))


def _as_sm_scale(sm_scale: Any) -> float:
    scale = as_float("sm_scale", sm_scale)
    if scale is None:
        raise KVCacheTypeError(
            "sm_scale: got None, expected a number, usually (qk_nope_head_dim + qk_rope_head_dim) ** -0.5: it does not"
            " follow from the sizes of latents"
        )
    return scale
