"""Kernel calls for CUDA tensors: the kernel, its counts and its arrays; `cuda` then runs them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from kvjax import AttentionSpec, UnsupportedError, kernels
from kvjax.ops.route import Query, Route, route
from kvjax_torch.dtypes import numpy_dtype
from kvjax_torch.plan import (
    AttentionPlan,
    BlockRows,
    CachePlan,
    GatherPlan,
    ReadTensors,
    RopePlan,
    WritePlan,
    WriteTensors,
)

ROW_ALIGNMENTS = (64, 16, 8, 4, 2)
"""Alignments of rows, in bytes, that kernels are compiled for."""

COPIED_BELOW = 16
"""Rows of a lower alignment than packed rows would have, up to this one, are packed before they are written, so that
threads read as many bytes at once."""

PAGE_ALIGNMENT = 16
"""Bytes that a thread moves at once, the highest alignment of pages that makes a difference."""

INT32_MAX = 2**31 - 1
"""The largest count, and the largest index into an array, that kernels take."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One run of a kernel.

    Attributes:
      kernel: the kernel.
      counts: its counts.
      tensors: its arrays.
      amount: the size that its number of programs depends on.
    """

    kernel: kernels.AnyCount
    counts: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    amount: int

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        return self.tensors[-1].device


def write_call(plan: WritePlan, tensors: WriteTensors, unique_slots: bool) -> Call:
    """The write of the tokens of a `reshape_and_cache_flash` call that `plan` describes."""
    return _write_call(plan, tensors, unique_slots, None)


def rope_call(
    plan: RopePlan,
    query: torch.Tensor,
    tensors: WriteTensors,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    unique_slots: bool,
) -> tuple[Call, torch.Tensor]:
    """The kernel call of a `rope_and_cache` call that `plan` describes and `has_rope` accepts; and rotated queries."""
    num_tokens, head_size = tensors.slot_mapping.shape[0], query.shape[2]
    query, alignment = _runs(query, num_tokens)
    rotation = kernels.Rotation(
        numpy_dtype(plan.write.dtype), head_size, plan.rot_dim, plan.is_neox, plan.table_dtype.itemsize
    )
    rotated = kernels.RotatedMemory(
        rotation,
        plan.num_heads,
        kernels.RowMemory(rotation.dtype, query.stride(0), alignment),
        numpy_dtype(plan.position_dtype),
        numpy_dtype(plan.table_dtype),
    )
    table = cos_sin_cache.contiguous()
    if table.data_ptr() % kernels.MAX_VECTOR_BYTES:
        table = table.clone()
    result = query.new_empty(query.shape)
    turned = _Turned(rotated, (query, positions.contiguous(), table, result), cos_sin_cache.shape[0] - 1)
    return _write_call(plan.write, tensors, unique_slots, turned), result


def has_rope(plan: RopePlan, query: torch.Tensor) -> bool:
    """Whether a kernel can rotate and write: it takes elements of two bytes and even head sizes."""
    is_served = plan.write.dtype.itemsize == 2 and not plan.write.cache.spec.head_size % 2
    return is_served and query.numel() > 0


class _Turned(NamedTuple):
    """The rotation that a write does first.

    Attributes:
      memory: the kernel's description of its arrays.
      tensors: its arrays.
      last_position: index of the last row of cosines and sines.
    """

    memory: kernels.RotatedMemory
    tensors: tuple[torch.Tensor, ...]
    last_position: int


def _write_call(plan: WritePlan, tensors: WriteTensors, unique_slots: bool, turned: _Turned | None) -> Call:
    key, value, key_cache, value_cache, slot_mapping, _, _ = tensors
    num_tokens = slot_mapping.shape[0]
    key, key_alignment = _runs(key, num_tokens)
    value, value_alignment = _runs(value, num_tokens)
    scales = plan.cache.scale_tensors(tensors)
    kernel = _write_kernel(
        plan.cache,
        plan.dtype,
        plan.slot_dtype,
        plan.scale_sizes,
        (key.stride(0), value.stride(0)),
        (key_alignment, value_alignment),
        (_page_alignment(key_cache), _page_alignment(value_cache)),
        _scale_alignments(plan.cache, scales),
        unique_slots,
        None if turned is None else turned.memory,
        target_of(key_cache.device),
    )
    last_slot = min(key_cache.shape[0] * plan.cache.spec.block_size, 1 << 31) - 1
    if num_tokens >= kernels.SEARCHED and not unique_slots:
        slot_mapping = only_last_tokens(slot_mapping, last_slot + 1)
    counts, others = (num_tokens, last_slot), ()  # type: tuple[int, ...], tuple[torch.Tensor, ...]
    if turned is not None:
        counts, others = (*counts, turned.last_position), turned.tensors
    arrays = (slot_mapping.contiguous(), key, value, key_cache, value_cache, *others, *_scales(plan.cache, scales))
    return Call(kernel, counts, arrays, num_tokens)


def only_last_tokens(slot_mapping: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Replaces repeated slots by -1 except for the last token of each, for writes of `kernels.SEARCHED` tokens or more.

    Runs on torch's current stream, without waiting for it.
    """
    token = torch.arange(slot_mapping.shape[0], dtype=torch.int32, device=slot_mapping.device)
    # One index for all slots below 0, and one for all from num_slots on.
    index = slot_mapping.to(torch.int64).clamp(-1, num_slots) + 1
    last_token = token.new_empty(num_slots + 2).scatter_reduce_(0, index, token, reduce="amax", include_self=False)
    return torch.where(last_token[index] == token, slot_mapping, -1)


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
    block_table, seq_lens = int32(block_table, -1, last_block + 1), int32(seq_lens, 0, max_len)
    alignments = _page_alignment(key_cache), _page_alignment(value_cache)
    scales = plan.cache.scale_tensors(tensors)
    scale_alignments = _scale_alignments(plan.cache, scales)
    kernel = _gather_kernel(plan.cache, plan.dtype, plan.scale_sizes, alignments, scale_alignments)
    arrays = (block_table, seq_lens, *_scales(plan.cache, scales), key_cache, value_cache, keys, values)
    return Call(kernel, (max_blocks, block_table.stride(0), last_block), arrays, num_seqs * max_blocks)


