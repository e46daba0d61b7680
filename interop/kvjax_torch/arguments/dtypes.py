"""Dtypes of torch for what kvjax stores and reads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from kvjax import (
    MLA_KV_CACHE_DTYPES,
    STORED_KV_CACHE_DTYPES,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    MLAAttentionSpec,
    VScaleLayout,
    parse_kv_cache_dtype,
)
from kvjax.ops.options import parse_dtype_of


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Torch's dtype of the same name."""
    return getattr(torch, dtype.name)


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Numpy's or ml_dtypes' dtype of the same name."""
    return np.dtype(str(dtype).removeprefix("torch."))


INPUT_DTYPES = tuple(torch_dtype(row.info.storage_dtype) for row in STORED_KV_CACHE_DTYPES if not row.is_quantized)
"""Element types of keys, values and gathered results."""

INDEX_DTYPES = (torch.int32, torch.int64)


@functools.cache
def resolve_cache_dtype(kv_cache_dtype: str | KVCacheDType, key_cache: torch.dtype) -> KVCacheDType:
    """The dtype that `kv_cache_dtype` names for a cache tensor of element type `key_cache`; "auto" is the tensor's own.

    Raises:
      KVCacheValueError: an unknown name, one of latents (MLA), or "auto" for bytes, which do not say what they hold.
      KVCacheTypeError: the tensor's element type cannot hold the named dtype.
    """
    dtype = parse_dtype_of("kv_cache_dtype", kv_cache_dtype, (KVCacheDType.AUTO, *STORED_KV_CACHE_DTYPES))
    if dtype is KVCacheDType.FP8_DS_MLA:
        names = ", ".join(row.value for row in STORED_KV_CACHE_DTYPES)
        raise KVCacheValueError(
            f"kv_cache_dtype: got {dtype.value!r}, expected one of {names} (it stores latents (MLA), which"
            " kvjax_torch.concat_and_cache_mla and mla_paged_attention take)"
        )
    if dtype is KVCacheDType.AUTO:
        # A tensor of 8-bit elements does not show whether each token and head has a scale: "auto" assumes not.
        held = [row for row in STORED_KV_CACHE_DTYPES if key_cache in storage_dtypes(row) and not row.is_per_token_head]
        if len(held) != 1:
            stored = [row for row in STORED_KV_CACHE_DTYPES if key_cache in storage_dtypes(row)]
            names = ", ".join(row.value for row in stored or STORED_KV_CACHE_DTYPES)
            raise KVCacheValueError(
                f"kv_cache_dtype: got {dtype.value!r} with a {key_cache} cache, expected one of {names}"
            )
        return held[0]
    if key_cache not in storage_dtypes(dtype):
        accepted = " or ".join(map(str, storage_dtypes(dtype)))
        raise KVCacheTypeError(
            f"key_cache: got dtype {key_cache}, expected {accepted} for kv_cache_dtype {dtype.value!r}"
        )
    return dtype


def resolve_latent_dtype(
    kv_cache_dtype: str | KVCacheDType, kv_cache: torch.dtype, name: str = "kv_cache"
) -> KVCacheDType:
    """The dtype that `kv_cache_dtype` names for a tensor of latents (MLA), the argument `name`; "auto" is its own.

    Raises:
      KVCacheValueError: an unknown name, one that latents cannot have, or "auto" for bytes.
      KVCacheTypeError: the tensor's element type cannot hold the named dtype.
    """
    dtype = parse_dtype_of("kv_cache_dtype", kv_cache_dtype, (KVCacheDType.AUTO, *MLA_KV_CACHE_DTYPES))
    names = ", ".join(row.value for row in MLA_KV_CACHE_DTYPES)
    if dtype is KVCacheDType.AUTO:
        # Rows in bytes have a storage dtype of uint8, which several dtypes share.
        held = [row for row in MLA_KV_CACHE_DTYPES if kv_cache in _latent_storage(row) and kv_cache is not torch.uint8]
        if len(held) != 1:
            raise KVCacheValueError(
                f"kv_cache_dtype: got {dtype.value!r} with a {kv_cache} cache, expected one of {names}"
            )
        return held[0]
    if dtype not in MLA_KV_CACHE_DTYPES:
        raise KVCacheValueError(f"kv_cache_dtype: got {dtype.value!r}, expected one of {names} for latents (MLA)")
    if kv_cache not in (accepted := _latent_storage(dtype)):
        raise KVCacheTypeError(
            f"{name}: got dtype {kv_cache}, expected {' or '.join(map(str, accepted))} for kv_cache_dtype"
            f" {dtype.value!r}"
        )
    return dtype


def _latent_storage(dtype: KVCacheDType) -> tuple[torch.dtype, ...]:
    """Element types of caches of latents: those of keys, but bytes where latents and rope keys are stored otherwise."""
    is_uniform = MLAAttentionSpec(1, LATENT_UNIT, 0, dtype=dtype).parts == (dtype, dtype)
    return storage_dtypes(dtype) if is_uniform else (torch.uint8,)


LATENT_UNIT = 128
"""Elements of a latent that all dtypes can store."""


def dtype_name(kv_cache_dtype: str | KVCacheDType) -> str:
    """`kv_cache_dtype` as torch's dispatcher takes it.

    Raises:
      KVCacheTypeError: neither a string nor a `KVCacheDType`.
    """
    return kv_cache_dtype if type(kv_cache_dtype) is str else parse_kv_cache_dtype(kv_cache_dtype).value


def order_name(v_scale_layout: str) -> str:
    """`v_scale_layout` as torch's dispatcher takes it.

    Raises:
      KVCacheValueError: not a string, nor a `VScaleLayout`.
    """
    return v_scale_layout if type(v_scale_layout) is str else VScaleLayout.parse(v_scale_layout).value


@functools.cache
def storage_dtypes(dtype: KVCacheDType) -> tuple[torch.dtype, ...]:
    """Element types of cache tensors that can hold `dtype`; a quantized cache may always be passed as uint8."""
    if not dtype.is_quantized:
        return (torch_dtype(dtype.info.storage_dtype),)
    own = {getattr(torch, part.info.storage_dtype.name, torch.uint8) for part in dtype.parts}  # torch may lack some
    return (torch.uint8, *own) if len(own) == 1 and torch.uint8 not in own else (torch.uint8,)


def has_scale_tensors(scale: torch.Tensor) -> bool:
    """Whether a call's scales are scales of each token and head in tensors of their own."""
    return scale.ndim == 3


