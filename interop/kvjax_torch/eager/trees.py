"""Query tokens that are a tree: which tokens the rows of sequences see, for kernels and for attention in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

WORD_BITS = 32


class TreeRows(NamedTuple):
    """What rows see of the last tokens of their sequences, which are query tokens and, where these are fewer, context.

    Attributes:
      seen: bool `[num_seqs, q_len, num_tokens]`, whether a row sees a token, no later one.
      depth: int64 `[num_seqs, q_len]`, by how many tokens a row's position follows the one before these tokens.
        Padding, which precedes a sequence's rows, has the depth of the first of them.
      of_tokens: int64 `[num_seqs, num_tokens]`, the same for the tokens.
      first: int64 `[num_seqs]`, the depth of a sequence's first row, the least one.
    """

    seen: torch.Tensor
    depth: torch.Tensor
    of_tokens: torch.Tensor
    first: torch.Tensor

    def of_rows(self, rows: slice) -> TreeRows:
        """That of some rows, the last ones of sequences that end with them."""
        return TreeRows(
            self.seen[:, rows, : rows.stop], self.depth[:, rows], self.of_tokens[:, : rows.stop], self.first
        )

    def of_sequence(self, seq: int) -> TreeRows:
        """That of one sequence."""
        return TreeRows(*(x[seq : seq + 1] for x in self))

    def words(self, window: int | None) -> torch.Tensor:
        """What the decode kernel reads, int32 `[num_seqs, q_len, 2 + words]`: `kvjax.kernels`' `ReadArrays.tree`."""
        bits = self._in_window(window).to(torch.int64)
        bits = pad(bits, (0, -bits.shape[-1] % WORD_BITS)).unflatten(-1, (-1, WORD_BITS))
        words = (bits << torch.arange(WORD_BITS, device=bits.device)).sum(-1)
        return torch.cat([torch.stack([self.depth, self.first[:, None].expand_as(self.depth)], -1), words], -1).int()

    def sees(self, seq_lens: torch.Tensor, max_len: int, window: int | None) -> torch.Tensor:
        """Whether rows see the tokens of sequences, bool `[num_seqs, q_len, max_len]`; past a length undefined."""
        num_tokens = self.seen.shape[2]
        starts = seq_lens.to(torch.int64).clamp(min=0)[:, None] - num_tokens
        number = (torch.arange(max_len, device=seq_lens.device) - starts)[:, None]
        at = number.clamp(0, num_tokens - 1).expand(-1, self.seen.shape[1], -1)
        in_context = number < 0 if window is None else (number < 0) & (self.depth[..., None] - number < window)
        return in_context | ((number >= 0) & self._in_window(window).gather(2, at))

    def _in_window(self, window: int | None) -> torch.Tensor:
        if window is None:
            return self.seen
        return self.seen & ((self.depth[..., None] - self.of_tokens[:, None]).clamp(min=0) < window)


def as_tree(tree_mask: torch.Tensor, num_tokens: int, q_lens: torch.Tensor) -> TreeRows:
    """The tree of a checked mask, whose first `num_tokens` rows and columns are used.

    A sequence with fewer query tokens (`q_lens`) has them first in its mask, and last in its tree.
    """
    own = tree_mask[..., :num_tokens, :num_tokens].expand(len(q_lens), num_tokens, num_tokens)
    place = torch.arange(num_tokens, device=own.device)
    first = (num_tokens - q_lens.to(torch.int64)).clamp(0, num_tokens)
    number = place - first[:, None]
    at = number.clamp(min=0)
    placed = own.gather(1, at[:, :, None].expand(own.shape)).gather(2, at[:, None].expand(own.shape))
    seen = (placed | (number < 0)[:, None]) & (place <= place[:, None])
    of_tokens = (seen & (place < place[:, None])).sum(-1)
    return TreeRows(seen, of_tokens.maximum(first[:, None]), of_tokens, first)
