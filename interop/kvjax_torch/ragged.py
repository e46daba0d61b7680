"""`ragged_paged_attention` of CUDA tensors: kernels over pages serve sequences that decode, `prompts` serves prompts.

Prompts that torch's flash attention does not support (a soft cap, for example) go to the kernels over pages too, in
pieces of a few rows: torch's operations would pass over the logits many times.

Arithmetic on torch's stream decides which sequence is which, in shapes that the call's limits fix. So nothing waits for
a length, and a CUDA graph that records a call can be replayed with other lengths. To either part, a sequence that the
other serves is empty.
"""

from __future__ import annotations

import dataclasses

import torch

from kvjax import UnsupportedError
from kvjax_torch import cuda, prompt_kernels, prompts
from kvjax_torch.attention_arguments import MAX_DECODE_Q_LEN
from kvjax_torch.plan import AttentionPlan, RaggedPlan, ReadTensors
from kvjax_torch.ragged_rows import RaggedCall, Results, Sequences


def attend(
    plan: RaggedPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    cu_q_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_paged_attention` of CUDA tensors that `plan` describes. Results are copied into `out` if it is given.

    Raises:
      UnsupportedError: batch invariance is requested, and prompts may come.
    """
    by_kernels = plan.max_prompts > 0 and prompt_kernels.serves(plan.attention, query.device)
    if plan.attention.batch_invariant and plan.max_prompts and not by_kernels:
        raise UnsupportedError(
            f"got batch_invariant=True and room for {plan.max_prompts} sequences of more than"
            f" decode_q_len={plan.attention.q_len} query tokens, for which torch's attention promises no bits; expected"
            " max_prompts=0, or CPU tensors"
        )
    head_size_v = plan.attention.cache.spec.head_size_v
    is_in_place = by_kernels and not plan.attention.q_len
    results = Results.of_nothing(query, head_size_v, sinks, out if is_in_place else None, is_in_place=is_in_place)
    if query.numel() and tensors.block_table.numel():
        sequences = Sequences.of(query.shape[0], tensors, cu_q_lens)
        call = RaggedCall(query, tensors, cu_q_lens, sequences, sinks, results)
        if plan.attention.q_len:
            _decode(plan.attention, call)
        if by_kernels:
            prompt_kernels.attend(plan, call, *(x[: query.shape[0]] for x in results))
        elif plan.max_prompts:
            _serve_prompts(plan, call)
    if is_in_place:
        return results.out, results.lse
    return results.out[:-1] if out is None else out.copy_(results.out[:-1]), results.lse[:-1]


def _serve_prompts(plan: RaggedPlan, call: RaggedCall) -> None:
    """Serves the sequences with more rows than `plan.attention.q_len`.

    Where torch's flash attention does not support the call, but the kernels over pages do, these take a few rows at a
    time. They read a page once for each such piece of a sequence, mostly from L2.
    """
    spec, max_blocks = plan.attention.cache.spec, call.sequences.table.shape[1]
    attention = plan.attention
    if attention.window is not None and attention.window >= max_blocks * spec.block_size:
        attention = dataclasses.replace(attention, window=None)
        plan = dataclasses.replace(plan, attention=attention)
    # For larger heads a pass takes few rows and spills registers.
    if not prompts.can_flash(attention) and max(spec.head_size, spec.head_size_v) <= prompts.MAX_HEAD_SIZE:
        # With a window, `_decode` takes each row by itself.
        piece = dataclasses.replace(attention, q_len=1 if attention.window is not None else MAX_DECODE_Q_LEN)

        def num_pieces(q_len: int) -> int:
            return call.query.shape[0] // q_len + plan.max_prompts

        q_len = cuda.tokens_over_pages(piece, num_pieces(piece.q_len), call.tensors)
        # Each piece has a copy of its sequence's row of the block table, in 64 bits.
        if q_len and num_pieces(q_len) * max_blocks * 8 <= prompts.DENSE_BYTES:
            pieces = _pieces(plan, call.sequences, q_len, num_pieces(q_len))
            _decode(dataclasses.replace(attention, q_len=q_len), dataclasses.replace(call, sequences=pieces))
            return
    prompts.attend(plan, call)


def _pieces(plan: RaggedPlan, sequences: Sequences, q_len: int, num_pieces: int) -> Sequences:
    """Divides prompts into pieces of `q_len` rows, of which each is a sequence that ends with the piece's last token.

    The first piece of a prompt may have fewer rows. `num_pieces` is at least the number of pieces; others are empty.
    """
    table, lens, starts, ends = sequences
    num_seqs, max_blocks = table.shape
    count = torch.where(prompts.is_prompt(plan, sequences), (sequences.q_lens + (q_len - 1)) // q_len, 0)
    total = count.cumsum(0)
    number = torch.arange(num_pieces, device=table.device)
    seq = torch.searchsorted(total, number, right=True)
    is_any, seq = seq < num_seqs, seq.clamp(max=num_seqs - 1)
    rows_after = (total[seq] - 1 - number) * q_len
    end = torch.where(is_any, ends[seq] - rows_after, 0)
    start = torch.maximum(torch.where(is_any, starts[seq], 0), end - q_len)
    num_tokens = lens.clamp(0, max_blocks * plan.attention.cache.spec.block_size).to(torch.int64)[seq] - rows_after
    return Sequences(table.index_select(0, seq), torch.where(is_any, num_tokens, 0), start, end)


def _decode(plan: AttentionPlan, call: RaggedCall) -> None:
    """Serves sequences of at most `plan.q_len` query rows, packed for a `paged_attention` call."""
    query, sequences = call.query, call.sequences
    table, lens, starts, ends = sequences
    num_seqs, most = table.shape[0], plan.q_len
    from_last = torch.arange(-most, 0, device=query.device)
    row = ends[:, None] + from_last
    is_row = (row >= starts[:, None]) & (sequences.q_lens <= most)[:, None]
    # Rows of other sequences would affect the rounding of this one's.
    rows = query.index_select(0, row.clamp(min=0).flatten()).masked_fill_(~is_row.view(-1, 1, 1), 0)
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
