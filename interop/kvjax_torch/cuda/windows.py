"""Updates of an exact window's ring on CUDA tensors, by themselves or with the write to pages; attention over both."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from kvjax import kernels
from kvjax_torch.arguments.dtypes import has_scale_tensors
from kvjax_torch.arguments.plan import (
    AttentionPlan,
    Encoding,
    RaggedPlan,
    ReadTensors,
    RingTensors,
    WindowPlaces,
    WindowStep,
    WriteTensors,
)
from kvjax_torch.arguments.writes import ring_plan, write_plan
from kvjax_torch.calls import attending, choosing, writing
from kvjax_torch.cuda import ragged, reads
from kvjax_torch.cuda.ragged_step import PackedRows, RaggedStep, Schedule
from kvjax_torch.launch import running


def update(key: torch.Tensor, value: torch.Tensor, ring: RingTensors) -> None:
    """Writes the last tokens of a step's sequences to a ring, in place."""
    running.check_capability(key.get_device())
    plan = ring_plan(key, value, ring)
    if key.shape[0]:
        with choosing.one_at_a_time:
            call = writing.ring_call(plan, key, value, ring)
        running.run(call)
        increment_version((ring.key_cache, ring.value_cache))


def write(tensors: WriteTensors, encoding: Encoding, unique_slots: bool, ring: RingTensors) -> None:
    """Writes a step's tokens to pages, and the last of its sequences to a ring, in place and by one kernel."""
    running.check_capability(tensors.key.get_device())
    plans = write_plan(tensors, encoding), ring_plan(tensors.key, tensors.value, ring)
    if tensors.key.shape[0]:
        with choosing.one_at_a_time:
            call = writing.write_call_with_ring(plans, tensors, unique_slots, ring)
        running.run(call)
        scales = (tensors.k_scale, tensors.v_scale) if has_scale_tensors(tensors.k_scale) else ()
        increment_version((ring.key_cache, ring.value_cache, tensors.key_cache, tensors.value_cache, *scales))


def places(step: WindowStep) -> WindowPlaces:
    """Where the tokens of a step are."""
    running.check_capability(step.seq_lens.get_device())
    num_seqs, room = len(step.seq_lens), step.room

    def empty(*shape: int) -> torch.Tensor:
        return step.seq_lens.new_empty(shape, dtype=torch.int32)

    lengths = empty(num_seqs), empty(num_seqs), empty(num_seqs), empty(num_seqs)
    found = WindowPlaces(*lengths, empty(num_seqs, step.columns))
    if room is not None:
        found = found._replace(old=empty(num_seqs, room.num_old), slots=empty(room.num_tokens))
    with choosing.one_at_a_time:
        kernel = kernels.window_places_kernel(with_room=room is not None)
    given = step.seq_lens, step.cu_q_lens, step.window_rows
    arrays = *(choosing.int32(x, -1, choosing.INT32_MAX) for x in given), *(x for x in found if x is not None)
    counts = num_seqs, step.num_rows, step.size, step.blocks_per_row, step.columns, step.decode_q_len, *(room or ())
    running.run(running.Call(kernel, counts, arrays, num_seqs))
    return found


class BothCaches(NamedTuple):
    """A step that attends over pages and over a ring of other tokens; its results are those of two calls, merged.

    Attributes:
      plans: of the calls over pages and over the ring; sinks are those of the latter.
      query: `[num_tokens, num_heads, head_size]`.
      tensors: what either reads.
      cu_q_lens: as in `ragged_paged_attention`.
      places: where its tokens are.
      sinks: float32 `[num_heads]`, or None.
    """

    plans: tuple[RaggedPlan, RaggedPlan]
    query: torch.Tensor
    tensors: tuple[ReadTensors, ReadTensors]
    cu_q_lens: torch.Tensor
    places: WindowPlaces
    sinks: torch.Tensor | None

    def over(self, keys: torch.Tensor, values: torch.Tensor) -> BothCaches:
        """The same with a copy of the ring's rows."""
        pages, ring = self.tensors
        return self._replace(tensors=(pages, ring._replace(key_cache=keys, value_cache=values)))

    @property
    def decoding(self) -> tuple[AttentionPlan, AttentionPlan]:
        """The plans of sequences that decode."""
        pages, ring = (plan.attention for plan in self.plans)
        return dataclasses.replace(pages, has_sinks=ring.has_sinks), ring


Parts = list[tuple[attending.AttentionPart, attending.AttentionPart]]
"""The parts of a call, over pages and over a ring."""


