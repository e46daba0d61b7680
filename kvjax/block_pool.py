"""Assigns the blocks of a paged cache to sequences: reference counts, prefix caching, eviction.

Host-side bookkeeping of block numbers and token ids, without arrays of keys and values or devices. As in vLLM's block
pool, a block has a reference count, a full one a hash chained from its parent's, and free blocks are reused in
the order of last use.
"""

from __future__ import annotations

import collections
import copy
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvjax.errors import KVCacheTypeError, KVCacheValueError, OutOfBlocksError, shown
from kvjax.spec import as_int

FREED_BLOCK = -1
"""Block table entry for a freed block, or for none."""

MAX_SLOTS = 2**31 - 1
"""Slots are int32."""

HASH_VERSION = "sha256-int64-1"
"""Names how blocks are hashed. Another way has another name, for hashes that are stored or sent."""

HASH_BYTES = hashlib.sha256().digest_size

_SALT, _BLOCK = b"\0", b"\1"
"""First bytes of what is hashed: no salt has the hash of a block. All that follows a block's has a fixed length."""


class BlockPool:
    """Allocates the block numbers `0 .. num_blocks - 1` of a cache, with a reference count each.

    A block without references is free. A full block with known tokens (`PagedSequence.commit`) stays cached when free:
    a sequence with the same prefix reuses it, until the pool evicts it. `allocate` takes free blocks that are not
    cached first, the last freed first, then evicts cached ones, the least recently used first; within a sequence the
    last block first.

    Operations are O(1) per block, and O(1) per token where they read token ids. If one raises, nothing has changed.

    Attributes:
      num_blocks: blocks of the cache.
      block_size: tokens in a block.

    Raises:
      KVCacheValueError: no blocks, blocks without tokens, or more slots than int32 holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = as_int("num_blocks", num_blocks, least=1)
        self.block_size = as_int("block_size", block_size, least=1)
        if self.num_blocks * self.block_size > MAX_SLOTS:
            raise KVCacheValueError(
                f"num_blocks: got {shown(self.num_blocks)} of {self.block_size} tokens, expected at most"
                f" {MAX_SLOTS // self.block_size}: slots are int32"
            )
        self._ref_cnt = [0] * self.num_blocks
        self._hash_of: list[bytes | None] = [None] * self.num_blocks
        self._block_of: dict[bytes, int] = {}
        # Free blocks: a stack of those that are not cached, and an LRU order of those that are.
        self._uncached = list(range(self.num_blocks - 1, -1, -1))
        self._evictable: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks without references, cached ones included: what `allocate` can return."""
        return len(self._uncached) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks, in use or free, that a sequence with their tokens as prefix would share."""
        return len(self._block_of)

    def ref_cnt(self, block: int) -> int:
        """Returns the reference count of `block`; 0 if it is free."""
        return self._ref_cnt[as_int("block", block, least=0, most=self.num_blocks - 1)]

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, with a reference count of 1.

        Raises:
          OutOfBlocksError: fewer are free.
        """
        number = as_int("num_blocks", num_blocks, least=0)
        if number > self.num_free:
            raise OutOfBlocksError(number, self.num_free, self.num_blocks)
        return [self._take_free() for _ in range(number)]

    def fork(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of `blocks`, which must be in use.

        Raises:
          KVCacheValueError: one of them is free, or not of this pool.
        """
        self._hold(self._as_held(blocks, collections.Counter(set(blocks))))

    def free(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each of `blocks`, which are in the order of their tokens.

        Raises:
          KVCacheValueError: one of them is already free, or not of this pool.
        """
        self._release(self._as_held(blocks, collections.Counter(blocks)))

    def sequence(self, token_ids: ArrayLike = (), *, salt: bytes = b"") -> PagedSequence:
        """Returns a new sequence that shares the cached blocks of the prefix of `token_ids`.

        Args:
          token_ids: integers `[num_tokens]`, its prompt. The sequence starts with its `num_tokens` in shared full
            blocks, never with the prompt's last token, which has to be computed for its logits.
          salt: only sequences with the same salt share blocks: whatever else keys and values depend on, such as an
            adapter's name or the version of the weights.
        """
        return PagedSequence(self, _as_ids(token_ids), salt)

    def append(self, sequences: Sequence[PagedSequence], num_new_tokens: Sequence[int]) -> np.ndarray:
        """Reserves room for that many more tokens of each sequence; if it raises, of none.

        A sequence that shares its partial last block gets a copy of its own to write into.

        Returns:
          int32 `[num_copies, 2]`: pairs of blocks (from, to) for `copy_blocks`, to copy before the new tokens are
          written. Empty unless `PagedSequence.fork` was used.

        Raises:
          OutOfBlocksError: fewer blocks are free than this needs.
          KVCacheValueError: a negative number, or a sequence that is repeated or of another pool.
        """
        numbers = [as_int("num_new_tokens", number, least=0) for number in num_new_tokens]
        growing = [pair for pair in self._checked_pairs(sequences, numbers) if pair[1]]
        # Of the sequences that share a block and now write to it, the last keeps it.
        writers = collections.Counter(
            sequence._blocks[-1] for sequence, _ in growing if sequence._num_tokens % self.block_size
        )
        needed = sum(min(number, self._ref_cnt[block] - 1) for block, number in writers.items())
        needed += sum(self._num_missing(sequence, number) for sequence, number in growing)
        fresh = iter(self.allocate(needed))
        copies = []
        for sequence, number in growing:
            if sequence._num_tokens % self.block_size:
                copies.extend(self._own_last_block(sequence, fresh))
            missing = self._num_missing(sequence, number)
            sequence._blocks.extend(next(fresh) for _ in range(missing))
            sequence._num_tokens += number
        return np.array(copies, np.int32).reshape(-1, 2)

    def _num_missing(self, sequence: PagedSequence, num_new_tokens: int) -> int:
        return -(-(sequence._num_tokens + num_new_tokens) // self.block_size) - len(sequence._blocks)

    def _own_last_block(self, sequence: PagedSequence, fresh: Iterator[int]) -> list[tuple[int, int]]:
        """Makes the last block of `sequence` writable, replacing it if it is shared; returns the pairs to copy."""
        block = sequence._blocks[-1]
        if self._ref_cnt[block] == 1:
            self._uncache(block)  # after truncate, a full block's hash is stale
            return []
        sequence._blocks[-1] = next(fresh)
        self._ref_cnt[block] -= 1
        return [(block, sequence._blocks[-1])]

    def _take_free(self) -> int:
        if self._uncached:
            block = self._uncached.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._uncache(block)
        self._ref_cnt[block] = 1
        return block

    def _take_cached(self, block_hash: bytes) -> int | None:
        """Returns the block with that hash, with one more reference; None if there is none."""
        block = self._block_of.get(block_hash)
        if block is not None:
            self._evictable.pop(block, None)
            self._ref_cnt[block] += 1
        return block

    def _cache(self, block: int, block_hash: bytes) -> None:
        """Registers `block` under its hash unless another block has it."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block], self._block_of[block_hash] = block_hash, block

    def _uncache(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None

    def _hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._ref_cnt[block] += 1

    def _release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each of `blocks`. Of those then free, the last is evicted first."""
        freed = []
        for block in blocks:
            self._ref_cnt[block] -= 1
            if not self._ref_cnt[block]:
                freed.append(block)
        self._uncached.extend(block for block in freed if self._hash_of[block] is None)
        self._evictable.update((block, None) for block in reversed(freed) if self._hash_of[block] is not None)

    def _as_held(self, blocks: Sequence[int], counts: collections.Counter[int]) -> list[int]:
        """Returns `blocks` as ints after checking that each has at least as many references as `counts` says."""
        for block, count in counts.items():
            known = 0 <= as_int("blocks", block) < self.num_blocks
            if not known or self._ref_cnt[block] < count:
                references = f"with {self._ref_cnt[block]} references" if known else f"of a pool of {self.num_blocks}"
                raise KVCacheValueError(
                    f"blocks: got block {block}, {references}, expected at least {count} references"
                )
        return [int(block) for block in blocks]

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
        return list(zip(sequences, numbers, strict=True))


class PagedSequence:
    """The blocks of a sequence, in the order of its tokens. Created by `BlockPool.sequence` and `fork`.

    Attributes:
      pool: owns its blocks.
    """

    def __init__(self, pool: BlockPool, token_ids: array[int], salt: bytes) -> None:
        if not isinstance(salt, bytes):
            raise KVCacheTypeError(f"salt: got {shown(salt)} of type {type(salt).__name__}, expected bytes")
        self.pool = pool
        self._root = hashlib.sha256(_SALT + salt).digest()
        self._blocks: array[int] = array("i")
        self._num_freed = 0
        self._hashes: list[bytes] = []
        self._token_ids: array[int] = token_ids
        for index in range((len(token_ids) - 1) // pool.block_size):
            block_hash = self._hash(index)
            block = pool._take_cached(block_hash)
            if block is None:
                break
            self._hashes.append(block_hash)
            self._blocks.append(block)
        self._num_tokens = len(self._blocks) * pool.block_size
        del self._token_ids[self._num_tokens :]

    @property
    def num_tokens(self) -> int:
        """Tokens that there is room for, those of freed blocks included."""
        return self._num_tokens

    @property
    def blocks(self) -> np.ndarray:
        """Its row of a block table: int32 `[ceil(num_tokens / block_size)]`, -1 for freed blocks; a copy."""
        return np.array(self._blocks, np.int32)

    @property
    def token_ids(self) -> np.ndarray:
        """The ids of its first tokens, as far as known: int64 `[at most num_tokens]`; a copy."""
        return np.array(self._token_ids, np.int64)

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """The hashes of its full blocks of known tokens, 32 bytes each; the last is that of all tokens up to its end.

        They depend on ids and salt alone and are the same in every process, for stores outside of it.
        """
        return tuple(self._hashes)

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Returns the slots of its tokens from `start` to `stop`: int32 `[stop - start]`, negative in freed blocks.

        Raises:
          KVCacheValueError: it has fewer tokens.
        """
        start = as_int("start", start, least=0)
        stop = as_int("stop", stop, least=start, most=self._num_tokens)
        size = self.pool.block_size
        first = start // size
        blocks = np.array(self._blocks[first : -(-stop // size)], np.int32)
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
        ids = _as_ids(token_ids)
        if len(self._token_ids) + len(ids) > self._num_tokens:
            raise KVCacheValueError(
                f"token_ids: got {len(ids)} after the {len(self._token_ids)} known ones, expected at most"
                f" {self._num_tokens - len(self._token_ids)}: the sequence has {self._num_tokens} tokens"
            )
        self._token_ids.extend(ids)
        for index in range(len(self._hashes), len(self._token_ids) // self.pool.block_size):
            self._hashes.append(self._hash(index))
            if self._blocks[index] != FREED_BLOCK:
                self.pool._cache(self._blocks[index], self._hashes[index])

    def fork(self) -> PagedSequence:
        """Returns another sequence with the same tokens and blocks; further tokens go to separate blocks."""
        other = copy.copy(self)
        other._blocks, other._token_ids, other._hashes = self._blocks[:], self._token_ids[:], self._hashes[:]
        self.pool._hold(self._blocks[self._num_freed :])
        return other

    def truncate(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens, and frees the blocks after them.

        Raises:
          KVCacheValueError: it has fewer tokens, or blocks that hold some of the last ones were freed.
        """
        number = as_int("num_tokens", num_tokens, least=0, most=self._num_tokens)
        size = self.pool.block_size
        if 0 < number < self._num_freed * size:
            raise KVCacheValueError(
                f"num_tokens: got {number}, expected 0 or at least {self._num_freed * size}: the blocks of the"
                " earlier tokens were freed"
            )
        num_kept = -(-number // size)
        self.pool._release(self._blocks[max(num_kept, self._num_freed) :])
        self._num_freed = min(self._num_freed, num_kept)
        self._num_tokens = number
        del self._blocks[num_kept:], self._token_ids[number:], self._hashes[number // size :]

    def free_before(self, position: int) -> None:
        """Frees the blocks whose tokens are all before `position`; their entries become -1.

        A query at position `p` with a sliding window of W attends to tokens from `p - W + 1` on: call it with that
        before a step whose first new token is at `p`. Blocks shared with full-attention layers must not be freed.
        """
        end = min(as_int("position", position), self._num_tokens) // self.pool.block_size
        passed = range(self._num_freed, end)
        if passed:
            self.pool._release(self._blocks[passed.start : passed.stop])
            self._blocks[passed.start : passed.stop] = array("i", [FREED_BLOCK] * len(passed))
            self._num_freed = end

    def free(self) -> None:
        """Frees all blocks. The sequence is then empty and reusable."""
        self.truncate(0)

    def _hash(self, index: int) -> bytes:
        """Returns the hash of a full block, from its parent's hash and its token ids."""
        size = self.pool.block_size
        parent = self._hashes[index - 1] if index else self._root
        return hashlib.sha256(_BLOCK + parent + self._token_ids[index * size : (index + 1) * size].tobytes()).digest()


def _as_ids(token_ids: Any) -> array[int]:
    ids = np.asarray(token_ids)
    if ids.ndim != 1:
        raise KVCacheValueError(f"token_ids: got shape {ids.shape}, expected [num_tokens]")
    if ids.size and ids.dtype.kind not in "iu":
        raise KVCacheTypeError(f"token_ids: got dtype {ids.dtype}, expected integers")
    return array("q", ids.astype(np.int64).tobytes())
