"""The kernel calls of writes: by themselves, with a rotation, and with the update of an exact window's ring."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kvjax import kernels
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.arguments.plan import RingTensors, RopeInputs, RopePlan, WritePlan, WriteTensors
from kvjax_torch.calls import choosing
from kvjax_torch.calls.arrays import (
    ScaleAlignments,
    page_alignment,
    page_memory,
    runs,
    scale_alignments,
    scale_arrays,
    scale_memory,
)
from kvjax_torch.launch.running import Call


def write_call(plan: WritePlan, tensors: WriteTensors, unique_slots: bool) -> Call:
    """The write of a `reshape_and_cache_flash` or `concat_and_cache_mla` call that `plan` describes."""
    return _write_call(plan, tensors, unique_slots, None)


def ring_call(plan: WritePlan, key: torch.Tensor, value: torch.Tensor, ring: RingTensors) -> Call:
    """The update of a ring with the tokens of a step, at least one; `plan` is that of the ring's pages."""
    inputs = _RingInputs.of(plan, key, value, ring)
    kernel = _ring_kernel(inputs.kind, choosing.target_of(key.device))
    return Call(kernel, (key.shape[0], *inputs.counts), inputs.tensors, inputs.counts[0])


def write_call_with_ring(
    plans: tuple[WritePlan, WritePlan], tensors: WriteTensors, unique_slots: bool, ring: RingTensors
) -> Call:
    """The write of a step's tokens, at least one, to pages and to a ring, which `plans` describe."""
    inputs = _RingInputs.of(plans[1], tensors.key, tensors.value, ring)
    return _write_call(plans[0], tensors, unique_slots, inputs)


def rope_call(plan: RopePlan, tensors: WriteTensors, rope: RopeInputs, unique_slots: bool) -> tuple[Call, torch.Tensor]:
    """The kernel call of a write with rotation that `plan` describes and `has_rope` accepts; and rotated queries.

    There may be more heads than `plan` has.
    """
    query, alignment = runs(rope.query, tensors.slot_mapping.shape[0])
    rotation = kernels.Rotation(
        numpy_dtype(plan.write.dtype), query.shape[2], plan.rot_dim, plan.is_neox, plan.table_dtype.itemsize
    )
    memory = kernels.RotatedMemory(
        rotation,
        query.shape[1],
        kernels.RowMemory(rotation.dtype, query.stride(0), alignment),
        numpy_dtype(plan.position_dtype),
        numpy_dtype(plan.table_dtype),
    )
    table = rope.cos_sin_cache.contiguous()
    if table.data_ptr() % kernels.MAX_VECTOR_BYTES:
        table = table.clone()
    result = query.new_empty(query.shape)
    rotated = _RotatedInputs(memory, (query, rope.positions.contiguous(), table, result), table.shape[0] - 1)
    return _write_call(plan.write, tensors, unique_slots, rotated), result


def has_rope(plan: RopePlan, query: torch.Tensor) -> bool:
    """Whether a kernel can rotate and write: it takes elements of two bytes and even head sizes."""
    return plan.write.dtype.itemsize == 2 and not query.shape[2] % 2 and query.numel() > 0


class _RotatedInputs(NamedTuple):
    """The rotation that a write does first.

    Attributes:
      memory: the kernel's description of its arrays.
      tensors: its arrays.
      last_position: index of the last row of cosines and sines.
    """

    memory: kernels.RotatedMemory
    tensors: tuple[torch.Tensor, ...]
    last_position: int


class _RingInputs(NamedTuple):
    """A ring that a kernel updates.

    Attributes:
      kind: the kernel's description of it.
      tensors: keys, values, the ring's pages, and the step's sequences.
      counts: the numbers of sequences and of rows.
    """

    kind: kernels.RingKind
    tensors: tuple[torch.Tensor, ...]
    counts: tuple[int, int]

    @classmethod
    def of(cls, plan: WritePlan, key: torch.Tensor, value: torch.Tensor, ring: RingTensors) -> _RingInputs:
        """Those of a step's tokens."""
        pages, most, num_tokens = (ring.key_cache, ring.value_cache), choosing.INT32_MAX, key.shape[0]
        num_seqs, num_rows = ring.seq_lens.shape[0], ring.key_cache.shape[0] // ring.blocks_per_row
        rows = [runs(x, num_tokens) for x in (key, value)]
        kind = _ring_kind(
            plan,
            tuple((x.stride(0), alignment) for x, alignment in rows),
            (page_alignment(pages[0]), page_alignment(pages[1])),
            ring.blocks_per_row,
            (ring.kept, kernels.ring_tokens(ring.kept, num_tokens)),
        )
        sequences = (
            choosing.int32(ring.seq_lens, 0, most),
            choosing.int32(ring.cu_q_lens, 0, most),
            choosing.int32(ring.window_rows, -1, num_rows),
        )
        return cls(kind, (*(x for x, _ in rows), *pages, *sequences), (num_seqs, num_rows))


