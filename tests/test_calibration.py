"""Scales from samples: against NumPy over all samples at once, whatever the batches; and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.helpers import matrix

import kvjax
from kvjax import (
    FullAttentionSpec,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    KVCacheWarning,
    calibrate,
    calibration,
)

FP8 = FullAttentionSpec(16, 3, 32, 16, dtype=KVCacheDType.FP8_E4M3)
BF16, E5M2, NVFP4 = (
    dataclasses.replace(FP8, head_size_v=32, dtype=dtype)
    for dtype in (KVCacheDType.BFLOAT16, KVCacheDType.FP8_E5M2, KVCacheDType.NVFP4)
)
SPECS = (FP8, BF16, NVFP4, E5M2)
METHODS = ("amax", "percentile", "mse")


def heavy_tails(seed: int, *shape: int) -> np.ndarray:
    """Numbers as of keys: heads of different magnitudes, a few numbers far from the others."""
    rng = np.random.default_rng(seed)
    of_heads = 2.0 ** -np.arange(shape[-2])[:, None]
    return (rng.standard_t(3, shape) * of_heads).astype(np.float32)


def batches(*tokens: int, specs: tuple[FullAttentionSpec, ...] = SPECS) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """A batch for each number of tokens."""
    return [
        [
            tuple(
                heavy_tails(100 * number + 10 * layer + half, count, 3, size)
                for half, size in enumerate((spec.head_size, spec.head_size_v))
            )
            for layer, spec in enumerate(specs)
        ]
        for number, count in enumerate(tokens)
    ]


SAMPLES = batches(8, 40)


def together(layer: int, half: int) -> np.ndarray:
    return np.concatenate([batch[layer][half] for batch in SAMPLES])


def by_scale(x: np.ndarray, per_head: bool) -> np.ndarray:
    return np.moveaxis(x, 1, 0).reshape(3, -1) if per_head else x.reshape(1, -1)


def each_scale(
    scales: tuple[kvjax.KVScales, ...], per_head: bool
) -> Iterator[tuple[Any, np.ndarray, np.ndarray, bool]]:
    """Spec, all its samples, and the scales that were found, `[1]` or `[heads]`; of layers that are quantized."""
    assert len(scales) == len(SPECS)
    for layer, spec in enumerate(SPECS):
        heads = per_head and spec in (FP8, E5M2)
        for half, scale in enumerate(scales[layer]):
            assert scale.dtype == np.float32
            assert scale.shape == ((3,) if heads else ())
            if spec is BF16:
                assert scale == 1
            else:
                yield spec, together(layer, half), np.atleast_1d(scale), heads


@pytest.mark.parametrize("per_head", [False, True])
def test_the_largest_magnitude_just_fits(per_head: bool):
    for spec, x, scales, heads in each_scale(calibrate(SPECS, SAMPLES, per_head=per_head), per_head):
        amax = np.abs(by_scale(x, heads)).max(axis=1)
        np.testing.assert_array_equal(scales, amax / np.float32(spec.dtype.info.max))


@matrix(
    {"per_head": [False, True], "percentile": [50, 99.0, 99.9, 100]}, few={"per_head": [True], "percentile": [99.0]}
)
def test_a_percentile_of_the_magnitudes_fits(per_head: bool, percentile: float):
    scales = calibrate(SPECS, SAMPLES, method="percentile", percentile=percentile, per_head=per_head)
    for spec, x, found, heads in each_scale(scales, per_head):
        magnitudes = np.abs(by_scale(x, heads))
        wanted = np.percentile(magnitudes, percentile, axis=1, method="inverted_cdf")
        fits = found * np.float32(spec.dtype.info.max)
        assert np.all(fits >= wanted * (1 - 1e-6))
        assert np.all(fits <= np.minimum(wanted * (1 + 1 / 64), magnitudes.max(axis=1)) * (1 + 1e-6))


def stored_errors(x: np.ndarray, spec: FullAttentionSpec, scale: np.ndarray) -> np.ndarray:
    """Squared errors of what a cache of a spec gives back, `[scales]`, by its public operations."""
    read = through_cache(x, scale if len(scale) > 1 else scale[0], spec)
    return (by_scale(np.float64(read) - x, len(scale) > 1) ** 2).sum(axis=1)


@functools.partial(jax.jit, static_argnames="spec")
def through_cache(x: jax.Array, scale: jax.Array, spec: FullAttentionSpec) -> jax.Array:
    spec = dataclasses.replace(spec, head_size=x.shape[-1], head_size_v=x.shape[-1])
    num_blocks = -(-len(x) // 16)
    cache = kvjax.KVCache(jnp.zeros(spec.cache_shape(num_blocks), spec.array_dtype), spec)
    cache = kvjax.reshape_and_cache_flash(x, x, cache, jnp.arange(len(x)), k_scale=scale)
    table, lens = jnp.arange(num_blocks)[None], jnp.full(1, len(x))
    return kvjax.gather_kv(cache, table, lens, k_scale=scale, dtype=jnp.float32)[0][0, : len(x)]


@matrix({"per_head": [False, True]}, few={"per_head": [True]})
def test_the_least_squared_error_is_that_of_the_cache(per_head: bool):
    largest = calibrate(SPECS, SAMPLES, per_head=per_head)
    least = calibrate(SPECS, SAMPLES, method="mse", per_head=per_head)
    gains = []
    for (spec, x, amax, _), (*_, found, _) in zip(
        each_scale(largest, per_head), each_scale(least, per_head), strict=True
    ):
        ratios = (2.0 ** (np.arange(8, -25, -1) / 8)).astype(np.float32)
        errors = np.stack([stored_errors(x, spec, amax * ratio) for ratio in ratios])
        best = stored_errors(x, spec, found)
        # Scales of which one is a power of two times the other may differ by the last bits of a sum.
        np.testing.assert_allclose(best, errors.min(axis=0), rtol=1e-4)
        gains += list(best / errors[8])
    assert min(gains) < 0.95, "none of them is better than the largest magnitude"
    assert max(gains) <= 1 + 1e-4


@matrix({"method": METHODS}, few={"method": ["amax"]})
def test_scales_do_not_depend_on_how_samples_are_batched(method: str):
    """One batch of all tokens, batches of other shapes and element types' exact values: the same scales."""
    samples = [[tuple(x.astype(ml_dtypes.bfloat16) for x in layer) for layer in batch] for batch in SAMPLES]
    exact = [
        [
            tuple(np.concatenate([np.float32(batch[layer][half]) for batch in samples]) for half in (0, 1))
            for layer in range(len(SPECS))
        ]
    ]
    reshaped = [[tuple(jnp.asarray(x).reshape(3, -1, *x.shape[1:]) for x in layer) for layer in exact[0]]]
    expected = jax.tree.leaves(calibrate(SPECS, exact, method=method))
    for others in (samples, reshaped):
        for scale, other in zip(expected, jax.tree.leaves(calibrate(SPECS, others, method=method)), strict=True):
            np.testing.assert_array_equal(scale, other)


