"""Who decides a dtype: the user, else the checkpoint, else the model; and which layers are left alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.dtypes import STORED_KV_CACHE_DTYPES, KVCacheDType, KVQuantMode
from kvjax.errors import KVCacheTypeError, KVCacheValueError, KVCacheWarning
from kvjax.layouts import CacheLayout, VScaleLayout
from kvjax.model_config import LayerKVConfig, ModelKVConfig
from kvjax.resolve import (
    DTypeSource,
    ResolvedKVCacheDType,
    resolve_kv_cache_dtype,
    resolve_layer_dtypes,
    resolve_layer_specs,
)
from kvjax.scales import load_kv_scales
from kvjax.spec import FullAttentionSpec, SlidingWindowSpec

BF16_OF_MODEL = ResolvedKVCacheDType(KVCacheDType.BFLOAT16, DTypeSource.MODEL)
FP8_OF_CHECKPOINT = ResolvedKVCacheDType(KVCacheDType.FP8_E4M3, DTypeSource.CHECKPOINT)
FP8_PER_HEAD = ResolvedKVCacheDType(KVCacheDType.FP8_E4M3, DTypeSource.CHECKPOINT, per_head_scales=True)
NVFP4_OF_CHECKPOINT = ResolvedKVCacheDType(KVCacheDType.NVFP4, DTypeSource.CHECKPOINT)

FP8_SCHEME = {"num_bits": 8, "type": "float"}
NVFP4_SCHEME = {"num_bits": 4, "type": "float"}


def compressed_tensors(scheme: object) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": scheme}


def modelopt(**declared: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "FP8", **declared}


def hf_quant_config(**declared: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": {"quant_algo": "FP8", **declared}}


def quark(group: Any, *outputs: Any) -> dict[str, Any]:
    """Quark's, with these `output_tensors` for the projections of keys, of values, ..."""
    layers = {name: {"weight": None, "output_tensors": output} for name, output in zip(QUARKS, outputs, strict=False)}
    return {"quant_method": "quark", "export": {"kv_cache_group": group}, "layer_quant_config": layers}


QUARKS = ["*k_proj", "*v_proj", "*o_proj"]
QUARKS_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}

