"""`torch.ops.kvjax.*`: the operations as registered with torch, with schemas and fake implementations.

They are registered with `torch.library.Library`, whose calls cost a third of those of `torch.library.custom_op`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kvjax import KVCacheDType
from kvjax_torch.arguments.attention import attention_plan, check_out, ragged_plan
from kvjax_torch.arguments.checks import check_devices, check_same_device
from kvjax_torch.arguments.dense import dense_plan
from kvjax_torch.arguments.dtypes import gathered_dtype, has_scale_tensors, resolve_cache_dtype, row_head_size
from kvjax_torch.arguments.latents import (
    GatheredRows,
    LatentPages,
    check_latent_out,
    latent_attention_plan,
    latent_gather_plan,
    latent_ragged_plan,
    latent_rope_plan,
    latent_write_plan,
)
from kvjax_torch.arguments.plan import (
    DenseTensors,
    Encoding,
    LatentQuery,
    Limits,
    ReadTensors,
    RopeInputs,
    SoftmaxOptions,
    WriteTensors,
)
from kvjax_torch.arguments.reads import gather_plan
from kvjax_torch.arguments.scales import refuse_scale_tensors
from kvjax_torch.arguments.writes import rope_plan, write_plan
from kvjax_torch.autograd import marks_writes, tensors_of, without_gradient
from kvjax_torch.cuda import dense_prompts, latents, ragged, reads, writes
from kvjax_torch.eager import host, merge
from kvjax_torch.eager import ragged as eager_ragged
from kvjax_torch.eager.rotation import rotate
from kvjax_torch.eager.trees import as_tree

_LIBRARY = torch.library.Library("kvjax", "DEF")


class OperationKernel(NamedTuple):
    """What an operation runs.

    Attributes:
      kernel: takes the operation's arguments, and returns its results as a tuple.
      written: which of the tensors that it takes it writes; none before these is optional.
    """

    kernel: Callable[..., tuple[torch.Tensor, ...]]
    written: tuple[int, ...]


IMPLEMENTATIONS: dict[Any, OperationKernel] = {}
"""Of each operation of `torch.ops.kvjax`."""


def _write(mutates_scales: bool, *given: Any, v_scale_layout: str = "linear", unique_slots: bool = False) -> None:
    *rows, kv_cache_dtype, k_scale, v_scale = given
    tensors, encoding = WriteTensors._make((*rows, k_scale, v_scale)), Encoding(kv_cache_dtype, v_scale_layout)
    if not mutates_scales:
        refuse_scale_tensors("reshape_and_cache_flash", tensors, encoding)
    if tensors.key_cache.is_cuda:
        writes.write(tensors, encoding, unique_slots)
    else:
        host.write(write_plan(tensors, encoding), tensors)


def _rope(
    mutates_scales: bool,
    *given: Any,
    v_scale_layout: str = "linear",
    is_neox: bool = True,
    unique_slots: bool = False,
) -> torch.Tensor:
    query, *rows, positions, cos_sin_cache, kv_cache_dtype, k_scale, v_scale = given
    tensors, encoding = WriteTensors._make((*rows, k_scale, v_scale)), Encoding(kv_cache_dtype, v_scale_layout)
    rope = RopeInputs(query, positions, cos_sin_cache, is_neox)
    if not mutates_scales:
        refuse_scale_tensors("rope_and_cache", tensors, encoding)
    if tensors.key_cache.is_cuda:
        return writes.rotate_and_write(tensors, rope, encoding, unique_slots)
    return host.rotate_and_write(rope_plan(tensors, rope, encoding), tensors, rope)


def _gather(
    *given: Any, v_scale_layout: str = "linear", dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    *pages, kv_cache_dtype, k_scale, v_scale = given
    tensors = ReadTensors._make((*pages, k_scale, v_scale))
    plan = gather_plan(tensors, Encoding(kv_cache_dtype, v_scale_layout), dtype)
    return (reads if tensors.key_cache.is_cuda else host).gather(plan, tensors)


def _attend(
    query: torch.Tensor,
    *given: Any,
    v_scale_layout: str = "linear",
    out: torch.Tensor | None = None,
    **softmax: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    *pages, kv_cache_dtype, k_scale, v_scale = given
    tensors, options = ReadTensors._make((*pages, k_scale, v_scale)), SoftmaxOptions(**softmax)
    plan = attention_plan(query, tensors, Encoding(kv_cache_dtype, v_scale_layout), options)
    if out is not None:
        check_out(out, query, plan.cache.spec, **tensors._asdict(), sinks=options.sinks, tree_mask=options.tree_mask)
    rows, into = (x if x is None or x.ndim == 4 else x[:, None] for x in (query, out))
    tree = None
    if plan.tree is not None and options.tree_mask is not None:
        tree = as_tree(options.tree_mask, plan.tree, torch.full_like(tensors.seq_lens, plan.tree))
    results = (reads if query.is_cuda else host).attend(plan, rows, tensors, options.sinks, into, tree)
    return results[0].view(*query.shape[:-1], results[0].shape[-1]), results[1].view(query.shape[:-1])


def _attend_ragged(
    query: torch.Tensor,
    *given: Any,
    v_scale_layout: str = "linear",
    out: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    *pages, cu_q_lens, kv_cache_dtype, k_scale, v_scale = given
    tensors, encoding = ReadTensors._make((*pages, k_scale, v_scale)), Encoding(kv_cache_dtype, v_scale_layout)
    in_fp8, lse = options.pop("query_quantization", False), options.pop("return_lse", True)
    limits, softmax = Limits(*(options.pop(name, None) for name in Limits._fields)), SoftmaxOptions(**options)
    plan = ragged_plan(query, tensors, cu_q_lens, encoding, softmax, limits, in_fp8)
    plan = dataclasses.replace(plan, returns_lse=lse)
    if out is not None:
        inputs = {**tensors._asdict(), "cu_q_lens": cu_q_lens, "sinks": softmax.sinks, "tree_mask": softmax.tree_mask}
        check_out(out, query, plan.attention.cache.spec, **inputs)
    tree, num_tokens = None, plan.attention.tree
    if num_tokens is not None and softmax.tree_mask is not None:
        tree = as_tree(softmax.tree_mask, num_tokens, cu_q_lens.clamp(0, len(query)).diff())
    serve = ragged.attend if query.is_cuda else host.attend_ragged
    return serve(plan, query, tensors, cu_q_lens, softmax.sinks, out, tree)


def _attend_to_dense(
    *given: torch.Tensor, causal: bool = True, sm_scale: float | None = None, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = DenseTensors._make(given)
    plan = dense_plan(tensors, causal, sm_scale)
    if out is not None:
        inputs = tensors._asdict()
        check_out(out, inputs.pop("query"), plan.spec, **inputs)
    return (dense_prompts if tensors.query.is_cuda else eager_ragged).attend(plan, tensors, out)


def _write_latents(*given: Any, unique_slots: bool = False) -> None:
    kv_c, k_pe, kv_cache, slot_mapping, *stored = given
    plan, tensors = latent_write_plan(kv_c, k_pe, LatentPages(kv_cache, *stored), slot_mapping)
    if kv_cache.is_cuda:
        latents.write(plan, tensors, unique_slots)
    else:
        host.write(plan, tensors)


def _rope_latents(*given: Any, unique_slots: bool = False) -> None:
    positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache, *stored = given
    rope = RopeInputs(q_pe, positions, cos_sin_cache, is_neox)
    plan, tensors = latent_rope_plan(rope, kv_c, k_pe, LatentPages(kv_cache, *stored), slot_mapping)
    if kv_cache.is_cuda:
        rotated = latents.rotate_and_write(plan, tensors, rope, unique_slots)
    else:
        rotated = rotate(q_pe, *rope[1:]), rotate(tensors.value, *rope[1:])
        host.write(plan.write, tensors._replace(value=rotated[1]))
    for x, turned in zip((q_pe, tensors.value), rotated, strict=True):
        x.copy_(turned)


def _gather_latents(*given: Any) -> None:
    src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype, scale, *starts = given
    pages, rows = LatentPages(src_cache, kv_cache_dtype, scale), GatheredRows(dst, token_to_seq, num_tokens)
    plan, tensors = latent_gather_plan(pages, rows, block_table, cu_seq_lens, *(starts or (None,)))
    (reads if src_cache.is_cuda else host).gather_rows(plan, tensors)


def _attend_to_latents(
    q_nope: torch.Tensor, q_pe: torch.Tensor, *given: Any, out: torch.Tensor | None = None, **softmax: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    kv_cache, block_table, seq_lens, *stored = given
    query, pages = LatentQuery(q_nope, q_pe), LatentPages(kv_cache, *stored)
    plan, tensors = latent_attention_plan(query, pages, block_table, seq_lens, SoftmaxOptions(**softmax))
    if out is not None:
        check_latent_out(out, query, plan, pages, block_table=block_table, seq_lens=seq_lens)
    joined = query.joined
    rows, into = (x if x is None or x.ndim == 4 else x[:, None] for x in (joined, out))
    results = (latents if q_nope.is_cuda else host).attend(plan, rows, tensors, None, into)
    return results[0].view(q_nope.shape), results[1].view(q_nope.shape[:-1])


def _attend_ragged_to_latents(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    *given: Any,
    out: torch.Tensor | None = None,
    max_q_len: int | None = None,
    **softmax: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    kv_cache, block_table, seq_lens, cu_q_lens, *stored = given
    query, pages = LatentQuery(q_nope, q_pe), LatentPages(kv_cache, *stored)
    sequences = block_table, seq_lens, cu_q_lens
    plan, tensors = latent_ragged_plan(query, pages, sequences, SoftmaxOptions(**softmax), max_q_len)
    if out is not None:
        read = {"block_table": block_table, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens}
        check_latent_out(out, query, plan.attention, pages, **read)
    serve = latents if q_nope.is_cuda else host
    return serve.attend_ragged(plan, query.joined, tensors, cu_q_lens, None, out)


def _into(attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
    """Attention that stores its results in its first argument and returns the log-sum-exp."""

    def run(out: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return attend(*args, **options, out=out)[1]

    return run


def _with_tuple(kernel: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        results = kernel(*args, **options)
        return results if isinstance(results, tuple) else () if results is None else (results,)

    return run


def _fake_of(operation: torch._ops.OpOverload, results: Callable[..., Any]) -> Callable[..., Any]:
    """The fake of an operation, which returns what `results` makes of its arguments. It refuses other devices."""
    names = [argument.name for argument in operation._schema.arguments]

    def fake(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options
        if "key_cache" in given:
            check_devices(**tensors_of(given))
        elif first := next((name for name in ("kv_cache", "src_cache", "query") if name in given), None):
            check_same_device(first, given[first], tensors_of(given))
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

    def dense(name: str, cache: torch.Tensor, part: KVCacheDType) -> torch.Tensor:
        row_bytes, apart = cache.shape[3] * cache.dtype.itemsize, has_scale_tensors(k_scale)
        head_size = row_head_size(name, row_bytes, part, scales_apart=apart)
        return cache.new_empty((num_seqs, max_len, cache.shape[2], head_size), dtype=gathered_dtype(dtype, stored))

    keys, values = stored.parts
    return dense("key_cache", key_cache, keys), dense("value_cache", value_cache, values)


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
    head_size_v = row_head_size("value_cache", row_bytes, stored.parts[1], scales_apart=apart)
    out = query.new_empty((*query.shape[:-1], head_size_v))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _attended_into(query: torch.Tensor, **_: Any) -> torch.Tensor:
    """Uninitialized log-sum-exp of attention that stores its results in `out`."""
    return query.new_empty(query.shape[:-1], dtype=torch.float32)


def _attended_to_latents(q_nope: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized results of attention over latents."""
    return q_nope.new_empty(q_nope.shape), q_nope.new_empty(q_nope.shape[:-1], dtype=torch.float32)


