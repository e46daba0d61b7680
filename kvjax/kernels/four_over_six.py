"""Blocks of `NVFP4_4OVER6` in one thread each: which of two block scales has the smaller error, and the codes, as PTX.

Both candidates' codes are made, exactly. To compare the sums of squared errors `|x| - q * step`, where `q` are the
codes' values, it is enough to compare

    A = step * (step * sum(q * q) - 2 * sum(|x| * q)),

because `sum(x * x)` is in both. The sums in `A` are dot products of small integers, for which GPUs have instructions
that take 2 or 4 elements: `2 * q` is one of 0 to 12, and `|x|` is scaled by a power of two to 16 bits. These hold it
exactly: the largest magnitude of a block becomes one from `2**15` to `2**16`, so the least that has a code, a quarter
of a step and thus at least 1/26 of the largest, is above `2**10`, where 11 bits are an integer. Smaller ones are
multiplied by 0.

What remains is rounding. Of `A`: the two sums are below `2**24`, and `A` is rounded twice, to `2**-23` of it. Of the
sums as `kvjax.quant` defines them: seven roundings at most, each of `2**-24`. A sum is less than `A`, in magnitude: a
magnitude from 0.75 steps on adds more to `A` than its squared error, and all others in a block add less than one
squared step, of the 25 that the largest adds. So where both `A` differ by more than `2**-20` of their sum, their
difference has the sign that the difference of the defined sums has. All other blocks, some of ten thousand, take the
defined sums, in a branch; so do blocks with NaN, with a block scale that is subnormal or might be clamped, which may
make the second candidate's codes exceed 4, and with numbers whose squares float32 might not hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

COLUMNS = 8
"""Pairs of elements of a block."""

MAGIC = 0x4AFFFFFC
"""The bits of `2**23 - 2` in float32; `arithmetic._e2m1_indices` says what its sums are."""

_DOUBLES = (0x03020100, 0x0C080604)
"""Twice the values of e2m1, a byte each."""

_LEAST_SCALE, _LARGEST_SCALE = 0x08, 0x78
"""The first normal number of e4m3; and 256: 1.5 times what is rounded to that is below 448."""

_LEAST_MAGNITUDE, _LARGEST_MAGNITUDE = (int(np.float32(x).view(np.uint32)) for x in (2.0**-40, 2.0**60))


def inline(code: str, operands: Sequence[str]) -> str:
    """PTX with names for `$0`, `$1` and so on."""
    return re.sub(r"\$(\d+)", lambda found: operands[int(found[1])], code)


def encode(kind: str, widen: str, exact: str) -> str:
    """PTX of one block: writes `$0` and `$1`, words of codes, and `$2`, the bits of the block scale.

    Reads `$3` to `$10`, words of two elements; `$11`, the largest magnitude, without NaN; and of either candidate
    (`$12` to `$14`, `$15` to `$17`) the bits of the block scale, its decoded value, and the inverse of that or 0.

    Args:
      kind: "bf16" or "f16", the elements.
      widen: PTX that writes the elements of the word `$2` to `$0` and `$1`, in float32.
      exact: PTX that sets `is_other`, `codes0` and `codes1` by the sums as they are defined.
    """
    words = [f"${3 + i}" for i in range(COLUMNS)]
    amax, six, step, inverse, four, other_step, other_inverse = (f"${i}" for i in range(11, 18))
    lines = [
        ".reg .pred usual, is_other, low_nan, high_nan;",
        ".reg .f32 x<8>, scaled, sum, line, eighth, factor, quarter, a, other_a, bound;",
        ".reg .b32 index<8>, last, other<8>, codes<2>, other_codes<2>, value<8>, bytes, exponent;",
        ".reg .b32 dot, other_dot, square, other_square, signs<4>, scale_bits, amax_bits, nan;",
        "mov.b32 dot, 0; mov.b32 other_dot, 0; mov.b32 square, 0; mov.b32 other_square, 0;",
        f"mul.f32 eighth, {inverse}, 0f3E000000;",
        f"mov.b32 amax_bits, {amax};",
        "and.b32 exponent, amax_bits, 0x7F800000;",
        f"sub.u32 exponent, {(127 + 15 + 127) << 23}, exponent;",
        "mov.b32 factor, exponent;",
    ]
    for half in range(2):
        own = words[4 * half : 4 * half + 4]
        for i, word in enumerate(own):
            lines += [inline(widen, [f"x{2 * i}", f"x{2 * i + 1}", word]), f"abs.f32 x{2 * i}, x{2 * i};", f"abs.f32 x{2 * i + 1}, x{2 * i + 1};"]
        for i in range(8):
            lines += [
                f"mul.rn.sat.f32 scaled, x{i}, eighth;",
                f"fma.rn.f32 sum, scaled, 0f41000000, 0f{MAGIC:08X};",
                f"mov.b32 index{i}, sum;",
                f"add.s32 index{i}, index{i}, {-MAGIC};",
                "fma.rn.f32 line, scaled, 0f00000004, 0f00000004;",
                "mov.b32 last, line;",
                f"min.s32 index{i}, index{i}, last;",
                f"mul.rn.f32 scaled, x{i}, {other_inverse};",
                f"add.rn.f32 sum, scaled, 0f{MAGIC:08X};",
                f"mov.b32 other{i}, sum;",
                f"fma.rn.f32 sum, x{i}, factor, 0f4B000000;",  # 2**23: the low 16 bits are the integer
                f"mov.b32 value{i}, sum;",
            ]
        lines.append(f"mov.b32 codes{half}, 0;")
        for i in reversed(range(4)):
            lines.append(f"cvt.pack.sat.s4.s32.b32 codes{half}, index{2 * i + 1}, index{2 * i}, codes{half};")
        # Indices times powers of 16 add up, modulo 2**32, to codes and a constant.
        shift = 4
        count = 8
        while count > 1:
            count //= 2
            for i in range(count):
                lines.append(f"mad.lo.u32 other{i}, other{2 * i + 1}, {1 << shift}, other{2 * i};")
            shift *= 2
        lines.append(f"sub.u32 other_codes{half}, other0, {MAGIC * 0x11111111 % 2**32};")
        for i in range(4):
            lines.append(f"prmt.b32 value{i}, value{2 * i}, value{2 * i + 1}, 0x5410;")
        for prefix in ("", "other_"):
            for quarter in range(2):
                code = f"{prefix}codes{half}"
                if quarter:
                    lines.append(f"shr.u32 bytes, {code}, 16;")
                    code = "bytes"
                lines += [
                    f"prmt.b32 bytes, {_DOUBLES[0]}, {_DOUBLES[1]}, {code};",
                    f"dp2a.lo.u32.u32 {prefix}dot, value{2 * quarter}, bytes, {prefix}dot;",
                    f"dp2a.hi.u32.u32 {prefix}dot, value{2 * quarter + 1}, bytes, {prefix}dot;",
                    f"dp4a.u32.u32 {prefix}square, bytes, bytes, {prefix}square;",
                ]
    lines += [
        "sub.u32 exponent, exponent, 0x01000000;",
        "mov.b32 quarter, exponent;",
    ]
    for prefix, each in (("", step), ("other_", other_step)):
        lines += [
            f"mul.f32 scaled, {each}, quarter;",
            f"cvt.rn.f32.u32 sum, {prefix}square;",
            f"cvt.rn.f32.u32 line, {prefix}dot;",
            "neg.f32 line, line;",
            "fma.rn.f32 line, sum, scaled, line;",
            f"mul.rn.f32 {prefix}a, line, scaled;",
        ]
    lines += [
        "add.f32 bound, a, other_a;",
        "sub.f32 sum, other_a, a;",
        "setp.lt.f32 is_other, sum, 0f00000000;",
        "abs.f32 sum, sum;",
        "fma.rn.f32 bound, bound, 0f35800000, sum;",
        f"sub.u32 amax_bits, amax_bits, {_LEAST_MAGNITUDE};",
        f"sub.u32 scale_bits, {six}, {_LEAST_SCALE};",
        *[f"max.NaN.xorsign.abs.{kind}x2 nan, {words[0] if i == 1 else 'nan'}, {words[i]};" for i in range(1, 8)],
        f"setp.nan.{kind}x2 low_nan|high_nan, nan, nan;",
        "or.pred low_nan, low_nan, high_nan;",
        "not.pred low_nan, low_nan;",
        f"setp.le.and.u32 usual, amax_bits, {_LARGEST_MAGNITUDE - _LEAST_MAGNITUDE}, low_nan;",
        f"setp.le.and.u32 usual, scale_bits, {_LARGEST_SCALE - _LEAST_SCALE}, usual;",
        "setp.gt.and.f32 usual, bound, 0f00000000, usual;",
    ]
    for half in range(2):
        own = words[4 * half : 4 * half + 4]
        lines += [
            f"selp.b32 codes{half}, other_codes{half}, codes{half}, is_other;",
            f"prmt.b32 signs0, {own[0]}, {own[1]}, 0xFBD9;",
            f"prmt.b32 signs1, {own[2]}, {own[3]}, 0xFBD9;",
            "prmt.b32 signs2, signs0, signs1, 0x5410;",
            "prmt.b32 signs3, signs0, signs1, 0x7632;",
            "and.b32 signs2, signs2, 0x08080808;",
            "and.b32 signs3, signs3, 0x80808080;",
            f"or.b32 codes{half}, codes{half}, signs2;",
            f"or.b32 codes{half}, codes{half}, signs3;",
        ]
    lines += ["@usual bra END;", exact, "END:"]
    lines += ["mov.b32 $0, codes0;", "mov.b32 $1, codes1;", f"selp.b32 $2, {four}, {six}, is_other;"]
    return "\n".join(["{", *lines, "}"])
