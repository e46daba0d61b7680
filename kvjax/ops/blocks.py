"""Copies of whole pages: `copy_blocks` within a cache, `swap_blocks` between two, also across devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import ArrayLike

from kvjax.cache import SCALES, KVCache, local_view
from kvjax.cache_views import split_region
from kvjax.errors import KVCacheValueError, UnsupportedError
from kvjax.layouts import CacheLayout
from kvjax.memory import check_memory, without_mesh
from kvjax.ops import select
from kvjax.ops.arguments import INDEX_DTYPES, as_layer, check_array, check_cache, check_devices
from kvjax.ops.value_checks import check_pairs, is_checked
from kvjax.scale_values import readable, refuse
from kvjax.spec import AttentionSpec, as_bool


def copy_blocks(
    cache: KVCache,
    pairs: ArrayLike,
    *,
    layer: ArrayLike | None = None,
    donate: bool = False,
    implementation: str | None = None,
) -> KVCache:
    """Copies whole pages of a cache to other pages of it, byte for byte, with block scales and padding.

    In a cache of several layers a block is a page in each, and all of them are copied.

    Functional: use the returned cache. With `donate`, or under `jit` with the cache donated (`donate_argnums`), the
    copy is in place, and its cost depends on the copied pages, not on the cache's size. All pages are read before any
    is written: a pair copies what its source held before the call, even if another pair writes to it, and two pairs may
    exchange pages.

    Outside `jit`, pairs are padded to a power of two, so that few sizes are compiled. Under `jit`, each number of pairs
    compiles the caller's program again: pad them with -1.

    Args:
      cache: the layer's cache, or the pool that layers share.
      pairs: int32 or int64 `[num_pairs, 2]`: source block and destination block of each copy. A pair with a block that
        is negative, or at or past `cache.num_blocks`, copies nothing. If two pairs have one destination, that page's
        contents are unspecified. Outside `jit` preferably a NumPy array: one on a device is first copied to the host.
      layer: to copy the pages of one layer only: its number, an int or an int32 scalar that may be traced. An array out
        of range copies nothing.
      donate: whether to donate the cache, as `swap_blocks` does its destination. Traced calls ignore it: the caller of
        the jitted function donates.
      implementation: `"xla"`, or `None` to choose.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape or dtype; the message names it.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    _check_pairs(pairs, cache, cache)
    check_devices(cache, pairs=pairs, layer=layer)
    layer, donate = _as_layer(cache, layer), as_bool("donate", donate)
    serve = select.choose("copy_blocks", implementation, _COPY, cache)
    if is_traced(cache.kv, pairs, layer):
        return dataclasses.replace(cache, kv=serve(cache, *_as_blocks(pairs, layer, cache, cache)))
    copy = _copy_donated_jit if donate else _copy_jit
    with named_views("cache.kv"):
        return dataclasses.replace(cache, kv=copy(cache.kv, *_as_blocks(*_on_host(pairs, layer), cache, cache)))