def row_head_size(what: str, row_bytes: int, part: KVCacheDType, *, scales_apart: bool = False) -> int:
    """The head size of a row of `row_bytes` of keys or values of dtype `part`; with `scales_apart` the row does not
    include scales of each token and head.

    Raises:
      KVCacheValueError: no head size has rows of `row_bytes`.
    """
    head_size = part.info.head_size_of(row_bytes + (part.info.row_bytes(1)[1] if scales_apart else 0))
    if head_size is None:
        unit = part.info.elements_per_scale or 1
        expected = "5 or more" if part.is_per_token_head else f"a multiple of {sum(part.info.row_bytes(unit))}"
        raise KVCacheValueError(f"{what}: got rows of {row_bytes} bytes, expected {expected} for {part.value!r}")
    return head_size


def check_dtype(dtype: object) -> None:
    """Raises `KVCacheTypeError` if `dtype` is neither None nor a `torch.dtype`, such as a string."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise KVCacheTypeError(
            f"dtype: got {dtype!r} of type {type(dtype).__name__}, expected one of {', '.join(map(str, INPUT_DTYPES))}"
        )


def gathered_dtype(dtype: torch.dtype | None, cache_dtype: KVCacheDType) -> torch.dtype:
    """The dtype of `gather_kv`'s results: `dtype`, or by default the cache's if it is unquantized, else bfloat16.

    Raises:
      KVCacheTypeError: `dtype` is not one of `INPUT_DTYPES`.
    """
    if dtype is None:
        return torch.bfloat16 if cache_dtype.is_quantized else torch_dtype(cache_dtype.info.storage_dtype)
    if dtype not in INPUT_DTYPES:
        raise KVCacheTypeError(f"dtype: got {dtype}, expected one of {', '.join(map(str, INPUT_DTYPES))}")
    return dtype
