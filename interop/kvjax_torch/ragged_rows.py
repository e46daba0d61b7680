"""The arrays of a `ragged_paged_attention` call on a GPU, and the results that its two parts fill in."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from kvjax_torch.plan import AttentionPlan, ReadTensors


class Sequences(NamedTuple):
    """Some sequences of a call.

    Attributes:
      table: `[num_seqs, max_blocks]`, any numbers: entries that are not blocks of the cache hold no tokens.
      lens: int32 or int64 `[num_seqs]`, any numbers.
      starts: int64 `[num_seqs]`, the first query row of each.
      ends: int64 `[num_seqs]`, the end of its query rows; between 0 and `num_tokens`.
    """

    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, num_tokens: int, tensors: ReadTensors, cu_q_lens: torch.Tensor) -> Sequences:
        """All sequences of a call of `num_tokens` query rows."""
        bounds = cu_q_lens.clamp(0, num_tokens).to(torch.int64)
        return cls(tensors.block_table, tensors.seq_lens, bounds[:-1], bounds[1:])

    @property
    def q_lens(self) -> torch.Tensor:
        """Query tokens of each sequence."""
        return self.ends - self.starts


class Results(NamedTuple):
    """The results of all query rows, and one more row that takes what belongs to none.

    Attributes:
      out: `[num_tokens + 1, num_heads, head_size_v]`, of the query's dtype.
      lse: float32 `[num_tokens + 1, num_heads]`.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of_nothing(
        cls,
        query: torch.Tensor,
        head_size_v: int,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
        *,
        is_in_place: bool = False,
    ) -> Results:
        """The results of rows that see no token; without the last row `is_in_place`, then in `out` if it is given."""
        num_tokens, num_heads, _ = query.shape
        num_tokens += not is_in_place
        lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
        if sinks is not None:
            lse.copy_(sinks)
        out = query.new_empty((num_tokens, num_heads, head_size_v)) if out is None else out
        return cls(out.zero_(), lse)

    def put(self, row: torch.Tensor, is_row: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Stores the results of some rows.

        Args:
          row: int64, of any shape: the query row of each result.
          is_row: bool, of that shape: whether a result belongs to a row.
          out: `[..., num_heads, head_size_v]`.
          lse: `[..., num_heads]`.
        """
        index = torch.where(is_row, row, self.out.shape[0] - 1).flatten()
        for whole, part in zip(self, (out, lse), strict=True):
            whole.index_copy_(0, index, part.flatten(0, row.ndim - 1))


@dataclasses.dataclass(frozen=True)
class RaggedCall:
    """A call's arrays and results.

    Attributes:
      query: `[num_tokens, num_heads, head_size]`.
      tensors: the cache, its scales, the block table and the lengths.
      cu_q_lens: the bounds of their rows, int32 or int64 `[num_seqs + 1]`, any numbers.
      sequences: all sequences.
      sinks: float32 `[num_heads]`, or None.
      results: of all rows; a row that neither part serves keeps the results of one that sees no token.
    """

    query: torch.Tensor
    tensors: ReadTensors
    cu_q_lens: torch.Tensor
    sequences: Sequences
    sinks: torch.Tensor | None
    results: Results


def blocks_reached(plan: AttentionPlan, max_q_len: int, max_blocks: int) -> int:
    """The number of blocks that hold all tokens a sequence's rows see, at any offset within the first block."""
    if plan.window is None:
        return max_blocks
    size = plan.cache.spec.block_size
    return min(-(-(plan.window - 1 + max_q_len + size - 1) // size), max_blocks)
