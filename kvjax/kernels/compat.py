"""Differences between supported JAX versions, and everything that needs private parts of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from kvjax.kernels.registers import lane_layout

# Lane semantics: kernels choose register layouts themselves. They also have their own barriers wherever a thread reads
# what another wrote; those that Mosaic would put around each store cost more than the store.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)

BASE_ALIGNMENT = 256
"""Alignment in bytes of JAX's arrays, which Mosaic GPU kernels require."""


def interpreting() -> bool:
    """Whether kernels are traced for interpret mode (`plgpu.force_gpu_interpret_mode`)."""
    return getattr(config, "pallas_tpu_interpret_mode_context_manager").value is not None  # noqa: B009


def named(name: str, body: Callable[..., None]) -> Callable[..., None]:
    """`body` with the name that profilers show."""

    def wrapper(*refs: Any) -> None:
        body(*refs)

    wrapper.__name__ = name
    return wrapper


def program_kernel(
    name: str, body: Callable[..., None], grid: int, out_type: Any = (), scratch_types: Sequence[Any] = ()
) -> Callable[..., Any]:
    """The kernel of `body`, with a grid of programs that are one warpgroup each."""
    kernel: Callable[..., Any] = plgpu.kernel(
        named(name, body),
        out_type=out_type,
        grid=(grid,),
        grid_names=("program",),
        scratch_types=scratch_types,
        compiler_params=COMPILER_PARAMS,
    )
    return kernel


def two_numbers(ref: Any) -> tuple[jax.Array, jax.Array]:
    """The lower and the upper half of the address of `ref` as int32.

    This is how a launcher passes numbers to a kernel whose arguments are references to JAX, without a copy to the GPU
    or a load there.
    """
    number = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))

    def from_address(_: Any, ref: Any) -> Any:
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        address = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        halves = address, arith.shrui(address, mgpu.c(32, i64))
        return tuple(mgpu.FragmentedArray.splat(arith.trunci(i32, half), (), is_signed=True) for half in halves)

    inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(number, number))(from_address)
    low, high = inlined(ref)
    return low, high


