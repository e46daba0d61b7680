"""Attention by FlashInfer, if it is installed: its tensor core kernels (FA2, FA3) and TensorRT-LLM's (XQA)."""

from __future__ import annotations

import collections
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from absl import flags

from benchmarks import workload
from benchmarks.peers.attention_inputs import PEER_ERROR, AttentionInputs, AttentionJob, Workers
from benchmarks.peers.in_torch import borrow, torch_peer
from benchmarks.peers.peer import Peer, Run, by_turns
from benchmarks.shapes import BLOCK_SIZE, AttentionRow
from kvjax import AttentionSpec, CacheLayout, KVCacheDType

BUILD_SECONDS = flags.DEFINE_integer(
    "build_seconds", 240, "seconds until all of FlashInfer's kernels must be built", lower_bound=0
)
BFLOAT16, FP8, NVFP4 = KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4

WORKSPACE_BYTES = 256 << 20
JOBS_A_BUILD = 3  # parallel compilations per module
MASK_BITS = 32


def views(pages: Any, spec: AttentionSpec) -> tuple[tuple[Any, Any], tuple[Any, Any] | None]:
    """Returns views of keys and values in a cache's tensor as FlashInfer expects them, and of NVFP4's block scales."""
    import torch

    if spec.dtype is not NVFP4:
        return pages.view(stored_dtype(spec.dtype)).unbind(1), None
    order = (spec.block_size, spec.num_kv_heads)
    if spec.layout is CacheLayout.HND:
        order = order[::-1]
    halves, num_data_bytes = pages.flatten(2), spec.block_size * spec.num_kv_heads * spec.head_size // 2
    data = halves[..., :num_data_bytes].unflatten(2, (*order, spec.head_size // 2))
    scales = halves[..., num_data_bytes:].unflatten(2, (*order, spec.head_size // 16))
    return data.unbind(1), scales.view(torch.float8_e4m3fn).unbind(1)


def stored_dtype(dtype: KVCacheDType) -> Any:
    import torch

    return {BFLOAT16: torch.bfloat16, FP8: torch.float8_e4m3fn, NVFP4: torch.uint8}[dtype]


def query_dtype(dtype: KVCacheDType, backend: str) -> Any:
    """Returns the query's dtype: FA3 multiplies pages in fp8 by a query in fp8, and rounds weights to it."""
    return stored_dtype(FP8 if (dtype, backend) == (FP8, "fa3") else BFLOAT16)


def scales_of(job: AttentionJob) -> tuple[float, float]:
    """Returns the decode scales of keys and values, or 1 for unquantized caches."""
    return (1.0, 1.0) if job.dtype is BFLOAT16 else workload.SCALES


def page_table(inputs: AttentionInputs) -> tuple[Any, Any, Any]:
    """Returns FlashInfer's page table: offset of each sequence, page indices, and tokens in each last page."""
    import torch

    row = inputs.job.row
    starts = torch.arange(row.num_seqs + 1, dtype=torch.int32) * row.blocks_a_seq
    last = torch.full((row.num_seqs,), (row.seq_len - 1) % BLOCK_SIZE + 1, dtype=torch.int32)
    return starts, borrow(inputs.table).flatten(), last


def window_left(row: AttentionRow) -> int:
    return -1 if row.window is None else row.window - 1


def wrapper_run(inputs: AttentionInputs, *, backend: str) -> Run:
    """Runs the decode wrapper or, for a step, the prefill wrapper with a preallocated output.

    The check applies the scale of values, because the wrapper would launch another kernel for it.
    """
    import flashinfer  # type: ignore[import-not-found]
    import torch

    job, row = inputs.job, inputs.job.row
    wait_for(prefill_key(job, backend))
    query = borrow(inputs.query).to(query_dtype(job.dtype, backend))
    k_scale, v_scale = scales_of(job)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    # FA3 in fp8 takes a scale for each head; that of keys is in `sm_scale`, that of values in the check.
    heads = (row.num_heads, row.num_kv_heads, row.num_kv_heads) if query.itemsize == 1 else ()
    ones = [torch.ones(count, device=query.device) for count in heads]
    first, options, out = list[Any](), dict[str, Any](window_left=window_left(row)), {}
    if row.is_step:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, row.layout.value, backend=backend)
        first, options["causal"] = [torch.from_numpy(row.cu_q_lens)], True
        out = {"out": torch.empty_like(query, dtype=torch.bfloat16)}
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, row.layout.value, use_tensor_cores=True, backend=backend
        )
        query = query.flatten(0, 1)
        options |= {"q_len_per_req": row.q_len} if row.q_len > 1 else {}
    sizes = row.num_heads, row.num_kv_heads, row.head_size, BLOCK_SIZE
    wrapper.plan(
        *(*first, *page_table(inputs), *sizes),
        q_data_type=query.dtype,
        kv_data_type=stored_dtype(job.dtype),
        o_data_type=torch.bfloat16,
        sm_scale=k_scale / row.head_size**0.5,
        logits_soft_cap=row.logits_soft_cap,
        **options,
    )

    def attend(pages: Any, block_scales: Any) -> Any:
        # With programmatic dependent launches, a kernel's time would include its wait for the previous kernel.
        return wrapper.run(query, pages, *ones, kv_cache_sf=block_scales, enable_pdl=False, **out)

    caches = [views(borrow(cache.kv), job.spec) for cache in inputs.caches]
    return inputs.run_in_torch(by_turns(attend, caches), most=PEER_ERROR, factor=v_scale)


def xqa_run(inputs: AttentionInputs) -> Run:
    """Runs TensorRT-LLM's XQA decode kernels."""
    import torch
    from flashinfer.decode import xqa_batch_decode_with_kv_cache  # type: ignore[import-not-found]

    job, row = inputs.job, inputs.job.row
    wait_for(xqa_key(job))
    table, lengths = borrow(inputs.table), borrow(inputs.seq_lens).view(torch.uint32)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=table.device)
    query = borrow(inputs.query).flatten(0, 1)
    k_scale, v_scale = scales_of(job)
    options: dict[str, Any] = {"window_left": window_left(row)}
    if row.q_len > 1:
        options |= {"q_len_per_req": row.q_len, "mask": causal_mask(row.num_seqs, row.q_len, table.device)}

    def attend(pages: Any, _: None) -> Any:
        return xqa_batch_decode_with_kv_cache(
            query,
            pages,
            workspace,
            table,
            lengths,
            row.blocks_a_seq * BLOCK_SIZE,
            bmm1_scale=k_scale / row.head_size**0.5,
            bmm2_scale=v_scale,
            kv_layout=row.layout.value,
            enable_pdl=False,
            **options,
        )

    caches = [views(borrow(cache.kv), job.spec) for cache in inputs.caches]
    return inputs.run_in_torch(by_turns(attend, caches), most=PEER_ERROR)


def causal_mask(num_seqs: int, q_len: int, device: Any) -> Any:
    """Returns a uint16 mask `[num_seqs, q_len, 2]`: bit i of a row is set if it attends to query token i."""
    import torch

    rows = torch.tensor([(1 << (row + 1)) - 1 for row in range(q_len)], dtype=torch.int32, device=device)
    return rows.view(torch.uint16).view(1, q_len, MASK_BITS // 16).repeat(num_seqs, 1, 1)


type ModuleKey = tuple[Any, ...]  # a function that builds a module, and its arguments


def prefill_key(job: AttentionJob, backend: str) -> ModuleKey:
    """Returns the key of the FA2 or FA3 module for a job; decodes use the prefill module too."""
    row = job.row
    return _build_prefill, backend, job.dtype, row.head_size, row.window is not None, row.logits_soft_cap is not None


def xqa_key(job: AttentionJob) -> ModuleKey:
    """Returns the key of the XQA module for a job."""
    row = job.row
    group = row.num_heads // row.num_kv_heads
    return _build_xqa, job.dtype, row.head_size, group, row.window is not None, row.q_len


@functools.cache
def module(*key: Any) -> Future[Any]:
    return _builders().submit(*key)


def _build_prefill(backend: str, dtype: KVCacheDType, head_size: int, has_window: bool, has_cap: bool) -> None:
    import torch
    from flashinfer.prefill import get_batch_prefill_module  # type: ignore[import-not-found]

    types = query_dtype(dtype, backend), stored_dtype(dtype), torch.bfloat16, torch.int32
    no_encoding, no_fp16 = 0, False
    get_batch_prefill_module(backend, *types, head_size, head_size, no_encoding, has_window, has_cap, no_fp16)


def _build_xqa(dtype: KVCacheDType, head_size: int, group: int, has_window: bool, q_len: int) -> None:
    import torch
    from flashinfer.xqa import get_xqa_module  # type: ignore[import-not-found]

    stored = stored_dtype(dtype)
    get_xqa_module(torch.bfloat16, stored, BLOCK_SIZE, head_size, group, has_window, torch.bfloat16, q_len)


@functools.cache
def _builders() -> Workers:
    os.environ.setdefault("MAX_JOBS", str(JOBS_A_BUILD))
    return Workers(max((os.cpu_count() or 1) // JOBS_A_BUILD, 1))


@functools.cache
def _deadline() -> float:
    return time.monotonic() + BUILD_SECONDS.value


def wait_for(key: ModuleKey) -> None:
    """Waits until a module is built; `TimeoutError` if it is not before the deadline."""
    try:
        module(*key).result(max(_deadline() - time.monotonic(), 0.001))
    except TimeoutError:
        raise TimeoutError(f"not built within --build_seconds={BUILD_SECONDS.value}") from None


def build_ahead(jobs: Sequence[AttentionJob], peers: Sequence[Peer[AttentionJob, AttentionInputs]]) -> None:
    """Starts building the modules for these peers and jobs in the background, the most used modules first."""
    _deadline()
    needed = [KEYS[peer](job) for peer in peers if peer in KEYS for job in jobs if peer.serves(job)]
    for key, _ in collections.Counter(needed).most_common():
        module(*key)


_peer = functools.partial(torch_peer, library="flashinfer")
FA2: Any = _peer(
    "FlashInfer FA2",
    functools.partial(wrapper_run, backend="fa2"),
    lambda job: not (job.row.prefix_len or job.row.varied),
)
FA3: Any = _peer(
    "FlashInfer FA3",
    functools.partial(wrapper_run, backend="fa3"),
    lambda job: not job.row.prefix_len and (job.dtype is BFLOAT16 or (job.dtype is FP8 and job.row.is_step)),
)
XQA: Any = _peer("FlashInfer XQA", xqa_run, lambda job: job.dtype is not NVFP4)
KEYS: dict[Any, Callable[[AttentionJob], ModuleKey]] = {
    FA2: functools.partial(prefill_key, backend="fa2"),
    FA3: functools.partial(prefill_key, backend="fa3"),
    XQA: xqa_key,
}
