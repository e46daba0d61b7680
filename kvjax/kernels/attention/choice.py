"""What the decode kernel serves, and how a call is launched: passes, warps, tiles and stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax.dtypes import STORED_KV_CACHE_DTYPES
from kvjax.errors import UnsupportedError
from kvjax.kernels import compat
from kvjax.kernels.aliases import ABSENT
from kvjax.kernels.attention.formats import DECODED
from kvjax.kernels.attention.problem import (
    COLUMNS,
    MERGE_OF_MANY,
    DecodeConfig,
    Division,
    MergeConfig,
    Problem,
)
from kvjax.kernels.attention.schedule import MIN_STAGES, Sequences
from kvjax.kernels.attention.segments import state_registers
from kvjax.kernels.attention.stages import TILE, StageLayout
from kvjax.kernels.launchable import Number, PageMemory, array_memory
from kvjax.kernels.registers import LANES, WARPS
from kvjax.kernels.target import Target
from kvjax.spec import AttentionSpec

DTYPES = frozenset(
    dtype for dtype in STORED_KV_CACHE_DTYPES if all(part.byte_format in DECODED for part in dtype.parts)
)
"""Dtypes of caches that the kernel reads. XLA attends to caches of any other."""

WIDE = 256
"""Above this `head_size + head_size_v`, registers hold the output of one tile of query rows only."""

SHARED_BYTES = 220 * 1024
"""Maximum bytes of shared memory of the pipeline, where a thread block may have more."""

BARRIER_BYTES = 1024
"""Bytes of shared memory for the pipeline's barriers: no more slots are chosen than these hold."""

MAX_WARPS = 8
"""Maximum warps of a block: two per scheduler leave 255 registers per thread, and several tiles keep them busy."""

MAX_TILES = 3
"""Maximum tiles of a warp in a stage: with more, only two stages fit."""

SLOTS = 3
"""Stages in shared memory: one that warps read, one that arrives, and one that the slowest warp may still read. Each
further one delays the first by the lookup of its blocks."""

AHEAD_BYTES = 16 * 1024
"""Minimum bytes to prefetch: what a multiprocessor reads in the latency of memory. Smaller stages take more slots."""

STAGES = 12
"""A stage has `tiles` tiles if a warp processes at least `STAGES * tiles * (tiles - 1)` of them in a call.

A call of `n` tiles per warp takes `n * (a + b / tiles) + c * tiles`: `b` is the work per stage, `c` that per tile in
the first and the last stage, which overlap with nothing. `STAGES` is `c / b`."""

MERGES = {1: MergeConfig(16, 4, 9), 4: MergeConfig(WARPS, 4, 9), 33: MERGE_OF_MANY}
"""How the merge is launched, by minimum number of sequences: with fewer sequences, each has more parts."""

MERGE_OF_FEW_ROWS = MergeConfig(8, 1, 19)
"""The first of these where a sequence has up to `FEW_ROWS` query rows, which would otherwise occupy as many
multiprocessors. It loads all parts of a sequence that is divided among 148 thread blocks at once."""

FEW_ROWS = 32

INTERPRETED_BLOCKS = 2
"""Thread blocks of interpreted calls."""

PART_TOKENS = 512
"""Tokens of a part of a batch-invariant call: shorter parts are more work to merge, longer ones leave thread blocks
idle where there are few sequences."""

BATCHES = tuple(MERGES)
"""Batch sizes at which the launch configuration changes."""


class BatchSizes(NamedTuple):
    """The sizes that the workspace of a batch-invariant call grows with.

    Attributes:
      num_seqs: sequences.
      q_len: query tokens of each.
      group: query heads of a KV head.
      max_blocks: entries of the block table for each sequence.
    """

    num_seqs: int
    q_len: int
    group: int
    max_blocks: int


def why_not(spec: AttentionSpec, invariant_batch: BatchSizes | None = None, target: Target | None = None) -> str | None:
    """Why the kernel cannot read caches of a spec; None where it can.

    `invariant_batch` are the sizes of a batch-invariant call; None for other calls, whose workspace has a fixed size.
    `target` is None if the GPU is unknown; a GPU with the most shared memory is then assumed.
    """
    target = target or Target()
    if spec.is_mla:
        return "no kernel attends over latents (MLA)"
    if spec.dtype not in DTYPES:
        return f"it reads no cache of dtype {spec.dtype.value!r}"
    if spec.head_size % TILE:
        return f"it multiplies {TILE} elements of a key at once; got head_size={spec.head_size}"
    if (row := spec.regions.v[0].row_bytes) % 2:
        return f"it reads values two bytes at once; got head_size_v={spec.head_size_v}, {row} bytes"
    if not _fits(_largest(spec), 1, WARPS, 1, limit := pipeline_bytes(target)):
        return (
            f"{WARPS * TILE} rows of head_size={spec.head_size} and head_size_v={spec.head_size_v} fill the"
            f" {limit // 1024} KiB of shared memory that it has"
        )
    return None if invariant_batch is None else _why_no_workspace(spec, invariant_batch, target)


