"""The gather of any tokens, one for each row of a result, as dense, dequantized keys and values.

Such tokens can be ranges of sequences, like the latents (MLA) that a chunked prompt attends to. A program takes `ROWS`
neighbouring rows. It issues all loads of their tokens before it uses any, decodes in registers, and stores the rows.
Most tokens are neighbours in a page and are loaded together, by wider accesses; the others are loaded one by one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.errors import UnsupportedError
from kvjax.kernels import compat
from kvjax.kernels.aliases import DType, Ref
from kvjax.kernels.codecs import codecs_of, why_not_pages
from kvjax.kernels.gather import dense_types
from kvjax.kernels.launchable import (
    ANY_LENGTH,
    PAGES,
    SCALES,
    AnyCount,
    Argument,
    Number,
    PageMemory,
    RowMemory,
    array_memory,
    page_arguments,
    scale_arguments,
    why_not_elements,
    with_origin,
)
from kvjax.kernels.page_tokens import DecodedPiece, GatherOperand, PageTokens, decoded_pieces, store_pieces
from kvjax.kernels.target import Target
from kvjax.spec import AttentionSpec

ROWS = 4
"""Rows of a program. Where they are loaded one by one, each thread has eight loads in flight, half of rope keys."""


@with_origin
def any_rows(spec: AttentionSpec, pages: tuple[PageMemory, ...], dense: tuple[RowMemory, ...]) -> AnyCount:
    """The gather of any number of rows; `pages` and `dense` are of latents and, where there are any, of rope keys.

    The arguments are the page of each row's token, negative for a row of zeros, and the token's index there, both
    int32, k_scale, v_scale, the pages, and the rows to fill.

    Raises:
      UnsupportedError: no kernel decodes the dtype, or reads elements at such addresses.
    """
    if reason := why_not_elements(spec, pages):
        raise UnsupportedError(f"gather_mla: {reason}")
    codecs, dtype = codecs_of(spec), dense[0].dtype
    indices = jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)
    dense_names = ("key", "value")[: len(codecs)]

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Any]) -> None:
        named = zip(codecs, pages, dense, PAGES, SCALES, dense_names, strict=False)
        operands = [
            GatherOperand(codec, memory.pages(arrays[name]), arrays[scale], arrays[into], alignment=rows.alignment)
            for codec, memory, rows, name, scale, into in named
        ]
        _gather(arrays["page"], arrays["token"], counts["num_rows"], operands, spec, dtype)

    return AnyCount(
        body,
        functools.partial(_kernel, grid=ANY_LENGTH),
        ("num_rows",),
        (
            Argument("page", indices),
            Argument("token", indices),
            *scale_arguments(spec, (1, 1), (None, None)),
            *page_arguments(spec, pages),
            *itertools.starmap(
                _dense_argument,
                zip(dense_names, dense, spec.part_sizes[: len(codecs)], dense_types(spec, 1, dtype), strict=True),
            ),
        ),
        writes=dense_names,
        num_programs=lambda num_rows: -(-num_rows // ROWS),
    )


def why_not(spec: AttentionSpec, target: Target | None = None) -> str | None:
    """Why the kernel cannot gather rows of a JAX array with pages of a spec; None where it can, on any `target`."""
    return why_not_pages(spec) or why_not_elements(spec, array_memory(spec))


_kernel = functools.partial(compat.program_kernel, "gather_mla")


def _gather(
    pages: Ref, tokens: Ref, num_rows: Number, operands: Sequence[GatherOperand], spec: AttentionSpec, dtype: DType
) -> None:
    """The body of the kernel; the last program stores the last row more than once."""
    first, types = lax.axis_index("program") * ROWS, dense_types(spec, 1, dtype)
    rows = [jnp.minimum(first + i, num_rows - 1) for i in range(ROWS)]
    places = [(pages[row], tokens[row]) for row in rows]

    def pieces(index: int, number: int) -> list[DecodedPiece]:
        page, token = places[index]
        own = [
            each._replace(dense=_rows_of(each.dense, rows[index], number, of))
            for each, of in zip(operands, types, strict=True)
        ]
        read = PageTokens(jnp.maximum(page, 0), token, number, jnp.where(page >= 0, number, 0))
        return decoded_pieces(own, read, spec, dtype)

    def take_each() -> None:
        store_pieces([piece for i in range(ROWS) for piece in pieces(i, 1)])

    if spec.block_size < ROWS:
        take_each()
        return
    page, token = places[0]
    steps = [(own == page) & (other == token + i) for i, (own, other) in enumerate(places)]
    are_neighbours = functools.reduce(lambda x, y: x & y, steps)
    pl.when(are_neighbours)(lambda: store_pieces(pieces(0, ROWS)))
    pl.when(~are_neighbours)(take_each)


def _rows_of(dense: Ref, row: jax.Array, number: int, of: jax.ShapeDtypeStruct) -> Ref:
    """Rows of a result: of an array of such rows, or of elements that begin with them."""
    own = dense.at[pl.ds(row, number)]
    if len(dense.shape) == len(of.shape):
        return own
    return own.at[:, pl.ds(0, math.prod(of.shape))].reshape(number, *of.shape[1:])


def _dense_argument(name: str, rows: RowMemory, size: int, of: jax.ShapeDtypeStruct) -> Argument:
    """The argument for rows of so many elements to fill, which are of the type `of` one row."""
    if rows.token_stride == size:
        # An array of such rows: interpret mode takes minutes to store to parts of a reshaped reference.
        return Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH, *of.shape[1:]), of.dtype))
    return rows.argument(name, functools.partial(_as_elements, dtype=of.dtype))


def _as_elements(rows: jax.Array, dtype: DType) -> jax.Array:
    """Rows in elements of a dtype, which may be words of two elements."""
    if rows.dtype == dtype:
        return rows
    return lax.bitcast_convert_type(rows.reshape(rows.shape[0], -1, 2), dtype)
