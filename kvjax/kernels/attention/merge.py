"""The merge kernel, the second of a call: combines the partial results of a sequence by log-sum-exp.

A row is one query head of one query token. Its parts are distributed round-robin over `warps_per_row` warps, each with
several loads in flight, and the first warp combines their results. The elements of a row are divided among
`blocks_per_row` thread blocks, each of which computes the weights of the parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Carry, Ref
from kvjax.kernels.attention.problem import Division, Problem, Refs
from kvjax.kernels.attention.schedule import Sequences, part_of_block
from kvjax.kernels.attention.softmax import LOWEST, Sums, normalized, sink
from kvjax.kernels.registers import LANES, WARPS


class Parts(NamedTuple):
    """A row's combined parts, float32: its sums, and the weighted values, relative to the same logit.

    `output` has a register for each of a thread's elements.
    """

    sums: Sums
    output: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Merge:
    """The body of the kernel.

    Attributes:
      problem: that of the preceding decode kernel.
      config: likewise.
      refs: likewise.
      shared: shared memory, float32, where several warps share a row.
    """

    problem: Problem
    config: Division
    refs: Refs
    shared: Ref

    def run(self) -> None:
        """The body of the kernel."""
        problem = self.problem
        thread = lanes.thread_index()
        lane = thread & (LANES - 1)
        warp = lax.axis_index("warpgroup") * WARPS + (thread >> 5)
        sequence = lax.axis_index("sequence")
        count = self.stages(sequence)
        rows = problem.q_len * problem.num_heads
        per_row = jnp.int32(blocks_per_row(problem, self.config))
        dim = lax.rem(lax.axis_index("rows"), per_row) * (LANES * self.elements_per_thread) + lane  # its first
        first_row = lax.div(lax.axis_index("rows"), per_row)
        if self.warps_per_row == 1:
            row, warp_index = first_row * WARPS + warp, thread * 0
        else:
            row, warp_index = lanes.splat(first_row, jnp.int32), warp
        is_row = row < rows
        index = sequence * rows + jnp.minimum(row, rows - 1)
        num_parts, part_index = self.parts(sequence, count)

        @pl.when(count == 0)
        def nothing_stored() -> None:
            self.store(index, row, dim, self.no_parts(), is_row & (warp_index == 0))

        @pl.when((count > 0) & (num_parts >= self.least_parts))
        def several_parts() -> None:
            parts = self.combined(num_parts, part_index, row, dim, warp_index, is_row)
            if self.warps_per_row > 1:
                parts = self.joined(parts, lane, warp)
            self.store(index, row, dim, parts, is_row & (warp_index == 0))

    @property
    def warps_per_row(self) -> int:
        """Warps that share a row: 1, or all of a block."""
        return self.config.merge.warps

    @property
    def sequences(self) -> Sequences:
        """The sequences of the call."""
        return Sequences(self.problem, self.config.rows, self.refs.seq_lens)

    def stages(self, sequence: jax.Array) -> jax.Array:
        """The number of stages of a sequence."""
        return self.sequences.stages(self.refs.seq_lens[sequence])[1]

    @property
    def least_parts(self) -> int:
        """The fewest parts for which this kernel stores a sequence's results; with one, the decode kernel does."""
        return 2

    @property
    def num_sums(self) -> int:
        """Numbers of a row in a part, besides its results."""
        return self.problem.sums

    def parts(self, sequence: jax.Array, count: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """The number of parts of a sequence of `count` stages, and a function to the index of each in the workspace."""
        if (least := self.config.part) is not None:
            part = self.sequences.part(count, least)
            start = sequence * self.sequences.max_parts(least)
            return lax.div(count + (part - 1), part), lambda number: number + start
        first, last = self.refs.spans[2 * sequence], self.refs.spans[2 * sequence + 1]
        return last - first + 1, lambda number: part_of_block(first + number, number == 0)

    @property
    def elements_per_thread(self) -> int:
        """Elements of a row that a thread holds."""
        return elements_per_thread(self.problem, self.config)

    def no_parts(self) -> Parts:
        """No part."""
        zero, lowest = lanes.splat(0.0, jnp.float32), lanes.splat(LOWEST, jnp.float32)
        sums = Sums(*(lowest, zero, lowest)[: self.num_sums])
        return Parts(sums, [zero] * self.elements_per_thread)

    def combined(
        self,
        num_parts: jax.Array,
        part_index: Callable[[jax.Array], jax.Array],
        row: jax.Array,
        dim: jax.Array,
        warp_index: jax.Array,
        is_row: jax.Array,
    ) -> Parts:
        """The combined parts of a row that a warp takes: every `warps_per_row`-th from `warp_index` on."""
        problem, at_once = self.problem, self.config.merge.at_once
        step = self.warps_per_row * at_once
        rows, size = problem.q_len * problem.num_heads, problem.spec.head_size_v

        def body(i: jax.Array, carry: Carry) -> Carry:
            (largest, total, top), output = carry
            loaded: list[Parts] = []
            for k in range(at_once):
                part = i * step + k * self.warps_per_row + warp_index
                is_part = is_row & (part < num_parts)
                offset = part_index(part) * rows + row
                sums = [
                    lanes.load_global(self.refs.partial_lse, self.num_sums * offset + j, is_part, none)
                    for j, none in enumerate((_bits(LOWEST), 0, _bits(LOWEST))[: self.num_sums])
                ]
                values = [
                    lanes.load_global(
                        self.refs.partial,
                        offset * size + dim + LANES * j,
                        is_part & (dim + LANES * j < size),
                        0,
                    )
                    for j in range(self.elements_per_thread)
                ]
                sums, values = ([lanes.bits(x, jnp.float32) for x in some] for some in (sums, values))
                loaded.append(Parts(Sums(*sums), values))
            new = largest
            for parts in loaded:
                new = jnp.maximum(new, parts.sums.largest)
            shrink = lanes.exp2(largest - new)
            total, output = total * shrink, [x * shrink for x in output]
            for parts in loaded:
                weight = lanes.exp2(parts.sums.largest - new)
                total = total + parts.sums.total * weight
                output = [x + y * weight for x, y in zip(output, parts.output, strict=True)]
                if parts.sums.top is not None:
                    top = jnp.maximum(top, parts.sums.top)
            return Parts(Sums(new, total, top), output)

        none = self.no_parts()
        steps = lax.div(num_parts + (step - 1), jnp.int32(step))
        return lax.fori_loop(0, steps, body, none)

    def joined(self, own: Parts, lane: jax.Array, warp: jax.Array) -> Parts:
        """The combined parts of all warps, in each of them."""
        first = self.num_sums  # register of the output
        largest, _, top = own.sums
        registers = [*own.sums.registers, *own.output]
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
            for other in range(self.warps_per_row)
        ]
        for other in loaded:
            largest = jnp.maximum(largest, other[0])
            if top is not None:
                top = jnp.maximum(top, other[2])
        weights = [lanes.exp2(other[0] - largest) for other in loaded]
        total, *output = (
            sum(
                (other[i] * weight for other, weight in zip(loaded, weights, strict=True)),
                start=lanes.splat(0.0, jnp.float32),
            )
            for i in (1, *range(first, count))
        )
        return Parts(Sums(largest, total, top), output)

    def store(self, index: jax.Array, row: jax.Array, dim: jax.Array, parts: Parts, condition: jax.Array) -> None:
        """Stores a row's output and log-sum-exp."""
        problem, size = self.problem, self.problem.spec.head_size_v
        own_sink = sink(problem, self.refs, row % problem.num_heads, condition)
        inverse, lse = normalized(parts.sums, own_sink, problem.weight_dtype)
        lanes.store_global(self.refs.lse, index, lse, condition & (dim == 0))
        for j, x in enumerate(parts.output):
            position = dim + LANES * j
            lanes.store_global(self.refs.out, index * size + position, x * inverse, condition & (position < size))


def elements_per_thread(problem: Problem, config: Division) -> int:
    """Elements of a row that a thread holds."""
    return min(config.merge.elements, -(-problem.spec.head_size_v // LANES))


def blocks_per_row(problem: Problem, config: Division) -> int:
    """Thread blocks that share a row; each takes different elements."""
    return -(-problem.spec.head_size_v // (LANES * elements_per_thread(problem, config)))


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))
