"""`concat_and_cache_mla`: writes latents and rope keys into a paged cache of multi-head latent attention (MLA)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax.cache import KVCache, local_view
from kvjax.ops import select
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    as_layer,
    as_scales,
    as_slots,
    check_array,
    check_cache,
    check_devices,
    check_latents,
)
from kvjax.ops.value_checks import check_slots, is_checked
from kvjax.ops.write import WriteTokens, own_slots, why_not_write, write_mosaic, write_xla, written
from kvjax.partition import CACHE, Signature
from kvjax.spec import as_bool


def concat_and_cache_mla(
    kv_c: ArrayLike,
    k_pe: ArrayLike,
    cache: KVCache,
    slot_mapping: ArrayLike,
    *,
    layer: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    unique_slots: bool = False,
    implementation: str | None = None,
) -> KVCache:
    """Writes latents and rope keys into their slots, as vLLM's operation of the same name.

    Functional: use the returned cache. Under `jit` with the cache donated (`donate_argnums`) the write is in place, as
    it is in a `lax.scan` over layers that carries one cache of all of them. No byte outside the written slots changes.

    Args:
      kv_c: `[num_tokens, kv_lora_rank]`, the latents after the norm; float32, float16 or bfloat16.
      k_pe: `[num_tokens, qk_rope_head_dim]` of `kv_c`'s dtype, the rope keys, rotated.
      cache: the layer's cache of an `MLAAttentionSpec`, or that of several layers.
      slot_mapping: int32 or int64 `[num_tokens]`: `block * block_size + offset` of each token. Negative slots and those
        at or past `cache.num_slots` write nothing. If several tokens have one slot, the last is written.
      layer: the layer to write in a cache of several, an int or an int32 scalar that may be traced. An array out of
        range writes nothing. None for a cache of one layer.
      scale: positive float32 decode scale (`value = stored * scale`), a scalar: for latents and rope keys of fp8_e4m3,
        and for NVFP4 latents. Default: the cache's `k_scale`, or 1. Other dtypes ignore it.
      unique_slots: promises that no two written tokens share a slot. If two do, the bytes of that slot are undefined.
      implementation: `"mosaic"`, `"xla"`, or `None` to choose by the cache's device.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype or scale; the message names it. Also for a cache of
        keys and values, and on differentiation.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    check_latents("concat_and_cache_mla", cache.spec)
    given, cache = cache, local_view(cache)
    tokens = as_latents(cache, kv_c, k_pe, slot_mapping, layer, scale)
    unique_slots = as_bool("unique_slots", unique_slots)
    serve = select.choose("concat_and_cache_mla", implementation, _IMPLEMENTATIONS, cache)
    return dataclasses.replace(given, kv=serve(cache, *tokens, unique_slots=unique_slots))


class LatentTokens(NamedTuple):
    """The arrays of a write of latents, checked."""

    kv_c: jax.Array
    k_pe: jax.Array
    slot_mapping: jax.Array
    layer: jax.Array | None
    scale: jax.Array

    @property
    def as_keys_and_values(self) -> WriteTokens:
        """Latents and rope keys as keys and values of one head."""
        kv_c, k_pe = (jnp.expand_dims(x, 1) for x in self[:2])
        return WriteTokens(kv_c, k_pe, self.slot_mapping, self.layer, self.scale, self.scale)


def as_latents(
    cache: KVCache, kv_c: Any, k_pe: Any, slot_mapping: Any, layer: ArrayLike | None, scale: ArrayLike | None
) -> LatentTokens:
    """Checks the arguments of a write of latents and returns them as JAX arrays."""
    rank, rope = cache.spec.part_sizes
    check_array("kv_c", kv_c, [("num_tokens", None), ("kv_lora_rank", rank)], INPUT_DTYPES)
    kv_c = jnp.asarray(kv_c)
    num_tokens = ("num_tokens", kv_c.shape[0])
    check_array("k_pe", k_pe, [num_tokens, ("qk_rope_head_dim", rope)], [kv_c.dtype])
    check_array("slot_mapping", slot_mapping, [num_tokens], INDEX_DTYPES)
    check_devices(cache, kv_c=kv_c, k_pe=k_pe, slot_mapping=slot_mapping, layer=layer, scale=scale)
    layer = as_layer(cache, layer)
    if is_checked():
        check_slots(slot_mapping, cache.num_slots)
    scales = as_scales(cache, layer, scale, None)
    return LatentTokens(kv_c, jnp.asarray(k_pe), as_slots(slot_mapping, cache.num_slots), layer, scales[0])


def _concat(write: Callable[..., jax.Array], cache: KVCache, *tokens: Any, unique_slots: bool) -> jax.Array:
    """Writes checked `LatentTokens`; returns the pages."""
    return write(cache, *LatentTokens(*tokens).as_keys_and_values, unique_slots=unique_slots)


_IMPLEMENTATIONS = select.Candidates(
    parameters=("cache", *LatentTokens._fields),
    xla=functools.partial(_concat, write_xla),
    mosaic=functools.partial(_concat, write_mosaic),
    results=written,
    why_not_mosaic=why_not_write,
    signature=Signature(
        arguments=("tokens kv_lora_rank", "tokens qk_rope_head_dim", "tokens", "", ""), results=CACHE, own=own_slots
    ),
)
