"""`reshape_and_cache_flash`: write tokens into a paged cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.cache import KVCache, local_view
from kvjax.cache_views import as_one_layer, pages_of, with_array
from kvjax.kernels import write as kernel
from kvjax.kernels.codecs import why_not_pages
from kvjax.kernels.launchable import PAGES, RowMemory, array_memory
from kvjax.kernels.target import Target
from kvjax.ops import select
from kvjax.ops.arguments import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    as_layer,
    as_scales,
    as_slots,
    check_array,
    check_cache,
    check_devices,
    check_keys_and_values,
)
from kvjax.ops.rows import (
    KEYS,
    VALUES,
    encode_rows,
    last_of_each_slot,
    scatter_rows,
)
from kvjax.ops.value_checks import check_slots, is_checked
from kvjax.partition import CACHE, Signature
from kvjax.spec import AttentionSpec, as_bool


def reshape_and_cache_flash(
    key: ArrayLike,
    value: ArrayLike,
    cache: KVCache,
    slot_mapping: ArrayLike,
    *,
    layer: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    unique_slots: bool = False,
    implementation: str | None = None,
) -> KVCache:
    """Writes tokens into their slots, encoded as the cache's layer stores them.

    Functional: use the returned cache. Under `jit` with the cache donated (`donate_argnums`) the write is in place; its
    cost depends on the number of tokens, not on the cache's size. No byte outside the written slots changes.

    In a `lax.scan` over layers, carry one cache of all of them (`KVCache.allocate(..., num_layers=...)`) and pass the
    `layer`: that is in place too. A scan over stacked caches copies them in every step.

    Args:
      key: `[num_tokens, num_kv_heads, head_size]` or `[batch, time, num_kv_heads, head_size]`; float32, float16 or
        bfloat16.
      value: of `key`'s shape and dtype, but with `head_size_v`.
      cache: the layer's cache, or that of several layers.
      slot_mapping: int32 or int64 `[num_tokens]` or `[batch, time]`: `block * block_size + offset` of each token.
        Negative slots and those at or past `cache.num_slots` write nothing. If several tokens have one slot, the last
        is written.
      layer: the layer to write in a cache of several, an int or an int32 scalar that may be traced; the slots are that
        layer's. An array out of range writes nothing. None for a cache of one layer.
      k_scale: positive float32 decode scale of the keys (`value = stored * scale`), a scalar or for fp8
        `[num_kv_heads]`; default: the cache's, or 1. Unquantized layers ignore it.
      v_scale: the same for the values.
      unique_slots: promises that no two written tokens share a slot, as `unique_indices` does in `jax.numpy`, and skips
        the duplicate check. If two do, the bytes of that slot are undefined.
      implementation: `"mosaic"`, `"xla"`, or `None` to choose by the cache's device.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype, layout or scale; the message names it.
      UnsupportedError: the requested implementation cannot serve this call.
      KVCacheTypeError: on differentiation with respect to any argument, because rounding has no useful gradient.
    """
    check_cache(cache)
    check_keys_and_values("reshape_and_cache_flash", cache.spec, "concat_and_cache_mla")
    return _write(cache, (key, value, slot_mapping, layer, k_scale, v_scale), unique_slots, implementation)


reshape_and_cache_flash_diffkv = reshape_and_cache_flash
"""vLLM's name for writes of values that have another head size than the keys."""


class WriteTokens(NamedTuple):
    """The arrays of a write, as callers give them or as `as_tokens` returns them."""

    key: Any
    value: Any
    slot_mapping: Any
    layer: Any
    k_scale: Any
    v_scale: Any


def _write(cache: KVCache, arrays: Sequence[Any], unique_slots: bool, implementation: str | None) -> KVCache:
    given, cache = cache, local_view(cache)
    tokens = as_tokens(cache, WriteTokens(*arrays))
    unique_slots = as_bool("unique_slots", unique_slots)
    serve = select.choose("reshape_and_cache_flash", implementation, _IMPLEMENTATIONS, cache)
    kv = serve(cache, *tokens, unique_slots=unique_slots)
    return dataclasses.replace(given, kv=kv)


def as_tokens(cache: KVCache, given: WriteTokens) -> WriteTokens:
    """Checks the arguments of a write and returns them as JAX arrays with one dimension of tokens."""
    key, value, slot_mapping, layer, k_scale, v_scale = given
    spec = cache.spec
    heads = ("num_kv_heads", spec.num_kv_heads)
    names = ("batch", "time") if np.ndim(key) == 4 else ("num_tokens",)
    check_array("key", key, [*((name, None) for name in names), heads, ("head_size", spec.head_size)], INPUT_DTYPES)
    key = jnp.asarray(key)
    tokens = list(zip(names, np.shape(key), strict=False))
    check_array("value", value, [*tokens, heads, ("head_size_v", spec.head_size_v)], [key.dtype])
    check_array("slot_mapping", slot_mapping, tokens, INDEX_DTYPES)
    check_devices(cache, **given._replace(key=key)._asdict())
    if len(tokens) == 2:
        key, value, slot_mapping = (flat_tokens(array) for array in (key, value, slot_mapping))
    layer = as_layer(cache, layer)
    if is_checked():
        check_slots(slot_mapping, cache.num_slots)
    scales = as_scales(cache, layer, k_scale, v_scale)
    return WriteTokens(jnp.asarray(key), jnp.asarray(value), as_slots(slot_mapping, cache.num_slots), layer, *scales)


