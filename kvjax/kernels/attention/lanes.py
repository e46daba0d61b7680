"""Warp-level programming: one register of every thread as an array.

A `[128]` array of 32-bit elements in `LANES` is one register of each thread of a warpgroup. Arithmetic on such arrays
is `jax.numpy`'s; this module adds warp-level instructions (matrix products, shuffles, transposes), and loads and stores
at per-thread addresses. Each has a model in `jax.numpy`, which interpret mode runs.

Threads of a warp are numbered as in the matrix instructions. Thread `4 * g + c` of a warp is row `g` (0 to 7)
and column `c` (0 to 3) of an 8 by 4 grid; `_grid` shows a register in that form.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from kvjax.kernels import compat
from kvjax.kernels.registers import LANES, THREADS, WARPS, lane_layout

LAYOUT = lane_layout((THREADS,), 1)
"""One element of an array of `THREADS` for each thread, in order."""

_SIGNED = {np.dtype(np.int32): True, np.dtype(np.uint32): False, np.dtype(np.float32): None}


def thread_index() -> jax.Array:
    """int32 `[128]`: each thread's number in its warpgroup."""
    return compat.layout_cast(lax.iota(jnp.int32, THREADS), LAYOUT)


def splat(value: Any, dtype: Any) -> jax.Array:
    """A register that holds `value`, a number or a scalar, in every thread."""
    x = lax.broadcast(jnp.asarray(value, dtype), (THREADS,))
    return compat.layout_cast(x, LAYOUT)


def bits(x: jax.Array, dtype: Any) -> jax.Array:
    """A bitcast of a register to another 32-bit type."""
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.integer):
        return x.astype(dtype)  # a bitcast would not change the signedness that Mosaic tracks
    return lax.bitcast_convert_type(x, dtype)


def asm(
    code: str,
    model: Callable[..., Any],
    *registers: jax.Array,
    results: Sequence[Any],
    convergent: bool = False,
) -> list[jax.Array]:
    """Runs PTX in each thread.

    Args:
      code: writes `$0` and so on, one for each of `results`, and reads the operands after them.
      model: computes the same in `jax.numpy`: from registers to a list of registers.
      registers: operands.
      results: dtypes of the results.
      convergent: whether the threads of a warp exchange data.
    """
    if compat.interpreting():
        return list(model(*registers))

    def run(_: Any, *operands: Any) -> Any:
        values = [_scalar(x) for x in operands]
        types = [utils.dtype_to_ir_type(np.dtype(dtype)) for dtype in results]
        outputs = compat.inline_ptx(code, values, types, side_effects=convergent)
        return tuple(_register(value, dtype) for value, dtype in zip(outputs, results, strict=True))

    shapes = tuple(plgpu.ShapeDtypeStruct((THREADS,), np.dtype(dtype), layout=LAYOUT) for dtype in results)
    return list(plgpu.inline_mgpu(arg_types=(LAYOUT,) * len(registers), return_type=shapes)(run)(*registers))


def _scalar(x: Any) -> Any:
    [register] = x.registers.flat
    return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register


def _register(value: Any, dtype: Any) -> Any:
    layout = LAYOUT.to_mgpu()
    return mgpu.FragmentedArray.splat(value, (THREADS,), layout, is_signed=_SIGNED[np.dtype(dtype)])


def _grid(x: jax.Array) -> jax.Array:
    """A register as `[warps, 8, 4]`."""
    return x.reshape(WARPS, 8, 4)


def shuffle_xor(x: jax.Array, mask: int) -> jax.Array:
    """The register of the thread whose lane number is this one's xor `mask`."""

    def model(x: jax.Array) -> list[jax.Array]:
        return [lax.rev(x.reshape(-1, 2, mask), (1,)).reshape(-1)]

    code = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
    return asm(code, model, x, results=[x.dtype], convergent=True)[0]


