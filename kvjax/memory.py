"""Allocates a cache's pages: zeroed memory, out-of-memory messages, and host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from kvjax.errors import KVCacheMemoryError, UnsupportedError
from kvjax.spec import AttentionSpec

MAX_BYTES = 2**63 - 1
"""XLA's byte counts are 64 bits and overflow silently."""


def host_sharding() -> SingleDeviceSharding:
    """Returns a `sharding` for `KVCache.allocate` in host memory, for pages that `swap_blocks` moves off a GPU.

    It is that of JAX's CPU device, where a donated array is written in place. Memory kind `"pinned_host"` is refused.

    Raises:
      UnsupportedError: JAX's CPU backend is disabled, as by `JAX_PLATFORMS=cuda`.
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise UnsupportedError(
            f"host_sharding: got jax_platforms={jax.config.jax_platforms!r}, expected 'cpu' among them, as in"
            " JAX_PLATFORMS=cuda,cpu"
        ) from error
    return SingleDeviceSharding(device)


def zeroed_pages(spec: AttentionSpec, num_blocks: int, num_layers: int | None, sharding: Sharding | None) -> jax.Array:
    """Returns the zeroed array of a cache of `num_blocks` pages, or of so many per layer, once it is allocated.

    Raises:
      KVCacheMemoryError: a device has too little memory.
    """
    if num_blocks * (num_layers or 1) * spec.page_size_bytes > MAX_BYTES:
        raise KVCacheMemoryError(_what_was_asked(spec, num_blocks, num_layers, sharding))
    try:
        pages = jnp.zeros(spec.cache_shape(num_blocks, num_layers), spec.array_dtype, device=sharding)
        # Dispatch is asynchronous: an allocation error may surface only when waiting for it.
        return pages if isinstance(pages, jax.core.Tracer) else pages.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise KVCacheMemoryError(_what_was_asked(spec, num_blocks, num_layers, sharding)) from error


def _what_was_asked(spec: AttentionSpec, num_blocks: int, num_layers: int | None, sharding: Sharding | None) -> str:
    each = "a page" if num_layers is None else f"{num_layers} pages, one per layer,"
    taken = _bytes(num_blocks * (num_layers or 1) * spec.page_size_bytes)
    fits = _what_fits(spec, num_blocks, num_layers, sharding)
    return (
        f"num_blocks: got {num_blocks}, which need {taken}, more memory than available{fits}."
        f" Each is {each} of {spec.page_size_bytes} bytes of {spec}"
    )


def _what_fits(spec: AttentionSpec, num_blocks: int, num_layers: int | None, sharding: Sharding | None) -> str:
    """Returns how many blocks the fullest device has memory for; empty if devices do not report memory."""
    shape = spec.cache_shape(num_blocks, num_layers)
    if sharding is None:
        devices, shard = _default_devices(), shape
    else:
        devices, shard = sorted(sharding.addressable_devices, key=lambda d: d.id), sharding.shard_shape(shape)
    free = {device: left for device in devices if (left := _free_bytes(device)) is not None}
    if not free:
        return ""
    device = min(free, key=lambda device: free[device])
    # A shard holds some of the pages, and a part of each page.
    part = math.prod(shard[1:]) * spec.array_dtype.itemsize
    fits = free[device] // part * (num_blocks // shard[0])
    return f"; expected at most {fits}: {_bytes(free[device])} are free on {device}"


def _default_devices() -> Sequence[jax.Device]:
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[:1]
    return [default]


def _free_bytes(device: jax.Device) -> int | None:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return max(stats["bytes_limit"] - stats.get("bytes_in_use", 0), 0)


def _bytes(count: int) -> str:
    return f"{count:,} bytes ({count / 2**30:,.2f} GiB)"
