"""Loads each layer's decode scales from a checkpoint, by the tensor names of known exporters."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kvjax.checkpoint import read_declared_kv_cache
from kvjax.dtypes import MLA_PARTS, KVCacheDType
from kvjax.errors import MAX_SHOWN, KVCacheError, KVCacheTypeError, KVCacheValueError, KVCacheWarning, kind_of, shown
from kvjax.layer_names import in_ranges, split_layer_name
from kvjax.model_config import LayerKVConfig, ModelKVConfig
from kvjax.resolve import RequestedKVCacheDType, resolve_layer_dtypes
from kvjax.scale_values import check_scale
from kvjax.spec import as_int
from kvjax.tensor_files import INDEX, Tensors, open_tensors, read_json, read_metadata


class KVScales(NamedTuple):
    """One layer's decode scales: float32, `[]`, or `[num_kv_heads]` with a scale per head."""

    k_scale: np.ndarray | np.float32
    v_scale: np.ndarray | np.float32

    @classmethod
    def stack(cls, scales: Iterable[KVScales]) -> KVScales:
        """Stacks the scales of several layers for one cache, `KVCache.allocate(..., num_layers=...)`.

        They become `[num_layers]`, or `[num_layers, num_kv_heads]` if a layer has one per head.

        Raises:
          KVCacheValueError: no layers, or different numbers of heads.
        """
        layers = list(scales)
        if not layers or len(shapes := {np.shape(scale) for layer in layers for scale in layer} - {()}) > 1:
            got = f"shapes {sorted(shapes)}" if layers else "none"
            raise KVCacheValueError(
                f"scales: got {got}, expected one KVScales per layer, scalars or of equal numbers of heads"
            )
        return cls(*(np.stack(np.broadcast_arrays(*of_layers)) for of_layers in zip(*layers, strict=True)))


type Divisors = tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True)
class LayerScales:
    """What a checkpoint holds for a layer.

    `dtype`: that of the layer's cache. `names`: the tensors that the scales of keys and of values come from, None if
    missing. `divisors`: what the exporter divided the largest key and the largest value by, None if unknown.
    """

    scales: KVScales
    dtype: KVCacheDType
    names: tuple[str | None, str | None] = (None, None)
    divisors: Divisors = (None, None)


# The part of names after the layer's index: vLLM's, and those that vLLM maps to them (`maybe_remap_kv_scale_name`,
# `get_cache_scale_mapper`). If several tensors of a layer match, the first pattern wins.
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
"""What every exporter divides the largest magnitude by for fp8 caches: the largest float8_e4m3fn."""

AMAX_DIVISOR = "kvjax_amax_divisor"
"""In the metadata of a file of scales: what the largest magnitudes were divided by, as `kvjax calibrate` writes it."""

KEY_ROTATION = "kvjax_key_rotation"
"""Likewise: the layers whose scales are those of rotated keys, `"0,3,4"`."""

MADE_FOR = "kv_cache_dtype"
"""Likewise: the dtypes that the scales are for, a name or `"0-3=fp8_e4m3,4=nvfp4"`."""


