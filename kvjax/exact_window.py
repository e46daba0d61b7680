"""`ExactWindow`: a ring with the last tokens of each sequence in the model dtype, beside pages that stay complete.

A ring is a `KVCache` whose blocks form rows, one for each sequence. The token at position p is in slot
`p % tokens_per_row` of its row, so block b of a sequence is block `b % blocks_per_row` of the row, and a block table
addresses it. `kvjax.window_attention` attends to it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike

from kvjax.cache import KVCache
from kvjax.errors import KVCacheTypeError, KVCacheValueError, UnsupportedError, kind_of, type_name
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    as_blocks,
    as_lengths,
    check_array,
    check_cache,
    check_devices,
)
from kvjax.ops.blocks import copy_blocks
from kvjax.ops.gather import gather_kv
from kvjax.ops.options import MAX_WINDOW, WINDOW_BLOCK_SIZE, num_reached_blocks, window_blocks
from kvjax.ops.value_checks import check_window_rows, is_checked
from kvjax.ops.write import reshape_and_cache_flash
from kvjax.partition import partition_of
from kvjax.spec import AttentionSpec, FullAttentionSpec, as_int
from kvjax.step_metadata import PADDING_SLOT, StepMetadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ExactWindow:
    """The last tokens of running sequences in the model dtype, for one layer or for the layers of one cache.

    A pytree with the ring's pages as its leaf; donate it where the cache is donated.

    Attributes:
      ring: the tokens, `blocks_per_row` blocks for each row.
      size: tokens that a query attends to in the ring, its own included.
      max_q_len: most new tokens of a sequence in a step that attends over the ring itself: 1 plus the number of drafts.
    """

    ring: KVCache
    size: int = dataclasses.field(metadata={"static": True})
    max_q_len: int = dataclasses.field(default=1, metadata={"static": True})

    @classmethod
    def allocate(
        cls,
        spec: AttentionSpec,
        num_rows: int,
        size: int,
        *,
        max_q_len: int = 1,
        num_layers: int | None = None,
        sharding: Sharding | jax.Device | None = None,
    ) -> ExactWindow:
        """Returns a window of zeros for a cache of `spec`, in its `model_dtype`.

        Args:
          spec: the cache's.
          num_rows: number of sequences whose tokens it holds.
          size: tokens that a query attends to, any positive number.
          max_q_len: as the attribute. Steps with longer chunks are served too, over a copy. Up to `max_q_len` of a
            step's tokens can be truncated after it.
          num_layers: the cache's.
          sharding: the cache's. Heads are divided as there; over axes that divide the cache's blocks, the window is
            replicated.

        Raises:
          KVCacheValueError, KVCacheTypeError: a number that is not a positive int, more slots than int32 holds, or a
            sharding that the cache cannot have.
          UnsupportedError: a spec of latents (MLA).
          KVCacheMemoryError: not enough memory.
        """
        ring, blocks = _ring_spec(spec), window_blocks(size, max_q_len)
        most = MAX_WINDOW // (blocks * WINDOW_BLOCK_SIZE)  # slots are int32
        num_rows = as_int("num_rows", num_rows, least=1, most=most)
        if isinstance(sharding, NamedSharding):
            divided = partition_of(spec, sharding, num_layers)
            sharding = dataclasses.replace(divided, blocks=()).sharding(ring)
        cache = KVCache.allocate(ring, num_rows * blocks, num_layers=num_layers, sharding=sharding)
        return cls(cache, int(size), int(max_q_len))

    @staticmethod
    def num_bytes(spec: AttentionSpec, num_rows: int, size: int, *, max_q_len: int = 1) -> int:
        """Returns the bytes that `allocate` takes for each layer; arguments and errors as there."""
        rows = as_int("num_rows", num_rows, least=1)
        return rows * window_blocks(size, max_q_len) * _ring_spec(spec).page_size_bytes

    @property
    def blocks_per_row(self) -> int:
        """Blocks of a row."""
        return window_blocks(self.size, self.max_q_len)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that a row holds: those that a query attends to, and room for `max_q_len - 1` more."""
        return self.blocks_per_row * WINDOW_BLOCK_SIZE

    @property
    def num_rows(self) -> int:
        """Sequences that it holds tokens of."""
        return self.ring.num_blocks // self.blocks_per_row


