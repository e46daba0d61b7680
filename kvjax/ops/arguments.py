"""Checks of operations' arguments: shapes and dtypes when traced, values of scales where they are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.cache import SCALES, KVCache, check_scale_shape
from kvjax.errors import KVCacheTypeError, KVCacheValueError, for_torch, kind_of, shown
from kvjax.memory import refuse_pinned
from kvjax.ops import options
from kvjax.ops.value_checks import check_layer, check_window, is_checked
from kvjax.scale_values import check_scale, check_scale_type
from kvjax.spec import AttentionSpec, as_int

INPUT_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
"""Dtypes that keys, values, queries and dequantized results may have."""

INDEX_DTYPES = (jnp.dtype(jnp.int32), jnp.dtype(jnp.int64))

OF_LAYER: Final = "layer"
"""As a window argument: the window of the layer's spec. None means no window."""

type Window = int | np.integer[Any] | jax.Array | Literal["layer"] | None
"""Tokens that a row attends to, its own included."""


def check_array(what: str, array: Any, dims: Sequence[tuple[str, int | None]], dtypes: Sequence[np.dtype[Any]]) -> None:
    """Raises if `array` is not a JAX or NumPy array of one of `dtypes` with the named `dims` (`None`: any size)."""
    if not isinstance(array, (jax.Array, np.ndarray)):
        how = f": numpy.asarray({what}, numpy.{dtypes[0]})" if isinstance(array, (list, tuple)) else for_torch(array)
        raise KVCacheTypeError(f"{what}: got {kind_of(array)}, expected an array{how}")
    if array.dtype not in dtypes:
        expected = str(dtypes[0]) if len(dtypes) == 1 else f"one of {', '.join(map(str, dtypes))}"
        raise KVCacheTypeError(f"{what}: got dtype {array.dtype}, expected {expected}")
    fits = len(array.shape) == len(dims) and all(
        size is None or got == size for got, (_, size) in zip(array.shape, dims, strict=True)
    )
    if not fits:
        expected = ", ".join(name if size is None else f"{name}={size}" for name, size in dims)
        raise KVCacheValueError(f"{what}: got shape {tuple(array.shape)}, expected [{expected}]")


def check_cache(cache: Any, what: str = "cache") -> None:
    """Raises if `cache` is not a `KVCache` with a live array that its spec describes, in memory that is accepted."""
    if not isinstance(cache, KVCache):
        raise KVCacheTypeError(f"{what}: got {kind_of(cache)}, expected a KVCache{for_torch(cache)}")
    cache.check(what)
    refuse_pinned(what, cache.kv)
    check_devices(cache, **{f"{what}.{name}": getattr(cache, name) for name in SCALES})


def check_keys_and_values(operation: str, spec: AttentionSpec, instead: str) -> None:
    """Raises `KVCacheValueError` for a cache of latents, and says which operation takes it."""
    if spec.is_mla:
        raise KVCacheValueError(
            f"{operation}: got a cache of latents (MLA), expected one of keys and values; use {instead}"
        )


def check_latents(operation: str, spec: AttentionSpec) -> None:
    """Raises `KVCacheValueError` for a cache of keys and values."""
    if not spec.is_mla:
        raise KVCacheValueError(
            f"{operation}: got a cache of keys and values, of a {type(spec).__name__}, expected one of latents, of an"
            " MLAAttentionSpec"
        )


def check_devices(cache: Any, **arrays: Any) -> None:
    """Raises if an array is committed to other devices than the cache's; XLA checks traced ones when it compiles.

    `cache` is a `KVCache`, or the keys that an operation takes instead.
    """
    if isinstance(cache.kv, jax.core.Tracer):
        return
    devices = cache.kv.devices()
    for what, array in arrays.items():
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or not array.committed:
            continue
        if (got := array.devices()) != devices:
            raise KVCacheValueError(
                f"{what}: got an array on {_names(got)}, expected {_names(devices)}, where the"
                f" {'cache is' if isinstance(cache, KVCache) else 'keys are'};"
                f" move it there with jax.device_put"
            )


def _names(devices: set[jax.Device]) -> str:
    return ", ".join(str(device) for device in sorted(devices, key=lambda device: device.id))


def as_layer(cache: KVCache, layer: ArrayLike | None) -> jax.Array | None:
    """Returns the layer as an int32 scalar, which may be out of range; None for a cache of one layer.

    Raises:
      KVCacheValueError, KVCacheTypeError: a layer for a cache of one, none for a cache of several, neither an int nor
        an integer scalar, or an int out of range.
    """
    num_layers = cache.num_layers
    if num_layers is None:
        if layer is not None:
            raise KVCacheValueError(
                f"layer: got {shown(layer)} for a cache without num_layers, expected None; a cache of several layers is"
                " KVCache.allocate(..., num_layers=...)"
            )
        return None
    if layer is None:
        raise KVCacheValueError(f"layer: got None for a cache of num_layers={num_layers}, expected the layer's number")
    if not isinstance(layer, jax.Array):
        return jnp.int32(as_int("layer", layer, least=0, most=num_layers - 1))
    check_array("layer", layer, [], INDEX_DTYPES)
    if is_checked():
        check_layer(layer, num_layers)
    if layer.dtype == jnp.int32:  # unchanged: each operation here would be one more before a kernel
        return layer
    return jnp.where((layer >= 0) & (layer < num_layers), layer, -1).astype(jnp.int32)


