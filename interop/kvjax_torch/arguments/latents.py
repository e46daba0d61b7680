"""Checks the arguments of operations on latents (MLA), and turns them into plans and tensors of keys and values.

A row of the cache is a latent and a rope key. Plans take the latents as keys and the rope keys as values, of one head.
These are two views of the same rows, so the code that writes and reads keys and values serves them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import NamedTuple

import torch

import kvjax
from kvjax import KVCacheDType, KVCacheTypeError, KVCacheValueError, MLAAttentionSpec
from kvjax.ops import options
from kvjax_torch.arguments.attention import check_out, checked_softmax
from kvjax_torch.arguments.caches import Facts, share_memory
from kvjax_torch.arguments.checks import (
    check_addresses,
    check_in_place,
    check_index,
    check_same_device,
    check_scale_values,
    on_host,
)
from kvjax_torch.arguments.dtypes import INPUT_DTYPES, resolve_latent_dtype
from kvjax_torch.arguments.plan import (
    AttentionPlan,
    BlockRows,
    CachePlan,
    GatherPlan,
    LatentQuery,
    Limits,
    RaggedPlan,
    RangeTensors,
    ReadTensors,
    RopeInputs,
    RopePlan,
    SoftmaxOptions,
    WritePlan,
    WriteTensors,
)
from kvjax_torch.arguments.writes import check_rotation


class LatentPages(NamedTuple):
    """A cache of latents, and how it is stored.

    Attributes:
      kv_cache: `[num_blocks, block_size, row]`.
      kv_cache_dtype: the name of a dtype.
      scale: the layer's decode scale.
    """

    kv_cache: torch.Tensor
    kv_cache_dtype: str
    scale: torch.Tensor


class GatheredRows(NamedTuple):
    """Rows of a result that a gather fills.

    Attributes:
      dst: `[num_rows, kv_lora_rank + qk_rope_head_dim]`.
      token_to_seq: the sequence of each row, or None.
      num_tokens: rows to fill.
    """

    dst: torch.Tensor
    token_to_seq: torch.Tensor | None
    num_tokens: int


def latent_write_plan(
    kv_c: torch.Tensor, k_pe: torch.Tensor, pages: LatentPages, slot_mapping: torch.Tensor
) -> tuple[WritePlan, WriteTensors]:
    """The plan of a `concat_and_cache_mla` call, and its tensors as keys and values.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    kv_cache, _, scale = pages
    _check_devices(kv_cache, kv_c=kv_c, k_pe=k_pe, slot_mapping=slot_mapping, scale=scale)
    check_index("slot_mapping", (slot_mapping.dtype, slot_mapping.ndim), ("num_tokens",))
    _check_rows("kv_c", kv_c, ("num_tokens", "kv_lora_rank"), INPUT_DTYPES)
    _check_rows("k_pe", k_pe, ("num_tokens", "qk_rope_head_dim"), (kv_c.dtype,))
    num_slots = slot_mapping.shape[0]
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        if rows.shape[0] < num_slots:
            raise KVCacheValueError(
                f"{name}: got {rows.shape[0]} tokens, expected at least one for each of the {num_slots} slots"
            )
    cache = _checked_cache(pages, (kv_c.shape[1], k_pe.shape[1]))
    if kvjax.is_checked():
        slots = on_host("slot_mapping", slot_mapping).numpy()
        kvjax.check_slots(slots, kv_cache.shape[0] * cache.spec.block_size)
    latents, rope_keys = _halves(kv_cache, cache)
    tensors = WriteTensors(kv_c[:, None], k_pe[:, None], latents, rope_keys, slot_mapping, scale, scale)
    return WritePlan(cache, kv_c.dtype, slot_mapping.dtype, (1, 1)), tensors


