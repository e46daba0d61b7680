"""Every byte of a page belongs to one row of one region, and a swizzled tile is a rearrangement of its scales."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.dtypes import STORED_KV_CACHE_DTYPES, KVCacheDType
from kvjax.layouts import CacheLayout, VScaleLayout
from kvjax.pages import PageRegion, interleaved_regions, separate_regions, swizzled_position
from kvjax.spec import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

laws = settings(derandomize=True, max_examples=80)

SIZES = st.integers(1, 6)


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Any spec with small pages, of its own page size or part of a pool."""
    dtype = draw(st.sampled_from(STORED_KV_CACHE_DTYPES))
    in_blocks = dtype.parts[1].info.elements_per_scale is not None
    v_scale_layout = draw(st.sampled_from(VScaleLayout)) if in_blocks else VScaleLayout.LINEAR
    head_sizes = SIZES.map(lambda size: 16 * size) if in_blocks else st.integers(1, 40)
    window = draw(st.none() | st.integers(1, 100))
    kind = FullAttentionSpec if window is None else SlidingWindowSpec
    spec = kind(
        block_size=draw(SIZES) * (4 if v_scale_layout is VScaleLayout.SWIZZLED else 1),
        num_kv_heads=draw(SIZES),
        head_size=draw(head_sizes),
        head_size_v=draw(st.none() | head_sizes),
        dtype=dtype,
        layout=draw(st.sampled_from(CacheLayout)),
        v_scale_layout=v_scale_layout,
        sliding_window=window,
    )
    padding = draw(st.none() | st.integers(0, 100))
    return spec if padding is None else kind(**vars(spec) | {"page_size_padded": spec.page_size_bytes + padding})


def row_bytes(spec: AttentionSpec, region: PageRegion, token: int, head: int) -> Iterator[int]:
    """The bytes of the page that hold one row, in the row's own order."""
    for byte in range(region.row_bytes):
        row, column = swizzled_position(token, byte, region.row_bytes) if region.swizzled else (token, byte)
        yield region.base + row * region.token_stride + head * region.head_stride + column


def rows(spec: AttentionSpec) -> Iterator[tuple[int, int]]:
    return itertools.product(range(spec.block_size), range(spec.num_kv_heads))


@laws
@given(specs())
def test_regions_tile_a_page(spec: AttentionSpec):
    written = collections.Counter(
        byte
        for region in itertools.chain(*spec.regions)
        for token, head in rows(spec)
        for byte in row_bytes(spec, region, token, head)
    )
    assert written == collections.Counter(range(spec.real_page_size_bytes))


@laws
@given(specs())
def test_rows_hold_what_the_dtype_takes(spec: AttentionSpec):
    for regions, part, head_size in zip(spec.regions, spec.dtype.parts, spec.head_sizes, strict=True):
        sizes = [region.row_bytes for region in regions]
        assert sizes == [size for size in part.info.row_bytes(head_size) if size]


@laws
@given(specs())
def test_only_v_scales_are_swizzled_and_only_where_asked_for(spec: AttentionSpec):
    assert [region.swizzled for region in spec.regions.k] == [False] * len(spec.regions.k)
    assert [region.swizzled for region in spec.regions.v] == [False, spec.is_swizzled][: len(spec.regions.v)]


