"""Attention with an exact recent window: each query's last tokens from a ring, all earlier ones from pages.

Both parts are causal attention. Over a ring, attention is limited to a window of its size; over pages, each query's
limit is that many tokens further back. `merge_attention_states` joins the results.

If the ring has room for a step's tokens beside those that the first of them sees, they are written to it, as to pages,
before they attend. This is the case for decodes and drafts. Longer chunks attend over a copy of the rows of the step's
sequences with room for the chunks; the ring takes the last of their tokens afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.cache import KVCache
from kvjax.errors import KVCacheValueError
from kvjax.exact_window import ExactWindow, as_rows, check_window, first_tokens
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    OF_LAYER,
    Window,
    as_layer,
    as_lengths,
    as_window,
    check_array,
)
from kvjax.ops.gather import Stored
from kvjax.ops.options import (
    MAX_WINDOW,
    WINDOW_BLOCK_SIZE,
    Given,
    WindowSpans,
    as_limits,
    as_sm_scale,
    num_reached_blocks,
)
from kvjax.ops.route import Query, check_query_quantization
from kvjax.ops.window_read import CachePart, QueryRows
from kvjax.ops.window_write import RingUpdate, update_ring, write_with_ring
from kvjax.ops.write import WriteTokens, reshape_and_cache_flash
from kvjax.partition import check_whole, partition_of
from kvjax.step_metadata import PADDING_SLOT, StepMetadata


def exact_window_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: KVCache,
    exact_window: ExactWindow,
    metadata: StepMetadata,
    *,
    layer: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sm_scale: float | None = None,
    sliding_window: Window = OF_LAYER,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    batch_invariant: bool = False,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    decode_q_len: int | None = None,
    query_quantization: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, ExactWindow]:
    """Attends as `ragged_paged_attention` does, with the last `exact_window.size` tokens of each query exact.

    This is what `attend` does after it has written the step's keys and values to the cache. The rows of sequences,
    `metadata.window_rows`, must hold the tokens before the step's first that its queries see. Earlier steps,
    `fill_exact_window` or `copy_window_rows` put them there.

    Under `jit`, donate the window: the ring is written in place. If `max_q_len` is at most that of the window, queries
    attend over the ring itself, else over a copy of the rows of the step's sequences and its new tokens.

    Args:
      query: `[num_tokens, num_heads, head_size]`; float32, float16 or bfloat16.
      key: `[num_tokens, num_kv_heads, head_size]`, as the cache has it. The ring stores it in the model dtype.
      value: `[num_tokens, num_kv_heads, head_size_v]`, likewise.
      cache: with the step's tokens.
      exact_window: of the same layers and heads.
      metadata: the step's sequences and their rows.
      layer: the layer in a cache and a window of several.
      k_scale: the decode scale that the keys were written with, if not the cache's; default: the cache's, or 1.
      v_scale: the same for the values.
      sm_scale: factor on the logits, as in `ragged_paged_attention`.
      sliding_window: tokens that a row attends to, exact ones included; None for no window. Default: the layer's.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`; None for no cap.
      sinks: float32 `[num_heads]`.
      batch_invariant: whether a sequence's results have the same bits whatever the rest of the batch.
      max_q_len: most query tokens of a sequence, in XLA too; default `num_tokens`.
      max_prompts: most sequences with more query tokens than `decode_q_len`.
      decode_q_len: most query tokens of a sequence on the decode path.
      query_quantization: whether prompts attend to pages with fp8 products; exact tokens are not rounded.
      implementation: `"mosaic"` or `"xla"`, for the write and both attentions; None chooses for each.

    Returns:
      `[num_tokens, num_heads, head_size_v]` of `query`'s dtype, and the window with the step's tokens.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `ragged_paged_attention`; a window of other layers or heads than the
        cache's, or metadata without rows.
      UnsupportedError: the requested implementation cannot serve this call; a cache of latents (MLA).
    """
    options: dict[str, Any] = {
        "layer": layer,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sm_scale": sm_scale,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "batch_invariant": batch_invariant,
        "max_q_len": max_q_len,
        "max_prompts": max_prompts,
        "decode_q_len": decode_q_len,
        "query_quantization": query_quantization,
    }
    new = StepTokens(key, value, implementation)
    attended, _, exact_window = attend_with_window(query, new, cache, exact_window, metadata, options)
    return attended, exact_window


def attend_with_window(
    query: Any,
    new: StepTokens,
    cache: KVCache,
    exact_window: ExactWindow,
    metadata: StepMetadata,
    given: dict[str, Any],
) -> tuple[jax.Array, KVCache, ExactWindow]:
    """Does what `exact_window_attention` does, after a write to the pages if `new` says so.

    Args:
      query: as there, and so are `cache`, `exact_window` and `metadata`.
      new: the step's tokens.
      cache: of pages.
      exact_window: of the same layers.
      metadata: the step's.
      given: all keyword arguments of `exact_window_attention` but `implementation`.

    Returns:
      The results, the cache and the window.
    """
    check_window(exact_window, cache, metadata)
    num_tokens = np.shape(metadata.slot_mapping)[0]
    dims = [("num_tokens", num_tokens), ("num_heads", None), ("head_size", cache.spec.head_size)]
    check_array("query", query, dims, INPUT_DTYPES)
    query = jnp.asarray(query)
    of_cache: dict[str, Any] = {name: given[name] for name in ("layer", "k_scale", "v_scale", "query_quantization")}
    sm_scale = as_sm_scale(given["sm_scale"], cache.spec.head_size)
    options = Given(sm_scale, None, given["logits_soft_cap"], True, given["batch_invariant"], new.implementation)
    # Where the ring has all that queries see, no call attends to pages.
    check_query_quantization(of_cache["query_quantization"], cache.spec, Query(query.dtype, sm_scale > 0))
    limits = as_limits(given["max_q_len"], given["max_prompts"], given["decode_q_len"])
    step = QueryRows(query, metadata.cu_q_lens, given["sinks"], options, limits)
    stored = Stored(*(of_cache[name] for name in ("layer", "k_scale", "v_scale")))
    pages = CachePart(cache, metadata.block_table, metadata.seq_lens, stored, OF_LAYER, of_cache["query_quantization"])
    if not np.shape(metadata.seq_lens)[0]:  # all rows are padding
        pages = pages._replace(cache=new.in_pages(cache, of_cache))
        return step.attend(pages)[0], pages.cache, exact_window
    longest = min(limits.max_q_len or num_tokens, num_tokens)
    written = write_step(exact_window, new, metadata, longest, cache, of_cache)
    lens, first_block = written.step.lens, written.step.first_block
    spans = _spans(given["sliding_window"], cache, exact_window.size)
    exact_window = dataclasses.replace(exact_window, ring=written.ring)
    near_lens = lens - first_block * WINDOW_BLOCK_SIZE
    near = CachePart(written.recent, written.table, near_lens, Stored(written.layer, None, None), spans.near)
    if spans.reaches_pages is False:
        return step.attend(near)[0], written.cache, exact_window
    far_lens = jnp.maximum(lens - exact_window.size, 0)  # a query whose limit is below 0 sees nothing
    far_lens = jnp.where(spans.reaches_pages, far_lens, 0)
    far = pages._replace(cache=written.cache, seq_lens=far_lens, sliding_window=spans.far)
    return step.attend_both(far, near), written.cache, exact_window


class WrittenStep(NamedTuple):
    """A step whose tokens are written: where its queries see the last ones, the ring, and the pages.

    Attributes:
      step: where they are.
      recent: the ring, or a copy of rows with room for the step.
      table: int32 `[num_seqs, columns]`, blocks of `recent` from each sequence's `first_block` on.
      layer: the layer in `recent`.
      ring: the ring, with the tokens that its rows keep.
      cache: the pages.
    """

    step: _Step
    recent: KVCache
    table: jax.Array
    layer: Any
    ring: KVCache
    cache: KVCache


def write_step(
    exact_window: ExactWindow,
    new: StepTokens,
    metadata: StepMetadata,
    longest: int,
    cache: KVCache,
    of_cache: Mapping[str, Any],
) -> WrittenStep:
    """Writes a step's tokens, at most `longest` of a sequence: for its queries, to the ring and, if asked, to pages.

    Pages and ring are written by one kernel, if devices divide the heads of both alike. `of_cache` is the layer and the
    scales, as `reshape_and_cache_flash` takes them.
    """
    step = _Step.of(exact_window, metadata)
    update = step.ring_update(exact_window, longest)
    layer = of_cache["layer"]
    if longest <= exact_window.max_q_len:
        cache, ring = new.in_both(cache, update, of_cache)
        return WrittenStep(step, ring, step.ring_table(longest), layer, ring, cache)
    recent, table, slots = _with_room(exact_window.ring, step, longest, as_layer(exact_window.ring, layer))
    new = new.after(recent)  # else XLA would copy the ring
    cache, ring = new.in_both(cache, update, of_cache)
    return WrittenStep(step, new.written(recent, slots, unique_slots=True), table, None, ring, cache)


def _spans(sliding_window: Window, cache: KVCache, size: int) -> WindowSpans:
    """Returns how a sliding window is divided, on the device if it is an array."""
    window, on_device = as_window(sliding_window, cache.spec)
    if on_device is not None:
        return WindowSpans(jnp.minimum(on_device, size), jnp.maximum(on_device - size, 1), on_device > size)
    return WindowSpans.of(window, size)


class StepTokens(NamedTuple):
    """A step's keys and values, and what writes them.

    Attributes:
      key: `[num_tokens, num_kv_heads, head_size]`.
      value: likewise.
      implementation: what writes them; None to choose.
      slots: those in the pages; None if they are there.
      unique_slots: whether slots are promised to be unique.
    """

    key: Any
    value: Any
    implementation: str | None
    slots: Any = None
    unique_slots: bool = False

    def written(self, cache: KVCache, slots: Any, **options: Any) -> KVCache:
        """Returns the cache with these tokens in slots."""
        return reshape_and_cache_flash(
            self.key, self.value, cache, slots, implementation=self.implementation, **options
        )

    def in_pages(self, cache: KVCache, of_cache: Mapping[str, Any]) -> KVCache:
        """Returns the cache with these tokens in their slots."""
        if self.slots is None:
            return cache
        options = {name: of_cache[name] for name in ("layer", "k_scale", "v_scale")}
        return self.written(cache, self.slots, unique_slots=self.unique_slots, **options)

    def in_both(self, cache: KVCache, update: RingUpdate, of_cache: Mapping[str, Any]) -> tuple[KVCache, KVCache]:
        """Returns the cache with these tokens in their slots, and the ring with the last of each sequence."""
        layer = of_cache["layer"]
        if self.slots is not None:
            tokens = WriteTokens(self.key, self.value, self.slots, layer, of_cache["k_scale"], of_cache["v_scale"])
            if both := write_with_ring(cache, tokens, update, self.unique_slots, self.implementation):
                return both
        ring = update_ring(update, self.key, self.value, layer, self.implementation)
        return self.in_pages(cache, of_cache), ring

    def after(self, cache: KVCache) -> StepTokens:
        """Returns the same tokens, available once the cache is."""
        key, value, _ = lax.optimization_barrier((self.key, self.value, cache.kv))
        return self._replace(key=key, value=value)


class _Step(NamedTuple):
    """Where the tokens of a step's sequences are in a window; int32.

    Attributes:
      lens: `[num_seqs]`, tokens of each sequence, the new ones included.
      q_lens: `[num_seqs]`, its new tokens.
      first_block: `[num_seqs]`, the first of its blocks (of `WINDOW_BLOCK_SIZE` tokens) that its queries see.
      row_start: `[num_seqs]`, the first block of its row; below 0 without a row.
      blocks_per_row: of the window.
      size: of the window.
      seq: `[num_tokens]`, each new token's sequence.
      position: `[num_tokens]`, its position, -1 for padding.
      cu_q_lens: `[num_seqs + 1]`, where new tokens of a sequence begin and end.
      rows: `[num_seqs]`, rows as they were given.
    """

    lens: jax.Array
    q_lens: jax.Array
    first_block: jax.Array
    row_start: jax.Array
    blocks_per_row: int
    size: int
    seq: jax.Array
    position: jax.Array
    cu_q_lens: jax.Array
    rows: jax.Array

    @classmethod
    def of(cls, window: ExactWindow, metadata: StepMetadata) -> _Step:
        check_array("slot_mapping", metadata.slot_mapping, [("num_tokens", None)], INDEX_DTYPES)
        if metadata.window_rows is None:
            raise KVCacheValueError(
                "metadata.window_rows: got None, expected each sequence's row of the window, as"
                " StepMetadata.from_sequences(..., window_rows=rows) holds them"
            )
        for what in ("seq_lens", "cu_q_lens", "window_rows"):
            check_whole(f"metadata.{what}", getattr(metadata, what))
        lens = as_lengths(metadata.seq_lens)
        first = first_tokens(metadata)
        q_lens, cu_q_lens = lens - first, as_lengths(metadata.cu_q_lens)
        row = as_rows("metadata.window_rows", metadata.window_rows, window, len(lens), q_lens > 0)
        seq, position = metadata.token_rows()
        oldest = jnp.maximum(first - (window.size - 1), 0)
        start = row * window.blocks_per_row
        blocks = oldest // WINDOW_BLOCK_SIZE, start, window.blocks_per_row
        # The kernel that updates the ring checks rows itself: it need not wait for another.
        rows = jnp.asarray(metadata.window_rows if metadata.window_rows.dtype == np.int32 else row)
        return cls(lens, q_lens, *blocks, window.size, seq, position, cu_q_lens, rows)

    def ring_update(self, window: ExactWindow, longest: int) -> RingUpdate:
        """Returns the update of the window's ring by steps with at most `longest` new tokens of a sequence."""
        return RingUpdate(window.ring, self.blocks_per_row, longest, self.lens, self.cu_q_lens, self.rows)

    def ring_table(self, max_q_len: int) -> jax.Array:
        """Returns a block table of the ring, from each sequence's `first_block` on, for `max_q_len` new tokens.

        Its first and its last column may be one block of the ring, for tokens of either.
        """
        block = self.first_block[:, None] + jnp.arange(self.num_columns(max_q_len), dtype=jnp.int32)
        in_row = self.row_start[:, None] + block % self.blocks_per_row
        return jnp.where(self.row_start[:, None] >= 0, in_row, -1)

    def num_columns(self, max_q_len: int) -> int:
        """Returns the most blocks that the queries of a sequence with `max_q_len` new tokens see."""
        return num_reached_blocks(self.size, max_q_len, MAX_WINDOW, WINDOW_BLOCK_SIZE)


