"""Measures `swap_blocks` to and from pinned host memory, over CUDA's copy of as many bytes in one piece."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax import lax
from jax.sharding import SingleDeviceSharding

from benchmarks import output, shapes, timing, workload
from benchmarks.measurement import OWN, Measurement
from kvjax import KVCache, KVCacheDType, swap_blocks

PINNED = "pinned_host"


class SwapBenchmark(output.Program):
    def test_blocks(self) -> None:
        """Of all layers of a model: 8,192 tokens, and a number of blocks that is no power of two."""
        counts: tuple[int, ...] = output.by_device(gpu=(512, 100), host=(16,), smoke=(3,))
        for dtype, num_blocks in itertools.product(shapes.TIMED_DTYPES, counts):
            self._measure_blocks(dtype, num_blocks, num_layers=output.by_device(gpu=32, host=8, smoke=2))

    def _measure_blocks(self, dtype: KVCacheDType, num_blocks: int, num_layers: int) -> None:
        spec, rng, device = shapes.LLAMA_8B.spec(dtype), np.random.default_rng(0), jax.devices()[0]
        places = {"device": SingleDeviceSharding(device), PINNED: SingleDeviceSharding(device, memory_kind=PINNED)}
        shape = {"num_blocks": 2 * num_blocks, "num_layers": num_layers}
        caches = {place: KVCache.allocate(spec, sharding=where, **shape) for place, where in places.items()}
        bits = jax.random.bits(jax.random.key(0), caches["device"].kv.shape, f"uint{8 * spec.array_dtype.itemsize}")
        caches["device"] = dataclasses.replace(caches["device"], kv=lax.bitcast_convert_type(bits, spec.array_dtype))
        pairs = np.stack([rng.permutation(2 * num_blocks)[:num_blocks] for _ in range(2)], axis=1)
        columns = {PINNED: pairs, "device": pairs[:, ::-1]}

        def swapped(to: str, _: int = 0) -> jax.Array:
            [source] = places.keys() - {to}
            caches[to] = swap_blocks(caches[source], caches[to], columns[to])
            return caches[to].kv

        swapped(PINNED)
        empty = KVCache.allocate(spec, sharding=device, **shape)
        back = swap_blocks(caches[PINNED], empty, columns["device"]).kv[pairs[:, 0]]
        if not jnp.array_equal(lax.bitcast_convert_type(back, bits.dtype), bits[pairs[:, 0]]):
            raise AssertionError(f"{dtype}: blocks came back from the host with other bytes")
        block_bytes = num_layers * spec.page_size_bytes
        moved = num_blocks * block_bytes
        for direction, to in (("to pinned_host", PINNED), ("from pinned_host", "device")):
            times, by_cuda = timing.measure_in_a_row(functools.partial(swapped, to), count=10), None
            subject = {"direction": direction, "dtype": dtype, "num_blocks": num_blocks, "block_bytes": block_bytes}
            if workload.is_gpu():
                [source] = places.keys() - {to}
                by_cuda = measure_cuda_copy(caches[source].kv, caches[to].kv, moved)
                self.results.add(Measurement("swap", subject, "CUDA memcpy", by_cuda, moved))
            self.results.add(Measurement("swap", subject, OWN, times, moved, by_cuda))


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
