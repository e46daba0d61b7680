"""Resolves the dtype of each layer's KV cache from the user's request, the checkpoint and the model."""

from __future__ import annotations

import dataclasses
import enum
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoint import DeclaredKVCache, read_declared_kv_cache
from kvjax.dtypes import MLA_KV_CACHE_DTYPES, KVCacheDType, parse_kv_cache_dtype, parse_model_dtype
from kvjax.errors import KVCacheTypeError, KVCacheValueError, KVCacheWarning, got_expected, kind_of
from kvjax.layer_choice import requested_dtypes, skipped_layers
from kvjax.layer_names import in_ranges
from kvjax.layouts import CacheLayout, VScaleLayout
from kvjax.model_config import AttentionKind, LayerKVConfig, ModelKVConfig
from kvjax.spec import AttentionSpec, FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

type RequestedKVCacheDType = str | KVCacheDType | Mapping[int | str, str | KVCacheDType]
"""What a user requests: a dtype for every layer, or dtypes by layers; see `resolve_layer_dtypes`."""


class DTypeSource(enum.StrEnum):
    """Who chose a layer's dtype."""

    USER = "user"
    CHECKPOINT = "checkpoint"
    MODEL = "model"


@dataclasses.dataclass(frozen=True)
class ResolvedKVCacheDType:
    """A KV cache dtype and its source.

    `dtype` is never `AUTO`. `per_head_scales`: whether the checkpoint, as the source, holds `k_scale` and `v_scale` as
    `[num_kv_heads]`; otherwise they are scalars.
    """

    dtype: KVCacheDType
    source: DTypeSource
    per_head_scales: bool = False


def resolve_kv_cache_dtype(
    requested: str | KVCacheDType, *, model_dtype: object, quantization_config: Mapping[str, Any] | None = None
) -> ResolvedKVCacheDType:
    """Resolves the dtype of a model's KV cache.

    An explicit `requested` always wins, and the other arguments are then ignored. `"auto"` takes the checkpoint's
    declaration, or without one the model's dtype.

    Args:
      requested: a string of `ACCEPTED_KV_CACHE_DTYPES` or a `KVCacheDType`.
      model_dtype: the model's compute dtype, as `parse_model_dtype` takes it.
      quantization_config: the checkpoint's, of `config.json` or `hf_quant_config.json`; never modified.

    Raises:
      KVCacheValueError: an unknown `requested`; for `"auto"`, a scheme that kvjax cannot store, one with a dtype per
        layer, or a model dtype without a cache dtype. The message names it.
      KVCacheTypeError: `requested` or `quantization_config` has another type.

    Warns:
      KVCacheWarning: for `"auto"`, the checkpoint declares an unknown ModelOpt algorithm.
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
    """Resolves the dtype of each of `model.layers`, the layers with a KV cache. Skipped layers keep the model dtype.

    Args:
      model: the layers, the model dtype and the checkpoint's declaration.
      requested: as in `resolve_kv_cache_dtype`, for all layers; or a mapping for some, such as
        `{"0-3": "bfloat16", "sliding_window": "fp8", "*": "nvfp4"}`. Keys are layer indices from 0 as ints or decimal
        strings, inclusive ranges of them, attention kinds, and `"*"` for the other layers. An index or a range takes
        precedence over a kind, a kind over `"*"`. Layers without a key are `"auto"`.
      skip_layers: indices, ranges and kinds (`"sliding_window"`, `"full_attention"`) of the layers that keep the model
        dtype, whatever is requested.

    Raises:
      KVCacheValueError: as `resolve_kv_cache_dtype`; also an index out of range or of a layer without a KV cache, an
        unknown name, two dtypes for a layer, or a dtype that a layer of latents (MLA) cannot store.
      KVCacheTypeError: as `resolve_kv_cache_dtype`; also a model of another type, a skipped layer or a key that is
        neither an int (bool excluded) nor a string, or a bare string for `skip_layers`.

    Warns:
      KVCacheWarning: for `"auto"`, as `resolve_kv_cache_dtype`; also the checkpoint declares dtypes for layers that the
        model does not have.
    """
    if not isinstance(model, ModelKVConfig):
        raise KVCacheTypeError(
            f"model: got {kind_of(model)}, expected a ModelKVConfig: ModelKVConfig.from_hf_config(config)"
        )
    skipped = skipped_layers(skip_layers, model)
    wanted = requested_dtypes(requested, model)
    declared = read_declared_kv_cache(model.quantization_config) if KVCacheDType.AUTO in wanted.values() else None
    if declared is not None:
        _warn_of_other_layers(declared, model)
    unquantized = ResolvedKVCacheDType(model.dtype, DTypeSource.MODEL)
    resolved = tuple(
        unquantized if index in skipped else _resolve_layer(wanted[index], declared, index) or unquantized
        for index in model.layer_indices
    )
    for index, layer, found in zip(model.layer_indices, model.layers, resolved, strict=True):
        if layer.is_mla and found.dtype not in MLA_KV_CACHE_DTYPES:
            what, names = f"kv_cache_dtype of layer {index}", [dtype.value for dtype in MLA_KV_CACHE_DTYPES]
            raise KVCacheValueError(got_expected(what, found.dtype.value, names, hint="it stores latents (MLA)"))
    return resolved


def _resolve_layer(wanted: KVCacheDType, declared: DeclaredKVCache | None, index: int) -> ResolvedKVCacheDType | None:
    """Returns a layer's dtype; None if neither the user nor the checkpoint chose one."""
    if wanted is not KVCacheDType.AUTO:
        return ResolvedKVCacheDType(wanted, DTypeSource.USER)
    dtype = declared.of_layer(index) if declared is not None else None
    if declared is None or dtype is None:
        return None
    return ResolvedKVCacheDType(dtype, DTypeSource.CHECKPOINT, declared.per_head_scales)


