"""Attention over the pages of latents (MLA): kvjax and its alternatives, listed in `PEERS`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import compare, output, workload
from benchmarks.latents import MLA_BLOCK_SIZE, RANK, ROPE, MLARow, spec_of
from benchmarks.peers import attends_flashinfer
from benchmarks.peers.attention_inputs import OWN_ERROR, PEER_ERROR, CheckedInputs, compiling, indices
from benchmarks.peers.in_torch import borrow, torch_peer
from benchmarks.peers.peer import Peer, Run, own_peers
from kvjax import KVCache, KVCacheDType, MLAAttentionSpec

BFLOAT16, FP8, FP8_DS_MLA = KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.FP8_DS_MLA
SM_SCALE = 192**-0.5
SCALE = 0.01  # the layer's, of dtypes that have one
SPARSE_HEADS = 64  # the fewest of FlashMLA's kernel for sparse attention


@dataclasses.dataclass(frozen=True)
class MLAJob:
    """One call of attention over latents to time."""

    row: MLARow
    dtype: KVCacheDType

    @property
    def spec(self) -> MLAAttentionSpec:
        return spec_of(self.dtype)

    @property
    def subject(self) -> dict[str, Any]:
        """The fields that identify the job in tables and files. Bars in microseconds depend on the device."""
        device = jax.devices()[0].device_kind
        return {"case": self.row.name, **dataclasses.asdict(self.row), "dtype": self.dtype, "device": device}

    @property
    def blocks_a_seq(self) -> int:
        return -(-self.row.seq_len // MLA_BLOCK_SIZE)

    @property
    def bytes_moved(self) -> int:
        """The minimum bytes to read and write: stored tokens, queries and results."""
        row = self.row
        rows = row.num_seqs * row.q_len * row.num_heads
        return row.num_seqs * row.seq_len * self.spec.bytes_per_token + rows * 2 * (2 * RANK + ROPE)

    def empty_cache(self) -> KVCache:
        return KVCache.allocate(self.spec, self.row.num_seqs * self.blocks_a_seq, k_scale=jnp.float32(SCALE))


class MLAInputs(CheckedInputs):
    """A full cache, the block table of its sequences in any order, and queries."""

    def __init__(self, job: MLAJob) -> None:
        self.job, row = job, job.row
        self.result_shape, self.sampled = (row.num_seqs, row.q_len, row.num_heads, RANK), np.asarray([0, -1])
        table = np.random.default_rng(1).permutation(row.num_seqs * job.blocks_a_seq).astype(np.int32)
        table = table.reshape(row.num_seqs, -1)
        self.cache = job.empty_cache()
        for seq, blocks in enumerate(table):
            self.cache = _filled(self.cache, blocks, jax.random.key(seq))
        self.table, self.lens = jax.device_put((table, np.full(row.num_seqs, row.seq_len, np.int32)))
        query = jax.random.normal(jax.random.key(99), (*self.result_shape[:-1], RANK + ROPE))
        query = query.astype(workload.INPUT_DTYPE)
        self.query = query[..., :RANK], query[..., RANK:]

    @functools.cached_property
    def expected(self) -> np.ndarray:
        query = [x[self.sampled].astype(jnp.float32) for x in self.query]
        numbers = self.table[self.sampled], self.lens[self.sampled]
        return np.asarray(reference(self.job).result()(*query, self.cache, *numbers), np.float64)

    def in_torch(self) -> list[Any]:
        """Returns queries without positions, rotated queries, the cache's array, table and lengths as tensors."""
        return [*map(borrow, (*self.query, self.cache.kv, self.table, self.lens))]


@functools.partial(jax.jit, donate_argnums=0)
def _filled(cache: KVCache, blocks: jax.Array, key: jax.Array) -> KVCache:
    slots = (blocks[:, None] * MLA_BLOCK_SIZE + jnp.arange(MLA_BLOCK_SIZE, dtype=jnp.int32)).reshape(-1)
    tokens = jax.random.normal(key, (slots.size, RANK + ROPE), workload.INPUT_DTYPE)
    return kvjax.concat_and_cache_mla(tokens[:, :RANK], tokens[:, RANK:], cache, slots, unique_slots=True)


