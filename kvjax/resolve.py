"""From what a user asks for, a checkpoint declares and a model computes in, to the dtype of each layer's KV cache."""

from __future__ import annotations

import dataclasses
import enum
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoint import DeclaredKVCache, read_declared_kv_cache
from kvjax.dtypes import KVCacheDType, parse_kv_cache_dtype, parse_model_dtype
from kvjax.errors import KVCacheValueError, KVCacheWarning
from kvjax.layer_choice import requested_dtypes, skipped_layers
from kvjax.layer_names import in_ranges
from kvjax.layouts import CacheLayout, VScaleLayout
from kvjax.model_config import AttentionKind, LayerKVConfig, ModelKVConfig
from kvjax.spec import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

type RequestedKVCacheDType = str | KVCacheDType | Mapping[int | str, str | KVCacheDType]
"""What a user asks for: a dtype of every layer, or dtypes by layers; `resolve_layer_dtypes` says how."""


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
      KVCacheValueError: an unknown `requested`, and for `"auto"` a scheme that kvjax cannot store, one with a dtype for
        each layer, or a model dtype that no cache dtype stands for; the message names it.
      KVCacheTypeError: `requested` or `quantization_config` is of another type.

    Warns:
      KVCacheWarning: for `"auto"`, the checkpoint declares an algorithm of ModelOpt's that kvjax does not know.
    """
    dtype = parse_kv_cache_dtype(requested)
    if dtype is not KVCacheDType.AUTO:
        return ResolvedKVCacheDType(dtype, DTypeSource.USER)
    declared = read_declared_kv_cache(quantization_config)
    if declared is None:
        return ResolvedKVCacheDType(parse_model_dtype(model_dtype), DTypeSource.MODEL)
    if declared.dtype is None:
        raise KVCacheValueError(
            "kv_cache_quantized_layers: got a KV cache dtype for each layer, expected one for all layers;"
            " resolve_layer_dtypes and resolve_layer_specs read it"
        )
    return ResolvedKVCacheDType(declared.dtype, DTypeSource.CHECKPOINT, declared.per_head_scales)


def resolve_layer_dtypes(
    model: ModelKVConfig, requested: RequestedKVCacheDType = "auto", *, skip_layers: Iterable[int | str] = ()
) -> tuple[ResolvedKVCacheDType, ...]:
    """The dtype of each of `model.layers`, the layers that have a KV cache. A skipped layer keeps the model dtype.

    Args:
      model: the layers, the model dtype and the checkpoint's declaration.
      requested: as in `resolve_kv_cache_dtype`, for all layers; or a mapping with that for some, such as
        `{"0-3": "bfloat16", "sliding_window": "fp8", "*": "nvfp4"}`. Its keys are the model's layer indices from 0 as
        ints or decimal strings, ranges of them with both ends, attention kinds, and `"*"` for the other layers. An
        index or a range comes before a kind, a kind before `"*"`. A layer that no key names is `"auto"`.
      skip_layers: indices, ranges and kinds (`"sliding_window"`, `"full_attention"`, each of which stands for every
        layer of its kind) of the layers that keep the model dtype, whatever is requested.

    Raises:
      KVCacheValueError: as `resolve_kv_cache_dtype`; and an index out of range or of a layer without a KV cache, a
        name that no layer has, or two dtypes for a layer.
      KVCacheTypeError: as `resolve_kv_cache_dtype`; and a skipped layer or a key that is neither an int (a bool is
        none) nor a string, or a bare string for `skip_layers`.

    Warns:
      KVCacheWarning: for `"auto"`, as `resolve_kv_cache_dtype`; and the checkpoint declares dtypes for layers that the
        model has not.
    """
    skipped = skipped_layers(skip_layers, model)
    asked = requested_dtypes(requested, model)
    declared = read_declared_kv_cache(model.quantization_config) if KVCacheDType.AUTO in asked.values() else None
    if declared is not None:
        _warn_of_other_layers(declared, model)
    unquantized = ResolvedKVCacheDType(model.dtype, DTypeSource.MODEL)
    return tuple(
        unquantized if index in skipped else _resolve_layer(asked[index], declared, index) or unquantized
        for index in model.layer_indices
    )


def _resolve_layer(asked: KVCacheDType, declared: DeclaredKVCache | None, index: int) -> ResolvedKVCacheDType | None:
    """A layer's dtype, None where neither the user nor the checkpoint chose one."""
    if asked is not KVCacheDType.AUTO:
        return ResolvedKVCacheDType(asked, DTypeSource.USER)
    dtype = declared.of_layer(index) if declared is not None else None
    if declared is None or dtype is None:
        return None
    return ResolvedKVCacheDType(dtype, DTypeSource.CHECKPOINT, declared.per_head_scales)


def _warn_of_other_layers(declared: DeclaredKVCache, model: ModelKVConfig) -> None:
    if others := sorted(set(declared.layers) - set(model.layer_indices)):
        warnings.warn(
            f"kv_cache_quantized_layers: the checkpoint declares a quantized cache for layers {in_ranges(others)}, of"
            " which the model keeps none; passed over",
            KVCacheWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),  # the caller's line, from whatever depth
        )


def resolve_layer_specs(
    model: ModelKVConfig,
    requested: RequestedKVCacheDType = "auto",
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
    has_block_scales = [dtype.byte_format is KVCacheDType.NVFP4 for dtype in dtypes]
    without_scales = VScaleLayout.LINEAR if any(has_block_scales) else v_scale_layout
    return tuple(
        _layer_spec(
            layer,
            dtype=dtype,
            model_dtype=model.dtype,
            block_size=block_size,
            layout=layout,
            v_scale_layout=v_scale_layout if has_scales else without_scales,
        )
        for layer, dtype, has_scales in zip(model.layers, dtypes, has_block_scales, strict=True)
    )


def _layer_spec(layer: LayerKVConfig, **fields: Any) -> AttentionSpec:
    fields |= {"num_kv_heads": layer.num_kv_heads, "head_size": layer.head_size, "head_size_v": layer.head_size_v}
    if layer.kind is AttentionKind.SLIDING_WINDOW:
        return SlidingWindowSpec(sliding_window=layer.sliding_window, **fields)
    return FullAttentionSpec(**fields)
