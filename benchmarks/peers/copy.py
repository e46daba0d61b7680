"""The copy that a device makes of as many bytes as an operation moves: the rate at which memory goes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.peers import cuda
from kvjax.table import markdown_table

BUFFER_BYTES = 1 << 30
"""Copies rotate through two buffers of this size, far more than a last-level cache holds."""


@functools.cache
def copy_seconds(bytes_moved: int) -> float | None:
    """Seconds of a copy that reads one half of `bytes_moved` and writes the other: the fastest of all ways to copy.

    `None` without a GPU: the time of a copy on the host is that of its page faults and of what else runs there.
    """
    if jax.default_backend() != "gpu":
        return None
    return min(all_copy_seconds(bytes_moved).values())


def all_copy_seconds(bytes_moved: int) -> dict[str, float]:
    """Seconds of that copy, by the way it is made; with plain CUDA where that can be built, else in XLA."""
    num_bytes = -(-bytes_moved // 2 // cuda.COPY_BYTES) * cuda.COPY_BYTES
    if not cuda.is_available():
        return {"XLA": _measure_in_xla(num_bytes).seconds}
    source, target = _buffers(max(num_bytes, BUFFER_BYTES))
    return {
        "a CUDA kernel": cuda.measure_copy_by_kernel(source, target, num_bytes).seconds,
        "cudaMemcpyAsync": cuda.memcpy_seconds(source, target, num_bytes),
    }


@functools.lru_cache(maxsize=1)
def _buffers(num_bytes: int) -> tuple[jax.Array, jax.Array]:
    return jax.block_until_ready((jnp.full(num_bytes, 1, jnp.uint8), jnp.full(num_bytes, 2, jnp.uint8)))


def _measure_in_xla(num_bytes: int) -> timing.Timing:
    """Times the inversion of every bit, which moves what a copy moves and which XLA does not elide."""
    source = jnp.arange(num_bytes // 4, dtype=jnp.uint32)
    invert = jax.jit(jnp.invert)
    return timing.measure(lambda _: invert(source))


def print_rates() -> None:
    """Prints the rate of copies of known size, which is the device's memory bandwidth past the size of its caches."""
    device = jax.devices()[0]
    clock = timing.measure(jax.jit(lambda number: number + 1)).clock
    print(f"{device.device_kind}; {clock}; bytes read plus bytes written\n")
    rows = [
        [f"{megabytes} MiB", way, f"{seconds * 1e6:,.2f}", f"{(megabytes << 20) / seconds / 1e9:,.0f}"]
        for megabytes in (1, 32, 128, 512)
        for way, seconds in all_copy_seconds(megabytes << 20).items()
    ]
    print(markdown_table(["moved", "copied by", "us", "GB/s"], rows, left=2))
