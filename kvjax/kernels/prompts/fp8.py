"""Products in fp8: both operands are e4m3, sums float32. Hopper multiplies these twice as fast as 16-bit operands.

- A row of the query is divided by a power of two, so that its largest element is from 128 to 256 and no rounding
  depends on the size of a row. The power multiplies its logits.
- Weights are relative to the least power of two that no weight exceeds, and multiplied by `2**WEIGHTS_EXPONENT`. So
  what a weight is rounded to does not depend on which tokens share its tile. Weights below `2**-14` lose bits, and
  those below `2**-18` are 0.
- Tensor cores read e4m3 values only along tokens, so values are transposed, with tokens in the order of
  `warpgroups.in_order_of_products`.
- The sum of a row's weights is that of the rounded ones: values have `GROUP` more rows, which are ones, so that tensor
  cores sum the weights too. A weighted mean of equal values is exact.
- Hopper's tensor cores add products of e4m3 with some 14 bits. The products of a tile are therefore added to those of
  earlier tiles in float32, as in DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3.2).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import quant
from kvjax.dtypes import KVCacheDType
from kvjax.kernels import compat, lanes, ptx, tiles, warpgroups
from kvjax.kernels.aliases import DType, DTypeLike, Ref, Scalar

DTYPE: DType = np.dtype(jnp.float8_e4m3fn)

ALIGNMENT = 32
"""Head sizes that tensor cores multiply in fp8 are multiples of this."""

BLOCK_TOKENS = 16
"""Block sizes are multiples of so many tokens, which `warpgroups.in_order_of_products` permutes among themselves."""

MAX_HEAD_SIZE = 128
"""More results than registers hold beside those of a tile."""

WEIGHTS_EXPONENT = 8
"""Weights of at most 1 are multiplied by two to this power: e4m3 ends at 448."""

_ONE = 0x38
"""1 in e4m3."""


def is_fp8(dtype: DTypeLike) -> bool:
    """Whether operands of a dtype are multiplied in fp8."""
    return np.dtype(dtype) == DTYPE


def why_not(head_sizes: tuple[int, int], block_size: int) -> str | None:
    """Why heads of such keys and values, in such blocks, are not multiplied in fp8; None if they are."""
    if block_size % BLOCK_TOKENS:
        return f"got block_size {block_size}, expected a multiple of {BLOCK_TOKENS}"
    if odd := [size for size in head_sizes if size % ALIGNMENT or size > MAX_HEAD_SIZE]:
        return f"got head size {odd[0]}, expected a multiple of {ALIGNMENT} up to {MAX_HEAD_SIZE}"
    return None


def takes_unit(dtype: KVCacheDType) -> bool:
    """Whether keys or values are divided by `unit_above` before they are rounded; others are e4m3."""
    return dtype.info.elements_per_scale is not None


def unit_above(scales: jax.Array) -> jax.Array:
    """The least power of two such that e4m3 holds elements of NVFP4 divided by it; float32.

    An element is up to 6 times its block's scale, 2,688, and has up to six significant bits. e4m3 has four, so elements
    of codes 1.5, 3 and 6 are rounded. Elements below `2**-14` of the largest that e4m3 then holds lose more.

    Args:
      scales: the bits of the largest block scale, e4m3, without a sign; not NaN.
    """
    exponent = (scales.astype(jnp.int32) >> 3) - 12
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def rounded(x: jax.Array, unit: jax.Array) -> jax.Array:
    """Keys or values without their layer's scale, rounded in a unit as for products in fp8; in XLA."""
    return _to_e4m3(x / unit) * unit


def rounded_rows(rows: jax.Array) -> jax.Array:
    """Rows of a query, along the last dimension, rounded likewise."""
    rows, power = scaled_rows(rows)
    return _to_e4m3(rows) * power[..., None]


def power_above(logits: jax.Array) -> jax.Array:
    """The least logarithms of powers of two that are not below `logits`."""
    return jnp.ceil(logits * _LOG2_E) / _LOG2_E


def rounded_weights(weights: jax.Array) -> jax.Array:
    """Weights, relative to a power of two, rounded likewise."""
    return _to_e4m3(weights * 2.0**WEIGHTS_EXPONENT) * 2.0**-WEIGHTS_EXPONENT


_LOG2_E = math.log2(math.e)


def _to_e4m3(x: jax.Array) -> jax.Array:
    most = float(jnp.finfo(DTYPE).max)
    return quant.cast(jnp.clip(x.astype(jnp.float32), -most, most), DTYPE).astype(jnp.float32)


def scaled_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows in float32 divided by a power of two, so that none exceeds 256, and this power, float32 `[rows]`.

    A row that is not finite stays so. Rows below `2**-119` are not scaled any further.
    """
    rows = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=rows.ndim - 1)
    exponent = jnp.maximum(lax.bitcast_convert_type(largest, jnp.int32) >> 23, 8)  # biased
    inverse = lax.bitcast_convert_type((261 - exponent) << 23, jnp.float32)
    power = lax.bitcast_convert_type((exponent - 7) << 23, jnp.float32)
    return rows * lax.broadcast_in_dim(inverse, rows.shape, range(rows.ndim - 1)), power


def integer_above(x: jax.Array) -> jax.Array:
    """The least integer that is not below `x`, in float32."""
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
    """Splits products of weights with a tile's rows: weighted values, `[rows, size]`, and sums of weights, `[rows]`."""
    size = acc.shape[1] - tiles.GROUP
    return warpgroups.columns(acc, 0, size), jnp.max(warpgroups.columns(acc, size, acc.shape[1]), axis=1)
