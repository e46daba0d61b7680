"""How arrays are spread over the registers of a warpgroup, and how wide its loads and stores may be."""

from __future__ import annotations

import math
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 32
WARPS = 4
THREADS = LANES * WARPS
MAX_VECTOR_BYTES = 16


def tile_layout(rows: int, columns: int, vector: int) -> Any:
    """A register layout for arrays `[..., rows, columns]` in which each thread holds runs of `vector` columns.

    Threads go along the columns first, then along the rows, as far as powers of two divide them. Where that uses fewer
    than all threads of the warpgroup, the others hold (and store) the same elements again.
    """
    across = _largest_power_of_two(columns // vector, THREADS)
    down = _largest_power_of_two(rows, THREADS // across)
    warps = max(1, across * down // LANES)
    warp_rows = min(down, warps)
    warp_columns = warps // warp_rows
    tiling = plgpu.Tiling(((down, across * vector), (down // warp_rows, across * vector // warp_columns), (vector,)))
    spare_lanes = LANES * warps // (across * down)
    layout = mgpu.TiledLayout(
        tiling,
        warp_dims=(*_replicated(WARPS // warps), -5, -4),
        lane_dims=(*_replicated(spare_lanes), -3, -2),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def tile_vector(rows: int, columns: int, itemsize: int, alignment: int) -> int:
    """Elements a thread moves at once: as many as alignment in bytes allows, but not so many that threads stay idle."""
    widest = _largest_power_of_two(math.gcd(columns, max(1, math.gcd(alignment, MAX_VECTOR_BYTES) // itemsize)))
    return max(1, min(widest, _largest_power_of_two(rows * columns, 1 << 30) // THREADS))


def _largest_power_of_two(value: int, limit: int = 1 << 30) -> int:
    return min(value & -value, limit)


def _replicated(times: int) -> tuple[plgpu.Replicated, ...]:
    return (plgpu.Replicated(times),) if times > 1 else ()
