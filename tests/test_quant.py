"""kvjax.quant against numpy and ml_dtypes: every input where they can be counted, else those next to a rounding."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import gpu_compile, reference
from support.hard_numbers import (
    SCALES,
    adversarial_blocks,
    all_values,
    around_midpoints,
    finite_values,
    nearly_tied_blocks,
)
from support.helpers import INPUT_DTYPES, assert_same_bytes, matrix, simple_spec
from support.interpret_mode import interpret_mode

from kvjax import KVCacheDType, UnsupportedError, quant
from kvjax.kernels import arithmetic, codecs, decoding
from kvjax.kernels.attention.formats import Format

FP8 = pytest.mark.parametrize("dtype", reference.FP8, ids=lambda dtype: dtype.value)
PER_TOKEN_HEAD = pytest.mark.parametrize("dtype", reference.PER_TOKEN_HEAD, ids=lambda dtype: dtype.value)
EACH_SCALE = pytest.mark.parametrize("scale", SCALES)


DIVISIONS = {
    "jit, constant": lambda x, scale: jax.jit(lambda x: quant.exact_divide(x, scale))(x),
    "jit, traced": lambda x, scale: jax.jit(quant.exact_divide)(x, jnp.float32(scale)),
    "jit, vector": lambda x, scale: jax.jit(quant.exact_divide)(x, jnp.full((7, 1), scale, jnp.float32)),
    "op by op, constant": lambda x, scale: quant.exact_divide(x, scale),
    "op by op, vector": lambda x, scale: quant.exact_divide(x, jnp.full((7, 1), scale, jnp.float32)),
}


@pytest.mark.parametrize("mode", DIVISIONS)
@pytest.mark.parametrize("scale", [0.0173, 6.0, 3.3333333, 1e-20])
def test_exact_divide_rounds_once(mode, scale):
    x = (np.random.default_rng(0).standard_normal((7, 10_000)) * 10).astype(np.float32)
    expected = x / np.float32(scale)
    assert (x * (1 / np.float32(scale)) != expected).sum() > 100  # what XLA would make of it is told apart here
    assert_same_bytes(np.asarray(DIVISIONS[mode](jnp.asarray(x), scale)), expected)


def test_exact_divide_handles_special_values():
    x = jnp.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 3e38], jnp.float32)
    divided = np.asarray(jax.jit(quant.exact_divide)(x, jnp.float32(0.5)))
    np.testing.assert_array_equal(divided, np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 2, np.inf]))
    assert np.signbit(divided[4])


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", INPUT_DTYPES)
def test_cast_rounds_every_16_bit_float(source, target):
    x = all_values(INPUT_DTYPES[source])
    dtype = np.dtype(INPUT_DTYPES[target])
    expected = reference.cast(x, dtype)
    for cast in (quant.cast, jax.jit(quant.cast, static_argnums=1)):
        assert_same_bytes(np.asarray(cast(jnp.asarray(x), dtype)), expected)


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_cast_rounds_float32_next_to_every_midpoint(target):
    dtype = np.dtype(INPUT_DTYPES[target])
    largest = finite_values(dtype)[-1]
    with np.errstate(over="ignore"):
        past = np.float32([1.0001, 1.01, 2, np.inf]) * largest
    patterns = np.arange(0, 2**32, 2**16 + 1).astype(np.uint32).view(np.float32)
    x = np.concatenate([around_midpoints(finite_values(dtype)), past, -past, patterns])
    assert (np.abs(x[x != 0]) < np.finfo(np.float32).tiny).any()  # subnormals are among them
    for cast in (quant.cast, jax.jit(quant.cast, static_argnums=1)):
        assert_same_bytes(np.asarray(cast(jnp.asarray(x), dtype)), reference.cast(x, dtype))


@matrix({"source": ["float16", "bfloat16"], "dtype": reference.FP8, "scale": SCALES}, pairs=True)
def test_encode_fp8_rounds_every_16_bit_float(source, dtype, scale):
    x = all_values(INPUT_DTYPES[source])
    expected = reference.encode_fp8(x, scale, dtype)
    encode = functools.partial(quant.encode_fp8, dtype=dtype)
    assert_same_bytes(np.asarray(encode(jnp.asarray(x), scale)), expected)
    assert_same_bytes(np.asarray(jax.jit(encode)(jnp.asarray(x), jnp.float32(scale))), expected)


@FP8
def test_encode_fp8_rounds_float32_next_to_every_midpoint(dtype):
    x = around_midpoints(finite_values(reference.ELEMENT[dtype]))
    largest = dtype.info.max
    x = np.concatenate([x, np.float32([1.03, 1.04, 1.0625, 1.07, 1e3, np.inf]) * np.float32(largest), -x])
    encoded = np.asarray(quant.encode_fp8(jnp.asarray(x), 1.0, dtype))
    assert_same_bytes(encoded, reference.encode_fp8(x, 1.0, dtype))
    assert_same_bytes(encoded, np.clip(x, -largest, largest).astype(reference.ELEMENT[dtype]))


@FP8
@pytest.mark.parametrize(
    ("x", "e4m3", "e5m2"),
    [
        ("nan", 0x7F, 0x7F),
        ("-nan", 0x7F, 0x7F),
        ("inf", 0x7E, 0x7B),
        ("-inf", 0xFE, 0xFB),
        ("0", 0x00, 0x00),
        ("-0", 0x80, 0x80),
        ("1", 0x38, 0x3C),
        ("-1e-30", 0x80, 0x80),
        ("1e30", 0x7E, 0x7B),
    ],
)
def test_encode_fp8_handles_special_values(dtype, x, e4m3, e5m2):
    encoded = quant.encode_fp8(jnp.asarray([float(x)], jnp.float32), 1.0, dtype)
    assert np.asarray(encoded).view(np.uint8)[0] == {KVCacheDType.FP8_E4M3: e4m3, KVCacheDType.FP8_E5M2: e5m2}[dtype]


@FP8
def test_fp8_scales_broadcast_over_heads(dtype):
    x = np.random.default_rng(0).standard_normal((5, 3, 64)).astype(np.float32)
    scales = np.float32([[0.0173], [1.0], [3.7]])
    expected = np.stack([reference.encode_fp8(x[:, head], scales[head, 0], dtype) for head in range(3)], axis=1)
    for encode in (quant.encode_fp8, jax.jit(quant.encode_fp8, static_argnums=2)):
        assert_same_bytes(np.asarray(encode(jnp.asarray(x), jnp.asarray(scales), dtype)), expected)


@FP8
@EACH_SCALE
def test_decode_fp8_decodes_every_byte(dtype, scale):
    stored = all_values(reference.ELEMENT[dtype])
    decoded = np.asarray(jax.jit(quant.decode_fp8)(jnp.asarray(stored), jnp.float32(scale)))
    np.testing.assert_array_equal(decoded, stored.astype(np.float32) * np.float32(scale))
    assert (np.signbit(decoded) == np.signbit(stored.astype(np.float32)))[~np.isnan(decoded)].all()


def adversarial_rows(most: float) -> np.ndarray:
    """`[rows, 64]` float32: codes on and beside every half at scales of 1 and of others; special values; magnitudes."""
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore", under="ignore"):
        halves = around_midpoints(np.arange(0, most + 1, dtype=np.float32))
        halves = np.resize(rng.permutation(halves), (-(-halves.size // 63), 63))
        largest = np.full((len(halves), 1), np.float32(most))
        at_one = np.concatenate([halves, largest], axis=1)  # a scale of 1, so that products are the numbers themselves
        scaled = [at_one * np.float32(factor) for factor in (0.37, 1e-6, 3.1e-6, 1e30, 2.0**-130)]
        magnitudes = np.exp2(rng.uniform(-140, 127, (500, 1))) * rng.standard_normal((500, 64))
        values = np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 1e-42, -1e-42, 1, -2, 3e38])
        special = [rng.choice(values, (200, 64)), rng.choice(values[3:], (200, 64)), np.repeat(values[:, None], 64, 1)]
        return np.concatenate([at_one, *scaled, magnitudes, *special]).astype(np.float32)


@matrix({"source": INPUT_DTYPES, "dtype": reference.PER_TOKEN_HEAD})
def test_encode_per_token_head_matches_the_reference(source, dtype):
    with np.errstate(over="ignore", under="ignore"):
        x = adversarial_rows(dtype.info.max).astype(INPUT_DTYPES[source])
    codes, scales = reference.encode_per_token_head(x, dtype)
    for encode in (quant.encode_per_token_head, jax.jit(quant.encode_per_token_head, static_argnums=1)):
        got_codes, got_scales = encode(jnp.asarray(x), dtype)
        assert_same_bytes(np.asarray(got_scales), scales)
        assert_same_bytes(np.asarray(got_codes), codes)


INT8, FP8_ROWS = KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.FP8_PER_TOKEN_HEAD


@pytest.mark.parametrize(
    ("dtype", "row", "codes", "scale"),
    [
        (INT8, [127, 0.5, -0.5, 1.5, 2.5, -2.5, 2.4999998], [127, 1, -1, 2, 3, -3, 2], 1),  # halves away from zero
        (INT8, [127, 0.49999997, -0.49999997, 0.4999999], [127, 1, -1, 0], 1),  # the sum with 0.5 is rounded
        (INT8, [-127, 126.5, -126.5, 126.49999], [-127, 127, -127, 126], 1),
        (INT8, [0.0, -0.0], [0, 0], 1e-6),
        (INT8, [1e-6, -4e-6, 5e-5], [1, -4, 50], 1e-6),  # below the least scale
        (INT8, [1e-45, -1e-40], [0, 0], 1e-6),
        (INT8, [np.nan, 254, -1], [0, 127, -1], 2),
        (INT8, [np.nan, -np.nan], [0, 0], 1e-6),
        (INT8, [np.inf, 1, -3e38], [0, 0, 0], np.inf),
        (FP8_ROWS, [448, 17, 19, -0.0, 2.0**-10, 1.5 * 2.0**-10], [0x7E, 0x58, 0x5A, 0x80, 0, 1], 1),  # ties to even
        (FP8_ROWS, [0.0, -0.0], [0, 0x80], 1e-6),
        (FP8_ROWS, [np.nan, 896, -2], [0x7F, 0x7E, 0xB8], 2),
        (FP8_ROWS, [-np.nan, np.nan], [0x7F, 0x7F], 1e-6),
        (FP8_ROWS, [np.inf, 1, -3e38, -np.inf], [0x7F, 0, 0x80, 0x7F], np.inf),
    ],
)
def test_encode_per_token_head_handles_special_rows(dtype, row, codes, scale):
    for encode in (reference.encode_per_token_head, quant.encode_per_token_head):
        got_codes, got_scale = map(np.asarray, encode(jnp.asarray([row], jnp.float32), dtype))
        np.testing.assert_array_equal(got_codes[0].view(np.int8), np.array(codes).astype(np.uint8).view(np.int8))
        assert_same_bytes(got_scale, np.float32([[scale]]))
    decoded = np.asarray(quant.decode_per_token_head(*quant.encode_per_token_head(jnp.float32([row]), dtype)))
    if np.isinf(scale):
        assert np.isnan(decoded).all()  # nothing finite is left to tell


@PER_TOKEN_HEAD
@pytest.mark.parametrize("scale", [1.0, 1e-6, 0.0173, 3e30, 0.0, np.inf, np.nan])
def test_decode_per_token_head_decodes_every_code(dtype, scale):
    codes = all_values(reference.ELEMENT[dtype])[None]
    with np.errstate(invalid="ignore"):
        expected = reference.one_nan(codes.astype(np.float32) * np.float32(scale))
    for decode in (quant.decode_per_token_head, jax.jit(quant.decode_per_token_head)):
        assert_same_bytes(np.asarray(decode(jnp.asarray(codes), jnp.full((1, 1), scale, jnp.float32))), expected)


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
def test_e2m1_codes_are_those_of_the_reference(source):
    x = around_midpoints(finite_values(reference.E2M1)) if source == "float32" else all_values(INPUT_DTYPES[source])
    with np.errstate(invalid="ignore"):
        x = x.astype(np.float32)
        saturated = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = np.asarray(jax.jit(quant.e2m1_codes)(jnp.asarray(x)))
    assert_same_bytes(codes[~np.isnan(x)], saturated[~np.isnan(x)])
    assert not codes[np.isnan(x)].any()


jit_encode = jax.jit(quant.encode_nvfp4, static_argnames="dtype")

NVFP4_ENCODINGS = {
    KVCacheDType.NVFP4: reference.encode_nvfp4,
    KVCacheDType.NVFP4_4OVER6: reference.encode_nvfp4_4over6,
}


@matrix({"dtype": NVFP4_ENCODINGS, "source": INPUT_DTYPES, "scale": SCALES})
def test_nvfp4_has_the_bytes_of_the_reference(dtype, source, scale):
    with np.errstate(over="ignore", under="ignore"):
        x = adversarial_blocks(scale).astype(INPUT_DTYPES[source])
    x = np.stack([x, x[::-1]], axis=1).reshape(-1, 1, 32)
    expected = NVFP4_ENCODINGS[dtype](x, scale)
    encode_blocks = functools.partial(quant.encode_nvfp4, dtype=dtype)
    constant = jax.jit(lambda x: encode_blocks(x, scale))
    traced = functools.partial(jax.jit(encode_blocks), scale=jnp.float32(scale))
    op_by_op = functools.partial(encode_blocks, scale=scale)
    for encode in (constant, traced, op_by_op):
        data, block_scales = encode(jnp.asarray(x))
        assert_same_bytes(np.asarray(block_scales).view(np.uint8), expected[1])
        assert_same_bytes(np.asarray(data), expected[0])


@matrix({"amax": [1.5, 6, 12, 384]}, few={"amax": [6]})
def test_four_over_six_keeps_the_smaller_error_and_six_in_a_tie(amax):
    """Each block of `amax`, which both scales hold, and any two multiples of its 48th: in fractions, not in floats."""
    multiples = np.stack(np.meshgrid(*[np.arange(49)] * 2), axis=-1).reshape(-1, 2)
    x = np.zeros((len(multiples), 16), np.float32)
    x[:, :3] = np.concatenate([np.full((len(x), 1), amax), multiples * (amax / 48)], axis=1)
    signs = np.random.default_rng(0).choice(np.float32([-1, 1]), x.shape)
    order = np.random.default_rng(1).permuted(np.tile(np.arange(16), (len(x), 1)), axis=1)
    _, block_scales = jit_encode(np.take_along_axis(x * signs, order, 1), 1.0, KVCacheDType.NVFP4_4OVER6)
    errors = [
        [
            min(abs(Fraction(int(n), 8) - Fraction(value) * 6 / largest) ** 2 for value in quant.E2M1_VALUES)
            for n in range(49)
        ]
        for largest in (6, 4)
    ]  # of multiples, in the scale of 6
    six, four = (np.array([one[first] + one[second] for first, second in multiples]) for one in errors)
    expected = np.where(six <= four, amax / 6, amax / 4)
    np.testing.assert_array_equal(np.asarray(block_scales)[:, 0].astype(np.float32), expected)
    assert ((six == four) & (six > 0)).any()
    assert (six < four).any()
    assert (four < six).any()


@matrix({"scale": [1.0, 0.0173]}, few={"scale": [0.0173]})
def test_four_over_six_compares_sums_to_the_last_bit(scale):
    x = nearly_tied_blocks(scale)
    assert len(x) >= 200
    stored = jit_encode(x, scale, KVCacheDType.NVFP4_4OVER6)
    for got, expected in zip(stored, reference.encode_nvfp4_4over6(x, scale), strict=True):
        assert_same_bytes(np.asarray(got).view(np.uint8), expected)


def test_four_over_six_has_the_bytes_of_nvfp4_where_it_keeps_six():
    x = np.random.default_rng(0).standard_normal((500, 16)).astype(np.float32)
    data, block_scales = jit_encode(x, 0.001, KVCacheDType.NVFP4_4OVER6)
    nvfp4 = jit_encode(x, 0.001)
    same = (block_scales == nvfp4[1])[:, 0]
    assert 0.2 < same.mean() < 0.8
    assert_same_bytes(np.asarray(data)[same], np.asarray(nvfp4[0])[same])
    errors = [((quant.decode_nvfp4(*stored, 0.001) - x) ** 2).sum() for stored in ((data, block_scales), nvfp4)]
    assert errors[0] < 0.95 * errors[1]


def test_a_sum_of_squares_is_rounded_once():
    """Also where the float64 sum lies in the middle between two float32, and what was cut off decides."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(100_000) * np.exp2(rng.integers(-70, 64, 100_000))).astype(np.float32)
    y = (rng.standard_normal(100_000) * np.exp2(rng.integers(-70, 64, 100_000))).astype(np.float32)
    first, low = np.float32(1 + 2.0**-12), np.float32(2.0**-40)
    x = np.concatenate([x, [first, first, 0, 1, 1e30, 1e-30]]).astype(np.float32)
    y = np.concatenate([y, [low, 2.0**-13, 1e30, np.nan, 1, 1e-30]]).astype(np.float32)
    with np.errstate(all="ignore"):
        squares = x.astype(np.float64) ** 2
        rounded = np.where(squares < 2.0**-126, 0, squares).astype(np.float32)
        expected = reference.fused(rounded, y.astype(np.float64) ** 2)
    assert_same_bytes(np.asarray(jax.jit(quant.sum_of_squares)(x, y))[:-3], expected[:-3])
    np.testing.assert_array_equal(np.asarray(quant.sum_of_squares(x, y)), expected)


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("target", gpu_compile.TARGETS)
def test_gpus_invert_block_scales_as_they_are_stored(target):
    """The program converts what it has rounded back: XLA, free to compute more precisely, has not dropped both."""
    x, scale = jax.ShapeDtypeStruct((8, 2, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    hlo = gpu_compile.compile_for(target, quant.encode_nvfp4, x, scale).hlo
    rounded = re.findall(r"(%\S+) = f8e4m3fn\[", hlo)
    assert any(re.search(rf"= f32\S+ convert\({re.escape(name)}\)", hlo) for name in rounded)


@EACH_SCALE
def test_decode_nvfp4_decodes_every_code_with_every_block_scale(scale):
    block_scales = all_values(reference.E4M3)
    data = np.tile(np.arange(0, 256, dtype=np.uint8).reshape(32, 8), (8, 1))
    codes = np.stack([data % 16, data // 16], axis=-1).reshape(256, 16)
    expected = reference.E2M1_VALUES[codes] * block_scales.astype(np.float32)[:, None] * np.float32(scale)
    decoded = np.asarray(jax.jit(quant.decode_nvfp4)(data, block_scales[:, None], jnp.float32(scale)))
    np.testing.assert_array_equal(decoded, expected)
    assert (np.signbit(decoded) == np.signbit(expected))[~np.isnan(expected)].all()


def test_a_dtype_that_nothing_encodes_is_refused():
    """One that is in the table but not here, or a whole layer's in place of its keys' or values'."""
    one, dtype = jnp.ones((1, 16)), KVCacheDType.AUTO
    with pytest.raises(UnsupportedError, match=r"dtype: got 'auto', which kvjax\.quant does not encode"):
        quant.encode(one, dtype, jnp.float32(1))
    with pytest.raises(UnsupportedError, match=r"dtype: got 'auto', which kvjax\.quant does not decode"):
        quant.decode([one], dtype, jnp.float32(1))


def test_a_dtype_without_a_codec_is_refused(monkeypatch):
    """One that XLA stores and `CODECS` does not have yet."""
    spec = simple_spec(KVCacheDType.FP8_E5M2)
    monkeypatch.delitem(codecs.CODECS, KVCacheDType.FP8_E5M2)
    with pytest.raises(UnsupportedError, match="dtype: got 'fp8_e5m2', which no kernel encodes or decodes"):
        codecs.codecs_of(spec)


@pytest.mark.parametrize("dtype", [KVCacheDType.FP8_E4M3, KVCacheDType.FP8_DS_MLA, KVCacheDType.NVFP4])
def test_kernels_have_no_codes_of_rows_for_another_dtype(dtype):
    """A codec of rows with a scale each that has one of these is refused, not written or read as fp8."""
    expected = f"dtype: got '{dtype.value}', expected fp8_per_token_head or int8_per_token_head"
    with interpret_mode(), pytest.raises(UnsupportedError, match=expected):
        arithmetic.encode_per_token_head(jnp.ones((2, 16)), dtype, lambda x: x[:, None])
    codes, scales = jnp.zeros((2, 16), jnp.uint8), jnp.zeros(2, jnp.int32)
    with pytest.raises(UnsupportedError, match=expected):
        decoding.decode_per_token_head(codes, scales, dtype, np.dtype(np.float16), lambda x: x[:, None])


@pytest.mark.parametrize("dtype", [KVCacheDType.AUTO, KVCacheDType.FP8_DS_MLA])
def test_a_dtype_that_attention_does_not_decode_is_refused(dtype):
    """It has no format; and of one in `DECODED` without a case, neither keys nor values are decoded in another way."""
    word, expected = jnp.zeros(128, jnp.uint32), f"dtype: got '{dtype.value}', which attention does not decode"
    with pytest.raises(UnsupportedError, match=expected):
        Format.of(dtype)
    without_case = Format(dtype, np.dtype(np.float16), 8)
    with pytest.raises(UnsupportedError, match=expected):
        without_case.key_pairs([word], 4, [])
    with pytest.raises(UnsupportedError, match=expected):
        without_case.value_pairs(word)
