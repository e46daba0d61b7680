"""Attention of long query chunks on Hopper: the gather kernel makes pages dense, the prompt kernel attends.

The kernel stores the results of each row in place, among those of the rows that decode, so that no rows are packed or
joined. Where few rows see many tokens, their tokens are divided into splits, whose results are merged.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache_views import flat_pages
from kvjax.kernels import prompts as kernel
from kvjax.kernels.attention import Softmax
from kvjax.kernels.prompts import fp8_gather
from kvjax.ops.gather import token_mask, units_of_blocks
from kvjax.ops.merge import merge_parts
from kvjax.ops.options import most_splits, prompts_at_once, restricting
from kvjax.ops.prompts import (
    Dense,
    LayerSequences,
    Prompts,
    by_lots,
    of_each_head,
    reached_blocks,
)


class Launch(NamedTuple):
    """A call of the kernel.

    Attributes:
      prompts: the rows and what they attend to.
      options: the call's, with a window that restricts.
      config: how it is launched.
      at_once: prompts of a lot, whose dense keys and values fit in `DENSE_BYTES` of `ops.options`.
      near: the same rows over other tokens, of which they see the last ones, as many as `near_window`; or None.
      near_window: see there.
    """

    prompts: Prompts
    options: Softmax
    config: kernel.PromptConfig
    at_once: int
    near: Prompts | None = None
    near_window: int | None = None

    @classmethod
    def of(
        cls, prompts: Prompts, options: Softmax, near: Prompts | None = None, near_window: int | None = None
    ) -> Launch:
        """The launch for prompts.

        With `batch_invariant`, rows are not divided into splits, whose number depends on the batch.
        """
        spec, (num_tokens, num_heads, _) = prompts.cache.spec, prompts.query.shape
        options = options._replace(window=restricting(options.window, prompts.max_tokens))
        reached = prompts.max_reached(options.window)
        tokens = reached + (0 if near is None else near.max_tokens)
        prompt_bytes = tokens * spec.num_kv_heads * (spec.head_size + spec.head_size_v) * prompts.dtype.itemsize
        at_once = prompts_at_once(prompt_bytes, len(prompts.sequences.lens))
        most = most_splits(num_tokens, num_heads, spec.head_size_v * prompts.query.dtype.itemsize)
        max_splits = 1 if options.batch_invariant else most
        config = kernel.choose(spec, at_once, prompts.max_q_len, num_heads, reached, max_splits)
        return cls(prompts, options, config, at_once, near, near_window)

    @property
    def reads_results(self) -> bool:
        """Whether results of prompts' rows have to be those of rows that attend to nothing: one more part."""
        return self.prompts.sinks is not None and bool(self.config.splits > 1)


def attend(launch: Launch, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attends with the rows of prompts.

    With `batch_invariant`, tiles of tokens begin where they would in any table. `results` are those of other rows,
    `[num_tokens, num_heads, head_size_v]` of the query's dtype, and the log-sum-exp, float32 `[num_tokens, num_heads]`.
    For prompts' rows the log-sum-exp is that of rows that attend to nothing (the sink), and if `launch.reads_results`
    the results are 0, otherwise arbitrary.

    Returns:
      `results`, with those of the first `max_q_len` rows of each sequence.
    """
    prompts, options, config, at_once, near, near_window = launch
    num_tokens = prompts.query.shape[0]
    problem = kernel.PromptProblem(prompts.max_q_len, options.window, options.logits_soft_cap, near_window)
    rows, results = padded(prompts.query, results)
    is_fp8 = kernel.fp8.is_fp8(prompts.dtype)
    alignment = kernel.TOKENS if options.batch_invariant or is_fp8 else kernel.ALIGNMENT

    def attend_lot(
        results: tuple[jax.Array, jax.Array], lots: tuple[LayerSequences, LayerSequences | None]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        sinks = prompts.sinks if config.splits == 1 else None  # with the rows that attend to nothing
        own, recent = lots
        operands = _operands(Dense.of(prompts, own), rows, sinks, problem, options.sm_scale, alignment)
        if near is not None and recent is not None:
            operands = operands._replace(near=_near(Dense.of(near, recent), problem, options.sm_scale, alignment))
        return attend_dense(operands, results, problem, config), None

    lots = prompts.sequences, None if near is None else near.sequences
    (out, lse), _ = by_lots(attend_lot, results, lots, at_once)
    return out[0, :num_tokens], lse[0, :num_tokens]


def padded(query: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns a query of at least `ROWS` rows, and results for it, of one split."""
    padding = max(kernel.ROWS - len(query), 0)
    rows, out, lse = (jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))) for x in (query, *results))
    return rows, (out[None], lse[None])


def attend_dense(
    operands: kernel.Operands[jax.Array] | kernel.RaggedOperands[jax.Array],
    results: tuple[jax.Array, jax.Array],
    problem: kernel.PromptProblem,
    config: kernel.PromptConfig,
) -> tuple[jax.Array, jax.Array]:
    """Stores results of prompts among `results`, of one split, and returns these.

    With several splits, what is there is one more part.
    """
    if config.splits == 1:
        return _in_place(operands, results, problem, config)
    out, lse = results
    parts = (
        lax.empty((config.splits, *out.shape[1:]), out.dtype),
        jnp.full((config.splits, *lse.shape[1:]), -jnp.inf, lse.dtype),
    )
    outs, lses = _in_place(operands, parts, problem, config)
    merged, lse = merge_parts([out[0], *outs], [lse[0], *lses])
    return merged.astype(out.dtype)[None], lse[None]


