"""Keys and values as the rows of a page's regions: encoded and scattered, gathered and decoded, in XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import quant
from kvjax.cache import split_region
from kvjax.dtypes import KVQuantMode
from kvjax.layouts import CacheLayout
from kvjax.pages import PageRegion, swizzled_position
from kvjax.spec import AttentionSpec


def encode_rows(x: jax.Array, spec: AttentionSpec, scale: jax.Array) -> tuple[jax.Array, ...]:
    """`x` `[..., num_kv_heads, head_size]` as stored rows: data and, for NVFP4, block scales."""
    match spec.quant_mode:
        case KVQuantMode.NVFP4:
            return quant.encode_nvfp4(x, scale)
        case KVQuantMode.FP8_PER_TENSOR:
            return (quant.encode_fp8(x, scale, spec.dtype),)
        case _:
            return (quant.cast(x, spec.storage_dtype),)


def decode_rows(rows: Sequence[jax.Array], spec: AttentionSpec, scale: jax.Array) -> jax.Array:
    """What rows as `encode_rows` makes them stand for: float32 where the layer is quantized, else the storage dtype."""
    match spec.quant_mode:
        case KVQuantMode.NVFP4:
            data, block_scales = rows
            return quant.decode_nvfp4(data, block_scales, scale)
        case KVQuantMode.FP8_PER_TENSOR:
            return quant.decode_fp8(rows[0], scale)
        case _:
            return rows[0]


def row_dtypes(spec: AttentionSpec) -> tuple[np.dtype[Any], ...]:
    """Element types of what `encode_rows` returns."""
    if spec.quant_mode is KVQuantMode.NVFP4:
        return spec.storage_dtype, jnp.dtype(jnp.float8_e4m3fn)
    return (spec.storage_dtype,)


def scatter_rows(
    pages: jax.Array, rows: jax.Array, region: PageRegion, block: jax.Array, token: jax.Array
) -> jax.Array:
    """Writes rows `[num_tokens, num_kv_heads, row]` into one region of flat pages `[num_blocks, page_elements]`.

    Token `i` goes to offset `token[i]` of page `block[i]`; one whose block is out of range is dropped. Pages of another
    dtype than the rows hold bytes.
    """
    if rows.dtype != pages.dtype:
        rows = lax.bitcast_convert_type(rows, pages.dtype).reshape(*rows.shape[:2], -1)
    num_tokens, num_heads, row = rows.shape
    base, token_stride, head_stride = (
        size // pages.dtype.itemsize for size in (region.base, region.token_stride, region.head_stride)
    )
    head = jnp.arange(num_heads, dtype=token.dtype)
    offsets = base + token[:, None] * token_stride + head * head_stride
    if region.swizzled:
        tile_row, column = swizzled_position(token[:, None, None], jnp.arange(row, dtype=token.dtype), row)
        offsets = base + tile_row * token_stride + head[:, None] * head_stride + column
    elif head_stride == row:  # the heads of a token are one run of bytes
        offsets = offsets[:, :1]
    offsets = offsets.reshape(num_tokens, -1)
    indices = jnp.stack([jnp.broadcast_to(block[:, None], offsets.shape), offsets], axis=-1)
    return lax.scatter(
        pages,
        indices,
        rows.reshape(*offsets.shape, -1),
        lax.ScatterDimensionNumbers(
            update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        ),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def gather_rows(pages: jax.Array, spec: AttentionSpec, region: PageRegion, dtype: np.dtype[Any]) -> jax.Array:
    """One region of flat pages `[..., page_elements]` as `[..., block_size, num_kv_heads, row]` of `dtype`."""
    rows = split_region(pages, spec, region)
    if spec.layout is CacheLayout.HND:
        rows = jnp.swapaxes(rows, -2, -3)
    if region.swizzled:
        num_scales = rows.shape[-1]
        token = np.arange(spec.block_size)[:, None]
        tile_row, column = swizzled_position(token, np.arange(num_scales), num_scales)
        rows = jnp.swapaxes(jnp.swapaxes(rows, -2, -3)[..., tile_row, column], -2, -3)
    return rows if rows.dtype == dtype else _from_bytes(rows, dtype)


def _from_bytes(rows: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    if dtype.itemsize > 1:
        rows = rows.reshape(*rows.shape[:-1], -1, dtype.itemsize)
    return lax.bitcast_convert_type(rows, dtype)
