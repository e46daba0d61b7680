"""The decodings of `kvjax.quant` as register arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kvjax import quant
from kvjax.dtypes import KVCacheDType
from kvjax.kernels import compat
from kvjax.kernels.aliases import DType
from kvjax.kernels.arithmetic import cast as cast

_HALF_FROM_E2M1 = 2.0**14
"""Factor from a float16 with the exponent and mantissa of an e2m1 code to its value: the biases are 15 and 1."""


def _product(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x * factor` with the canonical NaN, which the GPU's instruction returns but XLA on CPU does not."""
    product = x * factor
    return quant.with_canonical_nan(product) if compat.interpreting() else product


def decode_fp8(bits: jax.Array, scale: jax.Array, stored: KVCacheDType, dtype: DType) -> jax.Array:
    """`kvjax.quant.decode_fp8` of bytes, cast to `dtype`; `scale` is a scalar or of the shape of `bits`."""
    values = lax.bitcast_convert_type(bits, stored.info.storage_dtype).astype(jnp.float32)
    return cast(_product(values, scale), dtype)


def decode_per_token_head(
    codes: jax.Array, scales: jax.Array, stored: KVCacheDType, dtype: DType, broadcast: Callable[..., jax.Array]
) -> jax.Array:
    """`kvjax.quant.decode_per_token_head`, cast to `dtype`.

    Args:
      codes: their bits, uint8 `[..., head_size]`.
      scales: their bits, int32 `[...]`.
      stored: `FP8_PER_TOKEN_HEAD` or `INT8_PER_TOKEN_HEAD`.
      dtype: of the elements.
      broadcast: from `[...]` to `[..., head_size]`, in the registers of `codes`.
    """
    if stored is KVCacheDType.INT8_PER_TOKEN_HEAD:
        # A bitcast to int8 would leave them unsigned: Mosaic GPU skips casts between integers of one width.
        values = ((codes.astype(jnp.int32) ^ 128) - 128).astype(jnp.float32)
    else:
        values = lax.bitcast_convert_type(codes, stored.info.storage_dtype).astype(jnp.float32)
    return cast(_product(values, broadcast(lax.bitcast_convert_type(scales, jnp.float32))), dtype)


def decode_fp8_ds_mla(
    codes: jax.Array, scales: jax.Array, stored: KVCacheDType, dtype: DType, broadcast: Callable[..., jax.Array]
) -> jax.Array:
    """`kvjax.quant.decode_fp8_ds_mla` of blocks, cast to `dtype`; takes what `decode_per_token_head` does."""
    values = lax.bitcast_convert_type(codes, stored.info.storage_dtype).astype(jnp.float32)
    products = quant.normal(values * broadcast(lax.bitcast_convert_type(scales, jnp.float32)))
    return cast(quant.with_canonical_nan(products) if compat.interpreting() else products, dtype)


def decode_nvfp4(
    data: jax.Array,
    block_scales: jax.Array,
    scale: jax.Array,
    dtype: DType,
    broadcast: Callable[[jax.Array], jax.Array],
) -> list[jax.Array]:
    """`kvjax.quant.decode_nvfp4`, cast to `dtype`.

    The magnitude of a code is two exponent bits above one mantissa bit. Shifted to the position of these fields in a
    float16, it is `2**-14` times its value; code 1 is subnormal in both. Its product with the block scale is exact, in
    whatever order the powers of two are multiplied.

    Args:
      data: uint8 `[..., 8]`, a byte for each pair.
      block_scales: the bits of the blocks' scales, uint8 `[...]`.
      scale: float32 scalar.
      dtype: of the elements.
      broadcast: from `[...]` to `[..., 8]`, in the registers of `data`.

    Returns:
      The elements of each byte: one uint32 `[..., 8]` of two 16-bit elements, the even one in the low half, or two
      float32 arrays, the even elements and the odd ones.
    """
    factor = lax.bitcast_convert_type(block_scales, jnp.float8_e4m3fn).astype(jnp.float32)
    factor = broadcast(factor * jnp.float32(_HALF_FROM_E2M1))
    codes = data.astype(jnp.uint32)
    # The product with 0x1001 has the low code at the bottom of the low half and the high code at that of the high one.
    halves = codes * (0x1001 << 9) & 0x0E000E00 | codes * (0x1001 << 12) & jnp.uint32(0x80008000)
    low, high = (
        lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
        for half in (halves, halves >> 16)
    )
    low, high = (cast(_product(half * factor, scale), dtype) for half in (low, high))
    if low.dtype.itemsize == 4:
        return [low, high]
    low, high = (lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in (low, high))
    return [low | high << 16]
