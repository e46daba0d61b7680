"""The second level of a pool, blocks on the host: which pages to copy there and back before the next step.

Copies are collected until the engine takes them, and all those to the host happen first. So a device's block that waits
for its copy from the host is never copied to the host, and the host's block that it comes from is not reused until the
copies are taken.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax.block_pool.store import BlockStore
from kvjax.errors import OutOfBlocksError

NO_STATE = -1
"""The state of a sequence that has none."""


class Swaps(NamedTuple):
    """Copies to start before the next step, in this order; each int32 `[num_pairs, 2]`, (from, to).

    Attributes:
      to_host: pairs of a device's block and a host's, for `HostCaches.store`.
      from_host: pairs of a host's block and a device's, for `HostCaches.load`.
      states_to_host: the same of state slots.
      states_from_host: the same of state slots.
      state_copies: pairs of two state slots of the device, for forks that grew. Read all before the first is written.
    """

    to_host: np.ndarray
    from_host: np.ndarray
    states_to_host: np.ndarray
    states_from_host: np.ndarray
    state_copies: np.ndarray


class HostTier:
    """Blocks `0 .. num_blocks - 1` on the host, and the copies that are to be made.

    Attributes:
      store: their references and hashes.
    """

    def __init__(self, num_blocks: int, what: str = "host blocks") -> None:
        self.store = BlockStore(num_blocks, records_events=False, what=what)
        self._to_host: dict[int, int] = {}  # the host's block -> the device's
        self._from_host: dict[int, int] = {}  # the device's block -> the host's, which is held until the copy is taken

    def reuse(self, block: int, block_hash: bytes | None) -> None:
        """Saves a device's block that is taken for something else, if it is cached and the host has room."""
        if self._cancel(block) or block_hash is None:
            return
        if self._finds(block_hash):
            self.store.release([self.store.hold_cached(block_hash)])  # used as recently as the device's block
        elif self.store.num_free:
            self.store.release([self._copied(block, block_hash)])

    def _cancel(self, block: int) -> bool:
        """Drops the copy from the host that a device's block waits for; returns whether there was one."""
        host_block = self._from_host.pop(block, None)
        if host_block is not None:
            self.store.release([host_block])
        return host_block is not None

    def _copied(self, block: int, block_hash: bytes | None) -> int:
        """Takes a host's block, with a reference, and has a device's block copied to it."""
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
        self.check(blocks)
        # First those that are already on the host, so that none of them is taken for the others.
        there: dict[int, int] = {}
        for block, key in blocks:
            if block in self._from_host:
                self.store.hold([self._from_host[block]])
                there[block] = self._from_host[block]
            elif key and self._finds(key):
                there[block] = self.store.hold_cached(key)
        return [there[block] if block in there else self._copied(block, key) for block, key in blocks]

    def check(self, blocks: Sequence[tuple[int, bytes | None]]) -> None:
        """Raises `OutOfBlocksError` if `put` would."""
        found = [key for block, key in blocks if block not in self._from_host and key and self._finds(key)]
        needed = sum(block not in self._from_host for block, _ in blocks) - len(found)
        num_free = self.store.num_free - sum(self.store.is_free(key) for key in found)
        if needed > num_free:
            raise OutOfBlocksError(needed, num_free, self.store.num_blocks, self.store.what)

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


class ForkCopies:
    """Copies of blocks, or of state slots, for forks that grew; the engine makes them after the next swaps.

    Until then the sources are held. The content of a block that waits for its copy is that of its source.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._source: dict[int, int] = {}  # of each block to write
        self._holds: collections.Counter[int] = collections.Counter()

    def num_sequences(self, block: int) -> int:
        """Returns the references to a block without those of copies."""
        return self._store.ref_cnt[block] - self._holds[block]

    def content_of(self, block: int) -> int:
        """Returns the block that holds a block's content until copies are made."""
        return self._source.get(block, block)

    def add(self, shared: int, block: int) -> int:
        """Has the content of a shared block copied to one of a fork's own; returns the source of the copy."""
        source = self.content_of(shared)
        self._source[block] = source
        self.hold(source)
        return source

    def hold(self, block: int) -> None:
        """Keeps a block from being given away until `take`."""
        self._store.hold([block])
        self._holds[block] += 1

    def drop(self, block: int) -> None:
        """Forgets the copy to a block, if there is one."""
        if (source := self._source.pop(block, None)) is not None:
            self._holds[source] -= 1
            self._store.release([source])

    def take(self) -> list[tuple[int, int]]:
        """Returns the copies, pairs of source and block, and forgets them."""
        copies = [(source, block) for block, source in self._source.items()]
        self._store.release(self._holds.elements())
        self._source.clear()
        self._holds.clear()
        return copies


class States:
    """The state slots of a pool and of its host tier, and the copies that are to be made.

    A fork shares its parent's slot, as it shares blocks. Slots have no hashes, so none is found by its content.
    """

    def __init__(self, num_states: int, num_host_states: int) -> None:
        self.slots = BlockStore(num_states, records_events=False, what="states")
        self.host = HostTier(num_host_states, "host states")
        self.slots.on_reuse = self._reuse
        self._copies = ForkCopies(self.slots)

    def _reuse(self, slot: int, _: bytes | None) -> None:
        """Drops the copies that a slot waits for."""
        self.host.reuse(slot, None)
        self._copies.drop(slot)

    def num_needed(self, states: Sequence[int]) -> int:
        """Returns how many slots `own` takes for sequences that have these."""
        writers = collections.Counter(states)
        without = writers.pop(NO_STATE, 0)
        return without + sum(min(number, self._copies.num_sequences(slot) - 1) for slot, number in writers.items())

    def own(self, slot: int) -> int:
        """Returns the slot that a sequence with this one writes: the same, or a free one if it is shared or none."""
        if slot != NO_STATE and self._copies.num_sequences(slot) == 1:
            return slot
        [own] = self.slots.take(1)
        if slot != NO_STATE:
            self._copies.add(slot, own)
            self.slots.release([slot])
        return own

    def check_swap_out(self, slot: int) -> None:
        """Raises `OutOfBlocksError` if the host has no room for a state."""
        self.host.check([(self._copies.content_of(slot), None)])

    def swap_out(self, slot: int) -> int:
        """Moves a state to the host, which has room; returns its slot there."""
        [host_slot] = self.host.put([(self._copies.content_of(slot), None)])
        self.slots.release([slot])
        return host_slot

    def swap_in(self, host_slot: int) -> int:
        """Moves a state back, to a free slot, which it returns."""
        [slot] = self.slots.take(1)
        self.host.load(host_slot, slot)
        return slot

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the pairs to copy to the host, from it and for forks, and forgets them."""
        return *self.host.take(), as_pairs(self._copies.take())


def as_pairs(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns pairs as int32 `[num_pairs, 2]`."""
    return np.array(pairs, np.int32).reshape(-1, 2)
