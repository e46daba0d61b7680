"""Reads a key of a configuration: an int, or a list with an entry for each layer. Errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.errors import KVCacheValueError, got_expected, shown
from kvjax.spec import MAX_SIZE

MAX_LAYERS = 10_000
"""Layers of a model that is read: many times those of any known, and a bound on what a mistaken number allocates."""

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
"""The keys of most models; `kvjax.model_config` reads these and a few more."""

type Facts = dict[str, Any]
"""A configuration's keys and values; a key that stands there with null is left out."""


def num_layers(facts: Facts) -> int:
    """The number of layers, bounded."""
    value = positive_int(facts, "num_hidden_layers")
    if value > MAX_LAYERS:
        raise KVCacheValueError(f"config.num_hidden_layers: got {value}, expected an int of at most {MAX_LAYERS}")
    return value


def positive_int(facts: Facts, *keys: str) -> int:
    """The value of the first of `keys` that is there."""
    value = first_int(facts, *keys)
    if value is None:
        raise KVCacheValueError(f"config: got no {' or '.join(repr(key) for key in keys)}, expected a positive int")
    return value


def first_int(facts: Facts, *keys: str, minimum: int = 1) -> int | None:
    """The value of the first of `keys` that is there; None where none is."""
    for key in keys:
        if key in facts:
            return as_size(f"config.{key}", facts[key], minimum)
    return None


def as_size(what: str, value: object, minimum: int) -> int:
    """`value` where it is an int from `minimum` to `MAX_SIZE`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise KVCacheValueError(f"{what}: got {shown(value)}, expected an int of at least {minimum}")
    if value > MAX_SIZE:
        raise KVCacheValueError(f"{what}: got {shown(value)}, expected an int of at most {MAX_SIZE}")
    return value


def flag(facts: Facts, key: str, default: bool) -> bool:
    """A bool, `default` where the key is not there."""
    value = facts.get(key, default)
    if not isinstance(value, bool):
        raise KVCacheValueError(f"config.{key}: got {shown(value)}, expected true or false")
    return value


def indices(facts: Facts, key: str, layers: int) -> frozenset[int]:
    """A list of layers, by their indices from 0."""
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
    """A list with an entry for each layer, each replaced by its meaning."""
    entries = facts[key]
    # More entries than layers describe the layers of a draft head, which has a cache of its own.
    if not isinstance(entries, (list, tuple)) or len(entries) < layers:
        raise KVCacheValueError(
            f"config.{key}: got {shown(entries)}, expected a list with an entry for each of {layers} layers"
        )
    for index, entry in enumerate(entries[:layers]):
        if not isinstance(entry, (str, int)) or entry not in meaning:
            raise KVCacheValueError(got_expected(f"config.{key}[{index}]", entry, meaning))
    return [meaning[entry] for entry in entries[:layers]]