def _attended_to_latents_into(q_nope: torch.Tensor, **_: Any) -> torch.Tensor:
    """Uninitialized log-sum-exp of such attention that stores its results in `out`."""
    return q_nope.new_empty(q_nope.shape[:-1], dtype=torch.float32)


def _attended_to_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q_lens: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized results of attention over dense keys and values."""
    check_same_device("query", query, {"key": key, "value": value, "cu_q_lens": cu_q_lens})
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _merged(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized results of a merge."""
    merge.check(outs, lses)
    return torch.empty_like(outs[0], memory_format=torch.contiguous_format), lses[0].new_empty(lses[0].shape)


def _register(
    name: str, arguments: str, returns: str, kernel: Callable[..., Any], what: str, results: Callable[..., Any]
) -> None:
    """Registers an operation: its schema, its kernel on both devices, what refuses gradients, and its fake."""
    _LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    operation = getattr(torch.ops.kvjax, name).default
    tensors = [x for x in operation._schema.arguments if "Tensor" in str(x.type)]
    written = tuple(i for i, x in enumerate(tensors) if x.alias_info is not None and x.alias_info.is_write)
    IMPLEMENTATIONS[getattr(torch.ops.kvjax, name)] = OperationKernel(_with_tuple(kernel), written)
    kernel = marks_writes(operation)(kernel)
    _LIBRARY.impl(name, kernel, "CPU")
    _LIBRARY.impl(name, kernel, "CUDA")
    _LIBRARY.impl(name, without_gradient(operation, what), "Autograd", with_keyset=True)
    torch.library.register_fake(f"kvjax::{name}", _fake_of(operation, results), lib=_LIBRARY)


