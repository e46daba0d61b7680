"""Pages of int8 keys with a scale of each token and head, and NVFP4 values: `[K | K scales | V data | V scales]`.

Whatever writes or reads them, key by key.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_suite as suite
from support import gpu_compile, ragged_suite, reference
from support.any_count import attention_kernels, gather_kernel, write_kernel
from support.attention_suite import Case
from support.helpers import (
    assert_same_bytes,
    assert_same_floats,
    kv_tokens,
    page_bytes,
    poisoned,
    run_write,
    simple_spec,
)
from support.interpret_mode import interpret_mode

import kvjax
from kvjax import AttentionSpec, KVCache, KVCacheDType, KVCacheValueError, KVScales
from kvjax.kernels.attention import schedule

DTYPE, DTYPE_4OVER6 = KVCacheDType.INT8_K_NVFP4_V, KVCacheDType.INT8_K_NVFP4_4OVER6_V
SCALES = {"k_scale": np.float32(0.3), "v_scale": np.float32(1.7)}
"""That of keys is ignored."""

NUM_BLOCKS = 4
TABLE, LENGTHS = np.array([[1, 0, 2], [3, -1, 0]], np.int32), np.array([20, 12], np.int32)

SPECS = {
    "NHD": {},
    "HND-swizzled": {"layout": "HND", "v_scale_layout": "swizzled"},
    "diffkv": {"head_size": 72, "head_size_v": 128},
    "pool": {"page_size_padded": 5000, "v_scale_layout": "swizzled"},
}
EACH_SPEC = pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)


def slots_of(num_tokens: int) -> np.ndarray:
    """Some past the last."""
    return np.random.default_rng(0).permutation(NUM_BLOCKS * 8 + 4)[:num_tokens].astype(np.int32)


def check_write(spec: AttentionSpec, num_tokens: int, implementation: str, dtype: Any = np.float32) -> None:
    key, value = kv_tokens(spec, num_tokens, dtype)
    cache = poisoned(spec, NUM_BLOCKS)
    before = page_bytes(cache)
    written = run_write(implementation, key, value, cache, slots_of(num_tokens), **SCALES)
    expected = reference.write(before, spec, key, value, slots_of(num_tokens), *SCALES.values())
    assert_same_bytes(page_bytes(written), expected)


def check_gather(spec: AttentionSpec, implementation: str, dtype: Any) -> None:
    cache = poisoned(spec, NUM_BLOCKS)
    dense = kvjax.gather_kv(cache, TABLE, LENGTHS, **SCALES, dtype=dtype, implementation=implementation)
    for half, (got, scale) in enumerate(zip(dense, SCALES.values(), strict=True)):
        expected = reference.read(page_bytes(cache), spec, half, TABLE, LENGTHS, scale, np.dtype(dtype))
        assert_same_floats(np.asarray(got), expected)


def test_a_page_holds_data_and_scales_of_keys_and_then_of_values():
    spec = simple_spec(DTYPE, block_size=16, num_kv_heads=8, head_size=128)
    rows = 16 * 8
    assert [region.base // rows for region in (*spec.regions.k, *spec.regions.v)] == [0, 128, 132, 132 + 64]
    assert spec.page_size_bytes == rows * (128 + 4 + 64 + 8)
    assert spec.storage_dtype == spec.array_dtype == np.uint8
    assert 8 * spec.bytes_per_token / (2 * 8 * 128) == 6.375


@EACH_SPEC
@pytest.mark.parametrize("dtype", [DTYPE, DTYPE_4OVER6])
def test_xla_writes_and_reads_the_references_bytes(dtype, changes):
    spec = simple_spec(dtype, **changes)
    check_write(spec, 20, "xla")
    check_gather(spec, "xla", np.float16)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[] if name == "diffkv" else pytest.mark.full)
        for name, changes in SPECS.items()
    ],
)
@pytest.mark.parametrize("dtype", [DTYPE, pytest.param(DTYPE_4OVER6, marks=pytest.mark.full)])
def test_interpreted_the_kernels_write_and_read_the_references_bytes(dtype, changes):
    spec = simple_spec(dtype, **changes)
    with interpret_mode():
        check_write(spec, 20, "mosaic", jnp.bfloat16)
        check_gather(spec, "mosaic", np.float16)


WINDOWED = Case(DTYPE.value, lengths=(40, 0), window=39, sinks=True, cap=5.0, q_len=2, scales="scalar")
SWIZZLED = Case(DTYPE.value, "float16", "HND", "swizzled", lengths=(37,), block_size=8, scales="scalar")
WIDER_VALUES = Case(DTYPE.value, lengths=(37,), head_size=80, head_size_v=128)


@pytest.mark.parametrize(
    ("case", "is_kernel"),
    [
        (WINDOWED, False),
        (SWIZZLED, True),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((WINDOWED, True), (WIDER_VALUES, True))),
    ],
    ids=str,
)
def test_attention_is_right(case, is_kernel, monkeypatch):
    monkeypatch.setattr(schedule, "MIN_STAGES", 1)
    problem = suite.build(case)

    def attend(query, cache, *args, **options):
        run = functools.partial(kvjax.paged_attention, return_lse=True, implementation="mosaic" if is_kernel else "xla")
        with interpret_mode() if is_kernel else jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, run(query, cache, *args, **options))

    suite.assert_right(problem, *problem.run(attend))


def test_keys_are_those_of_an_int8_cache_and_values_those_of_an_nvfp4_one():
    spec = simple_spec(DTYPE)
    key, value = kv_tokens(spec, 20)
    caches = {
        dtype: run_write("xla", key, value, KVCache.allocate(simple_spec(dtype), NUM_BLOCKS), slots_of(20), **SCALES)
        for dtype in (DTYPE, *DTYPE.parts)
    }
    keys, values = (caches[part] for part in DTYPE.parts)
    keys_end, values_end = (cache.spec.regions.v[0].base for cache in (keys, values))
    both = np.concatenate([page_bytes(keys)[:, :keys_end], page_bytes(values)[:, values_end:]], axis=1)
    assert_same_bytes(page_bytes(caches[DTYPE]), both)


def test_the_scale_of_keys_is_dropped_and_neither_is_one_per_head():
    spec = simple_spec(DTYPE)
    cache = KVCache.allocate(spec, 1, k_scale=3.0, v_scale=2.0)
    assert (cache.k_scale, float(cache.v_scale)) == (None, 2.0)
    with pytest.raises(KVCacheValueError, match="k_scale: got -1.0, expected between"):
        KVCache.allocate(spec, 1, k_scale=-1.0)
    for name in SCALES:
        with pytest.raises(KVCacheValueError, match=rf"{name}: got shape \(2,\), expected a scalar for dtype 'int8_k"):
            kvjax.gather_kv(cache, TABLE[:, :1], LENGTHS, **{name: np.ones(2, np.float32)})


@pytest.mark.parametrize("method", ["amax", "mse"])
def test_calibration_finds_a_scale_of_values_alone(method):
    spec = simple_spec(DTYPE)
    key, value = (np.abs(x) for x in kv_tokens(spec, 64, specials=False))
    [scales] = kvjax.calibrate([spec], [[(key, value)]], method=method)
    amax = value.max() / np.float32(6 * 448)
    assert (scales.k_scale, np.shape(scales.v_scale)) == (1, ())
    assert scales.v_scale == amax if method == "amax" else scales.v_scale / amax < 2.01
    with pytest.raises(KVCacheValueError, match="per_head: got True, expected False"):
        kvjax.calibrate([spec], [[(key, value)]], per_head=True)


def model() -> kvjax.ModelKVConfig:
    return kvjax.ModelKVConfig.from_hf_config(
        {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 128},
        model_dtype="bfloat16",
    )


def test_of_a_checkpoint_only_the_scale_of_values_is_read():
    names = (f"model.layers.0.self_attn.{name}" for name in ("k_proj.k_scale", "v_proj.v_scale"))
    k_scale, v_scale = names
    tensors = {k_scale: np.float32(-3), v_scale: np.float32(5 / 448)}
    [scales] = kvjax.load_kv_scales(tensors, model(), DTYPE, amax_divisor=448)
    np.testing.assert_allclose(scales, [1, 5 / 2688], rtol=1e-6)
    del tensors[k_scale]
    assert kvjax.load_kv_scales(tensors, model(), DTYPE, amax_divisor=448) == (scales,)
    with pytest.warns(kvjax.KVCacheWarning, match=r"unknown.*; values: if it is 448, the unchanged") as warned:
        kvjax.load_kv_scales(tensors, model(), DTYPE)
    assert len(warned) == 1
    with pytest.warns(kvjax.KVCacheWarning, match="holds no scale, so 1 is used: values: magnitudes above 2688"):
        assert kvjax.load_kv_scales({k_scale: np.float32(1)}, model(), DTYPE) == (KVScales(1, 1),)
