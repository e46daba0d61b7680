"""Block tables of a paged cache, for a batch of sequences that grow together.

Sequences may share blocks, as the beams of a beam search do. Full blocks stay shared, since they are not written again;
a partly filled block is copied before a second sequence writes into it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from kvjax import BlockPool, KVCacheValueError, PagedSequence

NO_BLOCK = -1
NO_SLOT = -1
NO_COPIES = np.empty((0, 2), np.int32)


class AppendStep(NamedTuple):
    """What a layer needs to append tokens to each sequence and to read all of them back.

    Attributes:
      block_table: int32 `[num_seqs, max_blocks]`; -1 past a sequence's last block, and for blocks given back.
      slot_mapping: int64 `[num_seqs * num_new_tokens]`, the new tokens of the first sequence before those of the next;
        -1 for padding, which is not stored.
      seq_lens: int32 `[num_seqs]`, the new tokens included.
      cu_q_lens: int32 `[num_seqs + 1]`: where each sequence's new tokens begin, padding left out.
      stored: int64 `[num_stored]`: which of the new tokens, counted as in `slot_mapping`, are stored; `None` for all.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    cu_q_lens: torch.Tensor
    stored: torch.Tensor | None

    def to(self, device: torch.device) -> AppendStep:
        """The step on another device; the host does not wait."""
        moved = self._asdict()
        moved.update((name, x.to(device, non_blocking=True)) for name, x in moved.items() if x is not None)
        return AppendStep(**moved)


class Growth(NamedTuple):
    """What `BlockTable.plan` returns for `BlockTable.grow`.

    Attributes:
      start: positions that each sequence keeps.
      before: int64 `[num_seqs]`: tokens among them.
      first_seen: int64 `[num_seqs]`: blocks whose tokens are all before this one are freed.
      is_new: bool `[num_seqs, num_new]`: which of the new positions are tokens.
      is_token: bool `[num_seqs, end]`: which of all positions are; `None` if all are.
    """

    start: int
    before: np.ndarray
    first_seen: np.ndarray
    is_new: np.ndarray
    is_token: np.ndarray | None


