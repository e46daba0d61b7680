"""The update of an exact window's ring with a step's tokens, by itself or in one kernel with the write to pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import KVCache, local_view
from kvjax.errors import KVCacheValueError
from kvjax.kernels import write as kernel
from kvjax.ops import select
from kvjax.ops.arguments import as_scales
from kvjax.ops.write import WriteTokens, as_tokens, own_slots, why_not_write, write_mosaic, write_xla
from kvjax.partition import CACHE, Signature, partition_of


class RingUpdate(NamedTuple):
    """A ring, and a step. The last tokens of each of the step's sequences are written to the ring.

    The token at position p of a sequence goes to slot `p % (blocks_per_row * block_size)` of its row.

    Attributes:
      ring: a cache in the model dtype, whose blocks form rows.
      blocks_per_row: blocks of a row.
      longest: most new tokens of a sequence. If a sequence has more, its earlier ones are not written.
      seq_lens: int32 `[num_seqs]`, tokens of each sequence, the new ones included.
      cu_q_lens: int32 `[num_seqs + 1]`, where its new tokens begin and end.
      window_rows: int32 `[num_seqs]`, its row; nothing is written of a sequence whose row the ring does not have.
    """

    ring: KVCache
    blocks_per_row: int
    longest: int
    seq_lens: jax.Array
    cu_q_lens: jax.Array
    window_rows: jax.Array

    @property
    def sequences(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arrays that say where tokens go."""
        return self.seq_lens, self.cu_q_lens, self.window_rows

    @property
    def static(self) -> dict[str, int]:
        """What programs are traced for."""
        return {"blocks_per_row": self.blocks_per_row, "longest": self.longest}