@pytest.mark.parametrize(("method", "times"), [("amax", 1), ("percentile", 1), ("mse", 2)])
def test_samples_are_streamed(method: str, times: int):
    """A batch is asked for when the one before is done with, and no batch is read more often than is said."""
    read = []

    def samples() -> Iterator[Any]:
        for number, batch in enumerate(SAMPLES):
            read.append(number)
            yield batch

    scales = calibrate(SPECS, samples, method=method)
    assert read == [0, 1] * times
    assert jax.tree.all(jax.tree.map(np.array_equal, scales, calibrate(SPECS, SAMPLES, method=method)))
    if times == 1:
        assert jax.tree.all(jax.tree.map(np.array_equal, scales, calibrate(SPECS, samples(), method=method)))
    else:
        with pytest.raises(
            KVCacheTypeError, match="got a generator, which can be read only once, expected for method 'mse' a list"
        ):
            calibrate(SPECS, samples(), method=method)


@matrix({"update": ["_largest", "_count", "_add_errors"]})
def test_batches_of_one_shape_are_compiled_once(update: str):
    method = dict(zip(("_largest", "_count", "_add_errors"), METHODS, strict=True))[update]
    compiled = getattr(calibration, update)
    spec = dataclasses.replace(FP8, num_kv_heads=5, head_size=16)
    batch = [(np.ones((4, 5, 16), np.float32),) * 2] * 3
    compiled.clear_cache()
    calibrate([spec] * 3, [batch] * 3, method=method)
    assert compiled._cache_size() == 1


