"""Running kernels on torch's memory through JAX, where nothing can launch them on torch's streams.

JAX borrows the memory and is given what is written for its own (donation), so that the kernel writes where torch will
look. Shapes and numbers are constants of a JAX program: it is compiled for each number of tokens and blocks, and for
each way that arrays begin between two multiples of 16 bytes. JAX's stream waits for torch's when JAX borrows the first
array, and torch's for JAX's when torch borrows a result; the host waits for neither.

To borrow an array takes the host as long as to run the program, so arrays are kept by address, for calls that pass
memory there again. They own nothing: nobody may read them in between, since torch may have freed what lies there.
"""

from __future__ import annotations

import atexit
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import torch

from kvjax import UnsupportedError, kernels
from kvjax_torch.borrow import ALIGNMENT
from kvjax_torch.calls import Call
from kvjax_torch.driver import start_jax
from kvjax_torch.dtypes import torch_dtype

_KEPT = 4096
"""Arrays at most, then all are dropped; a model has a few for each layer, and as many that come with every step."""

_COPYING = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")
"""Options of JAX under which nothing is donated, or results are read, on the host, and arguments used again."""

_borrowed: dict[Any, jax.Array] = {}


def run(call: Call) -> None:
    """Runs a kernel on the CUDA device of its tensors. Callers hold a lock.

    Raises:
      UnsupportedError: JAX is asked to debug in a way that makes it write elsewhere; or it has written elsewhere.
    """
    start_jax()
    if options := [name for name in _COPYING if getattr(jax.config, name)]:
        raise UnsupportedError(f"got {', '.join(options)} turned on, expected it off: JAX would not write in place")
    program, forms = _program(call.kernel)
    if len(_borrowed) + len(forms) > _KEPT:
        _borrowed.clear()
    places: list[Any] = []
    arrays: list[jax.Array] = []
    numbers = list(call.counts)
    with torch.cuda.device(call.device):  # of which torch lends, and whose stream it makes JAX wait for
        for i, (tensor, form) in enumerate(zip(call.tensors, forms, strict=True)):
            address, rows, beginning = form.place(tensor)
            # What is written is given away, so it is an array of its own, whatever else lies there.
            place = call.device, address, rows, form, i if i in call.kernel.written else None
            # Borrowing the first array makes JAX wait; its program waits for all that it is given.
            array = _borrowed.get(place) if arrays else None
            if array is None or array.is_deleted():  # as by a caller who deletes all of `jax.live_arrays()`
                lent = _Lent(form.view(address, rows, call.device), is_waited_for=bool(arrays))
                array = jax.dlpack.from_dlpack(lent, copy=False)
                if arrays:
                    _borrowed[place] = array
            places.append(place)
            arrays.append(array)
            numbers.append(beginning)
        for i in call.kernel.written:
            del _borrowed[places[i]]
        written = program(tuple(numbers), call.amount, *arrays)
        torch.utils.dlpack.from_dlpack(written[-1])  # for torch's stream to wait for JAX's
    results = {places[i]: array for i, array in zip(call.kernel.written, written, strict=True)}
    for (_, address, *_), array in results.items():
        if (result := array.unsafe_buffer_pointer()) != address:
            raise UnsupportedError(
                f"JAX {jax.__version__} has not written in place: got a result at {result:#x}, expected {address:#x}"
            )
    _borrowed.update(results)


@atexit.register
def _give_back() -> None:
    """Drops all arrays while Python still runs: torch takes its tensors back in Python, whatever thread drops them."""
    try:
        jax.block_until_ready([array for array in _borrowed.values() if not array.is_deleted()])
    finally:
        _borrowed.clear()


class _Lent:
    """A tensor for JAX to borrow, with an event on torch's stream unless that is waited for already."""

    def __init__(self, tensor: torch.Tensor, is_waited_for: bool) -> None:
        self._tensor, self._stream = tensor, {"stream": -1} if is_waited_for else {}

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options | self._stream)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class _Memory:
    """Bytes on a GPU, for torch to make a tensor of that does not own them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class _Form(NamedTuple):
    """How JAX sees memory that a kernel takes: rows of elements; and in what units it is told where tensors begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bytes: int
    unit: int

    @classmethod
    def of(cls, argument: kernels.Argument) -> _Form:
        """Of an argument of a kernel."""
        array = argument.array
        row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
        return cls(torch_dtype(array.dtype), array.shape[1:], row_bytes, argument.unit)

    def place(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """Where the rows that a tensor lies in begin, how many they are, and how many units into them it begins.

        The last row is whole, though the tensor may end before it does: nobody reads what lies there.
        """
        address = tensor.data_ptr()
        before = address % ALIGNMENT["cuda"]
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = before + (last + 1) * tensor.element_size()
        beginning, rest = divmod(before, self.unit)
        if rest:
            raise UnsupportedError(f"got an array at address {address:#x}, expected a multiple of {self.unit} bytes")
        return address - before, -(-nbytes // self.row_bytes), beginning

    def view(self, address: int, rows: int, device: torch.device) -> torch.Tensor:
        """Rows that begin at an address."""
        memory = torch.as_tensor(_Memory(address, rows * self.row_bytes), device=device)
        return memory.view(self.dtype).view(rows, *self.shape)


@functools.lru_cache(maxsize=1024)
def _program(kernel: kernels.AnyCount) -> tuple[Callable[..., Any], list[_Form]]:
    """What runs a kernel, given its numbers, its amount and its arrays; and the form of these."""
    static = 0, 1
    donated = tuple(len(static) + i for i in kernel.written)
    program = jax.jit(kernel.with_numbers, static_argnums=static, donate_argnums=donated)
    return program, [_Form.of(argument) for argument in kernel.arguments]
