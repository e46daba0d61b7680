"""The cases that are timed: KV heads and head sizes as models have them on one device."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from kvjax import AttentionSpec, CacheLayout, FullAttentionSpec, KVCacheDType

BLOCK_SIZE = 16

TIMED_DTYPES = (KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4)
OTHER_DTYPES = (KVCacheDType.FLOAT32, KVCacheDType.FLOAT16, KVCacheDType.FP8_E5M2)

ALL_TOKENS = (1, 7, 64, 256, 2_048, 16_384, 65_536)
"""Tokens that one write takes: a decode step of one request to many, then prefills."""

FEW_TOKENS = (256, 16_384)
"""A decode step of many requests, and a prefill."""


class Slots(enum.StrEnum):
    """Where the tokens of a write go.

    `SCATTERED`: anywhere, as in a decode step, where each token is another sequence's. `CONTIGUOUS`: one after the
    other, as in a prefill into free blocks. `PADDED`: anywhere, but the last quarter are no tokens and have slot -1, as
    when a batch is filled up to the size of a recorded graph.
    """

    SCATTERED = "scattered"
    CONTIGUOUS = "contiguous"
    PADDED = "padded"

    def num_padded(self, num_tokens: int) -> int:
        """How many of so many tokens are padding."""
        return num_tokens // 4 if self is Slots.PADDED else 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer's shape on one device."""

    name: str
    num_kv_heads: int
    head_size: int

    def subject(self, dtype: KVCacheDType, layout: CacheLayout) -> dict[str, Any]:
        """What tables and files say of this layer's cache."""
        return {
            "case": self.name,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": dtype,
            "layout": layout,
        }

    def spec(self, dtype: KVCacheDType, layout: CacheLayout = CacheLayout.NHD) -> AttentionSpec:
        """This layer's cache in a dtype and a layout."""
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
CASES = (LLAMA_8B, LLAMA_70B_SHARD, *OTHER_CASES)
CASES_BY_NAME = {case.name: case for case in CASES}