def test_counts_of_magnitudes_may_exceed_32_bits():
    (low, high) = counts = jnp.zeros((2, 1, calibration.NUM_BINS), jnp.uint32)
    one = int(np.flatnonzero(calibration._count(jnp.ones((1, 1)), (jnp.zeros(1), counts), FP8, False)[1][0][0])[0])
    full = low.at[0, one].set(2**32 - 2)
    amax, (low, high) = calibration._count(jnp.ones((3, 1)), (jnp.zeros(1), jnp.stack([full, high])), FP8, False)
    assert (int(low[0, one]), int(high[0, one]), int(high.sum())) == (1, 1, 1)
    assert amax == 1


def test_magnitudes_past_the_histogram_are_in_its_ends():
    x = np.float32([2.0**-50] * 9 + [2.0**60]).reshape(10, 1, 1).repeat(16, 2)
    spec = FullAttentionSpec(16, 1, 16, dtype=KVCacheDType.FP8_E4M3)
    [median], [largest] = (
        calibrate([spec], [[(x, x)]], method="percentile", percentile=percentile) for percentile in (50, 100)
    )
    assert median.k_scale * 448 == pytest.approx(2.0**-40, rel=1 / 64)
    assert largest.k_scale == np.float32(2.0**60) / np.float32(448)


def test_a_percentile_just_below_the_end_of_the_histogram_is_rounded_up_by_no_more_than_others():
    x = np.full((4, 1, 16), 2.0**40 * (1 - 2**-10), np.float32)
    x[0] = 2.0**60
    spec = FullAttentionSpec(16, 1, 16, dtype=KVCacheDType.FP8_E4M3)
    [found] = calibrate([spec], [[(x, x)]], method="percentile", percentile=75)
    assert found.k_scale == np.float32(2.0**40) / np.float32(448)


@pytest.mark.parametrize("factor", [1.0, 1.01, 2.0**10])
def test_a_percentile_past_the_histogram_is_the_largest_magnitude(factor: float):
    x = np.full((4, 1, 16), factor * 2.0**40, np.float32)
    x[:2] /= 2
    spec = FullAttentionSpec(16, 1, 16, dtype=KVCacheDType.FP8_E4M3)
    for percentile in (75, 100):
        [found] = calibrate([spec], [[(x, x)]], method="percentile", percentile=percentile)
        assert found.k_scale == x.max() / np.float32(448)


def test_zeros_do_not_count_in_a_percentile():
    x = np.zeros((1000, 1, 16), np.float32)
    x[:10] = 3
    spec = FullAttentionSpec(16, 1, 16, dtype=KVCacheDType.FP8_E4M3)
    [scales] = calibrate([spec], [[(x, x)]], method="percentile", percentile=50)
    assert scales.k_scale == np.float32(3) / np.float32(448)


@pytest.mark.parametrize("method", METHODS)
def test_nan_is_passed_over(method: str):
    x = heavy_tails(0, 40, 3, 32)
    key = np.where(np.arange(40)[:, None, None] % 7 == 3, np.float32(np.nan), x)
    without = x[np.arange(40) % 7 != 3]
    spec = dataclasses.replace(FP8, head_size_v=32)
    [scales] = calibrate([spec], [[(key, x)]], method=method)
    [expected] = calibrate([spec], [[(without, x)]], method=method)
    np.testing.assert_array_equal(scales, expected)


@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_infinity_is_refused_by_its_layer(method: str, layer: int):
    """Also of layers without scales, such as the second."""
    sample = [*SAMPLES[0]]
    value = sample[layer][1].copy()
    value[2, 1, 0] = -np.inf
    sample[layer] = sample[layer][0], value
    message = f"samples: got infinite values of layer {layer}, expected finite values"
    with pytest.raises(KVCacheValueError, match=message):
        calibrate(SPECS, [sample], method=method)
    with pytest.raises(KVCacheValueError, match=f"infinite values of layer {layer + 6}, expected"):
        calibrate(SPECS, [sample], method=method, layer_indices=[6, 7, 8, 9])


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8_ds_mla", "nvfp4"])
def test_latents_and_rope_keys_of_every_dtype_are_checked(dtype: str):
    spec = kvjax.MLAAttentionSpec(16, 128, 64, dtype=dtype)
    kv_c, k_pe = np.ones((4, 128), np.float32), np.ones((4, 64), np.float32)
    calibrate([spec], [[(kv_c, k_pe)]])
    infinite = "rope keys" if spec.parts[0] is not spec.parts[1] else "latents"
    with pytest.raises(KVCacheValueError, match=f"samples: got infinite {infinite} of layer 0"):
        calibrate([spec], [[(kv_c, np.where(k_pe, np.float32(np.inf), k_pe))]])
    with pytest.raises(KVCacheValueError, match="qk_rope_head_dim=64"):
        calibrate([spec], [[(kv_c, k_pe[:, :63])]])