def load_kv_scales(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    model: ModelKVConfig,
    requested: RequestedKVCacheDType = "auto",
    *,
    skip_layers: Iterable[int | str] = (),
    amax_divisor: float | None = None,
    key_rotation: Iterable[int] = (),
) -> tuple[KVScales, ...]:
    """Loads the decode scales of each of `model.layers` from the tensors of a checkpoint.

    Unquantized layers get 1, which they ignore, and so do keys or values whose dtype takes no scale, whatever the
    checkpoint holds. Quantized layers without a scale in the checkpoint also get 1, with a warning that names them and
    states the loss. A layer with a scale of keys only, or of values only, uses it for both, as vLLM does, with a
    warning. Layers that take one scale (NVFP4) get the largest of scales per head.

    A scale is the largest magnitude that the exporter saw, over a divisor. All exporters divide by 448 for fp8 caches.
    For NVFP4 caches, ModelOpt's Hugging Face export also does; its Megatron export and auto-round divide by 6 * 448. A
    scale with a known divisor is converted to the layer's dtype: multiplied by `divisor / largest value of the dtype`,
    which is 448 for fp8_e4m3, 57344 for fp8_e5m2 and 6 * 448 for NVFP4. With an unknown divisor it is used unchanged,
    as vLLM always does, with a warning.

    Args:
      checkpoint: a folder, one of its safetensors files, or a mapping from names to arrays or tensors. Of files only
        the headers and the scales are read.
      model: the whole model, not a device's shard.
      requested: the dtype of each layer's cache, as in `resolve_layer_dtypes`.
      skip_layers: layers that keep the model dtype, likewise.
      amax_divisor: what the exporter divided by. Default: what a file of `kvjax calibrate` says; 448 if the checkpoint
        declares an fp8 cache; else unknown.
      key_rotation: the layers whose queries and keys the model rotates by `hadamard_transform`. They must be the layers
        that a file of `kvjax calibrate --key-rotation` was made for.

    Raises:
      KVCacheValueError: as `resolve_layer_dtypes`; `key_rotation` differs from a file's layers of rotated keys; a file
        of `kvjax calibrate` in a folder, or of scales of latents alone (NVFP4) for rope keys too (fp8); an
        invalid safetensors file, index or `hf_quant_config.json`, or one that is not a regular file; different values
        of a scale in two files; a scale that is neither a scalar nor one per head, or not between `MIN_SCALE` and
        `MAX_SCALE`; scales of more than one language model.
      KVCacheTypeError: `checkpoint` is neither a path nor a mapping; a scale in a mapping is not a real number or an
        array of them; `key_rotation` does not consist of layer indices.
      OSError: `checkpoint` does not exist, or a file cannot be read.

    Warns:
      KVCacheWarning: scales that are missing or have an unknown divisor; a folder with ModelOpt's
        `hf_quant_config.json` for a model without a `quantization_config`.
    """
    tensors = open_tensors(checkpoint)
    path = None if isinstance(checkpoint, Mapping) or not Path(checkpoint).is_file() else Path(checkpoint)
    if path and amax_divisor is None:
        amax_divisor = _divisor_in_file(path)
    if not isinstance(checkpoint, Mapping) and path is None:
        check_folder(Path(checkpoint))
    _check_rotation(key_rotation, load_key_rotation(path) if path else ())
    layers = read_layer_scales(tensors, model, requested, skip_layers=skip_layers, amax_divisor=amax_divisor)
    if path:
        _check_rope_keys(path, model, layers)
    folder = None if isinstance(checkpoint, Mapping) else Path(checkpoint)
    if folder and not model.quantization_config and _declares_quantized_cache(folder):
        warnings.warn(
            "checkpoint: got a folder with hf_quant_config.json and a model without a quantization_config, so what the"
            " file declares has no effect; expected ModelKVConfig.from_hf_config(config, quantization_config=...) with"
            " its content",
            KVCacheWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),  # attribute it to the caller's line
        )
    return tuple(layer.scales for layer in layers)


