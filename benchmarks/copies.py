"""Measures copies that move as many bytes as an operation, by each method.

Their rate is the reference for all shares. Run as a program, they also check the clock.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from benchmarks import output, timing
from benchmarks.measurement import Measurement
from benchmarks.peers import cuda

GPU_BUFFER_BYTES, HOST_BUFFER_BYTES = 1 << 30, 1 << 26
"""Size of each of the two buffers that copies rotate through. The GPU size far exceeds the last-level cache."""


@functools.cache
def measure(bytes_moved: int) -> timing.Timing:
    """Returns the time of the fastest copy that reads one half of `bytes_moved` and writes the other."""
    return min(all_ways(bytes_moved).values(), key=lambda timed: timed.seconds)


def all_ways(bytes_moved: int) -> dict[str, timing.Timing]:
    """Times each copy method. GPUs use CUDA if it is available, otherwise XLA."""
    num_bytes = -(-bytes_moved // 2 // cuda.COPY_BYTES) * cuda.COPY_BYTES
    if jax.default_backend() != "gpu":
        return {"memcpy": _measure_on_host(num_bytes)}
    if cuda.why_missing():
        return {"XLA": _measure_in_xla(num_bytes)}
    source, target = _device_buffers(max(num_bytes, GPU_BUFFER_BYTES))
    return {
        "a CUDA kernel": cuda.measure_copy_by_kernel(source, target, num_bytes),
        "cudaMemcpyAsync": cuda.measure_memcpy(source, target, num_bytes),
    }


@functools.lru_cache(maxsize=1)
def _device_buffers(num_bytes: int) -> tuple[jax.Array, jax.Array]:
    random = jax.random.bits(jax.random.key(0), (num_bytes,), jnp.uint8)
    return jax.block_until_ready((random, jnp.full(num_bytes, 2, jnp.uint8)))


@functools.lru_cache(maxsize=1)
def _host_buffers(num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns buffers with all pages mapped, because the first access to a page takes longer than the copy."""
    return np.random.default_rng(0).integers(256, size=num_bytes, dtype=np.uint8), np.full(num_bytes, 2, np.uint8)


def _measure_on_host(num_bytes: int) -> timing.Timing:
    source, target = _host_buffers(max(num_bytes, HOST_BUFFER_BYTES))
    rotation = len(source) // num_bytes

    def call(number: int) -> None:
        part = slice(number % rotation * num_bytes, (number % rotation + 1) * num_bytes)
        np.copyto(target[part], source[part])

    return timing.measure(call, wait=lambda _: None)


def _measure_in_xla(num_bytes: int) -> timing.Timing:
    """Times the inversion of every bit, which moves as many bytes as a copy and which XLA does not elide."""
    source = jnp.arange(num_bytes // 4, dtype=jnp.uint32)
    invert = jax.jit(jnp.invert)
    return timing.measure(lambda _: invert(source))


class CopyBenchmark(output.Program):
    def test_sizes(self) -> None:
        sizes: tuple[int, ...] = output.by_device(gpu=(1, 8, 32, 128, 512), host=(1, 8, 32), smoke=(1,))
        for moved in (megabytes << 20 for megabytes in sizes):
            ways = all_ways(moved)
            fastest = min(ways.values(), key=lambda times: times.seconds)
            for way, times in ways.items():
                subject = {"bytes_moved": moved}
                self.results.add(Measurement("copy", subject, "copy", times, moved, fastest, {"way": way}))


if __name__ == "__main__":
    absltest.main()
