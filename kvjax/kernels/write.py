"""The write kernel: rows of keys and values, encoded and put into their pages.

A program takes `tokens` neighbouring tokens. It loads their slots and all of their rows before it needs any of them,
encodes, and stores each token's rows into its page, or none where the slot says so. Unquantized and fp8 rows stay in
registers from load to store, since encoding leaves every element where it is. An NVFP4 block is spread over more
threads than its bytes are, so the program encodes all of its tokens together and lays the bytes out in shared memory,
where storing takes them from.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVQuantMode
from kvjax.kernels import arithmetic, compat
from kvjax.kernels.registers import THREADS, tile_layout, tile_vector
from kvjax.layouts import CacheLayout
from kvjax.pages import SWIZZLE_TOKENS, PageRegion, swizzled_position
from kvjax.spec import AttentionSpec

WORDS = NVFP4_BLOCK_SIZE // 2
"""Bytes of one block's codes, and pairs of elements that they encode."""


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
        smaller one leaves threads idle. But 264 programs, two for each of its multiprocessors, come first.
        """
        elements = 2048 if spec.dtype.is_quantized else 1024
        most = max(1, elements // (spec.num_kv_heads * max(spec.head_size, spec.head_size_v)))
        return cls(_power_of_two(min(most, max(1, num_tokens // 264))))


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


@dataclasses.dataclass(frozen=True)
class RowMove:
    """How one region's rows of one token, `[rows, columns]` elements, get from a source into a page.

    Attributes:
      region: where rows lie in a page, in elements of the page array.
      rows: heads, or 1 where the heads of a token are one run.
      columns: elements of a row.
      vector: elements that a thread moves at once.
      column: the one column that is moved, for swizzled scales in NHD, each of which has a token row of its own.
    """

    spec: AttentionSpec
    region: PageRegion
    rows: int
    columns: int
    vector: int
    column: int | None = None

    @property
    def layout(self) -> Any:
        """The registers that hold a token's rows on their way."""
        return tile_layout(self.rows, 1 if self.column is not None else self.columns, self.vector)

    def load(self, ref: Any, token: jax.Array | int) -> jax.Array:
        """The rows of a token in `ref` `[tokens, num_kv_heads * columns]`."""
        shape = self.rows, self.columns
        if self.column is None:
            return compat.load(ref.at[token], self.layout, shape)
        return compat.load(ref.at[token], self.layout, shape, columns=(self.column, 1))

    def store(self, rows: jax.Array, pages: Any, position: Position) -> None:
        """Puts encoded rows into their page."""
        if not compat.interpreting():
            compat.store(self.destination(pages, position), rows)
            return
        # Interpret mode knows no reshaped references, hence the same places one run at a time.
        for index in np.ndindex(rows.shape if self.region.swizzled else rows.shape[:1]):
            head, column = (*index, 0)[:2]
            token, size = position.token, rows[index].size
            if self.region.swizzled:
                column += self.column or 0
                token, column = swizzled_position(token, column, self.region.row_bytes)
            start = self.region.base + token * self.region.token_stride + head * self.region.head_stride + column
            compat.store(pages.at[position.block, pl.ds(start, size)], rows[index])

    def destination(self, pages: Any, position: Position) -> Any:
        """The rows' place in their page, as a reference of their shape."""
        spec, region = self.spec, self.region
        tokens, heads, row = spec.block_size, spec.num_kv_heads, region.row_bytes
        hnd = _heads_first(spec)
        stride = region.token_stride if hnd else region.head_stride
        start, offset = (region.base, 0) if stride == row else (0, region.base)
        page = pages.at[position.block, pl.ds(start, tokens * heads * stride)]
        token = position.token
        if region.swizzled and hnd:
            group, lane = token // SWIZZLE_TOKENS, token % SWIZZLE_TOKENS
            return page.reshape(heads, tokens // SWIZZLE_TOKENS, row, SWIZZLE_TOKENS).at[:, group, :, lane]
        if self.column is not None:
            tile_row, tile_column = swizzled_position(token, self.column, row)
            return page.reshape(tokens, heads, row).at[tile_row, :, pl.ds(tile_column, 1)]
        if hnd:
            return page.reshape(heads, tokens, stride).at[:, token, pl.ds(offset, row)]
        if self.rows == 1:
            return page.reshape(tokens, 1, heads * stride).at[token]
        return page.reshape(tokens, heads, stride).at[token, :, pl.ds(offset, row)]


def _heads_first(spec: AttentionSpec) -> bool:
    return spec.layout is CacheLayout.HND or spec.num_kv_heads == 1


def row_moves(spec: AttentionSpec, region: PageRegion, itemsize: int, *, by_head: bool = False) -> list[RowMove]:
    """The moves that take one token's rows of a region (given in bytes); several where a single one cannot."""
    heads = spec.num_kv_heads
    elements = dataclasses.replace(
        region,
        **{name: getattr(region, name) // itemsize for name in ("base", "token_stride", "head_stride", "row_bytes")},
    )
    row = elements.row_bytes
    if region.swizzled:
        if _heads_first(spec):
            return [RowMove(spec, elements, heads, row, 1)]
        return [RowMove(spec, elements, heads, row, 1, column) for column in range(row)]
    one_run = spec.layout is CacheLayout.NHD and region.head_stride == region.row_bytes and not by_head
    rows, columns = (1, heads * row) if one_run else (heads, row)
    alignment = math.gcd(spec.page_size_bytes, region.base, region.token_stride, region.head_stride)
    return [RowMove(spec, elements, rows, columns, tile_vector(rows, columns, itemsize, alignment))]


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
    num_tokens = key.shape[0]
    is_nvfp4 = spec.quant_mode is KVQuantMode.NVFP4
    prepare = _block_pairs if is_nvfp4 else _flat_rows
    if slot_mapping.dtype.itemsize > 4:
        slot_mapping = lax.bitcast_convert_type(slot_mapping, jnp.int32)
    sizes = spec.head_size, spec.head_size_v
    staged = [
        plgpu.SMEM((config.tokens, spec.num_kv_heads * row), jnp.uint8)
        for size in sizes
        for row in spec.dtype.info.row_bytes(size)
        if is_nvfp4
    ]
    kernel = plgpu.kernel(
        functools.partial(
            _body, spec=spec, config=config, num_tokens=num_tokens, num_blocks=pages.shape[0], in_dtype=key.dtype
        ),
        out_type=(),
        grid=(-(-num_tokens // config.tokens),),
        grid_names=("program",),
        scratch_types=staged,
        compiler_params=compat.COMPILER_PARAMS,
    )
    ref = jax.new_ref(pages)
    kernel(slot_mapping, prepare(key), prepare(value), k_scale, v_scale, ref)
    return jax.freeze(ref)


def _body(
    slots: Any,
    key: Any,
    value: Any,
    k_scale: Any,
    v_scale: Any,
    pages: Any,
    *staged: Any,
    spec: AttentionSpec,
    config: WriteConfig,
    num_tokens: int,
    num_blocks: int,
    in_dtype: Any,
) -> None:
    program_first = lax.axis_index("program") * config.tokens
    # The last program starts early instead of reading past the end; tokens of the one before are not its to write.
    first = jnp.minimum(program_first, num_tokens - config.tokens)
    positions = [
        _position(slots, first + i, spec, num_blocks, mine=first + i >= program_first) for i in range(config.tokens)
    ]
    halves = list(zip((key, value), (k_scale, v_scale), spec.regions, strict=True))
    moves: list[tuple[RowMove, Any, jax.Array | int, Callable[[jax.Array], jax.Array]]] = []
    if staged:
        stages = list(zip(staged[::2], staged[1::2], strict=True))
        blocks = [
            _load_blocks(x, first, math.prod(scales.shape), scales.shape[1], in_dtype)
            for (x, _, _), (_, scales) in zip(halves, stages, strict=True)
        ]
        for pairs, (_, scale, regions), stage in zip(blocks, halves, stages, strict=True):
            for stored, region, ref in zip(_encode_blocks(pairs, scale, in_dtype), regions, stage, strict=True):
                compat.store(ref, stored)
                moves += [(move, ref, 0, lambda loaded: loaded) for move in row_moves(spec, region, 1)]
        plgpu.commit_smem()  # also the barrier behind which every thread sees every stored byte
    else:
        for x, scale, regions in halves:
            by_head = scale.shape[0] > 1
            inverse = None if by_head or not spec.dtype.is_quantized else arithmetic.reciprocal(scale[0])
            for move in row_moves(spec, regions[0], spec.array_dtype.itemsize, by_head=by_head):
                encode = functools.partial(_encode_elements, scale=scale, inverse=inverse, move=move)
                moves.append((move, x, first, encode))
    loaded = [[move.load(source, start + i) for move, source, start, _ in moves] for i in range(config.tokens)]
    encoded = [[encode(row) for (*_, encode), row in zip(moves, rows, strict=True)] for rows in loaded]
    for position, rows in zip(positions, encoded, strict=True):

        @pl.when(position.written)
        def _(position: Position = position, rows: list[jax.Array] = rows) -> None:
            for (move, *_), row in zip(moves, rows, strict=True):
                move.store(row, pages, position)


def _position(slots: Any, index: jax.Array, spec: AttentionSpec, num_blocks: int, *, mine: jax.Array) -> Position:
    if len(slots.shape) == 2:  # int64 as two words, the low one first
        slot, written = slots[index, 0], slots[index, 1] == 0
    else:
        slot, written = slots[index], True
    last = min(num_blocks * spec.block_size, 1 << 31) - 1
    written = mine & written & (slot >= 0) & (slot <= last)
    block_size = jnp.int32(spec.block_size)
    return Position(written, lax.div(slot, block_size), lax.rem(slot, block_size))


def _flat_rows(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _block_pairs(x: jax.Array) -> jax.Array:
    """Blocks as rows: of 8 words that hold two 16-bit elements each, or of 8 pairs of float32."""
    pairs = x.reshape(-1, WORDS, 2)
    return pairs if x.dtype.itemsize == 4 else lax.bitcast_convert_type(pairs, jnp.uint32)


def _encode_elements(x: jax.Array, *, scale: Any, inverse: jax.Array | None, move: RowMove) -> jax.Array:
    spec = move.spec
    if spec.quant_mode is KVQuantMode.NONE:
        return arithmetic.cast(x, spec.storage_dtype)
    if inverse is None:
        by_head = arithmetic.reciprocal(compat.load(scale, move.layout.reduce(1)))
        inverse = compat.spread(by_head, x.shape[1], move.layout)
    return arithmetic.encode_fp8(x, inverse, spec.dtype)


def _load_blocks(x: Any, first: jax.Array, num_blocks: int, blocks_per_token: int, dtype: Any) -> _Blocks:
    """The blocks of a program's tokens, a row each: their even and their odd elements."""
    rows = x.at[pl.ds(first * blocks_per_token, num_blocks)]
    is_wide = dtype == jnp.float32  # pairs are neighbours in memory, so that each half is read with gaps
    vector = 1 if is_wide else max(1, min(WORDS, (num_blocks & -num_blocks) * WORDS // THREADS))
    layout = tile_layout(num_blocks, WORDS, vector)
    refs = [rows.at[:, :, i] for i in range(2)] if is_wide else [rows]
    return _Blocks(tuple(compat.load(ref, layout) for ref in refs), layout)


def _encode_blocks(blocks: _Blocks, scale: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    spread = functools.partial(compat.spread, columns=WORDS, layout=blocks.layout)
    return arithmetic.encode_nvfp4(blocks.pairs, np.dtype(dtype), scale[0], spread)
