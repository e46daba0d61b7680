"""Loads and stores of each thread, to shared and to global memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kvjax.kernels import compat, ptx
from kvjax.kernels.aliases import Context, Lowered, Ref, Transforms, Value
from kvjax.kernels.lanes.words import LAYOUT, bits, column, from_word, half2, to_word
from kvjax.kernels.registers import THREADS, WARPS


def load_shared(ref: Ref, offsets: jax.Array, size: int, immediate: int = 0) -> list[jax.Array]:
    """Loads `size` bytes (1, 2, 4, 8 or 16) from byte `offsets + immediate` of shared memory, as uint32 registers."""
    if compat.interpreting():
        data = bytes_at(ref, offsets + immediate, size)
        data = lax.pad(data.astype(jnp.uint32), jnp.uint32(0), ((0, 0, 0), (0, -size % 4, 0))).reshape(THREADS, -1, 4)
        words = functools.reduce(lax.bitwise_or, (column(data, i) << 8 * i for i in range(4)))
        return [column(words, i) for i in range(words.shape[1])]
    count = max(1, size // 4)

    def run(_: Context, ref: Lowered, offsets: Lowered) -> Lowered:
        i32 = ir.IntegerType.get_signless(32)
        address = arith.addi(shared_address(ref), to_word(offsets))
        registers = ", ".join(f"${i}" for i in range(count))
        if size < 4:
            code = f"{{ .reg .b16 x; ld.shared.u{8 * size} x, [$1+{immediate}]; cvt.u32.u16 $0, x; }}"
        else:
            vector_of = {1: "", 2: ".v2", 4: ".v4"}[count]
            code = f"ld.shared{vector_of}.b32 {{{registers}}}, [${count}+{immediate}];".replace(
                "{$0}", "$0" if count == 1 else "{$0}"
            )
        values = ptx.inline(code, [address], [i32] * count, side_effects=True)
        return tuple(from_word(value, np.uint32) for value in values)

    shapes = tuple(plgpu.ShapeDtypeStruct((THREADS,), np.dtype(np.uint32), layout=LAYOUT) for _ in range(count))
    return list(plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT), return_type=shapes)(run)(ref, offsets))


def load_transposed(ref: Ref, offsets: jax.Array, count: int, immediate: int = 0) -> list[jax.Array]:
    """Loads `count` (1, 2 or 4) 8 by 8 matrices of 16-bit elements from shared memory, transposed.

    Thread `8 * i + j` of a warp provides the offset of row `j` of matrix `i`: 16 bytes, 16-byte aligned. The thread in
    row `g` and column `c` receives elements `(2c, g)` and `(2c + 1, g)` of each matrix.
    """
    if compat.interpreting():
        data = bytes_at(ref, offsets + immediate, 16).astype(jnp.uint32)
        data = data.reshape(THREADS, 8, 2)
        elements = (column(data, 0) | column(data, 1) << 8).reshape(WARPS, 4, 8, 8)
        columns = jnp.swapaxes(elements, 2, 3).reshape(WARPS, 4, 8, 4, 2)
        words = column(columns, 0) | column(columns, 1) << 16
        return [lax.index_in_dim(words, i, 1, keepdims=False).reshape(-1) for i in range(count)]

    def run(_: Context, ref: Lowered, offsets: Lowered) -> Lowered:
        i32 = ir.IntegerType.get_signless(32)
        address = arith.addi(shared_address(ref), to_word(offsets))
        registers = ", ".join(f"${i}" for i in range(count))
        code = f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{registers}}}, [${count}+{immediate}];"
        values = ptx.inline(code, [address], [i32] * count, side_effects=True)
        return tuple(from_word(value, np.uint32) for value in values)

    shapes = tuple(plgpu.ShapeDtypeStruct((THREADS,), np.dtype(np.uint32), layout=LAYOUT) for _ in range(count))
    return list(plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT), return_type=shapes)(run)(ref, offsets))


def store_shared(
    ref: Ref,
    offsets: jax.Array,
    words: Sequence[jax.Array],
    size: int,
    condition: jax.Array,
    transforms: Transforms = (),
    immediate: int = 0,
) -> None:
    """Stores `size` bytes (1, or 4 for each of `words`) at `offsets + immediate` of shared memory if `condition` holds.

    `transforms` are those of `ref`, which interpret mode lacks.
    """
    if compat.interpreting():
        data = lax.bitcast_convert_type(jnp.stack(words, axis=1), jnp.uint8).reshape(THREADS, -1)
        flat = ref[...]
        data = lax.slice_in_dim(data, 0, size, axis=1)
        index = jnp.where(condition[:, None], indices_from(offsets + immediate, size), flat.shape[0])
        ref[...] = flat.at[index].set(data, mode="drop")
        return

    def run(_: Context, ref: Lowered, offsets: Lowered, condition: Lowered, *words: Lowered) -> None:
        address = arith.addi(shared_address(ref), to_word(offsets))
        operands = ", ".join(f"${i + 2}" for i in range(len(words)))
        kind = {1: "u8", 2: "u16"}.get(size, {1: "b32", 2: "v2.b32", 4: "v4.b32"}[len(words)])
        value = f"{{{operands}}}" if len(words) > 1 else operands
        known = f"+{immediate}" if immediate else ""
        code = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.{kind} [$0{known}], {value}; }}"
        ptx.inline(code, [address, to_word(condition), *map(to_word, words)], [], side_effects=True)

    types = plgpu.RefType(transforms), LAYOUT, LAYOUT, *((LAYOUT,) * len(words))
    words = [bits(word, jnp.uint32) for word in words]
    plgpu.inline_mgpu(arg_types=types)(run)(ref, offsets, condition, *words)


def bytes_at(ref: Ref, offsets: jax.Array, size: int) -> jax.Array:
    """The `size` bytes from each of `offsets` of a uint8 reference, in interpret mode."""
    whole = ref[...]
    return jnp.take(whole, indices_from(offsets, size), mode="clip")


def indices_from(offsets: jax.Array, size: int) -> jax.Array:
    """The `size` indices from each of `offsets` on: `[128, size]`."""
    return lax.broadcast_in_dim(offsets, (THREADS, size), (0,)) + lax.broadcasted_iota(jnp.int32, (THREADS, size), 1)


def shared_address(ref: Lowered) -> Value:
    """The address in shared memory of a reference, as i32."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.ptrtoint(i32, utils.memref_ptr(ref))


