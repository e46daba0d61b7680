"""Latents (MLA) of CUDA tensors on torch's current stream: writes, and attention with padded query tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvjax import kernels
from kvjax_torch.arguments.plan import (
    AttentionPlan,
    GatherPlan,
    RaggedPlan,
    RangeTensors,
    ReadTensors,
    RopeInputs,
    RopePlan,
    WritePlan,
    WriteTensors,
)
from kvjax_torch.calls import choosing, gathering, writing
from kvjax_torch.cuda import ragged, ragged_step, reads
from kvjax_torch.eager import dense
from kvjax_torch.eager.rotation import rotate
from kvjax_torch.launch import running

RESULT_BYTES = 8
"""Alignment of the memory that the kernels over latents store results to, up to four elements at once."""


def write(plan: WritePlan, tensors: WriteTensors, unique_slots: bool) -> None:
    """`concat_and_cache_mla` of CUDA tensors that `plan` describes."""
    running.check_capability(tensors.key_cache.get_device())
    with choosing.one_at_a_time:
        call = writing.write_call(plan, tensors, unique_slots)
    running.run(call)


def rotate_and_write(
    plan: RopePlan, tensors: WriteTensors, rope: RopeInputs, unique_slots: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`concat_and_cache_mla_rope_fused` of CUDA tensors that `plan` describes; returns rotated queries and rope keys.

    The kernel returns rope keys as one more head of the query. For float32 and odd sizes torch rotates.
    """
    heads = torch.cat([rope.query, tensors.value], dim=1)
    if writing.has_rope(plan, heads):
        running.check_capability(tensors.key_cache.get_device())
        with choosing.one_at_a_time:
            call, heads = writing.rope_call(plan, tensors, rope._replace(query=heads), unique_slots)
        running.run(call)
    else:
        heads = rotate(heads, *rope[1:])
        write(plan.write, tensors._replace(value=heads[:, -1:]), unique_slots)
    return heads[:, :-1], heads[:, -1:]


def compile_kernels(
    writes: Sequence[tuple[WritePlan, WriteTensors]],
    gather: tuple[GatherPlan, RangeTensors],
    attended: Sequence[tuple[AttentionPlan, ReadTensors]],
    unique_slots: bool,
) -> None:
    """Compiles the kernels of calls that plans and tensors describe, several at once."""
    device = gather[1].key_cache.device
    running.check_capability(device.index)
    whole, every = [], list[kernels.AnyCount]()
    alone = [(ragged_step.decoding_alone(plan), x) for plan, x in attended if ragged_step.are_alone(plan)]
    for plan, tensors in (*attended, *alone):
        parts = reads.parts_of(plan, 1, tensors)
        every += [kernel for part, _, _ in parts for kernel in reads.kernels_of_part(part, tensors)]
        if not parts:  # what torch attends to is gathered
            whole.append((dense.as_gather(plan), tensors))
    for plan, _ in attended:
        every += ragged_step.kernels_of(plan, None)
    with choosing.one_at_a_time:
        calls = [writing.write_call(*each, unique_slots) for each in writes]
        places = gathering.places_call(*gather)
        # `rows_call` may copy the tokens that it is given, and the kernel that finds them has not run.
        found = (torch.zeros_like(x) for x in places.tensors[-2:])
        calls += [places, gathering.rows_call(gather[0], gather[1].at(*found))]
        calls += [*(gathering.gather_call(*each) for each in whole)]
    running.compile_all([*every, *(call.kernel for call in calls)], device)


def attend(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_paged_attention` of CUDA tensors that `plan` describes, into `out` if it is given; there are no sinks."""
    if out is None or not out.data_ptr() % RESULT_BYTES:
        return reads.attend(plan, query, tensors, sinks, out)
    results, lse = reads.attend(plan, query, tensors, sinks)
    return out.copy_(results), lse


def attend_ragged(
    plan: RaggedPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    cu_q_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_ragged_paged_attention` of CUDA tensors that `plan` describes, into `out` if it is given.

    Every sequence is padded to the same number of query tokens, its own last, so that the host need not know their
    numbers. This number is a power of two, so that few kernels are compiled where `max_q_len` varies. All sequences
    thus decode, and none is a prompt.
    """
    attention = dataclasses.replace(plan.attention, q_len=1 << (plan.max_q_len - 1).bit_length())
    return ragged.attend(RaggedPlan(attention, plan.max_q_len, 0), query, tensors, cu_q_lens, sinks, out)
