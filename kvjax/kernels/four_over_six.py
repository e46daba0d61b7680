"""Blocks of `NVFP4_4OVER6` in one thread each: which of two block scales has the smaller error, and the codes, as PTX.

Both candidates' codes are computed exactly. To compare the sums of squared errors `|x| - q * step`, where `q` are the
codes' values, it is enough to compare

    A = step * (step * sum(q * q) - 2 * sum(|x| * q)),

because `sum(x * x)` is in both. The sums in `A` are dot products of small integers, for which GPUs have instructions
that take 2 or 4 elements: `2 * q` is one of 0 to 12, and `|x|` is scaled by a power of two to 16 bits. The 16 bits are
exact: the largest magnitude of a block becomes one from `2**15` to `2**16`. The least with a nonzero code, a quarter of
a step and thus at least 1/26 of the largest, is then above `2**10`, where 11 bits are an integer. Smaller ones are
multiplied by 0.

What remains is rounding. In `A`, the two sums are below `2**24`, and `A` is rounded twice, to `2**-23` of it. The sums
as `kvjax.quant` defines them have seven roundings at most, each of `2**-24`. Such a sum is less than `A` in magnitude:
a magnitude from 0.75 steps on adds more to `A` than its squared error, and all others in a block add less than one
squared step, of the 14 at least that the largest adds. So where both `A` differ by more than `2**-20` of their sum,
their difference has the same sign as that of the defined sums.

All other blocks, a few in ten thousand, compare the defined sums in a branch. So do blocks with NaN or of zeros, blocks
with numbers whose squares float32 might not hold, and those whose first scale is subnormal or whose second might be
clamped. In the remaining blocks, the second candidate has no magnitude above 4.5 steps and takes fewer instructions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

COLUMNS = 8
"""Pairs of elements of a block."""

MAGIC = 0x4AFFFFFC
"""The bits of `2**23 - 2` in float32. Sums with it are rounded to halves up to 2, and to integers from there."""

_DOUBLES = (0x03020100, 0x0C080604)
"""Twice the values of e2m1, a byte each."""

_LEAST_SCALE, _LARGEST_SCALE = 0x08, 0x78
"""The smallest normal number of e4m3; and 256: 1.5 times any number that rounds to 256 is below 448."""

_LEAST_MAGNITUDE, _LARGEST_MAGNITUDE = (int(np.float32(x).view(np.uint32)) for x in (2.0**-40, 2.0**60))


def inline(code: str, operands: Sequence[str]) -> str:
    """PTX with names for `$0`, `$1` and so on."""
    return re.sub(r"\$(\d+)", lambda found: operands[int(found[1])], code)


def encode(kind: str, widen: str, exact: str) -> str:
    """PTX of one block: writes `$0` and `$1`, words of codes, and `$2`, whose low byte is the block scale.

    Reads `$3` to `$10`, words of two elements; `$11`, the scale; and for 6 (`$12`, `$13`) and for 4 (`$14`, `$15`) the
    product with the scale and its inverse, each correctly rounded.

    Args:
      kind: "bf16" or "f16", the elements.
      widen: PTX that writes the elements of the word `$2` to `$0` and `$1`, in float32.
      exact: PTX that sets `codes0`, `codes1` and `scales` by the sums as they are defined.
    """
    words = [f"${3 + i}" for i in range(COLUMNS)]
    lines = [
        ".reg .pred usual, in_range, is_other;",
        ".reg .b16 both; .reg .b32 codes<2>, other_codes<2>, scales, amax_bits, exponent, first, last, above_least;",
        ".reg .f32 amax, step, other_step, inverse, other_inverse, factor, a, other_a;",
        ".reg .b32 dot, other_dot, square, other_square;",
        *_block_scales(kind, widen, words),
        "mul.f32 inverse, inverse, 0f3E000000;",
        # The power of two: exponents add up to that of 2**15.
        "mov.b32 amax_bits, amax;",
        "and.b32 exponent, amax_bits, 0x7F800000;",
        f"sub.u32 exponent, {(127 + 15 + 127) << 23}, exponent;",
        "mov.b32 factor, exponent;",
        f"sub.u32 above_least, amax_bits, {_LEAST_MAGNITUDE};",
        f"setp.le.u32 in_range, above_least, {_LARGEST_MAGNITUDE - _LEAST_MAGNITUDE};",
        "@!in_range bra DEFINED;",
        f"mov.b32 first, {_DOUBLES[0]}; mov.b32 last, {_DOUBLES[1]};",
        *(f"mov.b32 {name}, 0;" for name in ("dot", "other_dot", "square", "other_square")),
    ]
    lines += ["{", *_codes_and_sums(0, widen, words[:4]), "}"]
    # A branch between the halves: ptxas would interleave them, with registers for both.
    lines += [
        f"sub.u32 above_least, scales, {_LEAST_SCALE << 8};",
        f"setp.lt.u32 in_range, above_least, {_LARGEST_SCALE - _LEAST_SCALE + 1 << 8};",
        "@!in_range bra DEFINED;",
    ]
    lines += [
        *("{", *_codes_and_sums(1, widen, words[4:]), "}"),
        *_choice(),
        *(f"selp.b32 codes{half}, other_codes{half}, codes{half}, is_other;" for half in range(2)),
        *(line for half in range(2) for line in _signs(half, words[4 * half : 4 * half + 4])),
        "@usual bra END;",
        "DEFINED:",
        exact,
        "END:",
        "mov.b32 $0, codes0;",
        "mov.b32 $1, codes1;",
        "mov.b32 $2, scales;",
    ]
    return "\n".join(["{", *lines, "}"])


def _block_scales(kind: str, widen: str, words: Sequence[str]) -> list[str]:
    """Sets `amax` (NaN if an element is), `scales` (for 6 in the second byte, for 4 in the first), steps and inverses.

    The quotient of `amax` is rounded correctly (Markstein), unless its remainder leaves the range of float32; then the
    block takes the branch. The inverses are `arithmetic.rounded_reciprocal`.
    """
    lines = [
        "{ .reg .b32 largest, pair; .reg .b16 half<2>; .reg .f32 low, high, quotient, other_quotient, rest;",
        f"max.NaN.xorsign.abs.{kind}x2 largest, {words[0]}, {words[1]};",
        *(f"max.NaN.xorsign.abs.{kind}x2 largest, largest, {word};" for word in words[2:]),
        inline(widen, ["low", "high", "largest"]),
        "abs.f32 low, low;",
        "abs.f32 high, high;",
        "max.NaN.f32 amax, low, high;",
    ]
    for prefix, divisor, inverse in (("", "$12", "$13"), ("other_", "$14", "$15")):
        lines += [
            f"mul.rn.f32 {prefix}quotient, amax, {inverse};",
            f"neg.f32 rest, {prefix}quotient;",
            f"fma.rn.f32 rest, {divisor}, rest, amax;",
            f"fma.rn.f32 {prefix}quotient, rest, {inverse}, {prefix}quotient;",
        ]
    lines += [
        "cvt.rn.satfinite.e4m3x2.f32 both, quotient, other_quotient;",
        "cvt.u32.u16 scales, both;",
        "cvt.rn.f16x2.e4m3x2 pair, both;",
        "mov.b32 {half0, half1}, pair;",
    ]
    for prefix, half in (("", "half1"), ("other_", "half0")):
        lines += [
            f"cvt.f32.f16 {prefix}step, {half};",
            f"mul.rn.f32 {prefix}step, {prefix}step, $11;",
            f"rcp.approx.ftz.f32 low, {prefix}step;",
            "neg.f32 high, low;",
            f"fma.rn.f32 high, {prefix}step, high, 0f3F800000;",
            f"fma.rn.f32 {prefix}inverse, low, high, low;",
        ]
    return [*lines, "}"]


def _codes_and_sums(half: int, widen: str, words: Sequence[str]) -> list[str]:
    """Sets `codes` and `other_codes` of eight elements, without signs, and adds to the sums of both."""
    lines = [
        ".reg .f32 x<8>, scaled, sum, line;",
        ".reg .b32 index<8>, least, other<8>, value<8>, bytes, last_four, other_last_four;",
        *(inline(widen, [f"x{2 * i}", f"x{2 * i + 1}", word]) for i, word in enumerate(words)),
    ]
    for i in range(8):
        lines += [
            f"abs.f32 x{i}, x{i};",
            f"mul.rn.sat.f32 scaled, x{i}, inverse;",
            f"fma.rn.f32 sum, scaled, 0f41000000, 0f{MAGIC:08X};",
            f"mov.b32 index{i}, sum;",
            f"add.s32 index{i}, index{i}, {-MAGIC};",
            "fma.rn.f32 line, scaled, 0f00000004, 0f00000004;",
            "mov.b32 least, line;",
            f"min.s32 index{i}, index{i}, least;",
            f"mul.rn.f32 scaled, x{i}, other_inverse;",
            f"add.rn.f32 sum, scaled, 0f{MAGIC:08X};",
            f"mov.b32 other{i}, sum;",
            f"fma.rn.f32 sum, x{i}, factor, 0f4B000000;",  # 2**23: the low 16 bits are the integer
            f"mov.b32 value{i}, sum;",
        ]
    packed = "0"
    for i, name in ((3, "last_four"), (2, "last_four"), (1, f"codes{half}"), (0, f"codes{half}")):
        lines.append(f"cvt.pack.sat.s4.s32.b32 {name}, index{2 * i + 1}, index{2 * i}, {packed};")
        packed = name
    # Indices times powers of 16 add up, modulo 2**32, to codes and a constant.
    for count, shift in ((4, 4), (2, 8), (1, 16)):
        lines += [f"mad.lo.u32 other{i}, other{2 * i + 1}, {1 << shift}, other{2 * i};" for i in range(count)]
    lines.append(f"sub.u32 other_codes{half}, other0, {MAGIC * 0x11111111 % 2**32};")
    lines += [f"prmt.b32 value{i}, value{2 * i}, value{2 * i + 1}, 0x5410;" for i in range(4)]
    lines.append(f"shr.u32 other_last_four, other_codes{half}, 16;")
    for prefix in ("", "other_"):
        for quarter, selector in enumerate((f"{prefix}codes{half}", f"{prefix}last_four")):
            lines += [
                f"prmt.b32 bytes, first, last, {selector};",
                f"dp2a.lo.u32.u32 {prefix}dot, value{2 * quarter}, bytes, {prefix}dot;",
                f"dp2a.hi.u32.u32 {prefix}dot, value{2 * quarter + 1}, bytes, {prefix}dot;",
                f"dp4a.u32.u32 {prefix}square, bytes, bytes, {prefix}square;",
            ]
    return lines


def _choice() -> list[str]:
    """Sets `is_other`, `scales` to the chosen one, and `usual` unless the defined sums have to be compared."""
    lines = [
        "{ .reg .f32 quarter, squares, sum, bound;",
        # With twice the values, and a quarter of the step, this is a quarter of A.
        "sub.u32 exponent, exponent, 0x01000000;",
        "mov.b32 quarter, exponent;",
    ]
    for prefix in ("", "other_"):
        lines += [
            f"mul.f32 {prefix}step, {prefix}step, quarter;",
            f"cvt.rn.f32.u32 squares, {prefix}square;",
            f"cvt.rn.f32.u32 sum, {prefix}dot;",
            "neg.f32 sum, sum;",
            f"fma.rn.f32 sum, squares, {prefix}step, sum;",
            f"mul.rn.f32 {prefix}a, sum, {prefix}step;",
        ]
    return [
        *lines,
        "add.f32 bound, a, other_a;",
        "sub.f32 sum, other_a, a;",
        "setp.lt.f32 is_other, sum, 0f00000000;",
        "abs.f32 sum, sum;",
        "fma.rn.f32 bound, bound, 0f35800000, sum;",
        "setp.gt.f32 usual, bound, 0f00000000;",
        "shr.u32 above_least, scales, 8;",
        "selp.b32 scales, scales, above_least, is_other;",
        "}",
    ]


def _signs(half: int, words: Sequence[str]) -> list[str]:
    """Adds the signs of eight elements to `codes`."""
    return [
        "{ .reg .b32 first_four, last_four, even, odd;",
        f"prmt.b32 first_four, {words[0]}, {words[1]}, 0xFBD9;",  # bytes of sign bits: even, even, odd, odd
        f"prmt.b32 last_four, {words[2]}, {words[3]}, 0xFBD9;",
        "prmt.b32 even, first_four, last_four, 0x5410;",
        "prmt.b32 odd, first_four, last_four, 0x7632;",
        "and.b32 even, even, 0x08080808;",
        "and.b32 odd, odd, 0x80808080;",
        f"or.b32 codes{half}, codes{half}, even;",
        f"or.b32 codes{half}, codes{half}, odd; }}",
    ]
