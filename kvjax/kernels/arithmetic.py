"""The encodings of `kvjax.quant` as register arithmetic, which Mosaic lowers on sm_90 and on sm_100."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import quant
from kvjax.dtypes import KVCacheDType
from kvjax.kernels import compat, four_over_six
from kvjax.quant import E2M1_MAX, E2M1_SECOND, E2M1_VALUES, LEAST_TOKEN_SCALE, canonical_nan_bits


def reciprocal(divisor: jax.Array) -> jax.Array:
    """`1 / divisor` in float64 within two units in the last place, for a normal float32 whose reciprocal is normal.

    GPUs have an instruction for 23 bits of it, and divide float64 exactly but slowly. One step of the series
    `1 / d = y / (1 - e) = y * (1 + e + e**2 + ...)` with `e = 1 - d * y`, which float64 holds exactly, makes 69 of 23.
    """
    approximate = compat.ptx("rcp.approx.ftz.f32 $0, $1;", jnp.reciprocal, divisor)
    with jax.enable_x64(True):
        y = approximate.astype(jnp.float64)
        e = 1.0 - divisor.astype(jnp.float64) * y
        return y + y * (e + e * e)


def rounded_reciprocal(divisor: jax.Array) -> jax.Array:
    """`1 / divisor` in float32, correctly rounded, for a divisor between `2**-124` and `2**124`.

    What ptxas generates for `rcp.rn.f32`, without the branch for other divisors: one step of the series above, by fused
    multiply-adds. That it rounds correctly is a property of the approximations for all 2**23 mantissas: tests check all
    of them on a GPU, and check for other targets that ptxas relies on it too.
    """
    return compat.ptx(
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


def cast(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
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
    return _float8_bits(times(x.astype(jnp.float32), inverse), dtype.info.storage_dtype)


def _float8_bits(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """float32 rounded to nearest even, clamped to the largest finite value, NaN kept, as bytes."""
    if compat.interpreting():  # the instruction saturates and has one NaN, XLA's conversion does neither
        largest = float(jnp.finfo(dtype).max)
        bits = lax.bitcast_convert_type(jnp.clip(x, -largest, largest).astype(dtype), jnp.uint8)
        return jnp.where(jnp.isnan(x), jnp.uint8(canonical_nan_bits(dtype)), bits)
    return lax.bitcast_convert_type(x.astype(dtype), jnp.uint8)


def encode_nvfp4(
    pairs: Sequence[jax.Array], dtype: np.dtype[Any], scale: jax.Array, broadcast: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`kvjax.quant.encode_nvfp4` of rows of one block each.

    Args:
      pairs: uint32 `[..., 8]`, two 16-bit elements a word, the even one in the low half; or two float32 `[..., 8]`,
        the even elements and the odd ones.
      dtype: of the elements.
      scale: float32 scalar.
      broadcast: from `[...]` to `[..., 8]`, in the registers of `pairs`.

    Returns:
      uint8 `[..., 8]`, a byte for each pair, and uint8 `[...]`, the block scales' bits.
    """
    inverse = reciprocal(E2M1_MAX * scale)
    bits, _, factor = _block_scales(_largest_magnitudes(pairs, dtype), inverse, scale)
    return e2m1_pairs(*_halves(pairs, dtype), broadcast(factor)), bits


