"""How arrays are spread over the registers of a warpgroup, and how wide its loads and stores may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 32
WARPS = 4
THREADS = LANES * WARPS
MAX_VECTOR_BYTES = 16


def lane_layout(shape: Sequence[int], widest: int, *, whole_rows: bool = False) -> Any:
    """A register layout in which each thread holds runs along the last axis, of at most `widest` elements.

    Threads go along the last axis first and then along the ones before it, as far as powers of two divide them; runs
    are shorter where threads would otherwise stay idle. Threads that there is still no use for hold, and store, what
    others do. With `whole_rows` a row along the last axis is all in one warp, which can then reduce it by itself.
    """
    parts = [size & -size for size in shape]
    vector = min(parts[-1], widest, max(1, math.prod(parts) // THREADS))
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
