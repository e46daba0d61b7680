"""Checks the arguments of attention and turns them into plans."""

from __future__ import annotations

import math
import numbers

import torch

import kvjax
from kvjax import KVCacheTypeError, KVCacheValueError
from kvjax_torch.arguments import as_bool, check_addresses, check_devices, check_index, gather_plan, on_host
from kvjax_torch.caches import share_memory
from kvjax_torch.dtypes import INPUT_DTYPES
from kvjax_torch.plan import AttentionPlan, Encoding, GatherPlan, Limits, RaggedPlan, ReadTensors, Softmax

MAX_WINDOW = 2**31 - 1
"""The longest sequence; a larger window restricts nothing."""

MAX_DECODE_Q_LEN = 8
"""The largest default of `decode_q_len`, as in `kvjax`."""


def attention_plan(query: torch.Tensor, tensors: ReadTensors, encoding: Encoding, softmax: Softmax) -> AttentionPlan:
    """The plan of a `paged_attention` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    check_devices(tensors.key_cache, query=query)
    if query.ndim not in (3, 4):
        raise KVCacheValueError(
            f"query: got {query.ndim} dimensions, expected [num_seqs, num_heads, head_size] or [num_seqs, q_len,"
            " num_heads, head_size]"
        )
    q_len = query.shape[1] if query.ndim == 4 else 1
    softmax = checked_softmax(softmax)
    window = softmax.sliding_window
    gathered = gather_plan(tensors, encoding, torch.float32, last_tokens=None if window is None else window + q_len - 1)
    spec = gathered.cache.spec
    if query.shape[0] != tensors.block_table.shape[0] or query.shape[-1] != spec.head_size:
        raise KVCacheValueError(
            f"query: got shape {tuple(query.shape)}, expected num_seqs={tensors.block_table.shape[0]} and"
            f" head_size={spec.head_size}"
        )
    return _plan_of_query(gathered, query, q_len, softmax)


def _plan_of_query(gathered: GatherPlan, query: torch.Tensor, q_len: int, softmax: Softmax) -> AttentionPlan:
    """The plan of attention with `query [..., num_heads, head_size]` over the cache of a gather's plan.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid query or sinks.
    """
    sm_scale, window, logits_soft_cap, sinks, batch_invariant = softmax
    spec = gathered.cache.spec
    num_heads, head_size = query.shape[-2:]
    if query.dtype not in INPUT_DTYPES:
        raise KVCacheTypeError(f"query: got dtype {query.dtype}, expected {' or '.join(map(str, INPUT_DTYPES))}")
    if num_heads % spec.num_kv_heads or not num_heads:
        raise KVCacheValueError(
            f"query: got num_heads={num_heads}, expected a multiple of num_kv_heads={spec.num_kv_heads}"
        )
    if sinks is not None:
        if sinks.device != query.device:
            raise KVCacheValueError(f"sinks: got device {sinks.device}, expected {query.device}, that of key_cache")
        if sinks.dtype is not torch.float32:
            raise KVCacheTypeError(f"sinks: got dtype {sinks.dtype}, expected torch.float32")
        if sinks.shape != (num_heads,):
            raise KVCacheValueError(f"sinks: got shape {tuple(sinks.shape)}, expected [num_heads={num_heads}]")
    return AttentionPlan(
        gathered.cache,
        query.dtype,
        num_heads,
        q_len,
        gathered.scale_sizes,
        head_size**-0.5 if sm_scale is None else sm_scale,
        window,
        logits_soft_cap,
        sinks is not None,
        batch_invariant,
    )


def checked_softmax(softmax: Softmax) -> Softmax:
    """The same with numbers in the types of torch's dispatcher; no window in place of one over `MAX_WINDOW`.

    Raises:
      KVCacheValueError, KVCacheTypeError: a number of another type, not finite in float32, or not positive.
    """
    scale, cap = _as_float("sm_scale", softmax.sm_scale), _as_float("logits_soft_cap", softmax.logits_soft_cap)
    if cap is not None and cap < torch.finfo(torch.float32).tiny:
        raise KVCacheValueError(f"logits_soft_cap: got {cap}, expected a positive number or None")
    window = softmax.sliding_window
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, numbers.Integral):
            raise KVCacheTypeError(
                f"sliding_window: got {window!r} of type {type(window).__name__}, expected an int or None"
            )
        if window <= 0:
            raise KVCacheValueError(f"sliding_window: got {window}, expected a positive int or None")
        window = int(window) if window <= MAX_WINDOW else None
    invariant = as_bool("batch_invariant", softmax.batch_invariant)
    return Softmax(scale, window, cap, softmax.sinks, invariant)


def _as_float(what: str, number: object) -> float | None:
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise KVCacheTypeError(f"{what}: got {number!r} of type {type(number).__name__}, expected a float or None")
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise KVCacheValueError(f"{what}: got {number}, expected a number that is finite in float32")
    return value


def ragged_plan(
    query: torch.Tensor,
    tensors: ReadTensors,
    cu_q_lens: torch.Tensor,
    encoding: Encoding,
    softmax: Softmax,
    limits: Limits,
) -> RaggedPlan:
    """The plan of a `ragged_paged_attention` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    block_table = tensors.block_table
    check_devices(tensors.key_cache, query=query, cu_q_lens=cu_q_lens)
    if query.ndim != 3:
        raise KVCacheValueError(f"query: got {query.ndim} dimensions, expected [num_tokens, num_heads, head_size]")
    check_index("cu_q_lens", (cu_q_lens.dtype, cu_q_lens.ndim), ("num_seqs + 1",))
    check_index("block_table", (block_table.dtype, block_table.ndim), ("num_seqs", "max_blocks"))
    num_seqs = block_table.shape[0]
    if cu_q_lens.shape[0] != num_seqs + 1:
        raise KVCacheValueError(
            f"cu_q_lens: got shape {tuple(cu_q_lens.shape)}, expected [num_seqs + 1={num_seqs + 1}]"
        )
    num_tokens, softmax = query.shape[0], checked_softmax(softmax)
    longest, most, decoding = buckets(num_tokens, num_seqs, *limits, batch_invariant=softmax.batch_invariant)
    reach = None
    if kvjax.is_checked():
        bounds, window = on_host("cu_q_lens", cu_q_lens), softmax.sliding_window
        served = {"max_q_len": longest, "max_prompts": most, "decode_q_len": decoding}
        kvjax.check_query_lens(bounds.numpy(), num_tokens, **served)
        reach = None if window is None else bounds.diff().to(torch.int64) + (window - 1)
    gathered = gather_plan(tensors, encoding, torch.float32, last_tokens=reach)
    if query.shape[-1] != gathered.cache.spec.head_size:
        raise KVCacheValueError(
            f"query: got shape {tuple(query.shape)}, expected head_size={gathered.cache.spec.head_size}"
        )
    return RaggedPlan(_plan_of_query(gathered, query, decoding, softmax), longest, most)


