"""What holds of resolution for every input: generated checkpoints, models and requests, sound and unsound."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.any_json import JSON

from kvjax.dtypes import ACCEPTED_KV_CACHE_DTYPES, STORED_KV_CACHE_DTYPES, KVCacheDType, parse_kv_cache_dtype
from kvjax.errors import KVCacheError, KVCacheWarning
from kvjax.model_config import LayerKVConfig, ModelKVConfig
from kvjax.resolve import DTypeSource, resolve_kv_cache_dtype, resolve_layer_dtypes, resolve_layer_specs

laws = settings(derandomize=True, max_examples=80)


def changed(base: dict[str, Any], **values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """`base` with up to four of these keys set, to what they should be or to anything."""
    entries = st.one_of([st.tuples(st.just(key), value | value | JSON) for key, value in values.items()])
    return st.lists(entries, max_size=4).map(lambda changes: base | dict(changes))


SCHEMES = changed(
    {"num_bits": 8, "type": "float"},
    num_bits=st.sampled_from([8, 4, 16]),
    type=st.sampled_from(["float", "FLOAT", "int"]),
    strategy=st.sampled_from(["tensor", "attn_head", "tensor_group", "channel"]),
    dynamic=st.sampled_from([False, True, "local"]),
    symmetric=st.booleans(),
    group_size=st.sampled_from([16, 32]),
)
ALGORITHMS = st.sampled_from(["FP8", "fp8", "NVFP4", "MIXED_PRECISION", "INT8", "static"])
DECLARATIONS = {"kv_cache_scheme": SCHEMES | ALGORITHMS, "kv_cache_quant_algo": ALGORITHMS | SCHEMES}
LAYER_MAPS = st.dictionaries(
    st.sampled_from(["model.layers.0.self_attn", "layers.1.attn", "mtp.layers.0", "attn0"]),
    st.fixed_dictionaries({"quant_algo": ALGORITHMS | st.just("FP8_K_NVFP4_V")}),
    max_size=3,
)
DECLARATIONS["kv_cache_quantized_layers"] = LAYER_MAPS
SOUND_FP8 = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
SOUND_NVFP4 = {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}


def mappings_from(base: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return changed(
        base,
        quant_method=st.sampled_from(["compressed-tensors", "modelopt", "ModelOpt_FP4", "fp8", "gptq"]),
        producer=st.just({"name": "modelopt"}),
        quantization=changed({}, **DECLARATIONS),
        **DECLARATIONS,
    )


MAPPINGS = st.one_of([mappings_from(base) for base in ({}, SOUND_FP8, SOUND_NVFP4)])
QUANTIZATION_CONFIGS = MAPPINGS | MAPPINGS | JSON

UNQUANTIZED = [dtype for dtype in STORED_KV_CACHE_DTYPES if not dtype.is_quantized]
MODEL_DTYPES = st.sampled_from(UNQUANTIZED)
EXPLICIT = st.sampled_from([*STORED_KV_CACHE_DTYPES, *(name for name in ACCEPTED_KV_CACHE_DTYPES if name != "auto")])

LAYERS = st.builds(
    LayerKVConfig,
    num_kv_heads=st.integers(1, 16),
    head_size=st.sampled_from([64, 128]),
    head_size_v=st.sampled_from([64, 128]),
    sliding_window=st.none() | st.integers(1, 4096),
)
MODELS = st.builds(ModelKVConfig, layers=st.lists(LAYERS, min_size=1, max_size=12).map(tuple), dtype=MODEL_DTYPES)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An error of kvjax's, as a value."""

    kind: type[KVCacheError]
    message: str


def outcome[Result](call: Callable[[], Result]) -> Result | Refusal:
    """What a call returns, or how it refuses; an error that is not kvjax's own goes through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVCacheWarning)
        try:
            return call()
        except KVCacheError as error:
            return Refusal(type(error), str(error))


@st.composite
def skips(draw: st.DrawFn, model: ModelKVConfig) -> tuple[list[int | str], set[int]]:
    """Some of a model's layers in every way of naming them, and the indices that those names stand for."""
    kinds = [layer.kind for layer in model.layers]
    indices = draw(st.lists(st.integers(0, len(kinds) - 1), max_size=6))
    names = draw(st.lists(st.sampled_from(sorted(set(kinds))), max_size=2))
    entries = [draw(st.sampled_from([index, str(index)])) for index in indices] + [str(name) for name in names]
    return draw(st.permutations(entries)), {*indices, *(index for index, kind in enumerate(kinds) if kind in names)}


@laws
@given(EXPLICIT, MODEL_DTYPES, QUANTIZATION_CONFIGS)
def test_an_explicit_dtype_survives_any_checkpoint(
    requested: str | KVCacheDType, model_dtype: KVCacheDType, config: Any
):
    resolved = resolve_kv_cache_dtype(requested, model_dtype=model_dtype, quantization_config=config)
    assert resolved.dtype is parse_kv_cache_dtype(requested)
    assert resolved.source is DTypeSource.USER


@laws
@given(MODEL_DTYPES, QUANTIZATION_CONFIGS)
def test_auto_resolves_any_checkpoint_or_refuses_it_in_words(model_dtype: KVCacheDType, config: Any):
    resolved = outcome(lambda: resolve_kv_cache_dtype("auto", model_dtype=model_dtype, quantization_config=config))
    if isinstance(resolved, Refusal):
        assert "expected" in resolved.message
    elif resolved.source is DTypeSource.CHECKPOINT:
        assert resolved.dtype in (KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4)
        assert not resolved.per_head_scales or resolved.dtype is KVCacheDType.FP8_E4M3
    else:
        assert (resolved.dtype, resolved.source) == (model_dtype, DTypeSource.MODEL)


