"""Keys of a stage as the first matrix operand, and the logits: their products with the query."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Ref
from kvjax.kernels.attention import formats
from kvjax.kernels.attention.formats import KEY_TERMS, Format
from kvjax.kernels.attention.problem import Problem
from kvjax.kernels.attention.stages import SharedRows, StageLayout
from kvjax.kernels.attention.warp import Warp


@dataclasses.dataclass(frozen=True)
class KeyRows:
    """Rows of keys of one format that a warp reads from the stages in `buffer`.

    Attributes:
      format: how stored bytes become operands.
      rows: where the data are in a stage and, for NVFP4, their block scales.
      layout: the layout of a stage.
      warp: the warp; its rows are those of the tokens.
      buffer: shared memory.
    """

    format: Format
    rows: tuple[SharedRows, ...]
    layout: StageLayout
    warp: Warp
    buffer: Ref

    @functools.cached_property
    def unit(self) -> int:
        """Bytes of a key row that a thread loads at once."""
        rows = self.rows[0]
        share = rows.page.row_bytes // 4
        return min(16, share & -share, rows.alignment)

    @functools.cached_property
    def units(self) -> int:
        """Units of a key row that a thread loads."""
        return self.rows[0].page.row_bytes // 4 // self.unit

    @property
    def unit_elements(self) -> int:
        """Elements of a unit."""
        return self.unit * 8 // self.format.bits

    def operands(self, slot: jax.Array, tile: int, i: int) -> list[list[list[jax.Array]]]:
        """Unit `i` of a tile: for each term, four registers for each step of 16 dims."""
        data, unit = self.rows[0], self.unit
        start = self.warp.offset(self.layout, slot, data) + data.offset(self.warp.row) + self.warp.column * unit
        scales = self.scales(slot, tile, i) if self.format.has_block_scales else [[], []]
        pairs = []
        for half in range(2):
            step = tile * data.tile_stride + half * data.half_pitch
            words = lanes.load_shared(self.buffer, start, unit, step + 4 * i * unit)
            pairs.append(self.format.key_terms(words, unit, scales[half]))
        return [
            [[upper[j], lower[j], upper[j + 1], lower[j + 1]] for j in range(0, len(upper), 2)]
            for upper, lower in zip(*pairs, strict=True)
        ]

    def scales(self, slot: jax.Array, tile: int, unit: int) -> list[list[jax.Array]]:
        """The block scales of a unit of two key rows, each in both halves of a pair."""
        rows, size, block = self.rows[1], self.unit, self.format.block_bytes
        steps = [tile * rows.tile_stride + half * rows.half_pitch for half in range(2)]
        base = self.warp.offset(self.layout, slot, rows)
        if size == 2 * block:
            start = base + rows.offset(self.warp.row) + 2 * self.warp.column
            pairs = [lanes.load_shared(self.buffer, start, 2, step + 8 * unit)[0] for step in steps]
            pairs = [formats.scale_pairs(pair)[0] for pair in pairs]
            return [[lanes.both_halves(pair, half) for half in range(2)] for pair in pairs]
        start = base + rows.offset(self.warp.row) + ((4 * unit + self.warp.column) * size) // block
        found = [lanes.load_shared(self.buffer, start, 1, step)[0] for step in steps]
        return [[formats.scale_pairs(byte | byte << 8)[0]] for byte in found]


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that a warp reads from the stages in `buffer`."""

    problem: Problem
    layout: StageLayout
    warp: Warp
    buffer: Ref

    @functools.cached_property
    def rows(self) -> KeyRows:
        """The rows."""
        return KeyRows(self.problem.key_format, self.layout.keys, self.layout, self.warp, self.buffer)

    def logits(self, slot: jax.Array, tile: int, query: list[list[list[jax.Array]]]) -> list[jax.Array]:
        """The logits of a tile of tokens: four registers for each tile of query rows."""
        problem = self.problem
        zero = lanes.splat(0.0, jnp.float32)
        sums = [[zero] * 4 for _ in range(problem.tiles)]
        for i in range(self.rows.units):
            for number, steps in enumerate(self.rows.operands(slot, tile, i)):
                for step, operand in enumerate(steps):
                    at = 2 * (i * len(steps) + step)
                    for rows_tile, terms in enumerate(query):
                        for term in terms[: KEY_TERMS - number]:  # the other products are below float32's last bit
                            sums[rows_tile] = lanes.mma(
                                sums[rows_tile], operand, term[at : at + 2], problem.key_format.operand
                            )
        if problem.key_format.has_row_scales:
            factors = self.warp.row_scales(self.layout, self.buffer, slot, tile, self.layout.keys[1])
            sums = [[x * factors[i // 2] for i, x in enumerate(each)] for each in sums]
        return [x for each in sums for x in each]
