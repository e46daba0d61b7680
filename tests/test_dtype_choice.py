"""`choose_layer_dtypes`: the least sum of errors that fits, of errors that are attention's over stored bytes."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    LayerKVConfig,
    UnsupportedError,
    choose_layer_dtypes,
)
from kvjax.dtype_choice import _least

FP8, NVFP4 = KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4
LAYERS = (LayerKVConfig(2, 32, 32), LayerKVConfig(1, 16, 32, sliding_window=5), LayerKVConfig(2, 16, 16))
MODEL = kvjax.ModelKVConfig(LAYERS, "float32")
TOKENS = 23


def sequence(seed: int = 0, outliers: tuple[float, ...] = (1, 1, 1)) -> list[tuple[np.ndarray, ...]]:
    """Query, key and value of each layer; one channel of the keys is `outliers` times as large."""
    rng = np.random.default_rng(seed)
    layers = []
    for layer, outlier in zip(LAYERS, outliers, strict=True):
        heads, size, size_v = layer.num_kv_heads, layer.head_size, layer.head_size_v
        query, key, value = (
            rng.normal(size=(TOKENS, *shape)).astype(np.float32)
            for shape in ((2 * heads, size), (heads, size), (heads, size_v))
        )
        key[..., 3] *= outlier
        layers.append((query, key, value))
    return layers


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int | None) -> np.ndarray:
    """Row by row and head by head, in float64."""
    out = np.zeros((TOKENS, query.shape[1], value.shape[2]))
    for row, head in itertools.product(range(TOKENS), range(query.shape[1])):
        first = 0 if window is None else max(row + 1 - window, 0)
        kv = head // (query.shape[1] // key.shape[1])
        logits = key[first : row + 1, kv].astype(float) @ query[row, head] / np.sqrt(query.shape[2])
        weights = np.exp(logits - logits.max())
        out[row, head] = weights / weights.sum() @ value[first : row + 1, kv]
    return out


def stored(spec: kvjax.AttentionSpec, scales: kvjax.KVScales, key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """Keys and values written to a cache and gathered."""
    num_blocks = -(-len(key) // spec.block_size)
    cache = kvjax.KVCache.allocate(spec, num_blocks, **scales._asdict())
    write = kvjax.reshape_and_cache_flash
    cache = write(jnp.asarray(key), jnp.asarray(value), cache, jnp.arange(len(key)))
    read = kvjax.gather_kv(cache, jnp.arange(num_blocks)[None], jnp.array([len(key)]), dtype=jnp.float32)
    return [np.asarray(x[0, : len(key)]) for x in read]


KINDS = ["fp8_e4m3", "nvfp4_4over6", "fp8_k_nvfp4_v", "int8_k_nvfp4_4over6_v", "int8_per_token_head", "bfloat16"]


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=() if dtype == "nvfp4_4over6" else pytest.mark.nightly) for dtype in KINDS]
)
def test_an_error_is_that_of_attention_over_stored_keys_and_values(dtype):
    samples = [sequence(0), sequence(1)]
    specs = kvjax.resolve_layer_specs(MODEL, dtype)
    choice = choose_layer_dtypes(MODEL, samples, [dtype], bits=16)
    scales = kvjax.calibrate(specs, [[layer[1:] for layer in one] for one in samples])
    for number, spec in enumerate(specs):
        squares = np.zeros(2)
        for query, key, value in (one[number] for one in samples):
            exact = attention(query, key, value, spec.sliding_window)
            error = attention(query, *stored(spec, scales[number], key, value), spec.sliding_window) - exact
            squares += np.sum(error**2), np.sum(exact**2)
        assert choice.errors[number][KVCacheDType(dtype)] == pytest.approx(squares[0] / squares[1], rel=1e-3)


def test_the_layer_that_needs_more_bits_gets_them():
    samples = [sequence(outliers=(1, 1, 100))]
    choice = choose_layer_dtypes(MODEL, samples, ["nvfp4", "fp8"], bits=6)
    assert choice.dtypes[2] is FP8
    assert choice.bits <= 6
    specs = kvjax.resolve_layer_specs(MODEL, choice.dtypes)
    assert [spec.dtype for spec in specs] == [*choice.dtypes.values()]
    assert choice.bytes_per_token == sum(spec.bytes_per_token for spec in specs)
    assert choice.bits == 8 * choice.bytes_per_token / sum(spec.num_kv_heads * sum(spec.head_sizes) for spec in specs)


def test_keys_are_indices_of_the_model_where_some_layers_have_no_cache():
    model = kvjax.ModelKVConfig(LAYERS, "float32", layer_indices=(1, 4, 5), num_hidden_layers=7)
    assert [*choose_layer_dtypes(model, [sequence()], ["fp8"], bits=8).dtypes] == [1, 4, 5]
    samples = sequence()
    samples[1][1][:] = np.inf
    with pytest.raises(KVCacheValueError, match="infinite keys of layer 4"):
        choose_layer_dtypes(model, [samples], ["fp8"], bits=8)


def test_budgets_in_bits_and_in_bytes_are_the_same():
    samples, dtypes = [sequence()], ["nvfp4", "fp8", "bfloat16"]
    by_bits = choose_layer_dtypes(MODEL, samples, dtypes, bits=7)
    elements = 2 * 64 + 48 + 2 * 32
    assert by_bits == choose_layer_dtypes(MODEL, samples, dtypes, bytes_per_token=elements * 7 // 8)


def test_samples_may_be_a_function():
    expected = choose_layer_dtypes(MODEL, [sequence()], ["nvfp4"], bits=4.5)
    assert choose_layer_dtypes(MODEL, lambda: iter([sequence()]), ["nvfp4"], bits=4.5) == expected
    assert set(expected.dtypes.values()) == {NVFP4}


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_that_fits_has_a_smaller_sum(seed):
    rng = np.random.default_rng(seed)
    layers, dtypes = 5, 3
    errors = rng.choice([0, rng.random()], size=(layers, dtypes)) + rng.random((layers, dtypes))
    costs = rng.integers(1, 9, (layers, dtypes)) * 12
    budget = int(rng.integers(costs.min(axis=1).sum(), costs.max(axis=1).sum() + 30))
    every = [
        (errors[range(layers), choice].sum(), costs[range(layers), choice].sum())
        for choice in itertools.product(range(dtypes), repeat=layers)
    ]
    chosen = _least(errors, costs, budget)
    assert costs[range(layers), chosen].sum() <= budget
    least = min(error for error, cost in every if cost <= budget)
    assert errors[range(layers), chosen].sum() == pytest.approx(least)


def test_a_dtype_whose_values_overflow_is_chosen_only_where_no_other_fits():
    samples = [[(query, key, value * np.float32(1e5)) for query, key, value in sequence()]]
    choice = choose_layer_dtypes(MODEL, samples, ["float16", "fp8"], bits=16)
    assert {*choice.dtypes.values()} == {FP8}
    assert choice.errors[0][KVCacheDType.FLOAT16] == np.inf
    assert {*choose_layer_dtypes(MODEL, samples, ["float16"], bits=16).dtypes.values()} == {KVCacheDType.FLOAT16}
    errors = np.array([[np.inf, np.inf], [np.inf, 0.1]])
    assert _least(errors, np.array([[4, 1], [4, 1]]), 5).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_samples_that_are_not_finite_are_refused(name):
    layers = [list(layer) for layer in sequence()]
    layers[1][("query", "key", "value").index(name)][:] = np.nan
    with pytest.raises(KVCacheValueError, match="samples: got attention of layer 1 that is not finite"):
        choose_layer_dtypes(MODEL, [layers], ["float32", "nvfp4"], bits=32)


@pytest.mark.parametrize("budget", [{"bits": "4"}, {"bits": True}, {"bytes_per_token": 99.5}, {"bytes_per_token": "9"}])
def test_a_budget_of_another_type_is_refused(budget):
    with pytest.raises(KVCacheTypeError, match=f"{next(iter(budget))}: got"):
        choose_layer_dtypes(MODEL, [sequence()], ["nvfp4"], **budget)


def test_a_budget_that_is_not_finite_is_refused():
    with pytest.raises(KVCacheValueError, match="bits: got nan, expected a number that is finite"):
        choose_layer_dtypes(MODEL, [sequence()], ["nvfp4"], bits=float("nan"))


def test_measured_errors_may_choose_the_dtypes():
    """They are asked for once for each layer, dtype and rotation that there may be."""
    model = kvjax.ModelKVConfig(LAYERS, "float32", layer_indices=(1, 4, 5), num_hidden_layers=7)
    asked = []

    def error_of(layer: int | str, dtype: KVCacheDType, rotates: bool) -> float:
        asked.append((layer, dtype, rotates))
        if dtype is NVFP4:
            return {1: 0.5, 4: 0.125, 5: 3.0}[int(layer)] * (0.5 if rotates and layer == 1 else 1)
        return 0.0625 + rotates

    dtypes = ["nvfp4", "fp8", "float16"]
    choice = choose_layer_dtypes(model, None, dtypes, bits=6, key_rotation=True, error_of=error_of)
    assert choice.dtypes == {1: NVFP4, 4: NVFP4, 5: FP8}
    assert choice.key_rotation == (1,)
    assert [errors[NVFP4] for errors in choice.errors] == [0.5, 0.125, 3.0]
    assert [errors[NVFP4] for errors in choice.rotated_errors] == [0.25, 0.125, 3.0]
    kinds = [(NVFP4, False), (NVFP4, True), (FP8, False), (FP8, True), (KVCacheDType.FLOAT16, False)]
    assert {*asked} == {(layer, *kind) for layer in (1, 4, 5) for kind in kinds}
    assert len(asked) == 15


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"samples": [sequence()]}, KVCacheValueError, "samples: got a list beside error_of, expected None"),
        ({"error_of": 3}, KVCacheTypeError, "error_of: got an int, expected a function"),
        ({"error_of": lambda *_: "0"}, KVCacheTypeError, "error_of: got '0' for layer 0, nvfp4, expected a float"),
        (
            {"error_of": lambda *_: float("nan")},
            KVCacheValueError,
            "error_of: got nan for layer 0, nvfp4",
        ),
        ({"error_of": lambda *_: -1.0}, KVCacheValueError, "error_of: got -1.0 for layer 0, nvfp4, expected a number"),
        ({"error_of": None}, KVCacheTypeError, "samples: got None, expected a list or a function"),
        (
            {"bits": 4.4, "error_of": None, "samples": []},
            KVCacheValueError,
            "bits: got 4.4, expected at least 4.50, of",
        ),
    ],
)
def test_invalid_measured_errors_are_refused(arguments, error, message):
    arguments = {"samples": None, "dtypes": ["nvfp4"], "bits": 8, "error_of": lambda *_: 0.0} | arguments
    with pytest.raises(error, match=message):
        choose_layer_dtypes(MODEL, **arguments)


def test_samples_that_cannot_be_read_are_refused():
    with pytest.raises(KVCacheTypeError, match="samples: got an int, expected a list or a function"):
        choose_layer_dtypes(MODEL, 3, ["nvfp4"], bits=8)


def test_of_equal_errors_the_fewest_bytes_are_chosen():
    assert _least(np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([[4, 2], [2, 6]]), 100).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": None}, "bits, bytes_per_token: got None and None, expected one of them"),
        ({"bytes_per_token": 9}, "bits, bytes_per_token: got 8 and 9, expected one of them"),
        ({"dtypes": []}, "dtypes: got none, expected at least one"),
        ({"dtypes": ["fp9"]}, "kv_cache_dtype: got 'fp9'"),
        ({"bits": 4.4}, "bits: got 4.4, expected at least 4.50, of the smallest dtypes"),
        ({"samples": []}, "samples: got no batch"),
        ({"samples": [sequence()[:2]]}, r"samples\[0\]: got 2 layers, expected 3"),
        ({"samples": [[layer[1:] for layer in sequence()]]}, r"samples\[0\], layer 0: got 2 arrays, expected query"),
        (
            {"samples": [[(q[:, :3], k, v) for q, k, v in sequence()]]},
            r"layer 0, query: got shape \(23, 3, 32\), expected \[tokens=23, a multiple of 2, 32\]",
        ),
        (
            {"samples": [[(q, k[:9], v) for q, k, v in sequence()]]},
            r"layer 0: got keys \(9, 2, 32\) and values \(23, 2, 32\), expected \[tokens, 2, 32\]",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, message):
    arguments: dict[str, Any] = {"samples": [sequence()], "dtypes": ["nvfp4"], "bits": 8} | changes
    with pytest.raises(KVCacheValueError, match=message):
        choose_layer_dtypes(MODEL, **arguments)


def test_other_types_are_refused():
    with pytest.raises(KVCacheTypeError, match="model: got "):
        choose_layer_dtypes("llama", [sequence()], ["nvfp4"], bits=8)
    with pytest.raises(KVCacheTypeError, match="which can be read only once"):
        choose_layer_dtypes(MODEL, iter([sequence()]), ["nvfp4"], bits=8)
    lists = [[tuple(x.tolist() for x in layer) for layer in sequence()]]
    with pytest.raises(KVCacheTypeError, match=r"samples\[0\], layer 0, query: got "):
        choose_layer_dtypes(MODEL, lists, ["nvfp4"], bits=8)


def test_latents_are_refused():
    model = kvjax.ModelKVConfig((LayerKVConfig(1, 576, 512, is_mla=True),), "bfloat16")
    with pytest.raises(UnsupportedError, match="latent"):
        choose_layer_dtypes(model, [], ["fp8"], bits=8)


@pytest.mark.parametrize(("size", "run"), [(64, 64), (96, 32), (80, 16), (2, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_hadamard_transform_matches_its_formula(size: int, run: int, dtype: Any):
    """In sums of float32: for signs, whose sums 16 bits hold, to the rounding of one product."""
    x = np.random.default_rng(0).choice([-1.0, 1.0], (3, 2, size)).astype(dtype)
    index = [[-1 if (i & j).bit_count() % 2 else 1 for j in range(run)] for i in range(run)]
    blocks = x.astype(np.float64).reshape(3, 2, -1, run) @ np.float64(index) / np.sqrt(run)
    got = kvjax.hadamard_transform(x)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.float64(got), blocks.reshape(x.shape), rtol=float(jnp.finfo(dtype).eps))


def test_a_hadamard_transform_is_its_own_inverse_and_keeps_products():
    query, key = np.random.default_rng(0).normal(size=(2, 50, 3, 48)).astype(np.float32)
    rotated = [kvjax.hadamard_transform(x) for x in (query, key)]
    np.testing.assert_allclose(kvjax.hadamard_transform(rotated[0]), query, atol=1e-6)
    products = [np.einsum("qhd,khd->hqk", *pair) for pair in ((query, key), rotated)]
    np.testing.assert_allclose(*products, atol=2e-5)


def test_a_hadamard_transform_refuses_what_it_cannot_rotate():
    with pytest.raises(KVCacheValueError, match="x: got head_size=0, expected a positive even number"):
        kvjax.hadamard_transform(np.ones((2, 0), np.float32))
    with pytest.raises(KVCacheValueError, match="x: got head_size=5, expected a positive even number"):
        kvjax.hadamard_transform(np.ones((2, 5), np.float32))
    with pytest.raises(KVCacheValueError, match=r"x: got shape \[\], expected \[\.\.\., head_size\]"):
        kvjax.hadamard_transform(np.float32(1))
    with pytest.raises(KVCacheTypeError, match=r"x: got .*int32.*, expected"):
        kvjax.hadamard_transform(np.ones((2, 4), np.int32))


def test_keys_are_rotated_where_that_is_more_accurate():
    """One large element of a key in 16 takes the others' precision in NVFP4; rotated, all share its error."""
    rng = np.random.default_rng(0)
    layers = []
    for number, layer in enumerate(sequence()):
        query, key, value = layer
        key = np.where(np.arange(key.shape[-1]) == 3, 40, 1) * rng.uniform(0.5, 1, key.shape) if number != 1 else key
        layers.append((query, key.astype(np.float32), value))
    plain = choose_layer_dtypes(MODEL, [layers], ["nvfp4"], bits=4.5)
    choice = choose_layer_dtypes(MODEL, [layers], ["nvfp4"], bits=4.5, key_rotation=True)
    assert (plain.key_rotation, plain.rotated_errors) == ((), ())
    assert (choice.errors, choice.dtypes) == (plain.errors, plain.dtypes)
    pairs = zip(choice.errors, choice.rotated_errors, strict=True)
    lower = [rotated[NVFP4] < error[NVFP4] for error, rotated in pairs]
    assert choice.key_rotation == tuple(layer for layer in range(3) if lower[layer])
    assert 0 < len(choice.key_rotation) < 3
    rotated = [(*map(kvjax.hadamard_transform, layer[:2]), layer[2]) for layer in layers]
    of_rotated = choose_layer_dtypes(MODEL, [rotated], ["nvfp4"], bits=4.5).errors
    for mine, theirs in zip(choice.rotated_errors, of_rotated, strict=True):
        assert mine[NVFP4] == pytest.approx(theirs[NVFP4], rel=1e-4)


