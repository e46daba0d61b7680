"""The copy pipeline: a ring buffer of stages in shared memory that all warps of a block fill and read.

Each slot has two barriers: `full` completes when the copies of a stage have arrived, `empty` when all warps have
released the stage. Warps may thus be several stages apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Ref, Scalar
from kvjax.kernels.attention.stages import TILE, StageLayout
from kvjax.kernels.registers import LANES
from kvjax.pages import SWIZZLE_TOKENS


class PartlyStaticInt(NamedTuple):
    """An int32 that is partly known when the kernel is traced: `varying + known`, with `0 <= varying < bound`.

    Divisions by known numbers then cost instructions only where both parts decide the result. With 4 warps and 4 pieces
    per tile, piece `warp + 8` is `PartlyStaticInt(warp, 4, 8)`. Split by 4, it is piece `warp` of tile 2, and the tile
    is known. Split by 6, both parts matter, and the sum is divided when the kernel runs.
    """

    varying: jax.Array
    bound: int
    known: int

    @property
    def value(self) -> Scalar:
        """The number."""
        return self.varying + self.known

    def times(self, factor: int) -> PartlyStaticInt:
        """The product with a number."""
        return PartlyStaticInt(self.varying * factor, (self.bound - 1) * factor + 1, self.known * factor)

    def plus(self, other: PartlyStaticInt) -> PartlyStaticInt:
        """The sum."""
        return PartlyStaticInt(self.varying + other.varying, self.bound + other.bound - 1, self.known + other.known)

    def split(self, divisor: int) -> tuple[PartlyStaticInt, PartlyStaticInt]:
        """The quotient and the remainder by a divisor."""
        varying, bound, known = self
        if divisor % bound == 0 and known % bound == 0:  # then the sum of the remainders stays below the divisor
            return PartlyStaticInt(varying * 0, 1, known // divisor), PartlyStaticInt(varying, bound, known % divisor)
        if known % divisor:
            varying, bound, known = varying + known, bound + known, 0
        quotient = PartlyStaticInt(divided(varying, divisor), -(-bound // divisor), known // divisor)
        return quotient, PartlyStaticInt(remainder(varying, divisor), min(bound, divisor), 0)


def _chosen(index: PartlyStaticInt, values: Sequence[int]) -> PartlyStaticInt:
    """Element `index` of a list."""
    value = index.varying * 0
    if all(x == values[0] for x in values):
        return PartlyStaticInt(value, 1, values[0])
    if index.bound == 1:
        return PartlyStaticInt(value, 1, values[index.known])
    for i, x in enumerate(values):
        value = jnp.where(index.value == i, x, value)
    return PartlyStaticInt(value, max(values) + 1, 0)


class PieceCopy(NamedTuple):
    """One copy instruction, with which each thread or warp copies its own piece.

    Attributes:
      tile: the tile.
      to: destination byte in the stage.
      source: source byte in the page, without the offset of the tile in the page.
      token: the token in the tile, where the rows of a tile are in several pages.
      token_stride: bytes between tokens in the page.
      size: bytes.
      is_one: whether the thread or warp has a piece; None where all have.
      block: index of the token's block in `Ring.blocks`.
      array: index in `Ring.pages`.
      page_stride: bytes between pages.
    """

    tile: PartlyStaticInt
    to: PartlyStaticInt
    source: PartlyStaticInt
    token: PartlyStaticInt | None
    token_stride: int
    size: Scalar
    is_one: jax.Array | None
    block: int
    array: int
    page_stride: int


class BlockTokens(NamedTuple):
    """Tokens of a stage that are in one block: a tile, or one token per thread."""

    tile: PartlyStaticInt
    token: PartlyStaticInt | None


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ring of a thread block.

    Attributes:
      layout: what a stage holds.
      warps: warps of the block.
      slots: stages of the ring; with one, copies do not overlap with reads.
      buffer: shared memory, `uint8 [slots * layout.stage_bytes]`.
      barriers: shared memory, `int32 [4 * slots]`: the barrier `full` of each slot, then `empty` of each slot.
      pages: references to the pages of keys and of values, and of the scales of both where these are arrays of their
        own, `[num_blocks, page_elements]`.
      table: reference to the block table, flat.
      num_blocks: number of blocks of the cache, a uint32 register.
      num_layers: pages of a block.
      layer: the layer to read.
      first_head: the block's first KV head.
      thread: the thread's number in the block, a register.
    """

    layout: StageLayout
    warps: int
    slots: int
    buffer: Ref
    barriers: Ref
    pages: tuple[Ref, ...]
    table: Ref
    num_blocks: jax.Array
    num_layers: int
    layer: jax.Array
    first_head: jax.Array
    thread: jax.Array

    @property
    def ahead(self) -> int:
        """Stages that are prefetched while one is read; fewer than there are slots."""
        return min(self.slots - 1, max(1, self.slots - 2))  # with a free slot, no warp waits for the slowest

    @property
    def rows(self) -> int:
        """Tokens of a stage."""
        return TILE * self.layout.tiles

    def full(self, slot: Scalar) -> Scalar:
        """The index of the barrier that completes when a slot's copies have arrived."""
        return slot

    def empty(self, slot: Scalar) -> Scalar:
        """The index of the barrier that completes when all warps have released a slot."""
        return self.slots + slot

    def begin(self) -> None:
        """Initializes the barriers; all threads of the block call it once."""
        _ = self.copies  # traced once, here, and used within loops
        arrivals = self.warps if self.layout.chunks else self.warps * LANES
        lanes.initialize_barriers(self.barriers, self.thread, [arrivals] * self.slots + [self.warps] * self.slots)

    @functools.cached_property
    def copies(self) -> tuple[list[PieceCopy], list[BlockTokens]]:
        """The copies of a stage, and the tokens whose blocks they read."""
        return self._bulk_copies() if self.layout.chunks else self._thread_copies()

    def _bulk_copies(self) -> tuple[list[PieceCopy], list[BlockTokens]]:
        layout, warp = self.layout, self.thread >> 5
        copies: list[PieceCopy] = []
        tokens: list[BlockTokens] = []
        arrays = {rows.array: rows for rows in (*layout.keys, *layout.values)}
        for array, rows in sorted(arrays.items()):
            chunks = [chunk for chunk in layout.chunks if chunk.array == array]
            count = layout.tiles * len(chunks)
            for first in range(0, count, self.warps):
                tile, number = PartlyStaticInt(warp, self.warps, first).split(len(chunks))
                source, to, size, token, head, _ = (_chosen(number, values) for values in zip(*chunks, strict=True))
                is_one = None if first + self.warps <= count else warp + first < count
                source = PartlyStaticInt(source.value + self.first_head * head.value, 0, 0)
                to = tile.times(rows.tile_stride).plus(to)
                copies.append(
                    PieceCopy(
                        tile, to, source, None, token.value, size.value, is_one, len(tokens), array, rows.page_stride
                    )
                )
                tokens.append(BlockTokens(tile, None))
        return copies, tokens

    def _thread_copies(self) -> tuple[list[PieceCopy], list[BlockTokens]]:
        layout = self.layout
        threads = LANES * self.warps
        copies: list[PieceCopy] = []
        tokens: dict[tuple[int, ...], int] = {}
        looked_up: list[BlockTokens] = []
        for rows in (*layout.keys, *layout.values):
            pieces = rows.page.row_bytes // rows.unit
            count = layout.tiles * TILE * layout.heads * pieces
            for first in range(0, count, threads):
                rest, piece = PartlyStaticInt(self.thread, threads, first).split(pieces)
                if rows.by_token:
                    rest, head = rest.split(layout.heads)
                    tile, token = rest.split(TILE)
                else:
                    rest, token = rest.split(TILE)
                    tile, head = rest.split(layout.heads)
                is_one = None if first + threads <= count else self.thread + first < count
                # Blocks that several copies read are looked up once.
                same = (tile.known,) if tile.bound == 1 and layout.has_whole_tiles else (count, rows.by_token, first)
                if same not in tokens:
                    tokens[same] = len(looked_up)
                    looked_up.append(BlockTokens(tile, None if layout.has_whole_tiles else token))
                unit = piece.times(rows.unit)
                to = tile.times(rows.tile_stride).plus(head.times(rows.head_stride)).plus(unit)
                to = to.plus(token.times(rows.pitch)).plus(PartlyStaticInt(self.thread * 0, 1, rows.start))
                source = (
                    head.times(rows.page.head_stride)
                    .plus(unit)
                    .plus(PartlyStaticInt(self.thread * 0, 1, rows.page.base))
                )
                source = source._replace(varying=source.varying + self.first_head * rows.page.head_stride)
                if layout.has_whole_tiles:
                    source = source.plus(token.times(rows.page.token_stride))
                in_pages = None if layout.has_whole_tiles else token
                piece_of = in_pages, rows.page.token_stride, rows.unit
                copies.append(
                    PieceCopy(tile, to, source, *piece_of, is_one, tokens[same], rows.array, rows.page_stride)
                )
        return copies, looked_up

    def blocks(self, entries: Scalar, position: Scalar, start: Scalar, end: Scalar) -> list[jax.Array]:
        """The pages that the copies of a stage read, for each of `copies[1]`; -1 where nothing is to be copied.

        Args:
          entries: index of the sequence's first entry in the table.
          position: of the stage's first token.
          start: the first visible position.
          end: the end of the visible positions.
        """
        found = []
        for tile, token in self.copies[1]:
            first, size = position + tile.value * TILE, TILE
            if token is not None:
                # A swizzled row holds the scales of four tokens, which are copied together and are in one block.
                size = SWIZZLE_TOKENS if self.layout.is_swizzled else 1
                first = (first + token.value) & -size
            wanted = (first + (size - 1) >= start) & (first < end)
            block = lanes.load_global(self.table, entries + divided(first, self.layout.block_size), wanted, -1)
            exists = block < self.num_blocks  # as unsigned: negative entries are large
            page = lanes.bits(block, jnp.int32)
            if self.num_layers > 1:
                page = page * self.num_layers + self.layer
            found.append(jnp.where(exists, page, -1))
        return found

    def lacks_blocks(self, entries: Scalar, start: Scalar, end: Scalar) -> jax.Array:
        """Whether a block of the positions from `start` to `end` is not in the cache: a scalar, equal in all warps."""
        size = self.layout.block_size
        first, last = start // size, jnp.maximum(end - 1, 0) // size
        lane = self.thread & (LANES - 1)

        def body(i: jax.Array, lacks: jax.Array) -> jax.Array:
            entry = lane + (first + i * LANES)
            block = lanes.load_global(self.table, entry + entries, entry <= last, 0)
            return lacks | ((entry <= last) & (block >= self.num_blocks)).astype(jnp.int32)

        chunks = (last - first) // LANES + 1
        lacks = lax.fori_loop(0, jnp.where(end > start, chunks, 0), body, self.thread * 0)
        return lanes.any_in_warp(lacks != 0)

    def fill(self, slot: Scalar, parity: Scalar, position: Scalar, blocks: list[jax.Array]) -> None:
        """Starts the copies of a stage when all warps have released the slot.

        `parity` is that of the number of times the slot has been filled before.
        """
        layout = self.layout
        lanes.wait_for_barrier(self.barriers, self.empty(slot), 1 - parity)
        base, copies = slot * layout.stage_bytes, []
        for copy in self.copies[0]:
            block = blocks[copy.block]
            condition = block >= 0 if copy.is_one is None else (block >= 0) & copy.is_one
            offset = copy.source.varying
            if layout.block_size != TILE:
                first = copy.tile.times(TILE)
                first = first if copy.token is None else first.plus(copy.token)
                offset = offset + remainder(position + first.value, layout.block_size) * copy.token_stride
            copies.append(
                lanes.Copy(
                    copy.array, base + copy.to.varying, copy.to.known, block, copy.page_stride, offset,
                    copy.source.known, copy.size, condition,
                )
            )  # fmt: skip
        if layout.chunks:
            lanes.copy_bulk(self.buffer, self.pages, self.barriers, self.full(slot), copies, evict_first=True)
        else:
            for each in copies:
                lanes.copy_async(self.buffer, self.pages, each)
            lanes.arrive_with_copies(self.barriers, self.full(slot), asynchronous=layout.copies_asynchronously)

    def wait(self, slot: Scalar, parity: Scalar) -> None:
        """Waits until the stage in a slot has arrived; `parity` is as in `fill`."""
        lanes.wait_for_barrier(self.barriers, self.full(slot), parity)

    def release(self, slot: Scalar) -> None:
        """Releases the stage in a slot for this warp."""
        lanes.arrive_as_warp(self.barriers, self.empty(slot))

    def next(self, slot: jax.Array, parity: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The slot after a slot, and its parity."""
        is_last = slot == self.slots - 1
        return jnp.where(is_last, 0, slot + 1), jnp.where(is_last, 1 - parity, parity)


def divided(x: jax.Array, divisor: int) -> jax.Array:
    """The quotient of non-negative int32."""
    return lanes.bits(lax.div(lanes.bits(x, jnp.uint32), lanes.splat(divisor, jnp.uint32)), jnp.int32)


def remainder(x: jax.Array, divisor: int) -> jax.Array:
    """The remainder of non-negative int32."""
    return lanes.bits(lax.rem(lanes.bits(x, jnp.uint32), lanes.splat(divisor, jnp.uint32)), jnp.int32)