def parts_of(both: BothCaches) -> Parts | None:
    """What the kernels that read both are called for with rows that decode, if any do.

    None if no kernel serves those, or if either call is refused or empty.
    """
    with_prompts = zip(both.plans, both.tensors, strict=True)
    refused = any(ragged.why_refused(plan, both.query, each) is not None for plan, each in with_prompts)
    if refused or not (both.query.numel() and all(each.block_table.numel() for each in both.tensors)):
        return None
    running.check_capability(both.query.get_device())
    if not both.decoding[0].q_len:
        return []
    with choosing.one_at_a_time:
        return attending.joint_parts(both.decoding, len(both.places.q_lens), both.tensors) or None


def attend(both: BothCaches, parts: Parts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Attends with rows that decode by one kernel for both, and with those of prompts by one where it serves both.

    Returns results and log-sum-exps, to be merged: one pair if it has the results of all rows. If prompts attend to the
    two caches separately, there are two pairs: over the ring, with the results of rows that decode; and over pages,
    where other rows see nothing. `parts` are those of `parts_of`.
    """
    results = ragged.results_of(both.plans[1], both.query)
    near = _call(both, 1, both.sinks, results)
    if not near.plan.max_prompts:
        _divide_and_decode(both, parts, near.with_kernels())
        return [results]
    if near.by_kernels and near.of_prompts.attention.window is not None and not both.plans[0].query_quantization:
        far = _call(both, 0, both.sinks, results)
        if far.by_kernels:
            far = far.with_kernels(near)
            schedule = far.schedule()  # what it stores for rows that decode, the other one does too
            far.attend_with_prompts(schedule, _divide_and_decode(both, parts, near))
            return [results]
    near = near.with_kernels()
    near.attend_with_prompts(_divide_and_decode(both, parts, near))
    of_pages = ragged.results_of(both.plans[0], both.query)
    far = _call(both, 0, None, of_pages).with_kernels()
    ragged.see_nothing(*of_pages, None)
    far.attend_with_prompts(far.schedule())
    return [results, of_pages]


def _divide_and_decode(both: BothCaches, parts: Parts, near: ragged.RaggedCall) -> Schedule:
    """Divides a step by its call over the ring, and attends with rows that decode."""
    schedule = near.schedule()
    if schedule.packed is not None:
        near.place(schedule.packed, _decode(both, parts, schedule.packed))
    return schedule


def _call(
    both: BothCaches, number: int, sinks: torch.Tensor | None, results: tuple[torch.Tensor, torch.Tensor]
) -> ragged.RaggedCall:
    plan, tensors = both.plans[number], both.tensors[number]
    attention = dataclasses.replace(plan.attention, has_sinks=sinks is not None)
    # All rows of a sequence are packed together, whatever the window.
    packed = dataclasses.replace(attention, window=None)
    step = RaggedStep(both.query, both.query, tensors, both.cu_q_lens, sinks, *results)
    return ragged.RaggedCall.divided(dataclasses.replace(plan, attention=attention), packed, step)


def _decode(both: BothCaches, parts: Parts, packed: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of packed rows: `[n, num_heads, head_size_v]` and float32 `[n, num_heads]`."""
    plans, sinks, q_lens = both.decoding, both.sinks, both.places.q_lens
    pages, ring = both.tensors
    # A sequence that decodes has tokens in the ring: those of its query.
    tensors = pages._replace(seq_lens=both.places.decoding_lens), ring._replace(seq_lens=packed.lens)
    _compile(parts, tensors)
    if len(parts) == 1:
        results = reads.run_both(*attending.joint_calls(plans, packed.rows, tensors, q_lens, sinks))
    else:

        def attend_part(number: int, rows: torch.Tensor, own_sinks: torch.Tensor | None) -> reads.Results:
            of_pages, of_ring = parts[number]
            own = [each._replace(seq_lens=reads.lengths_of_part(plans[0], of_pages, each.seq_lens)) for each in tensors]
            own_q_lens = (q_lens - (plans[0].q_len - of_pages.tokens.stop)).clamp(0, rows.shape[1])
            own_plans = of_pages.plan, of_ring.plan
            return reads.run_both(*attending.joint_calls(own_plans, rows, (own[0], own[1]), own_q_lens, own_sinks))

        results = reads.by_parts(plans[0], [part for part, _ in parts], packed.rows, sinks, attend_part)
    return results[0].flatten(0, 1), results[1].flatten(0, 1)


def _compile(parts: Parts, tensors: tuple[ReadTensors, ReadTensors]) -> None:
    """Compiles the kernels of the parts of a call for batches of every size."""
    every: list[kernels.AnyCount] = []
    device = tensors[0].key_cache.device
    with choosing.one_at_a_time:
        for of_pages, of_ring in parts:
            plans = of_pages.plan, of_ring.plan
            places = attending.joint_places(plans, tensors)
            for least in kernels.ATTENTION_BATCHES:
                every += attending.joint_kernels(plans, places, device, least, (1, 1))[:2]
    running.compile_once(tuple(every), device)
