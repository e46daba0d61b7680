"""Names for what mypy knows as `Any`: what Pallas, Mosaic GPU and MLIR pass to kernels has no types of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Ref = Any
"""A reference of Pallas to an array in global or shared memory, or to barriers."""

Scalar = Any
"""An int32 or a float32, traced, or a number that is known when the kernel is traced."""

Value = Any
"""A value of MLIR, such as a register of a thread, an address or an index; or its type."""

Lowered = Any
"""An operand as lowering has it: MLIR's memref of a reference, or Mosaic GPU's `FragmentedArray` of an array."""

Context = Any
"""What Pallas passes to a lowering first."""

Layout = Any
"""Which thread holds which element of an array in registers, as `registers.lane_layout` and `plgpu.Layout` say."""

DType = np.dtype[Any]
"""A dtype."""

DTypeLike = Any
"""What NumPy makes a dtype of."""

Kernel = Callable[..., Any]
"""A function of arrays or references that launches a kernel."""

Carry = Any
"""What a loop carries: a pytree of scalars and registers."""
