"""Running kernels on torch's memory through JAX, where nothing can launch them on torch's streams.

JAX borrows the memory and is given what is written for its own (donation), so that the kernel writes where torch will
look. Shapes and numbers are constants of a JAX program: it is compiled for each number of tokens and blocks, and for
each way that arrays begin between two multiples of 256 bytes, where JAX's own begin.

To borrow an array takes the host as long as to run the program, so arrays are kept by address, for calls that pass
memory there again. They own nothing: nobody may read them in between, since torch may have freed what lies there.

JAX's stream waits for torch's by an array that nobody reads, a signal: a program waits for all that it is given, and
JAX has the signal only after an event on torch's stream, unless that has passed already. torch's stream waits for JAX's
where a result is lent. The host waits for neither, unless it has queued as many programs as JAX lets it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import torch

from kvjax import UnsupportedError, kernels
from kvjax_torch.calls import Call
from kvjax_torch.driver import start_jax
from kvjax_torch.dtypes import torch_dtype
from kvjax_torch.loan import Loan

_KEPT = 4096
"""Arrays at most, and runs at most, of each GPU; a model has a few for each layer, and others with every step."""

_COPYING = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")
"""Options of JAX under which nothing is donated, or results are read, on the host, and arguments used again."""

_ALIGNMENT = kernels.BASE_ALIGNMENT

_LEGACY_STREAM = 1
"""What the protocol calls CUDA's default stream, which torch calls 0."""


def run(call: Call, known_as: Any = None) -> None:
    """Runs a kernel on the CUDA device of its tensors. Callers hold that device's lock.

    Args:
      call: what runs, on what.
      known_as: what `run_again` will know the call by.

    Raises:
      UnsupportedError: JAX is asked to debug in a way that makes it write elsewhere, or it has written elsewhere; or a
        CUDA graph is captured.
    """
    device = call.device.index
    with torch.cuda.device(device):
        _check_can_run()  # as each run does, but before there is anything to start or to keep
    start_jax()
    loans = _loans.setdefault(device, _Loans(device))
    known = _Run(loans, *loans.prepared(call), call.kernel.written)
    known()
    if known_as is not None:
        loans.runs[known_as] = known


def run_again(device: int, known_as: Any) -> bool:
    """Runs a call again that differs in nothing from one before; whether there was one. Callers hold the device's lock.

    Raises:
      UnsupportedError: as `run`.
    """
    loans = _loans.get(device)
    known = None if loans is None else loans.runs.get(known_as)
    if known is None:
        return False
    known()
    return True


class _Loans:
    """What JAX has borrowed of one GPU.

    Attributes:
      device: which.
      borrowed: rows of memory, by what they are.
      runs: kernels with what they are called with, by what callers know them by; of rows that are in `borrowed`.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.borrowed: dict[Any, _Borrowed] = {}
        self.runs: dict[Any, _Run] = {}

    @functools.cached_property
    def signal(self) -> _Signal:
        """What every program waits for."""
        return _Signal(self.device)

    def prepared(self, call: Call) -> tuple[Callable[..., list[jax.Array]], list[_Borrowed]]:
        """The program that runs a call, and the memory that it takes."""
        if len(self.runs) >= _KEPT:
            self.runs.clear()
        if len(self.borrowed) + len(call.tensors) > _KEPT:
            self.drop()
        numbers, memory = list(call.counts), []
        for i, (tensor, form) in enumerate(zip(call.tensors, _forms(call.kernel), strict=True)):
            address, rows, beginning = form.place(tensor)
            # What is written is given away, so it is an array of its own, whatever else lies there.
            place = address, rows, form, i if i in call.kernel.written else None
            memory.append(self.borrowed.setdefault(place, _Borrowed(form, address, rows, self.device)))
            numbers.append(beginning)
        return _program(call.kernel, tuple(numbers), call.amount), memory

    def drop(self) -> None:
        """Forgets everything."""
        self.runs.clear()
        self.borrowed.clear()

    def end(self) -> None:
        """Waits for every program and has JAX give everything back, whoever may hold it; nothing runs afterwards."""
        arrays = [memory.array for memory in self.borrowed.values()]
        if (signal := vars(self).pop("signal", None)) is not None:
            arrays.append(signal.end())
        self.drop()
        for array in arrays:
            if array is not None and not array.is_deleted():
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    array.block_until_ready()
                array.delete()


_loans: dict[int, _Loans] = {}


@atexit.register  # before the end waits for it: that was imported earlier
def _give_back() -> None:
    """Has JAX give back everything, for which the end of Python then waits."""
    while _loans:
        _loans.popitem()[1].end()


def _check_can_run() -> None:
    if options := [name for name in _COPYING if getattr(jax.config, name)]:
        raise UnsupportedError(f"got {', '.join(options)} turned on, expected it off: JAX would not write in place")
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "got a stream that torch.cuda.graph records, expected one that runs: no graph can record what JAX runs"
        )


class _Run(NamedTuple):
    """A kernel with everything that it is called with.

    Attributes:
      loans: of the GPU that it runs on.
      program: what JAX runs; takes the arrays and a signal, and returns those that it has written.
      memory: of its arrays.
      written: which of them it writes.
    """

    loans: _Loans
    program: Callable[..., list[jax.Array]]
    memory: list[_Borrowed]
    written: tuple[int, ...]

    def __call__(self) -> None:
        with torch.cuda.device(self.loans.device):  # of which torch lends
            _check_can_run()
            stream = torch._C._cuda_getCurrentRawStream(self.loans.device)
            self.loans.signal.mark(stream)  # early, to have passed by the time that it is asked for
            written = [self.memory[i] for i in self.written]
            results = self.program(*self._arrays(written), self.loans.signal.after())
            try:
                for memory, result in zip(written, results, strict=True):
                    if (address := result.unsafe_buffer_pointer()) != memory.address:
                        raise UnsupportedError(
                            f"JAX {jax.__version__} has not written in place: got a result at {address:#x}, expected"
                            f" {memory.address:#x}"
                        )
            finally:
                # Makes torch's stream wait for the program. Last, for the host waits here until it has been enqueued.
                results[-1].__dlpack__(stream=stream or _LEGACY_STREAM)  # type: ignore[call-arg]
        for memory, result in zip(written, results, strict=True):
            memory.array = result  # and not before: what failed is not to be used again

    def _arrays(self, given_away: list[_Borrowed]) -> list[jax.Array]:
        """All that the program takes of memory, in no variable of the caller's: an error would keep that."""
        arrays = [memory.borrow() for memory in self.memory]
        for memory in given_away:
            memory.array = None
        return arrays


