"""The kernel calls of gathers."""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvjax import kernels
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.arguments.plan import BlockRows, CachePlan, GatherPlan, RangeTensors, ReadTensors, RowTensors
from kvjax_torch.calls import choosing
from kvjax_torch.calls.arrays import (
    ScaleAlignments,
    page_alignments,
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
    if _must_copy(plan.cache, page_alignments(tensors)):
        plan, tensors = _of_copied_blocks(plan, tensors)
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
    block_table, table_stride = choosing.table(block_table, tensors.num_blocks)
    seq_lens = choosing.int32(seq_lens, 0, max_len)
    scales = plan.cache.scale_tensors(tensors)
    of_scales = scale_alignments(plan.cache, scales)
    kernel = _gather_kernel(plan.cache, plan.dtype, plan.scale_sizes, page_alignments(tensors), of_scales)
    pages = (key_cache, value_cache)[:num_parts]
    arrays = (block_table, seq_lens, *scale_arrays(plan.cache, scales), *pages, *results)
    return Call(kernel, (max_blocks, table_stride, last_block), arrays, num_seqs * max_blocks)


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


def places_call(plan: GatherPlan, tensors: RangeTensors) -> Call:
    """The kernel call that finds the rows' tokens; its last tensors are their blocks and their indices there."""
    key_cache, _, block_table, cu_seq_lens, token_to_seq, seq_starts, *_, dst = tensors
    (num_seqs, max_blocks), num_rows = block_table.shape, dst.shape[0]
    table, stride = choosing.table(block_table, tensors.num_blocks)
    bounds, first_end = choosing.int32(cu_seq_lens, 0, choosing.INT32_MAX), 1
    # Where `token_to_seq` or `seq_starts` is None, its count is 0, and what is passed in its place is not read.
    given = [bounds if x is None else choosing.int32(x, -1, choosing.INT32_MAX) for x in (token_to_seq, seq_starts)]
    num_given = [0 if x is None else size for x, size in ((token_to_seq, num_rows), (seq_starts, num_seqs))]
    last_block = min(tensors.num_blocks, choosing.INT32_MAX) - 1
    counts = num_rows, num_seqs, max_blocks, stride, last_block, plan.cache.spec.block_size, *num_given, first_end
    places = key_cache.new_empty((2, num_rows), dtype=torch.int32)
    return Call(kernels.row_places_kernel(), counts, (table, bounds, bounds, *given, *places), num_rows)


def rows_call(plan: GatherPlan, tensors: RowTensors) -> Call:
    """The kernel call of a `gather_and_maybe_dequant_cache` call that `plan` describes.

    Its last tensors are the parts of the rows that it fills: of `dst`, or of memory of its own for rows at addresses
    that words of four bytes do not divide.
    """
    if _must_copy(plan.cache, page_alignments(tensors)):
        plan, tensors = _of_copied_tokens(plan, tensors)
    key_cache, value_cache, block, token, k_scale, v_scale, dst = tensors
    num_parts, sizes = plan.cache.num_parts, plan.cache.spec.part_sizes
    num_rows, width = dst.shape
    stride = dst.stride(0) if num_rows > 1 else width
    if row_alignment(dst.data_ptr() | stride * dst.element_size()) < WORD_BYTES:
        stride = -(-width // WORD_BYTES) * WORD_BYTES
        dst = dst.new_empty(num_rows, stride)[:, :width]
    parts = dst.split(sizes, dim=1)[:num_parts]
    memory = tuple((stride, row_alignment(part.data_ptr() | stride * part.element_size())) for part in parts)
    kernel = _rows_kernel(plan.cache, plan.dtype, page_alignments(tensors), memory)
    scales = scale_arrays(plan.cache, (k_scale, v_scale))
    return Call(kernel, (num_rows,), (block, token, *scales, *(key_cache, value_cache)[:num_parts], *parts), num_rows)


@functools.lru_cache(maxsize=1024)
def _rows_kernel(
    cache: CachePlan, dtype: torch.dtype, page_alignments: tuple[int, int], rows: tuple[tuple[int, int], ...]
) -> kernels.AnyCount:
    dense = tuple(kernels.RowMemory(numpy_dtype(dtype), *memory) for memory in rows)
    return kernels.row_gather_kernel(cache.spec, page_memory(cache, page_alignments), dense)


@functools.lru_cache(maxsize=1024)
def _must_copy(cache: CachePlan, alignments: tuple[int, int]) -> bool:
    """Whether kernels cannot read latents and rope keys where they are: rope keys of two bytes at odd addresses."""
    return cache.spec.is_mla and kernels.why_not_elements(cache.spec, page_memory(cache, alignments)) is not None


def _of_copied_blocks(plan: GatherPlan, tensors: ReadTensors) -> tuple[GatherPlan, ReadTensors]:
    """The same gather of copies of the table's blocks at even addresses; the host does not wait."""
    table, last_block = tensors.block_table, tensors.num_blocks - 1
    is_block = (table >= 0) & (table <= last_block)
    block = table.clamp(0, last_block).flatten().to(torch.int64)
    cache, keys, values = _copied(plan.cache, tensors, (block,))
    own = torch.where(is_block, torch.arange(len(block), device=table.device).view_as(table), -1)
    return dataclasses.replace(plan, cache=cache), tensors._replace(key_cache=keys, value_cache=values, block_table=own)


def _of_copied_tokens(plan: GatherPlan, tensors: RowTensors) -> tuple[GatherPlan, RowTensors]:
    """The same gather of copies of its tokens, each in a block of its own."""
    row = torch.arange(len(tensors.block), dtype=torch.int32, device=tensors.block.device)
    index = tensors.block.clamp(min=0)[:, None], tensors.token[:, None]
    cache, keys, values = _copied(plan.cache, tensors, index)
    own = tensors._replace(block=torch.where(tensors.block >= 0, row, -1), token=torch.zeros_like(row))
    return dataclasses.replace(plan, cache=cache), own._replace(key_cache=keys, value_cache=values)


def _copied(
    cache: CachePlan, tensors: ReadTensors | RowTensors, index: tuple[torch.Tensor, ...]
) -> tuple[CachePlan, torch.Tensor, torch.Tensor]:
    """Copies of latents and of rope keys at `index`, `[num_blocks, block_size, 1, row]`, and the plan of both."""
    keys, values = (x[index].contiguous() for x in (tensors.key_cache, tensors.value_cache))
    spec = dataclasses.replace(cache.spec, block_size=keys.shape[1])

    def rows_of(copy: torch.Tensor, rows: BlockRows) -> BlockRows:
        size = copy.shape[-1] * copy.element_size()
        regions = (dataclasses.replace(region, token_stride=size, head_stride=size) for region in rows.regions)
        return BlockRows(spec.block_size * size, tuple(regions))

    return CachePlan(spec, rows_of(keys, cache.keys), rows_of(values, cache.values)), keys, values