@functools.cache
def attention(job: MLAJob, implementation: str | None) -> Future[Any]:
    """Compiles kvjax's attention for a job: `(q_nope, q_pe, cache, table, lens)`."""
    return _compiling(job, job.row.num_seqs, workload.INPUT_DTYPE, implementation)


@functools.cache
def reference(job: MLAJob) -> Future[Any]:
    """Compiles attention in XLA for float32 queries of the sampled sequences."""
    return _compiling(job, 2, np.dtype(np.float32), "xla")


def _compiling(job: MLAJob, num_seqs: int, dtype: np.dtype, implementation: str | None) -> Future[Any]:
    shape = num_seqs, job.row.q_len, job.row.num_heads
    query = [jax.ShapeDtypeStruct((*shape, size), dtype) for size in (RANK, ROPE)]
    attend = functools.partial(kvjax.mla_paged_attention, sm_scale=SM_SCALE, implementation=implementation)
    numbers = indices(num_seqs, job.blocks_a_seq), indices(num_seqs)
    return compiling(attend, *query, jax.eval_shape(job.empty_cache), *numbers)


def kvjax_run(inputs: MLAInputs, *, implementation: str | None) -> Run:
    compiled = attention(inputs.job, implementation).result()
    args = *inputs.query, inputs.cache, inputs.table, inputs.lens
    return Run(lambda _: compiled(*args), functools.partial(inputs.check, most=OWN_ERROR))


def _build_flashinfer(dtype: KVCacheDType) -> None:
    import torch
    from flashinfer.mla import get_batch_mla_module  # type: ignore[import-not-found]

    types = torch.bfloat16, attends_flashinfer.stored_dtype(dtype), torch.bfloat16, torch.int32
    get_batch_mla_module("fa3", *types, RANK, ROPE, False)


