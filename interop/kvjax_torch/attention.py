"""Attention on torch tensors: over pages, over dense keys and values, and merges of what these return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from kvjax import KVCacheDType
from kvjax.ops.options import as_bool, as_float, as_limits
from kvjax_torch.arguments.attention import checked_softmax
from kvjax_torch.arguments.checks import check_tensors
from kvjax_torch.arguments.dtypes import dtype_name, order_name
from kvjax_torch.arguments.plan import SoftmaxOptions
from kvjax_torch.arguments.scales import Scale, as_tensors
from kvjax_torch.dispatch import call_attention
from kvjax_torch.eager.merge import as_parts


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `paged_attention` that do not change the type of its result."""

    v_scale_layout: str
    sm_scale: float | None
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: torch.Tensor | None
    tree_mask: torch.Tensor | None
    batch_invariant: bool
    out: torch.Tensor | None


class DenseAttentionOptions(TypedDict, total=False):
    """Likewise of `ragged_attention`."""

    causal: bool
    sm_scale: float | None
    out: torch.Tensor | None


class RaggedOptions(AttentionOptions, total=False):
    """Likewise of `ragged_paged_attention`."""

    max_q_len: int | None
    max_prompts: int | None
    decode_q_len: int | None
    query_quantization: bool


@overload
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...


