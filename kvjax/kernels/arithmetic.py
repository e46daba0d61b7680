"""The encodings of `kvjax.quant` as register arithmetic, which Mosaic lowers on sm_90 and on sm_100."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import quant
from kvjax.dtypes import KVCacheDType
from kvjax.kernels import compat
from kvjax.quant import CANONICAL_NAN_BITS, E2M1_MAX, E4M3_MAX


def reciprocal(divisor: jax.Array) -> jax.Array:
    """`1 / divisor` in float64 within two units in the last place, for a float32 whose reciprocal is normal.

    Mosaic divides float32 to about 22 bits and float64 exactly but slowly. One step of the series
    `1 / d = y / (1 - e) = y * (1 + e + e**2 + ...)` with `e = 1 - d * y`, which float64 holds exactly, makes 66 of 22.
    """
    approximate = 1.0 / divisor
    with jax.enable_x64(True):
        y = approximate.astype(jnp.float64)
        e = 1.0 - divisor.astype(jnp.float64) * y
        return y + y * (e + e * e)


def times(x: jax.Array, inverse: jax.Array) -> jax.Array:
    """`x / divisor` in float32, correctly rounded, for `inverse = reciprocal(divisor)` of `x`'s shape or a scalar.

    The float64 product is within four units in the last place, and `kvjax.quant.exact_divide` says why that rounds to
    the right float32.
    """
    with jax.enable_x64(True):
        if not inverse.shape:
            inverse = lax.broadcast(inverse, x.shape)
        return (x.astype(jnp.float64) * inverse).astype(jnp.float32)


def cast(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """`kvjax.quant.cast`: nearest even, with the canonical NaN."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if compat.interpreting():  # XLA's conversions on CPU flush subnormals and have other NaNs than the instructions
        return quant.cast(x, dtype)
    wide = x.astype(jnp.float32)
    if dtype != np.float32:
        return wide.astype(dtype)
    # Widening bfloat16 is a shift, no conversion: a NaN keeps its bits.
    bits = lax.bitcast_convert_type(wide, jnp.uint32)
    nan = jnp.full_like(bits, CANONICAL_NAN_BITS[dtype])
    return lax.bitcast_convert_type(jnp.where(wide == wide, bits, nan), dtype)


def encode_fp8(x: jax.Array, inverse: jax.Array, dtype: KVCacheDType) -> jax.Array:
    """`kvjax.quant.encode_fp8`, as bytes; `inverse` is the scale's `reciprocal`, a scalar or of the shape of `x`."""
    scaled = times(x.astype(jnp.float32), inverse)
    storage = dtype.info.storage_dtype
    if compat.interpreting():  # the instruction that converts saturates and has one NaN, XLA's conversion has neither
        scaled = jnp.clip(scaled, -dtype.info.max, dtype.info.max)
        bits = lax.bitcast_convert_type(scaled.astype(storage), jnp.uint8)
        return jnp.where(jnp.isnan(scaled), jnp.uint8(CANONICAL_NAN_BITS[storage]), bits)
    return lax.bitcast_convert_type(scaled.astype(storage), jnp.uint8)


