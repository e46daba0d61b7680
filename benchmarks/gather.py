"""Times `gather_kv` of whole sequences into bfloat16, compared with its alternatives, listed in `PEERS`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax import lax

import kvjax
from benchmarks import bars, compare, output, shapes, workload
from benchmarks.peers import in_torch
from benchmarks.peers.peer import Peer, Run, by_turns, own_peers
from benchmarks.shapes import BLOCK_SIZE, Case
from kvjax import AttentionSpec, CacheLayout, KVCache, KVCacheDType, KVQuantMode
from kvjax.ops.rows import decode_rows, encode_rows

CASES = output.define_some("cases", shapes.CASES_BY_NAME, "shapes to time gathers of (default: llama-3.1-8b)")
OUT_DTYPE = workload.INPUT_DTYPE


@dataclasses.dataclass(frozen=True)
class GatherJob:
    """One gather to time: `num_seqs` sequences of equal length."""

    case: Case
    dtype: KVCacheDType
    layout: CacheLayout
    num_seqs: int
    seq_len: int

    @property
    def spec(self) -> AttentionSpec:
        return self.case.spec(self.dtype, self.layout)

    @property
    def blocks_a_seq(self) -> int:
        return -(-self.seq_len // BLOCK_SIZE)

    @property
    def subject(self) -> dict[str, Any]:
        sizes = {"num_seqs": self.num_seqs, "seq_len": self.seq_len, "num_tokens": self.num_seqs * self.seq_len}
        return {**self.case.subject(self.dtype, self.layout), **sizes}

    @property
    def dense_bytes(self) -> int:
        elements = self.spec.num_kv_heads * (self.spec.head_size + self.spec.head_size_v)
        return self.num_seqs * self.blocks_a_seq * BLOCK_SIZE * elements * OUT_DTYPE.itemsize

    @property
    def bytes_moved(self) -> int:
        """The minimum bytes to read and write: stored tokens, block table, lengths, and the dense result."""
        numbers = (self.blocks_a_seq + 1) * np.dtype(np.int32).itemsize
        return self.num_seqs * (self.seq_len * self.spec.bytes_per_token + numbers) + self.dense_bytes

    @property
    def num_tables(self) -> int:
        """The number of block tables that calls rotate through, so that the pages they read are not in L2."""
        return min(max(workload.sizes().rotation_bytes // self.dense_bytes, 1), workload.MAX_BATCHES)


class GatherInputs:
    """Inputs of one job: a full cache and the block tables of its sequences."""

    def __init__(self, job: GatherJob) -> None:
        self.job, spec = job, job.spec
        shape = (job.num_tables, job.num_seqs, job.blocks_a_seq)
        tables = np.random.default_rng(1).permutation(int(np.prod(shape))).reshape(shape).astype(np.int32)
        self.tokens = workload.random_tokens(spec, tables.size * BLOCK_SIZE)
        slots = (tables[..., None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)).reshape(-1)
        cache = KVCache.allocate(spec, tables.size)
        self.cache = workload.write_in_xla(*self.tokens, cache, slots, **workload.scales())
        self.tables: list[jax.Array] = jax.device_put([*tables])
        self.seq_lens = jax.device_put(np.full(job.num_seqs, job.seq_len, np.int32))

    def check(self, gathered: Any) -> None:
        """Compares the keys and values of the first table with their encoded and decoded tokens.

        The expected values do not depend on any page.
        """
        job, scales = self.job, workload.scales().values()
        for got, x, scale, part in zip(gathered, self.tokens, scales, job.spec.dtype.parts, strict=True):
            rows = x[: job.num_seqs * job.blocks_a_seq * BLOCK_SIZE]
            decoded = _rounded(_encoded(rows, part, scale), part, scale, OUT_DTYPE)
            expected = decoded.reshape(got.shape)
            workload.check_same_bits(got, expected.at[:, job.seq_len :].set(0))


# Two programs, so that XLA cannot elide the conversion round trip.
_encoded = jax.jit(encode_rows, static_argnums=1)
_rounded = jax.jit(decode_rows, static_argnums=(1, 3))


def kvjax_run(inputs: GatherInputs, *, implementation: str | None) -> Run:
    gather = jax.jit(functools.partial(kvjax.gather_kv, dtype=OUT_DTYPE, implementation=implementation))
    sets = [(inputs.cache, table, inputs.seq_lens) for table in inputs.tables]
    compiled = gather.lower(*sets[0], **workload.scales()).compile()
    call = by_turns(functools.partial(compiled, **workload.scales()), sets)
    return Run(call, inputs.check, facts={"temporary_bytes": workload.temporary_bytes(compiled)})


def xla_gather_run(inputs: GatherInputs) -> Run:
    spec = inputs.job.spec

    def gather(kv: jax.Array, table: jax.Array, k_scale: jax.Array, v_scale: jax.Array) -> list[jax.Array]:
        pages = kv[table]  # [num_seqs, blocks, 2, ...]
        if spec.layout is CacheLayout.HND:
            pages = jnp.swapaxes(pages, 3, 4)
        halves = [pages[:, :, half].reshape(table.shape[0], -1, *pages.shape[-2:]) for half in range(2)]
        if spec.quant_mode is KVQuantMode.NONE:
            return [half.astype(OUT_DTYPE) for half in halves]
        codes = [lax.bitcast_convert_type(half, spec.storage_dtype).astype(jnp.float32) for half in halves]
        return [(half * scale).astype(OUT_DTYPE) for half, scale in zip(codes, (k_scale, v_scale), strict=True)]

    sets = [(inputs.cache.kv, table, *workload.scales().values()) for table in inputs.tables]
    compiled = jax.jit(gather).lower(*sets[0]).compile()
    return Run(by_turns(compiled, sets), inputs.check, facts={"temporary_bytes": workload.temporary_bytes(compiled)})


def torch_run(inputs: GatherInputs) -> Run:
    import torch

    job, spec = inputs.job, inputs.job.spec
    tables = [(in_torch.borrow(table).long().flatten(),) for table in inputs.tables]
    shape = (job.num_seqs, -1, job.case.num_kv_heads, job.case.head_size)
    halves = [*zip(in_torch.token_pages(inputs.cache), workload.SCALES, strict=True)]
    stored = None if spec.quant_mode is KVQuantMode.NONE else getattr(torch, spec.storage_dtype.name)

    def gather(table: Any) -> list[Any]:
        taken = [(half.index_select(0, table), scale) for half, scale in halves]
        rows = [rows.view(stored).float() * scale if stored else rows for rows, scale in taken]
        return [each.to(torch.bfloat16).reshape(shape) for each in rows]

    def check(gathered: list[Any]) -> None:
        inputs.check([jax.dlpack.from_dlpack(half.contiguous()) for half in gathered])

    return Run(by_turns(gather, tables), check, in_torch.wait)


def _is_simple(job: GatherJob) -> bool:
    """Returns whether indexing pages suffices: no stored scales, and sequences that fill their last page."""
    return not job.spec.stores_scales and job.seq_len % BLOCK_SIZE == 0


KVJAX, KVJAX_IN_XLA = own_peers(GatherJob, kvjax_run)
XLA_GATHER = Peer[GatherJob, GatherInputs]("XLA gather", xla_gather_run, serves=_is_simple)
INDEX_SELECT = in_torch.torch_peer("torch index_select", torch_run, _is_simple)
PEERS = (KVJAX, KVJAX_IN_XLA, XLA_GATHER, INDEX_SELECT)

CHOSEN = compare.define_peers(PEERS)


class GatherBenchmark(output.Program):
    def test_sizes(self) -> None:
        gpu = (bars.GATHER_SIZE, (1, 16_384), (256, 128))
        sizes: tuple[tuple[int, int], ...] = output.by_device(gpu=gpu, host=((4, 256), (1, 1_024)), smoke=((2, 32),))
        cases = CASES.value or [shapes.LLAMA_8B]
        jobs = [
            GatherJob(case, dtype, layout, *size)
            for case, size, layout, dtype in itertools.product(cases, sizes, CacheLayout, shapes.TIMED_DTYPES)
            if layout is CacheLayout.NHD or size is sizes[0]  # in both layouts only the first size
        ]
        peers = compare.present(self.results, PEERS, CHOSEN.value)
        compare.compare_all(self, "gather", jobs, peers, GatherInputs)


if __name__ == "__main__":
    absltest.main()
