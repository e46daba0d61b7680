"""What the MLA kernels serve, which of the two serves a call, and how it is launched.

`choose` decides: a call of few query rows takes the kernel of `few_rows`, whose configuration is a `DecodeConfig`, and
any other that of `decode`, whose configuration is an `MLAConfig`.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from kvjax.kernels import compat
from kvjax.kernels.attention.choice import BatchSizes, merge_config, plain_problem, too_many_parts, worthwhile_tiles
from kvjax.kernels.attention.problem import MERGE_OF_MANY, DecodeConfig, MergeConfig, Problem
from kvjax.kernels.attention.schedule import MAX_PARTS, MIN_STAGES
from kvjax.kernels.mla import few_rows_stages
from kvjax.kernels.mla.tiles import ROWS, TOKENS, shared_bytes
from kvjax.kernels.registers import WARPS
from kvjax.kernels.target import Target
from kvjax.spec import AttentionSpec

DTYPES = few_rows_stages.DTYPES
"""Dtypes of caches that the kernels read. XLA attends to caches of any other."""

FEW_ROWS = 32
"""Query rows of a sequence up to which the kernel for few rows serves: the output of more does not fit registers."""

ROWS_OF_TWO = 16
"""Rows up to which two warps divide a latent, where their stages fit; four else: a warp's registers hold 256 dims of 16
rows. Where `wgmma` serves it is faster than four warps."""

MAX_WARPS = 8
"""Maximum warps of a block of the kernel for few rows: two per scheduler leave 255 registers per thread."""

MAX_SLOTS = 5
"""Maximum stages in shared memory of the kernel for few rows. Of 4-bit latents one is 26 KB a tile of each warp, 1.5
times the bytes that a multiprocessor reads in the latency of memory."""

MAX_TILES = 2
"""Maximum tiles of a warp in a stage of the kernel for few rows: of three, two stages hold all that fits."""

MAX_RANK = 512
"""The results of more do not fit in registers."""

HALVES = 128
"""Each of two warpgroups takes half of the dims of a latent, a multiple of 64: runs of 128 bytes."""

PART_TOKENS = 512
"""Least tokens of a part of a batch-invariant call, as in the decode kernel of keys and values."""


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """How the kernel is launched.

    Attributes:
      blocks: thread blocks that share the work of a pass.
      passes: runs of `ROWS` query rows; each has its own thread blocks, which read all tokens.
      part: for batch-invariant calls the least tiles of a part; None where shares of thread blocks divide sequences.
      merge: how the merge is launched.
    """

    blocks: int
    passes: int
    part: int | None = None
    merge: MergeConfig = MERGE_OF_MANY

    @property
    def rows(self) -> int:
        """Tokens of a tile, the stage of a schedule."""
        return TOKENS


def why_not(
    spec: AttentionSpec,
    invariant_batch: BatchSizes | None = None,
    target: Target | None = None,
    rows: int | None = None,
) -> str | None:
    """Why no kernel can read caches of a spec; None where one can.

    `invariant_batch` are the sizes of a batch-invariant call; None for other calls, whose workspace has a fixed size.
    `rows` are the query rows of a sequence; None where they are unknown, so that they may be many.
    """
    target, rank = target or Target(), spec.part_sizes[0]
    few, are_few = why_not_few(spec, rows, target), rows is not None and rows <= FEW_ROWS
    reason = few and why_not_many(spec, target)
    if reason:
        return few if are_few or spec.dtype not in DTYPES else reason
    if invariant_batch is None:
        return None
    num_seqs, q_len, group, max_blocks = invariant_batch
    most = min(-(-max_blocks * spec.block_size // PART_TOKENS), MAX_PARTS)
    if num_seqs * most * q_len * group * rank > np.iinfo(np.int32).max:
        return too_many_parts(num_seqs)
    return None


def why_not_few(spec: AttentionSpec, rows: int | None, target: Target) -> str | None:
    """Why the kernel for few rows does not serve caches of a spec and calls of so many rows; None where it does."""
    if spec.dtype not in DTYPES:
        return f"no kernel reads latents (MLA) of dtype {spec.dtype.value!r}"
    if rows is None or rows > FEW_ROWS:
        many = "" if rows is None else f"; got {rows} query rows, which are query heads times query tokens"
        return f"latents (MLA) of dtype {spec.dtype.value!r} have a kernel for up to {FEW_ROWS} query rows{many}"
    if reason := _why_not_sizes(spec):
        return reason
    start = sum(spec.parts[0].info.row_bytes(spec.part_sizes[0]))
    if spec.part_sizes[1] and start % 8:
        return (
            f"it reads 8 bytes of a rope key at once; got kv_lora_rank={spec.part_sizes[0]}, which takes {start} bytes"
        )
    if few_config(plain_problem(spec, BatchSizes(num_seqs=1, q_len=1, group=rows, max_blocks=1)), target, 1) is None:
        return f"its stages do not fit the {target.shared_bytes} bytes of shared memory that it has"
    return None


def why_not_many(spec: AttentionSpec, target: Target) -> str | None:
    """Why the kernel for any number of rows does not serve caches of a spec; None where it does."""
    rank = spec.part_sizes[0]
    if target.compute_capability[0] != 9:
        return f"latents (MLA): `wgmma` is of compute capability 9; got {target.compute_capability}"
    if spec.dtype not in DTYPES:
        return f"no kernel reads latents (MLA) of dtype {spec.dtype.value!r}"
    if reason := _why_not_sizes(spec):
        return reason
    if spec.dtype.is_quantized and rank % (2 * HALVES):
        return f"it decodes latents of a multiple of {2 * HALVES} elements; got kv_lora_rank={rank}"
    for name in ("page_size_bytes", "bytes_per_token"):
        if (size := getattr(spec, name)) % 16:
            return f"it copies 16 bytes at once; got {name}={size}"
    # The compiler takes a byte more.
    if (needed := shared_bytes(spec) + 1) > target.shared_bytes:
        return f"its tiles take {needed} bytes of shared memory; got {target.shared_bytes}"
    return None


def _why_not_sizes(spec: AttentionSpec) -> str | None:
    rank, rope = spec.part_sizes
    if rank % HALVES or rank > MAX_RANK:
        return f"it takes latents of a multiple of {HALVES} elements up to {MAX_RANK}; got kv_lora_rank={rank}"
    if rope not in (0, 16, 32, 64):
        return f"it takes rope keys of 0, 16, 32 or 64 elements; got qk_rope_head_dim={rope}"
    return None


def choose(problem: Problem, target: Target) -> MLAConfig | DecodeConfig:
    """The kernel and configuration for a problem: a thread block for each multiprocessor, which has room for one."""
    num_rows = problem.q_len * problem.num_heads
    passes = max(1, -(-num_rows // ROWS))
    num_blocks = 2 * passes if compat.interpreting() else target.multiprocessors
    # Elements of 16 bits need no decoding, so memory bounds even padded rows: they are faster than in the other kernel.
    padded = not problem.spec.dtype.is_quantized or num_rows > ROWS_OF_TWO
    is_many = padded and why_not_many(problem.spec, target) is None
    is_few = not is_many and why_not_few(problem.spec, num_rows, target) is None
    if is_few and (few := few_config(problem, target, num_blocks)):
        return few
    part = PART_TOKENS // TOKENS if problem.batch_invariant else None
    return MLAConfig(max(1, num_blocks // passes), passes, part, merge_config(problem))


def few_config(problem: Problem, target: Target, num_blocks: int) -> DecodeConfig | None:
    """The configuration of the kernel for few rows; None where shared memory does not hold two stages."""
    # There are half as many groups of four, so a stage has half the tokens: they serve where groups of two do not fit.
    every = (2, 4) if problem.rows <= ROWS_OF_TWO else (4,)
    # Interpret mode has no barrier across warpgroups.
    most = WARPS if compat.interpreting() else MAX_WARPS
    for shares, warps in itertools.product(every, range(most, 0, -WARPS)):
        tiles = worthwhile_tiles(problem, MAX_TILES, num_blocks * warps // shares)
        for own, slots in itertools.product(range(tiles, 0, -1), range(MAX_SLOTS, 1, -1)):
            config = DecodeConfig(shares, warps, own, slots, num_blocks, None, merge_config(problem))
            if sum(few_rows_stages.scratch(problem, config)) <= target.shared_bytes - _RESERVED_BYTES:
                part = max(MIN_STAGES, PART_TOKENS // config.rows) if problem.batch_invariant else None
                return dataclasses.replace(config, part=part)
    return None


_RESERVED_BYTES = 1024
"""Bytes of shared memory that are left for alignment."""