_WRITTEN = "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping"
_READ = "Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens"
_STORED = "str kv_cache_dtype, Tensor k_scale, Tensor v_scale, *, str v_scale_layout='linear'"
_STORED_APART = "str kv_cache_dtype, Tensor(c!) k_scale, Tensor(d!) v_scale, *, str v_scale_layout='linear'"
_SOFTMAX = (
    "float? sm_scale=None, int? sliding_window=None, float? logits_soft_cap=None, Tensor? sinks=None,"
    " bool batch_invariant=False"
)
_TREE = "Tensor? tree_mask=None"
_LIMITS = "SymInt? max_q_len=None, SymInt? max_prompts=None, SymInt? decode_q_len=None"
_BOTH = "(Tensor, Tensor)"


def _register_write(
    name: str, before: str, after: str, returns: str, kernel: Callable[..., Any], results: Callable[..., Any]
) -> None:
    """Registers an operation that mutates caches, and that which mutates tensors of scales too."""
    for scales, stored, mutates_scales in (("", _STORED, False), ("_per_token_head", _STORED_APART, True)):
        run, arguments = functools.partial(kernel, mutates_scales), f"{before}, {stored}, {after}"
        _register(f"{name}{scales}", arguments, returns, run, "a write into a cache", results)


def _register_attention(
    name: str,
    arguments: str,
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    results: tuple[Callable[..., Any], Callable[..., Any]] = (_attended, _attended_into),
    what: str = "attention over a cache",
) -> None:
    """Registers attention, and that which stores its results in a given tensor."""
    both, lse = results
    _register(name, arguments, _BOTH, kernel, what, both)
    _register(f"{name}_out", f"Tensor(a!) out, {arguments}", "Tensor", _into(kernel), what, lse)


