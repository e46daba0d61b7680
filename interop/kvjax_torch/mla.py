"""Latents of multi-head latent attention (MLA) in torch tensors: vLLM's write and gather, and attention.

On CUDA they run on torch's current stream, and the host does not wait, except in `kvjax.checked()` and for the first
use of a float scale on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from kvjax import KVCacheDType
from kvjax.ops.options import as_bool, as_int, as_limits
from kvjax_torch import library as _registered  # noqa: F401  # torch.ops.kvjax
from kvjax_torch.arguments.attention import checked_softmax
from kvjax_torch.arguments.checks import check_tensors
from kvjax_torch.arguments.dtypes import dtype_name
from kvjax_torch.arguments.plan import SoftmaxOptions
from kvjax_torch.arguments.scales import Scale, as_tensor
from kvjax_torch.dispatch import call, call_attention


class MLAOptions(TypedDict, total=False):
    """Arguments of `mla_paged_attention` by name, which do not decide what it returns."""

    sliding_window: int | None
    logits_soft_cap: float | None
    batch_invariant: bool
    out: torch.Tensor | None


class MLARaggedOptions(MLAOptions, total=False):
    """Likewise of `mla_ragged_paged_attention`."""

    max_q_len: int | None


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    *,
    unique_slots: bool = False,
) -> None:
    """Writes latents and rope keys into the slots of a paged cache, in place, encoded as `kv_cache_dtype`.

    vLLM's operation of that name. The bytes are those that `kvjax.concat_and_cache_mla` writes; bytes outside the
    written slots do not change. A call that raises has written nothing. `torch.ops.kvjax.concat_and_cache_mla` is the
    same operation with the scale as a tensor on the cache's device.

    Args:
      kv_c: `[num_tokens, kv_lora_rank]`, the latents after the norm; float32, float16 or bfloat16. A row is contiguous.
        Tokens beyond the number of slots are padding.
      k_pe: `[num_tokens, qk_rope_head_dim]` of `kv_c`'s dtype, the rope keys, rotated; likewise.
      kv_cache: `[num_blocks, block_size, row]`, a latent and a rope key in each row: the memory of a `KVCache` of an
        `MLAAttentionSpec`. `row` is `kv_lora_rank + qk_rope_head_dim` elements of the storage dtype (for fp8 also
        uint8), or uint8 `[.., 656]` of fp8_ds_mla and `[.., 416]` of nvfp4 for 512 and 64 elements. The rows of a block
        are side by side; blocks may have gaps.
      slot_mapping: int32 or int64 `[num_slots]`: `block * block_size + offset` of each token. Negative slots and those
        at or past `num_blocks * block_size` write nothing. If several tokens have one slot, the last is written.
      kv_cache_dtype: a dtype of `kvjax.MLA_KV_CACHE_DTYPES` or its name; `"auto"` is the cache's own.
      scale: decode scale, a number or float32 of one element: for latents and rope keys of fp8, and for NVFP4 latents.
        Other dtypes ignore it.
      unique_slots: as in `reshape_and_cache_flash`.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `reshape_and_cache_flash`.
      UnsupportedError: likewise.
    """
    check_tensors(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    stored_as = dtype_name(kv_cache_dtype), _as_scale(scale, kv_cache)
    given = kv_c, k_pe, kv_cache, slot_mapping, *stored_as
    call(torch.ops.kvjax.concat_and_cache_mla, given, {"unique_slots": as_bool("unique_slots", unique_slots)})


def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    *,
    unique_slots: bool = False,
) -> None:
    """Rotates queries and rope keys by their positions, and writes latents and rope keys into their slots; in place.

    vLLM's operation of that name: `q_pe` and `k_pe` are rotated in place, for every token. The bytes of the cache are
    those that `kvjax.rope_and_cache_mla` writes. A call that raises has written nothing. On a GPU one kernel rotates
    and writes, between copies of `q_pe` and `k_pe`; for float32 and odd sizes torch rotates and the kernel of
    `concat_and_cache_mla` writes.

    Args:
      positions: int32 or int64 `[num_tokens]`: the row of `cos_sin_cache` of each token, clipped to its rows.
      q_pe: `[num_tokens, num_heads, qk_rope_head_dim]` of `kv_c`'s dtype, with any strides except within a head.
        Written in place.
      k_pe: as in `concat_and_cache_mla`, but not rotated. Written in place. No tensor shares elements with it or with
        `q_pe`.
      kv_c: as in `concat_and_cache_mla`, with as many tokens as slots.
      cos_sin_cache: as in `rope_and_cache`; `rot_dim` is at most `qk_rope_head_dim`.
      is_neox: as in `rope_and_cache`.
      slot_mapping: as in `concat_and_cache_mla`, `[num_tokens]`; -1 for padding.
      kv_cache: as in `concat_and_cache_mla`.
      kv_cache_dtype: as in `concat_and_cache_mla`.
      scale: as in `concat_and_cache_mla`.
      unique_slots: as in `reshape_and_cache_flash`.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `concat_and_cache_mla`; in `kvjax.checked()` also if the
        position of a written token is not a row of `cos_sin_cache`.
    """
    check_tensors(positions=positions, q_pe=q_pe, k_pe=k_pe, kv_c=kv_c, cos_sin_cache=cos_sin_cache)
    check_tensors(slot_mapping=slot_mapping, kv_cache=kv_cache)
    stored_as = dtype_name(kv_cache_dtype), _as_scale(scale, kv_cache)
    rotated = positions, q_pe, k_pe, kv_c, cos_sin_cache, as_bool("is_neox", is_neox)
    options = {"unique_slots": as_bool("unique_slots", unique_slots)}
    call(torch.ops.kvjax.concat_and_cache_mla_rope_fused, (*rotated, slot_mapping, kv_cache, *stored_as), options)


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor | None,
    num_tokens: int,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Stores the dequantized latents and rope keys of a range of tokens of each sequence in `dst`, one after the other.

    vLLM's operation of that name, and what `kvjax.gather_mla` returns: rows `cu_seq_lens[i]:cu_seq_lens[i + 1]` are the
    tokens of sequence `i` from `seq_starts[i]` on, the context of a prompt that is served in chunks.

    Args:
      src_cache: as `kv_cache` of `concat_and_cache_mla`.
      dst: float32, float16 or bfloat16 `[num_rows, kv_lora_rank + qk_rope_head_dim]`: latents, then rope keys. Written
        in place; rows from `num_tokens` on do not change. Decoding is in float32 and rounds once.
      block_table: int32 or int64 `[num_seqs, max_blocks]`: the blocks of each sequence, in order. Tokens of an entry
        that is not a block of the cache are zeros; entries of blocks without a token of the range may be anything.
      cu_seq_lens: int32 or int64 `[num_seqs + 1]`: 0 first, then not decreasing.
      token_to_seq: int32 or int64 `[num_tokens]`, the sequence of each row, as vLLM has it; None to find it. A row that
        is not of the range of its sequence is zeros.
      num_tokens: rows to fill, an int; those from `cu_seq_lens[-1]` on are zeros.
      kv_cache_dtype: as in `concat_and_cache_mla`.
      scale: the decode scale that the tokens were written with.
      seq_starts: int32 or int64 `[num_seqs]`, the first token of each range; default 0. They need not be multiples of
        `block_size`, as vLLM's must.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `concat_and_cache_mla`.
      UnsupportedError: likewise.
    """
    check_tensors(src_cache=src_cache, dst=dst, block_table=block_table, cu_seq_lens=cu_seq_lens)
    check_tensors(**{n: x for n, x in (("token_to_seq", token_to_seq), ("seq_starts", seq_starts)) if x is not None})
    rows = src_cache, dst, block_table, cu_seq_lens, token_to_seq, as_int("num_tokens", num_tokens, least=0)
    stored_as = dtype_name(kv_cache_dtype), _as_scale(scale, src_cache)
    call(torch.ops.kvjax.gather_and_maybe_dequant_cache, (*rows, *stored_as, seq_starts), {})