def test_unquantized_keys_are_never_rotated():
    choice = choose_layer_dtypes(MODEL, [sequence()], ["float16", "nvfp4"], bits=16, key_rotation=True)
    assert {*choice.dtypes.values()} == {KVCacheDType.FLOAT16}
    assert choice.key_rotation == ()
    assert all(errors[KVCacheDType.FLOAT16] == float("inf") for errors in choice.rotated_errors)
    with pytest.raises(KVCacheTypeError, match="key_rotation: got 1"):
        choose_layer_dtypes(MODEL, [sequence()], ["nvfp4"], bits=16, key_rotation=1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_hadamard_transform_overflows_only_where_its_results_do(dtype: Any):
    got = np.float64(kvjax.hadamard_transform(np.full((1, 128), 1e37, dtype)))
    assert got[0, 0] == pytest.approx(1e37 * np.sqrt(128), rel=0.01)
    assert np.abs(got[0, 1:]).max() < 1e-6 * got[0, 0]


def test_a_rotations_own_rounding_is_part_of_its_error():
    """Of bfloat16 keys with one large channel, whose rotation is rounded to bfloat16."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 64, 1, 128))
    query, key[..., 5] = query * 4, key[..., 5] + 400
    query[..., 5] *= 0.01
    sample = tuple(np.asarray(x, jnp.bfloat16) for x in (query, key, value))
    model = kvjax.ModelKVConfig((LayerKVConfig(1, 128, 128),), "bfloat16")
    dtype = KVCacheDType.INT8_PER_TOKEN_HEAD
    choice = choose_layer_dtypes(model, [[sample]], [dtype], bits=9, key_rotation=True)
    exact = _attended(*(x.astype(np.float64) for x in sample))
    rotated = [kvjax.hadamard_transform(x) for x in sample[:2]]
    [spec] = kvjax.resolve_layer_specs(model, dtype)
    keys, values = stored(spec, kvjax.KVScales(np.float32(1), np.float32(1)), rotated[1], sample[2])
    got = _attended(*(np.asarray(x, np.float64) for x in (rotated[0], keys, values)))
    wanted = np.sum((got - exact) ** 2) / np.sum(exact**2)
    assert choice.rotated_errors[0][dtype] == pytest.approx(wanted, rel=0.02)


def _attended(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Causal attention of one head in float64."""
    logits = np.where(np.tri(len(query)) > 0, query[:, 0] @ key[:, 0].T / np.sqrt(query.shape[-1]), -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ value[:, 0]


def test_layers_that_cannot_be_rotated_are_chosen_without():
    """An odd head size, and float16 queries whose rotation exceeds float16."""
    rng = np.random.default_rng(0)
    layers = []
    for size in (33, 128):
        query, key, value = rng.standard_normal((3, TOKENS, 1, size)).astype(np.float16)
        layers.append((query, key, value))
    layers[1][0][0] = 6000
    model = kvjax.ModelKVConfig((LayerKVConfig(1, 33, 33), LayerKVConfig(1, 128, 128)), "float16")
    choice = choose_layer_dtypes(model, [layers], ["fp8"], bits=8, key_rotation=True)
    assert choice.key_rotation == ()
    assert [errors[FP8] for errors in choice.rotated_errors] == [float("inf")] * 2
    assert choice.dtypes == choose_layer_dtypes(model, [layers], ["fp8"], bits=8).dtypes
