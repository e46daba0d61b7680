"""The operations on CUDA tensors, launched on torch's current stream.

A serving loop repeats the same write with other contents, and its kernel takes a microsecond, so the host has to keep
up. After a write was checked, planned and launched, writes of the same kind, which differ from it only in addresses and
in the number of tokens, are launched without either.

A launched call never has the host wait for the GPU, with two exceptions: in `kvjax.checked()` every call reads values
back, and the first use of a float scale on a device copies it there (`ops`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import kvjax
from kvjax import UnsupportedError, kernels
from kvjax_torch import calls, dense, launch
from kvjax_torch.arguments import check_tensors, gather_plan, rope_plan, write_plan
from kvjax_torch.plan import AttentionPlan, Encoding, GatherPlan, ReadTensors, WritePlan, WriteTensors
from kvjax_torch.rotation import rotate

MIN_COMPUTE_CAPABILITY = 9

_MOST_ROW_ALIGNMENT = calls.ROW_ALIGNMENTS[0]
_PAGE_ALIGNMENT = calls.PAGE_ALIGNMENT

_REMEMBERED = 4096
"""The most kinds of calls that are remembered; a model has a few, and one more for each size of cache."""

one_at_a_time = threading.Lock()
"""Held by calls that choose a kernel, so that threads that make the same first call choose the same one."""

_known_writes: dict[Any, _KnownWrite] = {}


class _KnownWrite(NamedTuple):
    """The launch of a kind of write.

    Attributes:
      kernel: the compiled kernel.
      num_programs: the number of programs as a function of the number of tokens.
      counts: the kernel's packed counts, whose lower half is to hold the number of tokens and is 0.
      num_slots: slots of the cache.
    """

    kernel: launch.Kernel
    num_programs: Callable[[int], int]
    counts: int
    num_slots: int


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    v_scale_layout: str,
    unique_slots: bool,
) -> None:
    """`reshape_and_cache_flash` of CUDA tensors; a write of a known kind is launched without being checked again."""
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
        kind = _write_kind(
            device,
            key_shape,
            value_shape,
            addresses,
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            kv_cache_dtype,
            k_scale,
            v_scale,
            v_scale_layout,
            unique_slots,
        )
    except IndexError:  # too few dimensions, which planning refuses
        kind = None
    except RuntimeError:  # no address or no shape, as of sparse and nested tensors
        check_tensors(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
        check_tensors(k_scale=k_scale, v_scale=v_scale)
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
            slot_mapping = calls.only_last_tokens(slot_mapping, known.num_slots)
            addresses = slot_mapping.data_ptr(), *addresses[1:]
        known.kernel((known.counts | num_tokens, *addresses), known.num_programs(num_tokens))
        return
    _check_capability(device)
    tensors = WriteTensors(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    plan = write_plan(*tensors[:5], kv_cache_dtype, k_scale, v_scale, v_scale_layout)
    _write_planned(plan, kind, addresses, tensors, unique_slots)


def _write_kind(
    device: int,
    key_shape: torch.Size,
    value_shape: torch.Size,
    addresses: tuple[int, ...],
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    v_scale_layout: str,
    unique_slots: bool,
) -> tuple[Any, ...]:
    """All that planning a write depends on except the devices of other tensors than `key_cache`, and counts."""
    return (
        device,
        kv_cache_dtype,
        v_scale_layout,
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


def _write_planned(
    plan: WritePlan, kind: Any, addresses: tuple[int, ...], tensors: WriteTensors, unique_slots: bool
) -> None:
    """Runs a write that `plan` describes, and remembers its kind if the next of the kind needs only a launch.

    That holds if the kernel was launched on the caller's tensors themselves, none of them copied.
    """
    with one_at_a_time:
        call = calls.write_call(plan, tensors, unique_slots)
    launcher = run(call)
    # A kind does not say where the scales of each token and head are.
    is_per_token_head = plan.cache.spec.dtype.is_per_token_head
    has_one_scale = tensors.k_scale.numel() == tensors.v_scale.numel() == 1 and not is_per_token_head
    # Slots are left out: those of a large write are searched, which makes others of them.
    is_uncopied = has_one_scale and [tensor.data_ptr() for tensor in call.tensors[1:]] == [*addresses[1:]]
    # A single slot is contiguous whatever its stride, but more slots with that stride would not be.
    if launcher is not None and is_uncopied and tensors.slot_mapping.stride() == (1,):
        if len(_known_writes) >= _REMEMBERED:
            _known_writes.clear()
        _, last_slot = call.counts
        [counts] = kernels.packed((0, last_slot))
        _known_writes[kind] = _KnownWrite(*launcher, counts, last_slot + 1)


def rotate_and_write(
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
    v_scale_layout: str,
    is_neox: bool,
    unique_slots: bool,
) -> torch.Tensor:
    """`rope_and_cache` of CUDA tensors; returns rotated queries.

    For float32 and odd head sizes, torch rotates and the kernel of `reshape_and_cache_flash` writes.
    """
    _check_capability(key_cache.get_device())
    tensors = query, key, value, key_cache, value_cache, slot_mapping, positions, cos_sin_cache
    plan = rope_plan(*tensors, kv_cache_dtype, k_scale, v_scale, v_scale_layout, is_neox)
    if not calls.has_rope(plan, query):
        turned = [rotate(x, positions, cos_sin_cache, is_neox) for x in (query, key)]
        written = turned[1], value, key_cache, value_cache, slot_mapping
        write(*written, kv_cache_dtype, k_scale, v_scale, v_scale_layout, unique_slots)
        return turned[0]
    with one_at_a_time:
        write_tensors = WriteTensors(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
        call, rotated = calls.rope_call(plan, query, write_tensors, positions, cos_sin_cache, unique_slots)
    run(call)
    return rotated


def gather(plan: GatherPlan, tensors: ReadTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_kv` of CUDA tensors that `plan` describes."""
    _check_capability(tensors.key_cache.get_device())
    with one_at_a_time:
        call = calls.gather_call(plan, tensors)
    run(call)
    keys, values = call.tensors[-2:]
    return keys, values


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
    _check_capability(key_cache.get_device())
    every = []
    with one_at_a_time:
        for key, value in rows:
            written = WriteTensors(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
            write_of = write_plan(*written[:5], encoding.kv_cache_dtype, k_scale, v_scale, encoding.v_scale_layout)
            every.append(calls.write_call(write_of, written, unique_slots).kernel)
        gather_of = gather_plan(tensors, encoding, dtype)
        every.append(calls.gather_call(gather_of, tensors).kernel)
    _compile_all(every, key_cache.device)


def parts_of(plan: AttentionPlan, num_seqs: int, tensors: ReadTensors) -> Sequence[calls.AttentionPart]:
    """What the kernels are called for, one after another; nothing if torch attends.

    Raises:
      UnsupportedError: the GPU has no kernels, or none that is batch-invariant if that is requested.
      KVCacheValueError: the workspace of a batch-invariant call is too large.
    """
    _check_capability(tensors.key_cache.get_device())
    serves = calls.has_attention(plan, num_seqs, tensors.block_table)
    parts = calls.attention_parts(plan, tensors.key_cache.device) if serves else ()
    if plan.batch_invariant:  # before anything is compiled or run
        with one_at_a_time:
            for of_part, _, _ in parts:
                calls.kernels_of_call(of_part, tensors)
        if not parts and num_seqs and tensors.block_table.numel():
            raise UnsupportedError(
                f"got batch_invariant=True for a query of {plan.dtype} and a cache of {plan.cache.spec.dtype.value!r},"
                " which no kernel launched on torch's stream serves; expected False, or CPU tensors"
            )
    return parts


def attend(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention` of CUDA tensors that `plan` describes, into `out` if it is given.

    Kernels attend to the pages if there are kernels for such a call. There are none for a float32 query, for example.
    Otherwise torch attends to gathered keys and values.
    """
    parts = parts_of(plan, query.shape[0], tensors)
    if not parts:
        return _attend_to_gathered(plan, query, tensors, sinks, out)
    _compile_parts(parts, tensors)
    if len(parts) == 1:
        return _attend_to_pages(plan, query, tensors, sinks, out)
    # There are more query rows than one run takes: each takes some of the tokens, or of the heads that share a KV head.
    spec = plan.cache.spec
    out = query.new_empty((*query.shape[:3], spec.head_size_v)) if out is None else out
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    dims = spec.num_kv_heads, plan.num_heads // spec.num_kv_heads
    queries, outs, lses = (x.unflatten(2, dims) for x in (query, out, lse))
    lengths = tensors.seq_lens.clamp(0, calls.INT32_MAX).to(torch.int32)
    for part, heads, tokens in parts:
        # A part's tokens are the last ones of sequences that end with the part.
        part_tensors = tensors._replace(seq_lens=lengths - (plan.q_len - tokens.stop))
        own_sinks = None if sinks is None else sinks.reshape(dims)[:, heads].reshape(-1)
        results = _attend_to_pages(part, queries[:, tokens, :, heads].flatten(2, 3), part_tensors, own_sinks)
        for whole, result in zip((outs, lses), results, strict=True):
            whole[:, tokens, :, heads] = result.unflatten(2, (spec.num_kv_heads, -1))
    return out, lse


_attends: set[Any] = set()
"""The plans, places of pages and devices whose kernels are compiled."""


def _compile_parts(parts: Sequence[calls.AttentionPart], tensors: ReadTensors) -> None:
    """Compiles the kernels of the parts of a call for batches of every size."""
    device = tensors.key_cache.device
    for plan, _, _ in parts:
        places = calls.page_places(plan.cache, tensors.key_cache, tensors.value_cache)
        if (kind := (plan, places, device)) in _attends:
            continue
        with one_at_a_time:
            every = [calls.attention_kernels(plan, places, device, least, 1) for least in kernels.ATTENTION_BATCHES]
        _compile_all([kernel for decode, merge, _ in every for kernel in (decode, merge)], device)
        if len(_attends) >= _REMEMBERED:
            _attends.clear()
        _attends.add(kind)


def _attend_to_pages(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    decode, merge = calls.attention_calls(plan, query, tensors, sinks, out)
    run(decode)
    run(merge)
    out, lse = merge.tensors[-2:]
    return out, lse


def _attend_to_gathered(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    gathered = GatherPlan(plan.cache, torch.float32, plan.scale_sizes)
    keys, values = (x.transpose(1, 2) for x in gather(gathered, tensors))
    sequences = tensors.block_table, tensors.seq_lens, tensors.num_blocks
    return dense.attend(plan, query, keys, values, *sequences, sinks, out=out)


_compiled_together: set[Any] = set()
"""The kernels, with devices, that `compile_once` compiled."""


def compile_once(every: tuple[kernels.AnyCount, ...], device: torch.device) -> None:
    """Compiles kernels, several at once, the first time that they are asked for together."""
    if (kind := (every, device)) in _compiled_together:
        return
    _check_capability(device.index)
    _compile_all(every, device)
    if len(_compiled_together) >= _REMEMBERED:
        _compiled_together.clear()
    _compiled_together.add(kind)


def run(call: calls.Call) -> _Launcher | None:
    """Runs a call; returns what was launched, or None if there was nothing to launch."""
    if not call.amount:
        return None
    launcher = _launcher(call.kernel, call.device)
    launcher.launch(call.counts, tuple(tensor.data_ptr() for tensor in call.tensors), call.amount)
    return launcher


def _compile_all(every: Sequence[kernels.AnyCount], device: torch.device) -> None:
    """Compiles and loads kernels, several at once."""
    with _naming_tested_versions():
        launch.compile_ahead(every, device)
    for kernel in every:
        _launcher(kernel, device)


def _launcher(kernel: kernels.AnyCount, device: torch.device) -> _Launcher:
    with _naming_tested_versions():
        return _compiled(kernel, device)


@contextlib.contextmanager
def _naming_tested_versions() -> Iterator[None]:
    try:
        yield
    except launch.LaunchUnavailableError as error:
        raise UnsupportedError(
            f"kvjax's kernels cannot be launched on torch's streams: {error}; tested with {launch.TESTED}"
        ) from error


@functools.lru_cache(maxsize=1024)
def _compiled(kernel: kernels.AnyCount, device: torch.device) -> _Launcher:
    return _Launcher(launch.compile_kernel(kernel, device), kernel.num_programs)


class _Launcher(NamedTuple):
    """A compiled kernel, and its number of programs as a function of a call's amount."""

    kernel: launch.Kernel
    num_programs: Callable[[int], int]

    def launch(self, counts: tuple[int, ...], addresses: tuple[int, ...], amount: int) -> None:
        """Launches the kernel on arrays at these addresses."""
        self.kernel((*kernels.packed(counts), *addresses), self.num_programs(amount))


@functools.lru_cache(maxsize=64)
def _check_capability(device: int) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major < MIN_COMPUTE_CAPABILITY:
        raise UnsupportedError(
            f"got tensors on cuda:{device} (sm_{major}{minor}), expected cpu, or cuda of sm_90 or later"
        )
