"""`torch.ops.kvjax.*`: the operations as registered with torch, with schemas and fake implementations.

They are registered with `torch.library.Library`, whose calls cost a third of those of `torch.library.custom_op`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from kvjax import KVCacheTypeError
from kvjax_torch import cuda, host, ragged
from kvjax_torch.arguments import (
    attention_plan,
    check_devices,
    gather_plan,
    refuse_gradient,
    rope_plan,
    write_plan,
)
from kvjax_torch.dtypes import gathered_dtype, has_scale_tensors, resolve_cache_dtype, row_head_size
from kvjax_torch.plan import ReadTensors, WriteTensors
from kvjax_torch.ragged_arguments import ragged_plan

_LIBRARY = torch.library.Library("kvjax", "DEF")
_LIBRARY.define(
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, *, str v_scale_layout='linear',"
    " bool unique_slots=False) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "reshape_and_cache_flash_per_token_head(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, str kv_cache_dtype, Tensor(c!) k_scale, Tensor(d!) v_scale, *, str v_scale_layout='linear',"
    " bool unique_slots=False) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "rope_and_cache(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, Tensor positions, Tensor cos_sin_cache, str kv_cache_dtype, Tensor k_scale, Tensor v_scale,"
    " *, str v_scale_layout='linear', bool is_neox=True, bool unique_slots=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "rope_and_cache_per_token_head(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache,"
    " Tensor(b!) value_cache, Tensor slot_mapping, Tensor positions, Tensor cos_sin_cache, str kv_cache_dtype,"
    " Tensor(c!) k_scale, Tensor(d!) v_scale, *, str v_scale_layout='linear', bool is_neox=True,"
    " bool unique_slots=False) -> Tensor",
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
    " int? sliding_window=None, float? logits_soft_cap=None, Tensor? sinks=None, bool batch_invariant=False)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "ragged_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens,"
    " Tensor cu_q_lens, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, *, str v_scale_layout='linear',"
    " float? sm_scale=None, int? sliding_window=None, float? logits_soft_cap=None, Tensor? sinks=None,"
    " bool batch_invariant=False, SymInt? max_q_len=None, SymInt? max_prompts=None, SymInt? decode_q_len=None)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _with_given_scales(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation under a schema that does not mutate scales."""
    names = list(inspect.signature(operation).parameters)
    cache, dtype, scale = map(names.index, ("key_cache", "kv_cache_dtype", "k_scale"))

    @functools.wraps(operation)
    def run(*args: Any, **options: Any) -> Any:  # the dispatcher passes these by position
        key_cache, kv_cache_dtype, k_scale = args[cache], args[dtype], args[scale]
        stored = resolve_cache_dtype(kv_cache_dtype, key_cache.dtype)
        if has_scale_tensors(k_scale) and stored.info.quant_mode.is_per_token_head:
            raise KVCacheTypeError(
                f"torch.ops.kvjax.{name}: got k_scale of shape {tuple(k_scale.shape)} for {kv_cache_dtype!r}, which is"
                f" written to; expected torch.ops.kvjax.{name}_per_token_head"
            )
        return operation(*args, **options)

    return run


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
        host.write(plan, WriteTensors(*tensors, k_scale, v_scale))


