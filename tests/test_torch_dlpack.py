"""What the path through JAX borrows, keeps and waits for: on the host, with the kernel and the GPU taken away.

`test_torch_cuda.py` runs the path itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from helpers import simple_spec  # noqa: E402
from torch_helpers import random_pages, torch_cache  # noqa: E402

from kvjax import AttentionSpec, KVCacheDType, UnsupportedError, kernels  # noqa: E402
from kvjax_torch import dlpack, loan  # noqa: E402
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
        kernels.Argument(jax.ShapeDtypeStruct((1,), np.int32), 4),
        kernels.Argument(jax.ShapeDtypeStruct((1, 16), np.float32), 4),
        kernels.Argument(jax.ShapeDtypeStruct((1,), np.int32), 4),
        kernels.Argument(jax.ShapeDtypeStruct((1, 16), np.float32), 4),
        kernels.Argument(jax.ShapeDtypeStruct((1, 16), np.float32), 4),
    )
    written = (3, 4)


class Signal:
    """As of a GPU; arrays that are there when torch's stream has come so far are its number."""

    def mark(self, stream: int) -> None:
        self.stream = stream

    def after(self) -> int:
        return self.stream


class Result:
    """An array of JAX's, which writes down who waits for it."""

    def __init__(self, array: jax.Array, waited: list[tuple[int, int]]) -> None:
        self.array, self.waited = array, waited
        self.is_deleted, self.delete, self.block_until_ready = array.is_deleted, array.delete, array.block_until_ready

    def unsafe_buffer_pointer(self) -> int:
        return self.array.unsafe_buffer_pointer()

    def __dlpack__(self, *, stream: int) -> None:
        self.waited.append((self.array.unsafe_buffer_pointer(), stream))


class Host:
    """What happens on the host, and what does not.

    Attributes:
      numbers: the numbers that kernels were given.
      borrowed: addresses that were borrowed.
      stream: torch's current one, of the GPU of the call.
      waited: addresses that streams of torch's have waited for, and those streams.
      devices: GPUs that were made current, or memory of which was looked at.
      copies: which of their results programs write into copies.
      fails: whether they fail.
    """

    def __init__(self, monkeypatch):
        self.numbers: list[tuple[int, ...]] = []
        self.borrowed: list[int] = []
        self.waited: list[tuple[int, int]] = []
        self.copies: tuple[int, ...] = ()
        self.fails = False
        self.devices: set[int] = set()
        self.stream = STREAM
        self.from_dlpack = jax.dlpack.from_dlpack
        forms = [dlpack._Form.of(argument) for argument in Kernel.arguments]
        monkeypatch.setattr(dlpack, "_forms", lambda _: forms)
        monkeypatch.setattr(dlpack, "_program", lambda _, *numbers: functools.partial(self.program, *numbers))
        monkeypatch.setattr(dlpack._Loans, "signal", Signal())
        monkeypatch.setattr(dlpack, "_loans", {})
        monkeypatch.setattr(loan, "_loans", set())
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
        return self.from_dlpack(lent, copy=False)

    def program(self, numbers, amount, *arrays):
        *arrays, signal = arrays
        assert amount == 2
        assert signal == self.stream
        self.numbers.append(numbers)
        if self.fails:
            raise RuntimeError("no kernel")
        given_away = arrays[3:]
        assert len({id(array) for array in given_away}) == 2
        assert not any(array is given for array in arrays[:3] for given in given_away)
        assert not any(array.is_deleted() for array in arrays)
        arrays = [getattr(array, "array", array) for array in arrays]
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


def kept() -> list[dlpack._Borrowed]:
    [loans] = dlpack._loans.values()
    return list(loans.borrowed.values())


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [memory(64, torch.int32), memory(64), memory(64, torch.int32), memory(64), memory(64)]


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_a_call_borrows_nothing_when_it_has_come_before(host, tensors):
    for _ in range(4):
        dlpack.run(call(*tensors))
    assert host.borrowed == addresses(tensors)
    assert host.numbers == [(7, 0, 0, 0, 0, 0)] * 4
    assert host.waited == [(values_of(tensors), STREAM)] * 4


def values_of(tensors: list[torch.Tensor]) -> int:
    return tensors[-1].data_ptr()


