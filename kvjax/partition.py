"""How a cache is divided among devices, and the one way in which an operation runs on each device's share of it.

Blocks may be divided, and KV heads, over any axes of a mesh. A device's share is a cache of its own: of its heads, laid
out as a page of so many heads is, and of its blocks, numbered from 0. So nothing that works on one device needs to know
of others: `run_on_shares` hands it a share and the arguments that belong to it, under `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

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
    """The axes of a mesh over which a cache's blocks and its KV heads are divided; over its others it is repeated.

    `num_layers` is the cache's: how many layers each of its blocks holds, `None` where its array has no such dimension.
    """

    mesh: Mesh | AbstractMesh
    blocks: tuple[str, ...]
    heads: tuple[str, ...]
    num_layers: int | None = None

    @property
    def num_block_shares(self) -> int:
        """Into how many shares the blocks are divided."""
        return self.size(self.blocks)

    def share(self, spec: AttentionSpec) -> AttentionSpec:
        """The spec of one device's share of a cache of `spec`."""
        shares = self.size(self.heads)
        return spec if shares == 1 else dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads // shares)

    def sharding(self, spec: AttentionSpec) -> NamedSharding:
        """The sharding of the cache's array, as short as jit returns it."""
        head_dim = _head_dim(spec, self.num_layers)
        entries = [_entry(self.blocks)]
        if self.heads and head_dim:
            entries += [None] * (head_dim - 1) + [_entry(self.heads)]
        return NamedSharding(self.mesh, PartitionSpec(*entries if any(entries) else ()))

    def scale_sharding(self, ndim: int) -> NamedSharding:
        """The sharding of a scale that the cache carries, of so many dimensions: the last counts heads, or layers."""
        is_per_head = ndim == (1 if self.num_layers is None else 2)
        entries = [*[None] * (ndim - 1), _entry(self.heads)] if is_per_head and self.heads else []
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def divided_among(self, axes: Sequence[str]) -> Partition:
        """What of this is divided over `axes`; over all others the cache is whole."""
        blocks, heads = (tuple(axis for axis in names if axis in axes) for names in (self.blocks, self.heads))
        return dataclasses.replace(self, blocks=blocks, heads=heads)

    def spec_of(self, dims: str, ndim: int) -> PartitionSpec:
        """How an array is divided whose first `ndim` dimensions `dims` names; see `Signature`."""
        divided = {"heads": self.heads, "blocks": self.blocks, "sequences": self.blocks}
        return PartitionSpec(*(_entry(divided.get(name, ())) for name in dims.split()[:ndim]))

    def size(self, axes: Sequence[str]) -> int:
        """Devices along these axes of the mesh."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


@functools.lru_cache(maxsize=1024)
def partition_of(spec: AttentionSpec, sharding: NamedSharding, num_layers: int | None = None) -> Partition:
    """How `sharding` divides a cache of `spec`, or of `num_layers` layers of it.

    Raises:
      KVCacheValueError: it divides something else than blocks and KV heads, or heads into no equal shares.
    """
    head_dim, ndim = _head_dim(spec, num_layers), len(spec.cache_shape(1, num_layers))
    entries = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    if len(entries) > ndim or any(entry is not None for dim, entry in enumerate(entries) if dim not in (0, head_dim)):
        raise KVCacheValueError(_unsupported(sharding, head_dim, ndim))
    if PartitionSpec.UNCONSTRAINED in entries:
        raise KVCacheValueError(_unsupported(sharding, head_dim, ndim))
    partition = Partition(sharding.mesh, _axes(entries[0]), _axes(entries[head_dim]) if head_dim else (), num_layers)
    if spec.num_kv_heads % (shares := partition.size(partition.heads)):
        raise KVCacheValueError(
            f"sharding: got {shares} devices along {'/'.join(partition.heads)} for num_kv_heads={spec.num_kv_heads},"
            " expected a divisor of it. Where there are more devices than heads several hold the same ones: make the"
            " mesh of two axes, divide the heads over one and leave the other out"
        )
    return partition


def _unsupported(sharding: NamedSharding, head_dim: int | None, ndim: int) -> str:
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
    """Which dimension of the array counts heads, where pages hold scales in name only; None in a shared pool."""
    if spec.page_size_padded is not None:
        return None
    return len(spec.cache_shape(1, num_layers)) - (3 if spec.layout is CacheLayout.HND else 2)


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes of the mesh in an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes[0] if len(axes) == 1 else axes or None


def within_shard_map(
    spec: AttentionSpec, sharding: NamedSharding, num_layers: int | None
) -> tuple[AttentionSpec, NamedSharding | None]:
    """What a cache of `spec`, `sharding` and `num_layers` is at the place that is being traced.

    A shard_map around it has divided everything over its axes already: the cache there is of the spec returned, and is
    divided as the sharding returned says, over the mesh's other axes; None where there are none.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return spec, sharding
    whole = partition_of(spec, sharding, num_layers)
    free = [axis for axis in sharding.mesh.axis_names if axis not in manual]
    spec = whole.divided_among(manual).share(spec)
    return spec, whole.divided_among(free).sharding(spec) if free else None