def load(ref: Any, layout: Any, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Loads a reference, reshaped to `shape`, into registers in `layout`; the loads need not be coalesced."""
    if interpreting():  # which knows no reshaped references, and in jax 0.11.1 no `plgpu.load`
        whole: jax.Array = ref[...]
        return whole if shape is None else whole.reshape(shape)
    if shape is not None:
        ref = ref.reshape(*shape)
    loaded: jax.Array = plgpu.load(ref, layout=layout, optimized=False)
    return loaded


_GLOBAL = 1
"""LLVM's address space of global memory."""


_LETTERS = {"i1": "b", "i16": "h", "i32": "r", "i64": "l", "f32": "f", f"!llvm.ptr<{_GLOBAL}>": "l"}
"""LLVM's constraints of PTX operands by type; shared memory addresses are i32, global memory addresses i64."""


def inline_ptx(
    code: str, operands: Sequence[Any], types: Sequence[Any], *, side_effects: bool = False, clobber: str = ""
) -> list[Any]:
    """Runs PTX in each thread, which writes `$0` and so on, of `types`, and reads the operands after them.

    Mosaic GPU has had such a function since jax 0.11.2.
    """
    constraints = [f"={_LETTERS[str(t)]}" for t in types] + [_LETTERS[str(x.type)] for x in operands]
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


def layout_cast(x: jax.Array, layout: Any) -> jax.Array:
    """`x` in registers in `layout`, which interpret mode does not have, nor in jax 0.11.1 the cast."""
    return x if interpreting() else plgpu.layout_cast(x, layout)


def barrier() -> None:
    """A barrier of the warpgroup, which makes stores to shared memory visible to all threads.

    Compilers do not move loads across it. `plgpu.commit_smem` would also make the stores visible to asynchronous
    copies, which takes a fence.
    """
    if interpreting():
        plgpu.commit_smem()
        return

    def wait(_: Any) -> None:
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
    """No instruction, but one that the compiler assumes to read and write memory."""
    _statement("", "~{memory}")


def _statement(code: str, clobbered: str = "") -> None:
    inline_ptx(code, [], [], clobber=clobbered)


def broadcast_columns(column: jax.Array, columns: int, layout: Any) -> jax.Array:
    """Broadcasts `[..., rows]` to `[..., rows, columns]` in `layout`."""
    dims = tuple(range(column.ndim))
    return layout_cast(lax.broadcast_in_dim(column, (*column.shape, columns), dims), layout)


if hasattr(plgpu, "store"):

    def _store(ref: Any, value: jax.Array) -> None:
        getattr(plgpu, "store")(ref, value, optimized=False)  # noqa: B009

else:  # before 0.12 there is no other store

    def _store(ref: Any, value: jax.Array) -> None:
        ref[...] = value


def store(ref: Any, value: jax.Array) -> None:
    """Stores registers to a whole reference, reshaped to their shape; the stores need not be coalesced."""
    if interpreting():
        ref[...] = value.reshape(ref.shape)
    elif value.size == 1:  # Mosaic would divide by zero, the gcd of no strides
        only = functools.reduce(lambda x, _: jnp.max(x, axis=-1), ref.shape, value.astype(jnp.int32))
        ref[(0,) * len(ref.shape)] = only.astype(value.dtype)
    else:
        _store(ref if ref.shape == value.shape else ref.reshape(*value.shape), value)


def store_rows(ref: Any, value: jax.Array, first: jax.Array, start: jax.Array, stop: jax.Array, layout: Any) -> None:
    """Stores the rows `start` to `stop` of `value` to `ref[first + row]`; `ref` has the dimensions of `value`.

    Elements that a thread holds in one register belong to an aligned word of `ref`, in global memory.
    """
    if interpreting():
        for row in range(value.shape[0]):

            @pl.when((row >= start) & (row < stop))
            def _(row: int = row) -> None:
                ref[first + row] = value[row]

        return

    def run(_: Any, ref: Any, value: Any, *numbers: Any) -> None:
        first, start, stop = (_scalar(number.registers.item()) for number in numbers)
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        # Of a thread, where its first register belongs, and how much later the others do: `foreach` would compute
        # an address for each element, from numbers that stay in registers.
        origin = next(iter(value.layout.thread_idxs(value.shape)))
        strides = value.layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(value.shape)))
        later: dict[int, list[Any]] = {}
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
                    pointer = llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), pointer)
                    llvm.store(register, pointer, alignment=utils.bitwidth(register.type) // 8)

    number = plgpu.Layout.WG_SPLAT(())
    types = plgpu.RefType(), layout, number, number, number
    plgpu.inline_mgpu(arg_types=types)(run)(ref, value, first, start, stop)


def load_each(ref: Any, indices: jax.Array, layout: Any) -> jax.Array:
    """`ref[indices]` of a one-dimensional reference to int32, one load per element."""
    if interpreting():
        return jnp.stack([ref[index] for index in indices])

    def run(_: Any, ref: Any, indices: Any) -> Any:
        def load_one(index: Any) -> Any:
            return memref.load(ref, [arith.index_castui(ir.IndexType.get(), index)])

        return indices._pointwise(_per_scalar(load_one), output_is_signed=True)

    types = plgpu.RefType(), layout
    result = plgpu.ShapeDtypeStruct(indices.shape, np.dtype(np.int32), layout=layout)
    loaded: jax.Array = plgpu.inline_mgpu(arg_types=types, return_type=result)(run)(ref, indices)
    return loaded


def fetch_add(count: Any, before: Any) -> None:
    """Adds 1 to `count`, in global memory, atomically, and stores what it was to `before`, in shared memory.

    Both are references to an int32. One thread of the warpgroup does so: the others read it after a barrier.
    """
    if interpreting():  # programs of a grid run one after another
        before[...] = count[...]
        count[...] += 1
        return

    def run(_: Any, count: Any, before: Any) -> None:
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            i32 = ir.IntegerType.get_signless(32)
            code = "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;"
            address = llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), utils.memref_ptr(count))
            [got] = inline_ptx(code, [address], [i32], side_effects=True)
            memref.store(got, before, [])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(run)(count, before)


