"""What transformers' own cache holds of each of its causal language models, from a forward pass of a tiny one."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvjax import KVCacheValueError, KVCacheWarning, LayerKVConfig, ModelKVConfig
from kvjax.hf_config.model_types import MODEL_TYPES
from kvjax_torch.transformers_cache import CACHE_ARGUMENT

CAUSAL_MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

MOST_LAYERS = 8
NUM_TOKENS = 5

# The largest that a size becomes, by its key. What is not here stays as it is.
SMALL = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), MOST_LAYERS),
    **dict.fromkeys(("decoder_layers", "num_encoder_layers", "num_decoder_layers"), MOST_LAYERS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "dff"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "dim_ff", "shared_intermediate_size"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), 300),
    "hidden_size_per_layer_input": 16,
    "head_dim": 24,
    "rotary_dim": 8,
    "kv_lora_rank": 48,
}

LEFT_OUT = object()

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_SLIDE = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention", "full_attention"]
_SLIDES_LAST = ["full_attention", "sliding_attention"] * 4
_GEMMA4 = {"layer_types": _SLIDE, "per_layer_config": LEFT_OUT, "global_head_dim": 32}
_QWEN = [{}, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 5, "layer_types": LEFT_OUT}]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "bamba": [{**_MAMBA, "attn_layer_indices": [1, 4]}],
    "blenderbot": [{"encoder_layers": 8}],
    "cohere_compass_text": [
        {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
            }
        }
    ],
    "dbrx": [{"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}}],
    "deepseek_v2": [{"num_experts_per_tok": 2}],
    "dots1": [{"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 8}],
    "falcon": [
        {},
        {"multi_query": False, "num_kv_heads": 4},
        {"multi_query": False, "num_kv_heads": 4, "new_decoder_architecture": True},
    ],
    "gemma3n": [{"text_config": {"num_kv_shared_layers": 2, "layer_types": _SLIDE}}],
    "gemma3n_text": [{"num_kv_shared_layers": 2, "layer_types": _SLIDE}],
    "gemma4": [{"text_config": {**_GEMMA4, "num_kv_shared_layers": 2}}],
    "gemma4_text": [
        _GEMMA4,
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2},
        {**_GEMMA4, "layer_types": _SLIDES_LAST},
    ],
    "gemma4_unified": [{"text_config": _GEMMA4}],
    "gemma4_unified_text": [
        _GEMMA4,
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {**_GEMMA4, "layer_types": _SLIDES_LAST},
    ],
    "gpt_bigcode": [{}, {"multi_query": False}],
    "granitemoehybrid": [{**_MAMBA, "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2}],
    "helium": [{"head_dim": 16}],
    "hrm_text": [{"num_hidden_layers": 2, "num_layers_per_stack": LEFT_OUT}],
    "hunyuan_v1_dense": [{"head_dim": 24}],
    "hunyuan_v1_moe": [{"head_dim": 24}],
    "inkling_text": [{}, {"layer_types": LEFT_OUT, "local_layer_ids": [0, 2, 5]}],
    "jamba": [{}, {"attn_layer_period": 3, "attn_layer_offset": 1}],
    "kimi_linear": [
        {},
        {"layer_types": LEFT_OUT, "linear_attn_config": {"full_attn_layers": [2, 7], "kda_layers": [1, 3, 4, 5, 6, 8]}},
    ],
    "lfm2": [{}, {"layer_types": LEFT_OUT, "full_attn_idxs": [1, 3]}],
    "lfm2_moe": [{"layer_types": ["conv", "full_attention"] * 4}],
    "mamba2": [{"num_heads": 8, "head_dim": 16}],
    "mimo_v2_flash": [{}, {"sliding_window_size": 6}],
    "ministral": [{"head_dim": 24}],
    "minimax": [{"layer_types": ["full_attention", "linear_attention"] * 4}],
    "mllama": [{"text_config": {"cross_attention_layers": [3, 6]}}],
    "modernbert-decoder": [{}, {"local_attention": 12, "sliding_window": LEFT_OUT}],
    "nemotron": [{"num_key_value_heads": 2}],
    "nemotron_h": [{}, {"layers_block_type": LEFT_OUT, "hybrid_override_pattern": "M*-M*E"}],
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": [{}, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 5}],
    "qwen3_next": [{}, {"layer_types": LEFT_OUT, "full_attention_interval": 3}],
    "recurrent_gemma": [{}, {"num_key_value_heads": 2, "block_types": ["recurrent", "attention"]}],
    "rwkv": [{"attention_hidden_size": 64}],
    "xlnet": [{"d_head": 16}],
    "xmod": [{"default_language": "en_XX"}],
    "zamba": [{"attention_hidden_size": 128, "attention_head_dim": 32}],
    "zamba2": [{"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 64, "n_mamba_heads": 2}],
}
"""What tiny models of a type need besides small sizes: sizes that fit together, and each of its mechanisms at work."""


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with small sizes, and of lists with an entry for each layer the first entries."""
    layers = next((config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if config.get(key)), 0)
    small: dict[str, Any] = {}
    for key, value in config.items():
        if key == "per_layer_config":
            small[key] = {layer: of for layer, of in value.items() if int(layer) < MOST_LAYERS}
        elif isinstance(value, dict):
            small[key] = shrink(value)
        elif isinstance(value, list) and len(value) == layers > MOST_LAYERS:
            small[key] = value[:MOST_LAYERS]
        elif isinstance(value, bool) or not isinstance(value, int):
            small[key] = value
        elif key.endswith(("token_id", "token_index")):
            small[key] = value % 100
        elif key == "num_key_value_heads" and "kv_lora_rank" in config:
            small[key] = min(value, SMALL["num_attention_heads"])
        elif key != "head_dim" or "kv_lora_rank" not in config:
            small[key] = min(value, SMALL.get(key, value))
        else:
            small[key] = value
    small.pop("transformers_version", None)
    return small


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with some keys changed or left out; nested ones change within."""
    result = dict(config)
    for key, value in changes.items():
        if value is LEFT_OUT:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            result[key] = changed(config[key], value)
        else:
            result[key] = value
    return result


def tiny_configs(model_type: str) -> Iterator[dict[str, Any]]:
    """Small configurations of a type, as files would hold them."""
    config = shrink(CONFIG_MAPPING[model_type]().to_dict())
    if config.get("is_decoder") is False and not config["is_encoder_decoder"]:
        config["is_decoder"] = True
    for changes in CHANGES.get(model_type, [{}]):
        yield changed(config, {"dtype": "float32", **changes})


def load(model_type: str, config: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """What transformers makes of a file; it changes lists of its argument in place."""
    return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(config)))


def cached_layers(model_type: str, config: transformers.PreTrainedConfig) -> list[LayerKVConfig | None]:
    """What each layer of transformers' own cache holds after a forward pass; None for a layer without tokens."""
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    torch.manual_seed(0)
    model = model_class(config).eval()
    ids = torch.randint(5, 90, (1, NUM_TOKENS))
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).get(CACHE_ARGUMENT)
        if cache is None:
            cache = DynamicCache(config=config)
            model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache})
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise TypeError(f"a cache of type {type(cache).__name__}")
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or [""] * len(cache.layers)
    layers: list[LayerKVConfig | None] = []
    # A cache that grows as layers write to it does not reach to last layers that write nothing.
    for layer, kind in itertools.zip_longest(cache.layers, kinds):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or not keys.numel():
            layers.append(None)
            continue
        # A chunk is a window to transformers. It is none to kvjax, which keeps every token either way.
        window = None if kind == "chunked_attention" else getattr(layer, "sliding_window", None)
        size, size_v = keys.shape[-1], values.shape[-1]
        if is_mla := size == getattr(config, "kv_lora_rank", None):  # it keeps latents as keys, rope keys as values
            size, size_v = size + size_v, size
        layers.append(LayerKVConfig(keys.shape[1], size, size_v, window, is_mla))
    return layers


