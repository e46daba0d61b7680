"""Tracks memory that torch has lent to JAX, so that the interpreter's exit can wait until JAX has released it.

JAX releases memory when the last program that reads it has ended, on a thread of its own, where torch's deleter needs
the GIL. If that thread asks for the GIL while the interpreter exits, the process aborts.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import time
import weakref
from collections.abc import Iterator

import jax

_MAX_WAIT = 2
"""The most seconds that the exit waits. No memory released long after the exit has been seen to abort."""

_RELEASE_TIME = 0.02
"""Seconds for a thread to finish releasing memory: it may need the GIL once more."""


class Export:
    """Memory that torch has lent. Only the lent tensor refers to it, so it lives until JAX releases the memory.

    Attributes:
      address: address of the memory.
      platform: the platform of its device, by the name that JAX and torch share.
    """

    was_made = False

    def __init__(self, address: int, platform: str) -> None:
        self.address, self.platform = address, platform
        Export.was_made = True
        # Not a WeakSet: that runs Python code when memory is released, and cannot be read while another thread lends.
        _exports.add(weakref.ref(self, _exports.discard))


_exports: set[weakref.ref[Export]] = set()


@atexit.register  # runs before JAX's exit handlers, registered earlier, which may release devices
def _wait() -> None:
    """Waits for memory that only programs hold. Arrays hold theirs until after the exit, which aborts nothing."""
    if not Export.was_made:
        return
    end = time.monotonic() + _MAX_WAIT
    while _is_pending() and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(_RELEASE_TIME)


def _is_pending() -> bool:
    """Whether some memory has more exports than live arrays hold, so that programs hold the others."""
    exports = [export for reference in _exports.copy() if (export := reference()) is not None]
    lent = collections.Counter(export.address for export in exports)
    held = collections.Counter(
        address for platform in {export.platform for export in exports} for address in _addresses_of_arrays(platform)
    )
    return not lent <= held


def _addresses_of_arrays(platform: str) -> Iterator[int]:
    for array in jax.live_arrays(platform):
        with contextlib.suppress(RuntimeError):  # deleted, or its program has failed
            # Asking an array for its shards makes arrays of them, so only arrays on several devices are asked.
            shares = [shard.data for shard in array.addressable_shards] if len(array.devices()) > 1 else [array]
            # On CPU, asking for the address of a result waits for its program and holds the GIL meanwhile, which other
            # programs need to end. What torch has lent is ready there.
            asked = (share for share in shares if platform != "cpu" or share.is_ready())
            yield from (share.unsafe_buffer_pointer() for share in asked)
