"""What the MLA kernel serves, and how a call is launched."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvjax.dtypes import MLA_KV_CACHE_DTYPES, KVCacheDType
from kvjax.kernels import compat
from kvjax.kernels.aliases import DType
from kvjax.kernels.attention.choice import BatchSizes, merge_config, too_many_parts
from kvjax.kernels.attention.problem import MERGE_OF_MANY, MergeConfig, Problem
from kvjax.kernels.attention.schedule import MAX_PARTS, Sequences
from kvjax.kernels.mla.packed import shared_bytes as packed_bytes
from kvjax.kernels.mla.tiles import ROWS, TOKENS, operand_dtypes, shared_bytes
from kvjax.kernels.target import Target
from kvjax.spec import AttentionSpec

DTYPES = frozenset(MLA_KV_CACHE_DTYPES) - {KVCacheDType.FLOAT32}
"""Dtypes of caches that the kernel reads. XLA attends to caches of any other."""

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
      passes: runs of `ROWS` query rows; each is the work of other thread blocks, which read all tokens.
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


def why_not(spec: AttentionSpec, invariant_batch: BatchSizes | None = None, target: Target | None = None) -> str | None:
    """Why the kernel cannot read caches of a spec; None where it can.

    `invariant_batch` are the sizes of a batch-invariant call; None for other calls, whose workspace has a fixed size.
    """
    target = target or Target()
    rank, rope = spec.part_sizes
    if target.compute_capability[0] != 9:
        return f"latents (MLA): `wgmma` is of compute capability 9; got {target.compute_capability}"
    if spec.dtype not in DTYPES:
        return f"no kernel reads latents (MLA) of dtype {spec.dtype.value!r}"
    if rank % HALVES or rank > MAX_RANK:
        return f"it takes latents of a multiple of {HALVES} elements up to {MAX_RANK}; got kv_lora_rank={rank}"
    if rope not in (0, 16, 32, 64):
        return f"it takes rope keys of 0, 16, 32 or 64 elements; got qk_rope_head_dim={rope}"
    if spec.dtype.is_quantized and rank % (2 * HALVES):
        return f"it decodes latents of a multiple of {2 * HALVES} elements; got kv_lora_rank={rank}"
    for name in ("page_size_bytes", "bytes_per_token"):
        if (size := getattr(spec, name)) % 16:
            return f"it copies 16 bytes at once; got {name}={size}"
    packed = packed_bytes(spec) if spec.dtype.is_quantized else 0
    if (needed := shared_bytes(spec) + packed) > target.shared_bytes:
        return f"its tiles take {needed} bytes of shared memory; got {target.shared_bytes}"
    if invariant_batch is None:
        return None
    num_seqs, q_len, group, max_blocks = invariant_batch
    most = min(-(-max_blocks * spec.block_size // PART_TOKENS), MAX_PARTS)
    if num_seqs * most * q_len * group * rank > np.iinfo(np.int32).max:
        return too_many_parts(num_seqs)
    return None


def operand_dtype(spec: AttentionSpec) -> DType:
    """The dtype of queries: that of the tiles' latents. Those for rope keys of another have its bits."""
    return operand_dtypes(spec)[0]


def choose(problem: Problem, target: Target) -> MLAConfig:
    """The configuration for a problem: one thread block for each multiprocessor, which has room for one."""
    passes = max(1, -(-problem.q_len * problem.num_heads // ROWS))
    num_blocks = 2 * passes if compat.interpreting() else target.multiprocessors
    part = PART_TOKENS // TOKENS if problem.batch_invariant else None
    return MLAConfig(max(1, num_blocks // passes), passes, part, merge_config(problem))


def num_parts(problem: Problem, config: MLAConfig) -> int:
    """Query rows of all parts that the workspace holds."""
    parts = 2 * config.blocks
    if config.part is not None:
        parts = int(problem.num_seqs) * int(Sequences(problem, config.rows, None).max_parts(config.part))
    return parts * problem.q_len * problem.num_heads
