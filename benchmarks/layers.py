"""Times a step over layers in a scan, compared with unrolled layers.

Run `python -m benchmarks.layers --json=layers.json` from the source tree. Each layer writes one token per sequence and
gathers the sequences. docs/scaling.md explains why the scan carries the cache instead of slicing it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import kvjax
from benchmarks import output, shapes, timing, workload
from benchmarks.measurement import Measurement
from benchmarks.operations import SCAN, SEPARATE, UNROLLED
from benchmarks.shapes import BLOCK_SIZE
from kvjax import AttentionSpec, KVCache, KVCacheDType

CASE, NUM_LAYERS = shapes.LLAMA_8B, 8
DTYPES = output.define_dtypes(shapes.TIMED_DTYPES)
MAX_SEQUENCES = 64

Scales = dict[str, jax.Array]


def write_and_read(
    cache: KVCache, hidden: jax.Array, table: jax.Array, scales: Scales, layer: Any = None
) -> tuple[KVCache, jax.Array]:
    """Runs one layer: writes the last token of each sequence, then gathers whole sequences.

    The next layer's input depends on the gathered values, without rounding.
    """
    options = {"layer": layer, "implementation": output.IMPLEMENTATION.value, **scales}
    slots = table[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1
    lengths = jnp.full(len(table), table.shape[1] * BLOCK_SIZE, jnp.int32)
    cache = kvjax.reshape_and_cache_flash(hidden, -hidden, cache, slots, unique_slots=True, **options)
    keys, values = kvjax.gather_kv(cache, table, lengths, dtype=hidden.dtype, **options)
    return cache, jnp.maximum(keys[:, 0], values[:, -1])


def scan(cache: KVCache, hidden: jax.Array, table: jax.Array, scales: Scales) -> tuple[Any, jax.Array]:
    """Scans over the layers of one cache, which is the carry."""

    def step(carry: tuple[KVCache, jax.Array], layer: jax.Array) -> tuple[tuple[KVCache, jax.Array], None]:
        return write_and_read(*carry, table, scales, layer), None

    return jax.lax.scan(step, (cache, hidden), jnp.arange(NUM_LAYERS, dtype=jnp.int32))[0]


def unrolled(cache: KVCache, hidden: jax.Array, table: jax.Array, scales: Scales) -> tuple[Any, jax.Array]:
    for layer in range(NUM_LAYERS):
        cache, hidden = write_and_read(cache, hidden, table, scales, layer)
    return cache, hidden


def separate(caches: list[KVCache], hidden: jax.Array, table: jax.Array, scales: Scales) -> tuple[Any, jax.Array]:
    written = []
    for cache in caches:
        cache, hidden = write_and_read(cache, hidden, table, scales)
        written.append(cache)
    return written, hidden


class Stepping:
    """A compiled step with donated caches; each call takes the caches that the previous call returned."""

    def __init__(self, step: Callable[..., Any], caches: Any, *others: Any) -> None:
        self.compiled = jax.jit(step, donate_argnums=0).lower(caches, *others).compile()
        self.caches, self.others = caches, others

    def __call__(self, number: int) -> jax.Array:
        self.caches, read = self.compiled(self.caches, *self.others)
        return read


def pages_of_a_layer(spec: AttentionSpec) -> int:
    """The number of pages that take 256 MiB in bfloat16 on a GPU; the same number for all dtypes."""
    page = dataclasses.replace(spec, dtype=KVCacheDType.BFLOAT16).page_size_bytes
    return max(workload.sizes().cache_bytes // (NUM_LAYERS * page), 2)


def steps(spec: AttentionSpec) -> dict[str, Stepping]:
    """Returns all variants of the step after checking that their first calls store and read the same bits."""
    num_blocks = pages_of_a_layer(spec)
    rng = np.random.default_rng(0)
    num_seqs = min(num_blocks, MAX_SEQUENCES)
    blocks = rng.permutation(num_blocks)[: num_blocks // num_seqs * num_seqs]
    table = jnp.asarray(blocks.reshape(num_seqs, -1), jnp.int32)
    hidden = jnp.asarray(rng.standard_normal((num_seqs, spec.num_kv_heads, spec.head_size)), jnp.bfloat16)
    one = functools.partial(KVCache.allocate, spec, num_blocks)
    others = hidden, table, workload.scales()
    found = {
        SCAN: Stepping(scan, one(num_layers=NUM_LAYERS), *others),
        UNROLLED: Stepping(unrolled, one(num_layers=NUM_LAYERS), *others),
        SEPARATE: Stepping(separate, [one() for _ in range(NUM_LAYERS)], *others),
    }
    read = [step(0) for step in found.values()]
    for other in read[1:]:
        workload.check_same_bits(read[0], other)
    for layer, cache in enumerate(found[SEPARATE].caches):
        for name in (SCAN, UNROLLED):
            workload.check_same_bits(found[name].caches.kv[:, layer], cache.kv)
    return found


class LayersBenchmark(output.Program):
    def test_a_step_over_layers(self) -> None:
        every = shapes.TIMED_DTYPES[-1:] if output.SMOKE.value else shapes.TIMED_DTYPES
        for dtype in output.chosen(DTYPES, KVCacheDType, every):
            with self.subTest(dtype=dtype.value):
                spec = CASE.spec(dtype)
                cache_bytes = NUM_LAYERS * pages_of_a_layer(spec) * spec.page_size_bytes
                subject = {**CASE.subject(dtype, spec.layout), "layers": NUM_LAYERS, "cache_bytes": cache_bytes}
                for peer, step in steps(spec).items():
                    facts = {"temporary_bytes": workload.temporary_bytes(step.compiled)}
                    times = timing.measure_in_a_row(step)
                    self.results.add(Measurement("step over layers", subject, peer, times, facts=facts))


if __name__ == "__main__":
    absltest.main()