def swap_blocks(source: KVCache, destination: KVCache, pairs: ArrayLike, *, layer: ArrayLike | None = None) -> KVCache:
    """Copies whole pages of one cache to pages of another, which may be on another device or divided differently.

    Only the pages of the pairs move, byte for byte, in all layers of caches of several. `source` is unchanged.
    **`destination` is donated**, and so written in place: use the returned cache. All pages are read before the first
    is written: without memory for them the call raises, and neither cache has changed or is donated. The destination is
    left donated and partly written only if a device fails while it writes.

    The call does not wait for the copies. A GPU runs its copies after the work that it was given before, and before the
    work that it is given next. To move blocks off a GPU and back beside its work, use `HostCaches`.

    The two may be divided among devices in different ways. Where pages hold scales, a device's pages are those of its
    own heads: if the caches divide the heads into different numbers of shares, each page's bytes are reordered.

    Traced, as inside `jit`, it copies between caches in memory of one device, in place if the caller donates
    `destination`. Reordering is not supported there.

    A page's bytes have meaning only with its cache's scales, so both caches must carry the same scales. Comparing them
    reads their values, which waits for the call that returned them; traced values are compared in checked mode only.

    Args:
      source: the cache to read.
      destination: the cache to write, with the same spec and number of layers. If it is divided among devices, its
        sharding is a `NamedSharding`.
      pairs: int32 or int64 `[num_pairs, 2]`: block of `source` and block of `destination` of each copy, preferably a
        NumPy array: one on a device is first copied to the host, which waits for what computes it. As in `copy_blocks`,
        a pair with a block outside its cache copies nothing, and pairs are padded to a power of two: for each pair of
        padding a page moves, too.
      layer: to copy the pages of one layer only: its number, as in `copy_blocks`.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype or spec; the message names it. Also: one cache given
        twice; caches with different scales, or traced ones of which only one carries a scale; traced caches that would
        need reordering; on a GPU, a destination that another library views.
      UnsupportedError: a cache in a memory other than its device's default, or a destination divided by another kind
        of sharding.
    """
    check_cache(source, "source")
    check_cache(destination, "destination")
    if source.kv is destination.kv:
        raise KVCacheValueError("destination: got the cache that is the source; within one cache use copy_blocks")
    for field in dataclasses.fields(source.spec):
        got, expected = getattr(destination.spec, field.name), getattr(source.spec, field.name)
        if got != expected:
            raise KVCacheValueError(
                f"destination.spec: got {field.name}={_shown(got)}, expected {_shown(expected)}, as source.spec has it"
            )
    if source.num_layers != destination.num_layers:
        raise KVCacheValueError(
            f"destination: got num_layers={destination.num_layers}, expected {source.num_layers}, as source has it"
        )
    _check_pairs(pairs, source, destination)
    for what in SCALES:
        _check_same_scale(what, source, destination)
    layer = _as_layer(source, layer)
    shares = _head_shares(source), _head_shares(destination)
    has_same_order = source.spec.has_head_axis or shares[0] == shares[1]
    if is_traced(source.kv, destination.kv, pairs, layer):
        if not has_same_order:
            raise KVCacheValueError(
                f"destination: got {source.spec.dtype.value!r} pages whose heads are divided into {shares[1]} shares in"
                f" a traced call, expected {shares[0]} as source has: their bytes are in another order. Call"
                " swap_blocks outside jit and shard_map, where it reorders them"
            )
        from_blocks, to_blocks, layer = _as_blocks(pairs, layer, source, destination)
        names = "source", "destination"
        source_kv, kv = select.without_gradient("swap_blocks", names, (source.kv, destination.kv))
        return dataclasses.replace(destination, kv=put(kv, take(source_kv, from_blocks, layer), to_blocks, layer))
    for name, cache in (("source", source), ("destination", destination)):
        check_memory(name, cache.kv.sharding)
    sharding = sharding_of_pages(destination.kv, layer)
    from_blocks, to_blocks, layer = _as_blocks(*_on_host(pairs, layer), source, destination)
    with without_mesh():
        pages = take_jit(source.kv, from_blocks, layer)
        if not has_same_order:
            if shares[0] > 1:
                pages = jax.device_put(pages, _undivided(sharding))
            pages = _regroup(pages, source.spec, *shares)
        pages = jax.device_put(pages, sharding)
        return dataclasses.replace(
            destination, kv=with_pages("destination.kv", destination.kv, pages, to_blocks, layer)
        )


def pages_to_host(cache: KVCache, blocks: np.ndarray) -> np.ndarray:
    """Returns whole pages of all heads as bytes on the host, uint8 `[num_blocks, num_layers or 1, page_size_bytes]`.

    `blocks` are int32 numbers of the whole cache, padded like the pairs of a swap. A divided cache's pages are in the
    order of an undivided one.
    """
    shares, number = _head_shares(cache), len(blocks)
    padded, _ = _on_host(np.stack([blocks, blocks], axis=1), None)
    pages = take_jit(cache.kv, np.maximum(padded[:, 0], 0), None)
    if shares > 1 and not cache.spec.has_head_axis:
        pages = _regroup(jax.device_put(pages, _undivided(cache.kv.sharding)), cache.spec, shares, 1)
    in_bytes = np.ascontiguousarray(np.asarray(pages)[:number]).view(np.uint8)
    return in_bytes.reshape(number, cache.num_layers or 1, cache.spec.page_size_bytes)


def pages_from_host(cache: KVCache, pages: np.ndarray) -> jax.Array:
    """Returns pages that `pages_to_host` returned, on the devices of another cache and in its order, for `put_pages`.

    Padded to a power of two, with zeros.
    """
    shares, number = _head_shares(cache), len(pages)
    stored = np.dtype(f"uint{8 * cache.kv.dtype.itemsize}")
    whole = np.zeros((1 << max(number - 1, 0).bit_length(), *cache.spec.cache_shape(1, cache.num_layers)[1:]), stored)
    whole[:number].view(np.uint8).reshape(number, -1)[...] = pages.reshape(number, -1)
    sharding, placed = sharding_of_pages(cache.kv, None), whole
    if shares > 1 and not cache.spec.has_head_axis:
        placed = _regroup(jax.device_put(whole, _undivided(sharding)), cache.spec, 1, shares)
    return jax.device_put(placed, sharding)


