"""Times torch's `paged_attention` on this GPU over pages of each order: kvjax's own, and vLLM's, a value after its key.

    PYTHONPATH=.:interop python tools/time_pages.py [--dtype=bfloat16 fp8_e4m3]

64 sequences of 8,192 tokens in random blocks of 16, 32 query heads over 8 KV heads of 128. A time is that of a call in
a CUDA graph, the smallest of ten replays. Fails if two orders give different results; times are not checked.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch

import kvjax_torch

NUM_SEQS, NUM_TOKENS, BLOCK_SIZE = 64, 8192, 16
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
CALLS, REPLAYS = 20, 10
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
ORDERS = {
    "kvjax's, NHD": (0, 3, 1, 2, 4),
    "kvjax's, HND": (0, 3, 2, 1, 4),
    "vLLM's, token-major": (0, 1, 2, 3, 4),
    "vLLM's, head-major": (0, 2, 1, 3, 4),
}
"""In memory, from the outermost: 0 blocks, 1 tokens, 2 heads, 3 key or value, 4 elements."""


def halves(rows: torch.Tensor, order: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[num_blocks, block_size, num_kv_heads, head_size]` of rows, copied to memory in an order."""
    pages = rows.permute(order).contiguous()
    key, value = pages.permute([order.index(axis) for axis in range(5)]).unbind(3)
    return key, value


def microseconds(call: Callable[[], object]) -> float:
    """The time of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return min(times)


def main() -> None:
    """Times each requested dtype in each order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=["fp8_e4m3", "bfloat16"])
    flags = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    new = {"device": "cuda", "generator": generator}
    num_blocks = NUM_SEQS * NUM_TOKENS // BLOCK_SIZE
    query = torch.randn(NUM_SEQS, HEADS, HEAD_SIZE, dtype=torch.bfloat16, **new)
    table = torch.randperm(num_blocks, dtype=torch.int32, **new).view(NUM_SEQS, -1)
    lens = torch.full((NUM_SEQS,), NUM_TOKENS, dtype=torch.int32, device="cuda")
    one = torch.ones((), device="cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in flags.dtype:
        rows = torch.randn(num_blocks, BLOCK_SIZE, KV_HEADS, 2, HEAD_SIZE, dtype=torch.bfloat16, **new)
        rows = rows.to(DTYPES[name])
        expected = None
        for order, axes in ORDERS.items():
            key, value = halves(rows, axes)
            attend = functools.partial(
                kvjax_torch.paged_attention, query, key, value, table, lens, name, k_scale=one, v_scale=one
            )
            out = attend().float()
            expected = out if expected is None else expected
            torch.testing.assert_close(out, expected, atol=1e-3, rtol=2e-2)
            print(f"{name:9} {order:20} {microseconds(attend):7.1f} us", flush=True)


if __name__ == "__main__":
    main()
