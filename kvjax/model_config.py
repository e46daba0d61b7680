"""The facts of a model that its KV cache depends on, read from a Hugging Face `config.json`."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import os
import warnings
from collections.abc import Mapping
from typing import Any, Self

from kvjax.dtypes import KVCacheDType, parse_model_dtype
from kvjax.errors import KVCacheTypeError, KVCacheValueError, KVCacheWarning, shown
from kvjax.hf_config.keys import MAX_LAYERS as MAX_LAYERS
from kvjax.hf_config.keys import Facts, first_int, num_layers, per_layer, positive_int
from kvjax.hf_config.plain_keys import plain_keys
from kvjax.spec import as_int


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
      layers: heads and window of each layer that has a KV cache, in the model's order.
      dtype: what the model computes in; made from anything that `parse_model_dtype` takes.
      quantization_config: the checkpoint's, as it stands; None where it has none.
      layer_indices: the index in the model of each of `layers`. By default all of the model's layers have a cache.
      num_hidden_layers: how many layers the model has, with a cache or without.
    """

    layers: tuple[LayerKVConfig, ...]
    dtype: KVCacheDType
    quantization_config: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    layer_indices: tuple[int, ...] = ()
    num_hidden_layers: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise KVCacheValueError("ModelKVConfig.layers: got none, expected at least one layer")
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "dtype", parse_model_dtype(self.dtype))
        indices = tuple(self.layer_indices) or tuple(range(len(self.layers)))
        if len(indices) != len(self.layers) or list(indices) != sorted({index for index in indices if index >= 0}):
            raise KVCacheValueError(
                f"ModelKVConfig.layer_indices: got {shown(indices)}, expected {len(self.layers)} indices in order"
            )
        count = self.num_hidden_layers or indices[-1] + 1
        if count <= indices[-1]:
            raise KVCacheValueError(
                f"ModelKVConfig.num_hidden_layers: got {count}, expected more than the last layer's index {indices[-1]}"
            )
        object.__setattr__(self, "layer_indices", indices)
        object.__setattr__(self, "num_hidden_layers", count)

    @property
    def layers_without_cache(self) -> tuple[int, ...]:
        """The indices of the layers that keep no keys and values of their own."""
        cached = set(self.layer_indices)
        return tuple(index for index in range(self.num_hidden_layers) if index not in cached)

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        *,
        model_dtype: object = None,
        quantization_config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Reads a `config.json`, flat or with the language model's part in `text_config`.

        `docs/models.md` lists the types of models that are understood. A type that is not among them is read by the
        plain keys, with a warning, unless it has keys that say that its cache may be another. A configuration without
        a `model_type` is read the same way; the warning comes only where it has keys that may matter and are not read.

        A layer of chunked attention (Llama 4) is held as full attention: its cache is the same, every token kept.

        Args:
          config: the parsed JSON; never modified, and copied where it is kept.
          model_dtype: what the model computes in, instead of the configuration's `dtype` or `torch_dtype`.
          quantization_config: instead of the configuration's, the content of ModelOpt's `hf_quant_config.json`.

        Raises:
          KVCacheValueError: a key that is missing or that no cache can be made from, naming it and what is accepted;
            or a model that keeps something else than its layers' keys and values (no tokens, or an encoder's too, or
            more than keys and values), or that has more than `MAX_LAYERS` layers.
          KVCacheTypeError: `config` is not a mapping.

        Warns:
          KVCacheWarning: what was assumed of a model of no known type, or of one that engines cache in several ways.
        """
        if not isinstance(config, Mapping):
            raise KVCacheTypeError(f"config: got {shown(config)} of type {type(config).__name__}, expected a mapping")
        part, facts, doubts = plain_keys(config)
        layers = _layers(facts)
        if quantization_config is None:
            quantization_config = next(
                (of["quantization_config"] for of in (part, config) if of.get("quantization_config") is not None), None
            )
        model = cls(
            layers=tuple(layers.values()),
            dtype=_dtype(config, part, facts) if model_dtype is None else parse_model_dtype(model_dtype),
            quantization_config=_copy(quantization_config),
            layer_indices=tuple(layers),
            num_hidden_layers=num_layers(facts),
        )
        if doubts.warning:
            warnings.warn(
                f"{doubts.warning}; assumed {_in_words(facts, model)}" if doubts.guessed else doubts.warning,
                KVCacheWarning,
                skip_file_prefixes=(os.path.dirname(__file__),),  # the caller's line, from whatever depth
            )
        return model

    def shard(self, tensor_parallel: int) -> Self:
        """What one of `tensor_parallel` devices holds: an equal share of each layer's KV heads, or a copy of one.

        Raises:
          KVCacheValueError: a layer's heads divide into no equal shares.
          KVCacheTypeError: `tensor_parallel` is not an int.
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


def _dtype(*parts: Mapping[str, Any]) -> KVCacheDType:
    # A model is loaded in the dtype that stands beside text_config, whatever stands in it.
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None:
                return parse_model_dtype(part[key])
    raise KVCacheValueError("config: got no 'dtype' or 'torch_dtype', expected one of them, or model_dtype given")


class _Keeps(enum.Enum):
    """What a layer keeps of the tokens."""

    ALL = enum.auto()
    WINDOW = enum.auto()
    NOTHING = enum.auto()


