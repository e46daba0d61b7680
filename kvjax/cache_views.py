"""Arrays of a cache in other shapes: flat pages, all layers as one, regions of a page."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from kvjax import partition
from kvjax.cache import KVCache, local_view
from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVCacheDType
from kvjax.errors import KVCacheTypeError, KVCacheValueError, kind_of
from kvjax.layouts import CacheLayout
from kvjax.memory import refuse_pinned
from kvjax.pages import PageRegion
from kvjax.spec import AttentionSpec


def nvfp4_kv_cache_full_dim(head_size: int) -> int:
    """Returns the bytes of one head of one token in an NVFP4 cache: `head_size / 2 + head_size / 16`, data and scales.

    Raises:
      KVCacheValueError: `head_size` is not a positive multiple of 16.
    """
    if head_size <= 0 or head_size % NVFP4_BLOCK_SIZE:
        raise KVCacheValueError(f"head_size: got {head_size}, expected a positive multiple of {NVFP4_BLOCK_SIZE}")
    return sum(KVCacheDType.NVFP4.info.row_bytes(head_size))


def nvfp4_split_views(
    cache: KVCache,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the four regions of an NVFP4 cache: `((k_data, v_data), (k_scale, v_scale))`.

    Data is uint8 `[num_blocks, block_size, num_kv_heads, head_size / 2]`, scales are float8_e4m3fn
    `[num_blocks, block_size, num_kv_heads, head_size / 16]` (HND: heads before tokens), in stored order: V scales of a
    swizzled cache are swizzled. With several layers they are `[num_blocks, num_layers, ...]`. JAX has no views: outside
    `jit` each is a copy.

    Raises:
      KVCacheValueError, KVCacheTypeError: the cache is not NVFP4, or was donated.
      UnsupportedError: it is in pinned host memory.
    """
    if not isinstance(cache, KVCache):
        raise KVCacheTypeError(f"cache: got {kind_of(cache)}, expected a KVCache")
    if cache.spec.dtype.byte_format is not KVCacheDType.NVFP4 or cache.spec.is_mla:
        of = " of latents (MLA)" if cache.spec.is_mla else ""
        raise KVCacheValueError(
            f"nvfp4_split_views: got a {cache.spec.dtype.value!r} cache{of}, expected 'nvfp4' keys and values"
        )
    cache.check()
    refuse_pinned("cache", cache.kv)
    cache = local_view(cache)
    num_layers = cache.num_layers
    if cache.sharding is None:
        return _split_views(cache.kv, cache.spec, num_layers=num_layers)
    dims = "tokens heads row" if cache.spec.layout is CacheLayout.NHD else "heads tokens row"
    dims = f"blocks {dims}" if num_layers is None else f"blocks layers {dims}"
    signature = partition.Signature(arguments=(), results=((dims, dims), (dims, dims)))
    divided = partition.partition_of(cache.spec, cache.sharding, num_layers)
    views: Any = partition.run_on_shares(
        "nvfp4_split_views", _split_views, signature, divided, cache.spec, cache.kv, num_layers=num_layers
    )
    return views


def _split_views(kv: jax.Array, spec: AttentionSpec, *, num_layers: int | None) -> Any:
    pages = kv.reshape(*kv.shape[: 1 if num_layers is None else 2], -1)
    keys, values = ([split_region(pages, spec, region) for region in regions] for regions in spec.regions)
    (k_data, k_scale), (v_data, v_scale) = keys, values
    e4m3 = jnp.float8_e4m3fn
    return (k_data, v_data), (lax.bitcast_convert_type(k_scale, e4m3), lax.bitcast_convert_type(v_scale, e4m3))


def as_one_layer(cache: KVCache) -> KVCache:
    """Returns all layers' pages as one layer's, a free reshape: block `b` of layer `i` becomes `b * num_layers + i`."""
    if cache.num_layers is None:
        return cache
    if cache.num_pages > jnp.iinfo(jnp.int32).max:
        raise KVCacheValueError(
            f"cache: got {cache.num_blocks} blocks of {cache.num_layers} layers, expected at most 2^31 - 1 pages on a"
            " device"
        )
    return with_array(KVCache(cache.kv, cache.spec), cache.kv, cache.spec.cache_shape(cache.num_pages))


def pages_of(cache: KVCache, layer: jax.Array | None, blocks: jax.Array, *, otherwise: int) -> jax.Array:
    """Returns the int32 indices of a layer's blocks in `as_one_layer(cache)`; `otherwise` for invalid ones."""
    exist = (blocks >= 0) & (blocks < cache.num_blocks)
    if cache.num_layers is None or layer is None:
        return jnp.where(exist, blocks, otherwise).astype(jnp.int32)
    exist &= (layer >= 0) & (layer < cache.num_layers)
    pages = jnp.where(exist, blocks, 0).astype(jnp.int32) * cache.num_layers + layer
    return jnp.where(exist, pages, otherwise)


def flat_pages(cache: KVCache) -> jax.Array:
    """Returns the pages flattened, `[num_pages, page_elements]`, a free reshape, in the order of `as_one_layer`."""
    return cache.kv.reshape(cache.num_pages, -1)


def with_flat_pages(cache: KVCache, pages: jax.Array) -> KVCache:
    """Returns the cache with other pages, given as `flat_pages` returns them."""
    return with_array(cache, pages, cache.kv.shape)


def with_array(cache: KVCache, kv: jax.Array, shape: tuple[int, ...]) -> KVCache:
    """Returns the cache with another array, reshaped for free."""
    # Without a layout constraint, XLA on CPU may transpose an axis of size 1 (head, token) and copy the cache.
    row_major = Layout(major_to_minor=tuple(range(len(shape))))
    return dataclasses.replace(cache, kv=with_layout_constraint(kv.reshape(shape), row_major))


def split_region(pages: jax.Array, spec: AttentionSpec, region: PageRegion) -> jax.Array:
    """Returns a region of flat pages `[..., page_elements]`: `[..., token, head, row]`, HND `[..., head, token, row]`.

    The result has the pages' dtype; `row` counts its elements.
    """
    inner, strides = (spec.block_size, spec.num_kv_heads), (region.token_stride, region.head_stride)
    if spec.layout is CacheLayout.HND:
        inner, strides = inner[::-1], strides[::-1]
    base, stride, row = (size // pages.dtype.itemsize for size in (region.base, strides[1], region.row_bytes))
    # The stride between rows: their size, or where K and V are interleaved the size of both.
    start, offset = (base, 0) if stride == row else (0, base)
    # lax instead of indexing, which takes ten times as long to trace.
    rows = lax.slice_in_dim(pages, start, start + inner[0] * inner[1] * stride, axis=-1)
    rows = lax.reshape(rows, (*pages.shape[:-1], *inner, stride))
    return rows if stride == row else lax.slice_in_dim(rows, offset, offset + row, axis=-1)
