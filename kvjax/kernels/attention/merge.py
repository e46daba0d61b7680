"""Putting together what several blocks of threads have of one sequence, by log-sum-exp: the second kernel of a call.

A row is one query head of one query token. `warps_a_row` warps take its parts by turns, several loads at once, and the
first of them joins what they have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels.attention import lanes
from kvjax.kernels.attention.problem import Problem, Refs
from kvjax.kernels.attention.schedule import Sequences
from kvjax.kernels.attention.softmax import LOWEST, normalized, sink
from kvjax.kernels.registers import LANES, WARPS

AT_ONCE = 4
"""Parts that a warp loads before it needs any."""


@dataclasses.dataclass(frozen=True)
class Merge:
    """The body of the kernel.

    Attributes:
      problem: of the decode kernel before.
      rows: tokens of a stage of it.
      refs: likewise.
      warps_a_row: 1, or all warps of a block.
      shared: shared memory, float32, where several warps have a row.
    """

    problem: Problem
    rows: int
    refs: Refs
    warps_a_row: int
    shared: Any

    def run(self) -> None:
        """What a block does."""
        problem = self.problem
        thread = lanes.thread_index()
        lane = thread & (LANES - 1)
        warp = lax.axis_index("warpgroup") * WARPS + (thread >> 5)
        sequence = lax.axis_index("sequence")
        length = self.refs.seq_lens[sequence]
        _, count = Sequences(problem, self.rows, self.refs.seq_lens).stages(length)
        rows = problem.q_len * problem.num_heads
        if self.warps_a_row == 1:
            row, turn = lax.axis_index("rows") * WARPS + warp, thread * 0
        else:
            row, turn = lanes.splat(lax.axis_index("rows"), jnp.int32), warp
        is_row = row < rows
        index = sequence * rows + jnp.minimum(row, rows - 1)
        first_block, last_block = self.refs.spans[2 * sequence], self.refs.spans[2 * sequence + 1]

        @pl.when(count == 0)
        def nothing_stored() -> None:
            zero = lanes.splat(0.0, jnp.float32)
            self.store(index, row, lane, zero + LOWEST, zero, [zero] * self.parts_a_row, is_row & (turn == 0))

        @pl.when((count > 0) & (first_block != last_block))
        def several_parts() -> None:
            largest, total, output = self.sums(first_block, last_block, row, lane, turn, is_row)
            if self.warps_a_row > 1:
                largest, total, output = self.joined(largest, total, output, lane, warp)
            self.store(index, row, lane, largest, total, output, is_row & (turn == 0))

    @property
    def parts_a_row(self) -> int:
        """Elements of a row that a thread has."""
        return -(-self.problem.spec.head_size_v // LANES)

    def sums(
        self, first_block: Any, last_block: Any, row: jax.Array, lane: jax.Array, turn: jax.Array, is_row: jax.Array
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """A warp's parts of a row."""
        problem, step = self.problem, self.warps_a_row * AT_ONCE
        rows, size = problem.q_len * problem.num_heads, problem.spec.head_size_v

        def body(i: jax.Array, carry: Any) -> Any:
            largest, total, output = carry
            loaded = []
            for k in range(AT_ONCE):
                part = i * step + k * self.warps_a_row + turn
                is_part = is_row & (part <= last_block - first_block)
                place = (2 * (first_block + part) + jnp.where(part == 0, 1, 0)) * rows + row
                pair = [
                    lanes.load_global(self.refs.partial_lse, 2 * place, is_part, _bits(LOWEST)),
                    lanes.load_global(self.refs.partial_lse, 2 * place + 1, is_part, 0),
                ]
                values = [
                    lanes.load_global(
                        self.refs.partial, place * size + lane + LANES * j, is_part & (lane + LANES * j < size), 0
                    )
                    for j in range(self.parts_a_row)
                ]
                loaded.append([lanes.bits(x, jnp.float32) for x in (*pair, *values)])
            new = largest
            for part_largest, *_ in loaded:
                new = jnp.maximum(new, part_largest)
            shrink = lanes.exp2(largest - new)
            total, output = total * shrink, [x * shrink for x in output]
            for part_largest, part_total, *values in loaded:
                weight = lanes.exp2(part_largest - new)
                total = total + part_total * weight
                output = [x + y * weight for x, y in zip(output, values, strict=True)]
            return new, total, output

        zero = lanes.splat(0.0, jnp.float32)
        steps = lax.div(last_block - first_block + step, jnp.int32(step))
        return lax.fori_loop(0, steps, body, (zero + LOWEST, zero, [zero] * self.parts_a_row))

    def joined(
        self, largest: jax.Array, total: jax.Array, output: list[jax.Array], lane: jax.Array, warp: jax.Array
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """The sums of all warps, in each of them."""
        registers = [largest, total, *output]
        count = len(registers)
        for i, x in enumerate(registers):
            offset = ((warp * count + i) * LANES + lane) * 4
            lanes.store_shared(self.shared, offset, [x], 4, offset >= 0)
        lanes.wait_for_block()
        loaded = [
            [
                lanes.bits(lanes.load_shared(self.shared, lane * 4, 4, (other * count + i) * 4 * LANES)[0], jnp.float32)
                for i in range(count)
            ]
            for other in range(self.warps_a_row)
        ]
        for other in loaded:
            largest = jnp.maximum(largest, other[0])
        weights = [lanes.exp2(other[0] - largest) for other in loaded]
        sums = [
            sum(
                (other[i] * weight for other, weight in zip(loaded, weights, strict=True)),
                start=lanes.splat(0.0, jnp.float32),
            )
            for i in range(1, count)
        ]
        return largest, sums[0], sums[1:]

    def store(
        self,
        index: jax.Array,
        row: jax.Array,
        lane: jax.Array,
        largest: jax.Array,
        total: jax.Array,
        output: list[jax.Array],
        condition: jax.Array,
    ) -> None:
        """Stores a row's output and log-sum-exp."""
        problem, size = self.problem, self.problem.spec.head_size_v
        inverse, lse = normalized(largest, total, sink(problem, self.refs, row % problem.num_heads, condition))
        lanes.store_global(self.refs.lse, index, lse, condition & (lane == 0))
        for j, x in enumerate(output):
            dim = lane + LANES * j
            lanes.store_global(self.refs.out, index * size + dim, x * inverse, condition & (dim < size))


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))
