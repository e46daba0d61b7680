"""Writes of CUDA tensors, launched on torch's current stream.

A serving loop repeats the same write with other contents, and its kernel takes a microsecond, so the host has to keep
up. After a write was checked, planned and launched, writes of the same kind, which differ from it only in addresses and
in the number of tokens, are launched without either.

A launched call never has the host wait for the GPU, with two exceptions: in `kvjax.checked()` every call reads values
back, and the first use of a float scale on a device copies it there (`ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import kvjax
from kvjax import kernels
from kvjax_torch.arguments.checks import check_tensors
from kvjax_torch.arguments.plan import Encoding, ReadTensors, RopeInputs, WritePlan, WriteTensors
from kvjax_torch.arguments.reads import gather_plan
from kvjax_torch.arguments.writes import rope_plan, write_plan
from kvjax_torch.calls import arrays, choosing, gathering, writing
from kvjax_torch.eager.rotation import rotate
from kvjax_torch.launch import running
from kvjax_torch.launch.loading import Kernel

_MOST_ROW_ALIGNMENT = arrays.ROW_ALIGNMENTS[0]
_PAGE_ALIGNMENT = arrays.PAGE_ALIGNMENT

_known_writes: dict[Any, _KnownWrite] = {}


class _KnownWrite(NamedTuple):
    """The launch of a kind of write.

    Attributes:
      kernel: the compiled kernel.
      num_programs: the number of programs as a function of the number of tokens.
      counts: the kernel's packed counts, whose lower half is to hold the number of tokens and is 0.
      num_slots: slots of the cache.
    """

    kernel: Kernel
    num_programs: Callable[[int], int]
    counts: int
    num_slots: int


def write(given: tuple[torch.Tensor, ...], encoding: tuple[str, str], unique_slots: bool) -> None:
    """`reshape_and_cache_flash` of CUDA tensors; a write of a known kind is launched without being checked again.

    Takes the fields of `WriteTensors` and of `Encoding` as plain tuples, since those are made faster.
    """
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale = given
    device, num_tokens = key_cache.get_device(), slot_mapping.numel()
    try:
        key_shape, value_shape = key.shape, value.shape
        addresses = (
            slot_mapping.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            k_scale.data_ptr(),
            v_scale.data_ptr(),
        )
        # All that planning depends on, except counts and the devices of tensors other than `key_cache`.
        kind = (
            device,
            encoding,
            unique_slots,
            key.dtype,
            key_shape[-2],
            key_shape[-1],
            key.stride(),
            addresses[1] % _MOST_ROW_ALIGNMENT,
            value.dtype,
            value_shape[-2],
            value_shape[-1],
            value.stride(),
            addresses[2] % _MOST_ROW_ALIGNMENT,
            key_cache.dtype,
            key_cache.shape,
            key_cache.stride(),
            addresses[3] % _PAGE_ALIGNMENT,
            value_cache.dtype,
            value_cache.shape,
            value_cache.stride(),
            addresses[4] % _PAGE_ALIGNMENT,
            addresses[4] - addresses[3],  # on which it depends whether they overlap
            slot_mapping.dtype,
            slot_mapping.stride(),
            k_scale.dtype,
            k_scale.stride(),
            v_scale.dtype,
            v_scale.stride(),
        )
    except IndexError:  # too few dimensions, which planning refuses
        kind = None
    except RuntimeError:  # no address or no shape, as of sparse and nested tensors
        check_tensors(**WriteTensors._make(given)._asdict())
        raise
    if (
        kind is not None
        and 0 < num_tokens <= key_shape[0]
        and num_tokens <= value_shape[0]
        and k_scale.numel() == v_scale.numel() == 1
        and device == key.get_device() == value.get_device() == value_cache.get_device()
        and device == slot_mapping.get_device() == k_scale.get_device() == v_scale.get_device()
        and not kvjax.is_checked()
        and (known := _known_writes.get(kind)) is not None
    ):
        if num_tokens >= kernels.SEARCHED and not unique_slots:
            slot_mapping = writing.only_last_tokens(slot_mapping, known.num_slots)
            addresses = slot_mapping.data_ptr(), *addresses[1:]
        known.kernel((known.counts | num_tokens, *addresses), known.num_programs(num_tokens))
        return
    running.check_capability(device)
    tensors = WriteTensors._make(given)
    _write_planned(write_plan(tensors, Encoding._make(encoding)), kind, addresses, tensors, unique_slots)


def _write_planned(
    plan: WritePlan, kind: Any, addresses: tuple[int, ...], tensors: WriteTensors, unique_slots: bool
) -> None:
    """Runs a write that `plan` describes, and remembers its kind if the next of the kind needs only a launch.

    That holds if the kernel was launched on the caller's tensors themselves, none of them copied.
    """
    with choosing.one_at_a_time:
        call = writing.write_call(plan, tensors, unique_slots)
    launcher = running.run(call)
    # A kind does not say where the scales of each token and head are.
    has_row_scales = any(part.info.has_row_scales for part in plan.cache.spec.dtype.parts)
    has_one_scale = tensors.k_scale.numel() == tensors.v_scale.numel() == 1 and not has_row_scales
    # Slots are left out: those of a large write are searched, which makes others of them.
    is_uncopied = has_one_scale and [tensor.data_ptr() for tensor in call.tensors[1:]] == [*addresses[1:]]
    # A single slot is contiguous whatever its stride, but more slots with that stride would not be.
    if launcher is not None and is_uncopied and tensors.slot_mapping.stride() == (1,):
        if len(_known_writes) >= running.REMEMBERED:
            _known_writes.clear()
        _, last_slot = call.counts
        [counts] = kernels.packed((0, last_slot))
        _known_writes[kind] = _KnownWrite(*launcher, counts, last_slot + 1)


def rotate_and_write(tensors: WriteTensors, rope: RopeInputs, encoding: Encoding, unique_slots: bool) -> torch.Tensor:
    """`rope_and_cache` of CUDA tensors; returns rotated queries.

    For float32 and odd head sizes, torch rotates and the kernel of `reshape_and_cache_flash` writes.
    """
    running.check_capability(tensors.key_cache.get_device())
    plan = rope_plan(tensors, rope, encoding)
    if not writing.has_rope(plan, rope.query):
        rotated, key = (rotate(x, *rope[1:]) for x in (rope.query, tensors.key))
        write(tensors._replace(key=key), encoding, unique_slots)
        return rotated
    with choosing.one_at_a_time:
        call, rotated = writing.rope_call(plan, tensors, rope, unique_slots)
    running.run(call)
    return rotated


def compile_writes_and_gathers(
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    tensors: ReadTensors,
    slot_mapping: torch.Tensor,
    encoding: Encoding,
    unique_slots: bool,
    dtype: torch.dtype | None,
) -> None:
    """Compiles the kernels of writes of keys and values like each of `rows`, and of gathers; several at once."""
    key_cache, value_cache, _, _, k_scale, v_scale = tensors
    running.check_capability(key_cache.get_device())
    every = []
    with choosing.one_at_a_time:
        for key, value in rows:
            written = WriteTensors(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
            every.append(writing.write_call(write_plan(written, encoding), written, unique_slots).kernel)
        gather_of = gather_plan(tensors, encoding, dtype)
        every.append(gathering.gather_call(gather_of, tensors).kernel)
    running.compile_all(every, key_cache.device)
