"""Pages of caches in pinned host memory, read into and written from arrays in device memory, a page at a time.

XLA compiles a gather or scatter on pinned memory for the host, or not at all, but moves slices and updates of slices
over the bus itself. Loops of these need a static number of pages: XLA waits for the condition of any other loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

UNROLL = 8
"""Pages in an iteration. On an H100, loops of one move pages of 576 KiB to the host at 31.9 GB/s, of eight at 41.5."""


def parts(indices: np.ndarray) -> Iterator[np.ndarray]:
    """Divides indices into powers of two, largest first: few numbers are compiled, and no page of padding moves."""
    first = 0
    while size := (1 << (len(indices) - first).bit_length()) // 2:
        yield indices[first : first + size]
        first += size


def in_device_type(kv: jax.Array) -> jax.Array:
    """Returns the same array, of the same memory, with the type of one in device memory.

    XLA gathers from it with a kernel that reads over the bus. From an array whose type shows pinned memory it gathers
    on the host, or not at all.
    """
    return jax.make_array_from_single_device_arrays(kv.shape, kv.sharding, [each.data for each in kv.addressable_shards])


def put(kv: jax.Array, pages: jax.Array, blocks: ArrayLike, layer: ArrayLike | None) -> jax.Array:
    """Returns the cache's array, in place if it is donated, with `pages`, as `take` returns them, in these blocks."""
    kv, pages, blocks = _as_pinned(kv), lax.bitcast_convert_type(pages, kv.dtype), jnp.asarray(blocks)

    def body(i: Any, kv: jax.Array) -> jax.Array:
        page = lax.dynamic_slice_in_dim(pages, i, 1)
        page = jax.device_put(page if layer is None else page[:, None], jax.memory.Space.Host)
        return lax.dynamic_update_slice(kv, page, _start(kv, blocks[i], layer))

    return lax.fori_loop(0, len(blocks), body, kv, unroll=min(UNROLL, len(blocks)))


def _as_pinned(kv: jax.Array) -> jax.Array:
    """Returns an array in pinned memory with that memory in its type, which what `out_shardings` put there lacks."""
    return jax.device_put(kv, jax.memory.Space.Host)


def _lead(layer: ArrayLike | None) -> int:
    """Returns how many dimensions of a cache's array number pages."""
    return 1 if layer is None else 2


def _start(kv: jax.Array, block: ArrayLike, layer: ArrayLike | None) -> list[Any]:
    """Returns where a page begins, all int32: JAX takes no indices of several types, which x64 would make."""
    page = [block] if layer is None else [block, layer]
    return [*page, *[np.int32(0)] * (kv.ndim - len(page))]
