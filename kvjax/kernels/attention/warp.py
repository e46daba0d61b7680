"""Thread and warp indices, and the warp's share of a thread block's work."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Ref
from kvjax.kernels.attention.formats import Format
from kvjax.kernels.attention.problem import DecodeConfig
from kvjax.kernels.attention.stages import SharedRows, StageLayout
from kvjax.kernels.registers import LANES, WARPS


@dataclasses.dataclass(frozen=True)
class Warp:
    """Registers of thread and warp indices; `of` traces them once, for use inside loops.

    Attributes:
      thread: the thread's number in its warpgroup.
      number: the warp's number in the block.
      row: the thread's row in its warp, `g`.
      column: the thread's column in its warp, `c`.
      head: the warp's KV head in the block's group.
      first_tile: the warp's first tile in a stage; a warp without work reads another's.
      works: whether the warp has work.
      kv_head: the warp's KV head.
    """

    thread: jax.Array
    number: jax.Array
    row: jax.Array
    column: jax.Array
    head: jax.Array
    first_tile: jax.Array
    works: jax.Array
    kv_head: jax.Array

    @classmethod
    def of(cls, config: DecodeConfig) -> Warp:
        """The indices of the executing warp."""
        thread = lanes.thread_index()
        number = lax.axis_index("warpgroup") * WARPS + (thread >> 5)
        row, column = (thread >> 2) & 7, thread & 3
        head = number % config.heads
        first_tile = number % (config.heads * config.groups) // config.heads * config.tiles
        works = number < config.heads * config.groups
        return cls(thread, number, row, column, head, first_tile, works, head + lax.axis_index("heads") * config.heads)

    @property
    def lane(self) -> jax.Array:
        """The thread's number in its warp."""
        return self.thread & (LANES - 1)

    def offset(self, layout: StageLayout, slot: jax.Array, rows: SharedRows) -> jax.Array:
        """Offset in the buffer of the rows of one kind that the warp reads from a stage."""
        return slot * layout.stage_bytes + (self.first_tile * rows.tile_stride + self.head * rows.head_stride)

    def row_scales(
        self, layout: StageLayout, buffer: Ref, slot: jax.Array, tile: int, rows: SharedRows
    ) -> list[jax.Array]:
        """The float32 scales of the thread's row of each half of a tile."""
        start, known = self.offset(layout, slot, rows) + rows.offset(self.row), tile * rows.tile_stride
        loaded = [lanes.load_shared(buffer, start, 4, known + half * rows.half_pitch)[0] for half in range(2)]
        return [lanes.bits(word, jnp.float32) for word in loaded]

    def scale(self, fmt: Format, ref: Ref, size: int) -> jax.Array:
        """The layer's float32 decode scale for the warp's head; 1 where the format has none."""
        if fmt.dtype.info.layer_scale is None:
            return lanes.splat(1.0, jnp.float32)
        return lanes.bits(lanes.load_global(ref, self.kv_head if size > 1 else self.thread * 0), jnp.float32)
