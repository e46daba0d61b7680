"""Decode scales of each layer's cache, as a checkpoint holds them: found by the names that its exporter gave them."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kvjax.checkpoint import read_declared_kv_cache
from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVCacheDType, KVQuantMode
from kvjax.errors import KVCacheError, KVCacheValueError, KVCacheWarning, shown
from kvjax.layer_names import in_ranges, split_layer_name
from kvjax.model_config import LayerKVConfig, ModelKVConfig
from kvjax.resolve import RequestedKVCacheDType, resolve_layer_dtypes
from kvjax.scale_values import check_scale
from kvjax.tensor_files import Tensors, open_tensors


class KVScales(NamedTuple):
    """One layer's decode scales: float32, `[]`, or `[num_kv_heads]` where each head has its own."""

    k_scale: np.ndarray | np.float32
    v_scale: np.ndarray | np.float32

    @classmethod
    def stack(cls, scales: Iterable[KVScales]) -> KVScales:
        """Those of several layers as one cache of these carries them, `KVCache.allocate(..., num_layers=...)`.

        They are `[num_layers]`, or `[num_layers, num_kv_heads]` where a layer has one for each head.

        Raises:
          KVCacheValueError: no layers, or some with other numbers of heads.
        """
        layers = list(scales)
        if not layers or len(shapes := {np.shape(scale) for layer in layers for scale in layer} - {()}) > 1:
            got = f"shapes {sorted(shapes)}" if layers else "none"
            raise KVCacheValueError(f"scales: got {got}, expected one KVScales a layer, scalars or of as many heads")
        return cls(*(np.stack(np.broadcast_arrays(*of_layers)) for of_layers in zip(*layers, strict=True)))


@dataclasses.dataclass(frozen=True)
class LayerScales:
    """What a checkpoint holds for a layer.

    `dtype`: that of the layer's cache. `names`: the tensors that `scales` are from, those of keys and of values, None
    where there is none. `divisor`: what their exporter divided the largest magnitude by, None where it is not known.
    """

    scales: KVScales
    dtype: KVCacheDType
    names: tuple[str | None, str | None] = (None, None)
    divisor: float | None = None


# vLLM's names and those that it maps to them (`maybe_remap_kv_scale_name`, `get_cache_scale_mapper`), each after its
# layer's index. Where a layer has several, the first that matches holds.
_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:^|\.)attn\.([kv])_scale$",  # vLLM
        r"(?:^|\.)[kv]_proj\.([kv])_scale$",  # ModelOpt
        r"(?:^|\.)qkv_proj\.([kv])_scale$",
        r"(?:^|\.)qkqkv_proj\.([kv])_scale$",
        r"(?:^|\.)([kv])_proj\.output_scale$",  # Quark, and compressed-tensors before it had a scheme for caches
        r"(?:^|\.)([kv])_cache\.scale$",  # HunYuan V3
        r"(?:^|\.)([kv])_scale$",  # compressed-tensors, Quark's custom mode
        r"(?:^|\.)(kv)_scale$",  # AutoFP8, Quark: one for both
    )
)

FP8_DIVISOR = 448.0
"""What every exporter divides the largest magnitude by for an fp8 cache: float8_e4m3fn's largest value."""


