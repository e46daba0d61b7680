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

COUNTS = "num_rows", "num_seqs", "max_blocks", "table_stride", "last_block", "block_size", "num_known", "num_firsts"

_ARRAYS = "block_table", "starts", "ends", "sequences", "firsts", "page", "token"


class RangeArrays(NamedTuple):
    """Ranges of tokens of sequences, in order, and the rows that they have.

    Attributes:
      block_table: int32 `[num_seqs, max_blocks]`.
      seq_lens: int32 `[num_seqs]`, the token after the last of each range; 0 for a sequence without tokens.
      starts: int32 `[num_seqs]`, the first row of each sequence.
      ends: int32 `[num_seqs]`, the row after its last.
      layer: int32 scalar, the layer to read, as in `gather`; None for pages of one layer.
    """

    block_table: jax.Array
    seq_lens: jax.Array
    starts: jax.Array
    ends: jax.Array
    layer: jax.Array | None = None


def row_places(
    arrays: RangeArrays, num_rows: int, block_size: int, num_pages: int, num_layers: int = 1
) -> tuple[jax.Array, jax.Array]:
    """The page of each row's token, -1 for a row that has none, and its index there: int32 `[num_rows]`."""
    block_table, seq_lens, starts, ends, layer = arrays
    num_seqs, max_blocks = block_table.shape
    layers = [] if layer is None else [layer.reshape(1)]

    def body(block_table: Ref, seq_lens: Ref, starts: Ref, ends: Ref, *others: Ref) -> None:
        table = Table(block_table, max_blocks, max_blocks, num_pages // num_layers - 1)
        if layers:
            table = table._replace(layer=others[0][0], num_layers=num_layers)
        rows = _Rows(num_rows, num_seqs, starts, ends, table, block_size)
        found = rows.search(num_seqs)
        of_range = _load(seq_lens, found.seq, found.has_seq)
        rows.store(found, lambda start, end: of_range - (end - found.row), *others[len(layers) :])

    kernel = _kernel(body, -(-num_rows // THREADS), out_type=[jax.ShapeDtypeStruct((num_rows,), jnp.int32)] * 2)
    page, token = kernel(block_table.reshape(-1), seq_lens, starts, ends, *layers)
    return page, token


@functools.cache
@with_origin
def any_places() -> AnyCount:
    """The same in caller-owned memory, for any numbers of rows, sequences and blocks.

    The arguments are int32: the block table, and of each sequence its first row and the row after its last; the
    sequence of each of the first `num_known` rows, clipped to those that exist; of the first `num_firsts` sequences the
    token of the first row, at least 0, which is token 0 of others; and the page and the index of each row's token.
    `table_stride` counts the entries from a sequence's first to that of the next.
    """

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Any]) -> None:
        table = Table(arrays["block_table"], counts["max_blocks"], counts["table_stride"], counts["last_block"])
        num_rows, num_seqs, num_known = (counts[name] for name in ("num_rows", "num_seqs", "num_known"))
        rows = _Rows(num_rows, num_seqs, arrays["starts"], arrays["ends"], table, counts["block_size"])
        found = rows.search(jnp.where(num_known < num_rows, num_seqs, 0))
        is_known = found.row < num_known
        known = jnp.minimum(_load(arrays["sequences"], found.row, is_known & found.is_row), num_seqs - 1)
        seq = jnp.where(is_known, jnp.maximum(known, 0), found.seq)
        found = found._replace(seq=seq, has_seq=found.is_row & (seq < num_seqs))
        first = jnp.maximum(_load(arrays["firsts"], seq, found.has_seq & (seq < counts["num_firsts"])), 0)
        rows.store(found, lambda start, end: first + (found.row - start), arrays["page"], arrays["token"])

    return AnyCount(
        body,
        functools.partial(_kernel, grid=ANY_LENGTH),
        COUNTS,
        tuple(Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)) for name in _ARRAYS),
        writes=_ARRAYS[-2:],
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

    def store(self, found: _Found, position_of: Callable[..., jax.Array], page: Ref, token: Ref) -> None:
        """Stores the places of rows; `position_of` makes the token of a row's sequence of its first row and its end."""
        row, is_row, seq, has_seq = found
        start, end = (_load(x, seq, has_seq) for x in (self.starts, self.ends))
        position, size = position_of(start, end), lanes.splat(self.block_size, jnp.int32)
        column = lax.div(position, size)
        is_token = has_seq & (start <= row) & (row < end) & (position >= 0) & (column < self.table.max_blocks)
        own_page, is_page = self.table.page_of(_load(self.table.ref, seq * self.table.stride + column, is_token))
        lanes.store_global(page, row, jnp.where(is_token & is_page, own_page, -1), is_row)
        lanes.store_global(token, row, jnp.where(is_token, lax.rem(position, size), 0), is_row)


def _load(ref: Ref, index: jax.Array, condition: jax.Array) -> jax.Array:
    return lanes.bits(lanes.load_global(ref, index, condition), jnp.int32)
