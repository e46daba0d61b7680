"""`attend`: a layer's attention in a ragged step, its write included."""

from __future__ import annotations

import math
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.cache import KVCache
from kvjax.errors import KVCacheTypeError, KVCacheValueError, UnsupportedError, kind_of
from kvjax.exact_window import ExactWindow
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    OF_LAYER,
    Window,
    check_array,
    check_cache,
    check_keys_and_values,
)
from kvjax.ops.ragged import RaggedOptions, ragged_paged_attention
from kvjax.ops.write import flat_tokens, reshape_and_cache_flash
from kvjax.step_metadata import StepMetadata
from kvjax.window_attention import StepTokens, attend_with_window


class AttendOptions(RaggedOptions, total=False):
    """Keyword arguments of `attend` that do not change the type of its result."""

    unique_slots: bool


@overload
def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: KVCache,
    metadata: StepMetadata,
    *,
    exact_window: None = ...,
    **options: Unpack[AttendOptions],
) -> tuple[jax.Array, KVCache]: ...


@overload
def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: KVCache,
    metadata: StepMetadata,
    *,
    exact_window: ExactWindow,
    **options: Unpack[AttendOptions],
) -> tuple[jax.Array, KVCache, ExactWindow]: ...


def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: KVCache,
    metadata: StepMetadata,
    *,
    exact_window: ExactWindow | None = None,
    layer: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sm_scale: float | None = None,
    sliding_window: Window = OF_LAYER,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    batch_invariant: bool = False,
    unique_slots: bool = False,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    decode_q_len: int | None = None,
    query_quantization: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, KVCache] | tuple[jax.Array, KVCache, ExactWindow]:
    """Runs a layer's attention in a ragged step: writes the new tokens, then each attends to its sequence up to itself.

    Equivalent to `reshape_and_cache_flash` with `metadata.slot_mapping`, followed by `ragged_paged_attention` over the
    returned cache; see there for details. With an exact window, `exact_window_attention` replaces the latter.

    Args:
      query: `[num_tokens, num_heads, head_size]`; float32, float16 or bfloat16. Its rows are those of the metadata;
        padding rows attend to nothing. Or `[batch, time, num_heads, head_size]` with `batch * time = num_tokens`; then
        keys, values and the result have these two dimensions too.
      key: `[num_tokens, num_kv_heads, head_size]`, likewise.
      value: `[num_tokens, num_kv_heads, head_size_v]`, of `key`'s dtype.
      cache: the layer's cache, or that of several layers. Under `jit`, donate it.
      metadata: the step's sequences, the same for all layers that share a block table.
      exact_window: the layer's window, or that of the cache's layers, whose rows `metadata.window_rows` names. Each
        query's last `exact_window.size` tokens are then read as they were given, in the model dtype. Under `jit`,
        donate it.
      layer: this layer's number in a cache of several.
      k_scale: as in the write and the attention; default: the cache's.
      v_scale: likewise.
      sm_scale: factor on the logits, as in `ragged_paged_attention`.
      sliding_window: tokens that a row attends to, its own included; None for no window. Default: the layer's.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`; None for no cap.
      sinks: float32 `[num_heads]`.
      tree_mask: which query tokens of its sequence each query token sees, for sequences on the decode path; not with an
        exact window.
      batch_invariant: whether a sequence's results have the same bits whatever the rest of the batch.
      unique_slots: promises that no two tokens share a slot, as is the case for sequences of one `BlockPool`.
      max_q_len: most query tokens of a sequence.
      max_prompts: most sequences with more query tokens than `decode_q_len`.
      decode_q_len: most query tokens of a sequence on the decode path.
      query_quantization: whether attention to prompts uses fp8 products.
      implementation: `"mosaic"` or `"xla"`, for the write and the attention; None chooses for each.

    Returns:
      `query`'s shape with `head_size_v`, of its dtype, and the updated cache; with an exact window, also the window.

    Raises:
      KVCacheValueError, KVCacheTypeError: as both operations; also a number of rows other than the metadata's.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    check_keys_and_values("attend", cache.spec, "concat_and_cache_mla and mla_ragged_paged_attention")
    if not isinstance(metadata, StepMetadata):
        raise KVCacheTypeError(f"metadata: got {kind_of(metadata)}, expected a StepMetadata")
    check_array("slot_mapping", metadata.slot_mapping, [("num_tokens", None)], INDEX_DTYPES)
    num_tokens = np.shape(metadata.slot_mapping)[0]
    heads = [("num_heads", None), ("head_size", cache.spec.head_size)]
    slots, batch = metadata.slot_mapping, ()
    if np.ndim(query) == 4:
        check_array("query", query, [("batch", None), ("time", None), *heads], INPUT_DTYPES)
        batch = np.shape(query)[:2]
        if math.prod(batch) != num_tokens:
            raise KVCacheValueError(
                f"query: got shape {np.shape(query)}, expected batch * time to be the metadata's"
                f" num_tokens={num_tokens}"
            )
        query, slots = flat_tokens(query), jnp.reshape(slots, batch)
    else:
        check_array("query", query, [("num_tokens", num_tokens), *heads], INPUT_DTYPES)
    leading = batch or (num_tokens,)
    if exact_window is not None and tree_mask is not None:
        raise UnsupportedError(
            "tree_mask: got one with an exact window, expected None: a window counts tokens by place"
        )
    for name, x in (("key", key), ("value", value)):
        if hasattr(x, "shape") and x.shape[:-2] != leading:  # without one, the write refuses it
            raise KVCacheValueError(
                f"{name}: got shape {x.shape}, expected the query's {leading}, then num_kv_heads and head_size"
            )
    given: dict[str, Any] = {"layer": layer, "k_scale": k_scale, "v_scale": v_scale, "implementation": implementation}
    options: dict[str, Any] = {
        "sm_scale": sm_scale,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "batch_invariant": batch_invariant,
        "max_q_len": max_q_len,
        "max_prompts": max_prompts,
        "decode_q_len": decode_q_len,
        "query_quantization": query_quantization,
    }
    if exact_window is None:
        options["tree_mask"] = tree_mask
        cache = reshape_and_cache_flash(key, value, cache, slots, unique_slots=unique_slots, **given)
        sequences = metadata.block_table, metadata.seq_lens, metadata.cu_q_lens
        attended = ragged_paged_attention(query, cache, *sequences, **(given | options))
        return attended.reshape(*batch, *attended.shape[1:]) if batch else attended, cache
    key, value = (flat_tokens(x) if batch and hasattr(x, "shape") else x for x in (key, value))
    new = StepTokens(key, value, implementation, metadata.slot_mapping, unique_slots)
    attended, cache, exact_window = attend_with_window(query, new, cache, exact_window, metadata, given | options)
    return attended.reshape(*batch, *attended.shape[1:]) if batch else attended, cache, exact_window
