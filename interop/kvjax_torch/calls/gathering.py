"""The kernel calls of gathers."""

from __future__ import annotations

import functools

import torch

from kvjax import kernels
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.arguments.plan import CachePlan, GatherPlan, ReadTensors
from kvjax_torch.calls import choosing
from kvjax_torch.calls.arrays import (
    ScaleAlignments,
    page_alignment,
    page_memory,
    scale_alignments,
    scale_arrays,
    scale_memory,
)
from kvjax_torch.launch.running import Call


def gather_call(plan: GatherPlan, tensors: ReadTensors) -> Call:
    """The kernel call of a `gather_kv` call that `plan` describes; the last two tensors are its results."""
    key_cache, value_cache, block_table, seq_lens, _, _ = tensors
    spec, last_block = plan.cache.spec, tensors.num_blocks - 1
    num_seqs, max_blocks = block_table.shape
    max_len = max_blocks * spec.block_size
    keys, values = (
        key_cache.new_empty((num_seqs, max_len, spec.num_kv_heads, size), dtype=plan.dtype)
        for size in (spec.head_size, spec.head_size_v)
    )
    # Numbers out of range stay out of range: they are clipped to -1, or to one past the last block.
    block_table, seq_lens = choosing.int32(block_table, -1, last_block + 1), choosing.int32(seq_lens, 0, max_len)
    alignments = page_alignment(key_cache), page_alignment(value_cache)
    scales = plan.cache.scale_tensors(tensors)
    of_scales = scale_alignments(plan.cache, scales)
    kernel = _gather_kernel(plan.cache, plan.dtype, plan.scale_sizes, alignments, of_scales)
    arrays = (block_table, seq_lens, *scale_arrays(plan.cache, scales), key_cache, value_cache, keys, values)
    return Call(kernel, (max_blocks, block_table.stride(0), last_block), arrays, num_seqs * max_blocks)


@functools.lru_cache(maxsize=1024)
def _gather_kernel(
    cache: CachePlan,
    dtype: torch.dtype,
    scale_sizes: tuple[int, int],
    page_alignments: tuple[int, int],
    scale_alignments: ScaleAlignments,
) -> kernels.AnyCount:
    pages, scale_pages = page_memory(cache, page_alignments), scale_memory(cache, scale_alignments)
    return kernels.gather_kernel(cache.spec, pages, numpy_dtype(dtype), scale_sizes, scale_pages)
