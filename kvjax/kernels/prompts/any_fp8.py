"""The tiles of products in fp8, for any number of prompts, tokens and blocks.

Two kernels run before the prompt kernel: one finds the divisors of NVFP4's elements, and one converts pages to tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat, lanes, tiles
from kvjax.kernels.aliases import ABSENT, Ref, Scalar
from kvjax.kernels.launchable import (
    ANY_LENGTH,
    PAGES,
    AnyCount,
    Argument,
    Number,
    PageMemory,
    Pages,
    page_arguments,
    with_origin,
)
from kvjax.kernels.page_tokens import PageTokens
from kvjax.kernels.prompts import fp8
from kvjax.kernels.prompts.fp8_gather import Neighbours, Part, load_scale, store_chunk
from kvjax.kernels.prompts.lot import COUNTS, FOUND, NUMBERS, LotTokens, tile_arguments
from kvjax.kernels.prompts.problem import TOKENS
from kvjax.kernels.registers import THREADS
from kvjax.spec import AttentionSpec

_CHUNK = fp8.BLOCK_TOKENS
"""Tokens that are in one page, and whose values are neighbours in a row."""


@functools.cache
@with_origin
def any_units(spec: AttentionSpec, pages: tuple[PageMemory, PageMemory]) -> AnyCount:
    """Finds, for each prompt and head, the largest block scales of the keys and values that its rows see.

    The arguments are the block table, the schedule's results, the keys' and the values' pages, and the result: `units`
    of `TiledArrays`, zeros before. The amount is the number of the tiles' tokens.
    """
    arguments = (*FOUND, *page_arguments(spec, pages), Argument("units", NUMBERS))

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Ref]) -> None:
        own = LotTokens.of_program(spec, counts, arrays, TOKENS)
        find = functools.partial(_find_largest, spec, pages, own)
        pl.when(own.is_prompt)(lambda: pl.when(own.is_stored)(find))

    kernel = functools.partial(compat.program_kernel, "units_fp8", grid=ANY_LENGTH)
    return AnyCount(body, kernel, COUNTS, arguments, ("units",), lambda num_tokens: num_tokens // TOKENS)


@functools.cache
@with_origin
def any_fp8_gather(spec: AttentionSpec, pages: tuple[PageMemory, PageMemory]) -> AnyCount:
    """The gather of a lot's pages to tiles of e4m3, values transposed; scales of a layer or head are not applied.

    The arguments are the block table, the schedule's results, the keys' and the values' pages, the units if there is
    NVFP4, and the results: tiles, in words, and the bias. The rest is as in `any_prompts.any_gather`.
    """
    has_units = any(map(fp8.takes_unit, spec.dtype.parts))
    arguments = (
        *FOUND,
        *page_arguments(spec, pages),
        *([Argument("units", NUMBERS)] if has_units else []),
        *(Argument(name, NUMBERS) for name in ("keys", "values")),
        tile_arguments(spec, fp8.DTYPE)[-1],
    )

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Ref]) -> None:
        own = LotTokens.of_program(spec, counts, arrays, _CHUNK)
        gather = functools.partial(_gather, spec, pages, own)
        pl.when(own.is_prompt)(lambda: pl.when(own.is_stored)(gather))

    kernel = functools.partial(compat.program_kernel, "gather_prompts_fp8", grid=ANY_LENGTH)
    writes = tuple(argument.name for argument in arguments[-3:])
    return AnyCount(body, kernel, COUNTS, arguments, writes, lambda num_tokens: num_tokens // _CHUNK)


def _neighbours(own: LotTokens, of_page: PageTokens, part: int) -> Neighbours:
    """Tokens of a page, or of another page where none is to be read."""
    page = jnp.clip(of_page.page, 0, own.counts["last_block"])
    first = of_page.first_valid[part]
    return Neighbours(page, of_page.token, jnp.int32(0) if first is None else first, of_page.num_valid)


def _first_unit(spec: AttentionSpec, own: LotTokens, part: int) -> Scalar:
    return (own.number * 2 + part) * spec.num_kv_heads


def _find_largest(spec: AttentionSpec, pages: tuple[PageMemory, PageMemory], own: LotTokens) -> None:
    """Each thread takes one block of a head, for all tokens."""
    for part, (dtype, memory, name) in enumerate(zip(spec.dtype.parts, pages, PAGES, strict=True)):
        if fp8.takes_unit(dtype):
            per_row = spec.head_sizes[part] // (dtype.info.elements_per_scale or 1)
            _find_largest_of(spec, part, memory.pages(own.arrays[name]), own, per_row)


def _find_largest_of(spec: AttentionSpec, part: int, pages: Pages, own: LotTokens, per_row: int) -> None:
    units, first_unit = own.arrays["units"], _first_unit(spec, own, part)
    count = spec.num_kv_heads * per_row

    def take(i: jax.Array, _: None) -> None:
        block = lanes.thread_index() + i * THREADS
        is_block = block < count
        block = jnp.minimum(block, count - 1)
        head, in_row = lax.div(block, jnp.int32(per_row)), lax.rem(block, jnp.int32(per_row))

        def look(j: jax.Array, largest: jax.Array) -> jax.Array:
            chunk = _neighbours(own, own.in_page(j * _CHUNK, _CHUNK), 1)  # units of both parts cover the same tokens
            loaded = [load_scale(pages, chunk.page, chunk.token + token, head, in_row) for token in range(_CHUNK)]
            for token, bits in enumerate(loaded):
                is_seen = (chunk.first_valid <= token) & (chunk.num_valid > token)
                bits = jnp.minimum(lanes.bits(bits, jnp.int32) & 0x7F, 0x7E)  # NaN is 0x7F
                largest = jnp.maximum(largest, jnp.where(is_seen, bits, 0))
            return largest

        largest = lax.fori_loop(0, own.tokens // _CHUNK, look, lanes.splat(0, jnp.int32))
        lanes.max_global(units, compat.layout_cast(head + first_unit, lanes.LAYOUT), largest, is_block)

    lax.fori_loop(0, -(-count // THREADS), take, None)


def _gather(spec: AttentionSpec, pages: tuple[PageMemory, PageMemory], own: LotTokens) -> None:
    of_page, arrays, heads = own.in_page(), own.arrays, spec.num_kv_heads
    own.store_bias(of_page.num_valid)
    named = zip(spec.dtype.parts, pages, PAGES, ("keys", "values"), spec.head_sizes, strict=True)
    for i, (dtype, memory, name, dense, size) in enumerate(named):
        inverse = functools.partial(_load_inverse, arrays.get("units", ABSENT), _first_unit(spec, own, i))
        part = Part(dtype, memory.pages(arrays[name]), size, heads, inverse)
        place = functools.partial(_store_tiles, arrays[dense], own, (heads, size), bool(i))
        store_chunk(part, _neighbours(own, of_page, i), bool(i), place)


def _load_inverse(units: Ref, first: Scalar, head: jax.Array) -> jax.Array:
    """The inverse of `fp8.unit_above`, a power of two from 2**-3 to 2**12, as two float16."""
    bits = lanes.load_global(units, compat.layout_cast(head + first, lanes.LAYOUT))
    exponent = 15 + 12 - lanes.bits(bits >> jnp.uint32(3), jnp.int32)  # biased
    return lanes.bits(exponent * (0x10001 << 10), jnp.uint32)


def _store_tiles(ref: Ref, own: LotTokens, row_of: tuple[int, int], transposed: bool, *of_words: Scalar) -> None:
    """Stores words of a head and dim; see `fp8_gather.Store`."""
    (heads, size), (head, dim, token, words, condition) = row_of, of_words
    num_tokens = jnp.int32(own.counts["num_tokens"])
    row = (own.prompt * heads + head) * num_tokens + own.position
    if transposed:
        row, column, columns = (row >> TOKENS.bit_length() - 1) * size + dim, own.position & TOKENS - 1, TOKENS
    else:
        row, column, columns = row + token, dim, size
    index = tiles.word_of(row, column, columns, fp8.DTYPE.itemsize)
    lanes.store_global_words(ref, compat.layout_cast(index, lanes.LAYOUT), words, condition)
