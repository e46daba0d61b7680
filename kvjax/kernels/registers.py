"""Register layouts: how a warpgroup's threads hold an array, and the width of vector loads and stores."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.aliases import Layout

LANES = 32
WARPS = 4
THREADS = LANES * WARPS
MAX_VECTOR_BYTES = 16
SECTOR_WORDS = 8
"""Words of four bytes in a sector, the unit of reads from memory."""


def lane_layout(shape: Sequence[int], max_vector: int, *, min_vector: int = 1, whole_rows: bool = False) -> Layout:
    """A register layout in which each thread holds vectors of up to `max_vector` elements along the last axis.

    Threads are distributed over the last axis first and then over the ones before it, as far as powers of two divide
    them. Vectors are shorter, down to `min_vector`, where threads would otherwise be idle. Threads that are left over
    hold, and store, copies of what others hold. With `whole_rows` each row along the last axis is in one warp, which
    can reduce it alone.
    """
    parts = [size & -size for size in shape]
    vector = min(parts[-1], max_vector, max(min_vector, math.prod(parts) // THREADS))
    parts[-1] //= vector
    lanes: list[int] = []
    warps: list[int] = []
    free_lanes, free_warps = LANES, WARPS
    for part in reversed(parts):
        lanes.append(min(part, free_lanes))
        # The first is the last axis.
        warps.append(1 if whole_rows and not warps else min(part // lanes[-1], free_warps))
        free_lanes //= lanes[-1]
        free_warps //= warps[-1]
    lanes[0] *= vector
    tile = tuple(lane * warp for lane, warp in zip(reversed(lanes), reversed(warps), strict=True))
    rank = len(tile)
    layout = mgpu.TiledLayout(
        plgpu.Tiling((tile, tuple(reversed(lanes)), (vector,))),
        warp_dims=(*_replicated(free_warps), *range(-2 * rank - 1, -rank - 1)),
        lane_dims=(*_replicated(free_lanes), *range(-rank - 1, -1)),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _replicated(times: int) -> tuple[plgpu.Replicated, ...]:
    return (plgpu.Replicated(times),) if times > 1 else ()
