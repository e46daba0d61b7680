"""The kernel calls of attention over pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from kvjax import AttentionSpec, kernels
from kvjax.ops.route import Query, Route, route
from kvjax_torch.arguments.dtypes import numpy_dtype, torch_dtype
from kvjax_torch.arguments.plan import AttentionPlan, ReadTensors
from kvjax_torch.calls import choosing
from kvjax_torch.calls.arrays import (
    PAGE_ALIGNMENT,
    PagePlaces,
    page_alignment,
    page_memory,
    page_places,
    scale_arrays,
    scale_memory,
)
from kvjax_torch.launch.running import Call


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
def route_of(
    plan: AttentionPlan, device: torch.device, query_quantization: bool = False, returns_lse: bool = True
) -> Route:
    """What serves a call on a device, without the limits of `has_attention`."""
    query = Query(
        numpy_dtype(plan.dtype),
        plan.sm_scale > 0,
        rows=plan.q_len * plan.num_heads,
        query_quantization=query_quantization,
        has_plain_softmax=not (returns_lse or plan.has_sinks) and plan.logits_soft_cap is None,
    )
    return route(plan.cache.spec, query, choosing.target_of(device))


@functools.lru_cache(maxsize=1024)
def attention_parts(plan: AttentionPlan, device: torch.device) -> tuple[AttentionPart, ...]:
    """The parts of a call, in the order they run; none if no kernel supports such a cache or query on the device."""
    spec = plan.cache.spec
    if route_of(plan, device).why_no_decode_kernel is not None:
        return ()
    if spec.is_mla:  # whose kernel divides rows itself
        return (AttentionPart(plan, slice(0, plan.num_heads), slice(0, plan.q_len)),)
    parts = []
    for heads, runs in kernels.attention_passes(spec, plan.num_heads // spec.num_kv_heads, plan.q_len):
        num_heads = (heads.stop - heads.start) * spec.num_kv_heads
        for tokens in runs:
            tree = None if plan.tree is None else tokens.stop  # a token sees none that follows
            part = dataclasses.replace(plan, num_heads=num_heads, q_len=tokens.stop - tokens.start, tree=tree)
            parts.append(AttentionPart(part, heads, tokens))
    return tuple(parts)


def has_attention(plan: AttentionPlan, num_seqs: int, tensors: ReadTensors) -> bool:
    """Whether a call has rows and blocks, and few enough elements for the kernels' 32-bit indices.

    The kernel over latents copies 16 bytes at once; that over keys and values takes pages of every alignment.
    """
    spec = plan.cache.spec
    elements = num_seqs * plan.q_len * plan.num_heads * max(spec.head_size, spec.head_size_v)
    is_aligned = not spec.is_mla or page_alignment(tensors.key_cache) == PAGE_ALIGNMENT
    return 0 < elements <= choosing.INT32_MAX and tensors.block_table.numel() > 0 and is_aligned


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


@functools.lru_cache(maxsize=4096)
def attention_kernels(
    plan: AttentionPlan, places: PagePlaces, device: torch.device, num_seqs: int, max_blocks: int
) -> AttentionKernels:
    """The kernels of a call of one part; many numbers of sequences share the same ones."""
    decode, merge, workspace = _attention_kernels(plan, places, choosing.target_of(device)).of(num_seqs, max_blocks)
    partial, partial_lse, spans = (array.size for array in workspace)
    return AttentionKernels(decode, merge, (partial, partial_lse, spans))


def kernels_of_call(plan: AttentionPlan, tensors: ReadTensors) -> AttentionKernels:
    """The kernels of a `paged_attention` call of one part that `plan` describes.

    Raises:
      UnsupportedError: int32 does not index the workspace of a batch-invariant call.
    """
    num_seqs, width = tensors.block_table.shape
    places, device = page_places(plan.cache, tensors), tensors.key_cache.device
    return attention_kernels(plan, places, device, num_seqs, choosing.most_blocks(plan.cache.spec, width))


def attention_calls(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
) -> tuple[Call, Call]:
    """The two kernel calls, in order, of a `paged_attention` call of one part that `plan` describes.

    The last two tensors of the second are the results: `[num_seqs, q_len, num_heads, head_size_v]` of the query's dtype
    and float32 `[num_seqs, q_len, num_heads]`. Workspace and results are allocated on torch's current stream, except
    for `out` if it is given: contiguous, of the results' shape and dtype. `tree` are `TreeRows.words`.
    """
    key_cache, value_cache, block_table, seq_lens, *_ = tensors
    spec, num_blocks = plan.cache.spec, tensors.num_blocks
    num_seqs, width = block_table.shape
    max_blocks = choosing.most_blocks(spec, width)
    decode, merge, workspace = kernels_of_call(plan, tensors)
    query = _query(_operand(query, spec, decode))
    queries = (query, *_rope_queries(query, spec, decode))
    block_table, table_stride = choosing.table(block_table, num_blocks)
    seq_lens = choosing.int32(seq_lens, 0, choosing.INT32_MAX)
    out = query.new_empty((*query.shape[:3], spec.head_size_v), dtype=plan.dtype) if out is None else out
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    between = _between(query, workspace)
    sink, trees = () if sinks is None else (sinks.contiguous(),), () if tree is None else (tree,)
    scales = scale_arrays(plan.cache, plan.cache.scale_tensors(tensors))
    pages = _rows(key_cache, spec), value_cache, *scales
    counts = num_seqs, max_blocks, min(num_blocks, choosing.INT32_MAX), table_stride, *_token_strides(query)
    return (
        Call(decode, counts, (seq_lens, block_table, *queries, *pages, *sink, *trees, out, lse, *between), num_seqs),
        Call(merge, (max_blocks,), (seq_lens, *sink, *between, out, lse), num_seqs),
    )


@functools.lru_cache(maxsize=4096)
def joint_kernels(
    plans: tuple[AttentionPlan, AttentionPlan],
    places: tuple[PagePlaces, PagePlaces],
    device: torch.device,
    num_seqs: int,
    blocks: tuple[int, int],
) -> AttentionKernels:
    """The kernels of a call of one part over pages and a ring, in this order; as `attention_kernels`."""
    decode, merge, workspace = _joint_kernels(plans, places, choosing.target_of(device)).of(num_seqs, *blocks)
    partial, partial_lse, spans = (array.size for array in workspace)
    return AttentionKernels(decode, merge, (partial, partial_lse, spans))


def joint_places(
    plans: tuple[AttentionPlan, AttentionPlan], tensors: tuple[ReadTensors, ReadTensors]
) -> tuple[PagePlaces, PagePlaces]:
    """Where the pages of both caches are."""
    return page_places(plans[0].cache, tensors[0]), page_places(plans[1].cache, tensors[1])


def table_blocks(
    plans: tuple[AttentionPlan, AttentionPlan], tensors: tuple[ReadTensors, ReadTensors]
) -> tuple[int, int]:
    """The entries of both block tables that lengths can reach."""
    pages, ring = (
        choosing.most_blocks(plan.cache.spec, each.block_table.shape[1])
        for plan, each in zip(plans, tensors, strict=True)
    )
    return pages, ring


def joint_parts(
    plans: tuple[AttentionPlan, AttentionPlan], num_seqs: int, tensors: tuple[ReadTensors, ReadTensors]
) -> list[tuple[AttentionPart, AttentionPart]]:
    """The parts of a call over pages and a ring, in the order they run; none if no kernel reads both."""
    pairs = list(zip(plans, tensors, strict=True))
    if not all(has_attention(plan, num_seqs, each) for plan, each in pairs):
        return []
    of_pages, of_ring = (attention_parts(plan, each.key_cache.device) for plan, each in pairs)
    if not (of_pages and of_ring):
        return []
    parts, target = list(zip(of_pages, of_ring, strict=True)), choosing.target_of(tensors[0].key_cache.device)
    for pages, ring in parts:
        own = pages.plan, ring.plan
        if not _has_workspace(own, joint_places(own, tensors), target, num_seqs, table_blocks(own, tensors)):
            return []
    return parts


@functools.lru_cache(maxsize=4096)
def _has_workspace(
    plans: tuple[AttentionPlan, AttentionPlan],
    places: tuple[PagePlaces, PagePlaces],
    target: kernels.Target,
    num_seqs: int,
    blocks: tuple[int, int],
) -> bool:
    """Whether int32 indexes the workspace of a call over pages and a ring."""
    return _joint_kernels(plans, places, target).why_not(num_seqs, *blocks) is None


def joint_calls(
    plans: tuple[AttentionPlan, AttentionPlan],
    query: torch.Tensor,
    tensors: tuple[ReadTensors, ReadTensors],
    q_lens: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[Call, Call]:
    """The two kernel calls, in order, of a call of one part over pages and a ring; as `attention_calls`.

    `q_lens`, integers `[num_seqs]`, are the numbers of each sequence's query tokens: the last of the query's.
    """
    pages, ring = tensors
    num_seqs, spec = pages.block_table.shape[0], plans[0].cache.spec
    blocks = table_blocks(plans, tensors)
    places = joint_places(plans, tensors)
    decode, merge, workspace = joint_kernels(plans, places, pages.key_cache.device, num_seqs, blocks)
    query = _query(query)
    of_each = [choosing.table(each.block_table, each.num_blocks) for each in tensors]
    lens = [choosing.int32(each.seq_lens, 0, choosing.INT32_MAX) for each in tensors]
    out = query.new_empty((*query.shape[:3], spec.head_size_v))
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    between = _between(query, workspace)
    scales = scale_arrays(plans[0].cache, plans[0].cache.scale_tensors(pages))
    of_pages = lens[0], of_each[0][0], query, pages.key_cache, pages.value_cache, *scales
    rows = (choosing.int32(q_lens, 0, choosing.INT32_MAX),) if query.shape[1] > 1 else ()
    of_ring = lens[1], of_each[1][0], ring.key_cache, ring.value_cache, *rows
    numbers = [min(each.num_blocks, choosing.INT32_MAX) for each in tensors]
    own_counts = num_seqs, blocks[0], numbers[0], of_each[0][1], *_token_strides(query)
    counts = *own_counts, blocks[1], numbers[1], of_each[1][1]
    sink = () if sinks is None else (sinks.contiguous(),)
    return (
        Call(decode, counts, (*of_pages, *of_ring, *between), num_seqs),
        Call(merge, (num_seqs, *blocks), (*lens, *sink, *between, out, lse), num_seqs),
    )


def _between(query: torch.Tensor, workspace: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The workspace of both kernels, on the query's device."""
    partial, partial_lse = (query.new_empty(size, dtype=torch.float32) for size in workspace[:2])
    return partial, partial_lse, query.new_empty(workspace[2], dtype=torch.int32)


