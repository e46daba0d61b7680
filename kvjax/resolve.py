"""From what a user asks for, a checkpoint declares and a model computes in, to the dtype of each layer's KV cache."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

from kvjax.checkpoint import read_declared_kv_cache
from kvjax.dtypes import KVCacheDType, parse_kv_cache_dtype, parse_model_dtype
from kvjax.errors import KVCacheTypeError, KVCacheValueError, got_expected, shown
from kvjax.layouts import CacheLayout, VScaleLayout
from kvjax.model_config import AttentionKind, LayerKVConfig, ModelKVConfig
from kvjax.spec import AttentionSpec, FullAttentionSpec, SlidingWindowSpec


class DTypeSource(enum.StrEnum):
    """Who chose a layer's dtype."""

    USER = "user"
    CHECKPOINT = "checkpoint"
    MODEL = "model"


@dataclasses.dataclass(frozen=True)
class ResolvedKVCacheDType:
    """A KV cache dtype and where it comes from.

    `dtype` is never `AUTO`. `per_head_scales`: the checkpoint that chose the dtype holds `k_scale` and `v_scale` as
    `[num_kv_heads]`; otherwise they are scalars.
    """

    dtype: KVCacheDType
    source: DTypeSource
    per_head_scales: bool = False


def resolve_kv_cache_dtype(
    requested: str | KVCacheDType, *, model_dtype: object, quantization_config: Mapping[str, Any] | None = None
) -> ResolvedKVCacheDType:
    """The dtype of a model's KV cache.

    An explicit `requested` always wins, and the other arguments are then not looked at. `"auto"` takes what the
    checkpoint declares, and where it declares nothing, the model's dtype.

    Args:
      requested: a string of `ACCEPTED_KV_CACHE_DTYPES` or a `KVCacheDType`.
      model_dtype: what the model computes in, as `parse_model_dtype` takes it.
      quantization_config: the checkpoint's, of `config.json` or `hf_quant_config.json`; never modified.

    Raises:
      KVCacheValueError: an unknown `requested`, and for `"auto"` a scheme that kvjax cannot store or a model dtype that
        no cache dtype stands for; the message names it.
      KVCacheTypeError: `requested` or `quantization_config` is of another type.

    Warns:
      KVCacheWarning: for `"auto"`, the checkpoint declares an algorithm of ModelOpt's that kvjax does not know.
    """
    dtype = parse_kv_cache_dtype(requested)
    if dtype is not KVCacheDType.AUTO:
        return ResolvedKVCacheDType(dtype, DTypeSource.USER)
    declared = read_declared_kv_cache(quantization_config)
    if declared is not None:
        return ResolvedKVCacheDType(declared.dtype, DTypeSource.CHECKPOINT, declared.per_head_scales)
    return ResolvedKVCacheDType(parse_model_dtype(model_dtype), DTypeSource.MODEL)


def resolve_layer_dtypes(
    model: ModelKVConfig, requested: str | KVCacheDType = "auto", *, skip_layers: Iterable[int | str] = ()
) -> tuple[ResolvedKVCacheDType, ...]:
    """The dtype of each of `model.layers`, the layers that have a KV cache. A skipped layer keeps the model dtype.

    Args:
      model: the layers, the model dtype and the checkpoint's declaration.
      requested: as in `resolve_kv_cache_dtype`.
      skip_layers: the model's layer indices from 0 as ints or decimal strings, and attention kinds
        (`"sliding_window"`, `"full_attention"`), each of which stands for every layer of its kind.

    Raises:
      KVCacheValueError: as `resolve_kv_cache_dtype`; and an index out of range or of a layer without a KV cache, or a
        name that no layer has.
      KVCacheTypeError: as `resolve_kv_cache_dtype`; and a skipped layer that is neither an int (a bool is none) nor a
        string, or a bare string for `skip_layers`.
    """
    skipped = _skipped_layers(skip_layers, model)
    chosen = resolve_kv_cache_dtype(requested, model_dtype=model.dtype, quantization_config=model.quantization_config)
    unskipped = ResolvedKVCacheDType(model.dtype, DTypeSource.MODEL)
    return tuple(unskipped if index in skipped else chosen for index in model.layer_indices)


def resolve_layer_specs(
    model: ModelKVConfig,
    requested: str | KVCacheDType = "auto",
    *,
    skip_layers: Iterable[int | str] = (),
    block_size: int = 16,
    layout: str | CacheLayout = CacheLayout.NHD,
    v_scale_layout: str | VScaleLayout = VScaleLayout.LINEAR,
) -> tuple[AttentionSpec, ...]:
    """One spec for each of `model.layers`, with the dtype that `resolve_layer_dtypes` gives it.

    `layout` is every layer's, `v_scale_layout` that of the NVFP4 layers.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `resolve_layer_dtypes`; and what a spec refuses, such as a head size that
        NVFP4 cannot store.
    """
    dtypes = [resolved.dtype for resolved in resolve_layer_dtypes(model, requested, skip_layers=skip_layers)]
    # A layer skipped among NVFP4 ones has no V scales to lay out; where no layer has any, the spec refuses the request.
    without_scales = VScaleLayout.LINEAR if KVCacheDType.NVFP4 in dtypes else v_scale_layout
    return tuple(
        _layer_spec(
            layer,
            dtype=dtype,
            model_dtype=model.dtype,
            block_size=block_size,
            layout=layout,
            v_scale_layout=v_scale_layout if dtype is KVCacheDType.NVFP4 else without_scales,
        )
        for layer, dtype in zip(model.layers, dtypes, strict=True)
    )


def _layer_spec(layer: LayerKVConfig, **fields: Any) -> AttentionSpec:
    fields |= {"num_kv_heads": layer.num_kv_heads, "head_size": layer.head_size, "head_size_v": layer.head_size_v}
    if layer.kind is AttentionKind.SLIDING_WINDOW:
        return SlidingWindowSpec(sliding_window=layer.sliding_window, **fields)
    return FullAttentionSpec(**fields)


def _skipped_layers(skip_layers: Iterable[int | str], model: ModelKVConfig) -> frozenset[int]:
    if isinstance(skip_layers, str) or not isinstance(skip_layers, Iterable):
        raise KVCacheTypeError(f"skip_layers: got {shown(skip_layers)}, expected a sequence of layer indices and kinds")
    kinds = dict(zip(model.layer_indices, (layer.kind for layer in model.layers), strict=True))
    cached = " that has a KV cache" if model.layers_without_cache else ""
    accepted = [f"a layer index from 0 to {model.num_hidden_layers - 1}{cached}", *dict.fromkeys(kinds.values())]
    skipped: set[int] = set()
    for entry in skip_layers:
        as_index = _as_index(entry)
        named = {index for index, kind in kinds.items() if index == as_index or kind == entry}
        if not named:
            raise KVCacheValueError(got_expected("skip_layers", entry, accepted))
        skipped |= named
    return frozenset(skipped)


def _as_index(entry: object) -> int | None:
    """The layer index that an int or a decimal string stands for; None for any other string."""
    if isinstance(entry, str):
        # No layer has an index of many digits, and Python reads no int of thousands.
        return int(entry) if entry.isascii() and entry.isdecimal() and len(entry) < 20 else None
    if isinstance(entry, bool) or not isinstance(entry, SupportsIndex):
        raise KVCacheTypeError(
            f"skip_layers: got {shown(entry)} of type {type(entry).__name__}, expected an int or a string for each"
            " layer"
        )
    return operator.index(entry)
