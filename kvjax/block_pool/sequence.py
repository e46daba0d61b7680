"""`PagedSequence`: the blocks of one sequence in every group of layers, here or on the host."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvjax.block_pool.core import FREED_BLOCK, PoolCore
from kvjax.block_pool.groups import Group, GroupTable
from kvjax.block_pool.hashes import as_ids, block_hash, root_hash
from kvjax.block_pool.host import NO_STATE
from kvjax.errors import KVCacheTypeError, KVCacheValueError, OutOfBlocksError, kind_of
from kvjax.spec import as_int, as_items


class PagedSequence:
    """The blocks of a sequence, in the order of its tokens. Created by `BlockPool.sequence` and `fork`.

    Attributes:
      pool: owns its blocks.
    """

    def __init__(self, pool: PoolCore, token_ids: array[int], salt: bytes) -> None:
        self.pool = pool
        self._roots = [root_hash(salt, group.index) for group in pool.groups]
        chains = pool._chains(token_ids, salt)
        self._num_tokens = pool._find_prefix(chains, len(token_ids))
        self._tables = pool._share(chains, self._num_tokens)
        self._token_ids: array[int] = token_ids[: self._num_tokens]
        self._num_resets = pool._num_resets
        self._last_cut = 0, 0
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
        """Its slot in arrays of states, from its first `append` until it is freed; -1 before, and without states.

        A fork has that of its parent until one of them grows.
        """
        return self._state

    @property
    def token_ids(self) -> np.ndarray:
        """The ids of its first tokens, as far as known: int64 `[at most num_tokens]`; a copy."""
        return np.array(self._token_ids, np.int64)

    @property
    def last_cut(self) -> tuple[int, int]:
        """How often `truncate` or `free` took tokens away, and how many tokens were left the last time."""
        return self._last_cut

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """The hashes of its full blocks of known tokens, 32 bytes each; the last is that of all tokens up to its end.

        They depend on ids and salt alone and are the same in every process, so stores outside of it can use them. Of
        several groups, those of the first.
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

    def _cache(self, group: Group, table: GroupTable, index: int) -> None:
        if self._is_shared and table.blocks[index] != FREED_BLOCK:
            size = group.block_size
            self.pool._cache(group, table, index, self._token_ids[index * size : (index + 1) * size])

    def fork(self) -> PagedSequence:
        """Returns another sequence with the same tokens, blocks and state; further tokens go to separate ones.

        `BlockPool.append` separates them: it returns the copies of blocks, `BlockPool.take_swaps` those of states.

        Raises:
          KVCacheValueError: it is swapped out.
        """
        self._check_is_here("fork")
        other = copy.copy(self)
        if self._state != NO_STATE:
            self.pool._states.slots.hold([self._state])
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
        if number < self._num_tokens:
            self._last_cut = self._last_cut[0] + 1, number
        self._num_tokens = number
        del self._token_ids[number:]
        if not number:
            self._num_resets = self.pool._num_resets
            if self._state != NO_STATE:
                self.pool._states.slots.release([self._state])
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
            pool._states.check_swap_out(self._state)
        live = [table.blocks[table.num_freed :] for table in self._tables]
        keys = [self._live_hashes(table) for table in self._tables]
        contents = [map(pool._fork_copies.content_of, blocks) for blocks in live]
        placed = iter(
            pool._host.put([pair for of in zip(contents, keys, strict=True) for pair in zip(*of, strict=True)])
        )
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

    def _live_hashes(self, table: GroupTable) -> list[bytes | None]:
        """Returns the hashes of a table's blocks that were not freed; None where no other sequence may share them."""
        number = len(table.blocks)
        hashes: list[bytes | None] = [*table.hashes] if self._is_shared else []
        return [*hashes, *[None] * (number - len(hashes))][table.num_freed :]

    def _free_swapped(self) -> None:
        """Gives back what it has on the host."""
        for host_blocks in self._swapped or ():
            self.pool._host.store.release(host_blocks)
        if self._host_state != NO_STATE:
            self.pool._states.host.store.release([self._host_state])
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

    def _drop(self, table: GroupTable, end: int) -> None:
        """Frees a table's first `end` blocks."""
        passed = range(table.num_freed, end)
        if passed:
            self.pool._store.release(table.blocks[passed.start : passed.stop])
            table.blocks[passed.start : passed.stop] = array("i", [FREED_BLOCK] * len(passed))
            table.num_freed = end


def check_is_sequence(what: str, sequence: object) -> None:
    """Raises `KVCacheTypeError` if it is no `PagedSequence`."""
    if not isinstance(sequence, PagedSequence):
        raise KVCacheTypeError(f"{what}: got {kind_of(sequence)}, expected a PagedSequence: BlockPool.sequence")


def paired(sequences: Sequence[PagedSequence], what: str, numbers: Sequence[int]) -> list[tuple[PagedSequence, Any]]:
    """Returns each sequence of a step with its number, which is not checked; messages name the numbers `what`.

    Raises:
      KVCacheValueError: not one number for each sequence, or a sequence given twice.
      KVCacheTypeError: not a sequence of `PagedSequence`s, or numbers without an order.
    """
    given = as_items("sequences", sequences, "a sequence of PagedSequences")
    counts = as_items(what, numbers, "a sequence of ints, one for each of the sequences")
    for index, sequence in enumerate(given):
        if not isinstance(sequence, PagedSequence):  # the name is made only if needed: steps call this
            check_is_sequence(f"sequences[{index}]", sequence)
    if len(given) != len(counts):
        raise KVCacheValueError(f"{what}: got {len(counts)} numbers, expected one for each of {len(given)} sequences")
    if len(set(given)) != len(given):
        raise KVCacheValueError("sequences: got a duplicate, expected each once")
    return list(zip(given, counts, strict=True))
