"""The encodings of `kvjax.quant` as register arithmetic, which Mosaic lowers on sm_90 and on sm_100."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import quant
from kvjax.dtypes import KVCacheDType
from kvjax.errors import UnsupportedError
from kvjax.kernels import compat, ptx
from kvjax.kernels.aliases import DType
from kvjax.quant import LEAST_TOKEN_SCALE, canonical_nan_bits


def reciprocal(divisor: jax.Array) -> jax.Array:
    """`1 / divisor` in float64 within two units in the last place, for a normal float32 whose reciprocal is normal.

    GPUs have an instruction that computes 23 bits of the reciprocal; exact float64 division is slow. One step of the
    series `1 / d = y / (1 - e) = y * (1 + e + e**2 + ...)` with `e = 1 - d * y`, which float64 holds exactly, turns 23
    bits into 69.
    """
    approximate = ptx.elementwise("rcp.approx.ftz.f32 $0, $1;", jnp.reciprocal, divisor)
    with jax.enable_x64(True):
        y = approximate.astype(jnp.float64)
        e = 1.0 - divisor.astype(jnp.float64) * y
        return y + y * (e + e * e)


def rounded_reciprocal(divisor: jax.Array) -> jax.Array:
    """`1 / divisor` in float32, correctly rounded, for a divisor between `2**-124` and `2**124`.

    This is the code that ptxas generates for `rcp.rn.f32`, without the branch for other divisors: one step of the
    series above, by fused multiply-adds. Its correct rounding is a property of the approximations for all 2**23
    mantissas. Tests check all of them on a GPU, and check that ptxas relies on it for other targets too.
    """
    return ptx.elementwise(
        "{ .reg .f32 y, e; rcp.approx.ftz.f32 y, $1; neg.f32 e, y; fma.rn.f32 e, $1, e, 0f3F800000;"
        " fma.rn.f32 $0, y, e, y; }",
        _exact_reciprocal,
        divisor,
    )


def _exact_reciprocal(divisor: jax.Array) -> jax.Array:
    return quant.exact_divide(jnp.ones_like(divisor), divisor)


def times(x: jax.Array, inverse: jax.Array) -> jax.Array:
    """`x / divisor` in float32, correctly rounded, for `inverse = reciprocal(divisor)` of `x`'s shape or a scalar.

    The float64 product is within four units in the last place, and `kvjax.quant.exact_divide` says why that rounds to
    the right float32.
    """
    with jax.enable_x64(True):
        if not inverse.shape:
            inverse = lax.broadcast(inverse, x.shape)
        return (x.astype(jnp.float64) * inverse).astype(jnp.float32)


def cast(x: jax.Array, dtype: DType) -> jax.Array:
    """`kvjax.quant.cast`: nearest even, with the canonical NaN."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if compat.interpreting():  # XLA's conversions on CPU flush subnormals and return other NaNs
        return quant.cast(x, dtype)
    wide = x.astype(jnp.float32)
    if dtype != np.float32:
        return wide.astype(dtype)
    # Widening bfloat16 is a shift, which keeps the bits of a NaN.
    bits = lax.bitcast_convert_type(wide, jnp.uint32)
    nan = jnp.full_like(bits, canonical_nan_bits(dtype))
    return lax.bitcast_convert_type(jnp.where(wide == wide, bits, nan), dtype)


def encode_fp8(x: jax.Array, inverse: jax.Array, dtype: KVCacheDType) -> jax.Array:
    """`kvjax.quant.encode_fp8`, as bytes; `inverse` is the scale's `reciprocal`, a scalar or of the shape of `x`."""
    return float8_bits(times(x.astype(jnp.float32), inverse), dtype.info.storage_dtype)


def float8_bits(x: jax.Array, dtype: DType) -> jax.Array:
    """float32 rounded to nearest even, clamped to the largest finite value, NaN kept, as bytes."""
    if compat.interpreting():  # the instruction saturates and has one NaN, XLA's conversion does neither
        largest = float(jnp.finfo(dtype).max)
        bits = lax.bitcast_convert_type(jnp.clip(x, -largest, largest).astype(dtype), jnp.uint8)
        return jnp.where(jnp.isnan(x), jnp.uint8(canonical_nan_bits(dtype)), bits)
    return lax.bitcast_convert_type(x.astype(dtype), jnp.uint8)


