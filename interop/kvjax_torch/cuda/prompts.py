"""Attention of prompts that the prompt kernel does not serve: pages are made dense, then torch attends.

A tile of rows at a time: `scaled_dot_product_attention`, with a mask for lengths and windows, serves products of 16
bits. It has no log-sum-exp, no soft cap and no sinks; calls with these, and products of float32, are left to `dense`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from kvjax import kernels
from kvjax.ops.options import num_reached_blocks, prompts_at_once
from kvjax_torch.arguments.plan import AttentionPlan, GatherPlan, RaggedPlan, ReadTensors
from kvjax_torch.calls import choosing
from kvjax_torch.cuda import ragged_step, reads
from kvjax_torch.cuda.ragged_step import RaggedStep
from kvjax_torch.eager import dense

LOGITS_BYTES = 256 << 20
"""Limit on the float32 logits of a tile of rows; those of a single row of each sequence may exceed it."""


class Lot(NamedTuple):
    """Prompts that are attended to at once; entries that are not prompts have no rows and no tokens.

    Attributes:
      table: `[num_seqs, max_blocks]`, any numbers: entries that are not blocks of the cache hold no tokens.
      lens: int64 `[num_seqs]`, tokens of each, that fit the table.
      starts: int64 `[num_seqs]`, the first query row of each.
      ends: int64 `[num_seqs]`, the end of its query rows; between 0 and `num_tokens`.
    """

    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


class Products(NamedTuple):
    """How the fallback computes attention.

    Attributes:
      dtype: 16 bits where these hold keys and values exactly.
      by_sdpa: whether by `scaled_dot_product_attention`: `Route.by_sdpa`.
    """

    dtype: torch.dtype
    by_sdpa: bool


def attend(plan: RaggedPlan, step: RaggedStep, placement: kernels.AnyCount, products: Products) -> None:
    """Serves the prompts of a step in lots that fit in `options.DENSE_BYTES`, and stores their results.

    `placement` is the kernel of `ragged_step.place`.
    """
    attention, spec, table = plan.attention, plan.attention.cache.spec, step.tensors.block_table
    bounds = step.cu_q_lens.clamp(0, step.query.shape[0]).to(torch.int64)
    q_lens, num_seqs = bounds.diff(), table.shape[0]
    is_prompt = (q_lens > attention.q_len) & (q_lens <= plan.max_q_len)
    # The index of the first prompt, the second, ...; `num_seqs` stands for none.
    chosen = bounds.new_full((num_seqs + 1,), num_seqs)
    number = torch.where(is_prompt, is_prompt.cumsum(0) - 1, num_seqs)
    chosen.scatter_(0, number, torch.arange(num_seqs, device=table.device))

    num_blocks = num_reached_blocks(attention.window, plan.max_q_len, table.shape[1], spec.block_size)
    elements = num_blocks * spec.block_size * spec.num_kv_heads * (spec.head_size + spec.head_size_v)
    at_once = prompts_at_once(elements * products.dtype.itemsize, plan.max_prompts)
    for first in range(0, plan.max_prompts, at_once):
        some = chosen[first : min(first + at_once, plan.max_prompts)]
        own = _reached(attention, _lot_of(step, bounds, some), num_blocks)
        _attend_to_lot(plan, step, placement, own, products)


def _lot_of(step: RaggedStep, bounds: torch.Tensor, chosen: torch.Tensor) -> Lot:
    """The sequences with the indices `chosen`; an empty one for each index that is the number of sequences."""
    tensors = step.tensors
    num_seqs = tensors.block_table.shape[0]
    is_any, seq = chosen < num_seqs, chosen.clamp(max=num_seqs - 1)
    every = tensors.block_table, tensors.seq_lens, bounds[:-1], bounds[1:]
    table, lens, starts, ends = (x.index_select(0, seq) for x in every)
    lens = torch.where(is_any, lens.clamp(0, choosing.INT32_MAX), 0).to(torch.int64)
    return Lot(table, lens, starts, torch.where(is_any, ends, starts))


def _reached(plan: AttentionPlan, own: Lot, num_blocks: int) -> Lot:
    """The sequences with only those blocks that a window reaches, `num_blocks` at most."""
    if plan.window is None:
        return own
    size, max_blocks = plan.cache.spec.block_size, own.table.shape[1]
    first_row = own.lens - (own.ends - own.starts)  # its position
    first_block = (first_row - (plan.window - 1)).clamp(min=0) // size
    column = first_block[:, None] + torch.arange(num_blocks, device=own.table.device)
    table = torch.where(column < max_blocks, own.table.gather(1, column.clamp(max=max_blocks - 1)), -1)
    return own._replace(table=table, lens=own.lens - first_block * size)


def _attend_to_lot(
    plan: RaggedPlan, step: RaggedStep, placement: kernels.AnyCount, own: Lot, products: Products
) -> None:
    """Attends with a tile of rows of each sequence at a time."""
    attention, num_rows = plan.attention, step.query.shape[0]
    query, *dense_tokens, weight = _operands(attention, step, own, products.dtype)
    keys, values = (x.transpose(1, 2).contiguous() for x in dense_tokens)
    del dense_tokens  # as large
    num_lot, max_len = own.lens.shape[0], keys.shape[2]
    if attention.window is not None and products.by_sdpa:  # what no row sees may be NaN, which a mask does not remove
        first = own.lens - (own.ends - own.starts) - (attention.window - 1)
        unseen = torch.arange(max_len, device=query.device) < first[:, None]
        for x in (keys, values):
            x.masked_fill_(unseen[:, None, :, None], 0.0)
    heads = query.shape[1] // (attention.cache.spec.num_kv_heads if products.by_sdpa else 1)
    tile = max(1, min(plan.max_q_len, num_rows, LOGITS_BYTES // (4 * num_lot * heads * max_len)))
    for first_row in range(0, min(plan.max_q_len, num_rows), tile):
        row = own.starts[:, None] + torch.arange(first_row, first_row + tile, device=query.device)
        rows = query.index_select(0, row.clamp(0, num_rows - 1).flatten()).unflatten(0, (num_lot, tile))
        # The length up to the last row of the tile, even if the sequence ends before that row.
        ends = own.lens - (own.ends - own.starts) + (first_row + tile)
        tokens = dense.DenseTokens(keys, values, own.table, ends, step.tensors.num_blocks)
        if products.by_sdpa:
            out, lse = _by_sdpa(attention, rows, tokens, weight)
        else:
            out, lse = dense.attend(attention, rows, tokens, step.sinks, weight)
        places = torch.where(row < own.ends[:, None], row, -1).to(torch.int32).flatten()
        ragged_step.place(step, placement, places, out.flatten(0, 1), lse.flatten(0, 1))


def _by_sdpa(
    plan: AttentionPlan, query: torch.Tensor, tokens: dense.DenseTokens, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what `dense.attend` does by `scaled_dot_product_attention`; the log-sum-exp is NaN.

    The query heads of a KV head become rows of a single head, because torch's memory-efficient kernel, the one that
    runs on most GPUs, requires as many query heads as KV heads.
    """
    num_kv_heads = tokens.keys.shape[1]
    group = plan.num_heads // num_kv_heads
    seen = dense.seen_by(plan, query.shape[1], tokens).repeat_interleave(group, dim=1)[:, None]
    rows = query.unflatten(2, (num_kv_heads, group)).transpose(1, 2).flatten(2, 3).to(tokens.keys.dtype)
    scale = plan.sm_scale
    if scale <= 0:  # kernels take positive ones
        rows, scale = rows * (-1.0 if scale < 0 else 0.0), abs(scale) or 1.0
    attended = functional.scaled_dot_product_attention(rows, tokens.keys, tokens.values, attn_mask=seen, scale=scale)
    attended = torch.where(seen.any(-1, keepdim=True), attended, 0.0)  # rows that see nothing may be NaN
    by_token = attended.unflatten(2, (query.shape[1], group)).transpose(1, 2).flatten(2, 3)
    out = torch.empty_like(by_token, dtype=plan.dtype, memory_format=torch.contiguous_format)
    torch.mul(by_token, weight[:, None], out=out)
    return out, query.new_full(query.shape[:-1], torch.nan, dtype=torch.float32)


