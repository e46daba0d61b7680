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
    if (reason := why_refused(plan, query, tensors)) is not None:
        raise UnsupportedError(reason)
    if attention.batch_invariant and attention.q_len:  # raises before anything is written
        reads.parts_of(attention, tensors.seq_lens.shape[0], tensors)
    out, lse = results_of(plan, query, out)
    if not (query.numel() and tensors.block_table.numel()):
        see_nothing(out, lse, sinks)
        return out, lse
    step = RaggedStep(query, query, tensors, cu_q_lens, sinks, out, lse)
    call = RaggedCall.divided(plan, attention, step).with_kernels()
    schedule = call.schedule()
    if schedule.packed is not None:
        call.place(schedule.packed, _decode(attention, call.step, schedule.packed, tree))
    call.attend_with_prompts(schedule)
    return out, lse


def results_of(
    plan: RaggedPlan, query: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the results of a call, unless `out` is that of the first."""
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty((num_tokens, num_heads, plan.attention.cache.spec.head_size_v)) if out is None else out
    return out, query.new_empty((num_tokens, num_heads), dtype=torch.float32)


def why_refused(plan: RaggedPlan, query: torch.Tensor, tensors: ReadTensors) -> str | None:
    """Why a call is refused, before anything is written; None if it is served."""
    attention, spec = plan.attention, plan.attention.cache.spec
    served = attending.route_of(attention, query.device, plan.query_quantization)
    lacks_kernel = plan.max_prompts > 0 and served.why_no_prompt_kernel is not None
    if attention.batch_invariant and lacks_kernel:
        return (
            f"got batch_invariant=True and room for {plan.max_prompts} sequences of more than"
            f" decode_q_len={attention.q_len} query tokens, which no kernel serves; expected max_prompts=0, or CPU"
            " tensors"
        )
    if plan.query_quantization and lacks_kernel:
        return (
            f"query_quantization needs the prompt kernel: {served.why_no_prompt_kernel}; got room for"
            f" {plan.max_prompts} sequences of more than decode_q_len={attention.q_len} query tokens, expected"
            " max_prompts=0, or CPU tensors"
        )
    num_tokens, num_heads, _ = query.shape
    row_size = num_heads * max(spec.head_size, spec.head_size_v)
    if num_tokens * row_size > choosing.INT32_MAX:
        return (
            f"got {num_tokens} query tokens of {num_heads} heads: {num_tokens * row_size} elements of the query or of"
            f" the results, expected at most {choosing.INT32_MAX}; divide the step"
        )
    packed_size = tensors.seq_lens.shape[0] * attention.q_len * row_size
    if query.numel() and tensors.block_table.numel() and packed_size > choosing.INT32_MAX:
        return (
            f"got {tensors.seq_lens.shape[0]} sequences, each padded to {attention.q_len} query tokens of {num_heads}"
            f" heads: {packed_size} elements, expected at most {choosing.INT32_MAX}; pass a smaller max_q_len or"
            " decode_q_len"
        )
    return None


@dataclasses.dataclass(frozen=True)
class RaggedCall:
    """A call, and what serves it.

    Attributes:
      plan: of the call, and of how rows that decode are packed.
      of_prompts: the plan of prompts.
      step: its arrays and results.
      step_kernels: those that divide it.
      products: the dtype of gathered keys and values, and what multiplies them where no kernel does.
      by_kernels: whether the prompt kernel attends with prompts.
      lots: of prompts, and `own` the kernels that attend with them; None where torch does.
      near: the call over near tokens that the prompt kernel also attends to; None for none.
    """

    plan: RaggedPlan
    of_prompts: RaggedPlan
    step: RaggedStep
    step_kernels: ragged_step.StepKernels
    products: prompts.Products
    by_kernels: bool
    lots: prompt_kernels.Lots | None = None
    own: prompt_kernels.PromptKernels | None = None
    near: RaggedCall | None = None

    @classmethod
    def divided(cls, plan: RaggedPlan, decoding: AttentionPlan, step: RaggedStep) -> RaggedCall:
        """A call that is not refused, without the kernels of its prompts; `step.rows` is the query."""
        attention = plan.attention
        served = attending.route_of(attention, step.query.device, plan.query_quantization, plan.returns_lse)
        by_kernels = plan.max_prompts > 0 and served.why_no_prompt_kernel is None
        rows = ragged_step.runs(step.query, kernels.PROMPT_ROWS if by_kernels else 1)
        step = dataclasses.replace(step, rows=rows)
        of_prompts = dataclasses.replace(plan, attention=_of_prompts(attention, step.tensors, by_kernels))
        window = of_prompts.attention.window if plan.max_prompts else None
        step_kernels = ragged_step.kernels_of(decoding, window, is_aligned=step.out.data_ptr() % 4 == 0)
        own_plan = dataclasses.replace(plan, attention=decoding)
        products = prompts.Products(torch_dtype(served.dense_dtype), served.by_sdpa)
        return cls(own_plan, of_prompts, step, step_kernels, products, by_kernels)

    @property
    def as_near(self) -> prompt_kernels.NearStep:
        """What another call's prompt kernel reads of this one."""
        return prompt_kernels.NearStep(self.of_prompts, self.step)

    def with_kernels(self, near: RaggedCall | None = None) -> RaggedCall:
        """Compiles the call's kernels, and those that divide `near`, which has the same results; returns the call."""
        lots = own = None
        others = () if near is None else near.step_kernels
        if self.by_kernels:
            near_step = None if near is None else near.as_near
            lots = prompt_kernels.Lots.of(self.of_prompts, self.step, near_step)
            own = prompt_kernels.kernels_of(self.of_prompts, self.step, near_step)
        kernels_of_call = *self.step_kernels, *others, *(() if own is None else own.every)
        running.compile_once(kernels_of_call, self.step.query.device)
        if lots is not None and lots.splits > 1:
            see_nothing(self.step.out, self.step.lse, self.step.sinks)
        return dataclasses.replace(self, lots=lots, own=own, near=near)

    def schedule(self) -> ragged_step.Schedule:
        """Divides the step; stores the results of rows that see nothing."""
        num_zeros = 0 if self.lots is None else self.lots.num_zeros
        return ragged_step.schedule(self.plan, self.step, self.step_kernels.schedule, num_zeros)

    def place(self, packed: PackedRows, decoded: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Stores the results of packed rows, `[n, num_heads, ...]`."""
        ragged_step.place(self.step, self.step_kernels.place, packed.places, *decoded)

    def attend_with_prompts(
        self, schedule: ragged_step.Schedule, near_schedule: ragged_step.Schedule | None = None
    ) -> None:
        """Stores the results of prompts; `near_schedule` is that of the call over near tokens, if there is one."""
        if self.lots is not None and self.own is not None:
            dtype, near = self.products.dtype, None
            if self.near is not None and near_schedule is not None:
                dtype = self.step.query.dtype
                near = self.near.as_near, near_schedule
            of_prompts = prompt_kernels.PromptCall(self.of_prompts, self.step, self.lots, self.own, dtype)
            prompt_kernels.attend(of_prompts, schedule, near)
        elif self.plan.max_prompts:
            prompts.attend(self.of_prompts, self.step, self.step_kernels.place, self.products)


def see_nothing(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Stores the results of rows that see nothing."""
    out.zero_()
    lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks.expand_as(lse))


def _of_prompts(plan: AttentionPlan, tensors: ReadTensors, by_kernels: bool) -> AttentionPlan:
    """The plan of prompts: without a tree, and without a window that holds all tokens of a table.

    Kernels are compiled once for tables of all widths, so their window is one that sums of int32 do not exceed.
    """
    reach = choosing.INT32_MAX // 2 if by_kernels else tensors.block_table.shape[1] * plan.cache.spec.block_size
    return dataclasses.replace(plan, window=restricting(plan.window, reach), tree=None)


def _decode(
    plan: AttentionPlan, step: RaggedStep, packed: PackedRows, tree: TreeRows | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of packed rows: `[n, num_heads, head_size_v]` and float32 `[n, num_heads]`."""
    rows, table = packed.rows, step.tensors.block_table
    if ragged_step.are_alone(plan):
        table, rows = table.repeat_interleave(plan.q_len, dim=0), rows.flatten(0, 1)[:, None]
    tensors = step.tensors._replace(block_table=table, seq_lens=packed.lens)
    out, lse = reads.attend(ragged_step.decoding_alone(plan), rows, tensors, step.sinks, None, tree)
    return out.flatten(0, 1), lse.flatten(0, 1)
