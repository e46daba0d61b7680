"""The decodings of `kvjax.quant` as register arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import quant
from kvjax.dtypes import KVCacheDType
from kvjax.errors import UnsupportedError
from kvjax.kernels import compat, ptx
from kvjax.kernels.aliases import DType
from kvjax.kernels.arithmetic import cast as cast

FACTOR = 2.0**7
"""Factor from float16 products of codes and block scales to the values. The biases of float16 and e2m1 are 15 and 1,
and block scales are multiplied by 2**7, after which they still fit float16."""


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

    Raises:
      UnsupportedError: another `stored`.
    """
    match stored:
        case KVCacheDType.INT8_PER_TOKEN_HEAD:
            # A bitcast to int8 would leave them unsigned: Mosaic GPU skips casts between integers of one width.
            values = ((codes.astype(jnp.int32) ^ 128) - 128).astype(jnp.float32)
        case KVCacheDType.FP8_PER_TOKEN_HEAD:
            values = lax.bitcast_convert_type(codes, stored.info.storage_dtype).astype(jnp.float32)
        case _:
            raise UnsupportedError(f"dtype: got {stored.value!r}, expected fp8_per_token_head or int8_per_token_head")
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
    float16, it is `2**-14` times its value; code 1 is subnormal in both. Its product with the block scale, which has
    four bits, is exact in float16. The product of the layer's scale, at most `2**100`, and a power of two is also
    exact.

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
    factor = broadcast(ptx.elementwise(PTX_OF_FACTOR, _factor, block_scales.astype(jnp.uint32)))
    given = data.astype(jnp.uint32), factor, scale * jnp.float32(FACTOR)
    if np.dtype(dtype).itemsize == 4:
        return list(_products(*given))
    return [ptx.elementwise(ptx_of_pair(dtype), functools.partial(_pair, dtype=dtype), *given)]


PTX_OF_FACTOR = """{
.reg .b16 both; .reg .b32 x, factor;
mul.lo.u32 x, $1, 0x101;
cvt.u16.u32 both, x;
cvt.rn.f16x2.e4m3x2 x, both;
mov.b32 factor, 0x58005800;
mul.rn.f16x2 $0, x, factor;
}"""
"""A block scale times 2**7 as two equal float16."""


def _factor(block_scales: jax.Array) -> jax.Array:
    values = lax.bitcast_convert_type(block_scales.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)
    half = lax.bitcast_convert_type((values * jnp.float32(FACTOR)).astype(jnp.float16), jnp.uint16).astype(jnp.uint32)
    return half | half << 16


def ptx_of_pair(dtype: DType) -> str:
    """PTX of a byte's two elements, the even one in the low half, from codes, the block's factor and the layer's scale.

    The product with 0x1001 puts the low code at the bottom of the low half, and the high code at that of the high half.
    """
    kind = {np.dtype(np.float16): "f16x2", np.dtype(jnp.bfloat16): "bf16x2"}[np.dtype(dtype)]
    return f"""{{
.reg .b16 half<2>; .reg .b32 codes, signs; .reg .f32 x<2>;
mul.lo.u32 codes, $1, {0x1001 << 9};
mul.lo.u32 signs, $1, {0x1001 << 12};
and.b32 codes, codes, 0x0E000E00;
and.b32 signs, signs, 0x80008000;
or.b32 codes, codes, signs;
mul.rn.f16x2 codes, codes, $2;
mov.b32 {{half0, half1}}, codes;
cvt.f32.f16 x0, half0;
cvt.f32.f16 x1, half1;
mul.rn.f32 x0, x0, $3;
mul.rn.f32 x1, x1, $3;
cvt.rn.{kind}.f32 $0, x1, x0;
}}"""


def _products(codes: jax.Array, factor: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two float32 elements that `ptx_of_pair` rounds."""
    halves = codes * (0x1001 << 9) & 0x0E000E00 | codes * (0x1001 << 12) & jnp.uint32(0x80008000)
    factor, low, high = (
        lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
        for half in (factor, halves, halves >> 16)
    )
    return _product(low * factor, scale), _product(high * factor, scale)


def _pair(codes: jax.Array, factor: jax.Array, scale: jax.Array, dtype: DType) -> jax.Array:
    low, high = (
        lax.bitcast_convert_type(cast(x, dtype), jnp.uint16).astype(jnp.uint32) for x in _products(codes, factor, scale)
    )
    return low | high << 16
