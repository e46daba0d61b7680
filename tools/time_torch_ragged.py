"""Times a serving step's attention from torch on this GPU, and compares its result with the decode kernel's.

    PYTHONPATH=.:interop python tools/time_torch_ragged.py [--dtype=nvfp4] [--step=chunk] [--kernels]

Device times, by CUDA events, are per call in a replayed CUDA graph of calls that alternate between several caches, so
that none is in L2; host times are of consecutive calls.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import numpy as np
import torch
from time_ragged_attention import STEPS

import kvjax_torch

NUM_CACHES, NUM_REPLAYS = 4, 10
BLOCK_SIZE, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE = 16, 8, 32, 128
ROWS = {"bfloat16": (128, torch.bfloat16), "fp8": (128, torch.uint8), "nvfp4": (72, torch.uint8)}


def build(steps: list[tuple[int, int]], dtype: str) -> tuple[torch.Tensor, list[Any], tuple[torch.Tensor, ...]]:
    """Returns the query, caches with their dtype and scales, and table, lengths and starts of a step."""
    q_lens, lens = torch.tensor(steps).T
    blocks = -(-lens // BLOCK_SIZE)
    num_blocks = int(blocks.sum())
    table = torch.full((len(steps), int(blocks.max())), -1)
    for row, own in zip(table, torch.randperm(num_blocks).split(blocks.tolist()), strict=True):
        row[: len(own)] = own
    size, element = ROWS[dtype]
    scale = 0.006 if dtype == "nvfp4" else 1.0
    caches = []
    for _ in range(NUM_CACHES):
        pages = torch.zeros(num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, size, dtype=element, device="cuda")
        cache = pages[:, 0], pages[:, 1], dtype, scale, scale
        shape = num_blocks * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE
        key, value = torch.randn(2, *shape, dtype=torch.bfloat16, device="cuda")
        slots = torch.arange(shape[0], device="cuda")
        kvjax_torch.reshape_and_cache_flash(key, value, *cache[:2], slots, *cache[2:], unique_slots=True)
        caches.append(cache)
    query = torch.randn(int(q_lens.sum()), NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
    starts = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0))
    return query, caches, tuple(x.to("cuda", torch.int32) for x in (table, lens, starts))


def error(out: torch.Tensor, query: torch.Tensor, cache: Any, tables: Any, options: dict[str, Any]) -> float:
    """Returns the largest difference from the decode kernel's results, for a sample of rows."""
    table, lens, starts = (x.cpu() for x in tables)
    row = torch.arange(0, len(query), max(1, len(query) // 64))
    seq = torch.searchsorted(starts[1:], row, right=True)
    length = (lens[seq] - (starts[seq + 1] - row)).to("cuda", torch.int32) + 1
    numbers = {name: x for name, x in options.items() if name in ("sliding_window", "logits_soft_cap")}
    pages = cache[0], cache[1], table[seq].cuda(), length, *cache[2:]
    expected = kvjax_torch.paged_attention(query[row.cuda()], *pages, **numbers)
    return float((out[row.cuda()].float() - expected.float()).abs().max())


def main() -> None:
    """Times the requested steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=ROWS, default="nvfp4")
    parser.add_argument("--step", choices=STEPS, help="default: all")
    parser.add_argument("--kernels", action="store_true", help="also print the time of each kernel")
    given = parser.parse_args()
    for name in [given.step] if given.step else STEPS:
        steps, options = STEPS[name]
        query, caches, tables = build(steps, given.dtype)
        attend = functools.partial(kvjax_torch.ragged_paged_attention, query, **options)

        def call(number: int, attend: Any = attend, caches: Any = caches, tables: Any = tables) -> torch.Tensor:
            key_cache, value_cache, *stored = caches[number % NUM_CACHES]
            return attend(key_cache, value_cache, *tables, *stored)

        largest = error(call(0), query, caches[0], tables, options)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for number in range(NUM_CACHES):
            call(number)
        on_host = (time.perf_counter() - began) / NUM_CACHES
        torch.cuda.synchronize()
        temporary = torch.cuda.max_memory_allocated() - before
        graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for number in range(NUM_CACHES):
                call(number)
        times = []
        for _ in range(NUM_REPLAYS):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / NUM_CACHES)
        print(
            f"{name}: {np.median(times):,.1f} us, {on_host * 1e6:,.0f} us of host time, {temporary / 2**20:,.0f} MiB of"
            f" temporary memory; largest difference from the decode kernel {largest:.2g}"
        )
        if given.kernels:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                call(0)
                torch.cuda.synchronize()
            for kernel in sorted(profile.key_averages(), key=lambda each: -each.device_time_total):
                print(f"    {kernel.device_time_total:8.2f} us {kernel.count:3d} x {kernel.key[:90]}")


if __name__ == "__main__":
    main()
