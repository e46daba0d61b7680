"""What the path through JAX borrows, keeps and waits for: on the host, with the kernel and the GPU taken away.

`test_torch_cuda.py` runs the path itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from kvjax import UnsupportedError, kernels  # noqa: E402
from kvjax_torch import dlpack  # noqa: E402
from kvjax_torch.calls import Call  # noqa: E402

ALIGNMENT = 64
"""Bytes at a multiple of which JAX borrows memory of the host, as it does memory of a GPU at a multiple of 16."""

FIRST, BORROWED_BEFORE = "JAX waits", "waited for already"


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


class Host:
    """What happens on the host, and what does not.

    Attributes:
      numbers: the numbers that kernels were given.
      borrowed: addresses that were borrowed, and whether JAX waits for torch there.
      waited: addresses that torch has waited for.
      copies: which of their results programs write into copies.
      fails: whether they fail.
    """

    def __init__(self, monkeypatch):
        self.numbers: list[tuple[int, ...]] = []
        self.borrowed: list[tuple[int, str]] = []
        self.waited: list[int] = []
        self.copies: tuple[int, ...] = ()
        self.fails = False
        self.from_dlpack, self.to_torch = jax.dlpack.from_dlpack, torch.utils.dlpack.from_dlpack
        forms = [dlpack._Form.of(argument) for argument in Kernel.arguments]
        monkeypatch.setattr(dlpack, "_program", lambda _: (self.program, forms))
        monkeypatch.setattr(dlpack, "_borrowed", {})
        monkeypatch.setattr(dlpack, "ALIGNMENT", {"cuda": ALIGNMENT})
        monkeypatch.setattr(dlpack._Form, "view", lambda form, address, rows, _: view(form, address, rows))
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(jax.dlpack, "from_dlpack", self.borrow)
        monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", self.wait)

    def borrow(self, lent, copy):
        assert copy is False
        tensor, asked = lent._tensor, []
        lent._tensor = mock.Mock(__dlpack__=lambda **options: asked.append(options))
        lent.__dlpack__(stream=7, max_version=(1, 0))
        waits = {7: FIRST, -1: BORROWED_BEFORE}
        [options] = asked
        self.borrowed.append((tensor.data_ptr(), waits[options.pop("stream")]))
        assert options == {"max_version": (1, 0)}
        return self.from_dlpack(tensor, copy=False)

    def wait(self, array):
        self.waited.append(array.unsafe_buffer_pointer())
        return self.to_torch(array)

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
        for i, array in enumerate(given_away):
            results.append(array + 0 if i in self.copies else self.from_dlpack(self.to_torch(array), copy=False))
            array.delete()  # donated
        return results


def view(form, address, rows):
    memory = (ctypes.c_uint8 * (rows * form.row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(form.dtype).view(rows, *form.shape)


@pytest.fixture
def host(monkeypatch) -> Host:
    return Host(monkeypatch)


def memory(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers from an aligned address on, with as many behind them again, for whole rows to reach into."""
    numbers = torch.zeros(2 * size + ALIGNMENT, dtype=dtype)
    return numbers[-numbers.data_ptr() % ALIGNMENT // numbers.element_size() :][:size]


def call(*tensors: torch.Tensor) -> Call:
    return Call(Kernel(), (7,), tensors, 2)


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [memory(64, torch.int32), memory(64), memory(64, torch.int32), memory(64), memory(64)]


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_a_call_borrows_one_array_when_it_has_come_before(host, tensors):
    for _ in range(4):
        dlpack.run(call(*tensors))
    first, *others = addresses(tensors)
    assert host.borrowed == [
        (first, FIRST),
        *((other, BORROWED_BEFORE) for other in others),
        *[(first, FIRST)] * 3,
    ]
    assert host.numbers == [(7, 0, 0, 0, 0, 0)] * 4
    assert host.waited == [others[-1]] * 4


def test_jax_waits_even_where_the_first_array_was_another_before(host, tensors):
    slots, rows, lengths, keys, values = tensors
    dlpack.run(call(slots, rows, lengths, keys, values))
    dlpack.run(call(lengths, rows, slots, keys, values))
    assert host.borrowed[5:] == [(lengths.data_ptr(), FIRST), (slots.data_ptr(), BORROWED_BEFORE)]


def test_memory_of_another_size_is_borrowed_again(host, tensors):
    slots, rows, lengths, keys, values = tensors
    for size in (64, 32, 64):
        dlpack.run(call(slots, rows[:size], lengths, keys[:size], values))
    borrowed = [address for address, _ in host.borrowed]
    assert [borrowed.count(tensor.data_ptr()) for tensor in (rows, lengths, keys, values)] == [2, 1, 2, 1]


def test_memory_is_borrowed_in_every_form_that_it_is_read_in(host, tensors):
    slots, rows, _, keys, values = tensors
    dlpack.run(call(slots, rows[:16], rows[:1], keys, values))


def test_memory_of_another_device_is_other_memory(host, tensors):
    for index in range(2):
        of_device = {"kernel": Kernel(), "counts": (7,), "tensors": tensors, "amount": 2}
        dlpack.run(types.SimpleNamespace(**of_device, device=torch.device("cuda", index)))
    assert [address for address, _ in host.borrowed] == addresses(tensors) * 2


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
    assert [address for address, _ in host.borrowed] == [*expected]


def test_an_array_that_somebody_deleted_is_borrowed_again(host, tensors):
    dlpack.run(call(*tensors))
    for array in list(dlpack._borrowed.values()):
        array.delete()
    dlpack.run(call(*tensors))
    assert [address for address, _ in host.borrowed] == addresses(tensors) * 2


def test_nothing_is_kept_of_what_was_given_to_a_kernel_that_failed(host, tensors):
    host.fails = True
    with pytest.raises(RuntimeError, match="no kernel"):
        dlpack.run(call(*tensors))
    host.fails = False
    dlpack.run(call(*tensors))
    first, rows, lengths, keys, values = addresses(tensors)
    assert [address for address, _ in host.borrowed] == [first, rows, lengths, keys, values, first, keys, values]


@pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)])
def test_a_program_that_writes_into_copies_is_found_out(host, tensors, copies):
    host.copies = copies
    with pytest.raises(UnsupportedError, match=r"not written in place: got a result at 0x[0-9a-f]+, expected 0x"):
        dlpack.run(call(*tensors))
    host.copies = ()
    dlpack.run(call(*tensors))
    *_, keys, values = addresses(tensors)
    assert [address for address, _ in host.borrowed][-2:] == [keys, values]


