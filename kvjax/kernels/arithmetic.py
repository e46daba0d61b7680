"""The encodings of `kvjax.quant` as register arithmetic, which Mosaic lowers on sm_90 and on sm_100."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.dtypes import KVCacheDType
from kvjax.quant import CANONICAL_NAN_BITS, E2M1_MAX, E4M3_MAX, NOT_A_FLOAT32

_ONE_BITS = 127 << 23
_EXPONENT_MASK = 0xFF << 23
_HALF_STEP_EXPONENTS = 22  # 2**22 is the float32 whose unit in the last place is a half


def reciprocal(divisor: jax.Array) -> jax.Array:
    """`1 / divisor` in float64, but for the last bit: to multiply with instead of dividing, see `times`."""
    with jax.enable_x64(True):
        wide = divisor.astype(jnp.float64)
        return jnp.full_like(wide, NOT_A_FLOAT32) / wide


def times(x: jax.Array, inverse: jax.Array) -> jax.Array:
    """`x / divisor` in float32, correctly rounded, for `inverse = reciprocal(divisor)` of `x`'s shape or a scalar.

    Mosaic's own float32 division is approximate. A float64 product with a float64 reciprocal is within four units in
    the last place of float64, and `kvjax.quant.exact_divide` says why that rounds to the right float32.
    """
    with jax.enable_x64(True):
        if not inverse.shape:
            inverse = lax.broadcast(inverse, x.shape)
        return (x.astype(jnp.float64) * inverse).astype(jnp.float32)


def cast(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """`kvjax.quant.cast`: nearest even, with the canonical NaN."""
    if x.dtype == dtype:
        return x
    wide = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(wide.astype(dtype), _unsigned(dtype))
    nan = jnp.full_like(bits, CANONICAL_NAN_BITS[np.dtype(dtype)])
    return lax.bitcast_convert_type(jnp.where(wide == wide, bits, nan), dtype)


def encode_fp8(x: jax.Array, inverse: jax.Array, dtype: KVCacheDType) -> jax.Array:
    """`kvjax.quant.encode_fp8`, as bytes; `inverse` is the scale's `reciprocal`, a scalar or of the shape of `x`."""
    wide = x.astype(jnp.float32)
    is_number = wide == wide
    limit = jnp.full_like(wide, dtype.info.max)
    scaled = jnp.minimum(jnp.maximum(times(wide, inverse), -limit), limit)
    scaled = jnp.where(is_number, scaled, jnp.full_like(wide, jnp.nan))
    bits = lax.bitcast_convert_type(scaled.astype(dtype.info.storage_dtype), jnp.uint8)
    if dtype is KVCacheDType.FP8_E5M2:  # it has several NaNs; with the sign gone, e4m3 has one
        nan = jnp.uint32(CANONICAL_NAN_BITS[dtype.info.storage_dtype])
        bits |= jnp.where(is_number, jnp.zeros_like(wide, jnp.uint32), nan).astype(jnp.uint8)
    return bits


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
    amax = jnp.max(jnp.maximum(jnp.abs(low), jnp.abs(high)), axis=1)
    scaled = times(amax, reciprocal(E2M1_MAX * scale))
    stored = jnp.minimum(scaled, jnp.full_like(amax, E4M3_MAX)).astype(jnp.float8_e4m3fn)
    bits = lax.bitcast_convert_type(stored, jnp.uint8)
    decoded = e4m3_to_float32(bits) * scale
    with jax.enable_x64(True):
        inverse = reciprocal(decoded).astype(jnp.float32)
    inverse = jnp.where(decoded == 0.0, jnp.zeros_like(decoded), inverse)
    inverse = spread(inverse)
    pairs = e2m1_codes(low * inverse) | e2m1_codes(high * inverse) << 4
    return pairs.astype(jnp.uint8), bits


def e4m3_to_float32(bits: jax.Array) -> jax.Array:
    """What non-negative, finite e4m3 bits (uint8) stand for, exactly.

    An e4m3 magnitude is an exponent of bias 7 above three mantissa bits. As an integer it counts eighths of a binade:
    for normal numbers the float32 with the same fields is `bits << 20` plus the difference of the biases. Subnormals
    are `bits / 512`.
    """
    count = bits.astype(jnp.uint32)
    normal = lax.bitcast_convert_type((count << 20) + jnp.uint32((127 - 7) << 23), jnp.float32)
    subnormal = count.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-9)
    return jnp.where(count < 8, subnormal, normal)


def e2m1_codes(x: jax.Array) -> jax.Array:
    """Four-bit codes (uint32) of float32 without NaN: nearest even, saturating at 6, sign kept for -0.

    e2m1 has steps of a half up to 2, of 1 up to 4 and of 2 up to 6: in the binade of `2**e`, `e` at least 0, a step is
    `2**(e - 1)`. That is also the unit in the last place of `C = 2**(e + 22)`. So `a + C` rounds `a` to nearest even in
    the steps of its own binade, and the integer bits of the sum count them: `bits(a + C) - bits(C)`, 2 to 4 in binade
    `e` (0 to 4 in the lowest). Each binade's codes start two above the last one's: add `2 * e`, which are the bits of
    `C` above its mantissa, less those of `2**22`.

    Examples: 0.75 is 1.5 steps of C = 2**22: 2, the even count, hence code 2 (1.0). 2.5 is 2.5 steps of 2**23: 2, code
    2 + 2 = 4 (2.0). 5 is 2.5 steps of 2**24: 2, code 2 + 4 = 6 (4.0); 5.01 counts 3, code 7 (6.0).
    """
    magnitude = jnp.minimum(jnp.abs(x), jnp.full_like(x, E2M1_MAX))
    exponent = jnp.maximum(_uint32(magnitude) & _EXPONENT_MASK, jnp.uint32(_ONE_BITS))
    unit_bits = exponent + jnp.uint32(_HALF_STEP_EXPONENTS << 23)
    counted = _uint32(magnitude + lax.bitcast_convert_type(unit_bits, jnp.float32))
    index = counted - unit_bits + ((exponent >> 22) - jnp.uint32(_ONE_BITS >> 22))
    return index | (_uint32(x) >> 28 & 8)


def _uint32(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
