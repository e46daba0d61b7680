"""What all who write the same tokens are given, and what their caches are compared with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import workload
from benchmarks.peers.peer import Run, by_turns
from benchmarks.shapes import BLOCK_SIZE
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
        return self.tokens.expected(self.job.spec, self.job.num_tokens)

    def poisoned(self) -> KVCache:
        return self.tokens.poisoned(self.job.spec)

    def run(self, write: Callable[..., Any], batches: Sequence[Sequence[Any]], cache: KVCache, wait: Any) -> Run:
        """What starts such writes into a cache, whose codes may differ a little from those of kvjax."""
        return Run(by_turns(write, batches), lambda _: self.check_paged(cache), wait)

    def exact_run(self, write: Callable[..., Any], batches: Sequence[Sequence[Any]], cache: KVCache, wait: Any) -> Run:
        return Run(by_turns(write, batches), lambda _: workload.check_same_bits(cache.kv, self.expected.kv), wait)

    def check_paged(self, cache: KVCache) -> dict[str, Any]:
        if cache.spec.quant_mode is KVQuantMode.NONE:
            workload.check_same_bits(cache.kv, self.expected.kv)
            return {}
        return workload.check_codes(cache.kv, self.expected.kv)


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
