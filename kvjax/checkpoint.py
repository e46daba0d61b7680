"""Reads what a checkpoint's `quantization_config` declares about its KV cache, in each producer's format."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import warnings
from collections.abc import Mapping
from typing import Any

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVCacheDType
from kvjax.errors import KVCacheTypeError, KVCacheValueError, KVCacheWarning, shown
from kvjax.layer_names import split_layer_name

_OVERRIDE = "pass a kv_cache_dtype to override the checkpoint's"


@dataclasses.dataclass(frozen=True)
class DeclaredKVCache:
    """A checkpoint's KV cache.

    `dtype`: the dtype of every layer, None if they differ. `per_head_scales`: whether the checkpoint holds a scale per
    KV head. `layers`: if they differ, dtypes by the model's layer indices; layers not listed are unquantized.
    """

    dtype: KVCacheDType | None
    per_head_scales: bool = False
    layers: Mapping[int, KVCacheDType] = dataclasses.field(default_factory=dict, hash=False)

    def of_layer(self, index: int) -> KVCacheDType | None:
        """Returns the dtype of a layer; None if it is unquantized."""
        return self.layers.get(index) if self.dtype is None else self.dtype


def read_declared_kv_cache(
    quantization_config: Mapping[str, Any] | None, *, warn: bool = True
) -> DeclaredKVCache | None:
    """Returns the declared KV cache; None if nothing is declared or it is unquantized.

    Reads compressed-tensors' `kv_cache_scheme`, ModelOpt's `kv_cache_quant_algo` and `kv_cache_scheme` (in
    `config.json`'s form and in `hf_quant_config.json`'s) with their `kv_cache_quantized_layers`, Quark's
    `kv_cache_group`, and AutoFP8's `"kv_cache_scheme": "static"`.

    Args:
      quantization_config: the checkpoint's; never modified.
      warn: whether to warn.

    Raises:
      KVCacheValueError: a scheme that kvjax cannot store; the message names it.
      KVCacheTypeError: `quantization_config` is neither a mapping nor None.

    Warns:
      KVCacheWarning: an unknown ModelOpt algorithm; the cache, or the layer, is then unquantized.
    """
    if quantization_config is None:
        return None
    if not isinstance(quantization_config, Mapping):
        raise KVCacheTypeError(
            f"quantization_config: got {shown(quantization_config)} of type {type(quantization_config).__name__},"
            " expected a mapping or None"
        )
    if _is_modelopt(quantization_config):
        return _read_modelopt(quantization_config, warn)
    if _lower(quantization_config.get("quant_method")) == "quark":
        return _read_quark(quantization_config)
    scheme = quantization_config.get("kv_cache_scheme")
    if scheme is None:
        return None
    if isinstance(scheme, Mapping):
        return _read_scheme(scheme)
    if (_lower(quantization_config.get("quant_method")), _lower(scheme)) == ("fp8", "static"):
        return DeclaredKVCache(KVCacheDType.FP8_E4M3)
    raise _unsupported(scheme, "unknown form")


def _is_modelopt(config: Mapping[str, Any]) -> bool:
    if method := _lower(config.get("quant_method")):
        return isinstance(method, str) and method.startswith("modelopt")
    # hf_quant_config.json has no quant_method; only ModelOpt writes these keys.
    return any(key in config for key in ("producer", "quantization", "kv_cache_quant_algo"))


def _read_modelopt(config: Mapping[str, Any], warn: bool) -> DeclaredKVCache | None:
    sections = [section for section in (config.get("quantization"), config) if isinstance(section, Mapping)]
    layers = next((section[_LAYERS] for section in sections if section.get(_LAYERS) is not None), None)
    if layers is not None:
        version = next((section[_VERSION] for section in sections if section.get(_VERSION) is not None), 1)
        return _read_layers(layers, version, warn)
    declarations = (section.get(key) for section in sections for key in ("kv_cache_quant_algo", "kv_cache_scheme"))
    declared = next((declaration for declaration in declarations if declaration is not None), None)
    if isinstance(declared, Mapping):
        return _read_scheme(declared)
    dtype = None if _lower(declared) == "mixed_precision" else _read_algorithm("kv_cache_quant_algo", declared, warn)
    return DeclaredKVCache(dtype) if dtype else None


_LAYERS, _VERSION = "kv_cache_quantized_layers", "kv_cache_schema_version"


def _read_layers(layers: object, version: object, warn: bool) -> DeclaredKVCache:
    """Reads ModelOpt's mapping from the names of attention modules to their algorithms."""
    if version != 1 or isinstance(version, bool):
        raise KVCacheValueError(f"{_VERSION}: got {shown(version)}, expected 1; {_OVERRIDE}")
    if not isinstance(layers, Mapping):
        raise KVCacheValueError(f"{_LAYERS}: got {shown(layers)}, expected an algorithm for each layer's name")
    algorithms: dict[int, object] = {}
    for name, entry in layers.items():
        parts = split_layer_name(name) if isinstance(name, str) else None
        if parts is None or not isinstance(entry, Mapping):
            raise KVCacheValueError(
                f"{_LAYERS}: got {shown(name)}: {shown(entry)}, expected names and algorithms such as"
                ' "model.layers.0.self_attn": {"quant_algo": "FP8"}'
            )
        algorithm = entry.get("quant_algo")
        if parts.is_of_language_model and algorithms.setdefault(parts.layer, algorithm) != algorithm:
            raise KVCacheValueError(
                f"{_LAYERS}: got {shown(algorithm)} and {shown(algorithms[parts.layer])} for layer {parts.layer},"
                " expected one"
            )
    read = {
        name: _read_algorithm(f"{_LAYERS}, layer {name}", algorithm, warn) for name, algorithm in algorithms.items()
    }
    return DeclaredKVCache(None, layers={layer: dtype for layer, dtype in read.items() if dtype})


