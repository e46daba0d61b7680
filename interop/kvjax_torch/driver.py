"""The CUDA driver's contexts: which GPU a thread means. torch and JAX both change it, and torch goes by it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import jax


@functools.cache
def library() -> ctypes.CDLL | None:
    """The driver; `None` on a machine without one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.cache
def primary_context(device: int) -> ctypes.c_void_p:
    """The context that torch uses on a device, and everyone else who asks for none of their own."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(handle), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context


def make_current(context: ctypes.c_void_p) -> None:
    """Makes a context this thread's."""
    call("cuCtxSetCurrent", context)


@contextlib.contextmanager
def unchanged_context() -> Iterator[None]:
    """Gives the thread back, at the end, the context that it has at the beginning, be it none."""
    before = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(before))
    try:
        yield
    finally:
        make_current(before)


@functools.cache
def start_jax() -> None:
    """Starts JAX, which makes its last GPU current if it has any, and leaves the one that torch means."""
    before, cuda = ctypes.c_void_p(), library()
    if cuda is not None:
        cuda.cuCtxGetCurrent(ctypes.byref(before))  # fails before anybody has started the driver, and none is current
    jax.devices()
    if cuda is not None and jax.default_backend() == "gpu":
        make_current(before)


def call(function: str, *arguments: object) -> None:
    """Calls the driver.

    Raises:
      RuntimeError: it returns an error.
    """
    if result := getattr(library(), function)(*arguments):
        raise RuntimeError(f"{function} of the CUDA driver returned error {result}")
