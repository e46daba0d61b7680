"""Keys and values in memory, laid out as `wgmma` reads them in shared memory: a tile is one run of bytes in both.

Rows of tokens are `[num_rows, columns]`: those of one head of one prompt follow each other, from a multiple of `GROUP`
on; transposed, those of the dims of a tile. Eight rows are divided into runs of `swizzle` bytes, each an eight by eight
matrix of `CHUNK` bytes (or fewer columns) whose columns are permuted differently in each row, so that a column lies in
different banks in each row. Copies of tiles thus need no descriptor, nor anything known when a kernel is compiled.

In interpret mode, where shared memory has no layout, rows are just rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kvjax.kernels import compat, lanes, ptx
from kvjax.kernels.aliases import (
    Barriers,
    Context,
    DType,
    DTypeLike,
    Layout,
    Lowered,
    Ref,
    Scalar,
    ScratchType,
    Transforms,
    Value,
)
from kvjax.kernels.registers import LANES, THREADS, WARPS

GROUP = 8
"""Rows of a matrix of `wgmma`: a tile begins at a multiple of them."""

CHUNK = 16
"""Bytes that are permuted together."""

ITEMSIZE = 2
"""Bytes of an element, except for products in fp8."""


def swizzle_of(columns: int, itemsize: int = ITEMSIZE) -> int:
    """Bytes of a run: the most that divide a row."""
    return next(size for size in (128, 64, 32) if columns * itemsize % size == 0)


def transforms_of(columns: int, itemsize: int = ITEMSIZE) -> Transforms:
    """The layout of rows in shared memory."""
    swizzle = swizzle_of(columns, itemsize)
    tiling = plgpu.TilingTransform((GROUP, swizzle // itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def shared(count: int, rows: int, columns: int, dtype: DTypeLike) -> ScratchType:
    """Shared memory of `count` tiles."""
    transforms = transforms_of(columns, jnp.dtype(dtype).itemsize)
    return plgpu.SMEM((count, rows, columns), dtype, transforms=transforms)


def offset(row: Value, column: Value, columns: int, itemsize: int = ITEMSIZE) -> Value:
    """The byte offset of an element in its group of rows, given its row there; takes integers of any kind."""
    swizzle = swizzle_of(columns, itemsize)
    width = swizzle // itemsize
    in_run = row * swizzle + (column & width - 1) * itemsize
    run = column >> width.bit_length() - 1
    return run * (GROUP * swizzle) + (in_run ^ (in_run >> 7 & swizzle // CHUNK - 1) << 4)


def word_of(row: Scalar, column: Scalar, columns: int, itemsize: int) -> Scalar:
    """The word in memory of an element of rows of tiles."""
    if compat.interpreting():
        return row * (columns * itemsize // 4) + (column * itemsize >> 2)
    group, in_group = row >> GROUP.bit_length() - 1, row & GROUP - 1
    return group * (GROUP * columns * itemsize // 4) + (offset(in_group, column, columns, itemsize) >> 2)


def clear_rows(buffer: Ref, slot: Scalar, start: Scalar, stop: Scalar) -> None:
    """Stores zeros to a tile's rows before `start` and from `stop` on; a warpgroup calls it.

    The rows are visible to tensor cores after `plgpu.commit_smem`.
    """
    _, rows, columns = buffer.shape
    if compat.interpreting():
        row = jnp.arange(rows)[:, None]
        tile = buffer[slot]
        buffer[slot] = jnp.where((row >= start) & (row < stop), tile, jnp.zeros_like(tile))
        return
    # Wherever a row's chunks lie in its run of bytes, all of them are cleared.
    swizzle, in_group, size = swizzle_of(columns), GROUP * columns * ITEMSIZE, rows * columns * ITEMSIZE

    def clear(i: jax.Array, _: None) -> None:
        place = lanes.thread_index() * CHUNK + i * (CHUNK * THREADS)
        row = lax.div(place, jnp.int32(in_group)) * GROUP
        row += lax.div(lax.rem(place, jnp.int32(GROUP * swizzle)), jnp.int32(swizzle))
        is_cleared = ((row < start) | (row >= stop)) & (row < rows)
        zeros = [lanes.splat(0, jnp.int32)] * (CHUNK // 4)
        lanes.store_shared(buffer, place + slot * size, zeros, CHUNK, is_cleared, transforms_of(columns))

    # Not unrolled: registers hold results meanwhile.
    lax.fori_loop(0, -(-size // (CHUNK * THREADS)), clear, None)


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of elements in tiles: its length, and how far apart neighbours are."""

    size: int
    rows: int | jax.Array
    columns: int


