"""The decode kernel: attention of a few query tokens per sequence over its pages.

A thread block takes all KV heads of a group and a share of all tokens; its warps divide heads and tokens of each stage.
A warp takes one KV head, whose query rows (its query heads, for each query token) are the columns of its matrix
products: logits `[tokens, rows] = keys @ query`, output `[dims, rows] += values @ weights`. Each stored row is
decoded once for all query rows, into the operand that is distributed over all threads of the warp, and the small
dimension of the instruction holds the few query rows.

This module is the loop over stages. Its steps are `query`, `keys`, `seen`, `softmax` and `values`; the epilogue is
`segments`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Carry, Ref, Scalar
from kvjax.kernels.attention.keys import Keys
from kvjax.kernels.attention.problem import DecodeConfig, Problem, Refs
from kvjax.kernels.attention.query import operand_of
from kvjax.kernels.attention.ring import Ring
from kvjax.kernels.attention.schedule import Sequences, serve_parts, serve_share
from kvjax.kernels.attention.seen import Seen, Span
from kvjax.kernels.attention.segments import Segments
from kvjax.kernels.attention.softmax import State, capped, margin, raised, weights
from kvjax.kernels.attention.stages import TILE, StagePlan
from kvjax.kernels.attention.values import ValueRows
from kvjax.kernels.attention.warp import Warp
from kvjax.kernels.registers import LANES, THREADS

SECTOR_ENTRIES = 8
"""Entries of a block table in a sector, the unit of reads from memory."""


class StageTokens(NamedTuple):
    """The tokens of a stage that a warp takes.

    Attributes:
      start: the position of the first one.
      entries: the start of the sequence's entries in the block table.
      span: what the sequence's rows see.
    """

    start: jax.Array
    entries: jax.Array
    span: Span


@dataclasses.dataclass(frozen=True)
class Decode:
    """The body of the kernel; one object per trace."""

    problem: Problem
    config: DecodeConfig
    refs: Refs
    warp: Warp
    ring: Ring
    keys: Keys
    seen: Seen
    values: ValueRows
    segments: Segments

    @classmethod
    def of(
        cls, problem: Problem, config: DecodeConfig, plan: StagePlan, refs: Refs, buffer: Ref, barriers: Ref
    ) -> Decode:
        """The body, for a plan of its stages and its shared memory."""
        warp = Warp.of(config)
        layer, num_blocks = jnp.int32(0), jnp.int32(problem.num_blocks)
        if problem.has_layer:
            layer = refs.layer[0]
            num_blocks = jnp.where((layer >= 0) & (layer < problem.num_layers), num_blocks, 0)
        ring = Ring(
            plan, config.warps, config.slots, buffer, barriers, refs.pages, refs.table,
            lanes.splat(num_blocks, jnp.uint32), problem.num_layers, layer, lax.axis_index("heads") * config.heads,
            lax.axis_index("warpgroup") * THREADS + warp.thread,
        )  # fmt: skip
        values = ValueRows(problem, plan, warp, buffer)
        return cls(
            problem, config, refs, warp, ring, Keys(problem, plan, warp, buffer),
            Seen(problem, plan, warp, refs, ring.num_blocks), values,
            Segments(problem, config, refs, warp, values, buffer),
        )  # fmt: skip

    def run(self) -> None:
        """Runs the body."""
        self.prefetch_table()
        self.ring.begin()
        sequences = Sequences(self.problem, self.config.rows, self.refs.seq_lens)
        cursor = jnp.int32(0), jnp.int32(0)
        if self.config.part is not None:
            serve_parts(self, sequences, self.config.blocks, self.config.part, cursor)
        else:
            serve_share(self, sequences, self.config.blocks, cursor)

    def finish(self, sequence: jax.Array, state: State, whole: jax.Array, part: jax.Array) -> None:
        """Stores the state of a segment."""
        self.segments.finish(sequence, state, whole, part)

    def store_span(self, sequence: jax.Array, first: jax.Array, last: jax.Array) -> None:
        """Stores the range of thread blocks that have parts of a sequence."""
        self.segments.store_span(sequence, first, last)

    def prefetch_table(self) -> None:
        """Brings the block table, or its start, to L2 while the lengths are read, which lookups depend on."""
        problem = self.problem
        entry = (lax.axis_index("block") * (self.config.warps * LANES) + self.ring.thread) * SECTOR_ENTRIES
        last = (problem.num_seqs - 1) * problem.table_stride + problem.max_blocks
        lanes.prefetch_global(self.refs.table, entry, entry < last)

    def attend(self, sequence: jax.Array, length: jax.Array, first: jax.Array, count: jax.Array, cursor: Any) -> Any:
        """Stages `first` to `first + count` of a sequence.

        `cursor` is the slot and the parity of the first stage; returns the state and the cursor after the last stage.
        """
        config, ring = self.config, self.ring
        span = Span.of(self.problem, length, self.seen.tree(sequence))
        entries = sequence * self.problem.table_stride
        # Nothing is looked up or copied past the end.
        end = jnp.minimum(span.end, (first + count) * config.rows)

        def position(stage: Scalar) -> jax.Array:
            return (first + stage) * config.rows

        def blocks(stage: Scalar) -> list[jax.Array]:
            return ring.blocks(entries, position(stage), span.start, end)

        def fill(stage: Scalar, carry: Carry) -> Carry:
            (slot, parity), found = carry
            ring.fill(slot, parity, position(stage), found)
            return ring.next(slot, parity), blocks(stage + 1)

        ahead = jnp.minimum(ring.ahead, count)
        filled = lax.fori_loop(0, ahead, fill, (cursor, blocks(0)))
        lacks = ring.lacks_blocks(entries, jnp.maximum(span.start, position(0)), end)
        query, factor = operand_of(self.keys, self.refs, sequence)

        def body(i: jax.Array, carry: Carry) -> Carry:
            ((next_slot, next_parity), found), (slot, parity), state = carry

            @pl.when(i + ahead < count)
            def _() -> None:
                ring.fill(next_slot, next_parity, position(i + ahead), found)

            filled = ring.next(next_slot, next_parity), blocks(i + ahead + 1)
            start = position(i) + self.warp.first_tile * TILE
            is_plain = (start >= span.sees_all_from) & (start + TILE * config.tiles <= span.sees_all_to)
            needs_look = lanes.any_in_warp(~is_plain) | lacks
            ring.wait(slot, parity)
            state = self.stage(slot, StageTokens(start, entries, span), needs_look, query, factor, state)
            ring.release(slot)
            return filled, ring.next(slot, parity), state

        _, cursor, state = lax.fori_loop(
            0, count, body, (filled, cursor, State.empty(self.problem.tiles, self.values.products))
        )
        return state, cursor

    def stage(
        self,
        slot: jax.Array,
        tokens: StageTokens,
        needs_look: jax.Array,
        query: list[list[list[jax.Array]]],
        factor: jax.Array,
        state: State,
    ) -> State:
        """One stage: all tiles of the warp's tokens."""
        start, entries, span = tokens
        config, cap = self.config, self.problem.logits_soft_cap
        logits = [self.keys.logits(slot, tile, query) for tile in range(config.tiles)]
        logits = [[capped(x * factor, cap) for x in registers] for registers in logits]
        values = self.values.load(slot, 0, self.values.pieces[0])  # before their use, to hide the latency

        def masked(logits: Any) -> Any:
            return [self.seen.logits(start + TILE * tile, entries, span, each) for tile, each in enumerate(logits)]

        logits = lax.cond(needs_look, masked, list, logits)
        state = raised(state, logits, margin(self.problem.value_format.operand))
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
        return State(state.largest, total, state.top, output)

    def row_scales(
        self, slot: jax.Array, tile: int, start: jax.Array, entries: jax.Array, span: Span, needs_look: jax.Array
    ) -> list[jax.Array]:
        """The scales of the thread's rows of values of a tile; empty where rows have none."""
        if not self.problem.value_format.has_row_scales:
            return []
        scales = self.warp.row_scales(self.values.plan, self.values.buffer, slot, tile, self.values.plan.values[1])
        seen = functools.partial(self.seen.row_scales, start + TILE * tile, entries, span)
        return list(lax.cond(needs_look, seen, list, scales))