_LAYER_TYPES = {
    "full_attention": _Keeps.ALL,
    "chunked_attention": _Keeps.ALL,
    "sliding_attention": _Keeps.WINDOW,
    # Attention and a state; the state is not counted.
    "hybrid": _Keeps.ALL,
    "hybrid_sliding": _Keeps.WINDOW,
    # A state that does not grow with the tokens.
    "linear_attention": _Keeps.NOTHING,
    "conv": _Keeps.NOTHING,
    "mamba": _Keeps.NOTHING,
    # No attention, or one that reads what other layers keep, or other tokens.
    "moe": _Keeps.NOTHING,
    "mlp": _Keeps.NOTHING,
    "shared": _Keeps.NOTHING,
    "cross_attention": _Keeps.NOTHING,
    # What transformers called it before version 5.
    "attention": _Keeps.ALL,
}
_HYBRID_LAYER_PATTERN = {0: _Keeps.ALL, 1: _Keeps.WINDOW}


def _layers(facts: Facts) -> dict[int, LayerKVConfig]:
    """Each layer that keeps keys and values, by its index."""
    keeps = _what_layers_keep(facts, num_layers(facts))
    window = positive_int(facts, "sliding_window") if _Keeps.WINDOW in keeps else None
    apart: Mapping[int, Facts] = facts.get("per_layer_config", {})
    layers = {
        index: _layer(facts | apart.get(index, {}), window if kept is _Keeps.WINDOW else None)
        for index, kept in enumerate(keeps)
        if kept is not _Keeps.NOTHING
    }
    if not layers:
        raise KVCacheValueError("config: got no layer that keeps keys and values, expected at least one")
    return layers


def _what_layers_keep(facts: Facts, layers: int) -> list[_Keeps]:
    if "layer_types" in facts:
        return per_layer(facts, "layer_types", layers, _LAYER_TYPES)
    if "hybrid_layer_pattern" in facts:
        return per_layer(facts, "hybrid_layer_pattern", layers, _HYBRID_LAYER_PATTERN)
    if not facts.get("sliding_window") or facts.get("use_sliding_window") is False:
        return [_Keeps.ALL] * layers
    if "sliding_window_pattern" in facts:
        period = positive_int(facts, "sliding_window_pattern")
        return [_Keeps.WINDOW if (index + 1) % period else _Keeps.ALL for index in range(layers)]
    first = first_int(facts, "max_window_layers", minimum=0) or 0
    return [_Keeps.WINDOW if index >= first else _Keeps.ALL for index in range(layers)]


def _layer(facts: Facts, window: int | None) -> LayerKVConfig:
    # MiMo-V2 states the sizes of its sliding layers apart (swa_...), Gemma 4 those of its full layers (...global_...).
    sliding = window is not None
    head_size = first_int(facts, "swa_head_dim" if sliding else "global_head_dim", "head_dim") or _hidden_per_head(
        facts
    )
    return LayerKVConfig(
        num_kv_heads=positive_int(
            facts,
            "swa_num_key_value_heads" if sliding else "num_global_key_value_heads",
            "num_key_value_heads",
            "num_attention_heads",
        ),
        head_size=head_size,
        head_size_v=first_int(facts, *(["swa_v_head_dim"] if sliding else []), "v_head_dim") or head_size,
        sliding_window=window,
    )


def _hidden_per_head(facts: Facts) -> int:
    if "hidden_size" not in facts or "num_attention_heads" not in facts:
        raise KVCacheValueError("config: got no 'head_dim', expected it, or 'hidden_size' and 'num_attention_heads'")
    hidden, heads = positive_int(facts, "hidden_size"), positive_int(facts, "num_attention_heads")
    if hidden % heads:
        raise KVCacheValueError(
            f"config: got no 'head_dim', and hidden_size={hidden}; expected a multiple of num_attention_heads={heads}"
        )
    return hidden // heads


def _in_words(facts: Facts, model: ModelKVConfig) -> str:
    """What the plain keys were taken to say."""
    alike = collections.Counter(model.layers)
    words = [
        f"{count} of {model.num_hidden_layers} layers with {layer.num_kv_heads} KV heads of {layer.head_size}"
        + (f" and {layer.head_size_v}" if layer.head_size_v != layer.head_size else "")
        + " elements"
        + (f" and a window of {layer.sliding_window}" if layer.sliding_window else "")
        for layer, count in alike.most_common(4)
    ]
    words += ["others"] * (len(alike) > 4)
    words += ["as many KV heads as num_attention_heads"] * ("num_key_value_heads" not in facts)
    words += ["heads of hidden_size / num_attention_heads"] * ("head_dim" not in facts)
    return ", ".join(words)


def _shard_layer(layer: LayerKVConfig, tensor_parallel: int) -> LayerKVConfig:
    heads = layer.num_kv_heads
    if tensor_parallel < 1 or (heads % tensor_parallel and tensor_parallel % heads):
        raise KVCacheValueError(
            f"tensor_parallel: got {shown(tensor_parallel)}, expected a divisor or a multiple of a layer's {heads} KV"
            " heads"
        )
    return dataclasses.replace(layer, num_kv_heads=max(1, heads // tensor_parallel))
