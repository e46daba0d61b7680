"""A `ragged_paged_attention` call on a GPU: its arrays, how it is divided, and where its results go.

One kernel packs the rows of sequences that decode, finds the prompts, and stores the results of rows that are neither.
Another places packed results among those of the step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from kvjax import kernels
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.arguments.plan import AttentionPlan, RaggedPlan, ReadTensors
from kvjax_torch.calls import choosing
from kvjax_torch.launch import running


class PackedRows(NamedTuple):
    """The rows of sequences that decode.

    Attributes:
      rows: `[num_seqs, decode_q_len, num_heads, head_size]`, the last ones of each sequence. Those that a sequence does
        not have, or that do not decode, are zeros: rows of others would affect the rounding of its own.
      places: int32 `[num_seqs * decode_q_len]`, the row of the query that each is, or -1.
      lens: int32 `[num_seqs]`, the tokens of each, 0 for a sequence that does not decode; with a window and several
        rows, `[num_seqs * decode_q_len]`, of each row.
    """

    rows: torch.Tensor
    places: torch.Tensor
    lens: torch.Tensor


class Schedule(NamedTuple):
    """How a step is divided.

    Attributes:
      prompts: int32, `kernels.PROMPT_FIELDS` of each prompt.
      header: int32, the number of prompts, and zeros for the prompt kernels.
      packed: the rows that decode; None if none do.
    """

    prompts: torch.Tensor
    header: torch.Tensor
    packed: PackedRows | None


@dataclasses.dataclass(frozen=True)
class RaggedStep:
    """A call's arrays and results.

    Attributes:
      query: `[num_tokens, num_heads, head_size]`.
      rows: the same as kernels read it, `[num_tokens, num_heads * head_size]`, or more rows.
      tensors: the cache, its scales, the block table and the lengths.
      cu_q_lens: the bounds of their rows, int32 or int64 `[num_seqs + 1]`, any numbers.
      sinks: float32 `[num_heads]`, or None.
      out: `[num_tokens, num_heads, head_size_v]` of the query's dtype, contiguous; results are stored here.
      lse: float32 `[num_tokens, num_heads]`, likewise.
    """

    query: torch.Tensor
    rows: torch.Tensor
    tensors: ReadTensors
    cu_q_lens: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor

    def table(self) -> tuple[torch.Tensor, int]:
        """The block table as kernels read it, and the entries from one sequence's first to the next's."""
        return choosing.table(self.tensors.block_table, self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return min(self.tensors.num_blocks, choosing.INT32_MAX)


def are_alone(plan: AttentionPlan) -> bool:
    """Whether each row that decodes becomes a sequence of its own.

    The window of a row that a sequence does not have would reach before those of its rows, where memory may hold NaN;
    in a tree such a row is at the position of the first one.
    """
    return plan.window is not None and plan.q_len > 1 and plan.tree is None


def decoding_alone(plan: AttentionPlan) -> AttentionPlan:
    """The plan of attention to packed rows."""
    return dataclasses.replace(plan, q_len=1) if are_alone(plan) else plan


def runs(query: torch.Tensor, least: int) -> torch.Tensor:
    """The query as kernels read it, a copy if its heads are not contiguous or rows not aligned.

    Zeros follow where there are fewer than `least` rows.
    """
    num_tokens, num_heads, head_size = query.shape
    token_stride, head_stride, stride = query.stride()
    is_run = (stride == 1 or head_size == 1) and (head_stride == head_size or num_heads == 1)
    places = query.data_ptr() | token_stride * query.element_size()
    is_near = num_heads * head_size <= token_stride <= choosing.INT32_MAX // max(num_tokens, least)
    if not (is_run and is_near) or places % _units(query).size:
        query = query.clone(memory_format=torch.contiguous_format)
        token_stride = num_heads * head_size
    if num_tokens < least:  # as far apart as they are, for kernels are compiled for a stride
        padded = query.new_zeros((least, token_stride))
        padded[:num_tokens, : num_heads * head_size].unflatten(1, (num_heads, head_size)).copy_(query)
        return padded[:, : num_heads * head_size]
    return query.as_strided((num_tokens, num_heads * head_size), (token_stride, 1))


def _units(query: torch.Tensor) -> kernels.Units:
    return kernels.Units.of(query.shape[1] * query.shape[2], numpy_dtype(query.dtype))


class StepKernels(NamedTuple):
    """The kernels of `schedule` and `place`."""

    schedule: kernels.AnyCount
    place: kernels.AnyCount


def kernels_of(plan: AttentionPlan, window: int | None, *, is_aligned: bool = True) -> StepKernels:
    """The kernels of a step whose rows see `window` tokens if they are a prompt's; None for all.

    `is_aligned` says whether 4 divides the address of the results.
    """
    spec, dtype = plan.cache.spec, numpy_dtype(plan.dtype)
    query = kernels.Units.of(plan.num_heads * spec.head_size, dtype)
    results = kernels.Units.of(plan.num_heads * spec.head_size_v, dtype, is_aligned)
    kind = kernels.StepKind(
        spec.block_size,
        window,
        plan.q_len,
        are_alone(plan),
        query,
        results,
        plan.num_heads,
        plan.has_sinks,
    )
    with choosing.one_at_a_time:
        return StepKernels(kernels.step_schedule_kernel(kind), kernels.placement_kernel(results, plan.num_heads))


def schedule(plan: RaggedPlan, step: RaggedStep, kernel: kernels.AnyCount, num_zeros: int) -> Schedule:
    """Divides a step, and stores the results of rows that see nothing: of no sequence, or of one that is not served.

    Sequences of at most `plan.attention.q_len` rows decode. Of the others, the first `plan.max_prompts` are prompts.
    Sequences of more than `plan.max_q_len` rows are neither.

    Args:
      plan: of the call.
      step: the call.
      kernel: that of `kernels_of`.
      num_zeros: zeros of the header.
    """
    attention, query, most = plan.attention, step.query, plan.attention.q_len
    num_rows, num_heads, head_size = query.shape
    num_seqs, width = step.tensors.block_table.shape
    table, table_stride = step.table()
    lens, bounds = (choosing.int32(x, 0, choosing.INT32_MAX) for x in (step.tensors.seq_lens, step.cu_q_lens))

    def empty(*shape: int) -> torch.Tensor:
        return query.new_empty(shape, dtype=torch.int32)

    prompts, header = empty(max(plan.max_prompts, 1) * len(kernels.PROMPT_FIELDS)), empty(1 + num_zeros)
    packed: PackedRows | None = None
    rows: tuple[torch.Tensor, ...] = ()
    stride = 0
    if most:
        rows = (step.rows,)
        stride = step.rows.stride(0) * query.element_size() // _units(query).size
        packed_rows = query.new_empty((num_seqs, most, num_heads, head_size))
        num_lens = num_seqs * most if are_alone(attention) else num_seqs
        packed = PackedRows(packed_rows, empty(num_seqs * most), empty(num_lens))
    sinks = () if step.sinks is None else (step.sinks.contiguous(),)
    max_blocks = choosing.most_blocks(attention.cache.spec, width)
    limits = plan.max_q_len, plan.max_prompts, num_zeros
    counts = num_seqs, num_rows, max_blocks, table_stride, step.num_blocks, *limits, stride
    arrays = table, lens, bounds, *rows, *sinks, prompts, header, step.out, step.lse, *(packed or ())
    running.run(running.Call(kernel, counts, arrays, kernels.step_schedule_programs(num_seqs, num_rows)))
    return Schedule(prompts, header, packed)


def place(
    step: RaggedStep, kernel: kernels.AnyCount, places: torch.Tensor, rows: torch.Tensor, lses: torch.Tensor
) -> None:
    """Stores results where they belong.

    Args:
      step: the call.
      kernel: that of `kernels_of`.
      places: int32 `[n]`, the row of each result, or -1 for one that belongs to none.
      rows: `[n, num_heads, head_size_v]` of the query's dtype, contiguous.
      lses: float32 `[n, num_heads]`, contiguous.
    """
    running.run(running.Call(kernel, (), (places, rows, lses, step.out, step.lse), places.shape[0]))
