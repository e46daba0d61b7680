"""The one dispatcher: which implementation of an operation serves a call."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import KVCacheValueError, UnsupportedError, got_expected


class Implementation(enum.StrEnum):
    """`MOSAIC` is Pallas Mosaic GPU (sm_90 and later), `XLA` runs anywhere."""

    MOSAIC = "mosaic"
    XLA = "xla"


def run(
    operation: str,
    implementation: str | None,
    candidates: Mapping[Implementation, Callable[..., Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls the implementation asked for, or for `None` the first of `candidates` that serves the call.

    Raises:
      KVCacheValueError: no such implementation.
      UnsupportedError: the one asked for cannot serve this call, or none can; with each one's reason.
    """
    if implementation is not None:
        try:
            chosen = Implementation(implementation)
        except ValueError:
            raise KVCacheValueError(got_expected("implementation", implementation, candidates)) from None
        if chosen not in candidates:
            raise UnsupportedError(got_expected(f"{operation}: implementation", implementation, candidates))
        return candidates[chosen](*args, **kwargs)
    reasons = []
    for name, candidate in candidates.items():
        try:
            return candidate(*args, **kwargs)
        except UnsupportedError as error:
            reasons.append(f"{name}: {error}")
    raise UnsupportedError(f"{operation}: no implementation serves this call; " + "; ".join(reasons))