DECLARATIONS = [
    # compressed-tensors
    (compressed_tensors(FP8_SCHEME), FP8_OF_CHECKPOINT),
    (compressed_tensors(FP8_SCHEME | {"strategy": "tensor", "dynamic": False, "symmetric": True}), FP8_OF_CHECKPOINT),
    (compressed_tensors(FP8_SCHEME | {"strategy": None, "dynamic": None, "group_size": None}), FP8_OF_CHECKPOINT),
    (compressed_tensors(FP8_SCHEME | {"strategy": "attn_head"}), FP8_PER_HEAD),
    (compressed_tensors(NVFP4_SCHEME), NVFP4_OF_CHECKPOINT),
    (compressed_tensors(NVFP4_SCHEME | {"strategy": "tensor_group", "group_size": 16}), NVFP4_OF_CHECKPOINT),
    # NVFP4's block scales are made as it is written, its tensor scale is static: that is "local".
    (compressed_tensors(NVFP4_SCHEME | {"dynamic": "local"}), NVFP4_OF_CHECKPOINT),
    (compressed_tensors(None), BF16_OF_MODEL),
    ({"quant_method": "compressed-tensors"}, BF16_OF_MODEL),
    ({"kv_cache_scheme": FP8_SCHEME}, FP8_OF_CHECKPOINT),
    # ModelOpt, in config.json
    (modelopt(kv_cache_quant_algo="FP8"), FP8_OF_CHECKPOINT),
    (modelopt(kv_cache_quant_algo="fp8"), FP8_OF_CHECKPOINT),
    (modelopt(kv_cache_quant_algo="NVFP4"), NVFP4_OF_CHECKPOINT),
    (modelopt(kv_cache_quant_algo="NvFp4"), NVFP4_OF_CHECKPOINT),
    (modelopt(kv_cache_quant_algo="MIXED_PRECISION"), BF16_OF_MODEL),
    (modelopt(kv_cache_quant_algo="mixed_precision"), BF16_OF_MODEL),
    (modelopt(kv_cache_scheme="FP8"), FP8_OF_CHECKPOINT),
    (modelopt(kv_cache_scheme="nvfp4"), NVFP4_OF_CHECKPOINT),
    (modelopt(kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"}), FP8_OF_CHECKPOINT),
    (modelopt(kv_cache_scheme=NVFP4_SCHEME), NVFP4_OF_CHECKPOINT),
    (modelopt(kv_cache_quant_algo=None, kv_cache_scheme="fp8"), FP8_OF_CHECKPOINT),
    (modelopt(kv_cache_quant_algo=None, kv_cache_scheme=None), BF16_OF_MODEL),
    (modelopt(), BF16_OF_MODEL),
    ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}, NVFP4_OF_CHECKPOINT),
    ({"quant_method": "ModelOpt", "kv_cache_quant_algo": "FP8"}, FP8_OF_CHECKPOINT),
    # ModelOpt, nested, as in hf_quant_config.json, which names no method
    (hf_quant_config(kv_cache_quant_algo="FP8"), FP8_OF_CHECKPOINT),
    (hf_quant_config(kv_cache_quant_algo="NVFP4"), NVFP4_OF_CHECKPOINT),
    (hf_quant_config(kv_cache_scheme=FP8_SCHEME), FP8_OF_CHECKPOINT),
    (hf_quant_config(kv_cache_quant_algo=None), BF16_OF_MODEL),
    (hf_quant_config(), BF16_OF_MODEL),
    (hf_quant_config() | {"kv_cache_quant_algo": "FP8"}, FP8_OF_CHECKPOINT),
    (hf_quant_config(kv_cache_quant_algo="NVFP4") | {"kv_cache_quant_algo": "FP8"}, NVFP4_OF_CHECKPOINT),
    (modelopt(quantization={"kv_cache_quant_algo": "NVFP4"}, kv_cache_scheme=FP8_SCHEME), NVFP4_OF_CHECKPOINT),
    ({"producer": {"name": "modelopt"}, "kv_cache_scheme": "FP8"}, FP8_OF_CHECKPOINT),
    # AutoFP8
    ({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}, FP8_OF_CHECKPOINT),
    # Quark
    (quark(["*k_proj", "*v_proj"], QUARKS_FP8, QUARKS_FP8), FP8_OF_CHECKPOINT),
    (quark(["*[kv]_proj"], QUARKS_FP8, QUARKS_FP8, {"dtype": "int8"}), FP8_OF_CHECKPOINT),
    (quark([], QUARKS_FP8), BF16_OF_MODEL),
    (quark(None), BF16_OF_MODEL),
    ({"quant_method": "quark"}, BF16_OF_MODEL),
    # quantized weights only
    ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, BF16_OF_MODEL),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, BF16_OF_MODEL),
    ({"quant_method": "awq", "bits": 4}, BF16_OF_MODEL),
    ({"quant_method": "mxfp4"}, BF16_OF_MODEL),
    ({"group_size": 64, "bits": 4}, BF16_OF_MODEL),
    ({}, BF16_OF_MODEL),
    (None, BF16_OF_MODEL),
]


@pytest.mark.parametrize(("declared", "resolved"), DECLARATIONS, ids=repr)
def test_auto_takes_what_the_checkpoint_declares(declared: dict[str, Any] | None, resolved: ResolvedKVCacheDType):
    assert resolve_kv_cache_dtype("auto", model_dtype="bfloat16", quantization_config=declared) == resolved


REFUSED_SCHEMES = [
    (FP8_SCHEME | {"dynamic": True}, "dynamic=True"),
    (NVFP4_SCHEME | {"dynamic": True}, "dynamic=True"),
    (FP8_SCHEME | {"dynamic": "local"}, "unknown combination"),
    (FP8_SCHEME | {"symmetric": False}, "symmetric=False"),
    (FP8_SCHEME | {"strategy": "channel"}, "unknown combination"),
    (FP8_SCHEME | {"strategy": "token"}, "unknown combination"),
    (NVFP4_SCHEME | {"strategy": "attn_head"}, "unknown combination"),
    (NVFP4_SCHEME | {"strategy": "group", "group_size": 32}, "unknown combination"),
    (NVFP4_SCHEME | {"group_size": 32}, "unknown combination"),
    ({"num_bits": 8, "type": "int"}, "unknown combination"),
    ({"num_bits": 4, "type": "int"}, "unknown combination"),
    ({"num_bits": 2, "type": "float"}, "unknown combination"),
    ({"num_bits": [8], "type": ["float"]}, "unknown combination"),
    ({"num_bits": 8}, "unknown combination"),
    ({"type": "float"}, "unknown combination"),
    ({}, "unknown combination"),
]


