"""Keys of a stage as the first matrix operand, and the logits: their products with the query."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.kernels import lanes
from kvjax.kernels.aliases import Ref
from kvjax.kernels.attention import formats
from kvjax.kernels.attention.formats import KEY_TERMS
from kvjax.kernels.attention.problem import Problem
from kvjax.kernels.attention.stages import StagePlan
from kvjax.kernels.attention.warp import Warp


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that a warp reads from the stages in `buffer`."""

    problem: Problem
    plan: StagePlan
    warp: Warp
    buffer: Ref

    @functools.cached_property
    def unit(self) -> int:
        """Bytes of a key row that a thread loads at once."""
        rows = self.plan.keys[0]
        share = rows.page.row_bytes // 4
        return min(16, share & -share, rows.alignment)

    @functools.cached_property
    def units(self) -> int:
        """Units of a key row that a thread loads."""
        return self.plan.keys[0].page.row_bytes // 4 // self.unit

    def logits(self, slot: jax.Array, tile: int, query: list[list[list[jax.Array]]]) -> list[jax.Array]:
        """The logits of a tile of tokens: four registers for each tile of query rows."""
        problem = self.problem
        data, unit = self.plan.keys[0], self.unit
        start = self.warp.offset(self.plan, slot, data) + data.offset(self.warp.row) + self.warp.column * unit
        zero = lanes.splat(0.0, jnp.float32)
        sums = [[zero] * 4 for _ in range(problem.tiles)]
        for i in range(self.units):
            pairs = []
            scales = self.scales(slot, tile, i) if self.problem.key_format.has_block_scales else [[], []]
            for half in range(2):
                step = tile * data.tile_stride + half * data.half_pitch
                words = lanes.load_shared(self.buffer, start, unit, step + 4 * i * unit)
                pairs.append(self.problem.key_format.key_terms(words, unit, scales[half]))
            for number, (upper, lower) in enumerate(zip(*pairs, strict=True)):
                for step in range(0, len(upper), 2):
                    operand = [upper[step], lower[step], upper[step + 1], lower[step + 1]]
                    at = i * len(upper) + step
                    for rows_tile, terms in enumerate(query):
                        for term in terms[: KEY_TERMS - number]:  # the other products are below float32's last bit
                            sums[rows_tile] = lanes.mma(
                                sums[rows_tile], operand, term[at : at + 2], self.problem.key_format.operand
                            )
        if self.problem.key_format.has_row_scales:
            factors = self.warp.row_scales(self.plan, self.buffer, slot, tile, self.plan.keys[1])
            sums = [[x * factors[i // 2] for i, x in enumerate(each)] for each in sums]
        return [x for each in sums for x in each]

    def scales(self, slot: jax.Array, tile: int, unit: int) -> list[list[jax.Array]]:
        """The block scales of a unit of two key rows, each in both halves of a pair."""
        rows, size, block = self.plan.keys[1], self.unit, self.problem.key_format.block_bytes
        steps = [tile * rows.tile_stride + half * rows.half_pitch for half in range(2)]
        base = self.warp.offset(self.plan, slot, rows)
        if size == 2 * block:
            start = base + rows.offset(self.warp.row) + 2 * self.warp.column
            pairs = [lanes.load_shared(self.buffer, start, 2, step + 8 * unit)[0] for step in steps]
            pairs = [formats.scale_pairs(pair)[0] for pair in pairs]
            return [[lanes.both_halves(pair, half) for half in range(2)] for pair in pairs]
        start = base + rows.offset(self.warp.row) + ((4 * unit + self.warp.column) * size) // block
        found = [lanes.load_shared(self.buffer, start, 1, step)[0] for step in steps]
        return [[formats.scale_pairs(byte | byte << 8)[0]] for byte in found]