class _Borrowed:
    """Rows on a GPU, and the array that JAX has of them.

    Attributes:
      address: where they begin.
      array: `None` before they are first borrowed, and while they are given away.
    """

    def __init__(self, form: _Form, address: int, rows: int, device: int) -> None:
        self.address, self.array = address, None  # type: int, jax.Array | None
        self._view = functools.partial(form.view, address, rows, device)

    def borrow(self) -> jax.Array:
        """The array, borrowed if need be, with no wait for torch."""
        if self.array is None or self.array.is_deleted():  # as by a caller who deletes all of `jax.live_arrays()`
            self.array = jax.dlpack.from_dlpack(_Producer(self._view()), copy=False)
        return self.array


class _Producer:
    """A tensor for JAX to borrow without waiting for torch."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._device = tensor, tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        # `torch.Tensor.__dlpack__` would make JAX's stream wait.
        return torch.utils.dlpack.to_dlpack(self._tensor)  # type: ignore[attr-defined]

    def __dlpack_device__(self) -> Any:
        return self._device


class _Signal(_Producer):
    """A tensor that JAX waits for torch to lend.

    It stays, with all that `torch.Tensor.__dlpack__` makes anew, which would take the host longer than the wait.
    """

    def __init__(self, device: int) -> None:
        # Lent as the rest is, without its owner, so that the end of Python knows when it is back.
        self._owner = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
        super().__init__(_bytes_at(self._owner.data_ptr(), self._owner.nbytes, device).view(torch.int32))
        # JAX gives the tensor back on a thread of its own. Were Python alone left to hold it, that would take Python's
        # lock, which the next call wants. So a capsule holds it too.
        self._held = super().__dlpack__()
        self._index = device
        self._event = torch.cuda.Event()
        self._given: jax.Array | None = None

    def end(self) -> jax.Array | None:
        """Lets go of the tensor, which is not lent again, and returns the array that JAX still has of it."""
        del self._tensor, self._held
        return self._given

    def mark(self, stream: int) -> None:
        """Notes how far torch's stream has to come, for `after`."""
        self._event.record(_stream(stream, self._index))

    def after(self) -> jax.Array:
        """An array that is there when torch's stream has come so far."""
        # It often has, where the GPU waits for the host. To ask the stream itself would not do: the default one has to
        # wait for others, but only its next work does, of which it knows nothing yet.
        if self._event.query():
            if self._given is None or self._given.is_deleted():
                self._given = jax.dlpack.from_dlpack(_Producer(self._tensor), copy=False)
            return self._given
        return jax.dlpack.from_dlpack(self, copy=False)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if stream is None:
            raise UnsupportedError(f"JAX {jax.__version__} names no stream to wait for torch's, expected it to")
        self._event.wait(_stream(0 if stream == _LEGACY_STREAM else stream, self._index))
        return super().__dlpack__()


@functools.lru_cache(maxsize=64)
def _stream(handle: int, device: int) -> torch.cuda.Stream:
    # Not `torch.cuda.ExternalStream`: of 0, the default stream, some versions of torch make a new one.
    return torch.cuda.get_stream_from_external(handle, device)


class _Memory(Loan):
    """Bytes on a GPU, for torch to make a tensor of that does not own them."""

    def __init__(self, address: int, nbytes: int) -> None:
        super().__init__(address, "cuda")
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _bytes_at(address: int, nbytes: int, device: int) -> torch.Tensor:
    return torch.as_tensor(_Memory(address, nbytes), device=torch.device("cuda", device))


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
        before = address % _ALIGNMENT
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = before + (last + 1) * tensor.element_size()
        beginning, rest = divmod(before, self.unit)
        if rest:
            raise UnsupportedError(f"got an array at address {address:#x}, expected a multiple of {self.unit} bytes")
        return address - before, -(-nbytes // self.row_bytes), beginning

    def view(self, address: int, rows: int, device: int) -> torch.Tensor:
        """Rows that begin at an address."""
        return _bytes_at(address, rows * self.row_bytes, device).view(self.dtype).view(rows, *self.shape)


@functools.lru_cache(maxsize=1024)
def _forms(kernel: kernels.AnyCount) -> list[_Form]:
    return [_Form.of(argument) for argument in kernel.arguments]


@functools.lru_cache(maxsize=_KEPT)
def _program(kernel: kernels.AnyCount, numbers: tuple[int, ...], amount: int) -> Callable[..., list[jax.Array]]:
    """What runs a kernel with these numbers and this amount, given its arrays and a signal."""

    def program(*given: jax.Array) -> list[jax.Array]:
        *arrays, _ = given
        return kernel.with_numbers(numbers, amount, *arrays)

    return jax.jit(program, donate_argnums=kernel.written, keep_unused=True)
