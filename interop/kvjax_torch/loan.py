"""What JAX has of torch's memory, and the end of Python, which waits for it to come back.

JAX gives memory back when the last program that reads it has ended, on a thread of its own, and torch takes it back in
Python. Where that thread wants Python while Python ends, the process aborts.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import time
import weakref
from collections.abc import Iterator

import jax

_LONGEST_END = 2
"""Seconds at most that the end of Python waits. Nothing that came back long after it has been seen to abort."""

_TO_TAKE_BACK = 0.02
"""Seconds that a thread is given to end with what it takes back: it may want Python once more."""


class Loan:
    """Memory that torch has lent. What lends it holds this, and nothing else does: it lives until JAX gives it back.

    Attributes:
      address: where it begins.
      platform: JAX's name of the device that it is on, which is torch's too.
    """

    was_made = False

    def __init__(self, address: int, platform: str) -> None:
        self.address, self.platform = address, platform
        Loan.was_made = True
        # Not a WeakSet: it runs Python where memory is taken back, and cannot be read while another thread lends.
        _loans.add(weakref.ref(self, _loans.discard))


_loans: set[weakref.ref[Loan]] = set()


@atexit.register  # before what JAX has registered, which may let go of its devices: it was imported earlier
def _wait() -> None:
    """Waits for memory that only programs have. Arrays keep theirs until after the end, where none has aborted."""
    if not Loan.was_made:
        return
    end = time.monotonic() + _LONGEST_END
    while _is_coming_back() and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(_TO_TAKE_BACK)


def _is_coming_back() -> bool:
    """Whether JAX has more loans of some memory than arrays."""
    loans = [loan for reference in _loans.copy() if (loan := reference()) is not None]
    lent = collections.Counter(loan.address for loan in loans)
    held = collections.Counter(
        address for platform in {loan.platform for loan in loans} for address in _addresses_of_arrays(platform)
    )
    return not lent <= held


def _addresses_of_arrays(platform: str) -> Iterator[int]:
    for array in jax.live_arrays(platform):
        with contextlib.suppress(RuntimeError):  # deleted, or its program has failed
            # Shares are arrays too from when they are first asked for, so an array that is not divided is not asked.
            shares = [shard.data for shard in array.addressable_shards] if len(array.devices()) > 1 else [array]
            yield from (share.unsafe_buffer_pointer() for share in shares)