def fill_exact_window(
    exact_window: ExactWindow,
    cache: KVCache,
    metadata: StepMetadata,
    rows: ArrayLike,
    *,
    layer: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    implementation: str | None = None,
) -> ExactWindow:
    """Fills rows of a window from pages, with the last tokens before a step's first new token.

    This is for sequences whose last tokens are only in the cache: after a prefix hit, a swap or a fork, or if their row
    was given to another sequence. Call it before the step that attends with these rows; `WindowRows.assign` returns the
    rows to fill.

    Under `jit` with the window donated, it is written in place. Each size of the metadata is compiled once, whatever
    the number of rows to fill.

    Args:
      exact_window: of the same layers and heads as the cache.
      cache: with the tokens before the step's new ones. Tokens in no block, behind a sliding window, read as zeros.
      metadata: the step's sequences; `window_rows` is not read.
      rows: int32 `[num_seqs]`, the row to fill for each sequence; -1 for none.
      layer: the layer in a cache of several, as in `gather_kv`.
      k_scale: the decode scale that the keys were written with, if not the cache's; default: the cache's, or 1.
      v_scale: the same for the values.
      implementation: `"mosaic"`, `"xla"` or `None` to choose, for the read and the write.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype or scale, or a window of other layers or heads; the
        message names it.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_window(exact_window, cache, metadata)
    first = first_tokens(metadata)
    row = as_rows("rows", rows, exact_window, first.shape[0])
    size = cache.spec.block_size
    max_blocks = np.shape(metadata.block_table)[1]
    start = jnp.maximum(first - exact_window.size, 0)
    column = (start // size)[:, None] + jnp.arange(num_reached_blocks(exact_window.size, 1, max_blocks, size))
    table = jnp.take_along_axis(as_blocks(metadata.block_table, cache), column, axis=1, mode="fill", fill_value=-1)
    skipped = start // size * size
    lens = jnp.where(row >= 0, first - skipped, 0)
    given: dict[str, Any] = {"layer": layer, "implementation": implementation}
    key, value = gather_kv(
        cache, table, lens, k_scale=k_scale, v_scale=v_scale, dtype=exact_window.ring.spec.storage_dtype, **given
    )
    position = skipped[:, None] + jnp.arange(key.shape[1], dtype=jnp.int32)
    is_token = (position >= start[:, None]) & (position < first[:, None]) & (row >= 0)[:, None]
    num_tokens = exact_window.tokens_per_row
    slots = jnp.where(is_token, row[:, None] * num_tokens + position % num_tokens, PADDING_SLOT)
    ring = reshape_and_cache_flash(key, value, exact_window.ring, slots, unique_slots=True, **given)
    return dataclasses.replace(exact_window, ring=ring)


def copy_window_rows(exact_window: ExactWindow, pairs: ArrayLike, *, donate: bool = False) -> ExactWindow:
    """Copies rows of a window to others, as for a forked sequence; see `copy_blocks`, whose rules hold for rows.

    Args:
      exact_window: with the rows.
      pairs: int32 or int64 `[num_pairs, 2]`, from and to; a pair with a row that the window does not have copies
        nothing. Preferably a NumPy array.
      donate: whether to donate the window, outside `jit`.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape or dtype; the message names it.
    """
    check_is_window(exact_window)
    check_array("pairs", pairs, [("num_pairs", None), ("rows", 2)], INDEX_DTYPES)
    given: Any = pairs
    xp: Any = jnp if isinstance(given, jax.Array) else np
    is_row = (given >= 0) & (given < exact_window.num_rows)
    first = xp.where(is_row, given, -1).astype(np.int32) * exact_window.blocks_per_row
    blocks = xp.where(
        is_row[:, None], first[:, None] + np.arange(exact_window.blocks_per_row, dtype=np.int32)[:, None], -1
    )
    return dataclasses.replace(exact_window, ring=copy_blocks(exact_window.ring, blocks.reshape(-1, 2), donate=donate))


def check_is_window(exact_window: Any) -> None:
    """Raises if `exact_window` is not an `ExactWindow`."""
    if not isinstance(exact_window, ExactWindow):
        raise KVCacheTypeError(f"exact_window: got {kind_of(exact_window)}, expected an ExactWindow")


def check_window(exact_window: Any, cache: Any, metadata: Any) -> None:
    """Raises if `exact_window` is not a window of this cache, or `metadata` is not a `StepMetadata`."""
    check_is_window(exact_window)
    check_cache(cache)
    check_cache(exact_window.ring, "exact_window.ring")
    if not isinstance(metadata, StepMetadata):
        raise KVCacheTypeError(f"metadata: got {kind_of(metadata)}, expected a StepMetadata")
    for name in ("num_kv_heads", "head_size", "head_size_v"):
        got, expected = getattr(exact_window.ring.spec, name), getattr(cache.spec, name)
        if got != expected:
            raise KVCacheValueError(f"exact_window: got {name}={got}, expected {expected} as the cache")
    if exact_window.ring.num_layers != cache.num_layers:
        raise KVCacheValueError(
            f"exact_window: got num_layers={exact_window.ring.num_layers}, expected {cache.num_layers} as the cache"
        )
    check_array("block_table", metadata.block_table, [("num_seqs", None), ("max_blocks", None)], INDEX_DTYPES)
    num_seqs = np.shape(metadata.block_table)[0]
    check_array("seq_lens", metadata.seq_lens, [("num_seqs", num_seqs)], INDEX_DTYPES)
    check_array("cu_q_lens", metadata.cu_q_lens, [("num_seqs + 1", num_seqs + 1)], INDEX_DTYPES)


def first_tokens(metadata: StepMetadata) -> jax.Array:
    """Returns the position of each sequence's first new token, int32 `[num_seqs]`."""
    ends = as_lengths(metadata.cu_q_lens)
    return jnp.maximum(as_lengths(metadata.seq_lens) - (ends[1:] - ends[:-1]), 0)


