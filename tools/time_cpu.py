"""Times writes and attention of CPU tensors from torch beside what torch has: a table for docs/notes/interop.md.

    PYTHONPATH=.:interop python tools/time_cpu.py [--dtypes auto nvfp4]

4 sequences of 1,024 tokens, 32 query heads and 8 KV heads of 128, blocks of 16. `scaled_dot_product_attention` reads
dense keys and values of the query's dtype, and `index_copy_` stores keys and values as they are: bfloat16 beside
quantized pages. Milliseconds of processor time with one thread of torch, the median of calls that alternate; "over" is
the median of each pair's ratio. Nothing is checked: the tests do that.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch

import kvjax
import kvjax_torch

NUM_SEQS, LENGTH, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 1024, 32, 8, 128, 16
DTYPES = ("float32", "bfloat16", "fp8_e4m3", "fp8_per_token_head", "nvfp4")
SCALE = 0.02
WRITES = (4, 64, NUM_SEQS * LENGTH)


def compare(ours: Callable[[], object], theirs: Callable[[], object], calls: int) -> tuple[float, float]:
    """Milliseconds of a call of `ours`, and how many times those of `theirs` next to it."""

    def milliseconds(call: Callable[[], object]) -> float:
        start = time.process_time()
        call()
        return (time.process_time() - start) * 1e3

    for call in (ours, theirs):  # the first compiles
        call()
    pairs = [(milliseconds(ours), milliseconds(theirs)) for _ in range(calls)]
    return statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)


def times(dtype: str, calls: int) -> list[tuple[float, float]]:
    """`compare` of attention, one query token a sequence, and then of a write of each number of tokens."""
    spec = kvjax.FullAttentionSpec(BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, dtype=kvjax.parse_kv_cache_dtype(dtype))
    num_blocks = NUM_SEQS * LENGTH // BLOCK_SIZE
    dense_dtype = torch.bfloat16 if spec.dtype.is_quantized else getattr(torch, dtype)
    key, value, dense_keys, dense_values = torch.randn(4, NUM_SEQS * LENGTH, NUM_KV_HEADS, HEAD_SIZE).to(dense_dtype)
    pages = torch.zeros(spec.cache_shape(num_blocks), dtype=torch.uint8 if spec.dtype.is_quantized else dense_dtype)
    caches = pages[:, 0], pages[:, 1]
    slots = torch.arange(NUM_SEQS * LENGTH)
    scales = (SCALE, SCALE)

    def write(num_tokens: int) -> None:
        rows = key[:num_tokens], value[:num_tokens]
        kvjax_torch.reshape_and_cache_flash(*rows, *caches, slots[:num_tokens], dtype, *scales)

    def copy(num_tokens: int) -> None:
        for dense, rows in ((dense_keys, key), (dense_values, value)):
            dense.index_copy_(0, slots[:num_tokens], rows[:num_tokens])

    written = [
        compare(functools.partial(write, n), functools.partial(copy, n), calls * max(1, 64 // n)) for n in WRITES
    ]
    query = torch.randn(NUM_SEQS, NUM_HEADS, HEAD_SIZE).to(dense_dtype)
    table = torch.arange(num_blocks, dtype=torch.int32).view(NUM_SEQS, -1)
    lengths = torch.full((NUM_SEQS,), LENGTH, dtype=torch.int32)
    attend = functools.partial(kvjax_torch.paged_attention, query, *caches, table, lengths, dtype, *scales)
    dense = (x.view(NUM_SEQS, LENGTH, NUM_KV_HEADS, HEAD_SIZE).transpose(1, 2) for x in (dense_keys, dense_values))
    sdpa = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, query[:, :, None], *dense, enable_gqa=True
    )
    return [compare(attend, sdpa, calls), *written]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--calls", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ["one token a sequence", "over `scaled_dot_product_attention`"]
    for num_tokens in WRITES:
        names += [f"write of {num_tokens:,} tokens", "over `index_copy_`"]
    print(f"| dtype | {' | '.join(names)} |\n| --- |{' ---: |' * len(names)}")
    for dtype in options.dtypes:
        cells = [f"{number:.3g}" for pair in times(dtype, options.calls) for number in pair]
        print(f"| {dtype} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
