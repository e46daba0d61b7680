"""The CUDA driver's current context, which says which GPU a thread uses. torch and JAX both change it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

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
