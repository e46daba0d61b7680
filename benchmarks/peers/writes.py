"""Who writes tokens into a paged cache: kvjax, and what a user would pick instead. `PEERS` lists them all."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from benchmarks import workload
from benchmarks.peers import cuda
from benchmarks.peers.in_jax import KVJAX, KVJAX_IN_XLA, XLA_SCATTER
from benchmarks.peers.in_torch import INDEX_COPY, INDEX_PUT
from benchmarks.peers.inputs import WriteInputs
from benchmarks.peers.libraries import FLASHINFER, VLLM
from benchmarks.peers.peer import Peer, Run
from benchmarks.workload import WriteJob


def cuda_run(inputs: WriteInputs, *, threads: cuda.ThreadCount) -> Run:
    cache, scales = inputs.poisoned(), workload.scales()
    jax.block_until_ready((cache, inputs.batches, scales))

    def call(number: int) -> None:
        cuda.reshape_and_cache(*inputs.batches[inputs.batch_number(number)], cache, **scales, threads=threads)

    def check(_: Any) -> None:
        workload.check_same_bits(cache.kv, inputs.expected.kv)

    return Run(call, check, cuda.synchronize)


CUDA = Peer[WriteJob, WriteInputs](
    "CUDA",
    functools.partial(cuda_run, threads=cuda.vllm_threads),
    serves=lambda job: cuda.serves(job.spec),
    why_missing=cuda.why_missing,
)
CUDA_FITTED = dataclasses.replace(
    CUDA, name="CUDA fitted", prepare=functools.partial(cuda_run, threads=cuda.fitted_threads)
)


PEERS = (KVJAX, KVJAX_IN_XLA, XLA_SCATTER, INDEX_COPY, INDEX_PUT, CUDA, CUDA_FITTED, VLLM, FLASHINFER)
