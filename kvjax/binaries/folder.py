"""Compiled kernels in a folder, for later processes.

An entry is a file of a header, the key and the kernel, with a checksum of both. If a file is anything else, or has
another key, its kernel is compiled again and the file overwritten. Nothing in a file runs before the GPU runs the
kernel. Files are renamed when complete, so several processes may read and write at once and end at any time. The folder
and its files must be the user's own and writable by nobody else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import struct
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from kvjax.errors import KVCacheValueError, KVCacheWarning, shown

FOLDER_VARIABLE = "KVJAX_CACHE_DIR"
SIZE_VARIABLE = "KVJAX_CACHE_SIZE"
DEFAULT_SIZE = 512
"""MiB that the entries of a folder may take."""

_HEADER = struct.Struct("<8sIIQ32s")  # magic, version, bytes of the key, bytes of the kernel, checksum
_MAGIC, _VERSION = b"kvjaxbin", 1
_MAX_ENTRY = 64 << 20
_ENTRY = re.compile(r"[0-9a-f]{64}\.kernel")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.kernel\.[0-9a-f]{16}")
_ABANDONED_AFTER = 3600.0
"""Seconds after which a file that was not renamed is taken for one of a process that has ended."""

_warned: set[Path] = set()


class _UnusableError(Exception):
    """Why a folder is not used."""


class Entry(NamedTuple):
    """A file of the folder.

    Attributes:
      name: its name.
      size: its bytes.
      used: when it was last used, in seconds since the epoch.
    """

    name: str
    size: int
    used: float


def folder_of(variables: Mapping[str, str]) -> Path | None:
    """The folder that environment variables name: `KVJAX_CACHE_DIR`, else `kvjax` in the user's folder of caches.

    Returns None if the cache is switched off: `KVJAX_CACHE_DIR` is empty or "0".
    """
    named = variables.get(FOLDER_VARIABLE)
    if named is not None:
        return None if named in ("", "0") else Path(os.path.expanduser(named)).absolute()
    caches = variables.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # XDG says to ignore it then
        caches = os.path.expanduser("~/.cache")
    return Path(caches, "kvjax") if os.path.isabs(caches) else None


def size_of(variables: Mapping[str, str]) -> int:
    """The bytes that entries may take: `KVJAX_CACHE_SIZE` in MiB, by default 512.

    Raises:
      KVCacheValueError: the variable is not a whole number of MiB, 1 or more.
    """
    text = variables.get(SIZE_VARIABLE, str(DEFAULT_SIZE))
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise KVCacheValueError(f"{SIZE_VARIABLE}: got {shown(text)}, expected a whole number of MiB, 1 or more")
    return int(text) << 20


class Folder:
    """A folder of compiled kernels.

    Args:
      path: where; it is made, for the user alone, when an entry is written.
      max_bytes: the most that entries may take. The least recently used ones are removed.
    """

    def __init__(self, path: Path, max_bytes: int = DEFAULT_SIZE << 20) -> None:
        self.path, self.max_bytes = path, max_bytes

    def read(self, key: str) -> bytes | None:
        """The kernel of a key; None if there is none, or the file is not what was written for this key."""
        name = _name(key)
        try:
            with self._opened() as folder:
                kernel = _unpacked(_content(folder, name), key.encode())
                with contextlib.suppress(OSError):
                    os.utime(name, dir_fd=folder, follow_symlinks=False)
                return kernel
        except _UnusableError as error:
            _warn(self.path, "read from", error)
        except (OSError, ValueError):  # missing, unreadable or damaged
            pass
        return None

    def write(self, key: str, kernel: bytes) -> None:
        """Keeps the kernel of a key, and removes entries if there are too many; warns once where that fails."""
        name = _name(key)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened() as folder:
                self._write(folder, name, _packed(key.encode(), kernel))
                self._evict(folder, name)
        except (OSError, _UnusableError) as error:
            _warn(self.path, "kept in", error)

    def entries(self) -> list[Entry]:
        """The entries, the least recently used first; none where the folder is missing or not used.

        Raises:
          OSError: the folder cannot be read.
          KVCacheValueError: the folder is not the user's own.
        """
        with self._for_command() as folder:
            return [] if folder is None else _entries(folder)

    def clear(self) -> list[Entry]:
        """Removes all entries, and what ended processes left; returns the entries. Other files remain.

        Raises:
          OSError: something cannot be removed.
          KVCacheValueError: the folder is not the user's own.
        """
        with self._for_command() as folder:
            if folder is None:
                return []
            entries = _entries(folder)
            for name in (*(entry.name for entry in entries), *_abandoned(folder, 0)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
            return entries

    @contextlib.contextmanager
    def _for_command(self) -> Iterator[int | None]:
        try:
            with self._opened() as folder:
                yield folder
        except FileNotFoundError:
            yield None
        except _UnusableError as error:
            raise KVCacheValueError(f"{FOLDER_VARIABLE}: got {self.path}: {error}") from None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder, through which all files are reached: a path may come to mean another folder."""
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise _UnusableError("it is a symbolic link or a file, expected a folder") from None
            raise
        try:
            _check_owner(os.fstat(folder))
            yield folder
        finally:
            os.close(folder)

    def _write(self, folder: int, name: str, content: bytes) -> None:
        temporary = f".{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise

    def _evict(self, folder: int, newest: str) -> None:
        entries = _entries(folder)
        excess = sum(entry.size for entry in entries) - self.max_bytes
        removed = _abandoned(folder, _ABANDONED_AFTER)
        for entry in entries:
            if excess > 0 and entry.name != newest:
                removed.append(entry.name)
                excess -= entry.size
        for name in removed:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.unlink(name, dir_fd=folder)


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _UnusableError(f"it belongs to user {status.st_uid}, expected {os.geteuid()}, who runs this process")
    if mode := stat.S_IMODE(status.st_mode) & 0o022:
        raise _UnusableError(f"others may write to it (mode {mode:04o}), expected only its owner")


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}.kernel"


