"""fp8, int8 and NVFP4 in plain `jax.lax`: the definition of every byte in a quantized cache.

Every kernel must match these functions bit for bit. They are written so that XLA cannot change a rounding: it rewrites
`x / scalar` as `x * (1 / scalar)`, contracts `a * b + c` and flushes subnormals on CPU, each of which changes bytes.
They use `lax` because `jnp` functions take ten times as long to trace.

Scales are *decode* scales: `value = stored * scale`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVCacheDType
from kvjax.errors import UnsupportedError

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the eight magnitudes of a four-bit code; bit 3 is the sign."""

E2M1_MAX = 6.0
E2M1_SECOND = 4.0
E4M3_MAX = 448.0

LEAST_TOKEN_SCALE = 1e-6
"""Lower bound of a scale per token and head, as in vLLM: rows of zeros need one too."""

NOT_A_FLOAT32 = 1.0 + 2.0**-52
"""The float64 next to 1: a factor without effect on a float32 result, and not representable in float32."""


def canonical_nan_bits(dtype: np.dtype) -> int:
    """Returns the bits of the NaN that NVIDIA GPUs' convert instructions write: all of them except the sign are set.

    Every dtype conversion of a NaN produces this one.
    """
    return (1 << 8 * np.dtype(dtype).itemsize - 1) - 1


def exact_divide(x: jax.Array, divisor: ArrayLike) -> jax.Array:
    """Returns `x / divisor` in float32, correctly rounded on every backend; the two broadcast.

    XLA divides float32 inexactly on GPU, and on every backend turns division by a broadcast value into multiplication
    by its reciprocal. In float64 such errors are a few units in the last place, under `2**-50` of the quotient. A
    quotient of two 24-bit significands is never that close to the midpoint of two float32, where rounding could go
    wrong: for a 25-bit midpoint `m`, `a / b - m` is a non-zero multiple of a unit over `b`, at least `2**-49` of `m`.

    If a float64 quotient is only rounded to float32, LLVM narrows the division to an inexact float32 division. The
    factor, which differs from 1 only in a float64's last bit, prevents that.
    """
    with jax.enable_x64(True):
        divisor = _to(jnp.asarray(divisor, jnp.float32), np.float64)
        if divisor.ndim and divisor.shape != x.shape:
            divisor = jnp.broadcast_to(divisor, x.shape)
        return _to(lax.mul(lax.div(_to(x, np.float64), divisor), np.float64(NOT_A_FLOAT32)), np.float32)


def cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns `x` in `dtype`, rounded to nearest even; values past the largest finite one become infinite.

    If `x` already has the dtype, its bits are unchanged. Otherwise NaN becomes the canonical NaN; subnormals are kept.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    converted = _bfloat16_bits(_to(x, np.float32)) if dtype == ml_dtypes.bfloat16 else _bits(_to(x, dtype))
    return lax.bitcast_convert_type(_where(_is_nan(x), canonical_nan_bits(dtype), converted), dtype)


def with_canonical_nan(x: jax.Array) -> jax.Array:
    """Returns `x` (float32) with every NaN replaced by the canonical one."""
    return lax.bitcast_convert_type(_where(_is_nan(x), canonical_nan_bits(x.dtype), _bits(x)), x.dtype)


def encode(x: jax.Array, dtype: KVCacheDType, scale: jax.Array) -> tuple[jax.Array, ...]:
    """Encodes `x` `[..., head_size]` as stored rows: data and, where pages hold them, scales.

    `dtype` is one of `AttentionSpec.parts`; `scale` is ignored where it takes none.
    """
    match dtype:
        case KVCacheDType.FLOAT32 | KVCacheDType.FLOAT16 | KVCacheDType.BFLOAT16:
            return (cast(x, dtype.info.storage_dtype),)
        case KVCacheDType.FP8_E4M3 | KVCacheDType.FP8_E5M2:
            return (encode_fp8(x, scale, dtype),)
        case KVCacheDType.FP8_PER_TOKEN_HEAD | KVCacheDType.INT8_PER_TOKEN_HEAD:
            return encode_per_token_head(x, dtype)
        case KVCacheDType.NVFP4 | KVCacheDType.NVFP4_4OVER6:
            return encode_nvfp4(x, scale, dtype)
        case KVCacheDType.FP8_DS_MLA:
            return encode_fp8_ds_mla(x)
    raise UnsupportedError(f"dtype: got {dtype.value!r}, which kvjax.quant does not encode")


