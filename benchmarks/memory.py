"""How much memory there is to measure in, asked before it is taken."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Bytes that arrays on the device may still take."""
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() == "gpu" else None
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else host_free_bytes()


def host_free_bytes() -> int:
    """The same of the host: what the machine has left, or the container where that has less."""
    machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # what the system would give up of its caches counts as free
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        machine = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    return machine if limit is None or used is None else min(machine, limit - used)


def _number(path: Path) -> int | None:
    words = path.read_text().split() if path.exists() else []
    return int(words[0]) if words and words[0].isdecimal() else None


def why_too_large(device_bytes: int, host_bytes: int = 0) -> str | None:
    """Why so many bytes cannot be allocated; `None` if they can."""
    if jax.default_backend() != "gpu":
        device_bytes, host_bytes = device_bytes + host_bytes, 0
    needs = (("the device", device_bytes, free_bytes()), ("the host", host_bytes, host_free_bytes()))
    for where, needed, free in needs:
        if needed > free:
            return f"too little memory: needs {needed / 2**30:,.1f} GiB on {where}, where {free / 2**30:,.1f} are free"
    return None


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, XLA's, torch's or CUDA's."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("RESOURCE_EXHAUSTED", "out of memory", "can't allocate memory")
    )
