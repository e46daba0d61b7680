"""`BlockPool`: allocates blocks to the sequences of one or several groups of layers."""

from __future__ import annotations

import collections
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvjax.block_pool.core import PoolCore
from kvjax.block_pool.hashes import as_ids
from kvjax.block_pool.host import Swaps
from kvjax.block_pool.sequence import PagedSequence, paired
from kvjax.block_pool.store import BlockEvent
from kvjax.errors import KVCacheValueError, OutOfBlocksError
from kvjax.spec import as_int, as_items


class BlockPool(PoolCore):
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
      num_states, num_host_blocks, num_host_states: as given.
      groups: of each group of layers, its `block_size` and `sliding_window`.

    Raises:
      KVCacheValueError: no blocks, blocks without tokens, or more slots than int32 holds.
      KVCacheTypeError: a number that is not an int, or `groups` that are not a sequence of specs or groups.
    """

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
        """State slots that no sequence has and no copy for a fork waits for."""
        return self._states.slots.num_free

    @property
    def num_free_host(self) -> int:
        """Host blocks that no swapped sequence has and no copy from the host waits for, cached ones included."""
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
          KVCacheTypeError: not a sequence of ints.
        """
        numbers = _as_blocks(blocks)
        self._store.check_held(dict.fromkeys(numbers, 1))
        self._store.hold(numbers)

    def free(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each of `blocks`, which are in the order of their tokens.

        Raises:
          KVCacheValueError: one of them is already free, or not of this pool.
          KVCacheTypeError: not a sequence of ints.
        """
        numbers = _as_blocks(blocks)
        self._store.check_held(collections.Counter(numbers))
        self._store.release(numbers)

    def sequence(self, token_ids: ArrayLike = (), *, salt: bytes = b"") -> PagedSequence:
        """Returns a new sequence that shares the cached blocks of the prefix of `token_ids`.

        Args:
          token_ids: integers `[num_tokens]`, its prompt. The sequence starts with its `num_tokens` in shared full
            blocks, never with the prompt's last token, which has to be computed for its logits.
          salt: only sequences with the same salt share blocks: whatever else keys and values depend on, such as an
            adapter's name or the version of the weights.

        Raises:
          KVCacheValueError: `token_ids` of another shape, or beyond int64.
          KVCacheTypeError: `token_ids` that are not integers, or a salt that is not bytes.
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

        Sequences keep their blocks. What a sequence that has tokens now commits later is not cached, until the sequence
        is freed.
        """
        self._store.clear()
        self._host.store.clear()
        self._num_resets += 1

    def take_swaps(self) -> Swaps:
        """Returns the copies to and from the host since the last call: make them before each step.

        First those to the host, then those from it, then those of states for forks, then what `append` returned.
        Without `num_host_blocks` and `num_host_states` there are only those for forks.
        """
        self._fork_copies.take()  # `append` has returned them
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
        sequence that shares its partial last block gets a copy of its own to write into; likewise one that shares its
        state, whose copies `take_swaps` returns.

        Returns:
          int32 `[num_copies, 2]`: pairs of blocks (from, to) for `copy_blocks`, to copy before the new tokens are
          written. Empty unless `PagedSequence.fork` was used. With `num_host_blocks`, these blocks are in use until
          `take_swaps`.

        Raises:
          OutOfBlocksError: fewer blocks, or states, are free than this needs.
          KVCacheValueError: a negative number, or a sequence that is repeated or of another pool.
          KVCacheTypeError: not a sequence of `PagedSequence`s, or not one of ints.
        """
        growing = [pair for pair in self._checked_pairs(sequences, num_new_tokens) if pair[1]]
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
        holders = self._fork_copies.num_sequences
        needed = sum(min(number, holders(block) - dropped[block] - 1) for block, number in writers.items())
        needed += sum(sequence._num_missing(number) for sequence, number in growing)
        num_free = self.num_free + sum(held[block] == count for block, count in dropped.items())
        if needed > num_free:
            raise OutOfBlocksError(needed, num_free, self.num_blocks)
        if self.num_states:
            self._states.slots.check(self._states.num_needed([sequence._state for sequence, _ in growing]))
        for sequence, _ in growing:
            sequence._drop_passed()
            if not sequence._num_tokens:
                sequence._num_resets = self._num_resets
            if self.num_states:
                sequence._state = self._states.own(sequence._state)
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

    def _checked_pairs(
        self, sequences: Sequence[PagedSequence], num_new_tokens: Sequence[int]
    ) -> list[tuple[PagedSequence, int]]:
        pairs = paired(sequences, "num_new_tokens", num_new_tokens)
        pairs = [(sequence, as_int("num_new_tokens", number, least=0)) for sequence, number in pairs]
        for index, (sequence, _) in enumerate(pairs):
            if sequence.pool is not self:
                raise KVCacheValueError(
                    f"sequences[{index}]: got a sequence of another pool, expected one of this pool"
                )
            sequence._check_is_here(f"sequences[{index}]")
        return pairs


def _as_blocks(blocks: Sequence[int]) -> list[int]:
    return [as_int("blocks", block) for block in as_items("blocks", blocks, "a sequence of block numbers")]
