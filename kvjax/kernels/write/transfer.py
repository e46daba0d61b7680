"""Encoded rows on their way into pages: from registers, or from shared memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat, warpgroups
from kvjax.kernels.aliases import Layout, Scalar
from kvjax.kernels.codecs import Codec
from kvjax.kernels.launchable import Number, Pages, Rows
from kvjax.kernels.registers import MAX_VECTOR_BYTES, THREADS, lane_layout
from kvjax.kernels.write.slots import Position, TokenSlots
from kvjax.pages import PageRegion, swizzled_position
from kvjax.spec import AttentionSpec


class WriteOperand(NamedTuple):
    """The keys or the values of a write.

    Attributes:
      codec: how they are encoded.
      rows: the rows to encode.
      scale: reference to their decode scale, `[1]` or `[num_kv_heads]`; None where each token and head has a scale, or
        nothing has.
      pages: the pages to write.
      scale_pages: the pages for the scales of each token and head, where those are not in `pages`.
    """

    codec: Codec
    rows: Rows
    scale: Scalar
    pages: Pages
    scale_pages: Pages | None = None

    @property
    def has_head_scales(self) -> bool:
        """Whether each head has a scale for all tokens."""
        return self.scale is not None and self.scale.shape[0] > 1

    @property
    def destinations(self) -> list[tuple[Pages, int]]:
        """Where what is staged goes, data and scales: pages, and the index of the region in them."""
        both = [(self.pages, 0), (self.pages, 1) if self.scale_pages is None else (self.scale_pages, 0)]
        return both[: self.codec.num_staged]


@dataclasses.dataclass(frozen=True)
class RowCopy:
    """Copies a token's rows of one region through registers: `rows` contiguous runs of `columns` elements.

    Attributes:
      region: the region, with offsets in elements.
      rows: the number of heads, or 1 where the heads of a token are contiguous.
      columns: elements of a run.
      max_vector: maximum number of elements of a vector load or store.
    """

    region: PageRegion
    rows: int
    columns: int
    max_vector: int

    @classmethod
    def of(cls, spec: AttentionSpec, pages: Pages, which: int, itemsize: int, *, by_head: bool = False) -> RowCopy:
        """The copy into region `which` of `pages`, in elements of `itemsize` bytes.

        `by_head` keeps heads apart, for one scale per head.
        """
        region, heads = pages.regions[which], spec.num_kv_heads
        alignment = math.gcd(pages.alignment, region.base, region.token_stride, region.head_stride, MAX_VECTOR_BYTES)
        elements = dataclasses.replace(
            region,
            **{
                name: getattr(region, name) // itemsize for name in ("base", "token_stride", "head_stride", "row_bytes")
            },
        )
        row = elements.row_bytes
        is_contiguous = heads == 1 or (region.head_stride == region.row_bytes and not by_head)
        rows, columns = (1, heads * row) if is_contiguous and not region.swizzled else (heads, row)
        return cls(elements, rows, columns, max(1, alignment // itemsize))

    def offset(self, token: jax.Array, row: Number, column: Number) -> jax.Array:
        """Offset of an element in its page."""
        region = self.region
        if region.swizzled:
            token, column = swizzled_position(token, column, region.row_bytes)
        offset: jax.Array = region.base + token * region.token_stride + row * region.head_stride + column
        return offset

    @property
    def layout(self) -> Layout:
        """The register layout of a token's rows."""
        return lane_layout((self.rows, self.columns), self.max_vector)

    def load(self, source: Rows, token: Number) -> jax.Array:
        """Loads the rows of a token."""
        rows = source.ref.at[token - source.first, pl.ds(0, self.rows * self.columns)]
        return compat.load(rows, self.layout, (self.rows, self.columns))

    def store(self, rows: jax.Array, pages: Pages, position: Position) -> None:
        """Stores encoded rows into their page."""
        offsets = [self.offset(position.token, row, 0) for row in range(self.rows)]
        if compat.interpreting():  # which does not support reshaped references
            for offset, row in zip(offsets, rows, strict=True):
                compat.store(pages.ref.at[position.page, pl.ds(offset, self.columns)], row)
            return
        # The slice covers whole strides and may extend past the end of the page, but nothing is stored there.
        stride = self.columns if self.rows == 1 else self.region.head_stride
        run = pages.ref.at[position.page, pl.ds(offsets[0], self.rows * stride)].reshape(self.rows, stride)
        compat.store(run.at[:, pl.ds(0, self.columns)], rows)


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Copies one region's bytes of all tokens of a program from shared memory into pages, one chunk per thread."""

    copy: RowCopy
    tokens: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        if self.copy.region.swizzled:
            return 1
        return self.copy.columns if compat.interpreting() else math.gcd(self.copy.columns, self.copy.max_vector)

    @property
    def chunks_per_token(self) -> int:
        """Chunks of one token."""
        return self.copy.rows * self.copy.columns // self.chunk_bytes

    @property
    def layout(self) -> Layout:
        """The register layout of one number per chunk, padded to whole warpgroups."""
        return lane_layout((self._padded_chunks,), 1)

    @property
    def _padded_chunks(self) -> int:
        chunks = self.tokens * self.chunks_per_token
        return chunks if compat.interpreting() else -(-chunks // THREADS) * THREADS

    def positions(self, slots: TokenSlots, first: jax.Array, first_owned: jax.Array, spec: AttentionSpec) -> Position:
        """Where the token of each chunk goes.

        `first` is the program's first token; tokens before `first_owned` are written by another program.
        """
        chunk = self._chunk_indices()
        token = first + jnp.minimum(lax.div(chunk, jnp.int32(self.chunks_per_token)), self.tokens - 1)
        is_chunk = (chunk < self.tokens * self.chunks_per_token) & (token >= first_owned)
        return slots.position(token, is_chunk, spec, self.layout)

    def store(self, staged: Any, pages: Pages, positions: Position, skipped: jax.Array | None) -> None:
        """Stores all chunks of `staged` `[tokens, bytes]`, except those of tokens whose bit in `skipped` is set."""
        chunk = self._chunk_indices()
        written = positions.written
        if skipped is not None:
            token = lax.div(chunk, jnp.int32(self.chunks_per_token))
            written &= lax.shift_right_logical(lax.broadcast(skipped, token.shape), token) & 1 == 0
        byte = lax.rem(chunk, jnp.int32(self.chunks_per_token)) * self.chunk_bytes
        row, column = lax.div(byte, jnp.int32(self.copy.columns)), lax.rem(byte, jnp.int32(self.copy.columns))
        offsets = self.copy.offset(positions.token, row, column)
        size = self.chunk_bytes
        copies = warpgroups.Copies(chunk * size, positions.page, offsets, written)
        warpgroups.copy_each(staged, pages.ref, copies, size, self.layout)

    def _chunk_indices(self) -> jax.Array:
        return compat.layout_cast(lax.iota(jnp.int32, self._padded_chunks), self.layout)
