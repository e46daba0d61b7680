"""`KVCache`: one layer's pages on a device, as a pytree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, Sharding

from kvjax import partition
from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVQuantMode
from kvjax.errors import KVCacheTypeError, KVCacheValueError
from kvjax.layouts import CacheLayout
from kvjax.memory import zeroed_pages
from kvjax.pages import PageRegion
from kvjax.spec import AttentionSpec


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The paged keys and values of one attention layer.

    A frozen pytree: `kv` is its one leaf, `spec` and `sharding` are static, so a cache passes through `jit`, `scan` and
    donation as an array does. Operations return a new `KVCache`; donate the old one to have it written in place. What
    takes the old one apart after that, as a call of a jitted function does, raises `KVCacheValueError`.

    A cache that is divided among devices says so in `sharding`, for under `jit` its array does not. Each device holds a
    cache of its own blocks and heads, of `local_spec`: `kv` is those side by side. Inside a `jax.shard_map` over these
    axes, with `in_specs=cache.sharding.spec`, a cache is the device's own, and so are slots and block numbers there.

    Attributes:
      kv: `spec.array_dtype` array of shape `spec.cache_shape(num_blocks)`.
      spec: the layer's layout, with the heads of all devices together.
      sharding: how `kv` is divided among the devices of a mesh, as `allocate` takes it; None without one.
    """

    kv: jax.Array
    spec: AttentionSpec
    sharding: NamedSharding | None = None

    @classmethod
    def allocate(cls, spec: AttentionSpec, num_blocks: int, *, sharding: Sharding | None = None) -> KVCache:
        """A cache of `num_blocks` zeroed pages, placed by `sharding` (default: JAX's default device).

        A `NamedSharding` may divide the cache's KV heads, its blocks or both, over any axes of a mesh; over the others
        it is repeated. Operations then run on each device's share, without communication. NVFP4 caches have an axis of
        heads in name only: the pages of a device are those of its heads, and lie side by side along that axis. Pages of
        a shared pool (`page_size_padded`) hold no such axis, so a pool may be divided by blocks alone.

        Raises:
          KVCacheTypeError, KVCacheValueError: `num_blocks` is no positive int, `spec` no `AttentionSpec`, or `sharding`
            divides the cache in another way.
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
        if not isinstance(sharding, NamedSharding):
            if isinstance(sharding, Sharding) and sharding.num_devices > 1:
                raise KVCacheTypeError(f"sharding: got {sharding} for several devices, expected a NamedSharding")
            return cls(zeroed_pages(spec, num_blocks, sharding), spec)
        divided = partition.partition_of(spec, sharding)
        if num_blocks % divided.num_block_shares:
            raise KVCacheValueError(
                f"num_blocks: got {num_blocks}, expected a multiple of {divided.num_block_shares}, into which"
                f" {sharding.spec} divides them"
            )
        placed = divided.sharding(spec)
        memory = NamedSharding(placed.mesh, placed.spec, memory_kind=sharding.memory_kind)
        return cls(zeroed_pages(spec, num_blocks, memory), spec, placed)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """For `jax.tree_util`: the leaf with its name, and what is static."""
        [kv], static = self.tree_flatten()
        return ((jax.tree_util.GetAttrKey("kv"), kv),), static

    def tree_flatten(self) -> tuple[Any, Any]:
        """The same without the name. Raises `KVCacheValueError` if the cache was donated."""
        # jit would raise first, and say only that some array has been deleted.
        check_not_donated("cache", self.kv)
        return (self.kv,), (self.spec, self.sharding)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> KVCache:
        """The reverse, of whatever leaf."""
        return cls(*leaves, *static)

    @property
    def local_spec(self) -> AttentionSpec:
        """The spec of what one device holds: `spec` with its share of the heads."""
        return self.spec if self.sharding is None else partition.partition_of(self.spec, self.sharding).share(self.spec)

    @property
    def num_blocks(self) -> int:
        """Pages in this cache."""
        return self.kv.shape[0]

    @property
    def num_slots(self) -> int:
        """Tokens that all pages hold together."""
        return self.num_blocks * self.spec.block_size

    def check(self, what: str = "cache") -> None:
        """Raises `KVCacheTypeError` or `KVCacheValueError` where `kv` is not what `spec` and `sharding` describe.

        `what` is the name of this cache in the message.
        """
        if not isinstance(self.kv, jax.Array):
            raise KVCacheTypeError(f"{what}.kv: got a {type(self.kv).__name__}, expected a jax.Array")
        check_not_donated(what, self.kv)
        if self.kv.dtype != self.spec.array_dtype:
            raise KVCacheTypeError(
                f"{what}.kv: got dtype {self.kv.dtype}, expected {self.spec.array_dtype} for {self.spec}"
            )
        spec = self.spec
        if self.sharding is not None:
            spec, _ = partition.within_shard_map(spec, self.sharding)
        expected = spec.cache_shape(self.kv.shape[0] if self.kv.ndim else 0)
        if self.kv.shape != expected:
            [other] = set(CacheLayout) - {spec.layout}
            fits_other = dataclasses.replace(spec, layout=other).cache_shape(expected[0]) == self.kv.shape
            hint = f" (the shape is that of layout={other.value!r})" if fits_other else ""
            if spec != self.spec:
                hint += f" inside a shard_map over axes of {what}.sharding, whose in_specs have to be its spec"
            raise KVCacheValueError(
                f"{what}.kv: got shape {self.kv.shape}, expected [num_blocks, {', '.join(map(str, expected[1:]))}]"
                f" for {spec}{hint}"
            )
        if self.sharding is not None and not isinstance(self.kv, jax.core.Tracer):
            partition.check_sharding(what, self.kv, self.sharding)
        if self.sharding is None and not self.spec.has_head_axis:
            as_seen_here(self, what)  # refuses what shows that it is divided by heads


def check_not_donated(what: str, kv: Any) -> None:
    """Raises `KVCacheValueError` where `kv`, of a cache named `what`, is an array that is not there any more."""
    if isinstance(kv, jax.Array) and not isinstance(kv, jax.core.Tracer) and kv.is_deleted():
        raise KVCacheValueError(
            f"{what}.kv: got an array that was donated to an earlier call, expected the one that call returned:"
            " `cache = write(key, value, cache, slot_mapping)`"
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
    cache = as_seen_here(cache)
    if cache.sharding is None:
        return _split_views(cache.kv, cache.spec)
    dims = "blocks tokens heads row" if cache.spec.layout is CacheLayout.NHD else "blocks heads tokens row"
    signature = partition.Signature(arguments=(), results=((dims, dims), (dims, dims)))
    views: Any = partition.run_on_shares(
        "nvfp4_split_views", _split_views, signature, cache.spec, cache.sharding, cache.kv
    )
    return views


def _split_views(kv: jax.Array, spec: AttentionSpec) -> Any:
    pages = kv.reshape(kv.shape[0], -1)
    keys, values = ([split_region(pages, spec, region) for region in regions] for regions in spec.regions)
    (k_data, k_scale), (v_data, v_scale) = keys, values
    e4m3 = jnp.float8_e4m3fn
    return (k_data, v_data), (lax.bitcast_convert_type(k_scale, e4m3), lax.bitcast_convert_type(v_scale, e4m3))


def as_seen_here(cache: KVCache, what: str = "cache") -> KVCache:
    """A checked cache as operations take it at the place that is being traced: it has the spec of its array there.

    Its sharding is over the axes that no shard_map around it has divided yet; one whose maker gave none is that which
    the array shows.

    Raises:
      KVCacheValueError: the array shows a sharding that no cache has, or that may mean two things.
    """
    if cache.sharding is not None:
        return KVCache(cache.kv, *partition.within_shard_map(cache.spec, cache.sharding))
    if (shown := partition.shown_sharding(cache.kv)) is None:
        return cache
    divided = partition.partition_of(cache.spec, shown)
    if divided.size(divided.heads) > 1 and not cache.spec.has_head_axis:
        raise KVCacheValueError(
            f"{what}: got an NVFP4 array divided as {shown.spec} and no sharding, which leaves open whether its pages"
            " hold the heads of one device or of all; expected KVCache.allocate(..., sharding=...), or if each device's"
            " pages are those of its own heads KVCache(kv, spec, sharding)"
        )
    return KVCache(cache.kv, cache.spec, divided.sharding(cache.spec))


def flat_pages(cache: KVCache) -> jax.Array:
    """The cache with each page flat: `[num_blocks, page_elements]`, a free reshape."""
    return cache.kv.reshape(cache.num_blocks, -1)


def with_flat_pages(cache: KVCache, pages: jax.Array) -> KVCache:
    """The cache whose pages, as `flat_pages` gives them, are `pages`."""
    # Without a layout, XLA on CPU may move an axis of one (head, token) outwards and copy the cache to move it back.
    row_major = Layout(major_to_minor=tuple(range(cache.kv.ndim)))
    return dataclasses.replace(cache, kv=with_layout_constraint(pages.reshape(cache.kv.shape), row_major))


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
