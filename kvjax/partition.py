"""Divides a cache among devices, and runs an operation on each device's share.

Blocks and KV heads may be divided over any axes of a mesh. A device's share is a cache: its pages have the layout of
its number of heads, and its blocks are numbered from 0. So code for one device needs no knowledge of others:
`run_on_shares` passes it a share and the matching arguments, under `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.errors import KVCacheValueError
from kvjax.layouts import CacheLayout
from kvjax.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Partition:
    """The mesh axes over which a cache's blocks and KV heads are divided; it is replicated over the others.

    `num_layers` is the cache's, None if its array has no dimension of layers.
    """

    mesh: Mesh | AbstractMesh
    blocks: tuple[str, ...]
    heads: tuple[str, ...]
    num_layers: int | None = None

    @property
    def num_block_shares(self) -> int:
        """Number of shares into which the blocks are divided."""
        return self.size(self.blocks)

    def share(self, spec: AttentionSpec) -> AttentionSpec:
        """Returns the spec of one device's share of a cache of `spec`."""
        shares = self.size(self.heads)
        return spec if shares == 1 else dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads // shares)

    def sharding(self, spec: AttentionSpec) -> NamedSharding:
        """Returns the sharding of the cache's array, without trailing Nones, as jit returns it."""
        head_dim = _head_dim(spec, self.num_layers)
        entries = [_entry(self.blocks)]
        if self.heads and head_dim:
            entries += [None] * (head_dim - 1) + [_entry(self.heads)]
        return NamedSharding(self.mesh, PartitionSpec(*entries if any(entries) else ()))

    def dims(self, spec: AttentionSpec) -> str:
        """Returns the dimensions of the cache's array, as far as they are divided, in the terms of `Signature`."""
        head_dim = _head_dim(spec, self.num_layers) if self.heads else None
        divided = {0: "blocks" if self.blocks else "all", head_dim: "heads"}
        return " ".join(divided.get(dim, "all") for dim in range(1 + (head_dim or 0)))

    def scale_sharding(self, ndim: int) -> NamedSharding:
        """Returns the sharding of a scale that the cache carries; its last dimension is heads or layers."""
        is_per_head = ndim == (1 if self.num_layers is None else 2)
        entries = [*[None] * (ndim - 1), _entry(self.heads)] if is_per_head and self.heads else []
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def restricted_to(self, axes: Sequence[str]) -> Partition:
        """Returns the partition over `axes` only."""
        blocks, heads = (tuple(axis for axis in names if axis in axes) for names in (self.blocks, self.heads))
        return dataclasses.replace(self, blocks=blocks, heads=heads)

    def spec_of(self, dims: str, ndim: int) -> PartitionSpec:
        """Returns the `PartitionSpec` of an array whose first `ndim` dimensions `dims` names; see `Signature`."""
        divided = {"heads": self.heads, "blocks": self.blocks, "sequences": self.blocks}
        return PartitionSpec(*(_entry(divided.get(name, ())) for name in dims.split()[:ndim]))

    def size(self, axes: Sequence[str]) -> int:
        """Number of devices along these axes of the mesh."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


@functools.lru_cache(maxsize=1024)
def partition_of(spec: AttentionSpec, sharding: NamedSharding, num_layers: int | None = None) -> Partition:
    """Returns how `sharding` divides a cache of `spec`, or of `num_layers` layers of it.

    Raises:
      KVCacheValueError: it divides other dimensions than blocks and KV heads, or heads into unequal shares.
    """
    head_dim, ndim = _head_dim(spec, num_layers), len(spec.cache_shape(1, num_layers))
    entries = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    if len(entries) > ndim or any(entry is not None for dim, entry in enumerate(entries) if dim not in (0, head_dim)):
        raise KVCacheValueError(_unsupported(spec, sharding, head_dim, ndim))
    if PartitionSpec.UNCONSTRAINED in entries:
        raise KVCacheValueError(_unsupported(spec, sharding, head_dim, ndim))
    partition = Partition(sharding.mesh, _axes(entries[0]), _axes(entries[head_dim]) if head_dim else (), num_layers)
    if spec.num_kv_heads % (shares := partition.size(partition.heads)):
        raise KVCacheValueError(
            f"sharding: got {shares} devices along {'/'.join(partition.heads)} for num_kv_heads={spec.num_kv_heads},"
            " expected a divisor of it. To replicate heads over more devices than heads, use a mesh of two axes, divide"
            " the heads over one and leave the other out"
        )
    return partition


def _unsupported(spec: AttentionSpec, sharding: NamedSharding, head_dim: int | None, ndim: int) -> str:
    if spec.is_mla:
        return (
            f"sharding: got {sharding.spec} for a cache of latents (MLA) of {ndim} dimensions, expected one that"
            " divides blocks (dimension 0) alone: all query heads read the same latents. To divide the query's heads,"
            " attend inside jax.shard_map over their axis, or with a replicated cache, allocated without sharding"
        )
    if head_dim is None:
        return (
            f"sharding: got {sharding.spec} for a pool of {ndim} dimensions that layers share, expected one that"
            " divides blocks (dimension 0) alone: its pages have no axis of heads. Give each device, under"
            " jax.shard_map, a pool of its own heads (ModelKVConfig.shard, then unify_page_sizes)"
        )
    example = PartitionSpec("data", *[None] * (head_dim - 1), "tensor")
    return (
        f"sharding: got {sharding.spec} for an array of {ndim} dimensions, expected one that divides blocks (dimension"
        f" 0), KV heads (dimension {head_dim}) or both, such as {example}"
    )


def _head_dim(spec: AttentionSpec, num_layers: int | None) -> int | None:
    """Returns the dimension of heads (nominal where pages hold scales); None for a shared pool and for latents."""
    if spec.page_size_padded is not None or spec.is_mla:
        return None
    return len(spec.cache_shape(1, num_layers)) - (3 if spec.layout is CacheLayout.HND else 2)


def _axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes[0] if len(axes) == 1 else axes or None


def local_sharding(
    what: str, kv: jax.Array, spec: AttentionSpec, sharding: NamedSharding | None, num_layers: int | None
) -> tuple[AttentionSpec, NamedSharding | None]:
    """Returns a cache's spec where it is traced, and how it is still divided there, None if it is not divided.

    Everything that determines a sharding is combined here: what the cache declares, or else what its array's type or
    placement shows, without the axes of a surrounding shard_map, which has already divided the cache over them.

    Raises:
      KVCacheValueError: without a declared sharding, the array's is one that no cache has, or is ambiguous.
    """
    if sharding is None:
        if (shown := _array_sharding(kv)) is None:
            return spec, None
        partition = partition_of(spec, shown, num_layers)
        if partition.size(partition.heads) > 1 and not spec.has_head_axis:
            raise KVCacheValueError(
                f"{what}: got an array of {spec.dtype.value!r} divided as {shown.spec} and no sharding, which does not"
                " say whether its pages hold the heads of one device or of all; expected KVCache.allocate(...,"
                " sharding=...), or KVCache(kv, spec, sharding) if each device's pages are those of its own heads"
            )
        return spec, partition.sharding(spec)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return spec, sharding
    partition = partition_of(spec, sharding, num_layers)
    spec = partition.restricted_to(manual).share(spec)
    free = [axis for axis in sharding.mesh.axis_names if axis not in manual]
    return spec, partition.restricted_to(free).sharding(spec) if free else None


def _array_sharding(array: jax.Array) -> NamedSharding | None:
    """Returns the sharding of an array that is divided or on several devices; of a traced array, that of its type."""
    is_traced = isinstance(array, jax.core.Tracer)
    sharding = jax.typeof(array).sharding if is_traced else array.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    is_divided = any(entry is not None for entry in sharding.spec)
    return sharding if is_divided or (not is_traced and sharding.mesh.size > 1) else None


def check_sharding(what: str, kv: jax.Array, sharding: NamedSharding) -> None:
    """Raises `KVCacheValueError` if a cache's concrete array is not divided as the cache declares."""
    same_memory = NamedSharding(sharding.mesh, sharding.spec, memory_kind=kv.sharding.memory_kind)
    if not kv.sharding.is_equivalent_to(same_memory, kv.ndim):
        raise KVCacheValueError(
            f"{what}.kv: got an array on {kv.sharding}, expected {sharding}, as {what}.sharding says: move a divided"
            f" cache with jax.device_put({what}, {what}.shardings)"
        )


