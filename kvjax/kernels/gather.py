"""The gather kernel: pages of whole sequences as dense, dequantized keys and values.

A program takes `tokens` neighbouring tokens of one block of one sequence. It loads what the page holds of them before
it needs any of it, decodes in registers, and stores the tokens' rows, which are neighbours in the result; tokens
past the sequence's length are zeros. What is past the length altogether is not read.

Every array in registers has the axes of the result, tokens first, whatever the order in the page: a thread loads what
it stores. An NVFP4 byte holds two elements: a result of 16 bits an element is then one of words that hold two, and a
byte in, a word out is as elementwise as the other formats. Of float32 a byte gives two, which are stored one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVQuantMode
from kvjax.kernels import compat, decoding
from kvjax.kernels.lanes import lane_layout
from kvjax.kernels.registers import MAX_VECTOR_BYTES
from kvjax.layouts import CacheLayout
from kvjax.pages import SWIZZLE_TOKENS, PageRegion, swizzled_position
from kvjax.spec import AttentionSpec

BLOCK_BYTES = NVFP4_BLOCK_SIZE // 2
"""Bytes of one NVFP4 block's codes, and words of two elements that they decode to."""

PROGRAM_BYTES = 32 << 10
"""What a program stores: 16 vectors a thread, loads enough to be waiting for, and registers enough to hold them."""

MAX_PIECES_LOADED = 9
"""Of the many that swizzled values are taken in: the keys and half of the values, where those come in quarters of a
row. More would not fit into the registers where odd numbers of heads leave threads idle."""


