"""Caches of several layers: each layer's bytes are those of a cache of its own, in place inside a scan too."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from support import reference
from support.helpers import (
    assert_same_bytes,
    assert_same_floats,
    can_write,
    each_case,
    kv_tokens,
    poisoned,
    simple_spec,
    skip_if_copied,
)
from support.interpret_mode import interpret_mode

from kvjax import (
    AttentionSpec,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    checked,
    copy_blocks,
    gather_kv,
    nvfp4_split_views,
    paged_attention,
    reshape_and_cache_flash,
    swap_blocks,
)
from kvjax.kernels.write import WriteConfig

NUM_LAYERS, NUM_BLOCKS = 3, 4
BFLOAT16, FP8, NVFP4 = KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4
SPECS = {
    "bfloat16": simple_spec(BFLOAT16),
    "float32-one-head": simple_spec(KVCacheDType.FLOAT32, num_kv_heads=1),
    "fp8-HND-diffkv": simple_spec(FP8, layout="HND", head_size_v=32),
    "nvfp4-swizzled": simple_spec(NVFP4, layout="HND", v_scale_layout="swizzled", num_kv_heads=3),
    "nvfp4-pool": simple_spec(NVFP4, page_size_padded=1300),
}
EACH_SPEC = each_case(
    [{"name": name} for name in SPECS],
    few={"name": ["bfloat16", "fp8-HND-diffkv", "nvfp4-swizzled"]},
    argument="spec",
    make=lambda case: SPECS[case["name"]],
)

# Of each layer others; padding and slots past a layer's pages are in all of them.
SLOTS = np.array([[3, -1, 31, 8, 32, -7], [0, 9, -1, 40, 2**31 - 1, 30], [-1, 95, -(2**31), 17, 1, 31]], np.int32)


def poisoned_layers(spec: AttentionSpec, num_blocks: int = NUM_BLOCKS, seed: int = 0) -> KVCache:
    kv = poisoned(spec, num_blocks * NUM_LAYERS, seed).kv
    return KVCache(kv.reshape(spec.cache_shape(num_blocks, NUM_LAYERS)), spec, num_layers=NUM_LAYERS)


def layer_bytes(cache: KVCache) -> list[np.ndarray]:
    """The bytes of each layer, `[num_blocks, page_size_bytes]`, copied."""
    pages = np.asarray(cache.kv).reshape(*cache.kv.shape[:2], -1).view(np.uint8)
    return [pages[:, layer].copy() for layer in range(pages.shape[1])]


def layer_tokens(spec: AttentionSpec, dtype: object = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of each layer, `[num_layers, num_tokens, ...]`."""
    keys, values = zip(*(kv_tokens(spec, SLOTS.shape[1], dtype, seed) for seed in range(NUM_LAYERS)), strict=True)
    return np.stack(keys), np.stack(values)


def write_layers(cache, keys, values, slots, layers, implementation):
    """A model's step: a scan over its layers that carries the cache."""

    def write(cache, per_layer):
        key, value, slots, layer = per_layer
        return reshape_and_cache_flash(key, value, cache, slots, layer=layer, implementation=implementation), None

    return jax.lax.scan(write, cache, (keys, values, slots, layers))[0]


@functools.cache
def jitted(function, **static):
    return jax.jit(functools.partial(function, **static), donate_argnums=0)


@EACH_SPEC
def test_a_scan_writes_the_bytes_of_separate_caches(implementation, spec):
    asked = implementation if can_write(implementation, spec) else None
    cache, (keys, values) = poisoned_layers(spec), layer_tokens(spec)
    # The last two are none of the cache's layers.
    layers = np.array([1, 2, 0, NUM_LAYERS, -1], np.int32)
    rows = [np.concatenate([x, x[:2]]) for x in (keys, values, SLOTS)]
    expected = layer_bytes(cache)
    for i, layer in enumerate(layers[:3]):
        expected[layer] = reference.write(expected[layer], spec, keys[i], values[i], SLOTS[i], 1.0, 1.0)
    written = jitted(write_layers, implementation=asked)(cache, *rows, layers)
    assert (written.spec, written.num_layers) == (spec, NUM_LAYERS)
    for got, bytes_of_layer in zip(layer_bytes(written), expected, strict=True):
        assert_same_bytes(got, bytes_of_layer)


TABLE = np.array([[3, 0, -1], [2, 4, 1], [1, 2**31 - 1, -(2**31)]], np.int32)
LENGTHS = np.array([13, 24, 8], np.int32)