def _content(folder: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not stat.S_ISREG(status.st_mode) or not is_own or status.st_size > _MAX_ENTRY:
            raise ValueError("not an entry")
        return file.read(_MAX_ENTRY + 1)


def _packed(key: bytes, kernel: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, len(key), len(kernel), _checksum(key, kernel)) + key + kernel


def _unpacked(content: bytes, key: bytes) -> bytes:
    """The kernel in a file's content.

    Raises:
      ValueError: it is not what `_packed` makes for this key.
    """
    if len(content) < _HEADER.size:
        raise ValueError("too short")
    magic, version, key_size, kernel_size, checksum = _HEADER.unpack_from(content)
    end = _HEADER.size + key_size
    if (magic, version, len(content)) != (_MAGIC, _VERSION, end + kernel_size):
        raise ValueError("of another form")
    kernel = content[end:]
    if content[_HEADER.size : end] != key or checksum != _checksum(key, kernel):
        raise ValueError("damaged, or of another key")
    return kernel


def _checksum(key: bytes, kernel: bytes) -> bytes:
    return hashlib.sha256(len(key).to_bytes(8, "little") + key + kernel).digest()


def _entries(folder: int) -> list[Entry]:
    return sorted(_files(folder, _ENTRY), key=lambda entry: (entry.used, entry.name))


def _abandoned(folder: int, seconds: float) -> list[str]:
    now = time.time()
    return [entry.name for entry in _files(folder, _TEMPORARY) if now - entry.used >= seconds]


def _files(folder: int, pattern: re.Pattern[str]) -> Iterator[Entry]:
    for name in os.listdir(folder):
        if pattern.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    yield Entry(name, status.st_size, status.st_mtime)


def _warn(path: Path, verb: str, error: Exception) -> None:
    """Warns once of each folder."""
    if path in _warned:
        return
    _warned.add(path)
    why = error.strerror if isinstance(error, OSError) else error
    warnings.warn(
        f"kernels compiled for torch are not {verb} {path}: {why}; {FOLDER_VARIABLE} names another folder, 0 none",
        KVCacheWarning,
        skip_file_prefixes=(os.path.dirname(__file__),),
    )