def store_numbers(ref: Any, *numbers: jax.Array) -> None:
    """Stores int32 scalars to an int32 reference to shared memory; every thread stores all, without a barrier."""
    if interpreting():
        for i, number in enumerate(numbers):
            ref[i] = number
        return

    def run(_: Any, ref: Any, *numbers: Any) -> None:
        for i, number in enumerate(numbers):
            memref.store(_scalar(number.registers.item()), ref, [mgpu.c(i, ir.IndexType.get())])

    types = plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * len(numbers)
    plgpu.inline_mgpu(arg_types=types)(run)(ref, *numbers)


def load_words(ref: Any, row: jax.Array, columns: jax.Array, alignment: int, layout: Any) -> jax.Array:
    """Loads four bytes as int32 from each byte offset in `columns` of a row of a two-dimensional uint8 reference.

    `row` is an int32 scalar; `columns` are int32 in `layout`, multiples of `alignment`.
    """
    if interpreting():
        starts = columns[..., None] + jnp.arange(4)
        return lax.bitcast_convert_type(ref[row][starts], jnp.int32)
    row_bytes = ref.shape[1]
    rows = layout_cast(lax.broadcast(row, columns.shape), layout)

    def run(_: Any, ref: Any, rows: Any, columns: Any) -> Any:
        i64, i32, byte = (ir.IntegerType.get_signless(bits) for bits in (64, 32, 8))
        pointer = utils.memref_ptr(ref)

        def load_one(row: Any, column: Any) -> Any:
            offset = arith.addi(arith.muli(arith.extui(i64, row), mgpu.c(row_bytes, i64)), arith.extui(i64, column))
            return llvm.load(i32, utils.getelementptr(pointer, [offset], byte), alignment=min(alignment, 4))

        return rows._pointwise(_per_scalar(load_one), columns, output_is_signed=True)

    types = plgpu.RefType(), layout, layout
    result = plgpu.ShapeDtypeStruct(columns.shape, np.dtype(np.int32), layout=layout)
    loaded: jax.Array = plgpu.inline_mgpu(arg_types=types, return_type=result)(run)(ref, rows, columns)
    return loaded


_ACC = getattr(plgpu, "ACC")  # noqa: B009  # which its stubs lack


