"""The kernel that divides a step: its sequences that decode, its prompts and what their rows see, and other rows.

A thread block takes a sequence. It counts the prompts before it, which gives the sequence's number among them, and
checks which blocks of its row of the block table are in the cache. Rows of sequences that decode are packed. Further
blocks take the rows that belong to no sequence. Rows that no kernel attends with get their results here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, lanes
from kvjax.kernels.aliases import Ref
from kvjax.kernels.launchable import ANY_LENGTH, AnyCount, Argument, Number, with_origin
from kvjax.kernels.prompts.tiled import FIELDS
from kvjax.kernels.prompts.transfer import Units, copy_units, fill_units
from kvjax.kernels.registers import THREADS, WARPS

COUNTS = (
    "num_seqs", "num_rows", "max_blocks", "table_stride", "num_blocks", "max_q_len", "max_prompts", "num_zeros",
    "query_stride",
)  # fmt: skip

ROWS_AT_ONCE = 16
"""Rows of no sequence that a thread block takes."""

_AT_ONCE = 4
"""Entries of the block table that a thread loads before it looks at any."""


@dataclasses.dataclass(frozen=True)
class StepKind:
    """What a schedule is compiled for.

    Attributes:
      block_size: tokens of a block.
      window: tokens that a row of a prompt sees, its own included; None for all.
      decode_q_len: most rows of a sequence that decodes.
      rows_alone: whether each row that decodes becomes a sequence of its own.
      query: a row of the query.
      results: a row of results.
      num_heads: query heads.
      has_sinks: whether heads have sinks.
    """

    block_size: int
    window: int | None
    decode_q_len: int
    rows_alone: bool
    query: Units
    results: Units
    num_heads: int
    has_sinks: bool


@functools.cache
@with_origin
def any_schedule(kind: StepKind) -> AnyCount:
    """Packs rows that decode, and finds up to `max_prompts` sequences with more rows; none has more than `max_q_len`.

    The arguments are the block table, the lengths and the bounds of rows, int32, the query where rows decode, the sinks
    if there are any, and the results:

    - `prompts`: `FIELDS` of each prompt.
    - `header`: the number of prompts followed by a 0 for each of `num_zeros`.
    - `out` and `lse` of rows that neither decode nor are a prompt's: 0, and their sink or -inf.
    - Where rows decode, `packed` `[num_seqs, decode_q_len]` rows of the query, the last ones of each sequence, zeros
      for those that it does not have; `places`, int32, for each packed row its row of the query, or -1; and `lens`, the
      tokens of each sequence, or of each row if `rows_alone`; 0 for one that does not decode.

    Bounds are clipped to `num_rows`. `table_stride` counts the entries from a sequence's first to that of the next,
    `query_stride` the units from one row to the next. The amount is `num_programs`.
    """
    decodes = kind.decode_q_len > 0
    results = "prompts", "header", "out", "lse", *(("packed", "places", "lens") if decodes else ())

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        _schedule(kind, counts, arrays, scratch[0])

    shared = [plgpu.SMEM((4 * WARPS,), np.dtype(np.uint8))]
    kernel = functools.partial(compat.program_kernel, "schedule_prompts", grid=ANY_LENGTH, scratch_types=shared)
    dtypes = {
        "query": kind.query.dtype, "packed": kind.query.dtype, "out": kind.results.dtype,
        "lse": np.dtype(np.float32), "sinks": np.dtype(np.float32),
    }  # fmt: skip
    given = ("query",) * decodes, ("sinks",) * kind.has_sinks
    names = "block_table", "seq_lens", "cu_q_lens", *given[0], *given[1], *results
    int32 = np.dtype(np.int32)
    arguments = tuple(Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH,), dtypes.get(name, int32))) for name in names)
    return AnyCount(body, kernel, COUNTS, arguments, writes=results, num_programs=lambda programs: programs)


def num_programs(num_seqs: int, num_rows: int) -> int:
    """Thread blocks of a schedule."""
    return num_seqs + -(-num_rows // ROWS_AT_ONCE)


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """The body of the kernel."""

    kind: StepKind
    counts: Mapping[str, Number]
    arrays: Mapping[str, Ref]
    shared: Ref
    thread: jax.Array

    def run(self) -> None:
        """The body of the kernel."""
        program, num_seqs = lax.axis_index("program"), jnp.int32(self.counts["num_seqs"])
        pl.when(program < num_seqs)(functools.partial(self.take_sequence, program))
        pl.when(program >= num_seqs)(functools.partial(self.clear_others, (program - num_seqs) * ROWS_AT_ONCE))

    def bound(self, x: jax.Array) -> jax.Array:
        """A bound of rows."""
        return jnp.clip(x, 0, jnp.int32(self.counts["num_rows"]))

    def decodes(self, q_len: jax.Array) -> jax.Array:
        """Whether a sequence of so many rows decodes; `decode_q_len` may exceed `max_q_len`."""
        return q_len <= jnp.minimum(self.kind.decode_q_len, jnp.int32(self.counts["max_q_len"]))

    def is_prompt(self, q_len: jax.Array) -> jax.Array:
        """Whether so many rows are those of a prompt."""
        return (q_len > self.kind.decode_q_len) & (q_len <= jnp.int32(self.counts["max_q_len"]))

    def clear(self, row: jax.Array, condition: jax.Array | None = None) -> None:
        """Stores the results of a row that sees nothing."""
        kind, arrays = self.kind, self.arrays

        def store() -> None:
            fill_units(arrays["out"], row * kind.results.in_row, kind.results, self.thread)

            def fill(i: jax.Array, _: None) -> None:
                head = self.thread + i * THREADS
                lse = lanes.splat(-jnp.inf, jnp.float32)
                if kind.has_sinks:
                    lse = lanes.bits(lanes.load_global(arrays["sinks"], head, head < kind.num_heads), jnp.float32)
                lanes.store_global(arrays["lse"], row * kind.num_heads + head, lse, head < kind.num_heads)

            lax.fori_loop(0, -(-kind.num_heads // THREADS), fill, None)

        store() if condition is None else pl.when(condition)(store)

    def clear_others(self, first: jax.Array) -> None:
        """Clears those of the `ROWS_AT_ONCE` rows from `first` on that belong to no sequence."""
        bounds = self.arrays["cu_q_lens"]
        start, end = self.bound(bounds[0]), self.bound(bounds[jnp.int32(self.counts["num_seqs"])])
        last = jnp.minimum(first + ROWS_AT_ONCE, jnp.int32(self.counts["num_rows"]))
        lax.fori_loop(first, last, lambda row, _: self.clear(row, (row < start) | (row >= end)), None)

    def take_sequence(self, own: jax.Array) -> None:
        """Describes a sequence."""
        cu_q_lens = self.arrays["cu_q_lens"]
        q_start, q_end = self.bound(cu_q_lens[own]), self.bound(cu_q_lens[own + 1])
        q_len = q_end - q_start
        length = jnp.maximum(self.arrays["seq_lens"][own], 0)
        number, total = self.count(own)
        total = jnp.minimum(total, jnp.int32(self.counts["max_prompts"]))
        pl.when(own == 0)(functools.partial(self.begin, total))
        is_served = self.is_prompt(q_len) & (number < jnp.int32(self.counts["max_prompts"]))
        pl.when(is_served)(functools.partial(self.describe, own, number, q_start, q_len, length))
        if self.kind.decode_q_len:
            self.pack(own, q_start, q_end, length)

        @pl.when(~self.decodes(q_len) & ~is_served)
        def skip() -> None:
            lax.fori_loop(q_start, q_end, lambda row, _: self.clear(row), None)

    def count(self, own: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The number of prompts before a sequence, and of all."""
        num_seqs = jnp.int32(self.counts["num_seqs"])

        def add(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            seq = self.thread + i * THREADS
            is_one = seq < num_seqs
            start, end = (
                lanes.bits(lanes.load_global(self.arrays["cu_q_lens"], seq + j, is_one), jnp.int32) for j in range(2)
            )
            found = (is_one & self.is_prompt(self.bound(end) - self.bound(start))).astype(jnp.int32)
            before, total = sums
            return before + jnp.where(seq < own, found, 0), total + found

        zero = lanes.splat(0, jnp.int32)
        sums = lax.fori_loop(0, _divided_up(num_seqs, THREADS), add, (zero, zero))
        number, total = (lanes.over_block(self.shared, lanes.sum_over_warp(x), jnp.add) for x in sums)
        return number, total

    def begin(self, total: jax.Array) -> None:
        """Stores the header."""
        num_zeros = jnp.int32(self.counts["num_zeros"])

        def clear(i: jax.Array, _: None) -> None:
            index = self.thread + i * THREADS
            value = jnp.where(index == 0, lanes.splat(total, jnp.int32), 0)
            lanes.store_global(self.arrays["header"], index, value, index < 1 + num_zeros)

        lax.fori_loop(0, _divided_up(1 + num_zeros, THREADS), clear, None)

    def pack(self, own: jax.Array, q_start: jax.Array, q_end: jax.Array, length: jax.Array) -> None:
        """Packs the rows of a sequence that decodes."""
        most, units, arrays = self.kind.decode_q_len, self.kind.query, self.arrays
        is_short = self.decodes(q_end - q_start)
        is_first = self.thread == 0
        stride = jnp.int32(self.counts["query_stride"])

        def store(name: str, index: jax.Array, value: jax.Array) -> None:
            lanes.store_global(arrays[name], self.thread + index, lanes.splat(value, jnp.int32), is_first)

        def pack_row(j: jax.Array, _: None) -> None:
            row, place = q_end - most + j, own * most + j
            is_row = is_short & (row >= q_start)
            source = jnp.maximum(row, 0) * stride
            copy_units(arrays["query"], source, arrays["packed"], place * units.in_row, units, self.thread, is_row)
            store("places", place, jnp.where(is_row, row, -1))
            if self.kind.rows_alone:
                # If a missing row had a length, its window would reach before those of the sequence's rows.
                store("lens", place, jnp.where(is_row, jnp.maximum(length + 1 + j - most, 0), 0))

        lax.fori_loop(0, most, pack_row, None)
        if not self.kind.rows_alone:
            store("lens", own, jnp.where(is_short & (q_end > q_start), length, 0))

    def describe(
        self, own: jax.Array, number: jax.Array, q_start: jax.Array, q_len: jax.Array, length: jax.Array
    ) -> None:
        """Stores the fields of a prompt."""
        block_size, window, arrays = self.kind.block_size, self.kind.window, self.arrays
        first_row = length - q_len  # the position of its token
        first_seen = jnp.int32(0)
        if window is not None:
            first_seen = jnp.maximum(first_row - jnp.int32(window - 1), 0)
        first_block = lax.div(first_seen, jnp.int32(block_size))
        skipped = first_block * block_size
        blocks = jnp.int32(self.counts["max_blocks"]) - first_block
        blocks = jnp.minimum(_divided_up(length - skipped, block_size), blocks)
        start = own * self.counts["table_stride"] + first_block

        def look(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first_absent, end = found
            entries = [self.thread + (i * _AT_ONCE + j) * THREADS for j in range(_AT_ONCE)]
            loaded = [lanes.load_global(arrays["block_table"], start + each, each < blocks, -1) for each in entries]
            for entry, block in zip(entries, loaded, strict=True):
                # As unsigned: negative entries are large.
                exists = block < lanes.splat(self.counts["num_blocks"], jnp.uint32)
                first_absent = jnp.minimum(first_absent, jnp.where(exists, first_absent, entry))
                end = jnp.where(exists, entry + 1, end)  # entries ascend
            return first_absent, end

        zero = lanes.splat(0, jnp.int32)
        chunks = _divided_up(blocks, THREADS * _AT_ONCE)
        found = lax.fori_loop(0, chunks, look, (lanes.splat(blocks, jnp.int32), zero))
        # The minimum is found as the maximum of the negated numbers.
        found = [lanes.over_block(self.shared, lanes.max_over_warp(x), jnp.maximum) for x in (-found[0], found[1])]
        blocks_until = jnp.minimum(-found[0], blocks), found[1]
        first_absent, end = (jnp.minimum(x * block_size, length - skipped) for x in blocks_until)
        fields = own, q_start, q_len, first_row - skipped, first_absent, end, first_block, first_seen - skipped
        row = functools.reduce(lambda row, i: jnp.where(self.thread == i, fields[i], row), range(len(FIELDS)), zero)
        index = number * len(FIELDS) + self.thread
        lanes.store_global(arrays["prompts"], index, row, self.thread < len(FIELDS))


def _schedule(kind: StepKind, counts: Mapping[str, Number], arrays: Mapping[str, Ref], shared: Ref) -> None:
    _Schedule(kind, counts, arrays, shared, lanes.thread_index()).run()


def _divided_up(x: jax.Array, divisor: int) -> jax.Array:
    """The quotient, rounded up, of a number that is not negative."""
    return lax.div(x, jnp.int32(divisor)) + (lax.rem(x, jnp.int32(divisor)) > 0).astype(jnp.int32)