def shuffle_up(x: jax.Array, distance: int) -> jax.Array:
    """The register of the thread `distance` lanes before this one; 0 where there is none."""

    def model(x: jax.Array) -> list[jax.Array]:
        lanes = x.reshape(WARPS, LANES)
        padded = lax.pad(lanes, jnp.zeros((), x.dtype), ((0, 0, 0), (distance, -distance, 0)))
        return [padded.reshape(-1)]

    code = (
        "{ .reg .pred inside; .reg .b32 x;"
        f" shfl.sync.up.b32 x|inside, $1, {distance}, 0, 0xffffffff;"
        " selp.b32 $0, x, 0, inside; }"
    )
    return asm(code, model, x, results=[x.dtype], convergent=True)[0]


def sum_over_warp(x: jax.Array) -> jax.Array:
    """The sum of an int32 register over the threads of a warp, in all of them."""
    return _over_warp(x, "add", jnp.sum)


def max_over_warp(x: jax.Array) -> jax.Array:
    """The maximum of an int32 register over the threads of a warp, in all of them."""
    return _over_warp(x, "max", jnp.max)


def _over_warp(x: jax.Array, operation: str, reduction: Callable[..., jax.Array]) -> jax.Array:
    def model(x: jax.Array) -> list[jax.Array]:
        by_warp = x.reshape(WARPS, LANES)
        reduced = reduction(by_warp, axis=1, keepdims=True).astype(x.dtype)
        return [jnp.broadcast_to(reduced, by_warp.shape).reshape(-1)]

    code = f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;"
    return asm(code, model, x, results=[x.dtype], convergent=True)[0]


def max_over_rows(x: jax.Array) -> jax.Array:
    """The float32 maximum over the eight threads of a column, in all of them."""
    for mask in (4, 8, 16):
        x = jnp.maximum(x, shuffle_xor(x, mask))
    return x


def sum_over_rows(x: jax.Array) -> jax.Array:
    """The sum over the eight threads of a column, in all of them."""
    for mask in (4, 8, 16):
        x = x + shuffle_xor(x, mask)
    return x


def transpose(x: jax.Array) -> jax.Array:
    """Transposes the 8 by 8 matrix of 16-bit elements that a register holds across a warp.

    Row `g` is in the threads of row `g`, two elements per thread.
    """

    def model(x: jax.Array) -> list[jax.Array]:
        halves = jnp.stack([x & 0xFFFF, x >> 16], axis=-1).reshape(WARPS, 8, 8)
        halves = jnp.swapaxes(halves, 1, 2).reshape(THREADS, 2)
        return [_column(halves, 0) | _column(halves, 1) << 16]

    code = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return asm(code, model, x, results=[jnp.uint32], convergent=True)[0]


def mma(acc: Sequence[jax.Array], a: Sequence[jax.Array], b: Sequence[jax.Array], dtype: Any) -> list[jax.Array]:
    """`acc + a @ b` in each warp: `a` 16 by 16 and `b` 16 by 8, of float16 or bfloat16, `acc` float32 16 by 8.

    Registers of the thread in row `g` and column `c` (each pair the lower column or row first):

    ```
          a: columns 2c, 2c+1   columns 2c+8, 2c+9      b: rows 2c, 2c+1   rows 2c+8, 2c+9
    row g         a[0]                a[2]        column g       b[0]              b[1]
    row g+8       a[1]                a[3]
          acc: columns 2c, 2c+1
    row g        acc[0], acc[1]
    row g+8      acc[2], acc[3]
    ```
    """
    name = {jnp.dtype(jnp.float16): "f16", jnp.dtype(jnp.bfloat16): "bf16"}[jnp.dtype(dtype)]

    def model(*registers: jax.Array) -> list[jax.Array]:
        left, right, sums = registers[:4], registers[4:6], registers[6:]

        def pairs(x: jax.Array) -> jax.Array:  # [warps, 8, 8]
            return lax.bitcast_convert_type(_grid(x), dtype).astype(jnp.float32).reshape(WARPS, 8, 8)

        matrix = jnp.concatenate(
            [jnp.concatenate([pairs(left[i]), pairs(left[i + 2])], axis=2) for i in range(2)], axis=1
        )
        other = jnp.concatenate([pairs(right[0]), pairs(right[1])], axis=2)
        product = jnp.einsum("wmk,wnk->wmn", matrix, other, precision="highest")
        product = product.reshape(WARPS, 2, 8, 4, 2)
        return [
            sums[2 * i + j] + lax.index_in_dim(_column(product, j), i, 1, keepdims=False).reshape(-1)
            for i in range(2)
            for j in range(2)
        ]

    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return asm(code, model, *a, *b, *acc, results=[jnp.float32] * 4, convergent=True)


