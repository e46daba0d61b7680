"""Which block of the pool belongs to which sequence: a free list, and block tables that grow a block at a time."""

from __future__ import annotations

import numpy as np


class BlockPool:
    """Hands out the block numbers `0 .. num_blocks - 1`, the most recently freed first.

    Attributes:
      times_handed_out: how often each block was given to a sequence; above 1 it was freed and used again.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self.times_handed_out = np.zeros(num_blocks, int)

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def take(self) -> int:
        """A block that nobody holds; `MemoryError` where there is none."""
        if not self._free:
            raise MemoryError(f"all {self.num_blocks} blocks of the cache are in use")
        block = self._free.pop()
        self.times_handed_out[block] += 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        """Frees `blocks`; `ValueError` where one is free already, for two sequences would then write to it."""
        if twice := sorted(set(blocks) & set(self._free)):
            raise ValueError(f"blocks {twice} are free already")
        self._free.extend(blocks)


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.blocks: list[int] = []

    def grow(self, num_tokens: int, pool: BlockPool) -> None:
        """Takes blocks from `pool` until there is room for `num_tokens`."""
        while len(self.blocks) * self.block_size < num_tokens:
            self.blocks.append(pool.take())

    def slots(self, start: int, stop: int) -> np.ndarray:
        """The slots of positions `start` to `stop` of the sequence: int32 `[stop - start]`."""
        positions = np.arange(start, stop)
        blocks = np.asarray(self.blocks, np.int32)[positions // self.block_size]
        return (blocks * self.block_size + positions % self.block_size).astype(np.int32)

    def row(self) -> np.ndarray:
        """This sequence's row of a block table: int32 `[max_blocks]`, zeros past its own blocks."""
        return np.pad(np.asarray(self.blocks, np.int32), (0, self.max_blocks - len(self.blocks)))
