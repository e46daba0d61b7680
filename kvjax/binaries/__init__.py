"""Kernels compiled to CUDA binaries for launchers, and the folder that keeps them for later processes.

`compiled` takes a kernel's binary from the folder, or compiles it and keeps it there. What is found there needs no
tracing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from kvjax.binaries.binary import Binary as Binary
from kvjax.binaries.binary import Device as Device
from kvjax.binaries.binary import LaunchUnavailableError as LaunchUnavailableError
from kvjax.binaries.binary import Shape as Shape
from kvjax.binaries.encoding import NoStableFormError
from kvjax.binaries.folder import Folder, folder_of, size_of
from kvjax.binaries.keys import key_of
from kvjax.binaries.module import given_integers as given_integers
from kvjax.binaries.workers import compile_all, start_ahead
from kvjax.errors import KVCacheValueError
from kvjax.kernels.launchable import AnyCount

_compilations = 0
_count_lock = threading.Lock()


def num_compilations() -> int:
    """The number of kernels that this process compiled or had others compile; those from the folder do not count."""
    return _compilations


def prepare() -> None:
    """Starts the processes in which `compiled` compiles, unless the folder has kernels; they import JAX meanwhile.

    Raises:
      KVCacheValueError: `KVJAX_COMPILE_PROCESSES` is invalid.
    """
    path = folder_of(os.environ)
    with contextlib.suppress(OSError, KVCacheValueError):  # `compiled` warns of a folder that it cannot use
        if path is not None and Folder(path).entries():
            return
    start_ahead()


def compiled(kernels: Sequence[AnyCount], device: Device) -> list[Binary]:
    """The binaries of kernels for a device: from the folder, or compiled, several at once.

    Raises:
      LaunchUnavailableError: JAX or its plugin lacks something that compiling needs.
      KVCacheValueError: an environment variable of the folder's is invalid.
    """
    global _compilations
    path = folder_of(os.environ)
    folder = None if path is None else Folder(path, size_of(os.environ))
    keys = [None if folder is None else _key(kernel, device) for kernel in kernels]
    found = [None if folder is None or key is None else _read(folder, key) for key in keys]
    missing = [i for i, binary in enumerate(found) if binary is None]
    for i, binary in zip(missing, compile_all([kernels[i] for i in missing], device), strict=True):
        found[i] = binary
        with _count_lock:
            _compilations += 1
        if folder is not None and (key := keys[i]) is not None:
            folder.write(key, binary.to_bytes())
    return [binary for binary in found if binary is not None]


def _key(kernel: AnyCount, device: Device) -> str | None:
    try:
        return key_of(kernel, device)
    except NoStableFormError:
        return None


def _read(folder: Folder, key: str) -> Binary | None:
    content = folder.read(key)
    try:
        return None if content is None else Binary.from_bytes(content)
    except ValueError:
        return None
