"""Data that the two warpgroups exchange: weights of a tile, and numbers of each query row.

Both are in the rows of `plgpu.Layout.WGMMA`: a row belongs to the warps of the same number in both warpgroups.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from kvjax.kernels import compat, lanes, ptx, tiles
from kvjax.kernels.aliases import Context, DType, Lowered, Ref, Value
from kvjax.kernels.lanes.words import LAYOUT, to_word
from kvjax.kernels.registers import THREADS
from kvjax.kernels.warpgroups import per_scalar

_ROW = plgpu.Layout.WGMMA.reduce(1)


def store_weights(ref: Ref, weights: jax.Array) -> None:
    """Stores 16 bits `[64, tokens]`. Each thread stores its registers for the other thread of the same number.

    `ref` has as many elements of any 16 bits.
    """
    if compat.interpreting():
        ref[...] = lax.bitcast_convert_type(weights, ref.dtype)
        return

    def run(_: Context, ref: Lowered, offset: Lowered, weights: Lowered) -> None:
        words = [utils.bitcast(register, ir.IntegerType.get_signless(32)) for register in weights.registers.flat]
        for i, pointer in enumerate(_chunks(ref, offset, len(words))):
            llvm.store(_vector_of(words[i * _WORDS : (i + 1) * _WORDS]), pointer, alignment=tiles.CHUNK)

    types = plgpu.RefType(tiles.transforms_of(ref.shape[-1])), LAYOUT, plgpu.Layout.WGMMA
    plgpu.inline_mgpu(arg_types=types)(run)(ref, lanes.thread_index() * tiles.CHUNK, weights)


def load_weights(ref: Ref, dtype: DType) -> jax.Array:
    """Loads what `store_weights` has stored, as an operand of `wgmma`."""
    if compat.interpreting():
        return lax.bitcast_convert_type(ref[...], dtype)
    rows, columns = ref.shape
    layout = plgpu.Layout.WGMMA

    def run(_: Context, ref: Lowered, offset: Lowered) -> Lowered:
        shape = layout.to_mgpu().registers_shape((rows, columns))
        word = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        kind = ir.VectorType.get((_WORDS,), word)
        registers = [
            utils.bitcast(vector.extract(chunk, [], [i]), pair)
            for chunk in (llvm.load(kind, x, alignment=tiles.CHUNK) for x in _chunks(ref, offset, math.prod(shape)))
            for i in range(_WORDS)
        ]
        array = np.array(registers, dtype=object).reshape(shape)
        return mgpu.FragmentedArray(_registers=array, _layout=layout.to_mgpu(), _is_signed=None)

    types = plgpu.RefType(tiles.transforms_of(columns)), LAYOUT
    result = plgpu.ShapeDtypeStruct((rows, columns), dtype, layout=layout)
    inlined = plgpu.inline_mgpu(arg_types=types, return_type=result)(run)
    weights: jax.Array = inlined(ref, lanes.thread_index() * tiles.CHUNK)
    return weights


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


def any_of_warpgroup(mask: jax.Array, barrier: jax.Array) -> jax.Array:
    """Whether any row's bool holds; also a warpgroup barrier, whose number is one of `lanes.wait_for_warps`.

    The result is for all rows, not those of a warp: if warps took different branches, compilers might duplicate the
    code after them in both, but all warps of a `wgmma` have to execute the same instruction.
    """
    if compat.interpreting():
        return jnp.any(mask)

    def run(_: Context, mask: Lowered, barrier: Lowered) -> Lowered:
        i32 = ir.IntegerType.get_signless(32)
        mine = mgpu.c(0, i32)
        for register in mask.registers.flat:
            mine = arith.ori(mine, ptx.scalar(register))
        code = (
            "{ .reg .pred mine, any; setp.ne.s32 mine, $1, 0;"
            f" barrier.cta.red.or.pred any, $2, {THREADS}, mine; selp.s32 $0, 1, 0, any; }}"
        )
        [found] = ptx.inline(code, [mine, to_word(barrier)], [i32], clobber="~{memory}", side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    result = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))
    inlined = plgpu.inline_mgpu(arg_types=(_ROW, LAYOUT), return_type=result)(run)
    found = inlined(mask.astype(jnp.int32), barrier + lanes.FIRST_BARRIER)
    return found != 0


def is_set(numbers: jax.Array) -> jax.Array:
    """Whether a number that all rows have is not 0."""
    if compat.interpreting():
        return numbers[0] != 0

    def run(_: Context, numbers: Lowered) -> Lowered:
        number = ptx.scalar(numbers.registers.flat[0])
        return mgpu.FragmentedArray.splat(number, (), is_signed=None)

    result = plgpu.ShapeDtypeStruct((), np.dtype(np.float32), layout=plgpu.Layout.WG_SPLAT(()))
    number: jax.Array = plgpu.inline_mgpu(arg_types=(_ROW,), return_type=result)(run)(numbers)
    return number != 0


_WORDS = tiles.CHUNK // 4


def _chunks(ref: Lowered, offset: Lowered, words: int) -> list[Value]:
    """Where a thread's chunks begin; those of neighbouring threads are contiguous, hence in different banks."""
    byte, start = ir.IntegerType.get_signless(8), to_word(offset)
    starts = [arith.addi(start, mgpu.c(i * THREADS * 4, start.type)) for i in range(0, words, _WORDS)]
    return [utils.getelementptr(utils.memref_ptr(ref), [x], byte) for x in starts]


def _vector_of(words: list[Value]) -> Value:
    return vector.from_elements(ir.VectorType.get((len(words),), words[0].type), words)


def _indices(size: int) -> jax.Array:
    return compat.layout_cast(lax.iota(jnp.int32, size), _ROW)


def _address(ref: Lowered, index: Value) -> Value:
    i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    offset = arith.muli(index, mgpu.c(4, i32))
    return utils.getelementptr(utils.memref_ptr(ref), [offset], byte)
