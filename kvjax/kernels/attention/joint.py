"""Both kernels of a call over two caches: pages, and the ring of an exact window with the last tokens of each sequence.

Thread blocks are divided between the caches by how much work each has, and the blocks of a cache divide its work as
usual. Thus the ring delays no block that attends to pages, and adds no kernel.

A sequence may have tokens in either cache, so all results are parts, which the merge combines. The factor that makes up
for the rounding of a row's largest weight depends on the cache's dtype, so each part is multiplied by the factor for
its own largest weight before it is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.errors import UnsupportedError
from kvjax.kernels import lanes
from kvjax.kernels.aliases import ABSENT, Carry, Ref
from kvjax.kernels.attention.choice import (
    BatchSizes,
    choose_for,
    plain_problem,
    scratch,
    sizes_of_passes,
    stage_layout,
)
from kvjax.kernels.attention.decode import Decode
from kvjax.kernels.attention.merge import Merge
from kvjax.kernels.attention.problem import DecodeConfig, MergeConfig, Problem, Refs
from kvjax.kernels.attention.schedule import Sequences, Workers
from kvjax.kernels.attention.softmax import State, Sums, top_rounding
from kvjax.kernels.launchable import Number
from kvjax.kernels.registers import LANES
from kvjax.kernels.target import Target
from kvjax.spec import AttentionSpec

NUM_SUMS = 2
"""Numbers of a row in a part: the logit that its weights are relative to, and their sum."""

COST_BYTES = 1024
"""The unit of work that thread blocks are divided by."""


@dataclasses.dataclass(frozen=True)
class JointConfig:
    """How both kernels are launched: the configuration for either cache, of the same heads, warps and thread blocks."""

    pages: DecodeConfig
    ring: DecodeConfig

    @property
    def both(self) -> tuple[DecodeConfig, DecodeConfig]:
        """The configurations, of the pages first."""
        return self.pages, self.ring

    @property
    def rows(self) -> int:
        """As in `Division`; `rows` and `part` are those of the pages, `blocks` and `merge` those of both caches."""
        return self.pages.rows

    @property
    def blocks(self) -> int:
        """Thread blocks that share the work."""
        return self.pages.blocks

    @property
    def part(self) -> int | None:
        """Stages of a part of the pages in a batch-invariant call."""
        return self.pages.part

    @property
    def merge(self) -> MergeConfig:
        """How the merge is launched."""
        return self.pages.merge


def choose(pages: Problem, ring: Problem, target: Target) -> JointConfig:
    """The configuration for both caches."""
    return JointConfig(*choose_for([pages, ring], target))


class JointSource(NamedTuple):
    """One of the caches.

    Attributes:
      problem: the description of the call over it.
      config: how the kernel is launched.
      refs: the kernel's references.
    """

    problem: Problem
    config: DecodeConfig
    refs: Refs

    @property
    def sequences(self) -> Sequences:
        """Its sequences."""
        return Sequences(self.problem, self.config.rows, self.refs.seq_lens)

    @property
    def stage_cost(self) -> int:
        """The work of a stage; a short window leaves some of its rows empty."""
        heads, tiles = self.config.heads, self.config.groups * self.config.tiles
        size, reach = stage_layout(self.problem, heads, tiles).stage_bytes, self.problem.reach
        size = size if reach is None else size * min(reach, self.config.rows) // self.config.rows
        return max(size // COST_BYTES, 1)


def work_of(sources: Sequence[JointSource]) -> list[jax.Array]:
    """The work of all sequences in each of the caches, whose lengths are loaded at once."""
    every = [source.sequences for source in sources]

    def add(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        each = zip(totals, sources, every, strict=True)
        return [total + sequences.counts(i * LANES) * source.stage_cost for total, source, sequences in each]

    totals = lax.fori_loop(0, every[0].chunks, add, [lanes.splat(0, jnp.int32)] * len(every))
    return [lanes.of_first_thread(lanes.sum_over_warp(total)) for total in totals]


def blocks_of_ring(pages: jax.Array, ring: jax.Array, num_blocks: int) -> jax.Array:
    """How many of at least two thread blocks take the ring, given each cache's work; a cache with work gets some."""
    size = jnp.maximum(lax.div(pages + ring + (num_blocks - 1), jnp.int32(num_blocks)), 1)
    blocks = jnp.minimum(jnp.maximum(lax.div(ring + lax.div(size, jnp.int32(2)), size), 1), num_blocks - 1)
    return jnp.where(ring == 0, 0, jnp.where(pages == 0, num_blocks, blocks))


