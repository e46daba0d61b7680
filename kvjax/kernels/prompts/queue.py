"""The work of the prompt kernel: items, which thread blocks take one after another."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels.aliases import Carry, Scalar
from kvjax.kernels.launchable import Number
from kvjax.kernels.prompts.operands import PromptArrays
from kvjax.kernels.prompts.problem import ROWS, PromptConfig, PromptProblem, block_shape


class Claimed(NamedTuple):
    """The item that a thread block has claimed, int32 numbers in its shared memory.

    Items are numbered prompt by prompt; in a prompt, the last rows come first, which see most tokens.

    Attributes:
      index: its number.
      prompt: the prompt that it belongs to; after the last item the number of prompts.
      before: items of all prompts before.
      count: items of the prompt; after the last item of the last prompt.
      kv_head: the head whose keys and values it reads.
      start: its first tile of tokens.
      stop: the tile after the last.
      near_start: its first tile of near tokens; None where there are none, like `near_stop`.
      near_stop: the tile after the last.
    """

    index: Scalar
    prompt: Scalar
    before: Scalar
    count: Scalar
    kv_head: Scalar
    start: Scalar
    stop: Scalar
    near_start: Scalar | None = None
    near_stop: Scalar | None = None

    @classmethod
    def num_numbers(cls, problem: PromptProblem) -> int:
        """How many numbers describe an item."""
        return len(cls._fields) - (2 if problem.near is None else 0)

    @property
    def numbers(self) -> tuple[Scalar, ...]:
        """The numbers that describe the item."""
        return self if self.near_start is not None else self[:-2]

    @property
    def bounds(self) -> tuple[Scalar, ...]:
        """As `Item.bounds`."""
        if self.near_start is None:
            return (self.stop,)
        return self.stop, self.near_start, self.stop + self.near_stop - self.near_start


class TileSpan(NamedTuple):
    """The tiles of tokens that a thread block's rows see.

    Attributes:
      start: the first tile.
      stop: the tile after the last.
      plain_start: the first tile that all rows see as a whole.
      plain_stop: the tile after the last such.
    """

    start: jax.Array
    stop: jax.Array
    plain_start: jax.Array
    plain_stop: jax.Array


def _span(
    problem: PromptProblem,
    config: PromptConfig,
    split: Scalar,
    rows: tuple[Scalar, Scalar],
    present: tuple[Scalar, Scalar, Scalar],
    no_tile: int | None,
    may_be_none: Scalar | None = None,
) -> TileSpan:
    """The tiles for rows at positions `rows`, the first and the last.

    `present` are the first token that is present, from there the first that is absent, and the end of those present.
    If no row sees a token, there is one masked tile: `no_tile`, unless that is None. There is none if `may_be_none`.
    """
    (first, last), (first_present, first_absent, end) = rows, present
    size = config.tokens
    start, stop = _seen(problem.window, size, rows, end)
    plain_stop = lax.div(jnp.clip(first + 1, 0, first_absent), jnp.int32(size))
    plain_start = jnp.int32(first_present)
    if problem.window is not None:
        plain_start = jnp.maximum(last - (problem.window - 1), plain_start)
    plain_start = lax.div(plain_start + (size - 1), jnp.int32(size))
    if not (isinstance(config.splits, int) and config.splits == 1):
        per = lax.div(stop - start + (config.splits - 1), jnp.int32(config.splits))
        start = jnp.minimum(start + split * per, stop)
        stop = jnp.minimum(start + per, stop)
    if no_tile is not None:
        is_some = start < stop if may_be_none is None else (start < stop) | may_be_none
        start = jnp.where(is_some, start, no_tile)
    stop = jnp.maximum(stop, start + (1 if may_be_none is None else jnp.where(may_be_none, 0, 1)))
    plain_start = jnp.clip(plain_start, start, stop)
    return TileSpan(start, stop, plain_start, jnp.clip(plain_stop, plain_start, stop))


def _seen(window: int | None, size: int, rows: tuple[Scalar, Scalar], end: Scalar) -> tuple[jax.Array, jax.Array]:
    """The first tile of `size` tokens that rows see, and the tile after the last; perhaps the same."""
    first, last = rows
    ends = jnp.clip(last + 1, 0, end)
    begins = jnp.int32(0) if window is None else jnp.maximum(first - (window - 1), 0)
    start, stop = lax.div(begins, jnp.int32(size)), lax.div(ends + (size - 1), jnp.int32(size))
    return start, jnp.maximum(start, stop)


class NearSpan(NamedTuple):
    """Tiles of near tokens: the first one, and the one after the last."""

    start: jax.Array
    stop: jax.Array


class Item(NamedTuple):
    """What a warpgroup computes at a time: `ROWS` rows of a head, with the tokens of a split.

    Its tiles are numbered from `span.start` on, near ones after the others.

    Attributes:
      prompt: as in `Claimed`.
      split: the split of its tokens.
      head: the query head.
      kv_head: the head of its keys and values.
      base: the first row of the query.
      q_start: row 0 of the sequence.
      q_end: the row after its last.
      position: the position of row 0.
      span: the tiles of its tokens.
      near: the tiles of near tokens, all of the last split; None where there are none.
    """

    prompt: jax.Array
    split: jax.Array
    head: jax.Array
    kv_head: jax.Array
    base: jax.Array
    q_start: jax.Array
    q_end: jax.Array
    position: jax.Array
    span: TileSpan
    near: NearSpan | None = None

    @property
    def stop(self) -> jax.Array:
        """The number after that of its last tile."""
        return self.bounds[-1]

    @property
    def bounds(self) -> tuple[jax.Array, ...]:
        """Where the item's tiles end: `stop`. With near tokens: where these begin, the first near tile, and `stop`."""
        if self.near is None:
            return (self.span.stop,)
        return self.span.stop, self.near.start, self.span.stop + self.near.stop - self.near.start


