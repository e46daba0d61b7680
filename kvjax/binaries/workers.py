"""Compiles several kernels at once: in processes that do nothing else, and in this one.

Tracing and lowering take most of the time and hold Python's lock, so threads would take turns. This process compiles
what the others do not, because they end or fail.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from kvjax.binaries.binary import Binary, Device, LaunchUnavailableError
from kvjax.binaries.compiling import can_compile_for, compile_here, in_turn
from kvjax.binaries.encoding import NoStableFormError, encode_kernel
from kvjax.binaries.keys import SOURCES, environment, options, sources_digest
from kvjax.errors import KVCacheValueError, shown
from kvjax.kernels.launchable import AnyCount

PROCESSES_VARIABLE = "KVJAX_COMPILE_PROCESSES"
MOST_PROCESSES = 12
"""The most processes by default; each takes half a gigabyte of the host's memory and a second to begin."""

_PATIENCE = 300.0
"""Seconds for which a process may compile one kernel."""

_AHEAD = 600.0
"""Seconds for which processes that were started ahead wait."""

_live_lock = threading.Lock()
_live: set[_Worker] = set()
_waiting: list[_Worker] = []
"""The live processes that `start_ahead` started and `compile_all` does not use yet."""


def _forget() -> None:
    """Runs in a forked process, which must not write to its parent's pipes."""
    global _live_lock
    _live_lock = threading.Lock()
    _live.clear()
    _waiting.clear()


os.register_at_fork(after_in_child=_forget)


class _WorkerError(Exception):
    """A process did not compile a kernel."""


def processes_of(variables: Mapping[str, str]) -> int:
    """The most processes to compile in: `KVJAX_COMPILE_PROCESSES`, by default one less than the CPUs, and up to 12.

    Raises:
      KVCacheValueError: the variable is not a number from 0 to 256.
    """
    text = variables.get(PROCESSES_VARIABLE)
    if text is None:
        return min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1)
    if not re.fullmatch(r"[0-9]{1,3}", text) or int(text) > 256:
        raise KVCacheValueError(f"{PROCESSES_VARIABLE}: got {shown(text)}, expected a number from 0 to 256")
    return int(text)


def start_ahead() -> None:
    """Starts as many processes as are allowed. They import JAX, and the next `compile_all` uses them.

    They end when it returns, after ten minutes, or with this process.
    """
    _waiting.extend(_started())
    timer = threading.Timer(_AHEAD, _end_waiting)
    timer.daemon = True
    timer.start()


def compile_all(kernels: Sequence[AnyCount], device: Device) -> list[Binary]:
    """Compiles kernels for a device, several at once in processes, all of which have ended when it returns.

    Raises:
      LaunchUnavailableError: JAX or its plugin lacks something that this needs.
    """
    waiting = collections.deque(range(len(kernels)))
    done: dict[int, Binary] = {}

    def serve(worker: _Worker) -> None:
        while index := _taken(waiting):
            try:
                done[index[0]] = worker.compile(kernels[index[0]], device)
            except (_WorkerError, NoStableFormError):
                return

    if any(worker.environment != environment(os.environ) for worker in _waiting):
        _end_waiting()
    # This process compiles one of them, unless enough others were started ahead.
    helps = len(_waiting) < len(kernels)
    workers = list(itertools.islice(_new_workers(), len(kernels) - helps))
    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        while helps and (index := _taken(waiting)):
            done[index[0]] = _compile(kernels[index[0]], device)
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.end()
        _end_waiting()
    return [done[i] if i in done else _compile(kernel, device) for i, kernel in enumerate(kernels)]


def _taken(waiting: collections.deque[int]) -> tuple[int] | None:
    try:
        return (waiting.popleft(),)
    except IndexError:
        return None


def _compile(kernel: AnyCount, device: Device) -> Binary:
    """Compiles a kernel in this process, or in another if a thread is compiling here or this one must not."""
    if in_turn.acquire(blocking=False):
        try:
            if can_compile_for(device):
                return compile_here(kernel.function, kernel.args, device)
        finally:
            in_turn.release()
    for worker in _new_workers():
        try:
            return worker.compile(kernel, device)
        except (NoStableFormError, _WorkerError):
            break
        finally:
            worker.end()
    with in_turn:
        if can_compile_for(device):
            return compile_here(kernel.function, kernel.args, device)
    raise LaunchUnavailableError(
        f"this process compiled kernels for another GPU than {device.device_kind}; those for that one need a process of"
        f" their own, which failed or which {PROCESSES_VARIABLE} forbids"
    )


def _new_workers() -> Iterator[_Worker]:
    """Processes that wait, then new ones, as many as there may be."""
    with contextlib.suppress(IndexError):
        while True:
            yield _waiting.pop()
    yield from _started()


def _started() -> Iterator[_Worker]:
    while sys.executable and not getattr(sys, "frozen", False):  # a frozen program would run itself
        with _live_lock:
            if len(_live) >= processes_of(os.environ):
                return
            try:
                worker = _Worker()
            except OSError:
                return
            _live.add(worker)
        yield worker


def _end_waiting() -> None:
    with contextlib.suppress(IndexError):
        while True:
            _waiting.pop().end()


class _Worker:
    """A process that compiles, `kvjax.binaries.worker`.

    Attributes:
      environment: its environment variables that may change code.
    """

    def __init__(self) -> None:
        self.environment = environment(os.environ)
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        variables = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvjax.binaries.worker"],  # -P: not from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
        )

    def compile(self, kernel: AnyCount, device: Device) -> Binary:
        """Compiles a kernel there.

        Raises:
          _WorkerError: it failed.
          NoStableFormError: the kernel has no form to be sent in, or the sources changed since this process read them.
        """
        if self.environment != environment(os.environ):
            raise _WorkerError("the environment changed since it began")
        request = {
            "kernel": encode_kernel(kernel),
            "device": dataclasses.asdict(device),
            "sources": sources_digest(SOURCES),
            "options": options(),
        }
        sent, received = self._process.stdin, self._process.stdout
        if sent is None or received is None:
            raise _WorkerError("no pipes")
        # A process that hangs is ended, which also ends the read from it.
        with _ending_after(_PATIENCE, self._process):
            try:
                sent.write(json.dumps(request).encode() + b"\n")
                sent.flush()
                reply = _read_reply(received)
                return Binary.from_bytes(reply)
            except (OSError, ValueError) as error:
                raise _WorkerError(str(error)) from error

    def end(self) -> None:
        """Ends the process."""
        with _live_lock:
            _live.discard(self)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def _ending_after(seconds: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read_reply(received: IO[bytes]) -> bytes:
    head = received.readline()
    reply: dict[str, Any] = json.loads(head or b'{"error": "it ended"}')
    if "error" in reply:
        raise ValueError(reply["error"])
    content = received.read(reply["size"])
    if len(content) != reply["size"]:
        raise ValueError("it ended")
    return content
