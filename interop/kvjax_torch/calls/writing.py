"""The kernel calls of writes, with and without a rotation."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kvjax import kernels
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.arguments.plan import RopeInputs, RopePlan, WritePlan, WriteTensors
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


def _write_call(plan: WritePlan, tensors: WriteTensors, unique_slots: bool, rotated: _RotatedInputs | None) -> Call:
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
        None if rotated is None else rotated.memory,
        choosing.target_of(key_cache.device),
    )
    last_slot = min(key_cache.shape[0] * plan.cache.spec.block_size, 1 << 31) - 1
    if num_tokens >= kernels.SEARCHED and not unique_slots:
        slot_mapping = only_last_tokens(slot_mapping, last_slot + 1)
    counts, others = (num_tokens, last_slot), ()  # type: tuple[int, ...], tuple[torch.Tensor, ...]
    if rotated is not None:
        counts, others = (*counts, rotated.last_position), rotated.tensors
    both = *(x for x, _ in rows), *(key_cache, value_cache)[:num_parts]
    arrays = (slot_mapping.contiguous(), *both, *others, *scale_arrays(plan.cache, scales))
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


@functools.lru_cache(maxsize=1024)
def _write_kernel(
    plan: WritePlan,
    rows: tuple[tuple[int, int], ...],
    page_alignments: tuple[int, int],
    scale_alignments: ScaleAlignments,
    unique_slots: bool,
    rotated: kernels.RotatedMemory | None,
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
        rotated=rotated,
    )
    return kernels.write_kernel(kind, target)