def flat_tokens(array: Any) -> Any:
    """Reshapes `[batch, time, ...]` to `[batch * time, ...]`."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def write_xla(cache: KVCache, *tokens: jax.Array | None, unique_slots: bool) -> jax.Array:
    """Writes checked `WriteTokens` in XLA; returns the pages."""
    key, value, slot_mapping, layer, k_scale, v_scale = WriteTokens(*tokens)
    spec = cache.spec
    if not unique_slots:
        # Of rows with one index, XLA's scatter keeps the last on CPU; elsewhere it may mix their elements.
        only_last = functools.partial(last_of_each_slot, num_slots=cache.num_slots)
        slot_mapping = lax.platform_dependent(slot_mapping, cpu=lambda slots: slots, default=only_last)
    # Past the last page, because a negative index would count from the end.
    page = pages_of(cache, layer, slot_mapping // spec.block_size, otherwise=cache.num_pages)
    token = (slot_mapping % spec.block_size).astype(jnp.int32)
    pages = as_one_layer(cache)
    for kv_index, x, scale in ((KEYS, key, k_scale), (VALUES, value, v_scale)):
        pages = scatter_rows(pages, kv_index, encode_rows(x, spec.parts[kv_index], scale), page, token)
    return pages.kv if cache.num_layers is None else with_array(cache, pages.kv, cache.kv.shape).kv


def write_mosaic(
    cache: KVCache,
    *tokens: jax.Array | None,
    unique_slots: bool,
    rotated: kernel.Rotated | None = None,
    ring: kernel.WindowRing | None = None,
    config: kernel.WriteConfig | None = None,
) -> Any:
    """Writes with the kernel, launched as `config` says, by default as is best for the number of tokens.

    Returns the pages, or with `rotated` the rotated queries and the pages, or with `ring` the pages and the ring's.
    """
    given = WriteTokens(*tokens)
    key, value, slot_mapping, layer, k_scale, v_scale = given
    if not key.size:
        return cache.kv if ring is None else (cache.kv, ring.kv)
    spec, num_tokens = cache.spec, key.shape[0]
    if num_tokens >= kernel.SEARCHED and not unique_slots:
        unique_slots, given = True, given._replace(slot_mapping=last_of_each_slot(slot_mapping, cache.num_slots))
    kind = kernel.WriteKind(
        spec,
        tuple(RowMemory.of(x) for x in (key, value) if x.size),
        array_memory(spec),
        slot_mapping.dtype,
        (k_scale.size, v_scale.size),
        unique_slots=unique_slots,
        rotated=None if rotated is None else rotated.memory,
        num_layers=None if layer is None else cache.num_layers,
        config=config or kernel.WriteConfig.choose(spec, num_tokens, rotates=rotated is not None),
        ring=None if ring is None else ring.kind(key, value),
    )
    write, counts = kernel.any_count(kind), [num_tokens, min(cache.num_slots, 1 << 31) - 1]
    arrays = given._asdict() | dict.fromkeys(PAGES, cache.kv)
    if ring is not None:
        counts += ring.counts
        results = write.of_arrays(counts, (num_tokens, ring.counts[0]), arrays | ring.arrays(key, value))
        return results[PAGES[0]], results[kernel.RING_PAGES[0]]
    if rotated is not None:
        counts.append(rotated.table.shape[0] - 1)
        arrays |= rotated.arrays
    results = write.of_arrays(counts, num_tokens, arrays)
    return results[PAGES[0]] if rotated is None else (results["rotated_query"], results[PAGES[0]])


def written(cache: KVCache, *_: Any, **__: Any) -> Any:
    """Returns the types of a write's results."""
    return cache.kv


def own_slots(
    spec: AttentionSpec,
    first_block: jax.Array,
    num_blocks: int,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    *others: Any,
) -> tuple[Any, ...]:
    """Returns slots in a share's numbering, computed by block, because the share's first slot may not fit int32."""
    block = slot_mapping // spec.block_size - first_block.astype(slot_mapping.dtype)
    slots = block * spec.block_size + slot_mapping % spec.block_size
    return key, value, jnp.where((block >= 0) & (block < num_blocks), slots, -1), *others


def why_not_write(spec: AttentionSpec, target: Target | None, *, rotates: bool = False) -> str | None:
    """Returns why the kernel cannot write to caches of a spec; None if it can."""
    return why_not_pages(spec) or kernel.why_no_staging(spec, target, rotates=rotates)


_IMPLEMENTATIONS = select.Candidates(
    parameters=("cache", *WriteTokens._fields),
    xla=write_xla,
    mosaic=write_mosaic,
    results=written,
    why_not_mosaic=why_not_write,
    signature=Signature(
        arguments=("tokens heads head_size", "tokens heads head_size", "tokens", "", "heads", "heads"),
        results=CACHE,
        own=own_slots,
    ),
)
