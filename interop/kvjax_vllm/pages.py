"""vLLM's pages, as `key_cache` and `value_cache` of `kvjax_torch`.

NVFP4 pages are those of vLLM's FLASHINFER, pages with a scale of each token and head those of its TRITON_ATTN.
"""

from __future__ import annotations

import dataclasses

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVQuantMode

from kvjax import UnsupportedError

LAYOUTS = KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC
"""Those with the rows of a block side by side. The first is preferred."""

SCALE_BYTES = 4


def packed_spec(spec: AttentionSpec) -> AttentionSpec:
    """A spec of vLLM, with the bytes of quantized rows.

    Raises:
      UnsupportedError: NVFP4 with two head sizes.
    """
    if spec.state_content_bytes is not None:
        return spec
    if spec.kv_quant_mode.is_nvfp4:
        if spec.head_size != spec.head_size_v:
            raise UnsupportedError(f"head_size_v: got {spec.head_size_v}, expected head_size={spec.head_size} in NVFP4")
        row = spec.head_size // 2 + spec.head_size // 16
        return dataclasses.replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=row)
    if spec.kv_quant_mode.is_per_token_head:
        row = spec.head_size + spec.head_size_v + 2 * SCALE_BYTES
        return dataclasses.replace(spec, state_content_bytes=row)
    return spec


def cache_views(kv_cache: torch.Tensor, head_size: int, mode: KVQuantMode) -> tuple[torch.Tensor, ...]:
    """`key_cache` and `value_cache` `[num_blocks, block_size, num_kv_heads, row]` of a layer's pages in vLLM.

    With a scale of each token and head, `k_scale` and `v_scale` `[num_blocks, block_size, num_kv_heads]` too.

    Args:
      kv_cache: vLLM's `[num_blocks, heads, block_size, content]`, of any of `LAYOUTS`.
      head_size: elements of a head of keys.
      mode: how the pages are quantized.
    """
    num_blocks, num_slots, size, content = kv_cache.shape
    if mode.is_nvfp4:  # a page is keys' data and scales, then values': vLLM counts either side's heads as slots
        heads, block_stride = num_slots // 2, kv_cache.stride(0)
        is_hnd = kv_cache.stride(1) > kv_cache.stride(2)
        strides = (block_stride, content, size * content, 1) if is_hnd else (block_stride, heads * content, content, 1)
        sides = (kv_cache.storage_offset() + side * heads * size * content for side in (0, 1))
        return tuple(kv_cache.as_strided((num_blocks, size, heads, content), strides, offset) for offset in sides)
    tokens = kv_cache.transpose(1, 2)
    if not mode.is_per_token_head:
        return tokens[..., :head_size], tokens[..., head_size:]
    # A row is a key and its scale, then a value and its scale: float32 among elements of one byte.
    words = kv_cache.view(torch.int8).view(torch.float32).transpose(1, 2)
    end, size_v = head_size + SCALE_BYTES, content - head_size - 2 * SCALE_BYTES
    values = tokens[..., end : end + size_v]
    return tokens[..., :head_size], values, words[..., head_size // 4], words[..., (end + size_v) // 4]