def as_slots(slot_mapping: ArrayLike, num_slots: int) -> jax.Array:
    """Returns `slot_mapping` as a JAX array in which slots that write nothing still write nothing.

    Without x64 JAX truncates NumPy int64 to its low half, which may be a slot of the cache even if the int64 is not.
    """
    if isinstance(slot_mapping, np.ndarray):
        slot_mapping = np.where((slot_mapping >= 0) & (slot_mapping < num_slots), slot_mapping, -1)
    return jnp.asarray(slot_mapping)


def as_blocks(block_table: Any, cache: KVCache) -> jax.Array:
    """Returns `block_table` as int32; an entry that is not a block of the cache still is not one."""
    if block_table.dtype == np.int32 and cache.sharding is None:
        return jnp.asarray(block_table)
    # The low half of an int64 may be a block. And a share of a divided cache, which numbers its own blocks, has to tell
    # an entry that is no block (-1) from a block of another share.
    xp: Any = np if isinstance(block_table, np.ndarray) else jnp
    is_block = (block_table >= 0) & (block_table < cache.num_blocks)
    return jnp.asarray(xp.where(is_block, block_table, -1).astype(np.int32))


def as_lengths(seq_lens: ArrayLike) -> jax.Array:
    """Returns `seq_lens` as an int32 JAX array, clamped to `0 .. 2**31 - 1` unless it is one already."""
    most = np.iinfo(np.int32).max
    if isinstance(seq_lens, np.ndarray):
        return jnp.asarray(np.clip(seq_lens, 0, most).astype(np.int32))
    lengths = jnp.asarray(seq_lens)
    return lengths if lengths.dtype == jnp.int32 else jnp.clip(lengths, 0, most).astype(jnp.int32)


def as_scales(
    cache: KVCache, layer: jax.Array | None, k_scale: ArrayLike | None, v_scale: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the decode scales of a call: the given ones, else those of the cache's layer.

    They are float32 and broadcast against `[..., num_kv_heads, head_size]`. Latents have one scale, `k_scale`, for all
    parts that take one.

    Raises:
      KVCacheTypeError: not a number or an array of numbers.
      KVCacheValueError: neither a scalar nor, for fp8, `[num_kv_heads]`; or a known value that is not between
        `MIN_SCALE` and `MAX_SCALE`.
    """
    if cache.spec.is_mla:
        scale = _as_scale("scale", k_scale, cache, layer, carried="k_scale")
        return scale, scale
    return (
        _as_scale("k_scale", k_scale, cache, layer, carried="k_scale"),
        _as_scale("v_scale", v_scale, cache, layer, carried="v_scale"),
    )


def _as_scale(what: str, scale: Any, cache: KVCache, layer: jax.Array | None, *, carried: str) -> jax.Array:
    if scale is None:
        what, scale = f"cache.{carried}", getattr(cache, carried)
        if scale is None:
            return jnp.asarray(1.0, jnp.float32)
        if layer is not None and np.ndim(scale):
            scale = lax.dynamic_index_in_dim(jnp.asarray(scale), layer, keepdims=False)
    is_on_device = isinstance(scale, jax.Array)  # reading its value waits for the device: only in checked mode
    (check_scale_type if is_on_device and not is_checked() else check_scale)(what, scale)
    array = jnp.asarray(scale, jnp.float32)
    check_scale_shape(what, array, cache.spec)
    return array[:, None] if array.ndim else array


def as_sinks(sinks: Any, num_heads: int, spec: AttentionSpec) -> jax.Array | None:
    """Returns the sinks after checking that the number of query heads fits the cache; None for none."""
    if num_heads % spec.num_kv_heads or not num_heads:
        raise KVCacheValueError(
            f"query: got num_heads={num_heads}, expected a multiple of num_kv_heads={spec.num_kv_heads}"
        )
    if sinks is None:
        return None
    check_array("sinks", sinks, [("num_heads", num_heads)], (np.dtype(np.float32), np.dtype(np.float64)))
    return jnp.asarray(sinks, jnp.float32)  # float64 is what `jax.numpy` makes by default with x64


def as_window(window: Any, spec: AttentionSpec) -> tuple[int | None, jax.Array | None]:
    """Returns a window as a static int, or as an int32 scalar on the device if it is an array.

    Both are None if there is no restriction. The scalar's value is unchecked.

    Raises:
      KVCacheValueError, KVCacheTypeError: neither a positive int, an integer scalar, None nor `OF_LAYER`.
    """
    if isinstance(window, str) and window == OF_LAYER:
        window = spec.sliding_window
    if window is None:
        return None, None
    if isinstance(window, jax.Array):
        check_array("sliding_window", window, [], INDEX_DTYPES)
        if is_checked():
            check_window(window)
        return None, jnp.clip(window, 0, options.MAX_WINDOW).astype(jnp.int32)
    expected = f"an int, an integer scalar, None for no window, or {OF_LAYER!r} for the layer's own"
    return options.as_window(window, expected), None


def reach_of(window: tuple[int | None, jax.Array | None], num_rows: Any, most_rows: int) -> Any:
    """Returns how many of its last tokens a sequence of `num_rows` rows (at most `most_rows`) needs; None for all."""
    restricted, on_device = window
    most = options.MAX_WINDOW - most_rows
    if on_device is not None:
        return num_rows + jnp.minimum(on_device - 1, most)
    return None if restricted is None else num_rows + min(restricted - 1, most)
