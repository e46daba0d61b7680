"""Layout and byte positions of `key_cache` and `value_cache`, from their shapes and strides."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvjax import (
    AttentionSpec,
    CacheLayout,
    FullAttentionSpec,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    VScaleLayout,
    kernels,
)
from kvjax_torch.arguments.plan import BlockRows, CachePlan


class Facts(NamedTuple):
    """The properties of a tensor that plans are made from and looked up by: not its contents, nor its address."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Facts:
        """The facts of `tensor`."""
        return cls(tensor.dtype, tensor.shape, tensor.stride())


def check_caches(key_cache: Facts, value_cache: Facts) -> None:
    """Raises unless the two can be halves of one paged cache, whatever their dtype."""
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if len(cache.shape) != 4:
            raise KVCacheValueError(
                f"{name}: got shape {tuple(cache.shape)}, expected [num_blocks, block_size, num_kv_heads, row]"
                " (HND caches too: transposed, with their own strides)"
            )
        if not cache.shape[0]:
            raise KVCacheValueError(f"{name}: got shape {tuple(cache.shape)}, expected at least one block")
        if cache.strides[3] != 1:
            raise KVCacheValueError(f"{name}: got strides {cache.strides}, expected 1 along the last dimension")
        if _has_overlap(cache):
            raise KVCacheValueError(
                f"{name}: got strides {cache.strides} for shape {tuple(cache.shape)}, expected rows that do not overlap"
            )
    if value_cache.dtype != key_cache.dtype:
        raise KVCacheTypeError(f"value_cache: got dtype {value_cache.dtype}, expected {key_cache.dtype} as key_cache")
    if value_cache.shape[:3] != key_cache.shape[:3]:
        num_blocks, block_size, num_heads, _ = key_cache.shape
        raise KVCacheValueError(
            f"value_cache: got shape {tuple(value_cache.shape)}, expected [num_blocks={num_blocks},"
            f" block_size={block_size}, num_kv_heads={num_heads}, row] as key_cache"
        )


def cache_plan(
    key_cache: Facts,
    value_cache: Facts,
    num_kv_heads: int,
    head_sizes: tuple[int, int],
    dtype: KVCacheDType,
    v_scale_layout: str,
    scale_tensors: tuple[Facts, Facts] | None = None,
) -> CachePlan:
    """The plan of checked caches that hold `dtype`, with heads of `head_sizes` elements (key, value).

    `scale_tensors` are the tensors of each token's and head's scales, of keys and of values.

    Raises:
      KVCacheValueError: sizes that no cache can have, rows of another size, halves of different layouts, or pages that
        hold scales in another arrangement.
    """
    spec = FullAttentionSpec(
        key_cache.shape[1],
        num_kv_heads,
        *head_sizes,
        dtype=dtype,
        layout=_layout(key_cache),
        v_scale_layout=VScaleLayout.parse(v_scale_layout),
    )
    halves = (("key_cache", key_cache), ("value_cache", value_cache))
    for (name, cache), head_size, row_bytes in zip(halves, spec.head_sizes, spec.row_bytes, strict=True):
        row = (row_bytes[0] if scale_tensors else sum(row_bytes)) // cache.dtype.itemsize
        if cache.shape[2:] != (num_kv_heads, row):
            is_apart = dtype.is_per_token_head and cache.shape[3] == head_size
            hint = "; or k_scale and v_scale [num_blocks, block_size, num_kv_heads]" if is_apart else ""
            raise KVCacheValueError(
                f"{name}: got shape {tuple(cache.shape)}, expected [num_blocks, block_size,"
                f" num_kv_heads={num_kv_heads}, {row}] for head size {head_size} in {dtype.value!r}{hint}"
            )
    if _layout(value_cache) is not spec.layout:
        raise KVCacheValueError(
            f"value_cache: got strides {value_cache.strides}, which are {_layout(value_cache).value}, expected"
            f" {spec.layout.value} as those of key_cache, {key_cache.strides}"
        )
    if scale_tensors is not None:
        k_scale, v_scale = scale_tensors
        scales = _scale_rows("k_scale", k_scale, key_cache), _scale_rows("v_scale", v_scale, key_cache)
        return CachePlan(spec, _strided_rows(key_cache), _strided_rows(value_cache), scales)
    keys, values = (
        _rows_of_block(name, cache, spec, regions) if len(regions) > 1 else _strided_rows(cache)
        for (name, cache), regions in zip(halves, spec.regions, strict=True)
    )
    return CachePlan(spec, keys, values)


def _layout(cache: Facts) -> CacheLayout:
    """The layout that the strides show; NHD with one head or one token, where both layouts are the same."""
    _, block_size, num_heads, _ = cache.shape
    _, token_stride, head_stride, _ = cache.strides
    is_hnd = block_size > 1 and num_heads > 1 and head_stride > token_stride
    return CacheLayout.HND if is_hnd else CacheLayout.NHD


