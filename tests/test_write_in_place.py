"""Where a write is in place: under jit with the cache donated, over layers and over a batch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import reference
from support.helpers import (
    FEW_DTYPES,
    INPUT_DTYPES,
    assert_same_bytes,
    can_write,
    each_case,
    kv_tokens,
    matrix,
    page_bytes,
    poisoned,
    simple_spec,
    skip_if_copied,
)

from kvjax import (
    STORED_KV_CACHE_DTYPES,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    gather_kv,
    reshape_and_cache_flash,
)

EACH_DTYPE = matrix({"dtype": STORED_KV_CACHE_DTYPES}, few={"dtype": FEW_DTYPES})
ARRAYS = {
    "NHD": {},
    "HND": {"layout": "HND"},
    "NHD-diffkv": {"head_size_v": 32},
    "HND-diffkv": {"head_size_v": 32, "layout": "HND"},
    "pool": {"page_size_padded": 9000},
    "swizzled": {"v_scale_layout": "swizzled"},
}
UNIT_AXES = {"": {}, "-one-head": {"num_kv_heads": 1}, "-one-token-blocks": {"block_size": 1}}
NUM_BLOCKS = 256
SLOTS = np.array([300, -1, 7, 8, 2000], np.int32)


def check_in_place(write, cache, *args) -> None:
    """`write(cache, *args)` keeps the donated cache's buffer and needs no memory that grows with the cache."""
    skip_if_copied(cache)
    compiled = jax.jit(write, donate_argnums=0).lower(cache, *args).compile()
    memory = compiled.memory_analysis()
    donated = jax.tree.leaves(cache)
    size = sum(leaf.nbytes for leaf in donated)
    inputs = sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    assert memory.alias_size_in_bytes == size
    # Float64 quotients of 16-bit tokens, and their slots; with few heads, what does not grow with them counts as well.
    assert memory.temp_size_in_bytes < 8 * inputs + 512 < size / 4
    before = [leaf.unsafe_buffer_pointer() for leaf in donated]
    written = compiled(cache, *args)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(written)] == before
    assert all(leaf.is_deleted() for leaf in donated)


# Each way that an array of a dtype may be shaped, axes of one among them, and a dtype of tokens.
DONATED = [
    {"dtype": dtype, "array": array, "unit": unit, "source": source}
    for dtype in STORED_KV_CACHE_DTYPES
    for array in ARRAYS
    for unit in UNIT_AXES
    for source in (["bfloat16"] if unit else ["float32", "bfloat16"])
    if array != "swizzled" or (dtype.parts[1].info.elements_per_scale and "block_size" not in UNIT_AXES[unit])
]


@each_case(DONATED)
def test_a_donated_cache_keeps_its_buffer(implementation, case):
    spec = simple_spec(case["dtype"], **ARRAYS[case["array"]], **UNIT_AXES[case["unit"]])
    key, value = kv_tokens(spec, len(SLOTS), INPUT_DTYPES[case["source"]])
    asked = implementation if can_write(implementation, spec) else None

    def write(cache, key, value, slots):
        return reshape_and_cache_flash(key, value, cache, slots, implementation=asked)

    check_in_place(write, KVCache.allocate(spec, 8 * NUM_BLOCKS // spec.block_size), key, value, SLOTS)


@matrix(
    {"dtype": STORED_KV_CACHE_DTYPES, "array": ARRAYS, "num_kv_heads": [1, 2], "num_tokens": [1, 2]},
    few={"num_tokens": [1]},
    valid=lambda case: case["array"] != "swizzled" or case["dtype"].parts[1].info.elements_per_scale,
)
def test_few_tokens_copy_no_cache(dtype, array, num_kv_heads, num_tokens):
    spec = simple_spec(dtype, num_kv_heads=num_kv_heads, **ARRAYS[array])
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(NUM_BLOCKS), spec.array_dtype), spec)
    skip_if_copied(cache)
    tokens = kv_tokens(spec, num_tokens)
    write = jax.jit(functools.partial(reshape_and_cache_flash, implementation="xla"), donate_argnums=2)
    memory = write.lower(*tokens, cache, SLOTS[:num_tokens]).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**14 < cache.kv.size


