"""Rotary position embedding and a write in one: `rope_and_cache`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax import quant
from kvjax.cache import KVCache, local_view
from kvjax.errors import KVCacheValueError
from kvjax.kernels.write import Rotated
from kvjax.ops import select
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    check_array,
    check_cache,
    check_devices,
    check_keys_and_values,
)
from kvjax.ops.value_checks import check_positions, is_checked
from kvjax.ops.write import WriteTokens, as_tokens, flat_tokens, own_slots, why_not_write, write_mosaic, write_xla
from kvjax.partition import CACHE, Signature
from kvjax.spec import as_bool


def rope_and_cache(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: KVCache,
    slot_mapping: ArrayLike,
    positions: ArrayLike,
    cos_sin_cache: ArrayLike,
    *,
    is_neox: bool = True,
    layer: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    unique_slots: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Rotates queries and keys by their positions, and writes keys and values into their slots.

    The stored bytes are the same as after rotating, rounding to `key`'s dtype and writing. A pair `(x, y)` of elements
    becomes `(x * cos - y * sin, y * cos + x * sin)`, in float32, with each product rounded. Queries are rotated for
    every token, including tokens whose slot writes nothing.

    Args:
      query: `[num_tokens, num_heads, head_size]` or `[batch, time, num_heads, head_size]`, of `key`'s dtype.
      key: `[num_tokens, num_kv_heads, head_size]` or `[batch, time, ...]`, float32, float16 or bfloat16.
      value: of `key`'s dtype; its head size may differ.
      cache: as in `reshape_and_cache_flash`, and so are `slot_mapping`, `layer`, the scales and `unique_slots`.
      slot_mapping: int32 or int64 `[num_tokens]` or `[batch, time]`.
      positions: int32 or int64 `[num_tokens]` or `[batch, time]`: each token's row of `cos_sin_cache`, clamped to its
        range.
      cos_sin_cache: float32, float16 or bfloat16 `[max_position, rot_dim]`, as in vLLM's rotary embeddings: for each
        position the cosines of `rot_dim / 2` pairs, then the sines. `rot_dim` is even and at most `head_size`; the
        remaining elements of a head are left unchanged.
      is_neox: whether element `i` of a head pairs with `i + rot_dim / 2` (NeoX, Llama) or `2 i` with `2 i + 1` (GPT-J).
      layer: the layer to write in a cache of several.
      k_scale: decode scale of the keys, instead of the cache's.
      v_scale: that of the values.
      unique_slots: promises that no two written tokens share a slot.
      implementation: `"mosaic"`, `"xla"`, or `None` to choose by the cache's device. For float32 keys and for odd head
        sizes XLA rotates and the kernel writes.

    Returns:
      `(query, cache)`: the rotated queries, of `query`'s shape and dtype, and the cache to use from now on.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype or scale; the message names it. Also differentiation.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    check_keys_and_values("rope_and_cache", cache.spec, "rope_and_cache_mla")
    given, cache = cache, local_view(cache)
    written = as_tokens(cache, WriteTokens(key, value, slot_mapping, layer, k_scale, v_scale))
    names = ("batch", "time") if np.ndim(key) == 4 else ("num_tokens",)
    tokens = list(zip(names, np.shape(key), strict=False))
    check_array(
        "query", query, [*tokens, ("num_heads", None), ("head_size", cache.spec.head_size)], [written.key.dtype]
    )
    if np.shape(query)[-2] % cache.spec.num_kv_heads:
        raise KVCacheValueError(
            f"query: got num_heads={np.shape(query)[-2]}, expected a multiple of num_kv_heads={cache.spec.num_kv_heads}"
        )
    check_rotation(positions, cos_sin_cache, tokens, ("head_size", cache.spec.head_size))
    check_devices(cache, query=query, positions=positions, cos_sin_cache=cos_sin_cache)
    unique_slots, is_neox = as_bool("unique_slots", unique_slots), as_bool("is_neox", is_neox)
    query, max_position = jnp.asarray(query), np.shape(cos_sin_cache)[0]
    shape = query.shape
    if len(tokens) == 2:
        query, positions = flat_tokens(query), flat_tokens(positions)
    if is_checked():
        check_positions(positions, written.slot_mapping, max_position)
    serve = select.choose("rope_and_cache", implementation, _IMPLEMENTATIONS, cache)
    rotated, kv = serve(
        cache,
        *written,
        query,
        as_positions(positions, max_position),
        jnp.asarray(cos_sin_cache),
        is_neox=is_neox,
        unique_slots=unique_slots,
    )
    return rotated.reshape(shape), dataclasses.replace(given, kv=kv)


def check_rotation(
    positions: Any, cos_sin_cache: Any, tokens: Sequence[tuple[str, int | None]], rotated: tuple[str, int]
) -> None:
    """Raises if positions are not those of tokens, or the table is not of elements of what is `rotated`."""
    check_array("positions", positions, tokens, INDEX_DTYPES)
    check_array("cos_sin_cache", cos_sin_cache, [("max_position", None), ("rot_dim", None)], INPUT_DTYPES)
    max_position, rot_dim = np.shape(cos_sin_cache)
    if rot_dim % 2 or not 2 <= rot_dim <= rotated[1] or not max_position:
        raise KVCacheValueError(
            f"cos_sin_cache: got shape {(max_position, rot_dim)}, expected at least one position and an even rot_dim of"
            f" 2 to {rotated[0]}={rotated[1]}"
        )


def as_positions(positions: Any, max_position: int) -> jax.Array:
    """Returns positions as int32, clamped where they may not fit."""
    if positions.dtype == np.int32:
        return jnp.asarray(positions)
    xp: Any = np if isinstance(positions, np.ndarray) else jnp
    return jnp.asarray(xp.clip(positions, 0, max_position - 1).astype(np.int32))


def rope_xla(cache: KVCache, *arrays: Any, is_neox: bool, unique_slots: bool) -> tuple[jax.Array, jax.Array]:
    """Rotates and writes in XLA; `arrays` are the `WriteTokens`, the query, positions and the table."""
    tokens, turned = WriteTokens(*arrays[:6]), arrays[6:]
    query, key = _rotated(_keys_of(cache, tokens), *turned, is_neox=is_neox)
    return query, write_xla(cache, *_with_keys(cache, tokens, key), unique_slots=unique_slots)


def _keys_of(cache: KVCache, tokens: WriteTokens) -> jax.Array:
    """Returns what is rotated: keys, or rope keys."""
    return tokens.value if cache.spec.is_mla else tokens.key


def _with_keys(cache: KVCache, tokens: WriteTokens, keys: jax.Array) -> WriteTokens:
    """Returns tokens with other `_keys_of`."""
    return tokens._replace(value=keys) if cache.spec.is_mla else tokens._replace(key=keys)


def _rotated(
    key: jax.Array, query: Any, positions: Any, cos_sin_cache: Any, *, is_neox: bool
) -> tuple[jax.Array, jax.Array]:
    rows = cos_sin_cache[jnp.clip(positions, 0, cos_sin_cache.shape[0] - 1)].astype(jnp.float32)
    cos, sin = jnp.split(rows, 2, axis=1)
    return quant.rotate(query, cos, sin, is_neox), quant.rotate(key, cos, sin, is_neox)


def rope_mosaic(cache: KVCache, *arrays: Any, is_neox: bool, unique_slots: bool) -> tuple[jax.Array, jax.Array]:
    """Rotates and writes with the kernel; takes and returns what `rope_xla` does."""
    tokens, turned = WriteTokens(*arrays[:6]), arrays[6:]
    key, (query, positions, table) = _keys_of(cache, tokens), turned
    if not key.size or not query.size or key.dtype.itemsize != 2 or key.shape[2] % 2:
        query, key = _rotated(key, *turned, is_neox=is_neox)
        return query, write_mosaic(cache, *_with_keys(cache, tokens, key), unique_slots=unique_slots)
    rotated = Rotated(query, positions, table, is_neox)
    query, kv = write_mosaic(cache, *tokens, unique_slots=unique_slots, rotated=rotated)
    return query, kv


def _results(cache: KVCache, *args: Any, **_: Any) -> Any:
    return args[6], cache.kv


_IMPLEMENTATIONS = select.Candidates(
    parameters=("cache", *WriteTokens._fields, "query", "positions", "cos_sin_cache"),
    xla=rope_xla,
    mosaic=rope_mosaic,
    results=_results,
    why_not_mosaic=functools.partial(why_not_write, rotates=True),
    signature=Signature(
        arguments=(
            *("tokens heads head_size", "tokens heads head_size", "tokens", "", "heads", "heads"),
            *("tokens heads head_size", "tokens", "positions rot_dim"),
        ),
        results=("tokens heads head_size", CACHE),
        own=own_slots,
    ),
)
