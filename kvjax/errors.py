"""The errors that kvjax raises, and the wording of their messages: what was given and what is accepted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import jax


class KVCacheError(Exception):
    """Base class of kvjax's errors."""


class UnsupportedError(KVCacheError, NotImplementedError):
    """An implementation cannot serve this call. Raised only if requested; `implementation=None` falls back."""


class KVCacheValueError(KVCacheError, ValueError):
    """An invalid value: an unknown dtype, a wrong shape, a layer index out of range."""


class KVCacheTypeError(KVCacheError, TypeError):
    """An argument of the wrong type or dtype."""


class KVCacheMemoryError(KVCacheError, MemoryError):
    """Not enough device memory for a cache."""


class OutOfBlocksError(KVCacheMemoryError):
    """A `BlockPool` has fewer free blocks than requested; the pool is unchanged.

    Attributes:
      num_needed: blocks requested.
      num_free: free blocks, and of `BlockPool.append` those that windows have passed, which it frees first.
      num_blocks: blocks of the pool.
      what: what the pool has run out of and the numbers count: "blocks", or for example "states".
    """

    def __init__(self, num_needed: int, num_free: int, num_blocks: int, what: str = "blocks") -> None:
        super().__init__(num_needed, num_free, num_blocks, what)
        self.num_needed, self.num_free, self.num_blocks, self.what = num_needed, num_free, num_blocks, what

    def __str__(self) -> str:
        free = f"{self.num_free} of the pool's {self.num_blocks} are free"
        return f"out of {self.what}: {self.num_needed} needed, and {free}"


class KVCacheWarning(UserWarning):
    """Something was ignored or assumed that a caller may want to know; the result is documented and usable."""


MAX_SHOWN = 500
"""Most characters of a value in a message: fits a quantization scheme, not a configuration."""


def shown(value: object) -> str:
    """Returns `repr(value)` for a message, truncated if long; never raises."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, deep nesting
        return f"{type(value).__name__} too large to print"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


def type_name(value: object) -> str:
    """Returns the name of a value's type for a message: the public one where JAX's class is private."""
    return "jax.Array" if isinstance(value, jax.Array) else type(value).__name__


def kind_of(value: object) -> str:
    """Returns what a value is, for a message: `a jax.Array`, `an int`, `None`."""
    if value is None:
        return "None"
    name = type_name(value)
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_of_torch(value: object) -> bool:
    """Returns whether a value is a torch tensor, without importing torch."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def for_torch(value: object) -> str:
    """Returns a message's suffix that points to kvjax_torch if the value is a torch tensor, else an empty string."""
    return "; kvjax_torch has the operations on torch's tensors" if is_of_torch(value) else ""


def got_expected(
    what: str, got: object, accepted: Iterable[object], *, hint: str | None = None, like: str | None = None
) -> str:
    """Returns `got X, expected one of ... (hint)`; the default hint is the accepted string closest to `like`.

    `like` defaults to the given string, for a typo.
    """
    choices = [str(choice) for choice in accepted]
    message = f"{what}: got {shown(got)}, expected one of {', '.join(choices)}"
    if hint is not None:
        message += f" ({hint})"
    elif isinstance(got, str):
        near = difflib.get_close_matches((like or got)[:MAX_SHOWN].strip().lower(), choices, n=1)
        if near:
            message += f" (did you mean {near[0]!r}?)"
    return message
