"""Selects a Mosaic GPU kernel or XLA when a program is lowered: its platform and devices are known by then.

A traced program contains a primitive instead of either implementation. Its lowering rule traces the implementation that
is used, so that kernels are not traced for a CPU, nor their XLA forms for a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.backend import get_default_device
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.errors import UnsupportedError
from kvjax.kernels import compat
from kvjax.kernels.aliases import Context, DType, Value
from kvjax.kernels.target import Target, tracing_for

MIN_COMPUTE_CAPABILITY = 9.0

_IN_SHARD_MAP = (
    "Give the cache its sharding (KVCache.allocate(..., sharding=...)), or call it inside jax.shard_map with"
    " check_vma=False, on a cache of one device's heads."
)


Arrays = Any
"""A pytree of arrays."""

Refuses = Callable[[Target], str | None]
"""Why a kernel cannot run on a GPU; None if it can."""

Leaves = Callable[..., list[jax.Array]]
"""A function from the leaves of its arguments to those of its results."""

Shapes = tuple[tuple[tuple[int, ...], DType], ...]
"""The shapes and dtypes of arrays."""


def run(
    required: bool,
    refuses: Refuses,
    mosaic: Callable[..., Arrays],
    otherwise: Callable[..., Arrays],
    results: Callable[..., Arrays],
    *args: Arrays,
    **static: Hashable,
) -> Arrays:
    """Calls `mosaic` if the lowered program can contain its kernel, otherwise `otherwise`, with the same arguments.

    A program can contain a kernel in interpret mode, and on a single CUDA device of compute capability 9.0 or later:
    XLA does not partition these kernels but gathers their operands. Inside `jax.shard_map` with `check_vma=False` each
    device runs its own kernel. Derivatives are those of `otherwise`.

    Args:
      required: whether to raise where the kernel cannot run.
      refuses: returns why the kernel cannot run on a GPU of this call's shapes; None if it can.
      mosaic: called with `args` and `static`; hashable, as are the other two.
      otherwise: likewise; both return arrays of the types of `results`.
      results: called likewise; returns arrays or `jax.ShapeDtypeStruct`s of the results' shapes and dtypes.
      args: arrays, or pytrees of them.
      static: hashable.

    Raises:
      UnsupportedError: when traced or lowered, if `required` and the kernel cannot run; with the reason.
    """
    leaves, tree = jax.tree.flatten(args)
    call = functools.partial(_Call, tree=tree, static=tuple(static.items()), enable_x64=jax.config.jax_enable_x64)
    if compat.interpreting() and not any(map(_is_spread, leaves)):
        return mosaic(*args, **static)
    types, out_tree = jax.tree.flatten(results(*args, **static))
    shapes = tuple((array.shape, array.dtype) for array in types)
    outputs = _bind(leaves, required, refuses, call(mosaic), call(otherwise), shapes)
    return jax.tree.unflatten(out_tree, outputs)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function from the leaves of its arguments to those of its results.

    It is traced when the program is lowered, in the x64 mode of the time of the call.
    """

    function: Callable[..., Arrays]
    tree: jax.tree_util.PyTreeDef
    static: tuple[tuple[str, Hashable], ...]
    enable_x64: bool

    def __call__(self, *leaves: jax.Array) -> list[jax.Array]:
        with jax.enable_x64(self.enable_x64):
            return jax.tree.leaves(self.function(*jax.tree.unflatten(self.tree, leaves), **dict(self.static)))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """`jax.vmap` of a function; instances of equal functions are equal."""

    function: Leaves
    in_axes: tuple[int | None, ...]

    def __call__(self, *leaves: jax.Array) -> list[jax.Array]:
        return jax.vmap(self.function, self.in_axes)(*leaves)


@dataclasses.dataclass(frozen=True)
class _For:
    """A function that is traced for a target; instances of equal functions and targets are equal."""

    target: Target
    function: Leaves

    def __call__(self, *leaves: jax.Array) -> list[jax.Array]:
        with tracing_for(self.target):
            return self.function(*leaves)


