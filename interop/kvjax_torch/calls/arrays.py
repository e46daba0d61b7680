"""The memory of caches, rows and scales as kernels are compiled for it: regions, strides and alignments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvjax import AttentionSpec, UnsupportedError, kernels
from kvjax_torch.arguments.plan import (
    BlockRows,
    CachePlan,
    ReadTensors,
    RowTensors,
)

ROW_ALIGNMENTS = (64, 16, 8, 4, 2)
"""Alignments of rows, in bytes, that kernels are compiled for."""

COPIED_BELOW = 16
"""Rows with a lower alignment than packed rows would have, up to this one, are packed before they are written, so that
threads read this many bytes at once."""

PAGE_ALIGNMENT = 16
"""Bytes that a thread moves at once, the highest alignment of pages that makes a difference."""


type ScaleAlignments = tuple[int | None, int | None]
"""For keys and for values, the alignment of the pages of the scales of each token and head; None if there are none.
"""


class PagePlaces(NamedTuple):
    """The properties of pages' addresses that kernels which read them are compiled for.

    Attributes:
      alignments: of the pages of keys and of those of values.
      value_start: bytes from a page of keys to that of values where both have the same pages; None elsewhere.
      scale_alignments: of the pages of the scales of each token and head.
    """

    alignments: tuple[int, int]
    value_start: int | None = None
    scale_alignments: ScaleAlignments = (None, None)


def page_places(plan: CachePlan, tensors: ReadTensors) -> PagePlaces:
    """The places of a cache's pages.

    Two views of pages that hold keys and values are one memory, of which a kernel copies the bytes of both together.
    """
    key_cache, value_cache, *_ = tensors
    start = value_cache.data_ptr() - key_cache.data_ptr()
    of_scales = scale_alignments(plan, plan.scale_tensors(tensors))
    return PagePlaces(page_alignments(tensors), start if 0 < start <= plan.last_value_start else None, of_scales)


def runs(x: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, int]:
    """Keys or values, copied if the elements of a token are not contiguous, and their alignment."""
    _, num_heads, size = x.shape
    token_stride, head_stride, _ = x.stride()
    is_run = (num_heads == 1 or head_stride == size) and token_stride >= num_heads * size
    packed = num_heads * size * x.element_size()
    alignment = row_alignment(x.data_ptr() | token_stride * x.element_size())
    if is_run and alignment >= min(COPIED_BELOW, row_alignment(packed)):
        return x, alignment
    return x[:num_tokens].clone(memory_format=torch.contiguous_format), row_alignment(packed)


def row_alignment(places: int) -> int:
    """The alignment that kernels are compiled for; `places` are the rows' addresses, in bytes, or-ed together."""
    return next(alignment for alignment in ROW_ALIGNMENTS if not places % alignment)


def _scale(scale: torch.Tensor) -> torch.Tensor:
    """A scale that a kernel can read; several are read as vectors, so unaligned ones are copied."""
    if scale.numel() == 1 or not scale.data_ptr() % kernels.MAX_VECTOR_BYTES:
        return scale.contiguous()
    return scale.clone(memory_format=torch.contiguous_format)


def scale_arrays(cache: CachePlan, scales: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The scale arrays of a kernel call; those of each token and head are never copied."""
    pairs = zip(scales, cache.have_row_scales, strict=True)
    return tuple(scale if of_rows else _scale(scale) for scale, of_rows in pairs)


def scale_alignments(cache: CachePlan, scales: tuple[torch.Tensor, torch.Tensor]) -> ScaleAlignments:
    """The alignments of the scales of each token and head that kernels are compiled for."""
    pairs = zip(scales, cache.have_row_scales, strict=True)
    k_scale, v_scale = (page_alignment(scale) if of_rows else None for scale, of_rows in pairs)
    return k_scale, v_scale


def page_alignment(cache: torch.Tensor) -> int:
    """The alignment of all pages of a tensor, `PAGE_ALIGNMENT` at most."""
    places = cache.data_ptr() | cache.stride(0) * cache.element_size() | PAGE_ALIGNMENT
    return places & -places


def page_alignments(tensors: ReadTensors | RowTensors) -> tuple[int, int]:
    """The alignments of the pages of keys and of those of values."""
    return page_alignment(tensors.key_cache), page_alignment(tensors.value_cache)


def page_memory(cache: CachePlan, alignments: tuple[int, int]) -> tuple[kernels.PageMemory, ...]:
    """The pages of keys and of values, or of the parts of latents; for rows with a scale for each token and head,
    without the scales.
    """
    every = tuple(
        _memory(cache.spec, name, _part(rows, 0) if of_rows else rows, alignment)
        for name, rows, of_rows, alignment in zip(
            ("key_cache", "value_cache"), (cache.keys, cache.values), cache.have_row_scales, alignments, strict=True
        )
    )
    return every[: cache.num_parts]


def scale_memory(
    cache: CachePlan, alignments: ScaleAlignments
) -> tuple[kernels.PageMemory | None, kernels.PageMemory | None]:
    """The pages of the scales of each token and head, as arrays of their own, which they may be."""
    keys, values = (
        None if alignment is None else _memory(cache.spec, name, own or _part(rows, 1), alignment)
        for name, rows, own, alignment in zip(
            ("k_scale", "v_scale"), (cache.keys, cache.values), cache.scales or (None, None), alignments, strict=True
        )
    )
    return keys, values


def _part(rows: BlockRows, index: int) -> BlockRows:
    return rows._replace(regions=rows.regions[index : index + 1])


def _memory(spec: AttentionSpec, name: str, rows: BlockRows, alignment: int) -> kernels.PageMemory:
    for region in rows.regions:
        reach = max(spec.num_kv_heads * region.head_stride, spec.block_size * region.token_stride)
        if reach > rows.block_stride:
            raise UnsupportedError(
                f"{name}: got blocks {rows.block_stride} bytes apart with rows of a block {reach} bytes apart,"
                " expected the rows of a block side by side; on CUDA no kernel serves blocks that interleave"
            )
    return kernels.PageMemory(rows.regions, rows.block_stride, alignment)
