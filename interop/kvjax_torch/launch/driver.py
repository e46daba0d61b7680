"""The CUDA driver: kernels, and the current context, which says which GPU a thread uses; torch and JAX change it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax


@functools.cache
def library() -> ctypes.CDLL | None:
    """The CUDA driver library; `None` on a machine without one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.cache
def primary_context(device: int) -> ctypes.c_void_p:
    """The primary context of a device, which torch uses."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(handle), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context


def make_current(context: ctypes.c_void_p) -> None:
    """Makes a context current on this thread."""
    call("cuCtxSetCurrent", context)


@contextlib.contextmanager
def unchanged_context() -> Iterator[None]:
    """Restores the thread's current context, or that it has none, on exit."""
    before = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(before))
    try:
        yield
    finally:
        make_current(before)


_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def load(code: bytes, name: str, shared_bytes: int) -> int:
    """Loads a kernel into the current context, for good; it may be launched with this much dynamic shared memory.

    Returns the driver's handle of it.

    Raises:
      RuntimeError: the driver does not load such code, or a kernel of this name is not in it.
    """
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), code)
    try:
        call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if shared_bytes:
            call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
    except RuntimeError:
        call("cuModuleUnload", module)
        raise
    return function.value or 0


_enqueue_type = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
_CONFIG_WORDS = 7
"""64-bit words of a CUlaunchConfig: grid, block and shared memory of 32 bits each, 4 bytes of padding, the stream, and
a pointer to attributes with their number, both 0."""


class _Frame(NamedTuple):
    """The memory of a launch.

    Attributes:
      pack: writes the configuration and then the parameter.
      config: address of the configuration.
      parameters: address of a list of one address, that of the parameter.
      owners: the memory.
    """

    pack: Callable[..., None]
    config: int
    parameters: int
    owners: tuple[Any, ...]


def launcher(
    function: int,
    num_arguments: int,
    passed: Sequence[int],
    grid: tuple[int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
) -> Callable[[int, Sequence[int], int], None]:
    """A function that enqueues a kernel, given a stream, the kernel's arguments and the grid's x.

    Args:
      function: the kernel, loaded in the context that is current at a launch.
      num_arguments: arguments of the function that is returned, 64-bit integers.
      passed: indices of those that the kernel takes, in one parameter.
      grid: thread blocks along y and z.
      block: threads of a block along x, y and z.
      shared_bytes: dynamic shared memory of a block.
    """
    cuda: Any = library()
    enqueue = _enqueue_type(("cuLaunchKernelEx", cuda)) if isinstance(cuda, ctypes.CDLL) else cuda.cuLaunchKernelEx
    words = struct.Struct(f"={_CONFIG_WORDS + len(passed)}Q")
    above_x, *constants = grid[0] << 32, grid[1] | block[0] << 32, block[1] | block[2] << 32, shared_bytes

    def new_frame() -> _Frame:
        memory = ctypes.create_string_buffer(words.size)
        address = ctypes.addressof(memory)
        parameters = (ctypes.c_void_p * 1)(address + 8 * _CONFIG_WORDS)
        pack = functools.partial(words.pack_into, memory, 0)
        return _Frame(pack, address, ctypes.addressof(parameters), (memory, parameters))

    # A launch takes a frame and gives it back. The driver has read it when it returns.
    frames: list[_Frame] = []

    def launch(stream: int, arguments: Sequence[int], num_programs: int) -> None:
        try:
            frame = frames.pop()
        except IndexError:
            frame = new_frame()
        frame[0](num_programs | above_x, *constants, stream, 0, 0, *arguments)
        error = enqueue(frame[1], function, frame[2], None)
        frames.append(frame)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx of the CUDA driver returned error {error}")

    if list(passed) == list(range(num_arguments)):
        return launch
    if len(passed) < 2:
        return lambda stream, arguments, num_programs: launch(stream, [arguments[i] for i in passed], num_programs)
    of_all = operator.itemgetter(*passed)
    return lambda stream, arguments, num_programs: launch(stream, of_all(arguments), num_programs)


@functools.cache
def start_jax() -> None:
    """Starts JAX and restores the current context, since JAX makes its last GPU current."""
    before, cuda = ctypes.c_void_p(), library()
    if cuda is not None:
        cuda.cuCtxGetCurrent(ctypes.byref(before))  # fails, with no context current, if the driver is not initialized
    jax.devices()
    if cuda is not None and jax.default_backend() == "gpu":
        make_current(before)


def call(function: str, *arguments: object) -> None:
    """Calls a function of the driver.

    Raises:
      RuntimeError: the driver returns an error.
    """
    if result := getattr(library(), function)(*arguments):
        raise RuntimeError(f"{function} of the CUDA driver returned error {result}")
