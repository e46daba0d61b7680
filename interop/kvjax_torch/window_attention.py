"""Attention with an exact recent window on torch tensors: a query's last tokens from a ring, all earlier from pages.

As in `kvjax.window_attention`, both parts are causal attention, joined by `merge_attention_states`. Indices are
computed on the device, and shapes depend on no value.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

import kvjax
from kvjax import KVCacheDType, KVCacheValueError
from kvjax.ops.options import (
    MAX_WINDOW,
    WINDOW_BLOCK_SIZE,
    WindowSpans,
    as_bool,
    as_limits,
    as_window,
    num_reached_blocks,
)
from kvjax_torch.arguments.attention import ragged_plan
from kvjax_torch.arguments.checks import check_devices, check_tensors, refuse_gradient
from kvjax_torch.arguments.dtypes import dtype_name
from kvjax_torch.arguments.plan import Encoding, RaggedPlan, ReadTensors, RingTensors, SoftmaxOptions, WriteTensors
from kvjax_torch.arguments.scales import Scale, as_tensors
from kvjax_torch.arguments.writes import write_plan
from kvjax_torch.attention import merge_attention_states, ragged_paged_attention
from kvjax_torch.cuda import windows
from kvjax_torch.exact_window import (
    MODEL_DTYPE,
    PADDING_SLOT,
    ExactWindow,
    check_rows,
    check_sizes,
    check_window,
    empty_pages,
    existing_rows,
    lengths,
    write_recent,
)
from kvjax_torch.ops import launches_kernels, reshape_and_cache_flash


def exact_window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    exact_window: ExactWindow,
    window_rows: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    v_scale_layout: str = "linear",
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    decode_q_len: int | None = None,
    query_quantization: bool = False,
    slot_mapping: torch.Tensor | None = None,
    unique_slots: bool = False,
) -> torch.Tensor:
    """Attends as `ragged_paged_attention`, with the last `exact_window.size` tokens of each query exact.

    It writes the step's tokens to the window, in place. With `slot_mapping` it also writes them to the pages, on a GPU
    by the same kernel; without, call it after they were written there. The pages stay complete. The rows have to hold
    the tokens before the step's first, as far as its queries see them: what earlier steps or `fill_exact_window` left
    there. Semantics are those of `kvjax.exact_window_attention`. The host does not wait, and a CUDA graph replays with
    other contents of all tensors. No gradient is computed.

    Args:
      query: as in `ragged_paged_attention`.
      key: `[num_tokens, num_kv_heads, head_size]`, the step's keys as they were written to the pages, so rotated.
      value: `[num_tokens, num_kv_heads, head_size_v]`, likewise.
      key_cache: as in `reshape_and_cache_flash`.
      value_cache: as in `reshape_and_cache_flash`.
      block_table: as in `ragged_paged_attention`.
      seq_lens: as in `ragged_paged_attention`.
      cu_q_lens: as in `ragged_paged_attention`.
      exact_window: of as many heads, of the same sizes.
      window_rows: int32 or int64 `[num_seqs]`, each sequence's row of the window. Without one (-1) a sequence sees no
        exact tokens.
      kv_cache_dtype: as in `reshape_and_cache_flash`.
      k_scale: the decode scale that the keys were written with.
      v_scale: the decode scale that the values were written with.
      v_scale_layout: the order that the V scales were written in.
      sm_scale: as in `ragged_paged_attention`.
      sliding_window: tokens that a query token sees, exact ones included; None for all.
      logits_soft_cap: as in `ragged_paged_attention`.
      sinks: as in `ragged_paged_attention`.
      batch_invariant: as in `ragged_paged_attention`.
      max_q_len: as in `ragged_paged_attention`. If it is at most that of the window, queries attend over the ring
        itself, else over a copy of the rows of the step's sequences and its new tokens. Pass it in every step.
      max_prompts: as in `ragged_paged_attention`.
      decode_q_len: as in `ragged_paged_attention`.
      query_quantization: whether prompts attend to pages by products in fp8; exact tokens are not rounded.
      slot_mapping: int32 or int64 `[num_tokens]`, the slots in the pages, as in `reshape_and_cache_flash`; None if the
        tokens are there.
      unique_slots: as in `reshape_and_cache_flash`.

    Returns:
      `[num_tokens, num_heads, head_size_v]` of the query's dtype.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `ragged_paged_attention`; a window of other heads than
        the cache's, or rows of another shape. In `kvjax.checked()` also a row that the window does not have, for a
        sequence with new tokens.
    """
    tensors = {"block_table": block_table, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens, "window_rows": window_rows}
    check_window(exact_window, key_cache, value_cache, tensors)
    scales = as_tensors(k_scale, v_scale, key_cache)
    check_tensors(**({} if sinks is None else {"sinks": sinks}))
    given = {"key_cache": key_cache, "value_cache": value_cache, "k_scale": scales[0], "v_scale": scales[1]}
    given_sinks = () if sinks is None else (sinks,)
    refuse_gradient("exact_window_attention", **given, **({} if sinks is None else {"sinks": sinks}))
    _check_tokens(exact_window, query, key, value)
    limits: dict[str, Any] = {"max_q_len": max_q_len, "max_prompts": max_prompts, "decode_q_len": decode_q_len}
    num_tokens, size = query.shape[0], exact_window.size
    step = _StepTensors.of(exact_window, seq_lens, cu_q_lens, window_rows)
    unique_slots = as_bool("unique_slots", unique_slots)
    if kvjax.is_checked():
        check_rows("window_rows", window_rows, step.q_lens > 0, exact_window.num_rows)
    options: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap, **limits}
    options["batch_invariant"] = batch_invariant
    window = as_window(sliding_window)
    softmax = SoftmaxOptions(sm_scale, window, logits_soft_cap, sinks, batch_invariant)
    nothing = torch.zeros_like(step.lens)
    longest = min(as_limits(**limits).max_q_len or num_tokens, num_tokens)
    of_pages = ReadTensors(key_cache, value_cache, block_table, nothing, *scales)
    one = as_tensors(*MODEL_DTYPE[1:], key_cache)
    table = step.ring_table(longest).int()
    of_ring = ReadTensors(exact_window.key_cache, exact_window.value_cache, table, nothing, *one)
    plans = []
    # Before the ring is written.
    for read, encoding, in_fp8 in (
        (of_pages, Encoding(dtype_name(kv_cache_dtype), v_scale_layout), query_quantization),
        (of_ring, Encoding(MODEL_DTYPE[0]), False),
    ):
        plans.append(ragged_plan(query, read, cu_q_lens, encoding, softmax, as_limits(**limits), in_fp8))
        check_sizes(exact_window, plans[-1].attention.cache.spec)
    to_pages = None
    if slot_mapping is not None:
        written = WriteTensors(key, value, key_cache, value_cache, slot_mapping, *scales)
        to_pages = _PagesWrite(written, Encoding(dtype_name(kv_cache_dtype), v_scale_layout), unique_slots)
        to_pages.check(num_tokens)
    over_pages, stored_as = (query, key_cache, value_cache, block_table), (kv_cache_dtype, k_scale, v_scale)
    if not len(step.lens):  # all rows are padding
        if to_pages is not None:
            to_pages.run()
        return ragged_paged_attention(*over_pages, seq_lens, cu_q_lens, *stored_as, sinks=sinks, **options)
    spans = WindowSpans.of(window, size)
    far_lens = (step.lens - size).clamp(min=0).int()  # a query whose limit is below 0 sees nothing
    near_lens = (step.lens - step.first_block * WINDOW_BLOCK_SIZE).int()
    if spans.reaches_pages and launches_kernels(query, key, value, *of_pages, *of_ring, cu_q_lens, *given_sinks):
        both = windows.BothCaches(
            _plans(plans[0], plans[1], spans),
            query,
            (of_pages._replace(seq_lens=far_lens), of_ring._replace(seq_lens=near_lens)),
            cu_q_lens,
            step.q_lens,
            sinks,
        )
        parts = windows.parts_of(both)
        if parts is not None:
            recent, table = _write_step(step, (key, value), table, longest, to_pages)
            results = windows.attend(both.over(*recent, table), parts)
            outs, lses = zip(*results, strict=True)
            return merge_attention_states(outs, lses)[0] if len(outs) > 1 else outs[0]
    if to_pages is not None:
        recent, table = _write_step(step, (key, value), table, longest, to_pages)
    others = []
    if spans.reaches_pages:
        others.append(
            ragged_paged_attention(
                *over_pages,
                far_lens,
                cu_q_lens,
                *stored_as,
                v_scale_layout=v_scale_layout,
                sliding_window=spans.far,
                return_lse=True,
                query_quantization=query_quantization,
                **options,
            )
        )
    if to_pages is None:  # after a call that may be refused
        recent, table = _write_step(step, (key, value), table, longest)
    near = ragged_paged_attention(
        query,
        recent[0],
        recent[1],
        table,
        near_lens,
        cu_q_lens,
        *MODEL_DTYPE,
        sliding_window=spans.near,
        sinks=sinks,
        return_lse=True,
        **options,
    )
    outs, lses = zip(near, *others, strict=True)
    return merge_attention_states(outs, lses)[0] if others else near[0]


def _plans(pages: RaggedPlan, ring: RaggedPlan, spans: WindowSpans) -> tuple[RaggedPlan, RaggedPlan]:
    """The plans of the calls over pages and over the ring, for those of the whole window; the ring has the sinks."""
    of_pages = dataclasses.replace(pages.attention, window=spans.far, has_sinks=False)
    of_ring = dataclasses.replace(ring.attention, window=spans.near)
    return dataclasses.replace(pages, attention=of_pages), dataclasses.replace(ring, attention=of_ring)


def write_exact_window(
    exact_window: ExactWindow,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    window_rows: torch.Tensor,
) -> None:
    """Writes a step's tokens to a window, in place, as `exact_window_attention` does; for other attention."""
    _update_ring(exact_window, (seq_lens, cu_q_lens, window_rows), (key, value), len(key))


