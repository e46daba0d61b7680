"""The operations on CPU tensors: JAX encodes and decodes tokens, and torch moves their bytes.

JAX copies an imported CPU array instead of writing it in place, so the caller's cache is not passed to JAX. kvjax
writes and reads a small cache whose pages hold one token each, in chunks of one size, so one compilation serves every
number of tokens. torch copies the rows of these pages to and from their positions in the caller's cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import kvjax
from kvjax import AttentionSpec, CacheLayout, KVCache, VScaleLayout
from kvjax.kernels import PageRegion
from kvjax_torch import dense
from kvjax_torch.borrow import to_jax, to_torch
from kvjax_torch.dtypes import numpy_dtype, torch_dtype
from kvjax_torch.plan import (
    AttentionPlan,
    CachePlan,
    GatherPlan,
    RaggedPlan,
    ReadTensors,
    RopePlan,
    WritePlan,
    WriteTensors,
)

CHUNK_TOKENS = 16
"""Tokens that JAX encodes or decodes at a time: few, since the last chunk is padded with zeros."""

TILE_ROWS = 64
"""Query tokens of a sequence that are served at once, which bounds the memory of their logits."""


def write(plan: WritePlan, tensors: WriteTensors) -> None:
    """Writes the tokens of a `reshape_and_cache_flash` call that `plan` describes."""
    key, value, key_cache, _, slot_mapping, k_scale, v_scale = tensors
    spec, pages = plan.cache.spec, _one_token_pages(plan.cache.spec)
    token, slot = _last_tokens(slot_mapping, key_cache.shape[0] * spec.block_size)
    staged = key_cache.new_empty((token.shape[0], pages.page_size_bytes), dtype=torch.uint8)
    for part in _chunks(token.shape[0]):
        rows = to_jax(_padded(key[token[part]])), to_jax(_padded(value[token[part]]))
        encoded = to_torch(encode_chunk(pages, *rows, _scale(k_scale, spec), _scale(v_scale, spec)))
        staged[part] = _page_bytes(encoded, part)
    # Nothing may fail from here on: a call that raises leaves the cache as it was.
    _store(plan, tensors, staged, slot)


def rotate_and_write(
    plan: RopePlan,
    query: torch.Tensor,
    tensors: WriteTensors,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> torch.Tensor:
    """`rope_and_cache` of CPU tensors that `plan` describes; returns rotated queries."""
    key, value, key_cache, _, slot_mapping, k_scale, v_scale = tensors
    spec = plan.write.cache.spec
    pages, num_tokens = _one_token_pages(spec), slot_mapping.shape[0]
    angles = cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1)]
    staged = key_cache.new_empty((num_tokens, pages.page_size_bytes), dtype=torch.uint8)
    rotated = query.new_empty(query.shape)
    for part in _chunks(num_tokens):
        rows = [to_jax(_padded(x[part])) for x in (query, key, value, angles)]
        turned, encoded = rotate_and_encode_chunk(
            pages, plan.is_neox, *rows, _scale(k_scale, spec), _scale(v_scale, spec)
        )
        rotated[part] = to_torch(turned)[: part.stop - part.start]
        staged[part] = _page_bytes(to_torch(encoded), part)
    token, slot = _last_tokens(slot_mapping, key_cache.shape[0] * spec.block_size)
    _store(plan.write, tensors, staged[token], slot)
    return rotated


def gather(plan: GatherPlan, tensors: ReadTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_kv` of CPU tensors that `plan` describes."""
    key_cache, _, block_table, seq_lens, k_scale, v_scale = tensors
    spec, pages = plan.cache.spec, _one_token_pages(plan.cache.spec)
    num_seqs, max_len = block_table.shape[0], block_table.shape[1] * spec.block_size
    is_block = (block_table >= 0) & (block_table < key_cache.shape[0])
    is_there = torch.arange(max_len, device=seq_lens.device) < seq_lens[:, None]
    is_there &= is_block.repeat_interleave(spec.block_size, dim=1)
    seq, position = is_there.nonzero(as_tuple=True)
    block = block_table[seq, position // spec.block_size].to(torch.int64)
    slot = block * spec.block_size + position % spec.block_size
    staged = key_cache.new_empty((slot.shape[0], pages.page_size_bytes), dtype=torch.uint8)
    for cache, stored_rows, staged_rows in _row_pairs(plan.cache, tensors, pages):
        view, index = _locate(cache, stored_rows, spec, slot)
        _view(staged, staged_rows, pages)[:, 0] = view[index]
    gathered = [
        key_cache.new_zeros((num_seqs, max_len, spec.num_kv_heads, size), dtype=plan.dtype)
        for size in (spec.head_size, spec.head_size_v)
    ]
    for part in _chunks(slot.shape[0]):
        stored = _padded(staged[part]).view(torch_dtype(pages.array_dtype)).view(pages.cache_shape(CHUNK_TOKENS))
        layer_scales = _scale(k_scale, spec), _scale(v_scale, spec)
        decoded = decode_chunk(pages, numpy_dtype(plan.dtype), to_jax(stored), *layer_scales)
        for result, rows in zip(gathered, decoded, strict=True):
            result[seq[part], position[part]] = to_torch(rows)[: part.stop - part.start]
    keys, values = gathered
    return keys, values


def attend(
    plan: AttentionPlan, query: torch.Tensor, tensors: ReadTensors, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention` of CPU tensors that `plan` describes, over keys and values gathered in float32."""
    gathered = GatherPlan(plan.cache, torch.float32, plan.scale_sizes)
    keys, values = (x.transpose(1, 2) for x in gather(gathered, tensors))
    block_table, seq_lens, num_blocks = tensors.block_table, tensors.seq_lens, tensors.num_blocks
    if not plan.batch_invariant or not query.shape[0]:
        return dense.attend(plan, query, keys, values, block_table, seq_lens, num_blocks, sinks)
    # Each sequence by itself, over the tokens it has: the shape of a sum decides the order of its terms.
    results = []
    for seq, length in enumerate(seq_lens.tolist()):
        blocks = min(max(-(-length // plan.cache.spec.block_size), 1), block_table.shape[1])
        own, tokens = slice(seq, seq + 1), slice(0, blocks * plan.cache.spec.block_size)
        dense_tokens = keys[own, :, tokens], values[own, :, tokens]
        arrays = query[own], *dense_tokens, block_table[own, :blocks], seq_lens[own]
        results.append(dense.attend(plan, *arrays, num_blocks, sinks))
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse


def attend_ragged(
    plan: RaggedPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    cu_q_lens: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_paged_attention` of CPU tensors that `plan` describes, one sequence after the other.

    The host can read lengths here, so every row is served, whatever the call's limits.
    """
    spec, (num_tokens, num_heads, _) = plan.attention.cache.spec, query.shape
    gathered = GatherPlan(plan.attention.cache, torch.float32, plan.attention.scale_sizes)
    out = query.new_zeros((num_tokens, num_heads, spec.head_size_v))
    lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    if sinks is not None:
        lse.copy_(sinks)
    bounds = cu_q_lens.clamp(0, num_tokens).tolist()
    for seq, (first, end) in enumerate(itertools.pairwise(bounds)):
        length = tensors.seq_lens[seq : seq + 1]
        table = tensors.block_table[seq : seq + 1, : -(-max(int(length), 0) // spec.block_size)]
        if first >= end or not table.numel():
            continue
        dense_tokens = gather(gathered, tensors._replace(block_table=table, seq_lens=length))
        keys, values = (x.transpose(1, 2).contiguous() for x in dense_tokens)
        for start in range(first, end, TILE_ROWS):
            rows = slice(start, min(start + TILE_ROWS, end))
            ends = length - (end - rows.stop)
            tile = query[None, rows], keys, values, table, ends, tensors.num_blocks, sinks
            for whole, part in zip((out, lse), dense.attend(plan.attention, *tile), strict=True):
                whole[rows] = part[0]
    return out, lse


@functools.partial(jax.jit, static_argnames="spec")
def encode_chunk(
    spec: AttentionSpec, key: jax.Array, value: jax.Array, k_scale: jax.Array, v_scale: jax.Array
) -> jax.Array:
    """The array of a cache that holds each token in a page of its own."""
    slots = jnp.arange(key.shape[0], dtype=jnp.int32)
    pages = KVCache.allocate(spec, key.shape[0])
    with kvjax.checked(False):  # the callers' arguments are already checked
        written = kvjax.reshape_and_cache_flash_diffkv(
            key, value, pages, slots, k_scale=k_scale, v_scale=v_scale, implementation="xla"
        )
    return written.kv


@functools.partial(jax.jit, static_argnames=("spec", "is_neox"))
def rotate_and_encode_chunk(
    spec: AttentionSpec,
    is_neox: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    angles: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Rotated queries, and the array of `encode_chunk` with rotated keys; `angles` has a row for each token."""
    tokens = jnp.arange(key.shape[0], dtype=jnp.int32)
    pages = KVCache.allocate(spec, key.shape[0])
    with kvjax.checked(False):
        rotated, written = kvjax.rope_and_cache(
            query,
            key,
            value,
            pages,
            tokens,
            tokens,
            angles,
            is_neox=is_neox,
            k_scale=k_scale,
            v_scale=v_scale,
            implementation="xla",
        )
    return rotated, written.kv


@functools.partial(jax.jit, static_argnames=("spec", "dtype"))
def decode_chunk(
    spec: AttentionSpec, dtype: np.dtype[Any], pages: jax.Array, k_scale: jax.Array, v_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of tokens, from an array of `encode_chunk`."""
    block_table = jnp.arange(pages.shape[0], dtype=jnp.int32)[:, None]
    with kvjax.checked(False):
        keys, values = kvjax.gather_kv(
            KVCache(pages, spec),
            block_table,
            jnp.ones_like(block_table[:, 0]),
            k_scale=k_scale,
            v_scale=v_scale,
            dtype=dtype,
            implementation="xla",
        )
    return keys[:, 0], values[:, 0]


def _page_bytes(pages: torch.Tensor, part: slice) -> torch.Tensor:
    """The pages of a chunk's tokens `[num_tokens, page_size_bytes]`, without those of padding."""
    return pages.view(CHUNK_TOKENS, -1).view(torch.uint8)[: part.stop - part.start]


def _store(plan: WritePlan, tensors: WriteTensors, staged: torch.Tensor, slot: torch.Tensor) -> None:
    """Copies the pages of tokens into their slots, which are distinct."""
    spec = plan.cache.spec
    pages = _one_token_pages(spec)
    for cache, into, staged_rows in _row_pairs(plan.cache, tensors, pages):
        view, index = _locate(cache, into, spec, slot)
        view[index] = _view(staged, staged_rows, pages)[:, 0]


def _one_token_pages(spec: AttentionSpec) -> AttentionSpec:
    return dataclasses.replace(
        spec, block_size=1, layout=CacheLayout.NHD, v_scale_layout=VScaleLayout.LINEAR, page_size_padded=None
    )


def _last_tokens(slot_mapping: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens to write and their slots: each slot in range once, with the last token that has it.

    torch's indexed writes run in parallel, so two tokens with one slot could leave a mixture of both.
    """
    token = ((slot_mapping >= 0) & (slot_mapping < num_slots)).nonzero()[:, 0]
    slot, which = torch.unique(slot_mapping[token].to(torch.int64), return_inverse=True)
    return torch.zeros_like(slot).scatter_reduce_(0, which, token, reduce="amax"), slot


def _chunks(num_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, CHUNK_TOKENS):
        yield slice(start, min(start + CHUNK_TOKENS, num_tokens))


def _padded(rows: torch.Tensor) -> torch.Tensor:
    chunk = rows.new_zeros((CHUNK_TOKENS, *rows.shape[1:]))
    chunk[: rows.shape[0]] = rows
    return chunk


def _scale(scale: torch.Tensor, spec: AttentionSpec) -> np.ndarray:
    if spec.quant_mode.is_per_token_head:
        return np.ones((), np.float32)
    return (scale.reshape(()) if scale.numel() == 1 else scale).detach().numpy()


def _row_pairs(
    plan: CachePlan, tensors: WriteTensors | ReadTensors, pages: AttentionSpec
) -> Iterator[tuple[torch.Tensor, PageRegion, PageRegion]]:
    """For data and scales, of keys and of values: the tensor, its rows, and the rows of one-token pages."""
    k, v = pages.regions
    for cache, rows, regions in ((tensors.key_cache, plan.keys, k), (tensors.value_cache, plan.values, v)):
        yield from zip(itertools.repeat(cache), rows.regions, regions, strict=False)
    if plan.scales is not None:
        for scale, rows, regions in zip((tensors.k_scale, tensors.v_scale), plan.scales, (k, v), strict=True):
            yield scale, rows.regions[0], regions[1]


def _view(tensor: torch.Tensor, rows: PageRegion, spec: AttentionSpec) -> torch.Tensor:
    """The bytes of a tensor's rows: `[num_blocks, block_size, num_kv_heads, row_bytes]`."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    return memory.as_strided(
        (tensor.shape[0], spec.block_size, spec.num_kv_heads, rows.row_bytes),
        (tensor.stride(0) * tensor.element_size(), rows.token_stride, rows.head_stride, 1),
        tensor.storage_offset() * tensor.element_size() + rows.base,
    )


def _locate(
    cache: torch.Tensor, rows: PageRegion, spec: AttentionSpec, slot: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A view of the cache, and the index into it of these slots' rows `[num_slots, num_kv_heads, row_bytes]`."""
    view, block, token = _view(cache, rows, spec), slot // spec.block_size, slot % spec.block_size
    if not rows.swizzled:
        return view, (block, token)
    scale = torch.arange(rows.row_bytes, device=slot.device)
    head = torch.arange(spec.num_kv_heads, device=slot.device)[:, None]
    tile_row, column = kvjax.swizzled_position(token[:, None, None], scale, rows.row_bytes)
    return view, (block[:, None, None], tile_row, head, column)
