"""The kernels' arithmetic against `kvjax.quant`: every 16-bit input, and float32 on and next to every rounding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import INPUT_DTYPES, assert_same_bytes
from interpret_mode import interpret_mode
from test_quant import SCALES, adversarial_blocks, all_values, around_midpoints, finite_values

from kvjax import quant
from kvjax.kernels import arithmetic


@pytest.mark.parametrize("source", INPUT_DTYPES)
def test_pairs_of_e2m1_codes(source):
    x = around_midpoints(finite_values(reference.E2M1)) if source == "float32" else all_values(INPUT_DTYPES[source])
    x = jnp.asarray(x[~np.isnan(x.astype(np.float32))], jnp.float32)
    codes = np.asarray(quant.e2m1_codes(x)).astype(np.uint32)
    with interpret_mode():
        pairs = np.asarray(arithmetic.e2m1_pairs(x, x[::-1]))
    assert_same_bytes(pairs, codes | codes[::-1] << 4)


@SCALES
@pytest.mark.parametrize("source", INPUT_DTYPES)
def test_blocks(source, scale):
    with np.errstate(over="ignore", under="ignore"):
        x = jnp.asarray(adversarial_blocks(scale).astype(INPUT_DTYPES[source]))
    data, block_scales = quant.encode_nvfp4(x, scale)
    low, high = (x[:, i::2].astype(jnp.float32) for i in range(2))
    with interpret_mode():
        got = arithmetic.encode_nvfp4(low, high, jnp.float32(scale), lambda column: jnp.tile(column[:, None], 8))
    assert_same_bytes(np.asarray(got[0]), np.asarray(data))
    assert_same_bytes(np.asarray(got[1]), np.asarray(block_scales)[:, 0].view(np.uint8))


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_a_widened_nan_is_canonical(source):
    x = all_values(INPUT_DTYPES[source])  # not interpreted: GPUs widen by a shift, which keeps a NaN's bits
    got = np.asarray(arithmetic.cast(jnp.asarray(x), np.dtype(np.float32)))
    assert_same_bytes(got, reference.cast(x, np.float32))
