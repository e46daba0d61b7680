"""Times `concat_and_cache_mla` and `gather_mla` of latents, in JAX and from torch, next to a copy of as many bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import kvjax
from benchmarks import compare, output, workload
from benchmarks.latents import MLA_BLOCK_SIZE, RANK, ROPE, spec_of
from benchmarks.peers import in_torch
from benchmarks.peers.peer import Peer, Run, by_turns, own_peers
from kvjax import KVCache, KVCacheDType, MLAAttentionSpec

SCALE, NUM_SEQS = 0.037, 4

DTYPES = output.define_dtypes(kvjax.MLA_KV_CACHE_DTYPES)
NUM_TOKENS = output.define_numbers("tokens", "tokens of a call (default: 64 to 65,536)", least=NUM_SEQS)


@dataclasses.dataclass(frozen=True)
class LatentsJob:
    """One call of `num_tokens` tokens: a write into random slots, or a gather of `NUM_SEQS` sequences."""

    dtype: KVCacheDType
    num_tokens: int

    @property
    def spec(self) -> MLAAttentionSpec:
        return spec_of(self.dtype)

    @property
    def subject(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def bytes_moved(self) -> int:
        """The minimum bytes to read and write: tokens in 16 bits, stored tokens, and a slot of each."""
        dense = (RANK + ROPE) * workload.INPUT_DTYPE.itemsize
        return self.num_tokens * (self.spec.bytes_per_token + dense + np.dtype(np.int32).itemsize)

    @property
    def num_blocks(self) -> int:
        blocks_a_call = NUM_SEQS * -(-self.num_tokens // (NUM_SEQS * MLA_BLOCK_SIZE))
        return max(workload.sizes().cache_bytes // self.spec.page_size_bytes, blocks_a_call)


class LatentsInputs:
    """A poisoned cache, tokens and slots, of which calls take different ones."""

    def __init__(self, job: LatentsJob) -> None:
        self.job = job
        rng = np.random.default_rng(0)
        distinct = rng.standard_normal(workload.DISTINCT_ELEMENTS, np.float32).astype(workload.INPUT_DTYPE)
        turns = workload.sizes().rotation_bytes // job.bytes_moved
        self.turns = min(max(turns, 1), workload.MAX_BATCHES)
        rows = np.resize(distinct, (job.num_tokens * self.turns, RANK + ROPE))
        slots = np.resize(rng.permutation(job.num_blocks * MLA_BLOCK_SIZE).astype(np.int32), len(rows))
        pairs = (np.array_split(x, self.turns) for x in (rows, slots))
        self.batches = [
            jax.device_put((each[:, :RANK].copy(), each[:, RANK:].copy(), own))
            for each, own in zip(*pairs, strict=True)
        ]
        self.tables = [rng.permutation(job.num_blocks).astype(np.int32) for _ in range(self.turns)]

    def poisoned(self) -> KVCache:
        spec = self.job.spec
        return KVCache(jnp.full(spec.cache_shape(self.job.num_blocks), workload.POISON, spec.array_dtype), spec)

    def written(self, implementation: str | None) -> Any:
        write = functools.partial(
            kvjax.concat_and_cache_mla, scale=SCALE, unique_slots=True, implementation=implementation
        )
        return jax.jit(write, donate_argnums=2)

    def check_write(self, cache: jax.Array) -> None:
        """Compares a cache after the first write with XLA's."""
        kv_c, k_pe, slots = self.batches[0]
        workload.check_same_bits(cache, self.written("xla")(kv_c, k_pe, self.poisoned(), slots).kv)

    @functools.cached_property
    def full(self) -> KVCache:
        """A cache in which every token is written."""
        cache, write = self.poisoned(), self.written("xla")
        slots, size = np.arange(self.job.num_blocks * MLA_BLOCK_SIZE, dtype=np.int32), self.job.num_tokens
        kv_c, k_pe, _ = self.batches[0]
        for start in range(0, len(slots), size):
            cache = write(
                kv_c, k_pe, cache, np.pad(own := slots[start : start + size], (0, size - len(own)), constant_values=-1)
            )
        return cache

    def ranges(self) -> list[tuple[jax.Array, jax.Array]]:
        """Block tables and cumulative lengths of gathers."""
        bounds = np.linspace(0, self.job.num_tokens, NUM_SEQS + 1).astype(np.int32)
        blocks = -(-int(np.diff(bounds).max()) // MLA_BLOCK_SIZE)
        tables = (np.resize(table, (NUM_SEQS, blocks)) for table in self.tables)
        return [jax.device_put((table, bounds)) for table in tables]

    def gathered(self, implementation: str | None) -> Any:
        read = functools.partial(
            kvjax.gather_mla,
            num_tokens=self.job.num_tokens,
            scale=SCALE,
            dtype=workload.INPUT_DTYPE,
            implementation=implementation,
        )
        return jax.jit(read)

    def check_gather(self, gathered: Any) -> None:
        """Compares the results of the first gather with XLA's."""
        for got, expected in zip(gathered, self.gathered("xla")(self.full, *self.ranges()[0]), strict=True):
            workload.check_same_bits(got, expected)


def write_run(inputs: LatentsInputs, *, implementation: str | None) -> Run:
    state, write = [inputs.poisoned()], inputs.written(implementation)

    def call(number: int) -> jax.Array:
        kv_c, k_pe, slots = inputs.batches[number % inputs.turns]
        state[0] = write(kv_c, k_pe, state[0], slots)
        return state[0].kv

    return Run(call, inputs.check_write)


def torch_write_run(inputs: LatentsInputs) -> Run:
    import torch

    import kvjax_torch

    job, cache = inputs.job, inputs.poisoned()
    kv_cache, batches = in_torch.borrow(cache.kv), [[*map(in_torch.borrow, batch)] for batch in inputs.batches]
    scale = torch.tensor(SCALE, device=kv_cache.device)

    def write(kv_c: Any, k_pe: Any, slots: Any) -> None:
        kvjax_torch.concat_and_cache_mla(kv_c, k_pe, kv_cache, slots, job.dtype, scale, unique_slots=True)

    return Run(by_turns(write, batches), lambda _: inputs.check_write(cache.kv), in_torch.wait)


def gather_run(inputs: LatentsInputs, *, implementation: str | None) -> Run:
    read, sets = inputs.gathered(implementation), [(inputs.full, *each) for each in inputs.ranges()]
    return Run(by_turns(read, sets), inputs.check_gather)


def torch_gather_run(inputs: LatentsInputs) -> Run:
    import torch

    import kvjax_torch

    job, cache = inputs.job, in_torch.borrow(inputs.full.kv)
    ranges = [[*map(in_torch.borrow, each)] for each in inputs.ranges()]
    dst = torch.empty(job.num_tokens, RANK + ROPE, dtype=torch.bfloat16, device=cache.device)
    scale = torch.tensor(SCALE, device=cache.device)

    def read(table: Any, bounds: Any) -> None:
        kvjax_torch.gather_and_maybe_dequant_cache(
            cache, dst, table, bounds, None, job.num_tokens, job.dtype, scale, None
        )

    def check(_: Any) -> None:
        inputs.check_gather([jax.dlpack.from_dlpack(part.contiguous()) for part in dst.split([RANK, ROPE], dim=1)])

    return Run(by_turns(read, ranges), check, in_torch.wait)


def _peers(run: Any, torch_run: Any) -> tuple[Peer[LatentsJob, LatentsInputs], ...]:
    from_torch: Peer[LatentsJob, LatentsInputs] = in_torch.torch_peer("kvjax_torch", torch_run, own=True)
    return *own_peers(LatentsJob, run), from_torch


WRITES, GATHERS = _peers(write_run, torch_write_run), _peers(gather_run, torch_gather_run)
PEERS = compare.define_peers(WRITES)


class LatentsBenchmark(output.Program):
    def _measure(self, operation: str, peers: Any) -> None:
        counts = NUM_TOKENS.value or output.by_device(gpu=(64, 4_096, 65_536), host=(64, 1_024), smoke=(8,))
        dtypes = DTYPES.value or kvjax.MLA_KV_CACHE_DTYPES[2:]
        jobs = [LatentsJob(*each) for each in itertools.product(dtypes, counts)]
        compare.compare_all(self, operation, jobs, compare.present(self.results, peers, PEERS.value), LatentsInputs)

    def test_writes(self) -> None:
        self._measure("mla write", WRITES)

    def test_gathers(self) -> None:
        self._measure("mla gather", GATHERS)


if __name__ == "__main__":
    absltest.main()