def any_in_warp(mask: jax.Array) -> jax.Array:
    """Whether a bool register holds in any thread of the warp: a scalar, which may differ from warp to warp.

    In interpret mode it is the same for all warps of a warpgroup: a true result must be safe for every warp.
    """
    if compat.interpreting():
        return mask.any()

    def run(_: Any, mask: Any) -> Any:
        code = (
            "{ .reg .pred mine, any; setp.ne.b32 mine, $1, 0;"
            " vote.sync.any.pred any, mine, 0xffffffff; selp.b32 $0, 1, 0, any; }"
        )
        [found] = compat.inline_ptx(code, [_scalar(mask)], [ir.IntegerType.get_signless(32)], side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    result = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))
    found = plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)(run)(mask.astype(jnp.int32))
    return found != 0


def of_first_thread(x: jax.Array) -> jax.Array:
    """A register that is the same in all threads of a warp, as a scalar."""
    if compat.interpreting():
        return lax.index_in_dim(x, 0, keepdims=False)

    def run(_: Any, x: Any) -> Any:
        return mgpu.FragmentedArray.splat(_scalar(x), (), is_signed=_SIGNED[np.dtype(np.int32)])

    result = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))
    return plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)(run)(x)


def load_shared(ref: Any, offsets: jax.Array, size: int, immediate: int = 0) -> list[jax.Array]:
    """Loads `size` bytes (1, 2, 4, 8 or 16) from byte `offsets + immediate` of shared memory, as uint32 registers."""
    if compat.interpreting():
        data = _bytes_of(ref, offsets + immediate, size)
        data = lax.pad(data.astype(jnp.uint32), jnp.uint32(0), ((0, 0, 0), (0, -size % 4, 0))).reshape(THREADS, -1, 4)
        words = functools.reduce(lax.bitwise_or, (_column(data, i) << 8 * i for i in range(4)))
        return [_column(words, i) for i in range(words.shape[1])]
    count = max(1, size // 4)

    def run(_: Any, ref: Any, offsets: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        address = arith.addi(_shared_address(ref), _scalar(offsets))
        registers = ", ".join(f"${i}" for i in range(count))
        if size < 4:
            code = f"{{ .reg .b16 x; ld.shared.u{8 * size} x, [$1+{immediate}]; cvt.u32.u16 $0, x; }}"
        else:
            vector_of = {1: "", 2: ".v2", 4: ".v4"}[count]
            code = f"ld.shared{vector_of}.b32 {{{registers}}}, [${count}+{immediate}];".replace(
                "{$0}", "$0" if count == 1 else "{$0}"
            )
        values = compat.inline_ptx(code, [address], [i32] * count, side_effects=True)
        return tuple(_register(value, np.uint32) for value in values)

    shapes = tuple(plgpu.ShapeDtypeStruct((THREADS,), np.dtype(np.uint32), layout=LAYOUT) for _ in range(count))
    return list(plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT), return_type=shapes)(run)(ref, offsets))


