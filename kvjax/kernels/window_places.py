"""The kernel that finds where a step's tokens are beside an exact recent window: lengths, block tables and slots.

A thread block takes a sequence. It describes what the sequence's queries see of a window's ring or, with room for the
step, of a copy of its rows followed by blocks for new tokens. There the first block of a sequence is behind those of
the sequences before, which the thread block counts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, lanes
from kvjax.kernels.aliases import Ref
from kvjax.kernels.launchable import ANY_LENGTH, AnyCount, Argument, Number, with_origin
from kvjax.kernels.registers import THREADS, WARPS

BLOCK_SIZE = 16
"""Tokens of a block of a window."""

_COUNTS = "num_seqs", "num_rows", "size", "blocks_per_row", "columns", "decode_q_len"
_COUNTS_OF_ROOM = "num_tokens", "num_old"
_SEQUENCES = "seq_lens", "cu_q_lens", "window_rows"
_RESULTS = "near_lens", "far_lens", "decoding_lens", "q_lens", "table"
_RESULTS_OF_ROOM = "old", "slots"


@functools.cache
@with_origin
def any_window_places(*, with_room: bool) -> AnyCount:
    """The kernel for any numbers of sequences and tokens, and any window.

    The arguments are int32: `seq_lens`, `cu_q_lens` and `window_rows` as callers of attention give them, where a row
    that the window does not have is that of a sequence without one, and the results:

    - `near_lens` `[num_seqs]`: tokens from the block of the oldest one that a query sees in the window.
    - `far_lens`: tokens before the last `size`; `decoding_lens` the same, 0 for a sequence without new tokens or with
      more than `decode_q_len` rows.
    - `q_lens`: new tokens, at most as many as there are.
    - `table` `[num_seqs, columns]`: the blocks of the ring for `near_lens`, -1 without a row.

    With `with_room`, `table` refers to memory that begins with `num_old` blocks of each sequence's row, and two more
    results are stored:

    - `old` `[num_seqs, num_old]`: the blocks of the ring that are copied there, any for a sequence without a row.
    - `slots` `[num_tokens]`: where new tokens go, -1 for those that no query sees there.

    The amount is the number of sequences.
    """
    counts_of = (*_COUNTS, *_COUNTS_OF_ROOM) if with_room else _COUNTS
    results = (*_RESULTS, *_RESULTS_OF_ROOM) if with_room else _RESULTS

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        numbers = {name: jnp.int32(number) for name, number in counts.items()}
        _Places(numbers, arrays, lanes.thread_index()).run(scratch[0] if with_room else None)

    shared = [plgpu.SMEM((4 * WARPS,), np.dtype(np.uint8))] * with_room
    return AnyCount(
        body,
        functools.partial(compat.program_kernel, "window_places", grid=ANY_LENGTH, scratch_types=shared),
        counts_of,
        tuple(Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)) for name in (*_SEQUENCES, *results)),
        writes=results,
        num_programs=lambda num_seqs: num_seqs,
    )


class _WindowSequence(NamedTuple):
    """The numbers of one sequence, or of one for each thread.

    Attributes:
      length: its tokens.
      start: its first row.
      end: the row after its last one.
      q_len: its new tokens: its last rows, at most as many as it has tokens.
      first_block: the first of its blocks that its queries see.
      row: its row of the window.
      has_row: whether there is one.
    """

    length: jax.Array
    start: jax.Array
    end: jax.Array
    q_len: jax.Array
    first_block: jax.Array
    row: jax.Array
    has_row: jax.Array


@dataclasses.dataclass(frozen=True)
class _Places:
    """The body of the kernel."""

    counts: Mapping[str, jax.Array]
    arrays: Mapping[str, Ref]
    thread: jax.Array

    def run(self, shared: Ref | None) -> None:
        own = lax.axis_index("program")
        sequence = self.describe(lambda name, offset: self.arrays[name][own + offset])
        self.store_lengths(own, sequence)
        if shared is None:
            self.store("table", own, self.counts["columns"], lambda column: self.in_ring(sequence, column))
            return
        num_old = self.counts["num_old"]
        self.store("old", own, num_old, lambda column: jnp.maximum(self.in_ring(sequence, column), 0))
        first = self.counts["num_seqs"] * num_old + self.new_blocks_before(own, shared)
        end = num_old + self.new_blocks(sequence)

        def in_copy(column: jax.Array) -> jax.Array:
            exists = sequence.has_row & (column >= 0) & (column < jnp.minimum(end, self.counts["columns"]))
            block = jnp.where(column < num_old, own * num_old + column, first + column - num_old)
            return jnp.where(exists, block, -1)

        self.store("table", own, self.counts["columns"], in_copy)
        self.store_slots(own, sequence, in_copy)

    def describe(self, load: Callable[[str, int], jax.Array]) -> _WindowSequence:
        """Describes a sequence by a function that loads its entry of an array."""
        length, row = jnp.maximum(load("seq_lens", 0), 0), load("window_rows", 0)
        start, end = load("cu_q_lens", 0), load("cu_q_lens", 1)
        q_len = jnp.minimum(end - start, length)
        oldest = jnp.maximum(length - q_len - (self.counts["size"] - 1), 0)
        has_row = (row >= 0) & (row < self.counts["num_rows"])
        return _WindowSequence(length, start, end, q_len, oldest >> _SHIFT, row, has_row)

    def store_lengths(self, own: jax.Array, sequence: _WindowSequence) -> None:
        """Stores a sequence's lengths."""
        far = jnp.maximum(sequence.length - self.counts["size"], 0)
        decodes = (sequence.q_len > 0) & (sequence.end - sequence.start <= self.counts["decode_q_len"])
        near = sequence.length - sequence.first_block * BLOCK_SIZE
        lengths = near, far, jnp.where(decodes, far, 0), sequence.q_len
        for name, number in zip(_RESULTS, lengths, strict=False):
            lanes.store_global(self.arrays[name], self.thread + own, _splat(number), self.thread == 0)

    def store(self, name: str, own: jax.Array, width: jax.Array, value_of: Callable[[jax.Array], jax.Array]) -> None:
        """Stores a sequence's row of a result."""

        def store_some(i: jax.Array, _: None) -> None:
            column = self.thread + i * THREADS
            lanes.store_global(self.arrays[name], own * width + column, value_of(column), column < width)

        lax.fori_loop(0, _divided_up(width, THREADS), store_some, None)

    def in_ring(self, sequence: _WindowSequence, column: jax.Array) -> jax.Array:
        """The block of the ring in a column from `first_block` on, -1 without a row."""
        per_row = self.counts["blocks_per_row"]
        block = sequence.row * per_row + lax.rem(sequence.first_block + column, _splat(per_row))
        return jnp.where(sequence.has_row, block, -1)

    def new_blocks(self, sequence: _WindowSequence) -> jax.Array:
        """The blocks that a sequence's new tokens take behind those of its row."""
        num_blocks = _divided_up(sequence.length, BLOCK_SIZE) - sequence.first_block - self.counts["num_old"]
        return jnp.where((sequence.q_len > 0) & sequence.has_row, jnp.maximum(num_blocks, 0), 0)

    def new_blocks_before(self, own: jax.Array, shared: Ref) -> jax.Array:
        """The blocks that new tokens of the sequences before take."""

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            seq = self.thread + i * THREADS
            is_before = seq < own

            def load(name: str, offset: int) -> jax.Array:
                return lanes.bits(lanes.load_global(self.arrays[name], seq + offset, is_before), jnp.int32)

            return total + jnp.where(is_before, self.new_blocks(self.describe(load)), 0)

        of_thread = lax.fori_loop(0, _divided_up(own, THREADS), add, _splat(jnp.int32(0)))
        return lanes.over_block(shared, lanes.sum_over_warp(of_thread), jnp.add)

    def store_slots(
        self, own: jax.Array, sequence: _WindowSequence, block_of: Callable[[jax.Array], jax.Array]
    ) -> None:
        """Stores the slots of a sequence's rows; the first sequence also stores those before, the last those after."""
        num_tokens = self.counts["num_tokens"]
        start, end = (jnp.clip(bound, 0, num_tokens) for bound in (sequence.start, sequence.end))
        first = jnp.where(own == 0, 0, start)
        stop = jnp.where(own == self.counts["num_seqs"] - 1, num_tokens, end)

        def store_some(i: jax.Array, _: None) -> None:
            token = first + self.thread + i * THREADS
            position = sequence.length - (sequence.end - token)
            block = block_of((position >> _SHIFT) - sequence.first_block)
            # Positions below 0 have no column.
            is_written = (token >= start) & (token < end) & (block >= 0)
            slot = jnp.where(is_written, block * BLOCK_SIZE + (position & BLOCK_SIZE - 1), -1)
            lanes.store_global(self.arrays["slots"], token, slot, token < stop)

        lax.fori_loop(0, _divided_up(jnp.maximum(stop - first, 0), THREADS), store_some, None)


_SHIFT = BLOCK_SIZE.bit_length() - 1


def _splat(number: jax.Array) -> jax.Array:
    return lanes.splat(number, jnp.int32)


def _divided_up(x: jax.Array, divisor: int) -> jax.Array:
    """The quotient by a power of two, rounded up, of a number that is not negative."""
    return (x >> divisor.bit_length() - 1) + ((x & divisor - 1) > 0).astype(jnp.int32)
