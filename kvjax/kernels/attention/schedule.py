"""Division of the work: all stages of all sequences, in order, are divided evenly among the thread blocks.

The share of a block may start and end anywhere in a sequence. Blocks are thus equally busy whatever the lengths are,
and one long sequence occupies all of them. Each warp computes its block's share from the lengths. `merge` combines the
parts of a sequence that several blocks process.

The division of a sequence, and the order of its sums, thus depends on the lengths of the others. In batch-invariant
calls each sequence is divided into parts by its own length, and a block processes the parts that start in its share,
one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Carry, Ref, Scalar
from kvjax.kernels.attention.problem import Problem
from kvjax.kernels.launchable import Number
from kvjax.kernels.registers import LANES

MIN_STAGES = 2
"""Minimum number of stages of a block's share, unless fewer are left."""

MAX_PARTS = 64
"""Maximum number of parts of a sequence in a batch-invariant call, which bounds the workspace."""


class Workers(NamedTuple):
    """The thread blocks that divide work among them.

    Attributes:
      block: the number of this one.
      blocks: how many there are.
    """

    block: jax.Array
    blocks: Number


class Share(NamedTuple):
    """The share of a block: `num_stages` stages, starting `skipped` stages into `sequence`.

    `end` is its end, counted in stages over all sequences; `size` is the size of every share but the last.
    """

    sequence: jax.Array
    skipped: jax.Array
    num_stages: jax.Array
    end: jax.Array
    size: jax.Array