def load_transposed(ref: Any, offsets: jax.Array, count: int, immediate: int = 0) -> list[jax.Array]:
    """Loads `count` (1, 2 or 4) 8 by 8 matrices of 16-bit elements from shared memory, transposed.

    Thread `8 * i + j` of a warp provides the offset of row `j` of matrix `i`: 16 bytes, 16-byte aligned. The thread in
    row `g` and column `c` receives elements `(2c, g)` and `(2c + 1, g)` of each matrix.
    """
    if compat.interpreting():
        data = _bytes_of(ref, offsets + immediate, 16).astype(jnp.uint32)
        data = data.reshape(THREADS, 8, 2)
        elements = (_column(data, 0) | _column(data, 1) << 8).reshape(WARPS, 4, 8, 8)
        columns = jnp.swapaxes(elements, 2, 3).reshape(WARPS, 4, 8, 4, 2)
        words = _column(columns, 0) | _column(columns, 1) << 16
        return [lax.index_in_dim(words, i, 1, keepdims=False).reshape(-1) for i in range(count)]

    def run(_: Any, ref: Any, offsets: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        address = arith.addi(_shared_address(ref), _scalar(offsets))
        registers = ", ".join(f"${i}" for i in range(count))
        code = f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{registers}}}, [${count}+{immediate}];"
        values = compat.inline_ptx(code, [address], [i32] * count, side_effects=True)
        return tuple(_register(value, np.uint32) for value in values)

    shapes = tuple(plgpu.ShapeDtypeStruct((THREADS,), np.dtype(np.uint32), layout=LAYOUT) for _ in range(count))
    return list(plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT), return_type=shapes)(run)(ref, offsets))


def store_shared(ref: Any, offsets: jax.Array, words: Sequence[jax.Array], size: int, condition: jax.Array) -> None:
    """Stores `size` bytes (1, or 4 for each of `words`) at byte `offsets` of shared memory where `condition` holds."""
    if compat.interpreting():
        data = lax.bitcast_convert_type(jnp.stack(words, axis=1), jnp.uint8).reshape(THREADS, -1)
        flat = ref[...]
        data = lax.slice_in_dim(data, 0, size, axis=1)
        index = jnp.where(condition[:, None], _run(offsets, size), flat.shape[0])
        ref[...] = flat.at[index].set(data, mode="drop")
        return

    def run(_: Any, ref: Any, offsets: Any, condition: Any, *words: Any) -> None:
        address = arith.addi(_shared_address(ref), _scalar(offsets))
        operands = ", ".join(f"${i + 2}" for i in range(len(words)))
        kind = {1: "u8", 2: "u16"}.get(size, {1: "b32", 2: "v2.b32", 4: "v4.b32"}[len(words)])
        value = f"{{{operands}}}" if len(words) > 1 else operands
        code = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.{kind} [$0], {value}; }}"
        compat.inline_ptx(code, [address, _scalar(condition), *map(_scalar, words)], [], side_effects=True)

    types = plgpu.RefType(), LAYOUT, LAYOUT, *((LAYOUT,) * len(words))
    words = [bits(word, jnp.uint32) for word in words]
    plgpu.inline_mgpu(arg_types=types)(run)(ref, offsets, condition.astype(jnp.int32), *words)


def _bytes_of(ref: Any, offsets: jax.Array, size: int) -> jax.Array:
    whole = ref[...]
    return jnp.take(whole, _run(offsets, size), mode="clip")


def _run(offsets: jax.Array, size: int) -> jax.Array:
    return lax.broadcast_in_dim(offsets, (THREADS, size), (0,)) + lax.broadcasted_iota(jnp.int32, (THREADS, size), 1)


def _column(x: jax.Array, index: int) -> jax.Array:
    return lax.index_in_dim(x, index, x.ndim - 1, keepdims=False)


