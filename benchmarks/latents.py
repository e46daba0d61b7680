"""Shapes of latents (MLA) to time: DeepSeek's, and calls of attention over them."""

from __future__ import annotations

import dataclasses
import re

from kvjax import KVCacheDType, MLAAttentionSpec

MLA_BLOCK_SIZE, RANK, ROPE = 64, 512, 64
"""Blocks as vLLM's kernels take them, latents and rope keys."""


def spec_of(dtype: KVCacheDType) -> MLAAttentionSpec:
    return MLAAttentionSpec(MLA_BLOCK_SIZE, RANK, ROPE, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class MLARow:
    """One call of attention over latents: the last `q_len` tokens of sequences of equal length."""

    num_heads: int
    q_len: int
    num_seqs: int
    seq_len: int

    @property
    def name(self) -> str:
        return f"{self.num_heads}x{self.q_len}-{self.num_seqs}x{self.seq_len}"

    @staticmethod
    def of(name: str) -> MLARow | None:
        """Returns the row of a name, which need not be one of `MLA_ROWS`, or `None` for another word."""
        numbers = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)-([1-9]\d*)x([1-9]\d*)", name)
        return MLARow(*map(int, numbers.groups())) if numbers else None


MLA_ROWS = (
    *(MLARow(num_heads, 1, 64, 8_192) for num_heads in (16, 64, 128)),
    MLARow(128, 1, 8, 32_768),
    MLARow(16, 4, 64, 4_096),
    MLARow(128, 2, 64, 4_096),
)
"""Rows for GPUs: heads of a device as tensor parallelism divides them, or not, and drafts."""
