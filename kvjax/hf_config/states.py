"""The size of what recurrent layers keep of a sequence: it does not grow with the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import KVCacheValueError
from kvjax.hf_config.keys import Facts, as_size, num_layers, positive_int
from kvjax.hf_config.plain_keys import language_model
from kvjax.hf_config.translate import LINEAR
from kvjax.spec import MAX_SIZE

_STATE_ITEMSIZE = 4
"""Engines keep recurrent states in float32, those of convolutions in the model's dtype."""

_WITH_STATES = frozenset({LINEAR, "conv", "mamba", "hybrid", "hybrid_sliding"})


def state_bytes(config: Mapping[str, Any], facts: Facts, itemsize: int) -> int | None:
    """Returns the bytes of one sequence's states in all layers; 0 without recurrent layers, None if unknown.

    Args:
      config: the whole configuration.
      facts: its plain keys.
      itemsize: bytes of an element of the model's dtype.
    """
    part, model_type = language_model(config)
    layer_types = facts.get("layer_types", ())
    if isinstance(model_type, str) and model_type in _SIZES:
        count = layer_types.count(LINEAR) if "layer_types" in facts else num_layers(facts)
        size = count * _SIZES[model_type](part, itemsize)
        if size > MAX_SIZE:
            raise KVCacheValueError(f"config: got states of {size} bytes, expected at most {MAX_SIZE}")
        return size
    return None if _WITH_STATES.intersection(layer_types) else 0


def _gated_delta_net(part: Mapping[str, Any], itemsize: int) -> int:
    """Qwen3-Next and Qwen3.5, a layer: the last inputs of a convolution, and a matrix for each value head."""
    key_heads, value_heads = (_size(part, f"linear_num_{kind}_heads", n) for kind, n in (("key", 16), ("value", 32)))
    key_size, value_size = (_size(part, f"linear_{kind}_head_dim", 128) for kind in ("key", "value"))
    channels = 2 * key_heads * key_size + value_heads * value_size
    convolution = channels * (_size(part, "linear_conv_kernel_dim", 4) - 1)
    return convolution * itemsize + value_heads * key_size * value_size * _STATE_ITEMSIZE


def _mamba2(part: Mapping[str, Any], itemsize: int) -> int:
    """Falcon-H1, a layer: the last inputs of a convolution, and a matrix for each head."""
    if part.get("mamba_d_ssm", 1024) is None:
        inner = _size(part, "mamba_expand", 2) * positive_int(dict(part), "hidden_size")
    else:
        inner = _size(part, "mamba_d_ssm", 1024)
    state = _size(part, "mamba_d_state", 256)
    channels = inner + 2 * _size(part, "mamba_n_groups", 1) * state
    return channels * (_size(part, "mamba_d_conv", 4) - 1) * itemsize + inner * state * _STATE_ITEMSIZE


def _size(part: Mapping[str, Any], key: str, default: int) -> int:
    value = part.get(key)
    return as_size(f"config.{key}", default if value is None else value, 1)


_SIZES: Mapping[str, Callable[[Mapping[str, Any], int], int]] = {
    "falcon_h1": _mamba2,
    "qwen3_5_moe_text": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_next": _gated_delta_net,
}
"""The bytes of a recurrent layer's state, by model type, from its keys and the size of the model's dtype."""
