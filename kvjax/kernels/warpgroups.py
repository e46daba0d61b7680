"""Operations of a warpgroup that Pallas lacks: barriers, accesses at computed addresses, matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from kvjax import quant
from kvjax.kernels import ptx
from kvjax.kernels.aliases import Accumulator, Context, Layout, Lowered, Ref, Value
from kvjax.kernels.compat import interpreting, layout_cast
from kvjax.kernels.registers import lane_layout


def two_numbers(ref: Ref) -> tuple[jax.Array, jax.Array]:
    """The lower and the upper half of the address of `ref` as int32.

    This is how a launcher passes numbers to a kernel whose arguments are references to JAX, without a copy to the GPU
    or a load there.
    """
    number = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))

    def from_address(_: Context, ref: Lowered) -> Lowered:
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        address = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        halves = address, arith.shrui(address, mgpu.c(32, i64))
        return tuple(mgpu.FragmentedArray.splat(arith.trunci(i32, half), (), is_signed=True) for half in halves)

    inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(number, number))(from_address)
    low, high = inlined(ref)
    return low, high


def barrier() -> None:
    """A barrier of the warpgroup, which makes stores to shared memory visible to all threads.

    Compilers do not move loads across it. `plgpu.commit_smem` would also make the stores visible to asynchronous
    copies, which takes a fence.
    """
    if interpreting():
        plgpu.commit_smem()
        return

    def wait(_: Context) -> None:
        _forbid_moving()
        utils.warpgroup_barrier()
        _forbid_moving()

    plgpu.inline_mgpu()(wait)()


def disable_unrolling() -> None:
    """Keeps ptxas from unrolling the loop whose body calls this."""
    if not interpreting():
        plgpu.inline_mgpu()(lambda _: _statement('.pragma "nounroll";'))()


def prevent_tail_merging(name: str) -> None:
    """Keeps the compiler from merging the last instructions of a branch with those of branches with other names.

    A program would jump to the merged instructions, and wait for them to be fetched.
    """
    if not interpreting():
        plgpu.inline_mgpu()(lambda _: _statement(f"// {name}"))()


def _forbid_moving() -> None:
    """Emits no instruction, but the compiler assumes that it reads and writes memory."""
    _statement("", "~{memory}")


def _statement(code: str, clobbered: str = "") -> None:
    ptx.inline(code, [], [], clobber=clobbered)


def store_rows(ref: Ref, value: jax.Array, first: jax.Array, start: jax.Array, stop: jax.Array, layout: Layout) -> None:
    """Stores the rows `start` to `stop` of `value` to `ref[first + row]`; `ref` has the dimensions of `value`.

    Elements that a thread holds in one register belong to an aligned word of `ref`, in global memory.
    """
    if interpreting():
        for row in range(value.shape[0]):

            @pl.when((row >= start) & (row < stop))
            def _(row: int = row) -> None:
                ref[first + row] = value[row]

        return

    def run(_: Context, ref: Lowered, value: Lowered, *numbers: Lowered) -> None:
        first, start, stop = (ptx.scalar(number.registers.item()) for number in numbers)
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        # For each thread, where its first register belongs, and how far after it the others do: `foreach` would compute
        # an address for each element, from numbers that stay in registers.
        origin = next(iter(value.layout.thread_idxs(value.shape)))
        strides = value.layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(value.shape)))
        later: dict[int, list[tuple[list[np.intp], Value]]] = {}
        for place in np.ndindex(value.registers.shape):
            row, *rest = np.unravel_index(np.dot(place, strides[: len(place)]), value.shape)
            later.setdefault(int(row), []).append((rest, value.registers[place]))
        for row, registers in later.items():
            own_row = arith.addi(arith.index_cast(i32, origin[0]), mgpu.c(row, i32))
            is_stored = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, own_row, start), arith.cmpi(arith.CmpIPredicate.slt, own_row, stop)
            )
            with mgpu.when(is_stored):
                of_row = mgpu.memref_slice(ref, arith.index_cast(index, arith.addi(first, own_row)))
                for rest, register in registers:
                    columns = tuple(arith.addi(x, mgpu.c(int(y), index)) for x, y in zip(origin[1:], rest, strict=True))
                    pointer = utils.memref_ptr(mgpu.memref_slice(of_row, columns) if columns else of_row)
                    pointer = llvm.addrspacecast(llvm.PointerType.get(ptx.GLOBAL), pointer)
                    llvm.store(register, pointer, alignment=utils.bitwidth(register.type) // 8)

    number = plgpu.Layout.WG_SPLAT(())
    types = plgpu.RefType(), layout, number, number, number
    plgpu.inline_mgpu(arg_types=types)(run)(ref, value, first, start, stop)


def load_each(ref: Ref, indices: jax.Array, layout: Layout) -> jax.Array:
    """`ref[indices]` of a one-dimensional reference to int32, one load per element."""
    if interpreting():
        return jnp.stack([ref[index] for index in indices])

    def run(_: Context, ref: Lowered, indices: Lowered) -> Lowered:
        def load_one(index: Value) -> Value:
            return memref.load(ref, [arith.index_castui(ir.IndexType.get(), index)])

        return indices._pointwise(per_scalar(load_one), output_is_signed=True)

    types = plgpu.RefType(), layout
    result = plgpu.ShapeDtypeStruct(indices.shape, np.dtype(np.int32), layout=layout)
    loaded: jax.Array = plgpu.inline_mgpu(arg_types=types, return_type=result)(run)(ref, indices)
    return loaded


def fetch_add(count: Ref, before: Ref) -> None:
    """Atomically adds 1 to `count`, in global memory, and stores its previous value to `before`, in shared memory.

    Both are references to an int32. One thread of the warpgroup does this; the others read `before` after a barrier.
    """
    if interpreting():  # programs of a grid run one after another
        before[...] = count[...]
        count[...] += 1
        return

    def run(_: Context, count: Lowered, before: Lowered) -> None:
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            i32 = ir.IntegerType.get_signless(32)
            code = "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;"
            address = llvm.addrspacecast(llvm.PointerType.get(ptx.GLOBAL), utils.memref_ptr(count))
            [got] = ptx.inline(code, [address], [i32], side_effects=True)
            memref.store(got, before, [])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(run)(count, before)


def store_numbers(ref: Ref, *numbers: jax.Array) -> None:
    """Stores int32 scalars to an int32 reference to shared memory; every thread stores all, without a barrier."""
    if interpreting():
        for i, number in enumerate(numbers):
            ref[i] = number
        return

    def run(_: Context, ref: Lowered, *numbers: Lowered) -> None:
        for i, number in enumerate(numbers):
            memref.store(ptx.scalar(number.registers.item()), ref, [mgpu.c(i, ir.IndexType.get())])

    types = plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * len(numbers)
    plgpu.inline_mgpu(arg_types=types)(run)(ref, *numbers)


def load_words(ref: Ref, row: jax.Array, columns: jax.Array, alignment: int, layout: Layout) -> jax.Array:
    """Loads four bytes as int32 from each byte offset in `columns` of a row of a two-dimensional uint8 reference.

    `row` is an int32 scalar; `columns` are int32 in `layout`, multiples of `alignment`.
    """
    if interpreting():
        starts = columns[..., None] + jnp.arange(4)
        return lax.bitcast_convert_type(ref[row][starts], jnp.int32)
    row_bytes = ref.shape[1]
    rows = layout_cast(lax.broadcast(row, columns.shape), layout)

    def run(_: Context, ref: Lowered, rows: Lowered, columns: Lowered) -> Lowered:
        i64, i32, byte = (ir.IntegerType.get_signless(bits) for bits in (64, 32, 8))
        pointer = utils.memref_ptr(ref)

        def load_one(row: Value, column: Value) -> Value:
            offset = arith.addi(arith.muli(arith.extui(i64, row), mgpu.c(row_bytes, i64)), arith.extui(i64, column))
            return llvm.load(i32, utils.getelementptr(pointer, [offset], byte), alignment=min(alignment, 4))

        return rows._pointwise(per_scalar(load_one), columns, output_is_signed=True)

    types = plgpu.RefType(), layout, layout
    result = plgpu.ShapeDtypeStruct(columns.shape, np.dtype(np.int32), layout=layout)
    loaded: jax.Array = plgpu.inline_mgpu(arg_types=types, return_type=result)(run)(ref, rows, columns)
    return loaded


_ACC = getattr(plgpu, "ACC")  # noqa: B009  # missing from its type stubs


def product(
    a: Ref | jax.Array,
    b: Ref,
    meanwhile: Callable[[], None],
    total: jax.Array | None = None,
    *,
    transposed: bool = False,
) -> jax.Array:
    """The matrix product of `a`, in registers or shared memory, and `b`, in shared memory, on Hopper's tensor cores.

    Args:
      a: `[64, k]`.
      b: `[k, n]`, or `[n, k]`.
      meanwhile: called while the tensor cores multiply.
      total: float32 `[64, n]`, what the product is added to.
      transposed: whether `b` is `[n, k]`.

    Returns:
      float32 `[64, n]`.
    """
    if interpreting():  # which has no `run_state`, and multiplies at once
        left, right = a[...], b[...].T if transposed else b[...]
        if left.dtype.itemsize == 1:  # XLA on a CPU multiplies no float8
            left, right = left.astype(jnp.float32), right.astype(jnp.float32)
        plgpu.commit_smem()  # tensor cores read shared memory as asynchronous copies do, without this fence
        meanwhile()
        result: jax.Array = jnp.dot(left, right, preferred_element_type=jnp.float32)
        return result if total is None else total + result
    right_operand = b.transpose((1, 0)) if transposed else b

    def multiply(accumulator: Accumulator) -> Any:
        plgpu.wgmma(accumulator, a, right_operand)
        meanwhile()
        return None if total is not None else accumulator[...]

    if total is not None:
        added: jax.Array = pl.run_state(multiply)(_ACC.init(total))
        return added
    shape = a.shape[0], right_operand.shape[1]
    multiplied: jax.Array = pl.run_scoped(multiply, _ACC(shape, jnp.float32))
    return multiplied


def sum_of_products(
    pairs: Sequence[tuple[Ref, Ref]], meanwhile: Callable[[], None], later: Sequence[tuple[Ref, Ref]]
) -> jax.Array:
    """The sum of `a @ b.T` of pairs of references to shared memory, `[64, k]` and `[n, k]`: float32 `[64, n]`.

    `meanwhile` is called when the products of `pairs` have started, and before those of `later` do.
    """
    if interpreting():
        plgpu.commit_smem()  # as in `product`
        meanwhile()
        products = [jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32) for a, b in (*pairs, *later)]
        return functools.reduce(jnp.add, products)

    def multiply(accumulator: Accumulator) -> jax.Array:
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, b.transpose((1, 0)))
        meanwhile()
        for a, b in later:
            plgpu.wgmma(accumulator, a, b.transpose((1, 0)))
        return accumulator[...]

    shape = pairs[0][0].shape[0], pairs[0][1].shape[0]
    total: jax.Array = pl.run_scoped(multiply, _ACC(shape, jnp.float32))
    return total


def any_thread(mask: jax.Array, bits: int) -> jax.Array:
    """The lowest `bits` bits of int32 `mask`, one element per thread, or-ed over all threads; also a `barrier`."""
    if interpreting():
        plgpu.commit_smem()
        return lax.reduce(mask, np.int32(0), lax.bitwise_or, (0,))

    def run(_: Context, mask: Lowered) -> Lowered:
        i32 = ir.IntegerType.get_signless(32)
        [mine] = [ptx.scalar(register) for register in mask.registers.flat]
        result = mgpu.c(0, i32)
        _forbid_moving()
        for bit in range(bits):
            one = arith.andi(arith.shrui(mine, mgpu.c(bit, i32)), mgpu.c(1, i32))
            [found] = ptx.inline(_ANY_THREAD, [one], [i32], side_effects=True)
            result = arith.ori(result, arith.shli(found, mgpu.c(bit, i32)))
        _forbid_moving()
        return mgpu.FragmentedArray.splat(result, (), is_signed=True)

    result = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))
    found: jax.Array = plgpu.inline_mgpu(arg_types=(lane_layout(mask.shape, 1),), return_type=result)(run)(mask)
    return found


# Barrier 1 is that of `barrier`.
_ANY_THREAD = """{
  .reg .pred %mine, %any;
  setp.ne.s32 %mine, $1, 0;
  barrier.cta.red.or.pred %any, 1, 128, %mine;
  selp.s32 $0, 1, 0, %any;
}"""


class Copies(NamedTuple):
    """What `copy_each` copies, for each element; indices are int32.

    Attributes:
      starts: the byte of the source, a multiple of the size.
      rows: the row of the destination.
      columns: the byte in this row, a multiple of the size.
      condition: whether to copy, bool.
    """

    starts: jax.Array
    rows: jax.Array
    columns: jax.Array
    condition: jax.Array


def copy_each(source: Ref, destination: Ref, copies: Copies, size: int, layout: Layout) -> None:
    """Copies `size` bytes (up to 16) for each element whose condition holds; each thread copies for its own elements.

    `source` is shared memory of any dtype, `destination` a two-dimensional uint8 reference.
    """
    starts, rows, columns, condition = copies
    if interpreting():
        flat = lax.bitcast_convert_type(source[...], jnp.uint8).reshape(-1)
        for i in range(starts.shape[0]):

            @pl.when(condition[i])
            def _(i: int = i) -> None:
                destination[rows[i], pl.ds(columns[i], size)] = lax.dynamic_slice(flat, (starts[i],), (size,))

        return
    row_bytes = destination.shape[1]

    def run(_: Context, source: Lowered, destination: Lowered, *arrays: Lowered) -> None:
        i64, byte = (ir.IntegerType.get_signless(bits) for bits in (64, 8))
        word = ir.IntegerType.get_signless(8 * min(size, 4))
        kind: Value = ir.VectorType.get((size // 4,), word) if size > 4 else word
        from_pointer = utils.memref_ptr(source)
        to_pointer = utils.memref_ptr(destination)

        def wide(x: Value) -> Value:
            return arith.extui(i64, x)

        def copy_one(start: Value, row: Value, column: Value, condition: Value) -> None:
            with mgpu.when(condition):
                value = llvm.load(kind, utils.getelementptr(from_pointer, [start], byte), alignment=size)
                offset = arith.addi(arith.muli(wide(row), mgpu.c(row_bytes, i64)), wide(column))
                llvm.store(value, utils.getelementptr(to_pointer, [offset], byte), alignment=size)

        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            per_scalar(copy_one)(*registers)

    types = plgpu.RefType(), plgpu.RefType(), layout, layout, layout, layout
    plgpu.inline_mgpu(arg_types=types)(run)(source, destination, starts, rows, columns, condition)


def per_scalar(run: Callable[..., Value]) -> Callable[..., Value]:
    """A function of registers, which may be vectors of one element, from a function of scalars."""

    def of_registers(*registers: Value) -> Value:
        result = run(*map(ptx.scalar, registers))
        if result is None or not isinstance(registers[0].type, ir.VectorType):
            return result
        return vector.broadcast(ir.VectorType.get((1,), result.type), result)

    return of_registers


def in_order_of_products(x: jax.Array) -> jax.Array:
    """Reorders the last dimension, a multiple of 16, as `e4m3_operand` orders the columns of an accumulator.

    Of 16 columns of an accumulator a thread has two pairs, 8 apart; of an operand of 8 bits it has four neighbours. The
    other operand has its rows in this order, so no thread needs what another has: a sum does not depend on the order.
    """
    return x.reshape(*x.shape[:-1], -1, 2, 4, 2).swapaxes(-3, -2).reshape(x.shape)


def e4m3_operand(x: jax.Array) -> jax.Array:
    """An accumulator, float32 `[64, size]`, rounded to e4m3, as the left operand of `product`.

    Its columns are in the order of `in_order_of_products`. Numbers past 448 become 448.
    """
    dtype = np.dtype(jnp.float8_e4m3fn)
    if interpreting():
        x = in_order_of_products(x)
        most = float(jnp.finfo(dtype).max)
        return quant.cast(jnp.clip(x, -most, most), dtype)

    def run(_: Context, x: Lowered) -> Lowered:
        i32 = ir.IntegerType.get_signless(32)
        four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        code = (
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
        )
        pairs = x.registers.reshape(-1, 2, 2)  # of 16 columns, the columns 8 apart, the rows 8 apart
        packed = np.empty((pairs.shape[0], 2), dtype=object)
        for group, half in np.ndindex(packed.shape):
            numbers = [
                vector.extract(pairs[group, column, half], [], [element]) for column in range(2) for element in range(2)
            ]
            [word] = ptx.inline(code, numbers, [i32])
            packed[group, half] = vector.bitcast(four, vector.broadcast(ir.VectorType.get((1,), i32), word))
        layout = mgpu.WGMMA_LAYOUT_8BIT
        shape = layout.registers_shape(x.shape)
        return mgpu.FragmentedArray(_registers=packed.reshape(shape), _layout=layout, _is_signed=None)

    layout = plgpu.Layout.WGMMA_8BIT
    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=layout)
    operand: jax.Array = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)(run)(x)
    return operand


def columns(x: jax.Array, start: int, stop: int) -> jax.Array:
    """`x[:, start:stop]` of an accumulator; multiples of 8."""
    if interpreting():
        return x[:, start:stop]
    result = plgpu.ShapeDtypeStruct((x.shape[0], stop - start), np.dtype(x.dtype), layout=plgpu.Layout.WGMMA)
    sliced: jax.Array = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)(
        lambda _, x: x[:, start:stop]
    )(x)
    return sliced
