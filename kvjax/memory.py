"""Where a cache's pages are: zeroed memory, out-of-memory messages, and host memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding, SingleDeviceSharding

from kvjax.errors import KVCacheMemoryError, KVCacheTypeError, UnsupportedError, shown, type_name
from kvjax.spec import AttentionSpec

MAX_BYTES = 2**63 - 1
"""XLA's byte counts are 64 bits and overflow silently."""


PINNED = "pinned_host"
"""JAX's memory kind for host memory that a GPU reads and writes directly."""


def host_sharding(like: Sharding) -> Sharding:
    """Returns where pages on the host are of a cache: pinned memory of each of its GPUs, or a CPU's own memory."""
    device: Any = next(iter(like.device_set))
    return like if device.platform == "cpu" else like.with_memory_kind(PINNED)


def without_mesh() -> AbstractContextManager[object]:
    """Returns a context that unsets the mesh of `jax.set_mesh`, under which jit refuses arrays on other devices.

    While JAX traces, also for a gradient, the mesh cannot be unset: then the context changes nothing.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    try:
        return jax.set_mesh(Mesh(np.empty((), object), ()))
    except ValueError:
        return contextlib.nullcontext()


def refuse_pinned(what: str, kv: jax.Array) -> None:
    """Raises `UnsupportedError` for a cache's array, traced or not, in pinned host memory."""
    if isinstance(kv, jax.core.Tracer):
        is_pinned = jax.typeof(kv).memory_space == jax.memory.Space.Host
    else:
        is_pinned = kv.sharding.memory_kind == PINNED
    if is_pinned:
        raise UnsupportedError(
            f"{what}: got a cache in memory of kind {PINNED!r}, expected one in its device's memory; HostCaches keeps"
            " blocks on the host"
        )


def check_memory(what: str, sharding: Sharding) -> None:
    """Raises `UnsupportedError` for memory other than the devices' default."""
    if (kind := sharding.memory_kind) is None:
        return
    devices: Iterable[Any] = sharding.addressable_devices
    own = next((device.default_memory().kind for device in devices), kind)
    if kind != own:
        raise UnsupportedError(
            f"{what}: got memory of kind {kind!r}, expected {own!r}: XLA would copy all of it in each call. HostCaches"
            " keeps blocks on the host"
        )


def as_sharding(what: str, sharding: Any) -> Sharding | None:
    """Returns the sharding of a device or a sharding; None for None."""
    if sharding is None or isinstance(sharding, Sharding):
        return sharding
    if isinstance(sharding, jax.Device):
        return SingleDeviceSharding(sharding)
    message = f"{what}: got {shown(sharding)} of type {type_name(sharding)}, expected a jax.sharding.Sharding"
    if isinstance(sharding, PartitionSpec):
        message += f", such as NamedSharding(mesh, {sharding}): a PartitionSpec has no devices"
    elif isinstance(sharding, str):
        message += f", such as SingleDeviceSharding(jax.devices({sharding!r})[0])"
    raise KVCacheTypeError(message)


def zeroed_pages(spec: AttentionSpec, num_blocks: int, num_layers: int | None, sharding: Sharding | None) -> jax.Array:
    """Returns the zeroed array of a cache of `num_blocks` pages, or of that many per layer, once it is allocated.

    Raises:
      KVCacheMemoryError: a device has too little memory.
    """
    if num_blocks * (num_layers or 1) * spec.page_size_bytes > MAX_BYTES:
        raise KVCacheMemoryError(_what_was_asked(spec, num_blocks, num_layers, sharding))
    try:
        shape, dtype = spec.cache_shape(num_blocks, num_layers), spec.array_dtype
        if sharding is not None and sharding.memory_kind == PINNED:
            pages = jax.device_put(np.zeros(shape, dtype), sharding)  # XLA itself fills device memory alone
        else:
            pages = jnp.zeros(shape, dtype, device=sharding)
        # Dispatch is asynchronous: an allocation error may surface only when waiting for it.
        return pages if isinstance(pages, jax.core.Tracer) else pages.block_until_ready()
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
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
    if sharding is not None and sharding.memory_kind == PINNED:
        return "; XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB (64 by default) limits pinned host memory of a process"
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
