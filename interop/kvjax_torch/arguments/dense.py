"""Checks the arguments of attention over dense keys and values and turns them into plans."""

from __future__ import annotations

import torch

import kvjax
from kvjax import AttentionSpec, KVCacheDType, KVCacheTypeError, KVCacheValueError
from kvjax.ops.options import as_bool, as_float, as_sm_scale
from kvjax_torch.arguments.checks import check_addresses, check_index, check_same_device, on_host
from kvjax_torch.arguments.dtypes import INPUT_DTYPES, numpy_dtype
from kvjax_torch.arguments.plan import DensePlan, DenseTensors


def dense_plan(tensors: DenseTensors, causal: bool, sm_scale: float | None) -> DensePlan:
    """The plan of a `ragged_attention` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    query, key, value, cu_q_lens, cu_kv_lens = tensors
    if query.dtype not in INPUT_DTYPES:
        raise KVCacheTypeError(f"query: got dtype {query.dtype}, expected {' or '.join(map(str, INPUT_DTYPES))}")
    check_same_device("query", query, tensors._asdict())
    dims = {"query": "num_tokens, num_heads, head_size"}
    dims |= {"key": "num_kv_tokens, num_kv_heads, head_size", "value": "num_kv_tokens, num_kv_heads, head_size_v"}
    for name, rows in zip(dims, tensors, strict=False):
        if rows.dtype is not query.dtype:
            raise KVCacheTypeError(f"{name}: got dtype {rows.dtype}, expected {query.dtype} as query")
        if rows.ndim != 3 or not (rows.shape[1] and rows.shape[2]):
            raise KVCacheValueError(
                f"{name}: got shape {tuple(rows.shape)}, expected [{dims[name]}], at least one head of at least one"
                " element"
            )
    (_, num_heads, head_size), (num_kv_tokens, num_kv_heads, _) = query.shape, key.shape
    if key.shape[2] != head_size:
        raise KVCacheValueError(f"key: got shape {tuple(key.shape)}, expected head_size={head_size} as query")
    if value.shape[:2] != key.shape[:2]:
        raise KVCacheValueError(
            f"value: got shape {tuple(value.shape)}, expected [num_kv_tokens={num_kv_tokens},"
            f" num_kv_heads={num_kv_heads}, head_size_v] as key"
        )
    if num_heads % num_kv_heads:
        raise KVCacheValueError(f"query: got num_heads={num_heads}, expected a multiple of num_kv_heads={num_kv_heads}")
    check_addresses({name: rows for name, rows in tensors._asdict().items() if name in dims})
    _check_bounds("cu_q_lens", cu_q_lens, query.shape[0])
    _check_bounds("cu_kv_lens", cu_kv_lens, num_kv_tokens)
    if cu_kv_lens.shape != cu_q_lens.shape:
        raise KVCacheValueError(
            f"cu_kv_lens: got shape {tuple(cu_kv_lens.shape)}, expected [num_seqs + 1={cu_q_lens.shape[0]}]"
        )
    spec = AttentionSpec(1, num_kv_heads, head_size, value.shape[2], dtype=KVCacheDType(numpy_dtype(query.dtype).name))
    scale = as_sm_scale(as_float("sm_scale", sm_scale), head_size)
    return DensePlan(spec, query.dtype, num_heads, scale, as_bool("causal", causal))


def _check_bounds(name: str, bounds: torch.Tensor, num_tokens: int) -> None:
    check_index(name, (bounds.dtype, bounds.ndim), ("num_seqs + 1",))
    if not bounds.shape[0]:
        raise KVCacheValueError(f"{name}: got shape (0,), expected [num_seqs + 1]")
    if not kvjax.is_checked():
        return
    before = 0
    for index, bound in enumerate(on_host(name, bounds).tolist()):
        if not before <= bound <= (num_tokens if index else 0):
            raise KVCacheValueError(
                f"{name}[{index}]: got {bound}, expected 0 first, and then each between the one before it and"
                f" num_tokens={num_tokens}"
            )
        before = bound
