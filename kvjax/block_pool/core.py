"""What a pool and its sequences share: groups of layers, blocks here and on the host, and the look-up of prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvjax.block_pool.groups import Group, GroupTable, HasBlocks, as_groups, cached_prefix
from kvjax.block_pool.hashes import Chain, root_hash
from kvjax.block_pool.host import ForkCopies, HostTier, States
from kvjax.block_pool.store import BlockStore, BlockStored, as_num_blocks
from kvjax.errors import KVCacheValueError
from kvjax.spec import as_bool, as_int

FREED_BLOCK = -1
"""Block table entry for a freed block, or for none."""


class PoolCore:
    """The parts of a `BlockPool`, which documents the arguments."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int | None = None,
        *,
        groups: Sequence[HasBlocks] | None = None,
        num_states: int = 0,
        num_host_blocks: int = 0,
        num_host_states: int = 0,
        records_events: bool = False,
    ) -> None:
        if (block_size is None) == (groups is None):
            raise KVCacheValueError(f"block_size: got {block_size} with {groups=}, expected one of the two")
        if groups is None:
            self.groups: tuple[Group, ...] = (Group(0, as_int("block_size", block_size, least=1)),)
        else:
            self.groups = as_groups(groups)
        self.block_size = self.groups[0].block_size
        self.num_blocks = as_num_blocks(num_blocks, max(group.block_size for group in self.groups))
        self.num_states = as_int("num_states", num_states, least=0)
        self._store = BlockStore(self.num_blocks, records_events=as_bool("records_events", records_events))
        self.num_host_states = as_int("num_host_states", num_host_states, least=0)
        self._states = States(self.num_states, self.num_host_states)
        self.num_host_blocks = as_int("num_host_blocks", num_host_blocks, least=0)
        self._host = HostTier(self.num_host_blocks)
        self._fork_copies = ForkCopies(self._store)
        if self.num_host_blocks:
            self._store.on_reuse = self._host.reuse
        self._num_resets = 0

    def _own_last_block(self, table: GroupTable, fresh: Iterator[int]) -> list[tuple[int, int]]:
        """Makes the last block of a table writable, replacing it if it is shared; returns the pairs to copy."""
        block = table.blocks[-1]
        if self._fork_copies.num_sequences(block) == 1:
            self._store.uncache(block)  # after truncate, a full block's hash is stale
            return []
        table.blocks[-1] = next(fresh)
        source = block
        if self.num_host_blocks:  # the next swaps, before the copy, write to neither block
            source = self._fork_copies.add(block, table.blocks[-1])
            self._fork_copies.hold(table.blocks[-1])
        self._store.ref_cnt[block] -= 1
        return [(source, table.blocks[-1])]

    def _chains(self, token_ids: array[int], salt: bytes) -> list[Chain]:
        return [Chain(token_ids, group.block_size, root_hash(salt, group.index)) for group in self.groups]

    def _find_prefix(self, chains: Sequence[Chain], num_tokens: int) -> int:
        if self.num_states:
            return 0
        found = cached_prefix(self.groups, chains, num_tokens, self._is_cached)
        if self.num_host_blocks and not self._has_room(chains, found):
            return cached_prefix(self.groups, chains, num_tokens, lambda key: self._store.find(key) is not None)
        return found

    def _is_cached(self, key: bytes) -> bool:
        return self._store.find(key) is not None or self._host.store.find(key) is not None

    def _has_room(self, chains: Sequence[Chain], num_tokens: int) -> bool:
        """Returns whether enough blocks are free for those of a cached prefix that only the host has."""
        keys = [
            chain[index]
            for group, chain in zip(self.groups, chains, strict=True)
            for index in range(group.num_passed(num_tokens), num_tokens // group.block_size)
        ]
        num_missing = sum(self._store.find(key) is None for key in keys)
        return num_missing <= self._store.num_free - sum(map(self._store.is_free, keys))

    def _share(self, chains: Sequence[Chain], num_tokens: int) -> list[GroupTable]:
        """Returns the tables of a cached prefix, with references to the blocks that windows see."""
        # All are held first: taking a block may evict a cached one here, which may in turn evict one on the host.
        held, loads = [], []
        for group, chain in zip(self.groups, chains, strict=True):
            passed, hashes = group.num_passed(num_tokens), chain.first(num_tokens // group.block_size)
            table = GroupTable(array("i", [FREED_BLOCK] * passed), passed, hashes)
            for index, key in enumerate(hashes[passed:], passed):
                is_here = self._store.find(key) is not None
                table.blocks.append(self._store.hold_cached(key) if is_here else FREED_BLOCK)
                if not is_here:
                    loads.append((group, chain, table, index, self._host.store.hold_cached(key)))
            held.append(table)
        for group, chain, table, index, host_block in loads:
            [table.blocks[index]] = self._store.take(1)
            self._host.load(host_block, table.blocks[index])
            self._cache(group, table, index, chain.token_ids(index))
        return held

    def _cache(self, group: Group, table: GroupTable, index: int, token_ids: array[int]) -> None:
        """Registers a full block of a table with known tokens under its hash, unless another has it."""
        store, block = self._store, table.blocks[index]
        if store.cache(block, table.hashes[index]) and store.events is not None:
            parent = table.hashes[index - 1] if index else None
            stored = BlockStored(block, table.hashes[index], parent, tuple(token_ids), group.block_size, group.index)
            store.events.append(stored)

    def _as_group(self, group: int) -> int:
        return as_int("group", group, least=0, most=len(self.groups) - 1)