def sharding_to_dict(sharding: NamedSharding) -> dict[str, Any]:
    """Returns a cache's sharding as JSON values; `sharding_from_dict` restores it on the same devices."""
    mesh = sharding.mesh
    devices = None if isinstance(mesh, AbstractMesh) else [*mesh.devices.flat]
    return {
        "axes": [[name, size, kind.name] for name, size, kind in zip(*_axes_of(mesh), strict=True)],
        "platform": devices and devices[0].platform,
        "devices": devices and [device.id for device in devices],
        "spec": [*sharding.spec],
    }


def _axes_of(mesh: Mesh | AbstractMesh) -> tuple[Sequence[str], Sequence[int], Sequence[AxisType]]:
    return mesh.axis_names, mesh.axis_sizes, mesh.axis_types


def sharding_from_dict(described: dict[str, Any]) -> NamedSharding:
    """Returns the sharding that `sharding_to_dict` described; over an abstract mesh if its devices are missing."""
    names, sizes, kinds = zip(*described["axes"], strict=True)
    types = tuple(AxisType[kind] for kind in kinds)
    spec = PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in described["spec"]))
    try:
        here = {device.id: device for device in jax.devices(described["platform"])}
        devices = np.array([here[number] for number in described["devices"]]).reshape(sizes)
    except (RuntimeError, KeyError, TypeError):  # no such platform or device, or the mesh was abstract
        return NamedSharding(AbstractMesh(sizes, names, types), spec)
    return NamedSharding(Mesh(devices, names, types), spec)


