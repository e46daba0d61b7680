"""Shapes to time: KV heads and head sizes of models on one device, and attention calls."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import numpy as np

from kvjax import AttentionSpec, CacheLayout, FullAttentionSpec, KVCacheDType

BLOCK_SIZE = 16

TIMED_DTYPES = (KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4)
PER_TOKEN_HEAD = (KVCacheDType.FP8_PER_TOKEN_HEAD, KVCacheDType.INT8_PER_TOKEN_HEAD)
MIXED = (
    *(KVCacheDType.FP8_K_NVFP4_V, KVCacheDType.FP8_K_NVFP4_4OVER6_V),
    *(KVCacheDType.INT8_K_NVFP4_V, KVCacheDType.INT8_K_NVFP4_4OVER6_V),
)
"""Keys in 8 bits, values in 4."""
OTHER_DTYPES = (
    *(KVCacheDType.FLOAT32, KVCacheDType.FLOAT16, KVCacheDType.FP8_E5M2, *PER_TOKEN_HEAD),
    KVCacheDType.NVFP4_4OVER6,
)

ALL_TOKENS = (1, 7, 64, 256, 2_048, 16_384, 65_536)
"""Tokens per write: decode steps of one to many requests, then prefills."""

FEW_TOKENS = (256, 16_384)  # a decode step of many requests, and a prefill


class Slots(enum.StrEnum):
    """The slot pattern of a write.

    `SCATTERED`: Random slots, as in a decode step, where each token belongs to a different sequence.
    `CONTIGUOUS`: Consecutive slots, as in a prefill into free blocks.
    `PADDED`: Random slots, but the last quarter is padding with slot -1, as in a batch padded to the size of a graph.
    """

    SCATTERED = "scattered"
    CONTIGUOUS = "contiguous"
    PADDED = "padded"

    def num_padded(self, num_tokens: int) -> int:
        return num_tokens // 4 if self is Slots.PADDED else 0


@dataclasses.dataclass(frozen=True)
class Case:
    """The shape of one layer on one device."""

    name: str
    num_kv_heads: int
    head_size: int

    def subject(self, dtype: KVCacheDType, layout: CacheLayout) -> dict[str, Any]:
        heads = {"num_kv_heads": self.num_kv_heads, "head_size": self.head_size}
        return {"case": self.name, **heads, "dtype": dtype, "layout": layout}

    def spec(self, dtype: KVCacheDType, layout: CacheLayout = CacheLayout.NHD) -> AttentionSpec:
        return FullAttentionSpec(BLOCK_SIZE, self.num_kv_heads, self.head_size, dtype=dtype, layout=layout)


LLAMA_8B = Case("llama-3.1-8b", 8, 128)
LLAMA_70B_SHARD = Case("llama-3.1-70b-tp8", 1, 128)
GPT_OSS_20B = Case("gpt-oss-20b", 8, 64)
OTHER_CASES = (
    Case("qwen3-32b-tp4", 2, 128),
    Case("gemma-3-27b", 16, 128),
    GPT_OSS_20B,
    Case("phi-3-mini-tp4", 8, 96),
    Case("gemma-3-12b", 8, 256),
)
CASES_BY_NAME = {case.name: case for case in (LLAMA_8B, LLAMA_70B_SHARD, *OTHER_CASES)}


@dataclasses.dataclass(frozen=True)
class AttentionRow:
    """One attention call over sequences of equal length, unless they are `varied`, whose last tokens are the query.

    In a server step (`is_step`), query tokens are packed, and their number may differ between sequences.
    """

    name: str
    num_seqs: int
    seq_len: int  # tokens per sequence, including the query
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    q_len: int = 1  # query tokens per sequence
    window: int | None = None  # tokens that a query token attends to, including itself; None for all
    logits_soft_cap: float | None = None
    layout: CacheLayout = CacheLayout.NHD
    base: str | None = None  # the name of the row that bars compare this row with
    is_step: bool = False
    num_prompts: int | None = None  # first sequences, with `q_len` query tokens; others have one. None: all
    prefix_len: int = 0  # tokens of a prefix that all sequences share; a multiple of BLOCK_SIZE
    varied: bool = False  # lengths up to `seq_len`, evenly spread, in random order

    @property
    def seq_lens(self) -> np.ndarray:
        """int32 `[num_seqs]`, the tokens of each sequence."""
        numbers = np.random.default_rng(3).permutation(self.num_seqs) + 1 if self.varied else self.num_seqs
        return np.full(self.num_seqs, self.seq_len * numbers // self.num_seqs, np.int32)

    @property
    def cu_q_lens(self) -> np.ndarray:
        """int32 `[num_seqs + 1]`, cumulative query lengths."""
        is_prompt = np.arange(self.num_seqs) < (self.num_seqs if self.num_prompts is None else self.num_prompts)
        return np.concatenate([[0], np.where(is_prompt, self.q_len, 1).cumsum()]).astype(np.int32)

    @property
    def blocks_a_seq(self) -> int:
        return -(-self.seq_len // BLOCK_SIZE)

    @property
    def prefix_blocks(self) -> int:
        return self.prefix_len // BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        return self.prefix_blocks + self.num_seqs * (self.blocks_a_seq - self.prefix_blocks)

    @property
    def first_block(self) -> int:
        """The index of the first page of a sequence that any query token attends to."""
        return 0 if self.window is None else max(self.seq_len - self.q_len + 1 - self.window, 0) // BLOCK_SIZE

    @property
    def num_blocks_read(self) -> int:
        own = -(-self.seq_lens // BLOCK_SIZE) - self.prefix_blocks - self.first_block
        return self.prefix_blocks + int(own.sum())

    def table(self, blocks: np.ndarray) -> np.ndarray:
        """Distributes pages over the sequences and returns the block table `[num_seqs, blocks_a_seq]`."""
        shared, own = np.split(blocks, [self.prefix_blocks])
        return np.concatenate([np.tile(shared, (self.num_seqs, 1)), own.reshape(self.num_seqs, -1)], axis=1)

    @property
    def options(self) -> dict[str, Any]:
        """Optional arguments of attention calls."""
        return {"sliding_window": self.window, "logits_soft_cap": self.logits_soft_cap}


ATTENTION_ROWS = (
    AttentionRow("64x8192", 64, 8_192),
    AttentionRow("64x2048", 64, 2_048),
    AttentionRow("256x1024", 256, 1_024),
    AttentionRow("8x8192", 8, 8_192),
    AttentionRow("1x8192", 1, 8_192),
    AttentionRow("64x8192-8/1", 64, 8_192, num_heads=8, num_kv_heads=1),
    AttentionRow("64x8192-64/8x64", 64, 8_192, num_heads=64, head_size=64),
    AttentionRow("64x1024", 64, 1_024),
    AttentionRow("64x8192-window-1024", 64, 8_192, window=1_024, base="64x1024"),
    AttentionRow("64x4096", 64, 4_096),
    AttentionRow("64x4096-4-tokens", 64, 4_096, q_len=4, base="64x4096"),
    AttentionRow("64x8192-HND", 64, 8_192, layout=CacheLayout.HND, base="64x8192"),
    AttentionRow("64x128-to-8192", 64, 8_192, varied=True),
)
"""Rows for GPUs, with 32 query heads over 8 KV heads of 128 unless the name says otherwise."""

HOST_ATTENTION_ROWS = (AttentionRow("4x512", 4, 512), AttentionRow("4x512-4-tokens", 4, 512, q_len=4))
"""Rows for CPUs."""

SMOKE_ATTENTION_ROWS = (
    AttentionRow("2x48", 2, 48, num_heads=4, num_kv_heads=2, head_size=64),
    AttentionRow("2x48-window-16", 2, 48, num_heads=4, num_kv_heads=2, head_size=64, window=16),
)

ATTENTION_ROWS_BY_NAME = {row.name: row for row in (*ATTENTION_ROWS, *HOST_ATTENTION_ROWS, *SMOKE_ATTENTION_ROWS)}


Step = functools.partial(AttentionRow, is_step=True)

RAGGED_ROWS = (
    Step("chunk", 1, 8_192, q_len=2_048),
    Step("chunks", 8, 4_096, q_len=512),
    Step("whole", 1, 8_192, q_len=8_192),
    Step("late-chunk", 1, 31_744, q_len=512),
    Step("mixed", 64, 4_096, q_len=1_024, num_prompts=1),
    Step("speculative", 64, 4_096, q_len=4),
    Step("shared-prefix", 64, 8_448, prefix_len=8_192),
    Step("chunk-soft-cap", 1, 8_192, q_len=2_048, logits_soft_cap=50.0),
    Step("chunk-window-1024", 1, 8_192, q_len=2_048, window=1_024),
    Step("chunk-heads-of-64", 1, 8_192, q_len=2_048, head_size=64),
    Step("chunk-heads-of-256", 1, 8_192, q_len=2_048, head_size=256),
    Step("chunk-heads-of-512", 1, 8_192, q_len=2_048, head_size=512),
)
"""Steps for GPUs, with 32 query heads over 8 KV heads of 128."""

HOST_RAGGED_ROWS = (
    Step("3x48", 3, 48, num_heads=4, num_kv_heads=2, head_size=64, q_len=20, num_prompts=1),
    Step("3x48-shared-32", 3, 48, num_heads=4, num_kv_heads=2, head_size=64, prefix_len=32),
    Step("1x48-capped", 1, 48, num_heads=4, num_kv_heads=2, head_size=64, q_len=20, window=16, logits_soft_cap=2.0),
)
"""Steps for CPUs and smoke tests."""

RAGGED_ROWS_BY_NAME = {row.name: row for row in (*RAGGED_ROWS, *HOST_RAGGED_ROWS)}