def _operands(
    dense: Dense,
    rows: jax.Array,
    sinks: jax.Array | None,
    problem: kernel.PromptProblem,
    sm_scale: float,
    alignment: int,
) -> kernel.Operands[jax.Array]:
    cache, sequences, v_scale = dense.prompts.cache, dense.sequences, dense.prompts.v_scale
    spec, size, num_heads = cache.spec, cache.spec.block_size, rows.shape[1]
    table, lens, first_row, start, skipped = _Reached.of(dense, problem.max_q_len, problem.window, alignment)
    if kernel.fp8.is_fp8(dense.prompts.dtype):
        first = jnp.zeros_like(lens) if start is None else start - skipped
        units = units_of_blocks(cache, table, lens, first)
        keys, values = fp8_gather.gather(flat_pages(cache), fp8_gather.Gathered(table, lens, first, units), spec)
    else:
        keys, values = dense.gather(table, lens)
        if start is not None:
            values = _without_tokens_before(values, start - skipped, size)
    is_there = token_mask(table, lens, cache.num_blocks, size)
    token = jnp.arange(is_there.shape[1], dtype=jnp.int32)[None, :]
    # One reduction for both.
    first_absent, minus_end = jnp.min(
        jnp.stack([jnp.where(is_there, token.size, token), jnp.where(is_there, -token - 1, 0)]), axis=-1
    )
    has_scale = spec.dtype.parts[1].info.layer_scale is not None
    factors = of_each_head(v_scale, spec, num_heads) if has_scale else jnp.ones(num_heads, jnp.float32)
    none = jnp.full(num_heads, -jnp.inf, jnp.float32)
    heads = jnp.stack([dense.factor * sm_scale, factors, none if sinks is None else sinks])
    if kernel.fp8.is_fp8(dense.prompts.dtype):
        of_heads = jnp.repeat(units, num_heads // spec.num_kv_heads, axis=2)
        heads = heads * jnp.stack([*of_heads, jnp.ones_like(of_heads[0])], axis=1)
    return kernel.Operands(
        rows,
        keys,
        values,
        sequences.q_ends - sequences.q_lens,
        jnp.minimum(sequences.q_lens, problem.max_q_len),
        first_row - skipped,
        jnp.where(is_there, jnp.float32(0.0), -jnp.inf),
        first_absent,
        -minus_end,
        heads,
    )


def _near(dense: Dense, problem: kernel.PromptProblem, sm_scale: float, alignment: int) -> kernel.NearTokens[jax.Array]:
    table, lens, first_row, start, skipped = _Reached.of(dense, problem.max_q_len, problem.near, alignment)
    keys, values = dense.gather(table, lens)
    if start is not None:
        values = _without_tokens_before(values, start - skipped, dense.prompts.cache.spec.block_size)
    factor = jnp.full(1, sm_scale, jnp.float32)
    ends = jnp.where(table[:, 0] >= 0, lens, 0)  # a sequence has a row of the ring, or no block of it
    return kernel.NearTokens(keys, values, first_row - skipped, ends, factor)


class _Reached(NamedTuple):
    """The tokens that the rows of sequences reach; int32 `[num_prompts]`.

    Attributes:
      table: `[num_prompts, columns]`, their blocks: at least a tile of tokens, and a multiple of the alignment.
      lens: how many they are.
      first_row: the position of the first row's token in its sequence.
      start: of the first that a row sees; None for the sequence's first.
      skipped: of the first in the table.
    """

    table: jax.Array
    lens: jax.Array
    first_row: jax.Array
    start: jax.Array | None
    skipped: jax.Array

    @classmethod
    def of(cls, dense: Dense, max_q_len: int, window: int | None, alignment: int) -> _Reached:
        """Those of the first `max_q_len` rows."""
        sequences, size = dense.sequences, dense.prompts.cache.spec.block_size
        first_row = sequences.lens - sequences.q_lens
        # What only rows that are left out see may be NaN, which a weight of 0 does not remove.
        lens = jnp.minimum(sequences.lens, first_row + max_q_len)
        start, table, skipped = None, sequences.table, jnp.zeros_like(first_row)
        if window is not None:
            table, start = reached_blocks(sequences, max_q_len, window, size)
            skipped = start // size * size
            lens = lens - skipped
        step = alignment // math.gcd(alignment, size)
        columns = max(table.shape[1], -(-kernel.TOKENS // size))
        table = jnp.pad(table, ((0, 0), (0, -(-columns // step) * step - table.shape[1])), constant_values=-1)
        return cls(table, lens, first_row, start, skipped)


def _without_tokens_before(dense: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Returns dense values with zeros for tokens before `start`, less than the block size `size`.

    Tokens before a window may be NaN, which a weight of 0 does not remove.
    """
    is_reached = (jnp.arange(size)[None, :] >= start[:, None])[:, :, None, None]
    block = jnp.where(is_reached, dense[:, :size], jnp.zeros((), dense.dtype))
    # Computed before the update, or XLA would copy the whole array first.
    return dense.at[:, :size].set(lax.optimization_barrier(block))


def _in_place(
    operands: kernel.Operands[jax.Array] | kernel.RaggedOperands[jax.Array],
    results: tuple[jax.Array, jax.Array],
    problem: kernel.PromptProblem,
    config: kernel.PromptConfig,
) -> tuple[jax.Array, jax.Array]:
    out, lse = (jax.new_ref(x) for x in results)
    # Zeros, which XLA does not know. It computes them with `ends`; a constant, or another shape, takes a kernel.
    claims = jax.new_ref(jnp.minimum(operands.ends, 0))
    kernel.attend(operands, out, lse, claims, problem, config)
    return jax.freeze(out), jax.freeze(lse)