@dataclasses.dataclass(frozen=True)
class StoredParts:
    """What a thread block does with segments of one cache: attends, and stores each as a part.

    Without parts of a fixed size, thread block b stores its part of sequence s as part `b + s` of its cache: a block
    takes consecutive sequences, and the next block continues with the last of them or a later one.

    Attributes:
      decode: the body of the kernel.
      first_block: the first of the thread blocks that take the cache.
      first_part: the index in the workspace of its first part.
      first_sequence: the index in `Refs.spans` of its first sequence.
    """

    decode: Decode
    first_block: Number
    first_part: Number
    first_sequence: Number

    def attend(
        self, sequence: jax.Array, length: jax.Array, first: jax.Array, count: jax.Array, cursor: Carry
    ) -> tuple[State, Carry]:
        """Attends to stages `first` to `first + count`; returns the state and the cursor of the next segment."""
        return self.decode.attend(sequence, length, first, count, cursor)

    def finish(self, sequence: jax.Array, state: State, whole: jax.Array, part: jax.Array) -> None:
        """Stores the state as a part of the cache: as number `part` if parts have a fixed size."""
        segments, dtype = self.decode.segments, self.decode.problem.weight_dtype
        sums, output, stores = segments.combined(state)
        output = list(output)
        for row, of_row in enumerate(sums):
            if of_row.top is not None and dtype is not None:
                factor = top_rounding(of_row.top, of_row, dtype)
                for i in segments.registers_of_row(row):
                    output[i - segments.first_output] *= factor
        if self.decode.config.part is None:
            part = lax.axis_index("block") + sequence
        kept = [Sums(of_row.largest, of_row.total) for of_row in sums]
        segments.store_part(part + self.first_part, kept, output, stores)

    def store_span(self, sequence: jax.Array, first: jax.Array, last: jax.Array) -> None:
        """Stores the range of a sequence's parts, given the cache's first and last thread block that have one."""
        start = sequence + (self.first_block + self.first_part)
        self.decode.segments.store_span(sequence + self.first_sequence, start + first, start + last)


def run_decode(sources: Sequence[JointSource], buffer: Ref, barriers: Ref) -> None:
    """The body of the decode kernel over pages and a ring; `buffer` and `barriers` are shared memory."""
    block, num_blocks = lax.axis_index("block"), sources[0].config.blocks
    pages, ring = work_of(sources)
    first = num_blocks - blocks_of_ring(pages, ring, num_blocks)
    teams = (jnp.int32(0), first), (first, num_blocks - first)
    for number, (source, (begin, count)) in enumerate(zip(sources, teams, strict=True)):
        _serve(source, number, first_part(sources, number), Workers(block - begin, count), (buffer, barriers))


def _serve(source: JointSource, number: int, first: Number, workers: Workers, shared: tuple[Ref, Ref]) -> None:
    problem, config, refs = source

    @pl.when((workers.block >= 0) & (workers.block < workers.blocks))
    def _() -> None:
        layout = stage_layout(problem, config.heads, config.groups * config.tiles)
        decode = Decode.of(problem, config, layout, refs, *shared)
        begin = lax.axis_index("block") - workers.block
        decode.serve(workers, StoredParts(decode, begin, first, number * problem.num_seqs))


def first_part(sources: Sequence[JointSource], number: int) -> Number:
    """The index in the workspace of the first part of one of the caches."""
    if not number:
        return 0
    problem, config, _ = sources[0]
    return problem.num_seqs * (1 if config.part is None else sources[0].sequences.max_parts(config.part))