@dataclasses.dataclass(frozen=True)
class GatherConfig:
    """How the gather is launched.

    Attributes:
      tokens: tokens a program takes; divides the block size, and is a multiple of 4 where V scales are swizzled.
    """

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"{self.tokens=} must be positive")

    @classmethod
    def choose(cls, spec: AttentionSpec, dtype: np.dtype[Any]) -> GatherConfig:
        """As many tokens as `PROGRAM_BYTES` hold, a power of two, for threads divide those."""
        token_bytes = spec.num_kv_heads * (spec.head_size + spec.head_size_v) * np.dtype(dtype).itemsize
        least = SWIZZLE_TOKENS if spec.is_swizzled else 1
        most = max(least, PROGRAM_BYTES // token_bytes)
        return cls(math.gcd(spec.block_size, 1 << most.bit_length() - 1))


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens, or some of their rows, that are decoded together.

    Attributes:
      stored: data and, for NVFP4, block scales, in the page.
      dense: where in the result to put what the data decodes to, one or two places of the data's shape.
      layout: the registers of all arrays of that shape.
      first_token: the first of its tokens in the program.
      token_step: from one token to the next.
    """

    stored: Sequence[Any]
    dense: Sequence[Any]
    layout: Any
    first_token: int = 0
    token_step: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Tokens and heads first."""
        return tuple(self.dense[0].shape)

    def load(self) -> list[jax.Array]:
        """What is stored; block scales in the registers of the blocks that they belong to."""
        data, *block_scales = self.stored
        last = len(self.shape) - 1
        return [compat.load(data, self.layout), *(compat.load(x, self.layout.reduce(last)) for x in block_scales)]

    def along(self, axis: int) -> Any:
        """The layout of an array that has this one axis."""
        return self.layout.reduce(tuple(other for other in range(len(self.shape)) if other != axis))

    def spread(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """`x`, which has these axes, along all of them."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, axes), self.layout)

    def store(self, decoded: Sequence[jax.Array], num_valid: jax.Array) -> None:
        """Stores what was decoded, but zeros for the program's tokens from `num_valid` on."""
        index = plgpu.layout_cast(lax.iota(jnp.int32, self.shape[0]), self.along(0))
        is_valid = self.spread(index * self.token_step + self.first_token < num_valid, (0,))
        for dense, rows in zip(self.dense, decoded, strict=True):
            compat.store(dense, jnp.where(is_valid, rows, jnp.zeros_like(rows)))

    def store_zeros(self) -> None:
        """Stores what there is past the end of a sequence."""
        for dense in self.dense:
            compat.store(dense, plgpu.layout_cast(jnp.zeros(self.shape, dense.dtype), self.layout))


def gather(
    pages: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    spec: AttentionSpec,
    dtype: np.dtype[Any],
    config: GatherConfig,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values `[num_seqs, max_blocks * block_size, num_kv_heads, head_size]` (`head_size_v`), of `dtype`.

    `pages` are flat, `[num_blocks, page_elements]` of the storage dtype; `block_table` `[num_seqs, max_blocks]` and
    `seq_lens` are int32; scales are float32, `[1]` or `[num_kv_heads]`.
    """
    num_seqs, max_blocks = block_table.shape
    dims = num_seqs, max_blocks * spec.block_size, spec.num_kv_heads
    sizes = spec.head_size, spec.head_size_v
    body = functools.partial(_body, spec=spec, config=config, dtype=dtype)
    body.__name__ = "gather_kv"  # type: ignore[attr-defined]  # what profilers will call it
    kernel = plgpu.kernel(
        body,
        out_type=tuple(_result_type(dims, size, spec, dtype) for size in sizes),
        grid=(num_seqs * max_blocks * (spec.block_size // config.tokens),),
        grid_names=("program",),
        compiler_params=compat.COMPILER_PARAMS,
    )
    results = kernel(block_table, seq_lens, k_scale, v_scale, pages)
    key, value = (
        (x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)).reshape(*dims, size)
        for x, size in zip(results, sizes, strict=True)
    )
    return key, value


def _result_type(dims: tuple[int, ...], size: int, spec: AttentionSpec, dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
    """What the kernel makes of keys or values; of NVFP4 a word, or two float32, for each byte of a block."""
    if spec.quant_mode is not KVQuantMode.NVFP4:
        return jax.ShapeDtypeStruct((*dims, size), dtype)
    blocks = (*dims, size // NVFP4_BLOCK_SIZE, BLOCK_BYTES)
    if np.dtype(dtype).itemsize == 4:
        return jax.ShapeDtypeStruct((*blocks, 2), dtype)
    return jax.ShapeDtypeStruct(blocks, jnp.uint32)


def _body(
    block_table: Any,
    seq_lens: Any,
    k_scale: Any,
    v_scale: Any,
    pages: Any,
    key: Any,
    value: Any,
    *,
    spec: AttentionSpec,
    config: GatherConfig,
    dtype: np.dtype[Any],
) -> None:
    program = lax.axis_index("program")
    chunks_a_block = spec.block_size // config.tokens
    chunks_a_seq = block_table.shape[1] * chunks_a_block
    seq, chunk = _divmod(program, chunks_a_seq)
    index, part = _divmod(chunk, chunks_a_block)
    position = chunk * config.tokens
    num_valid = jnp.maximum(seq_lens[seq], 0) - position
    block = jnp.minimum(jnp.maximum(block_table[seq, index], 0), pages.shape[0] - 1)
    token = part * config.tokens

    pieces: list[tuple[Piece, Any]] = []
    for dense, regions, scale in ((key, spec.regions.k, k_scale), (value, spec.regions.v, v_scale)):
        stored = [_tokens_of_page(pages, block, token, spec, config.tokens, region) for region in regions]
        dense_tokens = dense.at[seq, pl.ds(position, config.tokens)]
        decode_scale = scale[0] if scale.shape[0] == 1 else scale
        pieces += [(piece, decode_scale) for piece in _pieces(stored, dense_tokens, spec, regions)]

    @pl.when(num_valid > 0)
    def _() -> None:
        for batch in itertools.batched(pieces, MAX_PIECES_LOADED):
            loaded = [piece.load() for piece, _ in batch]
            for (piece, scale), stored in zip(batch, loaded, strict=True):
                piece.store(_decode(stored, scale, piece, spec, dtype), num_valid)

    @pl.when(num_valid <= 0)
    def _() -> None:
        for piece, _ in pieces:
            piece.store_zeros()


def _divmod(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(x, jnp.int32(divisor)), lax.rem(x, jnp.int32(divisor))


def _tokens_of_page(
    pages: Any, block: jax.Array, token: jax.Array, spec: AttentionSpec, num_tokens: int, region: PageRegion
) -> Any:
    """A region's rows of so many tokens of a page, from `token` on: `[num_tokens, num_kv_heads, row]`."""
    itemsize = jnp.dtype(pages.dtype).itemsize
    heads_first = spec.layout is CacheLayout.HND
    inner = region.token_stride if heads_first else region.head_stride
    base, stride, row = (size // itemsize for size in (region.base, inner, region.row_bytes))
    # Rows lie a stride apart: their own size, or in a page that holds K and V side by side the size of both.
    start, offset = (base, 0) if stride == row else (0, base)
    dims = (spec.num_kv_heads, spec.block_size) if heads_first else (spec.block_size, spec.num_kv_heads)
    page = pages.at[block, pl.ds(start, dims[0] * dims[1] * stride)].reshape(*dims, stride)
    if heads_first:
        return page.at[:, pl.ds(token, num_tokens), pl.ds(offset, row)].transpose((1, 0, 2))
    return page.at[pl.ds(token, num_tokens), :, pl.ds(offset, row)]


def _pieces(stored: Sequence[Any], dense: Any, spec: AttentionSpec, regions: Sequence[PageRegion]) -> Iterator[Piece]:
    """What a program does of keys or values, given its tokens of each region and their place in the result."""
    widest = _widest_vector(stored[0], dense, spec, regions[0])

    def piece(stored: Sequence[Any], dense: Any, *tokens: int) -> Piece:
        shape = stored[0].shape
        if len(dense.shape) == len(shape):
            return Piece(stored, [dense], lane_layout(shape, widest), *tokens)
        halves = [dense.at[(*(slice(None),) * len(shape), half)] for half in range(2)]
        return Piece(stored, halves, lane_layout(shape, widest=1), *tokens)  # neither half has neighbours

    if len(stored) == 1:
        yield piece(stored, dense)
        return
    data, scales = stored
    num_tokens, _, num_scales = scales.shape
    data = data.reshape(*scales.shape, BLOCK_BYTES)
    if not regions[1].swizzled:
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


def _widest_vector(stored: Any, dense: Any, spec: AttentionSpec, region: PageRegion) -> int:
    """The most neighbours that a thread may load and store at once: 16 bytes, where everything is aligned to them."""
    itemsizes = [jnp.dtype(x.dtype).itemsize for x in (stored, dense)]
    alignment = math.gcd(MAX_VECTOR_BYTES, spec.page_size_bytes, region.base, region.token_stride, region.head_stride)
    return max(1, min(alignment // itemsizes[0], MAX_VECTOR_BYTES // max(itemsizes)))


def _decode(
    stored: Sequence[jax.Array], scale: Any, piece: Piece, spec: AttentionSpec, dtype: np.dtype[Any]
) -> list[jax.Array]:
    match spec.quant_mode:
        case KVQuantMode.NVFP4:
            data, block_scales = stored
            spread = functools.partial(piece.spread, axes=tuple(range(data.ndim - 1)))
            return decoding.decode_nvfp4(data, block_scales, scale, dtype, spread)
        case KVQuantMode.FP8_PER_TENSOR:
            factor = piece.spread(compat.load(scale, piece.along(1)), (1,)) if scale.shape else scale
            return [decoding.decode_fp8(stored[0], factor, spec.dtype, dtype)]
        case _:
            return [decoding.cast(stored[0], dtype)]