class _Operands(NamedTuple):
    """What products of attention are made of, in one dtype.

    Attributes:
      rows: the call's query `[num_tokens, num_heads, head_size]`.
      keys: `[num_seqs, max_len, num_kv_heads, head_size]`; zeros where a sequence has no tokens.
      values: likewise.
      weight: float32 `[num_heads]` or `[1]`, a factor of the results.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    weight: torch.Tensor


def _operands(plan: AttentionPlan, step: RaggedStep, own: Lot, dtype: torch.dtype) -> _Operands:
    """Gathers keys and values.

    In 16 bits, a scale of quantized keys is split: the gathered keys take its power of two, and the query, which is
    rounded to float16, the rest. The scale of values multiplies the results.
    """
    key_cache, value_cache, _, _, k_scale, v_scale = step.tensors

    def gather(k_scale: torch.Tensor, v_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = ReadTensors(key_cache, value_cache, own.table, own.lens, k_scale, v_scale)
        return reads.gather(GatherPlan(plan.cache, dtype, plan.scale_sizes), tensors)

    rows, weight = step.query, step.query.new_ones(1, dtype=torch.float32)
    of_keys, of_values = (part.takes_scale and dtype is not torch.float32 for part in plan.cache.spec.dtype.parts)
    if of_keys:
        rest = 2 * torch.frexp(k_scale).mantissa  # 1 if the scale is a power of two
        rows = step.query.new_empty(step.query.shape, dtype=dtype)
        torch.mul(step.query, _of_each_head(rest, plan)[:, None], out=rows)
        most = torch.finfo(dtype).max
        rows.clamp_(-most, most)
        k_scale = k_scale / rest
    if of_values:
        weight, v_scale = _of_each_head(v_scale, plan), torch.ones_like(v_scale)
    return _Operands(rows, *gather(k_scale, v_scale), weight)


def _of_each_head(scale: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """A scale of one element, or of one for each KV head, as `[num_heads]` for query heads."""
    num_kv_heads = plan.cache.spec.num_kv_heads
    return scale.reshape(-1, 1).expand(num_kv_heads, plan.num_heads // num_kv_heads).flatten()
