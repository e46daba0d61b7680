"""`ModelKVConfig`: what a model's KV cache depends on, read from a Hugging Face `config.json`."""

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
from kvjax.hf_config.states import state_bytes
from kvjax.spec import as_int


class AttentionKind(enum.StrEnum):
    """Which earlier tokens a layer's queries attend to; the values are names for `skip_layers`."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"


@dataclasses.dataclass(frozen=True)
class LayerKVConfig:
    """One layer's keys and values: `[num_kv_heads, head_size]` and `[num_kv_heads, head_size_v]` per token.

    `sliding_window`: tokens that a query attends to, its own included; None for all. `is_mla`: whether the layer uses
    multi-head latent attention, stored as in `MLAAttentionSpec`. `num_kv_heads` is then 1. The first `head_size_v`
    elements of a key are the token's latent, which is also the value; the rest is the rope key.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int
    sliding_window: int | None = None
    is_mla: bool = False

    @property
    def kind(self) -> AttentionKind:
        """The layer's kind of attention."""
        return AttentionKind.FULL_ATTENTION if self.sliding_window is None else AttentionKind.SLIDING_WINDOW


@dataclasses.dataclass(frozen=True)
class ModelKVConfig:
    """What a model's KV cache depends on.

    Attributes:
      layers: heads and window of each layer that has a KV cache, in the model's order.
      dtype: the model's compute dtype; set from anything that `parse_model_dtype` takes.
      quantization_config: the checkpoint's, unparsed; None without one.
      layer_indices: the model's index of each of `layers`. Default: every layer has a cache.
      num_hidden_layers: number of the model's layers, with or without a cache.
      state_bytes: bytes that recurrent layers keep of one sequence, whatever its length; None if unknown.
    """

    layers: tuple[LayerKVConfig, ...]
    dtype: KVCacheDType
    quantization_config: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    layer_indices: tuple[int, ...] = ()
    num_hidden_layers: int = 0
    state_bytes: int | None = 0

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
        """The indices of the layers without keys and values of their own."""
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

        `docs/models.md` lists the supported model types. Other types are read by the plain keys, with a warning, unless
        they have keys that suggest another kind of cache. A configuration without a `model_type` is read the same way;
        it warns only about keys that may matter and are not read.

        Chunked attention (Llama 4) is treated as full attention: its cache also keeps every token.

        Args:
          config: the parsed JSON; never modified, kept parts are copied.
          model_dtype: the model's compute dtype, instead of the configuration's `dtype` or `torch_dtype`.
          quantization_config: instead of the configuration's, the content of ModelOpt's `hf_quant_config.json`.

        Raises:
          KVCacheValueError: a missing or invalid key; the message names it and what is accepted. Also a model that
            caches something other than its layers' keys and values (no tokens, an encoder's tokens too, or more than
            keys and values), or that has more than `MAX_LAYERS` layers.
          KVCacheTypeError: `config` is not a mapping.

        Warns:
          KVCacheWarning: assumptions about an unknown model type, or one that engines cache in several ways.
        """
        if not isinstance(config, Mapping):
            hint = ": config.to_dict()" if hasattr(config, "to_dict") else ""
            raise KVCacheTypeError(
                f"config: got {shown(config)} of type {type(config).__name__}, expected a mapping{hint}"
            )
        part, facts, doubts = plain_keys(config)
        layers = _layers(facts)
        if quantization_config is None:
            # Of two, an empty one declares nothing.
            declared = [of["quantization_config"] for of in (part, config) if of.get("quantization_config") is not None]
            quantization_config = next((each for each in declared if each != {}), {} if declared else None)
        dtype = _dtype(config, part, facts) if model_dtype is None else parse_model_dtype(model_dtype)
        model = cls(
            layers=tuple(layers.values()),
            dtype=dtype,
            quantization_config=_copy(quantization_config),
            layer_indices=tuple(layers),
            num_hidden_layers=num_layers(facts),
            state_bytes=state_bytes(config, facts, dtype.info.storage_dtype.itemsize),
        )
        if doubts.warning:
            warnings.warn(
                f"{doubts.warning}; assumed {_assumptions(facts, model)}" if doubts.guessed else doubts.warning,
                KVCacheWarning,
                skip_file_prefixes=(os.path.dirname(__file__),),  # attribute it to the caller's line
            )
        return model

    def shard(self, tensor_parallel: int) -> Self:
        """Returns one of `tensor_parallel` devices' share: an equal part of each layer's KV heads, or one replicated.

        Raises:
          KVCacheValueError: a layer's heads do not divide equally.
          KVCacheTypeError: `tensor_parallel` is not an int.
        """
        devices = as_int("tensor_parallel", tensor_parallel)
        layers = tuple(_shard_layer(layer, devices) for layer in self.layers)
        state_bytes = None if self.state_bytes is None else -(-self.state_bytes // devices)
        return dataclasses.replace(self, layers=layers, state_bytes=state_bytes)


def _copy(quantization_config: Any) -> Any:
    try:
        return copy.deepcopy(quantization_config)
    except RecursionError:
        raise KVCacheValueError(
            "config.quantization_config: got one nested too deeply to copy, expected a checkpoint's declaration"
        ) from None


def _dtype(*parts: Mapping[str, Any]) -> KVCacheDType:
    # transformers loads a model in the dtype beside text_config, not the one inside.
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None:
                return parse_model_dtype(part[key])
    raise KVCacheValueError("config: got no 'dtype' or 'torch_dtype', expected one of them, or model_dtype given")


class _Keeps(enum.Enum):
    """Which tokens a layer caches."""

    ALL = enum.auto()
    WINDOW = enum.auto()
    NOTHING = enum.auto()


_LAYER_TYPES = {
    "full_attention": _Keeps.ALL,
    "chunked_attention": _Keeps.ALL,
    "sliding_attention": _Keeps.WINDOW,
    # Attention and a recurrent state, which `state_bytes` counts.
    "hybrid": _Keeps.ALL,
    "hybrid_sliding": _Keeps.WINDOW,
    # A state of constant size.
    "linear_attention": _Keeps.NOTHING,
    "conv": _Keeps.NOTHING,
    "mamba": _Keeps.NOTHING,
    # No attention, or attention to other layers' caches or to other tokens.
    "moe": _Keeps.NOTHING,
    "mlp": _Keeps.NOTHING,
    "shared": _Keeps.NOTHING,
    "cross_attention": _Keeps.NOTHING,
    # transformers' name before version 5.
    "attention": _Keeps.ALL,
}
_HYBRID_LAYER_PATTERN = {0: _Keeps.ALL, 1: _Keeps.WINDOW}


def explain_layer_type(name: object) -> str | None:
    """Returns what transformers' name of a layer type is in kvjax, for a message; None for any other name."""
    kept = _LAYER_TYPES.get(name) if isinstance(name, str) else None
    if kept is None or name in list(AttentionKind):
        return None
    if kept is _Keeps.NOTHING:
        return f"{name} layers have no KV cache of their own"
    kind = AttentionKind.SLIDING_WINDOW if kept is _Keeps.WINDOW else AttentionKind.FULL_ATTENTION
    return f"{name} layers are named {kind.value}"


