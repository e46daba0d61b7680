"""Attention of kinds that were checked and planned before, which is launched without either, as writes are (`writes`).

A model repeats the same call in every layer and step with other contents. After a call was checked, planned and
launched, calls of its kind, which differ from it only in addresses, need two launches. A step whose block table has
another shape is of another kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import kvjax
from kvjax import KVCacheDType, kernels
from kvjax_torch.arguments.attention import attention_plan
from kvjax_torch.arguments.dtypes import dtype_name, order_name
from kvjax_torch.arguments.plan import Encoding, ReadTensors, SoftmaxOptions
from kvjax_torch.calls import arrays, attending
from kvjax_torch.cuda import reads
from kvjax_torch.launch import running
from kvjax_torch.launch.loading import Kernel

ALIGNMENT = 64
"""Elements of 4 bytes that arrays of the workspace begin at multiples of: as aligned as torch's own allocations."""

NUM_OUTPUTS = 5
"""The last arrays of the first kernel: the results and the workspace."""

NUMBERS = (float, int, type(None))
"""Types of a softmax's numbers that need no conversion."""

_known: dict[Any, _Known | None] = {}


class _Launch(NamedTuple):
    """A compiled kernel, its packed counts and its number of programs."""

    kernel: Kernel
    counts: tuple[int, ...]
    num_programs: int

    @classmethod
    def of(cls, call: running.Call) -> _Launch:
        kernel, num_programs = running.launcher(call.kernel, call.device)
        return cls(kernel, (*kernels.packed(call.counts),), num_programs(call.amount))


class _Known(NamedTuple):
    """The launches of a kind of call.

    Attributes:
      decode: of the first kernel.
      merge: of the second one.
      out_shape: of the result.
      starts: in the workspace, of `partial`, `partial_lse` and `spans`, and its end; elements.
    """

    decode: _Launch
    merge: _Launch
    out_shape: tuple[int, ...]
    starts: tuple[int, int, int, int]


class AttentionCall(NamedTuple):
    """A call of `paged_attention` of plain tensors, arguments as callers give them; without a tree or `out`."""

    query: torch.Tensor
    tensors: ReadTensors
    encoding: tuple[str | KVCacheDType, str]
    softmax: SoftmaxOptions


type Results = tuple[torch.Tensor, torch.Tensor]


def attend(call: AttentionCall, serve: Callable[[], Results]) -> Results:
    """The results of a call on CUDA tensors, which `serve` serves if it is not of a known kind."""
    addresses = _addresses(call)
    kind = None if kvjax.is_checked() else _kind(call, addresses)
    if kind is None:
        return serve()
    if kind in _known:
        known = _known[kind]
        return serve() if known is None else _launch(known, call, addresses)
    results = serve()
    if len(_known) >= running.REMEMBERED:
        _known.clear()
    _known[kind] = _planned(call, addresses)
    return results


def _addresses(call: AttentionCall) -> tuple[int, ...]:
    """Where the arrays are that the first kernel reads, in its order."""
    key_cache, value_cache, block_table, seq_lens, k_scale, v_scale = call.tensors
    sinks = call.softmax.sinks
    addresses = (
        seq_lens.data_ptr(),
        block_table.data_ptr(),
        call.query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        k_scale.data_ptr(),
        v_scale.data_ptr(),
    )
    return addresses if sinks is None else (*addresses, sinks.data_ptr())


def _kind(call: AttentionCall, addresses: tuple[int, ...]) -> Any:
    """All that planning depends on; None if it depends on more, or would refuse the call."""
    query, (key_cache, value_cache, block_table, seq_lens, k_scale, v_scale), encoding, softmax = call
    sm_scale, window, soft_cap, sinks, batch_invariant, _ = softmax
    device = key_cache.get_device()
    if not (
        batch_invariant is False
        and type(sm_scale) in NUMBERS
        and type(window) in NUMBERS
        and type(soft_cap) in NUMBERS
        and isinstance(encoding[0], str)
        and isinstance(encoding[1], str)
        and k_scale.numel() == v_scale.numel() == 1
        and device == query.get_device() == value_cache.get_device() == block_table.get_device()
        and device == seq_lens.get_device() == k_scale.get_device() == v_scale.get_device()
        and (sinks is None or device == sinks.get_device())
    ):
        return None
    # Where both are in the same pages, kernels are compiled for how far apart.
    apart = addresses[4] - addresses[3]
    is_one = key_cache.ndim > 0 and 0 < apart < key_cache.stride(0) * key_cache.element_size()
    return (
        device,
        encoding,
        (type(sm_scale), sm_scale, type(window), window, type(soft_cap), soft_cap),
        None if sinks is None else (sinks.dtype, sinks.shape, sinks.stride()),
        query.dtype,
        query.shape,
        query.stride(),
        addresses[2] % arrays.PAGE_ALIGNMENT,
        key_cache.dtype,
        key_cache.shape,
        key_cache.stride(),
        addresses[3] % arrays.PAGE_ALIGNMENT,
        value_cache.dtype,
        value_cache.shape,
        value_cache.stride(),
        addresses[4] % arrays.PAGE_ALIGNMENT,
        apart if is_one else None,
        block_table.dtype,
        block_table.shape,
        block_table.stride(),
        seq_lens.dtype,
        seq_lens.shape,
        seq_lens.stride(),
        k_scale.dtype,
        v_scale.dtype,
    )


def _planned(call: AttentionCall, addresses: tuple[int, ...]) -> _Known | None:
    """What a call that was served launches; None if that is not just two kernels over the caller's arrays."""
    query, tensors, encoding, softmax = call
    plan = attention_plan(query, tensors, Encoding(dtype_name(encoding[0]), order_name(encoding[1])), softmax)
    rows = query if query.ndim == 4 else query[:, None]
    parts = reads.parts_of(plan, rows.shape[0], tensors)
    has_row_scales = any(part.info.has_row_scales for part in plan.cache.spec.dtype.parts)
    if len(parts) != 1 or has_row_scales:
        return None
    decode, merge = attending.attention_calls(plan, rows, tensors, softmax.sinks)
    if [tensor.data_ptr() for tensor in decode.tensors[:-NUM_OUTPUTS]] != [*addresses]:
        return None
    out, _, *between = decode.tensors[-NUM_OUTPUTS:]
    ends = [*itertools.accumulate((-(-array.numel() // ALIGNMENT) * ALIGNMENT for array in between), initial=0)]
    starts = ends[0], ends[1], ends[2], ends[3]
    return _Known(_Launch.of(decode), _Launch.of(merge), (*query.shape[:-1], out.shape[-1]), starts)


def _launch(known: _Known, call: AttentionCall, addresses: tuple[int, ...]) -> Results:
    query, (decode, merge, out_shape, starts) = call.query, known
    out, lse = query.new_empty(out_shape), query.new_empty(out_shape[:-1], dtype=torch.float32)
    workspace = query.new_empty(starts[3], dtype=torch.float32)
    start = workspace.data_ptr()
    between = start, start + 4 * starts[1], start + 4 * starts[2]
    results = out.data_ptr(), lse.data_ptr()
    decode.kernel((*decode.counts, *addresses, *results, *between), decode.num_programs)
    merge.kernel((*merge.counts, addresses[0], *addresses[7:], *between, *results), merge.num_programs)
    return out, lse
