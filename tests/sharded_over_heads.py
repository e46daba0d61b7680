"""Writes, reads and attends with caches sharded over heads on four devices: right, in place, without communication.

A program of its own because JAX fixes the number of simulated devices (`XLA_FLAGS`) when it starts. Its argument says
how the mesh's axis is typed: `Auto` or, what `jax.make_mesh` takes by default, `Explicit`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import assert_same_bytes, kv_tokens, page_bytes, poisoned, simple_spec
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax import (
    AttentionSpec,
    KVCache,
    KVCacheDType,
    UnsupportedError,
    gather_kv,
    paged_attention,
    reshape_and_cache_flash,
    reshape_and_cache_flash_diffkv,
)

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
MESH = jax.make_mesh((4,), ("heads",), axis_types=(AxisType[sys.argv[1]],))
BY_HEAD = NamedSharding(MESH, P(None, "heads", None))
SLOTS, TABLE, LENS = np.array([9, -1, 30, 2], np.int32), np.array([[1, 3]], np.int32), np.array([16], np.int32)


def run_without_collectives(f: Any, *args: Any, **options: Any) -> Any:
    compiled = jax.jit(f, **options).lower(*args).compile()
    assert not any(name in compiled.as_text() for name in COLLECTIVES)
    return compiled(*args)


def device_pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def check_head_axis(spec: AttentionSpec, axis: int) -> None:
    """A cache whose array has an axis of heads may be sharded over it as any array is."""
    sharding = NamedSharding(MESH, P(*[None] * axis, "heads"))
    assert KVCache.allocate(spec, 4, sharding=sharding).kv.sharding == sharding
    poison = poisoned(spec, 4)
    cache = jax.device_put(poison, sharding)
    key, value = kv_tokens(spec, 4)
    expected = reference.write(page_bytes(poison), spec, key, value, SLOTS, 1.0, 1.0)

    pointers = device_pointers(cache.kv)
    key, value = (jax.device_put(x, BY_HEAD) for x in (key, value))
    written = run_without_collectives(reshape_and_cache_flash_diffkv, key, value, cache, SLOTS, donate_argnums=2)
    assert written.kv.sharding.is_equivalent_to(sharding, written.kv.ndim)
    assert device_pointers(written.kv) == pointers
    assert_same_bytes(page_bytes(written), expected)

    query = jax.device_put(np.ones((1, 16, spec.head_size), np.float32), BY_HEAD)
    dense = run_without_collectives(gather_kv, written, TABLE, LENS)
    attended = run_without_collectives(paged_attention, query, written, TABLE, LENS)
    for result, head_axis in (*((x, 2) for x in dense), (attended, 1)):
        assert result.sharding.is_equivalent_to(NamedSharding(MESH, P(*[None] * head_axis, "heads")), result.ndim)


def check_local_caches(spec: AttentionSpec, *, check_vma: bool) -> None:
    """An NVFP4 page holds its heads in an order of bytes: each device has pages of its own heads, under shard_map."""
    caches = [poisoned(spec, 4, seed) for seed in range(4)]
    key, value = kv_tokens(simple_spec(num_kv_heads=4 * spec.num_kv_heads), 4)
    # Not NumPy's memory, which JAX may borrow and then cannot give away.
    stacked = jax.device_put(jnp.stack([cache.kv for cache in caches]), NamedSharding(MESH, P("heads")))

    def write_local(kv: jax.Array, key: jax.Array, value: jax.Array, implementation: str | None = None) -> jax.Array:
        cache = KVCache(kv[0], spec)
        return reshape_and_cache_flash(key, value, cache, SLOTS, implementation=implementation).kv[None]

    specs = P("heads"), BY_HEAD.spec, BY_HEAD.spec
    write = jax.shard_map(write_local, mesh=MESH, in_specs=specs, out_specs=P("heads"), check_vma=check_vma)
    if check_vma:
        ask = functools.partial(write_local, implementation="mosaic")
        with pytest.raises(UnsupportedError, match="check_vma=False"):
            jax.shard_map(ask, mesh=MESH, in_specs=specs, out_specs=P("heads"))(
                stacked, *(jax.device_put(x, BY_HEAD) for x in (key, value))
            )
    pointers = device_pointers(stacked)
    sharded_tokens = (jax.device_put(x, BY_HEAD) for x in (key, value))
    written = run_without_collectives(write, stacked, *sharded_tokens, donate_argnums=0)
    assert device_pointers(written) == pointers
    written = np.asarray(written)
    for device, cache in enumerate(caches):
        heads = slice(device * spec.num_kv_heads, (device + 1) * spec.num_kv_heads)
        expected = reference.write(page_bytes(cache), spec, key[:, heads], value[:, heads], SLOTS, 1.0, 1.0)
        assert_same_bytes(written[device].reshape(4, -1), expected)


def main() -> None:
    for check_vma in (True, False):
        check_local_caches(simple_spec(KVCacheDType.NVFP4, v_scale_layout="swizzled"), check_vma=check_vma)
    for dtype, layout, head_size_v, axis in (
        (KVCacheDType.BFLOAT16, "NHD", 64, 3),
        (KVCacheDType.FP8_E4M3, "HND", 64, 2),
        (KVCacheDType.FP8_E4M3, "NHD", 32, 2),
        (KVCacheDType.BFLOAT16, "HND", 32, 1),
    ):
        check_head_axis(simple_spec(dtype, num_kv_heads=8, layout=layout, head_size_v=head_size_v), axis)


if __name__ == "__main__":
    main()