def test_a_known_call_runs_again_with_what_was_written_since(host, tensors):
    slots, rows, lengths, keys, values = tensors
    assert not dlpack.run_again(0, "first")
    dlpack.run(call(*tensors), known_as="first")
    dlpack.run(call(slots[16:], rows, lengths, keys, values), known_as="second")
    dlpack.run(call(slots[32:], rows, lengths, keys, values))
    assert host.numbers == [(7, 0, 0, 0, 0, 0)] * 3
    for name in ("first", "second", "second", "first"):
        assert dlpack.run_again(0, name)
    assert not dlpack.run_again(0, "third")
    assert len(host.numbers) == 3 + 4
    assert host.waited == [(values_of(tensors), STREAM)] * 7
    assert host.borrowed == [*addresses(tensors), slots[16:].data_ptr(), slots[32:].data_ptr()]


def test_a_call_that_failed_is_not_known(host, tensors):
    host.fails = True
    with pytest.raises(RuntimeError, match="no kernel"):
        dlpack.run(call(*tensors), known_as="call")
    assert not dlpack.run_again(0, "call")


def test_torchs_default_stream_waits_by_the_name_that_the_protocol_has_for_it(host, tensors, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
    host.stream = 0
    dlpack.run(call(*tensors))
    assert host.waited == [(values_of(tensors), 1)]


def test_memory_of_another_size_is_borrowed_again(host, tensors):
    slots, rows, lengths, keys, values = tensors
    for size in (64, 32, 64):
        dlpack.run(call(slots, rows[:size], lengths, keys[:size], values))
    assert [host.borrowed.count(tensor.data_ptr()) for tensor in (rows, lengths, keys, values)] == [2, 1, 2, 1]


def test_memory_is_borrowed_in_every_form_that_it_is_read_in(host, tensors):
    slots, rows, _, keys, values = tensors
    dlpack.run(call(slots, rows[:16], rows[:1], keys, values))


def test_memory_of_another_device_is_other_memory(host, tensors):
    for index in range(2):
        host.devices, host.stream = set(), STREAM + index
        dlpack.run(call(*tensors, device=index), known_as="call")
        assert host.devices == {index}
    assert host.borrowed == addresses(tensors) * 2
    for index in range(2):
        host.devices, host.stream = set(), STREAM + index
        assert dlpack.run_again(index, "call")
        assert host.devices == {index}
    assert not dlpack.run_again(2, "call")
    assert host.borrowed == addresses(tensors) * 2
    assert host.waited == [(values_of(tensors), STREAM + index) for index in (0, 1, 0, 1)]


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


def test_an_array_that_somebody_deleted_is_borrowed_again(host, tensors):
    dlpack.run(call(*tensors))
    for memory in kept():
        memory.array.delete()
    dlpack.run(call(*tensors))
    assert host.borrowed == addresses(tensors) * 2


def test_nothing_is_kept_of_what_was_given_to_a_kernel_that_failed(host, tensors):
    host.fails = True
    with pytest.raises(RuntimeError, match="no kernel"):
        dlpack.run(call(*tensors))
    host.fails = False
    dlpack.run(call(*tensors))
    *_, keys, values = addresses(tensors)
    assert host.borrowed == [*addresses(tensors), keys, values]


@pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)])
def test_a_program_that_writes_into_copies_is_found_out(host, tensors, copies):
    host.copies = copies
    with pytest.raises(UnsupportedError, match=r"not written in place: got a result at 0x[0-9a-f]+, expected 0x"):
        dlpack.run(call(*tensors))
    host.copies = ()
    dlpack.run(call(*tensors))
    assert host.borrowed == addresses(tensors) + addresses(tensors[3:])


@pytest.mark.parametrize("option", ["debug_nans", "debug_infs", "disable_jit"])
def test_nothing_runs_where_jax_is_asked_not_to_donate(host, tensors, option):
    message = f"got jax_{option} turned on, expected it"
    with getattr(jax, option)(True), pytest.raises(UnsupportedError, match=message):
        dlpack.run(call(*tensors))
    assert dlpack._loans == {}
    dlpack.run(call(*tensors), known_as="call")
    with getattr(jax, option)(True), pytest.raises(UnsupportedError, match=message):
        dlpack.run_again(0, "call")
    assert len(host.numbers) == 1


def test_nothing_runs_while_a_graph_is_captured(host, tensors, monkeypatch):
    dlpack.run(call(*tensors), known_as="call")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for run in (lambda: dlpack.run(call(*tensors)), lambda: dlpack.run_again(0, "call")):
        with pytest.raises(UnsupportedError, match=r"got a stream that torch\.cuda\.graph records"):
            run()
    assert len(host.numbers) == 1