def encode_nvfp4_4over6(
    pairs: Sequence[jax.Array], dtype: np.dtype[Any], scale: jax.Array, broadcast: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`kvjax.quant.encode_nvfp4` of `NVFP4_4OVER6`; arguments and results as of `encode_nvfp4`."""
    if len(pairs) == 2:
        return _lesser_error(pairs, dtype, scale, broadcast)

    def model(words: jax.Array, scale: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _lesser_error([words], dtype, scale, broadcast)

    divisors = [largest * scale for largest in (E2M1_MAX, E2M1_SECOND)]
    others = [x for divisor in divisors for x in (divisor, rounded_reciprocal(divisor))]
    return compat.ptx_rows(_ptx_of_block(dtype), model, pairs[0], scale, *others)


def _lesser_error(
    pairs: Sequence[jax.Array], dtype: np.dtype[Any], scale: jax.Array, broadcast: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`encode_nvfp4_4over6` of blocks that threads may share."""
    amax, magnitudes = _largest_magnitudes(pairs, dtype), _halves(_magnitudes(pairs), dtype)
    candidates = []
    for largest in (E2M1_MAX, E2M1_SECOND):
        bits, step, factor = _block_scales(amax, reciprocal(largest * scale), scale)
        eighth = broadcast(factor) * 0.125
        indices = [_e2m1_indices(half, eighth) for half in magnitudes]
        error = compat.ptx_sum(_ptx_of_squared_errors, _squared_errors, *indices, *magnitudes, broadcast(step))
        candidates.append((bits, indices, error))
    (bits, indices, error), (other_bits, other_indices, other_error) = candidates
    is_other = (other_error < error).astype(jnp.int32)
    bits = jnp.where(is_other != 0, other_bits.astype(jnp.int32), bits.astype(jnp.int32)).astype(jnp.uint8)
    low, high = _halves(pairs, dtype)
    return compat.ptx(_ptx_to_join_either, _join_either, *indices, low, high, *other_indices, broadcast(is_other)), bits


def _ptx_of_block(dtype: np.dtype[Any]) -> str:
    """PTX of `encode_nvfp4_4over6` for a thread that holds a whole block of 16-bit elements."""
    if dtype == jnp.bfloat16:
        kind, declared = "bf16", ".reg .b32 wide;"
        widened = "shl.b32 wide, $2, 16; mov.b32 $0, wide; and.b32 wide, $2, 0xFFFF0000; mov.b32 $1, wide;"
    else:
        kind, declared = "f16", ".reg .b16 half<2>;"
        widened = "mov.b32 {half0, half1}, $2; cvt.f32.f16 $0, half0; cvt.f32.f16 $1, half1;"
    widen = f"{{ {declared} {widened} }}"
    return four_over_six.encode(kind, widen, _ptx_of_defined_choice(widen))


def _ptx_of_defined_choice(widen: str) -> str:
    """PTX of `_lesser_error`, for `four_over_six.encode`; four words at a time, which takes fewer registers."""
    columns = four_over_six.COLUMNS // 2
    low, high, low_index, high_index = (
        [f"{name}{i}" for i in range(columns)] for name in ("low", "high", "low_index", "high_index")
    )
    words = [[f"${3 + columns * half + i}" for i in range(columns)] for half in range(2)]
    elements = f".reg .f32 {', '.join((*low, *high))};"

    def widened(half: int) -> list[str]:
        each = zip(low, high, words[half], strict=True)
        return ["{", elements, *(four_over_six.inline(widen, names) for names in each)]

    magnitudes = [f"abs.f32 {x}, {x};" for x in (*low, *high)]
    lines = [
        ".reg .f32 error, total, first_total, divisor, decoded; .reg .pred is_second;",
        ".reg .b32 own<2>, first<2>, bits, first_bits, own_divisor, last_divisor;",
        "mov.f32 amax, 0f00000000;",
    ]
    for half in range(2):  # of a number and a NaN, the maximum is the number
        lines += [*widened(half), *magnitudes, *(f"max.f32 amax, amax, {x};" for x in (*low, *high)), "}"]
    # A loop that ptxas cannot count: it would interleave both candidates, with registers for both. It ends for any
    # scale, because it compares bits.
    lines += [
        "mov.b32 first0, 0; mov.b32 first1, 0; mov.f32 first_total, 0f00000000; mov.b32 first_bits, 0;",
        "mov.f32 divisor, $12;",
        "CANDIDATE:",
        *_PTX_OF_DEFINED_SCALE,
    ]
    for half, error in enumerate(("total", "error")):
        lines += [*widened(half), f".reg .b32 codes, {', '.join((*low_index, *high_index))};", *magnitudes]
        for names in zip((*low_index, *high_index), (*low, *high), strict=True):
            lines.append(four_over_six.inline(_PTX_OF_INDEX, [*names, "inverse"]))
        operands = [*low_index, *high_index, *low, *high, *["decoded"] * columns]
        lines.append(four_over_six.inline(_ptx_of_squared_errors(columns), [error, *operands]))
        lines += [*_ptx_to_pack("codes", low_index, high_index), f"mov.b32 own{half}, codes;", "}"]
    lines += [
        "add.rn.f32 total, total, error;",
        "mov.b32 own_divisor, divisor; mov.b32 last_divisor, $14;",
        "setp.eq.u32 is_second, own_divisor, last_divisor;",
        "@is_second bra BOTH;",
        "mov.b32 first0, own0; mov.b32 first1, own1; mov.f32 first_total, total; mov.b32 first_bits, bits;",
        "mov.f32 divisor, $14;",
        "bra CANDIDATE;",
        "BOTH:",
        "setp.lt.f32 is_other, total, first_total;",
        "selp.b32 scales, bits, first_bits, is_other;",
    ]
    for half in range(2):
        lines += [*widened(half), ".reg .b32 codes;", f"selp.b32 codes, own{half}, first{half}, is_other;"]
        lines += [four_over_six.inline(line, [f"codes{half}"]) for line in _ptx_to_add_signs(low, high)]
        lines.append("}")
    return "\n".join(["{", *lines, "}"])


_PTX_OF_DEFINED_SCALE = (
    "{ .reg .f64 wide, y, e; .reg .f32 x; .reg .b16 both, half<2>; .reg .b32 pair;",
    "rcp.approx.ftz.f32 x, divisor;",
    "cvt.f64.f32 y, x;",
    "cvt.f64.f32 wide, divisor;",
    "neg.f64 wide, wide;",
    "mov.f64 e, 0d3FF0000000000000;",
    "fma.rn.f64 e, wide, y, e;",
    "fma.rn.f64 e, e, e, e;",
    "fma.rn.f64 y, y, e, y;",
    "cvt.f64.f32 wide, amax;",
    "mul.rn.f64 wide, wide, y;",
    "cvt.rn.f32.f64 x, wide;",
    "cvt.rn.satfinite.e4m3x2.f32 both, x, x;",
    "cvt.u32.u16 bits, both;",
    "cvt.rn.f16x2.e4m3x2 pair, both;",
    "mov.b32 {half0, half1}, pair;",
    "cvt.f32.f16 decoded, half0;",
    "mul.rn.f32 decoded, decoded, $11;",
    "rcp.approx.ftz.f32 x, decoded;",
    "neg.f32 inverse, x;",
    "fma.rn.f32 inverse, decoded, inverse, 0f3F800000;",
    "fma.rn.f32 inverse, x, inverse, x;",
    "setp.eq.f32 is_other, decoded, 0f00000000;",
    "selp.f32 inverse, 0f00000000, inverse, is_other;",
    "mul.f32 inverse, inverse, 0f3E000000; }",
)
"""`_block_scales` of `amax` and `divisor`: sets `bits`, `decoded` and `inverse`, an eighth of the last."""


def _block_scales(amax: jax.Array, inverse: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bits of the block scales `amax * inverse`, their decoded values, and the inverses of these."""
    bits = _float8_bits(times(amax, inverse), np.dtype(jnp.float8_e4m3fn))
    step = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32) * scale
    return bits, step, jnp.where(step == 0.0, jnp.zeros_like(step), rounded_reciprocal(step))


def _magnitudes(pairs: Sequence[jax.Array]) -> list[jax.Array]:
    """Pairs without their signs."""
    if len(pairs) == 2:
        return [jnp.abs(x) for x in pairs]
    return [pairs[0] & jnp.uint32(0x7FFF7FFF)]


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
    """
    with jax.enable_x64(True):
        inverse_of_most = jnp.float64(1.0 / dtype.info.max)
    scales = jnp.maximum(times(_largest_magnitude(x), inverse_of_most), jnp.float32(LEAST_TOKEN_SCALE))
    # The reciprocal of infinity is 0, but the series returns NaN.
    inverse = jnp.where(scales == jnp.inf, jnp.zeros_like(scales), rounded_reciprocal(scales))
    if dtype is KVCacheDType.INT8_PER_TOKEN_HEAD:
        codes = compat.ptx(_ptx_to_int8, _int8_codes, x, broadcast(inverse))
    else:
        codes = _float8_bits(x * broadcast(inverse), dtype.info.storage_dtype)
    return codes, lax.bitcast_convert_type(scales, jnp.int32)


def _largest_magnitude(x: jax.Array) -> jax.Array:
    """The largest magnitude in each row, NaN ignored; by the instruction that `_largest_magnitudes` uses."""
    if compat.interpreting():
        return jnp.max(jnp.fmax(jnp.abs(x), 0.0), axis=-1)
    largest = compat.ptx_reduce("max.xorsign.abs.f32 $0, $1, $2;", x)
    return compat.ptx("{ .reg .f32 x; abs.f32 x, $1; max.f32 $0, x, 0f00000000; }", jnp.abs, largest)


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


def _halves(pairs: Sequence[jax.Array], dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array]:
    """The even and the odd elements of pairs, in float32."""
    if len(pairs) == 2:
        return pairs[0], pairs[1]
    [words] = pairs
    if dtype == jnp.bfloat16:
        low, high = words << 16, words & jnp.uint32(0xFFFF0000)
        return lax.bitcast_convert_type(low, jnp.float32), lax.bitcast_convert_type(high, jnp.float32)
    low, high = (
        lax.bitcast_convert_type(half.astype(jnp.uint16), dtype).astype(jnp.float32)
        for half in (words & 0xFFFF, words >> 16)
    )
    return low, high


def _largest_magnitudes(pairs: Sequence[jax.Array], dtype: np.dtype[Any]) -> jax.Array:
    """The largest magnitude in each row of pairs, NaN ignored, in float32.

    The instruction returns the larger magnitude, with a sign that is ignored, and of a NaN and a number the number. A
    last maximum with 0 handles rows of NaN only.
    """
    if compat.interpreting():
        low, high = _halves(pairs, dtype)
        return jnp.max(jnp.fmax(_larger_magnitude(low, high), 0.0), axis=-1)
    of_two = "max.xorsign.abs.{} $0, $1, $2;".format
    if len(pairs) == 2:
        largest = compat.ptx_reduce(of_two("f32"), compat.ptx(of_two("f32"), _larger_magnitude, *pairs))
        low, high = largest, largest
    else:
        kind = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
        low, high = _halves([compat.ptx_reduce(of_two(kind), pairs[0])], dtype)
    last = "{ .reg .f32 x; max.xorsign.abs.f32 x, $1, $2; abs.f32 x, x; max.f32 $0, x, 0f00000000; }"
    return compat.ptx(last, _larger_magnitude, low, high)


def _larger_magnitude(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.fmax(jnp.abs(x), jnp.abs(y))


def e2m1_pairs(low: jax.Array, high: jax.Array, inverse: jax.Array) -> jax.Array:
    """Bytes of two codes each, of `low * inverse` and `high * inverse`: NaN becomes 0, -0 keeps its sign.

    `inverse` is not negative. Uses the conversion instruction from sm_100 on, float32 and integer arithmetic before.
    """
    return compat.ptx(_ptx_to_convert, _e2m1_pairs, low, high, inverse, since=(10, 0))


def _ptx_to_convert(columns: int) -> str:
    """The conversion rounds to nearest even, saturates and keeps signs. NaN, which it converts to 6, is cleared."""
    lines = [".reg .pred number; .reg .f32 x<2>; .reg .b8 codes<4>;"]
    for i in range(columns):
        for half in range(2):
            lines += [
                f"mul.rn.f32 x{half}, ${1 + half * columns + i}, ${1 + 2 * columns + i};",
                f"setp.num.f32 number, x{half}, x{half};",
                f"selp.f32 x{half}, x{half}, 0f00000000, number;",
            ]
        lines.append(f"cvt.rn.satfinite.e2m1x2.f32 codes{i}, x1, x0;")
    word = ", ".join(f"codes{i % columns}" for i in range(4))
    return "\n".join(["{", *lines, f"mov.b32 $0, {{{word}}};", "}"])


def _e2m1_pairs(low: jax.Array, high: jax.Array, inverse: jax.Array) -> jax.Array:
    indices = [_e2m1_indices(half, inverse * 0.125) for half in (low, high)]
    return compat.ptx(_ptx_to_join, _join, *indices, low, high)


def _ptx_to_join(columns: int) -> str:
    """Joins the indices of four pairs, saturated at 7, in four instructions, and the signs of eight elements in seven.

    A conversion to e4m3 packs the signs of two elements, and drops that of NaN.
    """
    low_index, high_index, low, high = _operands(columns, 4)
    lines = [".reg .b32 codes;", *_ptx_to_pack("codes", low_index, high_index), *_ptx_to_add_signs(low, high)]
    return "\n".join(["{", *lines, "}"])


def _operands(columns: int, count: int) -> list[list[str]]:
    """The names of `count` operands' columns."""
    return [[f"${1 + i * columns + j}" for j in range(columns)] for i in range(count)]


def _ptx_to_pack(codes: str, low_index: Sequence[str], high_index: Sequence[str]) -> list[str]:
    """Packs indices, saturated at 7."""
    lines = [f"mov.b32 {codes}, 0;"]
    for low, high in reversed(list(zip(low_index, high_index, strict=True))):  # each shifts those before it
        lines.append(f"cvt.pack.sat.s4.s32.b32 {codes}, {high}, {low}, {codes};")
    return lines


def _ptx_to_add_signs(low: Sequence[str], high: Sequence[str]) -> list[str]:
    """Combines `codes` and the signs of elements to `$0`."""
    columns = len(low)
    lines = [".reg .b16 half<2>; .reg .b32 even, odd;"]
    for signs, x in (("even", low), ("odd", high)):
        for i in range(2):
            lines.append(f"cvt.rn.satfinite.e4m3x2.f32 half{i}, {x[(2 * i + 1) % columns]}, {x[2 * i % columns]};")
        lines.append(f"mov.b32 {signs}, {{half0, half1}};")
    lines += [
        "shr.u32 even, even, 4;",
        "and.b32 even, even, 0x08080808;",
        "and.b32 odd, odd, 0x80808080;",
        "or.b32 codes, codes, even;",
        "or.b32 $0, codes, odd;",
    ]
    return lines


def _join(low_index: jax.Array, high_index: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    low_code, high_code = (
        jnp.minimum(index, 7) | (jnp.signbit(x) & (x == x)).astype(jnp.int32) << 3
        for index, x in ((low_index, low), (high_index, high))
    )
    return (low_code | high_code << 4).astype(jnp.uint8)


def _ptx_to_join_either(columns: int) -> str:
    """`_ptx_to_join` of one of two pairs of indices: the second where the last operand is not 0."""
    low_index, high_index, low, high, other_low, other_high, is_other = _operands(columns, 7)
    lines = [
        ".reg .b32 codes, other; .reg .pred is_other;",
        *_ptx_to_pack("codes", low_index, high_index),
        *_ptx_to_pack("other", other_low, other_high),
        f"setp.ne.s32 is_other, {is_other[0]}, 0;",  # of a whole block
        "selp.b32 codes, other, codes, is_other;",
        *_ptx_to_add_signs(low, high),
    ]
    return "\n".join(["{", *lines, "}"])


def _join_either(
    low_index: jax.Array,
    high_index: jax.Array,
    low: jax.Array,
    high: jax.Array,
    other_low: jax.Array,
    other_high: jax.Array,
    is_other: jax.Array,
) -> jax.Array:
    chosen = [jnp.where(is_other != 0, *each) for each in ((other_low, low_index), (other_high, high_index))]
    return _join(chosen[0], chosen[1], low, high)


_FLOAT16_BYTES = np.array(E2M1_VALUES, np.float16).view(np.uint16) >> 8
"""The upper bytes of e2m1 magnitudes as float16; the lower bytes are 0."""


def _ptx_of_squared_errors(columns: int) -> str:
    """The sum of squared errors of `columns` pairs of elements, in the order of `kvjax.quant`.

    Four indices, a nibble each and saturated at 7, look up the upper bytes of four float16 at a time.
    """
    low_index, high_index, low, high, step = _operands(columns, 5)
    first, last = (int.from_bytes(bytes(_FLOAT16_BYTES[i : i + 4].tolist()), "little") for i in (0, 4))
    lines = [
        ".reg .b32 codes, first, last, bytes, both; .reg .b16 half<2>; .reg .f32 step, value, error<2>, sum<4>;",
        f"mov.b32 first, {first}; mov.b32 last, {last}; neg.f32 step, {step[0]};",  # the step of a whole block
        *_ptx_to_pack("codes", low_index, high_index),
    ]
    for i, pair in enumerate(zip(low, high, strict=True)):
        if i % 2 == 0:
            lines += ["shr.u32 codes, codes, 16;"] if i else []
            lines.append("prmt.b32 bytes, first, last, codes;")
        # Byte 0 of the zero goes below each: 0x1404 of bytes 0 and 1, 0x3424 of bytes 2 and 3.
        lines += [f"prmt.b32 both, bytes, 0, {(0x1404, 0x3424)[i % 2]};", "mov.b32 {half0, half1}, both;"]
        for half, x in enumerate(pair):
            lines += [f"cvt.f32.f16 value, half{half};", f"fma.rn.f32 error{half}, value, step, {x};"]
        lines += [f"mul.rn.ftz.f32 sum{i}, error0, error0;", f"fma.rn.ftz.f32 sum{i}, error1, error1, sum{i};"]
    count = columns
    while count > 1:
        count //= 2
        lines += [f"add.rn.f32 sum{i}, sum{2 * i}, sum{2 * i + 1};" for i in range(count)]
    return "\n".join(["{", *lines, "mov.f32 $0, sum0;", "}"])


def _squared_errors(
    low_index: jax.Array, high_index: jax.Array, low: jax.Array, high: jax.Array, step: jax.Array
) -> jax.Array:
    errors = []
    for index, x in ((low_index, low), (high_index, high)):
        index = jnp.minimum(index, 7)
        quarters = jnp.where(index < 2, 2 * index, (2 | index & 1) << (index >> 1))
        with jax.enable_x64(True):
            value = quarters.astype(jnp.float64) * 0.25
            errors.append((x.astype(jnp.float64) - value * step.astype(jnp.float64)).astype(jnp.float32))
    return quant.sum_of_squares(*errors)


_PTX_OF_INDEX = f"""{{ .reg .f32 magnitude, sum, line; .reg .b32 index, last;
abs.f32 magnitude, $1;
mul.rn.sat.f32 magnitude, magnitude, $2;
fma.rn.f32 sum, magnitude, 0f41000000, 0f{four_over_six.MAGIC:08X};
mov.b32 index, sum;
add.s32 index, index, {-four_over_six.MAGIC};
fma.rn.f32 line, magnitude, 0f00000004, 0f00000004;
mov.b32 last, line;
min.s32 $0, index, last; }}"""


def _e2m1_indices(x: jax.Array, inverse: jax.Array) -> jax.Array:
    """The index (int32) of the e2m1 magnitude nearest to that of `8 * x * inverse`, ties to even; 0 for NaN.

    Let `g` be the broken line through (value, index) of 0, .5, 1, 1.5, 2, 3, 4, 6. Its slopes are 2 up to 2, 1 up to 4
    and 1/2 from there; they fall, so that `g(a) = min(2 * a, a + 2, a / 2 + 4)`. It takes the middle between
    neighbouring values to the middle between their indices, hence rounding to the nearest value, of even index in a
    tie, is rounding `g` to the nearest even integer. Rounding is monotonic: the least of the rounded lines is the
    rounded least line. Past 6 it is 7 or 8: callers saturate the index.

    A sum with `2**23 - 2` rounds the first two lines at once: up to `2**23`, where `a` is 2, float32 are halves apart,
    and integers from there. Each has the next bits, so that the bits less those of `2**23 - 2` are the index. The last
    line uses that subnormal float32 are the integers times `2**-149`, with these integers as their bits: a fused
    multiply-add of constants that small rounds it to an integer.

    Both round once and to nearest even. The product with `inverse` is rounded before, like that of `kvjax.quant`; it
    saturates at 1, which is a magnitude of 8, and a NaN at 0. The factor of 8 changes no rounding.

    Examples: 0.75 is 1.5 on the line, index 2 (1.0). 2.5 is min(5, 4.5, 5.25) = 4.5, index 4 (2.0). 5 is 6.5, index 6
    (4.0), and 5.01 rounds to 7 (6.0).

    The pipe that compares, shifts and masks is half as wide on sm_90 as the one that multiplies and adds: this asks one
    instruction of the narrow one, which adds integers and takes the least, and three of the other.
    """
    return compat.ptx(_PTX_OF_INDEX, _least_line, x, inverse)


def _least_line(x: jax.Array, inverse: jax.Array) -> jax.Array:
    with jax.enable_x64(True):  # where the lines are exact
        magnitude = jnp.fmin(jnp.abs(x) * inverse, 1.0).astype(jnp.float64)
        magnitude = jnp.where(jnp.isnan(x), 0.0, magnitude)
        lines = [jnp.rint(slope * magnitude + start).astype(jnp.int32) for slope, start in ((16, 0), (8, 2), (4, 4))]
        return jnp.minimum(jnp.minimum(lines[0], lines[1]), lines[2])
