"""Reads keys of a configuration: ints, flags, and lists with an entry per layer. Errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.errors import KVCacheValueError, got_expected, shown
from kvjax.spec import MAX_SIZE

MAX_LAYERS = 10_000
"""Limit on a model's layers: far above any known model, it bounds what an invalid number allocates."""

PLAIN_KEYS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "v_head_dim",
    "layer_types",
    "sliding_window",
)
"""The keys of most models; `kvjax.model_config` reads these and a few others."""

type Facts = dict[str, Any]
"""A configuration's keys and values, without those that are null."""


def num_layers(facts: Facts) -> int:
    """Returns the number of layers, at most `MAX_LAYERS`."""
    value = positive_int(facts, "num_hidden_layers")
    if value > MAX_LAYERS:
        raise KVCacheValueError(f"config.num_hidden_layers: got {value}, expected an int of at most {MAX_LAYERS}")
    return value


def positive_int(facts: Facts, *keys: str) -> int:
    """Returns the value of the first of `keys` that is present."""
    value = first_int(facts, *keys)
    if value is None:
        raise KVCacheValueError(f"config: got no {' or '.join(repr(key) for key in keys)}, expected a positive int")
    return value


def first_int(facts: Facts, *keys: str, minimum: int = 1) -> int | None:
    """Returns the value of the first of `keys` that is present; None if none is."""
    for key in keys:
        if key in facts:
            return as_size(f"config.{key}", facts[key], minimum)
    return None


def as_size(what: str, value: object, minimum: int) -> int:
    """Returns `value` if it is an int from `minimum` to `MAX_SIZE`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise KVCacheValueError(f"{what}: got {shown(value)}, expected an int of at least {minimum}")
    if value > MAX_SIZE:
        raise KVCacheValueError(f"{what}: got {shown(value)}, expected an int of at most {MAX_SIZE}")
    return value


def flag(facts: Facts, key: str, default: bool) -> bool:
    """Returns a bool, `default` if the key is missing."""
    value = facts.get(key, default)
    if not isinstance(value, bool):
        raise KVCacheValueError(f"config.{key}: got {shown(value)}, expected true or false")
    return value


def indices(facts: Facts, key: str, layers: int) -> frozenset[int]:
    """Returns a list of layer indices, from 0, as a set."""
    value = facts.get(key)
    if not isinstance(value, (list, tuple)):
        raise KVCacheValueError(f"config.{key}: got {shown(value)}, expected a list of layer indices")
    for position, index in enumerate(value):
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < layers:
            raise KVCacheValueError(
                f"config.{key}[{position}]: got {shown(index)}, expected a layer index from 0 to {layers - 1}"
            )
    return frozenset(value)


def per_layer[Meaning](facts: Facts, key: str, layers: int, meaning: Mapping[Any, Meaning]) -> list[Meaning]:
    """Returns a list with an entry per layer, each mapped to its meaning."""
    entries = facts[key]
    # Surplus entries describe the layers of a draft head, which has a cache of its own.
    if not isinstance(entries, (list, tuple)) or len(entries) < layers:
        raise KVCacheValueError(
            f"config.{key}: got {shown(entries)}, expected a list with an entry for each of {layers} layers"
        )
    for index, entry in enumerate(entries[:layers]):
        if not isinstance(entry, (str, int)) or entry not in meaning:
            raise KVCacheValueError(got_expected(f"config.{key}[{index}]", entry, meaning))
    return [meaning[entry] for entry in entries[:layers]]