class AttentionPart(NamedTuple):
    """The query rows of a call that one run of the attention kernels serves.

    Attributes:
      plan: the plan of a call of these rows alone.
      heads: the query heads of each KV head.
      tokens: the query tokens.
    """

    plan: AttentionPlan
    heads: slice
    tokens: slice


@functools.lru_cache(maxsize=1024)
def route_of(plan: AttentionPlan, device: torch.device) -> Route:
    """What serves a call on a device, without the limits of `has_attention`."""
    return route(plan.cache.spec, Query(numpy_dtype(plan.dtype), plan.sm_scale > 0), target_of(device))


@functools.lru_cache(maxsize=1024)
def attention_parts(plan: AttentionPlan, device: torch.device) -> tuple[AttentionPart, ...]:
    """The parts of a call, in the order they run; none if no kernel supports such a cache or query on the device."""
    spec = plan.cache.spec
    if route_of(plan, device).why_no_decode_kernel is not None:
        return ()
    parts = []
    for heads, runs in kernels.attention_passes(spec, plan.num_heads // spec.num_kv_heads, plan.q_len):
        num_heads = (heads.stop - heads.start) * spec.num_kv_heads
        for tokens in runs:
            part = dataclasses.replace(plan, num_heads=num_heads, q_len=tokens.stop - tokens.start)
            parts.append(AttentionPart(part, heads, tokens))
    return tuple(parts)


def has_attention(plan: AttentionPlan, num_seqs: int, block_table: torch.Tensor) -> bool:
    """Whether a call has rows and blocks, and few enough elements for the kernels' 32-bit indices."""
    rows = num_seqs * plan.q_len * plan.num_heads
    return (
        0 < rows * max(plan.cache.spec.head_size, plan.cache.spec.head_size_v) <= INT32_MAX and block_table.numel() > 0
    )


class AttentionKernels(NamedTuple):
    """The two kernels of attention, which run one after the other.

    Attributes:
      decode: attends to parts of sequences, and leaves their results in the workspace.
      merge: merges the parts.
      workspace: elements of `partial` and `partial_lse`, float32, and of `spans`, int32.
    """

    decode: kernels.AnyCount
    merge: kernels.AnyCount
    workspace: tuple[int, int, int]


class PagePlaces(NamedTuple):
    """Where pages are, as far as kernels that read them are compiled for it.

    Attributes:
      alignments: of the pages of keys and of those of values.
      value_start: bytes from a page of keys to that of values where both have the same pages; None elsewhere.
    """

    alignments: tuple[int, int]
    value_start: int | None = None


def page_places(plan: CachePlan, key_cache: torch.Tensor, value_cache: torch.Tensor) -> PagePlaces:
    """The places of a cache's pages.

    Two views of pages that hold keys and values are one memory, of which a kernel copies the bytes of both together.
    """
    start = value_cache.data_ptr() - key_cache.data_ptr()
    alignments = _page_alignment(key_cache), _page_alignment(value_cache)
    return PagePlaces(alignments, start if 0 < start <= plan.last_value_start else None)


@functools.lru_cache(maxsize=4096)
def attention_kernels(
    plan: AttentionPlan, places: PagePlaces, device: torch.device, num_seqs: int, max_blocks: int
) -> AttentionKernels:
    """The kernels of a call of one part; many numbers of sequences share the same ones."""
    decode, merge, workspace = _attention_kernels(plan, places, target_of(device)).of(num_seqs, max_blocks)
    partial, partial_lse, spans = (array.size for array in workspace)
    return AttentionKernels(decode, merge, (partial, partial_lse, spans))


def kernels_of_call(plan: AttentionPlan, tensors: ReadTensors) -> AttentionKernels:
    """The kernels of a `paged_attention` call of one part that `plan` describes.

    Raises:
      UnsupportedError: int32 does not index the workspace of a batch-invariant call.
    """
    key_cache, value_cache, block_table, *_ = tensors
    num_seqs, width = block_table.shape
    places = page_places(plan.cache, key_cache, value_cache)
    return attention_kernels(plan, places, key_cache.device, num_seqs, most_blocks(plan.cache.spec, width))


def most_blocks(spec: AttentionSpec, width: int) -> int:
    """The entries of a block table of this width that lengths can reach."""
    return min(width, INT32_MAX // spec.block_size)


def attention_calls(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> tuple[Call, Call]:
    """The two kernel calls, in order, of a `paged_attention` call of one part that `plan` describes.

    The last two tensors of the second are the results: `[num_seqs, q_len, num_heads, head_size_v]` of the query's dtype
    and float32 `[num_seqs, q_len, num_heads]`. Workspace and results are allocated on torch's current stream, except
    for `out` if it is given: contiguous, of the results' shape and dtype.
    """
    key_cache, value_cache, block_table, seq_lens, k_scale, v_scale = tensors
    spec, num_blocks = plan.cache.spec, tensors.num_blocks
    num_seqs, width = block_table.shape
    max_blocks = most_blocks(spec, width)
    decode, merge, workspace = kernels_of_call(plan, tensors)
    query = _query(query)
    block_table, seq_lens = int32(block_table, -1, num_blocks), int32(seq_lens, 0, INT32_MAX)
    table_stride = block_table.stride(0) if num_seqs > 1 else width
    if num_seqs * table_stride > INT32_MAX:
        block_table, table_stride = block_table.contiguous(), width
    out = query.new_empty((*query.shape[:3], spec.head_size_v)) if out is None else out
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    partial, partial_lse = (query.new_empty(size, dtype=torch.float32) for size in workspace[:2])
    between = partial, partial_lse, query.new_empty(workspace[2], dtype=torch.int32)
    sink = () if sinks is None else (sinks.contiguous(),)
    pages = key_cache, value_cache, k_scale.contiguous(), v_scale.contiguous()
    counts = num_seqs, max_blocks, min(num_blocks, INT32_MAX), table_stride, *_token_strides(query)
    return (
        Call(decode, counts, (seq_lens, block_table, query, *pages, *sink, out, lse, *between), num_seqs),
        Call(merge, (max_blocks,), (seq_lens, *sink, *between, out, lse), num_seqs),
    )


@functools.lru_cache(maxsize=1024)
def _write_kernel(
    cache: CachePlan,
    dtype: torch.dtype,
    slot_dtype: torch.dtype,
    scale_sizes: tuple[int, int],
    token_strides: tuple[int, int],
    row_alignments: tuple[int, int],
    page_alignments: tuple[int, int],
    scale_alignments: tuple[int, int] | None,
    unique_slots: bool,
    rotated: kernels.RotatedMemory | None,
    target: kernels.Target,
) -> kernels.AnyCount:
    rows = [
        kernels.RowMemory(numpy_dtype(dtype), *memory) for memory in zip(token_strides, row_alignments, strict=True)
    ]
    return kernels.write_kernel(
        cache.spec,
        (rows[0], rows[1]),
        page_memory(cache, page_alignments),
        numpy_dtype(slot_dtype),
        scale_sizes,
        unique_slots=unique_slots,
        scale_pages=_scale_memory(cache, scale_alignments),
        rotated=rotated,
        target=target,
    )


@functools.lru_cache(maxsize=1024)
def _gather_kernel(
    cache: CachePlan,
    dtype: torch.dtype,
    scale_sizes: tuple[int, int],
    page_alignments: tuple[int, int],
    scale_alignments: tuple[int, int] | None,
) -> kernels.AnyCount:
    pages, scale_pages = page_memory(cache, page_alignments), _scale_memory(cache, scale_alignments)
    return kernels.gather_kernel(cache.spec, pages, numpy_dtype(dtype), scale_sizes, scale_pages)


@functools.lru_cache(maxsize=1024)
def _attention_kernels(plan: AttentionPlan, places: PagePlaces, target: kernels.Target) -> kernels.AnyBatch:
    keys, values = page_memory(plan.cache, places.alignments)
    if (start := places.value_start) is not None:  # from the pages of keys on
        regions = tuple(dataclasses.replace(region, base=start + region.base) for region in values.regions)
        values = dataclasses.replace(keys, regions=regions)
    return kernels.attention_kernels(
        plan.cache.spec,
        (keys, values),
        numpy_dtype(plan.dtype),
        plan.scale_sizes,
        num_heads=plan.num_heads,
        q_len=plan.q_len,
        sm_scale=plan.sm_scale,
        window=plan.window,
        logits_soft_cap=plan.logits_soft_cap,
        has_sinks=plan.has_sinks,
        batch_invariant=plan.batch_invariant,
        target=target,
        one_memory=places.value_start is not None,
    )


@functools.cache
def target_of(device: torch.device) -> kernels.Target:
    """The GPU that kernels for a device are made for."""
    if device.type != "cuda":
        return kernels.Target()
    properties: Any = torch.cuda.get_device_properties(device)  # not all versions declare all that they have
    capability = properties.major, properties.minor
    return kernels.Target(properties.multi_processor_count, capability, properties.shared_memory_per_block_optin)


def _query(query: torch.Tensor) -> torch.Tensor:
    """The query `[num_seqs, q_len, num_heads, head_size]`; a copy if the heads of a token are not contiguous."""
    _, _, num_heads, head_size = query.shape
    strides = query.stride()
    is_run = (strides[3] == 1 or head_size == 1) and (strides[2] == head_size or num_heads == 1)
    reach = sum(size * stride for size, stride in zip(query.shape, _token_strides(query), strict=False))
    if is_run and reach + num_heads * head_size <= INT32_MAX and not query.data_ptr() % query.element_size():
        return query
    return query.clone(memory_format=torch.contiguous_format)


def _token_strides(query: torch.Tensor) -> tuple[int, int]:
    """Strides between sequences and between tokens, in elements; 0 along a dimension of size 1."""
    a_sequence, a_token = (
        stride if size > 1 else 0 for size, stride in zip(query.shape[:2], query.stride()[:2], strict=True)
    )
    return a_sequence, a_token


def _runs(x: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, int]:
    """Keys or values, copied if the elements of a token are not contiguous, and their alignment."""
    _, num_heads, size = x.shape
    token_stride, head_stride, _ = x.stride()
    is_run = (num_heads == 1 or head_stride == size) and token_stride >= num_heads * size
    packed = num_heads * size * x.element_size()
    alignment = _row_alignment(x.data_ptr() | token_stride * x.element_size())
    if is_run and alignment >= min(COPIED_BELOW, _row_alignment(packed)):
        return x, alignment
    return x[:num_tokens].clone(memory_format=torch.contiguous_format), _row_alignment(packed)


def _row_alignment(places: int) -> int:
    return next(alignment for alignment in ROW_ALIGNMENTS if not places % alignment)


def _scale(scale: torch.Tensor) -> torch.Tensor:
    """A scale that a kernel can read; several are read as vectors, so unaligned ones are copied."""
    if scale.numel() == 1 or not scale.data_ptr() % kernels.MAX_VECTOR_BYTES:
        return scale.contiguous()
    return scale.clone(memory_format=torch.contiguous_format)


def _scales(cache: CachePlan, scales: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The scale arrays of a kernel call; those of each token and head are never copied."""
    return scales if cache.spec.dtype.is_per_token_head else tuple(map(_scale, scales))


def _scale_alignments(cache: CachePlan, scales: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int] | None:
    """The alignments of the scales of each token and head that kernels are compiled for; None if there are none."""
    if not cache.spec.dtype.is_per_token_head:
        return None
    k_scale, v_scale = scales
    return _page_alignment(k_scale), _page_alignment(v_scale)


def int32(indices: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Indices in int32, neighbours side by side; those of 64 bits are clipped."""
    if indices.dtype is not torch.int32:
        indices = indices.clamp(least, most).to(torch.int32)
    return indices if indices.stride(-1) == 1 else indices.contiguous()


def _page_alignment(cache: torch.Tensor) -> int:
    places = cache.data_ptr() | cache.stride(0) * cache.element_size() | PAGE_ALIGNMENT
    return places & -places


def page_memory(cache: CachePlan, alignments: tuple[int, int]) -> tuple[kernels.PageMemory, kernels.PageMemory]:
    """The pages of keys and of values, without scales that are arrays of their own."""
    rows = cache.keys, cache.values
    if cache.spec.dtype.is_per_token_head:  # scales are arrays of their own
        rows = _part(cache.keys, 0), _part(cache.values, 0)
    return _memory(cache.spec, ("key_cache", "value_cache"), rows, alignments)


def _scale_memory(
    cache: CachePlan, alignments: tuple[int, int] | None
) -> tuple[kernels.PageMemory, kernels.PageMemory] | None:
    if alignments is None:
        return None
    rows = cache.scales or (_part(cache.keys, 1), _part(cache.values, 1))
    return _memory(cache.spec, ("k_scale", "v_scale"), rows, alignments)


def _part(rows: BlockRows, index: int) -> BlockRows:
    return rows._replace(regions=rows.regions[index : index + 1])


def _memory(
    spec: AttentionSpec,
    names: tuple[str, str],
    rows: tuple[BlockRows, BlockRows],
    alignments: tuple[int, int],
) -> tuple[kernels.PageMemory, kernels.PageMemory]:
    halves = [
        kernels.PageMemory(of_half.regions, of_half.block_stride, alignment)
        for of_half, alignment in zip(rows, alignments, strict=True)
    ]
    for name, memory in zip(names, halves, strict=True):
        for region in memory.regions:
            reach = max(spec.num_kv_heads * region.head_stride, spec.block_size * region.token_stride)
            if reach > memory.page_stride:
                raise UnsupportedError(
                    f"{name}: got blocks {memory.page_stride} bytes apart with rows of a block {reach} bytes apart,"
                    " expected the rows of a block side by side; on CUDA no kernel serves blocks that interleave"
                )
    return halves[0], halves[1]