def test_many_caches_are_written_in_place_in_one_jit(implementation):
    caches = {dtype.value: KVCache.allocate(simple_spec(dtype), NUM_BLOCKS) for dtype in STORED_KV_CACHE_DTYPES}
    key, value = kv_tokens(simple_spec(), len(SLOTS))

    def write(caches, key, value, slots):
        return {
            name: reshape_and_cache_flash(key, value, cache, slots, implementation=implementation)
            for name, cache in caches.items()
        }

    check_in_place(write, caches, key, value, SLOTS)


def stacked_layers(dtype: KVCacheDType, num_layers: int) -> tuple[KVCache, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Caches of equal layers stacked on a leading axis, their tokens, and the bytes of each after the write."""
    spec = simple_spec(dtype)
    caches = [poisoned(spec, 4, seed) for seed in range(num_layers)]
    keys, values = (np.stack(x) for x in zip(*(kv_tokens(spec, 5, seed=i) for i in range(num_layers)), strict=True))
    slots = np.array([[3, 9, -1, 31, 12 + i] for i in range(num_layers)], np.int32)
    expected = [
        reference.write(page_bytes(cache), spec, keys[i], values[i], slots[i], 1.0, 1.0)
        for i, cache in enumerate(caches)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches), (keys, values, slots), expected


def check_stacked(written: KVCache, expected: list[np.ndarray]) -> None:
    for layer, bytes_of_layer in enumerate(expected):
        assert_same_bytes(page_bytes(jax.tree.map(lambda x, layer=layer: x[layer], written)), bytes_of_layer)


@EACH_DTYPE
def test_a_scan_writes_each_of_stacked_layers(implementation, dtype):
    stacked, tokens, expected = stacked_layers(dtype, 3)

    @jax.jit
    def write_layers(stacked, tokens):
        def layer(hidden, per_layer):
            cache, (key, value, slots) = per_layer
            cache = reshape_and_cache_flash(key, value, cache, slots, implementation=implementation)
            return hidden + key.sum(), cache

        return jax.lax.scan(layer, 0.0, (stacked, tokens))[1]

    check_stacked(write_layers(stacked, tokens), expected)


@EACH_DTYPE
def test_vmap_writes_each_cache_of_a_batch(implementation, dtype):
    stacked, (keys, values, slots), expected = stacked_layers(dtype, 3)
    write = functools.partial(reshape_and_cache_flash, implementation=implementation)
    write = jax.jit(jax.vmap(write), donate_argnums=2)
    check_stacked(write(keys, values, stacked, slots), expected)


def stored_sum(key, stop):
    key = jax.lax.stop_gradient(key) if stop else key
    cache = reshape_and_cache_flash(key, key, KVCache.allocate(simple_spec(KVCacheDType.FLOAT32), 1), np.arange(2))
    read, _ = gather_kv(cache, np.zeros((1, 1), np.int32), np.array([2]))
    return read.sum()


DERIVATIVES = {
    "grad": lambda f, x: jax.grad(f)(x),
    "jitted grad": lambda f, x: jax.jit(jax.grad(f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "jacobian": lambda f, x: jax.jacfwd(f)(x),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_gradient_is_refused_and_may_be_stopped(derivative):
    key = jnp.ones((2, 2, 64))
    with pytest.raises(
        KVCacheTypeError, match=r"differentiate with respect to key; .* Pass jax.lax.stop_gradient\(key\)"
    ):
        DERIVATIVES[derivative](lambda key: stored_sum(key, stop=False), key)
    assert not DERIVATIVES[derivative](lambda key: stored_sum(key, stop=True), key).any()
    moved = DERIVATIVES[derivative](lambda key: stored_sum(key, stop=True) + (3 * key).sum(), key)
    assert moved.any()  # what does not go through the cache has its gradient
