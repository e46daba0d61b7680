"""Values of a stage as the first matrix operand, and the output: their products with the weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Ref
from kvjax.kernels.attention import formats
from kvjax.kernels.attention.problem import Problem
from kvjax.kernels.attention.stages import SharedRows, StageLayout
from kvjax.kernels.attention.warp import Warp
from kvjax.pages import swizzled_position

MAX_RUNS_OF_TERMS = 16
"""Maximum number of runs of eight float32 whose terms a thread holds at once; even."""


class Values(NamedTuple):
    """Values of a tile: for each run of eight units of a row, a register for tokens 0 to 7 and one for 8 to 15.

    Where values are sums of terms, `words` has all runs of the first term before those of the next. For NVFP4, `scales`
    are their block scales, those of two tokens as a float16 pair.
    """

    words: list[list[jax.Array]]
    scales: list[list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class ValueRows:
    """The values that a warp reads from the stages in `buffer`."""

    problem: Problem
    layout: StageLayout
    warp: Warp
    buffer: Ref

    @functools.cached_property
    def units(self) -> int:
        """Units of a value row."""
        return self.layout.values[0].page.row_bytes // self.problem.value_format.unit_bytes

    @functools.cached_property
    def tiles(self) -> int:
        """Runs of eight units of a value row."""
        return -(-self.units // 8)

    @functools.cached_property
    def products(self) -> int:
        """Matrix products of 16 dims that cover a value row."""
        return -(-self.tiles * self.problem.value_format.elements_per_unit // 2)

    def dim(self, product: int, half: int) -> tuple[jax.Array, jax.Array]:
        """The dim of row `8 * half + g` of a product, and whether it exists."""
        each = self.problem.value_format.elements_per_unit
        tile, element = divmod(2 * product + half, each)
        unit = 8 * tile + self.warp.row
        return unit * each + element, unit < self.units

    @functools.cached_property
    def pieces(self) -> list[range]:
        """Runs of eight units loaded together: all, except for float32, whose terms would take all registers."""
        size = MAX_RUNS_OF_TERMS if self.problem.value_format.value_terms > 1 else self.tiles
        return [range(start, min(start + size, self.tiles)) for start in range(0, self.tiles, size)]

    def load(self, slot: jax.Array, tile: int, piece: range) -> Values:
        """Loads a piece of a tile's values: as stored, or as terms of float32."""
        words = self.terms(slot, tile, piece) if self.problem.value_format.bits == 32 else self.words(slot, tile)
        return Values(words, self.scales(slot, tile) if self.problem.value_format.has_block_scales else [])

    def accumulate(self, values: Values, piece: range, weights: list[list[jax.Array]], output: list[jax.Array]) -> None:
        """Adds the products of a piece of a tile's values with the weights to `output`."""
        zero = lanes.splat(0, jnp.uint32)
        rows: list[list[jax.Array]] = []  # by run of eight dims: tokens 0 to 7, tokens 8 to 15
        fmt, products, done = self.problem.value_format, self.products, 0
        for index, words in enumerate(values.words):
            if index % len(piece) == 0:  # a term begins
                done = piece.start * fmt.elements_per_unit // 2
            pairs = [fmt.value_pairs(word) for word in words]
            if values.scales:
                of_run = zip(pairs, values.scales[index], strict=True)
                pairs = [[formats.scaled(pair, scale) for pair in both] for both, scale in of_run]
            rows += [list(both) for both in zip(*pairs, strict=True)]
            if index % len(piece) == len(piece) - 1 and len(rows) % 2:
                rows.append([zero, zero])
            while len(rows) >= 2:
                (first, first_later), (second, second_later), *rows = rows
                operand = [first, second, first_later, second_later]
                for columns, weight in enumerate(weights):
                    at = 4 * (columns * products + done)
                    output[at : at + 4] = lanes.mma(output[at : at + 4], operand, weight, fmt.operand)
                done += 1

    def words(self, slot: jax.Array, tile: int) -> list[list[jax.Array]]:
        """For each run of eight units two registers: for tokens 0 to 7 and for 8 to 15."""
        result = []
        rows = self.layout.values[0]
        base, known = self.warp.offset(self.layout, slot, rows), tile * rows.tile_stride
        if rows.alignment % 16 == 0 and rows.page.row_bytes % 16 == 0:
            lane = self.warp.lane
            start = base + rows.offset(lane & 7, (lane >> 3) & 1) + (lane >> 4) * 16
            for index in range(0, self.tiles, 2):
                count = min(2, self.tiles - index)
                words = lanes.load_transposed(self.buffer, start, 2 * count, known + 16 * index)
                result += [words[2 * i : 2 * i + 2] for i in range(count)]
            return result
        start = base + rows.offset(2 * self.warp.column)
        zero = lanes.splat(0, jnp.uint32)
        for index in range(self.tiles):
            unit = jnp.minimum(8 * index + self.warp.row, self.units - 1)
            is_unit = 8 * index + self.warp.row < self.units
            four = [
                lanes.load_shared(self.buffer, start + 2 * unit, 2, known + i * rows.pitch + half * rows.half_pitch)[0]
                for half in range(2)
                for i in range(2)
            ]
            words = [lanes.permute(four[2 * i], four[2 * i + 1], 0x5410) for i in range(2)]
            result.append([jnp.where(is_unit, word, zero) for word in words])
        return result

    def terms(self, slot: jax.Array, tile: int, piece: range) -> list[list[jax.Array]]:
        """As `words`, for a piece of each term of float32."""
        rows = self.layout.values[0]
        known = tile * rows.tile_stride
        start = self.warp.offset(self.layout, slot, rows) + rows.offset(2 * self.warp.column)
        zero = lanes.splat(0, jnp.uint32)
        terms: list[list[list[jax.Array]]] = [[] for _ in range(self.problem.value_format.value_terms)]
        for index in piece:
            unit, is_unit = 8 * index + self.warp.row, None
            if 8 * index + 8 > self.units:
                unit, is_unit = jnp.minimum(unit, self.units - 1), unit < self.units
            four = [
                lanes.load_shared(self.buffer, start + 4 * unit, 4, known + i * rows.pitch + half * rows.half_pitch)[0]
                for half in range(2)
                for i in range(2)
            ]
            four = four if is_unit is None else [jnp.where(is_unit, word, zero) for word in four]
            halves = [formats.in_terms(four[2 * i], four[2 * i + 1], len(terms)) for i in range(2)]
            for runs, both in zip(terms, zip(*halves, strict=True), strict=True):
                runs.append(list(both))
        return [run for runs in terms for run in runs]

    def scales(self, slot: jax.Array, tile: int) -> list[list[jax.Array]]:
        """For each run of eight units, for tokens 0 to 7 and 8 to 15: the block scales of two tokens as a pair.

        A run has two blocks: the first four units and the others.
        """
        rows = self.layout.values[1]
        base, known, count = self.warp.offset(self.layout, slot, rows), tile * rows.tile_stride, rows.page.row_bytes
        half_of_run = self.warp.row >> 2
        scales: list[list[jax.Array]] = []
        if rows.page.swizzled:  # the scales of four tokens are contiguous
            return [self.swizzled_scales(base, known, rows, 2 * index + half_of_run) for index in range(self.tiles)]
        start = base + rows.offset(2 * self.warp.column)
        steps = [known + i * rows.pitch + half * rows.half_pitch for half in range(2) for i in range(2)]
        size = math.gcd(count, rows.alignment, 8)
        if size < 4:
            for index in range(self.tiles):
                block = jnp.minimum(2 * index + half_of_run, count - 1)
                four = [lanes.load_shared(self.buffer, start + block, 1, step)[0] for step in steps]
                scales.append([formats.scale_pairs(four[2 * i] | four[2 * i + 1] << 8)[0] for i in range(2)])
            return scales
        selector = jnp.where(half_of_run == 0, jnp.uint32(0x6240), jnp.uint32(0x7351))
        for first in range(0, count, size):
            loaded = [lanes.load_shared(self.buffer, start, size, step + first) for step in steps]
            for word in range(size // 4):
                halves = [
                    formats.scale_pairs(lanes.permute(loaded[2 * i][word], loaded[2 * i + 1][word], selector))
                    for i in range(2)
                ]
                scales += [[halves[0][j], halves[1][j]] for j in range(2)]
        return scales

    def swizzled_scales(self, base: jax.Array, known: int, rows: SharedRows, block: jax.Array) -> list[jax.Array]:
        """The scales of a block, for tokens of the first and of the second half."""
        count = rows.page.row_bytes
        block = jnp.minimum(block, count - 1)

        def load(token: jax.Array, size: int) -> jax.Array:
            tile_row, column = swizzled_position(token, block, count)
            row, half = (tile_row // 2, tile_row % 2) if self.layout.interleaved else (tile_row % 8, tile_row // 8)
            return lanes.load_shared(self.buffer, base + rows.offset(row, half) + column, size, known)[0]

        if self.layout.interleaved:  # columns have four tokens of a group
            four = load(4 * self.warp.column, 4)
            return [formats.scale_pairs(lanes.permute(four, four, selector))[0] for selector in (0x0020, 0x0031)]
        return [formats.scale_pairs(load(2 * self.warp.column + 8 * half, 2))[0] for half in range(2)]
