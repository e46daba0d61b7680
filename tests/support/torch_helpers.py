"""What the tests of kvjax_torch share: caches and inputs in the shapes and strides that torch callers have them in."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvjax import AttentionSpec, CacheLayout
from kvjax_torch.arguments.dtypes import torch_dtype
from support.helpers import raise_scales

A_WHILE = 100_000_000
"""Cycles that a stream is kept busy for: about 55 ms, in which a busy host gets through a few calls."""

FORMS = ("one_allocation", "two_tensors", "padded_pages", "offset")


@dataclasses.dataclass(frozen=True)
class TorchCache:
    """`key_cache` and `value_cache` over poisoned memory; `pages()` copies what the pages hold, and all around them."""

    key: torch.Tensor
    value: torch.Tensor
    pages: Callable[[], np.ndarray]


def capture(graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
    """Records into `graph`, in the mode that it takes where JAX has started."""
    return torch.cuda.graph(graph, capture_error_mode="thread_local")


def resident_bytes() -> int:
    """Memory of this process on the host."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def nested(rows: torch.Tensor) -> torch.Tensor:
    """The same numbers as a tensor that torch keeps in another way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which says that these are a prototype
        return torch.nested.nested_tensor([*rows])


def assert_same(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Checks that tensors have the same bytes."""
    for each, wanted in zip(got, expected, strict=True):
        assert torch.equal(each.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))


def assert_waits_for_its_stream_alone(
    operation: Callable[..., Sequence[torch.Tensor]], call: dict[str, Any], stream: torch.cuda.Stream, repeats: int
) -> None:
    """Checks that an operation reads its query on `stream`, which writes it late, and that the host does not wait."""
    query, source, idle = call["query"], call["query"].clone(), torch.cuda.Event()
    expected = operation(**call)
    torch.cuda.synchronize()
    for _ in range(repeats):
        query.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(A_WHILE)
            query.copy_(source)
            used = [each.clone() for each in operation(**call)]
            query.zero_()
            idle.record()
        assert not idle.query(), "the host waited for the stream"
        stream.synchronize()
        assert_same(used, expected)


def assert_torch_sees_no_wait(operation: Callable[..., Sequence[torch.Tensor]], call: dict[str, Any]) -> None:
    """Checks that an operation makes no call that synchronizes, as torch's debug mode sees it."""
    expected = operation(**call)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = operation(**call)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert_same(results, expected)


def random_pages(spec: AttentionSpec, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Bytes `[num_blocks, page_size_bytes]`."""
    pages = np.random.default_rng(seed).integers(0, 256, (num_blocks, spec.page_size_bytes), np.uint8)
    raise_scales(pages, spec)
    return pages


def torch_cache(
    pages: np.ndarray,
    spec: AttentionSpec,
    *,
    form: str = "one_allocation",
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    before: int | None = None,
) -> TorchCache:
    """The pages as a torch caller's cache, element type `dtype` (by default that of kvjax's array).

    `form`: "one_allocation" holds them as they are, "padded_pages" with other bytes between them, "offset" after other
    bytes (`before` of them, in any form but the next); "two_tensors" holds keys and values apart, which halves them
    byte for byte only where K and V have equal sizes; "beside" has each value, of equal size, after its key, as
    vLLM, and other bytes between pages.
    """
    dtype = dtype or torch_dtype(spec.array_dtype)
    num_blocks, page_bytes = pages.shape
    if form == "two_tensors":
        split = spec.regions.v[0].base if spec.stores_scales else page_bytes // 2
        key, value = (torch.from_numpy(part.copy()).to(device) for part in np.split(pages, [split], axis=1))
        views = [_half(part, spec, dtype, half, 0) for half, part in enumerate((key, value))]
        return TorchCache(*views, lambda: torch.cat([key, value], dim=1).cpu().numpy().copy())
    beside = form == "beside" or (spec.is_diffkv and not spec.stores_scales)
    if form == "beside":
        row = sum(spec.row_bytes[0])
        pages = pages.reshape(num_blocks, 2, -1, row).swapaxes(1, 2).reshape(num_blocks, -1)
    default, between = {"padded_pages": (0, 48), "offset": (80, 0), "beside": (0, 48)}.get(form, (0, 0))
    before = default if before is None else before
    memory = torch.full((before + num_blocks * (page_bytes + between),), 0xAB, dtype=torch.uint8, device=device)
    held = memory[before:].view(num_blocks, -1)
    held[:, :page_bytes] = torch.from_numpy(pages).to(device)

    def read() -> np.ndarray:
        assert (memory[:before] == 0xAB).all()
        assert (held[:, page_bytes:] == 0xAB).all()
        return held[:, :page_bytes].cpu().numpy().copy()

    bytes_k, bytes_v = map(sum, spec.row_bytes)
    start = bytes_k if beside else page_bytes // (bytes_k + bytes_v) * bytes_k
    key, value = (_half(held, spec, dtype, half, start, beside=beside) for half in range(2))
    return TorchCache(key, value, read)


def _half(
    held: torch.Tensor, spec: AttentionSpec, dtype: torch.dtype, half: int, value_start: int, *, beside: bool = False
) -> torch.Tensor:
    """`[num_blocks, block_size, num_kv_heads, row]` of the keys (`half` 0) or the values in rows of pages."""
    row, other = map(sum, spec.row_bytes[:: 1 - 2 * half])
    step = row + other if beside else row
    strides = (spec.num_kv_heads * step, step) if spec.layout is CacheLayout.NHD else (step, spec.block_size * step)
    shape = (held.shape[0], spec.block_size, spec.num_kv_heads, row)
    view = held.as_strided(shape, (held.stride(0), *strides, 1), held.storage_offset() + half * value_start)
    return view.view(dtype)


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """`torch.from_numpy`, ml_dtypes' included."""
    tensor = torch.empty(array.shape, dtype=torch_dtype(array.dtype))
    tensor.view(-1).view(torch.uint8)[:] = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return tensor


def to_numpy(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """`tensor.numpy()`, ml_dtypes' included."""
    return tensor.contiguous().view(torch.uint8).cpu().numpy().view(dtype)