def put_pages(what: str, cache: KVCache, pages: jax.Array, blocks: np.ndarray) -> KVCache:
    """Writes pages of `pages_from_host` into int32 blocks, not padded, of the cache named `what`, which it donates."""
    to_blocks = np.pad(blocks, (0, len(pages) - len(blocks)), constant_values=cache.num_blocks)
    return dataclasses.replace(cache, kv=with_pages(f"{what}.kv", cache.kv, pages, to_blocks, None))


def _check_pairs(pairs: Any, source: KVCache, destination: KVCache) -> None:
    check_array("pairs", pairs, [("num_pairs", None), ("blocks", 2)], INDEX_DTYPES)
    if is_checked():
        check_pairs(pairs, source.num_blocks, destination.num_blocks)


def _check_same_scale(what: str, source: KVCache, destination: KVCache) -> None:
    """Raises if a scale of the two caches is known to differ."""
    scales = getattr(source, what), getattr(destination, what)
    if scales[0] is scales[1]:
        return
    expected = f"as source.{what} has it: pages are meaningful only with their scales"
    traced = is_traced(*scales)
    if traced and any(scale is None for scale in scales):
        got, wanted = ("none" if scale is None else "one" for scale in scales[::-1])
        raise KVCacheValueError(f"destination.{what}: got {got}, expected {wanted}, {expected}")
    if traced and not is_checked():
        return
    as_shown = (scale if is_traced(scale) else scale_on_host(scale) for scale in scales)
    xp, old, new = readable(*as_shown)
    if source.num_layers is not None:  # [num_layers] against [num_layers, num_kv_heads]
        old, new = (scale[:, None] if scale.ndim == 1 else scale for scale in (old, new))
    old, new = xp.broadcast_arrays(old, new)
    differ = (old < new) | (old > new)  # False for NaN, which stands for unknown
    first = xp.argmax(differ)
    refuse(
        differ.any(),
        f"destination.{what}: got {{new}}, expected {{old}}, {expected}; gather_kv and write tokens instead",
        new=new.reshape(-1)[first],
        old=old.reshape(-1)[first],
    )


def scale_on_host(scale: Any) -> np.ndarray:
    """Returns a concrete scale as a NumPy array, NaN where only other processes hold it."""
    if scale is None:
        return np.ones((), np.float32)
    if not isinstance(scale, jax.Array) or scale.is_fully_addressable or scale.is_fully_replicated:
        return np.asarray(scale)
    known = np.full(scale.shape, np.nan, np.float32)
    for shard in scale.addressable_shards:
        known[shard.index] = shard.data
    return known


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))


def sharding_of_pages(kv: jax.Array, layer: ArrayLike | None) -> Sharding:
    """Returns the sharding of selected pages in device memory that matches the whole cache's.

    Each device gets all selected pages.
    """
    sharding = kv.sharding
    if isinstance(sharding, NamedSharding):
        return _together(sharding, layer)
    if len(sharding.device_set) > 1:
        raise UnsupportedError(f"destination: got a cache on {sharding}, expected a NamedSharding or one device")
    return SingleDeviceSharding(*sharding.device_set)


def _together(sharding: NamedSharding, layer: ArrayLike | None) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1 if layer is None else 2 :]))


def _undivided(sharding: Sharding) -> Sharding:
    """Returns the sharding that replicates whole pages on every device."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _head_shares(cache: KVCache) -> int:
    """Returns the number of shares into which a cache's heads are divided."""
    return cache.spec.num_kv_heads // local_view(cache).local_spec.num_kv_heads


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _regroup(pages: jax.Array, spec: AttentionSpec, old_shares: int, new_shares: int) -> jax.Array:
    """Reorders pages with scales, `[..., *spec.cache_shape(n)[1:]]`, for another number of shares of the heads.

    A share's part of the array, along the axis of heads, is a page of its heads: their regions one after the other.
    Within a region the rows of a head, swizzled or not, have one order whatever the number of heads beside it.
    """
    page_shape = spec.cache_shape(1)[1:]
    lead, head_axis = pages.shape[: pages.ndim - len(page_shape)], -3 if spec.layout is CacheLayout.HND else -2

    def of_a_share(num_shares: int) -> AttentionSpec:
        return dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads // num_shares)

    old, new = of_a_share(old_shares), of_a_share(new_shares)
    old_pages = [part.reshape(*lead, -1) for part in jnp.split(pages, old_shares, head_axis)]
    parts: list[list[jax.Array]] = [[] for _ in range(new_shares)]
    for region in itertools.chain(*old.regions):
        rows = jnp.concatenate([split_region(page, old, region) for page in old_pages], head_axis)
        for part, own in zip(parts, jnp.split(rows, new_shares, head_axis), strict=True):
            part.append(own.reshape(*lead, -1))
    new_pages = [jnp.concatenate(part, -1).reshape(*lead, *new.cache_shape(1)[1:]) for part in parts]
    return jnp.concatenate(new_pages, head_axis)


