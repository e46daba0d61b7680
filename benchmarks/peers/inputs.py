"""What all who write the same tokens are given, and what their caches are compared with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import compare, output, workload
from benchmarks.output import Measurement
from benchmarks.peers.peer import Peer
from benchmarks.shapes import BLOCK_SIZE, Case, Slots
from benchmarks.workload import WriteJob
from kvjax import KVCache, KVQuantMode


@dataclasses.dataclass
class WriteInputs:
    """What all peers of one job are given: tokens in batches, and the cache that the first batch must leave behind."""

    job: WriteJob
    tokens: workload.Tokens
    batches: Sequence[workload.Batch]

    @functools.cached_property
    def expected(self) -> KVCache:
        """The cache after the first write."""
        return self.tokens.expected(self.job.spec, self.job.num_tokens)

    def poisoned(self) -> KVCache:
        """A new cache to write into."""
        return self.tokens.poisoned(self.job.spec)

    def batch_number(self, number: int) -> int:
        """Which batch call `number` writes."""
        return number % len(self.batches)


def dense_poisoned(inputs: WriteInputs) -> list[jax.Array]:
    """Keys and values of a new cache whose tokens lie slot after slot: two arrays `[num_slots, heads, head_size]`."""
    spec = inputs.job.spec
    shape = (inputs.tokens.num_blocks * BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
    return jax.block_until_ready([jnp.full(shape, workload.POISON, spec.array_dtype) for _ in range(2)])


def check_dense(caches: Sequence[jax.Array], inputs: WriteInputs) -> dict[str, Any]:
    """Compares such arrays with what the first batch must leave behind."""
    facts = {"codes_apart": 0}
    for half, got in enumerate(caches):
        expected = inputs.expected.kv[:, half].reshape(got.shape)
        if inputs.job.spec.quant_mode is KVQuantMode.NONE:
            workload.check_same_bits(got, expected)
        else:
            facts["codes_apart"] += workload.check_codes(got, expected)["codes_apart"]
    return facts


def check_paged(cache: KVCache, inputs: WriteInputs) -> dict[str, Any]:
    """Compares a cache with what the first batch must leave behind."""
    if cache.spec.quant_mode is KVQuantMode.NONE:
        workload.check_same_bits(cache.kv, inputs.expected.kv)
        return {}
    return workload.check_codes(cache.kv, inputs.expected.kv)


def measure(
    test: output.Program, operation: str, jobs: Sequence[WriteJob], peers: Sequence[Peer[WriteJob, WriteInputs]]
) -> dict[WriteJob, dict[str, Measurement]]:
    """Measures writes as `compare_all` does. What neighbouring jobs share is made once: their tokens and slots."""

    def shared(job: WriteJob) -> tuple[Case, Slots, int | None]:
        return job.case, job.slots, job.num_blocks

    most: dict[tuple[Case, Slots, int | None], int] = {}
    for job in jobs:
        most[shared(job)] = max(job.num_tokens, most.get(shared(job), 0))

    @functools.lru_cache(maxsize=1)
    def tokens(case: Case, slots: Slots, num_blocks: int | None) -> workload.Tokens:
        max_tokens = most[case, slots, num_blocks]
        pages = num_blocks or workload.default_pages(case, max_tokens)
        return workload.Tokens(case, max_tokens, pages, workload.sizes().rotation_bytes, slots)

    @functools.lru_cache(maxsize=1)
    def batches(num_tokens: int, of: workload.Tokens) -> list[workload.Batch]:
        return of.batches(num_tokens)

    def make(job: WriteJob) -> WriteInputs:
        return WriteInputs(job, tokens(*shared(job)), batches(job.num_tokens, tokens(*shared(job))))

    def why_too_large(job: WriteJob) -> str | None:
        return job.why_too_large(most[shared(job)])

    return compare.compare_all(test, operation, jobs, peers, make, why_too_large)
