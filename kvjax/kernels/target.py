"""The GPU that kernels are compiled for: number of multiprocessors, and available instructions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU model; by default an H100 or H200, whose instructions later GPUs support too.

    Attributes:
      multiprocessors: number of streaming multiprocessors.
      compute_capability: major and minor.
    """

    multiprocessors: int = 132
    compute_capability: tuple[int, int] = (9, 0)

    @classmethod
    def of(cls, device: Any) -> Target:
        """The target of a `jax.Device` or `jax.sharding.AbstractDevice`; what it lacks has its default."""
        multiprocessors = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
        capability = getattr(device, "compute_capability", None)
        return cls(
            int(multiprocessors) if multiprocessors else cls.multiprocessors,
            _capability(capability) if capability else cls.compute_capability,
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