def _shared_address(ref: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.ptrtoint(i32, utils.memref_ptr(ref))


def _statement(code: str) -> None:
    def run(_: Any) -> None:
        compat.inline_ptx(code, [], [], clobber="~{memory}")

    plgpu.inline_mgpu()(run)()


def wait_for_block() -> None:
    """A barrier of all threads of a block; in interpret mode, of a block that is one warpgroup."""
    if compat.interpreting():
        plgpu.commit_smem()
    else:
        _statement("bar.sync 0;")


def wait_before_copies() -> None:
    """`wait_for_block`, after which bulk copies may overwrite shared memory that threads have accessed.

    Threads and bulk copies access memory through different proxies, which a barrier alone does not order.
    """
    if compat.interpreting():
        plgpu.commit_smem()
    else:
        _statement("fence.proxy.async.shared::cta; bar.sync 0;")


def half2(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Two float32 registers as one of two 16-bit elements, rounded to nearest even, `x` in the lower half."""
    name = {jnp.dtype(jnp.float16): "f16x2", jnp.dtype(jnp.bfloat16): "bf16x2"}[jnp.dtype(dtype)]

    def model(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        low, high = (lax.bitcast_convert_type(v.astype(dtype), jnp.uint16).astype(jnp.uint32) for v in (x, y))
        return [low | high << 16]

    return asm(f"cvt.rn.{name}.f32 $0, $2, $1;", model, x, y, results=[jnp.uint32])[0]


def exp2(x: jax.Array) -> jax.Array:
    """`2 ** x` in float32, approximate; 0 for -inf."""
    return asm("ex2.approx.ftz.f32 $0, $1;", lambda x: [jnp.exp2(x)], x, results=[jnp.float32])[0]


def permute(x: jax.Array, y: jax.Array, selector: int | jax.Array) -> jax.Array:
    """Selects bytes of `x` (numbers 0 to 3) and `y` (4 to 7): nibble `i` of the selector is the number of byte `i`."""
    dynamic = [] if isinstance(selector, int) else [selector]

    def model(x: jax.Array, y: jax.Array, *dynamic: jax.Array) -> list[jax.Array]:
        chosen = dynamic[0] if dynamic else jnp.full((THREADS,), selector, jnp.uint32)
        source = jnp.stack([w >> shift & 0xFF for w in (x, y) for shift in (0, 8, 16, 24)], axis=1)
        result = jnp.zeros((THREADS,), jnp.uint32)
        for i in range(4):
            index = (chosen >> 4 * i & 7).astype(jnp.int32)
            wanted = lax.broadcast_in_dim(index, source.shape, (0,)) == lax.broadcasted_iota(jnp.int32, source.shape, 1)
            result |= jnp.sum(jnp.where(wanted, source, jnp.uint32(0)), axis=1, dtype=jnp.uint32) << 8 * i
        return [result]

    third = "$3" if dynamic else f"0x{selector:x}"
    return asm(f"prmt.b32 $0, $1, $2, {third};", model, x, y, *dynamic, results=[jnp.uint32])[0]


def both_halves(x: jax.Array, half: int) -> jax.Array:
    """The lower or the upper half of each register in both halves, as instructions on pairs take it."""

    def model(x: jax.Array) -> list[jax.Array]:
        part = x >> 16 * half & 0xFFFF
        return [part | part << 16]

    code = f"{{ .reg .b16 x<2>; mov.b32 {{x0, x1}}, $1; mov.b32 $0, {{x{half}, x{half}}}; }}"
    return asm(code, model, x, results=[jnp.uint32])[0]


def load_global(ref: Any, index: jax.Array, condition: jax.Array | None = None, otherwise: int = 0) -> jax.Array:
    """Loads element `index` of a one-dimensional reference in global memory, of 2 or 4 bytes, where `condition` holds.

    Returns uint32, with elements of 2 bytes in the lower half; `otherwise` where `condition` does not hold.
    """
    dtype = np.dtype(ref.dtype)
    if compat.interpreting():
        data = ref[...]
        loaded = lax.bitcast_convert_type(
            jnp.take(data, index, mode="clip"), np.dtype(f"uint{8 * dtype.itemsize}")
        ).astype(jnp.uint32)
        return loaded if condition is None else jnp.where(condition, loaded, jnp.uint32(otherwise & 0xFFFFFFFF))

    def run(_: Any, ref: Any, index: Any, *condition: Any) -> Any:
        address = _global_address(ref, _scalar(index), dtype.itemsize)
        predicate = "setp.ne.b32 p, $2, 0;" if condition else ""
        guard = "@p " if condition else ""
        default = f"mov.b32 $0, {otherwise & 0xFFFFFFFF};"
        if dtype.itemsize == 2:
            load = f".reg .b16 x; mov.b16 x, {otherwise & 0xFFFF}; {guard}ld.global.b16 x, [$1]; cvt.u32.u16 $0, x;"
        else:
            load = f"{default} {guard}ld.global.b32 $0, [$1];"
        code = f"{{ .reg .pred p; {predicate} {load} }}"
        i32 = ir.IntegerType.get_signless(32)
        [value] = compat.inline_ptx(code, [address, *map(_scalar, condition)], [i32], side_effects=True)
        return (_register(value, np.uint32),)

    extra = [] if condition is None else [condition.astype(jnp.int32)]
    shapes = (plgpu.ShapeDtypeStruct((THREADS,), np.dtype(np.uint32), layout=LAYOUT),)
    types = plgpu.RefType(), LAYOUT, *((LAYOUT,) * len(extra))
    return plgpu.inline_mgpu(arg_types=types, return_type=shapes)(run)(ref, index, *extra)[0]


def prefetch_global(ref: Any, index: jax.Array, condition: jax.Array) -> None:
    """Brings element `index` of a one-dimensional reference in global memory to L2 where `condition` holds."""
    if compat.interpreting():
        return

    def run(_: Any, ref: Any, index: Any, condition: Any) -> None:
        address = _global_address(ref, _scalar(index), np.dtype(ref_dtype).itemsize)
        code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }"
        compat.inline_ptx(code, [address, _scalar(condition)], [], side_effects=True)

    ref_dtype = ref.dtype
    types = plgpu.RefType(), LAYOUT, LAYOUT
    plgpu.inline_mgpu(arg_types=types)(run)(ref, index, condition.astype(jnp.int32))


def store_global(ref: Any, index: jax.Array, value: jax.Array, condition: jax.Array) -> None:
    """Stores `value`, converted to the type of a one-dimensional reference, at element `index` where `condition` holds.

    `value` is float32 for references to floats, int32 for int32 and for uint16, of which the lower half is stored.
    """
    dtype = np.dtype(ref.dtype)
    if compat.interpreting():
        data = ref[...]
        ref[...] = data.at[jnp.where(condition, index, data.shape[0])].set(value.astype(dtype), mode="drop")
        return
    if dtype.itemsize == 2 and dtype != np.uint16:
        value = half2(value, value, dtype)
    value = bits(value, jnp.uint32)

    def run(_: Any, ref: Any, index: Any, value: Any, condition: Any) -> None:
        address = _global_address(ref, _scalar(index), dtype.itemsize)
        if dtype.itemsize == 2:
            store = ".reg .b16 x, y; mov.b32 {x, y}, $1; @p st.global.b16 [$0], x;"
        else:
            store = "@p st.global.b32 [$0], $1;"
        code = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; {store} }}"
        compat.inline_ptx(code, [address, _scalar(value), _scalar(condition)], [], side_effects=True)

    types = plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT
    plgpu.inline_mgpu(arg_types=types)(run)(ref, index, value, condition.astype(jnp.int32))


def _global_address(ref: Any, index: Any, itemsize: int) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    base = llvm.ptrtoint(i64, utils.memref_ptr(ref))
    return arith.addi(base, arith.muli(arith.extsi(i64, index), mgpu.c(itemsize, i64)))


class Copy(NamedTuple):
    """A copy from global to shared memory, by each thread or by one thread of each warp.

    Attributes:
      source: index of the reference to read.
      to: destination byte in shared memory, without `to_immediate`.
      to_immediate: constant to add to `to`.
      row: row in global memory.
      row_bytes: bytes between rows.
      offset: byte in the row, without `immediate`.
      immediate: constant to add to `offset`.
      size: bytes.
      condition: whether anything is copied.
    """

    source: int
    to: jax.Array
    to_immediate: int
    row: jax.Array
    row_bytes: int
    offset: jax.Array
    immediate: int
    size: int | jax.Array
    condition: jax.Array


def copy_async(destination: Any, sources: Sequence[Any], copy: Copy) -> None:
    """Starts each thread's copy of 1, 2, 4, 8 or 16 bytes; copies of 1 or 2 bytes are synchronous."""
    which, to, to_immediate, row, row_bytes, offset, immediate, size, condition = copy
    source = sources[which]
    if not isinstance(size, int):
        raise TypeError("threads copy as many bytes each")
    if compat.interpreting():
        data = lax.bitcast_convert_type(source[...], jnp.uint8).reshape(-1)
        start = row * row_bytes + offset + immediate
        words = jnp.take(data, _run(start, size), mode="clip")
        flat = destination[...]
        index = jnp.where(condition[:, None], _run(to + to_immediate, size), flat.shape[0])
        destination[...] = flat.at[index].set(words, mode="drop")
        return

    def run(_: Any, destination: Any, source: Any, to: Any, row: Any, offset: Any, condition: Any) -> None:
        i64 = ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i64, utils.memref_ptr(source))
        address = arith.addi(base, arith.muli(arith.extui(i64, _scalar(row)), mgpu.c(row_bytes, i64)))
        address = arith.addi(address, arith.extui(i64, _scalar(offset)))
        to_address = arith.addi(_shared_address(destination), _scalar(to))
        target, origin = f"[$0+{to_immediate}]", f"[$1+{immediate}]"
        if size >= 4:
            cache = "cg" if size == 16 else "ca"
            instruction = f"@p cp.async.{cache}.shared.global {target}, {origin}, {size};"
        else:
            kind = f"u{8 * size}"
            instruction = f".reg .b16 x; @p ld.global.{kind} x, {origin}; @p st.shared.{kind} {target}, x;"
        code = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; {instruction} }}"
        compat.inline_ptx(code, [to_address, address, _scalar(condition)], [], clobber="~{memory}")

    types = plgpu.RefType(), plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT, LAYOUT
    plgpu.inline_mgpu(arg_types=types)(run)(destination, source, to, row, offset, condition.astype(jnp.int32))