def check_out(out: torch.Tensor, query: torch.Tensor, plan: AttentionPlan, **inputs: torch.Tensor | None) -> None:
    """Raises unless `out` can take the results of a call in place, without changing its `query` or other `inputs`."""
    shape = (*query.shape[:-1], plan.cache.spec.head_size_v)
    check_devices(query, out=out)
    if out.dtype is not plan.dtype:
        raise KVCacheTypeError(f"out: got dtype {out.dtype}, expected {plan.dtype} as query")
    if out.shape != shape:
        raise KVCacheValueError(f"out: got shape {tuple(out.shape)}, expected {shape}")
    if not out.is_contiguous():
        raise KVCacheValueError(f"out: got strides {out.stride()} for shape {shape}, expected a contiguous tensor")
    check_addresses({"out": out})
    for name, tensor in {"query": query, **inputs}.items():
        if tensor is not None and share_memory(out, tensor):
            raise KVCacheValueError(f"out: got memory that overlaps that of {name}, expected memory of its own")


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


def checked_limits(limits: Limits) -> Limits:
    """The same as ints for torch's dispatcher.

    Raises:
      KVCacheValueError, KVCacheTypeError: another type of value, or too small a number.
    """
    most, prompts, decoding = limits
    return Limits(
        _as_count("max_q_len", most, 1), _as_count("max_prompts", prompts, 0), _as_count("decode_q_len", decoding, 0)
    )


def _as_count(name: str, value: object, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise KVCacheTypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected an int")
    count = int(value)
    if count < least:
        raise KVCacheValueError(f"{name}: got {count}, expected an int of at least {least}")
    return min(count, 2**31 - 1)  # no call has more tokens or sequences