def load_kv_scales(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    model: ModelKVConfig,
    requested: RequestedKVCacheDType = "auto",
    *,
    skip_layers: Iterable[int | str] = (),
    amax_divisor: float | None = None,
) -> tuple[KVScales, ...]:
    """The decode scales of each of `model.layers`, from the tensors of a checkpoint.

    Layers that are not quantized get 1, which they do not use. So do quantized layers of which the checkpoint has no
    scale, and then a warning says which they are and what that costs. A layer with only one of both scales takes it for
    both, as vLLM does, with a warning. Layers that take one scale (NVFP4) get the largest where the checkpoint has one
    for each head.

    A scale is the largest magnitude that its exporter saw, over a divisor. All exporters divide by 448 for fp8 caches;
    for NVFP4 caches ModelOpt's Hugging Face export does too, its Megatron export and auto-round divide by 6 * 448. A
    scale whose divisor is known is brought to the layer's dtype: multiplied by `divisor / largest value of the dtype`,
    which is 448 for fp8_e4m3, 57344 for fp8_e5m2 and 6 * 448 for NVFP4. Where it is not known, the scale is taken as
    it stands, as vLLM takes all, and a warning says so.

    Args:
      checkpoint: a folder, one of its safetensors files, or a mapping from names to arrays or tensors. Of files the
        headers are read, and the scales alone.
      model: the whole model, not a device's share of it.
      requested: the dtype of each layer's cache, as `resolve_layer_dtypes` takes it.
      skip_layers: layers that keep the model dtype, likewise.
      amax_divisor: what the exporter divided by. By default 448 where the checkpoint declares an fp8 cache, else not
        known.

    Raises:
      KVCacheValueError: as `resolve_layer_dtypes`; a file that is no safetensors file; a scale that is neither a scalar
        nor one for each head, or not between `MIN_SCALE` and `MAX_SCALE`; scales of more than one language model.
      KVCacheTypeError: `checkpoint` is neither a path nor a mapping.
      OSError: a file that cannot be read.

    Warns:
      KVCacheWarning: scales that are missing, or whose divisor is not known.
    """
    return tuple(
        layer.scales
        for layer in read_layer_scales(
            open_tensors(checkpoint), model, requested, skip_layers=skip_layers, amax_divisor=amax_divisor
        )
    )


def read_layer_scales(
    tensors: Tensors,
    model: ModelKVConfig,
    requested: RequestedKVCacheDType = "auto",
    *,
    skip_layers: Iterable[int | str] = (),
    amax_divisor: float | None = None,
) -> tuple[LayerScales, ...]:
    """As `load_kv_scales`, with where each layer's scales are from."""
    divisor = _as_divisor(amax_divisor)
    dtypes = [resolved.dtype for resolved in resolve_layer_dtypes(model, requested, skip_layers=skip_layers)]
    divisors = [divisor or declared for declared in _declared_divisors(model)]
    names = _names_of_scales(tensors)
    layers = [
        _layer_scales(tensors, names.get(index, {}), layer, dtype, divisor)
        for index, layer, dtype, divisor in zip(model.layer_indices, model.layers, dtypes, divisors, strict=True)
    ]
    _warn_of_doubts(dict(zip(model.layer_indices, layers, strict=True)))
    return tuple(layers)


def _layer_scales(
    tensors: Tensors, names: Mapping[str, str], layer: LayerKVConfig, dtype: KVCacheDType, divisor: float | None
) -> LayerScales:
    of_both = names.get("k"), names.get("v")
    if not dtype.takes_scale or of_both == (None, None):
        return LayerScales(KVScales(np.float32(1), np.float32(1)), dtype)
    factor = np.float32(1.0 if divisor is None else divisor / dtype.info.max)
    k_scale, v_scale = (
        _read_scale(name or other or "", tensors, layer.num_kv_heads, dtype, factor)
        for name, other in (of_both, of_both[::-1])
    )
    return LayerScales(KVScales(k_scale, v_scale), dtype, of_both, divisor)


def _read_scale(
    name: str, tensors: Tensors, num_kv_heads: int, dtype: KVCacheDType, factor: np.float32
) -> np.ndarray | np.float32:
    scale = tensors[name]()
    if scale.size not in (1, num_kv_heads):
        raise KVCacheValueError(
            f"{name}: got shape {scale.shape}, expected one scale, or one for each of the whole model's {num_kv_heads}"
            " KV heads"
        )
    check_scale(name, scale)
    scale = scale.reshape(-1) * factor
    if scale.size > 1 and dtype.info.quant_mode is KVQuantMode.FP8_PER_TENSOR:
        return scale
    return scale.max()  # every head's largest magnitude is within the largest of all


