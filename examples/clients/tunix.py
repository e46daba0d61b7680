"""tunix's Llama 3 over kvjax's pages, in its own sampler. For google-tunix 0.1.7.

    pip install google-tunix==0.1.7

The sampler creates the cache by the model's `init_cache`, carries it as an opaque pytree and donates it.

- `init_cache`: Llama 3 has none, so the sampler would create dense arrays.
- `Attention.block`: the layer's attention updates the cache itself. Both overrides are in subclasses, because the
  sampler rebuilds the model from its classes.
- Prompts are padded on the left, and only the attention mask shows the padding. The number of keys that a row sees is
  its token's position plus one; a row that sees none is padding and gets no slot.
- Each row of the batch has its own blocks, in order: the sampler's batch neither grows nor shares.

Beam search repeats and reorders the batch's arrays; that does not work with pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from tunix.models.llama3 import model as llama3

import kvjax

BLOCK_SIZE = 16


class PagedAttention(llama3.Attention):
    """An attention layer over pages; `scales` are decode scales of keys and values."""

    scales: tuple[float, float]

    def block(self, x: Any, segment_pos: Any, cache: kvjax.KVCache, attn_mask: Any) -> tuple[kvjax.KVCache, Any]:
        """Writes the new tokens, then attends to all."""
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key = (llama3.apply_rope(each, segment_pos, head_dim=self.head_dim) for each in (query, key))
        table = jnp.arange(cache.num_blocks, dtype=jnp.int32).reshape(len(x), -1)
        num_seen = jnp.sum(attn_mask, axis=-1, dtype=jnp.int32)  # [batch, time]
        position = jnp.maximum(num_seen - 1, 0)
        block = jnp.take_along_axis(table, position // BLOCK_SIZE, axis=1)
        slots = jnp.where(num_seen > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        scales = dict(zip(("k_scale", "v_scale"), self.scales, strict=True))
        cache = kvjax.reshape_and_cache_flash(key, value, cache, slots, unique_slots=True, **scales)
        attended = kvjax.paged_attention(query, cache, table, num_seen[:, -1], **scales)
        return cache, self.o_proj(attended)


class PagedLlama3(llama3.Llama3):
    """A model that creates its own caches, all of `kv_cache_dtype`."""

    kv_cache_dtype: kvjax.KVCacheDType

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> dict[str, kvjax.KVCache]:
        """Returns caches for `cache_size` tokens of each row."""
        heads, size = self.config.num_kv_heads, self.config.head_dim
        spec = kvjax.FullAttentionSpec(BLOCK_SIZE, heads, size, dtype=self.kv_cache_dtype)
        num_blocks = batch_size * -(-cache_size // BLOCK_SIZE)
        return {f"layer_{i}": kvjax.KVCache.allocate(spec, num_blocks) for i in range(self.config.num_layers)}


def use_pages(model: llama3.Llama3, kv_cache_dtype: str, scales: Sequence[tuple[float, float]] | None = None) -> None:
    """Makes a model use pages, in place; `scales` has one pair per layer, by default 1."""
    model.__class__, model.kv_cache_dtype = PagedLlama3, kvjax.parse_kv_cache_dtype(kv_cache_dtype)
    for layer, of_layer in zip(model.layers, scales or [(1.0, 1.0)] * len(model.layers), strict=True):
        layer.attn.__class__, layer.attn.scales = PagedAttention, tuple(map(float, of_layer))
