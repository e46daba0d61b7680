"""Queries free memory before a benchmark allocates it."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Returns the free bytes on the device."""
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() == "gpu" else None
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else host_free_bytes()


def host_free_bytes() -> int:
    """Returns the free bytes on the host, limited by the container."""
    machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # includes reclaimable caches
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        machine = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    return machine if limit is None or used is None else min(machine, limit - used)


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def why_too_large(device_bytes: int, host_bytes: int = 0) -> str | None:
    """Returns why this many bytes cannot be allocated, or `None`."""
    if jax.default_backend() != "gpu":
        device_bytes, host_bytes = device_bytes + host_bytes, 0
    needs = (("the device", device_bytes, free_bytes()), ("the host", host_bytes, host_free_bytes()))
    for where, needed, free in needs:
        if needed > free:
            return f"too little memory: needs {needed / 2**30:,.1f} GiB on {where}, where {free / 2**30:,.1f} are free"
    return None


def is_exhausted(error: BaseException) -> bool:
    """Returns whether an error of Python, XLA, torch or CUDA means out of memory."""
    return isinstance(error, MemoryError) or any(
        message in str(error) for message in ("RESOURCE_EXHAUSTED", "out of memory", "can't allocate memory")
    )
