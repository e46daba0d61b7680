"""Kernels that take addresses and counts, for memory as torch's callers have it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax import AttentionSpec, KVCacheDType, MLAAttentionSpec, kernels
from kvjax.binaries.binary import Device
from kvjax.kernels.launchable import AnyCount
from kvjax.pages import interleaved_regions
from support.helpers import simple_spec

BFLOAT16 = np.dtype(jnp.bfloat16)
H200 = Device("NVIDIA H200", "9.0", 232448)
SPEC = simple_spec(KVCacheDType.NVFP4, num_kv_heads=8, head_size=128, block_size=16)
LATENTS = MLAAttentionSpec(64, 512, 64, dtype=KVCacheDType.FP8_E4M3)
KINDS = (
    "write",
    "write of scales",
    "rotate and write",
    "write with a ring",
    "ring",
    "gather",
    "decode",
    "merge",
    "decode with a ring",
    "merge with a ring",
    "decode latents",
)
"""Of `all_kinds`, which takes a while."""


def page_memory(spec: AttentionSpec) -> tuple[kernels.PageMemory, kernels.PageMemory]:
    """Of data, and of the scales that are not given by themselves."""
    keys, values = (
        kernels.PageMemory(tuple(regions[: 1 if part.is_per_token_head else None]), spec.page_size_bytes, 16)
        for regions, part in zip(spec.regions, spec.dtype.parts, strict=True)
    )
    return keys, values


def scale_memory(spec: AttentionSpec) -> tuple[kernels.PageMemory | None, kernels.PageMemory | None]:
    """Of the scales of each token and head, in the same pages."""
    keys, values = (
        kernels.PageMemory(tuple(regions[1:]), spec.page_size_bytes, 16) if part.is_per_token_head else None
        for regions, part in zip(spec.regions, spec.dtype.parts, strict=True)
    )
    return keys, values


def interleaved_memory(spec: AttentionSpec) -> list[tuple[kernels.PageMemory, kernels.PageMemory]]:
    """vLLM's pages with a scale for each token and head, `[token, head, K | K scale | V | V scale]`: data, and scales.

    Each is told from its own first element, and scales leave everything at multiples of four bytes.
    """
    row = spec.head_size + spec.head_size_v + 8
    strides = spec.num_kv_heads * row, row
    page = spec.block_size * spec.num_kv_heads * row
    parts = (spec.head_size, spec.head_size_v), (4, 4)
    memory = [
        [kernels.PageMemory((kernels.PageRegion(0, *strides, size),), page, 4) for size in sizes] for sizes in parts
    ]
    return [(keys, values) for keys, values in memory]


def beside_memory(spec: AttentionSpec) -> tuple[kernels.PageMemory, kernels.PageMemory]:
    """vLLM's pages, in which each value follows its key: both told from the page's first byte."""
    rows = [size * spec.array_dtype.itemsize for size in (spec.head_size, spec.head_size_v)]
    regions = interleaved_regions(rows, spec.block_size, spec.num_kv_heads, spec.layout)
    keys, values = (kernels.PageMemory((region,), spec.page_size_bytes, 16) for region in regions)
    return keys, values


def write_kernel(spec: AttentionSpec, slot_dtype: type = np.int64, **options: Any) -> kernels.AnyCount:
    rows = [
        kernels.RowMemory(BFLOAT16, spec.num_kv_heads * size + 64, 16) for size in (spec.head_size, spec.head_size_v)
    ]
    target = options.pop("target", None)
    options |= {"scale_pages": scale_memory(spec)}
    kind = kernels.WriteKind(spec, (rows[0], rows[1]), page_memory(spec), np.dtype(slot_dtype), (1, 1), **options)
    return kernels.write_kernel(kind, target)


def gather_kernel(spec: AttentionSpec) -> kernels.AnyCount:
    return kernels.gather_kernel(spec, page_memory(spec), BFLOAT16, (1, 1), scale_memory(spec))


def attention_kernels(
    spec: AttentionSpec,
    *,
    group: int = 4,
    q_len: int = 1,
    dtype: np.dtype = BFLOAT16,
    interleaved: bool = False,
    **options: Any,
) -> kernels.AnyBatch:
    target = options.pop("target", kernels.Target())
    own = {name: options.pop(name) for name in ("has_sinks", "one_memory") if name in options}
    memory, scales = beside_memory(spec) if own.get("one_memory") else page_memory(spec), scale_memory(spec)
    if interleaved:
        memory, scales = interleaved_memory(spec)
    softmax, num_heads = kernels.Softmax(**{"sm_scale": 0.125} | options), group * spec.num_kv_heads
    own["joined_query"] = spec.is_mla  # as from torch
    kind = kernels.BatchKind(spec, memory, dtype, num_heads, q_len, (1, 1), softmax, scale_pages=scales, **own)
    return (kernels.mla_kernels if spec.is_mla else kernels.attention_kernels)(kind, target)


def rotated_write() -> AnyCount:
    rotated = kernels.RotatedMemory(
        kernels.Rotation(BFLOAT16, 128, 64, True, 4),
        32,
        kernels.RowMemory(BFLOAT16, 4096, 16),
        np.dtype(np.int64),
        BFLOAT16,
    )
    rows = kernels.RowMemory(BFLOAT16, 1024, 64), kernels.RowMemory(BFLOAT16, 1024, 64)
    options = {"unique_slots": True, "rotated": rotated}
    return kernels.write_kernel(kernels.WriteKind(SPEC, rows, page_memory(SPEC), np.dtype(np.int32), (1, 8), **options))


def ring_kind(kept: int = 4) -> kernels.RingKind:
    """Of a ring beside a cache of `SPEC`."""
    spec = simple_spec(KVCacheDType.BFLOAT16, num_kv_heads=8, head_size=128, block_size=16)
    rows = kernels.RowMemory(BFLOAT16, 1024, 64), kernels.RowMemory(BFLOAT16, 1024, 64)
    return kernels.RingKind(spec, rows, page_memory(spec), 4, kept, kernels.ring_tokens(kept, 64))


def all_kinds() -> dict[str, AnyCount]:
    """A kernel of each of `KINDS`."""
    per_token = simple_spec(KVCacheDType.INT8_PER_TOKEN_HEAD, num_kv_heads=8, head_size=128, block_size=16)
    decode, merge, _ = attention_kernels(SPEC, window=100, logits_soft_cap=30.0, has_sinks=True).of(4, 64)
    spec = ring_kind().spec
    kinds = (
        kernels.BatchKind(each, page_memory(each), BFLOAT16, 32, 2, (1, 1), kernels.Softmax(0.125, window), sinks)
        for each, window, sinks in ((SPEC, None, True), (spec, 64, False))
    )
    decode_both, merge_both, _ = kernels.joint_attention_kernels(*kinds, kernels.Target()).of(4, 64, 5)
    return {
        "write": write_kernel(SPEC),
        "write of scales": write_kernel(per_token),
        "rotate and write": rotated_write(),
        "write with a ring": write_kernel(SPEC, ring=ring_kind()),
        "ring": kernels.ring_kernel(ring_kind()),
        "gather": gather_kernel(SPEC),
        "decode": decode,
        "merge": merge,
        "decode with a ring": decode_both,
        "merge with a ring": merge_both,
        "decode latents": attention_kernels(LATENTS, group=16, one_memory=True).of(4, 64)[0],
    }
