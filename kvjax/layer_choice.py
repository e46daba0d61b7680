"""Parses users' choices of layers: indices, ranges, kinds of attention and `"*"`."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import SupportsIndex

from kvjax.dtypes import KVCacheDType, parse_kv_cache_dtype
from kvjax.errors import KVCacheTypeError, KVCacheValueError, got_expected, shown
from kvjax.layer_names import MAX_DIGITS
from kvjax.model_config import ModelKVConfig, explain_layer_type

ALL_LAYERS = "*"
"""In a mapping of dtypes: the layers without another key."""

_RANGE = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}})(?:-([0-9]{{1,{MAX_DIGITS}}}))?")


def skipped_layers(skip_layers: Iterable[int | str], model: ModelKVConfig) -> frozenset[int]:
    """Returns the indices of the layers that `skip_layers` names.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `resolve_layer_dtypes`.
    """
    if isinstance(skip_layers, str) or not isinstance(skip_layers, Iterable):
        raise KVCacheTypeError(f"skip_layers: got {shown(skip_layers)}, expected a sequence of layer indices and kinds")
    return frozenset().union(*(_named("skip_layers", entry, model) for entry in skip_layers))


def requested_dtypes(
    requested: str | KVCacheDType | Mapping[int | str, str | KVCacheDType], model: ModelKVConfig
) -> dict[int, KVCacheDType]:
    """Returns the requested dtype of each layer that has a cache, by index; `AUTO` where none is requested.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `resolve_layer_dtypes`.
    """
    if not isinstance(requested, Mapping):
        return dict.fromkeys(model.layer_indices, parse_kv_cache_dtype(requested))
    # The more specific key wins: an index, then a kind, then "*".
    by_index: dict[int, tuple[object, KVCacheDType]] = {}
    by_kind: dict[int, KVCacheDType] = {}
    default = KVCacheDType.AUTO
    for entry, name in requested.items():
        dtype = parse_kv_cache_dtype(name)
        if entry == ALL_LAYERS:
            default = dtype
            continue
        layers = _named("kv_cache_dtype", entry, model, ALL_LAYERS)
        if isinstance(entry, str) and not _RANGE.fullmatch(entry):
            by_kind |= dict.fromkeys(layers, dtype)
            continue
        for layer in sorted(layers):
            other, chosen = by_index.setdefault(layer, (entry, dtype))
            if chosen is not dtype:
                raise KVCacheValueError(
                    f"kv_cache_dtype: got {chosen.value!r} for {shown(other)} and {dtype.value!r} for {shown(entry)},"
                    f" expected one dtype for layer {layer}"
                )
    chosen_by_index = {layer: dtype for layer, (_, dtype) in by_index.items()}
    return dict.fromkeys(model.layer_indices, default) | by_kind | chosen_by_index


def _named(what: str, entry: object, model: ModelKVConfig, *others: str) -> frozenset[int]:
    """Returns the layers that an index, a range or a kind names; raises if there are none."""
    kinds = dict(zip(model.layer_indices, (layer.kind for layer in model.layers), strict=True))
    first, last = _as_range(what, entry) or (0, -1)
    named = frozenset(index for index, kind in kinds.items() if first <= index <= last or kind == entry)
    if not named or last >= model.num_hidden_layers:
        cached = " that has a KV cache" if model.layers_without_cache else ""
        accepted = [f"a layer index from 0 to {model.num_hidden_layers - 1}{cached}", "a range such as 0-3"]
        raise KVCacheValueError(
            got_expected(
                what,
                entry,
                [*accepted, *dict.fromkeys(kinds.values()), *others],
                hint=explain_layer_type(entry),
            )
        )
    return named


def _as_range(what: str, entry: object) -> tuple[int, int] | None:
    """Returns the first and last index of an int, a decimal string or a range; None for other strings."""
    if isinstance(entry, str):
        match = _RANGE.fullmatch(entry)
        return (int(match[1]), int(match[2] or match[1])) if match else None
    if isinstance(entry, bool) or not isinstance(entry, SupportsIndex):
        raise KVCacheTypeError(
            f"{what}: got {shown(entry)} of type {type(entry).__name__}, expected an int or a string for each layer"
        )
    index = operator.index(entry)
    return index, index
