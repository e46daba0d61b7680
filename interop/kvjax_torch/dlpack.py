"""Runs kernels on torch's memory through JAX, where the launcher is unavailable.

Each call lends its tensors' memory to JAX by DLPack, runs the kernel as a JAX program and gives the memory back. What
the kernel writes is donated, so JAX writes in place. Shapes and numbers are constants of a JAX program: it compiles for
each number of tokens and of blocks, and for each offset of an array from a multiple of 256 bytes, where JAX's own
arrays begin.

JAX's stream waits for torch's when memory is lent, and torch's stream waits for JAX's when a result is lent back. JAX's
arrays do not own the memory. It may be freed after the call, since torch reuses it only on streams that wait for the
program. The host waits for neither stream, unless it has queued as many programs as JAX allows.
"""

from __future__ import annotations

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
from kvjax_torch.exports import Export

_COPYING = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")
"""Options of JAX under which it does not donate, or reads results on the host and uses arguments again."""

_ALIGNMENT = kernels.BASE_ALIGNMENT

_LEGACY_STREAM = 1
"""DLPack's name of CUDA's default stream, whose handle in torch is 0."""


def run(call: Call) -> None:
    """Runs a kernel on the CUDA device of its tensors. Callers hold that device's lock.

    Raises:
      UnsupportedError: JAX is in a debugging mode in which it does not write in place, or did not write in place; or a
        CUDA graph is being captured.
    """
    device = call.device.index
    with torch.cuda.device(device):
        _check_can_run()
    start_jax()
    with torch.cuda.device(device):  # lending synchronizes with the current stream of the current device
        forms = _forms(call.kernel)
        lent = [form.aligned_rows(tensor) for form, tensor in zip(forms, call.tensors, strict=True)]
        program = _program(call.kernel, (*call.counts, *(rows.offset for rows in lent)), call.amount)
        views = (form.view(rows.address, rows.num_rows, device) for form, rows in zip(forms, lent, strict=True))
        results = program(*(jax.dlpack.from_dlpack(_Lender(view), copy=False) for view in views))
        stream = torch._C._cuda_getCurrentRawStream(device) or _LEGACY_STREAM
        try:
            # Makes torch's stream wait for the program. First, so that it also waits if the check fails.
            results[-1].__dlpack__(stream=stream)  # type: ignore[call-arg]
            for i, result in zip(call.kernel.written, results, strict=True):
                if (address := result.unsafe_buffer_pointer()) != lent[i].address:
                    raise UnsupportedError(
                        f"JAX {jax.__version__} has not written in place: got a result at {address:#x}, expected"
                        f" {lent[i].address:#x}"
                    )
        finally:
            # JAX keeps an array that it exported until its next program, but torch may free the memory before that.
            results[-1].delete()


def _check_can_run() -> None:
    if options := [name for name in _COPYING if getattr(jax.config, name)]:
        raise UnsupportedError(f"got {', '.join(options)} turned on, expected it off: JAX would not write in place")
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "got a stream that torch.cuda.graph records, expected one that runs: no graph can record what JAX runs"
        )


class _Lender:
    """A tensor as a DLPack producer for JAX, whose stream then waits for torch's current one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if stream is None:  # torch would make its default stream wait instead
            raise UnsupportedError(f"JAX {jax.__version__} names no stream to wait for torch's, expected it to")
        return self._tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class _Memory(Export):
    """Bytes on a GPU, from which torch makes a tensor that does not own them."""

    def __init__(self, address: int, nbytes: int) -> None:
        super().__init__(address, "cuda")
        self.__cuda_array_interface__ = _interface(address, nbytes)


@functools.lru_cache(1 << 14)
def _interface(address: int, nbytes: int) -> dict[str, Any]:
    """Describes bytes. Cached because torch 2.11 leaks a reference to each value at each use."""
    return {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _bytes_at(address: int, nbytes: int, device: int) -> torch.Tensor:
    return torch.as_tensor(_Memory(address, nbytes), device=torch.device("cuda", device))


class _AlignedRows(NamedTuple):
    """The aligned rows that hold a tensor.

    Attributes:
      address: address of the first row.
      num_rows: number of rows.
      offset: offset of the tensor from there, in units of its argument.
    """

    address: int
    num_rows: int
    offset: int


class _Form(NamedTuple):
    """The form of a kernel's argument as a JAX array: rows of elements, and the unit of offsets into them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bytes: int
    unit: int

    @classmethod
    def of(cls, argument: kernels.Argument) -> _Form:
        """The form of an argument of a kernel."""
        array = argument.array
        row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
        return cls(torch_dtype(array.dtype), array.shape[1:], row_bytes, argument.unit)

    def aligned_rows(self, tensor: torch.Tensor) -> _AlignedRows:
        """The rows that hold a tensor. The last may reach past its end; kernels do not read what is there.

        Raises:
          UnsupportedError: the tensor does not begin at a multiple of the unit.
        """
        address = tensor.data_ptr()
        before = address % _ALIGNMENT
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = before + (last + 1) * tensor.element_size()
        offset, rest = divmod(before, self.unit)
        if rest:
            raise UnsupportedError(f"got an array at address {address:#x}, expected a multiple of {self.unit} bytes")
        return _AlignedRows(address - before, -(-nbytes // self.row_bytes), offset)

    def view(self, address: int, rows: int, device: int) -> torch.Tensor:
        """A tensor of rows that begin at an address, which does not own them."""
        return _bytes_at(address, rows * self.row_bytes, device).view(self.dtype).view(rows, *self.shape)


@functools.lru_cache(maxsize=1024)
def _forms(kernel: kernels.AnyCount) -> list[_Form]:
    return [_Form.of(argument) for argument in kernel.arguments]


@functools.lru_cache(maxsize=4096)
def _program(kernel: kernels.AnyCount, numbers: tuple[int, ...], amount: int) -> Callable[..., list[jax.Array]]:
    """The JAX program that runs a kernel with these numbers and this amount on its arrays."""
    return jax.jit(functools.partial(kernel.with_numbers, numbers, amount), donate_argnums=kernel.written)
