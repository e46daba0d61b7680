"""Inputs that all write peers share, and checks of their results."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from benchmarks import workload
from benchmarks.peers.peer import Peer
from benchmarks.shapes import BLOCK_SIZE
from benchmarks.workload import WriteJob
from kvjax import KVCache, KVQuantMode


@dataclasses.dataclass
class WriteInputs:
    """Inputs of one job: batches of its tokens, and the expected cache after the first batch."""

    job: WriteJob
    tokens: workload.Tokens

    @functools.cached_property
    def batches(self) -> list[workload.Batch]:
        return self.tokens.batches(self.job.num_tokens)

    @functools.cached_property
    def expected(self) -> KVCache:
        return self.tokens.expected(self.job.spec, self.job.num_tokens)

    def poisoned(self) -> KVCache:
        return self.tokens.poisoned(self.job.spec)

    def dense_poisoned(self) -> list[jax.Array]:
        """Returns poisoned dense keys and values in slot order: two arrays `[num_slots, heads, head_size]`."""
        spec = self.job.spec
        shape = (self.tokens.num_blocks * BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
        return jax.block_until_ready([jnp.full(shape, workload.POISON, spec.array_dtype) for _ in range(2)])

    def check(self, *stored: jax.Array, exact: bool = False) -> dict[str, int]:
        """Compares a cache's array, or dense keys and values, after the first batch with what they must be.

        Unless a peer is `exact`, its codes may differ slightly from kvjax's. Returns how many do.
        """
        kv = self.expected.kv
        expected = [kv] if len(stored) == 1 else [kv[:, half].reshape(each.shape) for half, each in enumerate(stored)]
        if exact or self.job.spec.quant_mode is KVQuantMode.NONE:
            for got, wanted in zip(stored, expected, strict=True):
                workload.check_same_bits(got, wanted)
            return {}
        return {"codes_apart": sum(map(workload.check_codes, stored, expected))}


type WritePeer = Peer[WriteJob, WriteInputs]
