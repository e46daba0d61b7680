"""Updates of an exact window's ring on CUDA tensors, by themselves or with the write to pages."""

from __future__ import annotations

import torch

from kvjax_torch.arguments.plan import Encoding, RingTensors, WriteTensors
from kvjax_torch.arguments.writes import ring_plan, write_plan
from kvjax_torch.calls import choosing, writing
from kvjax_torch.launch import running


def update(key: torch.Tensor, value: torch.Tensor, ring: RingTensors) -> None:
    """Writes the last tokens of a step's sequences to a ring, in place."""
    running.check_capability(key.get_device())
    plan = ring_plan(key, value, ring)
    if key.shape[0]:
        with choosing.one_at_a_time:
            call = writing.ring_call(plan, key, value, ring)
        running.run(call)


def write(tensors: WriteTensors, encoding: Encoding, unique_slots: bool, ring: RingTensors) -> None:
    """Writes a step's tokens to pages, and the last of its sequences to a ring, in place and by one kernel."""
    running.check_capability(tensors.key.get_device())
    plans = write_plan(tensors, encoding), ring_plan(tensors.key, tensors.value, ring)
    if tensors.key.shape[0]:
        with choosing.one_at_a_time:
            call = writing.write_call_with_ring(plans, tensors, unique_slots, ring)
        running.run(call)
