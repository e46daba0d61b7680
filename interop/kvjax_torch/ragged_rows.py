"""The arrays of a `ragged_paged_attention` call on a GPU, and the results that its ways put together."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Pages(NamedTuple):
    """A cache and its scales, as a call has them."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Of the cache."""
        return self.key_cache.shape[0]


class Sequences(NamedTuple):
    """Some sequences of a call.

    Attributes:
      table: `[num_seqs, max_blocks]`, of any numbers: entries outside the cache hold no tokens.
      lens: int32 or int64 `[num_seqs]`, of any numbers.
      starts: int64 `[num_seqs]`, the first row of each.
      ends: int64 `[num_seqs]`, the row after its last; between 0 and `num_tokens`.
    """

    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(
        cls, num_tokens: int, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_q_lens: torch.Tensor
    ) -> Sequences:
        """All of a call."""
        bounds = cu_q_lens.clamp(0, num_tokens).to(torch.int64)
        return cls(block_table, seq_lens, bounds[:-1], bounds[1:])

    @property
    def q_lens(self) -> torch.Tensor:
        """Query tokens of each."""
        return self.ends - self.starts


class Results(NamedTuple):
    """What rows come to; the last one is for what is of no row.

    Attributes:
      out: `[num_tokens + 1, num_heads, head_size_v]`, of the query's dtype.
      lse: float32 `[num_tokens + 1, num_heads]`.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of_nothing(cls, query: torch.Tensor, head_size_v: int, sinks: torch.Tensor | None) -> Results:
        """Those of rows that see nothing."""
        num_tokens, num_heads, _ = query.shape
        lse = query.new_full((num_tokens + 1, num_heads), -torch.inf, dtype=torch.float32)
        if sinks is not None:
            lse.copy_(sinks)
        return cls(query.new_zeros((num_tokens + 1, num_heads, head_size_v)), lse)

    def put(self, row: torch.Tensor, is_row: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Puts results where they belong.

        Args:
          row: int64, of any shape: which row each of them is.
          is_row: bool, likewise: whether it is any.
          out: `[..., num_heads, head_size_v]`.
          lse: `[..., num_heads]`.
        """
        place = torch.where(is_row, row, self.out.shape[0] - 1).flatten()
        for whole, part in zip(self, (out, lse), strict=True):
            whole.index_copy_(0, place, part.flatten(0, row.ndim - 1))
