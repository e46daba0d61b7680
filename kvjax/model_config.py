"""The facts of a model that its KV cache depends on, read from a Hugging Face `config.json`."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Self

from kvjax.dtypes import KVCacheDType, parse_model_dtype
from kvjax.errors import KVCacheTypeError, KVCacheValueError, got_expected, shown
from kvjax.spec import MAX_SIZE, as_int

MAX_LAYERS = 10_000
"""Layers of a model that is read: many times those of any known, and a bound on what a mistaken number allocates."""


class AttentionKind(enum.StrEnum):
    """Which earlier tokens a layer's queries see, under the name that `skip_layers` knows it by."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"


@dataclasses.dataclass(frozen=True)
class LayerKVConfig:
    """One layer's keys and values: `[num_kv_heads, head_size]` and `[num_kv_heads, head_size_v]` a token.

    `sliding_window`: tokens that a query sees, its own included; None where it sees all.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int
    sliding_window: int | None = None

    @property
    def kind(self) -> AttentionKind:
        """The kind of attention that reads this layer's cache."""
        return AttentionKind.FULL_ATTENTION if self.sliding_window is None else AttentionKind.SLIDING_WINDOW


@dataclasses.dataclass(frozen=True)
class ModelKVConfig:
    """What a model's KV cache depends on.

    Attributes:
      layers: each layer's heads and window, in the model's order.
      dtype: what the model computes in; made from anything that `parse_model_dtype` takes.
      quantization_config: the checkpoint's, as it stands; None where it has none.
    """

    layers: tuple[LayerKVConfig, ...]
    dtype: KVCacheDType
    quantization_config: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise KVCacheValueError("ModelKVConfig.layers: got none, expected at least one layer")
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "dtype", parse_model_dtype(self.dtype))

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        *,
        model_dtype: object = None,
        quantization_config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Reads a `config.json`, flat or with the language model's part in `text_config`.

        A layer of chunked attention (Llama 4) is held as full attention: its cache is the same, every token kept.

        Args:
          config: the parsed JSON; never modified, and copied where it is kept.
          model_dtype: what the model computes in, instead of the configuration's `dtype` or `torch_dtype`.
          quantization_config: instead of the configuration's, the content of ModelOpt's `hf_quant_config.json`.

        Raises:
          KVCacheValueError: a key that is missing or that no cache can be made from, naming it and what is accepted;
            or a model that keeps something else than each layer's keys and values (latent attention, linear
            attention, layers that share a cache), or has more than `MAX_LAYERS` layers.
          KVCacheTypeError: `config` is no mapping.
        """
        if not isinstance(config, Mapping):
            raise KVCacheTypeError(f"config: got {shown(config)} of type {type(config).__name__}, expected a mapping")
        facts = _facts(config)
        _refuse_other_caches(facts)
        num_layers = _positive_int(facts, "num_hidden_layers")
        if num_layers > MAX_LAYERS:
            raise KVCacheValueError(
                f"config.num_hidden_layers: got {num_layers}, expected an int of at most {MAX_LAYERS}"
            )
        windows = _sliding_windows(facts, num_layers)
        return cls(
            layers=tuple(_layer(facts, window) for window in windows),
            dtype=_dtype(config, facts) if model_dtype is None else parse_model_dtype(model_dtype),
            quantization_config=_copy(
                facts.get("quantization_config") if quantization_config is None else quantization_config
            ),
        )

    def shard(self, tensor_parallel: int) -> Self:
        """What one of `tensor_parallel` devices holds: an equal share of each layer's KV heads, or a copy of one.

        Raises:
          KVCacheValueError: a layer's heads divide into no equal shares.
          KVCacheTypeError: `tensor_parallel` is no int.
        """
        devices = as_int("tensor_parallel", tensor_parallel)
        return dataclasses.replace(self, layers=tuple(_shard_layer(layer, devices) for layer in self.layers))


def _copy(quantization_config: Any) -> Any:
    try:
        return copy.deepcopy(quantization_config)
    except RecursionError:
        raise KVCacheValueError(
            "config.quantization_config: got one nested too deeply to copy, expected what a checkpoint declares"
        ) from None


# What transformers' classes fill in where `config.json` leaves it out.
_QWEN_DEFAULTS = {"use_sliding_window": False}
_MODEL_TYPE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cohere2": {"sliding_window_pattern": 4},
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window_pattern": 6,
    },
    # The published checkpoints name no dtype; all that is not MXFP4 in them is bfloat16.
    "gpt_oss": {"dtype": "bfloat16"},
    "qwen2": _QWEN_DEFAULTS,
    "qwen2_moe": _QWEN_DEFAULTS,
    "qwen2_vl": _QWEN_DEFAULTS,
    "qwen2_5_vl": _QWEN_DEFAULTS,
    "qwen3": _QWEN_DEFAULTS,
    "qwen3_moe": _QWEN_DEFAULTS,
}

_OTHER_CACHES = {
    "kv_lora_rank": "multi-head latent attention keeps one latent a token",
    "compress_ratios": "compressed attention keeps one entry for several tokens",
    "num_kv_shared_layers": "some layers read another layer's cache",
    "full_attention_interval": "linear attention keeps a state, not tokens",
    "hybrid_override_pattern": "some layers keep a state, not tokens",
    "attn_layer_period": "some layers keep a state, not tokens",
}

_SLIDES_BY_LAYER_TYPE = {"full_attention": False, "chunked_attention": False, "sliding_attention": True}


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """One flat view: what stands in `text_config`, else beside it, else the model type's default; never null."""
    text = config.get("text_config")
    stated: dict[str, Any] = {}
    for part in (config, text if isinstance(text, Mapping) else {}):
        stated |= {key: value for key, value in part.items() if value is not None}
    model_type = stated.get("model_type")
    return {**_MODEL_TYPE_DEFAULTS.get(model_type if isinstance(model_type, str) else "", {}), **stated}