@functools.lru_cache(maxsize=1024)
def _ring_kind(
    plan: WritePlan,
    rows: tuple[tuple[int, int], ...],
    page_alignments: tuple[int, int],
    blocks_per_row: int,
    tokens: tuple[int, int],
) -> kernels.RingKind:
    """The update of a ring with `rows`; `tokens` are those of a sequence and of a program."""
    keys, values = (kernels.RowMemory(numpy_dtype(plan.dtype), *memory) for memory in rows)
    key_pages, value_pages = page_memory(plan.cache, page_alignments)
    return kernels.RingKind(plan.cache.spec, (keys, values), (key_pages, value_pages), blocks_per_row, *tokens)


@functools.lru_cache(maxsize=1024)
def _ring_kernel(kind: kernels.RingKind, target: kernels.Target) -> kernels.AnyCount:
    return kernels.ring_kernel(kind, target)


def _write_call(
    plan: WritePlan, tensors: WriteTensors, unique_slots: bool, also: _RotatedInputs | _RingInputs | None
) -> Call:
    key, value, key_cache, value_cache, slot_mapping, _, _ = tensors
    num_tokens, num_parts = slot_mapping.shape[0], plan.cache.num_parts
    rows = [runs(x, num_tokens) for x in (key, value)[:num_parts]]
    scales = plan.cache.scale_tensors(tensors)
    kernel = _write_kernel(
        plan,
        tuple((x.stride(0), alignment) for x, alignment in rows),
        (page_alignment(key_cache), page_alignment(value_cache)),
        scale_alignments(plan.cache, scales),
        unique_slots,
        None if also is None else also[0],
        choosing.target_of(key_cache.device),
    )
    last_slot = min(key_cache.shape[0] * plan.cache.spec.block_size, 1 << 31) - 1
    if num_tokens >= kernels.SEARCHED and not unique_slots:
        slot_mapping = only_last_tokens(slot_mapping, last_slot + 1)
    both = *(x for x, _ in rows), *(key_cache, value_cache)[:num_parts]
    before, after = (slot_mapping.contiguous(), *both), scale_arrays(plan.cache, scales)
    counts = num_tokens, last_slot
    if isinstance(also, _RingInputs):
        amount = num_tokens, also.counts[0]
        return Call(kernel, (*counts, *also.counts), (*before, *after, *also.tensors), amount)
    if also is not None:
        return Call(kernel, (*counts, also.last_position), (*before, *also.tensors, *after), num_tokens)
    return Call(kernel, counts, (*before, *after), num_tokens)


def only_last_tokens(slot_mapping: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Replaces repeated slots by -1 except for the last token of each, for writes of `kernels.SEARCHED` tokens or more.

    Runs on torch's current stream, without waiting for it.
    """
    token = torch.arange(slot_mapping.shape[0], dtype=torch.int32, device=slot_mapping.device)
    # One index for all slots below 0, and one for all from num_slots on.
    index = slot_mapping.to(torch.int64).clamp(-1, num_slots) + 1
    last_token = token.new_empty(num_slots + 2).scatter_reduce_(0, index, token, reduce="amax", include_self=False)
    return torch.where(last_token[index] == token, slot_mapping, -1)


@functools.lru_cache(maxsize=1024)
def _write_kernel(
    plan: WritePlan,
    rows: tuple[tuple[int, int], ...],
    page_alignments: tuple[int, int],
    scale_alignments: ScaleAlignments,
    unique_slots: bool,
    also: kernels.RotatedMemory | kernels.RingKind | None,
    target: kernels.Target,
) -> kernels.AnyCount:
    """The kernel for keys and values with `rows`, the strides of tokens and the alignments of each."""
    kind = kernels.WriteKind(
        plan.cache.spec,
        tuple(kernels.RowMemory(numpy_dtype(plan.dtype), *memory) for memory in rows),
        page_memory(plan.cache, page_alignments),
        numpy_dtype(plan.slot_dtype),
        plan.scale_sizes,
        unique_slots=unique_slots,
        scale_pages=scale_memory(plan.cache, scale_alignments),
        rotated=also if isinstance(also, kernels.RotatedMemory) else None,
        ring=also if isinstance(also, kernels.RingKind) else None,
    )
    return kernels.write_kernel(kind, target)
