"""Measures serving twice the users that fit, from a host tier and without, and the way back of a sequence from there.

Run `python -m benchmarks.host_tier --json=host_tier.json` from the source tree. benchmarks/README.md explains it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from typing import Any

import jax
import numpy as np
from absl.testing import absltest

import kvjax
from benchmarks import output, serving, shapes, timing
from benchmarks.bars import COMPUTED_AGAIN
from benchmarks.measurement import OWN, Measurement, plain
from benchmarks.serving import ServeJob
from benchmarks.shapes import BLOCK_SIZE
from benchmarks.timing import Clock, Timing
from examples import llama
from examples.engine import Engine

DTYPES = output.define_dtypes(shapes.TIMED_DTYPES)
TURNS = 3
"""The first fills caches, the second compiles swaps of as many blocks as the third has, which is timed."""


class HostTierBenchmark(output.Program):
    def test_users(self) -> None:
        of = serving.scenario()
        for dtype in DTYPES.value or shapes.TIMED_DTYPES:
            job = ServeJob(of, dtype, 2 * of.others[0])
            with self.subTest(**plain(job.subject)):
                self._measure(job)

    def _measure(self, job: ServeJob) -> None:
        tokens, one = job.num_seqs * job.of.tail, dataclasses.replace(job, num_seqs=1)
        found = {}
        for peer, num_host_blocks in ((OWN, job.num_blocks), (COMPUTED_AGAIN, 0)):
            engine = engine_of(job, job.num_seqs // 2, job.of.chunk, num_host_blocks)
            prompts = random_prompts(job, job.num_seqs, job.of.seq_len - job.of.tail)
            for _ in range(TURNS):
                seconds, computed, found[peer] = serve(engine, prompts, job.of.tail)
            if peer == OWN and computed > job.num_seqs * (BLOCK_SIZE + job.of.tail):
                raise AssertionError(f"{computed} tokens were computed, more than those that are new")
            equal = sum(got == expected for got, expected in zip(found[peer], found[OWN], strict=True))
            facts = {"tokens_a_second": round(tokens / seconds), "computed_tokens": computed, "equal_users": equal}
            times = Timing((seconds,), Clock.HOST)
            self.results.add(Measurement("host tier users", job.subject, peer, times, facts=facts))
            if num_host_blocks:
                times, moved = swaps_in(engine, job), job.of.bytes_a_sequence(job.dtype)
                self.results.add(Measurement("host tier sequence", one.subject, OWN, times, moved))
            del engine
            gc.collect()
        # Alone, and in larger chunks than beside decodes, which is the fastest way to compute them.
        engine = engine_of(job, 1, 4 * job.of.chunk, 0)
        prompts = random_prompts(job, 4, job.of.seq_len - 1)
        alone = [serve(engine, prompt[None], 1)[0] for prompt in prompts][1:]
        times = Timing(tuple(alone), Clock.HOST)
        self.results.add(Measurement("host tier sequence", one.subject, COMPUTED_AGAIN, times))


def random_prompts(job: ServeJob, number: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(job.of.config.vocab_size, size=(number, length))


class CountingEngine(Engine):
    """An engine that counts the tokens that its steps compute."""

    num_computed = 0

    def _start(self, batch: Any) -> Any:
        self.num_computed += sum(len(new) for _, new in batch)
        return super()._start(batch)


def engine_of(job: ServeJob, num_seqs: int, chunk: int, num_host_blocks: int) -> CountingEngine:
    """Returns an engine that holds a number of sequences on the device, and evicted prefixes on the host."""
    device = jax.devices()[0]
    num_blocks = num_seqs * (job.blocks_a_seq + 1)  # the engine wants a free block for each running sequence
    pool = kvjax.BlockPool(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks)
    options: Any = {"config": job.of.config, "implementation": serving.implementation()}
    run = functools.partial(llama.greedy_step, serving.params(job.of, 1), **options)
    sizes: Any = {"num_seqs": [num_seqs], "max_blocks": job.blocks_a_seq, "chunk": chunk}
    num_layers = job.of.config.num_hidden_layers
    caches = kvjax.KVCache.allocate(job.spec, num_blocks, num_layers=num_layers, sharding=device)
    return CountingEngine(run, caches, pool, sharding=device, **sizes)


def serve(engine: CountingEngine, prompts: np.ndarray, num_new_tokens: int) -> tuple[float, int, list[list[int]]]:
    """Returns the seconds until all prompts have their new tokens, how many were computed, and the new ones."""
    before = engine.num_computed
    requests = [engine.submit(prompt.tolist(), num_new_tokens) for prompt in prompts]
    start = time.perf_counter()
    while not engine.is_idle:
        engine.step()
    seconds = time.perf_counter() - start
    if (lengths := {len(request.generated) for request in requests}) != {num_new_tokens}:
        raise AssertionError(f"requests ended with {lengths} tokens")
    return seconds, engine.num_computed - before, [request.generated for request in requests]


def swaps_in(engine: Engine, job: ServeJob) -> Timing:
    """Times copies of a sequence's blocks from the host, in random order, while those before them are written."""
    host, rng = kvjax.HostCaches(engine.caches, job.blocks_a_seq), np.random.default_rng(0)
    numbers = (host.num_blocks, engine.caches.num_blocks)
    pairs = np.stack([rng.permutation(number)[: job.blocks_a_seq] for number in numbers], axis=1)
    host.store(engine.caches, pairs[:, ::-1])
    loading = host.load(pairs)

    def call(_: int) -> jax.Array:
        nonlocal loading
        following = host.load(pairs)
        engine.caches = loading.into(engine.caches)
        loading = following
        return engine.caches.kv

    return timing.measure_in_a_row(call, count=10)


if __name__ == "__main__":
    absltest.main()
