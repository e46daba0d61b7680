"""The prompt kernel: attention of long query chunks over dense keys and values, on Hopper's tensor cores.

Two warpgroups take 64 query rows of a head each and take turns, so that one computes its softmax while the other
multiplies, as in FlashAttention-3 (https://arxiv.org/abs/2407.08608). Where a KV head has an even number of query
heads, the two take neighbouring heads of the same rows; otherwise the same head of neighbouring rows. The turns also
order reads of shared memory and the copies that replace what was read: the second warpgroup issues these. (A third
warpgroup for copies would leave each thread 168 registers, for ptxas ignores `setmaxnreg` here.)

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
from kvjax.kernels.attention.softmax import LOG2_E, capped
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
      heads: float32 `[3, num_heads]`: a positive factor of the logits, one of the results, and the sink, -inf for none.
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


def attend(operands: Operands, out: Any, lse: Any, problem: Problem, config: PromptConfig) -> None:
    """Attends and stores results in place.

    Args:
      operands: arrays.
      out: reference to float16 or bfloat16 `[segments, num_tokens, num_heads, head_size_v]`.
      lse: reference to float32 `[segments, num_tokens, num_heads]`, natural logarithms.
      problem: see there.
      config: how to launch it.
    """
    query, keys, values = operands[:3]
    if query.shape[0] < ROWS or keys.shape[1] < config.tokens or keys.shape[1] % ALIGNMENT:
        raise ValueError(f"got {query.shape[0]} rows and {keys.shape[1]} tokens, expected what Operands describes")
    body = functools.partial(_body, problem, config)
    heads, rows = _block_shape(query.shape[1], keys.shape[2])
    kernel = plgpu.kernel(
        compat.named("prompt_attention", body),
        out_type=(),
        scratch_types=[
            _tiles(WARPGROUPS, ROWS, query.shape[2], keys.dtype),
            _tiles(config.stages, config.tokens, keys.shape[3], keys.dtype),
            _tiles(config.stages, config.tokens, values.shape[3], values.dtype),
            plgpu.Barrier(num_barriers=config.stages),
            plgpu.Barrier(num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        grid=(query.shape[1] // heads, -(-problem.max_q_len // rows), config.segments * keys.shape[0]),
        grid_names=("heads", "tile", "prompt"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=_COMPILER_PARAMS,
    )
    kernel(*operands, out, lse)


def _tiles(count: int, rows: int, columns: int, dtype: Any) -> Any:
    """Shared memory of matrices, as `wgmma` reads them."""
    swizzle = next(bytes for bytes in (128, 64, 32) if columns * np.dtype(dtype).itemsize % bytes == 0)
    tiling = plgpu.TilingTransform((8, swizzle // np.dtype(dtype).itemsize))  # type: ignore[abstract]
    transforms = tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
    return plgpu.SMEM((count, rows, columns), dtype, transforms=transforms)


class Scratch(NamedTuple):
    """Shared memory of a thread block.

    Attributes:
      query: rows of each warpgroup, of the keys' dtype.
      keys: a ring of tiles.
      values: likewise.
      key_ready: barriers, one for each tile of the ring.
      value_ready: likewise.
      turn: a barrier of the warpgroups.
    """

    query: Any
    keys: Any
    values: Any
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
    """The tiles for rows at the positions `first` to `last`; none if `last` is negative."""
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
    plain_start = jnp.clip(plain_start, start, stop)
    return _Span(start, stop, plain_start, jnp.clip(plain_stop, plain_start, stop))


def _body(problem: Problem, config: PromptConfig, *refs: Any) -> None:
    count = len(Operands._fields)
    operands, (out_ref, lse_ref, *scratch) = Operands(*refs[:count]), refs[count:]
    num_heads = operands.query.shape[1]
    heads, rows = _block_shape(num_heads, operands.keys.shape[2])

    warpgroup = lax.axis_index("warpgroup")
    index = lax.axis_index("prompt")
    prompt, segment = index, jnp.int32(0)
    if config.segments > 1:
        prompt, segment = lax.div(index, jnp.int32(config.segments)), lax.rem(index, jnp.int32(config.segments))
    head = lax.axis_index("heads") * heads
    kv_head = lax.div(head, jnp.int32(num_heads // operands.keys.shape[2]))
    # Later rows see more tokens: of a head, the longest work first.
    tile = -(-problem.max_q_len // rows) - 1 - lax.axis_index("tile")
    q_start, position = operands.q_starts[prompt], operands.positions[prompt]
    q_end = q_start + operands.q_lens[prompt]
    base = q_start + tile * rows

    @pl.when(base < q_end)
    def run() -> None:
        first = base - q_start + position
        last = jnp.minimum(base + rows, q_end) - 1 - q_start + position
        present = operands.first_absent[prompt], operands.ends[prompt]
        span = _span(problem, config, segment, first, last, *present)
        own_head, own_base = (head + warpgroup, base) if heads > 1 else (head, base + warpgroup * ROWS)
        rows_of_head = _Rows(
            *(problem, config, operands, Scratch(*scratch), warpgroup, prompt, own_head, kv_head),
            *(own_base, q_start, q_end, position, span, operands.heads[0, own_head] * LOG2_E),
        )
        rows_of_head.run(out_ref, lse_ref, segment)


def _first_token(config: PromptConfig, num_keys: int, tile: Any) -> Any:
    """The first token that is copied of a tile; the last tile starts earlier, to end with the dense tokens.

    What it shares with the tile before is masked.
    """
    return jnp.minimum(tile * config.tokens, num_keys - config.tokens)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A warpgroup that attends with `ROWS` rows of a head; one object per trace.

    Attributes:
      base: the first row of the query that it takes.
      position: the position of the sequence's row 0.
    """

    problem: Problem
    config: PromptConfig
    operands: Operands
    scratch: Scratch
    warpgroup: Any
    prompt: Any
    head: Any
    kv_head: Any
    base: Any
    q_start: Any
    q_end: Any
    position: Any
    span: _Span
    factor: Any

    def run(self, out_ref: Any, lse_ref: Any, segment: Any) -> None:
        operands, scratch, warpgroup, span = self.operands, self.scratch, self.warpgroup, self.span
        size_v = operands.values.shape[3]
        # The rows as they are loaded: within the query, so perhaps some of other tiles or sequences, not stored.
        base = jnp.clip(self.base, 0, operands.query.shape[0] - ROWS)

        @pl.when(warpgroup == 1)
        def copy_first() -> None:
            for stage in range(self.config.stages):
                self._copy_keys(span.start + stage)
                self._copy_values(span.start + stage)

        own_query = scratch.query.at[warpgroup]
        rows = compat.load(operands.query.at[pl.ds(base, ROWS), self.head], plgpu.Layout.WGMMA)
        most = float(jnp.finfo(own_query.dtype).max)
        own_query[...] = jnp.clip(rows.astype(jnp.float32), -most, most).astype(own_query.dtype)
        plgpu.commit_smem()
        # A row's logarithms are binary, those of `exp2`.
        largest = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        total = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        acc = plgpu.layout_cast(jnp.full((ROWS, size_v), 0, jnp.float32), plgpu.Layout.WGMMA)

        @pl.when(span.start < span.stop)
        def await_first_keys() -> None:
            plgpu.barrier_wait(scratch.key_ready.at[0])

        pl.when(warpgroup == 1)(self._take_turn)
        first = base - self.q_start + self.position  # position of the first copied row
        masked = functools.partial(self._tile, own_query, first, True)
        plain = functools.partial(self._tile, own_query, first, False)
        state = acc, largest, total
        if self.problem.window is not None:
            state = lax.fori_loop(span.start, span.plain_start, masked, state)
        state = lax.fori_loop(span.plain_start, span.plain_stop, plain, state)
        acc, largest, total = lax.fori_loop(span.plain_stop, span.stop, masked, state)
        pl.when(warpgroup == 0)(self._take_turn)

        sink = operands.heads[2, self.head] * LOG2_E
        whole = jnp.maximum(largest, sink)
        shift = jnp.where(whole == -jnp.inf, 0.0, whole)
        shrink = jnp.exp2(largest - shift)
        total = total * shrink + jnp.exp2(sink - shift)
        weight = jnp.where(total > 0, shrink / total, 0.0) * operands.heads[1, self.head]
        acc = acc * lax.broadcast_in_dim(weight, acc.shape, [0])
        lse = (shift + jnp.log2(total)) / LOG2_E
        # Only rows that are the sequence's and not another tile's.
        start = self.base - base
        stop = jnp.minimum(self.base + ROWS, self.q_end) - base
        stored = base, start, stop
        compat.store_rows(out_ref.at[segment, :, self.head], acc.astype(out_ref.dtype), *stored, plgpu.Layout.WGMMA)
        compat.store_rows(lse_ref.at[segment, :, self.head], lse, *stored, plgpu.Layout.WGMMA.reduce(1))

    def _copy_keys(self, tile: Any) -> None:
        self._copy(tile, self.operands.keys, self.scratch.keys, self.scratch.key_ready)

    def _copy_values(self, tile: Any) -> None:
        self._copy(tile, self.operands.values, self.scratch.values, self.scratch.value_ready)

    def _copy(self, tile: Any, source: Any, buffer: Any, ready: Any) -> None:
        """Copies a tile to its stage, whose last reader is done."""
        size = self.config.tokens

        @pl.when(tile < self.span.stop)
        def _() -> None:
            tokens = pl.ds(_first_token(self.config, source.shape[1], tile), size)
            stage = lax.rem(tile - self.span.start, jnp.int32(self.config.stages))
            plgpu.copy_gmem_to_smem(source.at[self.prompt, tokens, self.kv_head], buffer.at[stage], ready.at[stage])

    def _take_turn(self) -> None:
        plgpu.barrier_arrive(self.scratch.turn)
        plgpu.barrier_wait(self.scratch.turn)

    def _tile(self, own_query: Any, first: Any, is_masked: bool, tile: Any, state: Any) -> Any:
        """One tile of keys and values; `first` is the position of the first row."""
        _, keys, values, key_ready, value_ready, turn = self.scratch
        acc, largest, total = state
        config, span = self.config, self.span
        step = tile - span.start
        slot = lax.rem(step, jnp.int32(config.stages))

        def multiplying_keys() -> None:
            self._take_turn()

            @pl.when((self.warpgroup == 1) & (step > 0))
            def _() -> None:
                self._copy_values(tile + config.stages - 1)

        shape = ROWS, config.tokens
        logits = compat.product(own_query, keys.at[slot], multiplying_keys, transposed=True)
        factor = self.factor
        if self.problem.logits_soft_cap is not None:
            logits = capped(logits * factor, self.problem.logits_soft_cap, jnp.exp2)
            factor = jnp.float32(1.0)
        if is_masked:
            logits = self._masked(logits, first, tile)
        raised = jnp.maximum(largest, jnp.max(logits, axis=1) * factor)
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
            pl.when(self.warpgroup == 1)(functools.partial(self._copy_keys, tile + config.stages))

            @pl.when(tile + 1 < span.stop)
            def _() -> None:
                plgpu.barrier_wait(key_ready.at[lax.rem(step + 1, jnp.int32(config.stages))])

        acc = compat.product(operand, values.at[slot], multiplying_values, acc)
        return acc, raised, total

    def _masked(self, logits: jax.Array, first: Any, tile: Any) -> jax.Array:
        """Logits, -inf for the tokens that a row does not see."""
        config, num_keys = self.config, self.operands.keys.shape[1]
        first_token = _first_token(config, num_keys, tile)
        shape = logits.shape
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first
        token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first_token
        sees = (token <= row) & (token >= tile * config.tokens)
        if self.problem.window is not None:
            sees &= token > row - self.problem.window
        bias = compat.load(
            self.operands.bias.at[self.prompt, pl.ds(first_token, config.tokens)], plgpu.Layout.WGMMA.reduce(0)
        )
        sees &= lax.broadcast_in_dim(bias, shape, [1]) == 0
        return jnp.where(sees, logits, -jnp.inf)
