"""Where a step's tokens are beside an exact window, in torch: what the kernel `window_places` stores."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvjax.ops.options import WINDOW_BLOCK_SIZE
from kvjax_torch.arguments.plan import RingTensors, WindowPlaces, WindowStep

PADDING_SLOT = -1


def places(step: WindowStep) -> WindowPlaces:
    """Where the tokens of a step are."""
    of = _StepSequences.of(step.seq_lens, step.cu_q_lens)
    num_seqs, columns = len(of.lens), of.numbers(step.columns)
    first_block = (of.lens - of.q_lens - (step.size - 1)).clamp(min=0) // WINDOW_BLOCK_SIZE
    rows = existing_rows(step.window_rows, step.num_rows)
    far_lens = (of.lens - step.size).clamp(min=0)  # a query whose limit is below 0 sees nothing
    decodes = (of.q_lens > 0) & (of.ends - of.starts <= step.decode_q_len)
    near_lens = of.lens - first_block * WINDOW_BLOCK_SIZE
    lengths = near_lens, far_lens, torch.where(decodes, far_lens, 0), of.q_lens

    def in_ring(column: torch.Tensor) -> torch.Tensor:
        block = rows[:, None] * step.blocks_per_row + (first_block[:, None] + column) % step.blocks_per_row
        return torch.where(rows[:, None] >= 0, block, -1)

    if step.room is None:
        return WindowPlaces(*(x.int() for x in (*lengths, in_ring(columns))))
    num_tokens, num_old = step.room
    num_blocks = (of.lens + WINDOW_BLOCK_SIZE - 1) // WINDOW_BLOCK_SIZE - first_block - num_old
    num_blocks = torch.where((of.q_lens > 0) & (rows >= 0), num_blocks.clamp(min=0), 0)
    start = num_seqs * num_old + num_blocks.cumsum(0) - num_blocks
    own = of.numbers(num_seqs)[:, None] * num_old + columns
    table = torch.where(columns < num_old, own, start[:, None] + columns - num_old)
    exists = (rows[:, None] >= 0) & (columns < num_old + num_blocks[:, None])
    table = torch.where(exists, table, -1)
    seq, position = of.tokens(num_tokens)
    of_token = position // WINDOW_BLOCK_SIZE - first_block[seq]
    block = table[seq, of_token.clamp(0, max(step.columns - 1, 0))]
    is_written = (position >= 0) & (of_token >= 0) & (of_token < step.columns) & (block >= 0)
    slots = torch.where(is_written, block * WINDOW_BLOCK_SIZE + position % WINDOW_BLOCK_SIZE, PADDING_SLOT)
    old = in_ring(of.numbers(num_old)).clamp(min=0)
    return WindowPlaces(*(x.int() for x in (*lengths, table, old, slots)))


def ring_slots(ring: RingTensors, num_tokens: int) -> torch.Tensor:
    """`[num_tokens]`: the slots of a sequence's last tokens in its row, -1 for those that these overwrite."""
    of = _StepSequences.of(ring.seq_lens, ring.cu_q_lens)
    if not len(of.lens):
        return torch.full((num_tokens,), PADDING_SLOT, device=of.lens.device)
    seq, position = of.tokens(num_tokens)
    num_rows, per_row = len(ring.key_cache) // ring.blocks_per_row, ring.blocks_per_row * WINDOW_BLOCK_SIZE
    row = existing_rows(ring.window_rows, num_rows)[seq]
    is_kept = (position >= 0) & (row >= 0) & (position >= of.lens[seq] - per_row)
    return torch.where(is_kept, row * per_row + position % per_row, PADDING_SLOT)


class _StepSequences(NamedTuple):
    """A step's sequences; int64.

    Attributes:
      lens: `[num_seqs]`, their tokens.
      q_lens: likewise, their new tokens.
      starts: likewise, their first rows.
      ends: likewise, the rows after their last ones.
    """

    lens: torch.Tensor
    q_lens: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, seq_lens: torch.Tensor, cu_q_lens: torch.Tensor) -> _StepSequences:
        bounds = cu_q_lens.long()
        return cls(*lengths(seq_lens, cu_q_lens), bounds[:-1], bounds[1:])

    def numbers(self, count: int) -> torch.Tensor:
        """The integers from 0 to `count - 1`."""
        return torch.arange(count, device=self.lens.device)

    def tokens(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`[num_tokens]` twice: each row's sequence, and its token's position, -1 for rows of no sequence."""
        token = self.numbers(num_tokens)
        seq = torch.searchsorted(self.ends, token, right=True)
        is_token = seq < len(self.lens)
        seq = seq.clamp(max=max(len(self.lens) - 1, 0))
        is_token &= token >= self.starts[seq]
        return seq, torch.where(is_token, self.lens[seq] - (self.ends[seq] - token), -1)


def lengths(seq_lens: torch.Tensor, cu_q_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each sequence and its new ones, int64 `[num_seqs]`."""
    lens, ends = seq_lens.long().clamp(min=0), cu_q_lens.long()
    return lens, torch.minimum(ends[1:] - ends[:-1], lens)


def existing_rows(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows, int64, -1 for those that a window does not have."""
    return torch.where((rows >= 0) & (rows < num_rows), rows.long(), -1)
