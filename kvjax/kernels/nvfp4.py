"""NVFP4 encodings of `kvjax.quant` as register arithmetic: block scales, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.kernels import arithmetic, compat, e2m1, four_over_six, ptx
from kvjax.kernels.aliases import DType
from kvjax.quant import E2M1_MAX, E2M1_SECOND


def encode_nvfp4(
    pairs: Sequence[jax.Array], dtype: DType, scale: jax.Array, broadcast: Callable[[jax.Array], jax.Array]
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
    inverse = arithmetic.reciprocal(E2M1_MAX * scale)
    bits, _, factor = _block_scales(_largest_magnitudes(pairs, dtype), inverse, scale)
    return e2m1.encode_pairs(*_halves(pairs, dtype), broadcast(factor)), bits


def encode_nvfp4_4over6(
    pairs: Sequence[jax.Array], dtype: DType, scale: jax.Array, broadcast: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`kvjax.quant.encode_nvfp4` of `NVFP4_4OVER6`; arguments and results as of `encode_nvfp4`."""
    if len(pairs) == 2:
        return _lesser_error(pairs, dtype, scale, broadcast)

    def model(words: jax.Array, scale: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _lesser_error([words], dtype, scale, broadcast)

    divisors = [largest * scale for largest in (E2M1_MAX, E2M1_SECOND)]
    others = [x for divisor in divisors for x in (divisor, arithmetic.rounded_reciprocal(divisor))]
    return ptx.map_rows(ptx_of_block(dtype), model, pairs[0], scale, *others)


def _lesser_error(
    pairs: Sequence[jax.Array], dtype: DType, scale: jax.Array, broadcast: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`encode_nvfp4_4over6` of blocks that threads may share."""
    amax, magnitudes = _largest_magnitudes(pairs, dtype), _halves(_magnitudes(pairs), dtype)
    candidates = []
    for largest in (E2M1_MAX, E2M1_SECOND):
        bits, step, factor = _block_scales(amax, arithmetic.reciprocal(largest * scale), scale)
        eighth = broadcast(factor) * 0.125
        indices = [e2m1.nearest_indices(half, eighth) for half in magnitudes]
        error = ptx.sum_rows(e2m1.ptx_of_squared_errors, e2m1.squared_errors, *indices, *magnitudes, broadcast(step))
        candidates.append((bits, indices, error))
    (bits, indices, error), (other_bits, other_indices, other_error) = candidates
    is_other = (other_error < error).astype(jnp.int32)
    bits = jnp.where(is_other != 0, other_bits.astype(jnp.int32), bits.astype(jnp.int32)).astype(jnp.uint8)
    low, high = _halves(pairs, dtype)
    return ptx.elementwise(
        e2m1.ptx_to_join_either, e2m1.join_either, *indices, low, high, *other_indices, broadcast(is_other)
    ), bits


def ptx_of_block(dtype: DType) -> str:
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
            lines.append(four_over_six.inline(e2m1.PTX_OF_INDEX, [*names, "inverse"]))
        operands = [*low_index, *high_index, *low, *high, *["decoded"] * columns]
        lines.append(four_over_six.inline(e2m1.ptx_of_squared_errors(columns), [error, *operands]))
        lines += [*e2m1.ptx_to_pack("codes", low_index, high_index), f"mov.b32 own{half}, codes;", "}"]
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
        lines += [four_over_six.inline(line, [f"codes{half}"]) for line in e2m1.ptx_to_add_signs(low, high)]
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
"""PTX of `_block_scales` of `amax` and `divisor`: sets `bits`, `decoded`, and `inverse` to an eighth of the inverse."""


def _block_scales(amax: jax.Array, inverse: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bits of the block scales `amax * inverse`, their decoded values, and the inverses of these."""
    bits = arithmetic.float8_bits(arithmetic.times(amax, inverse), np.dtype(jnp.float8_e4m3fn))
    step = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32) * scale
    return bits, step, jnp.where(step == 0.0, jnp.zeros_like(step), arithmetic.rounded_reciprocal(step))


def _magnitudes(pairs: Sequence[jax.Array]) -> list[jax.Array]:
    """Pairs without their signs."""
    if len(pairs) == 2:
        return [jnp.abs(x) for x in pairs]
    return [pairs[0] & jnp.uint32(0x7FFF7FFF)]


def _halves(pairs: Sequence[jax.Array], dtype: DType) -> tuple[jax.Array, jax.Array]:
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


def _largest_magnitudes(pairs: Sequence[jax.Array], dtype: DType) -> jax.Array:
    """The largest magnitude in each row of pairs, NaN ignored, in float32.

    The instruction returns the larger magnitude, with a sign that is ignored. Of a NaN and a number it returns the
    number. A final maximum with 0 handles rows that are all NaN.
    """
    if compat.interpreting():
        low, high = _halves(pairs, dtype)
        return jnp.max(jnp.fmax(_larger_magnitude(low, high), 0.0), axis=-1)
    of_two = "max.xorsign.abs.{} $0, $1, $2;".format
    if len(pairs) == 2:
        largest = ptx.reduce_rows(of_two("f32"), ptx.elementwise(of_two("f32"), _larger_magnitude, *pairs))
        low, high = largest, largest
    else:
        kind = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
        low, high = _halves([ptx.reduce_rows(of_two(kind), pairs[0])], dtype)
    last = "{ .reg .f32 x; max.xorsign.abs.f32 x, $1, $2; abs.f32 x, x; max.f32 $0, x, 0f00000000; }"
    return ptx.elementwise(last, _larger_magnitude, low, high)


def _larger_magnitude(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.fmax(jnp.abs(x), jnp.abs(y))
