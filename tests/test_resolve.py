"""Who decides a dtype: the user, else the checkpoint, else the model; and which layers are left alone."""

from __future__ import annotations

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
    (FP8_SCHEME | {"dynamic": "local"}, "this combination"),
    (FP8_SCHEME | {"symmetric": False}, "symmetric=False"),
    (FP8_SCHEME | {"strategy": "channel"}, "this combination"),
    (FP8_SCHEME | {"strategy": "token"}, "this combination"),
    (NVFP4_SCHEME | {"strategy": "attn_head"}, "this combination"),
    (NVFP4_SCHEME | {"strategy": "group", "group_size": 32}, "this combination"),
    (NVFP4_SCHEME | {"group_size": 32}, "this combination"),
    ({"num_bits": 8, "type": "int"}, "this combination"),
    ({"num_bits": 4, "type": "int"}, "this combination"),
    ({"num_bits": 2, "type": "float"}, "this combination"),
    ({"num_bits": [8], "type": ["float"]}, "this combination"),
    ({"num_bits": 8}, "this combination"),
    ({"type": "float"}, "this combination"),
    ({}, "this combination"),
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


@pytest.mark.parametrize("method", ["compressed-tensors", "hifp8", None])
@pytest.mark.parametrize("scheme", ["static", "fp8", 8, [FP8_SCHEME]], ids=repr)
def test_auto_refuses_a_scheme_in_a_form_of_no_known_producer(method: str | None, scheme: object):
    with pytest.raises(KVCacheValueError, match="this form is not known") as raised:
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
def test_an_explicit_alias_is_explicit(requested: str, dtype: KVCacheDType):
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


def test_the_source_reads_as_a_word():
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


@pytest.mark.parametrize(
    "entry",
    [
        12,
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
    accepted = "a layer index from 0 to 11, sliding_window, full_attention"
    assert f"skip_layers: got {entry!r}, expected one of {accepted}" in str(raised.value)


def test_an_index_that_python_does_not_read_is_refused():
    with pytest.raises(
        KVCacheValueError, match=r"^skip_layers: got '999.*\.\.\. \(5,002 characters\), expected one of"
    ):
        resolve_layer_specs(MODEL, "fp8", skip_layers=["9" * 5000])


def test_a_kind_that_no_layer_has_is_refused_by_name():
    with pytest.raises(KVCacheValueError, match=r"got 'sliding_window', expected one of .* 0 to 11, full_attention$"):
        resolve_layer_specs(FULL_ONLY, "fp8", skip_layers=["sliding_window"])


@pytest.mark.parametrize("entry", [True, False, 1.0, None, b"0", (0,)], ids=repr)
def test_a_skipped_layer_that_is_no_int_or_string_is_refused_by_type(entry: Any):
    with pytest.raises(KVCacheTypeError, match="expected an int or a string") as raised:
        resolve_layer_specs(MODEL, "fp8", skip_layers=[entry])
    assert repr(entry) in str(raised.value)


@pytest.mark.parametrize("skip_layers", ["0", "sliding_window", 0, None], ids=repr)
def test_skip_layers_is_a_sequence(skip_layers: Any):
    with pytest.raises(KVCacheTypeError, match="expected a sequence of layer indices and kinds"):
        resolve_layer_specs(MODEL, "fp8", skip_layers=skip_layers)


def test_specs_hold_each_layers_facts():
    sliding, _, full, *_ = resolve_layer_specs(MODEL, "nvfp4", block_size=32, layout="HND")
    assert sliding == SlidingWindowSpec(
        32, 4, 64, dtype=KVCacheDType.NVFP4, layout=CacheLayout.HND, sliding_window=1024
    )
    assert full == FullAttentionSpec(32, 2, 128, 96, dtype=KVCacheDType.NVFP4, layout=CacheLayout.HND)
    assert (sliding.quant_mode, full.quant_mode) == (KVQuantMode.NVFP4, KVQuantMode.NVFP4)


def test_quantization_is_the_layers_own():
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
