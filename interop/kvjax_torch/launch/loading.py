"""Loads kernels, compiled for a GPU, into the context that torch uses."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvjax import binaries
from kvjax.kernels import AnyCount
from kvjax_torch.launch import driver

TESTED = "jax 0.11.1 to 0.12 with its CUDA plugin"
"""The versions that the launcher was tested with, for the error where something is missing."""

_thread = threading.local()
_known: weakref.WeakKeyDictionary[AnyCount, dict[int, _Once]] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel compiled for one CUDA device.

    Attributes:
      device: index of the device.
      context: the CUDA context that it was loaded in.
      launch: enqueues the kernel on a stream, given its arguments and the number of programs.
    """

    device: int
    context: ctypes.c_void_p
    launch: Callable[[int, Sequence[int], int], None]

    def __call__(self, arguments: Sequence[int], num_programs: int) -> None:
        """Enqueues the kernel on torch's current stream of the device, without waiting for anything."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        is_torchs_device = torch._C._cuda_getDevice() == self.device
        if is_torchs_device and getattr(_thread, "has_context", False):
            self.launch(stream, arguments, num_programs)
            return
        with driver.unchanged_context():
            driver.make_current(self.context)
            self.launch(stream, arguments, num_programs)
        if is_torchs_device:  # torch makes it current at the thread's first operation
            driver.make_current(self.context)
            _thread.has_context = True


@dataclasses.dataclass
class _Once:
    """A kernel on a device, that the first thread to hold the lock compiles and loads."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    binary: binaries.Binary | None = None
    kernel: Kernel | None = None


def compile_kernel(kernel: AnyCount, device: torch.device) -> Kernel:
    """A kernel on a CUDA device, compiled and loaded if this process has not done so.

    Raises:
      LaunchUnavailableError: JAX or its plugin lacks something that this needs.
    """
    once = _once(kernel, _index(device))
    with once.lock:
        if once.kernel is None:
            if once.binary is None:
                [once.binary] = binaries.compiled([kernel], device_of(device))
            once.kernel = _loaded(once.binary, len(kernel.args), _index(device))
            once.binary = None
        return once.kernel


def compile_ahead(kernels: Sequence[AnyCount], device: torch.device) -> None:
    """Compiles kernels that `compile_kernel` will load, several at once. Of one kernel alone it does nothing.

    Raises:
      LaunchUnavailableError: JAX or its plugin lacks something that this needs.
    """
    missing = {kernel: _once(kernel, _index(device)) for kernel in kernels}
    missing = {kernel: once for kernel, once in missing.items() if once.kernel is None and once.binary is None}
    if len(missing) > 1:
        for once, binary in zip(missing.values(), binaries.compiled(list(missing), device_of(device)), strict=True):
            once.binary = binary


def device_of(device: torch.device) -> binaries.Device:
    """The properties of a device that kernels are compiled for."""
    properties: Any = torch.cuda.get_device_properties(device)  # not all versions declare all that they have
    capability = f"{properties.major}.{properties.minor}"
    return binaries.Device(properties.name, capability, properties.shared_memory_per_block_optin)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _once(kernel: AnyCount, index: int) -> _Once:
    with _known_lock:
        return _known.setdefault(kernel, {}).setdefault(index, _Once())


def _loaded(binary: binaries.Binary, num_arguments: int, index: int) -> Kernel:
    torch.cuda.init()
    context = driver.primary_context(index)
    with driver.unchanged_context():
        driver.make_current(context)
        function = driver.load(binary.code, binary.name, binary.shape.shared_bytes)
    shape = binary.shape
    launch = driver.launcher(function, num_arguments, binary.passed, shape.grid, shape.block, shape.shared_bytes)
    return Kernel(index, context, launch)
