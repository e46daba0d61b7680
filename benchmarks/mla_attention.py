"""Times `mla_paged_attention` of decode steps, next to a copy of as many bytes as it reads, and `ragged_attention`."""

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
from benchmarks.peers.peer import Peer, Run
from kvjax import KVCacheDType, MLAAttentionSpec

BLOCK_SIZE, RANK, ROPE, SM_SCALE = 64, 512, 64, 192**-0.5
PROMPT_SIZE, PROMPT_SIZE_V = 192, 128
CHECKED = 2
"""Sequences whose results are compared with those of XLA."""

DTYPES = output.define_dtypes(kvjax.MLA_KV_CACHE_DTYPES)
HEADS = output.define_numbers("heads", "query heads (default: 16, 64, 128)", least=1)
Q_LENS = output.define_numbers("q_lens", "query tokens of a sequence (default: 1)", least=1)


@dataclasses.dataclass(frozen=True)
class MLAJob:
    """One call: `num_seqs` sequences of equal length."""

    dtype: KVCacheDType
    num_heads: int
    q_len: int
    num_seqs: int
    seq_len: int

    @property
    def spec(self) -> MLAAttentionSpec:
        return MLAAttentionSpec(BLOCK_SIZE, RANK, ROPE, dtype=self.dtype)

    @property
    def subject(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "dtype": self.dtype}

    @property
    def bytes_moved(self) -> int:
        """The minimum bytes to read and write: stored tokens, queries and results."""
        rows = self.num_seqs * self.q_len * self.num_heads
        return self.num_seqs * self.seq_len * self.spec.bytes_per_token + rows * 2 * (2 * RANK + ROPE)


class MLAInputs:
    """A full cache, the block table of its sequences in any order, and queries."""

    def __init__(self, job: MLAJob) -> None:
        self.job, spec = job, job.spec
        blocks = -(-job.seq_len // BLOCK_SIZE)
        table = np.random.default_rng(1).permutation(job.num_seqs * blocks).reshape(job.num_seqs, blocks)
        cache = kvjax.KVCache.allocate(spec, table.size, k_scale=jnp.float32(0.002))

        @functools.partial(jax.jit, donate_argnums=0)
        def write(cache: kvjax.KVCache, slots: jax.Array, key: jax.Array) -> kvjax.KVCache:
            tokens = jax.random.normal(key, (slots.size, RANK + ROPE), workload.INPUT_DTYPE)
            return kvjax.concat_and_cache_mla(tokens[:, :RANK], tokens[:, RANK:], cache, slots, unique_slots=True)

        for seq, row in enumerate(table):
            slots = (row[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1).astype(np.int32)
            cache = write(cache, slots, jax.random.key(seq))
        self.cache, self.table = cache, jax.device_put(table.astype(np.int32))
        self.lens = jax.device_put(np.full(job.num_seqs, job.seq_len, np.int32))
        query = jax.random.normal(jax.random.key(99), (job.num_seqs, job.q_len, job.num_heads, RANK + ROPE))
        query = query.astype(workload.INPUT_DTYPE)
        self.query = query[..., :RANK], query[..., RANK:]


def _prepare(inputs: MLAInputs, implementation: str | None) -> Run:
    attend = jax.jit(functools.partial(kvjax.mla_paged_attention, sm_scale=SM_SCALE, implementation=implementation))
    args = *inputs.query, inputs.cache, inputs.table, inputs.lens

    def check(out: jax.Array) -> None:
        some = [x[:CHECKED] for x in (*inputs.query, inputs.table, inputs.lens)]
        reference = functools.partial(kvjax.mla_paged_attention, sm_scale=SM_SCALE, implementation="xla")
        expected = np.asarray(jax.jit(reference)(*some[:2], inputs.cache, *some[2:]), np.float32)
        np.testing.assert_allclose(np.asarray(out[:CHECKED], np.float32), expected, rtol=0.02, atol=0.01)

    return Run(lambda _: attend(*args), check)


@dataclasses.dataclass(frozen=True)
class PromptJob:
    """A chunk of one prompt over keys of 192 and values of 128: its own tokens, or as many of its context as given."""

    num_heads: int
    q_len: int
    kv_len: int
    causal: bool

    @property
    def subject(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def bytes_moved(self) -> int:
        """Queries, keys, values and results."""
        return 2 * (PROMPT_SIZE + PROMPT_SIZE_V) * self.num_heads * (self.q_len + self.kv_len)


def _prompt_arrays(job: PromptJob) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (job.q_len, PROMPT_SIZE), (job.kv_len, PROMPT_SIZE), (job.kv_len, PROMPT_SIZE_V)
    sizes = [(length, job.num_heads, size) for length, size in shapes]
    arrays = [jax.random.normal(key, size, workload.INPUT_DTYPE) for key, size in zip(keys, sizes, strict=True)]
    return [*arrays, *(jnp.array([0, length], jnp.int32) for length in (job.q_len, job.kv_len))]


def _prepare_prompt(arrays: list[jax.Array], causal: bool, implementation: str | None) -> Run:
    attend = jax.jit(functools.partial(kvjax.ragged_attention, causal=causal, implementation=implementation))

    def check(out: jax.Array) -> None:
        reference = functools.partial(kvjax.ragged_attention, causal=causal, implementation="xla")
        expected = np.asarray(jax.jit(reference)(*arrays), np.float32)
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=0.02, atol=0.01)

    return Run(lambda _: attend(*arrays), check)


class MLAAttentionBenchmark(output.Program):
    def test_prompts(self) -> None:
        shapes = ((16, 2048, 2048, True), (16, 2048, 8192, False), (16, 8192, 8192, True), (128, 2048, 2048, True))
        jobs = [PromptJob(*each) for each in output.by_device(gpu=shapes, host=shapes[:1], smoke=((2, 70, 70, True),))]
        implementation = output.IMPLEMENTATION.value
        for causal in (True, False):
            prepare = functools.partial(_prepare_prompt, causal=causal, implementation=implementation)
            peers = [Peer[PromptJob, list[jax.Array]]("kvjax", prepare, own=True)]
            some = [job for job in jobs if job.causal is causal]
            compare.compare_all(self, "mla prompts", some, peers, _prompt_arrays)

    def test_rows(self) -> None:
        heads = HEADS.value or output.by_device(gpu=(16, 64, 128), host=(16,), smoke=(2,))
        q_lens = Q_LENS.value or (1,)
        size = output.by_device(gpu=(64, 8_192), host=(2, 512), smoke=(2, 100))
        dtypes = DTYPES.value or kvjax.MLA_KV_CACHE_DTYPES[1:]
        jobs = [MLAJob(*each, *size) for each in itertools.product(dtypes, heads, q_lens)]
        chosen = output.IMPLEMENTATION.value
        peers = [Peer[MLAJob, MLAInputs]("kvjax", functools.partial(_prepare, implementation=chosen), own=True)]
        compare.compare_all(self, "mla attention", jobs, peers, MLAInputs)


if __name__ == "__main__":
    absltest.main()
