"""Times a serving step's attention on this GPU, per kernel, and compares its result with XLA's.

    PYTHONPATH=. python tools/time_ragged_attention.py [--dtype=nvfp4] [--step=chunk] [--kernels]

Times are device times (CUPTI) of calls that alternate between several caches, so that none is in L2.
"""

from __future__ import annotations

import argparse
import collections
import functools
import re
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import timing

NUM_CACHES = 4

# For each sequence, its query tokens and its total tokens; and the static sizes of the program.
STEPS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "chunk": ([(2048, 8192)], {"max_q_len": 2048}),
    "chunks": ([(512, 4096)] * 8, {"max_q_len": 512, "max_prompts": 8}),
    "whole": ([(8192, 8192)], {"max_q_len": 8192}),
    "mixed": ([(1024, 4096), *[(1, 4096)] * 63], {"max_q_len": 1024, "max_prompts": 1}),
    "speculative": ([(4, 4096)] * 64, {"max_q_len": 4}),
    "window": ([(2048, 8192)], {"max_q_len": 2048, "sliding_window": 1024}),
    "soft cap": ([(2048, 8192)], {"max_q_len": 2048, "logits_soft_cap": 50.0}),
    "by default": ([(1024, 4096), *[(1, 4096)] * 63], {}),
    "prefix": ([(64, 8256)], {"max_q_len": 64}),
}


def build(steps: list[tuple[int, int]], dtype: str) -> tuple[Any, list[kvjax.KVCache], tuple[Any, ...], dict[str, Any]]:
    """Returns the query, caches, tables and scales of a step."""
    spec = kvjax.FullAttentionSpec(16, 8, 128, dtype=kvjax.KVCacheDType(dtype))
    q_lens, lens = np.array(steps, np.int32).T
    blocks = -(-lens // spec.block_size)
    table = np.full((len(lens), max(blocks)), -1, np.int32)
    order = iter(np.random.default_rng(0).permutation(sum(blocks)))
    for row, count in zip(table, blocks, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    scales = {"k_scale": 0.006, "v_scale": 0.006} if dtype == "nvfp4" else {}
    write = jax.jit(functools.partial(kvjax.reshape_and_cache_flash, unique_slots=True, **scales), donate_argnums=2)
    caches = []
    for seed in range(NUM_CACHES):
        num_tokens = sum(blocks) * spec.block_size
        tokens = jax.random.normal(jax.random.key(seed), (2, num_tokens, 8, 128), jnp.bfloat16)
        caches.append(write(*tokens, kvjax.KVCache.allocate(spec, sum(blocks)), jnp.arange(num_tokens)))
    query = jax.random.normal(jax.random.key(9), (sum(q_lens), 32, 128), jnp.bfloat16)
    tables = jnp.array(table), jnp.array(lens), jnp.array(np.cumsum([0, *q_lens], dtype=np.int32))
    return query, caches, tables, scales


def by_kernel(call: Any, calls: int = 20) -> dict[str, float]:
    """Returns the median microseconds of a call's kernels, summed by name."""
    cupti = timing._cupti()
    if cupti is None:
        return {}
    jax.block_until_ready(call(0))
    cupti._cupti_init()
    try:
        jax.block_until_ready([call(number) for number in range(calls)])
    finally:
        records = cupti._cupti_get_timings(False)
    each: dict[str, float] = collections.Counter()
    count = len(records) // calls
    for i in range(count):
        each[re.sub(r"_\d+$", "", records[i][0])] += 1e3 * statistics.median(x for _, x in records[i::count])
    return dict(sorted(each.items(), key=lambda item: -item[1]))


def main() -> None:
    """Times the requested steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="nvfp4")
    parser.add_argument("--step", choices=STEPS, help="default: all")
    parser.add_argument("--kernels", action="store_true", help="also print the time of each kernel")
    given = parser.parse_args()
    for name in [given.step] if given.step else STEPS:
        steps, options = STEPS[name]
        query, caches, tables, scales = build(steps, given.dtype)
        attend = functools.partial(kvjax.ragged_paged_attention, return_lse=True, **scales, **options)
        run, reference = (jax.jit(functools.partial(attend, implementation=which)) for which in ("mosaic", "xla"))
        got, expected = (jax.tree.map(np.float32, f(query, caches[0], *tables)) for f in (run, reference))
        errors = [np.abs(x - y).max() for x, y in zip(got, expected, strict=True)]

        def call(number: int, run: Any = run, args: Any = (query, caches, tables)) -> Any:
            return run(args[0], args[1][number % NUM_CACHES], *args[2])

        measured = timing.measure(call)
        temp = run.lower(query, caches[0], *tables).compile().memory_analysis().temp_size_in_bytes
        print(
            f"{name}: {measured.seconds * 1e6:,.1f} us ({measured.clock}), {len(measured.kernels)} kernels,"
            f" {temp / 2**20:,.0f} MiB of temporary arrays; largest difference from XLA {errors[0]:.2g} of values up to"
            f" {np.abs(expected[0]).max():.2g}, of log-sum-exp {errors[1]:.2g}"
        )
        if given.kernels:
            for kernel, microseconds in by_kernel(call).items():
                print(f"    {microseconds:8.2f} us {kernel[:100]}")


if __name__ == "__main__":
    main()