def _rope(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    v_scale_layout: str = "linear",
    is_neox: bool = True,
    unique_slots: bool = False,
) -> torch.Tensor:
    tensors = query, key, value, key_cache, value_cache, slot_mapping, positions, cos_sin_cache
    stored_as = kv_cache_dtype, k_scale, v_scale, v_scale_layout
    if key_cache.is_cuda:
        return cuda.rotate_and_write(*tensors, *stored_as, is_neox, unique_slots)
    plan = rope_plan(*tensors, *stored_as, is_neox)
    write_tensors = WriteTensors(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    return host.rotate_and_write(plan, query, write_tensors, positions, cos_sin_cache)


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
    return host.gather(plan, ReadTensors(*tensors, k_scale, v_scale))


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
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = query, key_cache, value_cache, block_table, seq_lens
    numbers = sm_scale, sliding_window, logits_soft_cap
    plan = attention_plan(*tensors, kv_cache_dtype, k_scale, v_scale, v_scale_layout, *numbers, sinks, batch_invariant)
    rows = query if query.ndim == 4 else query[:, None]
    serve = cuda.attend if key_cache.is_cuda else host.attend
    out, lse = serve(plan, rows, ReadTensors(*tensors[1:], k_scale, v_scale), sinks)
    return out.view(*query.shape[:-1], out.shape[-1]), lse.view(query.shape[:-1])


def _attend_ragged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    v_scale_layout: str = "linear",
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    decode_q_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = query, key_cache, value_cache, block_table, seq_lens, cu_q_lens
    numbers = sm_scale, sliding_window, logits_soft_cap
    options = v_scale_layout, *numbers, sinks, batch_invariant
    plan = ragged_plan(*tensors, kv_cache_dtype, k_scale, v_scale, *options, max_q_len, max_prompts, decode_q_len)
    serve = ragged.attend if key_cache.is_cuda else host.attend_ragged
    read_tensors = ReadTensors(key_cache, value_cache, block_table, seq_lens, k_scale, v_scale)
    return serve(plan, query, read_tensors, cu_q_lens, sinks)


def _without_gradient(operation: torch._ops.OpOverload, what: str) -> Callable[..., Any]:
    """The operation under autograd, also of torch.func and of compiled code: raises where a gradient would be lost."""
    names = [argument.name for argument in operation._schema.arguments]

    def run(keyset: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        needs_gradient = torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **options)
        if needs_gradient or forward_ad._current_level >= 0:
            given = dict(zip(names, args, strict=False)) | options
            refuse_gradient(what, **{name: each for name, each in given.items() if isinstance(each, torch.Tensor)})
        with torch._C._AutoDispatchBelowAutograd():
            return operation.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)

    return run


def _fake_of(kernel: Callable[..., Any], results: Callable[..., Any]) -> Callable[..., Any]:
    """The fake of a kernel, which returns what `results` makes of the arguments by name. It refuses other devices."""
    names = tuple(inspect.signature(kernel).parameters)

    def fake(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options
        check_devices(**{name: each for name, each in given.items() if isinstance(each, torch.Tensor)})
        return results(**given)

    return fake


def _written(**_: Any) -> None:
    """A write returns nothing."""


def _rotated(query: torch.Tensor, **_: Any) -> torch.Tensor:
    """Uninitialized rotated queries."""
    return query.new_empty(query.shape)


def _gathered(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized results of a gather."""
    stored = resolve_cache_dtype(kv_cache_dtype, key_cache.dtype)
    num_seqs, max_len = block_table.shape[0], block_table.shape[1] * key_cache.shape[1]

    def dense(name: str, cache: torch.Tensor) -> torch.Tensor:
        row_bytes, apart = cache.shape[3] * cache.dtype.itemsize, has_scale_tensors(k_scale)
        head_size = row_head_size(name, row_bytes, stored, scales_apart=apart)
        return cache.new_empty((num_seqs, max_len, cache.shape[2], head_size), dtype=gathered_dtype(dtype, stored))

    return dense("key_cache", key_cache), dense("value_cache", value_cache)


def _attended(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_cache_dtype: str,
    v_scale: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized results of attention."""
    stored = resolve_cache_dtype(kv_cache_dtype, key_cache.dtype)
    row_bytes, apart = value_cache.shape[3] * value_cache.dtype.itemsize, has_scale_tensors(v_scale)
    head_size_v = row_head_size("value_cache", row_bytes, stored, scales_apart=apart)
    out = query.new_empty((*query.shape[:-1], head_size_v))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


_WRITE, _ATTENTION = "a write into a cache", "attention over a cache"
for _name, _kernel, _what, _results in (
    ("reshape_and_cache_flash", _with_given_scales("reshape_and_cache_flash", _write), _WRITE, _written),
    ("reshape_and_cache_flash_per_token_head", _write, _WRITE, _written),
    ("rope_and_cache", _with_given_scales("rope_and_cache", _rope), _WRITE, _rotated),
    ("rope_and_cache_per_token_head", _rope, _WRITE, _rotated),
    ("gather_kv", _gather, "a gather", _gathered),
    ("paged_attention", _attend, _ATTENTION, _attended),
    ("ragged_paged_attention", _attend_ragged, _ATTENTION, _attended),
):
    _LIBRARY.impl(_name, _kernel, "CPU")
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _operation = getattr(torch.ops.kvjax, _name).default
    _LIBRARY.impl(_name, _without_gradient(_operation, _what), "Autograd", with_keyset=True)
    torch.library.register_fake(f"kvjax::{_name}", _fake_of(_kernel, _results), lib=_LIBRARY)