class _PagesWrite(NamedTuple):
    """A step's write to the pages.

    Attributes:
      tensors: its tensors.
      encoding: how they are encoded.
      unique_slots: whether slots are promised to be unique.
    """

    tensors: WriteTensors
    encoding: Encoding
    unique_slots: bool

    def check(self, num_tokens: int) -> None:
        """Raises if it cannot run, before anything is written."""
        check_tensors(slot_mapping=self.tensors.slot_mapping)
        write_plan(self.tensors, self.encoding)
        if len(self.tensors.slot_mapping) != num_tokens:
            raise KVCacheValueError(
                f"slot_mapping: got {len(self.tensors.slot_mapping)} slots, expected {num_tokens}, one for each token"
            )

    def run(self) -> None:
        """Writes to the pages alone."""
        dtype, order = self.encoding
        options: dict[str, Any] = {"kv_cache_dtype": dtype, "v_scale_layout": order, "unique_slots": self.unique_slots}
        reshape_and_cache_flash(**self.tensors._asdict(), **options)


def _write_step(
    step: _StepTensors,
    new: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    longest: int,
    to_pages: _PagesWrite | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Writes a step's keys and values, at most `longest` of a sequence; returns where its queries see them, by a table.

    That is the ring, whose block table is `table`, or a copy of rows with room for the step.
    """
    window = step.window
    if longest <= window.max_q_len:
        _update_ring(window, step.given, new, longest, to_pages)
        return (window.key_cache, window.value_cache), table
    recent, table, slots = _with_room(window, step, len(new[0]), longest)
    write_recent(*new, recent, slots)
    _update_ring(window, step.given, new, longest, to_pages)
    return recent, table.int()


def _update_ring(
    window: ExactWindow,
    sequences: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    longest: int,
    to_pages: _PagesWrite | None = None,
) -> None:
    """Writes a step's tokens to the window, and to the pages if asked: on a GPU in one kernel.

    `sequences` are `seq_lens`, `cu_q_lens` and `window_rows`; `new` are keys and values.
    """
    pages = window.key_cache, window.value_cache
    # One of two numbers, for a kernel is compiled for it.
    kept = window.max_q_len if longest <= window.max_q_len else window.tokens_per_row
    ring = RingTensors(*pages, *sequences, window.blocks_per_row, kept)
    if launches_kernels(*new, *pages, *sequences, *(() if to_pages is None else to_pages.tensors)):
        if to_pages is None:
            windows.update(*new, ring)
        else:
            windows.write(*to_pages, ring)
        return
    if to_pages is not None:
        to_pages.run()
    write_recent(*new, pages, _StepTensors.of(window, *sequences).ring_slots(len(new[0])))


class _StepTensors(NamedTuple):
    """Where the tokens of a step's sequences are in a window; int64.

    Attributes:
      lens: `[num_seqs]`, tokens of each sequence, the new ones included.
      q_lens: `[num_seqs]`, its new tokens.
      first_block: `[num_seqs]`, the first of its blocks (of `WINDOW_BLOCK_SIZE` tokens) that its queries see.
      row_start: `[num_seqs]`, the first block of its row; below 0 without a row.
      window: the window.
      given: `seq_lens`, `cu_q_lens` and `window_rows` as callers give them.
    """

    lens: torch.Tensor
    q_lens: torch.Tensor
    first_block: torch.Tensor
    row_start: torch.Tensor
    window: ExactWindow
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(
        cls, window: ExactWindow, seq_lens: torch.Tensor, cu_q_lens: torch.Tensor, rows: torch.Tensor
    ) -> _StepTensors:
        lens, q_lens = lengths(seq_lens, cu_q_lens)
        first_block = (lens - q_lens - (window.size - 1)).clamp(min=0) // WINDOW_BLOCK_SIZE
        row_start = existing_rows(rows, window) * window.blocks_per_row
        return cls(lens, q_lens, first_block, row_start, window, (seq_lens, cu_q_lens, rows))

    def token_rows(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`[num_tokens]` twice: each new token's sequence, and its position, -1 for padding."""
        ends = self.given[1][1:].long()
        token = torch.arange(num_tokens, device=ends.device)
        seq = torch.searchsorted(ends, token, right=True)
        is_token = seq < len(self.lens)
        seq = seq.clamp(max=max(len(self.lens) - 1, 0))
        return seq, torch.where(is_token, self.lens[seq] - (ends[seq] - token), -1)

    def ring_slots(self, num_tokens: int) -> torch.Tensor:
        """`[num_tokens]`: the slots of a sequence's last tokens in its row, -1 for those that these overwrite."""
        if not len(self.lens):
            return torch.full((num_tokens,), PADDING_SLOT, device=self.lens.device)
        seq, position = self.token_rows(num_tokens)
        tokens, start = self.window.tokens_per_row, self.row_start[seq] * WINDOW_BLOCK_SIZE
        is_kept = (position >= 0) & (start >= 0) & (position >= self.lens[seq] - tokens)
        return torch.where(is_kept, start + position % tokens, PADDING_SLOT)

    def ring_table(self, max_q_len: int) -> torch.Tensor:
        """A block table of the ring, from each sequence's `first_block` on, for so many new tokens.

        Its first and its last column may be one block of the ring, for tokens of either.
        """
        block = self.first_block[:, None] + torch.arange(self.num_columns(max_q_len), device=self.lens.device)
        in_row = self.row_start[:, None] + block % self.window.blocks_per_row
        return torch.where(self.row_start[:, None] >= 0, in_row, -1)

    def num_columns(self, max_q_len: int) -> int:
        """The most blocks that the queries of a sequence with so many new tokens see."""
        return num_reached_blocks(self.window.size, max_q_len, MAX_WINDOW, WINDOW_BLOCK_SIZE)


def _with_room(
    window: ExactWindow, step: _StepTensors, num_tokens: int, max_q_len: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A copy of the rows of a step's sequences with room for its tokens, its block table and their slots.

    The first columns of the table are blocks of the rows, from `first_block` to that of the first new token, the others
    blocks of the chunks.
    """
    num_seqs, device, (seq, position) = len(step.lens), step.lens.device, step.token_rows(num_tokens)
    num_old, columns = step.num_columns(1), step.num_columns(max_q_len)
    # Full blocks of new tokens, and one partial block for each sequence that has any.
    room = (num_tokens + min(num_seqs, num_tokens) * (WINDOW_BLOCK_SIZE - 1)) // WINDOW_BLOCK_SIZE
    heads, head_sizes = window.key_cache.shape[2], [window.key_cache.shape[3], window.value_cache.shape[3]]
    pages = empty_pages(window.key_cache, num_seqs * num_old + room, heads, head_sizes)
    old = step.ring_table(1).flatten().clamp(min=0)
    for copied, ring in zip(pages, (window.key_cache, window.value_cache), strict=True):
        copied[: len(old)] = ring[old]
    num_blocks = (step.lens + WINDOW_BLOCK_SIZE - 1) // WINDOW_BLOCK_SIZE - step.first_block - num_old
    num_blocks = torch.where((step.q_lens > 0) & (step.row_start >= 0), num_blocks.clamp(min=0), 0)
    start = num_seqs * num_old + num_blocks.cumsum(0) - num_blocks
    column = torch.arange(columns, device=device)[None]
    own = torch.arange(num_seqs, device=device)[:, None] * num_old + column
    table = torch.where(column < num_old, own, start[:, None] + column - num_old)
    exists = (step.row_start[:, None] >= 0) & (column < num_old + num_blocks[:, None])
    table = torch.where(exists, table, -1)
    of_token = position // WINDOW_BLOCK_SIZE - step.first_block[seq]
    block = table[seq, of_token.clamp(0, max(columns - 1, 0))]
    is_written = (position >= 0) & (of_token >= 0) & (of_token < columns) & (block >= 0)
    slots = torch.where(is_written, block * WINDOW_BLOCK_SIZE + position % WINDOW_BLOCK_SIZE, PADDING_SLOT)
    return pages, table, slots


def _check_tokens(window: ExactWindow, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raises if a step's tokens are not those of the window, before anything is written."""
    check_tensors(query=query, key=key, value=value)
    refuse_gradient("exact_window_attention", query=query, key=key, value=value)
    check_devices(window.key_cache, query=query, key=key, value=value)
    of_head = {"key": window.key_cache.shape[2:], "value": window.value_cache.shape[2:]}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        expected = of_head.get(name, (*tensor.shape[1:2], window.key_cache.shape[3]))
        if tensor.ndim != 3 or tensor.shape != (query.shape[0], *expected):
            raise KVCacheValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected {(query.shape[0], *expected)}, of"
                f" {'[num_tokens, num_heads, head_size]' if name == 'query' else 'the query and exact_window'}"
            )