@dataclasses.dataclass(frozen=True)
class Signature:
    """The dimensions of an operation's arguments and results, which say how they are divided.

    A string such as `"tokens heads head_size"` names an array's dimensions. `heads` and `blocks` are divided as the
    cache is, `sequences` in order among the shares of the blocks; all others are replicated. An array may have fewer
    dimensions than named, such as a scale for all heads, and may be `None`, such as the layer.

    Attributes:
      arguments: of each array after the cache.
      results: of each returned array, as a tree; `CACHE` for the cache's.
      own: maps the arguments to a share's numbering of blocks; called with the share's spec, its first block, its
        number of blocks and the arguments. None if no argument contains block numbers.
    """

    arguments: tuple[str, ...]
    results: Any
    own: Callable[..., tuple[jax.Array, ...]] | None = None


CACHE = "cache"


def run_on_shares(
    what: str,
    function: Callable[..., Any],
    signature: Signature,
    partition: Partition,
    spec: AttentionSpec,
    kv: jax.Array,
    *args: Any,
    **static: Any,
) -> Any:
    """Runs `function(kv, spec, *args, **static)` on each device's share of a cache, without communication.

    Args:
      what: the operation, for messages.
      function: runs on a share. Hashable, as is `static`: equal calls are traced once.
      signature: how `args` and the results are divided.
      partition: the cache's, over axes that no surrounding shard_map has divided.
      spec: the cache's.
      kv: the cache's array.
      args: arrays, numbers or None.
      static: passed on.

    Raises:
      KVCacheValueError: sequences do not divide into equal shares; or, over explicit axes, an argument would need
        communication.
    """
    shares = partition.num_block_shares
    for array, dims in zip(args, signature.arguments, strict=True):
        if array is not None and dims.startswith("sequences") and (size := jnp.shape(array)[0]) % shares:
            raise KVCacheValueError(
                f"{what}: got num_seqs={size} for a cache whose blocks are divided into {shares} shares, expected a"
                f" multiple of {shares}: each share serves num_seqs / {shares} consecutive sequences"
            )
    return _run_on_shares(kv, args, _Divided(what, function, signature, partition, spec, tuple(static.items())))


