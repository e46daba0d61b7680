"""Where the bytes of a token are in a page: the description that every write and read uses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvjax.layouts import CacheLayout

SWIZZLE_TOKENS = 4
"""Tokens whose V scales the swizzled layout interleaves; a swizzled block holds a multiple of this."""


@dataclasses.dataclass(frozen=True)
class PageRegion:
    """A page's rows of one kind, in bytes.

    Head `h` of token `t` has `row_bytes` at `base + t * token_stride + h * head_stride`; in a `swizzled` region its
    scales are at the positions that `swizzled_position` returns.
    """

    base: int
    token_stride: int
    head_stride: int
    row_bytes: int
    swizzled: bool = False


class PageRegions(NamedTuple):
    """The regions of one page: for keys and for values their data and, where pages hold them, scales."""

    k: tuple[PageRegion, ...]
    v: tuple[PageRegion, ...]


def separate_regions(rows: Sequence[int], block_size: int, num_heads: int, layout: CacheLayout) -> list[PageRegion]:
    """Returns consecutive regions, each contiguous and in the layout's order; `rows` are their row sizes in bytes."""
    starts = itertools.accumulate((block_size * num_heads * row for row in rows), initial=0)
    return [
        PageRegion(base, *_strides(row, block_size, num_heads, layout), row)
        for base, row in zip(starts, rows, strict=False)
    ]


def interleaved_regions(rows: Sequence[int], block_size: int, num_heads: int, layout: CacheLayout) -> list[PageRegion]:
    """Returns regions whose rows of one token and head are adjacent."""
    strides = _strides(sum(rows), block_size, num_heads, layout)
    return [
        PageRegion(base, *strides, row) for base, row in zip(itertools.accumulate(rows, initial=0), rows, strict=False)
    ]


def _strides(row: int, block_size: int, num_heads: int, layout: CacheLayout) -> tuple[int, int]:
    return (num_heads * row, row) if layout is CacheLayout.NHD else (row, block_size * row)


def swizzled_position(token: Any, scale: Any, num_scales: int) -> tuple[Any, Any]:
    """Returns the position of a token's scale in its swizzled tile: (row, column) of `[block_size, num_scales]`.

    Its byte in the row-major tile is `(token // 4) * 4 * num_scales + 4 * scale + token % 4`: four tokens' scales of
    one block are adjacent. `token` and `scale` are ints or integer arrays.
    """
    first = token - token % SWIZZLE_TOKENS
    byte = first * num_scales + SWIZZLE_TOKENS * scale + token % SWIZZLE_TOKENS
    return byte // num_scales, byte % num_scales
