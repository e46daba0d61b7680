"""What decides the code of a kernel, without tracing it: two processes with equal keys would compile the same code."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from kvjax import started
from kvjax.binaries.binary import Device
from kvjax.binaries.encoding import NoStableFormError, encode_kernel
from kvjax.kernels.launchable import AnyCount

SOURCES = Path(__file__).parents[1]
"""The folder of kvjax's sources, which say what kernels do."""

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda13-plugin",
    "ml_dtypes",
    "numpy",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink",  # its ptxas is used where it is found
    "nvidia-nvjitlink-cu12",
)

_HARMLESS_OPTIONS = (
    "jax_compilation_cache",
    "jax_compiler_detailed_logging",
    "jax_cuda_visible_devices",
    "jax_debug_log",
    "jax_default_device",
    "jax_dump_ir",
    "jax_explain_cache_misses",
    "jax_log",
    "jax_persistent_cache",
    "jax_platform",
    "jax_traceback",
    "jax_transfer_guard",
)
"""Prefixes of the names of JAX's options that do not change code; all others may."""


def key_of(kernel: AnyCount, device: Device) -> str:
    """The key of a kernel compiled for a device: a text that says all that its code depends on.

    Raises:
      NoStableFormError: some of that is not the same in every process, or changed since this process imported it.
    """
    facts = {
        "kernel": encode_kernel(kernel),
        "device": dataclasses.asdict(device),
        "sources": sources_digest(SOURCES),
        "packages": dict(_versions()),
        "python": list(sys.version_info[:3]),
        "options": options(),
        "environment": environment(os.environ),
    }
    return json.dumps(facts, sort_keys=True)


def options() -> dict[str, Any]:
    """JAX's options that may change the code of a kernel, as this thread has set them."""
    found = {}
    for name, value in jax.config.values.items():
        if not name.startswith(_HARMLESS_OPTIONS):
            value = getattr(jax.config, name, value)
            found[name] = value.name if isinstance(value, enum.Enum) else value
            if not isinstance(found[name], (bool, int, float, str, type(None))):
                raise NoStableFormError(f"{name} = {value!r}")
    return found


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that may change the code of a kernel."""
    return {
        name: value
        for name, value in variables.items()
        if name == "XLA_FLAGS" or (name.startswith("MOSAIC_GPU_") and not name.startswith("MOSAIC_GPU_DUMP"))
    }


@functools.cache
def sources_digest(folder: Path) -> str:
    """A digest of the Python sources under a folder.

    Raises:
      NoStableFormError: there are none, or one changed after this process imported them.
    """
    digest = hashlib.sha256()
    paths = sorted(folder.rglob("*.py"))
    for path in paths:
        status = path.stat()
        if max(status.st_mtime, status.st_ctime) > started.TIME:  # a copied file may keep its mtime
            raise NoStableFormError(f"{path}, which changed after this process began")
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    if not paths:
        raise NoStableFormError(f"no sources in {folder}")
    return digest.hexdigest()


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)
