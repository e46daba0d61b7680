"""`ragged_paged_attention` of CUDA tensors: the decode kernel serves some sequences, others are prompts.

Prompts are served by the prompt kernel (`prompt_kernels`), and where there is none by torch (`prompts`). A kernel
divides the step on torch's stream, in shapes that the call's limits fix. So nothing waits for a length, and a CUDA
graph that records a call can be replayed with other lengths.
"""

from __future__ import annotations

import dataclasses

import torch

from kvjax import UnsupportedError, kernels
from kvjax.ops.options import restricting
from kvjax_torch.arguments.dtypes import torch_dtype
from kvjax_torch.arguments.plan import AttentionPlan, RaggedPlan, ReadTensors
from kvjax_torch.calls import attending, choosing
from kvjax_torch.cuda import prompt_kernels, prompts, ragged_step, reads
from kvjax_torch.cuda.ragged_step import PackedRows, RaggedStep
from kvjax_torch.eager.trees import TreeRows
from kvjax_torch.launch import running


def attend(
    plan: RaggedPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    cu_q_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    tree: TreeRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_paged_attention` of CUDA tensors that `plan` describes; stores results in `out` if it is given.

    Raises:
      UnsupportedError: batch invariance or products in fp8 are requested, and prompts may come that the prompt kernel
        does not serve; or int32 does not index the packed rows of sequences that decode.
    """
    attention = plan.attention
    served = attending.route_of(attention, query.device, plan.query_quantization)
    by_kernels = plan.max_prompts > 0 and served.why_no_prompt_kernel is None
    if attention.batch_invariant and plan.max_prompts and not by_kernels:
        raise UnsupportedError(
            f"got batch_invariant=True and room for {plan.max_prompts} sequences of more than"
            f" decode_q_len={attention.q_len} query tokens, which no kernel serves; expected max_prompts=0, or CPU"
            " tensors"
        )
    if plan.query_quantization and plan.max_prompts and not by_kernels:
        raise UnsupportedError(
            f"query_quantization needs the prompt kernel: {served.why_no_prompt_kernel}; got room for"
            f" {plan.max_prompts} sequences of more than decode_q_len={attention.q_len} query tokens, expected"
            " max_prompts=0, or CPU tensors"
        )
    if attention.batch_invariant and attention.q_len:  # raises before anything is written
        reads.parts_of(attention, tensors.seq_lens.shape[0], tensors)
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty((num_tokens, num_heads, attention.cache.spec.head_size_v)) if out is None else out
    lse = query.new_empty((num_tokens, num_heads), dtype=torch.float32)
    if not (query.numel() and tensors.block_table.numel()):
        _see_nothing(out, lse, sinks)
        return out, lse
    spec = attention.cache.spec
    packed_size = tensors.seq_lens.shape[0] * attention.q_len * num_heads * max(spec.head_size, spec.head_size_v)
    if packed_size > choosing.INT32_MAX:
        raise UnsupportedError(
            f"got {tensors.seq_lens.shape[0]} sequences, each padded to {attention.q_len} query tokens of {num_heads}"
            f" heads: {packed_size} elements, expected at most {choosing.INT32_MAX}; pass a smaller max_q_len or"
            " decode_q_len"
        )
    rows = ragged_step.runs(query, kernels.PROMPT_ROWS if by_kernels else 1)
    step = RaggedStep(query, rows, tensors, cu_q_lens, sinks, out, lse, tree)
    of_prompts = dataclasses.replace(plan, attention=_of_prompts(attention, tensors, by_kernels))
    window = of_prompts.attention.window if plan.max_prompts else None
    step_kernels = ragged_step.kernels_of(attention, window, is_aligned=out.data_ptr() % 4 == 0)
    lots = prompt_kernels.Lots.of(of_prompts, step) if by_kernels else None
    own = prompt_kernels.kernels_of(of_prompts, step) if by_kernels else None
    running.compile_once((*step_kernels, *(() if own is None else own.every)), query.device)
    if lots is not None and lots.splits > 1:
        _see_nothing(out, lse, sinks)
    schedule = ragged_step.schedule(plan, step, step_kernels.schedule, 0 if lots is None else lots.num_zeros)
    if schedule.packed is not None:
        decoded = _decode(attention, step, schedule.packed)
        ragged_step.place(step, step_kernels.place, schedule.packed.places, *decoded)
    dtype = torch_dtype(served.dense_dtype)
    if lots is not None and own is not None:
        prompt_kernels.attend(of_prompts, step, schedule, lots, own, dtype)
    elif plan.max_prompts:
        prompts.attend(of_prompts, step, step_kernels.place, dtype)
    return out, lse


def _see_nothing(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Stores the results of rows that see nothing."""
    out.zero_()
    lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks.expand_as(lse))


def _of_prompts(plan: AttentionPlan, tensors: ReadTensors, by_kernels: bool) -> AttentionPlan:
    """The plan of prompts: without a tree, and without a window that holds all tokens of a table.

    Kernels are compiled once for tables of all widths, so theirs is one that sums of int32 do not exceed.
    """
    reach = choosing.INT32_MAX // 2 if by_kernels else tensors.block_table.shape[1] * plan.cache.spec.block_size
    return dataclasses.replace(plan, window=restricting(plan.window, reach), tree=None)


def _decode(plan: AttentionPlan, step: RaggedStep, packed: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of packed rows: `[n, num_heads, head_size_v]` and float32 `[n, num_heads]`."""
    rows, table = packed.rows, step.tensors.block_table
    if ragged_step.are_alone(plan):
        table, rows = table.repeat_interleave(plan.q_len, dim=0), rows.flatten(0, 1)[:, None]
    tensors = step.tensors._replace(block_table=table, seq_lens=packed.lens)
    out, lse = reads.attend(ragged_step.decoding_alone(plan), rows, tensors, step.sinks, None, step.tree)
    return out.flatten(0, 1), lse.flatten(0, 1)