@laws
@given(specs().filter(lambda spec: spec.has_head_axis))
def test_regions_are_where_the_array_indexes_them(spec: AttentionSpec):
    """Where the array's axes are its elements', indexing it by them finds the bytes that the regions name."""
    itemsize = spec.array_dtype.itemsize
    elements = np.arange(spec.real_page_size_bytes // itemsize).reshape(spec.cache_shape(1))[0]
    if not spec.is_diffkv:
        keys, values = elements
    else:
        keys, values = elements[..., : spec.head_size], elements[..., spec.head_size :]
    for stored, [region] in zip((keys, values), spec.regions, strict=True):
        by_token = stored if spec.layout is CacheLayout.NHD else stored.swapaxes(0, 1)
        for token, head in rows(spec):
            first_bytes = by_token[token, head] * itemsize
            assert first_bytes.tolist() == list(row_bytes(spec, region, token, head))[::itemsize]


def test_nvfp4_regions_stand_in_the_contracts_order():
    """`[K_data | K_scale | V_data | V_scale]`: 8 tokens, 2 heads, keys of 64 (32 + 4 bytes), values of 32 (16 + 2)."""
    spec = FullAttentionSpec(8, 2, 64, 32, dtype=KVCacheDType.NVFP4)
    assert spec.regions.k == (PageRegion(0, 64, 32, 32), PageRegion(512, 8, 4, 4))
    assert spec.regions.v == (PageRegion(576, 32, 16, 16), PageRegion(832, 4, 2, 2))
    swizzled = FullAttentionSpec(8, 2, 64, 32, dtype=KVCacheDType.NVFP4, layout="HND", v_scale_layout="swizzled")
    assert swizzled.regions.k == (PageRegion(0, 32, 256, 32), PageRegion(512, 4, 32, 4))
    assert swizzled.regions.v == (PageRegion(576, 16, 128, 16), PageRegion(832, 2, 16, 2, swizzled=True))


@pytest.mark.parametrize("dtype", [KVCacheDType.FP8_PER_TOKEN_HEAD, KVCacheDType.INT8_PER_TOKEN_HEAD])
def test_scales_of_each_token_and_head_have_their_own_regions(dtype: KVCacheDType):
    """`[K | K scales | V | V scales]`: 8 tokens, 2 heads, keys of 64 bytes, values of 32, scales of 4."""
    spec = FullAttentionSpec(8, 2, 64, 32, dtype=dtype)
    assert spec.regions.k == (PageRegion(0, 128, 64, 64), PageRegion(1024, 8, 4, 4))
    assert spec.regions.v == (PageRegion(1088, 64, 32, 32), PageRegion(1600, 8, 4, 4))
    hnd = FullAttentionSpec(8, 2, 64, 32, dtype=dtype, layout="HND")
    assert hnd.regions.k == (PageRegion(0, 64, 512, 64), PageRegion(1024, 4, 32, 4))
    assert hnd.regions.v == (PageRegion(1088, 32, 256, 32), PageRegion(1600, 4, 32, 4))


@laws
@given(specs().filter(lambda spec: spec.dtype.is_per_token_head))
def test_regions_of_whole_groups_of_16_tokens_are_aligned(spec: AttentionSpec):
    spec = dataclasses.replace(spec, block_size=16 * spec.block_size, page_size_padded=None)
    assert not any(region.base % 16 for region in itertools.chain(*spec.regions))
    assert not spec.page_size_bytes % 16


def test_separate_regions_follow_one_another():
    nhd = separate_regions([10, 6], 4, 3, CacheLayout.NHD)
    assert nhd == [PageRegion(0, 30, 10, 10), PageRegion(120, 18, 6, 6)]
    hnd = separate_regions([10, 6], 4, 3, CacheLayout.HND)
    assert hnd == [PageRegion(0, 10, 40, 10), PageRegion(120, 6, 24, 6)]


def test_interleaved_regions_share_their_strides():
    nhd = interleaved_regions([10, 6], 4, 3, CacheLayout.NHD)
    assert nhd == [PageRegion(0, 48, 16, 10), PageRegion(10, 48, 16, 6)]
    hnd = interleaved_regions([10, 6], 4, 3, CacheLayout.HND)
    assert hnd == [PageRegion(0, 16, 64, 10), PageRegion(10, 16, 64, 6)]


@pytest.mark.parametrize("num_scales", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("block_size", [4, 8, 12, 16, 64])
def test_swizzling_rearranges_a_tile_by_the_contracts_formula(block_size: int, num_scales: int):
    byte_of = {}
    for token, scale in itertools.product(range(block_size), range(num_scales)):
        row, column = swizzled_position(token, scale, num_scales)
        assert 0 <= column < num_scales
        byte_of[token, scale] = row * num_scales + column
        assert byte_of[token, scale] == (token // 4) * 4 * num_scales + 4 * scale + token % 4
    assert sorted(byte_of.values()) == list(range(block_size * num_scales))


def test_swizzling_sets_four_tokens_scales_of_one_block_side_by_side():
    """8 tokens of 2 scales, written `token.scale` in the tile's order."""
    tile = [""] * 16
    for token, scale in itertools.product(range(8), range(2)):
        row, column = swizzled_position(token, scale, 2)
        tile[row * 2 + column] = f"{token}.{scale}"
    assert " ".join(tile) == "0.0 1.0 2.0 3.0 0.1 1.1 2.1 3.1 4.0 5.0 6.0 7.0 4.1 5.1 6.1 7.1"


def test_swizzling_takes_arrays():
    tokens, scales = np.meshgrid(np.arange(16), np.arange(8), indexing="ij")
    rows, columns = swizzled_position(tokens, scales, 8)
    assert [*zip(rows.flat, columns.flat, strict=True)] == [
        swizzled_position(token, scale, 8) for token in range(16) for scale in range(8)
    ]