class _Divided(NamedTuple):
    """The static arguments of `run_on_shares`."""

    what: str
    function: Callable[..., Any]
    signature: Signature
    partition: Partition
    spec: AttentionSpec
    static: tuple[tuple[str, Any], ...]


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _run_on_shares(kv: jax.Array, args: tuple[jax.Array | None, ...], divided: _Divided) -> Any:
    what, function, signature, partition, spec, static = divided
    share, sharding = partition.share(spec), partition.sharding(spec)

    def on_share(kv: jax.Array, *args: Any) -> Any:
        if partition.blocks and signature.own is not None:
            args = signature.own(share, lax.axis_index(partition.blocks) * kv.shape[0], kv.shape[0], *args)
        return function(kv, share, *args, **dict(static))

    context = jax.sharding.get_abstract_mesh()
    mesh = context if dict(context.shape) == dict(sharding.mesh.shape) else sharding.mesh
    kv = _as_typed(what, kv, sharding.spec, mesh, or_whole=False)
    dims_of = zip(args, signature.arguments, strict=True)
    in_specs = [None if x is None else partition.spec_of(dims, x.ndim) for x, dims in dims_of]
    args = tuple(
        None if x is None or wanted is None else _as_typed(what, x, wanted, mesh)
        for x, wanted in zip(args, in_specs, strict=True)
    )
    return jax.shard_map(
        on_share,
        mesh=mesh,
        in_specs=(sharding.spec, *in_specs),
        out_specs=jax.tree.map(
            lambda dims: sharding.spec if dims == CACHE else partition.spec_of(dims, len(dims)), signature.results
        ),
        # Includes axes over which the cache is replicated: a kernel cannot run over axes that XLA partitions.
        axis_names=set(mesh.axis_names) - set(context.manual_axes),
        check_vma=False,
    )(kv, *args)


def check_whole(what: str, array: Any) -> None:
    """Raises `KVCacheValueError` for an array that explicit axes divide."""
    if isinstance(array, jax.Array) and any(jax.typeof(array).sharding.spec):
        raise KVCacheValueError(
            f"{what}: got {jax.typeof(array)}, divided as {jax.typeof(array).sharding.spec}, expected a whole array:"
            " jax.reshard(array, jax.P()) communicates it"
        )


def _as_typed(what: str, array: jax.Array, wanted: PartitionSpec, mesh: Any, *, or_whole: bool = True) -> jax.Array:
    """Returns `array` with the type that shard_map requires over explicit axes; raises if it needs communication."""
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit]
    if not explicit:
        return array
    entries = [_entry(tuple(axis for axis in _axes(entry) if axis in explicit)) for entry in wanted]
    target = PartitionSpec(*entries, *[None] * (array.ndim - len(entries)))
    got = jax.typeof(array).sharding.spec
    if got == target:
        return array
    if not or_whole or any(has not in (None, wants) for has, wants in zip(got, target, strict=True)):
        got_type = f"got {jax.typeof(array)}, divided as {got}"
        if not or_whole:
            raise KVCacheValueError(
                f"{what}: {got_type}, as the cache's array, expected {target}, as its sharding says:"
                " jax.reshard(cache, cache.shardings) moves it there"
            )
        expected = f"{target}, as the shares of the cache take it, or a whole array" if any(target) else "a whole array"
        raise KVCacheValueError(
            f"{what}: {got_type}, expected {expected};"
            f" jax.reshard(array, {target}) communicates it; docs/scaling.md, Explicit axes, shows how each share of"
            " the blocks writes its own tokens without communication"
        )
    return jax.reshard(array, NamedSharding(mesh, target))
