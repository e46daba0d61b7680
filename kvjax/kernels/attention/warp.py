"""Thread and warp indices, and the warp's share of a thread block's work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels.attention import lanes
from kvjax.kernels.attention.problem import DecodeConfig, Problem
from kvjax.kernels.attention.stages import SharedRows, StagePlan
from kvjax.kernels.registers import LANES, WARPS


@dataclasses.dataclass(frozen=True)
class Warp:
    """Registers of thread and warp indices; `of` traces them once, for use inside loops.

    Attributes:
      thread: the thread's number in its warpgroup.
      number: the warp's in the block.
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

    def offset(self, plan: StagePlan, slot: jax.Array, rows: SharedRows) -> jax.Array:
        """Offset in the buffer of the rows of one kind that the warp reads from a stage."""
        return slot * plan.stage_bytes + (self.first_tile * rows.tile_stride + self.head * rows.head_stride)

    def scale(self, problem: Problem, ref: Any, size: int) -> jax.Array:
        """The float32 decode scale of the warp's head; 1 where the layer is not quantized."""
        if not problem.spec.dtype.is_quantized:
            return lanes.splat(1.0, jnp.float32)
        return lanes.bits(lanes.load_global(ref, self.kv_head if size > 1 else self.thread * 0), jnp.float32)
