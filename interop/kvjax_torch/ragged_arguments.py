"""Checks the arguments of `ragged_paged_attention` and turns them into a plan."""

from __future__ import annotations

import numbers

import torch

import kvjax
from kvjax import KVCacheTypeError, KVCacheValueError
from kvjax_torch.arguments import (
    attention_numbers,
    check_devices,
    check_index,
    gather_plan,
    on_host,
    plan_of_query,
)
from kvjax_torch.plan import RaggedPlan

MAX_DECODE_Q_LEN = 8
"""The largest default of `decode_q_len`, as in `kvjax`."""


def ragged_plan(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    v_scale_layout: str,
    sm_scale: float | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    sinks: torch.Tensor | None,
    batch_invariant: bool,
    max_q_len: int | None,
    max_prompts: int | None,
    decode_q_len: int | None,
) -> RaggedPlan:
    """The plan of a `ragged_paged_attention` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    check_devices(key_cache, query=query, cu_q_lens=cu_q_lens)
    if query.ndim != 3:
        raise KVCacheValueError(f"query: got {query.ndim} dimensions, expected [num_tokens, num_heads, head_size]")
    check_index("cu_q_lens", (cu_q_lens.dtype, cu_q_lens.ndim), ("num_seqs + 1",))
    check_index("block_table", (block_table.dtype, block_table.ndim), ("num_seqs", "max_blocks"))
    num_seqs = block_table.shape[0]
    if cu_q_lens.shape[0] != num_seqs + 1:
        raise KVCacheValueError(
            f"cu_q_lens: got shape {tuple(cu_q_lens.shape)}, expected [num_seqs + 1={num_seqs + 1}]"
        )
    num_tokens = query.shape[0]
    given = max_q_len, max_prompts, decode_q_len
    longest, most, decoding = buckets(num_tokens, num_seqs, *given, batch_invariant=batch_invariant)
    scale, window, cap = attention_numbers(sm_scale, sliding_window, logits_soft_cap)
    reach = None
    if kvjax.is_checked():
        bounds = on_host("cu_q_lens", cu_q_lens)
        limits = {"max_q_len": longest, "max_prompts": most, "decode_q_len": decoding}
        kvjax.check_query_lens(bounds.numpy(), num_tokens, **limits)
        reach = None if window is None else bounds.diff().to(torch.int64) + (window - 1)
    gathered = gather_plan(
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        kv_cache_dtype,
        k_scale,
        v_scale,
        v_scale_layout,
        torch.float32,
        last_tokens=reach,
    )
    if query.shape[-1] != gathered.cache.spec.head_size:
        raise KVCacheValueError(
            f"query: got shape {tuple(query.shape)}, expected head_size={gathered.cache.spec.head_size}"
        )
    attention = plan_of_query(gathered, query, decoding, scale, window, cap, sinks, batch_invariant)
    return RaggedPlan(attention, longest, most)


def buckets(
    num_tokens: int,
    num_seqs: int,
    max_q_len: int | None,
    max_prompts: int | None,
    decode_q_len: int | None,
    *,
    batch_invariant: bool = False,
) -> tuple[int, int, int]:
    """`max_q_len`, `max_prompts` and `decode_q_len`, each reduced as far as the others allow, as in `kvjax`."""
    longest = num_tokens if max_q_len is None else max_q_len
    longest = longest if batch_invariant else min(longest, num_tokens)
    default = longest if longest <= MAX_DECODE_Q_LEN else 1
    decoding = max(default, 1) if decode_q_len is None else min(decode_q_len, max(longest, 1))
    prompts = min(num_seqs, num_seqs if batch_invariant else num_tokens // (decoding + 1)) if longest > decoding else 0
    return longest, prompts if max_prompts is None else min(max_prompts, prompts), decoding


def as_count(name: str, value: object, least: int) -> int | None:
    """A limit of a call as an int for torch's dispatcher; None stays None.

    Raises:
      KVCacheValueError, KVCacheTypeError: another type of value, or a number less than `least`.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise KVCacheTypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected an int")
    count = int(value)
    if count < least:
        raise KVCacheValueError(f"{name}: got {count}, expected an int of at least {least}")
    return min(count, 2**31 - 1)  # no call has more tokens or sequences