def part_of_block(block: Scalar, begins: Scalar) -> Scalar:
    """The index in the workspace of a thread block's partial result, where a call has no parts of a fixed size.

    A block leaves at most two partial results, because its share is consecutive stages: part `2 * block` of its first
    sequence, if that began in an earlier block, and part `2 * block + 1` of its last one, if that `begins` here and
    goes on in a later block. It attends alone to all sequences between these, and stores their results.
    """
    return block * 2 + jnp.where(begins, 1, 0)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequences of a call.

    Attributes:
      problem: the call's.
      rows: tokens of a stage.
      seq_lens: reference to int32 `[num_seqs]`.
    """

    problem: Problem
    rows: int
    seq_lens: Ref

    def stages(self, length: Scalar) -> tuple[Scalar, Scalar]:
        """For a sequence of a given length, the first stage with a visible token, and the number of such stages."""
        problem = self.problem
        length = jnp.maximum(length, 0)
        start = length * 0
        if problem.reach is not None:
            start = jnp.maximum(length - problem.reach, 0)
        stored = jnp.minimum(length, problem.max_blocks * problem.spec.block_size)
        first = lax.div(start, start * 0 + self.rows)
        count = lax.div(stored - 1, start * 0 + self.rows) + 1 - first
        return first, jnp.where(stored > start, count, 0)

    def part(self, count: jax.Array, least: int) -> jax.Array:
        """Stages per part of a sequence of `count` stages in a batch-invariant call; the last part may have fewer.

        The smallest multiple of `least` that makes at most `MAX_PARTS` parts.
        """
        return least * jnp.maximum(lax.div(count + (least * MAX_PARTS - 1), jnp.int32(least * MAX_PARTS)), 1)

    def max_parts(self, least: int) -> Number:
        """Maximum number of parts of a sequence in a batch-invariant call."""
        problem = self.problem
        last = problem.max_blocks * problem.spec.block_size - 1
        if isinstance(last, int):
            return min(last // (least * self.rows) + 1, MAX_PARTS)
        return jnp.minimum(lax.div(last, jnp.int32(least * self.rows)) + 1, MAX_PARTS)

    def counts(self, first: Scalar) -> jax.Array:
        """Stages of 32 sequences, one per thread of each warp."""
        lane = lanes.thread_index() & (LANES - 1)
        index = lane + first
        is_one = index < self.problem.num_seqs
        length = lanes.bits(lanes.load_global(self.seq_lens, index, is_one), jnp.int32)
        return self.stages(length)[1]

    @property
    def chunks(self) -> Number:
        """Runs of 32 sequences."""
        num_seqs = self.problem.num_seqs
        if isinstance(num_seqs, int):
            return -(-num_seqs // LANES)
        return lax.div(num_seqs + (LANES - 1), jnp.int32(LANES))

    def share(self, workers: Workers) -> Share:
        """The share of a thread block, in stages."""
        block, num_blocks = workers
        chunks, zero = self.chunks, lanes.splat(0, jnp.int32)

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            return total + self.counts(i * LANES)

        all_stages = lanes.of_first_thread(lanes.sum_over_warp(lax.fori_loop(0, chunks, add, zero)))
        size = jnp.maximum(lax.div(all_stages + (num_blocks - 1), jnp.int32(num_blocks)), MIN_STAGES)
        start = jnp.minimum(block * size, all_stages)
        count = jnp.minimum(all_stages - start, size)
        where = lanes.splat(start, jnp.int32)

        def search(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            before, sequence, skipped = carry
            mine = self.counts(i * LANES)
            end = mine
            for distance in (1, 2, 4, 8, 16):
                end = end + lanes.shuffle_up(end, distance)
            end = end + before
            lane = lanes.thread_index() & (LANES - 1)
            has = (end - mine <= where) & (where < end)
            # One thread finds it, in one chunk.
            found = jnp.where(has, i * LANES + lane, sequence)
            into = jnp.where(has, where - (end - mine), skipped)
            return lanes.max_over_warp(end), found, into

        _, sequence, skipped = lax.fori_loop(0, chunks, search, (zero, zero, zero))
        return Share(
            lanes.of_first_thread(lanes.max_over_warp(sequence)),
            lanes.of_first_thread(lanes.max_over_warp(skipped)),
            count,
            start + count,
            size,
        )

    def share_of_parts(self, workers: Workers, least: int) -> Share:
        """The share of a thread block in a batch-invariant call: from the first part that starts in it."""
        share = self.share(workers)
        _, count = self.stages(jnp.maximum(self.seq_lens[share.sequence], 0))
        part = self.part(count, least)
        begin = jnp.minimum(lax.div(share.skipped + (part - 1), part) * part, count)
        left = share.num_stages - (begin - share.skipped)
        ends = begin == count
        sequence = share.sequence + ends.astype(jnp.int32)
        return Share(sequence, jnp.where(ends, 0, begin), left, share.end, share.size)


class SegmentVisitor(Protocol):
    """What a thread block does with segments: runs of stages of a sequence."""

    def attend(
        self, sequence: jax.Array, length: jax.Array, first: jax.Array, count: jax.Array, cursor: Carry
    ) -> tuple[Carry, Carry]:
        """Attends to stages `first` to `first + count`; returns the state and the cursor of the next segment."""

    def finish(self, sequence: jax.Array, state: Carry, whole: jax.Array, part: jax.Array) -> None:
        """Stores the state: the result of a sequence if it is `whole`, else part `part` of the workspace."""

    def store_span(self, sequence: jax.Array, first: jax.Array, last: jax.Array) -> None:
        """Stores the range of thread blocks that have parts of a sequence."""


def serve(segments: SegmentVisitor, sequences: Sequences, workers: Workers, least: int | None, cursor: Carry) -> None:
    """Serves the share of a thread block; `least` are the stages of a part in a batch-invariant call."""
    if least is None:
        _serve_share(segments, sequences, workers, cursor)
    else:
        _serve_parts(segments, sequences, workers, least, cursor)


def _serve_share(segments: SegmentVisitor, sequences: Sequences, workers: Workers, cursor: Carry) -> None:
    """Serves the share of a thread block, segment after segment."""
    block = workers.block
    share = sequences.share(workers)

    def body(carry: Carry) -> Carry:
        sequence, skipped, left, cursor = carry
        length = jnp.maximum(sequences.seq_lens[sequence], 0)
        first, count = sequences.stages(length)
        num_stages = jnp.minimum(count - skipped, left)
        begins, ends = skipped == 0, skipped + num_stages == count
        last_block = lax.div(share.end - left + count - 1, share.size)
        state, cursor = segments.attend(sequence, length, first + skipped, num_stages, cursor)
        segments.finish(sequence, state, begins & ends, part_of_block(block, begins))

        @pl.when(begins)
        def _() -> None:
            segments.store_span(sequence, block, last_block)

        return sequence + 1, jnp.int32(0), left - num_stages, cursor

    _while_left(body, share, cursor)


def _serve_parts(segments: SegmentVisitor, sequences: Sequences, workers: Workers, least: int, cursor: Carry) -> None:
    """Serves the share of a thread block in a batch-invariant call, one part after the other."""
    share = sequences.share_of_parts(workers, least)
    most = sequences.max_parts(least)

    def body(carry: Carry) -> Carry:
        sequence, skipped, left, cursor = carry
        length = jnp.maximum(sequences.seq_lens[sequence], 0)
        first, count = sequences.stages(length)
        part = sequences.part(count, least)
        num_stages = jnp.minimum(count - skipped, part)
        ends = skipped + num_stages == count
        state, cursor = segments.attend(sequence, length, first + skipped, num_stages, cursor)
        whole = (skipped == 0) & ends
        segments.finish(sequence, state, whole, sequence * most + lax.div(skipped, part))
        following = jnp.where(ends, 0, skipped + num_stages)
        return sequence + ends.astype(jnp.int32), following, left - num_stages, cursor

    _while_left(body, share, cursor)


def _while_left(body: Callable[[Carry], Carry], share: Share, cursor: Carry) -> None:
    lax.while_loop(lambda carry: carry[2] > 0, body, (share.sequence, share.skipped, share.num_stages, cursor))
