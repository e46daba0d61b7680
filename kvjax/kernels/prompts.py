"""The prompt kernel: attention of long query chunks over dense keys and values, on Hopper's tensor cores.

Two warpgroups take 64 query rows of a head each and take turns, so that one computes its softmax while the other
multiplies, as in FlashAttention-3 (https://arxiv.org/abs/2407.08608). Where a KV head has an even number of query
heads, the two take neighbouring heads of the same rows; otherwise the same head of neighbouring rows. The turns also
order reads of shared memory and the copies that replace what was read: the second warpgroup issues these. (A third
warpgroup for copies would leave each thread 168 registers, for ptxas ignores `setmaxnreg` here.)

Each multiprocessor gets one thread block, which takes one item after another: rows of heads, the longest work of a
prompt first. Before it is done with an item it claims the next one from a queue that all blocks
share. The ring of tiles goes on from item to item: while a block multiplies the last tiles of an item, it copies the
first ones of the next, and it loads the next query rows while it stores results.

Rows of a sequence are consecutive rows of the query. Results are stored in place, in rows of the same index; the rows
of other sequences are not touched. A row sees the tokens up to its position, within its window, but for those whose
bias is -inf. Only tiles that some row does not see as a whole are masked.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat
from kvjax.kernels.attention.softmax import LOG2_E, capped, margin
from kvjax.kernels.target import Target, current
from kvjax.spec import AttentionSpec

ROWS = 64
"""Query rows of a warpgroup: the rows of one `wgmma`."""

MAX_HEAD_SIZE = 256
"""More do not fit in registers."""

TOKENS = 128
"""Most tokens of a tile."""

MIN_SEGMENT = 512
"""Least tokens of a segment of the longest sequence: fewer are sooner read than merged."""

ALIGNMENT = 8
"""Tokens at whose multiples a copy to the layout of `wgmma` may start; others would be copied to wrong places."""

WARPGROUPS = 2


@dataclasses.dataclass(frozen=True)
class PromptConfig:
    """How the kernel is launched.

    Attributes:
      tokens: keys and values of a tile.
      stages: tiles in shared memory, at least 2.
      segments: parts that a row's tiles are divided into, each with results of its own.
    """

    tokens: int
    stages: int
    segments: int = 1


class Problem(NamedTuple):
    """What a kernel is compiled for, besides the shapes of its arrays.

    Attributes:
      max_q_len: most rows of a sequence.
      window: tokens that a row sees, its own included.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`.
    """

    max_q_len: int
    window: int | None
    logits_soft_cap: float | None


class Operands(NamedTuple):
    """Arrays, or references to them.

    Attributes:
      query: float16 or bfloat16 `[num_tokens, num_heads, head_size]`, at least `ROWS` tokens.
      keys: float16 or bfloat16 `[num_prompts, num_tokens, num_kv_heads, head_size]`; the number of tokens is a multiple
        of `ALIGNMENT`, at least a tile. Queries are converted to their dtype.
      values: of their dtype, `[.., head_size_v]`; finite also where no row looks.
      q_starts: int32 `[num_prompts]`, the first row of each sequence.
      q_lens: int32 `[num_prompts]`, its rows, at most `max_q_len`.
      positions: int32 `[num_prompts]`, the index of its first row's token among the dense ones; may be negative.
      bias: float32 `[num_prompts, num_tokens]`, 0, or -inf for tokens that are absent.
      first_absent: int32 `[num_prompts]`: all tokens before this one are present.
      ends: int32 `[num_prompts]`: no token from this one on is present.
      heads: float32 `[3, num_heads]`: a positive factor of the logits, one of the results, and the sink, -inf for
        none. With several segments there must be none: each would count it.
    """

    query: Any
    keys: Any
    values: Any
    q_starts: Any
    q_lens: Any
    positions: Any
    bias: Any
    first_absent: Any
    ends: Any
    heads: Any


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """Why the kernel cannot attend with caches of a spec on a GPU; None if it can."""
    if target.compute_capability[0] != 9:
        return f"`wgmma` is of compute capability 9; got {target.compute_capability}"
    if odd := [size for size in (spec.head_size, spec.head_size_v) if size % 16 or size > MAX_HEAD_SIZE]:
        return f"its head sizes are multiples of 16 up to {MAX_HEAD_SIZE}; got {odd[0]}"
    return None


def _block_shape(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Heads and rows of a thread block."""
    return (WARPGROUPS, ROWS) if num_heads // num_kv_heads % WARPGROUPS == 0 else (1, ROWS * WARPGROUPS)


def choose(
    spec: AttentionSpec, num_prompts: int, max_q_len: int, num_heads: int, num_tokens: int, max_segments: int
) -> PromptConfig:
    """The configuration for a call; few rows that see many tokens are divided, so that all multiprocessors have work.

    `num_tokens` are the most tokens of a sequence.
    """
    heads, rows = _block_shape(num_heads, spec.num_kv_heads)
    blocks = num_prompts * -(-max_q_len // rows) * (num_heads // heads)
    segments = max(1, min(current().multiprocessors // blocks, num_tokens // MIN_SEGMENT, max_segments))
    # Registers hold the results and the logits of 64 rows.
    return PromptConfig(TOKENS if max(spec.head_size, spec.head_size_v) <= 128 else TOKENS // 2, 2, segments)


_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def attend(operands: Operands, out: Any, lse: Any, claims: Any, problem: Problem, config: PromptConfig) -> None:
    """Attends and stores results in place.

    Args:
      operands: arrays.
      out: reference to float16 or bfloat16 `[segments, num_tokens, num_heads, head_size_v]`.
      lse: reference to float32 `[segments, num_tokens, num_heads]`, natural logarithms.
      claims: reference to int32 `[num_prompts]`, 0; the kernel counts in the first one.
      problem: see there.
      config: how to launch it.
    """
    query, keys, values = operands[:3]
    if query.shape[0] < ROWS or keys.shape[1] < config.tokens or keys.shape[1] % ALIGNMENT:
        raise ValueError(f"got {query.shape[0]} rows and {keys.shape[1]} tokens, expected what Operands describes")
    heads, rows = _block_shape(query.shape[1], keys.shape[2])
    most_items = keys.shape[0] * -(-problem.max_q_len // rows) * (query.shape[1] // heads) * config.segments
    kernel = plgpu.kernel(
        compat.named("prompt_attention", functools.partial(_body, problem, config)),
        out_type=(),
        scratch_types=[
            _tiles(WARPGROUPS, ROWS, query.shape[2], keys.dtype),
            _tiles(config.stages, config.tokens, keys.shape[3], keys.dtype),
            _tiles(config.stages, config.tokens, values.shape[3], values.dtype),
            plgpu.SMEM((len(_Claimed._fields),), np.dtype(np.int32)),
            plgpu.Barrier(num_barriers=config.stages),
            plgpu.Barrier(num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        grid=(max(1, min(most_items, current().multiprocessors)),),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=_COMPILER_PARAMS,
    )
    kernel(*operands, out, lse, claims)


def _tiles(count: int, rows: int, columns: int, dtype: Any) -> Any:
    """Shared memory of matrices, as `wgmma` reads them."""
    swizzle = next(bytes for bytes in (128, 64, 32) if columns * np.dtype(dtype).itemsize % bytes == 0)
    tiling = plgpu.TilingTransform((8, swizzle // np.dtype(dtype).itemsize))  # type: ignore[abstract]
    transforms = tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
    return plgpu.SMEM((count, rows, columns), dtype, transforms=transforms)


class _Claimed(NamedTuple):
    """The item that a thread block has claimed, int32 numbers in its shared memory.

    Items are numbered prompt by prompt, in a prompt from the last rows on, which see most tokens.

    Attributes:
      index: its number.
      prompt: the prompt that it belongs to; after the last item the number of prompts.
      before: items of all prompts before.
      count: items of the prompt; after the last item of the last prompt.
      kv_head: the head whose keys and values it reads.
      start: its first tile of tokens.
      stop: the tile after the last.
    """

    index: Any
    prompt: Any
    before: Any
    count: Any
    kv_head: Any
    start: Any
    stop: Any


class Scratch(NamedTuple):
    """Shared memory of a thread block.

    Attributes:
      query: rows of each warpgroup, of the keys' dtype.
      keys: a ring of tiles.
      values: likewise.
      claimed: int32, the fields of `_Claimed`.
      key_ready: barriers, one for each tile of the ring.
      value_ready: likewise.
      turn: a barrier of the warpgroups.
    """

    query: Any
    keys: Any
    values: Any
    claimed: Any
    key_ready: Any
    value_ready: Any
    turn: Any


class _Span(NamedTuple):
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
    problem: Problem, config: PromptConfig, segment: Any, first: Any, last: Any, first_absent: Any, end: Any
) -> _Span:
    """The tiles for rows at the positions `first` to `last`.

    Where no row sees a token it is one tile, which is masked.
    """
    size = config.tokens
    ends = jnp.clip(last + 1, 0, end)
    begins = jnp.int32(0) if problem.window is None else jnp.maximum(first - (problem.window - 1), 0)
    start, stop = lax.div(begins, jnp.int32(size)), lax.div(ends + (size - 1), jnp.int32(size))
    stop = jnp.maximum(start, stop)
    plain_stop = lax.div(jnp.clip(first + 1, 0, first_absent), jnp.int32(size))
    plain_start = jnp.int32(0)
    if problem.window is not None:
        plain_start = lax.div(jnp.maximum(last - (problem.window - 1), 0) + (size - 1), jnp.int32(size))
    if config.segments > 1:
        per = lax.div(stop - start + (config.segments - 1), jnp.int32(config.segments))
        start = jnp.minimum(start + segment * per, stop)
        stop = jnp.minimum(start + per, stop)
    stop = jnp.maximum(stop, start + 1)
    plain_start = jnp.clip(plain_start, start, stop)
    return _Span(start, stop, plain_start, jnp.clip(plain_stop, plain_start, stop))


class _Item(NamedTuple):
    """What a warpgroup computes at a time: `ROWS` rows of a head, with the tokens of a segment.

    Attributes:
      prompt: as in `_Claimed`.
      segment: the segment of its tokens.
      head: the query head.
      kv_head: the head of its keys and values.
      base: the first row of the query.
      q_start: row 0 of the sequence.
      q_end: the row after its last.
      position: the position of row 0.
      span: the tiles of its tokens.
    """

    prompt: jax.Array
    segment: jax.Array
    head: jax.Array
    kv_head: jax.Array
    base: jax.Array
    q_start: jax.Array
    q_end: jax.Array
    position: jax.Array
    span: _Span


@dataclasses.dataclass(frozen=True)
class _Queue:
    """The items of a call."""

    problem: Problem
    config: PromptConfig
    operands: Operands

    @property
    def num_prompts(self) -> int:
        size: int = self.operands.keys.shape[0]
        return size

    @property
    def _group(self) -> int:
        """Query heads of a KV head."""
        size: int = self.operands.query.shape[1] // self.operands.keys.shape[2]
        return size

    @property
    def _block_shape(self) -> tuple[int, int]:
        return _block_shape(*(x.shape[-2] for x in (self.operands.query, self.operands.keys)))

    @property
    def _items_of_rows(self) -> int:
        """Items of the same rows."""
        size: int = self.operands.query.shape[1] // self._block_shape[0] * self.config.segments
        return size

    def _count(self, prompt: Any) -> Any:
        """Items of a prompt; of the last one, if there is no such."""
        rows = self._block_shape[1]
        q_len = self.operands.q_lens[jnp.minimum(prompt, self.num_prompts - 1)]
        return lax.div(jnp.maximum(q_len, 0) + (rows - 1), jnp.int32(rows)) * self._items_of_rows

    def first(self, index: Any) -> _Claimed:
        """The item of an index, from the first prompt on."""
        zero = jnp.int32(0)
        return self.seek(_Claimed(index, zero, zero, self._count(zero), zero, zero, zero))

    def seek(self, claimed: _Claimed) -> _Claimed:
        """The item of `claimed.index`, which is not before the item that the other fields describe."""
        index = claimed.index

        def is_later(at: Any) -> Any:
            prompt, before, count = at
            return (prompt < self.num_prompts) & (index - before >= count)

        def next_prompt(at: Any) -> Any:
            prompt, before, count = at
            return prompt + 1, before + count, self._count(prompt + 1)

        prompt, before, count = lax.while_loop(is_later, next_prompt, claimed[1:4])
        found = claimed._replace(prompt=prompt, before=before, count=count)
        item = self.item(found, 0)
        start, stop = item.span.start, item.span.stop
        stop = jnp.where(prompt < self.num_prompts, stop, start)
        return found._replace(kv_head=item.kv_head, start=start, stop=stop)

    def item(self, claimed: _Claimed, warpgroup: Any) -> _Item:
        """A warpgroup's part of an item; if there is none, one that no row belongs to, of the last prompt."""
        operands, (heads, rows) = self.operands, self._block_shape
        prompt = jnp.minimum(claimed.prompt, self.num_prompts - 1)
        groups = operands.query.shape[1] // heads
        number = claimed.index - claimed.before
        head = lax.rem(number, jnp.int32(groups)) * heads
        number = lax.div(number, jnp.int32(groups))
        segment = lax.rem(number, jnp.int32(self.config.segments))
        tile = lax.div(claimed.count, jnp.int32(self._items_of_rows)) - 1
        tile -= lax.div(number, jnp.int32(self.config.segments))
        q_start, position = operands.q_starts[prompt], operands.positions[prompt]
        q_end = q_start + operands.q_lens[prompt]
        base = q_start + tile * rows
        first = base - q_start + position
        last = jnp.minimum(base + rows, q_end) - 1 - q_start + position
        present = operands.first_absent[prompt], operands.ends[prompt]
        span = _span(self.problem, self.config, segment, first, last, *present)
        own_head, own_base = (head + warpgroup, base) if heads > 1 else (head, base + warpgroup * ROWS)
        kv_head = lax.div(head, jnp.int32(self._group))
        return _Item(claimed.prompt, segment, own_head, kv_head, own_base, q_start, q_end, position, span)


def _body(problem: Problem, config: PromptConfig, *refs: Any) -> None:
    count = len(Operands._fields)
    operands, (out_ref, lse_ref, claims, *scratch_refs) = Operands(*refs[:count]), refs[count:]
    scratch, queue = Scratch(*scratch_refs), _Queue(problem, config, operands)
    warpgroup = lax.axis_index("warpgroup")
    claimed = queue.first(lax.axis_index("block"))
    first = queue.item(claimed, warpgroup)

    def rows(item: _Item, step: Any) -> _Rows:
        return _Rows(problem, config, operands, scratch, queue, claims, warpgroup, item, step)

    @pl.when(first.prompt < queue.num_prompts)
    def run() -> None:
        zero = jnp.int32(0)
        first_rows = rows(first, zero)
        pl.when(warpgroup == 1)(functools.partial(first_rows.begin, claimed))
        first_rows.store_query(first_rows.load_query())

        def is_item(state: Any) -> Any:
            return state[0].prompt < queue.num_prompts

        lax.while_loop(is_item, lambda state: rows(*state).run(out_ref, lse_ref), (first, zero))
        # The second warpgroup has offered one more turn. Interpret mode wants it taken, and all to know.
        pl.when(warpgroup == 0)(functools.partial(plgpu.barrier_arrive, scratch.turn))
        plgpu.barrier_wait(scratch.turn)


def _first_token(config: PromptConfig, num_keys: int, tile: Any) -> Any:
    """The first token that is copied of a tile; the last tile starts earlier, to end with the dense tokens.

    What it shares with the tile before is masked.
    """
    return jnp.minimum(tile * config.tokens, num_keys - config.tokens)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A warpgroup that attends with the rows of an item.

    Whenever it begins with an item, these copies have been issued: of the item's first tiles, the keys of `stages` and
    the values of one less.

    Attributes:
      step: tiles of all items before.
    """

    problem: Problem
    config: PromptConfig
    operands: Operands
    scratch: Scratch
    queue: _Queue
    claims: Any
    warpgroup: Any
    item: _Item
    step: Any

    def begin(self, claimed: _Claimed) -> None:
        """What the second warpgroup does before a thread block's first item."""
        compat.store_numbers(self.scratch.claimed, *claimed)
        compat.barrier()
        span = self.item.span
        for ahead in range(self.config.stages):

            @pl.when(span.start + ahead < span.stop)
            def copy(ahead: int = ahead) -> None:
                self._copy_keys(span.start + ahead)
                if ahead < self.config.stages - 1:
                    self._copy_values(span.start + ahead)

        plgpu.barrier_arrive(self.scratch.turn)

    def run(self, out_ref: Any, lse_ref: Any) -> tuple[_Item, Any]:
        """Attends, and stores the results.

        Returns:
          The next item and its step; its query rows are in shared memory.
        """
        operands, scratch, warpgroup, item = self.operands, self.scratch, self.warpgroup, self.item
        size_v, span, stages = operands.values.shape[3], item.span, self.config.stages
        own_query = scratch.query.at[warpgroup]
        factor = operands.heads[0, item.head] * LOG2_E
        # A row's logarithms are binary, those of `exp2`.
        largest = compat.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        total = compat.layout_cast(jnp.full((ROWS,), 0, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        acc = compat.layout_cast(jnp.full((ROWS, size_v), 0, jnp.float32), plgpu.Layout.WGMMA)
        plgpu.barrier_wait(scratch.key_ready.at[self._slot(span.start)])

        @pl.when(warpgroup == 1)
        def follow() -> None:
            plgpu.barrier_wait(scratch.turn)
            # Of a short item the loop does not copy all that the next one begins with.
            pl.when(span.stop - span.start <= stages)(self._claim)
            for ahead in range(1, stages):

                @pl.when(span.start + ahead >= span.stop)
                def copy(ahead: int = ahead) -> None:
                    self._copy_keys(span.start + ahead)
                    if ahead < stages - 1:
                        self._copy_values(span.start + ahead)

        masked = functools.partial(self._tile, own_query, factor, True)
        plain = functools.partial(self._tile, own_query, factor, False)
        state = acc, largest, total
        if self.problem.window is not None:
            state = lax.fori_loop(span.start, span.plain_start, masked, state)
        state = lax.fori_loop(span.plain_start, span.plain_stop, plain, state)
        acc, largest, total = lax.fori_loop(span.plain_stop, span.stop, masked, state)
        plgpu.barrier_arrive(scratch.turn)

        following = self.queue.item(self._claimed(), warpgroup)
        next_rows = dataclasses.replace(self, item=following, step=self.step + span.stop - span.start)
        loaded = next_rows.load_query()
        sink = operands.heads[2, item.head] * LOG2_E
        whole = jnp.maximum(largest, sink)
        shift = jnp.where(whole == -jnp.inf, 0.0, whole)
        shrink = jnp.exp2(largest - shift)
        total = total * shrink + jnp.exp2(sink - shift)
        weight = jnp.where(total > 0, shrink / total, 0.0) * operands.heads[1, item.head]
        acc = acc * lax.broadcast_in_dim(weight, acc.shape, [0])
        lse = (shift + jnp.log2(total)) / LOG2_E
        # Only rows that are the sequence's and not another tile's.
        base = self._copied_base
        start = item.base - base
        stop = jnp.minimum(item.base + ROWS, item.q_end) - base
        stored = base, start, stop
        compat.store_rows(
            out_ref.at[item.segment, :, item.head], acc.astype(out_ref.dtype), *stored, plgpu.Layout.WGMMA
        )
        compat.store_rows(lse_ref.at[item.segment, :, item.head], lse, *stored, plgpu.Layout.WGMMA.reduce(1))
        is_next = following.prompt < self.queue.num_prompts
        pl.when(is_next)(functools.partial(next_rows.store_query, loaded))

        @pl.when(warpgroup == 0)
        def lead() -> None:
            plgpu.barrier_wait(scratch.turn)

        return following, next_rows.step

    @property
    def _copied_base(self) -> Any:
        """The first row that is loaded: rows within the query, so perhaps some of other tiles or sequences."""
        return jnp.clip(self.item.base, 0, self.operands.query.shape[0] - ROWS)

    def load_query(self) -> jax.Array:
        rows = pl.ds(self._copied_base, ROWS)
        return compat.load(self.operands.query.at[rows, self.item.head], plgpu.Layout.WGMMA)

    def store_query(self, rows: jax.Array) -> None:
        """Stores rows where `wgmma` reads them, in the dtype of the keys."""
        own_query = self.scratch.query.at[self.warpgroup]
        most = float(jnp.finfo(own_query.dtype).max)
        own_query[...] = jnp.clip(rows.astype(jnp.float32), -most, most).astype(own_query.dtype)
        plgpu.commit_smem()

    def _claim(self) -> None:
        """Claims the next item of the queue, and describes it in shared memory."""
        compat.fetch_add(self.claims.at[0], self.scratch.claimed.at[0])
        compat.barrier()
        claimed = self._claimed()
        # The first items are those of the thread blocks' indices.
        found = self.queue.seek(claimed._replace(index=claimed.index + lax.axis_size("block")))
        compat.barrier()
        compat.store_numbers(self.scratch.claimed, *found)
        compat.barrier()

    def _claimed(self) -> _Claimed:
        return _Claimed(*(self.scratch.claimed[i] for i in range(len(_Claimed._fields))))

    def _slot(self, tile: Any) -> Any:
        """The stage of a tile."""
        return lax.rem(self.step + tile - self.item.span.start, jnp.int32(self.config.stages))

    def _copy_keys(self, tile: Any) -> None:
        self._copy(tile, self.operands.keys, self.scratch.keys, self.scratch.key_ready)

    def _copy_values(self, tile: Any) -> None:
        self._copy(tile, self.operands.values, self.scratch.values, self.scratch.value_ready)

    def _copy(self, tile: Any, source: Any, buffer: Any, ready: Any) -> None:
        """Copies a tile to its stage, whose last reader is done; tiles after the last are those of the next item."""
        item = self.item

        def own() -> Any:
            return item.prompt, item.kv_head, tile, item.span.stop

        def following() -> Any:
            claimed = self._claimed()
            return claimed.prompt, claimed.kv_head, claimed.start + tile - item.span.stop, claimed.stop

        prompt, kv_head, copied, stop = lax.cond(tile < item.span.stop, own, following)

        @pl.when(copied < stop)
        def _() -> None:
            tokens = pl.ds(_first_token(self.config, source.shape[1], copied), self.config.tokens)
            slot = self._slot(tile)
            plgpu.copy_gmem_to_smem(source.at[prompt, tokens, kv_head], buffer.at[slot], ready.at[slot])

    def _take_turn(self) -> None:
        plgpu.barrier_arrive(self.scratch.turn)
        plgpu.barrier_wait(self.scratch.turn)

    def _tile(self, own_query: Any, factor: Any, is_masked: bool, tile: Any, state: Any) -> Any:
        """One tile of keys and values; `factor` is that of the logits."""
        _, keys, values, _, key_ready, value_ready, turn = self.scratch
        acc, largest, total = state
        config, span = self.config, self.item.span
        slot = self._slot(tile)

        def multiplying_keys() -> None:
            self._take_turn()
            pl.when(self.warpgroup == 1)(functools.partial(self._copy_values, tile + config.stages - 1))

        shape = ROWS, config.tokens
        logits = compat.product(own_query, keys.at[slot], multiplying_keys, transposed=True)
        if self.problem.logits_soft_cap is not None:
            logits = capped(logits * factor, self.problem.logits_soft_cap, jnp.exp2)
            factor = jnp.float32(1.0)
        if is_masked:
            logits = self._masked(logits, tile)
        raised = jnp.maximum(largest, jnp.max(logits, axis=1) * factor + margin(keys.dtype))
        shift = jnp.where(raised == -jnp.inf, 0.0, raised)
        shrink = jnp.exp2(largest - shift)
        weights = jnp.exp2(logits * factor - lax.broadcast_in_dim(shift, shape, [0]))
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        total *= shrink
        operand = weights.astype(keys.dtype)
        total += jnp.sum(weights, axis=1)
        acc, total, raised, operand = lax.optimization_barrier((acc, total, raised, operand))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(value_ready.at[slot])
        plgpu.barrier_wait(turn)

        def multiplying_values() -> None:
            @pl.when(self.warpgroup == 1)
            def copy() -> None:
                # Late, so that the block that is done first takes it, but before its first tile is copied.
                pl.when(tile == span.stop - config.stages - 1)(self._claim)
                self._copy_keys(tile + config.stages)

            @pl.when(tile + 1 < span.stop)
            def wait() -> None:
                plgpu.barrier_wait(key_ready.at[self._slot(tile + 1)])

        acc = compat.product(operand, values.at[slot], multiplying_values, acc)
        return acc, raised, total

    def _masked(self, logits: jax.Array, tile: Any) -> jax.Array:
        """Logits, -inf for the tokens that a row does not see."""
        first = self._copied_base - self.item.q_start + self.item.position
        config, num_keys = self.config, self.operands.keys.shape[1]
        first_token = _first_token(config, num_keys, tile)
        shape = logits.shape
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first
        token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first_token
        sees = (token <= row) & (token >= tile * config.tokens)
        if self.problem.window is not None:
            sees &= token > row - self.problem.window
        bias = compat.load(
            self.operands.bias.at[self.item.prompt, pl.ds(first_token, config.tokens)], plgpu.Layout.WGMMA.reduce(0)
        )
        sees &= lax.broadcast_in_dim(bias, shape, [1]) == 0
        return jnp.where(sees, logits, -jnp.inf)
