"""The tokens of a page as a program decodes them: loads of their rows, and stores of what these become.

Every array in registers has the axes of the result, tokens first, whatever the order in the page, so that each thread
stores what it loaded. An NVFP4 byte holds two elements. For 16-bit results they become one uint32 word, which makes
decoding elementwise as for other formats; for float32 the two elements are stored separately.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat, tiles, warpgroups
from kvjax.kernels.aliases import DType, Layout, Ref, Scalar
from kvjax.kernels.codecs import Codec, RowCodec
from kvjax.kernels.launchable import Pages
from kvjax.kernels.registers import MAX_VECTOR_BYTES, lane_layout
from kvjax.pages import SWIZZLE_TOKENS, PageRegion, swizzled_position
from kvjax.spec import AttentionSpec

WORD_BYTES = 4
"""Bytes of a float32 scale."""

MAX_PIECES_LOADED = 9
"""Maximum number of pieces in registers at once. Swizzled values have many pieces: this number is the keys and half of
the values where a piece is a quarter of a row. More do not fit where odd numbers of heads leave threads idle."""


Dense = Any
"""A reference to a result, or `tiles.Places`."""


class GatherOperand(NamedTuple):
    """The keys or the values of a gather.

    Attributes:
      codec: how they are decoded.
      pages: the pages to read.
      scale: reference to their decode scale, or a scalar; None where each token and head has a scale.
      dense: the result, `ref[tokens, heads, ...]`.
      scale_pages: the pages of the scales of each token and head, where those are not in `pages`.
      alignment: of the result's tokens, in bytes.
    """

    codec: Codec
    pages: Pages
    scale: Scalar
    dense: Dense
    scale_pages: Pages | None = None
    alignment: int = MAX_VECTOR_BYTES


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens, or some of their rows, that are decoded together.

    Attributes:
      stored: data in the page and, where it holds scales, the scales: a reference to NVFP4's block scales, or a
        function that loads the scales of each token and head, as int32, into a layout.
      dense: where in the result to put what the data decodes to, one or two places of the data's shape.
      layout: the registers of all arrays of that shape.
      first_token: the first of its tokens in the program.
      token_step: from one token to the next.
    """

    stored: Sequence[Any]
    dense: Sequence[Dense]
    layout: Layout
    first_token: int = 0
    token_step: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Tokens and heads first."""
        return tuple(self.dense[0].shape)

    def load(self) -> list[jax.Array]:
        """What is stored; block scales in the registers of the blocks that they belong to."""
        data, *scales = self.stored
        of_rows = self.layout.reduce(len(self.shape) - 1)
        load_scales = [x if callable(x) else functools.partial(compat.load, x) for x in scales]
        return [compat.load(data, self.layout), *(load(of_rows) for load in load_scales)]

    def along(self, axis: int) -> Layout:
        """The layout of an array that has only this axis."""
        return self.layout.reduce(tuple(other for other in range(len(self.shape)) if other != axis))

    def broadcast(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """Broadcasts `x`, which has only these axes, to all axes of the piece."""
        return compat.layout_cast(lax.broadcast_in_dim(x, self.shape, axes), self.layout)

    def store(self, decoded: Sequence[jax.Array], num_valid: jax.Array, first_valid: Scalar = None) -> None:
        """Stores what was decoded, and zeros for the program's tokens from `num_valid` on, and before `first_valid`."""
        token = compat.layout_cast(lax.iota(jnp.int32, self.shape[0]), self.along(0))
        token = token * self.token_step + self.first_token
        is_valid = token < num_valid
        if first_valid is not None:
            is_valid &= token >= first_valid
        is_valid = self.broadcast(is_valid, (0,))
        for dense, rows in zip(self.dense, decoded, strict=True):
            self._store(dense, jnp.where(is_valid, rows, jnp.zeros_like(rows)))

    def store_zeros(self) -> None:
        """Stores zeros, for tokens past the end of a sequence or of a block that is not in the cache."""
        for dense in self.dense:
            self._store(dense, compat.layout_cast(jnp.zeros(self.shape, dense.dtype), self.layout))

    def _store(self, dense: Ref, rows: jax.Array) -> None:
        if isinstance(dense, tiles.Places):
            dense.store(rows, self.layout)
        else:
            compat.store(dense, rows)