def _read_algorithm(what: str, algorithm: object, warn: bool) -> KVCacheDType | None:
    match _lower(algorithm):
        case None:
            return None
        case "fp8":
            return KVCacheDType.FP8_E4M3
        case "nvfp4":
            return KVCacheDType.NVFP4
        case "fp8_k_nvfp4_v":
            return KVCacheDType.FP8_K_NVFP4_V
    if warn:
        warnings.warn(
            f"{what}: unknown ModelOpt KV cache algorithm {shown(algorithm)} (known are FP8, NVFP4, FP8_K_NVFP4_V and,"
            f" with {_LAYERS}, MIXED_PRECISION): the KV cache keeps the model dtype; pass a kv_cache_dtype to choose"
            " another",
            KVCacheWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),  # attribute it to the caller's line
        )
    return None


def _read_quark(config: Mapping[str, Any]) -> DeclaredKVCache | None:
    """Reads the `layer_quant_config` of the outputs that Quark's export names as the KV cache's."""
    export, layers = config.get("export"), config.get("layer_quant_config")
    group = export.get("kv_cache_group") if isinstance(export, Mapping) else None
    if not group:
        return None
    patterns = [name for name in group if isinstance(name, str)] if isinstance(group, (list, tuple)) else []
    outputs = [
        layer.get("output_tensors") if isinstance(layer, Mapping) else None
        for name, layer in (layers.items() if isinstance(layers, Mapping) else ())
        if isinstance(name, str) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    for output in outputs or [None]:
        if not isinstance(output, Mapping) or not _is_quarks_fp8(output):
            raise KVCacheValueError(
                f"Quark's kv_cache_group {shown(group)}: got output_tensors {shown(output)}, expected dtype fp8_e4m3"
                f" and qscheme per_tensor, not dynamic; {_OVERRIDE}"
            )
    return DeclaredKVCache(KVCacheDType.FP8_E4M3)


def _is_quarks_fp8(output: Mapping[str, Any]) -> bool:
    return (output.get("dtype"), output.get("qscheme")) == ("fp8_e4m3", "per_tensor") and not output.get("is_dynamic")


def _read_scheme(scheme: Mapping[str, Any]) -> DeclaredKVCache:
    """Reads compressed-tensors' `QuantizationArgs`; rejects unknown settings that change how bytes decode."""
    dynamic, strategy = (_lower(scheme.get(key)) for key in ("dynamic", "strategy"))
    if dynamic not in (None, False, "local"):
        raise _unsupported(scheme, f"dynamic={shown(dynamic)} leaves the checkpoint without scales")
    if scheme.get("symmetric") is False:
        raise _unsupported(scheme, "symmetric=False needs zero points")
    match scheme.get("num_bits"), _lower(scheme.get("type")), strategy:
        case 8, "float", None | "tensor" | "attn_head" if dynamic != "local":
            return DeclaredKVCache(KVCacheDType.FP8_E4M3, per_head_scales=strategy == "attn_head")
        case 4, "float", None | "tensor" | "tensor_group" if scheme.get("group_size") in (None, NVFP4_BLOCK_SIZE):
            return DeclaredKVCache(KVCacheDType.NVFP4)
    raise _unsupported(scheme, "unknown combination")


def _unsupported(scheme: object, why: str) -> KVCacheValueError:
    return KVCacheValueError(
        f"kv_cache_scheme: got {shown(scheme)}: {why}; expected num_bits 8 and type float (strategy tensor or"
        f" attn_head), or num_bits 4 and type float (strategy tensor_group), with static scales; {_OVERRIDE}"
    )


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value