@pytest.mark.parametrize("wrap", [compressed_tensors, lambda scheme: modelopt(kv_cache_scheme=scheme)])
@pytest.mark.parametrize(("scheme", "reason"), REFUSED_SCHEMES, ids=repr)
def test_auto_refuses_a_scheme_that_would_decode_garbage(scheme: dict[str, Any], reason: str, wrap: Any):
    with pytest.raises(KVCacheValueError) as raised:
        resolve_kv_cache_dtype("auto", model_dtype="bfloat16", quantization_config=wrap(scheme))
    message = str(raised.value)
    assert repr(scheme) in message
    assert reason in message
    assert "expected num_bits 8 and type float" in message


@pytest.mark.parametrize(
    ("group", "outputs"),
    [
        (["*k_proj", "*v_proj"], [QUARKS_FP8, QUARKS_FP8 | {"dtype": "int8"}]),
        (["*k_proj"], [QUARKS_FP8 | {"qscheme": "per_channel"}]),
        (["*k_proj"], [QUARKS_FP8 | {"is_dynamic": True}]),
        (["*k_proj"], [None]),
        (["*k_proj"], []),
        ("*k_proj", [QUARKS_FP8]),
        ([3], [QUARKS_FP8]),
    ],
    ids=repr,
)
def test_auto_refuses_what_quark_may_store_and_kvjax_does_not(group: Any, outputs: list[Any]):
    with pytest.raises(KVCacheValueError, match=r"kv_cache_group .*: got output_tensors .*, expected dtype fp8_e4m3"):
        resolve_kv_cache_dtype("auto", model_dtype="bfloat16", quantization_config=quark(group, *outputs))


@pytest.mark.parametrize("name", ["FP8_K_NVFP4_V", "fp8_k_nvfp4_v"])
@pytest.mark.parametrize("wrap", [modelopt, hf_quant_config])
def test_auto_reads_keys_and_values_of_different_dtypes(name: str, wrap: Any):
    explicit = wrap(kv_cache_quant_algo=name)
    resolved = resolve_kv_cache_dtype("auto", model_dtype="bfloat16", quantization_config=explicit)
    assert (resolved.dtype, resolved.source) == (KVCacheDType.FP8_K_NVFP4_V, "checkpoint")
    assert resolve_kv_cache_dtype("fp8", model_dtype="bfloat16", quantization_config=explicit).source == "user"


@pytest.mark.parametrize("method", ["compressed-tensors", "hifp8", None])
@pytest.mark.parametrize("scheme", ["static", "fp8", 8, [FP8_SCHEME]], ids=repr)
def test_auto_refuses_a_scheme_in_a_form_of_no_known_producer(method: str | None, scheme: object):
    with pytest.raises(KVCacheValueError, match="unknown form") as raised:
        resolve_kv_cache_dtype(
            "auto", model_dtype="bfloat16", quantization_config={"quant_method": method, "kv_cache_scheme": scheme}
        )
    assert repr(scheme) in str(raised.value)


@pytest.mark.parametrize("algorithm", ["INT8", "NVFP4_AFFINE", "static", "", 8, False], ids=repr)
@pytest.mark.parametrize("wrap", [modelopt, hf_quant_config])
def test_auto_warns_of_an_unknown_modelopt_algorithm_and_keeps_the_model_dtype(algorithm: object, wrap: Any):
    with pytest.warns(KVCacheWarning, match="keeps the model dtype") as warned:
        resolved = resolve_kv_cache_dtype(
            "auto", model_dtype="bfloat16", quantization_config=wrap(kv_cache_quant_algo=algorithm)
        )
    assert resolved == BF16_OF_MODEL
    assert repr(algorithm) in str(warned[0].message)


@pytest.mark.parametrize(
    "resolve",
    [
        lambda config: resolve_kv_cache_dtype("auto", model_dtype="bfloat16", quantization_config=config),
        lambda config: resolve_layer_specs(ModelKVConfig(MODEL.layers, MODEL.dtype, config)),
    ],
    ids=["model", "layers"],
)
def test_the_warning_points_at_the_callers_line_and_comes_once(resolve: Any):
    with pytest.warns(KVCacheWarning) as warned:
        resolve(modelopt(kv_cache_quant_algo="INT8"))
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("config", ["fp8", 8, [FP8_SCHEME]], ids=repr)
def test_auto_refuses_a_quantization_config_that_is_no_mapping(config: Any):
    with pytest.raises(KVCacheTypeError, match="expected a mapping or None"):
        resolve_kv_cache_dtype("auto", model_dtype="bfloat16", quantization_config=config)


