"""fp8 and NVFP4 in plain `jax.lax`: the definition of every byte in a quantized cache.

Each kernel is held to these functions, bit for bit. They are written so that XLA cannot change a rounding: it turns
`x / scalar` into `x * (1 / scalar)`, contracts `a * b + c` and flushes subnormals on CPU, each of which moves bytes.
And by `lax`, since a function of `jnp` takes ten times as long to trace.

Scales are *decode* scales: `value = stored * scale`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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
        divisor = _to(jnp.asarray(divisor, jnp.float32), np.float64)
        if divisor.ndim and divisor.shape != x.shape:
            divisor = jnp.broadcast_to(divisor, x.shape)
        return _to(lax.mul(lax.div(_to(x, np.float64), divisor), np.float64(NOT_A_FLOAT32)), np.float32)


def cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x` in `dtype`, rounded to nearest even; values past the largest finite one become infinite.

    A float of `dtype` already keeps its bits. Otherwise NaN becomes the canonical NaN, and subnormals are kept.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    converted = _bfloat16_bits(_to(x, np.float32)) if dtype == ml_dtypes.bfloat16 else _bits(_to(x, dtype))
    return lax.bitcast_convert_type(_where(_is_nan(x), CANONICAL_NAN_BITS[dtype], converted), dtype)


def with_canonical_nan(x: jax.Array) -> jax.Array:
    """`x` (float32) with the canonical NaN for every other."""
    return lax.bitcast_convert_type(_where(_is_nan(x), CANONICAL_NAN_BITS[x.dtype], _bits(x)), x.dtype)


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
    scale = jnp.asarray(scale, jnp.float32)
    last = x.ndim - 1
    blocks = lax.reshape(_to(x, np.float32), (*x.shape[:last], x.shape[last] // NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE))
    amax = lax.reduce_max(_where(_is_nan(blocks), 0.0, lax.abs(blocks)), [x.ndim])
    scaled = exact_divide(amax, lax.mul(scale, np.float32(E2M1_MAX)))
    block_scales = _to(lax.min(scaled, np.float32(E4M3_MAX)), ml_dtypes.float8_e4m3fn)
    # XLA may take a conversion there and back for none: on GPUs it would invert the scales before they were rounded.
    decoded = lax.mul(_to(lax.optimization_barrier(block_scales), np.float32), scale)
    inverse = exact_divide(lax.full(decoded.shape, np.float32(1.0)), decoded)
    inverse = _where(lax.eq(decoded, np.float32(0.0)), 0.0, inverse)
    codes = lax.reshape(e2m1_codes(_times_each_block(blocks, inverse)), x.shape)
    even, odd = (lax.slice_in_dim(codes, start, None, 2, last) for start in (0, 1))
    return lax.bitwise_or(even, lax.shift_left(odd, np.uint8(4))), block_scales


def decode_nvfp4(data: jax.Array, block_scales: jax.Array, scale: ArrayLike) -> jax.Array:
    """`e2m1 * block_scale * scale` in float32, `[..., head_size]`, from what `encode_nvfp4` returns; NaN as in fp8."""
    nibbles = lax.bitwise_and(data, np.uint8(0xF)), lax.shift_right_logical(data, np.uint8(4))
    codes = lax.concatenate([lax.expand_dims(codes, [data.ndim]) for codes in nibbles], data.ndim)
    blocks = e2m1_values(lax.reshape(codes, (*block_scales.shape, NVFP4_BLOCK_SIZE)))
    values = lax.mul(_times_each_block(blocks, _to(block_scales, np.float32)), jnp.asarray(scale, jnp.float32))
    return with_canonical_nan(lax.collapse(values, values.ndim - 2))


def e2m1_codes(x: jax.Array) -> jax.Array:
    """Four-bit codes (uint8, 0 to 15) of float32 `x`: nearest even, saturating at 6, sign kept for -0, NaN as +0.

    A magnitude's index is the number of midpoints between neighbours that it has passed. On a midpoint itself the
    even index wins: one below an even index counts when it is reached, one below an odd index when it is passed.
    """
    magnitude = lax.abs(x)
    counts = []
    for upper in range(1, len(E2M1_VALUES)):
        midpoint = (E2M1_VALUES[upper - 1] + E2M1_VALUES[upper]) / 2
        passed = (lax.gt if upper % 2 else lax.ge)(magnitude, np.float32(midpoint))
        counts.append(_to(passed, np.uint8))
    sign = _to(lax.shift_right_logical(_bits(x), np.uint32(31)), np.uint8)
    codes = lax.bitwise_or(functools.reduce(lax.add, counts), lax.shift_left(sign, np.uint8(3)))
    return _where(_is_nan(x), 0, codes)


def e2m1_values(codes: jax.Array) -> jax.Array:
    """What four-bit codes stand for, in float32."""
    table = np.array([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], np.float32)
    at_scalars = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    indices = lax.expand_dims(_to(codes, np.int32), [codes.ndim])
    return lax.gather(table, indices, at_scalars, (1,), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _times_each_block(blocks: jax.Array, factors: jax.Array) -> jax.Array:
    """`[..., blocks, elements]` times `[..., blocks]`."""
    return lax.mul(blocks, lax.broadcast_in_dim(factors, blocks.shape, range(factors.ndim)))


def _with_rank_of(x: jax.Array, scale: ArrayLike) -> jax.Array:
    """`scale`, which broadcasts against `x`, with as many dimensions: users may have JAX refuse others."""
    scale = jnp.asarray(scale)
    return lax.expand_dims(scale, range(x.ndim - scale.ndim)) if scale.ndim else scale


def _to(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.convert_element_type(x, np.dtype(dtype))


def _is_nan(x: jax.Array) -> jax.Array:
    return lax.ne(x, x)


def _where(condition: jax.Array, number: float, x: jax.Array) -> jax.Array:
    """`x`, but a number where a condition holds."""
    return lax.select(condition, lax.full(x.shape, number, x.dtype), x)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))


def _bfloat16_bits(x: jax.Array) -> jax.Array:
    # A convert would flush subnormals on CPU; integers do not. Adding half a step, less one unless the kept part is
    # odd, carries into the kept part exactly when the dropped part rounds up to nearest even.
    bits, sixteen = _bits(x), np.uint32(16)
    is_odd = lax.bitwise_and(lax.shift_right_logical(bits, sixteen), np.uint32(1))
    rounded = lax.add(lax.add(bits, np.uint32(0x7FFF)), is_odd)
    return _to(lax.shift_right_logical(rounded, sixteen), np.uint16)
