"""Scales of checkpoints, each written as its exporter writes it; and what is said where one is missing or unclear."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
from kvjax import KVCacheTypeError, KVCacheValueError, KVCacheWarning, ModelKVConfig, load_kv_scales

HEADS, LAYERS = 2, 3
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": 16,
    "hidden_size": 64,
    "dtype": "bfloat16",
}
# The largest magnitudes of each layer's keys and values.
K_AMAX, V_AMAX = np.array([3.5, 56.0, 7.0], np.float32), np.array([1.75, 448.0, 0.875], np.float32)

type Arrays = dict[str, np.ndarray]


def each_layer(names: Mapping[str, np.ndarray], module: str = "model.layers.{}.self_attn") -> Arrays:
    """`names` of a layer's tensors, with values for all layers, under the names that they have in a model."""
    return {f"{module.format(i)}.{name}": values[i] for name, values in names.items() for i in range(LAYERS)}


def weights() -> Arrays:
    """Some of what else a checkpoint holds."""
    each = np.zeros((LAYERS, 4, 4), ml_dtypes.bfloat16)
    per_layer = each_layer({"k_proj.weight": each, "q_proj.input_scale": each, "k_proj.weight_scale": each})
    experts = {"model.layers.0.mlp.experts.5.up_proj.weight": each, "lm_head.weight": each}
    return {**per_layer, **experts, "model.vision_tower.layers.0.self_attn.k_scale": np.float32(9)}


def write(folder: Path, tensors: Arrays, quantization: Any, *, shards: int = 1, beside: bool = False) -> ModelKVConfig:
    """Writes a checkpoint's folder, and reads its model back as a user does."""
    tensors = {name: np.asarray(tensor) for name, tensor in (weights() | tensors).items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(tensors)
        parts = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
        for file, held in parts.items():
            save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = LLAMA if beside else LLAMA | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelKVConfig.from_hf_config(config, quantization_config=quantization if beside else None)


def hf_quant_config(algorithm: str) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": algorithm,
            "exclude_modules": ["lm_head"],
        },
    }


def compressed_tensors(strategy: str) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": ["lm_head"],
        "kv_cache_scheme": scheme | {"observer": "minmax", "group_size": None, "actorder": None},
    }


def quark(**output: Any) -> dict[str, Any]:
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None, "symmetric": None}
    projection = {"input_tensors": None, "weight": None, "output_tensors": spec | output}
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "order", "weight_format": "real_quantized"},
        "layer_quant_config": {"*k_proj": projection, "*v_proj": projection},
        "global_quant_config": {"output_tensors": None},
    }


AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
PER_HEAD = np.array([1.0, 0.5], np.float32)


def of_tensor(dtype: type = np.float32, shape: tuple[int, ...] = ()) -> list[np.ndarray]:
    return [(amax / np.float32(448)).astype(dtype).reshape(LAYERS, *shape) for amax in (K_AMAX, V_AMAX)]


