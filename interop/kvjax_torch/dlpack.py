"""Running kernels on torch's memory through JAX, where nothing can launch them on torch's streams.

JAX borrows the memory and is given what is written for its own (donation), so that the kernel writes where torch will
look. Shapes and numbers are constants of a JAX program: each number of tokens is compiled for. JAX's stream waits for
torch's when JAX borrows the first array, and torch's for JAX's when torch borrows a result; the host waits for neither.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch

from kvjax import UnsupportedError, kernels
from kvjax_torch.borrow import ALIGNMENT
from kvjax_torch.calls import Call
from kvjax_torch.driver import start_jax
from kvjax_torch.dtypes import torch_dtype


def run(call: Call) -> None:
    """Runs a kernel on the CUDA device of its tensors.

    Raises:
      UnsupportedError: JAX cannot borrow the memory as the kernel takes it.
    """
    start_jax()
    arrays: list[jax.Array] = []
    numbers = list(call.counts)
    with torch.cuda.device(call.device):  # of which torch lends, and whose stream it makes JAX wait for
        for tensor, argument in zip(call.tensors, call.kernel.arguments, strict=True):
            lent, beginning = _lent(tensor, argument)
            arrays.append(jax.dlpack.from_dlpack(_AlreadyWaitedFor(lent) if arrays else lent, copy=False))
            if argument.unit:
                numbers.append(beginning)
        written = _program(call.kernel)(tuple(numbers), call.amount, *arrays)
        torch.utils.dlpack.from_dlpack(written[-1])  # for torch's stream to wait for JAX's


class _AlreadyWaitedFor:
    """A tensor, for JAX to borrow without another event on torch's stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options | {"stream": -1})

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@functools.lru_cache(maxsize=1024)
def _program(kernel: kernels.AnyCount) -> Any:
    static = 0, 1
    donated = tuple(len(static) + i for i in kernel.written)
    return jax.jit(kernel.with_numbers, static_argnums=static, donate_argnums=donated)


def _lent(tensor: torch.Tensor, argument: kernels.Argument) -> tuple[torch.Tensor, int]:
    """A tensor's memory in the shape that a kernel takes it in, and how many units into it the tensor begins."""
    shape, dtype = argument.array.shape[1:], torch_dtype(argument.array.dtype)
    if not argument.unit:
        return tensor.view(-1).view(dtype).view(-1, *shape), 0
    storage = tensor.untyped_storage()
    offset = tensor.data_ptr() - storage.data_ptr()
    strides = [1]
    for size in reversed(shape):
        strides.insert(0, strides[0] * size)
    row_bytes = strides[0] * dtype.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    rows = -(-(last + 1) * tensor.element_size() // row_bytes)
    # The last row is whole, though the tensor ends before it does: the array begins before the tensor if need be.
    start = min(offset, storage.nbytes() - rows * row_bytes)
    start -= (storage.data_ptr() + start) % ALIGNMENT["cuda"]
    if start < 0:
        raise UnsupportedError(
            f"JAX cannot borrow a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}: got a storage"
            f" of {storage.nbytes()} bytes, expected at least {rows * row_bytes}"
        )
    lent = torch.empty(0, dtype=dtype, device=tensor.device)
    lent.set_(storage, start // dtype.itemsize, (rows, *shape), strides)
    return lent, (offset - start) // argument.unit
