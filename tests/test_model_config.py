"""What public models' configurations say of their KV cache, and what is said to a configuration that cannot be read."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.any_json import nested

from kvjax.dtypes import STORED_KV_CACHE_DTYPES, KVCacheDType
from kvjax.errors import KVCacheTypeError, KVCacheValueError, KVCacheWarning, shown
from kvjax.model_config import AttentionKind, LayerKVConfig, ModelKVConfig
from kvjax.resolve import DTypeSource, resolve_layer_dtypes, resolve_layer_specs
from kvjax.spec import FullAttentionSpec, SlidingWindowSpec

CONFIGS = Path(__file__).parent / "data" / "configs"
BF16, FP8 = KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3


UNPRINTABLE = 10**5000
"""Python refuses to print an int of so many digits."""


def load(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config


def layer(
    num_kv_heads: int, head_size: int, head_size_v: int | None = None, window: int | None = None
) -> LayerKVConfig:
    return LayerKVConfig(num_kv_heads, head_size, head_size_v or head_size, window)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a model's layers are, and what "auto" makes of them."""

    layers: list[LayerKVConfig]
    dtype: KVCacheDType = BF16
    source: DTypeSource = DTypeSource.MODEL


MODELS = {
    "Llama-3.1-8B-Instruct": Expected([layer(8, 128)] * 32),
    "Mistral-7B-v0.1": Expected([layer(8, 128, window=4096)] * 32),
    "Qwen2.5-7B-Instruct": Expected([layer(4, 128)] * 28),
    "Qwen3-0.6B": Expected([layer(8, 128)] * 28),
    "gemma-2-2b-it": Expected([layer(4, 256, window=4096), layer(4, 256)] * 13),
    "gemma-3-4b-it": Expected(
        ([layer(4, 256, window=1024)] * 5 + [layer(4, 256)]) * 5 + [layer(4, 256, window=1024)] * 4
    ),
    "gemma-4-31B-it": Expected(([layer(16, 256, window=1024)] * 5 + [layer(4, 512)]) * 10),
    "gpt-oss-20b": Expected([layer(8, 64, window=128), layer(8, 64)] * 12),
    "Llama-4-Scout-17B-16E-Instruct": Expected([layer(8, 128)] * 48),
    "Laguna-XS.2-FP8": Expected(([layer(8, 128)] + [layer(8, 128, window=512)] * 3) * 10, FP8, DTypeSource.CHECKPOINT),
    "MiMo-V2-Flash": Expected(
        [layer(4, 192, 128)]
        + [layer(8, 192, 128, window=129)] * 4  # 128 tokens and the query's own
        + ([layer(4, 192, 128)] + [layer(8, 192, 128, window=129)] * 5) * 7
        + [layer(4, 192, 128)]
    ),
    "Qwen3-32B-NVFP4": Expected([layer(8, 128)] * 64),
}
# Checkpoints that declare their quantization in a file of its own.
WITH_HF_QUANT_CONFIG = {
    "Qwen3-32B-NVFP4": ("Qwen3-32B-NVFP4", Expected([layer(8, 128)] * 64, FP8, DTypeSource.CHECKPOINT)),
    "Llama-3.1-8B-Instruct-FP8": ("Llama-3.1-8B-Instruct", Expected([layer(8, 128)] * 32)),
}


def test_every_configuration_is_expected_here():
    files = {path.name.removesuffix(".json") for path in CONFIGS.glob("*.json")}
    assert files == set(MODELS) | {f"{name}.hf_quant_config" for name in WITH_HF_QUANT_CONFIG}


def check(model: ModelKVConfig, expected: Expected) -> None:
    assert list(model.layers) == expected.layers
    resolved = resolve_layer_dtypes(model)
    assert {(layer.dtype, layer.source) for layer in resolved} == {(expected.dtype, expected.source)}
    specs = resolve_layer_specs(model)
    assert [type(spec) for spec in specs] == [
        FullAttentionSpec if layer.sliding_window is None else SlidingWindowSpec for layer in expected.layers
    ]
    assert [
        LayerKVConfig(spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.sliding_window) for spec in specs
    ] == expected.layers
    assert {spec.dtype for spec in specs} == {expected.dtype}


@pytest.mark.parametrize("name", MODELS)
def test_public_models_are_read_as_published(name: str):
    config = load(name)
    before = copy.deepcopy(config)
    check(ModelKVConfig.from_hf_config(config), MODELS[name])
    assert config == before


