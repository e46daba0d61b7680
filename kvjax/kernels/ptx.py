"""Inline PTX on arrays in registers, each with a model in `jax.numpy` that interpret mode runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from kvjax.kernels.aliases import Context, Kernel, Lowered, Value
from kvjax.kernels.compat import interpreting
from kvjax.kernels.registers import lane_layout

GLOBAL = 1
"""LLVM's address space of global memory."""


_LETTERS = {"i1": "b", "i16": "h", "i32": "r", "i64": "l", "f32": "f", f"!llvm.ptr<{GLOBAL}>": "l"}
"""LLVM's constraints of PTX operands by type; shared memory addresses are i32, global memory addresses i64."""


def inline(
    code: str,
    operands: Sequence[Value],
    types: Sequence[Value],
    *,
    side_effects: bool = False,
    clobber: str = "",
    early: bool = False,
) -> list[Value]:
    """Runs PTX in each thread, which writes `$0` and so on, of `types`, and reads the operands after them.

    With `early` it may write before it has read all operands.

    Mosaic GPU has had such a function since jax 0.11.2.
    """
    constraints = [f"={'&' if early else ''}{_LETTERS[str(t)]}" for t in types] + [
        _LETTERS[str(x.type)] for x in operands
    ]
    if clobber:
        constraints.append(clobber)
    if not types:
        result_type = ir.Type.parse("!llvm.void")
    elif len(types) == 1:
        result_type = types[0]
    else:
        result_type = llvm.StructType.get_literal(types)
    result = llvm.inline_asm(
        result_type, list(operands), code, ",".join(constraints), has_side_effects=side_effects or not types
    )
    if not types:
        return []
    if len(types) == 1:
        return [result]
    return [llvm.extractvalue(t, result, [i]) for i, t in enumerate(types)]


def scalar(register: Value) -> Value:
    """The value of a register, which may be a vector of one element."""
    return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register


_ptx = Primitive("kvjax_ptx")
_ptx_reduce = Primitive("kvjax_ptx_reduce")
_ptx_sum = Primitive("kvjax_ptx_sum")
_ptx_rows = Primitive("kvjax_ptx_rows")
_ptx_rows.multiple_results = True


def elementwise(
    code: str | Callable[[int], str],
    model: Callable[..., jax.Array],
    *operands: jax.Array,
    since: tuple[int, int] = (9, 0),
) -> jax.Array:
    """Runs PTX on each element if the GPU supports it; otherwise, and in interpret mode, runs `model`.

    Kernels are traced before the GPU is known. This is how they use instructions that only some GPUs have.

    Args:
      code: writes `$0`, reads `$1` and so on, and has no side effects. Where the result is bytes, a function from the
        number of columns (1, 2 or 4) to code that reads these columns of the first operand, then of the next, and so
        on, and writes a word with their bytes, the first one lowest. Other bytes of the word are ignored.
      model: computes the same elementwise in `jax.numpy`.
      operands: arrays of one shape and layout, of elements of 32 bits; or scalars.
      since: the first compute capability that supports the instructions.

    Returns:
      An array in the layout of the operands, of elements of 32 bits or of bytes.
    """
    if interpreting():
        return model(*operands)
    result: jax.Array = _ptx.bind(*operands, code=code, model=model, since=since)
    return result


def reduce_rows(code: str, x: jax.Array) -> jax.Array:
    """Reduces the last dimension of `x`, of 32-bit elements, by PTX that combines `$1` and `$2` into `$0`."""
    result: jax.Array = _ptx_reduce.bind(x, code=code)
    return result


