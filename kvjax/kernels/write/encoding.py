"""Loads of keys and values into registers, and their encoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVCacheDType, KVQuantMode
from kvjax.kernels import arithmetic, compat
from kvjax.kernels.memory import Rows
from kvjax.kernels.registers import MAX_VECTOR_BYTES, lane_layout
from kvjax.kernels.write.transfer import KVOperand, RowCopy
from kvjax.spec import AttentionSpec

BLOCK_PAIRS = NVFP4_BLOCK_SIZE // 2
"""Pairs of elements of an NVFP4 block; the codes of a pair are one byte."""


class LoadedRows(NamedTuple):
    """Rows in registers: one array, or one of the even and one of the odd elements; and the register layout."""

    arrays: tuple[jax.Array, ...]
    layout: Any


def token_rows(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    """`[num_tokens, elements]`; for NVFP4 uint32 words of two 16-bit elements, or `[num_tokens, pairs, 2]` float32."""
    if spec.quant_mode is not KVQuantMode.NVFP4:
        return x.reshape(x.shape[0], -1)
    pairs = x.reshape(x.shape[0], -1, 2)
    return pairs if x.dtype.itemsize == 4 else lax.bitcast_convert_type(pairs, jnp.uint32)


def row_copy(spec: AttentionSpec, operand: KVOperand, dtype: Any) -> RowCopy:
    """The copy of rows of `dtype` whose encoding leaves every element in its place."""
    itemsize = jnp.dtype(operand.pages.ref.dtype).itemsize
    copy = RowCopy.of(spec, operand.pages, 0, itemsize, by_head=operand.scale.shape[0] > 1)
    max_vector = min(copy.max_vector, operand.rows.alignment // jnp.dtype(dtype).itemsize)
    return dataclasses.replace(copy, max_vector=max_vector)


def row_encoder(spec: AttentionSpec, operand: KVOperand, copy: RowCopy) -> Callable[[jax.Array], jax.Array]:
    """A function that encodes the rows of a token; the scale is loaded and inverted here."""
    if not spec.dtype.is_quantized:
        return functools.partial(arithmetic.cast, dtype=spec.storage_dtype)
    if operand.scale.shape[0] > 1:
        by_head = arithmetic.reciprocal(compat.load(operand.scale, copy.layout.reduce(1)))
        inverse = compat.broadcast_columns(by_head, copy.columns, copy.layout)
    else:
        inverse = arithmetic.reciprocal(operand.scale[0])
    return functools.partial(arithmetic.encode_fp8, inverse=inverse, dtype=spec.dtype)


def load_blocks(
    rows: Rows, first: jax.Array, num_tokens: int, staged: Sequence[Any], spec: AttentionSpec, dtype: Any
) -> LoadedRows:
    """Loads the NVFP4 blocks of tokens, `[num_tokens, num_blocks, 8]`: words of two elements, or two arrays."""
    num_blocks = staged[1].shape[1]
    shape = num_tokens, num_blocks, BLOCK_PAIRS
    words = rows.ref.at[pl.ds(first - rows.first, num_tokens), pl.ds(0, num_blocks * BLOCK_PAIRS)]
    is_float32 = dtype == jnp.float32  # the elements of a pair are adjacent, so that each load has a stride of two
    layout = lane_layout(shape, 1 if is_float32 else min(BLOCK_PAIRS, rows.alignment // 4))
    refs = [words.at[:, :, i] for i in range(2)] if is_float32 else [words]
    return LoadedRows(tuple(compat.load(ref, layout, shape) for ref in refs), layout)


def load_heads(
    rows: Rows, first: jax.Array, num_tokens: int, staged: Sequence[Any], spec: AttentionSpec, dtype: Any
) -> LoadedRows:
    """Loads the rows of tokens, `[num_tokens, num_kv_heads, head_size]`, each row in one warp."""
    elements = staged[0].shape[1]
    shape = num_tokens, spec.num_kv_heads, elements // spec.num_kv_heads
    ref = rows.ref.at[pl.ds(first - rows.first, num_tokens), pl.ds(0, elements)]
    max_vector = min(rows.alignment, MAX_VECTOR_BYTES) // jnp.dtype(dtype).itemsize
    layout = lane_layout(shape, max_vector, whole_rows=True)
    return LoadedRows((compat.load(ref, layout, shape),), layout)


def encode_heads(rows: LoadedRows, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of each token and head."""
    [x] = rows.arrays
    broadcast = functools.partial(compat.broadcast_columns, columns=x.shape[-1], layout=rows.layout)
    return arithmetic.encode_per_token_head(x.astype(jnp.float32), spec.dtype, broadcast)


def encode_blocks(blocks: LoadedRows, scale: jax.Array, dtype: Any, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """Codes and block scales of NVFP4."""
    broadcast = functools.partial(compat.broadcast_columns, columns=BLOCK_PAIRS, layout=blocks.layout)
    is_4over6 = spec.dtype is KVCacheDType.NVFP4_4OVER6
    encode = arithmetic.encode_nvfp4_4over6 if is_4over6 else arithmetic.encode_nvfp4
    return encode(blocks.arrays, np.dtype(dtype), scale, broadcast)