@pytest.mark.parametrize("requested", STORED_KV_CACHE_DTYPES)
@pytest.mark.parametrize("declared", [config for config, _ in DECLARATIONS], ids=repr)
def test_an_explicit_dtype_wins_over_every_declaration(requested: KVCacheDType, declared: dict[str, Any] | None):
    expected = ResolvedKVCacheDType(requested, DTypeSource.USER)
    for form in (requested, requested.value):
        assert resolve_kv_cache_dtype(form, model_dtype="bfloat16", quantization_config=declared) == expected


@pytest.mark.parametrize(
    ("requested", "dtype"),
    [("float", KVCacheDType.FLOAT32), ("half", KVCacheDType.FLOAT16), ("fp8", KVCacheDType.FP8_E4M3)],
)
def test_an_alias_is_a_choice_of_the_user(requested: str, dtype: KVCacheDType):
    resolved = resolve_kv_cache_dtype(requested, model_dtype="bfloat16")
    assert resolved == ResolvedKVCacheDType(dtype, DTypeSource.USER)


@pytest.mark.parametrize("auto", ["auto", KVCacheDType.AUTO])
@pytest.mark.parametrize(
    ("model_dtype", "dtype"),
    [
        ("float32", KVCacheDType.FLOAT32),
        ("torch.float16", KVCacheDType.FLOAT16),
        (jnp.bfloat16, KVCacheDType.BFLOAT16),
        (KVCacheDType.FLOAT16, KVCacheDType.FLOAT16),
    ],
    ids=repr,
)
def test_auto_falls_back_to_the_model_dtype(auto: str | KVCacheDType, model_dtype: object, dtype: KVCacheDType):
    assert resolve_kv_cache_dtype(auto, model_dtype=model_dtype) == ResolvedKVCacheDType(dtype, DTypeSource.MODEL)


def test_a_model_dtype_that_no_cache_holds_is_refused_only_where_it_is_needed():
    with pytest.raises(KVCacheValueError, match="model dtype: got 'float8_e4m3fn'"):
        resolve_kv_cache_dtype("auto", model_dtype="float8_e4m3fn")
    explicit = resolve_kv_cache_dtype("fp8", model_dtype="float8_e4m3fn")
    assert explicit.dtype is KVCacheDType.FP8_E4M3


def test_a_source_prints_as_a_word():
    assert [str(source) for source in DTypeSource] == ["user", "checkpoint", "model"]


# Sliding, sliding, full, sliding, sliding, full, ...; full layers have other heads and other value sizes.
SLIDING = LayerKVConfig(num_kv_heads=4, head_size=64, head_size_v=64, sliding_window=1024)
FULL = LayerKVConfig(num_kv_heads=2, head_size=128, head_size_v=96)
MODEL = ModelKVConfig(layers=(SLIDING, SLIDING, FULL) * 4, dtype=KVCacheDType.BFLOAT16)
FULL_ONLY = ModelKVConfig(layers=(FULL,) * 12, dtype=KVCacheDType.BFLOAT16)