def latent_rope_plan(
    rope: RopeInputs, kv_c: torch.Tensor, k_pe: torch.Tensor, pages: LatentPages, slot_mapping: torch.Tensor
) -> tuple[RopePlan, WriteTensors]:
    """The plan of a `concat_and_cache_mla_rope_fused` call, and the tensors of its write, as keys and values.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    q_pe, positions, cos_sin_cache, _ = rope
    _check_devices(pages.kv_cache, q_pe=q_pe, positions=positions, cos_sin_cache=cos_sin_cache)
    write, tensors = latent_write_plan(kv_c, k_pe, pages, slot_mapping)
    if not k_pe.shape[1]:
        raise KVCacheValueError("k_pe: got qk_rope_head_dim=0, expected rope keys to rotate; use concat_and_cache_mla")
    for name, x in (("q_pe", q_pe), ("k_pe", k_pe)):
        if any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise KVCacheValueError(
                f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, expected rows that do not overlap: they"
                " are rotated in place"
            )
        check_in_place(name, x)
        if share_memory(x, pages.kv_cache):
            raise KVCacheValueError(f"{name}: got memory that overlaps that of kv_cache, expected memory of its own")
    if share_memory(q_pe, k_pe):
        raise KVCacheValueError(
            "k_pe: got memory that overlaps that of q_pe, expected memory of its own: both are rotated in place"
        )
    plan = check_rotation(write, tensors, rope, q_pe=q_pe, kv_c=kv_c, k_pe=k_pe, positions=positions)
    return plan, tensors


def latent_gather_plan(
    pages: LatentPages,
    rows: GatheredRows,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
) -> tuple[GatherPlan, RangeTensors]:
    """The plan of a `gather_and_maybe_dequant_cache` call, and its tensors.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    kv_cache, kv_cache_dtype, scale = pages
    dst, token_to_seq, num_tokens = rows
    given = {"dst": dst, "block_table": block_table, "cu_seq_lens": cu_seq_lens, "scale": scale}
    given |= {name: x for name, x in (("token_to_seq", token_to_seq), ("seq_starts", starts)) if x is not None}
    check_same_device("src_cache", kv_cache, given)
    check_index("block_table", (block_table.dtype, block_table.ndim), ("num_seqs", "max_blocks"))
    num_seqs = block_table.shape[0]
    _check_lengths("cu_seq_lens", cu_seq_lens, ("num_seqs + 1", num_seqs + 1))
    if starts is not None:
        _check_lengths("seq_starts", starts, ("num_seqs", num_seqs))
    if token_to_seq is not None:
        check_index("token_to_seq", (token_to_seq.dtype, token_to_seq.ndim), ("num_tokens",))
        if token_to_seq.shape[0] < num_tokens:
            raise KVCacheValueError(
                f"token_to_seq: got {token_to_seq.shape[0]} entries, expected at least num_tokens={num_tokens}"
            )
    _check_rows("dst", dst, ("num_tokens", "kv_lora_rank + qk_rope_head_dim"), INPUT_DTYPES)
    if not 0 <= num_tokens <= dst.shape[0]:
        raise KVCacheValueError(f"num_tokens: got {num_tokens}, expected 0 to {dst.shape[0]}, the rows of dst")
    if dst.shape[0] > 1 and dst.stride(0) < dst.shape[1]:
        raise KVCacheValueError(f"dst: got strides {dst.stride()}, expected rows that do not overlap")
    check_in_place("dst", dst)
    for name, read in {"src_cache": kv_cache, **given}.items():
        if name != "dst" and share_memory(dst, read):
            raise KVCacheValueError(f"dst: got memory that overlaps that of {name}, expected memory of its own")
    if kv_cache.ndim != 3:
        raise KVCacheValueError(f"src_cache: got shape {tuple(kv_cache.shape)}, expected [num_blocks, block_size, row]")
    dtype = resolve_latent_dtype(kv_cache_dtype, kv_cache.dtype, "src_cache")
    sizes = _sizes_of(dtype, kv_cache.shape[-1] * kv_cache.element_size(), dst.shape[1])
    cache = _checked_cache(pages, sizes, "src_cache")
    if kvjax.is_checked():
        _check_ranges(block_table, cu_seq_lens, starts, num_tokens, (kv_cache.shape[0], cache.spec.block_size))
    latents, rope_keys = _halves(kv_cache, cache)
    ranges = latents, rope_keys, block_table, cu_seq_lens, token_to_seq, starts
    tensors = RangeTensors(*ranges, scale, scale, dst[:num_tokens])
    return GatherPlan(cache, dst.dtype, (1, 1)), tensors


