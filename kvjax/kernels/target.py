"""The GPU that kernels are compiled for: its multiprocessors, shared memory and available instructions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

MAX_SHARED_BYTES = 227 * 1024
"""Bytes of shared memory that a thread block may have on compute capability 9.0 and 10.x, the most of any GPU."""

_SHARED_BYTES = {12: 99 * 1024}
"""The same by major compute capability, where it is less."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU model; by default an H100 or H200, whose instructions later GPUs support too.

    Attributes:
      multiprocessors: number of streaming multiprocessors.
      compute_capability: major and minor.
      shared_bytes: bytes of shared memory that a thread block may have.
    """

    multiprocessors: int = 132
    compute_capability: tuple[int, int] = (9, 0)
    shared_bytes: int = MAX_SHARED_BYTES

    @classmethod
    def of(cls, device: object) -> Target:
        """The target of a `jax.Device` or `jax.sharding.AbstractDevice`; missing attributes get defaults."""
        multiprocessors = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
        text = getattr(device, "compute_capability", None)
        capability = _capability(text) if text else cls.compute_capability
        shared_bytes = getattr(device, "shared_memory_per_block_optin", None)
        return cls(
            int(multiprocessors) if multiprocessors else cls.multiprocessors,
            capability,
            int(shared_bytes) if shared_bytes else _SHARED_BYTES.get(capability[0], MAX_SHARED_BYTES),
        )

    @property
    def converts_e2m1(self) -> bool:
        """Whether an instruction converts two e2m1 codes to float16."""
        return self.compute_capability >= (10, 0)


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


_current: ContextVar[Target] = ContextVar("target", default=Target())  # noqa: B039  # it is frozen


def current() -> Target:
    """The target of kernels traced now."""
    return _current.get()


@contextlib.contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Traces kernels in this context for `target`."""
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)
