"""Runs kernels on torch's current stream, compiled when they are first asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kvjax import UnsupportedError, binaries, kernels
from kvjax_torch.launch import loading

MIN_COMPUTE_CAPABILITY = 9

REMEMBERED = 4096
"""The most kinds of calls that are remembered; a model has a few, and one more for each size of cache."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One run of a kernel.

    Attributes:
      kernel: the kernel.
      counts: its counts.
      tensors: its arrays.
      amount: the size that its number of programs depends on, or several.
    """

    kernel: kernels.AnyCount
    counts: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    amount: int | tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        return self.tensors[-1].device


def compile_once(every: tuple[kernels.AnyCount, ...], device: torch.device) -> None:
    """Compiles kernels, several at once, the first time that they are asked for together."""
    if _asks(every):
        return
    _compile_once(every, device)


@functools.lru_cache(maxsize=REMEMBERED)
def _compile_once(every: tuple[kernels.AnyCount, ...], device: torch.device) -> None:
    check_capability(device.index)
    compile_all(every, device)


def _asks(every: Iterable[kernels.AnyCount]) -> bool:
    """Records kernels for `compile_operations` if it runs in this thread; returns whether it does."""
    asked: list[kernels.AnyCount] | None = getattr(_thread, "asked", None)
    if asked is None:
        return False
    asked.extend(every)
    return True


def run(call: Call) -> Launcher | None:
    """Runs a call; returns what was launched, or None if there was nothing to launch."""
    if not call.amount:
        return None
    if _asks([call.kernel]):
        raise _AskedError
    launched = launcher(call.kernel, call.device)
    launched.launch(call.counts, tuple(tensor.data_ptr() for tensor in call.tensors), call.amount)
    if (note := getattr(_thread, "note", None)) is not None:
        note(call, launched)
    return launched


_thread = threading.local()


@contextlib.contextmanager
def recorded(note: Callable[[Call, Launcher], None]) -> Iterator[None]:
    """Within it, `note` gets the calls that this thread runs, with what was launched."""
    before = getattr(_thread, "note", None)
    _thread.note = note
    try:
        yield
    finally:
        _thread.note = before


class _AskedError(Exception):
    """Ends an operation whose kernels are asked for, before its first launch."""


@functools.cache
def prepare() -> None:
    """Starts, once, the processes that compile kernels, if there is a GPU and no kernel on disk.

    Raises:
      KVCacheValueError: `KVJAX_COMPILE_PROCESSES` is invalid.
    """
    if torch.cuda.is_available():
        binaries.prepare()


def compile_operations(operations: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Runs operations up to their first launch by `run`, and compiles the kernels that all of them ask for at once.

    Compiling all kernels at once takes as long as those of one operation. An operation whose kernels are known may be
    replayed, so that it launches them.
    """
    asked = _thread.asked = list[kernels.AnyCount]()
    try:
        for operation in operations:
            with contextlib.suppress(_AskedError):
                operation()
    finally:
        _thread.asked = None
    compile_all([*dict.fromkeys(asked)], device)


def compile_all(every: Sequence[kernels.AnyCount], device: torch.device) -> None:
    """Compiles and loads kernels, several at once."""
    if _asks(every):
        return
    with _naming_tested_versions():
        loading.compile_ahead(every, device)
    for kernel in every:
        launcher(kernel, device)


def launcher(kernel: kernels.AnyCount, device: torch.device) -> Launcher:
    """A compiled kernel on a device.

    Raises:
      UnsupportedError: JAX or its plugin lacks something that this needs.
    """
    with _naming_tested_versions():
        return _compiled(kernel, device)


@contextlib.contextmanager
def _naming_tested_versions() -> Iterator[None]:
    try:
        yield
    except binaries.LaunchUnavailableError as error:
        raise UnsupportedError(
            f"kvjax's kernels cannot be launched on torch's streams: {error}; tested with {loading.TESTED}"
        ) from error


@functools.lru_cache(maxsize=1024)
def _compiled(kernel: kernels.AnyCount, device: torch.device) -> Launcher:
    return Launcher(loading.compile_kernel(kernel, device), kernel.num_programs)


class Launcher(NamedTuple):
    """A compiled kernel, and its number of programs as a function of a call's amount."""

    kernel: loading.Kernel
    num_programs: Callable[[Any], int]

    def launch(self, counts: tuple[int, ...], addresses: tuple[int, ...], amount: int | tuple[int, ...]) -> None:
        """Launches the kernel on arrays at these addresses."""
        self.kernel((*kernels.packed(counts), *addresses), self.num_programs(amount))


@functools.lru_cache(maxsize=64)
def check_capability(device: int) -> None:
    """Raises `UnsupportedError` for a GPU that there are no kernels for."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < MIN_COMPUTE_CAPABILITY:
        raise UnsupportedError(
            f"got tensors on cuda:{device} (sm_{major}{minor}), expected cpu, or cuda of sm_90 or later"
        )
