"""Products in fp8: both operands are e4m3, sums float32. Hopper multiplies these twice as fast as 16-bit operands.

- A row of the query is divided by a power of two, so that its largest element is from 128 to 256 and no rounding
  depends on the size of a row. The power multiplies its logits.
- Weights are relative to the least power of two that no logit's exceeds, times `2**WEIGHTS_EXPONENT`: so what a weight
  is rounded to does not depend on which tokens share its tile. Below `2**-14` they lose bits, below `2**-18` they are 0.
- Tensor cores read e4m3 values only along tokens, so these are transposed, and `warpgroups.in_order_of_products`.
- The sum of a row's weights is that of the rounded ones: values have `GROUP` rows more, which are ones, so that tensor
  cores sum weights too. A weighted mean of equal values is exact.
- Hopper's tensor cores add products of e4m3 with some 14 bits. The products of a tile are therefore added to those of
  earlier tiles in float32, as in DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3.2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.kernels import compat, lanes, ptx, tiles, warpgroups
from kvjax.kernels.aliases import DType, DTypeLike, Ref, Scalar

DTYPE: DType = np.dtype(jnp.float8_e4m3fn)

ALIGNMENT = 32
"""Head sizes that tensor cores multiply in fp8 are multiples of this."""

MAX_HEAD_SIZE = 128
"""More results than registers hold beside those of a tile."""

WEIGHTS_EXPONENT = 8
"""Weights of at most 1 are multiplied by two to this power: e4m3 ends at 448."""

_ONE = 0x38
"""1 in e4m3."""


def is_fp8(dtype: DTypeLike) -> bool:
    """Whether operands of a dtype are multiplied in fp8."""
    return np.dtype(dtype) == DTYPE


def scaled_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows in float32 divided by a power of two, so that none exceeds 256, and this power, float32 `[rows]`.

    A row that is not finite stays so. Rows below `2**-119` are not scaled any further.
    """
    rows = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=1)
    exponent = jnp.maximum(lax.bitcast_convert_type(largest, jnp.int32) >> 23, 8)  # biased
    inverse = lax.bitcast_convert_type((261 - exponent) << 23, jnp.float32)
    power = lax.bitcast_convert_type((exponent - 7) << 23, jnp.float32)
    return rows * lax.broadcast_in_dim(inverse, rows.shape, [0]), power


def integer_above(x: jax.Array) -> jax.Array:
    """The least integer that is not below, in float32."""
    return ptx.elementwise("cvt.rpi.f32.f32 $0, $1;", jnp.ceil, x)


def store_ones(values: Ref, size: int) -> None:
    """Stores ones below each tile of values, in rows `size` to `size + GROUP`; a warpgroup calls it."""
    stages, rows, tokens = values.shape
    if compat.interpreting():
        for stage in range(stages):
            for row in range(size, rows):
                values[stage, row] = jnp.ones(tokens, DTYPE)
        return
    # These rows are one run of bytes, in whatever order.
    words = [lanes.splat(_ONE * 0x01010101, jnp.int32)]
    thread = lanes.thread_index()
    for stage in range(stages):
        for first in range(0, tiles.GROUP * tokens, 4 * 128):
            offset: Scalar = thread * 4 + (stage * rows + size) * tokens + first
            lanes.store_shared(values, offset, words, 4, thread >= 0, tiles.transforms_of(tokens, 1))


def results_and_sums(acc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weighted values, `[rows, size]`, and the sums of weights, `[rows]`, of their products with a tile's rows."""
    size = acc.shape[1] - tiles.GROUP
    return warpgroups.columns(acc, 0, size), jnp.max(warpgroups.columns(acc, size, acc.shape[1]), axis=1)
