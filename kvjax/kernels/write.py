"""The write kernel: rows of keys and values, encoded and put into their pages.

A program takes `tokens` neighbouring tokens. It loads their slots and all of their rows before it needs any of them,
encodes, and stores each token's rows into its page, or none where the slot says so. Unquantized and fp8 rows stay in
registers from load to store, since encoding leaves every element where it is. An NVFP4 block is spread over more
threads than its bytes are, so the program encodes all of its tokens together and lays the bytes out in shared memory,
where storing takes them from.

`write` is for JAX's arrays. `any_count` is the same kernel for memory that somebody else owns: how many tokens and
blocks there are and where each array begins are numbers that a launch brings along, so that one kernel serves them all.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVQuantMode
from kvjax.kernels import arithmetic, compat
from kvjax.kernels.memory import MOST, AnyCount, Argument, Number, PageMemory, Pages, RowMemory, Rows
from kvjax.kernels.registers import MAX_VECTOR_BYTES, lane_layout
from kvjax.pages import SWIZZLE_TOKENS, PageRegion, swizzled_position
from kvjax.spec import AttentionSpec

WORDS = NVFP4_BLOCK_SIZE // 2
"""Bytes of one block's codes, and pairs of elements that they encode."""

PROGRAMS = 264
"""What a launch has at least, if it has tokens enough: two for each multiprocessor of an H200."""


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """How the write is launched.

    Attributes:
      tokens: tokens a program takes.
    """

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"{self.tokens=} must be positive")

    @classmethod
    def choose(cls, spec: AttentionSpec, num_tokens: int) -> WriteConfig:
        """Enough work a program, and enough programs.

        Measured on an H200, where a program of 1,024 elements of a half (2,048 where they are encoded: that fills a
        warpgroup's registers with whole blocks, and shares what is computed once) is as fast as larger ones, and a
        smaller one leaves threads idle. But `PROGRAMS` come first.
        """
        return cls(_power_of_two(min(_most_tokens(spec), max(1, num_tokens // PROGRAMS))))

    @classmethod
    def ladder(cls, spec: AttentionSpec) -> dict[int, WriteConfig]:
        """By the number of tokens that each is for, from that on: what `choose` chooses, but in steps of four."""
        most = _power_of_two(_most_tokens(spec))
        rungs = {4**i for i in range(most.bit_length()) if 4**i < most} | {most}
        return {1 if tokens == min(rungs) else tokens * PROGRAMS: cls(tokens) for tokens in sorted(rungs)}


def _most_tokens(spec: AttentionSpec) -> int:
    elements = 2048 if spec.dtype.is_quantized else 1024
    return max(1, elements // (spec.num_kv_heads * max(spec.head_size, spec.head_size_v)))


def _power_of_two(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)


class _Blocks(NamedTuple):
    pairs: tuple[jax.Array, ...]
    layout: Any


class Position(NamedTuple):
    """Where a token goes; `written` is false for one that goes nowhere."""

    written: jax.Array
    block: jax.Array
    token: jax.Array


class Half(NamedTuple):
    """Keys or values of a call: rows, their scale and the pages they go to."""

    rows: Rows
    scale: Any
    pages: Pages


@dataclasses.dataclass(frozen=True)
class RowMove:
    """How one region's rows of one token, `[rows, columns]` elements, get from a source into a page.

    Attributes:
      region: where rows lie in a page, in elements of the page array.
      rows: heads, or 1 where the heads of a token are one run.
      columns: elements of a row.
      widest: the most elements that a thread may move at once.
      column: the one column that is moved, for swizzled scales in NHD, each of which has a token row of its own.
    """

    region: PageRegion
    rows: int
    columns: int
    widest: int
    column: int | None = None

    @property
    def layout(self) -> Any:
        """The registers that hold a token's rows on their way."""
        return lane_layout((self.rows, self.moved_columns), self.widest)

    @property
    def moved_columns(self) -> int:
        """Columns that are moved."""
        return self.columns if self.column is None else 1

    def load(self, source: Rows, token: Number) -> jax.Array:
        """The rows of a token."""
        rows = source.ref.at[token, pl.ds(source.start, self.rows * self.columns)]
        columns = None if self.column is None else (self.column, 1)
        return compat.load(rows, self.layout, (self.rows, self.columns), columns=columns)

    def store(self, rows: jax.Array, pages: Pages, position: Position) -> None:
        """Puts encoded rows into their page."""
        if not compat.interpreting():
            compat.store(self.destination(pages, position), rows)
            return
        # Interpret mode knows no reshaped references, hence the same places one run at a time.
        region = self.region
        for index in np.ndindex(rows.shape if region.swizzled else rows.shape[:1]):
            head, column = (*index, 0)[:2]
            token, size = position.token, rows[index].size
            if region.swizzled:
                column += self.column or 0
                token, column = swizzled_position(token, column, region.row_bytes)
            start = pages.start + region.base + token * region.token_stride + head * region.head_stride + column
            compat.store(pages.ref.at[position.block, pl.ds(start, size)], rows[index])

    def destination(self, pages: Pages, position: Position) -> Any:
        """The rows' place in their page, as a reference of their shape."""
        region, step = self.region, 1
        token: Number = position.token
        first: Number = 0
        if self.column is not None:
            token, first = swizzled_position(token, self.column, region.row_bytes)
        elif region.swizzled:
            first, step = token % SWIZZLE_TOKENS, SWIZZLE_TOKENS
            token = token - first
        start = pages.start + region.base + token * region.token_stride + first
        columns = self.moved_columns * step
        # From row to row, so past the page's end perhaps, but nothing is stored there.
        stride = columns if self.rows == 1 else region.head_stride
        rows = pages.ref.at[position.block, pl.ds(start, self.rows * stride)].reshape(self.rows, stride)
        rows = rows.at[:, pl.ds(0, columns)]
        return rows if step == 1 else rows.reshape(self.rows, self.columns, step).at[:, :, 0]


def row_moves(
    spec: AttentionSpec, pages: Pages, which: int, itemsize: int, *, widest: int = 256, by_head: bool = False
) -> list[RowMove]:
    """The moves that take one token's rows of a region; several where a single one cannot."""
    region, heads = pages.regions[which], spec.num_kv_heads
    elements = dataclasses.replace(
        region,
        **{name: getattr(region, name) // itemsize for name in ("base", "token_stride", "head_stride", "row_bytes")},
    )
    row = elements.row_bytes
    if region.swizzled:
        if heads == 1 or region.token_stride == region.row_bytes:
            return [RowMove(elements, heads, row, 1)]
        return [RowMove(elements, heads, row, 1, column) for column in range(row)]
    is_one_run = heads == 1 or (region.head_stride == region.row_bytes and not by_head)
    alignment = math.gcd(pages.alignment, region.base, region.token_stride, region.head_stride, MAX_VECTOR_BYTES)
    rows, columns = (1, heads * row) if is_one_run else (heads, row)
    return [RowMove(elements, rows, columns, min(widest, max(1, alignment // itemsize)))]


def write(
    pages: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    spec: AttentionSpec,
    config: WriteConfig,
) -> jax.Array:
    """Writes tokens into flat pages `[num_blocks, page_elements]`, in place where they are donated.

    `slot_mapping` is int32 `[num_tokens]`, or int64 where x64 is on; scales are float32, `[1]` or `[num_kv_heads]`.
    """
    num_tokens, last_slot = key.shape[0], min(pages.shape[0] * spec.block_size, 1 << 31) - 1
    if slot_mapping.dtype.itemsize > 4:
        slot_mapping = lax.bitcast_convert_type(slot_mapping, jnp.int32)

    def body(slots: Any, key: Any, value: Any, k_scale: Any, v_scale: Any, pages: Any, *staged: Any) -> None:
        halves = [
            Half(Rows(rows), scale, Pages(pages, regions, spec.page_size_bytes))
            for rows, scale, regions in zip((key, value), (k_scale, v_scale), spec.regions, strict=True)
        ]
        _write_tokens(Rows(slots), halves, staged, spec, config, num_tokens, last_slot, dtype)

    dtype = key.dtype
    kernel = _kernel(body, spec, config.tokens, grid=-(-num_tokens // config.tokens))
    arrays = slot_mapping, _token_rows(key, spec), _token_rows(value, spec), k_scale, v_scale, pages
    # XLA on GPUs may fuse slices of stacked arrays, before or after a kernel, with the kernel, and forgets then that
    # the kernel writes in place: what it leaves as it was would be lost. Nothing is fused across a barrier.
    *inputs, pages = map(lax.optimization_barrier, arrays)
    ref = jax.new_ref(pages)
    kernel(*inputs, ref)
    return lax.optimization_barrier(jax.freeze(ref))


def any_count(
    spec: AttentionSpec,
    rows: tuple[RowMemory, RowMemory],
    pages: tuple[PageMemory, PageMemory],
    slot_dtype: np.dtype[Any],
    scale_sizes: tuple[int, int],
) -> AnyCount:
    """The write into memory that somebody else owns, given for keys and for values.

    The arrays are slots, keys, values, k_scale, v_scale, and the keys' and the values' pages.
    """
    configs = WriteConfig.ladder(spec)
    slots = jax.ShapeDtypeStruct((MOST,) if np.dtype(slot_dtype).itemsize == 4 else (MOST, 2), jnp.int32)

    def body(counts: Sequence[Number], arrays: Sequence[tuple[Any, Number]], staged: Sequence[Any]) -> None:
        num_tokens, last_slot = counts
        slots, key, value, k_scale, v_scale, key_pages, value_pages = arrays
        halves = [
            Half(Rows(*source, row_memory.alignment), scale, page_memory.pages(*destination))
            for source, row_memory, (scale, _), destination, page_memory in zip(
                (key, value), rows, (k_scale, v_scale), (key_pages, value_pages), pages, strict=True
            )
        ]
        for least, config in configs.items():
            above = [other for other in configs if other > least]

            @pl.when((num_tokens >= least) & (num_tokens < above[0] if above else True))
            def _(config: WriteConfig = config) -> None:
                dtype = rows[0].dtype
                _write_tokens(Rows(*slots), halves, staged, spec, config, num_tokens, last_slot, dtype)

    leasts, tokens = list(configs), [config.tokens for config in configs.values()]

    def num_programs(num_tokens: int) -> int:
        return -(-num_tokens // tokens[bisect.bisect_right(leasts, num_tokens) - 1])

    return AnyCount(
        body,
        functools.partial(_kernel, spec=spec, tokens=max(tokens), grid=MOST),
        ("num_tokens", "last_slot"),
        (
            Argument(slots, slots.dtype.itemsize * math.prod(slots.shape[1:])),
            *(_row_argument(memory, spec) for memory in rows),
            *(Argument(jax.ShapeDtypeStruct((size,), jnp.float32)) for size in scale_sizes),
            *(memory.argument(spec.array_dtype) for memory in pages),
        ),
        num_written=2,
        num_programs=num_programs,
    )


def _row_argument(memory: RowMemory, spec: AttentionSpec) -> Argument:
    one_token = jax.ShapeDtypeStruct((1, memory.token_stride), memory.dtype)
    rows = jax.eval_shape(functools.partial(_token_rows, spec=spec), one_token)
    array = jax.ShapeDtypeStruct((MOST, *rows.shape[1:]), rows.dtype)
    return Argument(array, array.dtype.itemsize * math.prod(array.shape[2:]))


def _kernel(body: Callable[..., None], spec: AttentionSpec, tokens: int, grid: int) -> Callable[..., Any]:
    staged = [
        plgpu.SMEM((tokens, spec.num_kv_heads * row), jnp.uint8)
        for size in (spec.head_size, spec.head_size_v)
        for row in spec.dtype.info.row_bytes(size)
        if spec.quant_mode is KVQuantMode.NVFP4
    ]
    kernel: Callable[..., Any] = plgpu.kernel(
        compat.named("reshape_and_cache_flash", body),
        out_type=(),
        grid=(grid,),
        grid_names=("program",),
        scratch_types=staged,
        compiler_params=compat.COMPILER_PARAMS,
    )
    return kernel


def _write_tokens(
    slots: Rows,
    halves: Sequence[Half],
    staged: Sequence[Any],
    spec: AttentionSpec,
    config: WriteConfig,
    num_tokens: Number,
    last_slot: Number,
    dtype: Any,
) -> None:
    """What a program does; `dtype` is that of the rows' elements."""
    program_first = lax.axis_index("program") * config.tokens
    # The last program starts early instead of reading past the end; tokens of the one before are not its to write.
    first = jnp.minimum(program_first, num_tokens - config.tokens)
    positions = [
        _position(slots, first + i, spec, last_slot, mine=first + i >= program_first) for i in range(config.tokens)
    ]
    moves: list[tuple[RowMove, Rows, Number, Pages, Callable[[jax.Array], jax.Array]]] = []
    if staged:
        stages = list(zip(staged[::2], staged[1::2], strict=True))
        blocks = [
            _load_blocks(half.rows, first, config.tokens, scales.shape[1], dtype)
            for half, (_, scales) in zip(halves, stages, strict=True)
        ]
        for loaded_blocks, half, stage in zip(blocks, halves, stages, strict=True):
            parts = _encode_blocks(loaded_blocks, half.scale, dtype)
            for which, (stored, ref) in enumerate(zip(parts, stage, strict=True)):
                ref = ref.at[pl.ds(0, config.tokens)]
                compat.store(ref, stored)
                for move in row_moves(spec, half.pages, which, itemsize=1):
                    moves.append((move, Rows(ref), 0, half.pages, lambda loaded: loaded))
        plgpu.commit_smem()  # also the barrier behind which every thread sees every stored byte
    else:
        for half in halves:
            scale = half.scale
            by_head = scale.shape[0] > 1
            inverse = None if by_head or not spec.dtype.is_quantized else arithmetic.reciprocal(scale[0])
            widest = half.rows.alignment // jnp.dtype(dtype).itemsize
            itemsize = spec.array_dtype.itemsize
            for move in row_moves(spec, half.pages, 0, itemsize, widest=widest, by_head=by_head):
                encode = functools.partial(_encode_elements, spec=spec, scale=scale, inverse=inverse, move=move)
                moves.append((move, half.rows, first, half.pages, encode))
    loaded = [[move.load(rows, start + i) for move, rows, start, *_ in moves] for i in range(config.tokens)]
    encoded = [[encode(row) for (*_, encode), row in zip(moves, rows, strict=True)] for rows in loaded]
    for position, rows in zip(positions, encoded, strict=True):

        @pl.when(position.written)
        def _(position: Position = position, rows: list[jax.Array] = rows) -> None:
            for (move, _, _, pages, _), row in zip(moves, rows, strict=True):
                move.store(row, pages, position)


def _position(slots: Rows, index: jax.Array, spec: AttentionSpec, last_slot: Number, *, mine: jax.Array) -> Position:
    index = slots.start + index
    if len(slots.ref.shape) == 2:  # int64 as two words, the low one first
        slot, written = slots.ref[index, 0], slots.ref[index, 1] == 0
    else:
        slot, written = slots.ref[index], True
    written = mine & written & (slot >= 0) & (slot <= last_slot)
    block_size = jnp.int32(spec.block_size)
    return Position(written, lax.div(slot, block_size), lax.rem(slot, block_size))


def _token_rows(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    """`[num_tokens, elements]`; for NVFP4 words of two 16-bit elements each, or pairs of float32."""
    if spec.quant_mode is not KVQuantMode.NVFP4:
        return x.reshape(x.shape[0], -1)
    pairs = x.reshape(x.shape[0], -1, 2)
    return pairs if x.dtype.itemsize == 4 else lax.bitcast_convert_type(pairs, jnp.uint32)


def _encode_elements(
    x: jax.Array, *, spec: AttentionSpec, scale: Any, inverse: jax.Array | None, move: RowMove
) -> jax.Array:
    if spec.quant_mode is KVQuantMode.NONE:
        return arithmetic.cast(x, spec.storage_dtype)
    if inverse is None:
        by_head = arithmetic.reciprocal(compat.load(scale, move.layout.reduce(1)))
        inverse = compat.spread(by_head, x.shape[1], move.layout)
    return arithmetic.encode_fp8(x, inverse, spec.dtype)


def _load_blocks(rows: Rows, first: jax.Array, num_tokens: int, num_blocks: int, dtype: Any) -> _Blocks:
    """The blocks of a program's tokens, `[num_tokens, num_blocks, 8]`: words of two elements, or both halves."""
    shape = num_tokens, num_blocks, WORDS
    words = rows.ref.at[pl.ds(first, num_tokens), pl.ds(rows.start, num_blocks * WORDS)]
    is_wide = dtype == jnp.float32  # pairs are neighbours in memory, so that each half is read with gaps
    layout = lane_layout(shape, 1 if is_wide else min(WORDS, rows.alignment // 4))
    refs = [words.at[:, :, i] for i in range(2)] if is_wide else [words]
    return _Blocks(tuple(compat.load(ref, layout, shape) for ref in refs), layout)


def _encode_blocks(blocks: _Blocks, scale: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    spread = functools.partial(compat.spread, columns=WORDS, layout=blocks.layout)
    return arithmetic.encode_nvfp4(blocks.pairs, np.dtype(dtype), scale[0], spread)
