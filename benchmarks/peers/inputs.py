"""Inputs that all write peers share, and checks of their results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import workload
from benchmarks.peers.peer import Peer, Run, by_turns
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
        return Run(by_turns(write, batches), lambda _: self.check([cache.kv], [self.expected.kv]), wait)

    def exact_run(self, write: Callable[..., Any], batches: Sequence[Sequence[Any]], cache: KVCache, wait: Any) -> Run:
        """Returns the run of a peer that must store the same bytes as kvjax."""
        return Run(by_turns(write, batches), lambda _: workload.check_same_bits(cache.kv, self.expected.kv), wait)

    def check(self, stored: Sequence[jax.Array], expected: Sequence[jax.Array]) -> dict[str, int]:
        """Compares what is stored after the first batch, and returns how many codes differ."""
        facts: dict[str, int] = {}
        for got, wanted in zip(stored, expected, strict=True):
            if self.job.spec.quant_mode is KVQuantMode.NONE:
                workload.check_same_bits(got, wanted)
            else:
                facts["codes_apart"] = facts.get("codes_apart", 0) + workload.check_codes(got, wanted)
        return facts


type WritePeer = Peer[WriteJob, WriteInputs]


def dense_poisoned(inputs: WriteInputs) -> list[jax.Array]:
    """Returns poisoned dense keys and values in slot order: two arrays `[num_slots, heads, head_size]`."""
    spec = inputs.job.spec
    shape = (inputs.tokens.num_blocks * BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
    return jax.block_until_ready([jnp.full(shape, workload.POISON, spec.array_dtype) for _ in range(2)])


def check_dense(caches: Sequence[jax.Array], inputs: WriteInputs) -> dict[str, Any]:
    """Compares dense keys and values with the expected cache after the first batch."""
    return inputs.check(caches, [inputs.expected.kv[:, half].reshape(each.shape) for half, each in enumerate(caches)])
