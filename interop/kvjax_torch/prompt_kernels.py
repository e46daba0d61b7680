"""Attention of prompts on Hopper: kvjax's own kernels, launched on torch's stream.

Three kernels run for a call, the last two for each lot of prompts: one finds the prompts among the sequences, one makes
their pages tiles in 16 bits, and one attends, as in JAX, and stores results in place.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvjax import KVQuantMode, kernels
from kvjax_torch import calls, cuda, merge
from kvjax_torch.dtypes import numpy_dtype, torch_dtype
from kvjax_torch.plan import AttentionPlan, RaggedPlan
from kvjax_torch.ragged_rows import RaggedCall, blocks_reached

DENSE_BYTES = 1 << 30
"""Limit on the dense keys and values of the sequences attended to at once; those of a single sequence may exceed it."""

SEGMENT_BYTES = 64 << 20
"""Limit on the results of all segments."""

_ROW_ALIGNMENT = 4
"""Bytes of a query's elements that a thread loads, and of those of a result that it stores, at once."""


@functools.lru_cache(maxsize=1024)
def serves(plan: AttentionPlan, device: torch.device) -> bool:
    """Whether the kernels serve the prompts of such a call on a device.

    They take the maximum of a row before they multiply by `sm_scale`, which has to be positive.
    """
    spec = plan.cache.spec
    is_dense = spec.quant_mode is not KVQuantMode.NONE or torch_dtype(spec.storage_dtype) is plan.dtype
    return (
        plan.dtype.itemsize == 2
        and is_dense
        and not spec.quant_mode.is_per_token_head
        and plan.sm_scale > 0
        and kernels.why_no_prompts(spec, calls.target_of(device)) is None
    )


