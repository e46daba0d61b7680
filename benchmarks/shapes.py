"""The cases that are timed: KV heads and head sizes as models have them on one device."""

from __future__ import annotations

import dataclasses

from kvjax import AttentionSpec, CacheLayout, FullAttentionSpec, KVCacheDType

BLOCK_SIZE = 16

TIMED_DTYPES = (KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4)

ALL_TOKENS = (1, 7, 64, 256, 2_048, 16_384, 65_536)
"""Tokens that one write takes: a decode step of one request to many, then prefills."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer's shape on one device, with the layouts and the numbers of tokens that it is timed in."""

    name: str
    num_kv_heads: int
    head_size: int
    layouts: tuple[CacheLayout, ...] = (CacheLayout.NHD,)
    num_tokens: tuple[int, ...] = (256, 16_384)

    def spec(self, dtype: KVCacheDType, layout: CacheLayout = CacheLayout.NHD) -> AttentionSpec:
        """This layer's cache in a dtype and a layout."""
        return FullAttentionSpec(BLOCK_SIZE, self.num_kv_heads, self.head_size, dtype=dtype, layout=layout)


LLAMA_8B = Case("llama-3-8b", 8, 128, layouts=tuple(CacheLayout), num_tokens=ALL_TOKENS)
LLAMA_70B_SHARD = Case("llama-3-70b-tp8", 1, 128, num_tokens=ALL_TOKENS)
CASES = (
    LLAMA_8B,
    LLAMA_70B_SHARD,
    Case("gpt-oss-20b", 8, 64),
    Case("phi-3-mini-tp4", 8, 96),
    Case("gemma-3-12b", 8, 256),
)
CASES_BY_NAME = {case.name: case for case in CASES}