def latent_attention_plan(
    query: LatentQuery, pages: LatentPages, block_table: torch.Tensor, seq_lens: torch.Tensor, softmax: SoftmaxOptions
) -> tuple[AttentionPlan, ReadTensors]:
    """The plan of an `mla_paged_attention` call, and its tensors.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    q_nope = query.nope
    if q_nope.ndim not in (3, 4):
        raise KVCacheValueError(
            f"q_nope: got {q_nope.ndim} dimensions, expected [num_seqs, num_heads, kv_lora_rank] or [num_seqs, q_len,"
            " num_heads, kv_lora_rank]"
        )
    q_len = q_nope.shape[1] if q_nope.ndim == 4 else 1
    plan, tensors = _plan_of_query(query, pages, block_table, seq_lens, softmax, q_len)
    if q_nope.shape[0] != block_table.shape[0]:
        raise KVCacheValueError(
            f"q_nope: got shape {tuple(q_nope.shape)}, expected num_seqs={block_table.shape[0]} as block_table"
        )
    return plan, tensors


def latent_ragged_plan(
    query: LatentQuery,
    pages: LatentPages,
    sequences: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    softmax: SoftmaxOptions,
    max_q_len: int | None,
) -> tuple[RaggedPlan, ReadTensors]:
    """The plan of an `mla_ragged_paged_attention` call of block table, lengths and cu_q_lens; and its tensors.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    block_table, seq_lens, cu_q_lens = sequences
    if query.nope.ndim != 3:
        raise KVCacheValueError(
            f"q_nope: got {query.nope.ndim} dimensions, expected [num_tokens, num_heads, kv_lora_rank]"
        )
    _check_devices(pages.kv_cache, cu_q_lens=cu_q_lens)
    check_index("block_table", (block_table.dtype, block_table.ndim), ("num_seqs", "max_blocks"))
    num_seqs, num_tokens = block_table.shape[0], query.nope.shape[0]
    _check_lengths("cu_q_lens", cu_q_lens, ("num_seqs + 1", num_seqs + 1))
    served = options.buckets(
        Limits(max_q_len, None, None), num_tokens, num_seqs, batch_invariant=softmax.batch_invariant
    )
    if kvjax.is_checked():
        kvjax.check_query_lens(on_host("cu_q_lens", cu_q_lens).numpy(), num_tokens, **served._asdict())
    plan, tensors = _plan_of_query(query, pages, block_table, seq_lens, softmax, max(served.max_q_len, 1))
    return RaggedPlan(plan, served.max_q_len, served.max_prompts), tensors


def check_latent_out(
    out: torch.Tensor, query: LatentQuery, plan: AttentionPlan, pages: LatentPages, **inputs: torch.Tensor
) -> None:
    """Raises unless `out` can take the results of a call in place, without changing what it reads."""
    check_out(out, query.nope, plan.cache.spec, q_pe=query.pe, kv_cache=pages.kv_cache, scale=pages.scale, **inputs)