def load_key_rotation(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Returns the layers whose scales in a file are those of rotated keys: `key_rotation` of `load_kv_scales`.

    Args:
      path: a safetensors file, of `kvjax calibrate --key-rotation`; other files name no layers.

    Raises:
      KVCacheValueError: the file's metadata is not what `kvjax calibrate` writes, or it is no safetensors file.
      OSError: the file cannot be read.
    """
    path = Path(path)
    text = read_metadata(path).get(KEY_ROTATION)
    if text is None:
        return ()
    layers = text.split(",")
    if not all(layer.isdecimal() and layer.isascii() and len(layer) < 5 for layer in layers):
        raise KVCacheValueError(
            f"{KEY_ROTATION} of {shown(str(path))}: got {shown(text)}, expected layers such as '0,3,4'"
        )
    return tuple(map(int, layers))


def check_folder(folder: Path) -> None:
    """Refuses a folder with a file of `kvjax calibrate`, because metadata is read only from a single file."""
    for path in [] if (folder / INDEX).exists() else sorted(folder.glob("*.safetensors")):
        if {AMAX_DIVISOR, KEY_ROTATION} & {*read_metadata(path)}:
            raise KVCacheValueError(
                f"checkpoint: got a folder with scales of kvjax calibrate, expected the file {shown(str(path))} itself,"
                " or a folder without it"
            )


def _check_rope_keys(path: Path, model: ModelKVConfig, layers: Sequence[LayerScales]) -> None:
    """Refuses scales of latents alone for layers whose rope keys are stored with the latents' scale."""
    made_for = read_metadata(path).get(MADE_FOR)
    rope_keys = {dtype.value: parts[1] for dtype, parts in MLA_PARTS.items()}
    if made_for not in rope_keys or rope_keys[made_for].takes_scale:
        return
    for index, layer, found in zip(model.layer_indices, model.layers, layers, strict=True):
        has_rope = layer.is_mla and layer.head_size > layer.head_size_v
        if has_rope and found.names[0] is not None and rope_keys[found.dtype.value].takes_scale:
            raise KVCacheValueError(
                f"checkpoint: got scales for {made_for}, those of latents alone, for layer {index} in"
                f" {found.dtype.value}, where rope keys have them too; expected those of kvjax calibrate --dtype"
                f" {found.dtype.value}"
            )


def _check_rotation(got: Any, expected: tuple[int, ...]) -> None:
    if isinstance(got, str) or not isinstance(got, Iterable):
        raise KVCacheTypeError(f"key_rotation: got {kind_of(got)}, expected the indices of layers")
    layers = tuple(as_int("key_rotation", layer, least=0) for layer in got)
    if {*layers} != {*expected}:
        raise KVCacheValueError(
            f"key_rotation: got {shown(layers)}, expected {shown(expected)}, the layers of rotated keys that the scales"
            " are for: rotate their queries and keys by hadamard_transform, or calibrate again"
        )


def _divisor_in_file(path: Path) -> float | None:
    text = read_metadata(path).get(AMAX_DIVISOR)
    if text is None:
        return None
    what = f"{AMAX_DIVISOR} of {shown(str(path))}"
    try:
        divisor = float(text)
    except ValueError:
        raise KVCacheValueError(f"{what}: got {shown(text)}, expected a number") from None
    check_scale(what, divisor)
    return divisor


def _declares_quantized_cache(folder: Path) -> bool:
    """Whether a folder's `hf_quant_config.json` declares a quantized cache."""
    path = folder / "hf_quant_config.json"
    return path.exists() and read_declared_kv_cache(read_json(path), warn=False) is not None


def read_layer_scales(
    tensors: Tensors,
    model: ModelKVConfig,
    requested: RequestedKVCacheDType = "auto",
    *,
    skip_layers: Iterable[int | str] = (),
    amax_divisor: float | None = None,
) -> tuple[LayerScales, ...]:
    """Loads scales as `load_kv_scales` does, with their tensor names and divisors."""
    divisor = _as_divisor(amax_divisor)
    dtypes = [resolved.dtype for resolved in resolve_layer_dtypes(model, requested, skip_layers=skip_layers)]
    divisors: list[Divisors] = [
        (divisor or of_keys, divisor or of_values) for of_keys, of_values in _declared_divisors(model)
    ]
    names = _names_of_scales(tensors)
    layers = [
        _layer_scales(tensors, names.get(index, {}), layer, dtype, of_layer)
        for index, layer, dtype, of_layer in zip(model.layer_indices, model.layers, dtypes, divisors, strict=True)
    ]
    _warn_of_assumptions(dict(zip(model.layer_indices, layers, strict=True)))
    return tuple(layers)


def _layer_scales(
    tensors: Tensors, names: Mapping[str, str], layer: LayerKVConfig, dtype: KVCacheDType, divisors: Divisors
) -> LayerScales:
    k_name, v_name = (
        names.get(kind) if part.takes_scale else None for kind, part in zip("kv", dtype.parts, strict=True)
    )
    if layer.is_mla:  # latents have one scale, that of keys
        v_name = None
    # Where one is missing, the other's is read for both.
    found = [(name, divisor) for name, divisor in zip((k_name, v_name), divisors, strict=True) if name is not None]
    if not found:
        return LayerScales(KVScales(np.float32(1), np.float32(1)), dtype)
    if layer.is_mla:
        (name, divisor), part = found[0], dtype.parts[0]
        scale = _read_scale(name, tensors, layer.num_kv_heads, part, divisor)
        return LayerScales(KVScales(np.float32(scale), np.float32(1)), dtype, (name, name), (divisor, divisor))
    k_scale, v_scale = (
        _read_scale(name, tensors, layer.num_kv_heads, part, divisor) if part.takes_scale else np.float32(1)
        for (name, divisor), part in zip((found[0], found[-1]), dtype.parts, strict=True)
    )
    return LayerScales(KVScales(k_scale, v_scale), dtype, (k_name, v_name), divisors)


def _read_scale(
    name: str, tensors: Tensors, num_kv_heads: int, part: KVCacheDType, divisor: float | None
) -> np.ndarray | np.float32:
    scale = tensors[name]()
    name = name if name.isprintable() and len(name) <= MAX_SHOWN else shown(name)
    if scale.size not in (1, num_kv_heads):
        raise KVCacheValueError(
            f"{name}: got shape {scale.shape}, expected one scale, or one per KV head of the whole model"
            f" ({num_kv_heads})"
        )
    check_scale(name, scale)
    scale = scale.reshape(-1) * np.float32(1.0 if divisor is None else divisor / part.info.max)
    if part.info.takes_head_scales and scale.size > 1:
        return scale
    return scale.max()  # covers every head


def _names_of_scales(tensors: Iterable[str]) -> dict[int, dict[str, str]]:
    """Returns, per layer, the names of the tensors with the scales of its keys ("k") and of its values ("v")."""
    found: dict[int, dict[str, tuple[int, str]]] = {}
    prefixes: dict[str, str] = {}
    for name in tensors:
        parts = split_layer_name(name)
        if parts is None or not parts.is_of_language_model:
            continue
        priority, kinds = next(
            ((i, match[1]) for i, pattern in enumerate(_NAMES) if (match := pattern.search(parts.rest))),
            (0, ""),
        )
        if kinds:
            prefixes.setdefault(parts.prefix, name)
        for kind in kinds:
            scales = found.setdefault(parts.layer, {})
            scales[kind] = min(scales.get(kind, (priority, name)), (priority, name))
    if len(prefixes) > 1:
        raise KVCacheValueError(
            f"checkpoint: got scales of several models' layers, {shown(list(prefixes.values()))}, expected those of"
            " one: pass a mapping of its tensors only"
        )
    return {layer: {kind: name for kind, (_, name) in scales.items()} for layer, scales in found.items()}


def _as_divisor(amax_divisor: float | None) -> float | None:
    if amax_divisor is None:
        return None
    check_scale("amax_divisor", amax_divisor)
    return float(amax_divisor)


def _declared_divisors(model: ModelKVConfig) -> list[Divisors]:
    """Returns each layer's divisors where the checkpoint's declaration determines it."""
    try:
        declared = read_declared_kv_cache(model.quantization_config, warn=False)
    except KVCacheError:  # the user requested another dtype, or resolve_layer_dtypes would have raised it
        declared = None
    dtypes = [declared and declared.of_layer(index) for index in model.layer_indices]

    def of(part: KVCacheDType) -> float | None:
        return FP8_DIVISOR if part is KVCacheDType.FP8_E4M3 else None

    parts = [dtype.parts if dtype else (KVCacheDType.AUTO,) * 2 for dtype in dtypes]
    return [(of(keys), of(values)) for keys, values in parts]


def _warn_of_assumptions(layers: Mapping[int, LayerScales]) -> None:
    for dtype in dict.fromkeys(layer.dtype for layer in layers.values() if layer.dtype.takes_scale):
        of_dtype = {index: layer for index, layer in layers.items() if layer.dtype is dtype}
        found = {index: layer for index, layer in of_dtype.items() if layer.names != (None, None)}
        _warn(
            [index for index in of_dtype if index not in found],
            dtype,
            f"the checkpoint holds no scale, so 1 is used: {_of_parts(dtype, _lost_with_one)}. This is right only for"
            " ModelOpt's *_cast recipes: otherwise calibrate (kvjax.calibrate), or pass k_scale and v_scale",
        )
        _warn(
            [index for index, layer in found.items() if None in _of_scaled(dtype, layer.names)],
            dtype,
            "the checkpoint holds a scale of keys or of values only, which is used for both. If the other kind is"
            " larger, it is clamped",
        )
        _warn(
            [index for index, layer in found.items() if None in _of_scaled(dtype, layer.divisors)],
            dtype,
            "the divisor of the scales is unknown, so they are used unchanged. Exporters of fp8 caches and ModelOpt's"
            " Hugging Face export divide the largest magnitude by 448 (amax_divisor=448), ModelOpt's Megatron export"
            f" and auto-round for NVFP4 by 2688 (amax_divisor=2688); {_of_parts(dtype, _cost_of_a_wrong_divisor)}",
        )


def _warn(layers: Sequence[int], dtype: KVCacheDType, message: str) -> None:
    if layers:
        warnings.warn(
            f"scales of layers {in_ranges(layers)} ({dtype.value}): {message}",
            KVCacheWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),  # attribute it to the caller's line
        )


