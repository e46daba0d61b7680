"""Stages of the decode kernel, of pages in every arrangement."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax.kernels.attention.stages import SharedRows, StageLayout
from kvjax.kernels.launchable import PageMemory
from kvjax.pages import interleaved_regions
from kvjax.spec import AttentionSpec


def page_memory(
    spec: AttentionSpec, *, one_memory: bool = True, alignment: int = 16, beside: bool = False
) -> tuple[PageMemory, PageMemory]:
    """Where keys and values lie: in one page, or each in one of its own, with nothing between rows that is theirs.

    With `beside` each value follows its key, as in vLLM's pages.
    """
    k, v = spec.regions
    if beside:
        rows = k[0].row_bytes, v[0].row_bytes
        regions = interleaved_regions(rows, spec.block_size, spec.num_kv_heads, spec.layout)
        return tuple(PageMemory((region,), spec.page_size_bytes, alignment) for region in regions)
    if one_memory:
        return tuple(PageMemory(regions, spec.page_size_bytes, alignment) for regions in (k, v))
    half = spec.page_size_bytes // 2
    moved = tuple(dataclasses.replace(region, base=region.base - v[0].base) for region in v)
    return PageMemory(k, half, alignment), PageMemory(moved, spec.page_size_bytes - half, alignment)


def layout_of(spec: AttentionSpec, heads: int | None = None, tiles: int = 1, **memory: Any) -> StageLayout:
    one_memory = memory.get("one_memory", True)
    places = page_memory(spec, **memory)
    return StageLayout.of(spec, places, heads or spec.num_kv_heads, tiles, one_memory=one_memory)


def kinds(layout: StageLayout) -> list[tuple[int, SharedRows]]:
    """Each kind of rows, with 0 for those of keys and 1 for those of values."""
    return [(half, rows) for half, each in enumerate((layout.keys, layout.values)) for rows in each]


def page_bytes(rows: SharedRows, token: int, head: int) -> np.ndarray:
    """Which bytes of a page a row is; a swizzled row is one of its tile."""
    page = rows.page
    return page.base + token * page.token_stride + head * page.head_stride + np.arange(page.row_bytes)