@pytest.mark.parametrize("name", WITH_HF_QUANT_CONFIG)
def test_public_models_with_a_separate_quantization_config_are_read(name: str):
    config, expected = WITH_HF_QUANT_CONFIG[name]
    declared = load(f"{name}.hf_quant_config")
    check(ModelKVConfig.from_hf_config(load(config), quantization_config=declared), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("requested", STORED_KV_CACHE_DTYPES)
def test_every_public_model_stores_every_dtype(name: str, requested: KVCacheDType):
    first, *rest = resolve_layer_specs(ModelKVConfig.from_hf_config(load(name)), requested, skip_layers=[0])
    assert first.dtype is BF16
    assert {spec.dtype for spec in rest} == {requested}


BASE = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}


def read(**changes: Any) -> ModelKVConfig:
    """The model of a plain configuration with some keys changed; None in place of a value leaves the key out."""
    return ModelKVConfig.from_hf_config({key: value for key, value in (BASE | changes).items() if value is not None})


def windows(**changes: Any) -> list[int | None]:
    return [layer.sliding_window for layer in read(**changes).layers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, layer(2, 64)),
        ({"num_key_value_heads": None}, layer(8, 64)),
        ({"head_dim": 96}, layer(2, 96)),
        ({"head_dim": 96, "hidden_size": None}, layer(2, 96)),
        ({"v_head_dim": 32}, layer(2, 64, 32)),
        ({"head_dim": 96, "v_head_dim": 96}, layer(2, 96)),
        ({"sliding_window": 7, "swa_num_key_value_heads": 4, "swa_head_dim": 48}, layer(4, 48, window=7)),
        ({"sliding_window": 7, "v_head_dim": 32, "swa_v_head_dim": 16}, layer(2, 64, 16, window=7)),
        ({"sliding_window": 7, "num_global_key_value_heads": 1, "global_head_dim": 16}, layer(2, 64, window=7)),
        ({"swa_num_key_value_heads": 4, "swa_head_dim": 48, "swa_v_head_dim": 16}, layer(2, 64)),
        ({"num_global_key_value_heads": 1, "global_head_dim": 16}, layer(1, 16)),
    ],
    ids=repr,
)
def test_numbers_and_sizes_of_heads_are_read(changes: dict[str, Any], expected: LayerKVConfig):
    assert read(**changes).layers == (expected,) * 4


def test_null_is_read_as_a_missing_key():
    nulls = dict.fromkeys(["head_dim", "v_head_dim", "sliding_window", "layer_types", "quantization_config", "dtype"])
    assert ModelKVConfig.from_hf_config(BASE | nulls) == read()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [None] * 4),
        ({"sliding_window": 9}, [9] * 4),
        ({"sliding_window": 9, "use_sliding_window": True}, [9] * 4),
        ({"sliding_window": 9, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 9, "model_type": "qwen2"}, [None] * 4),
        # transformers fills in max_window_layers=28.
        ({"sliding_window": 9, "model_type": "qwen2", "use_sliding_window": True}, [None] * 4),
        ({"sliding_window": 9, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, [9] * 4),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 9]),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, [9] * 4),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 28}, [None] * 4),
        ({"sliding_window": 9, "sliding_window_pattern": 3}, [9, 9, None, 9]),
        ({"sliding_window": 9, "sliding_window_pattern": 1}, [None] * 4),
        ({"sliding_window_pattern": 3}, [None] * 4),
        ({"sliding_window": 9, "model_type": "gemma2"}, [9, None, 9, None]),
        ({"sliding_window": 9, "model_type": "gemma2", "sliding_window_pattern": 4}, [9, 9, 9, None]),
        ({"sliding_window": 9, "model_type": "cohere2"}, [9, 9, 9, None]),
        ({"sliding_window": 9, "layer_types": ["full_attention"] * 4}, [None] * 4),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, [None] * 4),
        (
            {
                "sliding_window": 9,
                "sliding_window_pattern": 3,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
            },
            [None, 9, None, None],
        ),
        ({"sliding_window": 9, "layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, [None] * 4),
        ({"sliding_window": 9, "hybrid_layer_pattern": [0, 1, 1, 0]}, [None, 9, 9, None]),
    ],
    ids=repr,
)
def test_sliding_layers_are_recognized(changes: dict[str, Any], expected: list[int | None]):
    assert windows(**changes) == expected


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, KVCacheDType.FLOAT16),
        ({"torch_dtype": "torch.float16"}, KVCacheDType.FLOAT16),
        ({"torch_dtype": None, "dtype": "float32"}, KVCacheDType.FLOAT32),
        ({"torch_dtype": None, "model_type": "gpt_oss"}, KVCacheDType.BFLOAT16),
        ({"torch_dtype": "float16", "model_type": "gpt_oss"}, KVCacheDType.FLOAT16),
    ],
    ids=repr,
)
def test_a_model_config_has_the_dtype_that_it_names(changes: dict[str, Any], dtype: KVCacheDType):
    assert read(**changes).dtype is dtype