class PageTokens(NamedTuple):
    """Tokens of a page.

    Attributes:
      page: the page that they are in.
      token: the first of them in the page.
      number: how many they are.
      num_valid: how many of them to read, at most; the others are zeros.
      first_valid: for keys and for values the first that is not zero, or None.
    """

    page: jax.Array
    token: jax.Array
    number: int
    num_valid: jax.Array
    first_valid: Sequence[jax.Array | None] = (None, None)


def decode_tokens(operands: Sequence[GatherOperand], tokens: PageTokens, spec: AttentionSpec, dtype: DType) -> None:
    """Stores a program's tokens of one page, as elements of `dtype`; reads nothing if all of them are zeros.

    `operands` are keys and values. Their `dense` are the places of these tokens alone; their pages are of `spec`.
    """
    pieces = decoded_pieces(operands, tokens, spec, dtype)

    @pl.when(tokens.num_valid > 0)
    def _() -> None:
        store_pieces(pieces)

    @pl.when(tokens.num_valid <= 0)
    def _() -> None:
        for each in pieces:
            each.piece.store_zeros()


class DecodedPiece(NamedTuple):
    """A piece, what decodes it, how many tokens of its page are read at most, and the first that is not zero."""

    piece: Piece
    decode: Callable[..., list[jax.Array]]
    num_valid: jax.Array
    first_valid: jax.Array | None


def store_pieces(pieces: Sequence[DecodedPiece]) -> None:
    """Decodes and stores pieces; loads as many as registers hold before it uses any."""
    for batch in itertools.batched(pieces, MAX_PIECES_LOADED):
        loaded = [each.piece.load() for each in batch]
        for (piece, decode, num_valid, first), stored in zip(batch, loaded, strict=True):
            piece.store(decode(stored), num_valid, first)


def decoded_pieces(
    operands: Sequence[GatherOperand], tokens: PageTokens, spec: AttentionSpec, dtype: DType
) -> list[DecodedPiece]:
    """The pieces of tokens of a page; takes what `decode_tokens` does."""
    page, token, num_tokens, num_valid, first_valid = tokens
    pieces = []
    for operand, first in zip(operands, first_valid, strict=False):
        codec, pages, scale, _, scale_pages, _ = operand
        data, *scales = pages.regions
        stored: list[Any] = [_tokens_of_page(pages, page, token, spec, num_tokens, data)]
        if isinstance(codec, RowCodec):
            source = (pages, scales[0]) if scale_pages is None else (scale_pages, scale_pages.regions[0])
            dims = *stored[0].shape[:2], *codec.blocks(stored[0].shape[2])
            stored = [stored[0].reshape(*dims) if len(dims) > 3 else stored[0]]
            stored.append(functools.partial(_load_word_scales, *source, page, token, dims[:-1]))
        else:
            stored += [_tokens_of_page(pages, page, token, spec, num_tokens, region) for region in scales]
        decode_scale = scale[0] if scale is not None and scale.shape == (1,) else scale
        pieces += [
            DecodedPiece(
                piece, functools.partial(codec.decode, scale=decode_scale, piece=piece, dtype=dtype), num_valid, first
            )
            for piece in _pieces(stored, operand)
        ]
    return pieces