def _warn_of_other_layers(declared: DeclaredKVCache, model: ModelKVConfig) -> None:
    if others := sorted(set(declared.layers) - set(model.layer_indices)):
        warnings.warn(
            f"kv_cache_quantized_layers: the checkpoint declares a quantized cache for layers {in_ranges(others)}, of"
            " which the model caches none; ignored",
            KVCacheWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),  # attribute it to the caller's line
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
    """Returns one spec for each of `model.layers`, with the dtype that `resolve_layer_dtypes` resolves.

    `layout` applies to every layer except those of latents (MLA), whose pages have only one order. `v_scale_layout`
    applies to layers whose values are NVFP4.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `resolve_layer_dtypes`; also an invalid spec, such as a head size that
        NVFP4 cannot store.
    """
    dtypes = [resolved.dtype for resolved in resolve_layer_dtypes(model, requested, skip_layers=skip_layers)]
    # Layers without V scales are linear if other layers have them. If no layer has any, the spec raises for "swizzled".
    has_block_scales = [dtype.parts[1].info.elements_per_scale is not None for dtype in dtypes]
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
    if layer.is_mla:
        CacheLayout.parse(fields.pop("layout"))
        if VScaleLayout.parse(swizzle := fields.pop("v_scale_layout")) is not VScaleLayout.LINEAR:
            raise KVCacheValueError(f"v_scale_layout: got {swizzle!r} for latents (MLA), expected 'linear'")
        fields |= {"kv_lora_rank": layer.head_size_v, "qk_rope_head_dim": layer.head_size - layer.head_size_v}
        return MLAAttentionSpec(sliding_window=layer.sliding_window, **fields)
    fields |= {name: getattr(layer, name) for name in ("num_kv_heads", "head_size", "head_size_v")}
    if layer.kind is AttentionKind.SLIDING_WINDOW:
        return SlidingWindowSpec(sliding_window=layer.sliding_window, **fields)
    return FullAttentionSpec(**fields)