@overload
def mla_paged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    *,
    sm_scale: float,
    return_lse: Literal[False] = ...,
    **options: Unpack[MLAOptions],
) -> torch.Tensor: ...


@overload
def mla_paged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    *,
    sm_scale: float,
    return_lse: Literal[True],
    **options: Unpack[MLAOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def mla_paged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of each sequence over its latents, as `kvjax.mla_paged_attention` defines it.

    The logit of a token is `(q_nope . latent + q_pe . rope_key) * sm_scale`, and the result is the mean of the latents
    with the softmax's weights. `torch.ops.kvjax.mla_paged_attention` is the same operation with the scale as a tensor,
    and always returns both results; `mla_paged_attention_out` takes `out` first and returns the log-sum-exp. None has a
    gradient. On Hopper the kernel of `kvjax.mla_paged_attention` runs on torch's current stream, for a float16 or
    bfloat16 query and caches of all dtypes but float32 (docs/kernels.md has its limits); the first call of a kind
    compiles for batches of every size. Otherwise the sequences are gathered in float32 first.

    Args:
      q_nope: `[num_seqs, num_heads, kv_lora_rank]`, or `[num_seqs, q_len, num_heads, kv_lora_rank]` for the last
        `q_len` tokens of each sequence; float32, float16 or bfloat16. Queries without positions, multiplied by `W_UK`.
      q_pe: likewise with `qk_rope_head_dim`, of `q_nope`'s dtype, rotated.
      kv_cache: as in `concat_and_cache_mla`.
      block_table: as in `gather_kv`; entries of blocks before a window may be anything too.
      seq_lens: int32 or int64 `[num_seqs]`: tokens of each sequence, those of the query included.
      kv_cache_dtype: as in `concat_and_cache_mla`.
      scale: the decode scale that the tokens were written with.
      sm_scale: factor on the logits: the model's, usually `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`, with YaRN
        times the square of its `mscale`. It does not follow from the sizes of the cache.
      sliding_window: tokens that a query token sees, its own included; None for all.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`.
      return_lse: whether to return the log-sum-exp too.
      batch_invariant: as in `paged_attention`.
      out: memory for the first result: contiguous, of its shape and dtype, apart from every other argument's. It is
        written in place and returned.

    Returns:
      `q_nope`'s shape and dtype: latents, which `W_UV` maps to values. With `return_lse` also the natural logarithm of
      each softmax's denominator: float32, of the same shape without `kv_lora_rank`.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `concat_and_cache_mla`.
    """
    tensors = {"q_nope": q_nope, "q_pe": q_pe, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    softmax = SoftmaxOptions(sm_scale, sliding_window, logits_soft_cap, None, batch_invariant)
    operation = torch.ops.kvjax.mla_paged_attention, torch.ops.kvjax.mla_paged_attention_out
    return _attend(operation, tensors, (kv_cache_dtype, scale), softmax, {}, out, return_lse)


@overload
def mla_ragged_paged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    *,
    sm_scale: float,
    return_lse: Literal[False] = ...,
    **options: Unpack[MLARaggedOptions],
) -> torch.Tensor: ...


@overload
def mla_ragged_paged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    *,
    sm_scale: float,
    return_lse: Literal[True],
    **options: Unpack[MLARaggedOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def mla_ragged_paged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    max_q_len: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of each sequence over its latents, with a query length per sequence.

    As `kvjax.mla_ragged_paged_attention` defines it; all else is as in `mla_paged_attention`. On a GPU every sequence
    is padded to `max_q_len` query tokens, rounded up to a power of two. Use it for tokens that decode, with drafts,
    beside short prompts. Prompts are cheaper over keys and values of each head.

    Args:
      q_nope: `[num_tokens, num_heads, kv_lora_rank]`. Sequence `i` has the rows `cu_q_lens[i]:cu_q_lens[i + 1]`; rows
        from `cu_q_lens[-1]` on belong to no sequence, and see no token.
      q_pe: `[num_tokens, num_heads, qk_rope_head_dim]`.
      kv_cache: as in `mla_paged_attention`, and so are all arguments but the next and the last.
      block_table: `[num_seqs, max_blocks]`.
      seq_lens: `[num_seqs]`.
      cu_q_lens: int32 or int64 `[num_seqs + 1]`: 0 first, then not decreasing.
      kv_cache_dtype: the cache's dtype.
      scale: the decode scale.
      sm_scale: factor on the logits.
      sliding_window: tokens that a query token sees.
      logits_soft_cap: bound on the magnitude of logits.
      return_lse: whether to return the log-sum-exp too.
      batch_invariant: as there, for the same `max_q_len`.
      out: memory for the first result.
      max_q_len: the most query tokens of a sequence, an int; by default `num_tokens`. On a GPU a sequence with more has
        the results of one that sees no token.

    Returns:
      `q_nope`'s shape and dtype. With `return_lse` also float32 `[num_tokens, num_heads]`.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `mla_paged_attention`.
    """
    tensors = {"q_nope": q_nope, "q_pe": q_pe, "kv_cache": kv_cache}
    tensors |= {"block_table": block_table, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens}
    softmax = SoftmaxOptions(sm_scale, sliding_window, logits_soft_cap, None, batch_invariant)
    operation = torch.ops.kvjax.mla_ragged_paged_attention, torch.ops.kvjax.mla_ragged_paged_attention_out
    limits = {"max_q_len": as_limits(max_q_len, None, None).max_q_len}
    return _attend(operation, tensors, (kv_cache_dtype, scale), softmax, limits, out, return_lse)


def _attend(
    operation: tuple[Any, Any],
    tensors: Mapping[str, torch.Tensor],
    stored_as: tuple[str | KVCacheDType, Scale],
    softmax: SoftmaxOptions,
    limits: Mapping[str, int | None],
    out: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Calls a registered operation, the second one to have it store results in `out`."""
    check_tensors(**tensors, **({} if out is None else {"out": out}))
    kv_cache_dtype, scale = stored_as
    options = {**checked_softmax(softmax)._asdict(), **limits}
    del options["sinks"], options["tree_mask"]
    given = *tensors.values(), dtype_name(kv_cache_dtype), _as_scale(scale, tensors["kv_cache"])
    return call_attention(operation, given, options, out, return_lse)


def _as_scale(scale: Scale, cache: torch.Tensor) -> torch.Tensor:
    tensor = as_tensor("scale", scale, cache)
    check_tensors(scale=tensor)
    return tensor