def as_rows(what: str, rows: Any, window: ExactWindow, num_seqs: int, is_used: Any = None) -> jax.Array:
    """Returns the rows of sequences, int32 `[num_seqs]`, -1 for those that the window does not have.

    Checked mode checks those that `is_used` names; by default all but -1.
    """
    check_array(what, rows, [("num_seqs", num_seqs)], INDEX_DTYPES)
    check_devices(window.ring, **{what: rows})
    if is_checked():
        check_window_rows(what, rows, rows != -1 if is_used is None else is_used, window.num_rows)
    xp: Any = jnp if isinstance(rows, jax.Array) else np  # the low half of an int64 may be a row
    return jnp.asarray(xp.where((rows >= 0) & (rows < window.num_rows), rows, -1).astype(np.int32))


def _ring_spec(spec: Any) -> AttentionSpec:
    """Returns the spec of the ring for a cache of `spec`."""
    if not isinstance(spec, AttentionSpec):
        raise KVCacheTypeError(f"spec: got {spec!r} of type {type_name(spec)}, expected an AttentionSpec")
    if spec.is_mla:
        raise UnsupportedError("ExactWindow: got a spec of latents (MLA), expected one of keys and values")
    return FullAttentionSpec(
        WINDOW_BLOCK_SIZE,
        spec.num_kv_heads,
        spec.head_size,
        spec.head_size_v,
        dtype=spec.model_dtype,
        layout=spec.layout,
        model_dtype=spec.model_dtype,
    )
