"""The operations on CPU tensors. torch moves unquantized tokens; JAX encodes and decodes quantized ones.

JAX copies an imported CPU array instead of writing it in place, so the caller's cache is not passed to JAX. kvjax
writes and reads a small cache whose pages hold one token each, in chunks of few sizes, so few compilations serve every
number of tokens. torch copies the rows of these pages to and from their positions in the caller's cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import kvjax
from kvjax import AttentionSpec, CacheLayout, KVCache, VScaleLayout
from kvjax.kernels import PageRegion
from kvjax_torch.arguments.dtypes import numpy_dtype, torch_dtype
from kvjax_torch.arguments.plan import (
    AttentionPlan,
    CachePlan,
    GatherPlan,
    RaggedPlan,
    RangeTensors,
    ReadTensors,
    RopeInputs,
    RopePlan,
    WritePlan,
    WriteTensors,
)
from kvjax_torch.eager import dense, fp8
from kvjax_torch.eager.rotation import rotate, with_canonical_nan
from kvjax_torch.eager.trees import TreeRows
from kvjax_torch.sharing.borrow import to_jax, to_torch

FEW_TOKENS = 64
"""Calls of more tokens are encoded or decoded in larger chunks."""

CHUNK_TOKENS = (16, 512)
"""Tokens that JAX encodes or decodes at a time, of calls with few tokens and with many.

The last chunk is padded with zeros. Threads of JAX and of torch wait for each other at every chunk.
"""

TILE_ROWS = 64
"""Query tokens of a sequence that are served at once, which bounds the memory of their logits."""


def write(plan: WritePlan, tensors: WriteTensors) -> None:
    """Writes the tokens of a `reshape_and_cache_flash` call that `plan` describes."""
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale = tensors
    spec = plan.cache.spec
    token, slot = _last_tokens(slot_mapping, key_cache.shape[0] * spec.block_size)
    # Nothing may fail once a cache is written: a call that raises leaves both as they were.
    if not spec.dtype.is_quantized:
        position, caches = (slot // spec.block_size, slot % spec.block_size), (key_cache, value_cache)
        is_all = token.shape == slot_mapping.shape  # in order, then
        staged = [_staged(x[: token.shape[0]] if is_all else x[token], caches) for x in (key, value)]
        for cache, rows in zip(caches, staged, strict=True):
            _memory(cache, cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())[position] = rows
        return
    pages = _one_token_pages(spec)
    encoded = key_cache.new_empty((token.shape[0], pages.page_size_bytes), dtype=torch.uint8)
    for part, size in _chunks(token.shape[0]):
        chunk = to_jax(_padded(key[token[part]], size)), to_jax(_padded(value[token[part]], size))
        stored = to_torch(encode_chunk(pages, *chunk, *_scales(spec, k_scale, v_scale)))
        encoded[part] = stored.view(size, -1).view(torch.uint8)[: part.stop - part.start]
    for cache, into, encoded_rows in _row_pairs(plan.cache, tensors, pages):
        view, index = _locate(cache, into, spec, slot)
        view[index] = _view(encoded, encoded_rows, pages)[:, 0]


def rotate_and_write(plan: RopePlan, tensors: WriteTensors, rope: RopeInputs) -> torch.Tensor:
    """`rope_and_cache` of CPU tensors that `plan` describes; returns rotated queries."""
    rotated, key = (rotate(x, *rope[1:]) for x in (rope.query, tensors.key))
    write(plan.write, tensors._replace(key=key))
    return rotated


def gather(plan: GatherPlan, tensors: ReadTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_kv` of CPU tensors that `plan` describes."""
    block_table, seq_lens, spec = tensors.block_table, tensors.seq_lens, plan.cache.spec
    is_there = torch.arange(block_table.shape[1] * spec.block_size, device="cpu") < seq_lens[:, None]
    is_there &= dense.is_block(block_table, tensors.num_blocks).repeat_interleave(spec.block_size, dim=1)
    if spec.dtype.is_quantized:
        return _decoded(plan, tensors, is_there)
    keys, values = (_converted(_blocks(cache, tensors).flatten(1, 2), plan.dtype) for cache in tensors[:2])
    for x in (keys, values):
        x[~is_there] = 0
    return keys, values