def test_a_given_model_dtype_is_taken_instead():
    config = BASE | {"torch_dtype": "float8_e4m3fn"}
    assert ModelKVConfig.from_hf_config(config, model_dtype="float16").dtype is KVCacheDType.FLOAT16


SCHEME = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_a_nested_text_config_is_read(place: str):
    text = {key: value for key, value in BASE.items() if key != "torch_dtype"} | {"num_hidden_layers": 2}
    config: dict[str, Any] = {
        "model_type": "llava",
        "head_dim": 32,
        "hidden_size": 4096,
        "num_hidden_layers": 99,
        "text_config": text,
    }
    (config if place == "top" else text).update(torch_dtype="float16", quantization_config=SCHEME)
    model = ModelKVConfig.from_hf_config(config)
    assert model == ModelKVConfig((layer(2, 64),) * 2, KVCacheDType.FLOAT16, SCHEME)


def test_an_empty_quantization_config_does_not_hide_another():
    config = {"text_config": BASE | {"quantization_config": {}}, "quantization_config": SCHEME}
    assert ModelKVConfig.from_hf_config(config).quantization_config == SCHEME
    config = {"text_config": BASE | {"quantization_config": {}}}
    assert ModelKVConfig.from_hf_config(config).quantization_config == {}


def test_the_dtype_beside_text_config_holds_for_it_too():
    config = {"torch_dtype": "bfloat16", "text_config": BASE | {"dtype": "float32"}}
    assert ModelKVConfig.from_hf_config(config).dtype is KVCacheDType.BFLOAT16


def test_a_null_text_config_is_none():
    assert ModelKVConfig.from_hf_config(BASE | {"text_config": None}) == read()


def test_the_model_does_not_change_with_the_dict_it_was_read_from():
    config = BASE | {"quantization_config": copy.deepcopy(SCHEME)}
    model = ModelKVConfig.from_hf_config(config)
    config["quantization_config"]["kv_cache_scheme"]["num_bits"] = 3
    assert model.quantization_config == SCHEME


def test_models_are_frozen_and_compare_by_value():
    assert read() == read()
    assert len({read(), read(), read(quantization_config=SCHEME)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().dtype = KVCacheDType.FLOAT32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "config: got no 'num_hidden_layers'"),
        ({"num_key_value_heads": None, "num_attention_heads": None, "head_dim": 64}, "'num_attention_heads'"),
        ({"hidden_size": None}, "got no 'head_dim', expected it, or 'hidden_size' and 'num_attention_heads'"),
        ({"num_attention_heads": None}, "got no 'head_dim', expected it, or 'hidden_size' and 'num_attention_heads'"),
        ({"hidden_size": 500}, "hidden_size=500, expected a multiple of num_attention_heads=8"),
        ({"torch_dtype": None}, "got no 'dtype' or 'torch_dtype'"),
        ({"torch_dtype": "float8_e4m3fn"}, "model dtype: got 'float8_e4m3fn', expected one of float32"),
        ({"num_hidden_layers": 0}, "config.num_hidden_layers: got 0, expected an int of at least 1"),
        ({"num_hidden_layers": "4"}, "config.num_hidden_layers: got '4'"),
        ({"num_hidden_layers": True}, "config.num_hidden_layers: got True"),
        ({"num_key_value_heads": [2, 2, 1, 1]}, "config.num_key_value_heads: got [2, 2, 1, 1]"),
        ({"head_dim": 64.0}, "config.head_dim: got 64.0"),
        ({"v_head_dim": -1}, "config.v_head_dim: got -1"),
        ({"sliding_window": 9.5}, "config.sliding_window: got 9.5"),
        ({"sliding_window": 9, "sliding_window_pattern": "LLLG"}, "config.sliding_window_pattern: got 'LLLG'"),
        ({"sliding_window": 9, "sliding_window_pattern": 0}, "config.sliding_window_pattern: got 0"),
        ({"sliding_window": 9, "max_window_layers": -1}, "max_window_layers: got -1, expected an int of at least 0"),
        ({"layer_types": ["sliding_attention"] * 4}, "config: got no 'sliding_window'"),
        ({"layer_types": ["full_attention"] * 3}, "expected a list with an entry for each of 4 layers"),
        ({"layer_types": "full_attention"}, "config.layer_types: got 'full_attention'"),
        (
            {"layer_types": ["full_attention", "indexed_attention"] * 2},
            "config.layer_types[1]: got 'indexed_attention', expected one of full_attention, chunked_attention, ",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "config: got no layer that caches keys and values"),
        ({"layer_types": ["full_attention"] * 3 + [[]]}, "config.layer_types[3]: got []"),
        ({"hybrid_layer_pattern": [0, 1, 2, 0]}, "config.hybrid_layer_pattern[2]: got 2, expected one of 0, 1"),
        ({"kv_lora_rank": 512, "v_head_dim": 128}, "kv_lora_rank=512: multi-head latent attention"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2: some layers read another layer's cache"),
        ({"full_attention_interval": 4}, "full_attention_interval=4: linear attention caches a state, not tokens"),
        ({"num_hidden_layers": 10_001}, "config.num_hidden_layers: got 10001, expected an int of at most 10000"),
        ({"num_hidden_layers": 10**12}, "config.num_hidden_layers: got 1000000000000, expected an int of at most"),
        ({"head_dim": 2**63}, f"config.head_dim: got {2**63}, expected an int of at most {2**63 - 1}"),
        ({"head_dim": UNPRINTABLE}, "config.head_dim: got int too large to print, expected an int of at most"),
        ({"kv_lora_rank": UNPRINTABLE}, "config: got kv_lora_rank=int too large to print: multi-head"),
        ({"layer_types": nested(20_000)}, "config.layer_types: got list too large to print, expected a list"),
        ({"layer_types": ["x" * 600] * 4}, "config.layer_types[0]: got 'xxx"),
        ({"torch_dtype": UNPRINTABLE}, "model dtype: got int too large to print, expected one of float32"),
        ({"quantization_config": {"ignore": nested(20_000)}}, "config.quantization_config: got one nested too deeply"),
    ],
    ids=shown,
)
def test_what_cannot_be_read_is_named(changes: dict[str, Any], message: str):
    with pytest.raises(KVCacheValueError) as raised:
        read(**changes)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("model_type", ["no_such_model", "", UNPRINTABLE, ["llama"], 7], ids=shown)