def read_layers(config: Mapping[str, Any]) -> tuple[list[LayerKVConfig | None], list[str]]:
    """What kvjax reads of each layer, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KVCacheWarning)
        model = ModelKVConfig.from_hf_config(config)
    layers: list[LayerKVConfig | None] = [None] * model.num_hidden_layers
    for index, layer in zip(model.layer_indices, model.layers, strict=True):
        layers[index] = layer
    return layers, [str(warning.message) for warning in caught if warning.category is KVCacheWarning]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a type: `right`, `right, warned`, `refused`, `not judged` or `WRONG`, and why or of what."""

    status: str
    text: str

    def __str__(self) -> str:
        return f"{self.status} | {self.text}"


def judge(model_type: str) -> Verdict:
    """What kvjax reads of a type's tiny models next to what transformers' own cache holds."""
    judged, said = [], []
    try:
        files = list(tiny_configs(model_type))
        configs = [load(model_type, file) for file in files]
    except Exception as error:
        # A type that kvjax refuses by its name needs no configuration that transformers takes.
        return _refusal({"model_type": model_type}) or Verdict("not judged", _why(error))
    for file, config in zip(files, configs, strict=True):
        if refusal := _refusal(config.to_dict()):
            return refusal
        try:
            layers = cached_layers(model_type, config)
        except Exception as error:
            return Verdict("not judged", _why(error))
        for stated in (file, config.to_dict()):
            read, warned = read_layers(stated)
            if read != layers:
                return Verdict("WRONG", f"read {in_words(read)}, and the cache has {in_words(layers)}")
            said += warned
        judged.append(in_words(layers))
    status = "right, warned" if said else "right"
    return Verdict(status, "; ".join(dict.fromkeys(judged)))


