"""Attention of a step over pages and the ring of an exact window: for each kind of rows, one kernel reads both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.cache import KVCache, local_view
from kvjax.kernels import attention as kernel
from kvjax.kernels import placement
from kvjax.kernels.target import Target, current
from kvjax.ops import select
from kvjax.ops.arguments import Window, as_sinks, check_devices
from kvjax.ops.attention import attended, invariant_batch, own_query_sequences
from kvjax.ops.gather import Stored
from kvjax.ops.merge import merge_attention_states
from kvjax.ops.options import Given, Limits
from kvjax.ops.ragged import Prepared, attend_ragged, of_all_shares, prepared, ragged_xla
from kvjax.ops.ragged_kernels import NearCache, StaticOptions, StepRows, as_read_of_step, with_prompts
from kvjax.ops.route import Query, route, why_not_both
from kvjax.ops.window_write import shared_division
from kvjax.partition import Signature
from kvjax.spec import AttentionSpec


class CachePart(NamedTuple):
    """What queries read of one of the two caches; they see different tokens in each.

    Attributes:
      cache: the cache.
      block_table: int32 `[num_seqs, max_blocks]`.
      seq_lens: int32 `[num_seqs]`; rows see tokens as those of `ragged_paged_attention` do.
      stored: the layer and the scales.
      sliding_window: tokens that a row sees; None for no window, `OF_LAYER` for the layer's.
      query_quantization: whether attention to prompts uses fp8 products.
    """

    cache: KVCache
    block_table: ArrayLike
    seq_lens: ArrayLike
    stored: Stored
    sliding_window: Window
    query_quantization: bool = False


class QueryRows(NamedTuple):
    """The rows of a step, which attend to one cache or to both.

    Attributes:
      query: `[num_tokens, num_heads, head_size]`, checked.
      cu_q_lens: as in `ragged_paged_attention`.
      sinks: likewise.
      given: the options; those that a `CachePart` has are not read here.
      limits: the sizes that the program is compiled for.
    """

    query: jax.Array
    cu_q_lens: ArrayLike
    sinks: ArrayLike | None
    given: Given
    limits: Limits

    def attend(self, part: CachePart, *, has_sinks: bool = True) -> tuple[jax.Array, jax.Array]:
        """Attends to one cache, as `ragged_paged_attention` does."""
        attended: Any = attend_ragged("ragged_paged_attention", *self._call(part, has_sinks=has_sinks))
        return attended

    def attend_both(self, pages: CachePart, ring: CachePart) -> jax.Array:
        """Attends to pages and to a ring, whose heads are those of the pages; returns the output.

        It runs one operation if one kernel can read both, and devices divide the heads of both alike.
        """
        caches = local_view(pages.cache), local_view(ring.cache)
        dims = shared_division(*caches)
        calls = [self._prepared(part, has_sinks=part is ring) for part in (pages, ring)]
        asked = self._asked(pages, ring, calls)
        target, by_xla = placement.target_of(caches[0].kv), self.given.implementation == select.Implementation.XLA
        if dims is None or not (by_xla or asked.why_not(caches[0].spec, target) is None):
            near, far = self.attend(ring), self.attend(pages, has_sinks=False)
            return merge_attention_states([near[0], far[0]], [near[1], far[1]])[0]
        serve = select.choose("exact_window_attention", self.given.implementation, _candidates(asked, dims), caches[0])
        of_pages, of_ring = calls
        # The bounds of sequences' rows are the same in both calls.
        arrays = *of_pages.arrays, caches[1].kv, *of_ring.arrays[:2], *of_ring.arrays[4:]
        options = of_pages.options, of_ring.options
        of_window = caches[1].spec, caches[1].num_layers
        return of_all_shares(*serve(caches[0], self.query, *arrays, ring=of_window, options=options))[0]

    def _call(self, part: CachePart, *, has_sinks: bool) -> tuple[Any, ...]:
        """The arguments of `attend_ragged` after the operation."""
        cache = local_view(part.cache)
        sinks = as_sinks(self.sinks if has_sinks else None, self.query.shape[1], cache.spec)
        devices = {"query": self.query, "sinks": sinks, "cu_q_lens": self.cu_q_lens}
        check_devices(cache, **devices, sliding_window=part.sliding_window)
        own = self.given._replace(sliding_window=part.sliding_window, query_quantization=part.query_quantization)
        read = part.block_table, part.seq_lens, self.cu_q_lens, part.stored
        return cache, self.query, read, (sinks, None), own, self.limits

    def _prepared(self, part: CachePart, *, has_sinks: bool) -> Prepared:
        return prepared(*self._call(part, has_sinks=has_sinks))

    def _asked(self, pages: CachePart, ring: CachePart, calls: Sequence[Prepared]) -> Asked:
        of_pages, of_ring = (call.options for call in calls)
        (num_seqs, max_blocks), ring_blocks = np.shape(pages.block_table), np.shape(ring.block_table)[1]
        rows = num_seqs, of_pages.limits.decode_q_len, *self.query.shape[1:]
        sizes = invariant_batch(local_view(pages.cache), rows, max_blocks)
        queries, invariant = (of_pages.query, of_ring.query), of_pages.softmax.batch_invariant
        return Asked(queries, sizes, ring_blocks, invariant, local_view(ring.cache).spec)


class Asked(NamedTuple):
    """The properties of a call that decide whether one kernel reads both caches.

    Attributes:
      queries: of the calls over pages and over the ring.
      sizes: of rows that decode, for one device's share of the sequences.
      ring_blocks: entries of the ring's block table for each sequence.
      batch_invariant: whether the bits of a sequence's results must not depend on the rest of the batch.
      ring: the ring's spec.
    """

    queries: tuple[Query, Query]
    sizes: kernel.BatchSizes
    ring_blocks: int
    batch_invariant: bool
    ring: AttentionSpec

    def why_not(self, spec: AttentionSpec, target: Target | None) -> str | None:
        """Returns why kernels cannot serve the call beside pages of a spec; None if they can."""
        ring = dataclasses.replace(self.ring, num_kv_heads=spec.num_kv_heads)  # a device's share of its heads
        if (reason := why_not_both((spec, ring), self.queries, target)) is not None:
            return reason
        sizes = self.sizes, self.ring_blocks
        return kernel.why_not_both((spec, ring), *sizes, batch_invariant=self.batch_invariant, target=target)


ARRAYS = 10
"""Arrays of a call over one of both, after the query: the last of them are sinks, a tree and a window on the device."""


def _split(
    cache: KVCache, arrays: tuple[Any, ...], ring: tuple[AttentionSpec, int | None]
) -> tuple[KVCache, tuple[Any, ...], tuple[Any, ...]]:
    """Returns the ring, with as many heads as the cache, and the arrays of the calls over pages and over the ring."""
    of_pages, (kv, table, lens, *others), (spec, num_layers) = arrays[:ARRAYS], arrays[ARRAYS:], ring
    spec = dataclasses.replace(spec, num_kv_heads=cache.spec.num_kv_heads)
    return KVCache(kv, spec, num_layers=num_layers), of_pages, (table, lens, *of_pages[2:4], *others)


def _both_xla(
    cache: KVCache,
    query: jax.Array,
    *arrays: jax.Array | None,
    ring: tuple[AttentionSpec, int | None],
    options: tuple[StaticOptions, StaticOptions],
) -> tuple[jax.Array, jax.Array]:
    """Attends over both in XLA, and merges the results; returns what `ragged_xla` does."""
    recent, of_pages, of_ring = _split(cache, arrays, ring)
    near = ragged_xla(recent, query, *of_ring, options=options[1])
    far = ragged_xla(cache, query, *of_pages, options=options[0])
    return merge_attention_states([near[0], far[0]], [near[1], far[1]])


def _both_mosaic(
    cache: KVCache,
    query: jax.Array,
    *arrays: jax.Array | None,
    ring: tuple[AttentionSpec, int | None],
    options: tuple[StaticOptions, StaticOptions],
) -> tuple[jax.Array, jax.Array]:
    """Attends with the kernels; returns what `_both_xla` does.

    Rows that decode take one kernel, and so do those of prompts if the prompt kernel serves them in 16 bits. Otherwise
    prompts attend over the ring and over pages separately: the results over the ring include those of the decode
    kernel, and the results over pages leave these as they are.
    """
    recent, of_pages, of_ring = _split(cache, arrays, ring)
    far, q_starts, q_ends, softmax = as_read_of_step(of_pages, options[0].softmax)
    near, *_, near_softmax = as_read_of_step(of_ring, options[1].softmax)
    if not query.size or not far.block_table.size:
        return _both_xla(cache, query, *arrays, ring=ring, options=options)
    step, decoded = StepRows.of(len(query), q_starts, q_ends, options[0].limits.decode_q_len), None
    if step.decode_q_len:
        own = far._replace(seq_lens=step.decoding(far.seq_lens), sinks=near.sinks)
        of_window = near._replace(seq_lens=step.decoding(near.seq_lens), sinks=None)
        pages, window = (
            kernel.OneCache(each.kv, read, each.spec, of_each, each.num_layers or 1)
            for each, read, of_each in ((cache, own, softmax), (recent, of_window, near_softmax))
        )
        out, lse = kernel.decode_both(step.packed(query)[0], pages, window, step.q_lens)
        decoded = lax.collapse(out, 0, 2), lax.collapse(lse, 0, 2)
    near_window = near_softmax.window
    if near_window is not None and _one_prompt_kernel((cache.spec, recent.spec), options):
        both = far._replace(sinks=near.sinks)
        out, lse = with_prompts(cache, query, both, step, decoded, options[0], NearCache(recent, near, near_window))
        return out[None], lse[None]
    out, lse = with_prompts(recent, query, near, step, decoded, options[1])
    if options[0].limits.max_prompts:
        of_prompts = with_prompts(cache, query, far, step, None, options[0])
        out, lse = merge_attention_states([out, of_prompts[0]], [lse, of_prompts[1]])
    return out[None], lse[None]


def _one_prompt_kernel(specs: Sequence[AttentionSpec], options: Sequence[StaticOptions]) -> bool:
    """Whether the prompt kernel serves rows of prompts over pages and over a ring at once: in 16 bits, as over each."""
    asked = zip(specs, options, strict=True)
    by_kernel = all(route(spec, each.query, current()).why_no_prompt_kernel is None for spec, each in asked)
    return by_kernel and not any(each.query.query_quantization for each in options)


def _results(*args: Any, **_: Any) -> Any:
    """Returns the types of `_both_xla`'s results."""
    return tuple(jax.ShapeDtypeStruct((1, *result.shape), result.dtype) for result in attended(*args))


@functools.lru_cache(maxsize=1024)
def _candidates(asked: Asked, dims: str) -> select.Candidates:
    """The attention over pages and over a ring whose dimensions are these."""
    sequences, scales = ("sequences blocks_in_order", "sequences"), ("", "heads", "heads")
    own = "block_table", "seq_lens"
    stored = *kernel.ReadArrays._fields[2:], "sliding_window"
    names = "cache", "query", *own, "q_starts", "q_ends", *stored
    others = "heads", "tokens words", ""
    return select.Candidates(
        parameters=(*names, "exact_window.ring", *(f"exact_window.ring {name}" for name in (*own, *stored))),
        xla=_both_xla,
        mosaic=_both_mosaic,
        results=_results,
        why_not_mosaic=asked.why_not,
        differentiable=frozenset({"query", "sinks", "exact_window.ring sinks"}),
        signature=Signature(
            arguments=(
                *("tokens heads head_size", *sequences, "sequences", "sequences", *scales, *others),
                *(dims, "sequences ring_blocks", "sequences", *scales, *others),
            ),
            results=("blocks tokens heads head_size", "blocks tokens heads"),
            own=own_query_sequences,
        ),
    )