def _target() -> Target:
    """The target of a program lowered now, determined as Mosaic GPU does: by the mesh and the default device."""
    devices = [get_default_device(), *_visible_gpus()]
    if (abstract := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        devices = [*(device for device in devices if device.device_kind == abstract.device_kind), abstract]
    return next((Target.of(device) for device in devices if hasattr(device, "compute_capability")), Target.of(abstract))


def target_of(array: jax.Array) -> Target | None:
    """The target of a concrete array's devices; None if these are unknown, as of a traced array, or no GPUs."""
    if isinstance(array, jax.core.Tracer):
        return None
    return next((Target.of(device) for device in array.devices() if hasattr(device, "compute_capability")), None)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def implementation(function: Leaves, *leaves: jax.Array) -> list[jax.Array]:
    """Calls `function`. jit traces it once for equal argument types, and profilers show this name."""
    return function(*leaves)


_run_p = Primitive("kvjax_run")
_run_p.multiple_results = True


def _bind(
    leaves: Sequence[jax.Array],
    required: bool,
    refuses: Refuses,
    mosaic: Leaves,
    otherwise: Leaves,
    shapes: Shapes,
) -> list[jax.Array]:
    if not any(map(_is_spread, leaves)):
        implementations = {"refuses": refuses, "mosaic": mosaic, "otherwise": otherwise}
        return _run_p.bind(*leaves, required=required, shapes=shapes, **implementations)
    if required:
        raise UnsupportedError(f"an argument's type spreads it over devices. {_IN_SHARD_MAP}")
    return otherwise(*leaves)


def _is_spread(array: jax.Array) -> bool:
    """Whether an array's type is sharded over explicit mesh axes, or varies in a checked shard_map."""
    aval = jax.typeof(array)
    return bool(aval.manual_axis_type.varying) or any(axis is not None for axis in aval.sharding.spec)


def why_not(array: jax.Array) -> str | None:
    """Why no kernel can run on a concrete array's devices; `None` where one can, or where devices are unknown."""
    if isinstance(array, jax.core.Tracer) or compat.interpreting():
        return None
    devices = array.devices()
    return _why_not("/".join({device.platform for device in devices}), len(devices), list(devices))


def _why_not(platform: str, num_devices: int, devices: list[jax.Device]) -> str | None:
    if platform not in ("gpu", "cuda"):
        return (
            f"Pallas Mosaic GPU kernels need a CUDA GPU, and this runs on {platform}. To check one there, lower for it"
            " (`lowering_platforms=('cuda',)`) or run it in `plgpu.force_gpu_interpret_mode()`."
        )
    if num_devices > 1:
        return (
            f"the cache is spread over {num_devices} devices, and XLA would gather it for the kernel. {_IN_SHARD_MAP}"
        )
    old = sorted(
        {device.compute_capability for device in devices if float(device.compute_capability) < MIN_COMPUTE_CAPABILITY}
    )
    if old:
        return f"Pallas Mosaic GPU kernels need compute capability {MIN_COMPUTE_CAPABILITY}, and this GPU's is {old[0]}"
    return None


def _types(*_: object, shapes: Shapes, **__: object) -> list[ShapedArray]:
    mesh = jax.sharding.get_abstract_mesh()
    return [
        ShapedArray(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*[None] * len(shape))))
        for shape, dtype in shapes
    ]


def _run_here(
    *leaves: jax.Array, required: bool, refuses: Refuses, mosaic: Leaves, otherwise: Leaves, **_: object
) -> list[jax.Array]:
    """Runs a call on concrete arrays, as under `jax.disable_jit`."""
    target = _target()
    reason = next((reason for reason in map(why_not, leaves) if reason is not None), None) or refuses(target)
    return _For(target, _chosen(required, mosaic, otherwise, reason))(*leaves)


def _lower(
    ctx: Context, *operands: Value, required: bool, refuses: Refuses, mosaic: Leaves, otherwise: Leaves, **_: object
) -> Sequence[Value]:
    platforms = ctx.platforms or ctx.module_context.platforms
    reason = _why_not("/".join(platforms), _num_devices(ctx.module_context.axis_context), _visible_gpus())
    if reason is None:
        target = _target()
        reason, mosaic = refuses(target), _For(target, mosaic)
    chosen = _chosen(required, mosaic, otherwise, reason)
    return mlir.lower_fun(functools.partial(implementation, chosen))(ctx, *operands)


def _chosen(required: bool, mosaic: Leaves, otherwise: Leaves, reason: str | None) -> Leaves:
    if required and reason is not None:
        raise UnsupportedError(reason)
    return mosaic if reason is None else otherwise


_run_p.def_abstract_eval(_types)
_run_p.def_impl(_run_here)
mlir.register_lowering(_run_p, _lower)
# Registered for CUDA too, so that a program for several platforms has a branch for it.
mlir.register_lowering(_run_p, _lower, platform="cuda")


def _map(
    leaves: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    required: bool,
    refuses: Refuses,
    mosaic: Leaves,
    otherwise: Leaves,
    shapes: Shapes,
) -> tuple[list[jax.Array], list[int]]:
    in_axes = tuple(dims)
    size = next(leaf.shape[axis] for leaf, axis in zip(leaves, in_axes, strict=True) if axis is not None)
    shapes = tuple(((size, *shape), dtype) for shape, dtype in shapes)
    outputs = _bind(leaves, required, refuses, _Mapped(mosaic, in_axes), _Mapped(otherwise, in_axes), shapes)
    return outputs, [0] * len(outputs)


batching.primitive_batchers[_run_p] = _map


def _differentiate(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], *, required: bool, otherwise: Leaves, **_: object
) -> tuple[list[jax.Array], list[jax.Array]]:
    if required:
        raise UnsupportedError("the kernel has no gradient; implementation=None or 'xla' has, where XLA's form has one")
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*some: jax.Array) -> list[jax.Array]:
        leaves = list(primals)
        for i, x in zip(moving, some, strict=True):
            leaves[i] = x
        return otherwise(*leaves)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


ad.primitive_jvps[_run_p] = _differentiate


def _num_devices(axis_context: Context) -> int:
    """Devices over which XLA would partition the program; inside `shard_map` only those of automatic axes."""
    if hasattr(axis_context, "manual_axes"):
        shape = dict(axis_context.mesh.shape)
        return math.prod(size for axis, size in shape.items() if axis not in axis_context.manual_axes)
    return int(getattr(axis_context, "num_devices", 1))


def _visible_gpus() -> list[jax.Device]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # cross-compilation on a machine without GPUs
        return []