def encode_nvfp4(
    low: jax.Array, high: jax.Array, scale: jax.Array, spread: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`kvjax.quant.encode_nvfp4` of rows of one block each.

    Args:
      low: float32 `[rows, 8]`, the even elements.
      high: float32 `[rows, 8]`, the odd ones.
      scale: float32 scalar.
      spread: from `[rows]` to `[rows, 8]`, in the registers of `low`.

    Returns:
      uint8 `[rows, 8]`, a byte for each pair, and uint8 `[rows]`, the block scales' bits.
    """
    low, high = (jnp.where(half == half, half, jnp.zeros_like(half)) for half in (low, high))
    # Without their sign bits floats compare as integers do, and of these sm_90 takes the largest of three at once.
    largest_bits = jnp.max(jnp.maximum(_uint32(low) << 1, _uint32(high) << 1), axis=1) >> 1
    amax = lax.bitcast_convert_type(largest_bits, jnp.float32)
    scaled = times(amax, reciprocal(E2M1_MAX * scale))
    stored = jnp.minimum(scaled, jnp.full_like(amax, E4M3_MAX)).astype(jnp.float8_e4m3fn)
    bits = lax.bitcast_convert_type(stored, jnp.uint8)
    decoded = e4m3_to_float32(bits) * scale
    with jax.enable_x64(True):
        inverse = reciprocal(decoded).astype(jnp.float32)
    inverse = jnp.where(decoded == 0.0, jnp.zeros_like(decoded), inverse)
    inverse = spread(inverse)
    return e2m1_pairs(low * inverse, high * inverse).astype(jnp.uint8), bits


def e4m3_to_float32(bits: jax.Array) -> jax.Array:
    """What non-negative, finite e4m3 bits (uint8) stand for, exactly.

    An e4m3 magnitude is an exponent of bias 7 above three mantissa bits. As an integer it counts eighths of a binade:
    for normal numbers the float32 with the same fields is `bits << 20` plus the difference of the biases. Subnormals
    are `bits / 512`.
    """
    count = bits.astype(jnp.uint32)
    normal = lax.bitcast_convert_type((count << 20) + jnp.uint32((127 - 7) << 23), jnp.float32)
    # An integer below 2**23 is the mantissa of that much more than 2**23.
    as_float = lax.bitcast_convert_type(count | jnp.uint32((127 + 23) << 23), jnp.float32) - jnp.float32(2.0**23)
    return jnp.where(count < 8, as_float * jnp.float32(2.0**-9), normal)


def e2m1_pairs(low: jax.Array, high: jax.Array) -> jax.Array:
    """Two four-bit codes a byte (uint32), of float32 without NaN; signs are kept, that of -0 too.

    From sm_100 on there is an instruction for it, which rounds to nearest even and saturates.
    """
    convert = "{ .reg .b8 codes; cvt.rn.satfinite.e2m1x2.f32 codes, $2, $1; cvt.u32.u8 $0, codes; }"
    return compat.ptx(convert, _e2m1_pairs, low, high, since=(10, 0))


def _e2m1_pairs(low: jax.Array, high: jax.Array) -> jax.Array:
    indices = lax.bitcast_convert_type(_e2m1_indices(low) + _e2m1_indices(high) * 16, jnp.uint32)
    signs = _uint32(low) >> 28 & 0x08 | _uint32(high) >> 24 & 0x80
    return indices & 0x77 | signs


def _e2m1_indices(x: jax.Array) -> jax.Array:
    """The nearest e2m1 magnitude's index, ties to even, saturating at 6, in the last three bits of an int32.

    Let `g` be the broken line through (value, index) of 0, .5, 1, 1.5, 2, 3, 4, 6. Its slopes are 2 up to 2, 1 up to 4
    and 1/2 up to 6; they fall, so that `g(a) = min(2 * a, a + 2, a / 2 + 4)`. It takes the middle between neighbouring
    values to the middle between their indices, hence rounding to the nearest value, of even index in a tie, is rounding
    `g` to the nearest even integer. Adding 1.5 * 2**23, whose unit in the last place is 1, does that, in the same
    addition as the line's own constant, so that each line is rounded once; `2 * a` and `a / 2` are exact. Rounding is
    monotonic: the least of the rounded lines is the rounded least line. The index is in the sum's last three bits.

    Examples: 0.75 is 1.5 on the line, index 2 (1.0). 2.5 is min(5, 4.5, 5.25) = 4.5, index 4 (2.0). 5 is 6.5, index 6
    (4.0), and 5.01 rounds to 7 (6.0).

    The pipe that compares, shifts and masks is half as wide on sm_90 as the one that multiplies and adds: this asks
    three instructions of the narrow one and four of the other, with the product that makes `x`.
    """
    magnitude = jnp.minimum(jnp.abs(x), jnp.full_like(x, E2M1_MAX))
    to_integer = 1.5 * 2.0**23
    up_to_2 = _int32(magnitude * 2.0 + to_integer)
    up_to_4 = _int32(magnitude + (to_integer + 2.0))
    up_to_6 = _int32(magnitude * 0.5 + (to_integer + 4.0))
    # Positive floats compare as their bits do, and of integers sm_90 takes the least of three at once.
    return jnp.minimum(jnp.minimum(up_to_2, up_to_4), up_to_6)


def _int32(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _uint32(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)