@pytest.mark.parametrize("method", METHODS)
def test_samples_of_zeros_are_warned_of(method: str):
    key, value = (x.copy() for x in SAMPLES[0][0])
    key[:, 1:] = 0
    with pytest.warns(KVCacheWarning) as caught:
        [scales] = calibrate([FP8], [[(key, value * 0)]], method=method, per_head=True)
    assert [str(warning.message) for warning in caught] == [
        "samples: the keys of layer 0, heads [1, 2], are all 0, so their scale is 1",
        "samples: the values of layer 0, heads [0, 1, 2], are all 0, so their scale is 1",
    ]
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert scales.k_scale[0] < 1
    assert [*scales.k_scale[1:], *scales.v_scale] == [1] * 5


@pytest.mark.filterwarnings("ignore:samples. the keys")
def test_all_zero_keys_get_a_scale_of_one_by_mse():
    specs, key = (E5M2, NVFP4), np.zeros((8, 3, 32), np.float32)
    for scales in calibrate(specs, [[(key, heavy_tails(0, 8, 3, 32))] * 2], method="mse"):
        assert scales.k_scale == 1


@pytest.mark.parametrize("exponent", [-80, 70])
def test_the_scale_of_the_least_error_is_proportional_to_the_magnitude(exponent: int):
    """Squared errors of such magnitudes do not fit float32."""
    samples = [[tuple(x * np.float32(2.0**exponent) for x in layer) for layer in batch] for batch in SAMPLES]
    by_head = calibrate(SPECS, SAMPLES, method="mse", per_head=True)
    for layer, (expected, found) in enumerate(
        zip(by_head, calibrate(SPECS, samples, method="mse", per_head=True), strict=True)
    ):
        for its_expected, its_found in zip(expected, found, strict=True):
            factor = 1 if SPECS[layer] is BF16 else np.float32(2.0**exponent)
            np.testing.assert_array_equal(its_found, its_expected * factor)


def test_scales_stay_in_the_range_that_operations_take():
    for magnitude in (1e-34, 3e38):
        x = np.full((2, 1, 16), magnitude, np.float32)
        spec = FullAttentionSpec(16, 1, 16, dtype=KVCacheDType.NVFP4)
        for method in METHODS:
            [scales] = calibrate([spec], [[(x, x)]], method=method)
            kvjax.check_scale("k_scale", scales.k_scale)


