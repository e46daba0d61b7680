"""`gather_mla`: reads ranges of tokens from a paged cache of multi-head latent attention (MLA), dequantized."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from kvjax.cache import KVCache, local_view
from kvjax.cache_views import flat_pages, pages_of
from kvjax.kernels import gather_rows as kernel
from kvjax.kernels.launchable import PAGES, SCALES, RowMemory, array_memory
from kvjax.kernels.row_places import any_places
from kvjax.ops import select
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    as_blocks,
    as_layer,
    as_lengths,
    as_scales,
    check_array,
    check_cache,
    check_devices,
    check_latents,
)
from kvjax.ops.gather import last_blocks, own_sequences, result_dtype
from kvjax.ops.prompts import RowSequences
from kvjax.ops.rows import KEYS, VALUES, decode_rows, page_rows
from kvjax.ops.value_checks import check_cumulative, check_sequences, check_starts, is_checked
from kvjax.partition import Signature
from kvjax.spec import AttentionSpec, as_int


def gather_mla(
    cache: KVCache,
    block_table: ArrayLike,
    cu_seq_lens: ArrayLike,
    *,
    num_tokens: int,
    seq_starts: ArrayLike | None = None,
    layer: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the dequantized latents and rope keys of a range of tokens of each sequence, one after the other.

    Rows `cu_seq_lens[i]` to `cu_seq_lens[i + 1] - 1` are the tokens of sequence `i` from `seq_starts[i]` on, as in
    vLLM's `gather_and_maybe_dequant_cache`: the context of a prompt that is served in chunks, for attention over keys
    and values that the model computes from latents.

    Args:
      cache: the layer's cache of an `MLAAttentionSpec`, or that of several layers.
      block_table: int32 `[num_seqs, max_blocks]`: the pages of each sequence, in order. An entry that is not a block of
        the cache reads as zeros; entries of blocks without a token of the range may hold anything.
      cu_seq_lens: int32 `[num_seqs + 1]`, cumulative lengths of the ranges: starts with 0 and never decreases.
      num_tokens: rows of the results, a Python int. Rows from `cu_seq_lens[-1]` on are zeros.
      seq_starts: int32 `[num_seqs]`, the first token of each range; default 0. `kvjax.checked()` refuses negative ones;
        without it they are read as 0.
      layer: the layer to read in a cache of several, an int or an int32 scalar that may be traced. An array out of
        range reads zeros. None for a cache of one layer.
      scale: the decode scale that the tokens were written with, if not the cache's; default: the cache's `k_scale`, or
        1.
      dtype: float32, float16 or bfloat16, of the results; default: the storage dtype of an unquantized layer, else the
        spec's `model_dtype`. Decoding is in float32 and rounds once.
      implementation: `"mosaic"`, `"xla"`, or `None` to choose by the cache's device.

    Returns:
      `(kv_c, k_pe)`: `[num_tokens, kv_lora_rank]` and `[num_tokens, qk_rope_head_dim]`.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype or scale; the message names it. Also for a cache of
        keys and values.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    check_latents("gather_mla", cache.spec)
    cache = local_view(cache)
    spec, num_tokens = cache.spec, as_int("num_tokens", num_tokens, least=0, most=2**31 - 1)
    check_array("block_table", block_table, [("num_seqs", None), ("max_blocks", None)], INDEX_DTYPES)
    num_seqs = np.shape(block_table)[0]
    check_array("cu_seq_lens", cu_seq_lens, [("num_seqs + 1", num_seqs + 1)], INDEX_DTYPES)
    if seq_starts is not None:
        check_array("seq_starts", seq_starts, [("num_seqs", num_seqs)], INDEX_DTYPES)
    arrays = {"block_table": block_table, "cu_seq_lens": cu_seq_lens, "seq_starts": seq_starts}
    check_devices(cache, **arrays, layer=layer, scale=scale)
    if is_checked():
        check_cumulative("cu_seq_lens", cu_seq_lens, num_tokens)
        if seq_starts is not None:
            check_starts("seq_starts", seq_starts)
    bounds = as_lengths(cu_seq_lens)
    firsts = None if seq_starts is None else as_lengths(seq_starts)
    starts = ends = bounds
    if is_checked() or cache.sharding is not None:
        starts, ends = bounds[:-1], bounds[1:]
        after = _after_last(firsts, ends - starts)
        block_table = last_blocks(block_table, after, ends - starts, spec.block_size)
        if is_checked():
            check_sequences(block_table, after, cache.num_blocks, spec.block_size, what="seq_starts + lengths")
    layer = as_layer(cache, layer)
    table, scales = as_blocks(block_table, cache), as_scales(cache, layer, scale, None)
    out = result_dtype(dtype, spec)
    serve = select.choose("gather_mla", implementation, _IMPLEMENTATIONS, cache)
    parts = serve(cache, table, firsts, starts, ends, layer, scales[0], num_tokens=num_tokens, dtype=out)
    kv_c, k_pe = (_joined(part) for part in parts)
    return kv_c, k_pe


def _after_last(firsts: jax.Array | None, lens: jax.Array) -> jax.Array:
    """Returns the token after the last of each range, at most the largest int32."""
    if firsts is None:
        return lens
    firsts = jnp.maximum(firsts, 0)
    return jnp.where(firsts > np.iinfo(np.int32).max - lens, np.iinfo(np.int32).max, firsts + lens)


class _Ranges(NamedTuple):
    """Ranges of tokens of sequences.

    Attributes:
      block_table: int32 `[num_seqs, max_blocks]`.
      firsts: int32 `[num_seqs]`, the first token of each range; negative ones are read as 0. None for zeros.
      starts: int32 array whose first `num_seqs` elements are the first row of each sequence, in order. A sequence of
        another share starts where it ends.
      ends: int32 array whose last `num_seqs` elements are the row after the last of each sequence. Thus both may be
        the cumulative lengths.
      layer: int32 `[]`, or None for a cache of one layer.
      scale: float32 `[]`.
    """

    block_table: Any
    firsts: Any
    starts: Any
    ends: Any
    layer: Any
    scale: Any


def _gather_xla(
    cache: KVCache, *arrays: jax.Array | None, num_tokens: int, dtype: np.dtype[Any]
) -> tuple[jax.Array, jax.Array]:
    """Gathers in XLA, from checked arguments.

    Args:
      cache: one device's cache or its share of one.
      arrays: `_Ranges`, their layer int32 `[]` or None.
      num_tokens: rows.
      dtype: of the results.

    Returns:
      `[1, num_tokens, kv_lora_rank]` and `[1, num_tokens, qk_rope_head_dim]`. The first dimension is that of the shares
      of the cache's blocks.
    """
    ranges, spec = _Ranges._make(arrays), cache.spec
    if not num_tokens or not ranges.block_table.size:
        return _no_rows(spec, num_tokens, dtype)
    page, token = _places(cache, ranges, num_tokens)
    tokens = _token_rows(cache, page, token)
    alone = dataclasses.replace(spec, block_size=1, page_size_padded=None)

    def decode(index: int) -> jax.Array:
        dense = decode_rows(page_rows(tokens, alone, index), spec.parts[index], ranges.scale, dtype)
        return jnp.where(page[:, None] >= 0, dense.reshape(num_tokens, -1), jnp.zeros((), dtype))[None]

    return decode(KEYS), decode(VALUES)


def _gather_mosaic(
    cache: KVCache, *arrays: jax.Array | None, num_tokens: int, dtype: np.dtype[Any]
) -> tuple[jax.Array, jax.Array]:
    """Gathers with the kernel; takes and returns what `_gather_xla` does."""
    ranges, spec = _Ranges._make(arrays), cache.spec
    if not num_tokens or not ranges.block_table.size:
        return _no_rows(spec, num_tokens, dtype)
    num_layers = None if ranges.layer is None else cache.num_layers
    num_seqs, max_blocks = ranges.block_table.shape
    counts = num_tokens, num_seqs, max_blocks, max_blocks, cache.num_blocks - 1, spec.block_size
    num_known, num_firsts, first_end = 0, 0 if ranges.firsts is None else num_seqs, ranges.ends.size - num_seqs
    find = any_places(num_layers=num_layers)
    places = dict.fromkeys(find.writes, jax.ShapeDtypeStruct((num_tokens,), jnp.int32))
    # The kernel reads no element of these.
    none = {"sequences": ranges.ends} | ({"firsts": ranges.ends} if ranges.firsts is None else {})
    given = ranges._asdict() | none | places
    read = find.of_arrays((*counts, num_known, num_firsts, first_end), num_tokens, given)
    dense = [jax.ShapeDtypeStruct((num_tokens, size), dtype) for size in spec.part_sizes if size]
    gather = kernel.any_rows(spec, array_memory(spec)[: len(dense)], tuple(map(RowMemory.of, dense)))
    read |= dict.fromkeys(PAGES, cache.kv) | dict.fromkeys(SCALES, ranges.scale)
    rows = gather.of_arrays([num_tokens], num_tokens, read | dict(zip(gather.writes, dense, strict=True)))
    kv_c, *k_pe = (x[None] for x in rows.values())
    return kv_c, k_pe[0] if k_pe else kv_c[..., :0]


def _places(cache: KVCache, ranges: _Ranges, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the page of each row's token, -1 for none, and its index there, int32 `[num_tokens]`."""
    block_table, firsts, starts, ends, layer, _ = ranges
    block_size, num_seqs = cache.spec.block_size, block_table.shape[0]
    starts, ends = jnp.maximum(starts[:num_seqs], 0), ends[ends.size - num_seqs :]
    rows = RowSequences.of(num_tokens, starts, ends)
    position = jnp.arange(num_tokens, dtype=jnp.int32) - starts[rows.seq]
    if firsts is not None:
        position += jnp.maximum(firsts, 0)[rows.seq]
    column = position // block_size
    block = block_table[rows.seq, jnp.clip(column, 0, block_table.shape[1] - 1)]
    there = rows.is_any & (position >= 0) & (column < block_table.shape[1])
    page = jnp.where(there, pages_of(cache, layer, block, otherwise=-1), -1)
    return page.astype(jnp.int32), (position % block_size).astype(jnp.int32)