def _refusal(config: Mapping[str, Any]) -> Verdict | None:
    try:
        read_layers(config)
    except KVCacheValueError as error:
        return Verdict(
            "refused", re.sub(r"^config[^:]*: got [^:]*: |; expected .*", "", str(error)).replace("|", "\\|")
        )
    return None


def _why(error: Exception) -> str:
    sentence = " ".join(str(error).split()).split(". ")[0]
    return f"no tiny model: {sentence[:120]}".replace("|", "\\|")


def in_words(layers: list[LayerKVConfig | None]) -> str:
    """`3 of 8: 2 x 24, 3 of 8: 2 x 24/16 window 4`: layers, KV heads, head sizes and windows."""
    alike = collections.Counter(layer for layer in layers if layer)
    return ", ".join(
        f"{count} of {len(layers)}: {layer.num_kv_heads} x {layer.head_size}"
        + (f"/{layer.head_size_v}" if layer.head_size_v != layer.head_size else "")
        + (f" window {layer.sliding_window}" if layer.sliding_window else "")
        for layer, count in alike.items()
    )


def read_or_refused(config: Mapping[str, Any]) -> list[LayerKVConfig | None] | None:
    """What kvjax reads of each layer; None where it refuses."""
    try:
        return read_layers(config)[0]
    except KVCacheValueError:
        return None


def misread_without_a_key(model_type: str, config: Mapping[str, Any]) -> list[str]:
    """Keys that kvjax fills in otherwise than transformers where a file leaves them out, or says null."""
    row = MODEL_TYPES[model_type]
    read = {*row.keys, *(name for names in row.names.values() for name in names)} & {*config}
    wrong = []
    for key in sorted(read - {"dtype"}):
        for derived in ([], ["layer_types", "layers_block_type", "per_layer_config"]):
            for value in (LEFT_OUT, None):
                file = changed(config, {**dict.fromkeys(derived, LEFT_OUT), key: value})
                layers = read_or_refused(file)
                if layers is None:
                    continue
                try:
                    filled_in = load(model_type, file).to_dict()
                except Exception:  # whatever transformers raises: it reads no such file
                    continue
                if layers != read_or_refused(filled_in):
                    wrong.append(f"{key} {'left out' if value is LEFT_OUT else 'null'}, without {derived}")
    return wrong
