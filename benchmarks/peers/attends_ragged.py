"""Who attends in a step of a server, prompts beside decodes, to the pages of a cache. `PEERS` lists them all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax

from benchmarks import workload
from benchmarks.bars import NO_CASCADE
from benchmarks.peers import attends, attends_flashinfer, in_torch
from benchmarks.peers.attention_inputs import OWN_ERROR, RaggedInputs, RaggedJob, paged
from benchmarks.peers.peer import Peer, Run
from kvjax import CacheLayout, KVCacheDType


def no_cascade_run(inputs: RaggedInputs) -> Run:
    """Every sequence reads the tokens that all share."""
    [compiling] = _no_cascade_ahead(inputs.job)
    compiled = compiling.result()

    def call(number: int) -> jax.Array:
        cache = inputs.caches[inputs.cache_number(number)]
        return compiled(inputs.query, cache, inputs.table, inputs.seq_lens, **workload.scales())

    return Run(call, functools.partial(inputs.check, most=OWN_ERROR))


def _no_cascade_ahead(job: RaggedJob) -> Sequence[Future[Any]]:
    return [paged(job, job.query, None)]


def _attend_in_torch(job: RaggedJob, *tensors: Any) -> Any:
    import kvjax_torch

    stored: tuple[Any, ...] = job.dtype.value, *in_torch.float_scales()
    limits: dict[str, Any] = job.limits
    return kvjax_torch.ragged_paged_attention(*tensors, *stored, **limits)


def torch_run(inputs: RaggedInputs) -> Run:
    caches = [in_torch.borrow(cache.kv).unbind(1) for cache in inputs.caches]
    query, *numbers = [in_torch.borrow(each) for each in (inputs.query, *inputs.numbers)]

    def call(number: int) -> Any:
        return _attend_in_torch(inputs.job, query, *caches[inputs.cache_number(number)], *numbers)

    def check(attended: Any) -> dict[str, float]:
        return inputs.check(attended.float().cpu().numpy(), most=OWN_ERROR)

    return Run(call, check, in_torch.wait)


def _is_whole(job: RaggedJob) -> bool:
    """Whether it is causal attention of dense bfloat16 sequences, each with all its tokens as the query."""
    row = job.row
    return job.dtype is KVCacheDType.BFLOAT16 and row.q_len == row.seq_len and row.num_prompts is None


PEERS: tuple[Peer[RaggedJob, RaggedInputs], ...] = (
    Peer("kvjax", attends.KVJAX.prepare, why_missing=attends.KVJAX.why_missing, ahead=attends.KVJAX.ahead, own=True),
    Peer(NO_CASCADE, no_cascade_run, serves=lambda job: job.row.prefix_len > 0, ahead=_no_cascade_ahead, own=True),
    Peer(
        "cuDNN",
        attends.dense_run,
        serves=_is_whole,
        why_missing=attends.CUDNN.why_missing,
        ahead=attends.CUDNN.ahead,
    ),
    Peer(
        "kvjax_torch",
        torch_run,
        serves=lambda job: not job.row.prefix_len and job.row.layout is CacheLayout.NHD,
        why_missing=in_torch.why_missing,
        own=True,
    ),
    *attends_flashinfer.PREFILL.values(),
)
