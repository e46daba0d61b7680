"""Keys and values of a layer's pages, as operations on torch tensors take them."""

from __future__ import annotations

import math

import torch

from kvjax import AttentionSpec, CacheLayout, KVCacheTypeError, KVCacheValueError
from kvjax.ops.options import kind_of
from kvjax_torch.arguments.checks import check_tensors
from kvjax_torch.arguments.dtypes import torch_dtype


def split_kv_cache(kv_cache: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `key_cache` and `value_cache` of a layer's pages, of any cache dtype. They are views of its memory.

    Where keys and values have the same size, these are `kv_cache[:, 0]` and `kv_cache[:, 1]`, in HND with the middle
    dimensions exchanged. Other pages, such as those of `fp8_k_nvfp4_v`, have no such dimension.

    Args:
      kv_cache: of shape `spec.cache_shape(num_blocks)` and a dtype of as many bytes as `spec.array_dtype`, such as
        `to_torch(cache.kv)`. Pages may lie apart; each is contiguous.
      spec: the layer's.

    Returns:
      `[num_blocks, block_size, num_kv_heads, row]` each, of `kv_cache`'s dtype; for float32, float16 or bfloat16 in the
      bytes of a shared pool, of that dtype.

    Raises:
      KVCacheTypeError: no tensor, no spec of keys and values, or a dtype of another size.
      KVCacheValueError: another shape, pages that are not contiguous, or pages of a shared pool that are not aligned to
        the size of their elements.
    """
    check_tensors(kv_cache=kv_cache)
    if not isinstance(spec, AttentionSpec) or spec.is_mla:
        kind = "one of latents, which are not divided" if isinstance(spec, AttentionSpec) else kind_of(spec)
        raise KVCacheTypeError(f"spec: got {kind}, expected an AttentionSpec of keys and values")
    if kv_cache.element_size() != spec.array_dtype.itemsize:
        raise KVCacheTypeError(
            f"kv_cache: got dtype {kv_cache.dtype}, expected one of as many bytes as the spec's {spec.array_dtype}"
        )
    if not kv_cache.ndim or kv_cache.shape != spec.cache_shape(len(kv_cache)):
        page = ", ".join(map(str, spec.cache_shape(1)[1:]))
        raise KVCacheValueError(f"kv_cache: got shape {tuple(kv_cache.shape)}, expected [num_blocks, {page}]")
    if not kv_cache[:1].is_contiguous():
        raise KVCacheValueError(f"kv_cache: got strides {kv_cache.stride()}, expected contiguous pages")
    pages, is_hnd = kv_cache.flatten(1), spec.layout is CacheLayout.HND
    if (size := spec.storage_dtype.itemsize) > kv_cache.element_size():  # a shared pool's bytes
        if (kv_cache.data_ptr() | kv_cache.stride(0)) % size:
            raise KVCacheValueError(
                f"kv_cache: got address {kv_cache.data_ptr():#x} and {kv_cache.stride(0)} bytes from page to page,"
                f" expected multiples of {size}, the bytes of a {spec.storage_dtype}"
            )
        pages = pages[:, : spec.real_page_size_bytes].view(torch_dtype(spec.storage_dtype))
    inner = (spec.num_kv_heads, spec.block_size) if is_hnd else (spec.block_size, spec.num_kv_heads)
    rows, num_rows = [sum(row) // pages.element_size() for row in spec.row_bytes], math.prod(inner)
    pages = pages.narrow(1, 0, num_rows * sum(rows))
    if spec.regions.v[0].base == num_rows * sum(spec.row_bytes[0]):
        sides = pages.split([num_rows * row for row in rows], 1)
        halves = [side.unflatten(1, (*inner, row)) for side, row in zip(sides, rows, strict=True)]
    else:  # a token's key and value are adjacent
        halves = list(pages.unflatten(1, (*inner, sum(rows))).split(rows, 3))
    key_cache, value_cache = (half.transpose(1, 2) if is_hnd else half for half in halves)
    return key_cache, value_cache
