"""What a checkpoint's `quantization_config` declares about its KV cache: one pure reading of each producer's form."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import warnings
from collections.abc import Mapping
from typing import Any

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVCacheDType
from kvjax.errors import KVCacheTypeError, KVCacheValueError, KVCacheWarning, shown


@dataclasses.dataclass(frozen=True)
class DeclaredKVCache:
    """A checkpoint's KV cache: its dtype, and whether the checkpoint holds a scale for each KV head."""

    dtype: KVCacheDType
    per_head_scales: bool = False


def read_declared_kv_cache(
    quantization_config: Mapping[str, Any] | None, *, warn: bool = True
) -> DeclaredKVCache | None:
    """What `quantization_config` says of the KV cache; None where it says nothing or leaves it unquantized.

    Reads compressed-tensors' `kv_cache_scheme`, ModelOpt's `kv_cache_quant_algo` and `kv_cache_scheme` (in
    `config.json`'s form and in `hf_quant_config.json`'s), Quark's `kv_cache_group`, and AutoFP8's
    `"kv_cache_scheme": "static"`.

    Args:
      quantization_config: the checkpoint's; never modified.
      warn: whether to warn.

    Raises:
      KVCacheValueError: a scheme that kvjax cannot store; the message names it.
      KVCacheTypeError: `quantization_config` is neither a mapping nor None.

    Warns:
      KVCacheWarning: an algorithm of ModelOpt's that kvjax does not know; the result is then None.
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
    raise _unsupported(scheme, "this form is not known")


def _is_modelopt(config: Mapping[str, Any]) -> bool:
    if method := _lower(config.get("quant_method")):
        return isinstance(method, str) and method.startswith("modelopt")
    # hf_quant_config.json names no method; these keys are ModelOpt's own.
    return any(key in config for key in ("producer", "quantization", "kv_cache_quant_algo"))


def _read_modelopt(config: Mapping[str, Any], warn: bool) -> DeclaredKVCache | None:
    places = [place for place in (config.get("quantization"), config) if isinstance(place, Mapping)]
    declarations = (place.get(key) for place in places for key in ("kv_cache_quant_algo", "kv_cache_scheme"))
    declared = next((declaration for declaration in declarations if declaration is not None), None)
    if isinstance(declared, Mapping):
        return _read_scheme(declared)
    match _lower(declared):
        case None | "mixed_precision":
            return None
        case "fp8":
            return DeclaredKVCache(KVCacheDType.FP8_E4M3)
        case "nvfp4":
            return DeclaredKVCache(KVCacheDType.NVFP4)
    if warn:
        warnings.warn(
            f"ModelOpt KV cache algorithm {shown(declared)} is not known (known are FP8, NVFP4 and MIXED_PRECISION):"
            " the KV cache keeps the model dtype; ask for a kv_cache_dtype to choose another",
            KVCacheWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),  # the caller's line, from whatever depth
        )
    return None


def _read_quark(config: Mapping[str, Any]) -> DeclaredKVCache | None:
    """Reads what Quark's `layer_quant_config` makes of the outputs that its export names as the KV cache's."""
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
                " and qscheme per_tensor, not dynamic; ask for a kv_cache_dtype to pass over the checkpoint's"
            )
    return DeclaredKVCache(KVCacheDType.FP8_E4M3)


def _is_quarks_fp8(output: Mapping[str, Any]) -> bool:
    return (output.get("dtype"), output.get("qscheme")) == ("fp8_e4m3", "per_tensor") and not output.get("is_dynamic")


def _read_scheme(scheme: Mapping[str, Any]) -> DeclaredKVCache:
    """Reads compressed-tensors' `QuantizationArgs`; whatever changes how bytes decode and is not known is refused."""
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
    raise _unsupported(scheme, "this combination is not known")


def _unsupported(scheme: object, why: str) -> KVCacheValueError:
    return KVCacheValueError(
        f"kv_cache_scheme: got {shown(scheme)}: {why}; expected num_bits 8 and type float (strategy tensor or"
        " attn_head), or num_bits 4 and type float (strategy tensor_group), with static scales;"
        " ask for a kv_cache_dtype to pass over the checkpoint's"
    )


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value
