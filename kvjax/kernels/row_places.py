"""The kernel that finds the token of each row of a gather of ranges of sequences, one range after the other.

A thread takes a row. It searches the row's sequence among the ends of the ranges, unless it is given, and stores the
page of the row's token and the token's index there, which the gather reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels import compat, lanes
from kvjax.kernels.aliases import Ref
from kvjax.kernels.gather import Table
from kvjax.kernels.launchable import ANY_LENGTH, AnyCount, Argument, Number, with_origin
from kvjax.kernels.registers import THREADS

_COUNTS = "num_rows", "num_seqs", "max_blocks", "table_stride", "last_block", "block_size"
_RESULTS = "page", "token"


@functools.cache
@with_origin
def any_places(*, by_ends: bool = False, num_layers: int | None = None) -> AnyCount:
    """The kernel for any numbers of rows, sequences and blocks.

    The arguments are int32: the block table; of each sequence its first row (`starts`) and the row after its last
    (`ends`), and what says which tokens these rows are; with `num_layers` the layer to read, as in `gather`; and the
    results, the page of each row's token, -1 for a row that has none, and the token's index there. `table_stride`
    counts the entries from a sequence's first to that of the next.

    Args:
      by_ends: whether `seq_lens` has the token after the last of each range, 0 for a sequence whose rows have no
        tokens. Otherwise `firsts` has the first token, at least 0, of the first `num_firsts` sequences, the others
        begin with token 0, and `sequences` has the sequences of the first `num_known` rows, clipped to those that
        exist.
      num_layers: layers whose pages lie next to each other in a block; None for one.
    """
    find = _by_ends if by_ends else _by_firsts
    given = ("seq_lens", "starts", "ends") if by_ends else ("starts", "ends", "sequences", "firsts")
    layers = () if num_layers is None else ("layer",)
    names = "block_table", *given, *layers, *_RESULTS

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Any]) -> None:
        table = Table(arrays["block_table"], counts["max_blocks"], counts["table_stride"], counts["last_block"])
        if num_layers is not None:
            table = table._replace(layer=arrays["layer"][0], num_layers=num_layers)
        num_rows, num_seqs, block_size = (counts[name] for name in ("num_rows", "num_seqs", "block_size"))
        rows = _Rows(num_rows, num_seqs, arrays["starts"], arrays["ends"], table, block_size)
        rows.store(*find(rows, counts, arrays), *(arrays[name] for name in _RESULTS))

    return AnyCount(
        body,
        functools.partial(_kernel, grid=ANY_LENGTH),
        _COUNTS if by_ends else (*_COUNTS, "num_known", "num_firsts"),
        tuple(Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)) for name in names),
        writes=_RESULTS,
        num_programs=lambda num_rows: -(-num_rows // THREADS),
    )


_kernel = functools.partial(compat.program_kernel, "find_rows")


class _Found(NamedTuple):
    """A row of each thread, whether there is one, its sequence, and whether it has one."""

    row: jax.Array
    is_row: jax.Array
    seq: jax.Array
    has_seq: jax.Array


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a program."""

    num_rows: Number
    num_seqs: Number
    starts: Ref
    ends: Ref
    table: Table
    block_size: Number

    def search(self, num_seqs: Number) -> _Found:
        """Finds the first of so many sequences whose rows end after a thread's."""
        row = lax.axis_index("program") * THREADS + lanes.thread_index()
        is_row = row < self.num_rows

        def halve(left: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            size, seq = left  # it is `seq` or one of the `size` after it
            half = (size + 1) >> 1
            is_after = _load(self.ends, seq + half - 1, is_row) <= row
            return size >> 1, jnp.where(is_after, seq + half, seq)

        size = jnp.int32(num_seqs)
        _, seq = lax.while_loop(lambda left: left[0] > 0, halve, (size, lanes.splat(0, jnp.int32)))
        return _Found(row, is_row, seq, is_row & (seq < self.num_seqs))

    def store(self, found: _Found, position_of: _Positions, page: Ref, token: Ref) -> None:
        """Stores the places of rows."""
        row, is_row, seq, has_seq = found
        start, end = (_load(x, seq, has_seq) for x in (self.starts, self.ends))
        position, size = position_of(start, end), lanes.splat(self.block_size, jnp.int32)
        column = lax.div(position, size)
        is_token = has_seq & (start <= row) & (row < end) & (position >= 0) & (column < self.table.max_blocks)
        own_page, is_page = self.table.page_of(_load(self.table.ref, seq * self.table.stride + column, is_token))
        lanes.store_global(page, row, jnp.where(is_token & is_page, own_page, -1), is_row)
        lanes.store_global(token, row, jnp.where(is_token, lax.rem(position, size), 0), is_row)


type _Positions = Callable[[jax.Array, jax.Array], jax.Array]
"""Makes the tokens of a thread's row in its sequence of the sequence's first row and the row after its last."""


def _by_ends(rows: _Rows, _: Mapping[str, Number], arrays: Mapping[str, Ref]) -> tuple[_Found, _Positions]:
    """The sequences of a program's rows, and which tokens the rows are, by the ends of ranges."""
    found = rows.search(rows.num_seqs)
    of_range = _load(arrays["seq_lens"], found.seq, found.has_seq)
    return found, lambda start, end: of_range - (end - found.row)


def _by_firsts(rows: _Rows, counts: Mapping[str, Number], arrays: Mapping[str, Ref]) -> tuple[_Found, _Positions]:
    """The same, by the first tokens of ranges."""
    num_known = counts["num_known"]
    found = rows.search(jnp.where(num_known < rows.num_rows, rows.num_seqs, 0))
    is_known = found.row < num_known
    known = jnp.minimum(_load(arrays["sequences"], found.row, is_known & found.is_row), rows.num_seqs - 1)
    seq = jnp.where(is_known, jnp.maximum(known, 0), found.seq)
    found = found._replace(seq=seq, has_seq=found.is_row & (seq < rows.num_seqs))
    first = jnp.maximum(_load(arrays["firsts"], seq, found.has_seq & (seq < counts["num_firsts"])), 0)
    return found, lambda start, end: first + (found.row - start)


def _load(ref: Ref, index: jax.Array, condition: jax.Array) -> jax.Array:
    return lanes.bits(lanes.load_global(ref, index, condition), jnp.int32)