def attend(plan: RaggedPlan, call: RaggedCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Serves the first `plan.max_prompts` sequences with more rows than `plan.attention.q_len`.

    Args:
      plan: of a call that `serves` accepts; sequences with more than `plan.max_q_len` rows are not served.
      call: the call.
      out: `[num_tokens, num_heads, head_size_v]`, contiguous, that results are stored in.
      lse: float32 `[num_tokens, num_heads]`, likewise. Before, rows of prompts have their sink, or -inf.
    """
    attention, tensors = plan.attention, call.tensors
    spec, device, num_rows = attention.cache.spec, call.query.device, call.query.shape[0]
    num_seqs, width = tensors.block_table.shape
    max_blocks = calls.most_blocks(spec, width)
    if attention.window is not None and attention.window >= max_blocks * spec.block_size:
        attention = dataclasses.replace(attention, window=None)
    reached = blocks_reached(attention, plan.max_q_len, max_blocks) * spec.block_size
    num_tokens = -(-reached // kernels.PROMPT_TOKENS) * kernels.PROMPT_TOKENS
    token_bytes = spec.num_kv_heads * (spec.head_size + spec.head_size_v) * 2 + 4
    at_once = max(1, min(plan.max_prompts, DENSE_BYTES // (num_tokens * token_bytes)))
    num_lots = -(-plan.max_prompts // at_once)
    segments = _segments(plan, call, at_once, reached)

    query = _rows(call.query)
    is_aligned = out.data_ptr() % _ROW_ALIGNMENT == 0
    results = (out if is_aligned else torch.empty_like(out).copy_(out)), lse
    if segments > 1:
        results = (
            out.new_empty((segments * num_rows, *out.shape[1:])),
            lse.new_full((segments * num_rows, *lse.shape[1:]), -torch.inf),
        )
    places = calls.page_places(attention.cache, tensors.key_cache, tensors.value_cache)
    with cuda.one_at_a_time:
        schedule, gather, attend_whole, attend_divided = _kernels(attention, places, query.stride(0), device)
    cuda.compile_once((schedule, gather, attend_whole, *attend_divided), device)

    empty = call.query.new_empty
    prompts, header = (
        empty(size, dtype=torch.int32) for size in (plan.max_prompts * len(kernels.PROMPT_FIELDS), 1 + num_lots)
    )
    num_blocks = min(tensors.num_blocks, calls.INT32_MAX)
    table, lens = calls.int32(tensors.block_table, -1, num_blocks), calls.int32(tensors.seq_lens, 0, calls.INT32_MAX)
    table_stride = table.stride(0) if num_seqs > 1 else width
    if num_seqs * table_stride > calls.INT32_MAX:
        table, table_stride = table.contiguous(), width
    bounds = calls.int32(call.cu_q_lens, 0, calls.INT32_MAX)
    limits = attention.q_len, plan.max_q_len, plan.max_prompts
    counts = num_seqs, num_rows, max_blocks, table_stride, num_blocks, *limits, num_lots
    cuda.run(calls.Call(schedule, counts, (table, lens, bounds, prompts, header), num_seqs))

    dtype = torch.float16 if spec.quant_mode is not KVQuantMode.NONE else attention.dtype
    rows = at_once * num_tokens * spec.num_kv_heads
    keys, values = (empty((rows, size), dtype=dtype) for size in (spec.head_size, spec.head_size_v))
    tiles = keys, values, empty(at_once * num_tokens, dtype=torch.float32)
    pages = tensors.key_cache, tensors.value_cache
    scales: tuple[torch.Tensor, ...] = ()
    if spec.quant_mode is not KVQuantMode.NONE:
        scales = tensors.k_scale.contiguous(), tensors.v_scale.contiguous()
    sinks = () if call.sinks is None or segments > 1 else (call.sinks.contiguous(),)
    [kernel] = (attend_whole,) if segments == 1 else attend_divided
    for lot in range(num_lots):
        first = lot * at_once
        gather_counts = first, num_tokens, max_blocks, table_stride, num_blocks - 1
        cuda.run(calls.Call(gather, gather_counts, (table, prompts, header, *pages, *tiles), at_once * num_tokens))
        arrays = prompts, header, query, *tiles, *scales, *sinks, *results
        cuda.run(calls.Call(kernel, (query.shape[0], num_tokens, first, at_once, lot, segments), arrays, 1))
    if segments > 1:
        parts = [x.unflatten(0, (segments, num_rows)).unbind() for x in results]
        merged = merge.merge([out, *parts[0]], [lse, *parts[1]])
        out.copy_(merged[0])
        lse.copy_(merged[1])
    elif not is_aligned:
        out.copy_(results[0])


def _segments(plan: RaggedPlan, call: RaggedCall, at_once: int, reached: int) -> int:
    """Parts that a row's tokens are divided into, so that few rows occupy the whole GPU."""
    attention = plan.attention
    if attention.batch_invariant:
        return 1
    spec, num_rows = attention.cache.spec, call.query.shape[0]
    segment_bytes = num_rows * attention.num_heads * (spec.head_size_v * attention.dtype.itemsize + 4)
    return kernels.prompt_segments(
        spec,
        calls.target_of(call.query.device),
        num_prompts=at_once,
        max_q_len=min(plan.max_q_len, num_rows),
        num_heads=attention.num_heads,
        num_tokens=reached,
        max_segments=SEGMENT_BYTES // segment_bytes if num_rows >= kernels.PROMPT_ROWS else 1,
    )


@functools.lru_cache(maxsize=1024)
def _kernels(
    plan: AttentionPlan, places: calls.PagePlaces, token_stride: int, device: torch.device
) -> tuple[kernels.AnyCount, kernels.AnyCount, kernels.AnyCount, tuple[kernels.AnyCount, ...]]:
    """The schedule, the gather, and the kernels that attend: to whole rows and, unless batch-invariant, to segments."""
    spec, target = plan.cache.spec, calls.target_of(device)
    kind = kernels.PromptKind(
        spec,
        kernels.RowMemory(numpy_dtype(plan.dtype), token_stride, _ROW_ALIGNMENT),
        plan.num_heads,
        plan.scale_sizes,
        plan.sm_scale,
        plan.window,
        plan.logits_soft_cap,
        plan.has_sinks,
        is_divided=False,
    )
    divided = dataclasses.replace(kind, has_sinks=False, is_divided=True)
    return (
        kernels.prompt_schedule_kernel(spec.block_size, plan.window),
        kernels.prompt_gather_kernel(spec, calls.page_memory(plan.cache, places.alignments)),
        kernels.prompt_kernel(kind, target),
        () if plan.batch_invariant else (kernels.prompt_kernel(divided, target),),
    )


def _rows(query: torch.Tensor) -> torch.Tensor:
    """The query `[num_tokens, num_heads * head_size]`, a copy if threads cannot read it.

    Rows of zeros follow where there are fewer than `PROMPT_ROWS`.
    """
    num_tokens, num_heads, head_size = query.shape
    if num_tokens < kernels.PROMPT_ROWS:
        padded = query.new_zeros((kernels.PROMPT_ROWS, num_heads * head_size))
        padded[:num_tokens].unflatten(1, (num_heads, head_size)).copy_(query)
        return padded
    token_stride, head_stride, stride = query.stride()
    is_run = stride == 1 and (head_stride == head_size or num_heads == 1) and token_stride >= num_heads * head_size
    places = query.data_ptr() | token_stride * query.element_size()
    if not is_run or places % _ROW_ALIGNMENT:
        query = query.clone(memory_format=torch.contiguous_format)
        token_stride = num_heads * head_size
    return query.as_strided((num_tokens, num_heads * head_size), (token_stride, 1))