def is_traced(*arrays: Any) -> bool:
    """Returns whether one of the arrays is traced."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def _as_layer(cache: KVCache, layer: ArrayLike | None) -> ArrayLike | None:
    """Returns a checked layer; a number stays on the host, where reading it back from a device would wait."""
    if layer is None:
        return None
    on_device = as_layer(cache, layer)
    return on_device if isinstance(layer, jax.Array) else np.asarray(layer, np.int32)


def _on_host(pairs: Any, layer: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the layer, and the pairs padded with -1 to a power of two: each number of pairs is compiled."""
    pairs = np.asarray(pairs)
    num_pairs = 1 << max(len(pairs) - 1, 0).bit_length()
    padded = np.pad(pairs, ((0, num_pairs - len(pairs)), (0, 0)), constant_values=-1)
    return padded, None if layer is None else np.asarray(layer)


def _as_blocks(pairs: Any, layer: Any, source: KVCache, destination: KVCache) -> tuple[Any, Any, ArrayLike | None]:
    """Returns blocks to read, blocks to write and the layer. A pair that copies nothing writes past the last block.

    NumPy arrays stay on the host: JAX would truncate an int64, and a program takes them where it runs.
    """
    xp: Any = jnp if isinstance(pairs, jax.Array) or isinstance(layer, jax.Array) else np
    from_blocks, to_blocks = pairs[:, 0], pairs[:, 1]
    copied = (from_blocks >= 0) & (from_blocks < source.num_blocks)
    copied &= (to_blocks >= 0) & (to_blocks < destination.num_blocks)
    if source.num_layers is not None and layer is not None:
        copied = copied & (layer >= 0) & (layer < source.num_layers)
        layer = xp.clip(layer, 0, source.num_layers - 1)
    blocks = xp.where(copied, from_blocks, 0), xp.where(copied, to_blocks, destination.num_blocks)
    return blocks[0].astype(np.int32), blocks[1].astype(np.int32), layer


def take(kv: jax.Array, blocks: ArrayLike, layer: ArrayLike | None) -> jax.Array:
    """Returns pages as integers: gathering across devices sums, which would change floats' -0.0 and NaNs."""
    sharding = jax.typeof(kv).sharding
    # For a gather from an explicitly sharded axis JAX requires the result's sharding.
    together = None if sharding.spec[0] is None else _together(sharding, layer)
    stored = lax.bitcast_convert_type(kv, f"uint{8 * kv.dtype.itemsize}")
    return stored.at[_index(blocks, layer)].get(mode="clip", out_sharding=together)


def put(kv: jax.Array, pages: jax.Array, blocks: ArrayLike, layer: ArrayLike | None) -> jax.Array:
    """Returns a cache's array with pages as `take` returns them; a block past the last is dropped."""
    sharding = jax.typeof(kv).sharding
    pages = lax.bitcast_convert_type(pages, kv.dtype)
    # What two pairs write is unspecified. Where indices may repeat, XLA stores with atomic operations, byte by byte.
    return kv.at[_index(blocks, layer)].set(
        pages, mode="drop", unique_indices=True, out_sharding=sharding if sharding.spec[0] else None
    )


def _index(blocks: ArrayLike, layer: ArrayLike | None) -> Any:
    """Returns the index of blocks' pages: in all layers, or in one."""
    return blocks if layer is None else (blocks, layer)


take_jit, _put_jit = jax.jit(take), jax.jit(put, donate_argnums=0)


def with_pages(what: str, kv: jax.Array, pages: jax.Array, blocks: np.ndarray, layer: ArrayLike | None) -> jax.Array:
    """Returns the array `what`, which it donates, with pages that `take` returned."""
    with named_views(what):
        return _put_jit(kv, pages, blocks, layer)


@contextlib.contextmanager
def named_views(what: str) -> Iterator[None]:
    """Names the cache that a GPU's runtime does not donate, since another library views its memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "external reference" not in str(error):
            raise
        raise KVCacheValueError(
            f"{what}: got an array that NumPy or another library views, expected one without views, since it is donated"
        ) from error


def _copy(kv: jax.Array, from_blocks: ArrayLike, to_blocks: ArrayLike, layer: ArrayLike | None) -> jax.Array:
    return put(kv, take(kv, from_blocks, layer), to_blocks, layer)


_copy_jit = jax.jit(_copy)
_copy_donated_jit = jax.jit(_copy, donate_argnums=0)


def _copy_xla(cache: KVCache, from_blocks: ArrayLike, to_blocks: ArrayLike, layer: ArrayLike | None) -> jax.Array:
    return _copy(cache.kv, from_blocks, to_blocks, layer)


_COPY = select.Candidates(("cache", "from_blocks", "to_blocks", "layer"), _copy_xla)
