"""Rotary position embedding and a write of latents in one: `rope_and_cache_mla`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.cache import KVCache, local_view
from kvjax.errors import KVCacheValueError
from kvjax.ops import select
from kvjax.ops.arguments import check_array, check_cache, check_devices, check_latents
from kvjax.ops.mla_write import LatentTokens, as_latents
from kvjax.ops.rope import as_positions, check_rotation, rope_mosaic, rope_xla
from kvjax.ops.value_checks import check_positions, is_checked
from kvjax.ops.write import own_slots, why_not_write
from kvjax.partition import CACHE, Signature
from kvjax.spec import as_bool


def rope_and_cache_mla(
    q_pe: ArrayLike,
    kv_c: ArrayLike,
    k_pe: ArrayLike,
    cache: KVCache,
    slot_mapping: ArrayLike,
    positions: ArrayLike,
    cos_sin_cache: ArrayLike,
    *,
    is_neox: bool = True,
    layer: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    unique_slots: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Rotates queries and rope keys by their positions, and writes latents and rope keys into their slots.

    This is `rope_and_cache` for latents: the stored bytes are the same as after rotating, rounding to `k_pe`'s dtype
    and calling `concat_and_cache_mla`. Queries are rotated for every token, including tokens whose slot writes nothing.
    It is vLLM's `concat_and_cache_mla_rope_fused`, except for the order of arguments and what is written in place.

    Args:
      q_pe: `[num_tokens, num_heads, qk_rope_head_dim]`, of `k_pe`'s dtype: the part of queries with positions.
      kv_c: as in `concat_and_cache_mla`.
      k_pe: as there, but not rotated.
      cache: as there, and so are `slot_mapping`, `layer`, `scale` and `unique_slots`.
      slot_mapping: int32 or int64 `[num_tokens]`.
      positions: int32 or int64 `[num_tokens]`: each token's row of `cos_sin_cache`, clamped to its range.
      cos_sin_cache: as in `rope_and_cache`, with a `rot_dim` of at most `qk_rope_head_dim`.
      is_neox: as in `rope_and_cache`: whether element `i` pairs with `i + rot_dim / 2`, or `2 i` with `2 i + 1`, as in
        DeepSeek's models.
      layer: the layer to write in a cache of several.
      scale: decode scale, instead of the cache's.
      unique_slots: promises that no two written tokens share a slot.
      implementation: `"mosaic"`, `"xla"`, or `None` to choose by the cache's device. For float32 rope keys and for odd
        sizes XLA rotates and the kernel writes.

    Returns:
      `(q_pe, cache)`: the rotated queries, of `q_pe`'s shape and dtype, and the cache to use from now on.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype or scale; the message names it. Also for a cache of
        keys and values or without rope keys, and on differentiation.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    check_latents("rope_and_cache_mla", cache.spec)
    given, cache = cache, local_view(cache)
    rope = cache.spec.part_sizes[1]
    if not rope:
        raise KVCacheValueError("cache: got qk_rope_head_dim=0, expected rope keys to rotate; use concat_and_cache_mla")
    tokens = as_latents(cache, kv_c, k_pe, slot_mapping, layer, scale)
    num_tokens = ("num_tokens", tokens.kv_c.shape[0])
    check_array("q_pe", q_pe, [num_tokens, ("num_heads", None), ("qk_rope_head_dim", rope)], [tokens.kv_c.dtype])
    check_rotation(positions, cos_sin_cache, [num_tokens], ("qk_rope_head_dim", rope))
    check_devices(cache, q_pe=q_pe, positions=positions, cos_sin_cache=cos_sin_cache)
    max_position = np.shape(cos_sin_cache)[0]
    if is_checked():
        check_positions(positions, tokens.slot_mapping, max_position)
    options = {"is_neox": as_bool("is_neox", is_neox), "unique_slots": as_bool("unique_slots", unique_slots)}
    serve = select.choose("rope_and_cache_mla", implementation, _IMPLEMENTATIONS, cache)
    turned = jnp.asarray(q_pe), as_positions(positions, max_position), jnp.asarray(cos_sin_cache)
    rotated, kv = serve(cache, *tokens, *turned, **options)
    return rotated, dataclasses.replace(given, kv=kv)


def _rope(rotate_and_write: Callable[..., Any], cache: KVCache, *arrays: Any, **options: bool) -> Any:
    """Rotates and writes `LatentTokens`; `arrays` are these, the query, positions and the table."""
    tokens, turned = LatentTokens(*arrays[:5]), arrays[5:]
    return rotate_and_write(cache, *tokens.as_keys_and_values, *turned, **options)


def _results(cache: KVCache, *args: Any, **_: Any) -> Any:
    return args[5], cache.kv


_IMPLEMENTATIONS = select.Candidates(
    parameters=("cache", *LatentTokens._fields, "q_pe", "positions", "cos_sin_cache"),
    xla=functools.partial(_rope, rope_xla),
    mosaic=functools.partial(_rope, rope_mosaic),
    results=_results,
    why_not_mosaic=functools.partial(why_not_write, rotates=True),
    signature=Signature(
        arguments=(
            *("tokens kv_lora_rank", "tokens qk_rope_head_dim", "tokens", "", ""),
            *("tokens query_heads qk_rope_head_dim", "tokens", "positions rot_dim"),
        ),
        results=("tokens query_heads qk_rope_head_dim", CACHE),
        own=own_slots,
    ),
)
