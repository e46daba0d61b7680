"""Groups of layers with a block table of their own: which blocks a window has passed, and which prefix is cached."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from kvjax.block_pool.hashes import Chain
from kvjax.errors import KVCacheTypeError, KVCacheValueError, kind_of
from kvjax.spec import as_int, as_items


class HasBlocks(Protocol):
    """What a pool reads of a group of layers: an `AttentionSpec` or a `LayerGroup` has it."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query sees, its own included; None for all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table.

    `sliding_window`: tokens that a query sees, its own included; None for all, or for a window unknown to the pool.
    """

    index: int
    block_size: int
    sliding_window: int | None = None

    def num_blocks(self, num_tokens: int) -> int:
        """Returns how many blocks a table of so many tokens has, freed ones included."""
        return -(-num_tokens // self.block_size)

    def num_passed(self, position: int) -> int:
        """Returns how many blocks hold only tokens that no query from `position` on sees."""
        if self.sliding_window is None:
            return 0
        return max(position - self.sliding_window + 1, 0) // self.block_size


def as_groups(groups: Sequence[HasBlocks]) -> tuple[Group, ...]:
    """Returns the groups of a pool, in order, after checking their sizes."""
    given = as_items("groups", groups, "a sequence of specs, or what group_layers returns")
    if not given:
        raise KVCacheValueError("groups: got none, expected at least one")
    found = []
    for index, group in enumerate(given):
        if not hasattr(group, "block_size") or not hasattr(group, "sliding_window"):
            raise KVCacheTypeError(f"groups[{index}]: got {kind_of(group)}, expected a spec, or one of group_layers")
        window = group.sliding_window
        if window is not None:
            window = as_int(f"groups[{index}].sliding_window", window, least=1)
        found.append(Group(index, as_int(f"groups[{index}].block_size", group.block_size, least=1), window))
    return tuple(found)


class GroupTable:
    """A sequence's blocks in one group: `blocks` in the order of tokens, of which the first `num_freed` are freed."""

    __slots__ = ("blocks", "hashes", "num_freed")

    def __init__(self, blocks: array[int], num_freed: int, hashes: list[bytes]) -> None:
        self.blocks, self.num_freed, self.hashes = blocks, num_freed, hashes

    def copy(self) -> GroupTable:
        """Returns an equal table that changes by itself."""
        return GroupTable(self.blocks[:], self.num_freed, self.hashes[:])


def cached_prefix(
    groups: Sequence[Group], chains: Sequence[Chain], num_tokens: int, is_cached: Callable[[bytes], bool]
) -> int:
    """Returns how many of a prompt's tokens need not be computed: whole blocks of every group, never the last token.

    A group without a window needs all blocks of the prefix; one with a window needs those that the next token sees.
    """
    whole = math.lcm(*(group.block_size for group in groups))
    found = max(num_tokens - 1, 0) // whole * whole
    for group, chain in zip(groups, chains, strict=True):
        if group.sliding_window is None:
            run = next((i for i in range(found // group.block_size) if not is_cached(chain[i])), None)
            found = found if run is None else run * group.block_size // whole * whole
    # For each group, the first block of those known to be cached. Prefixes only shrink, so none is looked up twice.
    known = [found // group.block_size for group in groups]
    while found:
        shorter = found
        for group, chain in zip(groups, chains, strict=True):
            if group.sliding_window is not None:
                first, end = group.num_passed(shorter), min(known[group.index], shorter // group.block_size)
                gap = next((i for i in reversed(range(first, end)) if not is_cached(chain[i])), None)
                # Every shorter prefix whose last block is at or after the gap needs it too.
                shorter = shorter if gap is None else gap * group.block_size // whole * whole
                known[group.index] = min(first, end) if gap is None else gap
        if shorter == found:
            break
        found = shorter
    return found
