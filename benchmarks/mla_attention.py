"""Times `mla_paged_attention` of decode steps, its peers and a copy of as many bytes; and `ragged_attention`."""

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
from benchmarks.latents import MLA_ROWS, MLARow
from benchmarks.peers import attends_mla, in_torch
from benchmarks.peers.attends_mla import MLAJob
from benchmarks.peers.peer import Peer, Run
from kvjax import KVCacheDType

PROMPT_SIZE, PROMPT_SIZE_V = 192, 128
ROW_WORDS = "expected heads x query tokens - sequences x tokens, such as 16x1-64x8192, with commas between them"
DEFAULT_DTYPES = KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.FP8_DS_MLA, KVCacheDType.NVFP4

ROWS = output.define_words("rows", MLARow.of, ROW_WORDS, "rows to time (default: all of this device)")
DTYPES = output.define_dtypes(kvjax.MLA_KV_CACHE_DTYPES)
PEERS = compare.define_peers(attends_mla.PEERS)


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
    rows = (job.q_len, PROMPT_SIZE), (job.kv_len, PROMPT_SIZE), (job.kv_len, PROMPT_SIZE_V)
    sizes = [(length, job.num_heads, size) for length, size in rows]
    arrays = [jax.random.normal(key, size, workload.INPUT_DTYPE) for key, size in zip(keys, sizes, strict=True)]
    return [*arrays, *(jnp.array([0, length], jnp.int32) for length in (job.q_len, job.kv_len))]


def _check_prompt(arrays: list[jax.Array], causal: bool, out: Any) -> None:
    reference = functools.partial(kvjax.ragged_attention, causal=causal, implementation="xla")
    expected = np.asarray(jax.jit(reference)(*arrays), np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=0.02, atol=0.01)


def _prepare_prompt(arrays: list[jax.Array], causal: bool, implementation: str | None) -> Run:
    attend = jax.jit(functools.partial(kvjax.ragged_attention, causal=causal, implementation=implementation))
    return Run(lambda _: attend(*arrays), functools.partial(_check_prompt, arrays, causal))


def _prepare_torch_prompt(arrays: list[jax.Array], causal: bool) -> Run:
    import kvjax_torch

    tensors = [in_torch.borrow(array) for array in arrays]

    def check(out: Any) -> None:
        _check_prompt(arrays, causal, out.float().cpu())

    return Run(lambda _: kvjax_torch.ragged_attention(*tensors, causal=causal), check, in_torch.wait)


class MLAAttentionBenchmark(output.Program):
    def test_prompts(self) -> None:
        sizes = ((16, 2048, 2048, True), (16, 2048, 8192, False), (16, 8192, 8192, True), (128, 2048, 2048, True))
        jobs = [PromptJob(*each) for each in output.by_device(gpu=sizes, host=sizes[:1], smoke=((2, 70, 70, True),))]
        implementation = output.IMPLEMENTATION.value
        for causal in (True, False):
            prepare = functools.partial(_prepare_prompt, causal=causal, implementation=implementation)
            in_jax = Peer[PromptJob, list[jax.Array]]("kvjax", prepare, own=True)
            prepare_torch = functools.partial(_prepare_torch_prompt, causal=causal)
            from_torch: Peer[PromptJob, list[jax.Array]] = in_torch.torch_peer("kvjax_torch", prepare_torch, own=True)
            some, peers = [job for job in jobs if job.causal is causal], [in_jax, from_torch]
            compare.compare_all(self, "mla prompts", some, compare.present(self.results, peers, None), _prompt_arrays)

    def test_rows(self) -> None:
        host, smoke = (MLARow(16, 1, 2, 512),), (MLARow(2, 1, 2, 100),)
        rows = ROWS.value or output.by_device(gpu=MLA_ROWS, host=host, smoke=smoke)
        jobs = [*itertools.starmap(MLAJob, itertools.product(rows, DTYPES.value or DEFAULT_DTYPES))]
        attends_mla.measure(self, "mla attention", jobs, compare.present(self.results, attends_mla.PEERS, PEERS.value))


if __name__ == "__main__":
    absltest.main()
