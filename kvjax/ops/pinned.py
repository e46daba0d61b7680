"""Pages of caches in pinned host memory, which kernels of a GPU read and write over the bus."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import ArrayLike

COMPILER_OPTIONS = {"xla_disable_hlo_passes": "host-memory-transfer-asyncifier"}
"""`take` is compiled with them. With this pass XLA copies the whole cache in, or gathers into host memory first."""


def parts(indices: np.ndarray) -> Iterator[np.ndarray]:
    """Divides indices into powers of two, largest first: few numbers are compiled, and no page of padding moves."""
    first = 0
    while size := (1 << (len(indices) - first).bit_length()) // 2:
        yield indices[first : first + size]
        first += size


def take(kv: jax.Array, blocks: ArrayLike, layer: ArrayLike | None) -> jax.Array:
    """Returns pages `[num_pages, ...]` of a cache's array `kv`, as unsigned integers in device memory.

    `blocks` are int32 numbers `[num_pages]` of its blocks; with `layer`, an int32 scalar, of this layer's pages.
    """
    stored = lax.bitcast_convert_type(kv, f"uint{8 * kv.dtype.itemsize}")
    index = blocks if layer is None else (blocks, layer)
    stored, index = jax.device_put((stored, index), jax.memory.Space.Host)
    pages = stored.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jax.device_put(pages, jax.memory.Space.Device)


def put(kv: jax.Array, parts: Sequence[tuple[jax.Array, ArrayLike]], layer: ArrayLike | None) -> jax.Array:
    """Returns the cache's array, which it donates and writes in place, with parts of pages, as `take` returns them.

    Pages are divided among devices as the array is. A block past the last is dropped; what repeated ones hold is
    unspecified.
    """
    shards = []
    for shard in kv.addressable_shards:
        own = _of_one_device(shard.data)
        with jax.set_mesh(Mesh(np.array(shard.device), ())):  # jit refuses arrays of one device of a caller's mesh
            for pages, blocks in parts:
                [local] = (each.data for each in pages.addressable_shards if each.device == shard.device)
                own = _scatter_jit(own.sharding)(own, _of_one_device(local), blocks, layer)
        shards.append(own)
    return _in_pinned_type(kv.shape, kv.sharding, shards)


def _in_pinned_type(shape: tuple[int, ...], sharding: Sharding, shards: list[jax.Array]) -> jax.Array:
    """Returns an array of shards, of the same memory, whose type shows pinned memory: a traced call refuses it.

    JAX sets the memory of a type by a `NamedSharding` alone.
    """
    named = sharding
    if not isinstance(sharding, NamedSharding):
        mesh = Mesh(np.array([*sharding.device_set]), ("device",))
        named = NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return jax.device_put(jax.make_array_from_single_device_arrays(shape, named, shards), sharding)


def _of_one_device(array: jax.Array) -> jax.Array:
    """Returns a device's array, of the same memory, with a type that shows neither pinned memory nor a mesh.

    XLA scatters into it with a kernel, in place. Where a type shows pinned memory, it scatters on the host. The shard
    of an array on a mesh of one device is the array itself, whose `NamedSharding` would put both into the type.
    """
    [device] = array.devices()
    sharding = SingleDeviceSharding(device, memory_kind=array.sharding.memory_kind)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, [array])


def _scatter(kv: jax.Array, pages: jax.Array, blocks: ArrayLike, layer: ArrayLike | None) -> jax.Array:
    """Scatters pages as one row each, all integers: XLA stores rows of 72 bytes at a quarter of the rate.

    Where indices may repeat, it stores at a tenth.
    """
    index, lead = (blocks, 1) if layer is None else ((blocks, layer), 2)
    rows = lax.bitcast_convert_type(kv, pages.dtype).reshape(*kv.shape[:lead], -1)
    rows = rows.at[index].set(pages.reshape(len(pages), -1), mode="drop", unique_indices=True)
    return lax.bitcast_convert_type(rows, kv.dtype).reshape(kv.shape)


@functools.cache
def _scatter_jit(sharding: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(_scatter, donate_argnums=0, out_shardings=sharding)
