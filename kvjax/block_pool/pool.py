"""`BlockPool` and `PagedSequence`: blocks of one or several groups of layers, for sequences that grow and share."""

from __future__ import annotations

import collections
import copy
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvjax.block_pool.groups import Group, HasBlocks, Table, as_groups, cached_prefix
from kvjax.block_pool.hashes import Chain, as_ids, block_hash, root_hash
from kvjax.block_pool.host import HostTier, States, Swaps
from kvjax.block_pool.store import BlockEvent, BlockStore, BlockStored, as_num_blocks
from kvjax.errors import KVCacheValueError, OutOfBlocksError
from kvjax.spec import as_bool, as_int

FREED_BLOCK = -1
"""Block table entry for a freed block, or for none."""

NO_STATE = -1
"""The state of a sequence that has none."""


class BlockPool:
    """Allocates the block numbers `0 .. num_blocks - 1` of a cache, with a reference count each.

    A block without references is free. A full block with known tokens (`PagedSequence.commit`) stays cached when free:
    a sequence with the same prefix reuses it, until the pool evicts it. `allocate` takes free blocks that are not
    cached first, the last freed first, then evicts cached ones, the least recently used first; within a sequence the
    last block first.

    With `groups` a sequence has a block table for each group of layers, all with blocks of this pool. The pool then
    knows sliding windows: `append` frees the blocks that a window has passed, and a cached prefix needs only the blocks
    that a window still sees.

    Operations are O(1) per block, and O(1) per token where they read token ids. If one raises, nothing has changed.

    Args:
      num_blocks: blocks of the cache.
      block_size: tokens in a block, for layers that all share one table.
      groups: instead of `block_size`, the groups of layers: specs, or what `group_layers` returns.
      num_states: slots for a state of fixed size per sequence, such as that of recurrent layers. `append` gives each
        growing sequence one. A state holds a whole prefix, so such a pool shares no cached blocks between sequences.
      num_host_blocks: blocks on the host that this pool assigns too. Cached blocks that are evicted go there and come
        back for a sequence with their prefix; `PagedSequence.swap_out` moves a sequence there. Copy what `take_swaps`
        returns before each step.
      num_host_states: slots on the host for the states of sequences that are swapped out.
      records_events: whether `take_events` returns what is stored and removed.

    Attributes:
      num_blocks: blocks of the cache.
      block_size: tokens in a block; of several groups, in the first.
      groups: of each group of layers, its `block_size` and `sliding_window`.

    Raises:
      KVCacheValueError: no blocks, blocks without tokens, or more slots than int32 holds.
    """

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
        self._states = States(self.num_states, as_int("num_host_states", num_host_states, least=0))
        self.num_host_blocks = as_int("num_host_blocks", num_host_blocks, least=0)
        self._host = HostTier(self.num_host_blocks)
        if self.num_host_blocks:
            self._store.on_reuse = self._host.reuse
        self._num_resets = 0

    @property
    def num_free(self) -> int:
        """Blocks without references, cached ones included: what `allocate` can return."""
        return self._store.num_free

    @property
    def num_cached(self) -> int:
        """Blocks, in use or free, that a sequence with their tokens as prefix would share."""
        return self._store.num_cached

    @property
    def num_free_states(self) -> int:
        """State slots that no sequence has."""
        return self._states.slots.num_free

    @property
    def num_free_host(self) -> int:
        """Host blocks that no swapped sequence has, cached ones included."""
        return self._host.store.num_free

    def ref_cnt(self, block: int) -> int:
        """Returns the reference count of `block`; 0 if it is free."""
        return self._store.ref_cnt[as_int("block", block, least=0, most=self.num_blocks - 1)]

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, with a reference count of 1.

        Raises:
          OutOfBlocksError: fewer are free.
        """
        return self._store.take(as_int("num_blocks", num_blocks, least=0))

    def fork(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of `blocks`, which must be in use.

        Raises:
          KVCacheValueError: one of them is free, or not of this pool.
        """
        self._store.hold(self._store.as_held(blocks, collections.Counter(set(blocks))))

    def free(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each of `blocks`, which are in the order of their tokens.

        Raises:
          KVCacheValueError: one of them is already free, or not of this pool.
        """
        self._store.release(self._store.as_held(blocks, collections.Counter(blocks)))

    def sequence(self, token_ids: ArrayLike = (), *, salt: bytes = b"") -> PagedSequence:
        """Returns a new sequence that shares the cached blocks of the prefix of `token_ids`.

        Args:
          token_ids: integers `[num_tokens]`, its prompt. The sequence starts with its `num_tokens` in shared full
            blocks, never with the prompt's last token, which has to be computed for its logits.
          salt: only sequences with the same salt share blocks: whatever else keys and values depend on, such as an
            adapter's name or the version of the weights.
        """
        return PagedSequence(self, as_ids(token_ids), salt)

    def num_cached_tokens(self, token_ids: ArrayLike, *, salt: bytes = b"") -> int:
        """Returns the `num_tokens` that `sequence` would start with. Takes no references, and no block counts as used.

        Args:
          token_ids: as in `sequence`.
          salt: likewise.
        """
        ids = as_ids(token_ids)
        return self._find_prefix(self._chains(ids, salt), len(ids))

    def block_hashes(self, token_ids: ArrayLike, *, salt: bytes = b"", group: int = 0) -> tuple[bytes, ...]:
        """Returns the hashes of a prompt's full blocks, as `PagedSequence.block_hashes` has them, cached or not."""
        ids, index = as_ids(token_ids), self._as_group(group)
        return tuple(self._chains(ids, salt)[index].first(len(ids) // self.groups[index].block_size))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks, such as when weights change.

        Sequences keep their blocks. What those that have tokens now commit later is not cached, until they are freed.
        """
        self._store.clear()
        self._host.store.clear()
        self._num_resets += 1

    def take_swaps(self) -> Swaps:
        """Returns the copies to and from the host since the last call: make them before each step.

        First those to the host, then those from it, then what `append` returned. Without `num_host_blocks` and
        `num_host_states` there are none.
        """
        return Swaps(*self._host.take(), *self._states.take())

    def take_events(self) -> list[BlockEvent]:
        """Returns what happened to cached blocks since the last call, in order.

        Raises:
          KVCacheValueError: the pool was made without `records_events=True`.
        """
        events = self._store.events
        if events is None:
            raise KVCacheValueError("records_events: got False, expected a BlockPool made with records_events=True")
        self._store.events = []
        return events

    def append(self, sequences: Sequence[PagedSequence], num_new_tokens: Sequence[int]) -> np.ndarray:
        """Reserves room for that many more tokens of each sequence in every group; if it raises, of none.

        First it frees the blocks that the groups' windows have passed: those that the first new token does not see. A
        sequence that shares its partial last block gets a copy of its own to write into.

        Returns:
          int32 `[num_copies, 2]`: pairs of blocks (from, to) for `copy_blocks`, to copy before the new tokens are
          written. Empty unless `PagedSequence.fork` was used.

        Raises:
          OutOfBlocksError: fewer blocks, or states, are free than this needs.
          KVCacheValueError: a negative number, or a sequence that is repeated or of another pool.
        """
        numbers = [as_int("num_new_tokens", number, least=0) for number in num_new_tokens]
        growing = [pair for pair in self._checked_pairs(sequences, numbers) if pair[1]]
        passed = [blocks for sequence, _ in growing for blocks in self._passed(sequence)]
        dropped = collections.Counter(block for blocks in passed for block in blocks)
        held = self._store.ref_cnt
        # Of the sequences that share a block and now write to it, the last keeps it.
        writers = collections.Counter(
            table.blocks[-1]
            for sequence, _ in growing
            for group, table in zip(self.groups, sequence._tables, strict=True)
            if sequence._num_tokens % group.block_size
        )
        needed = sum(min(number, held[block] - dropped[block] - 1) for block, number in writers.items())
        needed += sum(sequence._num_missing(number) for sequence, number in growing)
        num_free = self.num_free + sum(held[block] == count for block, count in dropped.items())
        if needed > num_free:
            raise OutOfBlocksError(needed, num_free, self.num_blocks)
        without_state = [sequence for sequence, _ in growing if self.num_states and sequence._state == NO_STATE]
        self._states.slots.check(len(without_state))
        for sequence, _ in growing:
            sequence._drop_passed()
        for sequence in without_state:
            sequence._state = self._states.slots.take()
        fresh = iter(self._store.take(needed))
        copies = []
        for sequence, number in growing:
            for group, table in zip(self.groups, sequence._tables, strict=True):
                if sequence._num_tokens % group.block_size:
                    copies.extend(self._own_last_block(table, fresh))
                missing = group.num_blocks(sequence._num_tokens + number) - len(table.blocks)
                table.blocks.extend(next(fresh) for _ in range(missing))
            sequence._num_tokens += number
        return np.array(copies, np.int32).reshape(-1, 2)

    def _passed(self, sequence: PagedSequence) -> Iterator[array[int]]:
        """Yields the blocks of each group that the next token of a sequence does not see."""
        for group, table in zip(self.groups, sequence._tables, strict=True):
            end = group.num_passed(sequence._num_tokens)
            if end > table.num_freed:
                yield table.blocks[table.num_freed : end]

    def _own_last_block(self, table: Table, fresh: Iterator[int]) -> list[tuple[int, int]]:
        """Makes the last block of a table writable, replacing it if it is shared; returns the pairs to copy."""
        block = table.blocks[-1]
        if self._store.ref_cnt[block] == 1:
            self._store.uncache(block)  # after truncate, a full block's hash is stale
            return []
        table.blocks[-1] = next(fresh)
        self._store.ref_cnt[block] -= 1
        return [(block, table.blocks[-1])]

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
        return num_missing <= self.num_free - sum(map(self._store.is_free, keys))

    def _share(self, chains: Sequence[Chain], num_tokens: int) -> list[Table]:
        """Returns the tables of a cached prefix, with references to the blocks that windows see."""
        # All are held first: taking a block for one of them may evict here, and there what comes here goes.
        held, loads = [], []
        for group, chain in zip(self.groups, chains, strict=True):
            passed, hashes = group.num_passed(num_tokens), chain.first(num_tokens // group.block_size)
            table = Table(array("i", [FREED_BLOCK] * passed), passed, hashes)
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

    def _cache(self, group: Group, table: Table, index: int, token_ids: array[int]) -> None:
        """Registers a full block of a table with known tokens under its hash, unless another has it."""
        store, block = self._store, table.blocks[index]
        if store.cache(block, table.hashes[index]) and store.events is not None:
            parent = table.hashes[index - 1] if index else None
            stored = BlockStored(block, table.hashes[index], parent, tuple(token_ids), group.block_size, group.index)
            store.events.append(stored)

    def _as_group(self, group: int) -> int:
        return as_int("group", group, least=0, most=len(self.groups) - 1)

    def _checked_pairs(self, sequences: Sequence[PagedSequence], numbers: list[int]) -> list[tuple[PagedSequence, int]]:
        if len(sequences) != len(numbers):
            raise KVCacheValueError(
                f"num_new_tokens: got {len(numbers)} numbers, expected one for each of {len(sequences)} sequences"
            )
        if len(set(sequences)) != len(sequences):
            raise KVCacheValueError("sequences: got a duplicate, expected each once")
        for index, sequence in enumerate(sequences):
            if sequence.pool is not self:
                raise KVCacheValueError(
                    f"sequences[{index}]: got a sequence of another pool, expected one of this pool"
                )
            sequence._check_is_here(f"sequences[{index}]")
        return list(zip(sequences, numbers, strict=True))


class PagedSequence:
    """The blocks of a sequence, in the order of its tokens. Created by `BlockPool.sequence` and `fork`.

    Attributes:
      pool: owns its blocks.
    """

    def __init__(self, pool: BlockPool, token_ids: array[int], salt: bytes) -> None:
        self.pool = pool
        self._roots = [root_hash(salt, group.index) for group in pool.groups]
        chains = pool._chains(token_ids, salt)
        self._num_tokens = pool._find_prefix(chains, len(token_ids))
        self._tables = pool._share(chains, self._num_tokens)
        self._token_ids: array[int] = token_ids[: self._num_tokens]
        self._num_resets = pool._num_resets
        self._state = NO_STATE
        self._swapped: list[list[int]] | None = None
        self._host_state = NO_STATE

    @property
    def num_tokens(self) -> int:
        """Tokens that there is room for, those of freed blocks included."""
        return self._num_tokens

    @property
    def blocks(self) -> np.ndarray:
        """Its row of a block table: int32 `[ceil(num_tokens / block_size)]`, -1 for freed blocks; a copy.

        Of several groups, that of the first.
        """
        return self.blocks_of(0)

    def blocks_of(self, group: int) -> np.ndarray:
        """Returns its row of a group's block table, as `blocks`."""
        return np.array(self._tables[self.pool._as_group(group)].blocks, np.int32)

    @property
    def state(self) -> int:
        """Its slot in arrays of states, from its first `append` until it is freed; -1 before, and without states."""
        return self._state

    @property
    def token_ids(self) -> np.ndarray:
        """The ids of its first tokens, as far as known: int64 `[at most num_tokens]`; a copy."""
        return np.array(self._token_ids, np.int64)

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """The hashes of its full blocks of known tokens, 32 bytes each; the last is that of all tokens up to its end.

        They depend on ids and salt alone and are the same in every process, for stores outside of it. Of several
        groups, those of the first.
        """
        return tuple(self._tables[0].hashes)

    def slots(self, start: int, stop: int, *, group: int = 0) -> np.ndarray:
        """Returns the slots of its tokens from `start` to `stop`: int32 `[stop - start]`, negative in freed blocks.

        Raises:
          KVCacheValueError: it has fewer tokens.
        """
        start = as_int("start", start, least=0)
        stop = as_int("stop", stop, least=start, most=self._num_tokens)
        index = self.pool._as_group(group)
        size = self.pool.groups[index].block_size
        first = start // size
        blocks = np.array(self._tables[index].blocks[first : -(-stop // size)], np.int32)
        positions = np.arange(start, stop, dtype=np.int32)
        block = blocks[positions // size - first]
        return np.where(block < 0, FREED_BLOCK, block * size + positions % size)

    def commit(self, token_ids: ArrayLike) -> None:
        """Appends the ids of the next tokens, so that other sequences can share their blocks.

        Call it after dispatching the step that writes these tokens: later steps may then read them.

        Args:
          token_ids: integers `[any number]`.

        Raises:
          KVCacheValueError: more than there is room for.
        """
        ids = as_ids(token_ids)
        if len(self._token_ids) + len(ids) > self._num_tokens:
            raise KVCacheValueError(
                f"token_ids: got {len(ids)} after the {len(self._token_ids)} known ones, expected at most"
                f" {self._num_tokens - len(self._token_ids)}: the sequence has {self._num_tokens} tokens"
            )
        self._token_ids.extend(ids)
        for group, table in zip(self.pool.groups, self._tables, strict=True):
            size = group.block_size
            for index in range(len(table.hashes), len(self._token_ids) // size):
                parent = table.hashes[index - 1] if index else self._roots[group.index]
                table.hashes.append(block_hash(parent, self._token_ids[index * size : (index + 1) * size]))
                self._cache(group, table, index)

    @property
    def _is_shared(self) -> bool:
        """Whether its blocks are what other sequences with its tokens would compute."""
        return self._num_resets == self.pool._num_resets and not self.pool.num_states

    def _cache(self, group: Group, table: Table, index: int) -> None:
        if self._is_shared and table.blocks[index] != FREED_BLOCK:
            size = group.block_size
            self.pool._cache(group, table, index, self._token_ids[index * size : (index + 1) * size])

    def fork(self) -> PagedSequence:
        """Returns another sequence with the same tokens and blocks; further tokens go to separate blocks.

        It gets a state of its own: copy slot `state` of this sequence to that of the fork before either grows.

        Raises:
          OutOfBlocksError: no state is free.
          KVCacheValueError: it is swapped out.
        """
        self._check_is_here("fork")
        other = copy.copy(self)
        if self._state != NO_STATE:
            other._state = self.pool._states.slots.take()
        other._tables, other._token_ids = [table.copy() for table in self._tables], self._token_ids[:]
        for table in self._tables:
            self.pool._store.hold(table.blocks[table.num_freed :])
        return other

    def truncate(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens, and frees the blocks after them.

        Raises:
          KVCacheValueError: it has fewer tokens; or blocks that hold some of the last ones, or that a known window sees
            from there, were freed; or it has a state, which cannot go back.
        """
        number = as_int("num_tokens", num_tokens, least=0, most=self._num_tokens)
        if self._swapped is not None:
            if number:
                self._check_is_here("truncate")
            self._free_swapped()
        if 0 < number < self._num_tokens and self._state != NO_STATE:
            raise KVCacheValueError(
                f"num_tokens: got {number}, expected 0 or {self._num_tokens}: the sequence has a state, which is that"
                " after its last token"
            )
        for group, table in zip(self.pool.groups, self._tables, strict=True):
            window = group.sliding_window or 1
            if 0 < number < self._num_tokens and number - window + 1 < table.num_freed * group.block_size > 0:
                raise KVCacheValueError(
                    f"num_tokens: got {number}, expected 0 or at least"
                    f" {table.num_freed * group.block_size + window - 1}: the blocks of the earlier tokens were freed"
                )
        for group, table in zip(self.pool.groups, self._tables, strict=True):
            num_kept = group.num_blocks(number)
            self.pool._store.release(table.blocks[max(num_kept, table.num_freed) :])
            table.num_freed = min(table.num_freed, num_kept)
            del table.blocks[num_kept:], table.hashes[number // group.block_size :]
        self._num_tokens = number
        del self._token_ids[number:]
        if not number:
            self._num_resets = self.pool._num_resets
            if self._state != NO_STATE:
                self.pool._states.release(self._state)
                self._state = NO_STATE

    def free_before(self, position: int) -> None:
        """Frees the blocks whose tokens are all before `position`; their entries become -1.

        A query at position `p` with a sliding window of W attends to tokens from `p - W + 1` on: call it with that
        before a step whose first new token is at `p`. Blocks shared with full-attention layers must not be freed. A
        pool that knows the windows of its groups does this in `append`.

        Raises:
          KVCacheValueError: a pool of several groups, or it is swapped out.
        """
        number = min(as_int("position", position), self._num_tokens)
        self._check_is_here("free_before")
        if len(self._tables) > 1:
            raise KVCacheValueError(
                f"free_before: got a sequence of {len(self._tables)} groups, expected one: append frees what their"
                " windows have passed"
            )
        self._drop(self._tables[0], number // self.pool.block_size)

    def free(self) -> None:
        """Frees all blocks and its state. The sequence is then empty and reusable."""
        self.truncate(0)

    @property
    def is_swapped_out(self) -> bool:
        """Whether its blocks are on the host; those of its tables are then -1."""
        return self._swapped is not None

    def swap_out(self) -> None:
        """Moves its blocks and its state to the host, and frees them here; for a preempted request.

        `BlockPool.take_swaps` returns the copies. `swap_in` undoes it; `commit` and `free` are possible before.

        Raises:
          OutOfBlocksError: too few blocks or states are free on the host; nothing has changed.
          KVCacheValueError: it is swapped out.
        """
        self._check_is_here("swap_out")
        pool, has_state = self.pool, self._state != NO_STATE
        if has_state:
            pool._states.host.check(pool._states.num_host_needed(self._state))
        live = [table.blocks[table.num_freed :] for table in self._tables]
        keys = [self._live_hashes(table) for table in self._tables]
        placed = iter(pool._host.put([pair for of in zip(live, keys, strict=True) for pair in zip(*of, strict=True)]))
        self._swapped = [[next(placed) for _ in blocks] for blocks in live]
        for table, blocks in zip(self._tables, live, strict=True):
            pool._store.release(blocks)
            table.blocks[table.num_freed :] = array("i", [FREED_BLOCK] * len(blocks))
        if has_state:
            self._host_state, self._state = pool._states.swap_out(self._state), NO_STATE

    def swap_in(self) -> None:
        """Moves its blocks and its state back from the host. Blocks that are cached here need no copy.

        Raises:
          OutOfBlocksError: too few blocks or states are free; nothing has changed.
          KVCacheValueError: it is not swapped out.
        """
        if self._swapped is None:
            raise KVCacheValueError("swap_in: got a sequence that is not swapped out, expected one that is")
        pool, store, has_state = self.pool, self.pool._store, self._host_state != NO_STATE
        keys = [self._live_hashes(table) for table in self._tables]
        found = [key for of_table in keys for key in of_table if key and store.find(key) is not None]
        needed = sum(map(len, self._swapped)) - len(found)
        num_free = store.num_free - sum(map(store.is_free, found))
        if needed > num_free:
            raise OutOfBlocksError(needed, num_free, pool.num_blocks)
        pool._states.slots.check(int(has_state))
        here = {key: store.hold_cached(key) for key in found}
        for group, table, of_table, host_blocks in zip(pool.groups, self._tables, keys, self._swapped, strict=True):
            for index, (key, host_block) in enumerate(zip(of_table, host_blocks, strict=True), table.num_freed):
                if key in here:
                    table.blocks[index] = here[key]
                    pool._host.store.release([host_block])
                else:
                    [table.blocks[index]] = store.take(1)
                    pool._host.load(host_block, table.blocks[index])
                    if key is not None:
                        self._cache(group, table, index)
        self._swapped = None
        if has_state:
            self._state, self._host_state = pool._states.swap_in(self._host_state), NO_STATE

    def _live_hashes(self, table: Table) -> list[bytes | None]:
        """Returns the hashes of a table's blocks that were not freed; None where no other sequence may share them."""
        number = len(table.blocks)
        hashes: list[bytes | None] = [*table.hashes] if self._is_shared else []
        return [*hashes, *[None] * (number - len(hashes))][table.num_freed :]

    def _free_swapped(self) -> None:
        """Gives back what it has on the host."""
        for host_blocks in self._swapped or ():
            self.pool._host.store.release(host_blocks)
        if self._host_state != NO_STATE:
            self.pool._states.release_host(self._host_state)
        for table in self._tables:
            table.num_freed = len(table.blocks)
        self._swapped, self._host_state = None, NO_STATE

    def _check_is_here(self, what: str) -> None:
        if self._swapped is not None:
            raise KVCacheValueError(f"{what}: got a sequence that is swapped out, expected swap_in before")

    def _num_missing(self, num_new_tokens: int) -> int:
        """Returns the blocks that so many more tokens need in all groups."""
        number = self._num_tokens + num_new_tokens
        tables = zip(self.pool.groups, self._tables, strict=True)
        return sum(group.num_blocks(number) - len(table.blocks) for group, table in tables)

    def _drop_passed(self) -> None:
        for group, table in zip(self.pool.groups, self._tables, strict=True):
            self._drop(table, group.num_passed(self._num_tokens))

    def _drop(self, table: Table, end: int) -> None:
        """Frees a table's first `end` blocks."""
        passed = range(table.num_freed, end)
        if passed:
            self.pool._store.release(table.blocks[passed.start : passed.stop])
            table.blocks[passed.start : passed.stop] = array("i", [FREED_BLOCK] * len(passed))
            table.num_freed = end
