"""The epilogue of a segment, a thread block's share of one sequence: combines its warps, and stores the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Ref, Scalar
from kvjax.kernels.attention.problem import COLUMNS, DecodeConfig, Problem, Refs
from kvjax.kernels.attention.ring import divided, remainder
from kvjax.kernels.attention.softmax import State, Sums, normalized, sink
from kvjax.kernels.attention.warp import Warp
from kvjax.kernels.registers import LANES


def state_registers(problem: Problem) -> int:
    """Number of registers of a warp's state: sums and output."""
    fmt, size = problem.value_format, problem.spec.head_size_v
    runs = -(-size * fmt.bits // (8 * 8 * fmt.unit_bytes)) * fmt.elements_per_unit  # of eight dims
    return problem.tiles * (2 * problem.sums + 4 * -(-runs // 2))


class OutputRows(Protocol):
    """The dims of output registers, as `ValueRows` has them."""

    @property
    def products(self) -> int:
        """Matrix products of 16 dims that cover a row."""

    def dim(self, product: int, half: int) -> tuple[jax.Array, jax.Array]:
        """The dim of row `8 * half + g` of a product, and whether it exists."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """Stores a warp's segments.

    Attributes:
      problem: the call's.
      config: the launch configuration.
      refs: the references.
      warp: the warp.
      rows: maps the output's registers to dims.
      buffer: shared memory, reused after all warps have read the last stage.
    """

    problem: Problem
    config: DecodeConfig
    refs: Refs
    warp: Warp
    rows: OutputRows
    buffer: Ref

    def finish(
        self,
        sequence: jax.Array,
        state: State,
        whole: jax.Array,
        part: jax.Array,
    ) -> None:
        """Combines the states of a head's warps, and stores the result if it is `whole`, else as `part` for `merge`."""
        sums, output, stores = self.combined(state)

        @pl.when(whole)
        def _() -> None:
            self.store_result(sequence, sums, output, stores)

        @pl.when(~whole)
        def _() -> None:
            self.store_part(part, sums, output, stores)

    def combined(self, state: State) -> tuple[list[Sums], list[jax.Array], jax.Array]:
        """The combined state of a head's warps: the sums of each row, the output, and whether a thread stores these."""
        problem, config = self.problem, self.config
        total = [lanes.sum_over_rows(x) for x in state.total]
        top = [] if problem.weight_dtype is None else [lanes.max_over_rows(x) for x in state.top]
        registers = [*state.largest, *total, *top, *state.output]
        if config.groups > 1:
            registers = self.joined(registers)
        rows, start = 2 * problem.tiles, self.first_output
        sums = [Sums(*registers[row:start:rows]) for row in range(rows)]
        output = registers[start:]
        stores = self.warp.works & (self.warp.number < config.heads)
        return sums, self.scaled(output), stores

    def scaled(self, output: list[jax.Array]) -> list[jax.Array]:
        """The output times the scales of values that products lack."""
        fmt = self.problem.value_format
        factor = self.warp.scale(fmt, self.refs.v_scale, self.problem.scale_sizes[1]) * np.float32(fmt.factor)
        return [x * factor for x in output]

    @property
    def stores_sums(self) -> jax.Array:
        """Whether a thread stores what a row has once rather than for each element."""
        return self.warp.row == 0

    def store_span(self, sequence: jax.Array, first: jax.Array, last: jax.Array) -> None:
        """Stores the range of thread blocks that have parts of a sequence."""
        is_one = (self.warp.thread == 0) & (lax.axis_index("warpgroup") == 0) & (lax.axis_index("heads") == 0)
        for i, value in enumerate((first, last)):
            index = self.warp.thread * 0 + (2 * sequence + i)
            lanes.store_global(self.refs.spans, index, lanes.splat(value, jnp.int32), is_one)

    def joined(self, registers: list[jax.Array]) -> list[jax.Array]:
        """The combined state of all warps of a head, in the first of them."""
        problem, config = self.problem, self.config
        lane = self.warp.lane
        count, rows = len(registers), 2 * problem.tiles

        def offset(warp: Scalar, register: int) -> jax.Array:
            return (((warp - config.heads) * count + register) * LANES + lane) * 4

        lanes.wait_for_block()  # all stages have been read
        others = self.warp.works & (self.warp.number >= config.heads)
        for i, x in enumerate(registers):
            lanes.store_shared(self.buffer, offset(self.warp.number, i), [x], 4, others)
        lanes.wait_for_block()

        def body(group: jax.Array, mine: list[jax.Array]) -> list[jax.Array]:
            warp = self.warp.head + group * config.heads
            other = [
                lanes.bits(lanes.load_shared(self.buffer, offset(warp, i), 4)[0], jnp.float32) for i in range(count)
            ]
            result = list(mine)
            for row in range(rows):
                largest = jnp.maximum(mine[row], other[row])
                shrink, shrink_other = lanes.exp2(mine[row] - largest), lanes.exp2(other[row] - largest)
                result[row] = largest
                for i in [rows + row, *self.registers_of_row(row)]:
                    result[i] = mine[i] * shrink + other[i] * shrink_other
                for i in range(2 * rows + row, self.first_output, rows):
                    result[i] = jnp.maximum(mine[i], other[i])
            return result

        registers = lax.fori_loop(1, config.groups, body, registers)
        lanes.wait_before_copies()
        return list(registers)

    @property
    def first_output(self) -> int:
        """The index of the first output register; the registers of sums precede it."""
        return 2 * self.problem.tiles * self.problem.sums

    def registers_of_row(self, row: int) -> list[int]:
        """Indices of the output registers for one of the state's rows, of which it has two per tile."""
        start = self.first_output
        tile, i = divmod(row, 2)
        products = self.rows.products
        return [start + 4 * (tile * products + product) + j for product in range(products) for j in (i, i + 2)]

    def query_rows(self) -> Iterator[tuple[int, jax.Array, jax.Array, jax.Array]]:
        """For each row of the state: its number, whether it is a query row, and its query token and head."""
        problem = self.problem
        for row in range(2 * problem.tiles):
            query_row = row // 2 * COLUMNS + 2 * self.warp.column + row % 2
            token = divided(query_row, problem.group)
            head = self.warp.kv_head * problem.group + remainder(query_row, problem.group)
            yield row, query_row < problem.rows, token, head

    def store_result(
        self,
        sequence: jax.Array,
        sums: list[Sums],
        output: list[jax.Array],
        stores: jax.Array,
    ) -> None:
        """Stores the output and log-sum-exp of a sequence."""
        problem = self.problem
        for row, is_row, token, head in self.query_rows():
            index = (sequence * problem.q_len + token) * problem.num_heads + head
            own_sink = sink(problem, self.refs, head, is_row)
            inverse, lse = normalized(sums[row], own_sink, problem.weight_dtype)
            here = stores & is_row
            lanes.store_global(self.refs.lse, index, lse, here & self.stores_sums)
            self.store_row(self.refs.out, index, row, [x * inverse for x in self.of_row(output, row)], here)

    def of_row(self, output: list[jax.Array], row: int) -> list[jax.Array]:
        """The output registers of a row of the state."""
        return [output[i - self.first_output] for i in self.registers_of_row(row)]

    def store_row(self, ref: Ref, index: jax.Array, row: int, values: list[jax.Array], condition: jax.Array) -> None:
        """Stores the output of a row of the state as row `index` of `ref`."""
        start, size = self.first_output, self.problem.spec.head_size_v
        for i, value in zip(self.registers_of_row(row), values, strict=True):
            product, j = divmod((i - start) % (4 * self.rows.products), 4)
            dim, is_dim = self.rows.dim(product, j // 2)
            lanes.store_global(ref, index * size + dim, value, condition & is_dim)

    def store_part(
        self,
        part: jax.Array,
        sums: list[Sums],
        output: list[jax.Array],
        stores: jax.Array,
    ) -> None:
        """Stores a part of a sequence: the unnormalized output, and sums."""
        problem = self.problem
        for row, is_row, token, head in self.query_rows():
            index = (part * problem.q_len + token) * problem.num_heads + head
            here = stores & is_row
            registers = sums[row].registers
            for i, x in enumerate(registers):
                lanes.store_global(self.refs.partial_lse, index * len(registers) + i, x, here & self.stores_sums)
            self.store_row(self.refs.partial, index, row, self.of_row(output, row), here)