def _refuse_other_caches(facts: Mapping[str, Any]) -> None:
    for key, why in _OTHER_CACHES.items():
        if facts.get(key):
            raise KVCacheValueError(
                f"config: got {key}={shown(facts[key])}: {why}; expected a model whose layers each keep keys and values"
            )


def _dtype(config: Mapping[str, Any], facts: Mapping[str, Any]) -> KVCacheDType:
    # A model is loaded in the dtype that stands beside text_config, whatever stands in it.
    for part in (config, facts):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None:
                return parse_model_dtype(part[key])
    raise KVCacheValueError("config: got no 'dtype' or 'torch_dtype', expected one of them, or model_dtype given")


def _layer(facts: Mapping[str, Any], window: int | None) -> LayerKVConfig:
    # MiMo-V2 states the sizes of its sliding layers apart (swa_...), Gemma 4 those of its full layers (...global_...).
    sliding = window is not None
    head_size = _first_int(facts, "swa_head_dim" if sliding else "global_head_dim", "head_dim") or _hidden_per_head(
        facts
    )
    return LayerKVConfig(
        num_kv_heads=_positive_int(
            facts,
            "swa_num_key_value_heads" if sliding else "num_global_key_value_heads",
            "num_key_value_heads",
            "num_attention_heads",
        ),
        head_size=head_size,
        head_size_v=_first_int(facts, *(["swa_v_head_dim"] if sliding else []), "v_head_dim") or head_size,
        sliding_window=window,
    )


def _hidden_per_head(facts: Mapping[str, Any]) -> int:
    if "hidden_size" not in facts or "num_attention_heads" not in facts:
        raise KVCacheValueError("config: got no 'head_dim', expected it, or 'hidden_size' and 'num_attention_heads'")
    hidden, heads = _positive_int(facts, "hidden_size"), _positive_int(facts, "num_attention_heads")
    if hidden % heads:
        raise KVCacheValueError(
            f"config: got no 'head_dim', and hidden_size={hidden}; expected a multiple of num_attention_heads={heads}"
        )
    return hidden // heads


def _sliding_windows(facts: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Each layer's window, None for full attention."""
    sliding = _which_slide(facts, num_layers)
    window = _positive_int(facts, "sliding_window") if any(sliding) else None
    return [window if slides else None for slides in sliding]


def _which_slide(facts: Mapping[str, Any], num_layers: int) -> list[bool]:
    if "layer_types" in facts:
        return _read_per_layer(facts, "layer_types", num_layers, _SLIDES_BY_LAYER_TYPE)
    if "hybrid_layer_pattern" in facts:
        return _read_per_layer(facts, "hybrid_layer_pattern", num_layers, {0: False, 1: True})
    if not facts.get("sliding_window") or facts.get("use_sliding_window") is False:
        return [False] * num_layers
    if "sliding_window_pattern" in facts:
        period = _positive_int(facts, "sliding_window_pattern")
        return [(index + 1) % period != 0 for index in range(num_layers)]
    first = _first_int(facts, "max_window_layers", minimum=0) or 0
    return [index >= first for index in range(num_layers)]


def _read_per_layer(facts: Mapping[str, Any], key: str, num_layers: int, meaning: Mapping[Any, bool]) -> list[bool]:
    entries = facts[key]
    # More entries than layers describe the layers of a draft head, which has a cache of its own.
    if not isinstance(entries, (list, tuple)) or len(entries) < num_layers:
        raise KVCacheValueError(
            f"config.{key}: got {shown(entries)}, expected a list with an entry for each of {num_layers} layers"
        )
    for index, entry in enumerate(entries[:num_layers]):
        if not isinstance(entry, (str, int)) or entry not in meaning:
            raise KVCacheValueError(got_expected(f"config.{key}[{index}]", entry, meaning))
    return [meaning[entry] for entry in entries[:num_layers]]


def _positive_int(facts: Mapping[str, Any], *keys: str) -> int:
    value = _first_int(facts, *keys)
    if value is None:
        raise KVCacheValueError(f"config: got no {' or '.join(repr(key) for key in keys)}, expected a positive int")
    return value


def _first_int(facts: Mapping[str, Any], *keys: str, minimum: int = 1) -> int | None:
    """The value of the first of `keys` that is there; None where none is."""
    for key in keys:
        if key in facts:
            value = facts[key]
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise KVCacheValueError(f"config.{key}: got {shown(value)}, expected an int of at least {minimum}")
            if value > MAX_SIZE:
                raise KVCacheValueError(f"config.{key}: got {shown(value)}, expected an int of at most {MAX_SIZE}")
            return value
    return None


def _shard_layer(layer: LayerKVConfig, tensor_parallel: int) -> LayerKVConfig:
    heads = layer.num_kv_heads
    if tensor_parallel < 1 or (heads % tensor_parallel and tensor_parallel % heads):
        raise KVCacheValueError(
            f"tensor_parallel: got {shown(tensor_parallel)}, expected a divisor or a multiple of a layer's {heads} KV"
            " heads"
        )
    return dataclasses.replace(layer, num_kv_heads=max(1, heads // tensor_parallel))
