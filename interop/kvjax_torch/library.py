"""`torch.ops.kvjax.*`: the operations as torch knows them, with what they mutate and what they return.

They are defined and implemented through a `torch.library.Library`, whose calls cost a third of those of
`torch.library.custom_op`.
"""

from __future__ import annotations

import torch

from kvjax_torch import cuda, host
from kvjax_torch.arguments import attention_plan, check_devices, gather_plan, refuse_gradient, write_plan
from kvjax_torch.dtypes import gathered_dtype, resolve_cache_dtype, row_head_size

_LIBRARY = torch.library.Library("kvjax", "DEF")
_LIBRARY.define(
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, *, str v_scale_layout='linear',"
    " bool unique_slots=False) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "gather_kv(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, str kv_cache_dtype,"
    " Tensor k_scale, Tensor v_scale, *, str v_scale_layout='linear', ScalarType? dtype=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens,"
    " str kv_cache_dtype, Tensor k_scale, Tensor v_scale, *, str v_scale_layout='linear', float? sm_scale=None,"
    " int? sliding_window=None, float? logits_soft_cap=None, Tensor? sinks=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    v_scale_layout: str = "linear",
    unique_slots: bool = False,
) -> None:
    tensors = key, value, key_cache, value_cache, slot_mapping
    if key_cache.is_cuda:
        cuda.write(*tensors, kv_cache_dtype, k_scale, v_scale, v_scale_layout, unique_slots)
    else:
        plan = write_plan(*tensors, kv_cache_dtype, k_scale, v_scale, v_scale_layout)
        host.write(plan, *tensors, k_scale, v_scale)


def _gather(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    v_scale_layout: str = "linear",
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = key_cache, value_cache, block_table, seq_lens
    if key_cache.is_cuda:
        return cuda.gather(*tensors, kv_cache_dtype, k_scale, v_scale, v_scale_layout, dtype)
    plan = gather_plan(*tensors, kv_cache_dtype, k_scale, v_scale, v_scale_layout, dtype)
    return host.gather(plan, *tensors, k_scale, v_scale)


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    v_scale_layout: str = "linear",
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = query, key_cache, value_cache, block_table, seq_lens
    numbers = sm_scale, sliding_window, logits_soft_cap
    plan = attention_plan(*tensors, kv_cache_dtype, k_scale, v_scale, v_scale_layout, *numbers, sinks)
    rows = query if query.ndim == 4 else query[:, None]
    serve = cuda.attend if key_cache.is_cuda else host.attend
    out, lse = serve(plan, rows, *tensors[1:], k_scale, v_scale, sinks)
    return out.view(*query.shape[:-1], out.shape[-1]), lse.view(query.shape[:-1])


def _write_fake(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    v_scale_layout: str = "linear",
    unique_slots: bool = False,
) -> None:
    refuse_gradient(key=key, value=value)  # compiled code runs without autograd: it could not say so later
    check_devices(
        key_cache,
        value_cache=value_cache,
        key=key,
        value=value,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _gather_fake(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    v_scale_layout: str = "linear",
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_devices(
        key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    stored = resolve_cache_dtype(kv_cache_dtype, key_cache.dtype)
    num_seqs, max_len = block_table.shape[0], block_table.shape[1] * key_cache.shape[1]

    def dense(name: str, cache: torch.Tensor) -> torch.Tensor:
        head_size = row_head_size(name, cache.shape[3] * cache.dtype.itemsize, stored)
        return cache.new_empty((num_seqs, max_len, cache.shape[2], head_size), dtype=gathered_dtype(dtype, stored))

    return dense("key_cache", key_cache), dense("value_cache", value_cache)


def _attend_fake(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    v_scale_layout: str = "linear",
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_gradient("attention over a cache", query=query, **({} if sinks is None else {"sinks": sinks}))
    check_devices(
        key_cache,
        query=query,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    stored = resolve_cache_dtype(kv_cache_dtype, key_cache.dtype)
    head_size_v = row_head_size("value_cache", value_cache.shape[3] * value_cache.dtype.itemsize, stored)
    out = query.new_empty((*query.shape[:-1], head_size_v))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


for _name, _kernel, _fake in (
    ("reshape_and_cache_flash", _write, _write_fake),
    ("gather_kv", _gather, _gather_fake),
    ("paged_attention", _attend, _attend_fake),
):
    _LIBRARY.impl(_name, _kernel, "CPU")
    _LIBRARY.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"kvjax::{_name}", _fake, lib=_LIBRARY)
