"""`StepMetadata`: the sequences of a ragged step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.block_pool import FREED_BLOCK, MAX_SLOTS, PagedSequence
from kvjax.block_pool.sequence import paired
from kvjax.errors import KVCacheValueError, shown
from kvjax.ops.arguments import INDEX_DTYPES, check_array
from kvjax.ops.value_checks import check_num_seqs, is_checked
from kvjax.spec import as_int, as_items

PADDING_SLOT = -1
NO_ROW = -1
"""The row of a window for a sequence without new tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """The sequences of a step (prefills, chunked prefills, decodes), with their new tokens concatenated.

    A pytree of int32 arrays. A sequence's new tokens are its last ones; their keys and values are written to
    `slot_mapping` before attention. Padding: slots -1, lengths 0, repeated `cu_q_lens`, block table entries -1.

    Attributes:
      block_table: `[num_seqs, max_blocks]`, the blocks of each sequence.
      seq_lens: `[num_seqs]`, its tokens, the new ones included.
      cu_q_lens: `[num_seqs + 1]`: new tokens of sequence i are `cu_q_lens[i]` to `cu_q_lens[i + 1]`.
      slot_mapping: `[num_tokens]`, the slot of each new token.
      window_rows: `[num_seqs]`, each sequence's row of an `ExactWindow`, -1 for padding; None without a window.
    """

    block_table: Any
    seq_lens: Any
    cu_q_lens: Any
    slot_mapping: Any
    window_rows: Any = None

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[PagedSequence],
        q_lens: Sequence[int],
        *,
        num_tokens: int | Sequence[int] | None = None,
        num_seqs: int | Sequence[int] | None = None,
        max_blocks: int | Sequence[int] | None = None,
        group: int = 0,
        window_rows: Sequence[int] | np.ndarray | None = None,
    ) -> StepMetadata:
        """Builds the step of sequences of one `BlockPool`, on the host: NumPy arrays, O(tokens + table entries).

        Args:
          sequences: in the order of their tokens in the step; `BlockPool.append` has reserved the new ones.
          q_lens: number of new tokens of each, its last ones.
          num_tokens: tokens to pad to: a size, or sizes (buckets) of which the smallest that fits is used; each is
            compiled once. Default: no padding.
          num_seqs: rows to pad to, likewise.
          max_blocks: columns of the block table to pad to, likewise.
          group: the pool's group of layers that the step is for.
          window_rows: each sequence's row of an `ExactWindow`, as `WindowRows.assign` returns them.

        Raises:
          KVCacheValueError: the step does not fit the largest size; more new tokens than a sequence has, or new
            tokens in a freed block; a sequence given twice; two sequences with new tokens in the same slots, such as a
            fork and its parent before `append`; a sequence with new tokens without a row of its own, where rows are
            given.
          KVCacheTypeError: not a sequence of `PagedSequence`s, or not one of ints.
        """
        sequences, q_lens = _checked(sequences, q_lens)
        new = np.array(q_lens, np.int64)
        blocks = [sequence.blocks_of(group) for sequence in sequences]
        rows = _bucket("num_seqs", len(sequences), num_seqs)
        columns = _bucket("max_blocks", max(map(len, blocks), default=0), max_blocks)
        slot_mapping = np.full(_bucket("num_tokens", int(new.sum()), num_tokens), PADDING_SLOT, np.int32)
        block_table = np.full((rows, columns), FREED_BLOCK, np.int32)
        for row, own in enumerate(blocks):
            block_table[row, : len(own)] = own
        seq_lens = np.zeros(rows, np.int32)
        seq_lens[: len(new)] = [sequence.num_tokens for sequence in sequences]
        cu_q_lens = np.zeros(rows + 1, np.int32)
        cu_q_lens[1:] = np.cumsum(np.pad(new, (0, rows - len(new))))
        if sequences:
            size = sequences[0].pool.groups[group].block_size
            slots = _slots(block_table, seq_lens[: len(new)], new, size)
            _check_unique(slots, new, size)
            slot_mapping[: len(slots)] = slots
        own_rows = None if window_rows is None else np.full(rows, NO_ROW, np.int32)
        if own_rows is not None:
            own_rows[: len(new)] = _rows_of_window(window_rows, new)
        return cls(block_table, seq_lens, cu_q_lens, slot_mapping, own_rows)

    @classmethod
    def from_page_indices(
        cls,
        page_indices: ArrayLike,
        kv_lens: ArrayLike,
        cu_q_lens: ArrayLike,
        *,
        block_size: int,
        num_tokens: int,
        max_blocks: int | None = None,
        cu_kv_lens: ArrayLike | None = None,
        num_seqs: ArrayLike | None = None,
    ) -> StepMetadata:
        """Builds the step from the flat page indices of TPU stacks, on the device, also under `jit`.

        Without `cu_kv_lens` each sequence has equally many entries of `page_indices`, as in tpu-inference (its
        `block_tables`, `seq_lens` and `query_start_loc`). With it the pages of sequence i start at
        `cu_kv_lens[i] // block_size`, as in sglang-jax.

        Under `jit` the ints `block_size`, `num_tokens` and `max_blocks` are static.

        Args:
          page_indices: int32 `[num_pages]`. Entries past a sequence's length may be anything.
          kv_lens: int32 `[max_num_seqs]`, tokens of each sequence, the new ones included; 0 for padding.
          cu_q_lens: int32 `[max_num_seqs + 1]`.
          block_size: tokens in a page.
          num_tokens: rows of the query, padding included.
          max_blocks: columns of the block table, enough for the longest sequence; required with `cu_kv_lens`, else
            default `num_pages / max_num_seqs`.
          cu_kv_lens: int32 `[max_num_seqs + 1]`, cumulative lengths, each rounded up to whole pages.
          num_seqs: an int or an integer array, scalar or `[1]`; rows from there on are padding, whatever they hold. An
            int or a NumPy array is from 0 to `max_num_seqs`; a JAX array, whose value is not read, is clamped to that.
            Default: all rows are used.

        Raises:
          KVCacheValueError, KVCacheTypeError: inconsistent shapes, invalid dtypes, or a `num_seqs` out of range.
        """
        size = as_int("block_size", block_size, least=1)
        number = as_int("num_tokens", num_tokens, least=0)
        check_array("page_indices", page_indices, [("num_pages", None)], INDEX_DTYPES)
        check_array("kv_lens", kv_lens, [("max_num_seqs", None)], INDEX_DTYPES)
        pages, lengths = _as_int32(page_indices), jnp.maximum(_as_int32(kv_lens), 0)
        rows = lengths.shape[0]
        check_array("cu_q_lens", cu_q_lens, [("max_num_seqs + 1", rows + 1)], INDEX_DTYPES)
        ends = _as_int32(cu_q_lens)
        if num_seqs is not None:
            used = _as_num_seqs(num_seqs, rows)
            lengths = jnp.where(jnp.arange(rows) < used, lengths, 0)
            ends = ends[jnp.clip(jnp.arange(rows + 1), 0, used)]
        if cu_kv_lens is None:
            per_sequence = _pages_per_sequence(pages, rows)
            columns = per_sequence if max_blocks is None else as_int("max_blocks", max_blocks, least=0)
            first = jnp.arange(rows, dtype=jnp.int32) * per_sequence
        else:
            if max_blocks is None:
                raise KVCacheValueError("max_blocks: got None with cu_kv_lens, expected the columns of the block table")
            check_array("cu_kv_lens", cu_kv_lens, [("max_num_seqs + 1", rows + 1)], INDEX_DTYPES)
            per_sequence = columns = as_int("max_blocks", max_blocks, least=0)
            first = _as_int32(cu_kv_lens)[:-1] // size
        column = jnp.arange(columns, dtype=jnp.int32)[None]
        is_used = (column * size < lengths[:, None]) & (column < per_sequence)
        pages = jnp.where(pages <= MAX_SLOTS // size, pages, FREED_BLOCK)  # larger ones would overflow slots
        block_table = jnp.where(is_used, _entries(pages, first[:, None] + column), FREED_BLOCK)
        step = cls(block_table, lengths, ends, jnp.zeros(number, jnp.int32))
        sequence, position = step.token_rows()
        block = _entries(block_table, sequence, position // size)
        slots = jnp.where((position >= 0) & (block >= 0), block * size + position % size, PADDING_SLOT)
        return dataclasses.replace(step, slot_mapping=slots)

    def token_rows(self) -> tuple[jax.Array, jax.Array]:
        """Returns each token's sequence and position, on the device: two int32 `[num_tokens]`, rows and positions.

        The position of padding is -1, its row is arbitrary. Lengths beyond int32 are clamped.
        """
        lengths, ends = jnp.maximum(_as_int32(self.seq_lens), 0), _as_int32(self.cu_q_lens)
        token = jnp.arange(self.slot_mapping.shape[0], dtype=jnp.int32)
        row = jnp.searchsorted(ends[1:], token, side="right", method="scan_unrolled").astype(jnp.int32)
        position = _entries(lengths, row) - _entries(ends, row + 1) + token
        return row, jnp.where(token < ends[-1], jnp.maximum(position, -1), -1)


def _entries(array: jax.Array, *indices: jax.Array) -> jax.Array:
    """Returns `array[indices]`, -1 out of bounds."""
    if not array.size:  # which JAX cannot index
        return jnp.full(jnp.broadcast_shapes(*(index.shape for index in indices)), -1, array.dtype)
    return array.at[indices].get(mode="fill", fill_value=-1, wrap_negative_indices=False)


def _pages_per_sequence(pages: jax.Array, num_seqs: int) -> int:
    if not pages.shape[0]:  # of no sequences too
        return 0
    if not num_seqs or pages.shape[0] % num_seqs:
        raise KVCacheValueError(
            f"page_indices: got {pages.shape[0]} for {num_seqs} sequences, expected an equal number for each;"
            " if pages are packed, pass cu_kv_lens"
        )
    return pages.shape[0] // num_seqs


def _as_num_seqs(num_seqs: Any, most: int) -> jax.Array | int:
    """Returns a number of sequences, a scalar, from 0 to `most`."""
    if not isinstance(num_seqs, (jax.Array, np.ndarray)):
        return as_int("num_seqs", num_seqs, least=0, most=most)
    if num_seqs.shape not in ((), (1,)):
        raise KVCacheValueError(f"num_seqs: got shape {num_seqs.shape}, expected [] or [1]")
    check_array("num_seqs", num_seqs, [("one", 1)] * num_seqs.ndim, INDEX_DTYPES)
    if isinstance(num_seqs, np.ndarray):
        return as_int("num_seqs", num_seqs.item(), least=0, most=most)
    if is_checked():
        check_num_seqs(num_seqs, most)
    return jnp.clip(_as_int32(num_seqs), 0, most).reshape(())


def _as_int32(array: Any) -> jax.Array:
    """Returns `array` as int32, clamped to its range."""
    if array.dtype == np.int32:
        return jnp.asarray(array)
    bounds = np.iinfo(np.int32)
    return jnp.asarray(array.clip(bounds.min, bounds.max).astype(np.int32))


def _checked(sequences: Sequence[PagedSequence], q_lens: Sequence[int]) -> tuple[list[PagedSequence], list[int]]:
    """Returns both after checking that the sequences have as many tokens and share a pool."""
    pairs = paired(sequences, "q_lens", q_lens)
    given = [sequence for sequence, _ in pairs]
    for index, sequence in enumerate(given):
        if sequence.pool is not given[0].pool:
            raise KVCacheValueError(
                f"sequences[{index}]: got a sequence of another pool, expected that of sequences[0]"
            )
    numbers = [
        as_int(f"q_lens[{index}]", q_len, least=0, most=sequence.num_tokens)
        for index, (sequence, q_len) in enumerate(pairs)
    ]
    return given, numbers


def _rows_of_window(window_rows: Any, q_lens: np.ndarray) -> list[int]:
    """Returns the rows of sequences after checking that each with new tokens has its own."""
    rows = as_items("window_rows", window_rows, "a sequence of ints, one for each of the sequences")
    if len(rows) != len(q_lens):
        raise KVCacheValueError(f"window_rows: got {len(rows)} rows, expected one for each of {len(q_lens)} sequences")
    owners: dict[int, int] = {}
    for index, (row, q_len) in enumerate(zip(rows, q_lens, strict=True)):
        number = as_int(f"window_rows[{index}]", row, least=0 if q_len else NO_ROW, most=MAX_SLOTS)
        if q_len and (other := owners.setdefault(number, index)) != index:
            raise KVCacheValueError(
                f"window_rows[{index}]: got {number}, expected a row of its own: window_rows[{other}] is the same"
            )
    return [int(row) for row in rows]


def _slots(block_table: np.ndarray, seq_lens: np.ndarray, q_lens: np.ndarray, block_size: int) -> np.ndarray:
    """Returns the slots of the last `q_lens` tokens of each row, concatenated: int32 `[sum(q_lens)]`."""
    row = np.repeat(np.arange(len(q_lens)), q_lens)
    # In the concatenation, the last token of row i has index `sum(q_lens[:i + 1]) - 1`.
    position = np.arange(len(row)) + np.repeat(seq_lens - np.cumsum(q_lens), q_lens)
    block = block_table[row, position // block_size]
    if (block == FREED_BLOCK).any():
        token = int(np.argmax(block == FREED_BLOCK))
        raise KVCacheValueError(
            f"q_lens[{row[token]}]: got {q_lens[row[token]]} new tokens, the one at position {position[token]} in a"
            " freed block, expected all in allocated blocks"
        )
    return (block * block_size + position % block_size).astype(np.int32)


def _check_unique(slots: np.ndarray, q_lens: np.ndarray, block_size: int) -> None:
    """Raises if the new tokens of two sequences, `q_lens` of each, have the same slot."""
    in_order = np.sort(slots, kind="stable")  # fast where slots are in runs, as those of chunks are
    is_repeated = in_order[1:] == in_order[:-1]
    if is_repeated.any():
        slot = in_order[np.argmax(is_repeated)]
        first, second = np.repeat(np.arange(len(q_lens)), q_lens)[slots == slot][:2]
        raise KVCacheValueError(
            f"sequences[{second}]: got new tokens in block {slot // block_size}, where sequences[{first}] has some too,"
            " expected a block of its own: BlockPool.append separates forks"
        )


def _bucket(what: str, needed: int, sizes: int | Sequence[int] | None) -> int:
    """Returns the smallest of `sizes` that is at least `needed`."""
    if sizes is None:
        return needed
    given = [as_int(what, size, least=0) for size in (sizes if isinstance(sizes, Sequence) else [sizes])]
    fitting = [size for size in given if size >= needed]
    if not fitting:
        raise KVCacheValueError(f"{what}: got {shown(sizes)}, expected at least {needed}, which the step needs")
    return min(fitting)