def sum_rows(code: Callable[[int], str], model: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Sums over the last dimension, whose size is a power of two, pairwise: neighbours, neighbouring pairs, and so on.

    The result thus does not depend on which threads hold the columns.

    Args:
      code: a function from the number of columns (1, 2 or 4) to code that writes their float32 sum, added in that
        order, to `$0`; reads operands as `elementwise` describes for bytes.
      model: computes the summand of a column elementwise in `jax.numpy`.
      operands: arrays of one shape and layout, of elements of 32 bits.
    """
    if interpreting():
        sums = model(*operands)
        while sums.shape[-1] > 1:
            sums = sums[..., ::2] + sums[..., 1::2]
        return sums[..., 0]
    result: jax.Array = _ptx_sum.bind(*operands, code=code)
    return result


def map_rows(
    code: str, model: Callable[..., tuple[jax.Array, jax.Array]], x: jax.Array, *scalars: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs PTX on each row of `x` where a thread holds whole rows; otherwise, and in interpret mode, runs `model`.

    Args:
      code: writes `$0` and `$1`, each the bytes of four columns, and `$2`, whose low byte is the second result; reads
        the columns of `x` as `$3` to `$10`, then `scalars`. Has no side effects.
      model: computes the same in `jax.numpy`, of `x` and `scalars`.
      x: `[..., 8]`, of elements of 32 bits.
      scalars: of 32 bits.

    Returns:
      uint8 `[..., 8]` and `[...]`.
    """
    if interpreting():
        return model(x, *scalars)
    codes, result = _ptx_rows.bind(x, *scalars, code=code, model=model)
    return codes, result


def _ptx_result(*operands: jax.core.ShapedArray, model: Callable[..., jax.Array], **_: object) -> jax.core.ShapedArray:
    result = jax.eval_shape(model, *operands)
    return jax.core.ShapedArray(result.shape, result.dtype)


def _ptx_reduce_result(x: jax.core.ShapedArray, **_: object) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(x.shape[:-1], x.dtype)


def _ptx_sum_result(x: jax.core.ShapedArray, *_: object, **__: object) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(x.shape[:-1], np.dtype(np.float32))


def _lower_ptx(
    ctx: Context,
    *operands: Value,
    code: str | Callable[[int], str],
    model: Callable[..., jax.Array],
    since: tuple[int, int],
) -> Lowered:
    arch = utils.get_arch()
    if (arch.major, arch.minor) < since:
        return lowering._lower_fun(model)(ctx, *operands)
    [result] = ctx.avals_out
    element = utils.dtype_to_ir_type(result.dtype)
    run = _per_element(code, element) if isinstance(code, str) else _per_word(code, element)
    first, *others = (lowering._ensure_fa(x, aval.dtype) for x, aval in zip(operands, ctx.avals_in, strict=True))
    return first._pointwise(run, *others, output_is_signed=utils.is_signed(result.dtype))


def _lower_ptx_reduce(ctx: Context, x: Value, *, code: str) -> Value:
    return x.reduce(_per_element(code, x.mlir_dtype), len(ctx.avals_in[0].shape) - 1)


def _lower_ptx_sum(ctx: Context, *operands: Value, code: Callable[[int], str]) -> Value:
    [columns] = operands[0].registers.flat[0].type.shape
    step, f32 = min(columns, 4), ir.F32Type.get()
    add = _per_element("add.rn.f32 $0, $1, $2;", f32)

    def of_a_thread(*registers: Value) -> Value:
        sums = []
        for i in range(0, columns, step):
            scalars = [vector.extract(x, [], [j]) for x in registers for j in range(i, i + step)]
            sums += inline(code(step), scalars, [f32])
        while len(sums) > 1:
            sums = [add(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
        return vector.broadcast(ir.VectorType.get((1,), f32), sums[0])

    # Each thread has one column from here on; `reduce` adds those of neighbouring threads first.
    shape = (*operands[0].shape[:-1], operands[0].shape[-1] // columns)
    layout = lane_layout(shape, 1).to_mgpu()
    registers = [of_a_thread(*each) for each in zip(*(x.registers.flat for x in operands), strict=True)]
    partial = np.empty(layout.registers_shape(shape), dtype=object)
    partial.reshape(-1)[:] = registers
    return mgpu.FragmentedArray(_registers=partial, _layout=layout, _is_signed=None).reduce(add, len(shape) - 1)


def _ptx_rows_results(x: jax.core.ShapedArray, *_: object, **__: object) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(shape, np.dtype(np.uint8)) for shape in (x.shape, x.shape[:-1])]


def _lower_ptx_rows(ctx: Context, x: Lowered, *scalars: Lowered, code: str, model: Kernel) -> Lowered:
    [columns] = x.registers.flat[0].type.shape
    if columns != x.shape[-1]:
        return lowering._lower_fun(model)(ctx, x, *scalars)
    i32, byte = (ir.IntegerType.get_signless(bits) for bits in (32, 8))
    layout = x.layout.reduce((len(x.shape) - 1,))
    codes, results = np.empty_like(x.registers), np.empty(layout.registers_shape(x.shape[:-1]), dtype=object)
    numbers = [each.registers.item() if isinstance(each, mgpu.FragmentedArray) else each for each in scalars]
    for i, row in enumerate(x.registers.flat):
        elements = [vector.extract(row, [], [j]) for j in range(columns)]
        *words, result = inline(code, [*elements, *numbers], [i32] * 3)
        words = vector.from_elements(ir.VectorType.get((2,), i32), words)
        codes.flat[i] = vector.bitcast(ir.VectorType.get((columns,), byte), words)
        results.flat[i] = vector.broadcast(ir.VectorType.get((1,), byte), arith.trunci(byte, result))
    return [
        mgpu.FragmentedArray(_registers=registers, _layout=each, _is_signed=False)
        for registers, each in ((codes, x.layout), (results, layout))
    ]


def _per_element(code: str, element: Value) -> Kernel:
    """A function from operand registers, or vectors of them, to a result register or vector."""

    def run(*registers: Value) -> Value:
        if not isinstance(registers[0].type, ir.VectorType):
            [result] = inline(code, registers, [element])
            return result
        [columns] = registers[0].type.shape
        results = [run(*(vector.extract(x, [], [i]) for x in registers)) for i in range(columns)]
        return vector.from_elements(ir.VectorType.get((columns,), element), results)

    return run


def _per_word(code: Callable[[int], str], byte: Value) -> Kernel:
    """A function from vectors of operand registers to a vector of bytes."""

    def run(*registers: Value) -> Value:
        [columns] = registers[0].type.shape
        step = min(columns, 4)
        results = []
        for i in range(0, columns, step):
            operands = [vector.extract(x, [], [j]) for x in registers for j in range(i, i + step)]
            [word] = inline(code(step), operands, [ir.IntegerType.get_signless(32)])
            word_bytes = vector.bitcast(
                ir.VectorType.get((4,), byte), vector.broadcast(ir.VectorType.get((1,), word.type), word)
            )
            results += [vector.extract(word_bytes, [], [j]) for j in range(step)]
        return vector.from_elements(ir.VectorType.get((columns,), byte), results)

    return run


_ptx.def_abstract_eval(_ptx_result)
_ptx_reduce.def_abstract_eval(_ptx_reduce_result)
_ptx_sum.def_abstract_eval(_ptx_sum_result)
_ptx_rows.def_abstract_eval(_ptx_rows_results)
lowering.register_lowering_rule(_ptx, plgpu.LoweringSemantics.Lane)(_lower_ptx)
lowering.register_lowering_rule(_ptx_reduce, plgpu.LoweringSemantics.Lane)(_lower_ptx_reduce)
lowering.register_lowering_rule(_ptx_sum, plgpu.LoweringSemantics.Lane)(_lower_ptx_sum)
lowering.register_lowering_rule(_ptx_rows, plgpu.LoweringSemantics.Lane)(_lower_ptx_rows)
