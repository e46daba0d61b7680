"""Pallas kernels on supported versions of JAX and in interpret mode: launching, loads and stores of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.aliases import Barriers, Kernel, Layout, OutType, Ref, ScratchType

# Lane semantics: kernels choose register layouts themselves. They also place barriers themselves, wherever a thread
# reads what another wrote. The barriers that Mosaic would put around each store cost more than the store.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)

BASE_ALIGNMENT = 256
"""Alignment in bytes of JAX's arrays, which Mosaic GPU kernels require."""


def interpreting() -> bool:
    """Whether kernels are traced for interpret mode (`plgpu.force_gpu_interpret_mode`)."""
    return getattr(config, "pallas_tpu_interpret_mode_context_manager").value is not None  # noqa: B009


def named(name: str, body: Callable[..., None]) -> Callable[..., None]:
    """`body` with the name that profilers show."""

    def wrapper(*refs: Ref) -> None:
        body(*refs)

    wrapper.__name__ = name
    return wrapper


def program_kernel(
    name: str, body: Callable[..., None], grid: int, out_type: OutType = (), scratch_types: Sequence[ScratchType] = ()
) -> Kernel:
    """The kernel of `body`, with a grid of programs that are one warpgroup each."""
    kernel: Kernel = plgpu.kernel(
        named(name, body),
        out_type=out_type,
        grid=(grid,),
        grid_names=("program",),
        scratch_types=scratch_types,
        compiler_params=COMPILER_PARAMS,
    )
    return kernel


def load(ref: Ref, layout: Layout, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Loads a reference, reshaped to `shape`, into registers in `layout`; the loads need not be coalesced."""
    if interpreting():  # it has no reshaped references, and no `plgpu.load` in jax 0.11.1
        whole: jax.Array = ref[...]
        return whole if shape is None else whole.reshape(shape)
    if shape is not None:
        ref = ref.reshape(*shape)
    loaded: jax.Array = plgpu.load(ref, layout=layout, optimized=False)  # type: ignore[arg-type]  # a protocol
    return loaded


def copy_to_shared(source: Ref, target: Ref, full: Barriers) -> None:
    """Starts a copy from global to shared memory; `full` is the barrier that completes when it has arrived."""
    plgpu.copy_gmem_to_smem(source, target, full)  # type: ignore[arg-type]  # a protocol


def layout_cast(x: jax.Array, layout: Layout) -> jax.Array:
    """Casts `x` to `layout`. Interpret mode has no layouts and, in jax 0.11.1, no such cast."""
    return x if interpreting() else plgpu.layout_cast(x, layout)


def broadcast_columns(column: jax.Array, columns: int, layout: Layout) -> jax.Array:
    """Broadcasts `[..., rows]` to `[..., rows, columns]` in `layout`."""
    dims = tuple(range(column.ndim))
    return layout_cast(lax.broadcast_in_dim(column, (*column.shape, columns), dims), layout)


if hasattr(plgpu, "store"):

    def _store(ref: Ref, value: jax.Array) -> None:
        getattr(plgpu, "store")(ref, value, optimized=False)  # noqa: B009

else:  # before 0.12 there is no other store

    def _store(ref: Ref, value: jax.Array) -> None:
        ref[...] = value


def store(ref: Ref, value: jax.Array) -> None:
    """Stores registers to a whole reference, reshaped to their shape; the stores need not be coalesced."""
    if interpreting():
        ref[...] = value.reshape(ref.shape)
    elif value.size == 1:  # Mosaic would divide by zero, the gcd of no strides
        only = functools.reduce(lambda x, _: jnp.max(x, axis=-1), ref.shape, value.astype(jnp.int32))
        ref[(0,) * len(ref.shape)] = only.astype(value.dtype)
    else:
        _store(ref if ref.shape == value.shape else ref.reshape(*value.shape), value)