def _with_room(
    ring: KVCache, step: _Step, max_q_len: int, layer: jax.Array | None
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Returns a copy of the rows of a step's sequences with room for its tokens, the copy's table and the tokens'
    slots.

    The first columns of the table are blocks of the rows, from `first_block` to that of the first new token, the others
    blocks of the chunks.
    """
    num_seqs, num_tokens = len(step.lens), len(step.position)
    num_old, columns = step.num_columns(1), step.num_columns(max_q_len)
    # Full blocks of new tokens, and one partial block for each sequence that has any.
    room = (num_tokens + min(num_seqs, num_tokens) * (WINDOW_BLOCK_SIZE - 1)) // WINDOW_BLOCK_SIZE
    cache = _pages(ring, step.ring_table(1).reshape(-1), room, layer)
    num_blocks = -(-step.lens // WINDOW_BLOCK_SIZE) - step.first_block - num_old
    num_blocks = jnp.where((step.q_lens > 0) & (step.row_start >= 0), jnp.maximum(num_blocks, 0), 0)
    start = num_seqs * num_old + jnp.cumsum(num_blocks) - num_blocks
    column = jnp.arange(columns, dtype=jnp.int32)[None]
    own = jnp.arange(num_seqs, dtype=jnp.int32)[:, None] * num_old + column
    table = jnp.where(column < num_old, own, start[:, None] + column - num_old)
    exists = (step.row_start[:, None] >= 0) & (column < num_old + num_blocks[:, None])
    if layer is not None and ring.num_layers is not None:  # the copy has no layers: it is empty for one out of range
        exists &= (layer >= 0) & (layer < ring.num_layers)
    table = jnp.where(exists, table, -1)
    column = step.position // WINDOW_BLOCK_SIZE - step.first_block[step.seq]
    block = table.at[step.seq, column].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    is_written = (step.position >= 0) & (block >= 0)
    return (
        cache,
        table,
        jnp.where(is_written, block * WINDOW_BLOCK_SIZE + step.position % WINDOW_BLOCK_SIZE, PADDING_SLOT),
    )


def _pages(ring: KVCache, blocks: jax.Array, room: int, layer: jax.Array | None) -> KVCache:
    """Returns a cache of copies of a layer's blocks (any block for those below 0) and of `room` empty blocks."""
    index = blocks if ring.num_layers is None else (blocks, layer)
    copied = ring.kv.at[index].get(mode="clip", wrap_negative_indices=False)
    # Nothing reads a token that is not written: filling the room would take as long as writing it.
    shape = (len(blocks) + room, *copied.shape[1:])
    kv = lax.empty(shape, copied.dtype, out_sharding=jax.typeof(copied).sharding)
    kv = lax.dynamic_update_slice_in_dim(kv, copied, 0, axis=0)
    sharding = ring.sharding
    if sharding is not None:
        divided = partition_of(ring.spec, sharding, ring.num_layers)
        sharding = dataclasses.replace(divided, num_layers=None).sharding(ring.spec)
    return KVCache(kv, ring.spec, sharding)