@functools.lru_cache(maxsize=1024)
def _joint_kernels(
    plans: tuple[AttentionPlan, AttentionPlan], places: tuple[PagePlaces, PagePlaces], target: kernels.Target
) -> kernels.JointBatch:
    pages, ring = (_kind(plan, each) for plan, each in zip(plans, places, strict=True))
    return kernels.joint_attention_kernels(pages, ring, target)


@functools.lru_cache(maxsize=1024)
def _attention_kernels(plan: AttentionPlan, places: PagePlaces, target: kernels.Target) -> kernels.AnyBatch:
    kind = _kind(plan, places)
    return (kernels.mla_kernels if kind.spec.is_mla else kernels.attention_kernels)(kind, target)


def _kind(plan: AttentionPlan, places: PagePlaces) -> kernels.BatchKind:
    """What the kernels of a plan are compiled for, over pages at these places."""
    keys, *others = page_memory(plan.cache, places.alignments)
    values = others[0] if others else keys
    if (start := places.value_start) is not None:  # from the pages of keys on
        regions = tuple(dataclasses.replace(region, base=start + region.base) for region in values.regions)
        values = dataclasses.replace(keys, regions=regions)
    return kernels.BatchKind(
        plan.cache.spec,
        (keys, values),
        numpy_dtype(plan.dtype),
        plan.num_heads,
        plan.q_len,
        plan.scale_sizes,
        kernels.Softmax(
            sm_scale=plan.sm_scale,
            window=plan.window,
            logits_soft_cap=plan.logits_soft_cap,
            batch_invariant=plan.batch_invariant,
        ),
        plan.has_sinks,
        one_memory=places.value_start is not None,
        scale_pages=scale_memory(plan.cache, places.scale_alignments),
        joined_query=plan.cache.spec.is_mla,
        tree=plan.tree,
    )


