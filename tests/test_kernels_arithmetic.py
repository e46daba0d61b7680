"""The kernels' arithmetic against `kvjax.quant`: every 16-bit input, and float32 on and next to every rounding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import ptx, reference
from support.hard_numbers import (
    SCALES,
    adversarial_blocks,
    all_values,
    around_midpoints,
    finite_values,
    nearly_tied_blocks,
)
from support.helpers import INPUT_DTYPES, assert_same_bytes, matrix
from support.interpret_mode import interpret_mode

from kvjax import KVCacheDType, quant
from kvjax.kernels import arithmetic, e2m1, nvfp4


@pytest.mark.parametrize("source", INPUT_DTYPES)
def test_two_e2m1_codes_are_packed_into_a_byte(source):
    x = around_midpoints(finite_values(reference.E2M1)) if source == "float32" else all_values(INPUT_DTYPES[source])
    x = jnp.asarray(x, jnp.float32)
    codes = quant.e2m1_codes(x)
    with interpret_mode():
        pairs = e2m1.encode_pairs(x, x[::-1], jnp.ones_like(x))
    assert_same_bytes(np.asarray(pairs), np.asarray(codes | codes[::-1] << 4))


KERNELS = {KVCacheDType.NVFP4: nvfp4.encode_nvfp4, KVCacheDType.NVFP4_4OVER6: nvfp4.encode_nvfp4_4over6}


@matrix({"dtype": KERNELS, "source": INPUT_DTYPES, "scale": SCALES})
def test_encoded_blocks_are_those_of_xla(dtype, source, scale):
    with np.errstate(over="ignore", under="ignore"):
        x = jnp.asarray(adversarial_blocks(scale).astype(INPUT_DTYPES[source]))
    data, block_scales = quant.encode_nvfp4(x, scale, dtype)
    pairs = (x[:, ::2], x[:, 1::2]) if source == "float32" else (np.asarray(x).view(np.uint32),)
    with interpret_mode():
        got = KERNELS[dtype](pairs, x.dtype, jnp.float32(scale), lambda column: jnp.tile(column[:, None], 8))
    assert_same_bytes(np.asarray(got[0]), np.asarray(data))
    assert_same_bytes(np.asarray(got[1]), np.asarray(block_scales)[:, 0].view(np.uint8))


def blocks_in_ptx(x: np.ndarray, scale: float, code: str) -> tuple[np.ndarray, np.ndarray]:
    """What PTX of `encode_nvfp4_4over6` makes of `[blocks, 16]`: `[blocks, 8]` bytes of codes, and block scales."""
    divisors = np.float32([6, 4]) * np.float32(scale)
    scalars = np.float32([scale, divisors[0], 1 / divisors[0], divisors[1], 1 / divisors[1]])
    words = np.ascontiguousarray(np.ascontiguousarray(x).view(np.uint32).T)
    *codes, scales = ptx.run(code, 3, [*words, *(np.full(len(x), each) for each in scalars)])
    return np.stack(codes, axis=1).view(np.uint8), (scales & 0xFF).astype(np.uint8)


def unusual_blocks(x: np.ndarray, scale: float) -> np.ndarray:
    """Which blocks compare the sums as they are defined."""
    code = nvfp4.ptx_of_block(x.dtype)
    assert code.count("DEFINED:") == 1
    scales = "DEFINED: mov.b32 codes0, 0; mov.b32 codes1, 0; mov.b32 scales, 255; bra END;"
    return blocks_in_ptx(x, scale, code.replace("DEFINED:", scales))[1] == 255


@matrix({"source": ["float16", "bfloat16"], "scale": SCALES}, few={"source": ["bfloat16"], "scale": [0.0173]})
def test_four_over_six_in_ptx_has_the_bytes_of_the_reference(source, scale):
    """Run on the CPU, on which no kernel contains it."""
    rng, dtype = np.random.default_rng(0), INPUT_DTYPES[source]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        parts = [
            adversarial_blocks(scale),
            nearly_tied_blocks(scale),
            rng.standard_normal((2000, 16)) * scale * np.exp2(rng.uniform(-12, 14, (2000, 1))),
            rng.integers(-12, 13, (1000, 16)) * scale / 4,  # ties
        ]
        x = np.concatenate([part.astype(np.float32) for part in parts]).astype(dtype)
    data, block_scales = reference.encode_nvfp4_4over6(x, scale)
    got = blocks_in_ptx(x, scale, nvfp4.ptx_of_block(x.dtype))
    assert_same_bytes(got[0], data)
    assert_same_bytes(got[1], block_scales[:, 0])
    assert 0.01 < unusual_blocks(x, scale).mean() < 0.5 or not 2**-40 < scale < 2**40


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_four_over_six_seldom_compares_the_defined_sums(source):
    x = np.random.default_rng(0).standard_normal((20_000, 16)).astype(np.float32).astype(INPUT_DTYPES[source])
    assert unusual_blocks(x, 0.037).mean() < 0.001
    six, four = (reference.encode_nvfp4(x, 0.037, largest)[1] for largest in (6, 4))
    stored = blocks_in_ptx(x, 0.037, nvfp4.ptx_of_block(x.dtype))[1]
    assert 0.3 < (stored == four[:, 0])[(six != four)[:, 0]].mean() < 0.7


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_unusual_blocks_are_recognized(source):
    x = np.ones((9, 16), np.float32)
    x[1, 3] = np.nan
    x[2, 3] = np.inf
    x[3] = 0
    x[4] = 5 * 448  # the second scale is clamped
    x[5] = 2.0**-7  # the first is subnormal
    x[6] = np.nan
    x[7, 1:] = 0
    x[7, 0] = 12  # both sums are 0
    unusual = unusual_blocks(x.astype(INPUT_DTYPES[source]), 1.0)
    np.testing.assert_array_equal(unusual, [False, *[True] * 7, False])


@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan])
def test_four_over_six_in_ptx_terminates_for_any_scale(scale):
    with np.errstate(invalid="ignore", divide="ignore"):
        blocks_in_ptx(np.ones((1, 16), np.float16), scale, nvfp4.ptx_of_block(np.dtype(np.float16)))


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_a_widened_nan_is_canonical(source):
    x = all_values(INPUT_DTYPES[source])  # not interpreted: GPUs widen by a shift, which keeps a NaN's bits
    got = np.asarray(arithmetic.cast(jnp.asarray(x), np.dtype(np.float32)))
    assert_same_bytes(got, reference.cast(x, np.float32))
