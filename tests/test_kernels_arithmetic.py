"""The kernels' arithmetic against `kvjax.quant`: every 16-bit input, and float32 on and next to every rounding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import INPUT_DTYPES, assert_same_bytes, matrix
from interpret_mode import interpret_mode
from test_quant import SCALES, adversarial_blocks, all_values, around_midpoints, finite_values

from kvjax import KVCacheDType, quant
from kvjax.kernels import arithmetic


@pytest.mark.parametrize("source", INPUT_DTYPES)
def test_pairs_of_e2m1_codes(source):
    x = around_midpoints(finite_values(reference.E2M1)) if source == "float32" else all_values(INPUT_DTYPES[source])
    x = jnp.asarray(x, jnp.float32)
    codes = quant.e2m1_codes(x)
    with interpret_mode():
        pairs = arithmetic.e2m1_pairs(x, x[::-1], jnp.ones_like(x))
    assert_same_bytes(np.asarray(pairs), np.asarray(codes | codes[::-1] << 4))


KERNELS = {KVCacheDType.NVFP4: arithmetic.encode_nvfp4, KVCacheDType.NVFP4_4OVER6: arithmetic.encode_nvfp4_4over6}


@matrix({"dtype": KERNELS, "source": INPUT_DTYPES, "scale": SCALES})
def test_blocks(dtype, source, scale):
    with np.errstate(over="ignore", under="ignore"):
        x = jnp.asarray(adversarial_blocks(scale).astype(INPUT_DTYPES[source]))
    data, block_scales = quant.encode_nvfp4(x, scale, dtype)
    pairs = (x[:, ::2], x[:, 1::2]) if source == "float32" else (np.asarray(x).view(np.uint32),)
    with interpret_mode():
        got = KERNELS[dtype](pairs, x.dtype, jnp.float32(scale), lambda column: jnp.tile(column[:, None], 8))
    assert_same_bytes(np.asarray(got[0]), np.asarray(data))
    assert_same_bytes(np.asarray(got[1]), np.asarray(block_scales)[:, 0].view(np.uint8))


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_a_widened_nan_is_canonical(source):
    x = all_values(INPUT_DTYPES[source])  # not interpreted: GPUs widen by a shift, which keeps a NaN's bits
    got = np.asarray(arithmetic.cast(jnp.asarray(x), np.dtype(np.float32)))
    assert_same_bytes(got, reference.cast(x, np.float32))
