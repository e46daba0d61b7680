"""Writes in torch to the memory of JAX arrays. Indices are precomputed, as models do for all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import workload
from benchmarks.peers.inputs import WriteInputs, WritePeer
from benchmarks.peers.peer import Peer, Run, by_turns, why_no_gpu, why_not_importable
from benchmarks.shapes import BLOCK_SIZE, Slots
from benchmarks.workload import WriteJob
from kvjax import AttentionSpec, CacheLayout, KVCache, KVQuantMode


def borrow(array: jax.Array) -> Any:
    """Waits for an array and returns a tensor that shares its memory."""
    from kvjax_torch import to_torch

    return to_torch(jax.block_until_ready(array))


def has_gpu() -> bool:
    """Returns whether torch has a GPU. Does not use JAX, which calls from torch leave uninitialized."""
    import torch

    return torch.cuda.is_available()


def wait(_: object = None) -> None:
    """Waits for all work that torch launched."""
    if has_gpu():
        import torch

        torch.cuda.synchronize()


def why_missing(*modules: str) -> str | None:
    """Returns why torch cannot access the memory of JAX arrays here, or modules cannot be imported, or `None`."""
    if reason := why_not_importable("torch", "kvjax_torch", *modules):
        return reason
    return "torch sees no GPU" if workload.is_gpu() and not has_gpu() else None


def torch_peer[Job, Inputs](
    name: str,
    prepare: Callable[[Inputs], Run],
    serves: Callable[[Job], bool] = lambda _: True,
    *,
    library: str | None = None,
    own: bool = False,
) -> Peer[Job, Inputs]:
    """Returns a peer that torch calls, on a GPU if its kernels are those of another `library`."""
    missing = (lambda: why_no_gpu() or why_missing(library)) if library else why_missing
    return Peer(name, prepare, serves, missing, own=own)


def _torch_store(spec: AttentionSpec) -> Callable[[Any, float], Any]:
    """Returns a function that converts bfloat16 rows to the stored dtype."""
    import torch

    dtype, largest = getattr(torch, spec.storage_dtype.name), spec.dtype.info.max
    if spec.quant_mode is KVQuantMode.NONE:
        return lambda x, _: x.to(dtype)
    return lambda x, scale: (x.float() / scale).clamp_(-largest, largest).to(dtype).view(torch.uint8)


def borrowed(batches: Sequence[workload.Batch]) -> list[list[Any]]:
    """Returns the keys, values and slots of each batch as tensors."""
    return [[borrow(each) for each in batch] for batch in batches]


def index_copy_run(inputs: WriteInputs) -> Run:
    arrays, store = inputs.dense_poisoned(), _torch_store(inputs.job.spec)
    halves = [borrow(half).flatten(1) for half in arrays]

    def write(key: Any, value: Any, slots: Any) -> None:
        for half, x, scale in zip(halves, (key, value), workload.SCALES, strict=True):
            half.index_copy_(0, slots, store(x, scale))

    batches = [(key.flatten(1), value.flatten(1), slots.long()) for key, value, slots in borrowed(inputs.batches)]
    return Run(by_turns(write, batches), lambda _: inputs.check(*arrays), wait)


def token_pages(cache: KVCache) -> list[Any]:
    """Returns the keys and values of a cache as tensors `[num_blocks, BLOCK_SIZE, heads, head_size]`."""
    pages = borrow(cache.kv)
    pages = pages.transpose(2, 3) if cache.spec.layout is CacheLayout.HND else pages
    return [pages[:, 0], pages[:, 1]]


def index_put_run(inputs: WriteInputs) -> Run:
    cache, store = inputs.poisoned(), _torch_store(inputs.job.spec)
    halves = token_pages(cache)

    def write(key: Any, value: Any, index: Any) -> None:
        for half, x, scale in zip(halves, (key, value), workload.SCALES, strict=True):
            half.index_put_(index, store(x, scale))

    batches = [(*x, (slots.long() // BLOCK_SIZE, slots.long() % BLOCK_SIZE)) for *x, slots in borrowed(inputs.batches)]
    return Run(by_turns(write, batches), lambda _: inputs.check(cache.kv), wait)


def _serves_torch(job: WriteJob) -> bool:
    return not job.spec.stores_scales and job.slots is not Slots.PADDED  # torch's indices cannot skip tokens


INDEX_COPY: WritePeer = torch_peer(
    "torch index_copy_", index_copy_run, lambda job: _serves_torch(job) and job.layout is CacheLayout.NHD
)
INDEX_PUT = torch_peer("torch index_put_", index_put_run, _serves_torch)


def kvjax_writes(cache: KVCache, batches: Sequence[workload.Batch]) -> list[Callable[[], Any]]:
    """Returns a kvjax write from torch for each batch. The writes mutate JAX's arrays without its knowledge."""
    import kvjax_torch

    write, kv_cache = functools.partial(kvjax_torch.reshape_and_cache_flash, unique_slots=True), borrow(cache.kv)
    stored = cache.spec.dtype.value, *(borrow(scale) for scale in workload.scales().values())
    return [
        functools.partial(write, key, value, kv_cache[:, 0], kv_cache[:, 1], slots, *stored)
        for key, value, slots in borrowed(batches)
    ]


def kvjax_run(inputs: WriteInputs) -> Run:
    cache = inputs.poisoned()
    writes = kvjax_writes(cache, inputs.batches)
    return Run(lambda number: writes[number % len(writes)](), lambda _: inputs.check(cache.kv, exact=True), wait)


KVJAX: WritePeer = torch_peer("kvjax_torch", kvjax_run, lambda job: job.layout is CacheLayout.NHD, own=True)
