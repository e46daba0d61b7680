"""vLLM's pages, as `key_cache` and `value_cache` of `kvjax_torch`.

NVFP4 pages are those of vLLM's FLASHINFER; pages with a scale of each token and head are those of its TRITON_ATTN.
Pages of mixed dtypes are kvjax's own: all keys of a page, then all values. Their mode in vLLM is `KVQuantMode.CUSTOM`.
"""

from __future__ import annotations

import dataclasses

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVQuantMode

from kvjax import UnsupportedError

LAYOUTS = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC
"""Layouts with contiguous blocks, the preferred one first. If the tokens of a head are contiguous, decode attention
takes 6% less time over NVFP4, and at most 1% more over other dtypes."""

SCALE_BYTES = 4


def packed_spec(spec: AttentionSpec) -> AttentionSpec:
    """A spec of vLLM, with the bytes of quantized rows.

    Raises:
      UnsupportedError: NVFP4 with two head sizes; NVFP4 values whose head size is no multiple of 16.
    """
    if spec.state_content_bytes is not None:
        return spec
    if spec.kv_quant_mode.is_nvfp4:
        if spec.head_size != spec.head_size_v:
            raise UnsupportedError(f"head_size_v: got {spec.head_size_v}, expected head_size={spec.head_size} in NVFP4")
        row = spec.head_size // 2 + spec.head_size // 16
        return dataclasses.replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=row)
    if spec.kv_quant_mode.is_custom_mode:
        if spec.head_size_v % 16:
            raise UnsupportedError(f"head_size_v: got {spec.head_size_v}, expected a multiple of 16 for NVFP4 values")
        row = _mixed_key_bytes(spec.head_size, spec.dtype) + spec.head_size_v // 2 + spec.head_size_v // 16
        return dataclasses.replace(spec, state_content_bytes=row)
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
    _, num_slots, _, content = kv_cache.shape
    if mode.is_nvfp4:  # vLLM counts either side's heads as slots
        return _sides(kv_cache, num_slots // 2, (content, content))
    if mode.is_custom_mode:
        key_bytes = _mixed_key_bytes(head_size, kv_cache.dtype)
        return _sides(kv_cache.view(torch.uint8), num_slots, (key_bytes, content - key_bytes))
    tokens = kv_cache.transpose(1, 2)
    if not mode.is_per_token_head:
        return tokens[..., :head_size], tokens[..., head_size:]
    # A row is a key and its scale, then a value and its scale: float32 among elements of one byte.
    words = kv_cache.view(torch.int8).view(torch.float32).transpose(1, 2)
    end, size_v = head_size + SCALE_BYTES, content - head_size - 2 * SCALE_BYTES
    values = tokens[..., end : end + size_v]
    return tokens[..., :head_size], values, words[..., head_size // 4], words[..., (end + size_v) // 4]


def _sides(kv_cache: torch.Tensor, heads: int, rows: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Keys and values `[num_blocks, block_size, heads, row]` of pages with all keys first, from the bytes of rows."""
    num_blocks, _, size, _ = kv_cache.shape
    block_stride, start = kv_cache.stride(0), kv_cache.storage_offset()
    is_hnd = kv_cache.stride(1) > kv_cache.stride(2)
    views = []
    for row, offset in zip(rows, (start, start + heads * size * rows[0]), strict=True):
        strides = (block_stride, row, size * row, 1) if is_hnd else (block_stride, heads * row, row, 1)
        views.append(kv_cache.as_strided((num_blocks, size, heads, row), strides, offset))
    return tuple(views)


def _mixed_key_bytes(head_size: int, stored: torch.dtype) -> int:
    """Bytes of a key of a mixed dtype: those of int8 end with a float32 scale."""
    return head_size + SCALE_BYTES if stored is torch.int8 else head_size
