"""What the path through JAX lends and what it waits for: on the host, without the kernel and the GPU.

`test_torch_cuda.py` runs the path itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import types
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from helpers import simple_spec  # noqa: E402
from torch_helpers import random_pages, torch_cache  # noqa: E402

from kvjax import AttentionSpec, KVCacheDType, UnsupportedError, kernels  # noqa: E402
from kvjax_torch import dlpack, exports  # noqa: E402
from kvjax_torch.arguments import gather_plan, write_plan  # noqa: E402
from kvjax_torch.calls import Call, gather_call, write_call  # noqa: E402
from kvjax_torch.plan import ReadTensors, WriteTensors  # noqa: E402

ALIGNMENT = 64
"""Bytes at a multiple of which JAX borrows memory of the host; kernels on a GPU take it at multiples of 256."""

STREAM = 5
"""torch's current one, of GPU 0; those of others have the numbers behind it."""


class Kernel:
    """Slots, rows, lengths, and two halves of pages, which are written."""

    arguments = (
        kernels.Argument("slots", jax.ShapeDtypeStruct((1,), np.int32), 4),
        kernels.Argument("rows", jax.ShapeDtypeStruct((1, 16), np.float32), 4),
        kernels.Argument("lengths", jax.ShapeDtypeStruct((1,), np.int32), 4),
        kernels.Argument("key_cache", jax.ShapeDtypeStruct((1, 16), np.float32), 4),
        kernels.Argument("value_cache", jax.ShapeDtypeStruct((1, 16), np.float32), 4),
    )
    written = (3, 4)


class Result:
    """An array of JAX's, which records the streams that wait for it."""

    def __init__(self, array: jax.Array, waited: list[tuple[int, int]]) -> None:
        self.array, self.waited = array, waited

    def unsafe_buffer_pointer(self) -> int:
        return self.array.unsafe_buffer_pointer()

    def __dlpack__(self, *, stream: int) -> Any:
        self.waited.append((self.array.unsafe_buffer_pointer(), stream))
        return self.array.__dlpack__()

    def delete(self) -> None:
        self.array.delete()


class Host:
    """The host's part of a call, with stand-ins for the rest.

    Attributes:
      numbers: the numbers that kernels were given.
      borrowed: addresses that were lent to JAX.
      waited: addresses that torch's streams have waited for, and those streams.
      copies: which of their results programs write into copies.
      fails: whether programs fail.
      devices: GPUs that were made current, or whose memory was lent.
    """

    def __init__(self, monkeypatch):
        self.numbers: list[tuple[int, ...]] = []
        self.borrowed: list[int] = []
        self.waited: list[tuple[int, int]] = []
        self.copies: tuple[int, ...] = ()
        self.fails = False
        self.devices: set[int] = set()
        self.from_dlpack = jax.dlpack.from_dlpack
        forms = [dlpack._Form.of(argument) for argument in Kernel.arguments]
        monkeypatch.setattr(dlpack, "_forms", lambda _: forms)
        monkeypatch.setattr(dlpack, "_program", lambda _, *numbers: functools.partial(self.program, *numbers))
        monkeypatch.setattr(exports, "_exports", set())
        monkeypatch.setattr(dlpack, "_ALIGNMENT", ALIGNMENT)
        monkeypatch.setattr(dlpack, "_bytes_at", self.bytes_at)
        monkeypatch.setattr(torch.cuda, "device", self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)
        monkeypatch.setattr(jax.dlpack, "from_dlpack", self.borrow)

    def current(self, device):
        self.devices.add(device)
        return contextlib.nullcontext()

    def bytes_at(self, address, nbytes, device):
        self.devices.add(device)
        return bytes_at(address, nbytes, device)

    def borrow(self, lent, copy):
        assert copy is False
        self.borrowed.append(lent._tensor.data_ptr())
        return self.from_dlpack(lent._tensor, copy=False)

    def program(self, numbers, amount, *arrays):
        assert amount == 2
        self.numbers.append(numbers)
        if self.fails:
            raise RuntimeError("no kernel")
        given_away = arrays[3:]
        assert len({id(array) for array in given_away}) == 2
        assert not any(array is given for array in arrays[:3] for given in given_away)
        assert not any(array.is_deleted() for array in arrays)
        assert [array.shape[1:] for array in arrays] == [argument.array.shape[1:] for argument in Kernel.arguments]
        results = []
        for i, array in enumerate(arrays[3:]):
            result = array + 0 if i in self.copies else self.from_dlpack(torch.from_dlpack(array), copy=False)
            results.append(Result(result, self.waited))
            array.delete()  # donated
        return results