def _types(cache: KVCache, *_: Any, num_tokens: int, dtype: np.dtype[Any]) -> Any:
    """Returns the types of the results of `_gather_xla`."""
    return tuple(jax.ShapeDtypeStruct((1, num_tokens, size), dtype) for size in cache.spec.part_sizes)


def _no_rows(spec: AttentionSpec, num_tokens: int, dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array]:
    kv_c, k_pe = (jnp.zeros((1, num_tokens, size), dtype) for size in spec.part_sizes)
    return kv_c, k_pe


def _token_rows(cache: KVCache, page: jax.Array, token: jax.Array) -> jax.Array:
    """Returns all that pages hold of tokens, `[num_tokens, 1, row]`; pages out of range are clamped."""
    pages = flat_pages(cache)
    row = cache.spec.bytes_per_token // pages.dtype.itemsize
    rows = lax.gather(
        pages,
        jnp.stack([page, token * row], axis=1),
        lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)),
        slice_sizes=(1, row),
        mode=lax.GatherScatterMode.CLIP,
    )
    return rows[:, None]


def _joined(shares: jax.Array) -> jax.Array:
    """Returns the rows of all shares, each of which has zeros for the tokens of others.

    They are added as integers, because a sum of floats would change -0.0 and NaN.
    """
    if shares.shape[0] == 1:
        return shares[0]
    bits = lax.bitcast_convert_type(shares, f"uint{8 * shares.dtype.itemsize}")
    return lax.bitcast_convert_type(jnp.sum(bits, axis=0, dtype=bits.dtype), shares.dtype)


def _own_sequences(
    spec: AttentionSpec, first_block: jax.Array, num_blocks: int, *args: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the arguments for a share: its block numbers, and no rows for sequences of other shares."""
    block_table, firsts, starts, ends, *others = args
    after = _after_last(firsts, ends - starts)
    block_table, after = own_sequences(spec, first_block, num_blocks, block_table, after)
    return block_table, firsts, jnp.where(after == 0, ends, starts), ends, *others


_IMPLEMENTATIONS = select.Candidates(
    parameters=("cache", *_Ranges._fields),
    xla=_gather_xla,
    mosaic=_gather_mosaic,
    results=_types,
    why_not_mosaic=kernel.why_not,
    signature=Signature(
        arguments=("sequences blocks_in_order", "sequences", "sequences", "sequences", "", ""),
        results=("blocks tokens kv_lora_rank", "blocks tokens qk_rope_head_dim"),
        own=_own_sequences,
    ),
)
