"""Numbers that an encoding may round wrongly: next to midpoints, at the ends of a range, nearly tied."""

from __future__ import annotations

import numpy as np

from kvjax.scale_values import MAX_SCALE, MIN_SCALE
from support import reference

SCALES = [1.0, 0.0173, 3.7, 6.0, MIN_SCALE, MAX_SCALE]


def all_values(dtype) -> np.ndarray:
    """Every bit pattern of a 16-bit or smaller dtype."""
    bits = np.dtype(dtype).itemsize * 8
    return np.arange(2**bits).astype(f"u{bits // 8}").view(dtype)


def finite_values(dtype) -> np.ndarray:
    """Every non-negative finite value of a narrow dtype, in order, as float32."""
    values = all_values(dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values) & (values >= 0)])


def around_midpoints(values: np.ndarray) -> np.ndarray:
    """float32 values, their midpoints, what lies one bit to each side of those, and all that negated."""
    middles = (values[1:].astype(np.float64) + values[:-1]) / 2
    points = np.concatenate([values, middles.astype(np.float32)])
    near = [np.nextafter(points, np.float32(towards)) for towards in (-np.inf, np.inf)]
    every = np.concatenate([points, *near])
    return np.concatenate([every, -every])


def adversarial_blocks(scale: float) -> np.ndarray:
    """`[blocks, 16]` float32: amax on and beside every rounding of a block scale; special values; every magnitude."""
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore", under="ignore"):
        amax = around_midpoints(finite_values(reference.E4M3)) * np.float32(6) * np.float32(scale)
        amax = np.concatenate([amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.float32(np.inf))])
        at_midpoints = rng.choice(np.float32([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]) / 6, (len(amax), 16))
        on_roundings = at_midpoints * amax[:, None]
        on_roundings[:, 7] = amax
        magnitudes = np.exp2(rng.uniform(-140, 127, (200, 1))) * rng.standard_normal((200, 16))
        special = rng.choice(np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 1e-42, -1e-42, 1, -2, 3e38]), (300, 16))
        uniform = np.repeat(np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 1e-42, -1e-42, 1e-38, 3e38]), 16)
        return np.concatenate([on_roundings, magnitudes, special, uniform.reshape(-1, 16)]).astype(np.float32)


def blocks_at_powers_of_two(dtype, powers) -> np.ndarray:
    """`[blocks, 128]` of a float dtype: amax on and beside `448 * 2**k` for each power `k` that the dtype has, codes of
    e4m3 and what is next to their midpoints below it; then powers of two and subnormal numbers alone.
    """
    points = around_midpoints(finite_values(reference.E4M3))
    rng, blocks = np.random.default_rng(0), []
    with np.errstate(over="ignore", under="ignore"):
        for k in powers:
            at = np.array(448 * 2.0**k, np.float64).astype(dtype)
            if not np.isfinite(at.astype(np.float32)):
                continue
            for amax in (np.nextafter(at, dtype.type(0)), at, np.nextafter(at, dtype.type(np.inf))):
                below = points[np.abs(points) < 440]
                block = (rng.choice(below, 128).astype(np.float64) * 2.0**k).astype(dtype)
                block[rng.integers(128)] = rng.choice([-1, 1]).astype(dtype) * amax
                block[rng.integers(128)] = -0.0
                blocks.append(block)
        for magnitude in (1.0, 1e-4, 2.0**-13, 2.0**-24, 2.0**-133, 1e-40, 1e-45):
            blocks.append((magnitude * rng.uniform(-1, 1, 128)).astype(dtype))
    return np.stack(blocks)


def nearly_tied_blocks(scale: float) -> np.ndarray:
    """`[blocks, 16]` float32, in pairs one bit of one element apart: 6 has less error in one, 4 in the other."""

    def keeps_six(x: np.ndarray) -> np.ndarray:
        return (reference.encode_nvfp4_4over6(x, scale)[1] == reference.encode_nvfp4(x, scale)[1])[:, 0]

    low = np.random.default_rng(0).standard_normal((1000, 16)).astype(np.float32) * np.float32(6 * 100 * scale)
    low[:, 0] = np.abs(low[:, 0])
    high = low.copy()
    high[:, 0] *= np.float32(0.8)
    is_pair = keeps_six(low) != keeps_six(high)
    low, high = low[is_pair], high[is_pair]
    six = keeps_six(low)
    while (bits := [x[:, 0].copy().view(np.int32) for x in (low, high)]) and (np.abs(bits[0] - bits[1]) > 1).any():
        middle = low.copy()
        middle[:, 0] = (bits[0] + (bits[1] - bits[0]) // 2).view(np.float32)
        same = (keeps_six(middle) == six)[:, None]
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return np.concatenate([low, high])
