"""The gather of any tokens, one for each row of a result, as dense, dequantized keys and values.

Ranges of sequences are such tokens: those of latents (MLA) that a prompt in chunks attends to. A program takes `ROWS`
neighbouring rows. It issues all loads of their tokens before it uses any, decodes in registers, and stores the rows.
Tokens that are neighbours in a page, as most are, are loaded together, by wider accesses; others one by one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    Pages,
    RowMemory,
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


class RowArrays(NamedTuple):
    """The tokens to gather, one for each row of the result, and how they are stored.

    Attributes:
      page: int32 `[num_rows]`: the page of each token; negative for none, whose row is zeros.
      token: int32 `[num_rows]`: its index in the page.
      k_scale: float32 `[1]`.
      v_scale: likewise.
    """

    page: jax.Array
    token: jax.Array
    k_scale: jax.Array
    v_scale: jax.Array


def gather_rows(
    pages: Sequence[jax.Array], arrays: RowArrays, spec: AttentionSpec, dtype: DType
) -> tuple[jax.Array, ...]:
    """Latents and, where there are any, rope keys `[num_rows, size]` of `dtype`.

    `pages` are the same flat pages `[num_pages, page_elements]` for each of both, in the elements of `page_dtypes`.
    """
    num_rows, codecs = arrays.page.shape[0], codecs_of(spec)

    def body(page: Ref, token: Ref, *refs: Ref) -> None:
        scales, own_pages, dense = refs[:2], refs[2 : 2 + len(codecs)], refs[2 + len(codecs) :]
        operands = [
            GatherOperand(codec, Pages(own, regions, spec.page_size_bytes), scale, into)
            for codec, own, regions, scale, into in zip(codecs, own_pages, spec.regions, scales, dense, strict=False)
        ]
        _gather(page, token, num_rows, operands, spec, dtype)

    kernel = _kernel(body, -(-num_rows // ROWS), out_type=dense_types(spec, num_rows, dtype))
    results = kernel(*arrays, *pages[: len(codecs)])
    return tuple((x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)).reshape(num_rows, -1) for x in results)


@with_origin
def any_rows(spec: AttentionSpec, pages: tuple[PageMemory, ...], dense: tuple[RowMemory, ...]) -> AnyCount:
    """The same of caller-owned memory, for any number of rows.

    The arguments are the page and the token of each row, int32, k_scale, v_scale, the pages of latents and, where there
    are any, of rope keys, and the rows of these.

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

    as_rows = [functools.partial(_as_elements, dtype=of.dtype) for of in dense_types(spec, 1, dtype)]
    return AnyCount(
        body,
        functools.partial(_kernel, grid=ANY_LENGTH),
        ("num_rows",),
        (
            Argument("page", indices),
            Argument("token", indices),
            *scale_arguments(spec, (1, 1), (None, None)),
            *page_arguments(spec, pages),
            *(rows.argument(name, to) for rows, name, to in zip(dense, dense_names, as_rows, strict=True)),
        ),
        writes=dense_names,
        num_programs=lambda num_rows: -(-num_rows // ROWS),
    )


def why_not(spec: AttentionSpec, target: Target | None = None) -> str | None:
    """Why the kernel cannot gather rows of a JAX array with pages of a spec; None where it can, on any `target`."""
    size = spec.page_size_bytes
    return why_not_pages(spec) or why_not_elements(spec, [PageMemory(each, size, size) for each in spec.regions])


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


def _as_elements(rows: jax.Array, dtype: DType) -> jax.Array:
    """Rows in elements of a dtype, which may be words of two elements."""
    if rows.dtype == dtype:
        return rows
    return lax.bitcast_convert_type(rows.reshape(rows.shape[0], -1, 2), dtype)
