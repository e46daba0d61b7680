"""The loop over the stages of a thread block's share, which decode kernels have in common."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Carry, Ref, Scalar
from kvjax.kernels.attention.problem import DecodeConfig, Problem, Refs
from kvjax.kernels.attention.ring import Ring
from kvjax.kernels.attention.schedule import SegmentVisitor, Sequences, Workers, serve
from kvjax.kernels.attention.seen import Seen, Span
from kvjax.kernels.attention.segments import Segments
from kvjax.kernels.attention.softmax import State
from kvjax.kernels.attention.stages import TILE, StageLayout
from kvjax.kernels.attention.warp import Warp
from kvjax.kernels.registers import LANES, SECTOR_WORDS, THREADS


class StageTokens(NamedTuple):
    """The tokens of a stage that a warp takes.

    Attributes:
      number: the stage of the sequence.
      start: the position of the first one.
      entries: the start of the sequence's entries in the block table.
      span: what the sequence's rows see.
    """

    number: jax.Array
    start: jax.Array
    entries: jax.Array
    span: Span


@dataclasses.dataclass(frozen=True)
class StageLoop[Query]:
    """The body of a kernel, except for what it does with a stage and a `Query`; one object per trace."""

    problem: Problem
    config: DecodeConfig
    refs: Refs
    warp: Warp
    ring: Ring
    segments: Segments
    seen: Seen

    @staticmethod
    def ring_of(
        problem: Problem, config: DecodeConfig, layout: StageLayout, refs: Refs, shared: tuple[Ref, Ref], warp: Warp
    ) -> Ring:
        """The ring of a layout, in shared memory: a buffer and barriers."""
        layer, num_blocks = jnp.int32(0), jnp.int32(problem.num_blocks)
        if problem.has_layer:
            layer = refs.layer[0]
            num_blocks = jnp.where((layer >= 0) & (layer < problem.num_layers), num_blocks, 0)
        return Ring(
            layout, config.warps, config.slots, *shared, refs.pages, refs.table, lanes.splat(num_blocks, jnp.uint32),
            problem.num_layers, layer, lax.axis_index("heads") * layout.heads,
            lax.axis_index("warpgroup") * THREADS + warp.thread,
        )  # fmt: skip

    def run(self) -> None:
        """Runs the body."""
        self.serve(Workers(lax.axis_index("block"), self.config.blocks), self)

    def serve(self, workers: Workers, visitor: SegmentVisitor) -> None:
        """Has a visitor attend to this block's share with `attend`, and store the results."""
        self.prefetch_table(workers.block)
        self.ring.begin()
        sequences = Sequences(self.problem, self.config.rows, self.refs.seq_lens)
        serve(visitor, sequences, workers, self.config.part, (jnp.int32(0), jnp.int32(0)))

    def finish(self, sequence: jax.Array, state: State, whole: jax.Array, part: jax.Array) -> None:
        """Stores the state of a segment."""
        self.segments.finish(sequence, state, whole, part)

    def store_span(self, sequence: jax.Array, first: jax.Array, last: jax.Array) -> None:
        """Stores the range of thread blocks that have parts of a sequence."""
        self.segments.store_span(sequence, first, last)

    def prefetch_table(self, block: jax.Array) -> None:
        """Prefetches the block table, or its start, to L2 while the lengths that lookups depend on are read."""
        problem = self.problem
        entry = (block * (self.config.warps * LANES) + self.ring.thread) * SECTOR_WORDS
        last = (problem.num_seqs - 1) * problem.table_stride + problem.max_blocks
        lanes.prefetch_global(self.refs.table, entry, entry < last)

    def attend(
        self, sequence: jax.Array, length: jax.Array, first: jax.Array, count: jax.Array, cursor: Carry
    ) -> tuple[State, Carry]:
        """Attends to stages `first` to `first + count` of a sequence.

        `cursor` is the slot and the parity of the first stage; returns the state and the cursor after the last stage.
        """
        config, ring = self.config, self.ring
        span = self.seen.span(sequence, length)
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
        query = self.query(sequence)

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
            state = self.stage(slot, StageTokens(first + i, start, entries, span), needs_look, query, state)
            return filled, ring.next(slot, parity), state

        _, cursor, state = lax.fori_loop(
            0, count, body, (filled, cursor, State.empty(self.problem.tiles, self.segments.rows.products))
        )
        return state, cursor

    def query(self, sequence: jax.Array) -> Query:
        """The query of a sequence, as `stage` takes it."""
        raise NotImplementedError

    def stage(self, slot: jax.Array, tokens: StageTokens, needs_look: jax.Array, query: Query, state: State) -> State:
        """Attends to a stage that has arrived in a slot, and releases the slot.

        `needs_look` says whether there may be a row that does not see all tokens of the stage.
        """
        raise NotImplementedError
