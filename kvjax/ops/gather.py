"""`gather_kv`: reads a paged cache as dense, dequantized keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from kvjax.cache import KVCache, local_view
from kvjax.cache_views import as_one_layer, pages_of
from kvjax.errors import KVCacheTypeError, shown
from kvjax.kernels import gather as kernel
from kvjax.kernels.codecs import why_not_pages
from kvjax.kernels.launchable import PAGES, array_memory
from kvjax.kernels.prompts import fp8
from kvjax.ops import select
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    as_blocks,
    as_layer,
    as_lengths,
    as_scales,
    check_array,
    check_cache,
    check_devices,
    check_keys_and_values,
)
from kvjax.ops.rows import KEYS, VALUES, decode_rows, page_rows
from kvjax.ops.value_checks import check_sequences, is_checked
from kvjax.partition import Signature
from kvjax.spec import AttentionSpec


def gather_kv(
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    layer: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the dequantized keys and values of whole sequences.

    Args:
      cache: the layer's cache, or that of several layers.
      block_table: int32 `[num_seqs, max_blocks]`: the pages of each sequence, in order. An entry that is not a block of
        the cache, such as -1 for a freed block, reads as zeros; entries past a sequence's last block may hold anything.
      seq_lens: int32 `[num_seqs]`: tokens of each sequence.
      layer: the layer to read in a cache of several, an int or an int32 scalar that may be traced. An array out of
        range reads zeros. None for a cache of one layer.
      k_scale: the decode scale that the keys were written with, if not the cache's; default: the cache's, or 1.
      v_scale: the same for the values.
      dtype: float32, float16 or bfloat16, of the result; default: the storage dtype of an unquantized layer, else
        the spec's `model_dtype`. Decoding is in float32 and rounds once.
      implementation: `"mosaic"`, `"xla"`, or `None` to choose by the cache's device.

    Returns:
      `(key, value)`: `[num_seqs, max_len, num_kv_heads, head_size]` and `[.., head_size_v]`, where `max_len` is
      `max_blocks * block_size`; zeros from each sequence's length on, and for tokens in no block of the cache.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype or scale; the message names it.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    check_cache(cache)
    check_keys_and_values("gather_kv", cache.spec, "gather_mla")
    cache = local_view(cache)
    spec = cache.spec
    sequences = as_sequences(cache, block_table, seq_lens, Stored(layer, k_scale, v_scale))
    out = result_dtype(dtype, spec)
    serve = select.choose("gather_kv", implementation, _IMPLEMENTATIONS, cache)
    keys, values = serve(cache, *sequences, dtype=out)
    return keys, values


def result_dtype(dtype: DTypeLike | None, spec: AttentionSpec) -> np.dtype[Any]:
    """Returns the dtype of dense results; raises `KVCacheTypeError` for one that they cannot have."""
    if dtype is None:
        return spec.model_dtype.info.storage_dtype if spec.dtype.is_quantized else spec.storage_dtype
    try:
        out = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # NumPy evaluates strings of structured dtypes
        out = None
    if out not in INPUT_DTYPES:
        got = shown(dtype) if out is None else out
        raise KVCacheTypeError(f"dtype: got {got}, expected one of {', '.join(map(str, INPUT_DTYPES))}")
    return out


class Stored(NamedTuple):
    """Which of a cache's layers a call reads, and with which scales, as the caller gives them."""

    layer: ArrayLike | None
    k_scale: ArrayLike | None
    v_scale: ArrayLike | None


