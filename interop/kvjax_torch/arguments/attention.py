"""Checks the arguments of attention and turns them into plans."""

from __future__ import annotations

import torch

import kvjax
from kvjax import AttentionSpec, KVCacheTypeError, KVCacheValueError
from kvjax.ops import options
from kvjax.ops.route import Query, check_query_quantization
from kvjax_torch.arguments.caches import share_memory
from kvjax_torch.arguments.checks import check_addresses, check_devices, check_index, on_host
from kvjax_torch.arguments.dtypes import INPUT_DTYPES, numpy_dtype
from kvjax_torch.arguments.plan import (
    AttentionPlan,
    Encoding,
    GatherPlan,
    Limits,
    RaggedPlan,
    ReadTensors,
    SoftmaxOptions,
)
from kvjax_torch.arguments.reads import gather_plan


def attention_plan(
    query: torch.Tensor, tensors: ReadTensors, encoding: Encoding, softmax: SoftmaxOptions
) -> AttentionPlan:
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
    num_seqs = query.shape[0]
    if softmax.tree_mask is not None:
        check_tree_mask(softmax.tree_mask, query, num_seqs, ("q_len", q_len))
    return _plan_of_query(gathered, query, q_len, softmax)


def check_tree_mask(mask: torch.Tensor, query: torch.Tensor, num_seqs: int, size: tuple[str, int | None]) -> None:
    """Raises unless a mask is for this number of query tokens of each sequence; None allows any number.

    Raises:
      KVCacheValueError, KVCacheTypeError: another dtype, shape or device.
    """
    check_devices(query, tree_mask=mask)
    if mask.dtype is not torch.bool:
        raise KVCacheTypeError(f"tree_mask: got dtype {mask.dtype}, expected torch.bool")
    name, number = size
    number = mask.shape[-1] if number is None and mask.ndim else number
    if mask.ndim not in (2, 3) or mask.shape != (num_seqs, number, number)[-mask.ndim :]:
        shape = f"[num_seqs={num_seqs}, {name}={number}, {name}={number}]"
        raise KVCacheValueError(f"tree_mask: got shape {tuple(mask.shape)}, expected {shape}, or one for all sequences")


def _plan_of_query(gathered: GatherPlan, query: torch.Tensor, q_len: int, softmax: SoftmaxOptions) -> AttentionPlan:
    """The plan of attention with `query [..., num_heads, head_size]` over the cache of a gather's plan.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid query or sinks.
    """
    spec, sinks = gathered.cache.spec, softmax.sinks
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
        options.as_sm_scale(softmax.sm_scale, head_size),
        softmax.sliding_window,
        softmax.logits_soft_cap,
        sinks is not None,
        softmax.batch_invariant,
        None if softmax.tree_mask is None or not q_len else q_len,
    )


def checked_softmax(softmax: SoftmaxOptions) -> SoftmaxOptions:
    """The same with numbers in the types of torch's dispatcher, and no window if no sequence exceeds it.

    Raises:
      KVCacheValueError, KVCacheTypeError: a number of another type, not finite in float32, or not positive.
    """
    return SoftmaxOptions(
        options.as_float("sm_scale", softmax.sm_scale),
        options.as_window(softmax.sliding_window),
        options.as_soft_cap(softmax.logits_soft_cap),
        softmax.sinks,
        options.as_bool("batch_invariant", softmax.batch_invariant),
        softmax.tree_mask,
    )


def ragged_plan(
    query: torch.Tensor,
    tensors: ReadTensors,
    cu_q_lens: torch.Tensor,
    encoding: Encoding,
    softmax: SoftmaxOptions,
    limits: Limits,
    query_quantization: object = False,
) -> RaggedPlan:
    """The plan of a `ragged_paged_attention` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
      UnsupportedError: products in fp8 serve no such query or cache.
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
    if softmax.tree_mask is not None:
        check_tree_mask(softmax.tree_mask, query, num_seqs, ("decode_q_len", limits.decode_q_len))
        limits = limits._replace(decode_q_len=softmax.tree_mask.shape[-1])
    served = options.buckets(limits, num_tokens, num_seqs, batch_invariant=softmax.batch_invariant)
    reach = None
    if kvjax.is_checked():
        bounds, window = on_host("cu_q_lens", cu_q_lens), softmax.sliding_window
        kvjax.check_query_lens(bounds.numpy(), num_tokens, **served._asdict())
        reach = None if window is None else bounds.diff().to(torch.int64) + (window - 1)
    gathered = gather_plan(tensors, encoding, torch.float32, last_tokens=reach)
    if query.shape[-1] != gathered.cache.spec.head_size:
        raise KVCacheValueError(
            f"query: got shape {tuple(query.shape)}, expected head_size={gathered.cache.spec.head_size}"
        )
    plan = _plan_of_query(gathered, query, served.decode_q_len, softmax)
    asked = Query(numpy_dtype(plan.dtype), plan.sm_scale > 0)
    in_fp8 = check_query_quantization(query_quantization, plan.cache.spec, asked)
    return RaggedPlan(plan, served.max_q_len, served.max_prompts, in_fp8)


def check_out(out: torch.Tensor, query: torch.Tensor, spec: AttentionSpec, **inputs: torch.Tensor | None) -> None:
    """Raises unless `out` can take the results of a call in place, without changing its `query` or other `inputs`."""
    shape = (*query.shape[:-1], spec.head_size_v)
    check_devices(query, out=out)
    if out.dtype is not query.dtype:
        raise KVCacheTypeError(f"out: got dtype {out.dtype}, expected {query.dtype} as query")
    if out.shape != shape:
        raise KVCacheValueError(f"out: got shape {tuple(out.shape)}, expected {shape}")
    if not out.is_contiguous():
        raise KVCacheValueError(f"out: got strides {out.stride()} for shape {shape}, expected a contiguous tensor")
    check_addresses({"out": out})
    for name, tensor in {"query": query, **inputs}.items():
        if tensor is not None and share_memory(out, tensor):
            raise KVCacheValueError(f"out: got memory that overlaps that of {name}, expected memory of its own")
