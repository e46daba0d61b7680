"""`KVCache`: the pages of one layer, or of several layers of one spec, as a pytree."""

from __future__ import annotations

import copy
import dataclasses
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import ArrayLike

from kvjax import partition
from kvjax.dtypes import KVCacheDType
from kvjax.errors import KVCacheTypeError, KVCacheValueError, for_torch, kind_of, type_name
from kvjax.layouts import CacheLayout
from kvjax.memory import as_sharding, check_memory, zeroed_pages
from kvjax.scale_values import check_scale, check_scale_type
from kvjax.spec import AttentionSpec, as_int, spec_from_dict, spec_to_dict

SCALES = ("k_scale", "v_scale")


class _ReadOnly[T]:
    """A read-only field of a `KVCache`."""

    def __init__(self, read: Callable[[KVCache], T]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, cache: None, owner: type) -> Self: ...

    @overload
    def __get__(self, cache: KVCache, owner: type) -> T: ...

    def __get__(self, cache: KVCache | None, owner: type) -> Self | T:
        return self if cache is None else self._read(cache)

    def __set__(self, cache: KVCache, value: T) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {self._name!r}")

    def __delete__(self, cache: KVCache) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {self._name!r}")


@dataclasses.dataclass(init=False, eq=False, repr=False)
class KVCache:
    """The paged keys and values of one attention layer, or of `num_layers` layers of one spec.

    A frozen pytree: `kv` and the scales are its leaves, the rest is static, so a cache passes through `jit`, `scan` and
    donation like an array. Operations return a new `KVCache`; donate the old one for writes in place. Operations on a
    donated cache raise `KVCacheValueError`.

    Every operation uses the cache's scales and keeps them in its result. Functions mapped over all leaves apply to the
    scales too: for zeroed pages call `allocate`, not `jax.tree.map(jnp.zeros_like, cache)`.

    In a cache of several layers, a block number means that block in each layer, and operations take the `layer`. In a
    `lax.scan` over layers, carry the cache and pass the layer's number: it is written in place.

    Caches compare and hash by identity; to compare contents, compare the bytes of `kv`.

    A cache that is divided among devices declares the division in `sharding`, because its traced array does not show
    it. Each device holds a cache of its own blocks and heads, with the spec `local_spec`; `kv` is the concatenation of
    these. Inside a `jax.shard_map` over these axes, with `in_specs=cache.partition_specs`, a cache is the device's own
    share, and slots and block numbers count within it.

    Attributes:
      kv: `spec.array_dtype` array of shape `spec.cache_shape(num_blocks, num_layers)`.
      spec: the layout of a layer, with the heads of all devices.
      sharding: how `kv` is divided among the devices of a mesh, as in `allocate`; None without one.
      num_layers: number of layers, dimension 1 of `kv`; None for a cache of one layer without that dimension.
      k_scale: positive float32 decode scale of the keys or latents (`value = stored * scale`): `[]`, or for fp8 keys
        `[num_kv_heads]`; with `num_layers`: `[]`, `[num_layers]` or `[num_layers, num_kv_heads]`. None means 1, without
        a leaf.
      v_scale: the same for the values.
    """

    # Stored in the form to which `jit` flattens a cache, for every layer in each step. The fields read from these.
    __slots__ = ("_leaves", "_static")

    kv: _ReadOnly[jax.Array] = _ReadOnly(lambda cache: cache._leaves[0])
    spec: _ReadOnly[AttentionSpec] = _ReadOnly(lambda cache: cache._static[0])
    sharding: _ReadOnly[NamedSharding | None] = _ReadOnly(lambda cache: cache._static[1])
    num_layers: _ReadOnly[int | None] = _ReadOnly(lambda cache: cache._static[2])
    k_scale: _ReadOnly[jax.Array | None] = _ReadOnly(lambda cache: cache._leaves[1] if len(cache._leaves) > 1 else None)
    v_scale: _ReadOnly[jax.Array | None] = _ReadOnly(lambda cache: cache._leaves[2] if len(cache._leaves) > 1 else None)

    def __init__(
        self,
        kv: jax.Array,
        spec: AttentionSpec,
        sharding: NamedSharding | None = None,
        num_layers: int | None = None,
        k_scale: jax.Array | None = None,
        v_scale: jax.Array | None = None,
    ) -> None:
        has_scales = k_scale is not None or v_scale is not None
        self._leaves: tuple[Any, ...] = (kv, k_scale, v_scale) if has_scales else (kv,)
        self._static: tuple[AttentionSpec, NamedSharding | None, int | None] = (spec, sharding, num_layers)

    @classmethod
    def allocate(
        cls,
        spec: AttentionSpec,
        num_blocks: int,
        *,
        num_layers: int | None = None,
        sharding: Sharding | jax.Device | None = None,
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> KVCache:
        """Returns a cache of `num_blocks` zeroed pages, on the devices of `sharding` (default: JAX's default device).

        With `num_layers`, even 1, the cache has that many layers of `num_blocks` pages each.

        A `NamedSharding` may divide the cache's KV heads, its blocks or both, over any axes of a mesh; it is replicated
        over the others. Operations then run on each device's share, without communication. In caches whose pages hold
        scales the axis of heads is nominal: each device's pages hold its own heads, concatenated along that axis. Pages
        of a shared pool (`page_size_padded`) have no such axis, so a pool can be divided by blocks only.

        `k_scale` and `v_scale` are the cache's decode scales: numbers or arrays of the attributes' shapes, as
        `load_kv_scales` and `calibrate` return for a layer and `KVScales.stack` for several. They are copied to the
        pages' devices, per-head scales divided as the heads are. Default: 1. If the dtype of the keys or values takes
        no scale (`KVCacheDType.takes_scale` of that part), theirs is checked and dropped. Latents (MLA) have one scale,
        `k_scale`; their `v_scale` is dropped.

        Raises:
          KVCacheTypeError, KVCacheValueError: `num_blocks` or `num_layers` is not a positive int, `spec` is not an
            `AttentionSpec`, `sharding` divides other dimensions, or a scale has an invalid type or shape or is not
            between `MIN_SCALE` and `MAX_SCALE`.
          UnsupportedError: `sharding` is in memory that no operation supports.
          KVCacheMemoryError: not enough memory; the message says how much was requested and how many pages fit.
        """
        if not isinstance(spec, AttentionSpec):
            raise KVCacheTypeError(f"spec: got {spec!r} of type {type_name(spec)}, expected an AttentionSpec")
        num_blocks = as_int("num_blocks", num_blocks, least=1)
        if num_layers is not None:
            num_layers = as_int("num_layers", num_layers, least=1)
        scales = [_scale_leaf(*named, spec, num_layers) for named in (("k_scale", k_scale), ("v_scale", v_scale))]
        sharding = as_sharding("sharding", sharding)
        if sharding is not None:
            if not isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
                raise KVCacheTypeError(f"sharding: got {sharding} for several devices, expected a NamedSharding")
            check_memory("sharding", sharding)
        if not isinstance(sharding, NamedSharding):
            kv = zeroed_pages(spec, num_blocks, num_layers, sharding)
            on_device = None if sharding is None else SingleDeviceSharding(next(iter(sharding.device_set)))
            return cls(kv, spec, None, num_layers, *jax.device_put(scales, on_device))
        divided = partition.partition_of(spec, sharding, num_layers)
        if num_blocks % divided.num_block_shares:
            raise KVCacheValueError(
                f"num_blocks: got {num_blocks}, expected a multiple of {divided.num_block_shares}, the number"
                f" of shares in {sharding.spec}"
            )
        declared = divided.sharding(spec)
        kv = zeroed_pages(spec, num_blocks, num_layers, declared)
        scales = [None if x is None else jax.device_put(x, divided.scale_sharding(x.ndim)) for x in scales]
        return cls(kv, spec, declared, num_layers, *scales)

    def __repr__(self) -> str:
        fields = [_shown_array(self.kv), repr(self.spec)]
        fields += [] if self.sharding is None else [f"sharding={self.sharding!r}"]
        fields += [] if self.num_layers is None else [f"num_layers={self.num_layers}"]
        fields += [f"{what}={_shown_array(scale)}" for what, scale in self._scales()]
        return f"KVCache({', '.join(fields)})"

    def __copy__(self) -> KVCache:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        # jax does not copy a donated array, which has no data.
        return _unflatten(self._static, tuple(x if _is_donated(x) else copy.deepcopy(x, memo) for x in self._leaves))

    def __reduce__(self) -> Any:
        self._check_not_donated("cache")
        if self.sharding is not None and not isinstance(self.sharding.mesh, AbstractMesh):
            raise KVCacheTypeError(
                f"pickle: got a cache that is divided among devices as {self.sharding.spec}, expected one on one"
                " device: a pickle does not record devices. Pickle jax.device_get(cache.kv), cache.spec,"
                " cache.num_layers and the scales, and restore it with an equal sharding:"
                " KVCache(jax.device_put(kv, sharding), spec, sharding, num_layers, k_scale, v_scale)"
            )
        return KVCache, (self.kv, *self._static, *self._leaves[1:])

    def _scales(self) -> list[tuple[str, Any]]:
        """Returns the scales that are not None, with their names."""
        return [(what, scale) for what in SCALES if (scale := getattr(self, what)) is not None]

    @property
    def shardings(self) -> KVCache | None:
        """The leaves' shardings, as a `KVCache` that `jax.device_put` takes; None without a mesh."""
        if self.sharding is None:
            return None
        divided = partition.partition_of(self.spec, self.sharding, self.num_layers)
        scales: dict[str, Any] = {what: divided.scale_sharding(np.ndim(scale)) for what, scale in self._scales()}
        pages: Any = self.sharding
        return dataclasses.replace(self, kv=pages, **scales)

    @property
    def partition_specs(self) -> KVCache:
        """The leaves' `PartitionSpec`s, as a `KVCache` that `jax.shard_map` takes."""
        if (shardings := self.shardings) is None:
            return jax.tree.map(lambda _: PartitionSpec(), self)
        return jax.tree.map(lambda sharding: sharding.spec, shardings)

    @property
    def local_spec(self) -> AttentionSpec:
        """The spec of one device's share: `spec` with its number of heads."""
        if self.sharding is None:
            return self.spec
        return partition.partition_of(self.spec, self.sharding, self.num_layers).share(self.spec)

    @property
    def num_blocks(self) -> int:
        """Pages of a layer."""
        return self.kv.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages of all layers."""
        return self.num_blocks * (self.num_layers or 1)

    @property
    def num_slots(self) -> int:
        """Tokens that the pages of a layer hold."""
        return self.num_blocks * self.spec.block_size

    def check(self, what: str = "cache") -> None:
        """Raises `KVCacheTypeError` or `KVCacheValueError` if `kv` does not match `spec` and `sharding`.

        Also checks the types and shapes of scales. `what` names the cache in the message.
        """
        if not isinstance(self.kv, jax.Array):
            raise KVCacheTypeError(f"{what}.kv: got {kind_of(self.kv)}, expected a jax.Array{for_torch(self.kv)}")
        self._check_not_donated(what)
        if self.kv.dtype != self.spec.array_dtype:
            raise KVCacheTypeError(
                f"{what}.kv: got dtype {self.kv.dtype}, expected {self.spec.array_dtype} for a cache of dtype"
                f" {self.spec.dtype.value!r}"
            )
        spec = self.spec if self.sharding is None else local_view(self).spec
        num_blocks, num_layers = self.kv.shape[0] if self.kv.ndim else 0, self.num_layers
        expected = spec.cache_shape(num_blocks, num_layers)
        if self.kv.shape != expected:
            [other] = set(CacheLayout) - {spec.layout}
            other_spec = spec if spec.is_mla else dataclasses.replace(spec, layout=other)
            fits_other = other_spec.cache_shape(num_blocks, num_layers) == self.kv.shape
            hint = f" (the shape is that of layout={other.value!r})" if fits_other else ""
            if num_layers is None and self.kv.shape[2:] == expected[1:]:
                hint = (
                    f" (it has one dimension more: a cache of several layers is KVCache.allocate(..., num_layers=...),"
                    f" an array [num_blocks, num_layers, {', '.join(map(str, expected[1:]))}])"
                )
            if spec != self.spec:
                hint += f" inside a shard_map over axes of {what}.sharding, whose in_specs have to be its spec"
            raise KVCacheValueError(
                f"{what}.kv: got shape {self.kv.shape}, expected [num_blocks, {', '.join(map(str, expected[1:]))}]"
                f" for dtype {spec.dtype.value!r} and layout {spec.layout.value!r}{hint}"
            )
        for name, scale in self._scales():
            check_scale_type(f"{what}.{name}", scale)
            check_scale_shape(f"{what}.{name}", scale, spec, num_layers)
        if self.sharding is not None and not isinstance(self.kv, jax.core.Tracer):
            partition.check_sharding(what, self.kv, self.sharding)
        if self.sharding is None and not self.spec.has_head_axis:
            local_view(self, what)  # raises if the array is divided by heads

    def _check_not_donated(self, what: str) -> None:
        for name, array in (("kv", self.kv), *self._scales()):
            if _is_donated(array):
                raise KVCacheValueError(
                    f"{what}.{name}: got an array that was donated to an earlier call, expected the one that call"
                    " returned: `cache = write(key, value, cache, slot_mapping)`"
                )


def _serialize_static(static: Sequence[Any]) -> bytes:
    """Serializes the static part of a cache for `jax.export`."""
    spec, sharding, num_layers = static
    divided = None if sharding is None else partition.sharding_to_dict(sharding)
    return json.dumps([spec_to_dict(spec), divided, num_layers]).encode()


def _deserialize_static(serialized: bytes) -> tuple[Any, ...]:
    spec, divided, num_layers = json.loads(serialized)
    sharding = None if divided is None else partition.sharding_from_dict(divided)
    return spec_from_dict(spec), sharding, num_layers


# A step flattens and unflattens a cache per layer: avoid Python calls and the constructor.
_new = object.__new__
_flatten = operator.attrgetter("_leaves", "_static")


def _flatten_with_keys(cache: KVCache) -> Any:
    leaves, static = _flatten(cache)
    return [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in zip(("kv", *SCALES), leaves, strict=False)], static


def _unflatten(static: Any, leaves: Any) -> KVCache:
    cache = _new(KVCache)
    cache._leaves = leaves
    cache._static = static
    return cache


jax.tree_util.register_pytree_with_keys(KVCache, _flatten_with_keys, _unflatten, _flatten)
export.register_pytree_node_serialization(
    KVCache,
    serialized_name="kvjax.KVCache",
    serialize_auxdata=_serialize_static,
    deserialize_auxdata=_deserialize_static,
    from_children=lambda static, leaves: _unflatten(static, tuple(leaves)),
)


def _is_donated(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted()


def _shown_array(array: Any) -> str:
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    text = repr(array) if shape is None or dtype is None else f"{dtype}[{','.join(map(str, shape))}]"
    return text + (" (donated)" if _is_donated(array) else "")


def _part_of(what: str, spec: AttentionSpec) -> KVCacheDType:
    """Returns the dtype of the keys or, for a name that ends in "v_scale", of the values."""
    return spec.parts[what.endswith("v_scale")]


def _scale_shapes(part: KVCacheDType, spec: AttentionSpec, num_layers: int | None) -> dict[tuple[int, ...], str]:
    """Returns the valid shapes of a scale of keys or of values, each with its name for messages."""
    layers = () if num_layers is None else (num_layers,)
    names = [] if num_layers is None else [f"num_layers={num_layers}"]
    shapes: dict[tuple[int, ...], str] = {(): "a scalar"} | ({layers: f"[{names[0]}]"} if names else {})
    if part.info.takes_head_scales and not spec.is_mla:
        shapes[*layers, spec.num_kv_heads] = f"[{', '.join([*names, f'num_kv_heads={spec.num_kv_heads}'])}]"
    return shapes


def check_scale_shape(what: str, scale: Any, spec: AttentionSpec, num_layers: int | None = None) -> None:
    """Raises `KVCacheValueError` if a scale has an invalid shape; `what` ends in "v_scale" for one of values."""
    if np.shape(scale) not in (shapes := _scale_shapes(_part_of(what, spec), spec, num_layers)):
        raise KVCacheValueError(
            f"{what}: got shape {np.shape(scale)}, expected {' or '.join(shapes.values())} for dtype"
            f" {spec.dtype.value!r}"
        )


def _scale_leaf(what: str, scale: Any, spec: AttentionSpec, num_layers: int | None) -> jax.Array | None:
    """Returns a scale as a leaf of a cache; None if it has none."""
    if scale is None:
        return None
    (check_scale_type if isinstance(scale, jax.core.Tracer) else check_scale)(what, scale)
    if not _part_of(what, spec).takes_scale or (spec.is_mla and what == "v_scale"):
        return None
    check_scale_shape(what, scale, spec, num_layers)
    return jnp.array(scale, jnp.float32)  # a copy, because it is donated with the cache


def local_view(cache: KVCache, what: str = "cache") -> KVCache:
    """Returns a checked cache with the spec and sharding that it has where it is traced; see `local_sharding`.

    Raises:
      KVCacheValueError: the array has a sharding that no cache has, or an ambiguous one.
    """
    spec, sharding = partition.local_sharding(what, cache.kv, cache.spec, cache.sharding, cache.num_layers)
    if spec is cache.spec and sharding is cache.sharding:
        return cache
    return dataclasses.replace(cache, spec=spec, sharding=sharding)


def without_scales(cache: KVCache) -> KVCache:
    """Returns the cache without scales, as implementations take it: they get the call's scales as arguments."""
    return KVCache(cache.kv, *cache._static) if len(cache._leaves) > 1 else cache
