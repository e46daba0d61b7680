"""Stores keys and values in the regions of pages in XLA: encode, scatter, gather, decode."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import quant
from kvjax.cache import KVCache
from kvjax.cache_views import flat_pages, split_region, with_flat_pages
from kvjax.dtypes import KVCacheDType
from kvjax.layouts import CacheLayout
from kvjax.pages import PageRegion, swizzled_position
from kvjax.spec import AttentionSpec

KEYS, VALUES = 0, 1
"""Indices in `PageRegions`, and on the axis of size 2 of arrays that have one."""


# Jitted because keys and values are alike: tracing and lowering one takes as long as the rest of an operation.
encode_rows = functools.partial(jax.jit, static_argnums=1)(quant.encode)


@functools.partial(jax.jit, static_argnums=(1, 3))
def decode_rows(rows: Sequence[jax.Array], part: KVCacheDType, scale: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Decodes rows that `encode_rows` made of one of `AttentionSpec.parts`, to `dtype`."""
    return quant.cast(quant.decode(rows, part, scale), dtype)


MAX_SLOTS_PER_TOKEN = 1024
"""Up to this, a table of all slots finds duplicates; above, a sort, so that the cost of a write does not depend on the
cache's size. On an H200, for 16,384 tokens, the sort takes 53 us, the table 4."""


def last_of_each_slot(slots: jax.Array, num_slots: int) -> jax.Array:
    """Returns slots `[num_tokens]` with -1 for every token but the last of each slot."""
    if num_slots > MAX_SLOTS_PER_TOKEN * slots.shape[0]:
        order = jnp.argsort(slots, stable=True)
        in_order = slots[order]
        is_last = jnp.append(in_order[1:] != in_order[:-1], True)[: slots.shape[0]]
        return jnp.full_like(slots, -1).at[order].set(jnp.where(is_last, in_order, -1), unique_indices=True)
    token = jnp.arange(slots.shape[0], dtype=jnp.int32)
    index = jnp.where((slots >= 0) & (slots < num_slots), slots, num_slots).astype(jnp.int32)
    last_token = jnp.full(num_slots, -1, jnp.int32).at[index].max(token, mode="drop")
    return jnp.where(last_token.at[index].get(mode="fill", fill_value=-1) == token, slots, -1)


def scatter_rows(
    cache: KVCache, kv_index: int, rows: Sequence[jax.Array], block: jax.Array, token: jax.Array
) -> KVCache:
    """Writes rows `[num_tokens, num_kv_heads, row]`, as `encode_rows` makes them, to a cache's `KEYS` or `VALUES`.

    Token `i` goes to offset `token[i]` of page `block[i]`; a block past the last page drops it.
    """
    spec = cache.spec
    stored = [_to_array_dtype(row, spec) for row in rows]
    if spec.has_head_axis:
        # Indexed by its own axes, a cache that is sharded over heads needs no communication here.
        return KVCache(cache.kv.at[_token_index(spec, kv_index, block, token)].set(stored[0], mode="drop"), spec)
    pages = flat_pages(cache)
    for row, region in zip(stored, spec.regions[kv_index], strict=True):
        if region.row_bytes:  # 0 for latents without rope keys
            pages = _scatter_region(pages, row, region, block, token)
    return with_flat_pages(cache, pages)


def page_rows(pages: jax.Array, spec: AttentionSpec, kv_index: int) -> list[jax.Array]:
    """Returns the `KEYS` or `VALUES` of pages `[..., *spec.cache_shape(n)[1:]]`, as `encode_rows` made them.

    Each is `[..., block_size, num_kv_heads, row]`: data and, where pages hold them, scales.
    """
    if spec.has_head_axis:
        rows = pages[..., _columns(spec, kv_index)] if spec.is_diffkv else pages[..., kv_index, :, :, :]
        return [from_array_dtype(_tokens_first(rows, spec), spec.storage_dtype)]
    flat = lax.collapse(pages, pages.ndim - len(spec.cache_shape(1)) + 1)
    dtypes = spec.parts[kv_index].info.region_dtypes
    return [
        from_array_dtype(_region_rows(flat, spec, region), dtype)
        for region, dtype in zip(spec.regions[kv_index], dtypes, strict=True)
    ]


