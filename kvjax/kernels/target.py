"""The GPU that kernels are made for: how many multiprocessors it has, and which instructions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of GPU; by default an H100 or H200, whose instructions later ones have too.

    Attributes:
      multiprocessors: how many it has.
      compute_capability: major and minor.
    """

    multiprocessors: int = 132
    compute_capability: tuple[int, int] = (9, 0)

    @classmethod
    def of(cls, device: Any) -> Target:
        """That of a `jax.Device` or `jax.sharding.AbstractDevice`; what it does not say is as by default."""
        multiprocessors = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
        capability = getattr(device, "compute_capability", None)
        return cls(
            int(multiprocessors) if multiprocessors else cls.multiprocessors,
            _capability(capability) if capability else cls.compute_capability,
        )

    @property
    def converts_e2m1(self) -> bool:
        """Whether an instruction makes two float16 of two e2m1 codes."""
        return self.compute_capability >= (10, 0)


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


_current: ContextVar[Target] = ContextVar("target", default=Target())  # noqa: B039  # it is frozen


def current() -> Target:
    """What kernels traced now are for."""
    return _current.get()


@contextlib.contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Kernels traced in this context are for `target`."""
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)
