"""fp8 and NVFP4 in plain `jnp`: the definition of every byte in a quantized cache.

Each kernel is held to these functions, bit for bit. They are written so that XLA cannot change a rounding: it turns
`x / scalar` into `x * (1 / scalar)`, contracts `a * b + c` and flushes subnormals on CPU, each of which moves bytes.

Scales are *decode* scales: `value = stored * scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVCacheDType

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the eight magnitudes of a four-bit code stand for; bit 3 is the sign."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0

NOT_A_FLOAT32 = 1.0 + 2.0**-52
"""The float64 next to 1: a factor that changes nothing that a float32 shows, and that float32 cannot hold."""

CANONICAL_NAN_BITS: Mapping[np.dtype, int] = MappingProxyType(
    {
        np.dtype(np.float32): 0x7FFFFFFF,
        np.dtype(np.float16): 0x7FFF,
        np.dtype(ml_dtypes.bfloat16): 0x7FFF,
        np.dtype(ml_dtypes.float8_e4m3fn): 0x7F,
        np.dtype(ml_dtypes.float8_e5m2): 0x7F,
    }
)
"""The NaN that NVIDIA GPUs' convert instructions write. A NaN that changes its dtype becomes this one everywhere."""


def exact_divide(x: jax.Array, divisor: ArrayLike) -> jax.Array:
    """`x / divisor` in float32, correctly rounded whatever the backend; the two broadcast.

    XLA divides float32 inexactly on GPU, and everywhere turns division by a broadcast value into multiplication by its
    reciprocal. In float64 such errors are a few units in the last place, under `2**-50` of the quotient. That is nearer
    than a quotient of two 24-bit significands ever comes to the middle between two float32, where rounding could go
    wrong: for a 25-bit midpoint `m`, `a / b - m` is a non-zero multiple of a unit over `b`, at least `2**-49` of `m`.

    A float64 division that is only rounded to float32 LLVM narrows to a float32 division, inexact again. The factor
    keeps it from that: it is 1 but for the last bit of a float64, and no float32.
    """
    with jax.enable_x64(True):
        quotient = x.astype(jnp.float64) / jnp.asarray(divisor, jnp.float32).astype(jnp.float64)
        return (quotient * NOT_A_FLOAT32).astype(jnp.float32)


def cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x` in `dtype`, rounded to nearest even; values past the largest finite one become infinite.

    A float of `dtype` already keeps its bits. Otherwise NaN becomes the canonical NaN, and subnormals are kept.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    converted = _bfloat16_bits(x.astype(jnp.float32)) if dtype == ml_dtypes.bfloat16 else _bits(x.astype(dtype))
    nan_bits = jnp.asarray(CANONICAL_NAN_BITS[dtype], converted.dtype)
    return lax.bitcast_convert_type(jnp.where(jnp.isnan(x), nan_bits, converted), dtype)


def with_canonical_nan(x: jax.Array) -> jax.Array:
    """`x` (float32) with the canonical NaN for every other."""
    return jnp.where(jnp.isnan(x), lax.bitcast_convert_type(jnp.int32(CANONICAL_NAN_BITS[x.dtype]), x.dtype), x)


def encode_fp8(x: jax.Array, scale: ArrayLike, dtype: KVCacheDType) -> jax.Array:
    """`x / scale` in an fp8 dtype: clamped to the largest finite value, rounded to nearest even, NaN kept.

    Args:
      x: float32, float16 or bfloat16, any shape.
      scale: positive float32 decode scale that broadcasts against `x`.
      dtype: `FP8_E4M3` or `FP8_E5M2`.
    """
    info = dtype.info
    scaled = exact_divide(x.astype(jnp.float32), _with_rank_of(x, scale))
    return cast(jnp.clip(scaled, -info.max, info.max), info.storage_dtype)


def decode_fp8(stored: jax.Array, scale: ArrayLike) -> jax.Array:
    """`stored * scale` in float32, NaN as the canonical one."""
    return with_canonical_nan(stored.astype(jnp.float32) * _with_rank_of(stored, scale))


def encode_nvfp4(x: jax.Array, scale: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Blocks of 16 along the last dimension as four-bit codes and one float8 scale each.

    With `amax` the block's largest magnitude, NaN ignored: `sf = e4m3(min(amax / (6 * scale), 448))`,
    `inv = 1 / (sf * scale)` (0 where `sf` is 0), `code = e2m1(x * inv)`; float32 throughout, exact division.

    Args:
      x: float32, float16 or bfloat16 `[..., head_size]`, `head_size` a multiple of 16.
      scale: positive scalar float32 decode scale.

    Returns:
      `(data, block_scales)`: uint8 `[..., head_size / 2]`, the even element in the low nibble, and float8_e4m3fn
      `[..., head_size / 16]`.
    """
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE)
    amax = jnp.max(jnp.where(jnp.isnan(blocks), 0.0, jnp.abs(blocks)), axis=-1)
    block_scales = jnp.minimum(exact_divide(amax, E2M1_MAX * jnp.float32(scale)), E4M3_MAX).astype(jnp.float8_e4m3fn)
    # XLA may take a conversion there and back for none: on GPUs it would invert the scales before they were rounded.
    decoded = lax.optimization_barrier(block_scales).astype(jnp.float32) * scale
    inverse = jnp.where(decoded == 0.0, 0.0, exact_divide(jnp.ones_like(decoded), decoded))
    codes = e2m1_codes(blocks * inverse[..., None]).reshape(x.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, block_scales


def decode_nvfp4(data: jax.Array, block_scales: jax.Array, scale: ArrayLike) -> jax.Array:
    """`e2m1 * block_scale * scale` in float32, `[..., head_size]`, from what `encode_nvfp4` returns; NaN as in fp8."""
    codes = jnp.stack([data & 0xF, data >> 4], axis=-1).reshape(*block_scales.shape, NVFP4_BLOCK_SIZE)
    magnitudes = jnp.asarray(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), jnp.float32)[codes]
    values = magnitudes * block_scales.astype(jnp.float32)[..., None] * scale
    return with_canonical_nan(lax.collapse(values, values.ndim - 2))


def e2m1_codes(x: jax.Array) -> jax.Array:
    """Four-bit codes (uint8, 0 to 15) of float32 `x`: nearest even, saturating at 6, sign kept for -0, NaN as +0.

    A magnitude's index is the number of midpoints between neighbours that it has passed. On a midpoint itself the
    even index wins: one below an even index counts when it is reached, one below an odd index when it is passed.
    """
    magnitude = jnp.abs(x)
    index = jnp.zeros(x.shape, jnp.uint8)
    for upper in range(1, len(E2M1_VALUES)):
        midpoint = (E2M1_VALUES[upper - 1] + E2M1_VALUES[upper]) / 2
        passed = magnitude > midpoint if upper % 2 else magnitude >= midpoint
        index += passed.astype(jnp.uint8)
    codes = index | jnp.signbit(x).astype(jnp.uint8) << 3
    return jnp.where(jnp.isnan(x), jnp.uint8(0), codes)


def _with_rank_of(x: jax.Array, scale: ArrayLike) -> jax.Array:
    """`scale`, which broadcasts against `x`, with as many dimensions: users may have JAX refuse others."""
    scale = jnp.asarray(scale)
    return lax.expand_dims(scale, range(x.ndim - scale.ndim)) if scale.ndim else scale


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))


def _bfloat16_bits(x: jax.Array) -> jax.Array:
    # A convert would flush subnormals on CPU; integers do not. Adding half a step, less one unless the kept part is
    # odd, carries into the kept part exactly when the dropped part rounds up to nearest even.
    bits = _bits(x)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(jnp.uint16)
