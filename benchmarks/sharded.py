"""Times a cache that is sharded by heads over several devices, compared with one device with equal work.

Run `python -m benchmarks.sharded --json=sharded.json` from the source tree. docs/scaling.md explains the table. Without
GPUs, `XLA_FLAGS=--xla_force_host_platform_device_count=2` creates two CPU devices.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from benchmarks import output, shapes, timing, workload
from benchmarks.measurement import Measurement, plain
from benchmarks.timing import Timing
from benchmarks.workload import WriteJob
from kvjax import STORED_KV_CACHE_DTYPES, KVCache

SEQUENCES, SEQ_BLOCKS = 64, 64  # of a gather: 64 requests of 1,024 tokens
CASE = shapes.LLAMA_8B  # the shard of each device; N devices have N times its heads

Call = Callable[[int], Any]


@functools.cache
def placed(*axes: str | None) -> NamedSharding:
    """Returns the sharding over all devices of arrays that `axes` divide."""
    return NamedSharding(Mesh(np.array(jax.devices()), ("tensor",), axis_types=(AxisType.Explicit,)), P(*axes))


def on_devices(cache: KVCache) -> KVCache:
    """Returns a sharded cache with `cache` as every shard."""
    sharding = placed(None, None, None, "tensor")
    spec = dataclasses.replace(cache.spec, num_kv_heads=cache.spec.num_kv_heads * jax.device_count())
    return KVCache(workload.on_each_device(cache.kv, sharding), spec, sharding)


def shares(array: jax.Array, like: jax.Array) -> list[jax.Array]:
    """Returns the shard of each device, copied to the device of `like`."""
    return [jax.device_put(shard.data, like.device) for shard in array.addressable_shards]


def writing_calls(job: WriteJob) -> tuple[Call, Call]:
    """Returns equal writes on one device and on several, after checking every byte of the first."""
    tokens = workload.Tokens(job.case, job.num_tokens)
    batches = tokens.batches(job.num_tokens)
    by_heads = placed(None, "tensor"), placed(None, "tensor"), placed()
    divided = [workload.Batch(*map(workload.on_each_device, batch, by_heads)) for batch in batches]
    one = workload.Write(tokens.poisoned(job.spec), batches, output.IMPLEMENTATION.value)
    many = workload.Write(on_devices(tokens.poisoned(job.spec)), divided, output.IMPLEMENTATION.value)
    expected = tokens.expected(job.spec, job.num_tokens)
    for write, wanted in ((one, expected), (many, on_devices(expected))):
        write(0)
        write.check(wanted)
    return one, many


def gathering_calls(job: WriteJob) -> tuple[Call, Call]:
    """Returns equal gathers on one device and on several, after checking every bit of their results."""
    pages, page = workload.default_pages(job.case, 1), job.spec.page_size_bytes // job.spec.array_dtype.itemsize
    stored = jax.random.bits(jax.random.key(0), (pages, page), f"uint{8 * job.spec.array_dtype.itemsize}")
    kv = jax.lax.bitcast_convert_type(stored, job.spec.array_dtype).reshape(job.spec.cache_shape(pages))
    one = KVCache(kv, job.spec)
    blocks = min(SEQ_BLOCKS, job.num_tokens // shapes.BLOCK_SIZE)
    table = jnp.asarray(np.random.default_rng(1).integers(0, pages, (SEQUENCES, blocks)), jnp.int32)
    lens = jnp.full(SEQUENCES, blocks * shapes.BLOCK_SIZE, jnp.int32)
    read = jax.jit(functools.partial(kvjax.gather_kv, dtype=jnp.bfloat16, implementation=output.IMPLEMENTATION.value))
    in_xla = jax.jit(functools.partial(kvjax.gather_kv, dtype=jnp.bfloat16, implementation="xla"))
    expected = in_xla(one, table, lens, **workload.scales())
    many, tables = on_devices(one), [workload.on_each_device(x, placed()) for x in (table, lens)]
    calls = (
        lambda _: read(one, table, lens, **workload.scales()),
        lambda _: read(many, *tables, **workload.scales()),
    )
    for got, wanted in zip(calls[1](0), expected, strict=True):
        for share in shares(got, wanted):
            workload.check_same_bits(share, wanted)
    return calls


def device_timings(one: Call, many: Call) -> tuple[Timing, Timing]:
    """Times a call on one device, and on each of several devices."""
    alone = timing.measure(one)
    try:
        together = timing.measure(many)
    except RuntimeError as error:  # with several kernels per call, timestamps of devices interleave arbitrarily
        warnings.warn(f"timing several devices by the host's clock: {error}", stacklevel=2)
        return alone, timing.measure_in_a_row(many)
    # Timestamps do not name their device, so divide the sum over all devices by their number.
    seen = len(together.kernels) // len(alone.kernels) if alone.kernels else 1
    return alone, Timing(tuple(seconds / seen for seconds in together.samples), together.clock, together.kernels)


class ShardedBenchmark(output.Program):
    def test_equal_work_on_each_device(self) -> None:
        devices = jax.devices()
        if len(devices) < 2:
            self.results.skip("several devices", "needs 2 devices, and there is 1")
            return
        sizes: tuple[int, ...] = output.by_device(gpu=(256, 16_384), host=(64,), smoke=(8,))
        gathered = shapes.BLOCK_SIZE * (SEQ_BLOCKS if workload.is_gpu() else 1)
        jobs = [
            (operation, WriteJob(CASE, dtype, num_tokens))
            for dtype in (shapes.TIMED_DTYPES if output.SMOKE.value else STORED_KV_CACHE_DTYPES)
            for operation, num_tokens in (*(("sharded write", size) for size in sizes), ("sharded gather", gathered))
        ]
        for operation, job in jobs:
            with self.subTest(operation=operation, **plain(job.subject)):
                calls = (writing_calls if operation == "sharded write" else gathering_calls)(job)
                timed = (*device_timings(*calls), *map(timing.measure_in_a_row, calls))
                peers = [("one device", 1), (f"{len(devices)} devices", len(devices))] * 2
                for number, ((peer, count), times) in enumerate(zip(peers, timed, strict=True)):
                    facts = {"kv_heads_a_device": CASE.num_kv_heads} | ({"in_a_row": True} if number >= 2 else {})
                    subject = {**job.subject, "devices": count}
                    self.results.add(Measurement(operation, subject, peer, times, facts=facts))


if __name__ == "__main__":
    absltest.main()