def pipeline_bytes(target: Target) -> int:
    """Bytes of shared memory for stages, and for the states of warps."""
    return min(SHARED_BYTES, target.shared_bytes - BARRIER_BYTES)


def _fits(problem: Problem, heads: int, warps: int, slots: int, limit: int) -> bool:
    """Whether `limit` bytes hold `slots` stages of one tile per warp, and later the states of warps."""
    groups = warps // heads
    tile_bytes = stage_layout(problem, heads, 1).stage_bytes
    return max(groups * tile_bytes * slots, _joined_bytes(problem, heads, groups)) <= limit


def _largest(spec: AttentionSpec) -> Problem:
    """A call of as many query rows as one pass takes, over pages at any address."""
    keys, values = (PageMemory(regions, spec.page_size_bytes, 1) for regions in spec.regions)
    sizes = BatchSizes(num_seqs=1, q_len=rows_per_pass(spec), group=1, max_blocks=1)
    return dataclasses.replace(plain_problem(spec, sizes), memory=(keys, values), one_memory=False)


def plain_problem(spec: AttentionSpec, sizes: BatchSizes) -> Problem:
    """A batch-invariant call over a JAX array."""
    return Problem(
        spec=spec,
        memory=array_memory(spec),
        query_dtype=np.dtype(np.float16),
        q_len=sizes.q_len,
        num_heads=sizes.group * spec.num_kv_heads,
        num_seqs=sizes.num_seqs,
        max_blocks=sizes.max_blocks,
        table_stride=sizes.max_blocks,
        query_strides=(0, 0),
        num_blocks=0,
        num_layers=1,
        has_layer=False,
        sm_scale=1.0,
        window=None,
        logits_soft_cap=None,
        scale_sizes=(1, 1),
        one_memory=True,
        has_sinks=False,
        batch_invariant=True,
    )


def _why_no_workspace(spec: AttentionSpec, batch: BatchSizes, target: Target) -> str | None:
    """Why the kernel has no workspace for a batch-invariant call; None where it has."""
    for sizes in sizes_of_passes(spec, batch):
        problem = plain_problem(spec, sizes)
        if num_parts(problem, choose(problem, target)) * spec.head_size_v > np.iinfo(np.int32).max:
            return too_many_parts(batch.num_seqs)
    return None


def too_many_parts(num_seqs: Number) -> str:
    """Why a workspace for so many sequences cannot be indexed."""
    return (
        f"with batch_invariant=True its workspace is indexed in int32; got {num_seqs} sequences, whose parts have more"
        " elements; expected fewer of them a call, or shorter block tables"
    )


def rows_per_pass(spec: AttentionSpec) -> int:
    """Maximum query rows of a KV head in one pass over the pages; more rows take several passes."""
    return COLUMNS if spec.head_size + spec.head_size_v > WIDE else 2 * COLUMNS


def passes(spec: AttentionSpec, group: int, q_len: int) -> list[tuple[slice, list[slice]]]:
    """The passes of a call: slices of each group's heads, and for each the slices of the query tokens."""
    max_rows, divided = rows_per_pass(spec), []
    for first in range(0, group, max_rows):
        heads = slice(first, min(first + max_rows, group))
        tokens = max_rows // (heads.stop - heads.start)
        divided.append((heads, [slice(start, min(start + tokens, q_len)) for start in range(0, q_len, tokens)]))
    return divided


def sizes_of_passes(spec: AttentionSpec, batch: BatchSizes) -> list[BatchSizes]:
    """The sizes of the largest pass of a call for each run of heads."""
    return [
        batch._replace(q_len=runs[0].stop - runs[0].start, group=heads.stop - heads.start)
        for heads, runs in passes(spec, batch.group, batch.q_len)
        if runs  # else there are no query tokens
    ]


def choose(problem: Problem, target: Target) -> DecodeConfig:
    """The configuration for a problem."""
    return choose_for([problem], target)[0]