def bytes_at(address, nbytes, _):
    class Bytes(ctypes.c_uint8 * nbytes):
        memory: dlpack._Memory

    held = Bytes.from_address(address)
    held.memory = dlpack._Memory(address, nbytes)
    return torch.frombuffer(held, dtype=torch.uint8)


@pytest.fixture
def host(monkeypatch) -> Host:
    return Host(monkeypatch)


def memory(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers from an aligned address on, with as many behind them again, for whole rows to reach into."""
    numbers = torch.zeros(2 * size + ALIGNMENT, dtype=dtype)
    return numbers[-numbers.data_ptr() % ALIGNMENT // numbers.element_size() :][:size]


def call(*tensors: torch.Tensor, device: int = 0) -> Call:
    """As of tensors on a GPU."""
    of_device = {"kernel": Kernel(), "counts": (7,), "tensors": tensors, "amount": 2}
    return types.SimpleNamespace(**of_device, device=torch.device("cuda", device))


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [memory(64, torch.int32), memory(64), memory(64, torch.int32), memory(64), memory(64)]


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_each_call_lends_all_its_memory_and_torch_waits_for_it(host, tensors):
    for _ in range(4):
        dlpack.run(call(*tensors))
    assert host.borrowed == addresses(tensors) * 4
    assert host.numbers == [(7, 0, 0, 0, 0, 0)] * 4
    assert host.waited == [(values_of(tensors), STREAM)] * 4


def values_of(tensors: list[torch.Tensor]) -> int:
    return tensors[-1].data_ptr()


def test_nothing_is_lent_after_a_call(host, tensors):
    """Programs have ended on the host. What an error still refers to is given back with it."""
    gc.collect()
    before = len(jax.live_arrays())
    dlpack.run(call(*tensors))
    assert not exports._exports
    assert len(jax.live_arrays()) == before
    host.fails = True
    with pytest.raises(RuntimeError, match="no kernel") as caught:
        dlpack.run(call(*tensors))
    assert len(exports._exports) == len(tensors)
    del caught
    gc.collect()
    assert not exports._exports


def test_torchs_default_stream_waits_by_the_name_that_the_protocol_has_for_it(host, tensors, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
    dlpack.run(call(*tensors))
    assert host.waited == [(values_of(tensors), 1)]


def test_memory_is_borrowed_in_every_form_that_it_is_read_in(host, tensors):
    slots, rows, _, keys, values = tensors
    dlpack.run(call(slots, rows[:16], rows[:1], keys, values))


def test_memory_is_lent_on_the_device_of_the_call(host, tensors):
    for index in range(2):
        host.devices = set()
        dlpack.run(call(*tensors, device=index))
        assert host.devices == {index}
    assert host.waited == [(values_of(tensors), STREAM + index) for index in range(2)]


def test_what_is_written_is_an_array_of_its_own(host, tensors):
    """Keys beside values within one multiple of the alignment, and rows that are the pages."""
    slots, rows, lengths, keys, _ = tensors
    for _ in range(2):
        dlpack.run(call(slots, rows, lengths, keys[:32], keys[2:34]))
        assert host.numbers[-1] == (7, 0, 0, 0, 0, 2)
        dlpack.run(call(slots, keys[:32], lengths, keys[:32], keys[2:34]))


def test_arrays_are_told_where_in_them_tensors_begin(host, tensors):
    slots, rows, _, keys, values = tensors
    dlpack.run(call(slots[1:17], rows[3:], rows[2:3], keys[18:40], values[16:]))
    assert host.numbers == [(7, 1, 3, 2, 2, 0)]
    expected = *addresses([slots, rows, rows]), keys.data_ptr() + ALIGNMENT, values.data_ptr() + ALIGNMENT
    assert host.borrowed == [*expected]


@pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)])
def test_a_program_that_writes_into_copies_is_found_out(host, tensors, copies):
    host.copies = copies
    with pytest.raises(UnsupportedError, match=r"not written in place: got a result at 0x[0-9a-f]+, expected 0x"):
        dlpack.run(call(*tensors))
    assert len(host.waited) == 1, "torch's stream waits for what has run all the same"
    host.copies = ()
    dlpack.run(call(*tensors))


@pytest.mark.parametrize("option", ["debug_nans", "debug_infs", "disable_jit"])
def test_nothing_runs_where_jax_is_asked_not_to_donate(host, tensors, option):
    message = f"got jax_{option} turned on, expected it"
    with getattr(jax, option)(True), pytest.raises(UnsupportedError, match=message):
        dlpack.run(call(*tensors))
    assert host.borrowed == host.numbers == []
    dlpack.run(call(*tensors))
    assert len(host.numbers) == 1


def test_nothing_runs_while_a_graph_is_captured(host, tensors, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match=r"got a stream that torch\.cuda\.graph records"):
        dlpack.run(call(*tensors))
    assert host.borrowed == host.numbers == []


def test_torch_waits_for_what_runs_though_its_results_cannot_be_looked_at(host, tensors, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Result, "unsafe_buffer_pointer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dlpack.run(call(*tensors))
    assert host.waited == [(values_of(tensors), STREAM)]


def test_a_program_is_given_away_what_it_writes():
    kernel = mock.Mock(written=(1,))
    kernel.with_numbers = lambda numbers, amount, read, written: [written + read + numbers[0] + amount]
    arrays = [jax.ShapeDtypeStruct((5,), np.int32)] * 2
    lowered = dlpack._program(kernel, (3,), 4).lower(*arrays)
    read, written = jax.tree.leaves(lowered.args_info)
    assert [read.donated, written.donated] == [False, True]
    assert lowered.compile()(*(np.full(array.shape, 10, np.int32) for array in arrays))[0].tolist() == [27] * 5


class Lent:
    """A tensor on a GPU, which records the streams that it makes wait for torch's."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def __dlpack__(self, *, stream: int) -> str:
        self.waited.append(stream)
        return "capsule"

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3


def test_jaxs_stream_waits_for_torchs():
    tensor = Lent()
    lender = dlpack._Lender(tensor)
    assert lender.__dlpack_device__() == (2, 3)
    for stream in (7, 1):
        assert lender.__dlpack__(stream=stream, max_version=(1, 0), dl_device=None, copy=False) == "capsule"
    assert tensor.waited == [7, 1]


def test_nothing_is_lent_to_jax_if_it_names_no_stream():
    tensor = Lent()
    for options in ({}, {"stream": None}):
        with pytest.raises(UnsupportedError, match="names no stream to wait for torch's"):
            dlpack._Lender(tensor).__dlpack__(**options)
    assert tensor.waited == []


@pytest.mark.parametrize("start", range(0, 18))
@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 5), (16, 1)), ((3, 16), (16, 1)), ((2, 3, 4), (20, 4, 1)), ((1,), (9,))]
)
def test_the_rows_hold_the_whole_tensor(start, shape, strides):
    form = dlpack._Form.of(Kernel.arguments[3])
    tensor = memory(128).as_strided(shape, strides, start)
    address, rows, offset = form.aligned_rows(tensor)
    assert address % dlpack._ALIGNMENT == 0
    assert address + offset * form.unit == tensor.data_ptr()
    last = tensor[(-1,) * tensor.dim()].data_ptr() + tensor.element_size()
    assert (rows - 1) * form.row_bytes < last - address <= rows * form.row_bytes


