"""Attention of prompts on Hopper: kvjax's own kernels, launched on torch's stream.

Two kernels run for each lot of prompts: one converts their pages to tiles in 16 bits, or in fp8, and one attends, as in
JAX, and stores results in place. For products in fp8 of NVFP4, a third one runs first to find the divisors. With near
tokens, those of an exact window's ring, another gather runs too.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from kvjax import AttentionSpec, kernels
from kvjax.ops.options import most_splits, num_reached_blocks, prompts_at_once
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.arguments.plan import AttentionPlan, RaggedPlan
from kvjax_torch.calls import arrays, choosing
from kvjax_torch.cuda.ragged_step import RaggedStep, Schedule
from kvjax_torch.eager import merge
from kvjax_torch.launch import running

ROW_ALIGNMENT = 4
"""Bytes of a query's elements that a thread loads, and of those of a result that it stores, at once."""


class Lots(NamedTuple):
    """The division of prompts into lots, whose tiles are in memory at the same time.

    Attributes:
      at_once: prompts of a lot.
      number: lots.
      num_tokens: tokens of a prompt's tiles.
      splits: parts that a row's tokens are divided into, so that few rows occupy the whole GPU.
      num_units: numbers that products in fp8 of NVFP4 divide by, of all prompts.
    """

    at_once: int
    number: int
    num_tokens: int
    splits: int
    num_units: int

    @property
    def num_zeros(self) -> int:
        """Zeros that kernels begin with: claims of each lot, and units."""
        return self.number + self.num_units

    @classmethod
    def of(cls, plan: RaggedPlan, step: RaggedStep, near: NearStep | None) -> Lots:
        """The lots of a step."""
        spec = plan.attention.cache.spec
        reached = _reached(plan, step)
        num_tokens = _whole_tiles(reached)
        itemsize = 1 if plan.query_quantization else 2
        every = num_tokens + (0 if near is None else near.num_tokens)
        each = prompt_bytes(every, spec.num_kv_heads, (spec.head_size, spec.head_size_v), itemsize)
        at_once = prompts_at_once(each, plan.max_prompts)
        number, splits = -(-plan.max_prompts // at_once), _splits(plan, step, at_once, reached)
        num_units = 2 * spec.num_kv_heads * plan.max_prompts if plan.query_quantization else 0
        return cls(at_once, number, num_tokens, splits, num_units)


class NearStep(NamedTuple):
    """The call over near tokens, of the same rows, whose pages are of the query's dtype."""

    plan: RaggedPlan
    step: RaggedStep

    @property
    def num_tokens(self) -> int:
        """Tokens of a prompt's tiles."""
        return _whole_tiles(_reached(self.plan, self.step))


def _reached(plan: RaggedPlan, step: RaggedStep) -> int:
    """The most tokens in the blocks that the rows of a prompt reach."""
    size = plan.attention.cache.spec.block_size
    max_blocks = choosing.most_blocks(plan.attention.cache.spec, step.tensors.block_table.shape[1])
    return num_reached_blocks(plan.attention.window, plan.max_q_len, max_blocks, size) * size


def _whole_tiles(num_tokens: int) -> int:
    return -(-num_tokens // kernels.PROMPT_TOKENS) * kernels.PROMPT_TOKENS


def prompt_bytes(num_tokens: int, num_kv_heads: int, head_sizes: tuple[int, int], itemsize: int = 2) -> int:
    """Bytes of the tiles of a prompt: whole tiles of so many tokens, with elements of `itemsize` bytes."""
    return _whole_tiles(num_tokens) * (num_kv_heads * sum(head_sizes) * itemsize + 4)


class PromptKernels(NamedTuple):
    """The kernels that serve prompts.

    Attributes:
      units: finds what products in fp8 divide by; None where they divide by nothing.
      gather: makes pages tiles.
      near_gather: makes tiles of near tokens; None where there are none.
      attends: attend to whole rows and, unless batch-invariant, to splits.
    """

    units: kernels.AnyCount | None
    gather: kernels.AnyCount
    near_gather: kernels.AnyCount | None
    attends: tuple[kernels.AnyCount, ...]

    @property
    def every(self) -> tuple[kernels.AnyCount, ...]:
        """All of them."""
        optional = (each for each in (self.units, self.near_gather) if each is not None)
        return (*optional, self.gather, *self.attends)


class TileKind(NamedTuple):
    """What the tiles of prompts are.

    Attributes:
      places: where the pages are.
      query_quantization: whether products are in fp8.
      near: the plan of the call over near tokens, and where their pages are; None for none.
    """

    places: arrays.PagePlaces
    query_quantization: bool
    near: tuple[AttentionPlan, arrays.PagePlaces] | None


def kernels_of(plan: RaggedPlan, step: RaggedStep, near: NearStep | None) -> PromptKernels:
    """The kernels of a step."""
    of_near = None
    if near is not None:
        attention = near.plan.attention
        of_near = attention, arrays.page_places(attention.cache, near.step.tensors)
    kind = TileKind(arrays.page_places(plan.attention.cache, step.tensors), plan.query_quantization, of_near)
    with choosing.one_at_a_time:
        return _kernels(plan.attention, kind, step.rows.stride(0), step.query.device)


class PromptCall(NamedTuple):
    """The prompts of a call, and what serves them.

    Attributes:
      plan: of a call that the kernels serve.
      step: the call.
      lots: those of its prompts.
      own: the kernels of `kernels_of`.
      dtype: of gathered keys and values.
    """

    plan: RaggedPlan
    step: RaggedStep
    lots: Lots
    own: PromptKernels
    dtype: torch.dtype


def attend(call: PromptCall, schedule: Schedule, near: tuple[NearStep, Schedule] | None) -> None:
    """Serves the prompts of a step, and stores their results in place.

    With several splits, their rows must already hold the results of rows that see nothing. `schedule` is the division
    of the step, `near` the call over near tokens and its division.
    """
    plan, step, lots, own, dtype = call
    attention, tensors, out, lse = plan.attention, step.tensors, step.out, step.lse
    spec, num_rows = attention.cache.spec, step.query.shape[0]
    at_once, num_lots, num_tokens, splits, num_units = lots
    is_aligned = out.data_ptr() % ROW_ALIGNMENT == 0
    results = (out if is_aligned else torch.empty_like(out).copy_(out)), lse
    if splits > 1:
        results = (
            lse.new_empty((splits * num_rows, *out.shape[1:])),
            lse.new_full((splits * num_rows, *lse.shape[1:]), -torch.inf),
        )

    tiles = _tiles(spec, at_once * num_tokens, dtype, step.query.device)
    of_near: tuple[torch.Tensor, ...] = ()
    near_counts: tuple[int, ...] = ()
    if near is not None:
        near_counts = (near[0].num_tokens,)
        of_near = near[1].prompts, *_tiles(spec, at_once * near_counts[0], dtype, step.query.device)
    units = () if own.units is None else (schedule.header[-num_units:],)
    of_parts = list(zip(attention.cache.scale_tensors(tensors), spec.dtype.parts, strict=True))
    scales = [scale.contiguous() for scale, part in of_parts if part.takes_scale]
    row_scales = [scale for scale, part in of_parts if part.info.has_row_scales]
    sinks = () if step.sinks is None or splits > 1 else (step.sinks.contiguous(),)
    kernel = own.attends[splits > 1]
    (table, table_stride), found = step.table(), (schedule.prompts, schedule.header)
    max_blocks = choosing.most_blocks(spec, tensors.block_table.shape[1])
    for lot in range(num_lots):
        first = lot * at_once
        gather_counts, amount = (first, num_tokens, max_blocks, table_stride, step.num_blocks - 1), at_once * num_tokens
        pages = table, *found, tensors.key_cache, tensors.value_cache, *row_scales
        if own.units is not None:
            running.run(running.Call(own.units, gather_counts, (*pages, *units), amount))
        running.run(running.Call(own.gather, gather_counts, (*pages, *units, *tiles), amount))
        if near is not None and own.near_gather is not None:
            running.run(_near_gather(own.near_gather, *near, (first, at_once), of_near[1:]))
        inputs = *found, step.rows, *tiles, *units, *scales, *sinks, *of_near, *results
        counts = step.rows.shape[0], num_tokens, first, at_once, lot, splits, *near_counts
        running.run(running.Call(kernel, counts, inputs, 1))
    if splits > 1:
        # What the rows hold is one more part, with the sinks.
        parts = [x.unflatten(0, (splits, num_rows)).unbind() for x in results]
        merged = merge.merge([out.float(), *parts[0]], [lse, *parts[1]])
        out.copy_(merged[0])
        lse.copy_(merged[1])
    elif not is_aligned:
        out.copy_(results[0])


def _tiles(
    spec: AttentionSpec, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for tiles of keys and of values, and for the bias, of so many tokens of all prompts of a lot."""
    rows = num_tokens * spec.num_kv_heads
    keys, values = (torch.empty(rows * size, dtype=dtype, device=device) for size in spec.head_sizes)
    return keys, values, torch.empty(num_tokens, dtype=torch.float32, device=device)


def _near_gather(
    kernel: kernels.AnyCount,
    near: NearStep,
    schedule: Schedule,
    prompts: tuple[int, int],
    tiles: tuple[torch.Tensor, ...],
) -> running.Call:
    """The call that makes tiles of the near tokens of a lot's prompts: the first of them, and how many."""
    first, at_once = prompts
    tensors, num_tokens, (table, stride) = near.step.tensors, near.num_tokens, near.step.table()
    max_blocks = choosing.most_blocks(near.plan.attention.cache.spec, tensors.block_table.shape[1])
    counts = first, num_tokens, max_blocks, stride, near.step.num_blocks - 1
    inputs = table, schedule.prompts, schedule.header, tensors.key_cache, tensors.value_cache, *tiles
    return running.Call(kernel, counts, inputs, at_once * num_tokens)


def _splits(plan: RaggedPlan, step: RaggedStep, at_once: int, reached: int) -> int:
    attention = plan.attention
    if attention.batch_invariant:
        return 1
    spec, num_rows = attention.cache.spec, step.query.shape[0]
    most = most_splits(num_rows, attention.num_heads, spec.head_size_v)
    return kernels.prompt_splits(
        spec,
        choosing.target_of(step.query.device),
        num_prompts=at_once,
        max_q_len=min(plan.max_q_len, num_rows),
        num_heads=attention.num_heads,
        num_tokens=reached,
        max_splits=most if num_rows >= kernels.PROMPT_ROWS else 1,
    )


@functools.lru_cache(maxsize=1024)
def _kernels(plan: AttentionPlan, tiles: TileKind, token_stride: int, device: torch.device) -> PromptKernels:
    places, query_quantization, near = tiles
    spec, target = plan.cache.spec, choosing.target_of(device)
    kind = kernels.PromptKind(
        spec,
        kernels.RowMemory(numpy_dtype(plan.dtype), token_stride, ROW_ALIGNMENT),
        plan.num_heads,
        plan.scale_sizes,
        plan.sm_scale,
        plan.window,
        plan.logits_soft_cap,
        plan.has_sinks,
        is_divided=False,
        query_quantization=query_quantization,
        near=None if near is None else near[0].window,
    )
    pages = arrays.page_memory(plan.cache, places.alignments)
    units = kernels.prompt_units_kernel(spec, pages) if any(kind.has_units) else None
    if query_quantization:
        gather = kernels.prompt_fp8_gather_kernel(spec, pages)
    else:
        scale_pages = arrays.scale_memory(plan.cache, places.scale_alignments)
        gather = kernels.prompt_gather_kernel(spec, pages, kind.dtype, scale_pages)
    near_gather = None
    if near is not None:
        near_pages = arrays.page_memory(near[0].cache, near[1].alignments)
        near_gather = kernels.prompt_gather_kernel(near[0].cache.spec, near_pages, kind.dtype)
    divided = dataclasses.replace(kind, has_sinks=False, is_divided=True)
    splits = () if plan.batch_invariant else (kernels.prompt_kernel(divided, target),)
    return PromptKernels(units, gather, near_gather, (kernels.prompt_kernel(kind, target), *splits))
