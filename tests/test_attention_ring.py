"""The ring of the attention kernel: what its copies bring, by their models, and the arithmetic of their places."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import simple_spec
from support.interpret_mode import interpret_mode
from support.stage_layouts import kinds, layout_of, page_bytes

from kvjax import KVCacheDType
from kvjax.kernels.attention.ring import PartlyStaticInt, Ring
from kvjax.kernels.attention.stages import TILE
from kvjax.kernels.registers import LANES, THREADS, WARPS
from kvjax.spec import AttentionSpec

BF16, FP8, NVFP4 = KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4


def registers(values: Any) -> jax.Array:
    return jnp.asarray(np.broadcast_to(values, THREADS), jnp.int32)


def split_as_integers(number: PartlyStaticInt, divisor: int) -> tuple[PartlyStaticInt, PartlyStaticInt]:
    """The quotient and the remainder, tested against those of integers and against their own bounds."""
    parts = number.split(divisor)
    for part, expected in zip(parts, np.divmod(np.asarray(number.value), divisor), strict=True):
        np.testing.assert_array_equal(part.value, expected)
        varying = np.asarray(part.varying)
        assert varying.min() >= 0
        assert varying.max() < part.bound
    return parts


@pytest.mark.parametrize("bound", [1, 3, 4, 8, 32, 128])
def test_partly_static_ints_divide_like_integers(bound):
    with interpret_mode():
        for known, divisor in itertools.product([0, 4, 8, 128, 135, 1024, 1152], [1, 3, 4, 8, 24, 128, 256, 1000]):
            split_as_integers(PartlyStaticInt(registers(np.arange(THREADS) % bound), bound, known), divisor)


def test_division_keeps_static_parts_static():
    """So that most addresses are constants: of 128 threads that copy 8 pieces of a row, 16 tokens of 4 heads."""
    with interpret_mode():
        for first in range(0, 1024, THREADS):
            rest, piece = split_as_integers(PartlyStaticInt(registers(np.arange(THREADS)), THREADS, first), 8)
            rest, token = split_as_integers(rest, 16)
            tile, head = split_as_integers(rest, 4)
            assert (piece.known, piece.bound, token.known, token.bound) == (0, 8, 0, 16)
            assert (tile.bound, tile.known, head.bound, head.known) == (1, first // 512, 1, first // 128 % 4)


def test_partly_static_ints_add_and_multiply_like_integers():
    thread = np.arange(THREADS)
    some = [
        PartlyStaticInt(registers(thread % 8), 8, 5),
        PartlyStaticInt(registers(thread // 8), 16, 0),
        PartlyStaticInt(registers(0), 1, 7),
    ]
    for x, y, factor in itertools.product(some, some, [0, 1, 12]):
        for got, expected in [(x.plus(y), x.value + y.value), (x.times(factor), x.value * factor)]:
            np.testing.assert_array_equal(got.value, expected)
            assert 0 <= np.asarray(got.varying).min() <= np.asarray(got.varying).max() < got.bound


def filled(spec: AttentionSpec, heads: int, tiles: int, position: int, end: int, **memory: Any) -> tuple[Any, ...]:
    """A stage after its copies, by their models: layout, the pages' bytes, the table and the second slot's bytes."""
    num_layers, layer, num_blocks, first_head = 2, 1, 16, spec.num_kv_heads - heads
    layout = layout_of(spec, heads, tiles, **memory)
    rng = np.random.default_rng(0)
    table = rng.permutation(num_blocks).astype(np.int32)
    table[2] = num_blocks  # a block that does not exist
    pages = rng.integers(1, 256, (num_blocks * num_layers, spec.page_size_bytes), dtype=np.uint8)
    with interpret_mode():
        buffer = jax.new_ref(jnp.zeros(2 * layout.stage_bytes, jnp.uint8))
        both = jax.new_ref(jnp.asarray(pages))
        ring = Ring(
            layout, WARPS, 2, buffer, None, (both, both), jax.new_ref(jnp.asarray(table)), jnp.uint32(num_blocks),
            num_layers, jnp.int32(layer), jnp.int32(first_head), jnp.arange(THREADS, dtype=jnp.int32),
        )  # fmt: skip
        found = ring.blocks(jnp.int32(0), jnp.int32(position), jnp.int32(0), jnp.int32(end))
        ring.fill(jnp.int32(1), jnp.int32(0), jnp.int32(position), found)
        slots = np.asarray(buffer[...]).reshape(2, -1)
    assert not slots[0].any(), "copies into another slot"
    return layout, pages[layer::num_layers], table, slots[1]


@pytest.mark.parametrize(
    ("spec", "heads", "memory", "in_bulk"),
    [
        (simple_spec(NVFP4, block_size=16, num_kv_heads=4, v_scale_layout="swizzled"), 4, {}, True),
        (simple_spec(BF16, block_size=32, num_kv_heads=4, head_size_v=32), 2, {}, True),
        (simple_spec(FP8, block_size=16, num_kv_heads=4), 4, {"beside": True}, True),
        (simple_spec(BF16, block_size=32, num_kv_heads=4, layout="HND"), 2, {"beside": True}, True),
        (simple_spec(NVFP4, block_size=16, num_kv_heads=4), 2, {"alignment": 4}, False),
        (simple_spec(NVFP4, block_size=24, num_kv_heads=4, layout="HND"), 2, {}, False),
        (simple_spec(NVFP4, block_size=8, num_kv_heads=2, v_scale_layout="swizzled", head_size=80), 2, {}, False),
        (simple_spec(FP8, block_size=5, num_kv_heads=3), 3, {"beside": True}, False),
    ],
)
def test_a_stage_has_the_tokens_of_its_pages(spec, heads, memory, in_bulk):
    tiles, position, end = 2, 32, 61
    layout, pages, table, stage = filled(spec, heads, tiles, position, end, **memory)
    assert bool(layout.chunks) == in_bulk
    for half, rows in kinds(layout):
        for tile, row, which, head in itertools.product(range(tiles), range(8), range(2), range(heads)):
            token = position + tile * TILE + layout.token(row, which)
            block, in_page = divmod(token, spec.block_size)
            first = token // 4 * 4 if rows.page.swizzled else token  # four tokens share swizzled rows
            if first >= end or table[block] >= len(pages):
                continue
            at = tile * rows.tile_stride + rows.offset(row, which) + head * rows.head_stride
            expected = pages[table[block], page_bytes(rows, in_page, spec.num_kv_heads - heads + head)]
            got = stage[at : at + rows.page.row_bytes]
            np.testing.assert_array_equal(got, expected, f"{half} {tile} {row} {which} {head}")


def test_nothing_of_a_block_that_does_not_exist_is_copied():
    spec = simple_spec(BF16, block_size=16, num_kv_heads=2)
    for alignment in (16, 8):
        *_, stage = filled(spec, 2, 1, 32, 48, alignment=alignment)
        assert not stage.any()


def test_any_missing_block_is_noticed():
    spec = simple_spec(BF16, block_size=16, num_kv_heads=2)
    layout = layout_of(spec)
    table = np.zeros(3 * LANES, np.int32)
    table[70] = -1
    with interpret_mode():
        ring = Ring(
            layout, WARPS, 2, None, None, (None, None), jax.new_ref(jnp.asarray(table)), jnp.uint32(1), 1, jnp.int32(0),
            jnp.int32(0), jnp.arange(THREADS, dtype=jnp.int32),
        )  # fmt: skip
        for start, end, lacks in [(0, 1120, False), (0, 1121, True), (1135, 1136, True), (1136, 1500, False)]:
            assert bool(ring.lacks_blocks(jnp.int32(0), jnp.int32(start), jnp.int32(end))) == lacks
