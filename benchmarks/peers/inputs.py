"""What all who write the same tokens are given, and what their caches are compared with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import workload
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
        """The cache after the first write."""
        return self.tokens.expected(self.job.spec, self.job.num_tokens)

    def poisoned(self) -> KVCache:
        return self.tokens.poisoned(self.job.spec)

    def batch_number(self, number: int) -> int:
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
