"""Rotary position embedding in registers.

A thread holds vectors of element pairs of all heads of a token, and the cosines and sines that the heads share. NeoX
pairs element `i` of a head with `i + rot_dim / 2`, which are loaded separately. GPT-J pairs neighbours, which are
loaded as the halves of uint32 words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax import quant
from kvjax.kernels import compat, ptx
from kvjax.kernels.aliases import DType, Layout
from kvjax.kernels.launchable import Number, Rows
from kvjax.kernels.registers import MAX_VECTOR_BYTES, lane_layout


class LoadedHeads(NamedTuple):
    """The heads of a token in registers.

    Attributes:
      pairs: `[heads, rot_dim / 2]`, first and second elements of pairs (NeoX), or words of both (GPT-J).
      layout: their register layout.
      unrotated: `[heads, ...]`, the columns after `rot_dim` elements, or None.
    """

    pairs: Sequence[jax.Array]
    layout: Layout
    unrotated: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Parameters of the rotation.

    Attributes:
      dtype: of queries and keys, float16 or bfloat16.
      head_size: elements of a head.
      rot_dim: the number of leading elements of a head that are rotated; even.
      is_neox: whether elements `rot_dim / 2` apart form pairs (NeoX), or neighbours (GPT-J).
      table_itemsize: bytes of a table element.
    """

    dtype: DType
    head_size: int
    rot_dim: int
    is_neox: bool
    table_itemsize: int

    @property
    def elements_per_column(self) -> int:
        """Elements of a column: one, or two in a uint32 word."""
        return 1 if self.is_neox else 2

    @property
    def columns(self) -> int:
        """Columns of a head."""
        return self.head_size // self.elements_per_column

    def as_columns(self, x: jax.Array) -> jax.Array:
        """`[num_tokens, heads, head_size]` as rows of columns."""
        rows = x.reshape(x.shape[0], -1)
        if self.is_neox:
            return rows
        return lax.bitcast_convert_type(rows.reshape(x.shape[0], -1, 2), jnp.uint32)

    def load(self, source: Rows, token: jax.Array, heads: int) -> LoadedHeads:
        """Loads the heads of a token."""
        half, size = self.rot_dim // 2, self.elements_per_column
        column_bytes = size * self.dtype.itemsize
        run_bytes = math.gcd(source.alignment, self.columns * column_bytes, half * column_bytes, MAX_VECTOR_BYTES)
        table_bytes = math.gcd(half * self.table_itemsize, MAX_VECTOR_BYTES)
        max_vector = min(run_bytes // column_bytes, table_bytes // self.table_itemsize)
        layout = lane_layout((heads, half), max_vector)

        def load(column: int, columns: int, layout: Layout) -> jax.Array:
            rows = source.ref.at[token - source.first, pl.ds(0, heads * self.columns)]
            if compat.interpreting():  # which does not support reshaped references
                return compat.load(rows, layout).reshape(heads, self.columns)[:, column : column + columns]
            return compat.load(rows.reshape(heads, self.columns).at[:, pl.ds(column, columns)], layout)

        loaded = [load(i * half, half, layout) for i in range(2 if self.is_neox else 1)]
        rest = self.columns - 2 * half // size
        rest_layout = lane_layout((heads, rest), run_bytes // column_bytes) if rest else None
        unrotated = load(self.columns - rest, rest, rest_layout) if rest else None
        return LoadedHeads(loaded, layout, unrotated)

    def rotate(
        self, loaded: LoadedHeads, table: Rows, position: jax.Array, store: Callable[[jax.Array, int], None]
    ) -> None:
        """Rotates heads; `store` is called with `[heads, columns]` and the index of the first column.

        `table` has a row of `rot_dim` elements for each position, cosines then sines.
        """
        pairs, layout, unrotated = loaded
        heads, half = pairs[0].shape

        def of_all_heads(column: int) -> jax.Array:
            ref = table.ref.at[position, pl.ds(column, half)]
            row = compat.load(ref, layout.reduce(0)).astype(jnp.float32)
            return compat.layout_cast(lax.broadcast_in_dim(row, (heads, half), (1,)), layout)

        cos, sin = of_all_heads(0), of_all_heads(half)
        if self.is_neox:
            x, y = (each.astype(jnp.float32) for each in pairs)
        else:
            x, y = _halves(pairs[0], self.dtype)
        rotated = ptx.elementwise(_DIFFERENCE, quant.rotated_first, x, y, cos, sin)
        other = ptx.elementwise(_SUM, quant.rotated_second, x, y, cos, sin)
        if self.is_neox:
            store(_narrow(rotated, self.dtype), 0)
            store(_narrow(other, self.dtype), half)
        else:
            store(_joined(rotated, other, self.dtype), 0)
        if unrotated is not None:
            store(unrotated, self.columns - unrotated.shape[1])


# In PTX with explicit rounding, so that no compiler contracts products and sums to fused multiply-adds.
_DIFFERENCE = "{ .reg .f32 p, q; mul.rn.ftz.f32 p, $1, $3; mul.rn.ftz.f32 q, $2, $4; sub.rn.ftz.f32 $0, p, q; }"
_SUM = "{ .reg .f32 p, q; mul.rn.ftz.f32 p, $2, $3; mul.rn.ftz.f32 q, $1, $4; add.rn.ftz.f32 $0, p, q; }"


def store_heads(rows: Rows, token: Number, columns: int, values: jax.Array, column: int) -> None:
    """Stores `[heads, ...]` from `column` on of each head of a token, where a head has `columns` columns."""
    (heads, count), ref = values.shape, rows.ref
    if compat.interpreting():
        for head in range(heads):
            compat.store(ref.at[token, pl.ds(head * columns + column, count)], values[head])
        return
    run = ref.at[token, pl.ds(0, heads * columns)].reshape(heads, columns)
    compat.store(run.at[:, pl.ds(column, count)], values)


def _halves(words: jax.Array, dtype: DType) -> tuple[jax.Array, jax.Array]:
    low, high = (
        lax.bitcast_convert_type(half.astype(jnp.uint16), dtype).astype(jnp.float32)
        for half in (words & 0xFFFF, words >> 16)
    )
    return low, high


def _narrow(x: jax.Array, dtype: DType) -> jax.Array:
    return quant.cast(x, dtype) if compat.interpreting() else x.astype(dtype)


def _joined(low: jax.Array, high: jax.Array, dtype: DType) -> jax.Array:
    kind = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"

    def model(low: jax.Array, high: jax.Array) -> jax.Array:
        bits = [lax.bitcast_convert_type(quant.cast(x, dtype), jnp.uint16).astype(jnp.uint32) for x in (low, high)]
        return bits[0] | bits[1] << 16

    return ptx.elementwise(f"cvt.rn.{kind}.f32 $0, $2, $1;", model, low, high)
