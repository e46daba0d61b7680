"""`ragged_attention` of CUDA tensors: where kernels serve it, one makes tiles of keys and values, and one attends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvjax import UnsupportedError, kernels
from kvjax.ops.options import most_splits
from kvjax.ops.route import Query, route
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.arguments.plan import DensePlan, DenseTensors
from kvjax_torch.calls import choosing
from kvjax_torch.cuda import ragged_step
from kvjax_torch.cuda.prompt_kernels import ROW_ALIGNMENT
from kvjax_torch.eager import merge, ragged
from kvjax_torch.launch import running


def attend(
    plan: DensePlan, tensors: DenseTensors, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_attention` of CUDA tensors that `plan` describes; stores results in `out` if it is given.

    Raises:
      UnsupportedError: no kernel serves the call, and a CUDA graph is captured; or int32 does not index the arrays.
    """
    query, key, value, *_ = tensors
    device = query.device
    if (reason := _why_no_kernel(plan, device)) is not None:
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "ragged_attention without the prompt kernel reads cu_q_lens and cu_kv_lens on the host, which cannot"
                f" wait while a CUDA graph is captured; {reason}"
            )
        return ragged.attend(plan, tensors, out)
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty((num_tokens, num_heads, plan.spec.head_size_v)) if out is None else out
    lse = query.new_empty((num_tokens, num_heads), dtype=torch.float32)
    if not (num_tokens and key.shape[0]):
        return out.zero_(), lse.fill_(-torch.inf)
    sizes = {"query": num_tokens * num_heads * max(plan.spec.head_sizes)}
    for name, rows in (("key", key), ("value", value)):  # as tiles, which take no less than a copy
        sizes[name] = rows.shape[1] * _head_rows(rows.shape[0]) * rows.shape[2]
    for name, size in sizes.items():
        if size > choosing.INT32_MAX:
            raise UnsupportedError(f"{name}: got {size} elements, expected at most {choosing.INT32_MAX}")
    _launch(plan, tensors, (_run(key), _run(value)), out, lse)
    return out, lse


def compile_kernels(calls: Sequence[tuple[DensePlan, DenseTensors]]) -> None:
    """Compiles the kernels of calls of any lengths, several at once; calls that torch serves have none."""
    every = list[kernels.AnyCount]()
    for plan, (query, key, value, *_) in calls:
        if _why_no_kernel(plan, query.device) is None:
            rows = ragged_step.runs(query, kernels.PROMPT_ROWS)
            every += _kernels_of(plan, rows, (_run(key), _run(value)))
    if every:
        running.compile_all(list(dict.fromkeys(every)), calls[0][1].query.device)


@functools.lru_cache(maxsize=1024)
def _why_no_kernel(plan: DensePlan, device: torch.device) -> str | None:
    asked = Query(numpy_dtype(plan.dtype), plan.sm_scale > 0, has_prompts=True)
    return route(plan.spec, asked, choosing.target_of(device)).why_no_prompt_kernel


class _Kernels(NamedTuple):
    """The kernels of a call.

    Attributes:
      tiles: makes tiles.
      whole: attends to whole rows.
      divided: attends to splits of them.
    """

    tiles: kernels.AnyCount
    whole: kernels.AnyCount
    divided: kernels.AnyCount