def product(
    a: Any, b: Any, meanwhile: Callable[[], None], total: jax.Array | None = None, *, transposed: bool = False
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
        plgpu.commit_smem()  # tensor cores read shared memory as asynchronous copies do, without this fence
        meanwhile()
        result: jax.Array = jnp.dot(left, right, preferred_element_type=jnp.float32)
        return result if total is None else total + result
    right = b.transpose((1, 0)) if transposed else b

    def multiply(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, a, right)
        meanwhile()
        return None if total is not None else accumulator[...]

    if total is not None:
        added: jax.Array = pl.run_state(multiply)(_ACC.init(total))
        return added
    shape = a.shape[0], right.shape[1]
    multiplied: jax.Array = pl.run_scoped(multiply, _ACC(shape, jnp.float32))
    return multiplied


def any_thread(mask: jax.Array, bits: int) -> jax.Array:
    """The lowest `bits` bits of int32 `mask`, one element per thread, or-ed over all threads; also a `barrier`."""
    if interpreting():
        plgpu.commit_smem()
        return lax.reduce(mask, np.int32(0), lax.bitwise_or, (0,))

    def run(_: Any, mask: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        [mine] = [_scalar(register) for register in mask.registers.flat]
        result = mgpu.c(0, i32)
        _forbid_moving()
        for bit in range(bits):
            one = arith.andi(arith.shrui(mine, mgpu.c(bit, i32)), mgpu.c(1, i32))
            [found] = inline_ptx(_ANY_THREAD, [one], [i32], side_effects=True)
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


def copy_each(
    source: Any,
    starts: jax.Array,
    destination: Any,
    rows: jax.Array,
    columns: jax.Array,
    condition: jax.Array,
    size: int,
    layout: Any,
) -> None:
    """Copies `size` bytes (up to 16) for each element whose condition holds; each thread copies for its own elements.

    Copies from byte `starts` of `source`, shared memory of any dtype, to byte `columns` of row `rows` of `destination`,
    a two-dimensional uint8 reference. `starts` and `columns` are multiples of `size`; indices are int32.
    """
    if interpreting():
        flat = lax.bitcast_convert_type(source[...], jnp.uint8).reshape(-1)
        for i in range(starts.shape[0]):

            @pl.when(condition[i])
            def _(i: int = i) -> None:
                destination[rows[i], pl.ds(columns[i], size)] = lax.dynamic_slice(flat, (starts[i],), (size,))

        return
    row_bytes = destination.shape[1]

    def run(_: Any, source: Any, destination: Any, *arrays: Any) -> None:
        i64, byte = (ir.IntegerType.get_signless(bits) for bits in (64, 8))
        word = ir.IntegerType.get_signless(8 * min(size, 4))
        kind: Any = ir.VectorType.get((size // 4,), word) if size > 4 else word
        from_pointer = utils.memref_ptr(source)
        to_pointer = utils.memref_ptr(destination)

        def wide(x: Any) -> Any:
            return arith.extui(i64, x)

        def copy_one(start: Any, row: Any, column: Any, condition: Any) -> None:
            with mgpu.when(condition):
                value = llvm.load(kind, utils.getelementptr(from_pointer, [start], byte), alignment=size)
                offset = arith.addi(arith.muli(wide(row), mgpu.c(row_bytes, i64)), wide(column))
                llvm.store(value, utils.getelementptr(to_pointer, [offset], byte), alignment=size)

        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            _per_scalar(copy_one)(*registers)

    types = plgpu.RefType(), plgpu.RefType(), layout, layout, layout, layout
    plgpu.inline_mgpu(arg_types=types)(run)(source, destination, starts, rows, columns, condition)


def _per_scalar(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of registers, which may be vectors of one element, from a function of scalars."""

    def of_registers(*registers: Any) -> Any:
        result = run(*map(_scalar, registers))
        if result is None or not isinstance(registers[0].type, ir.VectorType):
            return result
        return vector.broadcast(ir.VectorType.get((1,), result.type), result)

    return of_registers


def _scalar(register: Any) -> Any:
    return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register


_ptx = Primitive("kvjax_ptx")
_ptx_reduce = Primitive("kvjax_ptx_reduce")
_ptx_sum = Primitive("kvjax_ptx_sum")
_ptx_rows = Primitive("kvjax_ptx_rows")
_ptx_rows.multiple_results = True


def ptx(
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


def ptx_reduce(code: str, x: jax.Array) -> jax.Array:
    """Reduces the last dimension of `x`, of 32-bit elements, by PTX that combines `$1` and `$2` to `$0`."""
    result: jax.Array = _ptx_reduce.bind(x, code=code)
    return result


def ptx_sum(code: Callable[[int], str], model: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Sums over the last dimension, whose size is a power of two, pairwise: neighbours, neighbouring pairs, and so on.

    The result thus does not depend on which threads hold the columns.

    Args:
      code: a function from the number of columns (1, 2 or 4) to code that writes their float32 sum, added in that
        order, to `$0`; reads operands as `ptx` describes for bytes.
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


def ptx_rows(
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


def _ptx_result(*operands: Any, model: Callable[..., jax.Array], **_: Any) -> Any:
    result = jax.eval_shape(model, *operands)
    return jax.core.ShapedArray(result.shape, result.dtype)


def _ptx_reduce_result(x: Any, **_: Any) -> Any:
    return jax.core.ShapedArray(x.shape[:-1], x.dtype)


def _ptx_sum_result(x: Any, *_: Any, **__: Any) -> Any:
    return jax.core.ShapedArray(x.shape[:-1], np.dtype(np.float32))


def _lower_ptx(
    ctx: Any,
    *operands: Any,
    code: str | Callable[[int], str],
    model: Callable[..., jax.Array],
    since: tuple[int, int],
) -> Any:
    arch = utils.get_arch()
    if (arch.major, arch.minor) < since:
        return lowering._lower_fun(model)(ctx, *operands)
    [result] = ctx.avals_out
    element = utils.dtype_to_ir_type(result.dtype)
    run = _per_element(code, element) if isinstance(code, str) else _per_word(code, element)
    first, *others = (lowering._ensure_fa(x, aval.dtype) for x, aval in zip(operands, ctx.avals_in, strict=True))
    return first._pointwise(run, *others, output_is_signed=utils.is_signed(result.dtype))


def _lower_ptx_reduce(ctx: Any, x: Any, *, code: str) -> Any:
    return x.reduce(_per_element(code, x.mlir_dtype), len(ctx.avals_in[0].shape) - 1)


def _lower_ptx_sum(ctx: Any, *operands: Any, code: Callable[[int], str]) -> Any:
    [columns] = operands[0].registers.flat[0].type.shape
    step, f32 = min(columns, 4), ir.F32Type.get()
    add = _per_element("add.rn.f32 $0, $1, $2;", f32)

    def of_a_thread(*registers: Any) -> Any:
        sums = []
        for i in range(0, columns, step):
            scalars = [vector.extract(x, [], [j]) for x in registers for j in range(i, i + step)]
            sums += inline_ptx(code(step), scalars, [f32])
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


def _ptx_rows_results(x: Any, *_: Any, **__: Any) -> Any:
    return [jax.core.ShapedArray(shape, np.dtype(np.uint8)) for shape in (x.shape, x.shape[:-1])]


def _lower_ptx_rows(ctx: Any, x: Any, *scalars: Any, code: str, model: Callable[..., Any]) -> Any:
    [columns] = x.registers.flat[0].type.shape
    if columns != x.shape[-1]:
        return lowering._lower_fun(model)(ctx, x, *scalars)
    i32, byte = (ir.IntegerType.get_signless(bits) for bits in (32, 8))
    layout = x.layout.reduce((len(x.shape) - 1,))
    codes, results = np.empty_like(x.registers), np.empty(layout.registers_shape(x.shape[:-1]), dtype=object)
    numbers = [each.registers.item() if isinstance(each, mgpu.FragmentedArray) else each for each in scalars]
    for i, row in enumerate(x.registers.flat):
        elements = [vector.extract(row, [], [j]) for j in range(columns)]
        *words, result = inline_ptx(code, [*elements, *numbers], [i32] * 3)
        words = vector.from_elements(ir.VectorType.get((2,), i32), words)
        codes.flat[i] = vector.bitcast(ir.VectorType.get((columns,), byte), words)
        results.flat[i] = vector.broadcast(ir.VectorType.get((1,), byte), arith.trunci(byte, result))
    return [
        mgpu.FragmentedArray(_registers=registers, _layout=each, _is_signed=False)
        for registers, each in ((codes, x.layout), (results, layout))
    ]


def _per_element(code: str, element: Any) -> Callable[..., Any]:
    """A function from operand registers, or vectors of them, to a result register or vector."""

    def run(*registers: Any) -> Any:
        if not isinstance(registers[0].type, ir.VectorType):
            [result] = inline_ptx(code, registers, [element])
            return result
        [columns] = registers[0].type.shape
        results = [run(*(vector.extract(x, [], [i]) for x in registers)) for i in range(columns)]
        return vector.from_elements(ir.VectorType.get((columns,), element), results)

    return run


def _per_word(code: Callable[[int], str], byte: Any) -> Callable[..., Any]:
    """A function from vectors of operand registers to a vector of bytes."""

    def run(*registers: Any) -> Any:
        [columns] = registers[0].type.shape
        step = min(columns, 4)
        results = []
        for i in range(0, columns, step):
            operands = [vector.extract(x, [], [j]) for x in registers for j in range(i, i + step)]
            [word] = inline_ptx(code(step), operands, [ir.IntegerType.get_signless(32)])
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