def decode(rows: Sequence[jax.Array], dtype: KVCacheDType, scale: jax.Array) -> jax.Array:
    """Returns rows that `encode` made, decoded to float32, or unchanged if they are unquantized."""
    match dtype.byte_format:
        case KVCacheDType.FLOAT32 | KVCacheDType.FLOAT16 | KVCacheDType.BFLOAT16:
            return rows[0]
        case KVCacheDType.FP8_E4M3 | KVCacheDType.FP8_E5M2:
            return decode_fp8(rows[0], scale)
        case KVCacheDType.FP8_PER_TOKEN_HEAD | KVCacheDType.INT8_PER_TOKEN_HEAD:
            return decode_per_token_head(*rows)
        case KVCacheDType.NVFP4:
            data, block_scales = rows
            return decode_nvfp4(data, block_scales, scale)
        case KVCacheDType.FP8_DS_MLA:
            return decode_fp8_ds_mla(*rows)
    raise UnsupportedError(f"dtype: got {dtype.value!r}, which kvjax.quant does not decode")


def encode_fp8(x: jax.Array, scale: ArrayLike, dtype: KVCacheDType) -> jax.Array:
    """Encodes `x / scale` in an fp8 dtype: clamped to the largest finite value, rounded to nearest even, NaN kept.

    Args:
      x: float32, float16 or bfloat16, any shape.
      scale: positive float32 decode scale that broadcasts against `x`.
      dtype: `FP8_E4M3` or `FP8_E5M2`.
    """
    scaled = exact_divide(x.astype(jnp.float32), _with_rank_of(x, scale))
    return _float8_codes(scaled, dtype.info.storage_dtype)


def decode_fp8(stored: jax.Array, scale: ArrayLike) -> jax.Array:
    """Returns `stored * scale` in float32, with canonical NaNs."""
    return with_canonical_nan(stored.astype(jnp.float32) * _with_rank_of(stored, scale))


def encode_per_token_head(x: jax.Array, dtype: KVCacheDType) -> tuple[jax.Array, jax.Array]:
    """Encodes each row of the last dimension as 8-bit codes and one float32 scale, as vLLM does (#38378, #45361).

    With `amax` the row's largest magnitude, NaN ignored, and Q the dtype's largest value, `scale = max(amax / Q, 1e-6)`
    and `q = x * (1 / scale)`; every operation rounds to float32. An fp8 code is `q` clamped to Q and rounded to nearest
    even, NaN kept. An int8 code is `abs(q) + 0.5`, truncated, with the sign of `q`, and 0 for NaN. An infinity makes
    the scale infinite, so the whole row reads as NaN.

    Args:
      x: float32, float16 or bfloat16 `[..., head_size]`.
      dtype: `FP8_PER_TOKEN_HEAD` or `INT8_PER_TOKEN_HEAD`.

    Returns:
      `(codes, scales)`: float8_e4m3fn or int8 `[..., head_size]`, and float32 `[..., 1]`.
    """
    info, last = dtype.info, x.ndim - 1
    x = _to(x, np.float32)
    amax = lax.reduce_max(_where(_is_nan(x), 0.0, lax.abs(x)), [last])
    scales = lax.max(exact_divide(amax, np.float32(info.max)), np.float32(LEAST_TOKEN_SCALE))
    inverse = exact_divide(lax.full(scales.shape, np.float32(1.0)), scales)
    scaled = lax.mul(x, lax.broadcast_in_dim(inverse, x.shape, range(last)))
    codes = int8_codes(scaled) if info.storage_dtype == np.int8 else _float8_codes(scaled, info.storage_dtype)
    return codes, lax.expand_dims(scales, [last])