def named(k: str, v: str, scales: list[np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip((k, v), scales, strict=True))


EXPORTERS = {
    "modelopt": (named("k_proj.k_scale", "v_proj.v_scale", of_tensor()), hf_quant_config("FP8")),
    "modelopt in config.json": (
        named("k_proj.k_scale", "v_proj.v_scale", of_tensor(shape=(1,))),
        {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
    ),
    "compressed-tensors": (
        named("k_scale", "v_scale", of_tensor(ml_dtypes.bfloat16, (1,))),
        compressed_tensors("tensor"),
    ),
    "compressed-tensors attn_head": (
        named("k_scale", "v_scale", [(x[:, None] * PER_HEAD).reshape(LAYERS, HEADS, 1, 1) for x in of_tensor()]),
        compressed_tensors("attn_head"),
    ),
    "quark": (named("k_proj.output_scale", "v_proj.output_scale", of_tensor()), quark()),
    "quark, custom_mode=fp8": (named("k_scale", "v_scale", of_tensor()), AUTO_FP8),
    "autofp8": ({"kv_scale": of_tensor(np.float16)[0]}, AUTO_FP8),
    "fused": (named("qkv_proj.k_scale", "qkv_proj.v_scale", of_tensor()), hf_quant_config("FP8")),
    "fused twice": (named("qkqkv_proj.k_scale", "qkqkv_proj.v_scale", of_tensor()), hf_quant_config("FP8")),
    "vllm": (named("attn.k_scale", "attn.v_scale", of_tensor()), compressed_tensors("tensor")),
    "hunyuan": (named("k_cache.scale", "v_cache.scale", of_tensor()), hf_quant_config("FP8")),
    "in float8": (named("k_scale", "v_scale", of_tensor(ml_dtypes.float8_e5m2)), compressed_tensors("tensor")),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_every_exporters_scales_are_found_and_bring_no_warning(tmp_path: Path, exporter: str, shards: int):
    tensors, quantization = EXPORTERS[exporter]
    model = write(tmp_path, each_layer(tensors), quantization, shards=shards, beside="producer" in quantization)
    scales = load_kv_scales(tmp_path, model)
    k, v = (values.astype(np.float32) for values in (list(tensors.values()) * 2)[:2])
    per_head = "attn_head" in exporter
    for layer, (k_scale, v_scale) in enumerate(scales):
        assert k_scale.dtype == v_scale.dtype == np.float32
        assert k_scale.shape == v_scale.shape == ((HEADS,) if per_head else ())
        np.testing.assert_array_equal(k_scale, k[layer].reshape(k_scale.shape))
        np.testing.assert_array_equal(v_scale, v[layer].reshape(v_scale.shape))
    resolved = kvjax.resolve_layer_dtypes(model)
    assert {(layer.dtype.value, layer.source, layer.per_head_scales) for layer in resolved} == {
        ("fp8_e4m3", "checkpoint", per_head)
    }


@pytest.mark.parametrize(
    "module",
    [
        "layers.{}.self_attn",
        "model.language_model.layers.{}.self_attn",
        "language_model.model.layers.{}.self_attn",
        "transformer.h.{}.attn",
        "backbone.layers.{}.mixer",
        "model.layers.{}.self_attn.mla_attn",
    ],
)
def test_layers_are_found_wherever_they_are_in_the_model(module: str):
    model = ModelKVConfig.from_hf_config(LLAMA | {"quantization_config": AUTO_FP8})
    k, v = of_tensor()
    scales = load_kv_scales(each_layer(named("k_scale", "v_scale", [k, v]), module), model)
    np.testing.assert_array_equal([layer.k_scale for layer in scales], k)
    np.testing.assert_array_equal([layer.v_scale for layer in scales], v)


FP8_MODEL = ModelKVConfig.from_hf_config(LLAMA | {"quantization_config": compressed_tensors("tensor")})
PLAIN = ModelKVConfig.from_hf_config(LLAMA)
NVFP4_MODEL = ModelKVConfig.from_hf_config(LLAMA, quantization_config=hf_quant_config("NVFP4"))
MODELOPT = each_layer(named("k_proj.k_scale", "v_proj.v_scale", of_tensor()))


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        ("attn.k_scale", "k_proj.k_scale"),
        ("k_proj.k_scale", "qkv_proj.k_scale"),
        ("k_proj.output_scale", "k_scale"),
        ("k_scale", "kv_scale"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_of_several_names_the_nearest_to_vllms_holds(nearer: str, farther: str, first: bool):
    ones, twos, v = np.ones(LAYERS, np.float32), np.full(LAYERS, 2, np.float32), of_tensor()[1]
    names = {nearer: ones, farther: twos} if first else {farther: twos, nearer: ones}
    scales = load_kv_scales(each_layer({**names, "v_proj.v_scale": v}), FP8_MODEL)
    assert [layer.k_scale for layer in scales] == [1, 1, 1]
    np.testing.assert_array_equal([layer.v_scale for layer in scales], v)


def test_layers_go_by_their_index_in_the_model():
    model = ModelKVConfig(
        FP8_MODEL.layers[:2],
        FP8_MODEL.dtype,
        FP8_MODEL.quantization_config,
        layer_indices=(0, 2),
        num_hidden_layers=LAYERS,
    )
    draft = {"model.layers.61.self_attn.k_scale": np.float32(9)}  # past the model's layers: one that drafts tokens
    scales = load_kv_scales(MODELOPT | draft, model)
    np.testing.assert_array_equal([layer.k_scale for layer in scales], of_tensor()[0][[0, 2]])


def test_tensors_of_torch_and_jax_are_taken():
    torch = pytest.importorskip("torch")
    k, v = of_tensor()
    tensors = each_layer(
        {
            "k_scale": [torch.tensor(float(x)).to(torch.bfloat16) for x in k],
            "v_scale": [jnp.float32(x) for x in v],
        }
    )
    scales = load_kv_scales(tensors, FP8_MODEL)
    assert [float(layer.k_scale) for layer in scales] == [float(x) for x in k.astype(ml_dtypes.bfloat16)]
    np.testing.assert_array_equal([layer.v_scale for layer in scales], v)


def test_what_is_loaded_is_what_operations_take(tmp_path: Path):
    tensors, quantization = EXPORTERS["compressed-tensors attn_head"]
    model = write(tmp_path, each_layer(tensors), quantization)
    [spec, *_], [scales, *_] = kvjax.resolve_layer_specs(model), load_kv_scales(tmp_path, model)
    largest = np.float32([[3.5, 1.75], [1.75, 0.875]])  # of keys and of values, of each head
    key, value = (np.ones((4, HEADS, 16), np.float32) * amax[:, None] for amax in largest)
    cache = kvjax.KVCache.allocate(spec, 1)
    cache = kvjax.reshape_and_cache_flash(key, value, cache, np.arange(4), **scales._asdict())
    stored = np.asarray(cache.kv).view(ml_dtypes.float8_e4m3fn)[0, :, :4].astype(np.float32)
    np.testing.assert_array_equal(stored, np.full_like(stored, 448))  # the largest magnitude is the largest code
    read = kvjax.gather_kv(cache, np.array([[0]]), np.array([4]), **scales._asdict())
    np.testing.assert_array_equal(np.asarray(read[0])[0, :4], key)
    np.testing.assert_array_equal(np.asarray(read[1])[0, :4], value)


def test_a_declaration_that_the_model_was_read_without_is_warned_of(tmp_path: Path):
    declared = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    model = write(
        tmp_path, each_layer({"k_proj.k_scale": K_AMAX / 448, "v_proj.v_scale": V_AMAX / 448}), declared, beside=True
    )
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))
    assert [layer.k_scale for layer in silently(tmp_path, model)] == [*(K_AMAX / 448)]
    with pytest.warns(KVCacheWarning, match=r"hf_quant_config\.json and a model without .*from_hf_config\("):
        scales = load_kv_scales(tmp_path, ModelKVConfig.from_hf_config(LLAMA))
    assert [layer.k_scale for layer in scales] == [1, 1, 1]
    declared["quantization"]["kv_cache_quant_algo"] = None  # weights alone
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))
    assert [layer.k_scale for layer in silently(tmp_path, ModelKVConfig.from_hf_config(LLAMA))] == [1, 1, 1]