@overload
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    return_lse: bool = False,
    v_scale_layout: str = "linear",
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of each sequence over its cached tokens, as `kvjax.paged_attention` defines it.

    `torch.ops.kvjax.paged_attention` is the same operation with scales as tensors on the caches' device, and always
    returns both results; `paged_attention_out` takes `out` first and returns the log-sum-exp. None has a gradient. On a
    GPU the kernels of `kvjax.paged_attention` run on torch's current stream, for a float16 or bfloat16 query and a
    cache that they support; torch owns their workspace, and the first call of a kind compiles for batches of every
    size. Otherwise sequences are gathered in float32 first.

    Args:
      query: `[num_seqs, num_heads, head_size]`, or `[num_seqs, q_len, num_heads, head_size]` for the last `q_len`
        tokens of each sequence; float32, float16 or bfloat16, with any strides.
      key_cache: as in `reshape_and_cache_flash`.
      value_cache: as in `reshape_and_cache_flash`.
      block_table: as in `gather_kv`; entries of blocks before a window may be anything too.
      seq_lens: int32 or int64 `[num_seqs]`: tokens of each sequence, those of the query included.
      kv_cache_dtype: as in `reshape_and_cache_flash`.
      k_scale: the decode scale that the keys were written with.
      v_scale: the decode scale that the values were written with.
      v_scale_layout: the order that the V scales were written in.
      sm_scale: factor on the logits, by default `1 / sqrt(head_size)`.
      sliding_window: tokens that a query token sees, its own included; None for all.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`.
      sinks: float32 `[num_heads]`: a logit of each head that joins the softmax's denominator, not scaled, not capped.
      tree_mask: bool `[num_seqs, q_len, q_len]`, or `[q_len, q_len]` for all sequences: whether query token `j` sees
        query token `i`, for drafts that are a tree; under a window by their depth, as in `kvjax.paged_attention`.
      return_lse: whether to return the log-sum-exp too.
      out: memory for the first result: contiguous, of its shape and dtype, apart from every other argument's. It is
        written in place and returned.
      batch_invariant: whether the bits of a sequence's results must not depend on the rest of the batch, at a cost
        (docs/attention.md); on a GPU only for calls that the kernels support.

    Returns:
      A tensor of the query's shape, but for `head_size_v`, and dtype. With `return_lse` also the natural logarithm of
      each softmax's denominator: float32, of the same shape without `head_size_v`.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `reshape_and_cache_flash`.
    """
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    tensors |= {"block_table": block_table, "seq_lens": seq_lens}
    softmax = SoftmaxOptions(sm_scale, sliding_window, logits_soft_cap, sinks, batch_invariant, tree_mask)
    operation = torch.ops.kvjax.paged_attention, torch.ops.kvjax.paged_attention_out
    stored_as = kv_cache_dtype, k_scale, v_scale, v_scale_layout
    return _attend(operation, tensors, stored_as, softmax, {}, out, return_lse)


@overload
def ragged_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[RaggedOptions],
) -> torch.Tensor: ...


@overload
def ragged_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    return_lse: Literal[True],
    **options: Unpack[RaggedOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def ragged_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    return_lse: bool = False,
    v_scale_layout: str = "linear",
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    decode_q_len: int | None = None,
    query_quantization: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of each sequence, any number for each, as `kvjax.ragged_paged_attention` defines it.

    Serves a step of a serving engine: prompts in chunks beside sequences that decode.
    `torch.ops.kvjax.ragged_paged_attention` is the same operation with scales as tensors on the caches' device, and
    returns both results, but with `return_lse=False` the log-sum-exp of prompts may be anything;
    `ragged_paged_attention_out` takes `out` first and returns the log-sum-exp. None has a
    gradient.

    On a GPU the host does not wait for lengths. The kernels of `paged_attention` serve sequences of at most
    `decode_q_len` query tokens, on Hopper the prompt kernel serves the others over gathered keys and values;
    docs/attention.md says what serves other calls. `max_q_len`, `max_prompts` and `decode_q_len` limit what the call
    serves; their defaults serve every call, at a cost. A sequence beyond a limit has the results of one that sees no
    token. On CPU tensors every sequence is served.

    Args:
      query: `[num_tokens, num_heads, head_size]`; float32, float16 or bfloat16, with any strides. Sequence `i` has the
        rows `cu_q_lens[i]:cu_q_lens[i + 1]`; rows from `cu_q_lens[-1]` on belong to no sequence, and see no token.
      key_cache: as in `reshape_and_cache_flash`.
      value_cache: as in `reshape_and_cache_flash`.
      block_table: as in `gather_kv`; entries of blocks before a window may be anything too. On a GPU a prompt's keys
        and values take memory for every entry of its row, so pass no more columns than the step needs.
      seq_lens: int32 or int64 `[num_seqs]`: tokens of each sequence, those of the query included.
      cu_q_lens: int32 or int64 `[num_seqs + 1]`: 0 first, then not decreasing.
      kv_cache_dtype: as in `reshape_and_cache_flash`.
      k_scale: the decode scale that the keys were written with.
      v_scale: the decode scale that the values were written with.
      v_scale_layout: the order that the V scales were written in.
      sm_scale: factor on the logits, by default `1 / sqrt(head_size)`.
      sliding_window: tokens that a query token sees, its own included; None for all.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`.
      sinks: float32 `[num_heads]`: a logit of each head that joins the softmax's denominator, not scaled, not capped.
      tree_mask: bool `[num_seqs, decode_q_len, decode_q_len]`, or `[decode_q_len, decode_q_len]`: the same for
        sequences of at most `decode_q_len` query tokens, by default as many as it has; prompts are causal.
      return_lse: whether to return the log-sum-exp too.
      out: memory for the first result: contiguous, of its shape and dtype, apart from every other argument's. It is
        returned.
      batch_invariant: whether the bits of a sequence's results must not depend on the rest of the batch, given the same
        `max_q_len` and `decode_q_len`. On a GPU only kernels promise that: the prompt kernel, or `max_prompts=0`.
      max_q_len: the most query tokens of a sequence, an int; by default `num_tokens`. 1 is decode.
      max_prompts: the most sequences with more query tokens than `decode_q_len`, an int; by default as many as
        `num_tokens` allows.
      decode_q_len: the most query tokens of a sequence that is served as one that decodes, an int; by default
        `max_q_len` if that is at most 8, else 1. With 0 no sequence is, and a sequence of one query token counts
        towards `max_prompts`.
      query_quantization: whether prompts (sequences with more query tokens than `decode_q_len`) are attended to with
        fp8 products, as in `kvjax.ragged_paged_attention`. On a GPU this needs the prompt kernel to serve them; on CPU
        tensors torch computes the same roundings.

    Returns:
      `[num_tokens, num_heads, head_size_v]` of the query's dtype. With `return_lse` also the natural logarithm of each
      softmax's denominator: float32 `[num_tokens, num_heads]`.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `reshape_and_cache_flash`.
    """
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    tensors |= {"block_table": block_table, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens}
    softmax = SoftmaxOptions(sm_scale, sliding_window, logits_soft_cap, sinks, batch_invariant, tree_mask)
    limits: dict[str, Any] = as_limits(max_q_len, max_prompts, decode_q_len)._asdict()
    limits["query_quantization"] = as_bool("query_quantization", query_quantization)
    limits["return_lse"] = as_bool("return_lse", return_lse)  # without it torch's own attention may serve prompts
    operation = torch.ops.kvjax.ragged_paged_attention, torch.ops.kvjax.ragged_paged_attention_out
    stored_as = kv_cache_dtype, k_scale, v_scale, v_scale_layout
    return _attend(operation, tensors, stored_as, softmax, limits, out, return_lse)


@overload
def ragged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DenseAttentionOptions],
) -> torch.Tensor: ...


@overload
def ragged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DenseAttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def ragged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences over dense keys and values, without a cache, as `kvjax.ragged_attention` defines it.

    Sequence `i` has the rows `cu_q_lens[i]:cu_q_lens[i + 1]` of the query, and the rows
    `cu_kv_lens[i]:cu_kv_lens[i + 1]` of keys and values: parts of a prompt over latents (MLA), which
    `merge_attention_states` joins. `torch.ops.kvjax.ragged_attention` is the same operation, and always returns both
    results; `ragged_attention_out` takes `out` first and returns the log-sum-exp. None has a gradient.

    On Hopper the prompt kernel serves float16 and bfloat16, head sizes that are multiples of 16 up to 256, and a
    positive `sm_scale`, after a kernel that copies keys and values to tiles. The host does not wait, and the first call
    of a kind compiles for any lengths. torch serves other calls of CUDA tensors, one sequence after the other: the host
    waits for both bounds.

    Args:
      query: `[num_tokens, num_heads, head_size]`; float32, float16 or bfloat16, with any strides. `num_heads` is a
        multiple of `num_kv_heads`; neighbouring query heads share a KV head.
      key: `[num_kv_tokens, num_kv_heads, head_size]`, of the query's dtype, with any strides. The kernel reads a copy
        if addresses or strides are not multiples of 16 bytes, or if tokens interleave.
      value: `[num_kv_tokens, num_kv_heads, head_size_v]`, likewise: also a slice of a projection.
      cu_q_lens: int32 or int64 `[num_seqs + 1]`: 0 first, then not decreasing. Rows from `cu_q_lens[-1]` on belong to
        no sequence, and see no token.
      cu_kv_lens: int32 or int64 `[num_seqs + 1]`, likewise. Tokens from `cu_kv_lens[-1]` on may hold anything.
      causal: whether a sequence's rows are its last tokens and see none after their own; otherwise each row sees all.
      sm_scale: factor on the logits, by default `1 / sqrt(head_size)`.
      return_lse: whether to return the log-sum-exp too.
      out: memory for the first result: contiguous, of its shape and dtype, apart from every other argument's. It is
        returned.

    Returns:
      `[num_tokens, num_heads, head_size_v]` of the query's dtype. With `return_lse` also the natural logarithm of each
      softmax's denominator: float32 `[num_tokens, num_heads]`. A row that sees nothing is 0, with -inf.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype, device or number; the message names it.
      UnsupportedError: an array of 2**31 elements or more, on a GPU; or a call that torch would serve there, while a
        CUDA graph is captured.
    """
    tensors = {"query": query, "key": key, "value": value, "cu_q_lens": cu_q_lens, "cu_kv_lens": cu_kv_lens}
    check_tensors(**tensors, **({} if out is None else {"out": out}))
    options = {"causal": as_bool("causal", causal), "sm_scale": as_float("sm_scale", sm_scale)}
    operation = torch.ops.kvjax.ragged_attention, torch.ops.kvjax.ragged_attention_out
    return call_attention(operation, tuple(tensors.values()), options, out, return_lse)


