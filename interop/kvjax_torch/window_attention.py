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
    Limits,
    WindowSpans,
    as_bool,
    as_limits,
    buckets,
    num_reached_blocks,
)
from kvjax_torch.arguments.attention import checked_softmax, ragged_plan
from kvjax_torch.arguments.checks import check_devices, check_tensors, refuse_gradient
from kvjax_torch.arguments.dtypes import dtype_name, has_scale_tensors, order_name
from kvjax_torch.arguments.plan import (
    Encoding,
    RaggedPlan,
    ReadTensors,
    RingTensors,
    SoftmaxOptions,
    WindowPlaces,
    WindowRoom,
    WindowStep,
    WriteTensors,
)
from kvjax_torch.arguments.scales import Scale, as_tensors
from kvjax_torch.arguments.writes import write_plan
from kvjax_torch.attention import merge_attention_states, ragged_paged_attention
from kvjax_torch.cuda import windows
from kvjax_torch.dispatch import launches_kernels
from kvjax_torch.eager import windows as eager_windows
from kvjax_torch.exact_window import (
    MODEL_DTYPE,
    ExactWindow,
    check_rows,
    check_sizes,
    check_type,
    check_window,
    empty_pages,
    write_recent,
)
from kvjax_torch.launch import tape
from kvjax_torch.ops import reshape_and_cache_flash


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
    by the same kernel; without it, call this after they were written there. The pages stay complete. The rows must hold
    the tokens before the step's first that its queries see. Earlier steps or `fill_exact_window` put them there.
    Semantics are those of `kvjax.exact_window_attention`. The host does not wait, and a CUDA graph replays with other
    contents of all tensors. No gradient is computed.

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
      query_quantization: whether prompts attend to pages with fp8 products; exact tokens are not rounded.
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
    given = {"query": query, "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    given |= {"block_table": block_table, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens, "window_rows": window_rows}
    optional: dict[str, Any] = {"sinks": sinks, "slot_mapping": slot_mapping}
    check_tensors(**given, **{name: x for name, x in optional.items() if x is not None})
    check_type(exact_window)
    call = _WindowCall(
        **given,
        **optional,
        window=exact_window,
        scales=as_tensors(k_scale, v_scale, key_cache),
        scales_of_ring=as_tensors(*MODEL_DTYPE[1:], key_cache),
        encoding=Encoding(dtype_name(kv_cache_dtype), order_name(v_scale_layout)),
        softmax=checked_softmax(SoftmaxOptions(sm_scale, sliding_window, logits_soft_cap, sinks, batch_invariant)),
        limits=as_limits(max_q_len, max_prompts, decode_q_len),
        query_quantization=as_bool("query_quantization", query_quantization),
        unique_slots=as_bool("unique_slots", unique_slots),
    )
    tensors = call.tensors()
    launches = launches_kernels(*tensors)
    if not launches or kvjax.is_checked():
        return _serve(call, launches)
    return tape.call(lambda: (_serve(call, True),), [_serve, *tensors, *call.facts()], call.written())[0]


class _WindowCall(NamedTuple):
    """A call of `exact_window_attention`: its arguments, their types checked."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_q_lens: torch.Tensor
    window_rows: torch.Tensor
    sinks: torch.Tensor | None
    slot_mapping: torch.Tensor | None
    window: ExactWindow
    scales: tuple[torch.Tensor, torch.Tensor]
    scales_of_ring: tuple[torch.Tensor, torch.Tensor]
    encoding: Encoding
    softmax: SoftmaxOptions
    limits: Limits
    query_quantization: bool
    unique_slots: bool

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, those that may be written first."""
        written = self.window.key_cache, self.window.value_cache, self.key_cache, self.value_cache, *self.scales
        read = self.query, self.key, self.value, self.block_table, self.seq_lens, self.cu_q_lens, self.window_rows
        return [*written, *read, *self.scales_of_ring, *(x for x in (self.sinks, self.slot_mapping) if x is not None)]

    def written(self) -> range:
        """Which of these are written: the ring, and with slots the pages, with scales of each token and head."""
        if self.slot_mapping is None:
            return range(2)
        return range(6 if has_scale_tensors(self.scales[0]) else 4)

    def stored_as(self) -> tuple[Any, ...]:
        """The pages' dtype and scales, as operations take them."""
        return self.encoding.kv_cache_dtype, *self.scales

    def options(self) -> dict[str, Any]:
        """The options of attention over either cache."""
        softmax = self.softmax
        options: dict[str, Any] = {"sm_scale": softmax.sm_scale, "logits_soft_cap": softmax.logits_soft_cap}
        return options | {"batch_invariant": softmax.batch_invariant, **self.limits._asdict()}

    def facts(self) -> list[Any]:
        """What else the call depends on."""
        softmax = self.softmax._replace(sinks=None)
        optional = self.sinks is None, self.slot_mapping is None
        sizes = self.window.size, self.window.max_q_len
        return [*self.encoding, *softmax, *self.limits, self.query_quantization, self.unique_slots, *optional, *sizes]


def _serve(call: _WindowCall, launches: bool) -> torch.Tensor:
    """Runs a call, by launching kernels itself or through torch's dispatcher."""
    query, window, softmax, limits = call.query, call.window, call.softmax, call.limits
    sequences, num_tokens = (call.seq_lens, call.cu_q_lens, call.window_rows), query.shape[0]
    _check(call)
    served = buckets(limits, num_tokens, len(call.seq_lens), batch_invariant=softmax.batch_invariant)
    longest = min(limits.max_q_len or num_tokens, num_tokens)
    step = _NewTokens(window, sequences, (call.key, call.value), num_tokens, longest, launches)
    places = step.places(served.decode_q_len)
    if kvjax.is_checked():
        check_rows("window_rows", call.window_rows, places.q_lens > 0, window.num_rows)
    of_pages = ReadTensors(call.key_cache, call.value_cache, call.block_table, places.far_lens, *call.scales)
    of_ring = ReadTensors(window.key_cache, window.value_cache, places.table, places.near_lens, *call.scales_of_ring)
    plans = []
    # Plans are made before the ring is written. Checked mode checks no block table here: the ring or its copy is not
    # written yet, and queries see fewer tokens of the pages than the plans say.
    planned_lens = torch.zeros_like(call.seq_lens) if kvjax.is_checked() else call.seq_lens
    for read, encoding, in_fp8 in (
        (of_pages, call.encoding, call.query_quantization),
        (of_ring, Encoding(MODEL_DTYPE[0]), False),
    ):
        read = read._replace(seq_lens=planned_lens)
        plans.append(ragged_plan(query, read, call.cu_q_lens, encoding, softmax, limits, in_fp8))
        check_sizes(window, plans[-1].attention.cache.spec)
    to_pages = None
    if call.slot_mapping is not None:
        tensors = WriteTensors(call.key, call.value, call.key_cache, call.value_cache, call.slot_mapping, *call.scales)
        to_pages = _PagesWrite(tensors, call.encoding, call.unique_slots)
        to_pages.check(num_tokens)
    if not len(call.seq_lens):  # all rows are padding
        if to_pages is not None:
            to_pages.run()
        return ragged_paged_attention(
            query,
            *of_pages[:3],
            call.seq_lens,
            call.cu_q_lens,
            *call.stored_as(),
            sinks=softmax.sinks,
            **call.options(),
        )
    spans = WindowSpans.of(softmax.sliding_window, window.size)
    if spans.reaches_pages and launches:
        both = windows.BothCaches(
            _plans(plans[0], plans[1], spans), query, (of_pages, of_ring), call.cu_q_lens, places, softmax.sinks
        )
        parts = windows.parts_of(both)
        if parts is not None:
            recent = step.write(places, to_pages)
            results = windows.attend(both.over(*recent), parts)
            outs, lses = zip(*results, strict=True)
            return merge_attention_states(outs, lses)[0] if len(outs) > 1 else outs[0]
    return _attend_apart(call, step, places, spans, to_pages)


def _attend_apart(
    call: _WindowCall, step: _NewTokens, places: WindowPlaces, spans: WindowSpans, to_pages: _PagesWrite | None
) -> torch.Tensor:
    """Writes a step's tokens, attends over pages and over the ring by calls of their own, and merges the results."""
    options = call.options() | {"return_lse": True}
    if to_pages is not None:
        recent = step.write(places, to_pages)
    others = []
    if spans.reaches_pages:
        others.append(
            ragged_paged_attention(
                *(call.query, call.key_cache, call.value_cache, call.block_table, places.far_lens, call.cu_q_lens),
                *call.stored_as(),
                v_scale_layout=call.encoding.v_scale_layout,
                sliding_window=spans.far,
                query_quantization=call.query_quantization,
                **options,
            )
        )
    if to_pages is None:  # after a call that may be refused
        recent = step.write(places)
    near = ragged_paged_attention(
        *(call.query, *recent, places.table, places.near_lens, call.cu_q_lens, *MODEL_DTYPE),
        sliding_window=spans.near,
        sinks=call.softmax.sinks,
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
    sequences, rows = (seq_lens, cu_q_lens, window_rows), (key, value)
    launches = launches_kernels(*rows, exact_window.key_cache, exact_window.value_cache, *sequences)
    _NewTokens(exact_window, sequences, rows, len(key), len(key), launches).update_ring()


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


class _NewTokens(NamedTuple):
    """A step's new tokens beside a window.

    Attributes:
      window: the window.
      sequences: `seq_lens`, `cu_q_lens` and `window_rows` as callers give them.
      rows: keys and values.
      num_tokens: rows of the step.
      longest: most new tokens of a sequence.
      launches: whether to launch kernels, past torch's dispatcher.
    """

    window: ExactWindow
    sequences: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    rows: tuple[torch.Tensor, torch.Tensor]
    num_tokens: int
    longest: int
    launches: bool

    @property
    def has_room(self) -> bool:
        """Whether queries see a copy of the window's rows with the step's tokens behind them, and not the ring."""
        return self.longest > self.window.max_q_len

    def num_columns(self, max_q_len: int) -> int:
        """The most blocks that the queries of a sequence with `max_q_len` new tokens see."""
        return num_reached_blocks(self.window.size, max_q_len, MAX_WINDOW, WINDOW_BLOCK_SIZE)

    def places(self, decode_q_len: int) -> WindowPlaces:
        """Where the step's tokens are."""
        window = self.window
        num_seqs = len(self.sequences[0])
        room = WindowRoom(self.num_tokens, self.num_columns(1)) if self.has_room and num_seqs else None
        sizes = window.num_rows, window.size, window.blocks_per_row, self.num_columns(self.longest), decode_q_len
        step = WindowStep(*self.sequences, *sizes, room)
        return windows.places(step) if self.launches and num_seqs else eager_windows.places(step)

    def write(self, places: WindowPlaces, to_pages: _PagesWrite | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values; returns where queries see them, the ring or a copy of its rows with the step's."""
        window = self.window
        recent = window.key_cache, window.value_cache
        if places.old is not None and places.slots is not None:
            recent = self._copied(places.old.flatten())
            write_recent(*self.rows, recent, places.slots)
        self.update_ring(to_pages)
        return recent

    def update_ring(self, to_pages: _PagesWrite | None = None) -> None:
        """Writes the last tokens of sequences to the window, and all to the pages if asked: on a GPU in one kernel."""
        window, pages = self.window, (self.window.key_cache, self.window.value_cache)
        # One of two numbers, because a kernel is compiled for it.
        kept = window.tokens_per_row if self.has_room else window.max_q_len
        ring = RingTensors(*pages, *self.sequences, window.blocks_per_row, kept)
        if not self.launches:
            if to_pages is not None:
                to_pages.run()
            write_recent(*self.rows, pages, eager_windows.ring_slots(ring, self.num_tokens))
        elif to_pages is None:
            windows.update(*self.rows, ring)
        else:
            windows.write(*to_pages, ring)

    def _copied(self, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of blocks of the ring, with room for the step's tokens behind them."""
        ring, num_seqs = (self.window.key_cache, self.window.value_cache), len(self.sequences[0])
        # Full blocks of new tokens, and one partial block for each sequence that has any.
        partial = min(num_seqs, self.num_tokens) * (WINDOW_BLOCK_SIZE - 1)
        num_blocks = len(old) + (self.num_tokens + partial) // WINDOW_BLOCK_SIZE
        pages = empty_pages(ring[0], num_blocks, ring[0].shape[2], [half.shape[3] for half in ring])
        for copied, half in zip(pages, ring, strict=True):
            torch.index_select(half, 0, old, out=copied[: len(old)])
        return pages


def _check(call: _WindowCall) -> None:
    """Raises if a call's tensors do not belong together, before anything is written."""
    indices = {"block_table": call.block_table, "seq_lens": call.seq_lens, "cu_q_lens": call.cu_q_lens}
    check_window(call.window, call.key_cache, call.value_cache, indices | {"window_rows": call.window_rows})
    given = {"key_cache": call.key_cache, "value_cache": call.value_cache}
    given |= {"k_scale": call.scales[0], "v_scale": call.scales[1]}
    if call.sinks is not None:
        given["sinks"] = call.sinks
    tokens = {"query": call.query, "key": call.key, "value": call.value}
    refuse_gradient("exact_window_attention", **given, **tokens)
    ring, num_tokens = call.window.key_cache, call.query.shape[0]
    check_devices(ring, **tokens)
    of_head = {"key": ring.shape[2:], "value": call.window.value_cache.shape[2:]}
    for name, tensor in tokens.items():
        expected = of_head.get(name, (*tensor.shape[1:2], ring.shape[3]))
        if tensor.ndim != 3 or tensor.shape != (num_tokens, *expected):
            raise KVCacheValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected {(num_tokens, *expected)}, of"
                f" {'[num_tokens, num_heads, head_size]' if name == 'query' else 'the query and exact_window'}"
            )