def silently(*args: Any, **kwargs: Any) -> tuple[kvjax.KVScales, ...]:
    """`load_kv_scales`, which is to warn of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_kv_scales(*args, **kwargs)


# What a user asks for beside what the checkpoint declares.


def test_layers_that_are_not_quantized_need_no_scale():
    assert silently({}, PLAIN) == (kvjax.KVScales(1, 1),) * LAYERS
    assert silently(MODELOPT, FP8_MODEL, "bfloat16") == (kvjax.KVScales(1, 1),) * LAYERS
    scales = silently(MODELOPT, FP8_MODEL, skip_layers=[1])
    np.testing.assert_array_equal([layer.k_scale for layer in scales], [*of_tensor()[0][:1], 1, *of_tensor()[0][2:]])


@pytest.mark.parametrize(("requested", "largest"), [("fp8", 448), ("fp8_e5m2", 57344), ("nvfp4", 6 * 448)])
def test_a_scale_of_a_declared_fp8_cache_is_brought_to_the_dtype_asked_for(requested: str, largest: float):
    scales = silently(MODELOPT, FP8_MODEL, requested)
    np.testing.assert_allclose([layer.k_scale for layer in scales], K_AMAX / largest, rtol=1e-6)
    np.testing.assert_allclose([layer.v_scale for layer in scales], V_AMAX / largest, rtol=1e-6)


@pytest.mark.parametrize(("model", "requested"), [(NVFP4_MODEL, "auto"), (NVFP4_MODEL, "fp8"), (PLAIN, "nvfp4")])
def test_where_nothing_declares_the_divisor_the_scale_stands_and_the_caller_may_choose(model, requested):
    with pytest.warns(KVCacheWarning) as caught:
        scales = load_kv_scales(MODELOPT, model, requested)
    [message] = [str(warning.message) for warning in caught]
    dtype, costs = (
        ("fp8_e4m3", "clamped") if requested == "fp8" else ("nvfp4", "the unchanged block scales use a sixth")
    )
    assert message.startswith(f"scales of layers 0-2 ({dtype}): the divisor of the scales is unknown")
    assert "(amax_divisor=448)" in message
    assert "(amax_divisor=2688)" in message
    assert costs in message
    assert [warning.filename for warning in caught] == [__file__]
    np.testing.assert_array_equal([layer.k_scale for layer in scales], of_tensor()[0])
    largest = 448 if requested == "fp8" else 2688
    for divisor in (448, 2688):
        chosen = silently(MODELOPT, model, requested, amax_divisor=divisor)
        expected = of_tensor()[0] * np.float32(divisor / largest)
        np.testing.assert_array_equal([layer.k_scale for layer in chosen], expected)


def test_of_a_map_of_layers_each_declares_its_own():
    """ModelOpt divides by 448 for every layer of a map; of its NVFP4 layers no file says so."""
    names = {f"model.layers.{i}.self_attn": {"quant_algo": algorithm} for i, algorithm in ((0, "FP8"), (2, "NVFP4"))}
    declared = hf_quant_config("MIXED_PRECISION")
    declared["quantization"] |= {"kv_cache_quantized_layers": names, "kv_cache_schema_version": 1}
    model = ModelKVConfig.from_hf_config(LLAMA, quantization_config=declared)
    with pytest.warns(
        KVCacheWarning, match=r"^scales of layers 2 \(nvfp4\): the divisor of the scales is unknown"
    ) as caught:
        scales = load_kv_scales(MODELOPT, model)
    assert len(caught) == 1
    np.testing.assert_array_equal([layer.k_scale for layer in scales], of_tensor()[0] * [1, 0, 1] + [0, 1, 0])
    asked = silently(MODELOPT, model, {"0": "nvfp4", "*": "bfloat16"})
    np.testing.assert_allclose([layer.k_scale for layer in asked], [K_AMAX[0] / 2688, 1, 1], rtol=1e-6)


def test_nvfp4_takes_the_largest_of_the_heads():
    tensors, quantization = EXPORTERS["compressed-tensors attn_head"]
    model = ModelKVConfig.from_hf_config(LLAMA | {"quantization_config": quantization})
    scales = silently(each_layer(tensors), model, "nvfp4")
    np.testing.assert_allclose([layer.k_scale for layer in scales], K_AMAX / 2688, rtol=1e-6)


# What is missing is said.


@pytest.mark.parametrize(
    ("requested", "dtype", "costs"),
    [
        ("auto", "fp8_e4m3", "magnitudes above 448 are clamped and those up to 0.00098 read as zero"),
        ("fp8_e5m2", "fp8_e5m2", "magnitudes above 57344 are clamped and those up to 7.6e-06 read as zero"),
        (
            "nvfp4",
            "nvfp4",
            "magnitudes above 2688 are clamped and blocks of 16 with no magnitude above 0.0059 read as zero",
        ),
    ],
)
def test_a_quantized_cache_without_scales_is_told_what_that_costs(tmp_path: Path, requested, dtype, costs):
    model = write(tmp_path, {}, compressed_tensors("tensor"))
    with pytest.warns(KVCacheWarning) as caught:
        scales = load_kv_scales(tmp_path, model, requested)
    [message] = [str(warning.message) for warning in caught]
    assert message.startswith(f"scales of layers 0-2 ({dtype}): the checkpoint holds no scale, so 1 is used:")
    assert costs in message
    assert "kvjax.calibrate" in message
    assert scales == (kvjax.KVScales(1, 1),) * LAYERS


@pytest.mark.parametrize("requested", ["fp8", "fp8_e5m2", "nvfp4"])
def test_a_scale_of_1_loses_the_magnitudes_that_the_warning_names(requested: str):
    """The magnitudes that the warning names: the next ones are kept."""
    least = {"fp8": 2.0**-10, "fp8_e5m2": 2.0**-17, "nvfp4": 6 * 2.0**-10}[requested]
    spec = kvjax.FullAttentionSpec(16, 1, 16, dtype=kvjax.parse_kv_cache_dtype(requested))
    largest = spec.dtype.info.max
    key = np.repeat(np.float32([largest, largest * 1.5, least, least * 1.01]), 16).reshape(4, 1, 16)
    cache = kvjax.reshape_and_cache_flash(key, key, kvjax.KVCache.allocate(spec, 1), np.arange(4))
    read = np.asarray(kvjax.gather_kv(cache, np.array([[0]]), np.array([4]))[0])[0, :4, 0, 0]
    assert list(read[:3]) == [largest, largest, 0]
    assert read[3] > 0


def test_one_missing_layer_is_named_and_the_others_are_read():
    tensors = {name: scale for name, scale in MODELOPT.items() if ".1." not in name}
    with pytest.warns(KVCacheWarning, match=r"^scales of layers 1 \(fp8_e4m3\): the checkpoint holds no scale"):
        scales = load_kv_scales(tensors, FP8_MODEL)
    k = of_tensor()[0]
    np.testing.assert_array_equal([layer.k_scale for layer in scales], [k[0], 1, k[2]])


@pytest.mark.parametrize("only", ["k", "v"])
def test_a_scale_that_stands_alone_is_taken_for_both(only: str):
    k = of_tensor()[0]
    tensors = each_layer({f"{only}_proj.{only}_scale": k})
    with pytest.warns(
        KVCacheWarning, match=r"^scales of layers 0-2 .*: the checkpoint holds a scale of keys or of values only"
    ):
        scales = load_kv_scales(tensors, FP8_MODEL)
    np.testing.assert_array_equal([(layer.k_scale, layer.v_scale) for layer in scales], np.stack([k, k], 1))


# What is refused.


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-38], ids=repr)
def test_a_scale_out_of_range_is_named(scale: float):
    name = "model.layers.1.self_attn.v_proj.v_scale"
    with pytest.raises(KVCacheValueError, match=rf"^{name}: got {scale}, expected between"):
        load_kv_scales(MODELOPT | {name: np.float32(scale)}, FP8_MODEL)


def test_a_scale_for_other_heads_is_named():
    name = "model.layers.1.self_attn.k_scale"
    with pytest.raises(KVCacheValueError, match=rf"^{name}: got shape \(3, 1, 1\), expected one scale, or one per"):
        load_kv_scales({name: np.ones((3, 1, 1), np.float32)}, FP8_MODEL)


def test_scales_of_two_models_are_not_mixed():
    other = each_layer(named("k_scale", "v_scale", of_tensor()), "assistant.layers.{}.self_attn")
    with pytest.raises(KVCacheValueError, match=r"several models' layers.*'assistant\.layers\.0\.self_attn\.k_scale'"):
        load_kv_scales(MODELOPT | other, FP8_MODEL)


@pytest.mark.parametrize("divisor", [0, -448.0, float("nan")])
def test_a_divisor_that_is_no_magnitude_is_refused(divisor: float):
    with pytest.raises(KVCacheValueError, match="amax_divisor: got"):
        load_kv_scales(MODELOPT, NVFP4_MODEL, amax_divisor=divisor)


@pytest.mark.parametrize("checkpoint", [None, 3, [("a", 1)]], ids=repr)
def test_a_checkpoint_that_is_neither_a_path_nor_a_mapping_is_refused(checkpoint: Any):
    with pytest.raises(KVCacheTypeError, match="checkpoint: got"):
        load_kv_scales(checkpoint, FP8_MODEL)


def test_a_mapping_without_names_or_numbers_is_refused():
    with pytest.raises(KVCacheTypeError, match="got the key 3, expected names"):
        load_kv_scales({3: 1.0}, FP8_MODEL)  # type: ignore[dict-item]
    with pytest.raises(KVCacheTypeError, match=r"layers\.0\.attn\.k_scale: got a str, expected an array of numbers"):
        load_kv_scales({"layers.0.attn.k_scale": "one"}, FP8_MODEL)


@pytest.mark.parametrize(
    ("scale", "got"),
    [
        ("0.5", "a str"),
        (b"0.5", "a bytes"),
        (True, "a bool"),
        (0.5j, "a complex"),
        (None, "None"),
        (["0.5"], "a list"),
        ([[0.5], [0.5, 0.25]], "a list"),
        (np.array("0.5"), "dtype <U3"),
        (np.array([True]), "dtype bool"),
        (np.complex64(0.5), "dtype complex64"),
        (np.array(0.5, object), "dtype object"),
        (jnp.array(True), "dtype bool"),
    ],
    ids=repr,
)
def test_a_scale_that_is_not_a_number_is_refused(scale: Any, got: str):
    tensors = {"layers.0.attn.k_scale": scale}
    with pytest.raises(KVCacheTypeError, match=rf"layers\.0\.attn\.k_scale: got {got}, expected an array of numbers"):
        load_kv_scales(tensors, FP8_MODEL)


def test_a_torch_tensor_that_does_not_hold_real_numbers_is_refused():
    torch = pytest.importorskip("torch")
    for tensor in (torch.tensor(True), torch.tensor(0.5j)):
        with pytest.raises(KVCacheTypeError, match=rf"got dtype {tensor.dtype}, expected an array of numbers"):
            load_kv_scales({"layers.0.attn.k_scale": tensor}, FP8_MODEL)


@pytest.mark.parametrize("scale", [1, 0.5, [0.5], np.uint8(2), np.array([[0.5]]), ml_dtypes.bfloat16(0.5)], ids=type)
def test_numbers_of_any_kind_are_taken_as_scales(scale: Any):
    tensors = each_layer({"k_scale": [scale] * LAYERS, "v_scale": [scale] * LAYERS})
    for layer in load_kv_scales(tensors, FP8_MODEL):
        assert layer.k_scale == layer.v_scale == np.float32(np.asarray(scale)).item()


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    with pytest.raises(KVCacheValueError, match=r"expected model\.safetensors\.index\.json or \*\.safetensors in it"):
        load_kv_scales(tmp_path, FP8_MODEL)
    with pytest.raises(FileNotFoundError):
        load_kv_scales(tmp_path / "missing.safetensors", FP8_MODEL)


def test_shards_without_scales_may_be_missing(tmp_path: Path):
    model = write(tmp_path, each_layer(EXPORTERS["modelopt"][0]), compressed_tensors("tensor"), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())
    files["weight_map"]["model.embed_tokens.weight"] = "not-there.safetensors"
    index.write_text(json.dumps(files))
    np.testing.assert_array_equal([layer.k_scale for layer in silently(tmp_path, model)], of_tensor()[0])
