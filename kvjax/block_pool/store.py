"""Blocks by number: who holds them, which are cached under which hash, and the order in which they are reused."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvjax.errors import KVCacheValueError, OutOfBlocksError, shown
from kvjax.spec import as_int

MAX_SLOTS = 2**31 - 1
"""Slots are int32."""


class BlockStored(NamedTuple):
    """A full block is now found by its hash: a sequence with its tokens as prefix shares it.

    `parent_hash` is None for a sequence's first block; `group` is the pool's group of layers.
    """

    block: int
    block_hash: bytes
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    group: int = 0


class BlockRemoved(NamedTuple):
    """A block is no longer found by this hash: it was evicted, or is written into after a truncation."""

    block: int
    block_hash: bytes


class AllBlocksCleared(NamedTuple):
    """No block is found any longer: `BlockPool.reset_prefix_cache` was called."""


type BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockStore:
    """Reference counts, hashes and free blocks `0 .. num_blocks - 1`.

    A block without references is free. `take` takes free blocks that are not cached first, the last freed first, then
    evicts cached ones, the least recently used first.

    Attributes:
      what: what they are, for messages.
      events: what happened to cached blocks; None where nobody asks.
      on_reuse: called with a free block that is taken and with its hash, before that is forgotten; may be None.
    """

    def __init__(self, num_blocks: int, *, records_events: bool, what: str = "blocks") -> None:
        self.num_blocks, self.what = num_blocks, what
        self.ref_cnt = [0] * num_blocks
        self.events: list[BlockEvent] | None = [] if records_events else None
        self.on_reuse: Callable[[int, bytes | None], None] | None = None
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # Free blocks: a stack of those that are not cached, and an LRU order of those that are.
        self._uncached = list(range(num_blocks - 1, -1, -1))
        self._evictable: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks without references, cached ones included."""
        return len(self._uncached) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks, in use or free, that have a hash."""
        return len(self._block_of)

    def take(self, number: int) -> list[int]:
        """Takes free blocks, with a reference count of 1.

        Raises:
          OutOfBlocksError: fewer are free.
        """
        self.check(number)
        return [self._take_free() for _ in range(number)]

    def check(self, number: int) -> None:
        """Raises `OutOfBlocksError` if fewer are free."""
        if number > self.num_free:
            raise OutOfBlocksError(number, self.num_free, self.num_blocks, self.what)

    def _take_free(self) -> int:
        if self._uncached:
            block = self._uncached.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
        if self.on_reuse is not None:
            self.on_reuse(block, self._hash_of[block])
        self.uncache(block)
        self.ref_cnt[block] = 1
        return block

    def find(self, block_hash: bytes) -> int | None:
        """Returns the block with that hash; None if there is none."""
        return self._block_of.get(block_hash)

    def is_free(self, block_hash: bytes) -> bool:
        """Returns whether there is a block with that hash, and nobody holds it."""
        block = self._block_of.get(block_hash)
        return block is not None and not self.ref_cnt[block]

    def hold_cached(self, block_hash: bytes) -> int:
        """Returns the block with that hash, which exists and may be free, with one more reference."""
        block = self._block_of[block_hash]
        self._evictable.pop(block, None)
        self.ref_cnt[block] += 1
        return block

    def cache(self, block: int, block_hash: bytes) -> bool:
        """Registers `block` under its hash unless another block has it; returns whether it did."""
        if self._hash_of[block] is not None or block_hash in self._block_of:
            return False
        self._hash_of[block], self._block_of[block_hash] = block_hash, block
        return True

    def uncache(self, block: int) -> None:
        """Forgets the hash of `block` if it has one."""
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
            if self.events is not None:
                self.events.append(BlockRemoved(block, block_hash))

    def clear(self) -> None:
        """Forgets all hashes. Free blocks that were cached are reused as the others, the least recently used first."""
        self._uncached.extend(reversed(self._evictable))
        self._evictable.clear()
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks
        if self.events is not None:
            self.events.append(AllBlocksCleared())

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of `blocks`, which are in use."""
        for block in blocks:
            self.ref_cnt[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drops a reference to each of `blocks`. Of the blocks that this frees, the last is evicted first."""
        freed = []
        for block in blocks:
            self.ref_cnt[block] -= 1
            if not self.ref_cnt[block]:
                freed.append(block)
        self._uncached.extend(block for block in freed if self._hash_of[block] is None)
        self._evictable.update((block, None) for block in reversed(freed) if self._hash_of[block] is not None)

    def check_held(self, counts: Mapping[int, int]) -> None:
        """Checks that each block has at least as many references as `counts` says.

        Raises:
          KVCacheValueError: names the first that has fewer, or is not of this pool.
        """
        for block, count in counts.items():
            known = 0 <= block < self.num_blocks
            if not known or self.ref_cnt[block] < count:
                references = f"with {self.ref_cnt[block]} references" if known else f"of a pool of {self.num_blocks}"
                raise KVCacheValueError(
                    f"blocks: got block {block}, {references}, expected at least {count} references"
                )


def as_num_blocks(num_blocks: int, block_size: int) -> int:
    """Returns a number of blocks after checking that int32 holds their slots."""
    number = as_int("num_blocks", num_blocks, least=1)
    if number * block_size > MAX_SLOTS:
        raise KVCacheValueError(
            f"num_blocks: got {shown(number)} of {block_size} tokens, expected at most {MAX_SLOTS // block_size}:"
            " slots are int32"
        )
    return number