def _plan_of_query(
    query: LatentQuery,
    pages: LatentPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax: SoftmaxOptions,
    q_len: int,
) -> tuple[AttentionPlan, ReadTensors]:
    (q_nope, q_pe), kv_cache = query, pages.kv_cache
    _check_devices(kv_cache, q_nope=q_nope, q_pe=q_pe, block_table=block_table, seq_lens=seq_lens, scale=pages.scale)
    check_index("block_table", (block_table.dtype, block_table.ndim), ("num_seqs", "max_blocks"))
    _check_lengths("seq_lens", seq_lens, ("num_seqs", block_table.shape[0]))
    for name, x, dtypes in (("q_nope", q_nope, INPUT_DTYPES), ("q_pe", q_pe, (q_nope.dtype,))):
        if x.dtype not in dtypes:
            raise KVCacheTypeError(f"{name}: got dtype {x.dtype}, expected {' or '.join(map(str, dtypes))}")
    if q_pe.shape[:-1] != q_nope.shape[:-1]:
        raise KVCacheValueError(
            f"q_pe: got shape {tuple(q_pe.shape)}, expected {[*q_nope.shape[:-1]]} as q_nope, then qk_rope_head_dim"
        )
    if not q_nope.shape[-2]:
        raise KVCacheValueError(f"q_nope: got shape {tuple(q_nope.shape)}, expected at least one head")
    softmax = checked_softmax(softmax)
    if softmax.sm_scale is None:
        raise KVCacheTypeError(
            "sm_scale: got None, expected a number, usually (qk_nope_head_dim + qk_rope_head_dim) ** -0.5: it does not"
            " follow from the sizes of latents"
        )
    cache = _checked_cache(pages, (q_nope.shape[-1], q_pe.shape[-1]))
    if kvjax.is_checked():
        blocks, lengths = on_host("block_table", block_table), on_host("seq_lens", seq_lens)
        if softmax.sliding_window is not None:  # blocks before the window may be freed
            ends = cache.spec.block_size * torch.arange(1, blocks.shape[1] + 1)
            blocks = blocks.masked_fill(lengths[:, None] - ends >= softmax.sliding_window + q_len - 1, -1)
        kvjax.check_sequences(blocks.numpy(), lengths.numpy(), kv_cache.shape[0], cache.spec.block_size)
    plan = AttentionPlan(
        cache,
        q_nope.dtype,
        q_nope.shape[-2],
        q_len,
        (1, 1),
        softmax.sm_scale,
        softmax.sliding_window,
        softmax.logits_soft_cap,
        has_sinks=False,
        batch_invariant=softmax.batch_invariant,
    )
    return plan, ReadTensors(*_halves(kv_cache, cache), block_table, seq_lens, pages.scale, pages.scale)


@functools.lru_cache(maxsize=1024)
def latent_cache(kv_cache: Facts, dtype: KVCacheDType, sizes: tuple[int, int], name: str = "kv_cache") -> CachePlan:
    """The plan of a cache of latents and rope keys of `sizes` elements, the argument `name`.

    Raises:
      KVCacheValueError: another shape, or rows of a block that are not side by side.
    """
    if len(kv_cache.shape) != 3 or not kv_cache.shape[0]:
        raise KVCacheValueError(
            f"{name}: got shape {tuple(kv_cache.shape)}, expected [num_blocks, block_size, row] of at least one block"
        )
    num_blocks, block_size, row = kv_cache.shape
    spec, itemsize = MLAAttentionSpec(block_size, *sizes, dtype=dtype), kv_cache.dtype.itemsize
    if row * itemsize != spec.bytes_per_token:
        raise KVCacheValueError(
            f"{name}: got shape {tuple(kv_cache.shape)}, expected [num_blocks, block_size,"
            f" {spec.bytes_per_token // itemsize}] for kv_lora_rank={sizes[0]} and qk_rope_head_dim={sizes[1]} in"
            f" {dtype.value!r}"
        )
    block_stride, token_stride, stride = kv_cache.strides
    is_dense = stride == 1 and (token_stride == row or block_size == 1)
    if not is_dense or (num_blocks > 1 and block_stride < block_size * row):
        raise KVCacheValueError(
            f"{name}: got strides {kv_cache.strides}, expected (at least {block_size * row}, {row}, 1): the rows of a"
            " block side by side"
        )
    latents, rope_keys = spec.regions
    starts = (latents[0].base, rope_keys[0].base)
    keys, values = (
        BlockRows(block_stride * itemsize, tuple(dataclasses.replace(rows, base=rows.base - start) for rows in regions))
        for regions, start in zip((latents, rope_keys), starts, strict=True)
    )
    return CachePlan(spec, keys, values)


def _checked_cache(pages: LatentPages, sizes: tuple[int, int], name: str = "kv_cache") -> CachePlan:
    """The plan of a cache whose address and scale are checked too."""
    kv_cache, kv_cache_dtype, scale = pages
    dtype = resolve_latent_dtype(kv_cache_dtype, kv_cache.dtype, name)
    cache = latent_cache(Facts.of(kv_cache), dtype, sizes, name)
    check_addresses({name: kv_cache})
    if scale.dtype is not torch.float32:
        raise KVCacheTypeError(f"scale: got dtype {scale.dtype}, expected torch.float32")
    if scale.numel() != 1:
        raise KVCacheValueError(f"scale: got shape {tuple(scale.shape)}, expected one element")
    check_scale_values({"scale": scale})
    return cache