def update_ring(update: RingUpdate, key: Any, value: Any, layer: Any, implementation: str | None) -> KVCache:
    """Returns a ring with a step's last tokens of each sequence; takes keys and values as the write to pages does.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape or dtype; a ring whose blocks are divided among devices.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    ring = local_view(update.ring)
    if ring.sharding is not None and partition_of(ring.spec, ring.sharding, ring.num_layers).blocks:
        raise KVCacheValueError(
            f"exact_window.ring: got blocks divided among devices, {ring.sharding.spec}, expected heads alone, as"
            " ExactWindow.allocate(..., sharding=...) divides"
        )
    no_slots = np.full(np.shape(key)[:1], -1, np.int32)
    key, value, _, layer, *_ = as_tokens(ring, WriteTokens(key, value, no_slots, layer, None, None))
    serve = select.choose("exact_window_attention", implementation, _RING_ALONE, ring)
    kv = serve(ring, key, value, layer, *update.sequences, **update.static)
    return dataclasses.replace(update.ring, kv=kv)


def write_with_ring(
    cache: KVCache, given: WriteTokens, update: RingUpdate, unique_slots: bool, implementation: str | None
) -> tuple[KVCache, KVCache] | None:
    """Writes a step's tokens to pages and to the ring; None where devices do not divide the heads of both alike.

    Raises: as `reshape_and_cache_flash`.
    """
    pages, ring = local_view(cache), local_view(update.ring)
    if (dims := shared_division(pages, ring)) is None:
        return None
    tokens = as_tokens(pages, given)
    serve = select.choose("reshape_and_cache_flash", implementation, _with_ring(dims), pages)
    kv, ring_kv = serve(
        *(pages, *tokens, ring.kv, *update.sequences),
        ring=(ring.spec, ring.num_layers),
        unique_slots=unique_slots,
        **update.static,
    )
    return dataclasses.replace(cache, kv=kv), dataclasses.replace(update.ring, kv=ring_kv)


def shared_division(pages: KVCache, ring: KVCache) -> str | None:
    """Returns how a ring is divided, in the terms of `Signature`; None if not as the heads of the pages are."""
    if pages.sharding is None or ring.sharding is None:
        return "" if pages.sharding is ring.sharding else None
    of_pages, of_ring = (partition_of(one.spec, one.sharding, one.num_layers) for one in (pages, ring))
    return (
        of_ring.dims(ring.spec)
        if of_ring == dataclasses.replace(of_pages, blocks=(), num_layers=of_ring.num_layers)
        else None
    )


def _ring_of(ring: KVCache, sequences: tuple[jax.Array, ...], blocks_per_row: int, longest: int) -> kernel.WindowRing:
    return kernel.WindowRing(ring.kv, ring.spec, ring.num_layers, blocks_per_row, longest, *sequences)


def _ring_xla(
    ring: KVCache, key: jax.Array, value: jax.Array, layer: Any, *sequences: jax.Array, **static: int
) -> jax.Array:
    index, slots = _kept_tokens(_ring_of(ring, sequences, **static), len(key))
    if index is not None:
        key, value = (x.at[index].get(mode="clip") for x in (key, value))
    return write_xla(ring, key, value, slots, layer, *as_scales(ring, None, None, None), unique_slots=True)


def _kept_tokens(ring: kernel.WindowRing, num_tokens: int) -> tuple[jax.Array | None, jax.Array]:
    """Returns the new tokens that rows keep, as an index, and their slots; an index of None stands for all tokens.

    The index has `kept` tokens of each sequence, unless the step has fewer; slots of those that it lacks are -1.
    """
    row_tokens = ring.blocks_per_row * ring.spec.block_size
    begin, end = ring.cu_q_lens[:-1, None], ring.cu_q_lens[1:, None]
    from_end = jnp.arange(ring.kept, 0, -1, dtype=jnp.int32)
    index, position = end - from_end, ring.seq_lens[:, None] - from_end
    row = ring.window_rows[:, None]
    is_kept = (index >= jnp.maximum(begin, 0)) & (index < num_tokens) & (position >= 0)
    is_kept &= (row >= 0) & (row < ring.num_rows)
    slots = jnp.where(is_kept, row * row_tokens + position % row_tokens, -1).reshape(-1)
    if slots.size < num_tokens:
        return index.reshape(-1), slots
    index = jnp.where(is_kept, index, num_tokens).reshape(-1)
    return None, jnp.full(num_tokens, -1, jnp.int32).at[index].set(slots, mode="drop")


def _ring_mosaic(
    ring: KVCache, key: jax.Array, value: jax.Array, layer: Any, *sequences: jax.Array, **static: int
) -> jax.Array:
    if not key.size:
        return ring.kv
    given = _ring_of(ring, sequences, **static)
    arrays = given.arrays(key, value) | {"layer": layer}
    results = kernel.any_ring(given.kind(key, value)).of_arrays((len(key), *given.counts), given.counts[0], arrays)
    return results[kernel.RING_PAGES[0]]


def _ring_type(ring: KVCache, *_: Any, **__: Any) -> Any:
    return ring.kv


_RING_ALONE = select.Candidates(
    parameters=("exact_window.ring", "key", "value", "layer", "seq_lens", "cu_q_lens", "window_rows"),
    xla=_ring_xla,
    mosaic=_ring_mosaic,
    results=_ring_type,
    why_not_mosaic=why_not_write,
    signature=Signature(
        arguments=("tokens heads head_size", "tokens heads head_size", "", "num_seqs", "bounds", "num_seqs"),
        results=CACHE,
    ),
)


def _split(
    cache: KVCache, arrays: tuple[Any, ...], ring: tuple[Any, Any]
) -> tuple[WriteTokens, KVCache, tuple[jax.Array, ...]]:
    """Returns the tokens, the ring and the step's sequences of arrays with as many heads as the cache."""
    tokens, (ring_kv, *sequences), (spec, num_layers) = WriteTokens(*arrays[:6]), arrays[6:], ring
    spec = dataclasses.replace(spec, num_kv_heads=cache.spec.num_kv_heads)
    return tokens, KVCache(ring_kv, spec, num_layers=num_layers), tuple(sequences)


def _both_xla(cache: KVCache, *arrays: Any, ring: tuple[Any, Any], unique_slots: bool, **static: int) -> Any:
    tokens, window, sequences = _split(cache, arrays, ring)
    kv = write_xla(cache, *tokens, unique_slots=unique_slots)
    return kv, _ring_xla(window, tokens.key, tokens.value, tokens.layer, *sequences, **static)


def _both_mosaic(cache: KVCache, *arrays: Any, ring: tuple[Any, Any], unique_slots: bool, **static: int) -> Any:
    tokens, window, sequences = _split(cache, arrays, ring)
    return write_mosaic(cache, *tokens, unique_slots=unique_slots, ring=_ring_of(window, sequences, **static))


def _both_types(cache: KVCache, *arrays: Any, **_: Any) -> Any:
    return cache.kv, arrays[6]


@functools.cache
def _with_ring(dims: str) -> select.Candidates:
    """The write to pages and to a ring whose dimensions are these."""
    row = "tokens heads head_size"
    return select.Candidates(
        parameters=("cache", *WriteTokens._fields, "exact_window.ring", "seq_lens", "cu_q_lens", "window_rows"),
        xla=_both_xla,
        mosaic=_both_mosaic,
        results=_both_types,
        why_not_mosaic=why_not_write,
        signature=Signature(
            arguments=(row, row, "tokens", "", "heads", "heads", dims, "num_seqs", "bounds", "num_seqs"),
            results=(CACHE, dims),
            own=own_slots,
        ),
    )