def initialize_barriers(ref: Any, thread: jax.Array, arrivals: Sequence[int]) -> None:
    """Initializes barriers in shared memory (int32, two words each), each with its number of arrivals.

    `thread`: each thread's number in the block; all of them call this.
    """
    if compat.interpreting():  # one warpgroup and synchronous copies: no barrier is needed
        return

    def run(_: Any, ref: Any, thread: Any) -> None:
        address = _shared_address(ref)
        inits = " ".join(f"@p mbarrier.init.shared::cta.b64 [$0+{8 * i}], {count};" for i, count in enumerate(arrivals))
        # Copies arrive through another proxy than threads, which requires the fence.
        fence = "@p fence.mbarrier_init.release.cluster;"
        code = f"{{ .reg .pred p; setp.eq.u32 p, $1, 0; {inits} {fence} bar.sync 0; }}"
        compat.inline_ptx(code, [address, _scalar(thread)], [], clobber="~{memory}")

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))(run)(ref, thread)


def _with_barrier(ref: Any, index: Any, code: str, *operands: Any) -> None:
    """Runs PTX with the address of barrier `index` as `$0`, and numbers as other operands."""

    def run(_: Any, ref: Any, index: Any, *operands: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        address = arith.addi(_shared_address(ref), arith.muli(_scalar(index), mgpu.c(8, i32)))
        compat.inline_ptx(code, [address, *map(_scalar, operands)], [], clobber="~{memory}")

    if compat.interpreting():
        return
    numbers = [x if jnp.shape(x) else splat(x, jnp.int32) for x in (index, *operands)]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *((LAYOUT,) * len(numbers))))(run)(ref, *numbers)