def test_no_more_than_so_many_are_kept(host, tensors, monkeypatch):
    monkeypatch.setattr(dlpack, "_KEPT", 11)
    slots, rows, lengths, keys, _ = tensors
    caches = [memory(64) for _ in range(10)]
    for values in caches:
        dlpack.run(call(slots, rows, lengths, keys, values), known_as=values.data_ptr())
        assert len(kept()) <= 11
        assert all(memory in kept() for run in dlpack._loans[0].runs.values() for memory in run.memory)
    assert len(kept()) >= 3


def test_no_more_than_so_many_runs_are_known(host, tensors, monkeypatch):
    monkeypatch.setattr(dlpack, "_KEPT", 11)
    for name in range(30):
        dlpack.run(call(*tensors), known_as=name)
        assert len(dlpack._loans[0].runs) <= 11
    assert len(dlpack._loans[0].runs) >= 3
    assert host.borrowed == addresses(tensors)  # which is not forgotten with them


def test_python_ends_when_every_program_has_ended(host, tensors):
    for device in range(2):
        host.stream = STREAM + device
        dlpack.run(call(*tensors, device=device), known_as="call")
    ended = []

    def wait(number):
        ended.append(("wait", number))
        raise jax.errors.JaxRuntimeError("its program failed, and its caller was told")

    every = list(dlpack._loans.values())
    for i, memory in enumerate(memory for loans in every for memory in loans.borrowed.values()):
        memory.array = types.SimpleNamespace(
            is_deleted=lambda i=i: i % 5 == 0,
            block_until_ready=functools.partial(wait, i),
            delete=functools.partial(ended.append, ("delete", i)),
        )
        if i % 5 == 1:
            memory.array = None  # given away
    dlpack._give_back()
    assert ended == [(what, i) for i in (7, 8, 9, 2, 3, 4) for what in ("wait", "delete")]
    assert [(loans.runs, loans.borrowed) for loans in every] == [({}, {})] * 2
    assert dlpack._loans == {}


def test_what_still_refers_to_a_run_does_not_keep_python(host, tensors, signal, monkeypatch):
    """As the traceback of an error does, or the function that waits."""
    dlpack.run(call(*tensors), known_as="call")
    loans = dlpack._loans[0]
    vars(loans)["signal"] = signal
    signal.mark(30)
    signal.after()
    held = [loans.runs["call"], *loans.borrowed.values()]
    assert len(loan._loans) == 1 + len(loans.borrowed)
    dlpack._give_back()
    assert not loan._loans
    del held


def test_torch_waits_for_what_runs_though_its_results_cannot_be_looked_at(host, tensors, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Result, "unsafe_buffer_pointer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dlpack.run(call(*tensors), known_as="call")
    assert host.waited == [(values_of(tensors), STREAM)]
    assert not dlpack.run_again(0, "call")


def test_a_program_takes_a_signal_that_nobody_reads_and_arrays_of_which_it_writes_some():
    """Of a signal that it did not take, it would not wait for torch."""
    kernel = mock.Mock(written=(1,))
    kernel.with_numbers = lambda numbers, amount, read, written: [written + read + numbers[0] + amount]
    arrays = [jax.ShapeDtypeStruct((size,), np.int32) for size in (5, 5, 1)]
    lowered = dlpack._program(kernel, (3,), 4).lower(*arrays)
    read, written, signal = jax.tree.leaves(lowered.args_info)
    assert [signal.donated, read.donated, written.donated] == [False, False, True]
    header = next(line for line in lowered.as_text().splitlines() if "@main" in line)
    assert header.count("%arg") == 3
    compiled = lowered.compile()
    assert compiled(*(np.full(array.shape, 10, np.int32) for array in arrays))[0].tolist() == [27] * 5


def test_of_a_gpu_there_is_one_signal(monkeypatch):
    made = []
    monkeypatch.setattr(dlpack, "_Signal", lambda device: made.append(device) or device)
    for device in (0, 1):
        loans = dlpack._Loans(device)
        assert loans.signal == loans.signal == device
    assert made == [0, 1]


class Event:
    """Writes down in `order` what streams do with it; has come to pass where that was marked on a stream in `IDLE`."""

    def __init__(self) -> None:
        self.order: list[tuple[str, tuple[int, int]]] = []

    def record(self, stream: tuple[int, int]) -> None:
        self.order.append(("record", stream))

    def wait(self, stream: tuple[int, int]) -> None:
        self.order.append(("wait", stream))

    def query(self) -> bool:
        what, (handle, _) = self.order[-1]
        return what == "record" and handle in IDLE


IDLE = 30, 31


@pytest.fixture
def event(monkeypatch) -> Event:
    """The event of a signal of GPU 3."""

    def zeros(size, dtype, device):
        assert device == torch.device("cuda", 3)
        return on_host

    event, on_host = Event(), memory(1, torch.int32)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(dlpack, "_bytes_at", bytes_at)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "get_stream_from_external", lambda handle, device: (handle, device))
    yield event
    dlpack._stream.cache_clear()


