"""The kernel calls of gathers."""

from __future__ import annotations

import functools

import torch

from kvjax import kernels
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.arguments.plan import CachePlan, GatherPlan, ReadTensors, RowTensors
from kvjax_torch.calls import choosing
from kvjax_torch.calls.arrays import (
    ScaleAlignments,
    page_alignment,
    page_memory,
    row_alignment,
    scale_alignments,
    scale_arrays,
    scale_memory,
)
from kvjax_torch.launch.running import Call

WORD_BYTES = 4
"""Alignment of rows that a gather fills: it may store two elements at once."""


def gather_call(plan: GatherPlan, tensors: ReadTensors) -> Call:
    """The kernel call of a `gather_kv` call that `plan` describes; the last tensors are its results.

    These are keys and values, or latents and, where there are any, rope keys of one head.
    """
    key_cache, value_cache, block_table, seq_lens, _, _ = tensors
    spec, last_block = plan.cache.spec, tensors.num_blocks - 1
    num_seqs, max_blocks = block_table.shape
    max_len = max_blocks * spec.block_size
    num_parts = plan.cache.num_parts
    results = [
        key_cache.new_empty((num_seqs, max_len, spec.num_kv_heads, size), dtype=plan.dtype)
        for size in spec.part_sizes[:num_parts]
    ]
    # Numbers out of range stay out of range: they are clipped to -1, or to one past the last block.
    block_table, seq_lens = choosing.int32(block_table, -1, last_block + 1), choosing.int32(seq_lens, 0, max_len)
    alignments = page_alignment(key_cache), page_alignment(value_cache)
    scales = plan.cache.scale_tensors(tensors)
    of_scales = scale_alignments(plan.cache, scales)
    kernel = _gather_kernel(plan.cache, plan.dtype, plan.scale_sizes, alignments, of_scales)
    pages = (key_cache, value_cache)[:num_parts]
    arrays = (block_table, seq_lens, *scale_arrays(plan.cache, scales), *pages, *results)
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


def rows_call(plan: GatherPlan, tensors: RowTensors) -> Call:
    """The kernel call of a `gather_and_maybe_dequant_cache` call that `plan` describes.

    Its last tensors are the parts of the rows that it fills: of `dst`, or of memory of its own for rows at addresses
    that words of four bytes do not divide.
    """
    key_cache, value_cache, block, token, k_scale, v_scale, dst = tensors
    num_parts, sizes = plan.cache.num_parts, plan.cache.spec.part_sizes
    num_rows, width = dst.shape
    stride = dst.stride(0) if num_rows > 1 else width
    if row_alignment(dst.data_ptr() | stride * dst.element_size()) < WORD_BYTES:
        stride = -(-width // WORD_BYTES) * WORD_BYTES
        dst = dst.new_empty(num_rows, stride)[:, :width]
    parts = dst.split(sizes, dim=1)[:num_parts]
    memory = tuple((stride, row_alignment(part.data_ptr() | stride * part.element_size())) for part in parts)
    alignments = page_alignment(key_cache), page_alignment(value_cache)
    kernel = _rows_kernel(plan.cache, plan.dtype, alignments, memory)
    places = (x.clamp(max=choosing.INT32_MAX).to(torch.int32) for x in (block, token))
    scales = scale_arrays(plan.cache, (k_scale, v_scale))
    return Call(kernel, (num_rows,), (*places, *scales, *(key_cache, value_cache)[:num_parts], *parts), num_rows)


@functools.lru_cache(maxsize=1024)
def _rows_kernel(
    cache: CachePlan, dtype: torch.dtype, page_alignments: tuple[int, int], rows: tuple[tuple[int, int], ...]
) -> kernels.AnyCount:
    dense = tuple(kernels.RowMemory(numpy_dtype(dtype), *memory) for memory in rows)
    return kernels.row_gather_kernel(cache.spec, page_memory(cache, page_alignments), dense)
