"""Every byte of a cache after a write: the written ones as support/reference.py gives them, all others untouched."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.helpers import (
    FEW_DTYPES,
    FP8_NAMES,
    INPUT_DTYPES,
    assert_same_bytes,
    cache_from_bytes,
    can_write,
    each_case,
    kv_tokens,
    matrix,
    page_bytes,
    pairwise,
    poisoned,
    run_write,
    simple_spec,
)

from kvjax import (
    STORED_KV_CACHE_DTYPES,
    KVCacheDType,
    KVCacheTypeError,
    reshape_and_cache_flash,
    unify_page_sizes,
)
from kvjax.ops.rows import MAX_SLOTS_PER_TOKEN, last_of_each_slot

NVFP4, BFLOAT16 = KVCacheDType.NVFP4, KVCacheDType.BFLOAT16

AXES = {
    "dtype": [dtype.value for dtype in STORED_KV_CACHE_DTYPES],
    "input_dtype": list(INPUT_DTYPES),
    "layout": ["NHD", "HND", "NHD-diffkv", "HND-diffkv"],
    "v_scale_layout": ["linear", "swizzled"],
    "head_size": [64, 80, 96, 112, 128, 192, 256],
    "num_kv_heads": [1, 2, 3, 5, 8, 16],
    "block_size": [1, 8, 16, 64],
    "scale": ["one", "scalar", "per_head"],
    "slots": ["shuffled", "padded", "out_of_range", "none"],
    "page": ["exact", "pool", "padded_pool"],
}
HEAD_SIZE_V = {64: 80, 80: 64, 96: 192, 112: 16, 128: 96, 192: 128, 256: 32}
SCALES = {"one": (1.0, 1.0), "scalar": (0.0173, 1.9)}


def is_valid(case: dict) -> bool:
    can_swizzle = "nvfp4" in case["dtype"] and case["block_size"] % 4 == 0
    takes_per_head = case["dtype"] in FP8_NAMES
    return (can_swizzle or case["v_scale_layout"] == "linear") and (takes_per_head or case["scale"] != "per_head")


def make_spec(case: dict):
    layout, _, diffkv = case["layout"].partition("-")
    spec = simple_spec(
        KVCacheDType(case["dtype"]),
        block_size=case["block_size"],
        num_kv_heads=case["num_kv_heads"],
        head_size=case["head_size"],
        head_size_v=HEAD_SIZE_V[case["head_size"]] if diffkv else None,
        layout=layout,
        v_scale_layout=case["v_scale_layout"],
    )
    if case["page"] == "exact":
        return spec
    padding = 0 if case["page"] == "pool" else 40
    return dataclasses.replace(spec, page_size_padded=spec.real_page_size_bytes + padding)


def make_scales(kind: str, num_heads: int) -> tuple[float | np.ndarray, float | np.ndarray]:
    if kind != "per_head":
        return SCALES[kind]
    scales = np.exp2(np.linspace(-3.3, 2.9, num_heads)).astype(np.float32)
    return scales, scales[::-1].copy()


def make_slots(kind: str, num_slots: int) -> np.ndarray:
    slots = np.random.default_rng(1).permutation(num_slots)[: min(20, num_slots - 1)].astype(np.int32)
    if kind == "padded":
        slots[::3] = -1
    elif kind == "out_of_range":
        slots[::4] = num_slots + np.arange(len(slots[::4])) * 1000
        slots[1::4] = -np.arange(1, 1 + len(slots[1::4]))
        slots[-1] = np.iinfo(np.int32).max
        slots[0] = np.iinfo(np.int32).min
    return slots[:0] if kind == "none" else slots


def check_write(implementation, spec, num_blocks, slots, dtype=np.float32, k_scale=1.0, v_scale=1.0, seed=0, **kv):
    """Writes into a poisoned cache and compares all of its bytes."""
    key, value = kv_tokens(spec, len(slots), dtype, seed, **kv)
    cache = poisoned(spec, num_blocks, seed)
    before = page_bytes(cache)
    asked = implementation if can_write(implementation, spec) else None
    written = run_write(asked, key, value, cache, slots, k_scale=k_scale, v_scale=v_scale)
    assert written.spec == spec
    assert_same_bytes(page_bytes(written), reference.write(before, spec, key, value, slots, k_scale, v_scale))


@each_case(pairwise(AXES, is_valid))
def test_every_kind_of_write_stores_the_bytes_of_the_reference(implementation, case):
    spec = make_spec(case)
    num_blocks = 3 if spec.block_size > 1 else 30
    slots = make_slots(case["slots"], num_blocks * spec.block_size)
    scales = make_scales(case["scale"], spec.num_kv_heads)
    check_write(implementation, spec, num_blocks, slots, INPUT_DTYPES[case["input_dtype"]], *scales)


@matrix({"num_kv_heads": range(1, 17)}, few={"num_kv_heads": [1, 6, 16]})
def test_every_number_of_heads_is_written(implementation, num_kv_heads):
    spec = simple_spec(NVFP4, num_kv_heads=num_kv_heads, v_scale_layout="swizzled")
    check_write(implementation, spec, 2, np.array([9, 2, -1, 15], np.int32), ml_dtypes.bfloat16)


GOLDEN = np.load(Path(__file__).parent / "data/nvfp4_golden.npz")


@pytest.mark.parametrize("case", range(int(GOLDEN["num_cases"])))
def test_nvfp4_has_the_golden_bytes(implementation, case):
    golden = {name.removeprefix(f"case{case}/"): GOLDEN[name] for name in GOLDEN.files if f"case{case}/" in name}
    key, value = (golden[f"{name}_bits"].view(INPUT_DTYPES[str(golden["dtype"])]) for name in ("key", "value"))
    spec = simple_spec(NVFP4, block_size=int(golden["block_size"]), num_kv_heads=key.shape[1], head_size=key.shape[2])
    num_blocks = int(golden["num_blocks"])
    regions = [golden[name].reshape(num_blocks, -1) for name in ("k_data", "k_block_scale", "v_data", "v_block_scale")]
    poison = [np.full_like(region, byte) for region, byte in zip(regions, (0xAB, 0xCD, 0xAB, 0xCD), strict=True)]
    cache = cache_from_bytes(np.concatenate(poison, axis=1), spec, num_blocks)
    scales = {name: float(golden[name]) for name in ("k_scale", "v_scale")}
    written = run_write(implementation, key, value, cache, golden["slot_mapping"], **scales)
    assert_same_bytes(page_bytes(written), np.concatenate(regions, axis=1))


@matrix({"name": INPUT_DTYPES, "layout": ["NHD", "HND"]})
def test_the_storage_dtype_keeps_every_bit(implementation, name, layout):
    dtype = np.dtype(INPUT_DTYPES[name])
    spec = simple_spec(KVCacheDType(name), block_size=128, num_kv_heads=2, head_size=128, layout=layout)
    patterns = np.arange(2**16, dtype=np.uint32)
    if dtype.itemsize == 4:
        patterns = patterns << 16 | patterns[::-1]  # every exponent, and NaNs of many payloads
    x = patterns.astype(f"u{dtype.itemsize}").view(dtype).reshape(256, 2, 128)
    slots = np.arange(256, dtype=np.int32)[::-1].copy()
    written = run_write(implementation, x, x[::-1].copy(), poisoned(spec, 2), slots)
    assert_same_bytes(page_bytes(written), reference.write(page_bytes(written) * 0, spec, x, x[::-1], slots, 1, 1))


@pytest.mark.parametrize("dtype", [KVCacheDType.FLOAT32, NVFP4], ids=lambda dtype: dtype.value)
def test_int64_slots_are_not_cut_to_32_bits(implementation, dtype):
    spec = simple_spec(dtype)
    slots = np.array([3, 2**32 + 4, -(2**32) + 5, 15, 8 * 2**32 + 6, -1], np.int64)
    check_write(implementation, spec, 2, slots[[0, 3, 5]])
    with jax.enable_x64(True):
        check_write(implementation, spec, 2, slots)
        check_write(implementation, spec, 2, jnp.asarray(slots))


def test_int64_slots_of_numpy_do_not_wrap_into_the_cache_where_x64_is_off():
    spec = simple_spec()
    key, value = kv_tokens(spec, 2)
    cache = poisoned(spec, 2)
    written = reshape_and_cache_flash(key, value, cache, np.array([2**32 + 4, -(2**32) + 5]))
    assert_same_bytes(page_bytes(written), page_bytes(cache))


@pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
def test_the_last_of_several_tokens_with_one_slot_is_written(implementation, dtype):
    spec = simple_spec(dtype, num_kv_heads=3)
    key, value = kv_tokens(spec, 9)
    last = [5, 7]
    expected = reference.write(page_bytes(poisoned(spec, 2)), spec, key[last], value[last], np.array([9, 5]), 1.0, 1.0)
    slots = np.array([5, 5, 9, 5, -1, 9, 5, 5, 100], np.int32)
    written = run_write(implementation, key, value, poisoned(spec, 2), slots)
    assert_same_bytes(page_bytes(written), expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_slots", [8, 20 * MAX_SLOTS_PER_TOKEN + 1])
@given(st.sampled_from([0, 1, 2, 20]).flatmap(lambda size: st.lists(st.integers(-3, 9), min_size=size, max_size=size)))
def test_the_last_token_of_each_slot_is_kept(num_slots, dtype, slots):
    slots = np.array(slots, dtype)
    expected = [slot if 0 <= slot < num_slots and slot not in slots[i + 1 :] else -1 for i, slot in enumerate(slots)]
    with jax.enable_x64(dtype is np.int64):
        keep = jax.jit(last_of_each_slot, static_argnames="num_slots")
        kept = np.asarray(keep(jnp.asarray(slots), num_slots=num_slots))
    kept = np.where((kept >= 0) & (kept < num_slots), kept, -1)
    assert_same_bytes(kept, np.array(expected, dtype))


def test_whether_slots_are_unique_is_known_when_traced():
    spec = simple_spec()
    key, value = kv_tokens(spec, 2)
    with pytest.raises(KVCacheTypeError, match="unique_slots: got 'yes' of type str, expected a bool"):
        reshape_and_cache_flash(key, value, poisoned(spec, 2), np.arange(2), unique_slots="yes")


def compares_slots(platform: str, **options: bool) -> bool:
    spec = simple_spec()
    key, value = kv_tokens(spec, 2)
    write = jax.jit(functools.partial(reshape_and_cache_flash, implementation="xla", **options))
    lowered = write.trace(key, value, poisoned(spec, 2), np.arange(2)).lower(lowering_platforms=(platform,))
    return "stablehlo.maximum" in lowered.as_text()


def test_slots_are_compared_where_a_scatter_may_mix_tokens():
    assert compares_slots("cuda")
    assert not compares_slots("cpu")
    assert not compares_slots("cuda", unique_slots=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layers_of_different_dtypes_share_one_pool(implementation, layout):
    dtypes = (BFLOAT16, KVCacheDType.FP8_E4M3, NVFP4)
    specs = unify_page_sizes([simple_spec(dtype, layout=layout, num_kv_heads=3) for dtype in dtypes])
    pool = poisoned(specs[0], 6)
    expected = page_bytes(pool)
    for layer, spec in enumerate(specs):
        first = 2 * layer * spec.block_size  # each layer has two of the pool's blocks
        slots = np.random.default_rng(layer).permutation(2 * spec.block_size)[:9].astype(np.int32) + first
        key, value = kv_tokens(spec, 9, seed=layer)
        asked = implementation if can_write(implementation, spec) else None
        pool = run_write(asked, key, value, dataclasses.replace(pool, spec=spec), slots)
        expected = reference.write(expected, spec, key, value, slots, 1.0, 1.0)
    assert_same_bytes(page_bytes(pool), expected)


@pytest.mark.parametrize(
    "spec",
    [simple_spec(), simple_spec(NVFP4, head_size_v=32), simple_spec(KVCacheDType.FP8_E4M3, layout="HND")],
    ids=["bfloat16", "nvfp4-diffkv", "fp8_e4m3-HND"],
)
@pytest.mark.parametrize(("batch", "time"), [(2, 3), (3, 1), (2, 0)])
def test_tokens_of_a_batch_are_written_as_they_come(implementation, spec, batch, time):
    """`[batch, time, ...]` leaves the bytes of its sequences one after the other, for arrays of NumPy and of JAX."""
    key, value = kv_tokens(spec, batch * time) if time else (np.zeros((0, 2, n)) for n in (64, spec.head_size_v))
    slots = np.array([9, -1, 4, 300, 2, 15], np.int32)[: batch * time]
    expected = page_bytes(run_write("xla", np.float32(key), np.float32(value), poisoned(spec, 2), slots))
    arrays = [np.float32(x).reshape(batch, time, *x.shape[1:]) for x in (key, value)]
    for as_array in (np.asarray, jnp.asarray):
        given_key, given_value = map(as_array, arrays)
        in_rows = as_array(slots).reshape(batch, time)
        written = run_write(implementation, given_key, given_value, poisoned(spec, 2), in_rows)
        assert_same_bytes(page_bytes(written), expected)


@matrix({"dtype": STORED_KV_CACHE_DTYPES}, few={"dtype": FEW_DTYPES})
def test_scales_may_be_traced_arrays(implementation, dtype):
    scales = jnp.float32(0.37), jnp.float32(2.3)
    check_write(implementation, simple_spec(dtype), 2, np.array([9, 2], np.int32), np.float32, *scales)