def read_layers(cache, query, layers, implementation):
    """What each layer holds, and its attention, of a scan that carries a query."""

    def read(query, layer):
        keys, values = gather_kv(cache, TABLE, LENGTHS, layer=layer, implementation=implementation)
        attended, lse = paged_attention(query, cache, TABLE, LENGTHS, layer=layer, return_lse=True)
        return query, (keys, values, attended, lse)

    return jax.lax.scan(read, query, layers)[1]


@EACH_SPEC
def test_a_scan_reads_what_separate_caches_hold(implementation, spec):
    asked = implementation if can_write(implementation, spec) else None
    cache, (query, _) = poisoned_layers(spec), kv_tokens(spec, len(TABLE), specials=False)
    layers = np.array([1, 2, 0, NUM_LAYERS, -1, 2**31 - 1], np.int32)
    read = jax.jit(functools.partial(read_layers, implementation=asked))(cache, query, layers)
    for i, layer in enumerate(layers):
        if 0 <= layer < NUM_LAYERS:
            alone = KVCache(cache.kv[:, layer], spec)
            expected = (
                *gather_kv(alone, TABLE, LENGTHS),
                *paged_attention(query, alone, TABLE, LENGTHS, return_lse=True),
            )
        else:
            expected = [np.full_like(x[i], 0 if part < 3 else -np.inf) for part, x in enumerate(read)]
        for got, wanted in zip(read[:2], expected[:2], strict=True):
            assert_same_floats(np.asarray(got[i]), np.asarray(wanted))
        for got, wanted in zip(read[2:], expected[2:], strict=True):
            np.testing.assert_allclose(got[i], wanted, rtol=1e-5, atol=1e-5)


PAIRS = np.array([[0, 3], [3, 1], [-1, 2], [2, 4]], np.int32)


