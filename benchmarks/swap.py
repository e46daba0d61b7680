"""Measures copies of blocks to the host and back, over CUDA's copy of as many bytes in one piece, and beside a step."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax import lax

from benchmarks import output, shapes, timing, workload
from benchmarks.measurement import OWN, Measurement
from kvjax import HostCaches, KVCache, KVCacheDType

PINNED = "pinned_host"


class SwapBenchmark(output.Program):
    def test_blocks(self) -> None:
        """Of all layers of a model: 8,192 tokens, and a number of blocks that is no power of two."""
        counts: tuple[int, ...] = output.by_device(gpu=(512, 100), host=(16,), smoke=(3,))
        for dtype, num_blocks in itertools.product(shapes.TIMED_DTYPES, counts):
            self._measure_blocks(dtype, num_blocks, num_layers=output.by_device(gpu=32, host=8, smoke=2))

    def _measure_blocks(self, dtype: KVCacheDType, num_blocks: int, num_layers: int) -> None:
        spec, rng, device = shapes.LLAMA_8B.spec(dtype), np.random.default_rng(0), jax.devices()[0]
        cache = KVCache.allocate(spec, 2 * num_blocks, num_layers=num_layers, sharding=device)
        bits = jax.random.bits(jax.random.key(0), cache.kv.shape, f"uint{8 * spec.array_dtype.itemsize}")
        cache = dataclasses.replace(cache, kv=lax.bitcast_convert_type(bits, spec.array_dtype))
        host = HostCaches(cache, 2 * num_blocks)
        pairs = np.stack([rng.permutation(2 * num_blocks)[:num_blocks] for _ in range(2)], axis=1)

        def store(_: int = 0) -> None:
            host.store(cache, pairs)

        store()
        loading = host.load(pairs[:, ::-1])
        empty = KVCache.allocate(spec, 2 * num_blocks, num_layers=num_layers, sharding=device)
        back = loading.into(empty).kv[pairs[:, 0]]
        if not jnp.array_equal(lax.bitcast_convert_type(back, bits.dtype), bits[pairs[:, 0]]):
            raise AssertionError(f"{dtype}: blocks came back from the host with other bytes")
        loading = host.load(pairs[:, ::-1])

        def load(_: int = 0) -> jax.Array:
            """Starts to load blocks while those of the last call are written."""
            nonlocal cache, loading
            following = host.load(pairs[:, ::-1])
            cache = loading.into(cache)
            loading = following
            return cache.kv

        block_bytes = num_layers * spec.page_size_bytes
        moved = num_blocks * block_bytes
        pinned = jax.device_put(cache.kv, cache.kv.sharding.with_memory_kind(PINNED))
        for direction, call in (("to the host", store), ("from the host", load)):
            wait = jax.block_until_ready if call is load else lambda _: host.wait()
            times, by_cuda = timing.measure_in_a_row(call, wait=wait, count=10), None
            host.wait()
            subject = {"direction": direction, "dtype": dtype, "num_blocks": num_blocks, "block_bytes": block_bytes}
            if workload.is_gpu():
                source, target = (cache.kv, pinned) if call is store else (pinned, cache.kv)
                by_cuda = measure_cuda_copy(source, target, moved)
                self.results.add(Measurement("swap", subject, "CUDA memcpy", by_cuda, moved))
            facts = {f"step_{what}_ns": round(1e9 * each) for what, each in steps_beside(call, host).items()}
            self.results.add(Measurement("swap", subject, OWN, times, moved, by_cuda, facts=facts))


def steps_beside(start: Callable[[], Any], host: HostCaches) -> dict[str, float]:
    """The seconds of a step of matrix products alone, and of one that copies were started before."""
    size = output.by_device(gpu=8192, host=256, smoke=64)
    matrix = jnp.full((size, size), 1 / size, jnp.bfloat16)

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 20, lambda _, y: y @ matrix, x)

    def run(before: Callable[[], Any]) -> float:
        host.wait()
        jax.block_until_ready(step(matrix))
        before()
        begin = time.perf_counter()
        jax.block_until_ready(step(matrix))
        return time.perf_counter() - begin

    samples = {"alone": lambda: None, "beside": start}
    return {what: float(np.median([run(before) for _ in range(7)])) for what, before in samples.items()}


def measure_cuda_copy(source: jax.Array, target: jax.Array, num_bytes: int) -> timing.Timing:
    """Times CUDA's copy of the first bytes of an array to another, of which one is in pinned host memory.

    By the driver, which is where a GPU is.
    """
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    pointers = [ctypes.c_uint64(array.unsafe_buffer_pointer()) for array in (target, source)]
    [device] = source.devices()

    def check(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA's driver: error {error}")

    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.local_hardware_id))
    check(driver.cuCtxSetCurrent(context))
    return timing.measure_in_a_row(
        lambda _: check(driver.cuMemcpyAsync(*pointers, ctypes.c_size_t(num_bytes), None)),
        count=20,
        wait=lambda _: check(driver.cuCtxSynchronize()),
    )


if __name__ == "__main__":
    absltest.main()
