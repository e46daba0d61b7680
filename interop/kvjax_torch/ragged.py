"""`ragged_paged_attention` of CUDA tensors: kernels over pages serve sequences that decode, `prompts` serves prompts.

Arithmetic on torch's stream decides which sequence is which, in shapes that the call's limits fix. So nothing waits for
a length, and a CUDA graph that records a call can be replayed with other lengths. To either part, a sequence that the
other serves is empty.
"""

from __future__ import annotations

import dataclasses

import torch

from kvjax import UnsupportedError
from kvjax_torch import cuda, prompts
from kvjax_torch.plan import AttentionPlan, RaggedPlan, ReadTensors
from kvjax_torch.ragged_rows import RaggedCall, Results, Sequences


def attend(
    plan: RaggedPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    cu_q_lens: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_paged_attention` of CUDA tensors that `plan` describes.

    Raises:
      UnsupportedError: batch invariance is requested, and prompts may come.
    """
    if plan.attention.batch_invariant and plan.max_prompts:
        raise UnsupportedError(
            f"got batch_invariant=True and room for {plan.max_prompts} sequences of more than"
            f" decode_q_len={plan.attention.q_len} query tokens, for which torch's attention promises no bits; expected"
            " max_prompts=0, or CPU tensors"
        )
    results = Results.of_nothing(query, plan.attention.cache.spec.head_size_v, sinks)
    if query.numel() and tensors.block_table.numel():
        sequences = Sequences.of(query.shape[0], tensors, cu_q_lens)
        call = RaggedCall(query, tensors, sequences, sinks, results)
        if plan.attention.q_len:
            _decode(plan.attention, call)
        if plan.max_prompts:
            prompts.attend(plan, call)
    return results.out[:-1], results.lse[:-1]


def _decode(plan: AttentionPlan, call: RaggedCall) -> None:
    """Serves sequences of at most `plan.q_len` query rows, packed for a `paged_attention` call."""
    query, sequences = call.query, call.sequences
    table, lens, starts, ends = sequences
    num_seqs, most = table.shape[0], plan.q_len
    from_last = torch.arange(-most, 0, device=query.device)
    row = ends[:, None] + from_last
    is_row = (row >= starts[:, None]) & (sequences.q_lens <= most)[:, None]
    rows = query.index_select(0, row.clamp(min=0).flatten())
    if plan.window is None or most == 1:
        lens = lens * is_row[:, -1]
    else:
        # The window of a row that a sequence does not have would reach before those of its rows, where memory may hold
        # NaN. So each row becomes a sequence of its own.
        lens = ((lens[:, None] + (1 + from_last)) * is_row).flatten()
        table, plan = table.repeat_interleave(most, dim=0), dataclasses.replace(plan, q_len=1)
    rows = rows.view(-1, plan.q_len, *query.shape[1:])
    out, lse = cuda.attend(plan, rows, call.tensors._replace(block_table=table, seq_lens=lens), call.sinks)
    per_row = (num_seqs, most)
    call.results.put(row, is_row, out.flatten(0, 1).unflatten(0, per_row), lse.flatten(0, 1).unflatten(0, per_row))