@dataclasses.dataclass(frozen=True)
class Queue:
    """The items of a call."""

    problem: PromptProblem
    config: PromptConfig
    arrays: PromptArrays

    @property
    def num_prompts(self) -> Number:
        """Prompts, those without rows included."""
        return self.arrays.num_prompts

    @property
    def _last_prompt(self) -> Scalar:
        return self.num_prompts - 1 if isinstance(self.num_prompts, int) else jnp.maximum(self.num_prompts - 1, 0)

    @property
    def _group(self) -> int:
        """Query heads of a KV head."""
        return self.arrays.num_heads // self.arrays.num_kv_heads

    @property
    def _block_shape(self) -> tuple[int, int]:
        return block_shape(self.arrays.num_heads, self.arrays.num_kv_heads)

    @property
    def _items_of_rows(self) -> Number:
        """Items of the same rows."""
        return self.arrays.num_heads // self._block_shape[0] * self.config.splits

    def _count(self, prompt: Scalar) -> Scalar:
        """Items of a prompt; those of the last one if there is no such prompt."""
        rows = self._block_shape[1]
        q_len = self.arrays.q_len(jnp.minimum(prompt, self._last_prompt))
        return lax.div(jnp.maximum(q_len, 0) + (rows - 1), jnp.int32(rows)) * self._items_of_rows

    def first(self, index: Scalar) -> Claimed:
        """The item of an index, from the first prompt on."""
        zero = jnp.int32(0)
        return self.seek(Claimed(index, zero, zero, self._count(zero), zero, zero, zero))

    def seek(self, claimed: Claimed) -> Claimed:
        """The item of `claimed.index`, which is not before the item that the other fields describe."""
        index = claimed.index

        def is_later(at: Carry) -> Scalar:
            prompt, before, count = at
            return (prompt < self.num_prompts) & (index - before >= count)

        def next_prompt(at: Carry) -> Carry:
            prompt, before, count = at
            return prompt + 1, before + count, self._count(prompt + 1)

        prompt, before, count = lax.while_loop(is_later, next_prompt, claimed[1:4])
        found = claimed._replace(prompt=prompt, before=before, count=count)
        item = self.item(found, 0)
        start, stop = item.span.start, item.span.stop
        is_any = prompt < self.num_prompts
        found = found._replace(kv_head=item.kv_head, start=start, stop=jnp.where(is_any, stop, start))
        if item.near is None:
            return found
        return found._replace(near_start=item.near.start, near_stop=jnp.where(is_any, item.near.stop, item.near.start))

    def item(self, claimed: Claimed, warpgroup: Scalar) -> Item:
        """A warpgroup's part of an item; if there is none, a part of the last prompt without rows."""
        arrays, (heads, rows) = self.arrays, self._block_shape
        prompt = jnp.minimum(claimed.prompt, self._last_prompt)
        groups = arrays.num_heads // heads
        number = claimed.index - claimed.before
        head = lax.rem(number, jnp.int32(groups)) * heads
        number = lax.div(number, jnp.int32(groups))
        split = lax.rem(number, jnp.int32(self.config.splits))
        tile = lax.div(claimed.count, jnp.int32(self._items_of_rows)) - 1
        tile -= lax.div(number, jnp.int32(self.config.splits))
        q_start, position = arrays.q_start(prompt), arrays.position(prompt)
        q_end = q_start + arrays.q_len(prompt)
        base = q_start + tile * rows
        first = base - q_start + position
        last = jnp.minimum(base + rows, q_end) - 1 - q_start + position
        present = arrays.first_present(prompt), arrays.first_absent(prompt), arrays.end(prompt)
        has_near = near = None
        if arrays.near is not None:
            has_near = split == self.config.splits - 1
            ahead = arrays.near.position(prompt) - position
            rows_near = first + ahead, last + ahead
            start, stop = _seen(self.problem.near, self.config.tokens, rows_near, arrays.near.end(prompt))
            start = jnp.where(start < stop, start, 0)
            near = NearSpan(start, jnp.where(has_near, jnp.maximum(stop, start + 1), start))
        span = _span(self.problem, self.config, split, (first, last), present, arrays.no_tile, has_near)
        own_head, own_base = (head + warpgroup, base) if heads > 1 else (head, base + warpgroup * ROWS)
        kv_head = lax.div(head, jnp.int32(self._group))
        return Item(claimed.prompt, split, own_head, kv_head, own_base, q_start, q_end, position, span, near)