def choose_for(problems: Sequence[Problem], target: Target) -> list[DecodeConfig]:
    """The configurations for problems that share thread blocks: as many heads as fit, then as many tiles per warp.

    Launches one block per multiprocessor, which has room for one, and at least one for each problem. Heads and warps
    are the best for the first problem among those with which a stage of each other problem fits.
    """
    num_kv_heads, limit = problems[0].spec.num_kv_heads, pipeline_bytes(target)
    max_warps = WARPS if compat.interpreting() else MAX_WARPS  # interpret mode has no barrier across warpgroups
    num_blocks = INTERPRETED_BLOCKS * len(problems) if compat.interpreting() else target.multiprocessors

    def fit(heads: int, warps: int, slots: int) -> bool:
        first, *others = problems
        return _fits(first, heads, warps, slots, limit) and all(_fits(x, heads, warps, 1, limit) for x in others)

    for heads in range(min(num_kv_heads, max_warps), 0, -1):
        if num_kv_heads % heads:
            continue
        warps = -(-heads // WARPS) * WARPS
        if not fit(heads, warps, 2 if heads > 1 else 1):
            continue
        while warps + WARPS <= max_warps and fit(heads, warps + WARPS, SLOTS):
            warps += WARPS
        blocks = max(-(-num_blocks * heads // num_kv_heads), len(problems))
        return [_pipeline(problem, heads, warps, blocks, limit) for problem in problems]
    raise UnsupportedError(f"paged_attention: no configuration of the kernel holds rows of {problems[0].spec}")


def _pipeline(problem: Problem, heads: int, warps: int, blocks: int, limit: int) -> DecodeConfig:
    """The configuration for given numbers of heads, warps and thread blocks."""
    groups = warps // heads
    tile_bytes = stage_layout(problem, heads, 1).stage_bytes
    tiles = worthwhile_tiles(problem, min(MAX_TILES, limit // (groups * tile_bytes * SLOTS)), blocks * groups)
    stage_bytes = groups * tile_bytes * tiles
    slots = min(SLOTS - 1 + -(-AHEAD_BYTES // stage_bytes), limit // stage_bytes)
    part = max(MIN_STAGES, PART_TOKENS // (groups * tiles * TILE)) if problem.batch_invariant else None
    return DecodeConfig(heads, warps, tiles, slots, blocks, part, merge_config(problem))


def worthwhile_tiles(problem: Problem, most: int, groups: int) -> int:
    """The number of tiles per warp in a stage, at most `most`, when `groups` groups of warps share a call's tokens."""
    num_seqs, max_blocks = int(problem.num_seqs), int(problem.max_blocks)
    tiles = max(1, most)
    # The configuration of a batch-invariant call must not depend on the batch. 0 blocks means that the number is known
    # only at launch: sequences may then be long.
    if max_blocks and not problem.batch_invariant:
        tokens = max_blocks * problem.spec.block_size
        if problem.reach is not None:
            tokens = min(tokens, problem.reach)
        runs = num_seqs * tokens // (groups * TILE)
        while tiles > 1 and runs < STAGES * tiles * (tiles - 1):
            tiles -= 1
    return tiles


def merge_config(problem: Problem) -> MergeConfig:
    """How the merge is launched, in a batch-invariant call whatever the batch."""
    if problem.batch_invariant:
        return MergeConfig(WARPS, 4, 9)
    least = max(each for each in MERGES if each <= max(int(problem.num_seqs), 1))
    is_few = least == 1 and problem.q_len * problem.num_heads <= FEW_ROWS
    merge = MERGE_OF_FEW_ROWS if is_few else MERGES[least]
    return merge._replace(warps=min(merge.warps, WARPS)) if compat.interpreting() else merge


def restricting(window: int | None, q_len: int) -> int | None:
    """A window, or None for one that no sequence exceeds, so that sums with it stay within int32."""
    return None if window is not None and window > np.iinfo(np.int32).max - q_len else window


def num_parts(problem: Problem, config: Division) -> int:
    """Query rows of all parts that the workspace holds."""
    parts = 2 * config.blocks
    if config.part is not None:
        parts = int(problem.num_seqs) * int(Sequences(problem, config.rows, ABSENT).max_parts(config.part))
    return parts * problem.q_len * problem.num_heads


def stage_layout(problem: Problem, heads: int, tiles: int) -> StageLayout:
    """The layout of a stage of `tiles` tiles of `heads` heads."""
    return StageLayout.of(
        problem.spec,
        problem.memory,
        heads,
        tiles,
        one_memory=problem.one_memory,
        scale_memory=problem.scale_memory,
    )


def scratch(problem: Problem, config: DecodeConfig) -> tuple[int, int]:
    """Bytes of the decode kernel's shared memory: of the buffer for stages and then warp states, and of barriers."""
    ring = config.slots * stage_layout(problem, config.heads, config.groups * config.tiles).stage_bytes
    return max(ring, _joined_bytes(problem, config.heads, config.groups)), 16 * config.slots


def _joined_bytes(problem: Problem, heads: int, groups: int) -> int:
    """Bytes of the states that all warps of a head but the first store, when a segment ends."""
    return (groups - 1) * heads * state_registers(problem) * LANES * 4