def _has_overlap(cache: Facts) -> bool:
    reach = 1
    for stride, size in sorted(zip(cache.strides, cache.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def check_apart(tensors: Mapping[str, torch.Tensor], *, is_written: bool) -> None:
    """Raises `KVCacheValueError` if two tensors share memory.

    Values that are only read may lie within the rows of keys, as in multi-head latent attention.
    """
    for (name, one), (other_name, other) in itertools.combinations(tensors.items(), 2):
        if share_memory(one, other) and (is_written or not _lie_within(one, other)):
            accepted = "memory of its own" if is_written else "memory of its own or rows within its rows"
            distance = other.data_ptr() - one.data_ptr()
            raise KVCacheValueError(
                f"{other_name}: got memory that overlaps that of {name}, {distance} bytes after its start, expected"
                f" {accepted}"
            )


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    facts, distance = Facts.of(one), other.data_ptr() - one.data_ptr()
    if distance >= _reach(facts):
        return False
    others = Facts.of(other)
    return -_reach(others) < distance and _share_bytes(facts, others, distance)


@functools.lru_cache(maxsize=1024)
def _reach(facts: Facts) -> int:
    """Bytes from a tensor's first one to its last."""
    last = sum((size - 1) * stride for size, stride in zip(facts.shape, facts.strides, strict=True))
    return (last + 1) * facts.dtype.itemsize if all(facts.shape) else 0


@functools.lru_cache(maxsize=1024)
def _share_bytes(one: Facts, other: Facts, distance: int) -> bool:
    """Whether two tensors share a byte; the first element of `other` is `distance` bytes after that of `one`."""
    address = max(1, 1 - distance)
    try:
        return np.shares_memory(_bytes_at(address, one), _bytes_at(address + distance, other), max_work=1_000_000)
    except np.exceptions.TooHardError:  # of strides that no cache has
        return False


def _bytes_at(address: int, facts: Facts) -> np.ndarray:
    """The bytes of a tensor at an address, for numpy to compare with others'; none of them may be read."""
    size = facts.dtype.itemsize
    shape, strides = (*facts.shape, size), (*(stride * size for stride in facts.strides), 1)
    fields = {"data": (address, True), "shape": shape, "strides": strides, "typestr": "|u1", "version": 3}
    return np.asarray(types.SimpleNamespace(__array_interface__=fields))


def _lie_within(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether each row of values lies within that of the keys of its token and head."""
    distance, size = values.data_ptr() - keys.data_ptr(), keys.element_size()
    last = distance + values.shape[3] * size
    return keys.stride()[:3] == values.stride()[:3] and distance >= 0 and last <= keys.shape[3] * size


def _strided_rows(cache: Facts) -> BlockRows:
    """The rows of a tensor that holds one kind of row."""
    itemsize = cache.dtype.itemsize
    block_stride, token_stride, head_stride, _ = (stride * itemsize for stride in cache.strides)
    return BlockRows(block_stride, (kernels.PageRegion(0, token_stride, head_stride, cache.shape[3] * itemsize),))


def _scale_rows(name: str, scales: Facts, key_cache: Facts) -> BlockRows:
    """The rows, of one float32 each, of a tensor `[num_blocks, block_size, num_kv_heads]` of any strides."""
    num_blocks, block_size, num_heads, _ = key_cache.shape
    if scales.shape != key_cache.shape[:3]:
        raise KVCacheValueError(
            f"{name}: got shape {tuple(scales.shape)}, expected [num_blocks={num_blocks}, block_size={block_size},"
            f" num_kv_heads={num_heads}] as key_cache"
        )
    if _has_overlap(scales):
        raise KVCacheValueError(
            f"{name}: got strides {scales.strides} for shape {tuple(scales.shape)}, expected scales that do not overlap"
        )
    return _strided_rows(Facts(scales.dtype, (*scales.shape, 1), (*scales.strides, 1)))


def _rows_of_block(name: str, cache: Facts, spec: AttentionSpec, regions: Sequence[kernels.PageRegion]) -> BlockRows:
    """The rows of a tensor whose last dimension is nominal: data and scales are separate regions of a block."""
    _, block_size, num_heads, row = cache.shape
    expected = (num_heads * row, row) if spec.layout is CacheLayout.NHD else (row, block_size * row)
    for stride, size, wanted in zip(cache.strides[1:3], cache.shape[1:3], expected, strict=True):
        if size > 1 and stride != wanted:
            raise KVCacheValueError(
                f"{name}: got strides {cache.strides}, expected (any, {expected[0]}, {expected[1]}, 1): the"
                f" {block_size * num_heads * row} bytes of a block in {spec.dtype.value!r} side by side"
            )
    return BlockRows(
        cache.strides[0], tuple(dataclasses.replace(rows, base=rows.base - regions[0].base) for rows in regions)
    )