def _decoded(plan: GatherPlan, tensors: ReadTensors, is_there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather` of a quantized cache: the tokens `is_there`, bool `[num_seqs, max_len]`, between zeros."""
    key_cache, _, block_table, *_ = tensors
    spec = plan.cache.spec
    seq, position = is_there.nonzero(as_tuple=True)
    block = block_table[seq, position // spec.block_size].to(torch.int64)
    slot = block * spec.block_size + position % spec.block_size
    keys, values = (
        key_cache.new_zeros((*is_there.shape, spec.num_kv_heads, size), dtype=plan.dtype) for size in spec.part_sizes
    )
    for part, *decoded in _decoded_tokens(plan, tensors, slot):
        for result, rows in zip((keys, values), decoded, strict=True):
            result[seq[part], position[part]] = rows
    return keys, values


def gather_rows(plan: GatherPlan, tensors: RangeTensors) -> None:
    """`gather_and_maybe_dequant_cache` of CPU tensors that `plan` describes."""
    spec, dst = plan.cache.spec, tensors.dst.zero_()
    row, block, token = _places_of_rows(tensors, spec.block_size)
    keys, values = dst.split(spec.part_sizes, dim=1)
    if not spec.dtype.is_quantized:
        for into, cache in ((keys, tensors.key_cache), (values, tensors.value_cache)):
            into[row] = _converted(cache[block, token, 0], plan.dtype)
        return
    for part, *decoded in _decoded_tokens(plan, tensors, block * spec.block_size + token):
        for into, rows in zip((keys, values), decoded, strict=True):
            into[row[part]] = rows[:, 0]


def _places_of_rows(tensors: RangeTensors, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows that have a token, its block, and its index there, int64."""
    table, bounds = tensors.block_table, tensors.cu_seq_lens.to(torch.int64)
    row, (num_seqs, max_blocks) = torch.arange(tensors.dst.shape[0], device="cpu"), table.shape
    if not num_seqs or not max_blocks:
        return row[:0], row[:0], row[:0]
    if tensors.token_to_seq is None:
        seq = torch.searchsorted(bounds[1:].contiguous(), row, right=True).clamp(max=num_seqs - 1)
    else:
        seq = tensors.token_to_seq[: len(row)].to(torch.int64).clamp(0, num_seqs - 1)
    position = row - bounds[seq]
    if tensors.seq_starts is not None:
        position = position + tensors.seq_starts.to(torch.int64).clamp(min=0)[seq]
    column = position // block_size
    block = table[seq, column.clamp(0, max_blocks - 1)].to(torch.int64)
    is_token = (row >= bounds[seq]) & (row < bounds[seq + 1]) & (column < max_blocks)
    is_token &= dense.is_block(block, tensors.num_blocks)
    return row[is_token], block[is_token], (position % block_size)[is_token]


def _decoded_tokens(
    plan: GatherPlan, tensors: ReadTensors | RangeTensors, slot: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """The tokens of slots of a quantized cache, by chunks of them: keys and values `[.., num_kv_heads, size]`."""
    spec, pages = plan.cache.spec, _one_token_pages(plan.cache.spec)
    staged = tensors.key_cache.new_empty((slot.shape[0], pages.page_size_bytes), dtype=torch.uint8)
    for cache, stored_rows, staged_rows in _row_pairs(plan.cache, tensors, pages):
        view, index = _locate(cache, stored_rows, spec, slot)
        _view(staged, staged_rows, pages)[:, 0] = view[index]
    for part, size in _chunks(slot.shape[0]):
        stored = _padded(staged[part], size).view(torch_dtype(pages.array_dtype)).view(pages.cache_shape(size))
        layer_scales = _scales(spec, tensors.k_scale, tensors.v_scale)
        decoded = decode_chunk(pages, numpy_dtype(plan.dtype), to_jax(stored), *layer_scales)
        keys, values = (to_torch(rows)[: part.stop - part.start] for rows in decoded)
        yield part, keys, values


def _dense(plan: AttentionPlan, tensors: ReadTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values for `dense.attend`: float32 `[num_seqs, num_kv_heads, max_len, head_size]`.

    What lies where a sequence has no token is undefined.
    """
    if plan.cache.spec.is_mla:
        return dense.keys_of_latents(*gather(dense.as_gather(plan), tensors))
    if plan.cache.spec.dtype.is_quantized:
        gathered = gather(dense.as_gather(plan), tensors)
        keys, values = (x.transpose(1, 2).contiguous() for x in gathered)
        return keys, values
    # One pass copies blocks, and one converts; products take heads in any order.
    blocks = (_blocks(cache, tensors).permute(0, 3, 1, 2, 4) for cache in tensors[:2])
    keys, values = (x.to(torch.float32).flatten(2, 3) for x in blocks)
    return keys, values


def _dense_in_fp8(plan: AttentionPlan, tensors: ReadTensors, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`_dense` of one sequence, rounded as for products in fp8; its rows see tokens from `first` on."""
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    stored = _dense(plan, tensors._replace(k_scale=one, v_scale=one))
    keys, values = (
        fp8.rounded(x, _unit(plan, tensors, part, first)) * scale.reshape(-1, 1, 1)
        for part, (x, scale) in enumerate(zip(stored, (tensors.k_scale, tensors.v_scale), strict=True))
    )
    return keys, values


def _unit(plan: AttentionPlan, tensors: ReadTensors, part: int, first: int) -> torch.Tensor:
    """What keys (part 0) or values of a sequence are divided by: `[num_kv_heads, 1, 1]`, or 1 for all."""
    spec = plan.cache.spec
    if spec.dtype.parts[part].info.elements_per_scale is None:
        return torch.ones(1, dtype=torch.float32, device="cpu")
    end = min(int(tensors.seq_lens), tensors.block_table.shape[1] * spec.block_size)
    position = torch.arange(first, max(end, first), device="cpu")
    block = tensors.block_table[0, position // spec.block_size].to(torch.int64)
    is_there = dense.is_block(block, tensors.num_blocks)
    slot = (block * spec.block_size + position % spec.block_size)[is_there]
    view, index = _locate(tensors[part], (plan.cache.keys, plan.cache.values)[part].regions[1], spec, slot)
    bits = (view[index] & 0x7F).clamp(max=0x7E)  # NaN is 0x7F
    largest = bits.amax((0, 2)) if len(slot) else bits.new_zeros(spec.num_kv_heads)
    return fp8.unit_above(largest)[:, None, None]


def _blocks(cache: torch.Tensor, tensors: ReadTensors) -> torch.Tensor:
    """The blocks of a table `[num_seqs, max_blocks, block_size, num_kv_heads, row]`; any block for other entries."""
    table = tensors.block_table.to(torch.int64).clamp(0, tensors.num_blocks - 1)
    return cache.index_select(0, table.flatten()).unflatten(0, table.shape)


def attend(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    tree: TreeRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention` of CPU tensors that `plan` describes, into `out` if it is given."""
    num_seqs, q_len = query.shape[:2]
    bounds = range(0, (num_seqs + 1) * q_len, q_len) if q_len else [0] * (num_seqs + 1)
    out, lse = _attend_rows(
        plan, query.flatten(0, 1), tensors, bounds, (sinks, tree), None if out is None else out.flatten(0, 1)
    )
    return out.unflatten(0, (num_seqs, q_len)), lse.unflatten(0, (num_seqs, q_len))


def attend_ragged(
    plan: RaggedPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    cu_q_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    tree: TreeRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_paged_attention` of CPU tensors that `plan` describes, into `out` if it is given.

    The host can read lengths here, so every row is served, whatever the call's limits.
    """
    bounds = cu_q_lens.clamp(0, query.shape[0]).tolist()
    return _attend_rows(plan.attention, query, tensors, bounds, (sinks, tree), out, plan.query_quantization)


def _attend_rows(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    bounds: Sequence[int],
    others: tuple[torch.Tensor | None, TreeRows | None],
    out: torch.Tensor | None,
    query_quantization: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's rows `query[bounds[i]:bounds[i + 1]]`, one sequence after the other.

    Dense keys and values thus stay in the processor's cache, and the order of sums does not depend on the batch. With
    `query_quantization`, sequences of more rows than `plan.q_len` have the errors of products in fp8. `others` are the
    sinks and the tree, whose last rows are those of a sequence of up to `plan.q_len`.
    """
    sinks, tree = others
    spec, (num_tokens, num_heads, _) = plan.cache.spec, query.shape
    out = query.new_zeros((num_tokens, num_heads, spec.head_size_v)) if out is None else out.zero_()
    lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    if sinks is not None:
        lse.copy_(sinks)
    for seq, (first, end) in enumerate(itertools.pairwise(bounds)):
        own = tensors._replace(block_table=tensors.block_table[seq : seq + 1], seq_lens=tensors.seq_lens[seq : seq + 1])
        own = _within(int(own.seq_lens), spec, own)
        if first >= end or not own.block_table.numel():
            continue
        in_fp8 = query_quantization and end - first > plan.q_len
        if in_fp8:
            first_seen = 0 if plan.window is None else int(own.seq_lens) - (end - first) - (plan.window - 1)
            keys, values = _dense_in_fp8(plan, own, max(first_seen, 0))
        else:
            keys, values = _dense(plan, own)
        for start in range(first, end, TILE_ROWS):
            rows = slice(start, min(start + TILE_ROWS, end))
            ends = own.seq_lens - (end - rows.stop)
            table = _within(int(ends), spec, own).block_table
            seen = slice(0, table.shape[1] * spec.block_size)
            own_tree = None
            if tree is not None and end - first <= plan.q_len:
                places = slice(plan.q_len - (end - start), plan.q_len - (end - rows.stop))
                own_tree = tree.of_sequence(seq).of_rows(places)
            tokens = dense.DenseTokens(keys[:, :, seen], values[:, :, seen], table, ends, tensors.num_blocks, own_tree)
            found = dense.attend(plan, query[None, rows], tokens, sinks, in_fp8=in_fp8)
            for whole, part in zip((out, lse), found, strict=True):
                whole[rows] = part[0]
    return out, lse


def _within(length: int, spec: AttentionSpec, tensors: ReadTensors) -> ReadTensors:
    """The tensors with only those columns of the block table that `length` tokens reach."""
    return tensors._replace(block_table=tensors.block_table[:, : -(-max(length, 0) // spec.block_size)])


@functools.partial(jax.jit, static_argnames="spec")
def encode_chunk(
    spec: AttentionSpec, key: jax.Array, value: jax.Array, k_scale: jax.Array, v_scale: jax.Array
) -> jax.Array:
    """The array of a cache that holds each token in a page of its own."""
    slots = jnp.arange(key.shape[0], dtype=jnp.int32)
    pages = KVCache.allocate(spec, key.shape[0])
    with kvjax.checked(False):  # the callers' arguments are already checked
        if spec.is_mla:
            rows = key[:, 0], value[:, 0]
            return kvjax.concat_and_cache_mla(*rows, pages, slots, scale=k_scale, implementation="xla").kv
        written = kvjax.reshape_and_cache_flash(
            key, value, pages, slots, k_scale=k_scale, v_scale=v_scale, implementation="xla"
        )
    return written.kv


@functools.partial(jax.jit, static_argnames=("spec", "dtype"))
def decode_chunk(
    spec: AttentionSpec, dtype: np.dtype[Any], pages: jax.Array, k_scale: jax.Array, v_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of tokens, from an array of `encode_chunk`."""
    block_table = jnp.arange(pages.shape[0], dtype=jnp.int32)[:, None]
    with kvjax.checked(False):
        if spec.is_mla:
            bounds = jnp.array([0, pages.shape[0]], jnp.int32)
            kv_c, k_pe = kvjax.gather_mla(
                KVCache(pages, spec),
                block_table.T,
                bounds,
                num_tokens=pages.shape[0],
                scale=k_scale,
                dtype=dtype,
                implementation="xla",
            )
            return kv_c[:, None], k_pe[:, None]
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


def _one_token_pages(spec: AttentionSpec) -> AttentionSpec:
    if spec.is_mla:  # which has one layout
        return dataclasses.replace(spec, block_size=1, page_size_padded=None)
    return dataclasses.replace(
        spec, block_size=1, layout=CacheLayout.NHD, v_scale_layout=VScaleLayout.LINEAR, page_size_padded=None
    )


def _last_tokens(slot_mapping: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens to write and their slots: each slot in range once, with the last token that has it.

    torch's indexed writes run in parallel, so two tokens with one slot could leave a mixture of both.
    """
    slots = slot_mapping.to(torch.int64)  # int32 may not hold `num_slots`
    token = ((slots >= 0) & (slots < num_slots)).nonzero()[:, 0]
    slot, which = torch.unique(slots[token], return_inverse=True)
    if slot.shape == slots.shape:
        return torch.arange(slots.shape[0], device="cpu"), slots
    return torch.zeros_like(slot).scatter_reduce_(0, which, token, reduce="amax"), slot


def _staged(rows: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rows as the caches store them, in memory other than the caches'."""
    rows = _converted(rows, caches[0].dtype)
    is_shared = any(rows.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr() for cache in caches)
    return rows.clone() if is_shared else rows


def _converted(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows in an unquantized dtype, as `kvjax` converts: NaN becomes canonical, but the same dtype keeps its bits."""
    return rows if rows.dtype is dtype else with_canonical_nan(rows.to(dtype))


def _chunks(num_tokens: int) -> Iterator[tuple[slice, int]]:
    """The tokens of each chunk, and its size."""
    size = CHUNK_TOKENS[num_tokens > FEW_TOKENS]
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens)), size


def _padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    chunk = rows.new_zeros((size, *rows.shape[1:]))
    chunk[: rows.shape[0]] = rows
    return chunk


def _scales(spec: AttentionSpec, *scales: torch.Tensor) -> list[np.ndarray]:
    """The layer's scales of keys and of values; 1 where they take none."""
    return [
        (scale.reshape(()) if scale.numel() == 1 else scale).detach().numpy()
        if part.takes_scale
        else np.ones((), np.float32)
        for scale, part in zip(scales, spec.parts, strict=True)
    ]


def _row_pairs(
    plan: CachePlan, tensors: WriteTensors | ReadTensors | RangeTensors, pages: AttentionSpec
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
    return _memory(tensor, torch.uint8).as_strided(
        (tensor.shape[0], spec.block_size, spec.num_kv_heads, rows.row_bytes),
        (tensor.stride(0) * tensor.element_size(), rows.token_stride, rows.head_stride, 1),
        tensor.storage_offset() * tensor.element_size() + rows.base,
    )


def _memory(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a tensor, of which autograd and inference mode know nothing."""
    return torch.empty(0, dtype=dtype, device="cpu").set_(tensor.detach().untyped_storage())


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