WIDE = kernels.Argument("wide", jax.ShapeDtypeStruct((1, 16), np.float32), 16)
"""Of numbers that a kernel reads four at a time."""


def test_nothing_runs_on_an_array_between_two_units(host, tensors, monkeypatch):
    *others, values = tensors
    arguments = [*Kernel.arguments[:4], WIDE]
    monkeypatch.setattr(dlpack, "_forms", lambda _: [dlpack._Form.of(argument) for argument in arguments])
    with pytest.raises(UnsupportedError, match=r"got an array at address 0x[0-9a-f]+, expected a multiple of 16 bytes"):
        dlpack.run(call(*others, values[1:]))
    assert host.numbers == []


def traced(call: Call) -> None:
    """Traces what runs a call of tensors that begin where they do; results begin where they would on a GPU."""
    numbers, arrays = list(call.counts), []
    for tensor, argument, form in zip(call.tensors, call.kernel.arguments, dlpack._forms(call.kernel), strict=True):
        is_result = form.unit == kernels.BASE_ALIGNMENT
        _, rows, offset = (0, tensor.nbytes // form.row_bytes, 0) if is_result else form.aligned_rows(tensor)
        numbers.append(offset)
        arrays.append(jax.ShapeDtypeStruct((rows, *argument.array.shape[1:]), argument.array.dtype))
    dlpack._program(call.kernel, tuple(numbers), call.amount).trace(*arrays)


@pytest.mark.parametrize("layout", ["NHD", "HND", "NHD-diffkv", "HND-diffkv"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("start", [0, 16, 48, 208])
def test_tensors_may_begin_anywhere(dtype, layout, start):
    """Rows that are packed and begin late reach past the rows that JAX has of them; so do pages."""
    layout, _, diffkv = layout.partition("-")
    head_size_v = 64 if diffkv else None
    spec = simple_spec(KVCacheDType(dtype), num_kv_heads=2, head_size=128, head_size_v=head_size_v, layout=layout)
    cache = torch_cache(random_pages(spec, 4), spec, before=start)
    key, value = (late_rows(spec, size, start) for size in (spec.head_size, spec.head_size_v))
    slots, scales = torch.arange(5), [torch.ones(4)[i:][:1] for i in (0, 1)]
    halves, options = (cache.key, cache.value), (dtype, *scales, "linear")
    plan = write_plan(key, value, *halves, slots, *options)
    traced(write_call(plan, WriteTensors(key, value, *halves, slots, *scales), False))
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    plan = gather_plan(*halves, table, lengths, *options, None)
    traced(gather_call(plan, ReadTensors(*halves, table, lengths, *scales)))


def test_what_is_no_block_is_none_in_the_kernels_table():
    """Kernels are given int32, in which the low half of an int64 could be a block."""
    spec = simple_spec(KVCacheDType.BFLOAT16)
    cache, lengths = torch_cache(random_pages(spec, 4), spec), torch.zeros(1, dtype=torch.int64)
    table = torch.tensor([[3, 4, -1, 2**32, 1 - 2**32, 2**63 - 1, -(2**63), 0]])
    arguments, scales = (cache.key, cache.value, table, lengths), (torch.ones(1), torch.ones(1))
    plan = gather_plan(*arguments, "bfloat16", *scales, "linear", None)
    call = gather_call(plan, ReadTensors(*arguments, *scales))
    given, last_block = call.tensors[0], call.counts[-1]
    assert ((given >= 0) & (given <= last_block)).tolist() == [[True, *[False] * 6, True]]


def test_results_of_a_gather_begin_where_jaxs_arrays_do():
    """Its kernel takes that for granted, whatever memory torch has its tensors from."""
    spec = simple_spec(KVCacheDType.BFLOAT16, num_kv_heads=2, head_size=128)
    cache = torch_cache(random_pages(spec, 4), spec)
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    arguments = cache.key, cache.value, table, lengths
    plan = gather_plan(*arguments, "bfloat16", torch.ones(1), torch.ones(1), "linear", None)
    gather = gather_call(plan, ReadTensors(*arguments, torch.ones(1), torch.ones(1)))
    for form in dlpack._forms(gather.kernel)[-2:]:
        result = late_rows(spec, 128, 0)
        form.aligned_rows(result)
        for start in (16, 64, 128):
            with pytest.raises(UnsupportedError, match="expected a multiple of 256 bytes"):
                form.aligned_rows(late_rows(spec, 128, start))


def late_rows(spec: AttentionSpec, size: int, start: int) -> torch.Tensor:
    flat = torch.zeros(5 * spec.num_kv_heads * size + 256, dtype=torch.bfloat16)
    first = (-flat.data_ptr() % 256 + start) // 2
    return flat[first:][: 5 * spec.num_kv_heads * size].view(5, spec.num_kv_heads, size)