_register_write("reshape_and_cache_flash", _WRITTEN, "bool unique_slots=False", "()", _write, _written)
_register_write(
    "rope_and_cache",
    f"Tensor query, {_WRITTEN}, Tensor positions, Tensor cos_sin_cache",
    "bool is_neox=True, bool unique_slots=False",
    "Tensor",
    _rope,
    _rotated,
)
_register("gather_kv", f"{_READ}, {_STORED}, ScalarType? dtype=None", _BOTH, _gather, "a gather", _gathered)
_register_attention("paged_attention", f"Tensor query, {_READ}, {_STORED}, {_SOFTMAX}, {_TREE}", _attend)
_register_attention(
    "ragged_paged_attention",
    f"Tensor query, {_READ}, Tensor cu_q_lens, {_STORED}, {_SOFTMAX}, {_LIMITS}, bool query_quantization=False,"
    f" {_TREE}, bool return_lse=True",
    _attend_ragged,
)
_register_attention(
    "ragged_attention",
    "Tensor query, Tensor key, Tensor value, Tensor cu_q_lens, Tensor cu_kv_lens, *, bool causal=True,"
    " float? sm_scale=None",
    _attend_to_dense,
    (_attended_to_dense, _attended_into),
    "attention",
)
_register("merge_attention_states", "Tensor[] outs, Tensor[] lses", _BOTH, merge.merge, "a merge of states", _merged)

_OF_LATENTS = "Tensor q_nope, Tensor q_pe, Tensor kv_cache, Tensor block_table, Tensor seq_lens"
_LATENTS = "str kv_cache_dtype, Tensor scale"
_LATENT_SOFTMAX = _SOFTMAX.replace(" Tensor? sinks=None,", "")
_TO_LATENTS = _attended_to_latents, _attended_to_latents_into

_register(
    "concat_and_cache_mla",
    f"Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, {_LATENTS}, *, bool unique_slots=False",
    "()",
    _write_latents,
    "a write into a cache",
    _written,
)
_register(
    "concat_and_cache_mla_rope_fused",
    "Tensor positions, Tensor(a!) q_pe, Tensor(b!) k_pe, Tensor kv_c, Tensor cos_sin_cache, bool is_neox,"
    f" Tensor slot_mapping, Tensor(c!) kv_cache, {_LATENTS}, *, bool unique_slots=False",
    "()",
    _rope_latents,
    "a write into a cache",
    _written,
)
_register(
    "gather_and_maybe_dequant_cache",
    "Tensor src_cache, Tensor(a!) dst, Tensor block_table, Tensor cu_seq_lens, Tensor? token_to_seq, SymInt num_tokens,"
    f" {_LATENTS}, Tensor? seq_starts=None",
    "()",
    _gather_latents,
    "a gather",
    _written,
)
_register_attention(
    "mla_paged_attention", f"{_OF_LATENTS}, {_LATENTS}, *, {_LATENT_SOFTMAX}", _attend_to_latents, _TO_LATENTS
)
_register_attention(
    "mla_ragged_paged_attention",
    f"{_OF_LATENTS}, Tensor cu_q_lens, {_LATENTS}, *, {_LATENT_SOFTMAX}, SymInt? max_q_len=None",
    _attend_ragged_to_latents,
    _TO_LATENTS,
)
