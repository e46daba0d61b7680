"""What JAX has of torch's memory on GPUs, and the end of Python, which waits for it to come back.

JAX gives memory back when the last program that reads it has ended, on a thread of its own, and torch takes it back in
Python. Where that thread wants Python while Python ends, the process aborts.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref

import jax

_LONGEST_END = 2
"""Seconds at most that the end of Python waits. What comes back long after it is left where it is, and does no harm."""

_TO_TAKE_BACK = 0.02
"""Seconds that a thread is given to end with what it takes back: it may want Python once more."""


class Lent:
    """Memory that torch has lent. What lends it holds this, and nothing else does: it lives until JAX gives it back."""

    ever = False

    def __init__(self, address: int) -> None:
        self.address = address
        _lent.add(self)
        Lent.ever = True


_lent: weakref.WeakSet[Lent] = weakref.WeakSet()


@atexit.register
def _wait() -> None:
    """Waits for memory that only programs of JAX's still have. What arrays hold comes back after the end."""
    if not Lent.ever:
        return
    end = time.monotonic() + _LONGEST_END
    while _is_coming_back() and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(_TO_TAKE_BACK)


def _is_coming_back() -> bool:
    return bool(_lent) and not {lent.address for lent in _lent} <= _held_by_arrays()


def _held_by_arrays() -> set[int]:
    addresses = set()
    for array in jax.live_arrays("gpu"):
        with contextlib.suppress(RuntimeError):  # deleted, or its program has failed
            addresses |= {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    return addresses
