"""Attention of prompts on a GPU: the gather kernel makes pages dense, then torch attends.

torch's builds for CUDA have FlashAttention-2 for sequences of any lengths (`torch.ops.aten._flash_attention_forward`).
It aligns the last query row of a sequence with its last key, so chunks after cached tokens are one call, which reads
the step's query in place. It does not support some calls (a soft cap, other head sizes). Where kernels over pages do
not serve those either, `dense` attends, a tile of rows at a time, with products of 16 bits where these hold keys and
values exactly, and else of float32.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from kvjax import KVQuantMode
from kvjax_torch import cuda, dense
from kvjax_torch.dtypes import torch_dtype
from kvjax_torch.plan import AttentionPlan, GatherPlan, RaggedPlan, ReadTensors
from kvjax_torch.ragged_rows import RaggedCall, Sequences, blocks_reached

DENSE_BYTES = 1 << 30
"""Limit on the dense keys and values of the sequences attended to at once; those of a single sequence may exceed it."""

LOGITS_BYTES = 64 << 20
"""Limit on the float32 logits of a tile of rows; those of a single row of each sequence may exceed it."""

MAX_HEAD_SIZE = 256
"""The limit of FlashAttention-2's forward pass."""


def attend(plan: RaggedPlan, call: RaggedCall) -> None:
    """Serves the sequences with too many rows to decode, in lots of as many as `DENSE_BYTES` allows.

    Sequences with more than `plan.max_q_len` rows, and those after the first `plan.max_prompts`, are not served.
    """
    attention, spec, sequences = plan.attention, plan.attention.cache.spec, call.sequences
    num_seqs, is_served = sequences.table.shape[0], is_prompt(plan, sequences)
    num_prompts = is_served.cumsum(0)
    # The index of the first prompt, the second, ...; `num_seqs` stands for none.
    seq = torch.arange(num_seqs, device=call.query.device)
    chosen = seq.new_full((num_seqs + 1,), num_seqs)
    chosen.scatter_(0, torch.where(is_served, num_prompts - 1, num_seqs), seq)

    dtype = _dense_dtype(attention)
    num_blocks = blocks_reached(attention, plan.max_q_len, sequences.table.shape[1])
    elements = num_blocks * spec.block_size * spec.num_kv_heads * (spec.head_size + spec.head_size_v)
    at_once = max(1, min(plan.max_prompts, DENSE_BYTES // (elements * dtype.itemsize)))
    serve = _by_flash if can_flash(attention) else _by_softmax
    for first in range(0, plan.max_prompts, at_once):
        chosen_now = chosen[first : min(first + at_once, plan.max_prompts)]
        own = _own_sequences(sequences, chosen_now, spec.block_size)
        reach = _reached(attention, own, num_blocks, call.tensors.num_blocks)
        number = torch.where(is_served, num_prompts - 1 - first, -1)
        serve(_Lot(call, attention, plan.max_q_len, dtype, number, *reach))


def is_prompt(plan: RaggedPlan, sequences: Sequences) -> torch.Tensor:
    """Which sequences are served as prompts: bool `[num_seqs]`, true for `plan.max_prompts` at most."""
    q_lens = sequences.q_lens
    is_any = (q_lens > plan.attention.q_len) & (q_lens <= plan.max_q_len)
    return is_any & (is_any.cumsum(0) <= plan.max_prompts)


def can_flash(plan: AttentionPlan) -> bool:
    """Whether torch's flash attention serves such a call.

    It looks for the largest logit before it multiplies by `sm_scale`, which has to be positive.
    """
    spec = plan.cache.spec
    return (
        _dense_dtype(plan) is not torch.float32
        and spec.head_size == spec.head_size_v <= MAX_HEAD_SIZE
        and spec.head_size % 8 == 0
        and plan.sm_scale > 0
        and plan.logits_soft_cap is None
        and torch.backends.cuda.is_flash_attention_available()
    )


def _dense_dtype(plan: AttentionPlan) -> torch.dtype:
    """The dtype of query rows, keys and values in products: one of 16 bits if it holds keys and values exactly.

    That is the query's for a cache that stores it, and float16, with three more bits than bfloat16, for quantized ones.
    It holds codes exactly, but not codes times scales that differ among tokens.
    """
    spec = plan.cache.spec
    if plan.dtype is torch.float32 or spec.quant_mode.is_per_token_head:
        return torch.float32
    if spec.quant_mode is not KVQuantMode.NONE:
        return torch.float16
    return plan.dtype if torch_dtype(spec.storage_dtype) is plan.dtype else torch.float32


def _own_sequences(sequences: Sequences, chosen: torch.Tensor, block_size: int) -> Sequences:
    """The sequences with the indices `chosen`; an empty one for each index that is `num_seqs`."""
    num_seqs, max_blocks = sequences.table.shape
    is_any, seq = chosen < num_seqs, chosen.clamp(max=num_seqs - 1)
    table, lens, starts, ends = (x.index_select(0, seq) for x in sequences)
    lens = torch.where(is_any, lens.clamp(0, max_blocks * block_size), 0).to(torch.int64)
    return Sequences(table, lens, starts, torch.where(is_any, ends, starts))


class _Reach(NamedTuple):
    """Sequences without the blocks that none of their rows sees.

    Attributes:
      own: the sequences, of no more blocks than `blocks_reached` returns; lengths are int64, and fit the table.
      first_seen: int64 `[num_seqs]`, the first token that a row sees, a token of the first block.
      is_hole: bool, of the table's shape: whether an entry is not a block of the cache, so that it holds no tokens.
    """

    own: Sequences
    first_seen: torch.Tensor
    is_hole: torch.Tensor


def _reached(plan: AttentionPlan, own: Sequences, num_blocks: int, num_cache_blocks: int) -> _Reach:
    """Keeps the blocks that a window reaches; without a window, drops freed blocks before the first row."""
    size, max_blocks = plan.cache.spec.block_size, own.table.shape[1]
    first_own = own.lens - own.q_lens  # the first row's position
    if plan.window is not None:
        first_seen = (first_own - (plan.window - 1)).clamp(min=0)
        first_block = first_seen // size
        column = first_block[:, None] + torch.arange(num_blocks, device=own.table.device)
        table = own.table.gather(1, column.clamp(max=max_blocks - 1))
        table = torch.where(column < max_blocks, table, -1)
        lens = (own.lens - first_block * size).clamp(max=num_blocks * size)
        first_seen = first_seen - first_block * size
    else:
        column = torch.arange(max_blocks, device=own.table.device)
        is_before = column < (first_own.clamp(min=0) // size)[:, None]
        is_gone = is_before & ~dense.is_block(own.table, num_cache_blocks)
        kept = (~is_gone).cumsum(1) - 1
        table = own.table.new_full((own.table.shape[0], max_blocks + 1), -1)
        table = table.scatter_(1, torch.where(is_gone, max_blocks, kept), own.table)[:, :max_blocks]
        lens = own.lens - is_gone.sum(1) * size
        first_seen = torch.zeros_like(lens)
    return _Reach(own._replace(table=table, lens=lens), first_seen, ~dense.is_block(table, num_cache_blocks))


@dataclasses.dataclass(frozen=True)
class _Lot:
    """Sequences that are attended to at once.

    Attributes:
      call: the call that they belong to.
      plan: of the call's sequences that decode; a window that holds every token is None.
      max_q_len: the most query rows of a sequence.
      dtype: element type of dense keys and values.
      number: int64, of each sequence of the call its index in the lot; any other number for one that is not in it.
      own: as in `_Reach`.
      first_seen: as in `_Reach`.
      is_hole: as in `_Reach`.
    """

    call: RaggedCall
    plan: AttentionPlan
    max_q_len: int
    dtype: torch.dtype
    number: torch.Tensor
    own: Sequences
    first_seen: torch.Tensor
    is_hole: torch.Tensor

    @property
    def max_len(self) -> int:
        """Tokens of each sequence's dense keys and values."""
        return self.own.table.shape[1] * self.plan.cache.spec.block_size

    def gather(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense keys and values `[num_seqs, max_len, num_kv_heads, ...]`; zeros where a sequence has no tokens."""
        gathered = GatherPlan(self.plan.cache, self.dtype, self.plan.scale_sizes)
        key_cache, value_cache, *_ = self.call.tensors
        tensors = ReadTensors(key_cache, value_cache, self.own.table, self.own.lens, k_scale, v_scale)
        return cuda.gather(gathered, tensors)


class _Operands(NamedTuple):
    """What products of attention are made of, in a lot's dtype.

    Attributes:
      rows: the call's query `[num_tokens, num_heads, head_size]`.
      keys: `[num_seqs, max_len, num_kv_heads, head_size]`.
      values: likewise.
      weight: float32 `[num_heads]` or `[1]`, a factor of the results.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    weight: torch.Tensor


def _operands(lot: _Lot) -> _Operands:
    """Gathers keys and values.

    In 16 bits, a scale of quantized keys is split: the gathered keys take its power of two, and the query, which is
    rounded to float16, the rest. The scale of values multiplies the results.
    """
    call, plan = lot.call, lot.plan
    k_scale, v_scale = call.tensors.k_scale, call.tensors.v_scale
    weight = call.query.new_ones(1, dtype=torch.float32)
    if plan.cache.spec.quant_mode is KVQuantMode.NONE or lot.dtype is torch.float32:
        return _Operands(call.query, *lot.gather(k_scale, v_scale), weight)
    rest = 2 * torch.frexp(k_scale).mantissa  # 1 if the scale is a power of two
    rows = call.query.new_empty(call.query.shape, dtype=lot.dtype)
    torch.mul(call.query, _of_each_head(rest, plan)[:, None], out=rows)
    most = torch.finfo(lot.dtype).max
    rows.clamp_(-most, most)
    dense_tokens = lot.gather(k_scale / rest, torch.ones_like(v_scale))
    return _Operands(rows, *dense_tokens, _of_each_head(v_scale, plan))


def _by_flash(lot: _Lot) -> None:
    """Stores the results of a lot's rows, from one call on all rows in which other sequences have no keys."""
    call, plan = lot.call, lot.plan
    query, sequences, number = call.query, call.sequences, lot.number
    num_lot, size = lot.own.lens.shape[0], plan.cache.spec.block_size
    rows, keys, values, weight = _operands(lot)
    if plan.window is not None:  # values before the window may be NaN, and 0 * NaN is not 0
        is_unseen = torch.arange(size, device=query.device) < lot.first_seen[:, None]
        values[:, :size].masked_fill_(is_unseen[:, :, None, None], 0)

    in_lot = (number >= 0) & (number < num_lot)
    index = number.clamp(0, num_lot - 1)
    num_keys = lot.own.lens.index_select(0, index) * in_lot
    # Where the keys of each sequence begin; for one without keys, any position.
    starts = torch.cat([index, index[:1]]) * lot.max_len
    bounds = torch.cat([sequences.starts[:1], sequences.ends])
    out, lse = flash(
        _aligned(rows),
        keys.flatten(0, 1),
        values.flatten(0, 1),
        *(x.to(torch.int32) for x in (bounds, starts, num_keys)),
        max_q_len=max(lot.max_q_len, 2),  # for 1 it would assume that every sequence has a row
        max_len=lot.max_len,
        sm_scale=plan.sm_scale,
        window=plan.window,
    )

    row = torch.arange(query.shape[0], device=query.device)
    of_seq = torch.searchsorted(sequences.ends, row, right=True)
    is_any, of_seq = of_seq < number.shape[0], of_seq.clamp(max=number.shape[0] - 1)
    is_own = is_any & in_lot[of_seq] & (row >= sequences.starts[of_seq])
    position = num_keys[of_seq] - (sequences.ends[of_seq] - row)
    weight, lse = _corrected(lot, index[of_seq], position, weight[None], lse)
    weighted = torch.mul(out, weight[:, :, None], out=torch.empty_like(call.results.out[:-1]))
    for whole, part in zip(call.results, (weighted, lse), strict=True):
        torch.where(is_own.view(-1, *[1] * (part.ndim - 1)), part, whole[:-1], out=whole[:-1])


def _corrected(
    lot: _Lot, of_lot: torch.Tensor, position: torch.Tensor, weight: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Corrects for sinks and for tokens of holes: returns factors for the results, and their log-sum-exp.

    A token of a hole has a logit of 0 and a value of 0: it adds 1 to the denominator and nothing else. A row sees holes
    if the table lacks blocks of a sequence's newest tokens, as a table of a shared prefix does. Rows that see none are
    not changed; for others the result is the less precise, the larger the holes' share of the denominator.

    Args:
      lot: the sequences.
      of_lot: int64 `[num_tokens]`, the sequence of the lot that each row belongs to.
      position: int64 `[num_tokens]`, the position of each row among its sequence's keys.
      weight: float32 `[1, num_heads]` or `[1, 1]`, a factor of all results.
      lse: float32 `[num_tokens, num_heads]`, without sinks.
    """
    sinks = lot.call.sinks
    num_seen = (position + 1).clamp(0, lot.max_len if lot.plan.window is None else lot.plan.window)
    holes = _holes_seen(lot, of_lot, position)
    sees, holes = (num_seen > holes)[:, None], holes[:, None]
    share = torch.where(holes > 0, 1.0 - holes * torch.exp(-lse), 1.0).clamp(min=torch.finfo(torch.float32).eps)
    lse = torch.where(sees, lse + torch.log(share), -torch.inf)
    weight = torch.where(sees, weight / share, 0.0)
    if sinks is None:
        return weight, lse
    whole = torch.logaddexp(lse, sinks)
    return weight * torch.exp(lse - torch.where(whole == -torch.inf, 0.0, whole)), whole


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Rows that flash attention can read 16 bytes at a time; a copy if these are not aligned for that."""
    places = [rows.data_ptr(), *(stride * rows.element_size() for stride in rows.stride()[:-1])]
    is_aligned = rows.stride(-1) == 1 and not any(place % 16 for place in places)
    return rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)


def flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bounds: torch.Tensor,
    starts: torch.Tensor,
    num_keys: torch.Tensor,
    *,
    max_q_len: int,
    max_len: int,
    sm_scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-2 of torch, causal: the last row of a sequence sees its last key.

    The results of rows of no sequence are undefined, and so is the log-sum-exp of a row that sees no key, whose result
    is 0.

    Args:
      query: `[num_tokens, num_heads, head_size]`, float16 or bfloat16.
      keys: `[num_keys, num_kv_heads, head_size]`, of the query's dtype.
      values: likewise.
      bounds: int32 `[num_seqs + 1]`, the first row of each sequence, then the end of the last one's rows.
      starts: int32 `[num_seqs + 1]`, the first key of each sequence; the last entry is not read.
      num_keys: int32 `[num_seqs]`, keys of each sequence.
      max_q_len: the most rows of a sequence; at least 2.
      max_len: the most keys of a sequence.
      sm_scale: factor on the logits, positive.
      window: tokens that a row sees, its own included.

    Returns:
      `[num_tokens, num_heads, head_size]` of the query's dtype, and float32 `[num_tokens, num_heads]`.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        query,
        keys,
        values,
        bounds,
        starts,
        max_q_len,
        max_len,
        0.0,
        True,
        False,
        scale=sm_scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
        seqused_k=num_keys,
    )
    return out, lse.t()


def _of_each_head(scale: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """A scale of one element, or of one for each KV head, as `[num_heads]` for query heads."""
    num_kv_heads = plan.cache.spec.num_kv_heads
    return scale.reshape(-1, 1).expand(num_kv_heads, plan.num_heads // num_kv_heads).flatten()


def _holes_seen(lot: _Lot, of_lot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The number of tokens of holes among those that each row would see: int64 `[num_tokens]`."""
    size, num_blocks = lot.plan.cache.spec.block_size, lot.is_hole.shape[1]
    before = torch.nn.functional.pad(lot.is_hole.cumsum(1), (1, 0))  # holes among the blocks before each

    def up_to(count: torch.Tensor) -> torch.Tensor:
        """The number among the first `count` tokens."""
        count = count.clamp(0, num_blocks * size)
        block = (count // size).clamp(max=num_blocks - 1)
        return before[of_lot, block] * size + lot.is_hole[of_lot, block] * (count - block * size)

    holes = up_to(position + 1)
    return holes if lot.plan.window is None else holes - up_to(position + 1 - lot.plan.window)


def _by_softmax(lot: _Lot) -> None:
    """Stores the results of a lot's rows, from `dense` attention of a tile of rows of each sequence at a time."""
    own, (_, num_heads, _) = lot.own, lot.call.query.shape
    query, *dense_tokens, weight = _operands(lot)
    keys, values = (x.transpose(1, 2).contiguous() for x in dense_tokens)
    del dense_tokens  # as large
    num_lot = own.lens.shape[0]
    tile = max(1, min(lot.max_q_len, LOGITS_BYTES // (4 * num_lot * num_heads * lot.max_len)))
    for first in range(0, lot.max_q_len, tile):
        row = own.starts[:, None] + torch.arange(first, first + tile, device=query.device)
        rows = query.index_select(0, row.clamp(0, query.shape[0] - 1).flatten()).unflatten(0, (num_lot, tile))
        # The length up to the last row of the tile, even if the sequence ends before that row.
        ends = own.lens - own.q_lens + (first + tile)
        of_cache = own.table, ends, lot.call.tensors.num_blocks
        attended = dense.attend(lot.plan, rows, keys, values, *of_cache, lot.call.sinks, weight)
        lot.call.results.put(row, row < own.ends[:, None], *attended)