def _rows(key_cache: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The keys as the kernels read them: of latents whole rows, which begin with the latents."""
    if not spec.is_mla:
        return key_cache
    row = spec.bytes_per_token // key_cache.element_size()
    return key_cache.as_strided((*key_cache.shape[:3], row), key_cache.stride(), key_cache.storage_offset())


def _operand(query: torch.Tensor, spec: AttentionSpec, decode: kernels.AnyCount) -> torch.Tensor:
    """The query as the kernel reads it: over latents contiguous, in its own dtype or in that of products.

    Rope parts of another dtype than latents have its bits.
    """
    if not spec.is_mla:
        return query
    if not _has_parts(decode):
        return query.contiguous()
    dtype, rope_dtype = map(torch_dtype, kernels.mla_operand_dtypes(spec))
    if dtype is rope_dtype:
        return _clamped(query, dtype).contiguous()
    latents, rope = query.split(spec.part_sizes, dim=-1)
    return torch.cat([_clamped(latents, dtype), _clamped(rope, rope_dtype).contiguous().view(dtype)], dim=-1)


def _has_parts(decode: kernels.AnyCount) -> bool:
    """Whether the kernel reads the query as rows of products, not as a flat array."""
    return len(next(each.array.shape for each in decode.arguments if each.name == "query")) > 1


def _rope_queries(query: torch.Tensor, spec: AttentionSpec, decode: kernels.AnyCount) -> tuple[torch.Tensor, ...]:
    """The rope part of what `_operand` has returned, if a kernel reads it apart."""
    if not spec.part_sizes[-1] or not spec.is_mla or not _has_parts(decode):
        return ()
    return (query.view(torch_dtype(kernels.mla_operand_dtypes(spec)[1]))[..., spec.part_sizes[0] :],)


def _clamped(query: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if query.dtype is dtype:
        return query
    most = torch.finfo(dtype).max
    return query.float().clamp(-most, most).to(dtype)


def _query(query: torch.Tensor) -> torch.Tensor:
    """The query `[num_seqs, q_len, num_heads, head_size]`; a copy if heads are not contiguous or tokens not aligned."""
    _, _, num_heads, head_size = query.shape
    strides = query.stride()
    is_run = (strides[3] == 1 or head_size == 1) and (strides[2] == head_size or num_heads == 1)
    steps = _token_strides(query)
    reach = sum(size * stride for size, stride in zip(query.shape, steps, strict=False))
    places = query.data_ptr(), *(stride * query.element_size() for stride in steps)
    is_aligned = not any(place % kernels.MAX_VECTOR_BYTES for place in places)
    if is_run and is_aligned and reach + num_heads * head_size <= choosing.INT32_MAX:
        return query
    return query.clone(memory_format=torch.contiguous_format)


def _token_strides(query: torch.Tensor) -> tuple[int, int]:
    """Strides between sequences and between tokens, in elements; 0 along a dimension of size 1."""
    a_sequence, a_token = (
        stride if size > 1 else 0 for size, stride in zip(query.shape[:2], query.stride()[:2], strict=True)
    )
    return a_sequence, a_token
