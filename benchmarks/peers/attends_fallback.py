"""Attention to prompts by the fallback that serves GPUs without the prompt kernel.

A negative `sm_scale` takes the fallback on every GPU. The query is negated too, so the results are those of the kernel.
"""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import Future
from typing import Any

from benchmarks import output
from benchmarks.peers import attends
from benchmarks.peers.attention_inputs import AttentionInputs, AttentionJob, attention
from benchmarks.peers.peer import Run


def negative_scale(job: AttentionJob) -> float:
    return -(job.row.head_size**-0.5)


def negated(inputs: AttentionInputs) -> AttentionInputs:
    """Returns inputs whose query is negated, and whose expected results are those of `inputs`."""
    expected, inputs = inputs.expected, copy.copy(inputs)
    inputs.query, inputs.expected = -inputs.query, expected
    return inputs


def jax_run(inputs: AttentionInputs) -> Run:
    implementation, scale = output.IMPLEMENTATION.value, negative_scale(inputs.job)
    return attends.kvjax_run(negated(inputs), implementation=implementation, sm_scale=scale)


def jax_ahead(job: AttentionJob) -> list[Future[Any]]:
    return [attention(job, output.IMPLEMENTATION.value, sm_scale=negative_scale(job))]


def torch_run(inputs: AttentionInputs) -> Run:
    return attends.step_in_torch_run(negated(inputs), sm_scale=negative_scale(inputs.job))


PEERS = (
    attends.KVJAX,
    attends.IN_TORCH,
    dataclasses.replace(
        attends.KVJAX, name="kvjax, fallback", prepare=jax_run, serves=attends.IN_TORCH.serves, ahead=jax_ahead
    ),
    dataclasses.replace(attends.IN_TORCH, name="kvjax_torch, fallback", prepare=torch_run),
)