def wait_for_barrier(ref: Any, index: Any, parity: Any) -> None:
    """Waits until a barrier has completed the phase of a parity: 0 for its first; the one before that is complete."""
    code = (
        "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
        " @done bra OUT; bra AGAIN; OUT: }"
    )
    _with_barrier(ref, index, code, parity)


def copy_bulk(
    destination: Any,
    sources: Sequence[Any],
    barriers: Any,
    index: Any,
    copies: Sequence[Copy],
    transforms: tuple[Any, ...] = (),
) -> None:
    """One thread of each warp starts bulk copies, and arrives at a barrier that also waits for their bytes.

    All threads of a warp pass the same copies. `transforms` are those of the destination.
    """
    if compat.interpreting():
        for copy in copies:
            for warp in range(WARPS):
                _copy_model(destination, sources[copy.source], copy, warp * LANES)
        return

    def run(_: Any, destination: Any, first: Any, second: Any, barriers: Any, index: Any, *registers: Any) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        bases = [llvm.ptrtoint(i64, utils.memref_ptr(source)) for source in (first, second)]
        shared = _shared_address(destination)
        counter = arith.addi(_shared_address(barriers), arith.muli(_scalar(index), mgpu.c(8, i32)))
        operands, code = [counter], []
        size: Any = mgpu.c(0, i32)
        sizes = itertools.count(4 * len(copies))
        for i, copy in enumerate(copies):
            to, row, offset, condition = map(_scalar, registers[4 * i : 4 * i + 4])
            address = arith.muli(arith.extui(i64, row), mgpu.c(copy.row_bytes, i64))
            address = arith.addi(bases[copy.source], address)
            address = arith.addi(address, arith.extui(i64, arith.addi(offset, mgpu.c(copy.immediate, i32))))
            operands += [arith.addi(shared, arith.addi(to, mgpu.c(copy.to_immediate, i32))), address, condition]
            length = mgpu.c(copy.size, i32) if isinstance(copy.size, int) else _scalar(registers[next(sizes)])
            operands.append(length)
            size = arith.addi(size, arith.muli(condition, length))
            target, origin, wanted, bytes_ = (f"${4 * i + j + 2}" for j in range(4))
            code.append(
                f"setp.ne.and.b32 q, {wanted}, 0, p;"
                " @q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                f" [{target}], [{origin}], {bytes_}, [$0];"
            )
        # ptxas knows that `elect` selects one thread. For other predicates it generates a loop over threads.
        begin = (
            "{ .reg .pred p, q; .reg .b64 state; elect.sync _|p, 0xffffffff;"
            " @p mbarrier.arrive.expect_tx.shared::cta.b64 state, [$0], $1;"
        )
        compat.inline_ptx(" ".join([begin, *code, "}"]), [counter, size, *operands[1:]], [], clobber="~{memory}")

    registers = [splat(index, jnp.int32)]
    for copy in copies:
        registers += [copy.to, copy.row, copy.offset, copy.condition.astype(jnp.int32)]
    registers += [copy.size for copy in copies if not isinstance(copy.size, int)]
    types = plgpu.RefType(transforms), *((plgpu.RefType(),) * 3), *((LAYOUT,) * len(registers))
    plgpu.inline_mgpu(arg_types=types)(run)(destination, *sources, barriers, *registers)


