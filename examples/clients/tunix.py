"""tunix's Llama 3 over kvjax's pages, in its own sampler. For google-tunix 0.1.7.

    pip install google-tunix==0.1.7

tunix's sampler makes its cache by the model's `init_cache`, carries it through the loop that decodes as a pytree that
it never looks into, and donates it. What tunix has to be told:

- `init_cache`: Llama 3 has none, and the sampler would make dense arrays;
- the layer's attention, which has its cache inline: `Attention.block`. Both go into subclasses, for the sampler takes
  the model apart and rebuilds it by its classes;
- prompts are padded on the left, and which columns are padding stands in the attention mask alone. The keys that a row
  of it sees are its token's position in the sequence and one: what sees none is padding, and gets no slot;
- each row of the batch has blocks of its own, in order: the sampler's batch neither grows nor shares.

Beam search would repeat and reorder the cache as arrays of the batch, which pages are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from tunix.models.llama3 import model as llama3

import kvjax

BLOCK_SIZE = 16


class PagedAttention(llama3.Attention):
    """An attention layer over pages."""

    def block(self, x: Any, segment_pos: Any, cache: kvjax.KVCache, attn_mask: Any) -> tuple[kvjax.KVCache, Any]:
        """What the layer computes: writes the new tokens, then attends to all."""
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key = (llama3.apply_rope(each, segment_pos, head_dim=self.head_dim) for each in (query, key))
        table = jnp.arange(cache.num_blocks, dtype=jnp.int32).reshape(len(x), -1)
        num_seen = jnp.sum(attn_mask, axis=-1, dtype=jnp.int32)  # [batch, time]
        position = jnp.maximum(num_seen - 1, 0)
        block = jnp.take_along_axis(table, position // BLOCK_SIZE, axis=1)
        slots = jnp.where(num_seen > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        cache = kvjax.reshape_and_cache_flash(key, value, cache, slots, unique_slots=True)
        attended = kvjax.paged_attention(query, cache, table, num_seen[:, -1])
        return cache, self.o_proj(attended)


class PagedLlama3(llama3.Llama3):
    """A model that makes its caches itself, of one dtype; `scales` are each layer's decode scales."""

    kv_cache_dtype: kvjax.KVCacheDType
    scales: tuple[tuple[float, float], ...]

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> dict[str, kvjax.KVCache]:
        """What the sampler asks for: room for `cache_size` tokens of each row."""
        heads, size = self.config.num_kv_heads, self.config.head_dim
        spec = kvjax.FullAttentionSpec(BLOCK_SIZE, heads, size, dtype=self.kv_cache_dtype)
        num_blocks = batch_size * -(-cache_size // BLOCK_SIZE)
        return {
            f"layer_{i}": kvjax.KVCache.allocate(spec, num_blocks, k_scale=k_scale, v_scale=v_scale)
            for i, (k_scale, v_scale) in enumerate(self.scales)
        }


def use_pages(model: llama3.Llama3, kv_cache_dtype: str, scales: Sequence[tuple[float, float]] | None = None) -> None:
    """Has a model keep its keys and values in pages, in place; `scales` are one pair a layer, by default 1."""
    model.__class__, model.kv_cache_dtype = PagedLlama3, kvjax.parse_kv_cache_dtype(kv_cache_dtype)
    pairs = scales or [(1.0, 1.0)] * len(model.layers)
    model.scales = tuple((float(k_scale), float(v_scale)) for k_scale, v_scale in pairs)
    for layer, _ in zip(model.layers, pairs, strict=True):
        layer.attn.__class__ = PagedAttention
