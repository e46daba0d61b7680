"""Copies between a device's memory and the host's that run beside the device's programs."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from kvjax.errors import UnsupportedError

DRIVER = "libcuda.so.1"

_lock = threading.Lock()

_NON_BLOCKING = 1
"""CUDA's flag of a stream that does not wait for the default stream."""


class HostCopy(NamedTuple):
    """Addresses and a number of bytes."""

    to: int
    source: int
    num_bytes: int


def check(device: jax.Device) -> None:
    """Raises `UnsupportedError` for a device that is neither a CPU nor a GPU with CUDA's driver."""
    if device.platform == "cpu":
        return
    try:
        if device.platform != "gpu":
            raise OSError(f"it is a {device.platform}")
        ctypes.CDLL(DRIVER)
    except OSError as error:
        raise UnsupportedError(f"caches: got caches on {device}, expected a CPU or CUDA's GPUs: {error}") from error


def start(device: jax.Device, copies: Iterable[HostCopy]) -> None:
    """Starts copies to a device's memory or from it, of which the other side is host memory.

    A GPU's copy engines make them, at the full rate of the bus if the host memory is pinned, while kernels run.

    Raises:
      RuntimeError: CUDA's driver reports an error.
    """
    if device.platform == "cpu":
        for each in copies:
            ctypes.memmove(each.to, each.source, each.num_bytes)
        return
    driver, stream = _stream(device.local_hardware_id)
    for each in copies:
        to, source = ctypes.c_uint64(each.to), ctypes.c_uint64(each.source)
        _check(driver.cuMemcpyAsync(to, source, ctypes.c_size_t(each.num_bytes), stream))


def wait(device: jax.Device) -> None:
    """Waits until a device's copies are made; raises as `start` does."""
    if device.platform != "cpu":
        driver, stream = _stream(device.local_hardware_id)
        _check(driver.cuStreamSynchronize(stream))


def _stream(ordinal: int | None) -> tuple[Any, ctypes.c_void_p]:
    """Returns CUDA's driver with a GPU's context set in this thread, and a stream there."""
    with _lock:  # each GPU has one stream, which `wait` waits for
        driver, context, stream = _stream_and_context(ordinal)
    _check(driver.cuCtxSetCurrent(context))
    return driver, stream


@functools.cache
def _stream_and_context(ordinal: int | None) -> tuple[Any, ctypes.c_void_p, ctypes.c_void_p]:
    driver, context, stream = ctypes.CDLL(DRIVER), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))  # which JAX uses too
    _check(driver.cuCtxSetCurrent(context))
    _check(driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING))
    return driver, context, stream


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA's driver returned error {error} for a copy between the host and a device")
