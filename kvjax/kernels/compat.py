"""What differs between the JAX versions that the kernels run on, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import config
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

# Lanes, not warpgroups: the kernels say themselves which lane holds what. No kernel reads what another thread wrote
# without a barrier of its own, and the ones that Mosaic would put around each store cost more than the store.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)

BASE_ALIGNMENT = 256
"""Bytes that compiled kernels take the address of every argument to be a multiple of."""

NUMBER_SHIFT = 8
"""A number that is passed as an address begins above the bits that `BASE_ALIGNMENT` says are zeros."""


def interpreting() -> bool:
    """Whether kernels traced now run in interpret mode (`plgpu.force_gpu_interpret_mode`)."""
    return getattr(config, "pallas_tpu_interpret_mode_context_manager").value is not None  # noqa: B009


def named(name: str, body: Callable[..., None]) -> Callable[..., None]:
    """`body` with the name that profilers will show."""

    def wrapper(*refs: Any) -> None:
        body(*refs)

    wrapper.__name__ = name
    return wrapper


def number(ref: Any) -> jax.Array:
    """The int32, not negative, that the address of `ref` stands for: `address >> NUMBER_SHIFT`.

    How a launcher passes numbers to a kernel, whose arguments are all addresses: nothing has to be written to the GPU
    beforehand, nor read there. In interpret mode, which knows no addresses, the number is in the memory.
    """
    if interpreting():
        value: jax.Array = ref[0]
        return value
    layout = plgpu.Layout.WG_SPLAT(())

    def from_address(_: Any, ref: Any) -> Any:
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        shifted = arith.shrui(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), mgpu.c(NUMBER_SHIFT, i64))
        return mgpu.FragmentedArray.splat(arith.trunci(i32, shifted), (), is_signed=True)

    number_type = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=layout)
    inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=number_type)(from_address)
    from_address_of: Callable[[Any], jax.Array] = inlined
    return from_address_of(ref)


def load(
    ref: Any, layout: Any, shape: tuple[int, ...] | None = None, columns: tuple[int, int] | None = None
) -> jax.Array:
    """Loads a reference, seen as `shape`, into registers in `layout`, whatever instructions that takes.

    All of it, or of two dimensions only `columns`, a first one and a number.
    """
    first, number = columns or (0, 0)
    if shape is not None and interpreting():  # which knows no reshaped references
        whole: jax.Array = ref[...].reshape(shape)
        return whole[:, first : first + number] if columns else whole
    if shape is not None:
        ref = ref.reshape(*shape)
    if columns:
        ref = ref.at[:, pl.ds(first, number)]
    loaded: jax.Array = plgpu.load(ref, layout=layout, optimized=False)
    return loaded


def spread(column: jax.Array, columns: int, layout: Any) -> jax.Array:
    """`[..., rows]` as `[..., rows, columns]` in `layout`, every column the same."""
    dims = tuple(range(column.ndim))
    return plgpu.layout_cast(lax.broadcast_in_dim(column, (*column.shape, columns), dims), layout)


if hasattr(plgpu, "store"):

    def _store(ref: Any, value: jax.Array) -> None:
        getattr(plgpu, "store")(ref, value, optimized=False)  # noqa: B009

else:  # before 0.12 there is no other store

    def _store(ref: Any, value: jax.Array) -> None:
        ref[...] = value


def store(ref: Any, value: jax.Array) -> None:
    """Stores registers to a whole reference, seen in their shape, whatever instructions that takes."""
    if interpreting():
        ref[...] = value.reshape(ref.shape)
    else:
        _store(ref if ref.shape == value.shape else ref.reshape(*value.shape), value)