def load_global(ref: Ref, index: jax.Array, condition: jax.Array | None = None, otherwise: int = 0) -> jax.Array:
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

    def run(_: Context, ref: Lowered, index: Lowered, *condition: Lowered) -> Lowered:
        address = global_address(ref, to_word(index), dtype.itemsize)
        predicate = "setp.ne.b32 p, $2, 0;" if condition else ""
        guard = "@p " if condition else ""
        default = f"mov.b32 $0, {otherwise & 0xFFFFFFFF};"
        if dtype.itemsize == 2:
            load = f".reg .b16 x; mov.b16 x, {otherwise & 0xFFFF}; {guard}ld.global.b16 x, [$1]; cvt.u32.u16 $0, x;"
        else:
            load = f"{default} {guard}ld.global.b32 $0, [$1];"
        code = f"{{ .reg .pred p; {predicate} {load} }}"
        i32 = ir.IntegerType.get_signless(32)
        [value] = ptx.inline(code, [address, *map(to_word, condition)], [i32], side_effects=True)
        return (from_word(value, np.uint32),)

    extra = [] if condition is None else [condition]
    shapes = (plgpu.ShapeDtypeStruct((THREADS,), np.dtype(np.uint32), layout=LAYOUT),)
    types = plgpu.RefType(), LAYOUT, *((LAYOUT,) * len(extra))
    return plgpu.inline_mgpu(arg_types=types, return_type=shapes)(run)(ref, index, *extra)[0]


class Bytes(NamedTuple):
    """Bytes in global memory, for each thread; numbers of threads are int32 `[128]`.

    Attributes:
      page: page in the reference.
      page_bytes: bytes between pages.
      offset: byte in the page.
      condition: bool `[128]`, whether there are any; zeros are loaded where it does not hold.
    """

    page: jax.Array
    page_bytes: int
    offset: jax.Array
    condition: jax.Array