def _tokens_of_page(
    pages: Pages, number: jax.Array, token: jax.Array, spec: AttentionSpec, num_tokens: int, region: PageRegion
) -> Ref:
    """A region's rows of `num_tokens` tokens of a page, from `token` on: `[num_tokens, num_kv_heads, row]`."""
    itemsize = jnp.dtype(pages.ref.dtype).itemsize
    heads_first = spec.num_kv_heads == 1 or (spec.block_size > 1 and region.head_stride > region.token_stride)
    strides, dims = (region.token_stride, region.head_stride), (spec.block_size, spec.num_kv_heads)
    (outer, inner), (length, width) = (strides[::-1], dims[::-1]) if heads_first else (strides, dims)
    base, outer, inner, row = (size // itemsize for size in (region.base, outer, inner, region.row_bytes))
    # The stride of rows is their own size or, in pages with K and V side by side, the size of both.
    start, offset = (base, 0) if inner == row else (0, base)
    outer = width * inner if length == 1 else outer
    page = pages.ref.at[number, pl.ds(start, length * outer)]
    if outer != width * inner:
        page = page.reshape(length, outer).at[:, pl.ds(0, width * inner)]
    page = page.reshape(length, width, inner)
    if heads_first:
        return page.at[:, pl.ds(token, num_tokens), pl.ds(offset, row)].transpose((1, 0, 2))
    return page.at[pl.ds(token, num_tokens), :, pl.ds(offset, row)]


def _load_word_scales(
    pages: Pages, region: PageRegion, number: jax.Array, token: jax.Array, shape: tuple[int, ...], layout: Layout
) -> jax.Array:
    """The scales, int32 `shape`, of tokens of a page from `token` on: of heads, or of the blocks of their rows."""
    strides = region.token_stride, region.head_stride, WORD_BYTES
    columns = compat.layout_cast(jnp.full(shape, region.base + token * region.token_stride), layout)
    for axis in range(len(shape)):
        index = compat.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), layout)
        columns += index * strides[axis]
    alignment = math.gcd(pages.alignment, region.base, region.token_stride, region.head_stride)
    return warpgroups.load_words(pages.ref, number, columns, alignment, layout)


def _pieces(stored: Sequence[Any], operand: GatherOperand) -> Iterator[Piece]:
    """The pieces of a program's keys or values, given its tokens in each region."""
    pages, dense = operand.pages, operand.dense
    max_vector = _max_vector(stored[0], operand)

    def piece(stored: Sequence[Any], dense: Dense, *tokens: int) -> Piece:
        shape = stored[0].shape
        if len(dense.shape) == len(shape):
            return Piece(stored, [dense], lane_layout(shape, max_vector), *tokens)
        even_and_odd = [dense.at[(*(slice(None),) * len(shape), i)] for i in range(2)]
        return Piece(stored, even_and_odd, lane_layout(shape, max_vector=1), *tokens)  # neither is contiguous

    if len(stored) == 1 or callable(stored[1]):
        yield piece(stored, dense)
        return
    data, scales = stored
    num_tokens, _, num_scales = scales.shape
    data = data.reshape(*scales.shape, data.shape[-1] // num_scales)
    if not pages.regions[1].swizzled:
        yield piece((data, scales), dense)
        return
    # A swizzled row holds scales of four tokens. Those of one token lie four bytes apart, a quarter of them in each of
    # four rows; or, where a quarter is not a whole number of scales, they are taken one by one.
    groups = num_tokens // SWIZZLE_TOKENS
    data, dense, scales = (x.reshape(groups, SWIZZLE_TOKENS, *x.shape[1:]) for x in (data, dense, scales))
    in_quarters = num_scales % SWIZZLE_TOKENS == 0
    run = num_scales // SWIZZLE_TOKENS if in_quarters else 1
    for token, first in itertools.product(range(SWIZZLE_TOKENS), range(0, num_scales, run)):
        row, column = swizzled_position(token, first, num_scales)
        rows = scales.at[:, row]
        if in_quarters:
            run_scales = rows.reshape(*rows.shape[:2], run, SWIZZLE_TOKENS).at[:, :, :, column]
        else:
            run_scales = rows.at[:, :, pl.ds(column, run)]
        run_data, run_dense = (x.at[:, token, :, pl.ds(first, run)] for x in (data, dense))
        yield piece((run_data, run_scales), run_dense, token, SWIZZLE_TOKENS)


def _max_vector(stored: Ref, operand: GatherOperand) -> int:
    """Maximum number of elements of a vector load and store: 16 bytes, where everything is aligned to them."""
    itemsize, dense_itemsize = (jnp.dtype(x.dtype).itemsize for x in (stored, operand.dense))
    region, pages = operand.pages.regions[0], operand.pages
    alignment = math.gcd(MAX_VECTOR_BYTES, pages.alignment, region.base, region.token_stride, region.head_stride)
    most = min(MAX_VECTOR_BYTES // itemsize, math.gcd(MAX_VECTOR_BYTES, operand.alignment) // dense_itemsize)
    return max(1, min(alignment // itemsize, most))
