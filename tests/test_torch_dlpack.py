"""What the path through JAX borrows and keeps: on the host, with the kernel and the GPU taken away.

`test_torch_cuda.py` runs the path itself.
"""

from __future__ import annotations

import contextlib
import ctypes

import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from kvjax import kernels  # noqa: E402
from kvjax_torch import borrow, dlpack  # noqa: E402
from kvjax_torch.calls import Call  # noqa: E402

ALIGNMENT = borrow.ALIGNMENT["cuda"]


class Kernel:
    """Two arrays, of which the second is written."""

    arguments = (
        kernels.Argument(jax.ShapeDtypeStruct((1, 8), np.int32), 4),
        kernels.Argument(jax.ShapeDtypeStruct((1, 16), np.float32), 4),
    )
    written = (1,)


class Host:
    """What happens on the host: numbers that kernels were given, addresses that were borrowed, and what raises."""

    def __init__(self, monkeypatch):
        self.numbers: list[tuple[int, ...]] = []
        self.borrowed: list[int] = []
        self.fails = False
        forms = [dlpack._Form.of(argument) for argument in Kernel.arguments]
        monkeypatch.setattr(dlpack, "_program", lambda _: (self.program, forms))
        monkeypatch.setattr(dlpack, "_borrowed", {})
        monkeypatch.setattr(dlpack._Form, "view", host_view)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        from_dlpack = jax.dlpack.from_dlpack

        def counted(lent, copy):
            assert copy is False
            self.borrowed.append(lent._tensor.data_ptr())
            return from_dlpack(lent._tensor)  # a copy perhaps: the host asks for 64 bytes

        monkeypatch.setattr(jax.dlpack, "from_dlpack", counted)

    def program(self, numbers, amount, *arrays):
        assert amount == 2
        self.numbers.append(numbers)
        if self.fails:
            raise RuntimeError("no kernel")
        given = arrays[1]
        result = given + 0
        given.delete()  # donated
        return [result]


def host_view(form, address, rows, device):
    memory = (ctypes.c_uint8 * (rows * form.row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(form.dtype).view(rows, *form.shape)


@pytest.fixture
def host(monkeypatch) -> Host:
    return Host(monkeypatch)


def aligned(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Memory that begins at a multiple of 64 bytes, which JAX borrows on the host too."""
    memory = torch.zeros(size + 64, dtype=dtype)
    return memory[-memory.data_ptr() % 64 // memory.element_size() :][:size]


def call(slots: torch.Tensor, pages: torch.Tensor) -> Call:
    return Call(Kernel(), (7,), (slots, pages), 2)


def test_a_call_borrows_one_array_when_it_has_come_before(host):
    slots, pages = aligned(torch.int32, 64), aligned(torch.float32, 64)
    for _ in range(4):
        dlpack.run(call(slots, pages))
    first = slots.data_ptr()
    assert host.borrowed == [first, pages.data_ptr(), first, first, first]
    assert host.numbers == [(7, 0, 0)] * 4


def test_arrays_are_told_where_in_them_tensors_begin(host):
    slots, pages = aligned(torch.int32, 64), aligned(torch.float32, 64)
    dlpack.run(call(slots[1:17], pages[6:40]))
    assert host.numbers == [(7, 1, 2)]
    assert host.borrowed == [slots.data_ptr(), pages.data_ptr() + ALIGNMENT]


def test_an_array_that_somebody_deleted_is_borrowed_again(host):
    slots, pages = aligned(torch.int32, 64), aligned(torch.float32, 64)
    dlpack.run(call(slots, pages))
    for array in list(dlpack._borrowed.values()):
        array.delete()
    dlpack.run(call(slots, pages))
    assert host.borrowed == [slots.data_ptr(), pages.data_ptr()] * 2


def test_nothing_is_kept_of_what_was_given_to_a_kernel_that_failed(host):
    slots, pages = aligned(torch.int32, 64), aligned(torch.float32, 64)
    host.fails = True
    with pytest.raises(RuntimeError, match="no kernel"):
        dlpack.run(call(slots, pages))
    host.fails = False
    dlpack.run(call(slots, pages))
    assert host.borrowed == [slots.data_ptr(), pages.data_ptr()] * 2


def test_no_more_than_so_many_are_kept(host, monkeypatch):
    monkeypatch.setattr(dlpack, "_KEPT", 7)
    slots = aligned(torch.int32, 64)
    caches = [aligned(torch.float32, 64) for _ in range(10)]
    for pages in caches:
        dlpack.run(call(slots, pages))
        assert len(dlpack._borrowed) <= 7
    assert len(dlpack._borrowed) > 2


@pytest.mark.parametrize("start", range(0, 9))
@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 5), (16, 1)), ((3, 16), (16, 1)), ((2, 3, 4), (20, 4, 1)), ((1,), (9,))]
)
def test_the_rows_hold_the_whole_tensor(start, shape, strides):
    form = dlpack._Form.of(Kernel.arguments[1])
    tensor = aligned(torch.float32, 128).as_strided(shape, strides, start)
    address, rows, beginning = form.place(tensor)
    assert address % ALIGNMENT == 0
    assert address + beginning * form.unit == tensor.data_ptr()
    last = tensor[(-1,) * tensor.dim()].data_ptr() + tensor.element_size()
    assert (rows - 1) * form.row_bytes < last - address <= rows * form.row_bytes