class BlockTable:
    """The blocks of sequences that grow together, taken from a pool of `num_blocks` blocks of `block_size` tokens.

    Positions are those of the batch, padding included: `start` and `end` are the same for every sequence. Only tokens
    are stored, one after the other, and no padding.

    Args:
      num_blocks: blocks of the pool.
      block_size: tokens in a block.
      sliding_window: tokens that a query of these layers sees, its own included; `None` for all.
      option: the name of `num_blocks` in error messages.

    Raises:
      KVCacheValueError: `num_blocks` or `block_size` is not positive.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, sliding_window: int | None = None, option: str = "num_blocks"
    ) -> None:
        self._pool = BlockPool(num_blocks, block_size)
        self._window = sliding_window
        self._option = option
        self._sequences: list[PagedSequence] = []
        self._is_token: np.ndarray | None = None
        self._copies = NO_COPIES

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._pool.block_size

    @property
    def num_seqs(self) -> int:
        """Sequences that hold tokens."""
        return len(self._sequences)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that hold tokens of any sequence, shared ones counted once."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def has_padding(self) -> bool:
        """Whether some positions of the batch were padding, which is not stored."""
        return self._is_token is not None

    @property
    def copies(self) -> np.ndarray:
        """Blocks that `grow` gave new copies: int32 `[num_copies, 2]` of (from, to), until `copied` is called."""
        return self._copies

    def copied(self) -> None:
        """Says that every layer has made the `copies`."""
        self._copies = NO_COPIES

    def rows(self) -> np.ndarray:
        """The table: int32 `[num_seqs, max_blocks]`; -1 past a sequence's last block, and for blocks given back."""
        blocks = [sequence.blocks for sequence in self._sequences]
        rows = np.full((len(blocks), max(map(len, blocks), default=0)), NO_BLOCK, np.int32)
        for row, of_sequence in zip(rows, blocks, strict=True):
            row[: len(of_sequence)] = of_sequence
        return rows

    def plan(
        self, num_seqs: int, start: int, end: int, *, is_token: np.ndarray | None = None, free_passed: bool = False
    ) -> Growth:
        """Plans to allocate blocks for the positions from `start` to `end` of every sequence; nothing changes yet.

        Args:
          num_seqs: the number of sequences; it may change only where `start` is 0.
          start: positions that each sequence keeps.
          end: positions that each sequence will have.
          is_token: bool `[num_seqs, end]`: False for padding; `None` where there is none.
          free_passed: whether to free first the blocks that the window has passed at position `start`.

        Raises:
          KVCacheValueError: another number of sequences, padding before `start` that differs from before, or too few
            blocks.
        """
        if start and num_seqs != self.num_seqs:
            raise KVCacheValueError(
                f"key_states: got a batch of {num_seqs}, expected {self.num_seqs}, the sequences that the cache holds"
            )
        if is_token is not None and is_token.all():
            is_token = None
        if start:
            self._check_padding(start, is_token)
        before = np.array(self._num_tokens(start) if start else [0] * num_seqs, np.int64)
        is_new = np.ones((num_seqs, end - start), np.bool_) if is_token is None else is_token[:, start:]
        first_seen = np.zeros_like(before)
        if free_passed and self._window is not None:
            first_seen = np.maximum(before - self._window + 1, 0)
        growth = Growth(start, before, first_seen, is_new, None if is_token is None else is_token.copy())
        num_missing = self._num_missing(growth)
        if num_missing > 0:
            raise KVCacheValueError(
                f"{self._option}: got {self.num_blocks} blocks of {self.block_size} tokens, expected at least"
                f" {self.num_blocks + num_missing} to hold {num_seqs} sequences of {end} tokens"
            )
        return growth

    def grow(self, growth: Growth) -> AppendStep:
        """Allocates the blocks of what `plan` has returned; nothing may have changed since.

        Layers make the `copies` before anything is written or grown again.

        Returns:
          The step, on the host.
        """
        start, before, first_seen, is_new, is_token = growth
        if not start:
            self._replace(self._pool.sequence() for _ in before)
        self.truncate(start)
        if first_seen.any():
            for sequence, position in zip(self._sequences, first_seen.tolist(), strict=True):
                sequence.free_before(position)
        added = is_new.sum(axis=1)
        self._copies = self._pool.append(self._sequences, added.tolist())
        self._is_token = is_token
        block_table = self.rows()
        cu_q_lens = np.concatenate([[0], np.cumsum(added)])
        return AppendStep(
            block_table=torch.from_numpy(block_table),
            slot_mapping=torch.from_numpy(self._slots(block_table, before, is_new).ravel()),
            seq_lens=torch.from_numpy((before + added).astype(np.int32)),
            cu_q_lens=torch.from_numpy(cu_q_lens.astype(np.int32)),
            stored=None if is_new.all() else torch.from_numpy(np.flatnonzero(is_new)),
        )

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions of every sequence, as `check_length` allows, and frees later blocks."""
        for sequence, num_kept in zip(self._sequences, self._num_tokens(length), strict=True):
            sequence.truncate(num_kept)
        if self._is_token is not None:
            self._is_token = self._is_token[:, :length]

    def check_length(self, length: int, held: int) -> None:
        """Checks that the sequences can continue from the first `length` of `held` positions.

        Raises:
          KVCacheValueError: blocks that the window reaches from there are already freed.
        """
        if self._window is None:
            return
        for sequence, num_kept in zip(self._sequences, self._num_tokens(length), strict=True):
            if not 0 < num_kept < sequence.num_tokens:
                continue
            oldest = int((sequence.blocks == NO_BLOCK).sum()) * self.block_size
            if max(num_kept - self._window + 1, 0) < oldest:
                raise KVCacheValueError(
                    f"tokens_to_remove: got {length - held}, expected at most the tokens of the last step or all:"
                    f" blocks that the sliding window of {self._window} tokens had passed were given back"
                )

    def select(self, sequences: np.ndarray) -> None:
        """Replaces all sequences by those with these indices (or marked by a bool array); copies share their blocks."""
        if not self.num_seqs:
            return
        is_token = self._is_token
        self._replace(self._sequences[index].fork() for index in np.arange(self.num_seqs)[sequences])
        self._is_token = None if is_token is None else is_token[sequences]

    def _replace(self, sequences: Iterable[PagedSequence]) -> None:
        replaced, self._sequences = self._sequences, list(sequences)
        for sequence in replaced:
            sequence.free()
        self._is_token = None
        self._copies = NO_COPIES

    def _num_tokens(self, length: int) -> list[int]:
        """Tokens of each sequence before position `length`."""
        if self._is_token is not None:
            return [int(number) for number in self._is_token[:, :length].sum(axis=1)]
        return [min(length, sequence.num_tokens) for sequence in self._sequences]

    def _num_missing(self, growth: Growth) -> int:
        """How many blocks a growth lacks; at most 0 if there are enough."""
        size, (start, before, first_seen, is_new, _) = self.block_size, growth
        added = is_new.sum(axis=1)
        num_kept = -(-before // size)
        num_needed = int((-(-(before + added) // size) - num_kept).sum())
        if not start:  # every block is free then
            return num_needed - self.num_blocks
        most_missing = num_needed + len(before) - self._pool.num_free  # if each last block is copied and none is freed
        if most_missing <= 0:
            return most_missing
        rows = self.rows()
        index = np.arange(rows.shape[1])
        is_held = (rows != NO_BLOCK) & (index >= first_seen[:, None] // size) & (index < num_kept[:, None])
        num_holders = np.bincount(rows[is_held], minlength=self.num_blocks)
        # Of the sequences that share a partly filled block and write into it, one keeps it if no other holds it.
        writes = (added > 0) & (before % size > 0)
        num_writers = np.bincount(rows[writes, before[writes] // size], minlength=self.num_blocks)
        num_copies = int(np.minimum(num_writers, num_holders - 1).clip(0).sum())
        return num_needed + num_copies + int((num_holders > 0).sum()) - self.num_blocks

    def _check_padding(self, start: int, is_token: np.ndarray | None) -> None:
        """Checks that the first `start` positions are padding where they were when they were stored."""
        every = np.ones((self.num_seqs, start), np.bool_)
        held, shown = (every if mask is None else mask[:, :start] for mask in (self._is_token, is_token))
        for row, position in np.argwhere(held != shown)[:1]:
            got, expected = ("a token", "padding") if shown[row, position] else ("padding", "a token")
            raise KVCacheValueError(
                f"attention_mask: got {got} at position {position} of sequence {row}, expected {expected}, as the cache"
                " holds it"
            )

    def _slots(self, block_table: np.ndarray, before: np.ndarray, is_new: np.ndarray) -> np.ndarray:
        """Slots of the new positions: int64, of `is_new`'s shape."""
        if not is_new.any():
            return np.full(is_new.shape, NO_SLOT, np.int64)
        position = np.maximum(before[:, None] + np.cumsum(is_new, axis=1) - 1, 0)
        block = np.take_along_axis(block_table, position // self.block_size, axis=1).astype(np.int64)
        return np.where(is_new, block * self.block_size + position % self.block_size, NO_SLOT)
