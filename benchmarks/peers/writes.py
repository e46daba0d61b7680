"""Writes into a paged cache: kvjax and its alternatives, listed in `PEERS`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import compare, output, workload
from benchmarks.peers import cuda, in_torch
from benchmarks.peers.in_torch import INDEX_COPY, INDEX_PUT, borrow, borrowed
from benchmarks.peers.inputs import WriteInputs, WritePeer
from benchmarks.peers.peer import Peer, Run, by_turns, own_peers
from benchmarks.shapes import BLOCK_SIZE, Slots
from benchmarks.workload import WriteJob
from kvjax import AttentionSpec, CacheLayout, KVCacheDType, KVQuantMode, nvfp4_split_views

NVFP4 = KVCacheDType.NVFP4


def kvjax_run(inputs: WriteInputs, *, implementation: str | None, **options: bool) -> Run:
    write = workload.Write(inputs.poisoned(), inputs.batches, implementation, **options)
    facts = {"temporary_bytes": workload.temporary_bytes(write.compiled)}
    return Run(write, lambda _: write.check(inputs.expected), facts=facts)


KVJAX, KVJAX_IN_XLA = own_peers(WriteJob, kvjax_run)
KVJAX_ANY_SLOTS = dataclasses.replace(
    own_peers(WriteJob, functools.partial(kvjax_run, unique_slots=False))[0], name="kvjax, any slots"
)
NOT_DONATED = Peer[WriteJob, WriteInputs](
    "kvjax, cache not donated",
    functools.partial(kvjax_run, implementation=None, donated=False),
    serves=lambda job: job.dtype is KVCacheDType.BFLOAT16,  # copying the cache dominates the time for any dtype
    own=True,
)


def _scatter(
    caches: list[jax.Array], batch: workload.Batch, scales: dict[str, jax.Array], spec: AttentionSpec
) -> list[jax.Array]:
    # JAX counts negative indices from the end, so map padding past the end.
    slots = jnp.where(batch.slot_mapping < 0, caches[0].shape[0], batch.slot_mapping)
    stored = [_stored(batch.key, scales["k_scale"], spec), _stored(batch.value, scales["v_scale"], spec)]
    return [cache.at[slots].set(rows, mode="drop") for cache, rows in zip(caches, stored, strict=True)]


def _stored(x: jax.Array, scale: jax.Array, spec: AttentionSpec) -> jax.Array:
    info = spec.dtype.info
    if spec.quant_mode is KVQuantMode.NONE:
        return x.astype(info.storage_dtype)
    codes = jnp.clip(x.astype(jnp.float32) / scale, -info.max, info.max).astype(info.storage_dtype)
    return lax.bitcast_convert_type(codes, spec.array_dtype)  # a scatter of 8-bit floats is slow on CPU


def scatter_run(inputs: WriteInputs) -> Run:
    caches = inputs.dense_poisoned()
    scatter = jax.jit(functools.partial(_scatter, spec=inputs.job.spec), donate_argnums=0)
    compiled = scatter.lower(caches, inputs.batches[0], workload.scales()).compile()

    def write(*batch: jax.Array) -> list[jax.Array]:
        caches[:] = compiled(caches, workload.Batch(*batch), workload.scales())
        return caches

    facts = {"temporary_bytes": workload.temporary_bytes(compiled)}
    return Run(by_turns(write, inputs.batches), lambda _: inputs.check(*caches), facts=facts)


XLA_SCATTER = Peer[WriteJob, WriteInputs](
    "XLA scatter", scatter_run, serves=lambda job: not job.spec.stores_scales and job.layout is CacheLayout.NHD
)


def cuda_run(inputs: WriteInputs, *, threads: cuda.ThreadCount) -> Run:
    cache = inputs.poisoned()
    jax.block_until_ready((cache, inputs.batches, workload.scales()))
    write = functools.partial(cuda.reshape_and_cache, cache=cache, threads=threads)
    call = by_turns(write, [(batch,) for batch in inputs.batches])
    return Run(call, lambda _: inputs.check(cache.kv, exact=True), cuda.synchronize)


CUDA = Peer[WriteJob, WriteInputs](
    "CUDA",
    functools.partial(cuda_run, threads=cuda.vllm_threads),
    serves=lambda job: cuda.serves(job.spec),
    why_missing=cuda.why_missing,
)
CUDA_FITTED = dataclasses.replace(
    CUDA, name="CUDA fitted", prepare=functools.partial(cuda_run, threads=cuda.fitted_threads)
)


def _flashinfer_append(inputs: WriteInputs) -> Run:
    """Appends to one request that owns all pages in order, so that a token's position equals its slot."""
    import torch
    from flashinfer import page  # type: ignore[import-not-found]

    cache = inputs.poisoned()
    pages = borrow(cache.kv)
    ints: Any = {"dtype": torch.int32, "device": pages.device}
    table, bounds = torch.arange(cache.num_blocks, **ints), torch.tensor([0, cache.num_blocks], **ints)
    owners = pages, table, bounds, torch.tensor([BLOCK_SIZE], **ints)
    first_request, layout = torch.zeros(inputs.job.num_tokens, **ints), inputs.job.layout.value

    def write(key: Any, value: Any, slots: Any) -> None:
        page.append_paged_kv_cache(key, value, first_request, slots, *owners, kv_layout=layout)

    return Run(by_turns(write, borrowed(inputs.batches)), lambda _: inputs.check(cache.kv), in_torch.wait)