@pytest.mark.parametrize(
    ("skip_layers", "skipped"),
    [
        ([], set()),
        ([0], {0}),
        (["0"], {0}),
        (("11", 11, "011"), {11}),
        ([1, "1", 10, "10"], {1, 10}),
        (["sliding_window"], {0, 1, 3, 4, 6, 7, 9, 10}),
        (["full_attention"], {2, 5, 8, 11}),
        (["full_attention", 0, "5"], {0, 2, 5, 8, 11}),
        (["sliding_window", "full_attention"], set(range(12))),
        (range(3), {0, 1, 2}),
        (["0-2", "10-11"], {0, 1, 2, 10, 11}),
        ({7}, {7}),
        (np.array([3, 4]), {3, 4}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("requested", ["fp8", "fp8_e5m2", "nvfp4", "float32"])
def test_skipped_layers_keep_the_model_dtype(skip_layers: Iterable[int | str], skipped: set[int], requested: str):
    resolved = resolve_layer_dtypes(MODEL, requested, skip_layers=skip_layers)
    chosen = resolve_kv_cache_dtype(requested, model_dtype="bfloat16")
    assert list(resolved) == [BF16_OF_MODEL if index in skipped else chosen for index in range(12)]
    specs = resolve_layer_specs(MODEL, requested, skip_layers=skip_layers)
    assert [spec.dtype for spec in specs] == [layer.dtype for layer in resolved]


def test_a_skipped_layer_keeps_the_model_dtype_where_the_checkpoint_chose():
    model = ModelKVConfig(
        MODEL.layers, KVCacheDType.FLOAT16, compressed_tensors(FP8_SCHEME | {"strategy": "attn_head"})
    )
    resolved = resolve_layer_dtypes(model, skip_layers=["full_attention"])
    kept = ResolvedKVCacheDType(KVCacheDType.FLOAT16, DTypeSource.MODEL)
    assert resolved == (FP8_PER_HEAD, FP8_PER_HEAD, kept) * 4


def test_layers_to_skip_go_by_their_index_in_the_model():
    model = ModelKVConfig((SLIDING, FULL), KVCacheDType.BFLOAT16, layer_indices=(2, 5), num_hidden_layers=8)
    assert [resolved.dtype for resolved in resolve_layer_dtypes(model, "fp8", skip_layers=[5])] == (
        [KVCacheDType.FP8_E4M3, KVCacheDType.BFLOAT16]
    )
    with pytest.raises(KVCacheValueError, match="got 1, expected one of a layer index from 0 to 7 that has a KV cache"):
        resolve_layer_specs(model, "fp8", skip_layers=[1])


# A dtype for each layer: what a checkpoint declares, and what a user asks for.


def layer_map(*algorithms: object, algorithm: str = "MIXED_PRECISION", **others: Any) -> dict[str, Any]:
    """ModelOpt's map of attention modules, from layer 0 on."""
    names = {f"model.layers.{i}.self_attn": {"quant_algo": one} for i, one in enumerate(algorithms)}
    return {
        "kv_cache_quant_algo": algorithm,
        "kv_cache_schema_version": 1,
        "kv_cache_quantized_layers": names,
    } | others


def with_quantization(declared: dict[str, Any] | None, model: ModelKVConfig | None = None) -> ModelKVConfig:
    return dataclasses.replace(model or MODEL, quantization_config=declared)


def in_words(resolved: Iterable[ResolvedKVCacheDType]) -> list[str]:
    return [f"{layer.dtype.value} of {layer.source}" for layer in resolved]


@pytest.mark.parametrize("wrap", [modelopt, hf_quant_config])
@pytest.mark.parametrize("algorithm", ["MIXED_PRECISION", "FP8"])
def test_a_checkpoint_declares_the_dtype_of_each_layer(wrap: Any, algorithm: str):
    """What the map leaves out is unquantized, whether the others are alike or not."""
    declared = wrap(**layer_map("FP8", "nvfp4", None, "FP8", algorithm=algorithm))
    fp8, nvfp4, model = "fp8_e4m3 of checkpoint", "nvfp4 of checkpoint", "bfloat16 of model"
    resolved = resolve_layer_dtypes(with_quantization(declared))
    assert in_words(resolved) == [fp8, nvfp4, model, fp8, *[model] * 8]
    skipping = resolve_layer_dtypes(with_quantization(declared), skip_layers=["0-2"])
    assert in_words(skipping) == [model] * 3 + [fp8] + [model] * 8
    explicit = resolve_layer_dtypes(with_quantization(declared), "fp8_e5m2")
    assert in_words(explicit) == ["fp8_e5m2 of user"] * 12


def test_a_map_of_weights_does_not_decide_the_dtype_of_caches():
    weights = {"model.layers.0.self_attn.q_proj": {"quant_algo": "NVFP4"}}
    declared = modelopt(quant_algo="MIXED_PRECISION", quantized_layers=weights)
    assert in_words(resolve_layer_dtypes(with_quantization(declared))) == ["bfloat16 of model"] * 12


def test_one_dtype_for_a_map_is_refused():
    with pytest.raises(KVCacheValueError, match="a KV cache dtype for each layer, expected one for all layers"):
        resolve_kv_cache_dtype("auto", model_dtype="bfloat16", quantization_config=modelopt(**layer_map("FP8")))
    explicit = resolve_kv_cache_dtype("fp8", model_dtype="bfloat16", quantization_config=modelopt(**layer_map("FP8")))
    assert explicit.source == "user"


def test_a_map_names_layers_by_their_index_in_the_model_wherever_they_are():
    names = ["model.language_model.layers.2.self_attn", "vision_tower.layers.5.attn", "mtp.layers.0.self_attn"]
    declared = modelopt(kv_cache_quantized_layers={name: {"quant_algo": "FP8"} for name in names})
    model = ModelKVConfig((SLIDING, FULL), KVCacheDType.BFLOAT16, declared, layer_indices=(2, 5), num_hidden_layers=8)
    assert in_words(resolve_layer_dtypes(model)) == ["fp8_e4m3 of checkpoint", "bfloat16 of model"]


def test_layers_that_the_model_has_not_are_warned_of():
    declared = modelopt(**layer_map(*["FP8"] * 14))
    with pytest.warns(
        KVCacheWarning, match="a quantized cache for layers 12-13, of which the model caches none"
    ) as warned:
        resolved = resolve_layer_specs(with_quantization(declared))
    assert [spec.dtype for spec in resolved] == [KVCacheDType.FP8_E4M3] * 12
    assert [warning.filename for warning in warned] == [__file__]


def test_an_unknown_algorithm_of_a_layer_is_warned_of():
    with pytest.warns(
        KVCacheWarning, match="kv_cache_quantized_layers, layer 1: unknown ModelOpt KV cache algorithm 'INT8'"
    ):
        resolved = resolve_layer_dtypes(with_quantization(modelopt(**layer_map("FP8", "INT8"))))
    assert in_words(resolved[:2]) == ["fp8_e4m3 of checkpoint", "bfloat16 of model"]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (layer_map("FP8", kv_cache_schema_version=2), "kv_cache_schema_version: got 2, expected 1; pass a"),
        (layer_map("FP8", kv_cache_schema_version=True), "kv_cache_schema_version: got True, expected 1"),
        ({"kv_cache_quantized_layers": ["FP8"]}, "kv_cache_quantized_layers: got ['FP8'], expected an algorithm for"),
        (
            {"kv_cache_quantized_layers": {"attn0": {"quant_algo": "FP8"}}},
            "got 'attn0': {'quant_algo': 'FP8'}, expected",
        ),
        ({"kv_cache_quantized_layers": {"layers.0": "FP8"}}, "got 'layers.0': 'FP8', expected names and algorithms"),
        ({"kv_cache_quantized_layers": {"layers." + "9" * 5000: {}}}, "kv_cache_quantized_layers: got 'layers.999"),
        (
            {"kv_cache_quantized_layers": {"a.0.b": {"quant_algo": "FP8"}, "a.0.c": {"quant_algo": "NVFP4"}}},
            "kv_cache_quantized_layers: got 'NVFP4' and 'FP8' for layer 0, expected one",
        ),
    ],
    ids=lambda value: repr(value)[:80] + repr(value)[-40:],
)
def test_a_map_that_cannot_be_served_is_refused(declared: dict[str, Any], message: str):
    with pytest.raises(KVCacheValueError) as raised:
        resolve_layer_dtypes(with_quantization(modelopt(**declared)))
    assert message in str(raised.value)
    resolved = resolve_layer_dtypes(with_quantization(modelopt(**declared)), "fp8")
    assert in_words(resolved) == ["fp8_e4m3 of user"] * 12


S, F = [0, 1, 3, 4, 6, 7, 9, 10], [2, 5, 8, 11]  # sliding and full layers of MODEL


@pytest.mark.parametrize(
    ("requested", "layers"),
    [
        ({}, {}),
        ({"*": "fp8"}, {"fp8_e4m3": range(12)}),
        ({"0-3": "float32", "*": "nvfp4"}, {"float32": range(4), "nvfp4": range(4, 12)}),
        ({"*": "nvfp4", "0-3": "float32"}, {"float32": range(4), "nvfp4": range(4, 12)}),
        ({"sliding_window": "fp8"}, {"fp8_e4m3": S}),
        (
            {"0-3": "float32", "sliding_window": "fp8", "*": "nvfp4"},
            {"float32": range(4), "fp8_e4m3": S[3:], "nvfp4": F[1:]},
        ),
        ({"full_attention": "fp8_e5m2", 2: "half", "11": "auto"}, {"float16": [2], "fp8_e5m2": [5, 8]}),
        ({"2-2": "fp8", np.int64(3): KVCacheDType.NVFP4}, {"fp8_e4m3": [2], "nvfp4": [3]}),
        ({"0-5": "fp8", "4": "fp8_e4m3", "sliding_window": "auto"}, {"fp8_e4m3": range(6)}),
        ({"*": "auto", "7": "fp8"}, {"fp8_e4m3": [7]}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("declared", [None, compressed_tensors(FP8_SCHEME | {"strategy": "attn_head"})])
def test_a_user_chooses_for_each_layer(requested: dict[Any, Any], layers: dict[str, Any], declared: Any):
    """The nearer name holds; a layer that none names, or "auto" does, is the checkpoint's, else the model's."""
    before = dict(requested)
    expected = [BF16_OF_MODEL if declared is None else FP8_PER_HEAD] * 12
    for dtype, indices in layers.items():
        for index in indices:
            expected[index] = ResolvedKVCacheDType(KVCacheDType(dtype), DTypeSource.USER)
    model = with_quantization(declared)
    assert list(resolve_layer_dtypes(model, requested)) == expected
    assert [spec.dtype for spec in resolve_layer_specs(model, requested)] == [layer.dtype for layer in expected]
    skipping = resolve_layer_dtypes(model, requested, skip_layers=["3-4", 7])
    assert list(skipping) == [BF16_OF_MODEL if index in (3, 4, 7) else layer for index, layer in enumerate(expected)]
    assert requested == before


def test_the_checkpoint_is_not_looked_at_where_every_layer_is_asked_for():
    refused = with_quantization(compressed_tensors(FP8_SCHEME | {"dynamic": True}))
    assert in_words(resolve_layer_dtypes(refused, {"*": "fp8"})) == ["fp8_e4m3 of user"] * 12
    with pytest.raises(KVCacheValueError, match="dynamic=True"):
        resolve_layer_dtypes(refused, {"0-10": "fp8"})


def test_a_range_passes_over_layers_without_a_cache():
    model = ModelKVConfig((SLIDING, FULL), KVCacheDType.BFLOAT16, layer_indices=(2, 5), num_hidden_layers=8)
    assert in_words(resolve_layer_dtypes(model, {"0-4": "fp8"})) == ["fp8_e4m3 of user", "bfloat16 of model"]
    with pytest.raises(
        KVCacheValueError, match="got '3-4', expected one of a layer index from 0 to 7 that has a KV cache"
    ):
        resolve_layer_dtypes(model, {"3-4": "fp8"})


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (
            {"0-12": "fp8"},
            "kv_cache_dtype: got '0-12', expected one of a layer index from 0 to 11, a range such as 0-3",
        ),
        ({"3-2": "fp8"}, "kv_cache_dtype: got '3-2', expected one of"),
        ({"-1": "fp8"}, "kv_cache_dtype: got '-1', expected one of"),
        ({"sliding": "fp8"}, "kv_cache_dtype: got 'sliding', expected one of"),
        ({12: "fp8"}, "sliding_window, full_attention, *"),
        ({"0": "fp9"}, "kv_cache_dtype: got 'fp9', expected one of auto, float32"),
        ({"0-3": "fp8", 3: "nvfp4"}, "got 'fp8_e4m3' for '0-3' and 'nvfp4' for 3, expected one dtype for layer 3"),
    ],
    ids=repr,
)
def test_a_map_that_does_not_fit_the_model_is_refused(requested: dict[Any, Any], message: str):
    with pytest.raises(KVCacheValueError) as raised:
        resolve_layer_dtypes(MODEL, requested)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "requested", [{None: "fp8"}, {True: "fp8"}, {0.0: "fp8"}, {"0": None}, {"0": {}}, [], 3], ids=repr
)
def test_a_map_of_other_kinds_is_refused_by_type(requested: Any):
    with pytest.raises(KVCacheTypeError, match="kv_cache_dtype: got "):
        resolve_layer_dtypes(MODEL, requested)


@pytest.mark.parametrize(
    "entry",
    [
        12,
        "0-12",
        "5-4",
        "1-",
        -1,
        "12",
        "-1",
        "1.0",
        "0x1",
        " 1",
        "",
        "sliding",
        "Full_Attention",
        "all",
        "\N{ARABIC-INDIC DIGIT ONE}",
        "1" * 20,
    ],
    ids=repr,
)
def test_a_layer_that_the_model_has_not_is_refused_by_name(entry: int | str):
    with pytest.raises(KVCacheValueError) as raised:
        resolve_layer_specs(MODEL, "fp8", skip_layers=[0, entry])
    accepted = "a layer index from 0 to 11, a range such as 0-3, sliding_window, full_attention"
    assert f"skip_layers: got {entry!r}, expected one of {accepted}" in str(raised.value)


def test_an_index_that_python_does_not_read_is_refused():
    with pytest.raises(
        KVCacheValueError, match=r"^skip_layers: got '999.*\.\.\. \(5,002 characters\), expected one of"
    ):
        resolve_layer_specs(MODEL, "fp8", skip_layers=["9" * 5000])


def test_a_kind_that_no_layer_has_is_refused_by_name():
    with pytest.raises(
        KVCacheValueError,
        match=r"got 'sliding_window', expected one of .* 0 to 11, a range such as 0-3, full_attention$",
    ):
        resolve_layer_specs(FULL_ONLY, "fp8", skip_layers=["sliding_window"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sliding_attention", "sliding_attention layers are named sliding_window"),
        ("chunked_attention", "chunked_attention layers are named full_attention"),
        ("linear_attention", "linear_attention layers have no KV cache of their own"),
    ],
)
def test_a_layer_type_of_transformers_is_explained(name: str, hint: str):
    for requested, skip_layers in (({name: "fp8"}, []), ("fp8", [name])):
        with pytest.raises(KVCacheValueError) as raised:
            resolve_layer_specs(MODEL, requested, skip_layers=skip_layers)
        assert str(raised.value).endswith(f"({hint})")


@pytest.mark.parametrize("entry", [True, False, 1.0, None, b"0", (0,)], ids=repr)
def test_a_skipped_layer_that_is_no_int_or_string_is_refused_by_type(entry: Any):
    with pytest.raises(KVCacheTypeError, match="expected an int or a string") as raised:
        resolve_layer_specs(MODEL, "fp8", skip_layers=[entry])
    assert repr(entry) in str(raised.value)


@pytest.mark.parametrize("model", [{"num_hidden_layers": 2}, "config.json", None], ids=repr)
@pytest.mark.parametrize(
    "read",
    [resolve_layer_dtypes, resolve_layer_specs, functools.partial(load_kv_scales, {})],
    ids=["dtypes", "specs", "scales"],
)
def test_an_argument_that_is_no_model_is_refused(read: Any, model: Any):
    with pytest.raises(KVCacheTypeError, match=r"^model: got .*, expected a ModelKVConfig: ModelKVConfig.from_hf_"):
        read(model)


@pytest.mark.parametrize("skip_layers", ["0", "sliding_window", 0, None], ids=repr)
def test_skip_layers_that_are_no_sequence_are_refused(skip_layers: Any):
    with pytest.raises(KVCacheTypeError, match="expected a sequence of layer indices and kinds"):
        resolve_layer_specs(MODEL, "fp8", skip_layers=skip_layers)


def test_specs_hold_each_layers_facts():
    sliding, _, full, *_ = resolve_layer_specs(MODEL, "nvfp4", block_size=32, layout="HND")
    assert sliding == SlidingWindowSpec(
        32, 4, 64, dtype=KVCacheDType.NVFP4, layout=CacheLayout.HND, sliding_window=1024
    )
    assert full == FullAttentionSpec(32, 2, 128, 96, dtype=KVCacheDType.NVFP4, layout=CacheLayout.HND)
    assert (sliding.quant_mode, full.quant_mode) == (KVQuantMode.NVFP4, KVQuantMode.NVFP4)


def test_each_layer_has_its_own_quantization_mode():
    specs = resolve_layer_specs(MODEL, "fp8", skip_layers=["sliding_window"])
    assert [spec.quant_mode for spec in specs[:3]] == [KVQuantMode.NONE, KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR]


def test_the_defaults_are_auto_and_blocks_of_16():
    specs = resolve_layer_specs(FULL_ONLY)
    assert specs == (FullAttentionSpec(16, 2, 128, 96, dtype=KVCacheDType.BFLOAT16),) * 12


def test_swizzled_v_scales_are_for_the_nvfp4_layers():
    specs = resolve_layer_specs(MODEL, "nvfp4", skip_layers=["full_attention"], v_scale_layout="swizzled")
    swizzled, linear = VScaleLayout.SWIZZLED, VScaleLayout.LINEAR
    assert [spec.v_scale_layout for spec in specs[:3]] == [swizzled, swizzled, linear]


@pytest.mark.parametrize(
    ("requested", "skip_layers"), [("fp8", []), ("auto", []), ("nvfp4", ["full_attention", "sliding_window"])]
)
def test_swizzled_v_scales_without_an_nvfp4_layer_are_refused(requested: str, skip_layers: list[str]):
    with pytest.raises(KVCacheValueError, match="v_scale_layout: got 'swizzled'"):
        resolve_layer_specs(MODEL, requested, skip_layers=skip_layers, v_scale_layout="swizzled")


def test_a_head_size_that_nvfp4_cannot_store_is_refused():
    model = ModelKVConfig((LayerKVConfig(num_kv_heads=2, head_size=72, head_size_v=72),), KVCacheDType.BFLOAT16)
    with pytest.raises(KVCacheValueError, match="head_size: got 72"):
        resolve_layer_specs(model, "nvfp4")
    assert resolve_layer_specs(model, "nvfp4", skip_layers=[0])[0].dtype is KVCacheDType.BFLOAT16
