"""The decode kernel: attention of a few query tokens per sequence over its pages.

A thread block takes all KV heads of a group and a share of all tokens; its warps divide heads and tokens of each stage.
A warp takes one KV head, whose query rows (its query heads, for each query token) are the columns of its matrix
products: logits `[tokens, rows] = keys @ query`, output `[dims, rows] += values @ weights`. Each stored row is decoded
once for all query rows, into the operand that is distributed over all threads of the warp. The few query rows take the
small dimension of the instruction.

This module defines what the kernel does with a stage; `loop` is the loop over stages. Its steps are `query`, `keys`,
`seen`, `softmax` and `values`; the epilogue is `segments`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax

from kvjax.kernels.aliases import Ref
from kvjax.kernels.attention.keys import Keys
from kvjax.kernels.attention.loop import StageLoop, StageTokens
from kvjax.kernels.attention.problem import DecodeConfig, Problem, Refs
from kvjax.kernels.attention.query import operand_of
from kvjax.kernels.attention.seen import Seen, Span
from kvjax.kernels.attention.segments import Segments
from kvjax.kernels.attention.softmax import State, capped, margin, raised, weights
from kvjax.kernels.attention.stages import TILE, StageLayout
from kvjax.kernels.attention.values import ValueRows
from kvjax.kernels.attention.warp import Warp

Operand = tuple[list[list[list[jax.Array]]], jax.Array]
"""A query as `operand_of` returns it, and the factor of logits."""


@dataclasses.dataclass(frozen=True)
class Decode(StageLoop[Operand]):
    """The body of the kernel; one object per trace."""

    keys: Keys
    values: ValueRows

    @classmethod
    def of(
        cls, problem: Problem, config: DecodeConfig, layout: StageLayout, refs: Refs, buffer: Ref, barriers: Ref
    ) -> Decode:
        """The body, for a layout of its stages and its shared memory."""
        warp = Warp.of(config)
        ring = cls.ring_of(problem, config, layout, refs, (buffer, barriers), warp)
        values = ValueRows(problem, layout, warp, buffer)
        return cls(
            problem, config, refs, warp, ring, Segments(problem, config, refs, warp, values, buffer),
            Seen(problem, layout, warp, refs, ring.num_blocks), Keys(problem, layout, warp, buffer), values,
        )  # fmt: skip

    def query(self, sequence: jax.Array) -> Operand:
        """The query as an operand, and the factor of logits."""
        return operand_of(self.keys, self.refs, sequence)

    def stage(
        self,
        slot: jax.Array,
        tokens: StageTokens,
        needs_look: jax.Array,
        query: Operand,
        state: State,
    ) -> State:
        """One stage: all tiles of the warp's tokens."""
        _, start, entries, span = tokens
        operand, factor = query
        config, cap = self.config, self.problem.logits_soft_cap
        logits = [self.keys.logits(slot, tile, operand) for tile in range(config.tiles)]
        logits = [[capped(x * factor, cap) for x in registers] for registers in logits]
        values = self.values.load(slot, 0, self.values.pieces[0])  # before their use, to hide the latency

        def masked(logits: list[list[jax.Array]]) -> list[list[jax.Array]]:
            return [self.seen.logits(start + TILE * tile, entries, span, each) for tile, each in enumerate(logits)]

        logits = lax.cond(needs_look, masked, list, logits)
        of_weights, has_top = self.problem.value_format.operand, self.problem.weight_dtype is not None
        state = raised(state, logits, margin(of_weights), has_top=has_top)
        total, output = list(state.total), list(state.output)
        for tile, registers in enumerate(logits):
            row_scales = self.row_scales(slot, tile, start, entries, span, needs_look)
            seen_values = functools.partial(self.seen.values, start + TILE * tile, entries, span)
            operands: list[list[jax.Array]] = []
            for piece in self.values.pieces:
                if tile or piece.start:
                    values = self.values.load(slot, tile, piece)
                values = lax.cond(needs_look, seen_values, lambda values: values, values)
                operands = operands or weights(
                    registers, state.largest, total, self.problem.value_format.operand, row_scales
                )
                self.values.accumulate(values, piece, operands, output)
        self.ring.release(slot)
        return State(state.largest, total, state.top, output)

    def row_scales(
        self, slot: jax.Array, tile: int, start: jax.Array, entries: jax.Array, span: Span, needs_look: jax.Array
    ) -> list[jax.Array]:
        """The scales of the thread's rows of values of a tile; empty where rows have none."""
        if not self.problem.value_format.has_row_scales:
            return []
        scales = self.warp.row_scales(self.values.layout, self.values.buffer, slot, tile, self.values.layout.values[1])
        seen = functools.partial(self.seen.row_scales, start + TILE * tile, entries, span)
        return list(lax.cond(needs_look, seen, list, scales))