@laws
@given(EXPLICIT | st.just("auto"), MODEL_DTYPES, QUANTIZATION_CONFIGS)
def test_resolving_is_pure(requested: str | KVCacheDType, model_dtype: KVCacheDType, config: Any):
    def resolve(config: Any) -> object:
        return outcome(lambda: resolve_kv_cache_dtype(requested, model_dtype=model_dtype, quantization_config=config))

    before, equal_input = copy.deepcopy(config), copy.deepcopy(config)
    first = resolve(config)
    assert repr(config) == repr(before)  # NaN is not equal to itself, but prints alike
    assert resolve(config) == resolve(equal_input) == first


@laws
@given(EXPLICIT | st.just("auto"), MODEL_DTYPES, QUANTIZATION_CONFIGS)
def test_resolving_twice_changes_nothing(requested: str | KVCacheDType, model_dtype: KVCacheDType, config: Any):
    once = outcome(lambda: resolve_kv_cache_dtype(requested, model_dtype=model_dtype, quantization_config=config))
    if not isinstance(once, Refusal):
        twice = resolve_kv_cache_dtype(once.dtype, model_dtype=model_dtype, quantization_config=config)
        assert twice.dtype is once.dtype


@laws
@given(st.data(), MODELS, EXPLICIT | st.just("auto"), st.sampled_from([None, SOUND_FP8]))
def test_a_skipped_layer_is_never_quantized(
    data: st.DataObject, model: ModelKVConfig, requested: str | KVCacheDType, config: dict[str, Any] | None
):
    model = ModelKVConfig(model.layers, model.dtype, config)
    skip_layers, skipped = data.draw(skips(model))
    chosen = resolve_kv_cache_dtype(requested, model_dtype=model.dtype, quantization_config=config)
    specs = resolve_layer_specs(model, requested, skip_layers=skip_layers)
    for index, (resolved, spec) in enumerate(
        zip(resolve_layer_dtypes(model, requested, skip_layers=skip_layers), specs, strict=True)
    ):
        assert spec.dtype is resolved.dtype
        if index in skipped:
            assert (resolved.dtype, resolved.source) == (model.dtype, DTypeSource.MODEL)
            assert not spec.dtype.is_quantized
        else:
            assert resolved == chosen


@laws
@given(MODELS, EXPLICIT, st.integers() | st.text(max_size=20))
def test_a_layer_to_skip_is_one_of_the_models_or_refused_by_name(
    model: ModelKVConfig, requested: str | KVCacheDType, entry: int | str
):
    kinds = {str(layer.kind) for layer in model.layers}
    known = entry in kinds or entry in range(len(model.layers)) or entry in map(str, range(len(model.layers)))
    refusal = outcome(lambda: resolve_layer_specs(model, requested, skip_layers=[entry]))
    if not known and not (isinstance(entry, str) and entry.startswith("0")):
        assert isinstance(refusal, Refusal)
        assert f"skip_layers: got {entry!r}, expected one of a layer index" in refusal.message


HF_CONFIGS = changed(
    {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "bfloat16",
        "sliding_window": 8,
    },
    num_hidden_layers=st.integers(1, 6),
    num_attention_heads=st.sampled_from([4, 8]),
    num_key_value_heads=st.sampled_from([1, 2]),
    hidden_size=st.sampled_from([256, 512]),
    head_dim=st.sampled_from([64, 128]),
    v_head_dim=st.sampled_from([64, 128]),
    torch_dtype=st.sampled_from(["bfloat16", "float16"]),
    dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    model_type=st.sampled_from(["llama", "gemma2", "gemma3_text", "qwen2", "gpt_oss"]),
    sliding_window=st.integers(0, 9),
    sliding_window_pattern=st.integers(0, 3),
    use_sliding_window=st.booleans(),
    max_window_layers=st.integers(0, 3),
    layer_types=st.lists(st.sampled_from(["full_attention", "sliding_attention", "linear_attention"]), max_size=6),
    hybrid_layer_pattern=st.lists(st.integers(0, 2), max_size=6),
    quantization_config=MAPPINGS,
    kv_lora_rank=st.none(),
)


@laws
@given(HF_CONFIGS | HF_CONFIGS.flatmap(lambda text: HF_CONFIGS.map(lambda top: top | {"text_config": text})))
def test_any_configuration_is_read_purely_or_refused_in_words(config: dict[str, Any]):
    before = copy.deepcopy(config)
    model = outcome(lambda: ModelKVConfig.from_hf_config(config))
    assert repr(config) == repr(before)
    assert repr(outcome(lambda: ModelKVConfig.from_hf_config(before))) == repr(model)
    if isinstance(model, Refusal):
        assert "expected" in model.message
    else:
        assert all(layer.num_kv_heads > 0 and layer.head_size > 0 and layer.head_size_v > 0 for layer in model.layers)
        assert model.dtype in UNQUANTIZED


class AllSeen(Exception):  # noqa: N818
    """Ends the drawing."""


def test_what_is_generated_reaches_every_outcome():
    wanted = {Refusal, ModelKVConfig, KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4}
    seen: set[object] = set()

    @settings(laws, database=None, phases=[Phase.generate])
    @given(QUANTIZATION_CONFIGS, HF_CONFIGS)
    def collect(quantization: Any, config: dict[str, Any]) -> None:
        resolved = outcome(
            lambda: resolve_kv_cache_dtype("auto", model_dtype="bfloat16", quantization_config=quantization)
        )
        model = outcome(lambda: ModelKVConfig.from_hf_config(config))
        seen.update([type(model), type(resolved) if isinstance(resolved, Refusal) else resolved.dtype])
        assert seen <= wanted
        if seen == wanted:
            raise AllSeen

    with pytest.raises(AllSeen):
        collect()
