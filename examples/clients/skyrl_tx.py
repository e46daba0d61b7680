"""SkyRL tx's models over kvjax's pages while they generate. For skyrl[jax] 0.4.0.

    pip install 'skyrl[jax]==0.4.0'

SkyRL tx computes prompts over dense keys and values, pads these to the longest sequence, and carries them through the
loop that decodes as a pytree that it never looks into. So three of its functions learn of pages, for all models that
attend by them (Llama, Qwen3 and the full layers of Qwen3.5; not DeepSeek's latents):

- `KVCache.pad_to_length`, which now moves a prompt's keys and values into pages, instead of padding them;
- `KVCache.update_layer`, by which a step writes;
- the `dot_product_attention` that each model imported, by which it attends.

A layer's pages stand in the place of its keys, and nothing in that of its values. Each row of the batch has blocks of
its own, in order, for `max_length` tokens. Training attends to dense keys and values, as before. Tried on one device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from skyrl.tx.layers import attention
from skyrl.tx.models import llama3, qwen3, qwen3_5
from skyrl.tx.utils.generator import GeneratorMixin, KVCache

import kvjax

BLOCK_SIZE = 16
MODELS = (llama3, qwen3, qwen3_5)

_pad, _update = KVCache.pad_to_length, KVCache.update_layer


def use_pages(kv_cache_dtype: str, scales: Sequence[tuple[float, float]] | None = None) -> None:
    """Has models keep keys and values in pages of a dtype; `scales` are one pair a layer, by default 1."""
    dtype = kvjax.parse_kv_cache_dtype(kv_cache_dtype)
    KVCache.pad_to_length = functools.partialmethod(_in_pages, dtype=dtype, scales=scales)
    KVCache.update_layer = staticmethod(_write)
    for model in MODELS:
        model.dot_product_attention = _attend
    GeneratorMixin._prefill_and_decode.clear_cache()  # of what was compiled for dense arrays, or other scales


def _in_pages(self: KVCache, max_length: int, *, dtype: Any, scales: Any) -> KVCache:
    keys, values = list(self.keys), list(self.values)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        batch, length, heads, size = key.shape
        if not length:  # a layer of linear attention
            continue
        if key.shape != value.shape:
            raise kvjax.UnsupportedError(f"got keys of {size} and values of {value.shape[-1]}, as DeepSeek has them")
        spec = kvjax.FullAttentionSpec(BLOCK_SIZE, heads, size, dtype=dtype, model_dtype=str(key.dtype))
        k_scale, v_scale = scales[i] if scales else (1.0, 1.0)
        blocks = -(-max_length // BLOCK_SIZE)
        cache = kvjax.KVCache.allocate(spec, batch * blocks, k_scale=k_scale, v_scale=v_scale)
        position = jnp.arange(length)
        slots = jnp.arange(batch)[:, None] * blocks * BLOCK_SIZE + position
        slots = jnp.where(position < self.cache_position[:, None], slots, -1)
        keys[i] = kvjax.reshape_and_cache_flash(key, value, cache, slots, unique_slots=True)
        values[i] = jnp.zeros((batch, 0, heads, size), value.dtype)
    return dataclasses.replace(self, keys=keys, values=values)


def _write(kv_cache: tuple[Any, Any], k: Any, v: Any, positions: Any) -> tuple[Any, Any]:
    cache, nothing = kv_cache
    tokens = cache.num_blocks // len(k) * BLOCK_SIZE
    slots = jnp.arange(len(k))[:, None] * tokens + positions
    return kvjax.reshape_and_cache_flash(k, v, cache, slots, unique_slots=True), nothing


def _attend(q: Any, k: Any, v: Any, attention_mask: Any, is_causal: bool, head_dim: int) -> Any:
    if not isinstance(k, kvjax.KVCache):
        return attention.dot_product_attention(q, k, v, attention_mask, is_causal, head_dim)
    table = jnp.arange(k.num_blocks, dtype=jnp.int32).reshape(len(q), -1)
    lens = jnp.sum(attention_mask, axis=1, dtype=jnp.int32)
    return kvjax.paged_attention(q, k, table, lens, sm_scale=head_dim**-0.5)
