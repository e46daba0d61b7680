"""The layout of stages in shared memory.

A stage is `tiles` runs of 16 tokens of one sequence, for all KV heads of the thread block. Where alignment allows, its
tiles are copied by bulk copies, one for each contiguous run of bytes; otherwise all threads copy together, up to 16
bytes at a time. Bulk copies reach a higher memory rate: they bypass the caches, and one instruction copies kilobytes.

Where pages hold each value beside its key, as vLLM's do, so do stages: the two are copied as one row.

Rows are `pitch` bytes apart in shared memory. `ldmatrix` reads eight rows of 16 bytes at once; to avoid bank conflicts
these should start at eight different multiples of 16 bytes modulo 128. Small rows of values are padded to achieve this:
for them, padding costs least and conflicts would bound the kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.kernels.aliases import Scalar
from kvjax.kernels.launchable import PageMemory, RowScaleMemory
from kvjax.pages import SWIZZLE_TOKENS, PageRegion
from kvjax.spec import AttentionSpec

TILE = 16
"""Tokens of one product."""

COPY_BYTES = 16
"""Maximum bytes of a thread's copy, and alignment of sizes and addresses of bulk copies."""

PADDED_BYTES = 256
"""Minimum bytes of a token's values, over the heads of a thread block, for padding to be worth one bulk copy per pair
of tokens. Twice as many for values with block scales and at most `FEW_HEADS` heads: instructions bound their kernels,
and the number of copies does not depend on the number of heads."""

FEW_HEADS = 4


class PageArray(NamedTuple):
    """An array of pages, as far as they hold rows of keys or of values.

    Attributes:
      half: 0 for keys, 1 for values.
      pages: where the rows are: data or scales, or both.
    """

    half: int
    pages: PageMemory


@dataclasses.dataclass(frozen=True)
class SharedRows:
    """Rows of one kind in a stage.

    The 16 tokens of a tile are the eight rows of two matrices, its halves (`StageLayout.token`).

    Attributes:
      page: their layout in a page.
      page_stride: bytes between pages.
      start: their offset in a tile.
      pitch: bytes between rows of a half.
      half_pitch: bytes from a row to the same row of the other half.
      head_stride: bytes between heads.
      tile_stride: bytes between tiles.
      unit: bytes of a thread's copy; for bulk copies the alignment of all addresses.
      array: index in `Ring.pages` of the array that has these pages.
    """

    page: PageRegion
    page_stride: int
    start: int
    pitch: int
    half_pitch: int
    head_stride: int
    tile_stride: int
    unit: int
    array: int

    @property
    def by_token(self) -> bool:
        """Whether the heads of a token are closer together than the tokens of a head."""
        return self.page.token_stride >= self.page.head_stride

    @property
    def alignment(self) -> int:
        """Alignment of all row offsets in bytes, up to 16."""
        return math.gcd(self.start, self.pitch, self.half_pitch, self.head_stride, self.tile_stride, 16)

    def offset(self, row: Scalar, half: Scalar = 0) -> Scalar:
        """Offset of a row in its head's part of its tile."""
        return self.start + row * self.pitch + half * self.half_pitch


