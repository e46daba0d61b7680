"""Whether a program may hold a Mosaic GPU kernel: its platform and devices are known only when it is lowered."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from kvjax.errors import UnsupportedError
from kvjax.kernels import compat

MIN_COMPUTE_CAPABILITY = 9.0

_IN_SHARD_MAP = (
    "Give the cache its sharding (KVCache.allocate(..., sharding=...)), or call it inside jax.shard_map with"
    " check_vma=False, on a cache of one device's heads."
)

_serves_p = Primitive("kvjax_mosaic_serves")
_serves_p.def_abstract_eval(lambda *, required: ShapedArray((), np.dtype(bool)))


def run(required: bool, mosaic: Callable[..., Any], otherwise: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Calls `mosaic` where the program, once lowered, can hold its kernel, else `otherwise`, with the same arguments.

    In interpret mode it always can. Otherwise that takes a CUDA device of compute capability 9.0, and one device: XLA
    does not partition these kernels but gathers what they take. Inside `jax.shard_map`, if it does not check what
    varies over the mesh (`check_vma=False`), each device has its own.

    Raises:
      UnsupportedError: when traced or lowered, if `required` and the program cannot; with the reason.
    """
    mosaic, otherwise = functools.partial(mosaic, **static), functools.partial(otherwise, **static)
    if any(_is_spread(jax.typeof(array)) for array in jax.tree.leaves(args)):
        if required:
            raise UnsupportedError(f"an argument's type spreads it over devices. {_IN_SHARD_MAP}")
        return otherwise(*args)
    if compat.interpreting():
        return mosaic(*args)

    def choose(*operands: Any) -> Any:
        return lax.cond(_serves_p.bind(required=required), mosaic, otherwise, *operands)

    return choose(*args) if required else lax.platform_dependent(*args, cuda=choose, default=otherwise)


def _is_spread(aval: Any) -> bool:
    """Whether a type says that its array differs by device: along a mesh's explicit axes, or in a checked shard_map."""
    return bool(aval.manual_axis_type.varying) or any(axis is not None for axis in aval.sharding.spec)


def why_not(array: Any) -> str | None:
    """Why no kernel can run on a concrete array where it is; `None` where one can, or before that is known."""
    if isinstance(array, jax.core.Tracer) or compat.interpreting():
        return None
    devices = array.devices()
    return _why_not("/".join({device.platform for device in devices}), len(devices), list(devices))


def _why_not(platform: str, num_devices: int, devices: list[Any]) -> str | None:
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


def _lower(ctx: Any, *, required: bool) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    reason = _why_not("/".join(platforms), _num_devices(ctx.module_context.axis_context), _visible_gpus())
    if required and reason is not None:
        raise UnsupportedError(reason)
    return [mlir.ir_constant(np.bool_(reason is None))]


mlir.register_lowering(_serves_p, _lower)


def _num_devices(axis_context: Any) -> int:
    """Devices among which XLA would have to divide the program; within `shard_map` none but one's own."""
    if hasattr(axis_context, "manual_axes"):
        shape = dict(axis_context.mesh.shape)
        return math.prod(size for axis, size in shape.items() if axis not in axis_context.manual_axes)
    return int(getattr(axis_context, "num_devices", 1))


def _visible_gpus() -> list[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # a program for a GPU that this machine has not
        return []