def _launch(
    plan: DensePlan,
    tensors: DenseTensors,
    dense: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Runs the kernels; `dense` are keys and values as `_run` has them."""
    query, spec = tensors.query, plan.spec
    num_rows, num_tokens, num_copied = query.shape[0], tensors.key.shape[0], dense[0].shape[0]
    rows = ragged_step.runs(query, kernels.PROMPT_ROWS)
    own = _kernels_of(plan, rows, dense)
    running.compile_once(own, query.device)

    head_rows = _head_rows(num_tokens)
    tiles = [query.new_empty(spec.num_kv_heads * head_rows * size) for size in spec.head_sizes]
    bounds = [choosing.int32(x, 0, choosing.INT32_MAX) for x in tensors[3:]]
    num_seqs = bounds[0].shape[0] - 1
    prompts = query.new_empty(kernels.ragged_prompts_size(num_seqs), dtype=torch.int32)
    of_tiles = num_seqs, num_rows, num_tokens, num_copied, head_rows, int(plan.causal)
    running.run(running.Call(own.tiles, of_tiles, (*dense, *bounds, *tiles, prompts), num_copied))

    splits = _splits(plan, query, num_tokens)
    results = out, lse
    if splits > 1:
        results = lse.new_empty((splits * num_rows, *out.shape[1:])), lse.new_empty((splits * num_rows, lse.shape[1]))
    elif out.data_ptr() % ROW_ALIGNMENT:
        results = torch.empty_like(out), lse
    kernel, counts = own.divided if splits > 1 else own.whole, (num_seqs, rows.shape[0], head_rows, splits)
    running.run(running.Call(kernel, counts, (rows, *tiles, prompts, *results), 1))
    if splits > 1:
        merged = merge.merge(*(list(x.unflatten(0, (splits, num_rows)).unbind()) for x in results))
        out.copy_(merged[0])
        lse.copy_(merged[1])
    elif results[0] is not out:
        out.copy_(results[0])


def _head_rows(num_tokens: int) -> int:
    """The rows of a head's tiles: the prompt kernel reads whole tiles from any group of rows on."""
    return -(-num_tokens // kernels.PROMPT_ALIGNMENT) * kernels.PROMPT_ALIGNMENT + kernels.PROMPT_TOKENS


def _run(x: torch.Tensor) -> torch.Tensor:
    """Keys or values as kernels read them, `[num_tokens, num_heads, size]`, 16 bytes at once.

    This is a copy if their strides or alignment do not allow that, if they are further apart than int32 indexes, or if
    there are fewer than a program takes: then zeros follow.
    """
    num_tokens, num_heads, size = x.shape
    token_stride, head_stride, stride = x.stride()
    reach = (num_heads - 1) * head_stride + size
    places = x.data_ptr() | token_stride * x.element_size() | head_stride * x.element_size()
    is_near = reach <= token_stride <= choosing.INT32_MAX // max(num_tokens, kernels.TILE_TOKENS)
    if stride != 1 or not is_near or places % kernels.MAX_VECTOR_BYTES:
        x = x.clone(memory_format=torch.contiguous_format)
        token_stride, head_stride, _ = x.stride()
    if num_tokens >= kernels.TILE_TOKENS:
        return x
    # As far apart as they are, for kernels are compiled for strides.
    padded = x.new_zeros(kernels.TILE_TOKENS * token_stride)
    padded = padded.as_strided((kernels.TILE_TOKENS, num_heads, size), (token_stride, head_stride, 1))
    padded[:num_tokens] = x
    return padded


def _splits(plan: DensePlan, query: torch.Tensor, num_tokens: int) -> int:
    num_rows = query.shape[0]
    most = most_splits(num_rows, plan.num_heads, plan.spec.head_size_v)
    return kernels.prompt_splits(
        plan.spec,
        choosing.target_of(query.device),
        num_prompts=1,
        max_q_len=num_rows,
        num_heads=plan.num_heads,
        num_tokens=num_tokens,
        max_splits=most if num_rows >= kernels.PROMPT_ROWS else 1,
    )


def _kernels_of(plan: DensePlan, rows: torch.Tensor, dense: tuple[torch.Tensor, torch.Tensor]) -> _Kernels:
    """The kernels of a call whose query is `rows` and whose keys and values are `dense`, as kernels read them."""
    with choosing.one_at_a_time:
        strides = tuple((x.stride(0), x.stride(1)) for x in dense)
        return _kernels(plan, rows.stride(0), strides, rows.device)


@functools.lru_cache(maxsize=1024)
def _kernels(
    plan: DensePlan, token_stride: int, strides: tuple[tuple[int, int], ...], device: torch.device
) -> _Kernels:
    spec, dtype, target = plan.spec, numpy_dtype(plan.dtype), choosing.target_of(device)
    query = kernels.RowMemory(dtype, token_stride, ROW_ALIGNMENT)
    kind = kernels.RaggedKind(spec, query, plan.num_heads, plan.sm_scale, is_divided=False)
    rows = (kernels.HeadRows(dtype, size, *each) for size, each in zip(spec.head_sizes, strides, strict=True))
    divided = dataclasses.replace(kind, is_divided=True)
    return _Kernels(
        kernels.tiles_kernel(spec.num_kv_heads, *rows),
        kernels.ragged_kernel(kind, target),
        kernels.ragged_kernel(divided, target),
    )