def _flashinfer_nvfp4(inputs: WriteInputs) -> Run:
    import torch
    from flashinfer import page

    job = inputs.job
    expected = [*zip(*nvfp4_split_views(inputs.expected), strict=True)]  # (data, scales) of keys, then of values
    arrays = [[jnp.full(each.shape, workload.POISON, jnp.uint8) for each in half] for half in expected]
    data, scales = zip(*(map(borrow, half) for half in arrays), strict=True)
    options = data, tuple(each.view(torch.float8_e4m3fn) for each in scales), *workload.SCALES

    def write(*batch: Any) -> None:
        page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*batch, *options, kv_layout=job.layout.value)

    def check(_: Any) -> dict[str, Any]:
        apart = 0
        for (data, block_scales), (expected_data, expected_scales) in zip(arrays, expected, strict=True):
            stored_scales = lax.bitcast_convert_type(expected_scales, jnp.uint8)
            apart += workload.check_codes(block_scales, stored_scales)
            apart += workload.check_codes(data, expected_data, bits=4)
        return {"codes_apart": apart}

    return Run(by_turns(write, borrowed(inputs.batches)), check, in_torch.wait)


FLASHINFER: WritePeer = in_torch.torch_peer(
    "FlashInfer",
    lambda inputs: (_flashinfer_nvfp4 if inputs.job.dtype is NVFP4 else _flashinfer_append)(inputs),
    lambda job: job.dtype is NVFP4 or (job.dtype is KVCacheDType.BFLOAT16 and job.slots is not Slots.PADDED),
    library="flashinfer.page",
)

PEERS = (KVJAX, KVJAX_ANY_SLOTS, KVJAX_IN_XLA, XLA_SCATTER, INDEX_COPY, INDEX_PUT, CUDA, CUDA_FITTED, FLASHINFER)


def measure(test: output.Program, operation: str, jobs: Sequence[WriteJob], peers: Sequence[WritePeer]) -> None:
    """Measures writes with `compare_all`. Consecutive jobs share their tokens."""

    @functools.lru_cache(maxsize=1)
    def tokens(*shared: Any) -> workload.Tokens:
        case, slots, num_blocks = shared
        most = max(job.num_tokens for job in jobs if (job.case, job.slots, job.num_blocks) == shared)
        return workload.Tokens(case, most, slots, num_blocks)

    def make(job: WriteJob) -> WriteInputs:
        return WriteInputs(job, tokens(job.case, job.slots, job.num_blocks))

    compare.compare_all(test, operation, jobs, peers, make)
