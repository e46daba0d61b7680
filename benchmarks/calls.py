"""Host costs of calls: tracing and lowering a program of many layers, and dispatch with many caches.

Run `python -m benchmarks.calls --json=calls.json` from the source tree. docs/notes/costs.md has results.
`python -m benchmarks.calls CallsBenchmark.test_dispatch` measures only dispatch, which takes seconds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import kvjax
from benchmarks import ahead, output, shapes, timing
from benchmarks.measurement import Measurement
from benchmarks.shapes import BLOCK_SIZE
from benchmarks.timing import Clock, Timing
from kvjax import KVCache, KVCacheDType

CASE, NUM_LAYERS, NUM_CACHES = shapes.LLAMA_8B, 32, 64
NUM_SEQS, MAX_BLOCKS, NUM_BLOCKS = 4, 8, 64
UNQUANTIZED = KVCacheDType.BFLOAT16
DTYPES = (UNQUANTIZED, KVCacheDType.NVFP4)

WRITES, GATHERS, ATTENDS = "writes", "gathers", "attends"
STEPS = ((WRITES,), (WRITES, GATHERS), (WRITES, ATTENDS), (WRITES, GATHERS, ATTENDS))


def trace(what: tuple[str, ...], dtype: KVCacheDType, num_layers: int) -> tuple[float, float, int]:
    """Traces and lowers a decode step of unrolled layers for JAX's default backend, as the first one in a process.

    Returns:
      The seconds to trace, the seconds to lower, and the number of lines of StableHLO.
    """
    jax.default_backend()
    spec = CASE.spec(dtype)
    struct: Any = jax.ShapeDtypeStruct
    caches = [KVCache(struct(spec.cache_shape(NUM_BLOCKS), spec.array_dtype), spec) for _ in range(num_layers)]
    query = struct((NUM_SEQS, 4 * spec.num_kv_heads, spec.head_size), jnp.bfloat16)
    hidden = struct((NUM_SEQS, spec.num_kv_heads, spec.head_size), jnp.bfloat16)
    table, lengths = struct((NUM_SEQS, MAX_BLOCKS), jnp.int32), struct((NUM_SEQS,), jnp.int32)

    def step(caches: list[KVCache], query: Any, hidden: Any, table: Any, lengths: Any) -> Any:
        written, read = [], []
        for cache in caches:
            cache = kvjax.reshape_and_cache_flash(hidden, hidden, cache, table[:, -1] * BLOCK_SIZE)
            if GATHERS in what:
                read.append(kvjax.gather_kv(cache, table, lengths))
            if ATTENDS in what:
                query = kvjax.paged_attention(query, cache, table, lengths)
            written.append(cache)
        return written, read, query

    start = time.perf_counter()
    traced = jax.jit(step).trace(caches, query, hidden, table, lengths)
    between = time.perf_counter()
    lowered = traced.lower()
    end = time.perf_counter()
    return between - start, end - between, len(lowered.as_text().splitlines())


def dispatches() -> dict[str, Callable[[int], Any]]:
    """Returns calls of a trivial program that takes many caches, or the same number of arrays."""
    spec = CASE.spec(UNQUANTIZED)
    caches = [KVCache.allocate(spec, 1) for _ in range(NUM_CACHES)]
    arrays = [jnp.array(cache.kv) for cache in caches]
    held: dict[str, Any] = {"caches": caches, "arrays": arrays}
    read, returned = jax.jit(_read), jax.jit(lambda given: given, donate_argnums=0)

    def reads(kind: str, _: int) -> Any:
        return read(held[kind])

    def returns(kind: str, _: int) -> Any:
        held[kind] = returned(held[kind])
        return held[kind]

    return {
        f"{NUM_CACHES} {kind}, {how}": functools.partial(call, kind)
        for how, call in (("donated and returned", returns), ("read", reads))
        for kind in held
    }


def _read(given: Any) -> Any:
    """Reads an element of each array, because JAX drops unused arguments."""
    return sum(leaf.reshape(-1)[0] for leaf in jax.tree.leaves(given))


class CallsBenchmark(output.Program):
    def test_dispatch(self) -> None:
        calls = dispatches()
        for name, call in calls.items():
            self.results.add(Measurement("dispatch", {"dtype": UNQUANTIZED.value}, name, timing.measure_in_a_row(call)))

    def test_tracing(self) -> None:
        steps, repeats, num_layers = (STEPS[:1], 1, 2) if output.SMOKE.value else (STEPS, 5, NUM_LAYERS)
        for what in steps:
            found: dict[KVCacheDType, list[tuple[float, float, int]]] = {dtype: [] for dtype in DTYPES}
            for _ in range(repeats):  # interleaves the dtypes
                for dtype in DTYPES:
                    found[dtype].append(ahead.in_new_process(trace, what, dtype, num_layers))
            for dtype, each in found.items():
                traces, lowers, lines = zip(*each, strict=True)
                times = Timing(tuple(map(sum, zip(traces, lowers, strict=True))), Clock.WALL)
                subject: dict[str, Any] = {"dtype": dtype, "layers": num_layers, "step": " and ".join(what)}
                facts = {"trace_seconds": float(np.median(traces)), "lower_seconds": float(np.median(lowers))}
                facts["lines"] = lines[0]
                self.results.add(Measurement("trace and lower", subject, "kvjax", times, facts=facts))


if __name__ == "__main__":
    absltest.main()