def _layers(facts: Facts) -> dict[int, LayerKVConfig]:
    """Returns the layers that cache keys and values, by index."""
    keeps = _kept_tokens(facts, num_layers(facts))
    window = positive_int(facts, "sliding_window") if _Keeps.WINDOW in keeps else None
    overrides: Mapping[int, Facts] = facts.get("per_layer_config", {})
    layers = {
        index: _layer(facts | overrides.get(index, {}), window if kept is _Keeps.WINDOW else None)
        for index, kept in enumerate(keeps)
        if kept is not _Keeps.NOTHING
    }
    if not layers:
        raise KVCacheValueError("config: got no layer that caches keys and values, expected at least one")
    return layers


def _kept_tokens(facts: Facts, layers: int) -> list[_Keeps]:
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
    # MiMo-V2 has separate sizes for sliding layers (swa_...), Gemma 4 for full layers (...global_...).
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
        is_mla=facts.get("is_mla") is True,
    )


def _hidden_per_head(facts: Facts) -> int:
    if "hidden_size" not in facts or "num_attention_heads" not in facts:
        raise KVCacheValueError("config: got no 'head_dim', expected it, or 'hidden_size' and 'num_attention_heads'")
    hidden, heads = positive_int(facts, "hidden_size"), positive_int(facts, "num_attention_heads")
    if hidden % heads:
        raise KVCacheValueError(
            f"config: got no 'head_dim' and hidden_size={hidden}, expected a multiple of num_attention_heads={heads}"
        )
    return hidden // heads


def _assumptions(facts: Facts, model: ModelKVConfig) -> str:
    """Describes what the plain keys were taken to mean."""
    counts = collections.Counter(model.layers)
    parts = [
        f"{count} of {model.num_hidden_layers} layers with {layer.num_kv_heads} KV heads of {layer.head_size}"
        + (f" and {layer.head_size_v}" if layer.head_size_v != layer.head_size else "")
        + " elements"
        + (f" and a window of {layer.sliding_window}" if layer.sliding_window else "")
        for layer, count in counts.most_common(4)
    ]
    parts += ["others"] * (len(counts) > 4)
    parts += ["as many KV heads as num_attention_heads"] * ("num_key_value_heads" not in facts)
    parts += ["heads of hidden_size / num_attention_heads"] * ("head_dim" not in facts)
    return ", ".join(parts)


def _shard_layer(layer: LayerKVConfig, tensor_parallel: int) -> LayerKVConfig:
    heads = layer.num_kv_heads
    if tensor_parallel < 1 or (heads % tensor_parallel and tensor_parallel % heads):
        raise KVCacheValueError(
            f"tensor_parallel: got {shown(tensor_parallel)}, expected a divisor or a multiple of a layer's {heads} KV"
            " heads"
        )
    return dataclasses.replace(layer, num_kv_heads=max(1, heads // tensor_parallel))