def _of_scaled[Of](dtype: KVCacheDType, of_both: tuple[Of, Of]) -> list[Of]:
    """Returns the entries, of keys and of values, whose part of the dtype takes a scale."""
    return [each for each, part in zip(of_both, dtype.parts, strict=True) if part.takes_scale]


def _of_parts(dtype: KVCacheDType, text: Callable[[KVCacheDType], str]) -> str:
    keys, values = dtype.parts
    texts = {what: text(part) for what, part in _of_scaled(dtype, (("keys", keys), ("values", values)))}
    if len(texts) > len(set(texts.values())):
        return texts["keys"]
    return "; ".join(f"{what}: {each}" for what, each in texts.items())


def _lost_with_one(part: KVCacheDType) -> str:
    if block := part.info.elements_per_scale:
        # A block scale of amax / 6 that is at most half of float8_e4m3fn's smallest is stored as 0.
        lost = f"blocks of {block} with no magnitude above {6 * 2.0**-10:.2g} read as zero"
    else:
        least = float(ml_dtypes.finfo(part.info.storage_dtype).smallest_subnormal) / 2
        lost = f"those up to {least:.2g} read as zero"
    return f"magnitudes above {part.info.max:g} are clamped and {lost}"


def _cost_of_a_wrong_divisor(part: KVCacheDType) -> str:
    if part.info.elements_per_scale:
        return (
            "if it is 448, the unchanged block scales use a sixth of their range, so small blocks lose precision sooner"
        )
    return "if it is 2688, magnitudes above a sixth of the largest are clamped"
