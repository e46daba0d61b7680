"""What the two warpgroups tell each other: weights of a tile, and numbers of each query row.

Both are in the rows of `plgpu.Layout.WGMMA`: a row belongs to a warp of each warpgroup, with the same number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kvjax.kernels import compat, ptx, tiles
from kvjax.kernels.aliases import Context, Lowered, Ref, Value
from kvjax.kernels.warpgroups import per_scalar

_ROW = plgpu.Layout.WGMMA.reduce(1)


def store_weights(ref: Ref, weights: jax.Array) -> None:
    """Stores `[64, tokens]` of 16 bits as an operand of `wgmma`, which sees them after `Tiles.announce`."""
    if compat.interpreting():
        ref[...] = weights
        return
    columns = weights.shape[1]

    def run(_: Context, ref: Lowered, weights: Lowered) -> None:
        weights.store_tiled(ref, tiles.swizzle_of(columns))  # an assignment would load what is there

    types = plgpu.RefType(tiles.transforms_of(columns)), plgpu.Layout.WGMMA
    plgpu.inline_mgpu(arg_types=types)(run)(ref, weights)


def store_numbers(ref: Ref, numbers: jax.Array) -> None:
    """Stores float32 `[rows]` to shared memory."""
    if compat.interpreting():
        ref[...] = numbers
        return

    def run(_: Context, ref: Lowered, index: Lowered, numbers: Lowered) -> None:
        def store(number: Value, index: Value) -> Value:
            llvm.store(number, _address(ref, index))
            return number

        numbers._pointwise(per_scalar(store), index)

    types = plgpu.RefType(), _ROW, _ROW
    plgpu.inline_mgpu(arg_types=types)(run)(ref, _indices(numbers.size), numbers)


def load_numbers(ref: Ref) -> jax.Array:
    """Loads what `store_numbers` has stored."""
    if compat.interpreting():
        loaded: jax.Array = ref[...]
        return loaded

    def run(_: Context, ref: Lowered, index: Lowered) -> Lowered:
        def load(index: Value) -> Value:
            return llvm.load(ir.F32Type.get(), _address(ref, index))

        return index._pointwise(per_scalar(load))

    (size,) = ref.shape
    result = plgpu.ShapeDtypeStruct((size,), np.dtype(np.float32), layout=_ROW)
    inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _ROW), return_type=result)(run)
    numbers: jax.Array = inlined(ref, _indices(size))
    return numbers


def any_of_warp(mask: jax.Array) -> jax.Array:
    """Whether a bool of rows holds for one of a warp's; in interpret mode, for one of all rows."""
    if compat.interpreting():
        return jnp.any(mask)

    def run(_: Context, mask: Lowered) -> Lowered:
        i32 = ir.IntegerType.get_signless(32)
        mine = mgpu.c(0, i32)
        for register in mask.registers.flat:
            mine = arith.ori(mine, ptx.scalar(register))
        code = (
            "{ .reg .pred mine, any; setp.ne.s32 mine, $1, 0;"
            " vote.sync.any.pred any, mine, 0xffffffff; selp.s32 $0, 1, 0, any; }"
        )
        [found] = ptx.inline(code, [mine], [i32], side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    result = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))
    found = plgpu.inline_mgpu(arg_types=(_ROW,), return_type=result)(run)(mask.astype(jnp.int32))
    return found != 0


def _indices(size: int) -> jax.Array:
    return compat.layout_cast(lax.iota(jnp.int32, size), _ROW)


def _address(ref: Lowered, index: Value) -> Value:
    i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    offset = arith.muli(index, mgpu.c(4, i32))
    return utils.getelementptr(utils.memref_ptr(ref), [offset], byte)