def as_sequences(
    cache: KVCache,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    stored: Stored,
    num_seqs: int | None = None,
    last_tokens: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Checks the arguments of a read and returns them as JAX arrays: table, lengths, layer and scales.

    Table and lengths are int32, with unchecked values. Where only the `last_tokens` of a sequence are read (an int, or
    one for each), earlier entries are neither checked nor attributed to another share.
    """
    check_array("block_table", block_table, [("num_seqs", num_seqs), ("max_blocks", None)], INDEX_DTYPES)
    check_devices(cache, block_table=block_table, seq_lens=seq_lens, **stored._asdict())
    check_array("seq_lens", seq_lens, [("num_seqs", np.shape(block_table)[0])], INDEX_DTYPES)
    if last_tokens is not None and (is_checked() or cache.sharding is not None):
        block_table = last_blocks(block_table, seq_lens, last_tokens, cache.spec.block_size)
    if is_checked():
        check_sequences(block_table, seq_lens, cache.num_blocks, cache.spec.block_size)
    layer = as_layer(cache, stored.layer)
    scales = as_scales(cache, layer, stored.k_scale, stored.v_scale)
    return as_blocks(block_table, cache), as_lengths(seq_lens), layer, *scales


def last_blocks(block_table: Any, seq_lens: Any, last_tokens: Any, block_size: int) -> Any:
    """Returns the table with -1 for the blocks before those of the last tokens of each sequence."""
    is_traced = any(isinstance(array, jax.Array) for array in (block_table, seq_lens, last_tokens))
    xp: Any = jnp if is_traced else np
    ends = block_size * xp.arange(1, block_table.shape[1] + 1)
    lengths = seq_lens.clip(0, np.iinfo(np.int32).max) if isinstance(seq_lens, np.ndarray) else as_lengths(seq_lens)
    return xp.where(lengths[:, None] - ends[None, :] >= xp.reshape(last_tokens, (-1, 1)), -1, block_table)


def in_one_layer(cache: KVCache, layer: jax.Array | None, block_table: jax.Array) -> tuple[KVCache, jax.Array]:
    """Returns a cache with the pages of all layers as one layer's, and a layer's block table in its numbering."""
    if layer is None:
        return cache, block_table
    return as_one_layer(cache), pages_of(cache, layer, block_table, otherwise=-1)


def token_mask(block_table: jax.Array, seq_lens: jax.Array, num_blocks: int, block_size: int) -> jax.Array:
    """Returns the mask of existing tokens, bool `[num_seqs, max_blocks * block_size]`.

    False from a sequence's length on, and for entries that are not one of the cache's `num_blocks`: clamped, they would
    read another sequence's tokens, so every implementation masks them.
    """
    is_block = jnp.repeat((block_table >= 0) & (block_table < num_blocks), block_size, axis=1)
    return is_block & (jnp.arange(is_block.shape[1])[None, :] < seq_lens[:, None])


def gather_xla(
    cache: KVCache,
    block_table: jax.Array,
    seq_lens: jax.Array,
    layer: jax.Array | None,
    k_scale: jax.Array,
    v_scale: jax.Array,
    *,
    dtype: np.dtype[Any],
) -> tuple[jax.Array, jax.Array]:
    """Gathers in XLA, from checked arguments; returns what `gather_kv` does, or for latents the latents and the rope
    keys.

    Each of these has one head, `[num_seqs, max_len, 1, size]`.
    """
    cache, block_table = in_one_layer(cache, layer, block_table)
    spec = cache.spec
    num_seqs, max_len = block_table.shape[0], block_table.shape[1] * spec.block_size
    pages = cache.kv[jnp.clip(block_table, 0, cache.num_blocks - 1)]
    there = token_mask(block_table, seq_lens, cache.num_blocks, spec.block_size)[:, :, None, None]

    def decode(kv_index: int, scale: jax.Array) -> jax.Array:
        decoded = decode_rows(page_rows(pages, spec, kv_index), spec.parts[kv_index], scale, dtype)
        dense = decoded.reshape(num_seqs, max_len, *decoded.shape[-2:])
        return jnp.where(there, dense, jnp.zeros((), dtype))

    return decode(KEYS, k_scale), decode(VALUES, v_scale)


def units_of_blocks(cache: KVCache, block_table: jax.Array, seq_lens: jax.Array, first: jax.Array) -> jax.Array:
    """Returns the divisors of NVFP4 keys and values for fp8 products, for each sequence and head.

    Float32 `[2, num_seqs, num_kv_heads]`: `fp8.unit_above` of the largest block scale of a sequence's tokens from
    `first` `[num_seqs]` on; 1 for keys or values of another dtype. The cache has one layer.
    """
    spec = cache.spec
    shape = block_table.shape[0], block_table.shape[1] * spec.block_size, spec.num_kv_heads
    pages = cache.kv[jnp.clip(block_table, 0, cache.num_blocks - 1)]
    there = token_mask(block_table, seq_lens, cache.num_blocks, spec.block_size)
    there &= jnp.arange(shape[1]) >= first[:, None]
    has_scales = np.array([part.info.elements_per_scale is not None for part in spec.parts])

    def largest(kv_index: int) -> jax.Array:
        if not has_scales[kv_index]:
            return jnp.zeros(shape, jnp.uint8)
        _, scales = page_rows(pages, spec, kv_index)
        bits = jax.lax.bitcast_convert_type(scales.reshape(*shape, -1), jnp.uint8)
        return jnp.max(jnp.minimum(bits & 0x7F, 0x7E), axis=-1)

    # Both together, for fewer kernels.
    bits = jnp.stack([largest(KEYS), largest(VALUES)])
    units = fp8.unit_above(jnp.max(jnp.where(there[None, :, :, None], bits, 0), axis=2))
    return jnp.where(has_scales[:, None, None], units, 1.0)


def _dense(cache: KVCache, block_table: jax.Array, *_: Any, dtype: np.dtype[Any]) -> Any:
    """Returns the types of `gather_kv`'s results."""
    spec = cache.spec
    shape = block_table.shape[0], block_table.shape[1] * spec.block_size, spec.num_kv_heads
    return tuple(jax.ShapeDtypeStruct((*shape, size), dtype) for size in (spec.head_size, spec.head_size_v))


def gather_mosaic(
    cache: KVCache, *sequences: Any, dtype: np.dtype[Any], config: kernel.GatherConfig | None = None
) -> tuple[jax.Array, jax.Array]:
    """Gathers with the kernel, launched as `config` says, if given; takes and returns what `gather_xla` does."""
    spec, (block_table, seq_lens, layer, k_scale, v_scale) = cache.spec, sequences
    keys, values = _dense(cache, block_table, dtype=dtype)
    if not keys.shape[0] * keys.shape[1]:
        return jnp.zeros(keys.shape, dtype), jnp.zeros(values.shape, dtype)
    sizes, num_layers = (k_scale.size, v_scale.size), None if layer is None else cache.num_layers
    gather = kernel.any_count(spec, array_memory(spec), dtype, sizes, num_layers=num_layers, config=config)
    arrays = {"block_table": block_table, "seq_lens": seq_lens, "layer": layer, "k_scale": k_scale, "v_scale": v_scale}
    arrays |= {**dict.fromkeys(PAGES, cache.kv), "key": keys, "value": values}
    counts = block_table.shape[1], block_table.shape[1], cache.num_blocks - 1
    dense = gather.of_arrays(counts, block_table.size, arrays)
    return dense["key"], dense["value"]


def own_sequences(
    spec: AttentionSpec, first_block: jax.Array, num_blocks: int, block_table: jax.Array, seq_lens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a block table in a share's numbering, and lengths: 0 for a sequence with a block in another share.

    An entry that is not a block of the whole cache is negative, as `as_blocks` makes it, and stays negative.
    """
    is_block = block_table >= 0
    own = block_table - first_block.astype(block_table.dtype)
    is_used = jnp.arange(own.shape[1])[None, :] * spec.block_size < seq_lens[:, None]
    is_elsewhere = is_used & is_block & ((own < 0) | (own >= num_blocks))
    return jnp.where(is_block, own, -1), jnp.where(is_elsewhere.any(axis=1), 0, seq_lens)


def _own_sequences(
    spec: AttentionSpec, first_block: jax.Array, num_blocks: int, *args: jax.Array
) -> tuple[jax.Array, ...]:
    return *own_sequences(spec, first_block, num_blocks, *args[:2]), *args[2:]


_IMPLEMENTATIONS = select.Candidates(
    parameters=("cache", "block_table", "seq_lens", "layer", "k_scale", "v_scale"),
    xla=gather_xla,
    mosaic=gather_mosaic,
    results=_dense,
    why_not_mosaic=why_not_pages,
    signature=Signature(
        arguments=("sequences blocks_in_order", "sequences", "", "heads", "heads"),
        results=("sequences tokens heads head_size",) * 2,
        own=_own_sequences,
    ),
)
