"""The second level of a pool, blocks on the host: which pages to copy there and back before the next step.

Copies are collected until the engine takes them, and all those to the host happen first. So a block that waits for its
copy from the host is never copied there, and the host's block that it comes from is not reused until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax.block_pool.store import BlockStore
from kvjax.errors import OutOfBlocksError


class Swaps(NamedTuple):
    """Copies to make before the next step, in this order; each int32 `[num_pairs, 2]`, (from, to).

    Attributes:
      to_host: pairs of a device's block and a host's, for `swap_blocks(cache, host_cache, pairs)`.
      from_host: pairs of a host's block and a device's, for `swap_blocks(host_cache, cache, pairs)`.
      states_to_host: the same of state slots.
      states_from_host: the same of state slots.
    """

    to_host: np.ndarray
    from_host: np.ndarray
    states_to_host: np.ndarray
    states_from_host: np.ndarray


class HostTier:
    """Blocks `0 .. num_blocks - 1` on the host, and the copies that are to be made.

    Attributes:
      store: their references and hashes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.store = BlockStore(num_blocks, records_events=False)
        self._to_host: dict[int, int] = {}  # the host's block -> the device's
        self._from_host: dict[int, int] = {}  # the device's block -> the host's, which is held until the copy is taken

    def reuse(self, block: int, block_hash: bytes | None) -> None:
        """Saves a device's block that is taken for something else, if it is cached and the host has room."""
        if self._cancel(block) or block_hash is None:
            return
        if self.store.find(block_hash) is None and self.store.num_free:
            self.store.release([self._copied(block, block_hash)])

    def _cancel(self, block: int) -> bool:
        """Drops the copy from the host that a device's block waits for; returns whether there was one."""
        host_block = self._from_host.pop(block, None)
        if host_block is not None:
            self.store.release([host_block])
        return host_block is not None

    def _copied(self, block: int, block_hash: bytes | None) -> int:
        """Takes a host's block, with a reference, that a device's is copied to."""
        [host_block] = self.store.take(1)
        self._to_host[host_block] = block  # instead of what was to be copied there, which is evicted
        if block_hash is not None:
            self.store.cache(host_block, block_hash)
        return host_block

    def load(self, host_block: int, block: int) -> None:
        """Has a host's block copied to a device's; takes over a reference to the former."""
        self._from_host[block] = host_block

    def put(self, blocks: Sequence[tuple[int, bytes | None]]) -> list[int]:
        """Returns host blocks, with a reference each, that hold the given blocks of a device and their hashes.

        Raises:
          OutOfBlocksError: fewer are free; nothing has changed.
        """
        found = [key for block, key in blocks if block not in self._from_host and key and self._finds(key)]
        needed = sum(block not in self._from_host for block, _ in blocks) - len(found)
        num_free = self.store.num_free - sum(self.store.is_free(key) for key in found)
        if needed > num_free:
            raise OutOfBlocksError(needed, num_free, self.store.num_blocks, "host blocks")
        # Those that are there first: none of them is then taken for the others.
        there: dict[int, int] = {}
        for block, key in blocks:
            if block in self._from_host:
                self.store.hold([self._from_host[block]])
                there[block] = self._from_host[block]
            elif key and self._finds(key):
                there[block] = self.store.hold_cached(key)
        return [there[block] if block in there else self._copied(block, key) for block, key in blocks]

    def _finds(self, block_hash: bytes) -> bool:
        return self.store.find(block_hash) is not None

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pairs to copy to the host and from it, and forgets them."""
        to_host = [(block, host_block) for host_block, block in self._to_host.items()]
        from_host = [(host_block, block) for block, host_block in self._from_host.items()]
        self._to_host.clear()
        self._from_host.clear()
        self.store.release(host_block for host_block, _ in from_host)
        return as_pairs(to_host), as_pairs(from_host)


class StateSlots:
    """Slots of states on the device or on the host, without hashes: free ones, and those that are held."""

    def __init__(self, number: int, what: str) -> None:
        self.number, self._what = number, what
        self._free = list(range(number - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def check(self, number: int) -> None:
        """Raises `OutOfBlocksError` if fewer are free."""
        if number > len(self._free):
            raise OutOfBlocksError(number, len(self._free), self.number, self._what)

    def take(self) -> int:
        """Returns a free slot."""
        self.check(1)
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Frees a slot."""
        self._free.append(slot)


class States:
    """The state slots of a pool and of its host tier, and the copies that are to be made."""

    def __init__(self, num_states: int, num_host_states: int) -> None:
        self.slots = StateSlots(num_states, "states")
        self.host = StateSlots(num_host_states, "host states")
        self._to_host: dict[int, int] = {}  # the host's slot -> the device's
        self._from_host: dict[int, int] = {}  # the device's slot -> the host's

    def release(self, slot: int) -> None:
        """Frees a slot, and what it waits for."""
        if (host_slot := self._from_host.pop(slot, None)) is not None:
            self.host.release(host_slot)
        self.slots.release(slot)

    def release_host(self, host_slot: int) -> None:
        """Frees a slot of the host."""
        self._to_host.pop(host_slot, None)
        self.host.release(host_slot)

    def swap_out(self, slot: int) -> int:
        """Moves a state to the host, which has room; returns its slot there."""
        host_slot = self._from_host.pop(slot, None)
        if host_slot is None:
            host_slot = self.host.take()
            self._to_host[host_slot] = slot
        self.slots.release(slot)
        return host_slot

    def num_host_needed(self, slot: int) -> int:
        """Returns how many slots of the host `swap_out` takes."""
        return 0 if slot in self._from_host else 1

    def swap_in(self, host_slot: int) -> int:
        """Moves a state back, to a free slot, which it returns."""
        slot = self.slots.take()
        self._from_host[slot] = host_slot
        return slot

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pairs to copy to the host and from it, and forgets them."""
        to_host = [(slot, host_slot) for host_slot, slot in self._to_host.items()]
        from_host = [(host_slot, slot) for slot, host_slot in self._from_host.items()]
        self._to_host.clear()
        self._from_host.clear()
        for host_slot, _ in from_host:
            self.host.release(host_slot)
        return as_pairs(to_host), as_pairs(from_host)


def as_pairs(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns pairs as int32 `[num_pairs, 2]`."""
    return np.array(pairs, np.int32).reshape(-1, 2)
