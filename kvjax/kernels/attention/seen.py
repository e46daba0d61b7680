"""The mask: the tokens that query rows see, and masking of logits and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels import lanes
from kvjax.kernels.aliases import ABSENT
from kvjax.kernels.attention.problem import COLUMNS, TREE_DEPTHS, Problem, Refs
from kvjax.kernels.attention.ring import divided
from kvjax.kernels.attention.stages import StageLayout
from kvjax.kernels.attention.values import Values
from kvjax.kernels.attention.warp import Warp


class TreeRow(NamedTuple):
    """The query tokens that a query row sees, and its depth among them, which only a window needs; 0 without one."""

    words: Sequence[jax.Array]
    depth: jax.Array | int


class Span(NamedTuple):
    """The visible positions of a sequence.

    Attributes:
      length: the sequence's length; query tokens are at its last positions.
      start: the first position that any query row sees.
      end: the end of the stored positions.
      sees_all_from: start of the positions that all query rows see.
      sees_all_to: their end.
      tree: for each of a thread's query rows, which of `Problem.tree` query tokens it sees; empty without a tree.
    """

    length: jax.Array
    start: jax.Array
    end: jax.Array
    sees_all_from: jax.Array
    sees_all_to: jax.Array
    tree: Sequence[TreeRow] = ()

    @classmethod
    def of(cls, problem: Problem, length: jax.Array) -> Span:
        """The visible positions of a sequence of a length."""
        q_len, window = problem.q_len, problem.window
        start = jnp.int32(0) if problem.reach is None else jnp.maximum(length - problem.reach, 0)
        all_from = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
        end = jnp.minimum(length, problem.max_blocks * problem.spec.block_size)
        last_rows = max(q_len - 1, problem.tree or 0)
        return cls(length, start, end, all_from, jnp.minimum(length - last_rows, end))


@dataclasses.dataclass(frozen=True)
class Seen:
    """The mask of a warp's query rows.

    Attributes:
      problem: the call's.
      layout: maps rows of a tile to tokens.
      warp: the warp.
      refs: the references; the block table is flat.
      num_blocks: number of blocks of the cache, a uint32 register.
    """

    problem: Problem
    layout: StageLayout
    warp: Warp
    refs: Refs
    num_blocks: jax.Array

    def span(self, sequence: jax.Array, length: jax.Array) -> Span:
        """What the rows of a sequence of a length see."""
        problem = self.problem
        span = Span.of(problem, length)
        if problem.window is not None and self.refs.q_lens is not ABSENT:
            # Rows that a sequence does not have would reach further back, to tokens that may be NaN.
            first = length - (self.refs.q_lens[sequence] + (problem.window - 1))
            span = span._replace(start=jnp.maximum(first, 0))
        if problem.tree is None:
            return span
        if problem.window is not None:
            at = sequence * (problem.q_len * problem.tree_size) + 1
            first = lax.bitcast_convert_type(self.refs.tree[at], jnp.int32) + (length - problem.tree)
            span = span._replace(start=jnp.maximum(first + (1 - problem.window), 0))
        return span._replace(tree=[self._tree_row(sequence, row) for row in self.query_rows()])

    def _tree_row(self, sequence: jax.Array, query_row: jax.Array) -> TreeRow:
        problem, is_row = self.problem, query_row < self.problem.rows
        index = (sequence * problem.q_len + query_row // problem.group) * problem.tree_size

        def loaded(number: int) -> jax.Array:
            return lanes.load_global(self.refs.tree, index + number, is_row)

        words = [loaded(number) for number in range(TREE_DEPTHS, problem.tree_size)]
        return TreeRow(words, 0 if problem.window is None else lanes.bits(loaded(0), jnp.int32))

    def query_rows(self) -> list[jax.Array]:
        """The thread's query rows, in the order of its registers: two of each tile."""
        return [columns * COLUMNS + 2 * self.warp.column + i for columns in range(self.problem.tiles) for i in range(2)]

    def is_there(self, start: jax.Array, entries: jax.Array, span: Span, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The position of a row of the tile that begins at `start`, and whether any query row sees it."""
        position = start + row
        seen = (position >= span.start) & (position < span.end)
        entry = entries + divided(position, self.layout.block_size)
        block = lanes.load_global(self.refs.table, entry, seen, -1)
        return position, block < self.num_blocks

    def logits(self, start: jax.Array, entries: jax.Array, span: Span, logits: list[jax.Array]) -> list[jax.Array]:
        """Logits of a tile, -inf where a query row does not see a token."""
        problem = self.problem
        none = lanes.splat(-jnp.inf, jnp.float32)
        logits = list(logits)
        for half in range(2):
            position, is_there = self.is_there(start, entries, span, self.layout.token(self.warp.row, half))
            for number, query_row in enumerate(self.query_rows()):
                end = span.length - (problem.q_len - 1) + divided(query_row, problem.group)
                seen = is_there & (position < end)
                first = None if problem.window is None else end - problem.window
                if problem.tree is not None:
                    row, context = span.tree[number], span.length - problem.tree
                    seen &= in_tree(position - context, row.words)
                    if problem.window is not None:  # its words say which query tokens are in the window
                        first = jnp.minimum(context + row.depth + (1 - problem.window), context)
                if first is not None:
                    seen &= position >= first
                at = 4 * (number // 2) + 2 * half + number % 2
                logits[at] = jnp.where(seen, logits[at], none)
        return logits

    def row_scales(self, start: jax.Array, entries: jax.Array, span: Span, scales: list[jax.Array]) -> list[jax.Array]:
        """Scales of the thread's rows of a tile, zero where no query row sees a token: they may be NaN there."""
        zero = lanes.splat(0.0, jnp.float32)
        seen = [self.is_there(start, entries, span, self.layout.token(self.warp.row, half))[1] for half in range(2)]
        return [jnp.where(is_there, scale, zero) for is_there, scale in zip(seen, scales, strict=True)]

    def values(self, start: jax.Array, entries: jax.Array, span: Span, values: Values) -> Values:
        """Values of a tile, zero where no query row sees a token.

        They may be NaN there, which a weight of 0 would not mask. For NVFP4 the block scales are cleared, since codes
        are always finite.
        """
        zero = lanes.splat(0, jnp.uint32)
        masks = []
        for half in range(2):
            mask = zero
            for i in range(2):
                _, seen = self.is_there(start, entries, span, self.layout.token(2 * self.warp.column + i, half))
                mask = mask | jnp.where(seen, lanes.splat(0xFFFF << 16 * i, jnp.uint32), zero)
            masks.append(mask)

        def kept(rows: list[list[jax.Array]]) -> list[list[jax.Array]]:
            return [[x & mask for x, mask in zip(both, masks, strict=True)] for both in rows]

        words, scales = values
        return (
            Values(words, kept(scales)) if self.problem.value_format.has_block_scales else Values(kept(words), scales)
        )


def in_tree(number: jax.Array, words: Sequence[jax.Array]) -> jax.Array:
    """Whether a query row sees a query token, given by its number; negative ones, those of the context, are seen."""
    seen = number < 0
    for i, word in enumerate(words):
        own = number - 32 * i
        bit = (word >> lanes.bits(own & 31, jnp.uint32)) & jnp.uint32(1)
        seen |= (own >= 0) & (own < 32) & (bit != 0)
    return seen
