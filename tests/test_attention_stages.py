"""Stages of the decode kernel: where the bytes of a page go in shared memory, and which copies bring them there."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from support.helpers import matrix, simple_spec
from support.stage_layouts import kinds, layout_of, page_bytes, page_memory

from kvjax import KVCacheDType
from kvjax.dtypes import STORED_KV_CACHE_DTYPES
from kvjax.kernels.attention import stages
from kvjax.kernels.attention.stages import TILE, Chunk, StageLayout
from kvjax.kernels.launchable import PageMemory
from kvjax.pages import separate_regions

BF16, NVFP4 = KVCacheDType.BFLOAT16, KVCacheDType.NVFP4
BANKS = 128
"""Bytes that shared memory serves at once."""


def brought(stage: StageLayout, page_tile: int, first_head: int) -> np.ndarray:
    """The tile in shared memory after its bulk copies: of each byte the page's, 2**31 further an array; -1 of none."""
    tile = np.full(stage.stage_bytes // stage.tiles, -1, np.int64)
    for chunk in stage.chunks:
        source = chunk.source + page_tile * TILE * chunk.token_stride + first_head * chunk.head_stride
        to = tile[chunk.to : chunk.to + chunk.size]
        assert to.size == chunk.size, "past the tile's end"
        assert (to == -1).all(), "two copies bring one byte"
        assert [x % 16 for x in (source, chunk.to, chunk.size)] == [0, 0, 0]
        to[:] = source + np.arange(chunk.size) + (chunk.array << 31)
    return tile


def assert_each_row_is_brought_once(stage: StageLayout, num_heads: int) -> None:
    assert stage.chunks
    for page_tile, first_head in itertools.product(range(stage.block_size // TILE), range(0, num_heads, stage.heads)):
        tile = brought(stage, page_tile, first_head)
        wanted = np.full_like(tile, -1)
        for _, rows in kinds(stage):
            for row, which, head in itertools.product(range(8), range(2), range(stage.heads)):
                at = rows.offset(row, which) + head * rows.head_stride
                token = page_tile * TILE + stage.token(row, which)
                here = wanted[at : at + rows.page.row_bytes]
                assert (here == -1).all(), "two rows lie in one place"
                here[:] = page_bytes(rows, token, first_head + head) + (rows.array << 31)
        np.testing.assert_array_equal(tile, wanted)


@matrix(
    {
        "dtype": STORED_KV_CACHE_DTYPES,
        "layout": ["NHD", "HND"],
        "block_size": [16, 32, 48],
        "heads": [8, 4, 1],
        "head_size_v": [128, 64],
        "one_memory": [True, False],
        "v_scale_layout": ["linear", "swizzled"],
    },
    valid=lambda case: (
        (case["v_scale_layout"] == "linear" or KVCacheDType(case["dtype"]) is NVFP4)
        and (case["one_memory"] or case["head_size_v"] == 128)
    ),
    pairs=True,
    whole=True,
)
def test_bulk_copies_bring_each_byte_once_to_where_it_is_read(
    dtype, layout, block_size, heads, head_size_v, one_memory, v_scale_layout
):
    spec = simple_spec(
        KVCacheDType(dtype), layout=layout, block_size=block_size, num_kv_heads=8, head_size=128,
        head_size_v=head_size_v, v_scale_layout=v_scale_layout,
    )  # fmt: skip
    stage = layout_of(spec, heads, 2, one_memory=one_memory)
    if not stage.chunks:  # the scales of a token may be no whole 16 bytes: those of one head are 8, and of 64 dims 4
        assert layout == "NHD"
        assert any(rows.page.row_bytes * heads % 16 for _, rows in kinds(stage))
        return
    assert_each_row_is_brought_once(stage, 8)


@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [8, 4])
def test_bulk_copies_bring_scales_from_arrays_of_their_own(layout, heads, one_memory):
    spec = simple_spec(KVCacheDType.INT8_PER_TOKEN_HEAD, layout=layout, block_size=16, num_kv_heads=8, head_size=128)
    data = page_memory(dataclasses.replace(spec, dtype=KVCacheDType.FP8_E4M3), one_memory=one_memory)
    rows = separate_regions([4], 16, 8, spec.layout)
    scales = tuple(PageMemory(tuple(rows), 16 * 8 * 4, 16) for _ in range(2))
    stage = StageLayout.of(spec, data, heads, 2, one_memory=one_memory, scale_memory=scales)
    assert {rows.array for _, rows in kinds(stage)} == ({0, 2, 3} if one_memory else {0, 1, 2, 3})
    assert [rows.page.row_bytes for _, rows in kinds(stage)] == [128, 4, 128, 4]
    assert_each_row_is_brought_once(stage, 8)


@pytest.mark.parametrize(("dtype", "layout", "num_chunks"), [
    (NVFP4, "NHD", 8), (BF16, "NHD", 8), (KVCacheDType.FP8_E4M3, "NHD", 8),
    (NVFP4, "HND", 1), (BF16, "HND", 1), (KVCacheDType.FP8_E4M3, "HND", 1),
])  # fmt: skip
def test_bytes_that_adjoin_in_page_and_tile_are_one_copy(dtype, layout, num_chunks):
    """Rows of values are padded after each pair of tokens but the last, so seven gaps divide an NHD page."""
    spec = simple_spec(dtype, layout=layout, block_size=16, num_kv_heads=8, head_size=128)
    stage = layout_of(spec)
    assert len(stage.chunks) == num_chunks
    assert sum(chunk.size for chunk in stage.chunks) == spec.page_size_bytes


@matrix(
    {
        "dtype": [BF16, KVCacheDType.FLOAT16, KVCacheDType.FLOAT32, KVCacheDType.FP8_E4M3],
        "layout": ["NHD", "HND"],
        "block_size": [16, 48],
        "heads": [8, 2],
        "head_size_v": [128, 64],
    },
    pairs=True,
    whole=True,
)
def test_values_beside_their_keys_are_copied_with_them(dtype, layout, block_size, heads, head_size_v):
    """Of all heads of two tokens together, or of all tokens of a head."""
    shape = {"layout": layout, "block_size": block_size, "num_kv_heads": 8, "head_size": 128}
    spec = simple_spec(dtype, head_size_v=head_size_v, **shape)
    stage = layout_of(spec, heads, 2, beside=True)
    assert_each_row_is_brought_once(stage, 8)
    by_token, by_head = 8 if heads == 8 else TILE, 1 if block_size == TILE else heads
    assert len(stage.chunks) == {"NHD": by_token, "HND": by_head}[layout]
    size = sum(chunk.size for chunk in stage.chunks)
    assert size == TILE * heads * sum(rows.page.row_bytes for _, rows in kinds(stage))
    assert stage.stage_bytes <= layout_of(simple_spec(dtype, **shape), heads, 2).stage_bytes


def test_values_that_follow_no_key_are_rows_of_their_own():
    spec = simple_spec(BF16, block_size=16, num_kv_heads=8, head_size=128)
    keys, values = page_memory(spec, beside=True)
    every = [StageLayout.of(spec, (keys, values), 8, 1, one_memory=True)]
    for change in ({"base": 272}, {"base": 0, "token_stride": 8 * 512 + 256}):
        region = dataclasses.replace(values.regions[0], **change)
        every.append(
            StageLayout.of(spec, (keys, dataclasses.replace(values, regions=(region,))), 8, 1, one_memory=True)
        )
    every.append(StageLayout.of(spec, (keys, values), 8, 1, one_memory=False))
    assert [len(stage.chunks) for stage in every] == [8, 256, 256, 256]


def test_copies_are_joined_only_where_both_ends_follow():
    first = Chunk(0, 0, 32, 16, 8, 0)
    for second, across, num in [
        (first._replace(source=32, to=32), False, 1),
        (first._replace(source=48, to=32), False, 2),
        (first._replace(source=32, to=48), False, 2),
        (first._replace(source=32, to=32, array=1), True, 2),
        (first._replace(source=32, to=32, token_stride=32), False, 2),
        (first._replace(source=32, to=32, token_stride=32), True, 1),
    ]:
        merged = stages._merged([second, first], across=across)
        assert len(merged) == num
        assert sum(chunk.size for chunk in merged) == 64


def changed(memory: tuple[PageMemory, PageMemory], region: dict[str, int], **page: int) -> tuple[PageMemory, ...]:
    keys, values = (dataclasses.replace(half, **page) for half in memory)
    values = dataclasses.replace(
        values, regions=(dataclasses.replace(values.regions[0], **region), *values.regions[1:])
    )
    return keys, values


@pytest.mark.parametrize(
    ("region", "page", "unit"),
    [
        ({}, {"alignment": 8}, 8),
        ({}, {"alignment": 2}, 2),
        ({}, {"page_stride": 2 * 16 * 8 * 256 + 4}, 4),
        ({"base": 16 * 8 * 256 + 2}, {}, 2),
        ({"head_stride": 264, "token_stride": 8 * 264}, {}, 8),
        ({"token_stride": 8 * 256 + 2}, {}, 2),
    ],
    ids=str,
)
def test_threads_copy_what_is_not_aligned(region, page, unit):
    spec = simple_spec(BF16, block_size=16, num_kv_heads=8, head_size=128)
    memory = page_memory(spec)
    assert StageLayout.of(spec, memory, 8, 1, one_memory=True).chunks
    stage = StageLayout.of(spec, changed(memory, region, **page), 8, 1, one_memory=True)
    assert not stage.chunks
    assert stage.values[0].unit == unit
    assert stage.copies_asynchronously == (unit >= 4)


@pytest.mark.parametrize(
    "spec",
    [
        simple_spec(BF16, block_size=8, num_kv_heads=8),
        simple_spec(BF16, block_size=24, num_kv_heads=8),
        simple_spec(NVFP4, block_size=16, num_kv_heads=8, head_size=80, v_scale_layout="swizzled"),
    ],
    ids=["pages of half a tile", "pages of no whole tiles", "scales of no whole words"],
)
def test_threads_copy_what_no_bulk_copy_divides(spec):
    assert not layout_of(spec).chunks


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, KVCacheDType.FP8_E5M2, NVFP4], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("alignment", [16, 8])
def test_eight_rows_of_values_are_read_at_once(dtype, head_size, alignment):
    """`ldmatrix` reads 16 bytes of eight rows: in eight different 16ths of 128 bytes, if rows are padded for it."""
    spec = simple_spec(dtype, block_size=16, num_kv_heads=8, head_size=head_size)
    stage = layout_of(spec, alignment=alignment)
    rows = stage.values[0]
    assert stage.interleaved == bool(stage.chunks) == (alignment == 16)
    for half, head in itertools.product(range(2), range(8)):
        starts = [rows.offset(row, half) + head * rows.head_stride for row in range(8)]
        if rows.page.row_bytes % 16 == 0:  # or else `ldmatrix` does not read them
            assert not any(start % 16 for start in starts)
            assert len({start % BANKS for start in starts}) == 8


@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "head_size", "is_padded"),
    [
        (NVFP4, 8, 64, True),
        (NVFP4, 4, 128, False),
        (NVFP4, 4, 256, True),
        (NVFP4, 2, 128, False),
        (KVCacheDType.FP8_K_NVFP4_V, 4, 128, False),
        (KVCacheDType.FP8_E4M3, 2, 128, True),
        (BF16, 1, 128, True),
    ],
)
def test_values_are_padded_from_a_minimum_size_per_token(
    dtype: KVCacheDType, num_kv_heads: int, head_size: int, is_padded: bool
):
    """NVFP4 values of up to four heads are padded from 512 bytes per token, all others from 256."""
    stage = layout_of(simple_spec(dtype, block_size=16, num_kv_heads=num_kv_heads, head_size=head_size))
    assert stage.interleaved == is_padded
    assert (len(stage.chunks) > 1) == is_padded
