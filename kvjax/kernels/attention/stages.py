"""Rows of pages on their way through shared memory: what each warp copies for itself, and where it puts it.

A warp has a ring of its own: `slots` stages of `tiles` runs of 16 tokens of one KV head, each row copied by
asynchronous copies of up to 16 bytes. So no warp waits for another. Rows lie `pitch` bytes apart, such that the loads
of `formats` find them in different banks: eight rows that `ldmatrix` reads together start at eight different multiples
of 16 bytes modulo 128, and key rows of 64 bytes follow each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels.attention import lanes
from kvjax.kernels.memory import PageMemory
from kvjax.kernels.registers import LANES
from kvjax.pages import SWIZZLE_TOKENS, PageRegion, swizzled_position

TILE = 16
"""Tokens of one product."""

COPY_BYTES = 16
"""Bytes that a thread copies at once, at most."""


@dataclasses.dataclass(frozen=True)
class SharedRows:
    """Rows of one kind in a stage.

    Attributes:
      page: where they are in a page.
      page_stride: bytes from a page to the next.
      start: where they begin in the stage.
      pitch: bytes from a row to the next.
      unit: bytes of a copy.
    """

    page: PageRegion
    page_stride: int
    start: int
    pitch: int
    unit: int

    @property
    def alignment(self) -> int:
        """Bytes that each row's offset is a multiple of, up to 16."""
        return math.gcd(self.start, self.pitch, 16)

    def offset(self, row: Any) -> Any:
        """Where a row begins in the stage."""
        return self.start + row * self.pitch

    def scale_offset(self, row: Any, scale: Any) -> Any:
        """Where a block scale of a token lies in the stage; of swizzled rows for whole groups of four tokens."""
        if not self.page.swizzled:
            return self.offset(row) + scale
        tile_row, column = swizzled_position(row, scale, self.page.row_bytes)
        return self.offset(tile_row) + column


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What a stage of a warp holds.

    Attributes:
      block_size: tokens of a page.
      tiles: runs of 16 tokens.
      keys: data and, for NVFP4, block scales.
      values: the same.
      stage_bytes: bytes of a stage.
    """

    block_size: int
    tiles: int
    keys: tuple[SharedRows, ...]
    values: tuple[SharedRows, ...]
    stage_bytes: int

    @classmethod
    def of(cls, block_size: int, memory: Sequence[PageMemory], tiles: int) -> StagePlan:
        """The plan for pages of so many tokens, whose keys and values lie in `memory`."""
        start = 0
        halves: list[list[SharedRows]] = [[], []]
        for is_values, half in enumerate(memory):
            for is_scales, region in enumerate(half.regions):
                unit = math.gcd(
                    COPY_BYTES, region.row_bytes, region.base, region.token_stride, region.head_stride,
                    half.page_stride, half.alignment,
                )  # fmt: skip
                pitch = region.row_bytes if is_scales else _pitch(region.row_bytes, bool(is_values))
                start = -(-start // 16) * 16
                halves[is_values].append(SharedRows(region, half.page_stride, start, pitch, unit))
                start += TILE * tiles * pitch
        keys, values = (tuple(half) for half in halves)
        return cls(block_size, tiles, keys, values, -(-start // 128) * 128)

    @property
    def is_swizzled(self) -> bool:
        """Whether the V scales of four tokens share rows."""
        return any(rows.page.swizzled for rows in self.values)

    @property
    def has_whole_tiles(self) -> bool:
        """Whether each tile lies in one page."""
        return self.block_size % TILE == 0


def _pitch(row_bytes: int, is_values: bool) -> int:
    """Bytes between rows: an odd multiple of 16 where they are read by `ldmatrix`."""
    if row_bytes % 16:
        return row_bytes
    if not is_values and row_bytes <= 64:
        return row_bytes
    return row_bytes + (16 if row_bytes % 32 == 0 else 0)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ring of each warp.

    Attributes:
      plan: what a stage holds.
      slots: stages of a ring.
      buffer: shared memory, `uint8 [warps * slots * plan.stage_bytes]`.
      pages: references to the pages of keys and of values, `[num_blocks, page_elements]`.
      table: reference to the block table, flat.
      num_blocks: blocks from 0 to less than this exist: a uint32 register.
      num_layers: pages of a block.
      layer: which of them.
      warp: the warp's number in the block, a register.
      head: the warp's KV head, a register.
      thread: the thread's number in its warpgroup.
    """

    plan: StagePlan
    slots: int
    buffer: Any
    pages: tuple[Any, Any]
    table: Any
    num_blocks: jax.Array
    num_layers: int
    layer: jax.Array
    warp: jax.Array
    head: jax.Array
    thread: jax.Array

    def base(self, slot: Any) -> jax.Array:
        """Where a slot begins in shared memory."""
        return (self.warp * self.slots + slot) * self.plan.stage_bytes

    def blocks(self, entries: Any, position: jax.Array, start: Any, length: Any) -> list[jax.Array]:
        """The page of each row of a stage, or -1 where no token is looked for in it; of every tile a register.

        A thread has row `lane % 16`. For a block that does not exist it is -2.

        Args:
          entries: where the sequence's entries begin in the table.
          position: of the stage's first row.
          start: the first position that is seen.
          length: the sequence's; nothing is seen from there on.
        """
        found = []
        for tile in range(self.plan.tiles):
            if self.plan.has_whole_tiles:
                first = position + TILE * tile
                wanted = (first + (TILE - 1) >= start) & (first < length)
            else:
                first = position + TILE * tile + (self.thread & 15)
                # A swizzled row holds scales of four tokens: they travel together, and are in one block.
                group = SWIZZLE_TOKENS if self.plan.is_swizzled else 1
                wanted = (first // group * group + (group - 1) >= start) & (first // group * group < length)
            entry = entries + divided(first, self.plan.block_size)
            block = lanes.load_global(self.table, entry, wanted, -1)
            missing = lanes.splat(-2, jnp.int32)
            exists = block < self.num_blocks  # one comparison: negative numbers are large ones
            page = lanes.bits(block, jnp.int32)
            if self.num_layers > 1:
                page = jnp.where(exists, page * self.num_layers + self.layer, page)
            found.append(jnp.where(exists | ~wanted, page, missing))
        return found

    def fill(self, slot: Any, position: jax.Array, blocks: list[jax.Array]) -> None:
        """Starts the copies of a stage, of the rows whose block is there, and ends a group of copies."""
        plan = self.plan
        lane = self.thread & (LANES - 1)
        base = self.base(slot)
        halves = zip(self.pages, (plan.keys, plan.values), strict=True)
        for pages, rows in ((pages, rows) for pages, half in halves for rows in half):
            region, unit = rows.page, rows.unit
            pieces = region.row_bytes // unit
            whole = pieces <= LANES and LANES % pieces == 0  # then a copy's row and piece are known of its thread
            head = self.head * region.head_stride
            count = TILE * pieces
            for tile in range(plan.tiles):
                for first in range(0, count, LANES):
                    if whole:
                        step = first // pieces
                        row, piece = lane // pieces, (lane % pieces) * unit
                    else:
                        step = 0
                        row, piece = (lane + first) // pieces, (lane + first) % pieces * unit
                    inside = None if first + LANES <= count else lane + first < count
                    to = base + rows.offset(row) + piece
                    to_immediate = (TILE * tile + step) * rows.pitch
                    block = blocks[tile]
                    if plan.has_whole_tiles:
                        token = remainder(position + TILE * tile, plan.block_size)
                        place = (token + row) * region.token_stride + head + piece
                        immediate = region.base + step * region.token_stride
                    else:
                        at = jnp.minimum(row + step, TILE - 1)
                        block = lanes.shuffle(block, at)
                        token = remainder(position + TILE * tile + at, plan.block_size)
                        place = token * region.token_stride + head + piece
                        immediate = region.base
                    copies = block >= 0 if inside is None else (block >= 0) & inside
                    lanes.copy_async(
                        self.buffer,
                        to,
                        to_immediate,
                        pages,
                        block,
                        rows.page_stride,
                        place,
                        immediate,
                        unit,
                        copies,
                    )
        lanes.end_copies()

    def wait(self) -> None:
        """Waits for the oldest stage but `slots - 1`, for all threads of the warp."""
        lanes.wait_for_copies(self.slots - 1)


def divided(x: Any, divisor: int) -> Any:
    """The quotient of int32 that are not negative."""
    return lanes.bits(lax.div(lanes.bits(x, jnp.uint32), lanes.splat(divisor, jnp.uint32)), jnp.int32)


def remainder(x: Any, divisor: int) -> Any:
    """The remainder of int32 that are not negative."""
    return lanes.bits(lax.rem(lanes.bits(x, jnp.uint32), lanes.splat(divisor, jnp.uint32)), jnp.int32)
