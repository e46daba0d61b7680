"""Writes in torch, on the memory of JAX's arrays. Indices are made beforehand, as a model makes them for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from benchmarks import workload
from benchmarks.peers.inputs import WriteInputs, check_dense, check_paged, dense_poisoned
from benchmarks.peers.peer import Peer, Run, why_not_importable
from benchmarks.shapes import BLOCK_SIZE, Slots
from benchmarks.workload import WriteJob
from kvjax import AttentionSpec, CacheLayout, KVQuantMode


def borrow(array: jax.Array) -> Any:
    """A tensor over the memory of an array, once that is ready."""
    from kvjax_torch import to_torch

    return to_torch(jax.block_until_ready(array))


def has_gpu() -> bool:
    """Whether torch has one. JAX is not asked, for that would start it, as no call from torch does."""
    import torch

    return torch.cuda.is_available()


def wait(_: object = None) -> None:
    """Waits for what torch has started."""
    if has_gpu():
        import torch

        torch.cuda.synchronize()


def seconds_in_a_row(call: Callable[[], Any], count: int) -> float:
    """Seconds that a call takes on the GPU when others come right before and after it, by CUDA's events."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def why_missing() -> str | None:
    """Why torch cannot work on the memory of JAX's arrays here."""
    reason = why_not_importable("torch", "kvjax_torch")
    if reason is None and workload.is_gpu():
        import torch

        return None if torch.cuda.is_available() else "torch sees no GPU"
    return reason


def _torch_store(spec: AttentionSpec) -> Callable[[Any, float], Any]:
    """What turns rows in bfloat16 into rows as a cache tensor holds them."""
    import torch

    if spec.quant_mode is KVQuantMode.NONE:
        dtype = getattr(torch, spec.storage_dtype.name)
        return lambda x, _: x.to(dtype)
    dtype, largest = getattr(torch, spec.storage_dtype.name), spec.dtype.info.max
    return lambda x, scale: (x.float() / scale).clamp_(-largest, largest).to(dtype).view(torch.uint8)


def float_scales() -> list[float]:
    """The decode scales of keys and values."""
    return [float(scale) for scale in workload.scales().values()]


def index_copy_run(inputs: WriteInputs) -> Run:
    arrays = dense_poisoned(inputs)
    caches, store = [borrow(half).flatten(1) for half in arrays], _torch_store(inputs.job.spec)
    batches = [
        (borrow(batch.slot_mapping).long(), [borrow(x).flatten(1) for x in (batch.key, batch.value)])
        for batch in inputs.batches
    ]
    scales = float_scales()

    def call(number: int) -> None:
        slots, rows = batches[inputs.batch_number(number)]
        for cache, x, scale in zip(caches, rows, scales, strict=True):
            cache.index_copy_(0, slots, store(x, scale))

    return Run(call, lambda _: check_dense(arrays, inputs), wait)


def index_put_run(inputs: WriteInputs) -> Run:
    cache = inputs.poisoned()
    pages, store = borrow(cache.kv), _torch_store(inputs.job.spec)
    if inputs.job.layout is CacheLayout.HND:
        pages = pages.transpose(2, 3)
    halves = pages[:, 0], pages[:, 1]
    batches = []
    for batch in inputs.batches:
        slots = borrow(batch.slot_mapping).long()
        index = (slots // BLOCK_SIZE, slots % BLOCK_SIZE)
        batches.append((index, [borrow(x) for x in (batch.key, batch.value)]))
    scales = float_scales()

    def call(number: int) -> None:
        index, rows = batches[inputs.batch_number(number)]
        for half, x, scale in zip(halves, rows, scales, strict=True):
            half.index_put_(index, store(x, scale))

    return Run(call, lambda _: check_paged(cache, inputs), wait)


def _serves_torch(job: WriteJob) -> bool:
    return not job.spec.stores_scales and job.slots is not Slots.PADDED  # torch's indices skip nothing


INDEX_COPY = Peer[WriteJob, WriteInputs](
    "torch index_copy_",
    index_copy_run,
    serves=lambda job: _serves_torch(job) and job.layout is CacheLayout.NHD,
    why_missing=why_missing,
)
INDEX_PUT = Peer[WriteJob, WriteInputs](
    "torch index_put_", index_put_run, serves=_serves_torch, why_missing=why_missing
)


def kvjax_run(inputs: WriteInputs) -> Run:
    import kvjax_torch

    cache = inputs.poisoned()
    pages, scales = borrow(cache.kv), [borrow(scale) for scale in workload.scales().values()]
    key_cache, value_cache = pages[:, 0], pages[:, 1]
    batches = [[borrow(each) for each in batch] for batch in inputs.batches]
    dtype = inputs.job.dtype.value

    def call(number: int) -> None:
        key, value, slots = batches[inputs.batch_number(number)]
        kvjax_torch.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, dtype, *scales)

    def check(_: Any) -> None:
        workload.check_same_bits(cache.kv, inputs.expected.kv)

    return Run(call, check, wait)


KVJAX = Peer[WriteJob, WriteInputs](
    "kvjax_torch",
    kvjax_run,
    serves=lambda job: job.layout is CacheLayout.NHD,
    why_missing=why_missing,
    own=True,
)