def _halves(kv_cache: torch.Tensor, cache: CachePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents and the rope keys of rows, `[num_blocks, block_size, 1, row]` each."""
    size = sum(cache.spec.row_bytes[0]) // kv_cache.element_size()
    rows = kv_cache[:, :, None]
    return rows[..., :size], rows[..., size:]


@functools.lru_cache(maxsize=1024)
def _sizes_of(dtype: KVCacheDType, row_bytes: int, width: int) -> tuple[int, int]:
    """The elements of a latent and of a rope key, `width` together, whose row is `row_bytes`.

    Where both are stored alike, every division has the same bytes. The one that models have is taken: the latent's size
    is the largest power of two that leaves a rope key.

    Raises:
      KVCacheValueError: no sizes have such rows.
    """
    likely = 1 << max(width - 1, 1).bit_length() - 1
    for rank in (likely, *range(1, width + 1)) if width else ():
        with contextlib.suppress(KVCacheValueError):  # the latent is not a whole number of blocks with scales
            if MLAAttentionSpec(1, rank, width - rank, dtype=dtype).bytes_per_token == row_bytes:
                return rank, width - rank
    raise KVCacheValueError(
        f"dst: got rows of {width} elements, expected kv_lora_rank + qk_rope_head_dim of a cache whose rows have"
        f" {row_bytes} bytes of {dtype.value!r}"
    )


def _check_ranges(
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    num_tokens: int,
    blocks: tuple[int, int],
) -> None:
    """Raises `KVCacheValueError` for ranges out of order or beyond their tables, and for blocks that do not exist."""
    bounds, table = on_host("cu_seq_lens", cu_seq_lens).to(torch.int64), on_host("block_table", block_table)
    lengths = bounds.diff()
    if bounds[0] or (lengths < 0).any() or bounds[-1] > num_tokens:
        raise KVCacheValueError(
            f"cu_seq_lens: got {bounds.tolist()}, expected 0 first, then not decreasing, up to num_tokens={num_tokens}"
        )
    first = torch.zeros_like(lengths) if starts is None else on_host("seq_starts", starts).to(torch.int64)
    if (first < 0).any():
        raise KVCacheValueError(f"seq_starts: got {first.tolist()}, expected at least 0")
    ends = first + lengths
    # Blocks before a range, and those of an empty one, may be anything.
    before = blocks[1] * torch.arange(1, table.shape[1] + 1) <= first[:, None]
    table = table.masked_fill(before | (lengths == 0)[:, None], -1)
    kvjax.check_sequences(table.numpy(), torch.where(lengths > 0, ends, 0).numpy(), *blocks)


def _check_devices(kv_cache: torch.Tensor, **tensors: torch.Tensor) -> None:
    check_same_device("kv_cache", kv_cache, tensors)


def _check_lengths(name: str, lengths: torch.Tensor, dim: tuple[str, int]) -> None:
    check_index(name, (lengths.dtype, lengths.ndim), (dim[0],))
    if lengths.shape[0] != dim[1]:
        raise KVCacheValueError(f"{name}: got shape {tuple(lengths.shape)}, expected [{dim[0]}={dim[1]}]")


def _check_rows(name: str, rows: torch.Tensor, dims: tuple[str, str], dtypes: tuple[torch.dtype, ...]) -> None:
    if rows.dtype not in dtypes:
        raise KVCacheTypeError(f"{name}: got dtype {rows.dtype}, expected {' or '.join(map(str, dtypes))}")
    if rows.ndim != 2:
        raise KVCacheValueError(f"{name}: got {rows.ndim} dimensions, expected [{', '.join(dims)}]")
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise KVCacheValueError(
            f"{name}: got strides {rows.stride()}, expected 1 along {dims[1]}; copy with {name}.contiguous()"
        )
    check_addresses({name: rows})