class Chunk(NamedTuple):
    """A contiguous run of bytes that a bulk copy copies for a tile.

    Attributes:
      source: source byte in the page, for the page's first tile and the thread block's first head.
      to: destination byte in the tile.
      size: bytes.
      token_stride: bytes between tokens in the page.
      head_stride: bytes between heads in the page.
      array: index of the array of pages; that of keys where keys and values are one array.
    """

    source: int
    to: int
    size: int
    token_stride: int
    head_stride: int
    array: int


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """The contents of a stage.

    Attributes:
      block_size: tokens of a page.
      heads: KV heads of the thread block.
      tiles: runs of 16 tokens.
      keys: data and, where the page or an array of their own holds them, scales.
      values: the same.
      stage_bytes: bytes of the stage.
      interleaved: whether the halves of a tile are its even and odd tokens; otherwise its first and last eight.
      chunks: the bulk copies of a tile; empty where threads copy.
    """

    block_size: int
    heads: int
    tiles: int
    keys: tuple[SharedRows, ...]
    values: tuple[SharedRows, ...]
    stage_bytes: int
    interleaved: bool
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        memory: tuple[PageMemory, PageMemory],
        heads: int,
        tiles: int,
        *,
        one_memory: bool,
        scale_memory: RowScaleMemory = (None, None),
    ) -> StageLayout:
        """The layout for caches of `spec`.

        `memory` is that of keys and of values, which are one array if `one_memory`. In `Ring.pages` these are followed
        by the arrays of `scale_memory`, of keys or values whose scales are a separate array.
        """
        every = *enumerate(memory), *enumerate(scale_memory)
        arrays = [PageArray(half, pages) for half, pages in every if pages is not None]
        in_bulk = cls._in_bulk(spec, arrays, heads, tiles, one_memory=one_memory)
        return in_bulk or cls._by_threads(spec, arrays, heads, tiles)

    @classmethod
    def _in_bulk(
        cls, spec: AttentionSpec, arrays: Sequence[PageArray], heads: int, tiles: int, *, one_memory: bool
    ) -> StageLayout | None:
        """Rows in the order of the page, with 16 bytes of padding after pairs of values; None if unaligned."""
        memory = [array.pages for array in arrays]
        if spec.block_size % TILE or _divides_words(memory):
            return None
        values = memory[1].regions[0]
        is_few = spec.parts[1].info.elements_per_scale is not None and heads <= FEW_HEADS
        is_padded = values.row_bytes * heads >= PADDED_BYTES * (2 if is_few else 1)
        interleaved = is_padded and values.token_stride >= values.head_stride
        both = _beside(memory) if one_memory else None
        placed: list[list[SharedRows]] = [[], []]
        chunks: list[Chunk] = []
        start = 0
        for number, (half, pages) in enumerate(arrays):
            array = 0 if one_memory and number < 2 else number
            for region in pages.regions if both is None or number > 1 else (both,)[number:]:
                pad = COPY_BYTES if interleaved and (region is values or region is both) else 0
                rows, end = _in_order(region, pages.page_stride, start, heads, pad, array, interleaved=interleaved)
                chunks += _chunks(rows, heads, interleaved=interleaved)
                placed[half].append(rows)
                start = end
        if both is not None:
            rows = placed[0][0]
            keys = dataclasses.replace(rows, page=memory[0].regions[0])
            placed[0][0] = keys
            placed[1].insert(0, dataclasses.replace(rows, page=values, start=rows.start + keys.page.row_bytes))
        merged = _merged(chunks, across=spec.block_size == TILE and heads == spec.num_kv_heads)
        if not _are_aligned(merged, spec, memory, heads):
            return None
        tile_bytes = -(-start // 128) * 128
        of_keys, of_values = (
            tuple(dataclasses.replace(rows, tile_stride=tile_bytes) for rows in each) for each in placed
        )
        return cls(
            spec.block_size, heads, tiles, of_keys, of_values, tiles * tile_bytes, interleaved, tuple(merged),
        )  # fmt: skip

    @classmethod
    def _by_threads(cls, spec: AttentionSpec, arrays: Sequence[PageArray], heads: int, tiles: int) -> StageLayout:
        """Rows of a head contiguous, padded to an odd multiple of 16 bytes where that avoids bank conflicts."""
        start = 0
        placed: list[list[SharedRows]] = [[], []]
        for number, (half, pages) in enumerate(arrays):
            for region in pages.regions:
                is_scales = bool(placed[half])
                row = region.row_bytes
                unit = math.gcd(
                    COPY_BYTES, row, region.base, region.token_stride, region.head_stride, pages.page_stride,
                    pages.alignment,
                )  # fmt: skip
                padded = not is_scales and row % (2 * COPY_BYTES) == 0 and (half == 1 or row > 4 * COPY_BYTES)
                pitch = row + (COPY_BYTES if padded else 0)
                # An odd multiple of 64, so that rows of neighbouring heads are in different banks.
                head_stride = (TILE * pitch + 63) // 128 * 128 + 64
                placed[half].append(
                    SharedRows(
                        region,
                        pages.page_stride,
                        start,
                        pitch,
                        8 * pitch,
                        head_stride,
                        heads * head_stride,
                        unit,
                        number,
                    )
                )
                start += tiles * heads * head_stride
        of_keys, of_values = map(tuple, placed)
        return cls(spec.block_size, heads, tiles, of_keys, of_values, -(-start // 128) * 128, False, ())

    def token(self, row: Scalar, half: Scalar) -> Scalar:
        """The token in its tile of a row of a half."""
        return 2 * row + half if self.interleaved else row + 8 * half

    @property
    def is_swizzled(self) -> bool:
        """Whether the V scales of four tokens share rows."""
        return any(rows.page.swizzled for rows in self.values)

    @property
    def copies_asynchronously(self) -> bool:
        """Whether all copies are of 4 bytes or more, which asynchronous copies require."""
        return all(rows.unit >= 4 for rows in (*self.keys, *self.values))

    @property
    def has_whole_tiles(self) -> bool:
        """Whether each tile lies in one page."""
        return self.block_size % TILE == 0


def _beside(memory: Sequence[PageMemory]) -> PageRegion | None:
    """The rows of keys and values of one array as one region, where each value follows its key; None elsewhere."""
    if any(len(half.regions) > 1 for half in memory):
        return None
    [keys], [values] = (half.regions for half in memory[:2])
    if dataclasses.replace(values, base=keys.base, row_bytes=keys.row_bytes) != keys:
        return None  # the strides differ
    follows = values.base == keys.base + keys.row_bytes
    both = dataclasses.replace(keys, row_bytes=keys.row_bytes + values.row_bytes)
    return both if follows and min(keys.token_stride, keys.head_stride) >= both.row_bytes else None


def _divides_words(memory: Sequence[PageMemory]) -> bool:
    """Whether the scales of four tokens, contiguous in the swizzled layout, may extend over two of its rows."""
    regions = [region for half in memory for region in half.regions]
    return any(region.swizzled and region.row_bytes % SWIZZLE_TOKENS for region in regions)


def _in_order(
    region: PageRegion, page_stride: int, start: int, heads: int, pad: int, array: int, *, interleaved: bool
) -> tuple[SharedRows, int]:
    """Rows from `start` of a tile in the order of the page, with `pad` bytes between pairs of tokens; and their end.

    There is no padding after the last pair, so that it is contiguous with what follows.
    """
    by_token = region.token_stride >= region.head_stride
    token = heads * region.row_bytes if by_token else region.row_bytes
    size = TILE * token + 7 * pad
    pitch, half_pitch = (2 * token + pad, token) if interleaved else (token, 8 * token)
    head = region.row_bytes if by_token else size
    rows = SharedRows(region, page_stride, start, pitch, half_pitch, head, 0, COPY_BYTES, array)
    return rows, start + size * (1 if by_token else heads)


def _chunks(rows: SharedRows, heads: int, *, interleaved: bool) -> list[Chunk]:
    """A chunk for each contiguous run of rows of one token: of all heads, or of one."""
    region = rows.page
    is_run = rows.by_token and region.head_stride == region.row_bytes
    chunks: list[Chunk] = []
    for head in range(1 if is_run else heads):
        for token in range(TILE):
            row, which = (token // 2, token % 2) if interleaved else (token % 8, token // 8)
            source = region.base + token * region.token_stride + head * region.head_stride
            to = rows.offset(row, which) + head * rows.head_stride
            size = region.row_bytes * (heads if is_run else 1)
            chunks.append(Chunk(source, to, size, region.token_stride, region.head_stride, rows.array))
    return chunks


def _are_aligned(chunks: Sequence[Chunk], spec: AttentionSpec, memory: Sequence[PageMemory], heads: int) -> bool:
    """Whether sizes and addresses of bulk copies are multiples of 16 bytes, for every page, tile and first head."""
    numbers = [number for half in memory for number in (half.page_stride, half.alignment)]
    for chunk in chunks:
        numbers += [chunk.source, chunk.to, chunk.size]
        numbers += [TILE * chunk.token_stride] if spec.block_size > TILE else []
        numbers += [heads * chunk.head_stride] if heads < spec.num_kv_heads else []
    return not any(number % COPY_BYTES for number in numbers)


def _merged(chunks: list[Chunk], *, across: bool) -> list[Chunk]:
    """Merges chunks that are contiguous both in the page and in the tile; also across regions with `across`."""
    merged: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.array, chunk.source)):
        if merged:
            last = merged[-1]
            follows = (last.array, last.source + last.size, last.to + last.size) == (chunk.array, *chunk[:2])
            if follows and (across or last[3:] == chunk[3:]):
                merged[-1] = last._replace(size=last.size + chunk.size)
                continue
        merged.append(chunk)
    return merged