def load_global_words(ref: Ref, index: jax.Array, size: int, condition: jax.Array) -> list[jax.Array]:
    """Loads `size` bytes (4, 8 or 16) from element `index` of a one-dimensional reference on, as uint32 registers.

    Elements have 2 or 4 bytes, and addresses are multiples of `size`. Zeros are loaded where `condition` does not hold.
    """
    dtype = np.dtype(ref.dtype)
    if compat.interpreting():
        data = ref[...]
        places = indices_from(index, size // dtype.itemsize)
        found = lax.bitcast_convert_type(jnp.take(data, places, mode="fill"), jnp.uint8).reshape(THREADS, size // 4, 4)
        return _words_where(condition, found)

    def run(_: Context, ref: Lowered, index: Lowered, condition: Lowered) -> Lowered:
        return _load_words(global_address(ref, to_word(index), dtype.itemsize), condition, size)

    shapes = tuple(plgpu.ShapeDtypeStruct((THREADS,), np.dtype(np.uint32), layout=LAYOUT) for _ in range(size // 4))
    types = plgpu.RefType(), LAYOUT, LAYOUT
    return list(plgpu.inline_mgpu(arg_types=types, return_type=shapes)(run)(ref, index, condition))


def load_global_bytes(ref: Ref, where: Bytes, size: int, immediate: int = 0) -> list[jax.Array]:
    """Loads 4, 8 or 16 bytes, aligned to as many, from byte `immediate` of `where` on, as uint32 registers."""
    if compat.interpreting():
        data = lax.bitcast_convert_type(ref[...], jnp.uint8).reshape(-1)
        start = where.page * where.page_bytes + where.offset + immediate
        found = jnp.take(data, indices_from(start, size), mode="fill").reshape(THREADS, size // 4, 4)
        return _words_where(where.condition, found)

    def run(_: Context, ref: Lowered, page: Lowered, offset: Lowered, condition: Lowered) -> Lowered:
        address = _page_address(ref, page, where.page_bytes, offset)
        return _load_words(address, condition, size, immediate)

    shapes = tuple(plgpu.ShapeDtypeStruct((THREADS,), np.dtype(np.uint32), layout=LAYOUT) for _ in range(size // 4))
    types = plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT
    inlined = plgpu.inline_mgpu(arg_types=types, return_type=shapes)(run)
    return list(inlined(ref, where.page, where.offset, where.condition))


def _words_where(condition: jax.Array, found: jax.Array) -> list[jax.Array]:
    """Bytes `[128, words, 4]` as registers, zeros where `condition` does not hold; in interpret mode."""
    words = lax.bitcast_convert_type(found, jnp.uint32)
    return [jnp.where(condition, column(words, i), jnp.uint32(0)) for i in range(words.shape[1])]


def _load_words(address: Value, condition: Lowered, size: int, immediate: int = 0) -> Lowered:
    """Loads 4, 8 or 16 bytes from `address + immediate` where `condition` holds, and zeros elsewhere."""
    count, i32 = size // 4, ir.IntegerType.get_signless(32)
    registers = ", ".join(f"${i}" for i in range(count))
    clear = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    to, kind = (registers, "b32") if count == 1 else (f"{{{registers}}}", f"v{count}.b32")
    code = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {clear} @p ld.global.{kind} {to}, [${count}+{immediate}]; }}"
    )
    values = ptx.inline(code, [address, to_word(condition)], [i32] * count, side_effects=True, early=True)
    return tuple(from_word(value, np.uint32) for value in values)


def prefetch_global_bytes(ref: Ref, where: Bytes, size: int) -> None:
    """Prefetches bytes to the L2 cache; `size` and addresses are multiples of 16."""
    if compat.interpreting():
        return

    def run(_: Context, ref: Lowered, page: Lowered, offset: Lowered, condition: Lowered) -> None:
        address = _page_address(ref, page, where.page_bytes, offset)
        code = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p cp.async.bulk.prefetch.L2.global [$0], {size}; }}"
        ptx.inline(code, [address, to_word(condition)], [], side_effects=True)

    types = plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT
    plgpu.inline_mgpu(arg_types=types)(run)(ref, where.page, where.offset, where.condition)


def _page_address(ref: Lowered, page: Lowered, page_bytes: int, offset: Lowered) -> Value:
    i64 = ir.IntegerType.get_signless(64)
    address = arith.muli(arith.extui(i64, to_word(page)), mgpu.c(page_bytes, i64))
    address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(ref)), address)
    return arith.addi(address, arith.extui(i64, to_word(offset)))


