"""`KVCache`: one layer's pages on a device, as a pytree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Sharding

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVQuantMode
from kvjax.errors import KVCacheTypeError, KVCacheValueError
from kvjax.layouts import CacheLayout
from kvjax.memory import zeroed_pages
from kvjax.pages import PageRegion
from kvjax.spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The paged keys and values of one attention layer.

    A frozen pytree: `kv` is its one leaf, `spec` is static, so a cache passes through `jit`, `scan` and donation as an
    array does. Operations return a new `KVCache`; donate the old one to have it written in place.

    Attributes:
      kv: `spec.array_dtype` array of shape `spec.cache_shape(num_blocks)`.
      spec: the layer's layout.
    """

    kv: jax.Array
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})

    @classmethod
    def allocate(cls, spec: AttentionSpec, num_blocks: int, *, sharding: Sharding | None = None) -> KVCache:
        """A cache of `num_blocks` zeroed pages, placed by `sharding` (default: JAX's default device).

        Sharded over the head axis, an unquantized or fp8 cache is written and read without communication. An NVFP4
        page, like a shared pool, has no such axis in memory: give each device, under `jax.shard_map`, a cache of the
        heads it holds.

        Raises:
          KVCacheTypeError, KVCacheValueError: `num_blocks` is no positive int, or `spec` no `AttentionSpec`.
          KVCacheMemoryError: there is not enough memory; says how much was asked for, and how many pages would fit.
        """
        if not isinstance(spec, AttentionSpec):
            raise KVCacheTypeError(f"spec: got {spec!r} of type {type(spec).__name__}, expected an AttentionSpec")
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int):
            raise KVCacheTypeError(
                f"num_blocks: got {num_blocks!r} of type {type(num_blocks).__name__}, expected an int"
            )
        if num_blocks <= 0:
            raise KVCacheValueError(f"num_blocks: got {num_blocks}, expected a positive int")
        return cls(zeroed_pages(spec, num_blocks, sharding), spec)

    @property
    def num_blocks(self) -> int:
        """Pages in this cache."""
        return self.kv.shape[0]

    @property
    def num_slots(self) -> int:
        """Tokens that all pages hold together."""
        return self.num_blocks * self.spec.block_size

    def check(self, what: str = "cache") -> None:
        """Raises `KVCacheTypeError` or `KVCacheValueError` where `kv` is not the array that `spec` describes.

        `what` is the name of this cache in the message.
        """
        if not isinstance(self.kv, jax.Array):
            raise KVCacheTypeError(f"{what}.kv: got a {type(self.kv).__name__}, expected a jax.Array")
        if not isinstance(self.kv, jax.core.Tracer) and self.kv.is_deleted():
            raise KVCacheValueError(
                f"{what}.kv: got an array that was donated to an earlier call, expected the one that call returned:"
                " `cache = write(key, value, cache, slot_mapping)`"
            )
        if self.kv.dtype != self.spec.array_dtype:
            raise KVCacheTypeError(
                f"{what}.kv: got dtype {self.kv.dtype}, expected {self.spec.array_dtype} for {self.spec}"
            )
        expected = self.spec.cache_shape(self.kv.shape[0] if self.kv.ndim else 0)
        if self.kv.shape != expected:
            [other] = set(CacheLayout) - {self.spec.layout}
            fits_other = dataclasses.replace(self.spec, layout=other).cache_shape(expected[0]) == self.kv.shape
            hint = f" (the shape is that of layout={other.value!r})" if fits_other else ""
            raise KVCacheValueError(
                f"{what}.kv: got shape {self.kv.shape}, expected [num_blocks, {', '.join(map(str, expected[1:]))}]"
                f" for {self.spec}{hint}"
            )


def nvfp4_kv_cache_full_dim(head_size: int) -> int:
    """Bytes of one head of one token in an NVFP4 cache, data and block scales: `head_size / 2 + head_size / 16`.

    Raises:
      KVCacheValueError: `head_size` is not a positive multiple of 16.
    """
    if head_size <= 0 or head_size % NVFP4_BLOCK_SIZE:
        raise KVCacheValueError(f"head_size: got {head_size}, expected a positive multiple of {NVFP4_BLOCK_SIZE}")
    return head_size // 2 + head_size // NVFP4_BLOCK_SIZE


def nvfp4_split_views(
    cache: KVCache,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The four regions of an NVFP4 cache: `((k_data, v_data), (k_scale, v_scale))`.

    Data is uint8 `[num_blocks, block_size, num_kv_heads, head_size / 2]`, scales are float8_e4m3fn
    `[num_blocks, block_size, num_kv_heads, head_size / 16]` (HND: heads before tokens), as they are stored: V scales of
    a swizzled cache come swizzled. JAX has no views: outside `jit` each is a copy.

    Raises:
      KVCacheValueError, KVCacheTypeError: the cache is not an NVFP4 one, or was donated.
    """
    if not isinstance(cache, KVCache):
        raise KVCacheTypeError(f"cache: got a {type(cache).__name__}, expected a KVCache")
    if cache.spec.quant_mode is not KVQuantMode.NVFP4:
        raise KVCacheValueError(f"nvfp4_split_views: got a {cache.spec.dtype.value!r} cache, expected 'nvfp4'")
    cache.check()
    pages = flat_pages(cache)
    keys, values = ([split_region(pages, cache.spec, region) for region in regions] for regions in cache.spec.regions)
    (k_data, k_scale), (v_data, v_scale) = keys, values
    e4m3 = jnp.float8_e4m3fn
    return (k_data, v_data), (lax.bitcast_convert_type(k_scale, e4m3), lax.bitcast_convert_type(v_scale, e4m3))


def flat_pages(cache: KVCache) -> jax.Array:
    """The cache with each page flat: `[num_blocks, page_elements]`, a free reshape."""
    return cache.kv.reshape(cache.num_blocks, -1)


def with_flat_pages(cache: KVCache, pages: jax.Array) -> KVCache:
    """The cache whose pages, as `flat_pages` gives them, are `pages`."""
    # Without a layout, XLA on CPU may move an axis of one (head, token) outwards and copy the cache to move it back.
    row_major = Layout(major_to_minor=tuple(range(cache.kv.ndim)))
    return KVCache(with_layout_constraint(pages.reshape(cache.kv.shape), row_major), cache.spec)


def split_region(pages: jax.Array, spec: AttentionSpec, region: PageRegion) -> jax.Array:
    """One region of flat pages `[..., page_elements]`, as `[..., token, head, row]` (HND: `[..., head, token, row]`).

    The result has the pages' dtype, and the row counts elements of it.
    """
    inner, strides = (spec.block_size, spec.num_kv_heads), (region.token_stride, region.head_stride)
    if spec.layout is CacheLayout.HND:
        inner, strides = inner[::-1], strides[::-1]
    base, stride, row = (size // pages.dtype.itemsize for size in (region.base, strides[1], region.row_bytes))
    # Rows lie stride apart: their own size, or in a page that holds K and V side by side the size of both.
    start, offset = (base, 0) if stride == row else (0, base)
    rows = pages[..., start : start + inner[0] * inner[1] * stride].reshape(*pages.shape[:-1], *inner, stride)
    return rows[..., offset : offset + row]