def _copy_model(destination: Any, source: Any, copy: Copy, thread: int) -> None:
    row, offset, to, condition = (
        lax.index_in_dim(x, thread, keepdims=False) for x in (copy.row, copy.offset, copy.to, copy.condition)
    )
    data = lax.bitcast_convert_type(source[...], jnp.uint8).reshape(-1)
    size = copy.size if isinstance(copy.size, int) else lax.index_in_dim(copy.size, thread, keepdims=False)
    flat = destination[...]
    at = jnp.arange(flat.shape[0]) - (to + copy.to_immediate)
    copied = jnp.take(data, row * copy.row_bytes + offset + copy.immediate + at, mode="clip")
    destination[...] = jnp.where(condition & (at >= 0) & (at < size), copied, flat)


def arrive_with_copies(ref: Any, index: Any, *, asynchronous: bool) -> None:
    """Each thread arrives at a barrier when its copies have completed; it waits for them unless `asynchronous`."""
    if asynchronous:
        code = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
    else:
        code = "cp.async.wait_all; { .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [$0]; }"
    _with_barrier(ref, index, code)


def arrive_as_warp(ref: Any, index: Any) -> None:
    """One thread of each warp arrives at a barrier, after all threads of the warp."""
    code = (
        "{ .reg .pred p; .reg .u32 lane; .reg .b64 state; bar.warp.sync 0xffffffff;"
        " mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; @p mbarrier.arrive.shared::cta.b64 state, [$0]; }"
    )
    _with_barrier(ref, index, code)
