"""The errors kvjax raises, and the one sentence they share: what came, and what would be accepted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import jax


class KVCacheError(Exception):
    """Base of the errors that only kvjax raises."""


class UnsupportedError(KVCacheError, NotImplementedError):
    """An implementation cannot serve this call. Asked for by name it is raised; `implementation=None` moves on."""


class KVCacheValueError(KVCacheError, ValueError):
    """A value that kvjax does not take: an unknown dtype, a wrong shape, a layer that no model has."""


class KVCacheTypeError(KVCacheError, TypeError):
    """An argument of the wrong kind or element type."""


class KVCacheMemoryError(KVCacheError, MemoryError):
    """A cache that no device has the memory for."""


class OutOfBlocksError(KVCacheMemoryError):
    """A `BlockPool` has fewer free blocks than were asked for; nothing was taken.

    Attributes:
      num_needed: blocks that were asked for.
      num_free: blocks that nobody holds.
      num_blocks: blocks of the pool.
    """

    def __init__(self, num_needed: int, num_free: int, num_blocks: int) -> None:
        super().__init__(num_needed, num_free, num_blocks)
        self.num_needed, self.num_free, self.num_blocks = num_needed, num_free, num_blocks

    def __str__(self) -> str:
        return f"out of blocks: {self.num_needed} needed, and {self.num_free} of the pool's {self.num_blocks} are free"


class KVCacheWarning(UserWarning):
    """Something was passed over that a caller may want to know of; what is returned is documented and usable."""


MOST_SHOWN = 500
"""Characters of a value that a message holds: a whole quantization scheme, not a whole configuration."""


def shown(value: object) -> str:
    """`repr` of what came, for a message: cut where it is long, and never an error of its own."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python prints no int of thousands of digits, and nothing nested as deep
        return f"{type(value).__name__} too large to print"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"


def type_name(value: object) -> str:
    """The name of a value's type, for a message: the public one, where JAX's own class is private."""
    return "jax.Array" if isinstance(value, jax.Array) else type(value).__name__


def kind_of(value: object) -> str:
    """What something is, for a message: `a jax.Array`, `an int`, `None`."""
    if value is None:
        return "None"
    name = type_name(value)
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_of_torch(value: object) -> bool:
    """Whether it is a tensor of torch, which kvjax does not import."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def for_torch(value: object) -> str:
    """The end of a message about a value that has no place here: where torch's tensors have theirs, if it is one."""
    return "; kvjax_torch has the operations on torch's tensors" if is_of_torch(value) else ""


def got_expected(what: str, got: object, accepted: Iterable[object]) -> str:
    """Words `got X, expected one of ...`, with the nearest accepted string where `got` looks like a typo."""
    choices = [str(choice) for choice in accepted]
    message = f"{what}: got {shown(got)}, expected one of {', '.join(choices)}"
    if isinstance(got, str):
        near = difflib.get_close_matches(got[:MOST_SHOWN].strip().lower(), choices, n=1)
        if near:
            message += f" (did you mean {near[0]!r}?)"
    return message