def _token_index(spec: AttentionSpec, kv_index: int, block: jax.Array, token: jax.Array) -> tuple[Any, ...]:
    """Returns an index into an array with a head axis that selects tokens' rows, `[num_tokens, heads, row]`."""
    inner = (token, slice(None)) if spec.layout is CacheLayout.NHD else (slice(None), token)
    return (block, *inner, _columns(spec, kv_index)) if spec.is_diffkv else (block, kv_index, *inner)


def _columns(spec: AttentionSpec, kv_index: int) -> slice:
    return (slice(spec.head_size), slice(spec.head_size, None))[kv_index]


def _tokens_first(rows: jax.Array, spec: AttentionSpec) -> jax.Array:
    return jnp.swapaxes(rows, -2, -3) if spec.layout is CacheLayout.HND else rows


def _scatter_region(
    pages: jax.Array, rows: jax.Array, region: PageRegion, block: jax.Array, token: jax.Array
) -> jax.Array:
    """Writes rows `[num_tokens, num_kv_heads, row]` into one region of flat pages `[num_blocks, page_elements]`.

    Both have the array's dtype, which has one byte except for unquantized latents.
    """
    num_tokens, num_heads, row = rows.shape
    base, token_stride, head_stride = (
        size // pages.dtype.itemsize for size in (region.base, region.token_stride, region.head_stride)
    )
    # Contiguous runs of bytes: all heads of a token, one head, or single bytes in a swizzled region.
    if region.swizzled:
        runs: tuple[int, ...] = num_heads, row
    else:
        runs = (1,) if num_heads == 1 or head_stride == row else (num_heads,)
    shape = num_tokens, *runs
    tile_row = lax.broadcast_in_dim(token, shape, [0])
    steps = []
    if region.swizzled:
        tile_row, column = swizzled_position(tile_row, lax.broadcasted_iota(token.dtype, shape, 2), row)
        steps.append(column)
    steps.append(_times(tile_row, token_stride))
    if runs != (1,):
        steps.append(_times(lax.broadcasted_iota(token.dtype, shape, 1), head_stride))
    offsets = lax.add(functools.reduce(lax.add, steps), token.dtype.type(base))
    updates = lax.reshape(rows, (num_tokens, math.prod(runs), num_heads * row // math.prod(runs)))
    columns = [lax.reshape(x, (*updates.shape[:2], 1)) for x in (lax.broadcast_in_dim(block, shape, [0]), offsets)]
    indices = lax.concatenate(columns, 2)
    if num_tokens * math.prod(runs) == 1:
        # For a single update XLA on CPU selects between the pages with and without it, and copies all of them.
        indices = jnp.concatenate([indices, jnp.full_like(indices, pages.shape[0])])  # past the last page: dropped
        updates = jnp.concatenate([updates, updates])
    return lax.scatter(
        pages,
        indices,
        updates,
        lax.ScatterDimensionNumbers(
            update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        ),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def _times(index: jax.Array, stride: int) -> jax.Array:
    return lax.mul(index, index.dtype.type(stride))


def _region_rows(pages: jax.Array, spec: AttentionSpec, region: PageRegion) -> jax.Array:
    """Returns one region of flat pages `[..., page_bytes]` as bytes `[..., block_size, num_kv_heads, row]`."""
    rows = _tokens_first(split_region(pages, spec, region), spec)
    if region.swizzled:
        num_scales = rows.shape[-1]
        token = np.arange(spec.block_size)[:, None]
        tile_row, column = swizzled_position(token, np.arange(num_scales), num_scales)
        rows = jnp.swapaxes(jnp.swapaxes(rows, -2, -3)[..., tile_row, column], -2, -3)
    return rows


def _to_array_dtype(rows: jax.Array, spec: AttentionSpec) -> jax.Array:
    if rows.dtype == spec.array_dtype:
        return rows
    stored = lax.bitcast_convert_type(rows, spec.array_dtype)
    return lax.collapse(stored, rows.ndim - 1)


def from_array_dtype(rows: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Bitcasts rows of a cache array, `[..., bytes]` or `[..., elements]`, to `dtype`."""
    if rows.dtype != dtype and dtype.itemsize > 1:
        rows = rows.reshape(*rows.shape[:-1], rows.shape[-1] // dtype.itemsize, dtype.itemsize)
    return lax.bitcast_convert_type(rows, dtype)
