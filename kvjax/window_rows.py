"""`WindowRows`: which sequence has which row of an exact window."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvjax.block_pool import PagedSequence
from kvjax.block_pool.sequence import check_is_sequence, paired
from kvjax.errors import KVCacheTypeError, KVCacheValueError, kind_of
from kvjax.spec import as_int
from kvjax.step_metadata import NO_ROW


class WindowSizes(Protocol):
    """The sizes that rows are assigned by: an `ExactWindow`, of kvjax or of kvjax_torch, has them."""

    @property
    def num_rows(self) -> int:
        """Sequences that the window holds tokens of."""

    @property
    def size(self) -> int:
        """Tokens that a query attends to there."""

    @property
    def tokens_per_row(self) -> int:
        """Tokens that a row holds."""


@dataclasses.dataclass
class _Held:
    """A sequence's row, and which of its tokens are there: those at positions from `start` to `stop`.

    `num_cuts`: the sequence's number of cuts (`PagedSequence.last_cut`) when this was recorded.
    """

    row: int
    start: int
    stop: int
    num_cuts: int = 0

    def follow(self, sequence: PagedSequence) -> None:
        """Forgets tokens that the sequence no longer has, whatever was appended since."""
        num_cuts, left = sequence.last_cut
        if num_cuts != self.num_cuts:
            # After several cuts only the last one's length is known: assume that no token is left.
            self.stop = min(self.stop, left) if num_cuts == self.num_cuts + 1 else 0
        self.num_cuts = num_cuts


class WindowRows:
    """Assigns the rows of a window to sequences, reusing the rows of sequences that ran least recently.

    Host-side bookkeeping, one for the windows of all layers, which have equal sizes. A sequence keeps its row from step
    to step. It gets a row to fill from the pages if it lost its row, if it has tokens but never had a row (after a
    prefix hit, a swap, a fork or an import), or if its tokens changed after a truncation or `free`. There is nothing to
    release.

    Attributes:
      num_rows: of the window; most sequences in a step.
    """

    def __init__(self, exact_window: WindowSizes) -> None:
        names = "num_rows", "size", "tokens_per_row"
        if not all(isinstance(getattr(exact_window, name, None), int) for name in names):
            raise KVCacheTypeError(
                f"exact_window: got {kind_of(exact_window)}, expected an ExactWindow of kvjax or of kvjax_torch"
            )
        self.num_rows = exact_window.num_rows
        self._size, self._tokens_per_row = exact_window.size, exact_window.tokens_per_row
        self._held: collections.OrderedDict[PagedSequence, _Held] = collections.OrderedDict()  # by last use

    def assign(self, sequences: Sequence[PagedSequence], q_lens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Assigns rows for a step, which must then run: its tokens count as written to the window.

        Args:
          sequences: of the step; `BlockPool.append` has reserved its new tokens.
          q_lens: number of new tokens of each.

        Returns:
          int32 `[num_seqs]`, twice: the row of each sequence, for `StepMetadata`; and the rows that
          `fill_exact_window` has to fill before the step, -1 where it has nothing to do. Both are -1 for a sequence
          without new tokens.

        Raises:
          KVCacheValueError: more sequences than rows, more new tokens than a sequence has, or a sequence given twice.
            Nothing has changed.
          KVCacheTypeError: not a sequence of `PagedSequence`s, or not one of ints.
        """
        pairs = paired(sequences, "q_lens", q_lens)
        new = _with_new_tokens(pairs)
        if len(new) > self.num_rows:
            raise KVCacheValueError(
                f"sequences: got {len(new)} with new tokens, expected at most {self.num_rows}, the rows of the window"
            )
        for sequence in new:
            if sequence in self._held:
                self._held.move_to_end(sequence)
        rows, fills = np.full((2, len(pairs)), NO_ROW, np.int32)
        for sequence, (index, first) in new.items():
            held = self._take(sequence)
            seen = max(first - self._size + 1, 0)  # the first token that the new ones attend to in the window
            if not (held.start <= seen and first <= held.stop):
                held.start = max(first - self._size, 0)
                fills[index] = held.row if seen < first else NO_ROW
            held.stop = sequence.num_tokens
            held.start = max(held.start, held.stop - self._tokens_per_row)
            rows[index] = held.row
        return rows, fills

    def fork(self, sequence: PagedSequence, other: PagedSequence) -> np.ndarray:
        """Gives `other`, forked from `sequence`, a row with the same tokens; without it, the row is filled from pages.

        Returns:
          int32 `[0 or 1, 2]`: rows to copy (from, to) by `copy_window_rows` before the next call of this object; none
          if `sequence` has no row, or the only one.

        Raises:
          KVCacheTypeError: one of them is no `PagedSequence`.
        """
        check_is_sequence("sequence", sequence)
        check_is_sequence("other", other)
        if sequence not in self._held or self.num_rows == 1:
            return np.zeros((0, 2), np.int32)
        self._held.move_to_end(sequence)
        own, copied = self._held[sequence], self._take(other)
        own.follow(sequence)
        copied.start, copied.stop, copied.num_cuts = own.start, own.stop, other.last_cut[0]
        return np.array([[own.row, copied.row]], np.int32)

    def _take(self, sequence: PagedSequence) -> _Held:
        """Returns the sequence's row, or a free one, or else that of the sequence that ran least recently."""
        held = self._held.pop(sequence, None)
        if held is None:
            free = len(self._held) < self.num_rows
            held = _Held(len(self._held) if free else self._held.popitem(last=False)[1].row, 0, 0)
        held.follow(sequence)
        self._held[sequence] = held
        return held


def _with_new_tokens(pairs: Sequence[tuple[PagedSequence, Any]]) -> dict[PagedSequence, tuple[int, int]]:
    """Returns, of each sequence with new tokens, its index and the position of the first of them."""
    new = {}
    for index, (sequence, q_len) in enumerate(pairs):
        if number := as_int(f"q_lens[{index}]", q_len, least=0, most=sequence.num_tokens):
            new[sequence] = index, sequence.num_tokens - number
    return new
