"""`ragged_paged_attention` of CUDA tensors: sequences that decode by the kernels over pages, prompts over dense keys.

Which sequence is which is decided by arithmetic on torch's stream, in shapes that the call's numbers fix: nothing waits
for a length, and a CUDA graph that records a call replays with other lengths. To each of the two ways a sequence of the
other is an empty one.
"""

from __future__ import annotations

import dataclasses

import torch

from kvjax import UnsupportedError
from kvjax_torch import cuda, prompts
from kvjax_torch.plan import AttentionPlan, RaggedPlan
from kvjax_torch.ragged_rows import Pages, Results, Sequences


def attend(
    plan: RaggedPlan,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_paged_attention` of CUDA tensors that `plan` describes.

    Raises:
      UnsupportedError: prompts are to have the same bits whatever else is in the batch.
    """
    if plan.attention.batch_invariant and plan.max_prompts:
        raise UnsupportedError(
            f"got batch_invariant=True and room for {plan.max_prompts} sequences of more than"
            f" decode_q_len={plan.attention.q_len} query tokens, for which torch's attention promises no bits; expected"
            " max_prompts=0, or CPU tensors"
        )
    results = Results.of_nothing(query, plan.attention.cache.spec.head_size_v, sinks)
    if query.numel() and block_table.numel():
        pages = Pages(key_cache, value_cache, k_scale, v_scale)
        sequences = Sequences.of(query.shape[0], block_table, seq_lens, cu_q_lens)
        _decode(plan.attention, query, pages, sequences, sinks, results)
        if plan.max_prompts:
            prompts.attend(plan, query, pages, sequences, sinks, results)
    return results.out[:-1], results.lse[:-1]


def _decode(
    plan: AttentionPlan,
    query: torch.Tensor,
    pages: Pages,
    sequences: Sequences,
    sinks: torch.Tensor | None,
    results: Results,
) -> None:
    """The rows of sequences with at most `plan.q_len` of them, packed as a `paged_attention` call has them."""
    table, lens, starts, ends = sequences
    num_seqs, most = table.shape[0], plan.q_len
    from_last = torch.arange(-most, 0, device=query.device)
    row = ends[:, None] + from_last
    is_row = (row >= starts[:, None]) & (sequences.q_lens <= most)[:, None]
    rows = query.index_select(0, row.clamp(min=0).flatten())
    if plan.window is None or most == 1:
        lens = lens * is_row[:, -1]
    else:
        # A row that a sequence has not would reach further back than those that it has, to what may be NaN there: so
        # each row is a sequence of its own.
        lens = ((lens[:, None] + (1 + from_last)) * is_row).flatten()
        table, plan = table.repeat_interleave(most, dim=0), dataclasses.replace(plan, q_len=1)
    rows = rows.view(-1, plan.q_len, *query.shape[1:])
    out, lse = cuda.attend(
        plan, rows, pages.key_cache, pages.value_cache, table, lens, pages.k_scale, pages.v_scale, sinks
    )
    per_row = (num_seqs, most)
    results.put(row, is_row, out.flatten(0, 1).unflatten(0, per_row), lse.flatten(0, 1).unflatten(0, per_row))