def _names_of_scales(tensors: Iterable[str]) -> dict[int, dict[str, str]]:
    """By layer, the names of the tensors with the scales of its keys ("k") and of its values ("v")."""
    found: dict[int, dict[str, tuple[int, str]]] = {}
    prefixes: dict[str, str] = {}
    for name in tensors:
        parts = split_layer_name(name)
        if parts is None or not parts.is_of_language_model:
            continue
        place, halves = next(
            ((place, match[1]) for place, pattern in enumerate(_NAMES) if (match := pattern.search(parts.rest))),
            (0, ""),
        )
        if halves:
            prefixes.setdefault(parts.prefix, name)
        for half in halves:
            scales = found.setdefault(parts.layer, {})
            scales[half] = min(scales.get(half, (place, name)), (place, name))
    if len(prefixes) > 1:
        raise KVCacheValueError(
            f"checkpoint: got scales of several models' layers, {shown(list(prefixes.values()))}, expected those of"
            " one: pass a mapping of its tensors alone"
        )
    return {layer: {half: name for half, (_, name) in scales.items()} for layer, scales in found.items()}


def _as_divisor(amax_divisor: float | None) -> float | None:
    if amax_divisor is None:
        return None
    check_scale("amax_divisor", amax_divisor)
    return float(amax_divisor)


def _declared_divisors(model: ModelKVConfig) -> list[float | None]:
    """What each layer's scales were divided by, where what the checkpoint declares settles it."""
    try:
        declared = read_declared_kv_cache(model.quantization_config, warn=False)
    except KVCacheError:  # the user asked for another dtype, or it would have been raised before
        declared = None
    dtypes = [declared and declared.of_layer(index) for index in model.layer_indices]
    return [FP8_DIVISOR if dtype is KVCacheDType.FP8_E4M3 else None for dtype in dtypes]


def _warn_of_doubts(layers: Mapping[int, LayerScales]) -> None:
    for dtype in dict.fromkeys(layer.dtype for layer in layers.values() if layer.dtype.takes_scale):
        of_dtype = {index: layer for index, layer in layers.items() if layer.dtype is dtype}
        found = {index: layer for index, layer in of_dtype.items() if layer.names != (None, None)}
        _warn(
            [index for index in of_dtype if index not in found],
            dtype,
            "the checkpoint holds no scale, so 1 is taken, with which magnitudes above"
            f" {dtype.info.max:g} are clamped and {_lost_with_one(dtype)}. Only ModelOpt's *_cast recipes mean 1:"
            " otherwise calibrate (kvjax.calibrate), or give k_scale and v_scale",
        )
        _warn(
            [index for index, layer in found.items() if None in layer.names],
            dtype,
            "the checkpoint holds a scale of keys or of values alone, which is taken for both. Where the other kind is"
            " larger it is clamped",
        )
        _warn(
            [index for index, layer in found.items() if layer.divisor is None],
            dtype,
            "nothing declares what the scales were divided by, so they are taken as they stand. Exporters of fp8 caches"
            " and ModelOpt's Hugging Face export divide the largest magnitude by 448 (amax_divisor=448), ModelOpt's"
            f" Megatron export and auto-round for NVFP4 by 2688 (amax_divisor=2688); {_cost_of_a_wrong_divisor(dtype)}",
        )


def _warn(layers: Sequence[int], dtype: KVCacheDType, message: str) -> None:
    if layers:
        warnings.warn(
            f"scales of layers {in_ranges(layers)} ({dtype.value}): {message}",
            KVCacheWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),  # the caller's line, from whatever depth
        )


def _lost_with_one(dtype: KVCacheDType) -> str:
    if dtype.info.quant_mode is KVQuantMode.NVFP4:
        # A block scale of amax / 6 that is at most half of float8_e4m3fn's smallest is stored as 0.
        return f"a block of {NVFP4_BLOCK_SIZE} with none above {6 * 2.0**-10:.2g} reads as zero"
    least = float(ml_dtypes.finfo(dtype.info.storage_dtype).smallest_subnormal) / 2
    return f"those up to {least:.2g} read as zero"


def _cost_of_a_wrong_divisor(dtype: KVCacheDType) -> str:
    if dtype.info.quant_mode is KVQuantMode.NVFP4:
        return (
            "after 448, the block scales as they stand reach a sixth of their range, so small blocks lose bits sooner"
        )
    return "after 2688, all above a sixth of the largest magnitude is clamped"
