"""Swaps pages between devices, and spread over them, and asks for what cannot be; run on four simulated CPU devices."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import (
    AttentionSpec,
    KVCache,
    KVCacheDType,
    KVCacheMemoryError,
    KVCacheValueError,
    UnsupportedError,
    memory,
    swap_blocks,
)
from support.helpers import assert_same_bytes, kv_tokens, page_bytes, poison, poisoned, simple_spec

DEVICES = jax.devices()
MESHES = [jax.make_mesh((4,), ("heads",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit)]
OUT, BACK = np.array([[0, 2], [3, 0], [-1, 1]], np.int32), np.array([[2, 1], [0, 2]], np.int32)


def pointers(cache: KVCache) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in cache.kv.addressable_shards]


def check_out_and_back(spec: AttentionSpec, where: Sharding, on_host: Sharding) -> None:
    cache = jax.device_put(poisoned(spec, 4), where)
    host = jax.device_put(poisoned(spec, 3, seed=1), on_host)
    # Not of these: NumPy may keep what it read of an array, which JAX then copies instead of writing in place.
    before, host_before = page_bytes(poisoned(spec, 4)), page_bytes(poisoned(spec, 3, seed=1))
    at = pointers(host)
    swapped = swap_blocks(cache, host, OUT)
    assert pointers(swapped) == at
    assert not cache.kv.is_deleted()
    host_before[OUT[:2, 1]] = before[OUT[:2, 0]]

    at = pointers(cache)
    back = swap_blocks(swapped, cache, BACK)
    assert pointers(back) == at
    assert back.kv.sharding.is_equivalent_to(where, back.kv.ndim)
    assert_same_bytes(page_bytes(swapped), host_before)
    before[BACK[:, 1]] = host_before[BACK[:, 0]]
    assert_same_bytes(page_bytes(back), before)


def check_on_host(spec: AttentionSpec, where: Sharding) -> None:
    """Each device keeps what it holds on the host."""
    cache, others = (jax.device_put(poisoned(spec, 4, seed), where) for seed in (0, 2))
    host = poison(kvjax.HostCaches(cache, 3))
    expected = page_bytes(poisoned(spec, 4, 2))
    expected[BACK[:, 1]] = page_bytes(cache)[OUT[:2, 0]]
    host.store(cache, OUT[:2])
    at = pointers(others)
    back = host.load(BACK).into(others)
    assert pointers(back) == at
    assert back.kv.sharding.is_equivalent_to(where, back.kv.ndim)
    assert_same_bytes(page_bytes(back), expected)
    host.wait()


def main() -> None:
    for dtype in (KVCacheDType.BFLOAT16, KVCacheDType.NVFP4):
        one = SingleDeviceSharding(DEVICES[1])
        check_out_and_back(simple_spec(dtype), one, SingleDeviceSharding(DEVICES[0]))
        check_on_host(simple_spec(dtype), one)
    spec = simple_spec(num_kv_heads=8)
    for mesh, axes in itertools.product(MESHES, (P(None, None, None, "heads"), P("heads"), P())):
        where = NamedSharding(mesh, axes)
        check_out_and_back(spec, where, SingleDeviceSharding(DEVICES[0]))
        if axes == P("heads"):
            with pytest.raises(UnsupportedError, match="expected blocks that are not divided"):
                kvjax.HostCaches(jax.device_put(poisoned(spec, 4), where), 3)
        else:
            check_on_host(spec, where)
            with jax.set_mesh(mesh):
                check_on_host(spec, where)
        copied = jax.jit(kvjax.copy_blocks, donate_argnums=0)
        spread = jax.device_put(poisoned(spec, 4), NamedSharding(mesh, axes))
        expected = page_bytes(poisoned(spec, 4))
        expected[1] = expected[3]
        written = copied(spread, np.int32([[3, 1], [2, -1]]))
        assert_same_bytes(page_bytes(written), expected)
        assert written.kv.sharding.is_equivalent_to(NamedSharding(mesh, axes), written.kv.ndim)

    with pytest.raises(UnsupportedError, match=r"caches\[1\]: got a cache on .*, expected the devices of caches\[0\]"):
        kvjax.HostCaches([jax.device_put(poisoned(spec, 4), device) for device in DEVICES[:2]], 3)
    cache = jax.device_put(poisoned(spec, 4), DEVICES[1])
    before = page_bytes(cache)
    key, value = kv_tokens(spec, 2)
    slots, table, lens = np.int32([1, 2]), np.int32([[0]]), np.int32([3])
    elsewhere = [jax.device_put(x, DEVICES[2]) for x in (key, value, slots, table, lens)]
    calls = {
        "key": lambda: kvjax.reshape_and_cache_flash(elsewhere[0], value, cache, slots),
        "value": lambda: kvjax.reshape_and_cache_flash(key, elsewhere[1], cache, slots),
        "slot_mapping": lambda: kvjax.reshape_and_cache_flash(key, value, cache, elsewhere[2]),
        "k_scale": lambda: kvjax.gather_kv(cache, table, lens, k_scale=jax.device_put(1.0, DEVICES[2])),
        "block_table": lambda: kvjax.gather_kv(cache, elsewhere[3], lens),
        "seq_lens": lambda: kvjax.paged_attention(key[:1], cache, table, elsewhere[4]),
        "query": lambda: kvjax.paged_attention(elsewhere[0][:1], cache, table, lens),
        "pairs": lambda: kvjax.copy_blocks(cache, jax.device_put(OUT, DEVICES[2])),
    }
    for name, call in calls.items():
        with pytest.raises(KVCacheValueError) as raised:
            call()
        message = f"{name}: got an array on {DEVICES[2]}, expected {DEVICES[1]}, where the cache is; move it there"
        assert str(raised.value).startswith(message), raised.value
    assert_same_bytes(page_bytes(cache), before)
    with pytest.raises(ValueError, match="incompatible devices"):  # JAX's own, which comes first
        jax.jit(kvjax.reshape_and_cache_flash)(elsewhere[0], elsewhere[1], cache, slots)
    # What was put nowhere in particular goes where the cache is, and a swap takes its pairs from anywhere.
    kvjax.reshape_and_cache_flash(jax.numpy.asarray(key), value, cache, jax.numpy.asarray(slots))
    swap_blocks(cache, poisoned(spec, 4), jax.device_put(OUT, DEVICES[2]))

    check_what_would_fit()


def check_what_would_fit() -> None:
    """Of a cache that is spread, every device holds a part: the one with the least left decides."""
    spec = simple_spec(num_kv_heads=8)
    memory._free_bytes = lambda device: (100 + device.id) * spec.page_size_bytes
    for axes, pages, device in ((P(None, None, None, "heads"), 400, 0), (P("heads"), 400, 0), (P(), 100, 0)):
        with pytest.raises(KVCacheMemoryError) as raised:
            KVCache.allocate(spec, 2**40, sharding=NamedSharding(MESHES[0], axes))
        assert f"expected at most {pages}: " in str(raised.value), raised.value
        assert f"are free on {DEVICES[device]}." in str(raised.value), raised.value


if __name__ == "__main__":
    main()