@pytest.fixture
def signal(event) -> dlpack._Signal:
    return dlpack._Signal(3)


def test_the_signal_waits_on_jaxs_stream_for_torchs(signal, event, monkeypatch):
    for torchs, jaxs, named in ((5, 7, 7), (0, 7, 7), (5, 1, 0)):

        def borrow(lent, copy, jaxs=jaxs):
            assert copy is False
            assert lent.__dlpack_device__() == signal._tensor.__dlpack_device__()
            return lent.__dlpack__(stream=jaxs, max_version=(1, 0))

        monkeypatch.setattr(jax.dlpack, "from_dlpack", borrow)
        signal.mark(torchs)
        assert "dltensor" in repr(signal.after())
        assert event.order[-2:] == [("record", (torchs, 3)), ("wait", (named, 3))]


def test_more_than_python_holds_the_signal(signal):
    """Or JAX, which gives it back, would take Python's lock for it."""
    assert "dltensor" in repr(signal._held)


def test_the_signal_is_not_lent_to_who_names_no_stream(signal, event):
    for options in ({}, {"stream": None}):
        with pytest.raises(UnsupportedError, match="names no stream to wait for torch's"):
            signal.__dlpack__(**options)
    assert event.order == []


def test_nobody_waits_for_what_has_been_done(signal, event):
    signal.mark(30)
    given = signal.after()
    assert given.unsafe_buffer_pointer() == signal._tensor.data_ptr()
    signal.mark(31)
    assert signal.after() is given
    given.delete()
    assert not signal.after().is_deleted()
    assert event.order == [("record", (30, 3)), ("record", (31, 3))]
    signal.mark(5)
    with pytest.raises(UnsupportedError):  # on the host JAX names no stream
        signal.after()


@pytest.mark.parametrize("start", range(0, 18))
@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 5), (16, 1)), ((3, 16), (16, 1)), ((2, 3, 4), (20, 4, 1)), ((1,), (9,))]
)
def test_the_rows_hold_the_whole_tensor(start, shape, strides):
    form = dlpack._Form.of(Kernel.arguments[3])
    tensor = memory(128).as_strided(shape, strides, start)
    address, rows, beginning = form.place(tensor)
    assert address % dlpack._ALIGNMENT == 0
    assert address + beginning * form.unit == tensor.data_ptr()
    last = tensor[(-1,) * tensor.dim()].data_ptr() + tensor.element_size()
    assert (rows - 1) * form.row_bytes < last - address <= rows * form.row_bytes


WIDE = kernels.Argument(jax.ShapeDtypeStruct((1, 16), np.float32), 16)
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
        _, rows, beginning = (0, tensor.nbytes // form.row_bytes, 0) if is_result else form.place(tensor)
        numbers.append(beginning)
        arrays.append(jax.ShapeDtypeStruct((rows, *argument.array.shape[1:]), argument.array.dtype))
    signal = jax.ShapeDtypeStruct((1,), np.int32)
    dlpack._program(call.kernel, tuple(numbers), call.amount).trace(*arrays, signal)


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
        form.place(result)
        for start in (16, 64, 128):
            with pytest.raises(UnsupportedError, match="expected a multiple of 256 bytes"):
                form.place(late_rows(spec, 128, start))


def late_rows(spec: AttentionSpec, size: int, start: int) -> torch.Tensor:
    flat = torch.zeros(5 * spec.num_kv_heads * size + 256, dtype=torch.bfloat16)
    first = (-flat.data_ptr() % 256 + start) // 2
    return flat[first:][: 5 * spec.num_kv_heads * size].view(5, spec.num_kv_heads, size)