@dataclasses.dataclass(frozen=True)
class JointMerge(Merge):
    """The body of the merge: `problem`, `config` and `refs` are those of the pages.

    Attributes:
      sources: pages and ring.
    """

    sources: tuple[JointSource, JointSource]

    def counts(self, sequence: jax.Array) -> list[jax.Array]:
        """The stages of a sequence in either cache."""
        return [source.sequences.stages(source.refs.seq_lens[sequence])[1] for source in self.sources]

    def stages(self, sequence: jax.Array) -> jax.Array:
        """The number of stages of a sequence."""
        pages, ring = self.counts(sequence)
        return pages + ring

    @property
    def least_parts(self) -> int:
        """The decode kernel stores no results."""
        return 1

    @property
    def num_sums(self) -> int:
        """Numbers of a row in a part."""
        return NUM_SUMS

    def parts(self, sequence: jax.Array, count: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """The number of parts of a sequence in both caches, and a function to the index of each in the workspace."""
        found = [self.of_source(number, sequence, count) for number, count in enumerate(self.counts(sequence))]
        (num_pages, first), (num_ring, first_of_ring) = found

        def index(number: jax.Array) -> jax.Array:
            return jnp.where(number < num_pages, first + number, first_of_ring + (number - num_pages))

        return num_pages + num_ring, index

    def of_source(self, number: int, sequence: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The number of parts of a sequence of `count` stages in a cache, and the index of the first."""
        problem, config, refs = self.sources[number]
        if (least := config.part) is not None:
            sequences = self.sources[number].sequences
            part = sequences.part(count, least)
            start = first_part(self.sources, number) + sequence * sequences.max_parts(least)
            return lax.div(count + (part - 1), part), start
        at = 2 * (sequence + number * problem.num_seqs)
        first, last = refs.spans[at], refs.spans[at + 1]
        return jnp.where(count > 0, last - first + 1, 0), first


def run_merge(sources: tuple[JointSource, JointSource], config: JointConfig, shared: Sequence[Ref]) -> None:
    """The body of the merge; `shared` is shared memory, where warps share rows."""
    JointMerge(sources[0].problem, config, sources[0].refs, shared[0] if shared else ABSENT, sources).run()


def shared_bytes(pages: Problem, ring: Problem, config: JointConfig) -> tuple[int, int]:
    """Bytes of the decode kernel's shared memory, as `scratch` returns them: enough for either cache by itself."""
    of_pages, of_ring = scratch(pages, config.pages), scratch(ring, config.ring)
    return max(of_pages[0], of_ring[0]), max(of_pages[1], of_ring[1])


def num_parts(pages: Problem, ring: Problem, config: JointConfig) -> int:
    """Query rows of all parts that the workspace holds."""
    parts = config.blocks + 2 * int(pages.num_seqs)
    if config.part is not None:
        sources = JointSource(pages, config.pages, Refs()), JointSource(ring, config.ring, Refs())
        most = (source.sequences.max_parts(int(source.config.part or 1)) for source in sources)
        parts = int(pages.num_seqs) * int(sum(most))
    return parts * pages.q_len * pages.num_heads


def why_not_both(
    specs: tuple[AttentionSpec, AttentionSpec],
    sizes: BatchSizes,
    ring_blocks: int,
    *,
    batch_invariant: bool,
    target: Target | None,
) -> str | None:
    """Why the kernels serve no call of such sizes over pages and a ring, each of which the decode kernel reads.

    `ring_blocks` are the entries of the ring's block table for each sequence.
    """
    for own in sizes_of_passes(specs[0], sizes):
        of_each = own, own._replace(max_blocks=ring_blocks)
        pages, ring = (
            dataclasses.replace(plain_problem(spec, each), batch_invariant=batch_invariant)
            for spec, each in zip(specs, of_each, strict=True)
        )
        if (reason := why_no_workspace(pages, ring, choose(pages, ring, target or Target()))) is not None:
            return reason
    return None


def why_no_workspace(pages: Problem, ring: Problem, config: JointConfig) -> str | None:
    """Why int32 does not index the workspace of a call; None where it does."""
    if num_parts(pages, ring, config) * pages.spec.head_size_v <= np.iinfo(np.int32).max:
        return None
    return (
        f"the workspace of attention with an exact window is indexed in int32; got {pages.num_seqs} sequences, whose"
        " parts have more elements; expected fewer of them a call"
    )


def workspace(pages: Problem, ring: Problem, config: JointConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The workspace of a call, which the merge reads: `partial`, `partial_lse` and `spans`."""
    if (reason := why_no_workspace(pages, ring, config)) is not None:  # for launchers, which do not ask `why_not`
        raise UnsupportedError(f"exact_window_attention: the kernel cannot serve this call: {reason}")
    parts = num_parts(pages, ring, config)
    return (
        jax.ShapeDtypeStruct((parts * pages.spec.head_size_v,), jnp.float32),
        jax.ShapeDtypeStruct((parts * NUM_SUMS,), jnp.float32),
        jax.ShapeDtypeStruct((4 * int(pages.num_seqs),), jnp.int32),
    )
