"""Writes into a paged cache: kvjax and its alternatives, listed in `PEERS`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import compare, output, workload
from benchmarks.peers import cuda
from benchmarks.peers.in_jax import KVJAX, KVJAX_ANY_SLOTS, KVJAX_IN_XLA, XLA_SCATTER
from benchmarks.peers.in_torch import INDEX_COPY, INDEX_PUT
from benchmarks.peers.inputs import WriteInputs
from benchmarks.peers.libraries import FLASHINFER
from benchmarks.peers.peer import Peer, Run
from benchmarks.shapes import Case, Slots
from benchmarks.workload import WriteJob


def cuda_run(inputs: WriteInputs, *, threads: cuda.ThreadCount) -> Run:
    cache, scales = inputs.poisoned(), workload.scales()
    jax.block_until_ready((cache, inputs.batches, scales))
    batches = [(*batch, cache) for batch in inputs.batches]
    options: dict[str, Any] = {**scales, "threads": threads}
    write = functools.partial(cuda.reshape_and_cache, **options)
    return inputs.exact_run(write, batches, cache, cuda.synchronize)


CUDA = Peer[WriteJob, WriteInputs](
    "CUDA",
    functools.partial(cuda_run, threads=cuda.vllm_threads),
    serves=lambda job: cuda.serves(job.spec),
    why_missing=cuda.why_missing,
)
CUDA_FITTED = dataclasses.replace(
    CUDA, name="CUDA fitted", prepare=functools.partial(cuda_run, threads=cuda.fitted_threads)
)


PEERS = (KVJAX, KVJAX_ANY_SLOTS, KVJAX_IN_XLA, XLA_SCATTER, INDEX_COPY, INDEX_PUT, CUDA, CUDA_FITTED, FLASHINFER)


def measure(
    test: output.Program, operation: str, jobs: Sequence[WriteJob], peers: Sequence[Peer[WriteJob, WriteInputs]]
) -> None:
    """Measures writes with `compare_all`. Consecutive jobs share their tokens and slots."""

    def shared(job: WriteJob) -> tuple[Case, Slots, int | None]:
        return job.case, job.slots, job.num_blocks

    most: dict[tuple[Case, Slots, int | None], int] = {}
    for job in jobs:
        most[shared(job)] = max(job.num_tokens, most.get(shared(job), 0))

    @functools.lru_cache(maxsize=1)
    def tokens(case: Case, slots: Slots, num_blocks: int | None) -> workload.Tokens:
        return workload.Tokens(case, most[case, slots, num_blocks], slots, num_blocks)

    @functools.lru_cache(maxsize=1)
    def batches(num_tokens: int, of: workload.Tokens) -> list[workload.Batch]:
        return of.batches(num_tokens)

    def make(job: WriteJob) -> WriteInputs:
        return WriteInputs(job, tokens(*shared(job)), batches(job.num_tokens, tokens(*shared(job))))

    compare.compare_all(test, operation, jobs, peers, make)
