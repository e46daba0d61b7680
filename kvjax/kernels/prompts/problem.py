"""What the prompt kernel is compiled for, and how it is launched."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from kvjax.kernels.aliases import DType
from kvjax.kernels.launchable import Number
from kvjax.kernels.target import Target, current
from kvjax.spec import AttentionSpec

ROWS = 64
"""Query rows of a warpgroup: the rows of one `wgmma`."""

MAX_HEAD_SIZE = 256
"""More do not fit in registers."""

TOKENS = 128
"""Most tokens of a tile."""

MIN_SPLIT_TOKENS = 512
"""Least tokens of a split of the longest sequence: fewer are sooner read than merged."""

ALIGNMENT = 8
"""Tokens at whose multiples a copy to the layout of `wgmma` may start; others would be copied to wrong places."""

WARPGROUPS = 2

_STAGES = 2

_OTHER_BYTES = 1024
"""More than barriers and the claimed item take of shared memory."""


@dataclasses.dataclass(frozen=True)
class PromptConfig:
    """How the kernel is launched.

    Attributes:
      tokens: keys and values of a tile.
      stages: tiles in shared memory, at least 2.
      splits: number of parts that a row's tokens are divided into. Each part has its own results. Kernels over
        caller-owned memory get it at launch.
    """

    tokens: int
    stages: int
    splits: Number = 1


class PromptProblem(NamedTuple):
    """What a kernel is compiled for, besides the shapes of its arrays.

    Attributes:
      max_q_len: most rows of a sequence.
      window: tokens that a row sees, its own included.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`.
      near: tokens that a row sees of the near ones, its own included; None where there are none.
    """

    max_q_len: int
    window: int | None
    logits_soft_cap: float | None
    near: int | None = None


def dense_dtype(spec: AttentionSpec, query_dtype: DType) -> DType:
    """The dtype of gathered keys and values: one of 16 bits, or float32 where that would round what is stored.

    The dtype of 16 bits is the query's for a cache that stores it, and that of the table for quantized caches. The
    scales of a layer or a head are applied later. Elements with a scale of their row, which no 16-bit dtype holds
    exactly, are rounded to the query's; those with scales of blocks never are (`kvjax.dtypes.check_exact_in`). Latents
    are not gathered for prompts. The kernel takes no float32.
    """
    is_other = not spec.dtype.is_quantized and spec.storage_dtype != query_dtype
    if is_other or query_dtype == np.float32:
        return np.dtype(np.float32)
    return spec.dtype.exact_in or np.dtype(query_dtype)


def why_not(head_sizes: tuple[int, int], target: Target) -> str | None:
    """Why the kernel cannot attend with heads of such keys and values on a GPU; None if it can."""
    if target.compute_capability[0] != 9:
        return f"`wgmma` is of compute capability 9; got {target.compute_capability}"
    if odd := [size for size in head_sizes if size % 16 or size > MAX_HEAD_SIZE]:
        return f"its head sizes are multiples of 16 up to {MAX_HEAD_SIZE}; got {odd[0]}"
    return None


def block_shape(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Heads and rows of a thread block."""
    return (WARPGROUPS, ROWS) if num_heads // num_kv_heads % WARPGROUPS == 0 else (1, ROWS * WARPGROUPS)


def choose(
    spec: AttentionSpec,
    num_prompts: int,
    max_q_len: int,
    num_heads: int,
    num_tokens: int,
    max_splits: int,
) -> PromptConfig:
    """The configuration for a call; few rows that see many tokens are divided, so that all multiprocessors have work.

    `num_tokens` are the most tokens of a sequence.
    """
    heads, rows = block_shape(num_heads, spec.num_kv_heads)
    size, size_v = spec.head_sizes
    blocks = num_prompts * -(-max_q_len // rows) * (num_heads // heads)
    splits = max(1, min(current().multiprocessors // blocks, num_tokens // MIN_SPLIT_TOKENS, max_splits))
    # Registers hold the results and the logits of 64 rows, shared memory the queries and two stages.
    elements = WARPGROUPS * ROWS * size + _STAGES * TOKENS * (size + size_v)
    is_large = size_v > 128 or elements * 2 + _OTHER_BYTES > current().shared_bytes
    return PromptConfig(TOKENS // 2 if is_large else TOKENS, _STAGES, splits)
