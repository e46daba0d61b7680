"""`StepMetadata`, the sequences of a ragged step, and `attend`, its write and attention in one layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.block_pool import FREED_BLOCK, MAX_SLOTS, PagedSequence
from kvjax.cache import KVCache
from kvjax.errors import KVCacheTypeError, KVCacheValueError, kind_of, shown
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    OF_LAYER,
    Window,
    check_array,
    check_cache,
    check_keys_and_values,
)
from kvjax.ops.ragged import ragged_paged_attention
from kvjax.ops.values import check_num_seqs, is_checked
from kvjax.ops.write import flat_tokens, reshape_and_cache_flash_diffkv
from kvjax.spec import as_int

PADDING_SLOT = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """The sequences of a step (prefills, chunked prefills, decodes), with their new tokens concatenated.

    A pytree of int32 arrays. A sequence's new tokens are its last ones; their keys and values are written to
    `slot_mapping` before attention. Padding: slots -1, lengths 0, repeated `cu_q_lens`, block table entries -1.

    Attributes:
      block_table: `[num_seqs, max_blocks]`, the blocks of each sequence.
      seq_lens: `[num_seqs]`, its tokens, the new ones included.
      cu_q_lens: `[num_seqs + 1]`: new tokens of sequence i are `cu_q_lens[i]` to `cu_q_lens[i + 1]`.
      slot_mapping: `[num_tokens]`, the slot of each new token.
    """

    block_table: Any
    seq_lens: Any
    cu_q_lens: Any
    slot_mapping: Any

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[PagedSequence],
        q_lens: Sequence[int],
        *,
        num_tokens: int | Sequence[int] | None = None,
        num_seqs: int | Sequence[int] | None = None,
        max_blocks: int | Sequence[int] | None = None,
    ) -> StepMetadata:
        """Builds the step of sequences of one `BlockPool`, on the host: NumPy arrays, O(tokens + table entries).

        Args:
          sequences: in the order of their tokens in the step; `BlockPool.append` has reserved the new ones.
          q_lens: number of new tokens of each, its last ones.
          num_tokens: tokens to pad to: a size, or sizes (buckets) of which the smallest that fits is used; each is
            compiled once. Default: no padding.
          num_seqs: rows to pad to, likewise.
          max_blocks: columns of the block table to pad to, likewise.

        Raises:
          KVCacheValueError: the step does not fit the largest size; more new tokens than a sequence has, or new
            tokens in a freed block.
        """
        new = np.array(_new_tokens(sequences, q_lens), np.int64)
        blocks = [sequence.blocks for sequence in sequences]
        rows = _bucket("num_seqs", len(sequences), num_seqs)
        columns = _bucket("max_blocks", max(map(len, blocks), default=0), max_blocks)
        slot_mapping = np.full(_bucket("num_tokens", int(new.sum()), num_tokens), PADDING_SLOT, np.int32)
        block_table = np.full((rows, columns), FREED_BLOCK, np.int32)
        for row, own in enumerate(blocks):
            block_table[row, : len(own)] = own
        seq_lens = np.zeros(rows, np.int32)
        seq_lens[: len(new)] = [sequence.num_tokens for sequence in sequences]
        cu_q_lens = np.zeros(rows + 1, np.int32)
        cu_q_lens[1:] = np.cumsum(np.pad(new, (0, rows - len(new))))
        if sequences:
            size = sequences[0].pool.block_size
            slot_mapping[: new.sum()] = _slots(block_table, seq_lens[: len(new)], new, size)
        return cls(block_table, seq_lens, cu_q_lens, slot_mapping)

    @classmethod
    def from_page_indices(
        cls,
        page_indices: ArrayLike,
        kv_lens: ArrayLike,
        cu_q_lens: ArrayLike,
        *,
        block_size: int,
        num_tokens: int,
        max_blocks: int | None = None,
        cu_kv_lens: ArrayLike | None = None,
        num_seqs: ArrayLike | None = None,
    ) -> StepMetadata:
        """Builds the step from the flat page indices of TPU stacks, on the device, also under `jit`.

        Without `cu_kv_lens` each sequence has equally many entries of `page_indices`, as in tpu-inference (its
        `block_tables`, `seq_lens` and `query_start_loc`). With it the pages of sequence i start at
        `cu_kv_lens[i] // block_size`, as in sglang-jax.

        Under `jit` the ints `block_size`, `num_tokens` and `max_blocks` are static.

        Args:
          page_indices: int32 `[num_pages]`. Entries past a sequence's length may be anything.
          kv_lens: int32 `[max_num_seqs]`, tokens of each sequence, the new ones included; 0 for padding.
          cu_q_lens: int32 `[max_num_seqs + 1]`.
          block_size: tokens in a page.
          num_tokens: rows of the query, padding included.
          max_blocks: columns of the block table, enough for the longest sequence; required with `cu_kv_lens`, else
            default `num_pages / max_num_seqs`.
          cu_kv_lens: int32 `[max_num_seqs + 1]`, cumulative lengths, each rounded up to whole pages.
          num_seqs: an int or an integer array, scalar or `[1]`; rows from there on are padding, whatever they hold. An
            int or a NumPy array is from 0 to `max_num_seqs`; a JAX array, whose value is not read, is clamped to that.
            Default: all rows are used.

        Raises:
          KVCacheValueError, KVCacheTypeError: inconsistent shapes, invalid dtypes, or a `num_seqs` out of range.
        """
        size = as_int("block_size", block_size, least=1)
        number = as_int("num_tokens", num_tokens, least=0)
        check_array("page_indices", page_indices, [("num_pages", None)], INDEX_DTYPES)
        check_array("kv_lens", kv_lens, [("max_num_seqs", None)], INDEX_DTYPES)
        pages, lengths = _as_int32(page_indices), jnp.maximum(_as_int32(kv_lens), 0)
        rows = lengths.shape[0]
        check_array("cu_q_lens", cu_q_lens, [("max_num_seqs + 1", rows + 1)], INDEX_DTYPES)
        ends = _as_int32(cu_q_lens)
        if num_seqs is not None:
            used = _as_num_seqs(num_seqs, rows)
            lengths = jnp.where(jnp.arange(rows) < used, lengths, 0)
            ends = ends[jnp.clip(jnp.arange(rows + 1), 0, used)]
        if cu_kv_lens is None:
            per_sequence = _pages_per_sequence(pages, rows)
            columns = per_sequence if max_blocks is None else as_int("max_blocks", max_blocks, least=0)
            first = jnp.arange(rows, dtype=jnp.int32) * per_sequence
        else:
            if max_blocks is None:
                raise KVCacheValueError("max_blocks: got None with cu_kv_lens, expected the columns of the block table")
            check_array("cu_kv_lens", cu_kv_lens, [("max_num_seqs + 1", rows + 1)], INDEX_DTYPES)
            per_sequence = columns = as_int("max_blocks", max_blocks, least=0)
            first = _as_int32(cu_kv_lens)[:-1] // size
        column = jnp.arange(columns, dtype=jnp.int32)[None]
        is_used = (column * size < lengths[:, None]) & (column < per_sequence)
        pages = jnp.where(pages <= MAX_SLOTS // size, pages, FREED_BLOCK)  # larger ones would overflow slots
        block_table = jnp.where(is_used, _entries(pages, first[:, None] + column), FREED_BLOCK)
        step = cls(block_table, lengths, ends, jnp.zeros(number, jnp.int32))
        sequence, position = step.token_rows()
        block = _entries(block_table, sequence, position // size)
        slots = jnp.where((position >= 0) & (block >= 0), block * size + position % size, PADDING_SLOT)
        return dataclasses.replace(step, slot_mapping=slots)

    def token_rows(self) -> tuple[jax.Array, jax.Array]:
        """Returns each token's sequence and position, on the device: two int32 `[num_tokens]`, rows and positions.

        The position of padding is -1, its row is arbitrary.
        """
        lengths, ends = jnp.asarray(self.seq_lens), jnp.asarray(self.cu_q_lens)
        token = jnp.arange(self.slot_mapping.shape[0], dtype=jnp.int32)
        row = jnp.searchsorted(ends[1:], token, side="right", method="scan_unrolled").astype(jnp.int32)
        position = _entries(lengths, row) - _entries(ends, row + 1) + token
        return row, jnp.where(token < ends[-1], jnp.maximum(position, -1), -1)


def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: KVCache,
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
    unique_slots: bool = False,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    decode_q_len: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs a layer's attention in a ragged step: writes the new tokens, then each attends to its sequence up to itself.

    Equivalent to `reshape_and_cache_flash_diffkv` to `metadata.slot_mapping` and `ragged_paged_attention` over the
    returned cache; see there for details.

    Args:
      query: `[num_tokens, num_heads, head_size]`; float32, float16 or bfloat16. Its rows are those of the metadata;
        padding rows attend to nothing. Or `[batch, time, num_heads, head_size]` with `batch * time = num_tokens`; then
        keys, values and the result have these two dimensions too.
      key: `[num_tokens, num_kv_heads, head_size]`, likewise.
      value: `[num_tokens, num_kv_heads, head_size_v]`, of `key`'s dtype.
      cache: the layer's cache, or that of several layers. Under `jit`, donate it.
      metadata: the step's sequences, the same for all layers that share a block table.
      layer: this layer's number in a cache of several.
      k_scale: as in the write and the attention; default: the cache's.
      v_scale: likewise.
      sm_scale: factor on the logits, as in `ragged_paged_attention`.
      sliding_window: tokens that a row attends to, its own included; None for no window. Default: the layer's.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`; None for no cap.
      sinks: float32 `[num_heads]`.
      batch_invariant: whether a sequence's results have the same bits whatever the rest of the batch.
      unique_slots: promises that no two tokens share a slot, as is the case for sequences of one `BlockPool`.
      max_q_len: most query tokens of a sequence.
      max_prompts: most sequences with more query tokens than `decode_q_len`.
      decode_q_len: most query tokens of a sequence on the decode path.
      implementation: `"mosaic"` or `"xla"`, for the write and the attention; None chooses for each.

    Returns:
      `query`'s shape with `head_size_v`, of its dtype, and the updated cache.

    Raises:
      KVCacheValueError, KVCacheTypeError: as both operations; also a number of rows other than the metadata's.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    check_keys_and_values("attend", cache.spec, "concat_and_cache_mla and mla_ragged_paged_attention")
    if not isinstance(metadata, StepMetadata):
        raise KVCacheTypeError(f"metadata: got {kind_of(metadata)}, expected a StepMetadata")
    check_array("slot_mapping", metadata.slot_mapping, [("num_tokens", None)], INDEX_DTYPES)
    num_tokens = np.shape(metadata.slot_mapping)[0]
    heads = [("num_heads", None), ("head_size", cache.spec.head_size)]
    slots, batch = metadata.slot_mapping, ()
    if np.ndim(query) == 4:
        check_array("query", query, [("batch", None), ("time", None), *heads], INPUT_DTYPES)
        batch = np.shape(query)[:2]
        if math.prod(batch) != num_tokens:
            raise KVCacheValueError(
                f"query: got shape {np.shape(query)}, expected batch * time to be the metadata's"
                f" num_tokens={num_tokens}"
            )
        query, slots = flat_tokens(query), jnp.reshape(slots, batch)
    else:
        check_array("query", query, [("num_tokens", num_tokens), *heads], INPUT_DTYPES)
    leading = batch or (num_tokens,)
    if hasattr(key, "shape") and key.shape[:-2] != leading:  # without one, the write refuses it
        raise KVCacheValueError(
            f"key: got shape {key.shape}, expected the query's {leading}, then num_kv_heads and head_size"
        )
    given: dict[str, Any] = {"layer": layer, "k_scale": k_scale, "v_scale": v_scale, "implementation": implementation}
    cache = reshape_and_cache_flash_diffkv(key, value, cache, slots, unique_slots=unique_slots, **given)
    attended = ragged_paged_attention(
        query,
        cache,
        metadata.block_table,
        metadata.seq_lens,
        metadata.cu_q_lens,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        batch_invariant=batch_invariant,
        max_q_len=max_q_len,
        max_prompts=max_prompts,
        decode_q_len=decode_q_len,
        **given,
    )
    return attended.reshape(*batch, *attended.shape[1:]) if batch else attended, cache


def _entries(array: jax.Array, *indices: jax.Array) -> jax.Array:
    """Returns `array[indices]`, -1 out of bounds."""
    return array.at[indices].get(mode="fill", fill_value=-1, wrap_negative_indices=False)


def _pages_per_sequence(pages: jax.Array, num_seqs: int) -> int:
    if not num_seqs or pages.shape[0] % num_seqs:
        raise KVCacheValueError(
            f"page_indices: got {pages.shape[0]} for {num_seqs} sequences, expected an equal number for each;"
            " if pages are packed, pass cu_kv_lens"
        )
    return pages.shape[0] // num_seqs


def _as_num_seqs(num_seqs: Any, most: int) -> jax.Array | int:
    """Returns a number of sequences, a scalar, from 0 to `most`."""
    if not isinstance(num_seqs, (jax.Array, np.ndarray)):
        return as_int("num_seqs", num_seqs, least=0, most=most)
    if num_seqs.shape not in ((), (1,)):
        raise KVCacheValueError(f"num_seqs: got shape {num_seqs.shape}, expected [] or [1]")
    check_array("num_seqs", num_seqs, [("one", 1)] * num_seqs.ndim, INDEX_DTYPES)
    if isinstance(num_seqs, np.ndarray):
        return as_int("num_seqs", num_seqs.item(), least=0, most=most)
    if is_checked():
        check_num_seqs(num_seqs, most)
    return jnp.clip(_as_int32(num_seqs), 0, most).reshape(())


def _as_int32(array: Any) -> jax.Array:
    """Returns `array` as int32, clamped to its range."""
    if array.dtype == np.int32:
        return jnp.asarray(array)
    bounds = np.iinfo(np.int32)
    return jnp.asarray(array.clip(bounds.min, bounds.max).astype(np.int32))


def _new_tokens(sequences: Sequence[PagedSequence], q_lens: Sequence[int]) -> list[int]:
    """Returns `q_lens` after checking that the sequences have as many tokens and share a pool."""
    if len(q_lens) != len(sequences):
        raise KVCacheValueError(
            f"q_lens: got {len(q_lens)} numbers, expected one for each of {len(sequences)} sequences"
        )
    for index, sequence in enumerate(sequences):
        if sequence.pool is not sequences[0].pool:
            raise KVCacheValueError(
                f"sequences[{index}]: got a sequence of another pool, expected that of sequences[0]"
            )
    return [
        as_int(f"q_lens[{index}]", q_len, least=0, most=sequence.num_tokens)
        for index, (sequence, q_len) in enumerate(zip(sequences, q_lens, strict=True))
    ]


def _slots(block_table: np.ndarray, seq_lens: np.ndarray, q_lens: np.ndarray, block_size: int) -> np.ndarray:
    """Returns the slots of the last `q_lens` tokens of each row, concatenated: int32 `[sum(q_lens)]`."""
    row = np.repeat(np.arange(len(q_lens)), q_lens)
    # In the concatenation, the last token of row i has index `sum(q_lens[:i + 1]) - 1`.
    position = np.arange(len(row)) + np.repeat(seq_lens - np.cumsum(q_lens), q_lens)
    block = block_table[row, position // block_size]
    if (block == FREED_BLOCK).any():
        token = int(np.argmax(block == FREED_BLOCK))
        raise KVCacheValueError(
            f"q_lens[{row[token]}]: got {q_lens[row[token]]} new tokens, the one at position {position[token]} in a"
            " freed block, expected all in allocated blocks"
        )
    return (block * block_size + position % block_size).astype(np.int32)


def _bucket(what: str, needed: int, sizes: int | Sequence[int] | None) -> int:
    """Returns the smallest of `sizes` that is at least `needed`."""
    if sizes is None:
        return needed
    given = [as_int(what, size, least=0) for size in (sizes if isinstance(sizes, Sequence) else [sizes])]
    fitting = [size for size in given if size >= needed]
    if not fitting:
        raise KVCacheValueError(f"{what}: got {shown(sizes)}, expected at least {needed}, which the step needs")
    return min(fitting)