def _attend(
    operation: tuple[Any, Any],
    tensors: Mapping[str, torch.Tensor],
    stored_as: tuple[str | KVCacheDType, Scale, Scale, str],
    softmax: SoftmaxOptions,
    limits: Mapping[str, Any],
    out: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Calls a registered operation, the second one to have it store results in `out`."""
    optional = {"sinks": softmax.sinks, "tree_mask": softmax.tree_mask, "out": out}
    check_tensors(**tensors, **{name: x for name, x in optional.items() if x is not None})
    kv_cache_dtype, k_scale, v_scale, v_scale_layout = stored_as
    scales = as_tensors(k_scale, v_scale, tensors["key_cache"])
    given = *tensors.values(), dtype_name(kv_cache_dtype), *scales
    options = {"v_scale_layout": order_name(v_scale_layout), **checked_softmax(softmax)._asdict(), **limits}
    return call_attention(operation, given, options, out, return_lse)


def merge_attention_states(
    outs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over disjoint sets of tokens, as `kvjax.merge_attention_states` defines it.

    `lse = log(sum(exp(lses)))` and `out = sum(exp(lses - lse) * outs)`, in float32. No token may be in two sets, and a
    sink may be included in one set only. A part whose log-sum-exp is -inf has no weight, whatever its `outs` hold; if
    all are -inf, the result is 0 with -inf. `torch.ops.kvjax.merge_attention_states` is the same operation on lists.

    Args:
      outs: `[..., num_heads, head_size_v]` for each part, float32, float16 or bfloat16: a sequence of tensors of one
        shape and dtype, or one stacked tensor, `[num_parts, ..., num_heads, head_size_v]`.
      lses: float32 `[..., num_heads]` for each part, likewise: what `paged_attention` returns with `return_lse`.

    Returns:
      `(out, lse)`: `[..., num_heads, head_size_v]` of the dtype of `outs`, and float32 `[..., num_heads]`.

    Raises:
      KVCacheValueError, KVCacheTypeError: no part, or an invalid shape, dtype or device; or a part requires a gradient.
    """
    merged: tuple[torch.Tensor, torch.Tensor] = torch.ops.kvjax.merge_attention_states.default(
        as_parts("outs", outs), as_parts("lses", lses)
    )
    return merged