@dataclasses.dataclass(frozen=True)
class Places:
    """Where elements of an array belong in tiles; sliced as references are.

    Attributes:
      ref: reference to 16-bit `[num_rows, columns]`.
      axes: the array's axes.
      row: of the first element.
      column: likewise.
      elements: columns of an element: 2 for words.
    """

    ref: Ref
    axes: tuple[Axis, ...]
    row: Value
    column: int = 0
    elements: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(axis.size for axis in self.axes)

    @property
    def dtype(self) -> DType:
        """The array's dtype."""
        return np.dtype(np.uint32) if self.elements == 2 else np.dtype(self.ref.dtype)

    @property
    def at(self) -> Places:
        """Takes slices, as references do."""
        return self

    def __getitem__(self, index: Scalar) -> Places:
        axes, row, column = [], self.row, self.column
        index = index if isinstance(index, tuple) else (index,)
        for axis, each in zip(self.axes, (*index, *[slice(None)] * (len(self.axes) - len(index))), strict=True):
            start = 0
            if isinstance(each, slice):
                axes.append(axis)
            elif isinstance(each, int):
                start = each
            else:
                start = each.start
                axes.append(dataclasses.replace(axis, size=each.size))
            row, column = row + start * axis.rows, column + start * axis.columns
        return dataclasses.replace(self, axes=tuple(axes), row=row, column=column)

    def reshape(self, *shape: int) -> Places:
        """Divides the first axis into two, as gathers do for scales of four tokens."""
        first, *others = self.axes
        outer, inner = shape[:2]
        if outer * inner != first.size or shape[2:] != self.shape[1:]:
            raise ValueError(f"{self.shape} has no {shape=}")
        divided = Axis(outer, first.rows * inner, first.columns * inner), Axis(inner, first.rows, first.columns)
        return dataclasses.replace(self, axes=(*divided, *others))

    def store(self, values: jax.Array, layout: Layout) -> None:
        """Stores an array, in registers in `layout`."""
        if compat.interpreting():
            self._store_interpreted(values)
            return
        columns = self.ref.shape[1]

        def run(_: Context, ref: Lowered, values: Lowered, row: Lowered, *registers: Lowered) -> None:
            i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
            row = ptx.scalar(row.registers.item())
            strides = [ptx.scalar(x.registers.item()) for x in registers]
            base = llvm.ptrtoint(i64, utils.memref_ptr(ref))
            origin = [arith.index_cast(i32, x) for x in next(iter(values.layout.thread_idxs(values.shape)))]
            element_strides = values.layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(values.shape)))
            for place in np.ndindex(values.registers.shape):
                later = np.unravel_index(int(np.dot(place, element_strides[: len(place)])), values.shape)
                index = [arith.addi(x, mgpu.c(int(y), i32)) for x, y in zip(origin, later, strict=True)]
                own_row, column = row, mgpu.c(self.column, i32)
                for i, axis in enumerate(self.axes):
                    if not (isinstance(axis.rows, int) and axis.rows == 0):
                        own_row = arith.addi(own_row, arith.muli(index[i], strides[i]))
                    if axis.columns:
                        column = arith.addi(column, arith.muli(index[i], mgpu.c(axis.columns, i32)))
                group = arith.shrui(own_row, mgpu.c(3, i32))
                in_group = arith.andi(own_row, mgpu.c(GROUP - 1, i32))
                inner = _Integer(in_group), _Integer(column)
                where = arith.muli(arith.extui(i64, group), mgpu.c(GROUP * columns * ITEMSIZE, i64))
                where = arith.addi(where, arith.extui(i64, offset(*inner, columns).value))
                address = llvm.inttoptr(llvm.PointerType.get(1), arith.addi(base, where))
                register = values.registers[place]
                llvm.store(register, address, alignment=utils.bitwidth(register.type) // 8)

        number = plgpu.Layout.WG_SPLAT(())
        numbers = [jnp.int32(self.row), *(jnp.int32(axis.rows) for axis in self.axes)]
        types = plgpu.RefType(), layout, *[number] * len(numbers)
        plgpu.inline_mgpu(arg_types=types)(run)(self.ref, values, *numbers)

    def _store_interpreted(self, values: jax.Array) -> None:
        values = lax.bitcast_convert_type(values, self.ref.dtype) if self.elements == 2 else values[..., None]
        row, column = jnp.int32(self.row), jnp.int32(self.column)
        for i, axis in enumerate(self.axes):
            shape = [axis.size if i == j else 1 for j in range(len(self.axes))]
            index = jnp.arange(axis.size, dtype=jnp.int32).reshape(shape)
            row, column = row + index * axis.rows, column + index * axis.columns
        rows, columns = (jnp.broadcast_to(x, self.shape)[..., None] for x in (row, column))
        columns = columns + jnp.arange(self.elements)
        self.ref[...] = self.ref[...].at[jnp.broadcast_to(rows, columns.shape), columns].set(values)


@dataclasses.dataclass(frozen=True)
class _Integer:
    """An int32 register, for `offset`."""

    value: Value

    def _with(self, operation: Callable[[Value, Value], Value], other: Scalar) -> _Integer:
        other = other.value if isinstance(other, _Integer) else mgpu.c(other, ir.IntegerType.get_signless(32))
        return _Integer(operation(self.value, other))

    def __add__(self, other: Scalar) -> _Integer:
        return self._with(arith.addi, other)

    def __mul__(self, other: Scalar) -> _Integer:
        return self._with(arith.muli, other)

    def __xor__(self, other: Scalar) -> _Integer:
        return self._with(arith.xori, other)

    def __and__(self, other: Scalar) -> _Integer:
        return self._with(arith.andi, other)

    def __lshift__(self, other: Scalar) -> _Integer:
        return self._with(arith.shli, other)

    def __rshift__(self, other: Scalar) -> _Integer:
        return self._with(arith.shrui, other)


def barriers(count: int) -> ScratchType:
    """Shared memory of barriers for copies of tiles, each of which `WARPS` warps arrive at."""
    if compat.interpreting():
        return plgpu.Barrier(num_barriers=count)
    return plgpu.SMEM((2 * count,), np.dtype(np.int32))


def begin(each: Sequence[Barriers], warpgroup: jax.Array) -> None:
    """Initializes the barriers of several references; all threads of the block call it."""
    if compat.interpreting():
        return
    thread = warpgroup * THREADS + lanes.thread_index()
    for ref in each:
        lanes.initialize_barriers(ref, thread, [WARPS] * (ref.shape[0] // 2))


def wait(ref: Barriers, slot: Scalar, times: Scalar) -> None:
    """Waits for a copy; `times` is how often its barrier has completed before."""
    if compat.interpreting():
        plgpu.barrier_wait(ref.at[slot])
    else:
        lanes.wait_for_barrier(ref, slot, times & 1)


def copy(source: Ref, row: Scalar, buffer: Ref, slot: Scalar, full: Barriers, num_rows: int | None = None) -> None:
    """Starts the copy of a tile, from row `row` on, by the warps of a warpgroup; `full` has its barrier.

    The tile has `num_rows` rows, the first ones of the slot; by default all.
    """
    _, slot_rows, columns = buffer.shape
    rows = slot_rows if num_rows is None else num_rows
    if compat.interpreting():
        compat.copy_to_shared(source.at[pl.ds(row, rows)], buffer.at[slot, pl.ds(0, rows)], full.at[slot])
        return
    itemsize = jnp.dtype(source.dtype).itemsize
    row_bytes = columns * itemsize
    part = rows * row_bytes // WARPS
    offset = (lanes.thread_index() >> LANES.bit_length() - 1) * part
    to = offset + slot * (slot_rows * row_bytes)
    one = lanes.Copy(0, to, 0, lanes.splat(row, jnp.int32), row_bytes, offset, 0, part, offset >= 0)
    lanes.copy_bulk(buffer, (source, source), full, slot, [one], transforms_of(columns, itemsize))
