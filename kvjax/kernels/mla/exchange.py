"""What the two warpgroups tell each other: weights of a tile, a factor of each query row, and a bit.

Weights and factors go through the same shared memory, one after the other. Both are in the rows of
`plgpu.Layout.WGMMA`.
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
    """Stores `[64, 64]` of 16 bits as an operand of `wgmma`, which sees them after `Tiles.announce`."""
    if compat.interpreting():
        ref[...] = weights
        return
    columns = weights.shape[1]

    def run(_: Context, ref: Lowered, weights: Lowered) -> None:
        weights.store_tiled(ref, tiles.swizzle_of(columns))  # an assignment would load what is there

    types = plgpu.RefType(tiles.transforms_of(columns)), plgpu.Layout.WGMMA
    plgpu.inline_mgpu(arg_types=types)(run)(ref, weights)


def store_factors(ref: Ref, factors: jax.Array) -> None:
    """Stores float32 `[64]` to the first bytes of `ref`, 16 bits `[64, 64]` in shared memory."""
    (size,) = factors.shape
    if compat.interpreting():
        halves = lax.bitcast_convert_type(factors, ref.dtype)
        ref[: halves.size // ref.shape[1]] = halves.reshape(-1, ref.shape[1])
        return

    def run(_: Context, ref: Lowered, index: Lowered, factors: Lowered) -> None:
        def store(factor: Value, index: Value) -> Value:
            llvm.store(factor, _address(ref, index))
            return factor

        factors._pointwise(per_scalar(store), index)

    types = plgpu.RefType(tiles.transforms_of(ref.shape[1])), _ROW, _ROW
    plgpu.inline_mgpu(arg_types=types)(run)(ref, _indices(size), factors)


def load_factors(ref: Ref, size: int) -> jax.Array:
    """Loads what `store_factors` has stored: float32 `[size]`."""
    if compat.interpreting():
        halves = ref[: 2 * size // ref.shape[1]]
        return lax.bitcast_convert_type(halves.reshape(size, 2), jnp.float32)

    def run(_: Context, ref: Lowered, index: Lowered) -> Lowered:
        def load(index: Value) -> Value:
            return llvm.load(ir.F32Type.get(), _address(ref, index))

        return index._pointwise(per_scalar(load))

    types = plgpu.RefType(tiles.transforms_of(ref.shape[1])), _ROW
    result = plgpu.ShapeDtypeStruct((size,), np.dtype(np.float32), layout=_ROW)
    loaded: jax.Array = plgpu.inline_mgpu(arg_types=types, return_type=result)(run)(ref, _indices(size))
    return loaded


def any_in_block(mask: jax.Array, threads: int) -> jax.Array:
    """Whether a bool of rows holds in any of a block's threads, all of which call this: a barrier; not interpreted."""

    def run(_: Context, mask: Lowered) -> Lowered:
        i32 = ir.IntegerType.get_signless(32)
        mine = mgpu.c(0, i32)
        for register in mask.registers.flat:
            mine = arith.ori(mine, ptx.scalar(register))
        code = (
            "{ .reg .pred mine, any; setp.ne.s32 mine, $1, 0;"
            f" barrier.cta.red.or.pred any, 0, {threads}, mine; selp.s32 $0, 1, 0, any; }}"
        )
        [found] = ptx.inline(code, [mine], [i32], clobber="~{memory}", side_effects=True)
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