def decode_per_token_head(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns `codes * scales` in float32, from what `encode_per_token_head` returns; NaN as in fp8."""
    scales = lax.broadcast_in_dim(scales, codes.shape, range(codes.ndim))
    return with_canonical_nan(lax.mul(_to(codes, np.float32), scales))


def encode_fp8_ds_mla(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encodes blocks of 128 along the last dimension as fp8 codes and one float32 scale each, as in vLLM's MLA caches.

    `scale = 2 ** ceil(log2(max(amax / 448, 1e-4)))`, without rounding (`block_scales`), with `amax` the block's largest
    magnitude, NaN ignored; a code is `x / scale`, which is exact, rounded to nearest even, the sign of 0 and NaN kept.
    This is FlashMLA's convention (its `tests/quant.py`), and vLLM 0.33.0's `concat_and_cache_mla`, which takes only
    16-bit latents, stores the same; earlier versions stored `max(amax / 448, 2**-126)`. `decode_fp8_ds_mla` reads any
    scale. An infinity makes the scale infinite: the whole block reads as NaN. Finite scales are at most `2**120`, under
    which magnitudes from `248 * 2**120` on round to 256 and read as infinity.

    Args:
      x: float32, float16 or bfloat16 `[..., size]`, a multiple of 128.

    Returns:
      `(codes, scales)`: float8_e4m3fn `[..., size]` and float32 `[..., size / 128]`.
    """
    block = (info := KVCacheDType.FP8_DS_MLA.info).elements_per_scale or 1
    blocks = lax.reshape(_to(x, np.float32), (*x.shape[:-1], x.shape[-1] // block, block))
    amax = lax.reduce_max(_where(_is_nan(blocks), 0.0, lax.abs(blocks)), [x.ndim])
    scales, inverse = block_scales(amax)
    return lax.reshape(_float8_codes(_times_each_block(blocks, inverse), info.storage_dtype), x.shape), scales


def block_scales(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns scales of `fp8_ds_mla` for float32 magnitudes `amax`, and their reciprocals, 0 for infinity.

    `448 * 2**k` is `1.75 * 2**(k + 8)`: adding `0x1FFFFF` to the bits of `amax` carries into the exponent if its
    significand exceeds 1.75. Products with reciprocals are exact, or subnormal: their codes are 0, flushed or not.
    """
    bits = lax.bitwise_and(lax.add(lax.bitcast_convert_type(amax, np.int32), np.int32(0x1FFFFF)), np.int32(255 << 23))
    bits = lax.sub(lax.max(bits, np.int32(127 - 13 + 8 << 23)), np.int32(8 << 23))  # 2**-13 is above 1e-4
    scales, inverse = (lax.bitcast_convert_type(x, np.float32) for x in (bits, lax.sub(np.int32(254 << 23), bits)))
    is_infinite = lax.eq(amax, np.float32(np.inf))
    return _where(is_infinite, np.inf, scales), _where(is_infinite, 0.0, inverse)


def decode_fp8_ds_mla(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns float32 `codes * scales`, `[..., size]`, of what `encode_fp8_ds_mla` returns; NaN as in fp8.

    Magnitudes below `2**-126` are flushed to zeros of the same sign.
    """
    blocks = lax.reshape(_to(codes, np.float32), (*scales.shape, codes.shape[-1] // scales.shape[-1]))
    return with_canonical_nan(lax.reshape(normal(_times_each_block(blocks, scales)), codes.shape))


def int8_codes(x: jax.Array) -> jax.Array:
    """Returns float32 `x` as int8: halves away from zero, saturating at 127 and -127, NaN as 0.

    The sum with 0.5 rounds to float32 before truncation, so 0.49999997 becomes 1. It is added to the magnitude, because
    a product followed directly by a sum would be contracted and round only once.
    """
    magnitude = lax.add(lax.min(lax.abs(x), np.float32(127.0)), np.float32(0.5))
    codes = _to(_where(_is_nan(x), 0.0, magnitude), np.int32)
    return _to(lax.select(lax.lt(x, np.float32(0.0)), lax.neg(codes), codes), np.int8)


def _float8_codes(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    return cast(lax.clamp(-largest, x, largest), dtype)


def encode_nvfp4(
    x: jax.Array, scale: ArrayLike, dtype: KVCacheDType = KVCacheDType.NVFP4
) -> tuple[jax.Array, jax.Array]:
    """Encodes blocks of 16 along the last dimension as four-bit codes and one float8 scale each.

    With `amax` the block's largest magnitude, NaN ignored: `sf = e4m3(min(amax / (6 * scale), 448))`,
    `inv = 1 / (sf * scale)` (0 if `sf` is 0), `code = e2m1(x * inv)`; float32 throughout, exact division.

    `NVFP4_4OVER6` also encodes each block with 4 in place of 6, which maps its largest magnitude to about 4 (four over
    six: codes are denser there, and none lies between 4 and 6). It keeps the encoding with the smaller sum of squared
    errors (`_squared_errors`), that of 6 in a tie.

    Args:
      x: float32, float16 or bfloat16 `[..., head_size]`, `head_size` a multiple of 16.
      scale: positive scalar float32 decode scale.
      dtype: `NVFP4` or `NVFP4_4OVER6`.

    Returns:
      `(data, block_scales)`: uint8 `[..., head_size / 2]`, the even element in the low nibble, and float8_e4m3fn
      `[..., head_size / 16]`.
    """
    scale = jnp.asarray(scale, jnp.float32)
    last = x.ndim - 1
    blocks = lax.reshape(_to(x, np.float32), (*x.shape[:last], x.shape[last] // NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE))
    amax = lax.reduce_max(_where(_is_nan(blocks), 0.0, lax.abs(blocks)), [x.ndim])
    block_scales, steps, codes = _encode_blocks(blocks, amax, scale, E2M1_MAX)
    if dtype is KVCacheDType.NVFP4_4OVER6:
        other_scales, other_steps, other_codes = _encode_blocks(blocks, amax, scale, E2M1_SECOND)
        errors, other_errors = _squared_errors(blocks, codes, steps), _squared_errors(blocks, other_codes, other_steps)
        is_other = lax.lt(other_errors, errors)
        block_scales = lax.select(is_other, other_scales, block_scales)
        codes = lax.select(lax.broadcast_in_dim(is_other, codes.shape, range(is_other.ndim)), other_codes, codes)
    codes = lax.reshape(codes, x.shape)
    even, odd = (lax.slice_in_dim(codes, start, None, 2, last) for start in (0, 1))
    return lax.bitwise_or(even, lax.shift_left(odd, np.uint8(4))), block_scales


def _encode_blocks(
    blocks: jax.Array, amax: jax.Array, scale: jax.Array, largest: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns block scales that map `amax` to about `largest`, their decoded values, and codes."""
    scaled = exact_divide(amax, lax.mul(scale, np.float32(largest)))
    block_scales = _to(lax.min(scaled, np.float32(E4M3_MAX)), ml_dtypes.float8_e4m3fn)
    # XLA may cancel a conversion and its inverse: on GPUs it would invert the scales before they were rounded.
    steps = lax.mul(_to(lax.optimization_barrier(block_scales), np.float32), scale)
    inverse = exact_divide(lax.full(steps.shape, np.float32(1.0)), steps)
    inverse = _where(lax.eq(steps, np.float32(0.0)), 0.0, inverse)
    return block_scales, steps, e2m1_codes(_times_each_block(blocks, inverse))


def _squared_errors(blocks: jax.Array, codes: jax.Array, steps: jax.Array) -> jax.Array:
    """Returns the sum of squared errors of each block, in units of the input, in float32.

    `error = |x| - |e2m1| * step`, rounded once. Elements 2 i and 2 i + 1 give `fma(odd, odd, even * even)`, flushed
    to 0 below `2**-126`; these are added pairwise, as a tree, so that threads may share a block. A block with
    NaN has NaN. For blocks whose squares do not fit float32, where all errors are below `2**-63` or one is above
    `2**64` with each scale, neither sum is smaller.

    In float64 the product is exact, and so is the difference unless one side is negligible.
    """
    with jax.enable_x64(True):
        values = _to(lax.abs(e2m1_values(codes)), np.float64)
        stored = _times_each_block(values, _to(steps, np.float64))
        errors = _rounded(lax.sub(_to(lax.abs(blocks), np.float64), stored))
    sums = sum_of_squares(*(lax.slice_in_dim(errors, start, None, 2, errors.ndim - 1) for start in (0, 1)))
    while sums.shape[-1] > 1:
        even, odd = (lax.slice_in_dim(sums, start, None, 2, sums.ndim - 1) for start in (0, 1))
        sums = lax.add(even, odd)
    return lax.squeeze(sums, [sums.ndim - 1])


def sum_of_squares(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns `fma(y, y, x * x)` in float32 on every backend: `x * x` is rounded, then the sum, once.

    The float64 sum is rounded to odd, which makes a second rounding to less than half the bits correct (Boldo and
    Melquiond 2008): using its exact error (Knuth's two-sum), it is truncated, and its last bit is set if it was
    inexact. Results below `2**-126` are 0, as on GPUs that flush subnormals.
    """
    with jax.enable_x64(True):
        squares = [lax.mul(each, each) for each in (_to(x, np.float64), _to(y, np.float64))]
        first, second = _to(_flushed(squares[0]), np.float64), squares[1]
        total = lax.add(first, second)
        of_second = lax.sub(total, first)
        error = lax.add(lax.sub(first, lax.sub(total, of_second)), lax.sub(second, of_second))
        is_above, is_below = lax.lt(error, np.float64(0.0)), lax.gt(error, np.float64(0.0))
        bits = lax.sub(_bits(total), _to(is_above, np.uint64))
        bits = lax.bitwise_or(bits, _to(lax.bitwise_or(is_above, is_below), np.uint64))
        return _flushed(lax.bitcast_convert_type(bits, np.float64))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, is_neox: bool) -> jax.Array:
    """Rotates pairs of elements of each head by the angle of its position, in float32, rounded to the dtype of `x`.

    The pair `(x, y)` becomes `(x * cos - y * sin, y * cos + x * sin)`: products are rounded, then differences and sums.
    Magnitudes below `2**-126` are flushed to 0.

    Args:
      x: float32, float16 or bfloat16 `[num_tokens, heads, head_size]`.
      cos: float32 `[num_tokens, rot_dim / 2]`, for each pair; `rot_dim` is at most `head_size`, and the remaining
        elements are unchanged.
      sin: the same.
      is_neox: whether element `i` is paired with `i + rot_dim / 2`, else `2 i` with `2 i + 1` (GPT-J).
    """
    half, last = cos.shape[-1], x.ndim - 1
    rotary, rest = (lax.slice_in_dim(x, *ends, 1, last) for ends in ((0, 2 * half), (2 * half, x.shape[last])))
    if is_neox:
        pairs = [lax.slice_in_dim(rotary, i * half, (i + 1) * half, 1, last) for i in range(2)]
    else:
        pairs = [lax.slice_in_dim(rotary, i, None, 2, last) for i in range(2)]
    first, second = (_to(each, np.float32) for each in pairs)
    angles = [lax.broadcast_in_dim(each, first.shape, (0, 2)) for each in (cos, sin)]
    rotated = rotated_first(first, second, *angles), rotated_second(first, second, *angles)
    rounded = [with_canonical_nan(each) if x.dtype == np.float32 else cast(each, x.dtype) for each in rotated]
    # As integers: on some CPUs XLA concatenates bfloat16 in float32, which changes NaN.
    *rounded, rest = map(_bits, (*rounded, rest))
    if not is_neox:
        rounded = [
            lax.reshape(lax.concatenate([lax.expand_dims(each, [x.ndim]) for each in rounded], x.ndim), rotary.shape)
        ]
    return lax.bitcast_convert_type(lax.concatenate([*rounded, rest], last), x.dtype)


def rotated_first(x: jax.Array, y: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `x * cos - y * sin` in float32, from rounded products; subnormals are flushed, as XLA does on CPU."""
    return normal(lax.sub(*_products((x, cos), (y, sin))))


def rotated_second(x: jax.Array, y: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `y * cos + x * sin`, likewise."""
    return normal(lax.add(*_products((y, cos), (x, sin))))


def _products(*pairs: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
    """Returns rounded float32 products. The barrier prevents XLA and LLVM from contracting them with their consumer."""
    products = [lax.mul(normal(x), normal(y)) for x, y in pairs]
    return [normal(product) for product in lax.optimization_barrier(products)]


def normal(x: jax.Array) -> jax.Array:
    """Flushes float32 subnormals to zeros of the same sign."""
    zeros = lax.bitcast_convert_type(lax.bitwise_and(_bits(x), np.uint32(1 << 31)), np.float32)
    return lax.select(lax.lt(lax.abs(x), np.float32(2.0**-126)), zeros, x)


def _flushed(x: jax.Array) -> jax.Array:
    """Converts non-negative float64 to float32, flushing subnormals to 0."""
    return _rounded(_where(lax.lt(x, np.float64(2.0**-126)), 0.0, x))


def _rounded(x: jax.Array) -> jax.Array:
    """Rounds float64 to float32. Without the barrier, XLA on GPUs would cancel this and a conversion back."""
    return lax.optimization_barrier(_to(x, np.float32))


def decode_nvfp4(data: jax.Array, block_scales: jax.Array, scale: ArrayLike) -> jax.Array:
    """Returns float32 `e2m1 * block_scale * scale`, `[..., head_size]`, of `encode_nvfp4`'s results; NaN as in fp8."""
    nibbles = lax.bitwise_and(data, np.uint8(0xF)), lax.shift_right_logical(data, np.uint8(4))
    codes = lax.concatenate([lax.expand_dims(codes, [data.ndim]) for codes in nibbles], data.ndim)
    blocks = e2m1_values(lax.reshape(codes, (*block_scales.shape, NVFP4_BLOCK_SIZE)))
    values = lax.mul(_times_each_block(blocks, _to(block_scales, np.float32)), jnp.asarray(scale, jnp.float32))
    return with_canonical_nan(lax.collapse(values, values.ndim - 2))


def e2m1_codes(x: jax.Array) -> jax.Array:
    """Returns four-bit codes (uint8, 0 to 15) of float32 `x`: nearest even, saturating at 6, -0 kept, NaN as +0.

    A magnitude's index is the number of midpoints below it. Exactly on a midpoint the even index wins: a midpoint below
    an even index counts if it is reached, one below an odd index if it is exceeded.
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
    """Returns the float32 values of four-bit codes."""
    table = np.array([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], np.float32)
    at_scalars = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    indices = lax.expand_dims(_to(codes, np.int32), [codes.ndim])
    return lax.gather(table, indices, at_scalars, (1,), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _times_each_block(blocks: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiplies `[..., blocks, elements]` by `[..., blocks]`."""
    return lax.mul(blocks, lax.broadcast_in_dim(factors, blocks.shape, range(factors.ndim)))


def _with_rank_of(x: jax.Array, scale: ArrayLike) -> jax.Array:
    """Returns `scale` with the rank of `x`: users may disable implicit rank promotion."""
    scale = jnp.asarray(scale)
    return lax.expand_dims(scale, range(x.ndim - scale.ndim)) if scale.ndim else scale


def _to(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.convert_element_type(x, np.dtype(dtype))


def _is_nan(x: jax.Array) -> jax.Array:
    return lax.ne(x, x)


def _where(condition: jax.Array, number: float, x: jax.Array) -> jax.Array:
    """Returns `number` where the condition holds, else `x`."""
    return lax.select(condition, lax.full(x.shape, number, x.dtype), x)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))


def _bfloat16_bits(x: jax.Array) -> jax.Array:
    # A convert would flush subnormals on CPU; integer operations do not. Adding half a step, less one unless the kept
    # part is odd, carries into the kept part exactly if the dropped part rounds up to nearest even.
    bits, sixteen = _bits(x), np.uint32(16)
    is_odd = lax.bitwise_and(lax.shift_right_logical(bits, sixteen), np.uint32(1))
    rounded = lax.add(lax.add(bits, np.uint32(0x7FFF)), is_odd)
    return _to(lax.shift_right_logical(rounded, sixteen), np.uint16)