def test_operations_accept_the_scales_that_calibration_finds():
    scales = calibrate([FP8], [batch[:1] for batch in SAMPLES], per_head=True)
    key, value = SAMPLES[1][0]
    cache = kvjax.KVCache.allocate(FP8, 3)
    cache = kvjax.reshape_and_cache_flash(key, value, cache, np.arange(40), **scales[0]._asdict())
    read = kvjax.gather_kv(cache, np.array([[0, 1, 2]]), np.array([40]), **scales[0]._asdict())
    np.testing.assert_allclose(np.asarray(read[0])[0, :40], key, rtol=2**-4, atol=float(scales[0].k_scale.max()) / 512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "max"}, "method: got 'max', expected one of amax, percentile, mse"),
        ({"layer_indices": [3]}, "layer_indices: got 1, expected 4, one for each spec"),
        ({"percentile": 0}, "percentile: got 0, expected above 0 and at most 100"),
        ({"percentile": float("nan")}, "percentile: got nan, expected above 0"),
        (
            {"specs": [BF16, NVFP4, BF16, BF16], "per_head": True},
            "per_head: got True, expected False: no layer's dtype",
        ),
        ({"samples": []}, "samples: got no batch, expected at least one"),
        ({"samples": [SAMPLES[0][:2]]}, "samples[0]: got keys and values of 2 layers, expected 4, one pair"),
        (
            {"samples": [SAMPLES[0], [(value, value) for _, value in SAMPLES[0]]]},
            "samples[1], keys of layer 0: got shape (8, 3, 16), expected [..., num_kv_heads=3, head_size=32]",
        ),
        (
            {"samples": [[SAMPLES[0][0], (SAMPLES[0][1][1][..., :31], SAMPLES[0][1][1]), *SAMPLES[0][2:]]]},
            "samples[0], keys of layer 1: got shape (8, 3, 31), expected [..., num_kv_heads=3, head_size=32]",
        ),
        ({"samples": [[(key[:0], value[:0]) for key, value in SAMPLES[0]]]}, "and at least one token"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(KVCacheValueError) as raised:
        calibrate(**{"specs": SPECS, "samples": SAMPLES} | change)
    assert message in str(raised.value)


@pytest.mark.parametrize("percentile", ["99", None, True, 99j, np.array([99.0])], ids=repr)
def test_a_percentile_that_is_not_a_number_is_refused(percentile: Any):
    with pytest.raises(KVCacheTypeError, match=r"percentile: got .* of type .*, expected a number above 0 and at most"):
        calibrate(SPECS, SAMPLES, method="percentile", percentile=percentile)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            [(key.astype(np.int32), value) for key, value in SAMPLES[0]],
            "keys of layer 0: got dtype int32, expected one",
        ),
        ([(None, value) for _, value in SAMPLES[0]], "samples[0], keys of layer 0: got a NoneType, expected an array"),
        (None, "samples[0]: got a NoneType, expected (key, value) for each layer"),
        ([(1, 2, 3)], "samples[0]: got a list, expected (key, value) for each layer"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_batches_of_other_kinds_are_refused_by_type(batch: Any, message: str):
    with pytest.raises(KVCacheTypeError) as raised:
        calibrate(SPECS, [batch])
    assert message in str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_finds_the_scales_of_the_cpu(method: str):
    found = []
    for platform in ("cpu", "cuda"):
        with jax.default_device(jax.devices(platform)[0]):
            found.append(jax.tree.leaves(calibrate(SPECS, SAMPLES, method=method, per_head=True)))
    for cpu, gpu in zip(*found, strict=True):
        np.testing.assert_array_equal(cpu, gpu)


@pytest.fixture
def llama() -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "dtype": "float32",
    }
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@matrix({"requested": ["fp8", "nvfp4"]}, few={"requested": ["nvfp4"]})
def test_the_documented_example_calibrates_a_transformers_model(llama: Any, requested: str):
    import torch

    import kvjax_torch
    from kvjax_torch.transformers_cache import CACHE_ARGUMENT, KvjaxCache

    page = (Path(__file__).parents[1] / "docs/calibration.md").read_text().partition("## From Python")[2]
    [source] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in source.splitlines() if line]) == 7, "as many as README says"
    batches = torch.arange(40).reshape(2, 2, 10)
    names = {"kvjax": kvjax, "kvjax_torch": kvjax_torch, "torch": torch, "model": llama, "batches": batches}
    source = source.replace("(ids).cache", f"(ids).{CACHE_ARGUMENT}")
    exec(source.replace('"mse"', '"amax"').replace('"fp8"', f'"{requested}"'), names)
    with torch.no_grad():
        caches = [llama(ids)[CACHE_ARGUMENT] for ids in batches]
    for layer, (spec, scales) in enumerate(zip(names["specs"], names["scales"], strict=True)):
        for scale, part in zip(scales, ("keys", "values"), strict=True):
            amax = max(float(getattr(cache.layers[layer], part).abs().max()) for cache in caches)
            assert scale == np.float32(amax) / np.float32(spec.dtype.info.max)
    k_scale, v_scale = (list(of_layers) for of_layers in zip(*names["scales"], strict=True))
    cache = KvjaxCache(llama.config, num_blocks=4, kv_cache_dtype=requested, k_scale=k_scale, v_scale=v_scale)
    written = llama.generate(batches[0], **{CACHE_ARGUMENT: cache}, max_new_tokens=4, do_sample=False)
    assert written.shape == (2, 14)
