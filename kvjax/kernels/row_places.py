"""The kernel that finds the token of each row of a gather of ranges of sequences, one range after the other.

A thread takes a row. Unless the row's sequence is given, the thread searches for it among the ends of the ranges. It
stores the page of the row's token and the token's index in that page, for the gather to read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels import compat, lanes
from kvjax.kernels.aliases import Ref
from kvjax.kernels.gather import Table
from kvjax.kernels.launchable import ANY_LENGTH, AnyCount, Argument, Number, with_origin
from kvjax.kernels.registers import SECTOR_WORDS, THREADS

_COUNTS = "num_rows", "num_seqs", "max_blocks", "table_stride", "last_block", "block_size"
_RESULTS = "page", "token"


@functools.cache
@with_origin
def any_places(*, num_layers: int | None = None) -> AnyCount:
    """The kernel for any numbers of rows, sequences and blocks.

    The arguments are int32: the block table; `starts`, the first row of each sequence; `ends`, which from `first_end`
    on has the row after each sequence's last, so that both may be the cumulative lengths of the ranges; the sequences
    of the first `num_known` rows, clipped to those that exist; the first token of each of the first `num_firsts`
    sequences, at least 0, while the others begin with token 0; with `num_layers` the layer to read, as in `gather`; and
    the results, the page of each row's token, -1 for a row that has none, and the token's index there. `table_stride`
    is the number of entries from one sequence's first to the next sequence's first.
    """
    layers = () if num_layers is None else ("layer",)
    names = "block_table", "starts", "ends", "sequences", "firsts", *layers, *_RESULTS

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Any]) -> None:
        table = Table(arrays["block_table"], counts["max_blocks"], counts["table_stride"], counts["last_block"])
        if num_layers is not None:
            table = table._replace(layer=arrays["layer"][0], num_layers=num_layers)
        _find(table, counts, arrays)

    return AnyCount(
        body,
        functools.partial(_kernel, grid=ANY_LENGTH),
        (*_COUNTS, "num_known", "num_firsts", "first_end"),
        tuple(Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)) for name in names),
        writes=_RESULTS,
        num_programs=lambda num_rows: -(-num_rows // THREADS),
    )


_kernel = functools.partial(compat.program_kernel, "find_rows")


def _find(table: Table, counts: Mapping[str, Number], arrays: Mapping[str, Ref]) -> None:
    """The body of the kernel."""
    num_rows, num_seqs, num_known = counts["num_rows"], counts["num_seqs"], counts["num_known"]
    row = lax.axis_index("program") * THREADS + lanes.thread_index()
    is_row = row < num_rows
    # The search for the sequence hides the latency of what is read next.
    _prefetch(arrays["firsts"], lanes.thread_index(), counts["num_firsts"])
    _prefetch(table.ref, row, (num_seqs - 1) * table.stride + table.max_blocks)

    def end_of(seq: jax.Array, condition: jax.Array) -> jax.Array:
        return _load(arrays["ends"], seq + counts["first_end"], condition)

    def halve(left: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        size, seq = left  # the sequence is `seq` or one of the `size` after it
        half = (size + 1) >> 1
        is_after = end_of(seq + half - 1, is_row) <= row
        return size >> 1, jnp.where(is_after, seq + half, seq)

    size = jnp.where(num_known < num_rows, jnp.int32(num_seqs), 0)
    _, found = lax.while_loop(lambda left: left[0] > 0, halve, (size, lanes.splat(0, jnp.int32)))
    is_known = row < num_known
    known = jnp.minimum(_load(arrays["sequences"], row, is_known & is_row), num_seqs - 1)
    seq = jnp.where(is_known, jnp.maximum(known, 0), found)
    has_seq = is_row & (seq < num_seqs)

    start, end = jnp.maximum(_load(arrays["starts"], seq, has_seq), 0), end_of(seq, has_seq)
    first = jnp.maximum(_load(arrays["firsts"], seq, has_seq & (seq < counts["num_firsts"])), 0)
    position, block_size = first + (row - start), lanes.splat(counts["block_size"], jnp.int32)
    column = lax.div(position, block_size)
    is_token = has_seq & (start <= row) & (row < end) & (position >= 0) & (column < table.max_blocks)
    own_page, is_page = table.page_of(_load(table.ref, seq * table.stride + column, is_token))
    lanes.store_global(arrays["page"], row, jnp.where(is_token & is_page, own_page, -1), is_row)
    lanes.store_global(arrays["token"], row, jnp.where(is_token, lax.rem(position, block_size), 0), is_row)


def _prefetch(ref: Ref, sector: jax.Array, size: Number) -> None:
    """Prefetches a sector to L2, if it begins within the first `size` elements."""
    first = sector * SECTOR_WORDS
    lanes.prefetch_global(ref, first, first < size)


def _load(ref: Ref, index: jax.Array, condition: jax.Array) -> jax.Array:
    return lanes.bits(lanes.load_global(ref, index, condition), jnp.int32)
