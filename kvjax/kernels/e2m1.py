"""Encoding to e2m1, the 4-bit elements of NVFP4, as register arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import quant
from kvjax.kernels import four_over_six, ptx
from kvjax.quant import E2M1_VALUES


def encode_pairs(low: jax.Array, high: jax.Array, inverse: jax.Array) -> jax.Array:
    """Bytes of two codes each, of `low * inverse` and `high * inverse`: NaN becomes 0, -0 keeps its sign.

    `inverse` is not negative. Uses the conversion instruction from sm_100 on, float32 and integer arithmetic before.
    """
    return ptx.elementwise(_ptx_to_convert, _encode_pairs, low, high, inverse, since=(10, 0))


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


def _encode_pairs(low: jax.Array, high: jax.Array, inverse: jax.Array) -> jax.Array:
    indices = [nearest_indices(half, inverse * 0.125) for half in (low, high)]
    return ptx.elementwise(_ptx_to_join, _join, *indices, low, high)


def _ptx_to_join(columns: int) -> str:
    """Joins the indices of four pairs, saturated at 7, in four instructions, and the signs of eight elements in seven.

    A conversion to e4m3 packs the signs of two elements, and drops that of NaN.
    """
    low_index, high_index, low, high = _operands(columns, 4)
    lines = [".reg .b32 codes;", *ptx_to_pack("codes", low_index, high_index), *ptx_to_add_signs(low, high)]
    return "\n".join(["{", *lines, "}"])


def _operands(columns: int, count: int) -> list[list[str]]:
    """The names of `count` operands' columns."""
    return [[f"${1 + i * columns + j}" for j in range(columns)] for i in range(count)]


def ptx_to_pack(codes: str, low_index: Sequence[str], high_index: Sequence[str]) -> list[str]:
    """Packs indices, saturated at 7."""
    lines = [f"mov.b32 {codes}, 0;"]
    for low, high in reversed(list(zip(low_index, high_index, strict=True))):  # each shifts those before it
        lines.append(f"cvt.pack.sat.s4.s32.b32 {codes}, {high}, {low}, {codes};")
    return lines


def ptx_to_add_signs(low: Sequence[str], high: Sequence[str]) -> list[str]:
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


def ptx_to_join_either(columns: int) -> str:
    """`_ptx_to_join` of one of two pairs of indices: the second where the last operand is not 0."""
    low_index, high_index, low, high, other_low, other_high, is_other = _operands(columns, 7)
    lines = [
        ".reg .b32 codes, other; .reg .pred is_other;",
        *ptx_to_pack("codes", low_index, high_index),
        *ptx_to_pack("other", other_low, other_high),
        f"setp.ne.s32 is_other, {is_other[0]}, 0;",  # of a whole block
        "selp.b32 codes, other, codes, is_other;",
        *ptx_to_add_signs(low, high),
    ]
    return "\n".join(["{", *lines, "}"])


def join_either(
    low_index: jax.Array,
    high_index: jax.Array,
    low: jax.Array,
    high: jax.Array,
    other_low: jax.Array,
    other_high: jax.Array,
    is_other: jax.Array,
) -> jax.Array:
    """The model of `ptx_to_join_either`."""
    chosen = [jnp.where(is_other != 0, *each) for each in ((other_low, low_index), (other_high, high_index))]
    return _join(chosen[0], chosen[1], low, high)


_FLOAT16_BYTES = np.array(E2M1_VALUES, np.float16).view(np.uint16) >> 8
"""The upper bytes of e2m1 magnitudes as float16; the lower bytes are 0."""