@pytest.mark.parametrize("layer", [None, 1, jnp.int32(2), jnp.int32(NUM_LAYERS), jnp.int32(-1)], ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_blocks_are_copied_in_all_layers_or_in_one(layer, traced):
    spec = SPECS["nvfp4-swizzled"]
    layers = [i for i in range(NUM_LAYERS) if layer is None or i == int(layer)]
    source, destination = poisoned_layers(spec), poisoned_layers(spec, seed=1)
    within, between = layer_bytes(source), layer_bytes(destination)
    for i in layers:
        between[i][[3, 1]] = within[i][[0, 3]]
        within[i][[3, 1]] = within[i][[0, 3]]
    copy, swap = (functools.partial(function, pairs=PAIRS, layer=layer) for function in (copy_blocks, swap_blocks))
    copied = (jax.jit(copy) if traced else copy)(source)
    swapped = (jax.jit(swap) if traced else swap)(source, destination)
    for got, expected in ((copied, within), (swapped, between)):
        assert (got.spec, got.num_layers) == (spec, NUM_LAYERS)
        assert_same_bytes(np.stack(layer_bytes(got)), np.stack(expected))


def test_caches_of_different_numbers_of_layers_swap_no_blocks():
    source, destination = (KVCache.allocate(SPECS["bfloat16"], 2, num_layers=layers) for layers in (3, None))
    with pytest.raises(KVCacheValueError, match="destination: got num_layers=None, expected 3, as source has it"):
        swap_blocks(source, destination, PAIRS)


def test_nvfp4_views_of_several_layers_hold_those_of_each():
    cache = poisoned_layers(SPECS["nvfp4-swizzled"])
    for layer in range(NUM_LAYERS):
        alone = nvfp4_split_views(KVCache(cache.kv[:, layer], cache.spec))
        for of_all, of_one in zip(jax.tree.leaves(nvfp4_split_views(cache)), jax.tree.leaves(alone), strict=True):
            assert_same_bytes(np.asarray(of_all[:, layer]), np.asarray(of_one))


def test_checked_mode_names_a_layer_out_of_range():
    spec = SPECS["bfloat16"]
    cache, (key, value) = KVCache.allocate(spec, 2, num_layers=3), kv_tokens(spec, 1)
    message = "layer: got 3, expected between 0 and 2"
    with checked():
        with pytest.raises(KVCacheValueError, match=message):
            gather_kv(cache, TABLE[:, :0], LENGTHS * 0, layer=jnp.int32(3))
        write = checkify.checkify(
            lambda layer: reshape_and_cache_flash(key, value, cache, np.zeros(1, int), layer=layer)
        )
        error, _ = jax.jit(write)(3)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()


@EACH_SPEC
def test_a_scan_is_in_place(implementation, spec):
    asked = implementation if can_write(implementation, spec) else None
    num_blocks = 256
    cache, (keys, values) = KVCache.allocate(spec, num_blocks, num_layers=NUM_LAYERS), layer_tokens(spec)
    args = cache, keys, values, SLOTS, np.arange(NUM_LAYERS, dtype=np.int32)
    skip_if_copied(cache)
    write = jax.jit(functools.partial(write_layers, implementation=asked), donate_argnums=0)
    compiled = write.lower(*args).compile()
    memory, address = compiled.memory_analysis(), cache.kv.unsafe_buffer_pointer()
    assert memory.alias_size_in_bytes == cache.kv.nbytes
    assert memory.temp_size_in_bytes < 8 * keys.nbytes < cache.kv.nbytes / 4
    assert compiled(*args).kv.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("layer", [1, np.int64(1), jnp.int32(1)], ids=lambda layer: type(layer).__name__)
def test_one_layer_is_written_outside_jit(layer):
    spec = SPECS["bfloat16"]
    cache, (key, value) = poisoned_layers(spec), kv_tokens(spec, 6)
    expected = layer_bytes(cache)
    expected[1] = reference.write(expected[1], spec, key, value, SLOTS[0], 1.0, 1.0)
    written = reshape_and_cache_flash(key, value, cache, SLOTS[0], layer=layer)
    for got, bytes_of_layer in zip(layer_bytes(written), expected, strict=True):
        assert_same_bytes(got, bytes_of_layer)


@pytest.mark.parametrize(
    ("num_layers", "layer", "error", "message"),
    [
        (None, 0, KVCacheValueError, "layer: got 0 for a cache without num_layers, expected None"),
        (3, None, KVCacheValueError, "layer: got None for a cache of num_layers=3, expected the layer's number"),
        (3, 3, KVCacheValueError, "layer: got 3, expected an int of at most 2"),
        (3, -1, KVCacheValueError, "layer: got -1, expected an int of at least 0"),
        (3, True, KVCacheTypeError, "layer: got True of type bool, expected an int"),
        (3, "0", KVCacheTypeError, "layer: got '0' of type str, expected an int"),
        (3, jnp.zeros(1, jnp.int32), KVCacheValueError, "layer: got shape (1,), expected []"),
        (3, jnp.float32(0), KVCacheTypeError, "layer: got dtype float32, expected one of int32, int64"),
    ],
)
def test_a_layer_that_no_cache_has_is_refused(num_layers, layer, error, message):
    spec = SPECS["bfloat16"]
    key, value = kv_tokens(spec, 6)
    with pytest.raises(error) as raised:
        reshape_and_cache_flash(key, value, KVCache.allocate(spec, 2, num_layers=num_layers), SLOTS[0], layer=layer)
    assert str(raised.value).startswith(message)


@each_case([{"name": "fp8-HND-diffkv", "tokens": 1}, {"name": "nvfp4-swizzled", "tokens": 4}], few={"tokens": [1]})
def test_the_interpreted_kernel_writes_the_bytes_of_xla(case, monkeypatch):
    name, tokens = case["name"], case["tokens"]
    monkeypatch.setattr(WriteConfig, "choose", lambda *_, **__: WriteConfig(tokens))
    spec, written = SPECS[name], []
    key, value = kv_tokens(spec, SLOTS.shape[1])
    for implementation in ("mosaic", "xla"):
        write = jax.jit(functools.partial(reshape_and_cache_flash, implementation=implementation))
        with interpret_mode():
            cache = poisoned_layers(spec)
            for layer in (2, NUM_LAYERS, -1):
                cache = write(key, value, cache, SLOTS[0], layer=jnp.int32(layer))
            written.append(np.stack(layer_bytes(cache)))
    assert_same_bytes(*written)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fp8-HND-diffkv", "nvfp4-swizzled"])
def test_the_interpreted_kernel_reads_the_bits_of_xla(name):
    cache, read = poisoned_layers(SPECS[name]), []
    for implementation in ("mosaic", "xla"):
        gather = jax.jit(functools.partial(gather_kv, implementation=implementation))
        with interpret_mode():
            keys, values = zip(
                *(gather(cache, TABLE[:2], LENGTHS[:2], layer=jnp.int32(i)) for i in (2, NUM_LAYERS)), strict=True
            )
            read.append([np.stack(x).astype(np.float32) for x in (keys, values)])
    for mosaic, xla in zip(*read, strict=True):
        assert_same_floats(mosaic, xla)