def flashinfer_run(inputs: MLAInputs) -> Run:
    """Runs FlashInfer's wrapper, planned beforehand. It reads latents and rope keys as two views of the same rows."""
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    job, row = inputs.job, inputs.job.row
    attends_flashinfer.wait_for((_build_flashinfer, job.dtype))
    q_nope, q_pe, cache, table, lens = inputs.in_torch()
    cache = cache.view(attends_flashinfer.stored_dtype(job.dtype))
    workspace = torch.zeros(attends_flashinfer.WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    seqs = torch.arange(row.num_seqs + 1, dtype=torch.int32, device=cache.device)
    wrapper.plan(
        qo_indptr=seqs * row.q_len,
        kv_indptr=seqs * job.blocks_a_seq,
        kv_indices=table.flatten(),
        kv_len_arr=lens,
        num_heads=row.num_heads,
        head_dim_ckv=RANK,
        head_dim_kpe=ROPE,
        page_size=MLA_BLOCK_SIZE,
        causal=row.q_len > 1,
        sm_scale=SM_SCALE,
        q_data_type=q_nope.dtype,
        kv_data_type=cache.dtype,
    )
    given = {"q_nope": q_nope.flatten(0, 1), "q_pe": q_pe.flatten(0, 1)}
    given |= zip(("ckv_cache", "kpe_cache"), cache.split([RANK, ROPE], dim=-1), strict=True)
    given |= {"ckv_scale": SCALE, "kpe_scale": SCALE} if job.dtype is FP8 else {}
    attend = functools.partial(wrapper.run, **given, out=torch.empty_like(given["q_nope"]))
    return inputs.run_in_torch(lambda _: attend(), most=PEER_ERROR)


def vllm_run(inputs: MLAInputs) -> Run:
    """Runs FlashAttention-3 with heads of 64, the rope keys, and values of 512, as vLLM does, scheduled beforehand."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    row = inputs.job.row
    q_nope, q_pe, cache, table, lens = inputs.in_torch()
    values, rope_keys = cache.unsqueeze(-2).split([RANK, ROPE], dim=-1)
    cu_q_lens = torch.arange(row.num_seqs + 1, dtype=torch.int32, device=cache.device) * row.q_len
    sizes = {"max_seqlen_q": row.q_len, "max_seqlen_k": row.seq_len, "cu_seqlens_q": cu_q_lens, "causal": True}
    metadata = get_scheduler_metadata(
        batch_size=row.num_seqs,
        num_heads_q=row.num_heads,
        num_heads_kv=1,
        headdim=ROPE,
        headdim_v=RANK,
        cache_seqlens=lens,
        qkv_dtype=cache.dtype,
        page_size=MLA_BLOCK_SIZE,
        **sizes,
    )
    attend = functools.partial(
        flash_attn_varlen_func,
        q=q_pe.flatten(0, 1),
        k=rope_keys,
        v=values,
        q_v=q_nope.flatten(0, 1),
        seqused_k=lens,
        block_table=table,
        softmax_scale=SM_SCALE,
        scheduler_metadata=metadata,
        fa_version=3,
        **sizes,
    )
    return inputs.run_in_torch(lambda _: attend(), most=PEER_ERROR)


def flashmla_run(inputs: MLAInputs) -> Run:
    """Runs FlashMLA. `fp8_ds_mla` takes its kernel for sparse attention, given every token and at least 64 heads."""
    import torch
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    row = inputs.job.row
    *queries, cache, table, lens = inputs.in_torch()
    query, mode = torch.cat(queries, dim=-1), {"causal": True}
    if inputs.job.dtype is FP8_DS_MLA:
        query = torch.nn.functional.pad(query, (0, 0, 0, max(SPARSE_HEADS - row.num_heads, 0)))
        slots = table.unsqueeze(-1) * MLA_BLOCK_SIZE + torch.arange(
            MLA_BLOCK_SIZE, dtype=torch.int32, device=table.device
        )
        mode = {"is_fp8_kvcache": True, "indices": slots.flatten(1)[:, None, : row.seq_len].contiguous()}
    metadata, _ = get_mla_metadata()  # the first call fills it, others reuse it
    args = query, cache.unsqueeze(-2), table, lens, RANK, metadata

    def attend(_: int) -> Any:
        out, _ = flash_mla_with_kvcache(*args, softmax_scale=SM_SCALE, **mode)
        return out[:, :, : row.num_heads]

    return inputs.run_in_torch(attend, most=PEER_ERROR)


type MLAPeer = Peer[MLAJob, MLAInputs]

KVJAX, _ = own_peers(MLAJob, kvjax_run)
FLASHINFER: MLAPeer = torch_peer(
    "FlashInfer FA3", flashinfer_run, lambda job: job.dtype in (BFLOAT16, FP8), library="flashinfer.mla"
)
VLLM: MLAPeer = torch_peer("vLLM FA3", vllm_run, lambda job: job.dtype is BFLOAT16, library="vllm.vllm_flash_attn")
FLASHMLA: MLAPeer = torch_peer(
    "FlashMLA",
    flashmla_run,
    lambda job: job.dtype is BFLOAT16 or (job.dtype is FP8_DS_MLA and job.row.q_len == 1),
    library="vllm.third_party.flashmla.flash_mla_interface",
)
PEERS = (KVJAX, VLLM, FLASHMLA, FLASHINFER)


def measure(test: output.Program, operation: str, jobs: Sequence[MLAJob], peers: Sequence[MLAPeer]) -> None:
    """Measures attention with `compare_all`, after starting FlashInfer's builds and compiling every job."""
    for job in jobs:
        if FLASHINFER in peers and FLASHINFER.serves(job):
            attends_flashinfer.module(_build_flashinfer, job.dtype)
    own = [attention(job, output.IMPLEMENTATION.value) for job in jobs if KVJAX in peers]
    concurrent.futures.wait([*own, *map(reference, jobs)])
    compare.compare_all(test, operation, jobs, peers, MLAInputs)
