"""The gather kernel: pages of whole sequences as dense, dequantized keys and values.

A program takes `tokens` neighbouring tokens of one block of one sequence. It issues all loads of their rows before it
uses any, decodes in registers, and stores the rows, which are contiguous in the result. Tokens past the sequence's
length are zeros, and so are tokens of entries of the block table that are no block of the cache; programs with only
such tokens read nothing.

Every array in registers has the axes of the result, tokens first, whatever the order in the page, so that each thread
stores what it loaded. An NVFP4 byte holds two elements. For 16-bit results they become one uint32 word, which makes
decoding elementwise as for other formats; for float32 the two elements are stored separately.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat, tiles, warpgroups
from kvjax.kernels.aliases import DType, Layout, Ref, Scalar
from kvjax.kernels.codecs import Codec, codecs_of
from kvjax.kernels.memory import (
    ANY_LENGTH,
    PAGES,
    AnyCount,
    Argument,
    Number,
    PageMemory,
    Pages,
    page_dtype,
    scale_arguments,
    scales_of,
    with_origin,
)
from kvjax.kernels.registers import MAX_VECTOR_BYTES, lane_layout
from kvjax.pages import SWIZZLE_TOKENS, PageRegion, swizzled_position
from kvjax.spec import AttentionSpec

PROGRAM_BYTES = 32 << 10
"""Bytes that a program stores: 16 vectors per thread, enough loads to hide their latency, in enough registers."""

MAX_PIECES_LOADED = 9
"""Maximum number of pieces in registers at once. Swizzled values have many: this is the keys and half of the values
where those are quarters of a row. More do not fit where odd numbers of heads leave threads idle."""


@dataclasses.dataclass(frozen=True)
class GatherConfig:
    """How the gather is launched.

    Attributes:
      tokens: tokens per program; divides the block size, and is a multiple of 4 where V scales are swizzled.
    """

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"{self.tokens=} must be positive")

    @classmethod
    def choose(cls, spec: AttentionSpec, dtype: DType) -> GatherConfig:
        """As many tokens as `PROGRAM_BYTES` hold, rounded down to a power of two, which threads divide evenly."""
        token_bytes = spec.num_kv_heads * (spec.head_size + spec.head_size_v) * np.dtype(dtype).itemsize
        least = SWIZZLE_TOKENS if spec.is_swizzled else 1
        most = max(least, PROGRAM_BYTES // token_bytes)
        return cls(math.gcd(spec.block_size, 1 << most.bit_length() - 1))


class KVOperand(NamedTuple):
    """The keys or the values of a gather.

    Attributes:
      codec: how they are decoded.
      pages: the pages to read.
      scale: reference to their decode scale, or a scalar; None where each token and head has a scale.
      dense: the result, `ref[tokens, heads, ...]`.
      scale_pages: the pages of the scales of each token and head, where those are not in `pages`.
    """

    codec: Codec
    pages: Pages
    scale: Scalar
    dense: Ref
    scale_pages: Pages | None = None


class Table(NamedTuple):
    """The block table: each sequence has `max_blocks` entries of `ref`, `stride` after those of the one before.

    In a cache of several layers, whose pages lie next to each other in a block, `layer` is the layer to read.
    """

    ref: Ref
    max_blocks: Number
    stride: Number
    last_block: Number
    layer: Number = 0
    num_layers: int = 1

    def page(self, seq: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The page of a sequence's block, and whether it is in the cache; entries may be any number."""
        entry = self.ref[seq * self.stride + index]
        is_block = (entry >= 0) & (entry <= self.last_block)
        if isinstance(self.layer, int):
            return entry, is_block
        is_layer = (self.layer >= 0) & (self.layer < self.num_layers)
        return entry * jnp.int32(self.num_layers) + self.layer, is_block & is_layer


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens, or some of their rows, that are decoded together.

    Attributes:
      stored: data in the page and, where it holds scales, those: a reference of NVFP4's block scales, or what loads
        those of each token and head, as int32, into a layout.
      dense: where in the result to put what the data decodes to, one or two places of the data's shape.
      layout: the registers of all arrays of that shape.
      first_token: the first of its tokens in the program.
      token_step: from one token to the next.
    """

    stored: Sequence[Any]
    dense: Sequence[Any]
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
        """The layout of an array that has this one axis."""
        return self.layout.reduce(tuple(other for other in range(len(self.shape)) if other != axis))

    def broadcast(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """`x`, which has these axes, along all of them."""
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


class GatherArrays(NamedTuple):
    """The sequences to gather, and how they are stored.

    Attributes:
      block_table: int32 `[num_seqs, max_blocks]`.
      seq_lens: int32 `[num_seqs]`.
      k_scale: float32 `[1]` or `[num_kv_heads]`.
      v_scale: likewise.
      layer: int32 scalar, the layer to read, as in the write; None for pages of one layer.
    """

    block_table: jax.Array
    seq_lens: jax.Array
    k_scale: jax.Array
    v_scale: jax.Array
    layer: jax.Array | None = None


def gather(
    pages: jax.Array,
    arrays: GatherArrays,
    spec: AttentionSpec,
    dtype: DType,
    config: GatherConfig,
    num_layers: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values `[num_seqs, max_blocks * block_size, num_kv_heads, head_size]` (`head_size_v`), of `dtype`.

    `pages` are flat, `[num_blocks, page_elements]` of the storage dtype; of `num_layers` layers
    `[num_blocks * num_layers, page_elements]`.
    """
    block_table, seq_lens, k_scale, v_scale, layer = arrays
    num_seqs, max_blocks = block_table.shape
    num_entries, last_block = num_seqs * max_blocks, pages.shape[0] // num_layers - 1
    layers, codecs = [] if layer is None else [layer.reshape(1)], codecs_of(spec)

    def body(block_table: Any, seq_lens: Ref, k_scale: Ref, v_scale: Ref, pages: Ref, *others: Ref) -> None:
        dense = others[len(layers) :]
        operands = [
            KVOperand(codec, Pages(pages, regions, spec.page_size_bytes), scale, ref)
            for codec, regions, scale, ref in zip(codecs, spec.regions, (k_scale, v_scale), dense, strict=True)
        ]
        table = Table(block_table, max_blocks, max_blocks, last_block)
        if layers:
            table = table._replace(layer=others[0][0], num_layers=num_layers)
        _gather_tokens(table, seq_lens, operands, spec, config, dtype)

    outputs = _dense_types(spec, num_entries * spec.block_size, dtype)
    kernel = _kernel(body, num_entries * (spec.block_size // config.tokens), out_type=outputs)
    results = kernel(block_table.reshape(-1), seq_lens, k_scale, v_scale, pages, *layers)
    dims = num_seqs, max_blocks * spec.block_size, spec.num_kv_heads
    key, value = (
        (x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)).reshape(*dims, size)
        for x, size in zip(results, spec.head_sizes, strict=True)
    )
    return key, value


@with_origin
def any_count(
    spec: AttentionSpec,
    pages: tuple[PageMemory, PageMemory],
    dtype: DType,
    scale_sizes: tuple[int, int],
    scale_pages: tuple[PageMemory, PageMemory] | None = None,
) -> AnyCount:
    """The gather from caller-owned memory, given for keys and for values.

    The arguments are the block table and the lengths, int32, k_scale, v_scale, the keys' and the values' pages, and the
    dense keys and values. Where each token and head has a scale, k_scale and v_scale are the memory of these,
    `scale_pages`, as in the write. `table_stride` counts the entries from a sequence's first to that of the next.

    Raises:
      UnsupportedError: no kernel decodes the dtype.
    """
    codecs = codecs_of(spec)
    config = GatherConfig.choose(spec, dtype)
    indices = jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)
    dense_names = "key", "value"

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Any]) -> None:
        scales, of_tokens = scales_of(arrays, scale_pages)
        operands = [
            KVOperand(codec, memory.pages(arrays[name]), scale, arrays[dense_name], of_token)
            for codec, memory, name, scale, dense_name, of_token in zip(
                codecs, pages, PAGES, scales, dense_names, of_tokens, strict=True
            )
        ]
        table = Table(arrays["block_table"], counts["max_blocks"], counts["table_stride"], counts["last_block"])
        _gather_tokens(table, arrays["seq_lens"], operands, spec, config, dtype)

    return AnyCount(
        body,
        functools.partial(_kernel, grid=ANY_LENGTH),
        ("max_blocks", "table_stride", "last_block"),
        (
            Argument("block_table", indices),
            Argument("seq_lens", indices),
            *scale_arguments(spec, scale_sizes, scale_pages),
            *(memory.argument(name, page_dtype(spec)) for name, memory in zip(PAGES, pages, strict=True)),
            # The body assumes that results, which are new arrays, are aligned as JAX's are.
            *(
                Argument(name, dense)
                for name, dense in zip(dense_names, _dense_types(spec, ANY_LENGTH, dtype), strict=True)
            ),
        ),
        writes=dense_names,
        num_programs=lambda num_entries: num_entries * (spec.block_size // config.tokens),
    )


_kernel = functools.partial(compat.program_kernel, "gather_kv")


def _dense_types(spec: AttentionSpec, num_tokens: int, dtype: DType) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The kernel's results for keys and for values."""
    dims = num_tokens, spec.num_kv_heads
    return tuple(
        codec.dense_type(dims, size, dtype) for codec, size in zip(codecs_of(spec), spec.head_sizes, strict=True)
    )


def _gather_tokens(
    table: Table,
    seq_lens: Ref,
    operands: Sequence[KVOperand],
    spec: AttentionSpec,
    config: GatherConfig,
    dtype: DType,
) -> None:
    """The body of the kernel."""
    chunks_per_block = spec.block_size // config.tokens
    seq, chunk = _divmod(lax.axis_index("program"), table.max_blocks * chunks_per_block)
    index, part = _divmod(chunk, chunks_per_block)
    position = chunk * config.tokens
    page, is_page = table.page(seq, index)
    num_valid = jnp.where(is_page, jnp.maximum(seq_lens[seq], 0) - position, 0)
    first = seq * (table.max_blocks * spec.block_size) + position
    operands = [each._replace(dense=each.dense.at[pl.ds(first, config.tokens)]) for each in operands]
    decode_tokens(operands, PageTokens(page, part * config.tokens, config.tokens, num_valid), spec, dtype)


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
    first_valid: Sequence[Any] = (None, None)


def decode_tokens(operands: Sequence[KVOperand], tokens: PageTokens, spec: AttentionSpec, dtype: DType) -> None:
    """Stores a program's tokens, as elements of `dtype`.

    `operands` are keys and values, whose `dense` are the places of these tokens alone; the pages are those of a spec.
    """
    page, token, num_tokens, num_valid, first_valid = tokens
    pieces: list[tuple[Piece, Callable[..., list[jax.Array]], Any]] = []
    for (codec, pages, scale, dense, scale_pages), first in zip(operands, first_valid, strict=True):
        data, *scales = pages.regions
        stored = [_tokens_of_page(pages, page, token, spec, num_tokens, data)]
        if spec.dtype.is_per_token_head:
            source = (pages, scales[0]) if scale_pages is None else (scale_pages, scale_pages.regions[0])
            stored.append(functools.partial(_load_token_scales, *source, page, token, spec, num_tokens))
        else:
            stored += [_tokens_of_page(pages, page, token, spec, num_tokens, region) for region in scales]
        decode_scale = scale[0] if scale is not None and scale.shape == (1,) else scale
        pieces += [
            (piece, functools.partial(codec.decode, scale=decode_scale, piece=piece, dtype=dtype), first)
            for piece in _pieces(stored, dense, pages)
        ]

    @pl.when(num_valid > 0)
    def _() -> None:
        for batch in itertools.batched(pieces, MAX_PIECES_LOADED):
            loaded = [piece.load() for piece, _, _ in batch]
            for (piece, decode, first), stored in zip(batch, loaded, strict=True):
                piece.store(decode(stored), num_valid, first)

    @pl.when(num_valid <= 0)
    def _() -> None:
        for piece, _, _ in pieces:
            piece.store_zeros()


def _divmod(x: jax.Array, divisor: Number) -> tuple[jax.Array, jax.Array]:
    divisor = jnp.int32(divisor)
    return lax.div(x, divisor), lax.rem(x, divisor)


def _tokens_of_page(
    pages: Pages, number: jax.Array, token: jax.Array, spec: AttentionSpec, num_tokens: int, region: PageRegion
) -> Any:
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


def _load_token_scales(
    pages: Pages,
    region: PageRegion,
    number: jax.Array,
    token: jax.Array,
    spec: AttentionSpec,
    num_tokens: int,
    layout: Layout,
) -> jax.Array:
    """The scales of `num_tokens` tokens of a page, from `token` on, as int32 `[num_tokens, num_kv_heads]`."""
    shape, start = (num_tokens, spec.num_kv_heads), region.base + token * region.token_stride
    of_token, of_head = (compat.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), layout) for axis in (0, 1))
    columns = of_token * region.token_stride + of_head * region.head_stride + start
    alignment = math.gcd(pages.alignment, region.base, region.token_stride, region.head_stride)
    return warpgroups.load_words(pages.ref, number, columns, alignment, layout)


def _pieces(stored: Sequence[Any], dense: Any, pages: Pages) -> Iterator[Piece]:
    """The pieces of a program's keys or values, given its tokens in each region and in the result."""
    max_vector = _max_vector(stored[0], dense, pages)

    def piece(stored: Sequence[Any], dense: Any, *tokens: int) -> Piece:
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
    # four rows; or, where a quarter is no whole number of scales, they are taken one by one.
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


def _max_vector(stored: Any, dense: Any, pages: Pages) -> int:
    """Maximum number of elements of a vector load and store: 16 bytes, where everything is aligned to them."""
    itemsizes = [jnp.dtype(x.dtype).itemsize for x in (stored, dense)]
    region = pages.regions[0]
    alignment = math.gcd(MAX_VECTOR_BYTES, pages.alignment, region.base, region.token_stride, region.head_stride)
    return max(1, min(alignment // itemsizes[0], MAX_VECTOR_BYTES // max(itemsizes)))
