"""Inputs that all write peers share, and checks of their results."""

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
    """Inputs of one job: batches of tokens, and the expected cache after the first batch."""

    job: WriteJob
    tokens: workload.Tokens
    batches: Sequence[workload.Batch]

    @functools.cached_property
    def expected(self) -> KVCache:
        return self.tokens.expected(self.job.spec, self.job.num_tokens)

    def poisoned(self) -> KVCache:
        return self.tokens.poisoned(self.job.spec)

    def run(self, write: Callable[..., Any], batches: Sequence[Sequence[Any]], cache: KVCache, wait: Any) -> Run:
        """Returns the run of a peer whose codes may differ slightly from kvjax's."""
        return Run(by_turns(write, batches), lambda _: self.check_paged(cache), wait)

    def exact_run(self, write: Callable[..., Any], batches: Sequence[Sequence[Any]], cache: KVCache, wait: Any) -> Run:
        """Returns the run of a peer that must store the same bytes as kvjax."""
        return Run(by_turns(write, batches), lambda _: workload.check_same_bits(cache.kv, self.expected.kv), wait)

    def check_paged(self, cache: KVCache) -> dict[str, Any]:
        if cache.spec.quant_mode is KVQuantMode.NONE:
            workload.check_same_bits(cache.kv, self.expected.kv)
            return {}
        return workload.check_codes(cache.kv, self.expected.kv)


def dense_poisoned(inputs: WriteInputs) -> list[jax.Array]:
    """Returns poisoned dense keys and values in slot order: two arrays `[num_slots, heads, head_size]`."""
    spec = inputs.job.spec
    shape = (inputs.tokens.num_blocks * BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
    return jax.block_until_ready([jnp.full(shape, workload.POISON, spec.array_dtype) for _ in range(2)])


def check_dense(caches: Sequence[jax.Array], inputs: WriteInputs) -> dict[str, Any]:
    """Compares dense keys and values with the expected cache after the first batch."""
    facts = {"codes_apart": 0}
    for half, got in enumerate(caches):
        expected = inputs.expected.kv[:, half].reshape(got.shape)
        if inputs.job.spec.quant_mode is KVQuantMode.NONE:
            workload.check_same_bits(got, expected)
        else:
            facts["codes_apart"] += workload.check_codes(got, expected)["codes_apart"]
    return facts
