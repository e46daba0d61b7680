"""Types of what Pallas, Mosaic GPU and MLIR pass to kernels; `Any` where these have no types that may be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

DType = np.dtype[np.generic]
"""A dtype."""

DTypeLike = jax.typing.DTypeLike
"""What NumPy makes a dtype of."""

Scalar = Any
"""An int32 or a float32, traced, or a number that is known when the kernel is traced."""

Index = Any
"""What selects a part of a reference: integers, traced or not, and slices, or a tuple of them."""


class Ref(Protocol):
    """A reference of Pallas to an array in global or shared memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def ndim(self) -> int: ...  # noqa: D102

    @property
    def dtype(self) -> DType: ...  # noqa: D102

    @property
    def at(self) -> RefParts: ...  # noqa: D102

    def reshape(self, *shape: int) -> Ref: ...  # noqa: D102

    def transpose(self, permutation: tuple[int, ...]) -> Ref: ...  # noqa: D102

    def __getitem__(self, index: Index) -> jax.Array: ...

    def __setitem__(self, index: Index, value: jax.typing.ArrayLike) -> None: ...


class RefParts(Protocol):
    """References to parts of an array, by index."""

    def __getitem__(self, index: Index) -> Ref: ...


ABSENT: Any = None
"""In place of a reference that a kernel does not read."""

Barriers = Any
"""A reference of Pallas to barriers in shared memory, or to one of them."""

Accumulator = Any
"""A reference to the registers that products of `wgmma` are summed in."""

Transforms = tuple[plgpu.TilingTransform | plgpu.SwizzleTransform, ...]
"""How a matrix lies in shared memory: in tiles, swizzled."""

ScratchType = pl.MemoryRef | plgpu.Barrier
"""What a kernel allocates in shared memory: an array, or barriers."""

OutType = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...] | list[jax.ShapeDtypeStruct]
"""The results of a kernel."""

Value = Any
"""A value of MLIR, such as a register of a thread, an address or an index; or its type."""

Lowered = Any
"""An operand during lowering: MLIR's memref for a reference, or Mosaic GPU's `FragmentedArray` for an array."""

Context = Any
"""What Pallas passes to a lowering first."""

Layout = Any
"""A register layout: which thread holds which element of an array. See `registers.lane_layout`, `plgpu.Layout`."""

Kernel = Callable[..., Any]
"""A function of arrays or references that launches a kernel."""

Carry = Any
"""What a loop carries: a pytree of scalars and registers."""

type Registers = list[jax.Array]
"""Registers of each thread, `[128]` each."""
