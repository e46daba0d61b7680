"""Which blocks of a paged cache hold which tokens, for a batch of sequences that grow together.

Sequences may share blocks, as the beams of a beam search do. A full block is shared for good, since nobody writes it
again; one that is still being filled is copied before a second sequence writes into it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from kvjax import BlockPool, KVCacheValueError, OutOfBlocksError, PagedSequence


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
        self._pool = BlockPool(num_blocks, block_size)
        self._sequences: list[PagedSequence] = []
        self._planned: tuple[int, int, int] | None = None
        self._steps: dict[torch.device, Step] = {}

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

    def grow(self, num_seqs: int, start: int, end: int, device: torch.device) -> Step:
        """Makes room for the tokens from `start` to `end` of every sequence; one step for all layers that ask for it.

        Args:
          num_seqs: sequences that grow: all there are, or any number where `start` is 0.
          start: tokens that each sequence keeps.
          end: tokens that each will hold.
          device: where the result's tensors lie.

        Raises:
          KVCacheValueError: another number of sequences, or no blocks left; each then holds its first `start` tokens.
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
        for sequence in self._sequences:
            sequence.truncate(min(length, sequence.num_tokens))
        self._planned = None

    def select(self, sequences: np.ndarray) -> None:
        """Puts the numbered (or marked) sequences in place of all; those named twice share their blocks."""
        if self.num_seqs:
            self._replace(self._sequences[index].fork() for index in np.arange(self.num_seqs)[sequences])

    def _replace(self, sequences: Iterable[PagedSequence]) -> None:
        replaced, self._sequences = self._sequences, list(sequences)
        for sequence in replaced:
            sequence.free()
        self._planned = None

    def _plan(self, num_seqs: int, start: int, end: int) -> Step:
        if not start:
            self._replace(self._pool.sequence() for _ in range(num_seqs))
        elif num_seqs != self.num_seqs:
            raise KVCacheValueError(
                f"key_states: got a batch of {num_seqs}, expected {self.num_seqs}, the sequences that the cache holds"
            )
        self.truncate(start)
        try:
            copies = self._pool.append(self._sequences, [end - start] * num_seqs)
        except OutOfBlocksError as error:
            raise KVCacheValueError(
                f"num_blocks: got {self.num_blocks} blocks of {self.block_size} tokens, expected at least"
                f" {self.num_blocks - error.num_free + error.num_needed} to hold {num_seqs} sequences of {end} tokens"
            ) from error
        block_table = np.empty((num_seqs, -(-end // self.block_size)), np.int32)
        slots = np.empty((num_seqs, end - start), np.int64)
        for row, sequence in enumerate(self._sequences):
            block_table[row], slots[row] = sequence.blocks, sequence.slots(start, end)
        arrays = block_table, slots.ravel(), np.full(num_seqs, end, np.int32), *copies.T.copy()
        return Step(*map(torch.from_numpy, arrays))