def test_a_model_of_no_known_type_is_read_by_the_plain_keys_and_said_so(model_type: Any):
    with pytest.warns(KVCacheWarning) as warned:
        model = read(model_type=model_type, num_key_value_heads=None, residual_kv_heads=3)
    assert model == read(num_key_value_heads=None)
    assert str(warned[0].message) == (
        f"config.model_type: got {shown(model_type)}, which is unknown to kvjax, and 'residual_kv_heads', which it does"
        " not read; assumed 4 of 4 layers with 8 KV heads of 64 elements, as many KV heads as num_attention_heads,"
        " heads of hidden_size / num_attention_heads"
    )
    assert [warning.filename for warning in warned] == [__file__]


def test_without_a_model_type_only_doubtful_keys_are_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(vocab_size=99, use_cache=True, hidden_act="silu", attention_bias=False, mlp_kv_heads=0)
    with pytest.warns(KVCacheWarning, match="^config: got 'v_heads', which kvjax does not read; assumed 4 of 4 layers"):
        read(v_heads=3)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"multi_query": True}, "multi_query=True"),
        ({"attn_layer_indices": [1]}, "attn_layer_indices=[1]"),
        ({"layers_block_type": ["mamba", "hybrid"]}, "layers_block_type"),
        ({"block_types": ["recurrent"]}, "block_types"),
        ({"kv_channels": 64}, "kv_channels=64"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers=[3]"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({"llm_config": {"num_hidden_layers": 4}}, "llm_config"),
        ({"local_attention": 128}, "local_attention=128"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("model_type", [None, "no_such_model"])
def test_keys_that_contradict_the_plain_ones_are_refused(changes: dict[str, Any], key: str, model_type: str | None):
    with pytest.raises(KVCacheValueError, match=f"^config: got {re.escape(key)}"):
        read(model_type=model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba2", "a state"),
        ("vit", "not a decoder"),
        ("bart", "the encoder's tokens"),
        ("deepseek_v32", "an indexer's key"),
        ("bert", "an encoder caches no"),
    ],
)
def test_models_that_keep_something_else_are_refused(model_type: str, reason: str):
    with pytest.raises(KVCacheValueError, match=reason):
        read(model_type=model_type)


def test_nothing_beside_text_config_is_taken_for_the_language_models():
    text = {key: value for key, value in BASE.items() if key != "torch_dtype"} | {"model_type": "llama"}
    beside = {"head_dim": 7, "sliding_window": 5, "num_key_value_heads": 1, "torch_dtype": "float16"}
    model = ModelKVConfig.from_hf_config({"model_type": "llava", "text_config": text, **beside})
    assert model == ModelKVConfig((layer(2, 64),) * 4, KVCacheDType.FLOAT16)
    with pytest.warns(KVCacheWarning, match="got 'some_vlm', which is unknown to kvjax; only text_config is read"):
        assert ModelKVConfig.from_hf_config({"model_type": "some_vlm", "text_config": text, **beside}) == model
    with pytest.raises(KVCacheValueError, match=r"config.text_config: got \[\], expected a mapping"):
        read(text_config=[])


# The mechanisms of the table, each in a small file; docs/notes/models.md has what transformers keeps of every type.
FALCON = {"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 4544, "num_attention_heads": 71}
LATENT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
KIMI_LINEAR = LATENT | {
    "num_hidden_layers": 4,
    "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
}


LONGCAT = {key: value for key, value in LATENT.items() if key != "num_hidden_layers"} | {"model_type": "longcat_flash"}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
RECURRENT = [None, None, layer(4, 64, window=9)]
N_EMBED = [("falcon", [layer(1, 32)] * 2), ("bloom", [layer(71, 32)] * 2)]
WINDOWLESS = [
    ("falcon_h1", [layer(8, 64)] * 2),
    ("llama4_text", [layer(8, 128)] * 2),
    ("zaya", [layer(2, 128)] * 2),
]


def latents(rank: int, rope: int) -> LayerKVConfig:
    return LayerKVConfig(1, rank + rope, rank, is_mla=True)


MECHANISMS: list[tuple[dict[str, Any], list[LayerKVConfig | None]]] = [
    (FALCON | {"multi_query": True}, [layer(1, 64)] * 2),
    (FALCON, [layer(1, 64)] * 2),
    (FALCON | {"multi_query": False}, [layer(71, 64)] * 2),
    (
        {"model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [1, 3], "hidden_size": 4096}
        | {"num_attention_heads": 32, "num_key_value_heads": 8},
        [None, layer(8, 128)] * 2,
    ),
    (
        {"model_type": "jamba", "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2}
        | {"hidden_size": 4096, "num_attention_heads": 32},
        [None, None, layer(8, 128), None],
    ),
    (
        {"model_type": "zamba2", "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}
        | {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 32, "kv_channels": 80},
        [None, layer(32, 160), None],
    ),
    (
        {"model_type": "recurrent_gemma", "num_hidden_layers": 4, "hidden_size": 2560, "num_attention_heads": 10}
        | {"num_key_value_heads": 1, "head_dim": 256, "attention_window_size": 2048},
        [None, None, layer(1, 256, window=2048), None],
    ),
    (
        {"model_type": "jetmoe", "num_hidden_layers": 1, "hidden_size": 2048, "num_key_value_heads": 16}
        | {"kv_channels": 128},
        [layer(16, 128)],
    ),
    (
        {"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4, "head_dim": 256},
        [None, None, None, layer(2, 256)],
    ),
    (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E", "num_hidden_layers": 4},
        [None, None, layer(8, 128), None],
    ),
    (
        {"model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 9}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        [layer(2, 256, window=9), layer(2, 256), None, None],
    ),
    (
        {"model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
        | {"per_layer_config": {"0": {"intermediate_size": 9}, "1": {"head_dim": 512, "intermediate_size": 9}}},
        [layer(4, 256, window=512), layer(4, 512)],
    ),
    (
        {"model_type": "gemma4_text", "num_hidden_layers": 1, "layer_types": ["full_attention"]}
        | {"per_layer_config": {"0": {"head_dim": 512, "global_head_dim": 64, "num_global_key_value_heads": 1}}},
        [layer(4, 512)],
    ),
    # transformers makes the last layer of Gemma 4 full.
    *(
        (
            {"model_type": model_type, "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
            | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "sliding_window": 9},
            [layer(4, 256, window=9), layer(1, 512)],
        )
        for model_type in ("gemma4_text", "gemma4_unified_text")
    ),
    (
        {"model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
        | {"per_layer_config": {"0": {"head_dim": 64}}},
        [layer(4, 64, window=512), layer(4, 256)],
    ),
    (
        {"model_type": "gemma4_text", "num_hidden_layers": 3, "num_kv_shared_layers": 1}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        [layer(4, 512), layer(4, 256, window=512), None],
    ),
    (
        {"model_type": "gemma3n_text", "num_hidden_layers": 2, "num_kv_shared_layers": 0}
        | {"layer_types": ["full_attention", "sliding_attention"]},
        [layer(2, 256), layer(2, 256, window=512)],
    ),
    (
        {"model_type": "gpt2", "n_layer": 2, "n_head": 12, "n_embd": 768, "num_key_value_heads": 1},
        [layer(12, 64)] * 2,
    ),
    # Types with names of their own, by the plain ones.
    *(
        (SIZES | {"model_type": model_type, **own}, [layer(kv_heads, 64)] * 2)
        for model_type, own, kv_heads in (
            ("bloom", {}, 4),
            ("ctrl", {}, 4),
            ("dbrx", {"attn_config": {"kv_n_heads": 2}}, 2),
            ("gpt2", {}, 4),
            ("gpt_bigcode", {}, 1),
            ("gptj", {}, 4),
            ("mpt", {}, 4),
            ("mpt", {"n_layers": None, "n_heads": None, "d_model": None}, 4),
        )
    ),
    ({"model_type": "jetmoe", "num_hidden_layers": 1, "head_dim": 32}, [layer(16, 32)]),
    (SIZES | {"model_type": "recurrent_gemma", "num_hidden_layers": 3, "sliding_window": 9}, RECURRENT),
    (SIZES | {"model_type": "recurrent_gemma", "num_hidden_layers": 3, "attention_window_size": 9}, RECURRENT),
    *((FALCON | {"model_type": kind, "hidden_size": None, "n_embed": 71 * 32}, heads) for kind, heads in N_EMBED),
    (FALCON | {"n_embed": None}, [layer(1, 64)] * 2),
    *(
        (
            {"model_type": "zamba2", "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"]}
            | {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, name: 64},
            [None, layer(4, 64)],
        )
        for name in ("attention_head_dim", "head_dim")
    ),
    # Windows that the type's class has no layer for.
    *((SIZES | {"model_type": kind, "sliding_window": 9}, expected) for kind, expected in WINDOWLESS),
    (
        {"model_type": "llama4", "text_config": SIZES | {"model_type": "llama4_text", "sliding_window": 9}},
        [layer(8, 128)] * 2,
    ),
    (
        SIZES | {"model_type": "zaya", "sliding_window": 9, "layer_types": ["hybrid", "hybrid_sliding"]},
        [layer(2, 128), layer(2, 128, window=9)],
    ),
    (
        {"model_type": "gpt_bigcode", "n_layer": 1, "n_head": 48, "n_embd": 6144},
        [layer(1, 128)],
    ),
    (
        {"model_type": "dbrx", "n_layers": 1, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}},
        [layer(8, 128)],
    ),
    (
        {"model_type": "bert", "is_decoder": True, "num_hidden_layers": 1, "hidden_size": 768}
        | {"num_attention_heads": 12},
        [layer(12, 64)],
    ),
    (
        {"model_type": "mistral", "num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 32}
        | {"sliding_window": None},
        [layer(8, 128)],
    ),
    (BASE | {"layer_types": ["linear_attention", "full_attention"] * 2}, [None, layer(2, 64)] * 2),
    *(
        (LATENT | {"model_type": model_type}, [latents(512, 64)] * 2)
        for model_type in ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "sarvam_mla", "youtu")
    ),
    (LATENT | {"model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32}, [latents(256, 32)] * 2),
    (LATENT | {"model_type": "mistral4", "kv_lora_rank": 256}, [latents(256, 64)] * 2),
    (LATENT | {"model_type": "deepseek_v3", "qk_rope_head_dim": 0}, [latents(512, 0)] * 2),
    (KIMI_LINEAR | {"model_type": "kimi_linear"}, [None, None, None, latents(512, 64)]),
    (LATENT | {"model_type": "bailing_hybrid", "layer_group_size": 2}, [None, latents(512, 64)]),
    # LongCat's `num_hidden_layers` counts the attentions, of which each of `num_layers` has two.
    *(
        (LONGCAT | layers, [latents(512, 64)] * attentions)
        for layers, attentions in (
            ({"num_layers": 2}, 4),
            ({"num_hidden_layers": 4}, 4),
            ({"num_layers": 2, "num_hidden_layers": 4}, 4),
            ({}, 56),
        )
    ),
    ({"model_type": "kimi_k25", "text_config": LATENT | {"model_type": "deepseek_v3"}}, [latents(512, 64)] * 2),
    # Composites whose class fills in a part of `text_config` that differs from the defaults of its type.
    ({"model_type": "voxtral", "text_config": {}}, [layer(8, 128)] * 30),
    ({"model_type": "voxtral", "text_config": {"model_type": "llama", "num_hidden_layers": 2}}, [layer(8, 128)] * 2),
    ({"model_type": "voxtral", "text_config": {"num_hidden_layers": 2, "head_dim": None}}, [layer(8, 96)] * 2),
    ({"model_type": "glmasr", "text_config": {}}, [layer(4, 128)] * 28),
    ({"model_type": "glmasr", "text_config": SIZES}, [layer(4, 64)] * 2),
]


def read_by_layer(config: dict[str, Any]) -> list[LayerKVConfig | None]:
    model = ModelKVConfig.from_hf_config({"dtype": "bfloat16", **config})
    layers: list[LayerKVConfig | None] = [None] * model.num_hidden_layers
    for index, of in zip(model.layer_indices, model.layers, strict=True):
        layers[index] = of
    assert model.layers_without_cache == tuple(index for index, of in enumerate(layers) if of is None)
    return layers


@pytest.mark.parametrize(("config", "expected"), MECHANISMS, ids=repr)
def test_each_mechanism_of_the_table_is_read(config: dict[str, Any], expected: list[LayerKVConfig | None]):
    assert read_by_layer(config) == expected


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3", "youtu"])
def test_latent_attention_has_no_window(model_type: str):
    config = LATENT | {"model_type": model_type}
    assert read_by_layer(config | {"sliding_window": None}) == read_by_layer(config)
    with pytest.raises(
        KVCacheValueError, match=r"^config: got sliding_window=4096 for multi-head latent attention, exp"
    ):
        read_by_layer(config | {"sliding_window": 4096})
    with pytest.raises(KVCacheValueError, match="or use_sliding_window=false"):
        read_by_layer(config | {"sliding_window": 4096, "use_sliding_window": True})
    assert read_by_layer(config | {"sliding_window": 4096, "use_sliding_window": False}) == read_by_layer(config)


def test_keys_of_an_indexer_are_ignored_by_classes_that_have_none():
    """transformers' DeepSeek V3 reads none of them, and attends to all tokens; sparse classes are refused by name."""
    config = LATENT | {"model_type": "deepseek_v3"}
    assert read_by_layer(config | {"index_topk": 2048, "index_head_dim": 128}) == read_by_layer(config)
    for model_type in ("deepseek_v32", "glm_moe_dsa"):
        with pytest.raises(KVCacheValueError, match="sparse attention also caches an indexer's key"):
            read_by_layer(config | {"model_type": model_type, "index_topk": 2048})


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("kv_lora_rank", "got no 'kv_lora_rank', expected a positive int"),
        ("qk_rope_head_dim", "got no 'qk_rope_head_dim', expected an int of at least 0"),
    ],
)
def test_ranks_of_latent_attention_are_not_guessed(left_out: str, message: str):
    config = {key: value for key, value in LATENT.items() if key != left_out}
    with pytest.raises(KVCacheValueError, match=f"^config: {message}$"):
        read_by_layer(config | {"model_type": "deepseek_v3"})
    with pytest.raises(KVCacheValueError, match=f"config.{left_out}: got -1, expected an int of at least"):
        read_by_layer(config | {"model_type": "deepseek_v3", left_out: -1})


@pytest.mark.parametrize(
    ("config", "expected", "said"),
    [
        (
            FALCON
            | {"new_decoder_architecture": True, "num_kv_heads": 8, "hidden_size": 8192}
            | {"num_attention_heads": 128},
            [layer(8, 64)] * 2,
            "num_kv_heads=8 KV heads are assumed; transformers' own cache repeats them",
        ),
        (
            {"model_type": "mllama", "text_config": BASE | {"model_type": "mllama_text_model"}}
            | {"text_config": BASE | {"model_type": "mllama_text_model", "cross_attention_layers": [1]}},
            [layer(2, 64), None, layer(2, 64), layer(2, 64)],
            "1 cross-attention layers cache only keys and values of an image's tokens, which are not counted",
        ),
    ],
)
def test_models_that_engines_cache_in_several_ways_are_warned_of(config: dict[str, Any], expected: Any, said: str):
    with pytest.warns(KVCacheWarning, match=re.escape(said)):
        assert read_by_layer(config) == expected


def test_names_that_disagree_are_refused():
    config = {"model_type": "gpt2", "n_layer": 2, "num_hidden_layers": 3, "n_head": 2, "n_embd": 64, "dtype": "float32"}
    with pytest.raises(KVCacheValueError, match="got n_layer=2 and num_hidden_layers=3, expected one of them"):
        ModelKVConfig.from_hf_config(config)


@pytest.mark.parametrize("layers", [{"num_layers": 4, "num_hidden_layers": 4}, {"num_hidden_layers": 5}])
def test_layers_of_longcat_that_are_not_half_of_its_attentions_are_refused(layers: dict[str, int]):
    with pytest.raises(KVCacheValueError, match=r"num_hidden_layers=\d, expected 2 attentions for each of num_layers"):
        read_by_layer(LONGCAT | layers)


@pytest.mark.parametrize("key", ["sliding_window", "skip"])
def test_a_layer_that_differs_otherwise_is_refused(key: str):
    config = {"model_type": "gemma4_text", "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    with pytest.raises(KVCacheValueError, match=rf"per_layer_config\[0\]: got \['{key}'\], expected only head_dim and"):
        ModelKVConfig.from_hf_config(config | {"per_layer_config": {"0": {"head_dim": 8, key: 4}}})


@pytest.mark.parametrize("indices", [(1,), (1, 0), (0, 0), (-1, 0)])
def test_indices_are_those_of_the_layers(indices: tuple[int, ...]):
    with pytest.raises(KVCacheValueError, match="expected 2 indices in order"):
        ModelKVConfig((layer(1, 64),) * 2, BF16, layer_indices=indices)
    with pytest.raises(KVCacheValueError, match="num_hidden_layers: got 5, expected more than"):
        ModelKVConfig((layer(1, 64),) * 2, BF16, layer_indices=(3, 7), num_hidden_layers=5)


@pytest.mark.parametrize("config", [None, "config.json", [BASE]], ids=repr)
def test_a_configuration_that_is_no_mapping_is_refused(config: Any):
    with pytest.raises(KVCacheTypeError, match="expected a mapping"):
        ModelKVConfig.from_hf_config(config)


def test_a_configuration_of_transformers_is_told_apart_from_a_mapping():
    config = pytest.importorskip("transformers").LlamaConfig()
    with pytest.raises(KVCacheTypeError, match=r" of type LlamaConfig, expected a mapping: config\.to_dict\(\)$"):
        ModelKVConfig.from_hf_config(config)


def test_a_model_without_layers_is_refused():
    with pytest.raises(KVCacheValueError, match="expected at least one layer"):
        ModelKVConfig((), KVCacheDType.BFLOAT16)


def test_a_window_decides_the_kind_of_a_layer():
    assert layer(1, 64).kind is AttentionKind.FULL_ATTENTION
    assert layer(1, 64, window=8).kind is AttentionKind.SLIDING_WINDOW


@pytest.mark.parametrize(
    ("tensor_parallel", "full", "sliding"), [(1, 4, 8), (2, 2, 4), (4, 1, 2), (8, 1, 1), (16, 1, 1)]
)
def test_a_shard_holds_its_share_of_the_heads(tensor_parallel: int, full: int, sliding: int):
    model = ModelKVConfig((layer(4, 192, 128), layer(8, 192, 128, window=128)), BF16, SCHEME)
    shard = ModelKVConfig((layer(full, 192, 128), layer(sliding, 192, 128, window=128)), BF16, SCHEME)
    assert model.shard(tensor_parallel) == shard


@pytest.mark.parametrize("tensor_parallel", ["2", 2.0, True, None])
def test_a_number_of_devices_that_is_no_int_is_refused(tensor_parallel: Any):
    with pytest.raises(KVCacheTypeError, match=f"^tensor_parallel: got {tensor_parallel!r} of type "):
        read().shard(tensor_parallel)


@pytest.mark.parametrize("tensor_parallel", [0, -1, 3, 6, 12])
def test_heads_that_divide_into_no_equal_shares_are_refused(tensor_parallel: int):
    with pytest.raises(KVCacheValueError, match=f"tensor_parallel: got {tensor_parallel}, expected a divisor"):
        ModelKVConfig.from_hf_config(load("gpt-oss-20b")).shard(tensor_parallel)


def test_the_states_of_recurrent_layers_are_counted():
    qwen = {"model_type": "qwen3_5_text", "dtype": "float32", "num_hidden_layers": 4, "linear_num_key_heads": 2}
    qwen |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
    falcon = {"model_type": "falcon_h1", "dtype": "bfloat16", "num_hidden_layers": 3, "hidden_size": 64}
    falcon |= {"num_attention_heads": 4, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_d_conv": 5}
    expected = {
        3 * (3 * (2 * 2 * 8 + 4 * 16) * 4 + 4 * 8 * 16 * 4): qwen,
        3 * ((5 - 1) * (96 + 2 * 2 * 32) * 2 + 96 * 32 * 4): falcon | {"mamba_d_ssm": 96},
        3 * ((5 - 1) * (192 + 2 * 2 * 32) * 2 + 192 * 32 * 4): falcon | {"mamba_d_ssm": None, "mamba_expand": 3},
        3 * ((5 - 1) * (1024 + 2 * 2 * 32) * 2 + 1024 * 32 * 4): falcon | {"mamba_expand": 3},
    }
    for size, config in expected.items():
        model = ModelKVConfig.from_hf_config(config)
        assert model.state_bytes == size
        assert model.shard(2).state_bytes == size // 2
    with pytest.raises(KVCacheValueError, match=r"config.linear_num_value_heads: got 0, expected an int of at least 1"):
        ModelKVConfig.from_hf_config(qwen | {"linear_num_value_heads": 0})
    llama = {"model_type": "llama", "dtype": "bfloat16"}
    jamba = {"model_type": "jamba", "dtype": "bfloat16"}
    zaya = {"model_type": "zaya", "dtype": "bfloat16"}
    assert ModelKVConfig.from_hf_config(llama).state_bytes == 0
    assert ModelKVConfig.from_hf_config(jamba).state_bytes is None
    assert ModelKVConfig.from_hf_config(zaya).state_bytes is None