def shown_sharding(array: jax.Array) -> NamedSharding | None:
    """How an array shows that it is divided, or that several devices have it; one that is traced by its type alone."""
    is_traced = isinstance(array, jax.core.Tracer)
    sharding = jax.typeof(array).sharding if is_traced else array.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    is_divided = any(entry is not None for entry in sharding.spec)
    return sharding if is_divided or (not is_traced and sharding.mesh.size > 1) else None


def check_sharding(what: str, kv: jax.Array, sharding: NamedSharding) -> None:
    """Raises `KVCacheValueError` where a cache's array, not a traced one, is not divided as its cache says."""
    same_memory = NamedSharding(sharding.mesh, sharding.spec, memory_kind=kv.sharding.memory_kind)
    if not kv.sharding.is_equivalent_to(same_memory, kv.ndim):
        raise KVCacheValueError(
            f"{what}.kv: got an array on {kv.sharding}, expected {sharding}, as {what}.sharding says: move a cache that"
            f" is divided among devices with jax.device_put({what}, {what}.shardings)"
        )


def sharding_to_dict(sharding: NamedSharding) -> dict[str, Any]:
    """A cache's sharding as JSON has it; `sharding_from_dict` makes an equal one of it where its devices are."""
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
    """The sharding that `sharding_to_dict` described; over an abstract mesh where its devices are not here."""
    names, sizes, kinds = zip(*described["axes"], strict=True)
    types = tuple(AxisType[kind] for kind in kinds)
    spec = PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in described["spec"]))
    try:
        here = {device.id: device for device in jax.devices(described["platform"])}
        devices = np.array([here[number] for number in described["devices"]]).reshape(sizes)
    except (RuntimeError, KeyError, TypeError):  # no such platform, no such device, or an abstract mesh to begin with
        return NamedSharding(AbstractMesh(sizes, names, types), spec)
    return NamedSharding(Mesh(devices, names, types), spec)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Which dimensions of an operation's arguments and results are divided as the cache is.

    An array's dimensions are named in a string such as `"tokens heads head_size"`. Divided are `heads`, `blocks`, and
    `sequences`: in order, among the shares of the blocks. By any other name a device has the whole. An array may have
    only the first of the dimensions named, as a scale has, which is for all heads or for each; and for an array there
    may be `None`, as for the layer where a cache holds one.

    Attributes:
      arguments: of each array after the cache.
      results: of each array that is returned, in the tree in which it is; `CACHE` for the cache's.
      own: makes of the arguments those of a share of the blocks; called with the share's spec, its first block and how
        many it has, and the arguments. None where they name no blocks.
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
    """`function(kv, spec, *args, **static)` on each device's share of a cache, without communication.

    Args:
      what: the operation, for messages.
      function: what runs on a share. Like `static` it is hashable, for each is traced once.
      signature: what of `args` and of the results belongs to a share.
      partition: the cache's, over axes that no shard_map around has divided already.
      spec: the cache's.
      kv: the cache's array.
      args: arrays, numbers or None.
      static: passed on.

    Raises:
      KVCacheValueError: sequences that divide into no equal shares; or, over explicit axes, an argument that would have
        to be communicated.
    """
    shares = partition.num_block_shares
    for array, dims in zip(args, signature.arguments, strict=True):
        if dims.startswith("sequences") and (size := jnp.shape(array)[0]) % shares:
            raise KVCacheValueError(
                f"{what}: got num_seqs={size} for a cache whose blocks are divided into {shares} shares, expected a"
                f" multiple of {shares}: the first num_seqs / {shares} sequences read from the first share, and so on"
            )
    return _run_on_shares(kv, args, what, function, signature, partition, spec, tuple(static.items()))


@functools.partial(jax.jit, static_argnums=range(2, 8), inline=True)
def _run_on_shares(
    kv: jax.Array,
    args: tuple[jax.Array | None, ...],
    what: str,
    function: Callable[..., Any],
    signature: Signature,
    partition: Partition,
    spec: AttentionSpec,
    static: tuple[tuple[str, Any], ...],
) -> Any:
    share, sharding = partition.share(spec), partition.sharding(spec)

    def on_a_share(kv: jax.Array, *args: Any) -> Any:
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
        on_a_share,
        mesh=mesh,
        in_specs=(sharding.spec, *in_specs),
        out_specs=jax.tree.map(
            lambda dims: sharding.spec if dims == CACHE else partition.spec_of(dims, len(dims)), signature.results
        ),
        # Every other axis too, though the cache is repeated over it: over an axis left to XLA no kernel can run.
        axis_names=set(mesh.axis_names) - set(context.manual_axes),
        check_vma=False,
    )(kv, *args)


def _as_typed(what: str, array: jax.Array, wanted: PartitionSpec, mesh: Any, *, or_whole: bool = True) -> jax.Array:
    """`array` with the type that shard_map wants of explicit axes, if no device needs another's part for that."""
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
            f" jax.reshard(array, {target}) communicates it, and docs/scaling.md, Explicit axes, shows how each share"
            " of the blocks writes its own tokens without that"
        )
    return jax.reshard(array, NamedSharding(mesh, target))