@pytest.mark.parametrize("option", ["debug_nans", "debug_infs", "disable_jit"])
def test_nothing_runs_where_jax_is_asked_not_to_donate(host, tensors, option):
    with getattr(jax, option)(True), pytest.raises(UnsupportedError, match=f"got jax_{option} turned on, expected it"):
        dlpack.run(call(*tensors))
    assert host.numbers == []
    dlpack.run(call(*tensors))


def test_no_more_than_so_many_are_kept(host, tensors, monkeypatch):
    monkeypatch.setattr(dlpack, "_KEPT", 9)
    slots, rows, lengths, keys, _ = tensors
    caches = [memory(64) for _ in range(10)]
    for values in caches:
        dlpack.run(call(slots, rows, lengths, keys, values))
        assert len(dlpack._borrowed) <= 9
    assert len(dlpack._borrowed) >= 3


def test_nothing_is_left_for_the_end_of_python(host, tensors):
    dlpack.run(call(*tensors))
    array = next(iter(dlpack._borrowed.values()))
    array.delete()
    dlpack._give_back()
    assert dlpack._borrowed == {}


@pytest.mark.parametrize("start", range(0, 18))
@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 5), (16, 1)), ((3, 16), (16, 1)), ((2, 3, 4), (20, 4, 1)), ((1,), (9,))]
)
def test_the_rows_hold_the_whole_tensor(start, shape, strides):
    form = dlpack._Form.of(Kernel.arguments[3])
    tensor = memory(128).as_strided(shape, strides, start)
    address, rows, beginning = form.place(tensor)
    assert address % dlpack.ALIGNMENT["cuda"] == 0
    assert address + beginning * form.unit == tensor.data_ptr()
    last = tensor[(-1,) * tensor.dim()].data_ptr() + tensor.element_size()
    assert (rows - 1) * form.row_bytes < last - address <= rows * form.row_bytes


def test_an_array_between_two_units_is_refused():
    form = dlpack._Form.of(kernels.Argument(jax.ShapeDtypeStruct((1, 16), np.float32), 16))
    with pytest.raises(UnsupportedError, match="expected a multiple of 16 bytes"):
        form.place(memory(64)[1:])