def ptx_of_squared_errors(columns: int) -> str:
    """The sum of squared errors of `columns` pairs of elements, in the order of `kvjax.quant`.

    Four indices, a nibble each and saturated at 7, look up the upper bytes of four float16 at a time.
    """
    low_index, high_index, low, high, step = _operands(columns, 5)
    first, last = (int.from_bytes(bytes(_FLOAT16_BYTES[i : i + 4].tolist()), "little") for i in (0, 4))
    lines = [
        ".reg .b32 codes, first, last, bytes, both; .reg .b16 half<2>; .reg .f32 step, value, error<2>, sum<4>;",
        f"mov.b32 first, {first}; mov.b32 last, {last}; neg.f32 step, {step[0]};",  # the step of a whole block
        *ptx_to_pack("codes", low_index, high_index),
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


def squared_errors(
    low_index: jax.Array, high_index: jax.Array, low: jax.Array, high: jax.Array, step: jax.Array
) -> jax.Array:
    """The model of `ptx_of_squared_errors`, for a pair of elements."""
    errors = []
    for index, x in ((low_index, low), (high_index, high)):
        index = jnp.minimum(index, 7)
        quarters = jnp.where(index < 2, 2 * index, (2 | index & 1) << (index >> 1))
        with jax.enable_x64(True):
            value = quarters.astype(jnp.float64) * 0.25
            errors.append((x.astype(jnp.float64) - value * step.astype(jnp.float64)).astype(jnp.float32))
    return quant.sum_of_squares(*errors)


PTX_OF_INDEX = f"""{{ .reg .f32 magnitude, sum, line; .reg .b32 index, last;
abs.f32 magnitude, $1;
mul.rn.sat.f32 magnitude, magnitude, $2;
fma.rn.f32 sum, magnitude, 0f41000000, 0f{four_over_six.MAGIC:08X};
mov.b32 index, sum;
add.s32 index, index, {-four_over_six.MAGIC};
fma.rn.f32 line, magnitude, 0f00000004, 0f00000004;
mov.b32 last, line;
min.s32 $0, index, last; }}"""


def nearest_indices(x: jax.Array, inverse: jax.Array) -> jax.Array:
    """The index (int32) of the e2m1 magnitude nearest to that of `8 * x * inverse`, ties to even; 0 for NaN.

    Let `g` be the piecewise linear function through (value, index) of 0, .5, 1, 1.5, 2, 3, 4, 6. Its slopes are 2 up to
    2, 1 up to 4 and 1/2 from there. They decrease, so `g(a) = min(2 * a, a + 2, a / 2 + 4)`. It maps the midpoint of
    neighbouring values to the midpoint of their indices. Rounding to the nearest value, ties to the even index, is
    therefore rounding `g` to nearest even. Rounding is monotonic: the minimum of the rounded lines is the rounded
    minimum. Past 6 the index is 7 or 8: callers saturate it.

    Adding `2**23 - 2` rounds the first two lines at once: float32 are 1/2 apart up to `2**23`, where `a` is 2, and 1
    apart from there. Their bits are consecutive, so the bits minus those of `2**23 - 2` are the index. For the last
    line, subnormal float32 are integers times `2**-149`, with these integers as their bits: a fused multiply-add of
    constants that small rounds to an integer.

    Both round once, to nearest even. The product with `inverse` is rounded before, as in `kvjax.quant`. It saturates at
    1, which is a magnitude of 8, and NaN becomes 0. The factor of 8 changes no rounding.

    Examples: 0.75 is 1.5 on the line, index 2 (1.0). 2.5 is min(5, 4.5, 5.25) = 4.5, index 4 (2.0). 5 is 6.5, index 6
    (4.0), and 5.01 rounds to 7 (6.0).

    On sm_90 the pipe that compares, shifts and masks is half as wide as the one that multiplies and adds. This function
    issues one instruction to the narrow pipe, which adds integers and takes the minimum, and three to the other.
    """
    return ptx.elementwise(PTX_OF_INDEX, _least_line, x, inverse)


def _least_line(x: jax.Array, inverse: jax.Array) -> jax.Array:
    with jax.enable_x64(True):  # in float64 the lines are exact
        magnitude = jnp.fmin(jnp.abs(x) * inverse, 1.0).astype(jnp.float64)
        magnitude = jnp.where(jnp.isnan(x), 0.0, magnitude)
        lines = [jnp.rint(slope * magnitude + start).astype(jnp.int32) for slope, start in ((16, 0), (8, 2), (4, 4))]
        return jnp.minimum(jnp.minimum(lines[0], lines[1]), lines[2])