def prefetch_global(ref: Ref, index: jax.Array, condition: jax.Array) -> None:
    """Prefetches element `index` of a one-dimensional reference in global memory to L2 where `condition` holds."""
    if compat.interpreting():
        return

    def run(_: Context, ref: Lowered, index: Lowered, condition: Lowered) -> None:
        address = global_address(ref, to_word(index), np.dtype(ref_dtype).itemsize)
        code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }"
        ptx.inline(code, [address, to_word(condition)], [], side_effects=True)

    ref_dtype = ref.dtype
    types = plgpu.RefType(), LAYOUT, LAYOUT
    plgpu.inline_mgpu(arg_types=types)(run)(ref, index, condition)


def store_global(ref: Ref, index: jax.Array, value: jax.Array, condition: jax.Array) -> None:
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

    def run(_: Context, ref: Lowered, index: Lowered, value: Lowered, condition: Lowered) -> None:
        address = global_address(ref, to_word(index), dtype.itemsize)
        if dtype.itemsize == 2:
            store = ".reg .b16 x, y; mov.b32 {x, y}, $1; @p st.global.b16 [$0], x;"
        else:
            store = "@p st.global.b32 [$0], $1;"
        code = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; {store} }}"
        ptx.inline(code, [address, to_word(value), to_word(condition)], [], side_effects=True)

    types = plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT
    plgpu.inline_mgpu(arg_types=types)(run)(ref, index, value, condition)


def store_global_words(ref: Ref, index: jax.Array, words: Sequence[jax.Array], condition: jax.Array) -> None:
    """Stores 1, 2 or 4 words from element `index` of a one-dimensional reference on, where `condition` holds.

    Elements have 2 or 4 bytes, and the address is a multiple of the words' size.
    """
    dtype = np.dtype(ref.dtype)
    if compat.interpreting():
        data = ref[...]
        stored = lax.bitcast_convert_type(jnp.stack([bits(word, jnp.uint32) for word in words], axis=1), dtype)
        stored = stored.reshape(THREADS, -1)
        places = indices_from(index, stored.shape[1])
        ref[...] = data.at[jnp.where(condition[:, None], places, data.shape[0])].set(stored, mode="drop")
        return

    def run(_: Context, ref: Lowered, index: Lowered, condition: Lowered, *words: Lowered) -> None:
        address = global_address(ref, to_word(index), dtype.itemsize)
        registers = ", ".join(f"${i + 2}" for i in range(len(words)))
        kind, value = ("b32", registers) if len(words) == 1 else (f"v{len(words)}.b32", f"{{{registers}}}")
        code = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global.{kind} [$0], {value}; }}"
        ptx.inline(code, [address, to_word(condition), *map(to_word, words)], [], side_effects=True)

    types = plgpu.RefType(), *((LAYOUT,) * (2 + len(words)))
    words = [bits(word, jnp.uint32) for word in words]
    plgpu.inline_mgpu(arg_types=types)(run)(ref, index, condition, *words)


def max_global(ref: Ref, index: jax.Array, value: jax.Array, condition: jax.Array) -> None:
    """Raises element `index` of a one-dimensional reference to int32 in global memory to `value`, atomically.

    Only where `condition` holds; `value` is int32, not negative.
    """
    if compat.interpreting():  # programs of a grid run one after another
        data = ref[...]
        ref[...] = data.at[jnp.where(condition, index, data.shape[0])].max(value, mode="drop")
        return

    def run(_: Context, ref: Lowered, index: Lowered, value: Lowered, condition: Lowered) -> None:
        address = global_address(ref, to_word(index), 4)
        code = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.relaxed.gpu.global.max.u32 [$0], $1; }"
        ptx.inline(code, [address, to_word(value), to_word(condition)], [], side_effects=True)

    types = plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT
    plgpu.inline_mgpu(arg_types=types)(run)(ref, index, value, condition)


def global_address(ref: Lowered, index: Value, itemsize: int) -> Value:
    """The address of an element of a reference in global memory, as i64."""
    i64 = ir.IntegerType.get_signless(64)
    base = llvm.ptrtoint(i64, utils.memref_ptr(ref))
    return arith.addi(base, arith.muli(arith.extsi(i64, index), mgpu.c(itemsize, i64)))