def encode_per_token_head(
    x: jax.Array, dtype: KVCacheDType, broadcast: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`kvjax.quant.encode_per_token_head` of rows.

    Args:
      x: float32 `[..., head_size]`.
      dtype: `FP8_PER_TOKEN_HEAD` or `INT8_PER_TOKEN_HEAD`.
      broadcast: from `[...]` to `[..., head_size]`, in the registers of `x`.

    Returns:
      The codes' bits, uint8 `[..., head_size]`, and those of the scales, int32 `[...]`.

    Raises:
      UnsupportedError: another dtype.
    """
    with jax.enable_x64(True):
        inverse_of_most = jnp.float64(1.0 / dtype.info.max)
    scales = jnp.maximum(times(_largest_magnitude(x), inverse_of_most), jnp.float32(LEAST_TOKEN_SCALE))
    # The reciprocal of infinity is 0, but the series returns NaN.
    inverse = jnp.where(scales == jnp.inf, jnp.zeros_like(scales), rounded_reciprocal(scales))
    match dtype:
        case KVCacheDType.INT8_PER_TOKEN_HEAD:
            codes = ptx.elementwise(_ptx_to_int8, _int8_codes, x, broadcast(inverse))
        case KVCacheDType.FP8_PER_TOKEN_HEAD:
            codes = float8_bits(x * broadcast(inverse), dtype.info.storage_dtype)
        case _:
            raise UnsupportedError(f"dtype: got {dtype.value!r}, expected fp8_per_token_head or int8_per_token_head")
    return codes, lax.bitcast_convert_type(scales, jnp.int32)


def encode_fp8_ds_mla(
    x: jax.Array, dtype: KVCacheDType, broadcast: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`kvjax.quant.encode_fp8_ds_mla` of blocks; takes and returns what `encode_per_token_head` does."""
    scales, inverse = quant.block_scales(_largest_magnitude(x))
    codes = float8_bits(x * broadcast(inverse), dtype.info.storage_dtype)
    return codes, lax.bitcast_convert_type(scales, jnp.int32)


def _largest_magnitude(x: jax.Array) -> jax.Array:
    """The largest magnitude in each row, NaN ignored; by the instruction that `_largest_magnitudes` uses."""
    if compat.interpreting():
        return jnp.max(jnp.fmax(jnp.abs(x), 0.0), axis=-1)
    largest = ptx.reduce_rows("max.xorsign.abs.f32 $0, $1, $2;", x)
    return ptx.elementwise("{ .reg .f32 x; abs.f32 x, $1; max.f32 $0, x, 0f00000000; }", jnp.abs, largest)


def _ptx_to_int8(columns: int) -> str:
    """Explicit rounding prevents contraction of products and sums. The conversion returns 0 for NaN."""
    lines = [".reg .f32 x<4>, half; .reg .b32 sign, code<4>, codes;", "mov.b32 codes, 0;"]
    for i in range(columns):
        lines += [
            f"mul.rn.f32 x{i}, ${1 + i}, ${1 + columns + i};",
            f"mov.b32 sign, x{i};",
            "lop3.b32 sign, sign, 0x80000000, 0x3F000000, 0xEA;",  # one half with the sign
            "mov.b32 half, sign;",
            f"add.rn.f32 x{i}, x{i}, half;",
            f"cvt.rzi.s32.f32 code{i}, x{i};",
        ]
    for i in reversed(range(0, 4, 2)):  # each shifts those before it
        lines.append(f"cvt.pack.sat.s8.s32.b32 codes, code{(i + 1) % columns}, code{i % columns}, codes;")
    return "\n".join(["{", *lines, "mov.b32 $0, codes; }"])


def _int8_codes(x: jax.Array, inverse: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(quant.int8_codes(x * inverse), jnp.uint8)
