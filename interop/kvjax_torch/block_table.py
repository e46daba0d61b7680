"""Which blocks of a paged cache hold which tokens, for a batch of sequences that grow together.

Sequences may share blocks, as the beams of a beam search do. A full block is shared for good, since nobody writes it
again; one that is still being filled is copied before a second sequence writes into it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvjax import KVCacheValueError


class Step(NamedTuple):
    """What every layer needs in order to append tokens to each sequence and to read them all back.

    Attributes:
      block_table: int32 `[num_seqs, max_blocks]`.
      slot_mapping: int64 `[num_seqs * num_new_tokens]`, the new tokens of the first sequence before those of the next.
      seq_lens: int32 `[num_seqs]`, the new tokens included.
      copy_from: int32 `[num_copies]`: blocks to copy, whole, before anything is written.
      copy_to: int32 `[num_copies]`: where to.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    copy_from: torch.Tensor
    copy_to: torch.Tensor


class BlockTable:
    """The blocks of sequences of equal length, taken from `num_blocks` blocks of `block_size` tokens as they grow.

    Raises:
      KVCacheValueError: when made with no blocks or with blocks of no tokens.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, number in (("num_blocks", num_blocks), ("block_size", block_size)):
            if number < 1:
                raise KVCacheValueError(f"{name}: got {number}, expected at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._rows = np.empty((0, 0), np.int32)
        self._planned: tuple[int, int, int] | None = None
        self._steps: dict[torch.device, Step] = {}

    @property
    def num_seqs(self) -> int:
        """Sequences that hold tokens."""
        return len(self._rows)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that hold tokens of any sequence, shared ones counted once."""
        return np.unique(self._rows).size

    def grow(self, num_seqs: int, start: int, end: int, device: torch.device) -> Step:
        """Makes room for the tokens from `start` to `end` of every sequence; one step for all layers that ask for it.

        Args:
          num_seqs: sequences that grow: all there are, or any number where `start` is 0.
          start: tokens that each sequence keeps.
          end: tokens that each will hold.
          device: where the result's tensors lie.

        Raises:
          KVCacheValueError: another number of sequences, or no blocks left; nothing has then changed.
        """
        on_host = torch.device("cpu")
        if self._planned != (num_seqs, start, end):
            self._steps = {on_host: self._plan(num_seqs, start, end)}
            self._planned = num_seqs, start, end
        if device not in self._steps:
            self._steps[device] = Step(*(tensor.to(device, non_blocking=True) for tensor in self._steps[on_host]))
        return self._steps[device]

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of every sequence and gives back the blocks behind them."""
        self._replace(self._rows[:, : -(-length // self.block_size)])

    def select(self, sequences: np.ndarray) -> None:
        """Puts the numbered (or marked) sequences in place of all; those named twice share their blocks."""
        if self.num_seqs:
            self._replace(self._rows[sequences])

    def _replace(self, rows: np.ndarray) -> None:
        self._rows, self._planned = rows, None

    def _plan(self, num_seqs: int, start: int, end: int) -> Step:
        if start and num_seqs != len(self._rows):
            raise KVCacheValueError(
                f"key_states: got a batch of {num_seqs}, expected {len(self._rows)}, the sequences that the cache holds"
            )
        num_kept, num_wanted = (-(-length // self.block_size) for length in (start, end))
        kept = self._rows[:, :num_kept] if start else np.empty((num_seqs, 0), np.int32)
        # Of the sequences that share a block that is not full, the first goes on with it and the others get copies.
        being_filled = kept[:, -1] if start % self.block_size and end > start else kept[:, :0].ravel()
        owners = np.unique(being_filled, return_index=True)[1]
        copying = np.setdiff1d(np.arange(being_filled.size), owners)
        fresh = self._free_blocks(kept, copying.size + num_seqs * (num_wanted - num_kept), num_seqs, end)
        copy_to, added = np.split(fresh, [copying.size])
        rows = np.concatenate([kept, added.reshape(num_seqs, -1)], axis=1)
        copy_from = rows[copying, num_kept - 1]
        rows[copying, num_kept - 1] = copy_to
        self._rows = rows
        positions = np.arange(start, end)
        slots = rows[:, positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        arrays = rows, slots.ravel(), np.full(num_seqs, end, np.int32), copy_from, copy_to
        return Step(*map(torch.from_numpy, arrays))

    def _free_blocks(self, kept: np.ndarray, number: int, num_seqs: int, length: int) -> np.ndarray:
        is_free = np.ones(self.num_blocks, bool)
        is_free[kept] = False
        free = np.flatnonzero(is_free).astype(np.int32)
        if free.size < number:
            raise KVCacheValueError(
                f"num_blocks: got {self.num_blocks} blocks of {self.block_size} tokens, expected at least"
                f" {self.num_blocks - free.size + number} to hold {num_seqs} sequences of {length} tokens"
            )
        return free[:number]
