"""Attention of long query chunks on Hopper: the gather kernel makes pages dense, the prompt kernel attends.

The kernel stores the results of each row in place, among those of the rows that decode, so that no rows are packed or
joined. Where few rows see many tokens, their tokens are divided into segments, whose results are merged.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache import KVCache
from kvjax.kernels import prompts as kernel
from kvjax.kernels.target import Target
from kvjax.ops.gather import token_mask
from kvjax.ops.merge import merge_parts
from kvjax.ops.options import most_segments, num_reached_blocks, prompts_at_once, restricting
from kvjax.ops.prompts import (
    Dense,
    Sequences,
    in_batches,
    of_each_head,
    reached_blocks,
)
from kvjax.spec import AttentionSpec


def serves(spec: AttentionSpec, dtype: np.dtype[Any], sm_scale: float, target: Target) -> bool:
    """Returns whether the kernel attends with queries of a dtype over pages of a spec on a target.

    It takes the maximum of a row before it multiplies by `sm_scale`, which has to be positive.
    """
    is_dense = spec.dtype.is_quantized or spec.storage_dtype == dtype
    return is_dense and sm_scale > 0 and kernel.why_not((spec.head_size, spec.head_size_v), target) is None


def attend(
    cache: KVCache,
    query: jax.Array,
    sequences: Sequences,
    k_scale: jax.Array,
    v_scale: jax.Array,
    sinks: jax.Array | None,
    results: tuple[jax.Array, jax.Array],
    *,
    max_q_len: int,
    sm_scale: float,
    window: int | None,
    logits_soft_cap: float | None,
    batch_invariant: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attends with the rows of some sequences, as many at once as `options.DENSE_BYTES` hold.

    Args are those of `prompts.attend`. With `batch_invariant`, rows are not divided into segments, whose number depends
    on the batch, and tiles of tokens begin where they would in any table. `results` are those of other rows, and for
    these rows those of rows that attend to nothing (0 and the sink): `[num_tokens, num_heads, head_size_v]` of the
    query's dtype, and the log-sum-exp, float32 `[num_tokens, num_heads]`.

    Returns:
      `results`, with those of the first `max_q_len` rows of each sequence.
    """
    num_prompts, max_blocks = sequences.table.shape
    spec, num_tokens = cache.spec, query.shape[0]
    window = restricting(window, max_blocks * spec.block_size)
    problem = kernel.Problem(max_q_len, window, logits_soft_cap)
    dtype = Dense.dtype_of(cache, query)
    padding = max(kernel.ROWS - num_tokens, 0)
    rows = jnp.pad(query, ((0, padding), (0, 0), (0, 0)))
    out, lse = results
    results = jnp.pad(out, ((0, padding), (0, 0), (0, 0)))[None], jnp.pad(lse, ((0, padding), (0, 0)))[None]

    reached = num_reached_blocks(window, max_q_len, max_blocks, spec.block_size) * spec.block_size
    prompt_bytes = reached * spec.num_kv_heads * (spec.head_size + spec.head_size_v) * dtype.itemsize
    at_once = prompts_at_once(prompt_bytes, num_prompts)
    most = most_segments(num_tokens, query.shape[1], spec.head_size_v * query.dtype.itemsize)
    max_segments = 1 if batch_invariant else most
    alignment = kernel.TOKENS if batch_invariant else kernel.ALIGNMENT
    config = kernel.choose(spec, at_once, max_q_len, query.shape[1], reached, max_segments)

    def attend_batch(results: tuple[jax.Array, jax.Array], batch: Sequences) -> tuple[jax.Array, jax.Array]:
        dense = Dense.of(cache, query, batch, k_scale)
        if config.segments == 1:
            return _in_place(
                _operands(dense, rows, v_scale, sinks, problem, sm_scale, alignment), results, problem, config
            )
        # Rows that attend to nothing are one more part, with the sinks.
        operands = _operands(dense, rows, v_scale, None, problem, sm_scale, alignment)
        out, lse = results
        parts = (
            lax.empty((config.segments, *out.shape[1:]), out.dtype),
            jnp.full((config.segments, *lse.shape[1:]), -jnp.inf, lse.dtype),
        )
        outs, lses = _in_place(operands, parts, problem, config)
        merged, lse = merge_parts([out[0], *outs], [lse[0], *lses])
        return merged.astype(out.dtype)[None], lse[None]

    if at_once == num_prompts:
        results = attend_batch(results, sequences)
    else:
        batches = in_batches(sequences, at_once)
        results, _ = lax.scan(lambda *args: (attend_batch(*args), None), results, batches)
    out, lse = results
    return out[0, :num_tokens], lse[0, :num_tokens]


def _operands(
    dense: Dense,
    rows: jax.Array,
    v_scale: jax.Array,
    sinks: jax.Array | None,
    problem: kernel.Problem,
    sm_scale: float,
    alignment: int,
) -> kernel.Operands:
    cache, sequences = dense.cache, dense.sequences
    spec, size, num_heads = cache.spec, cache.spec.block_size, rows.shape[1]
    first_row = sequences.lens - sequences.q_lens  # the position of its token
    # What only rows that are left out see may be NaN, which a weight of 0 does not remove.
    lens = jnp.minimum(sequences.lens, first_row + problem.max_q_len)
    start, table, skipped = None, sequences.table, jnp.zeros_like(first_row)
    if problem.window is not None:
        table, start = reached_blocks(sequences, problem.max_q_len, problem.window, size)
        skipped = start // size * size
        lens = lens - skipped
    # A tile of tokens, and a multiple of the alignment.
    step = alignment // math.gcd(alignment, size)
    columns = max(table.shape[1], -(-kernel.TOKENS // size))
    table = jnp.pad(table, ((0, 0), (0, -(-columns // step) * step - table.shape[1])), constant_values=-1)
    keys, values = dense.gather(table, lens)
    if start is not None:
        values = _without_tokens_before(values, start - skipped, size)
    is_there = token_mask(table, lens, cache.num_blocks, size)
    token = jnp.arange(is_there.shape[1], dtype=jnp.int32)[None, :]
    # One reduction for both.
    first_absent, minus_end = jnp.min(
        jnp.stack([jnp.where(is_there, token.size, token), jnp.where(is_there, -token - 1, 0)]), axis=-1
    )
    is_quantized = spec.dtype.is_quantized
    factors = of_each_head(v_scale, spec, num_heads) if is_quantized else jnp.ones(num_heads, jnp.float32)
    none = jnp.full(num_heads, -jnp.inf, jnp.float32)
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
        jnp.stack([dense.factor * sm_scale, factors, none if sinks is None else sinks]),
    )


def _without_tokens_before(dense: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Returns dense values with zeros for tokens before `start`, less than the block size `size`.

    Tokens before a window may be NaN, which a weight of 0 does not remove.
    """
    is_reached = (jnp.arange(size)[None, :] >= start[:, None])[:, :, None, None]
    block = jnp.where(is_reached, dense[:, :size], jnp.zeros((), dense.dtype))
    # Computed before the update, or XLA would copy the whole array first.
    return dense.at[:, :size].set(lax.optimization_barrier(block))


def _in_place(
    operands: kernel.Operands,
    results: tuple[jax.Array, jax.Array],
    problem: kernel.Problem,
    config: kernel.PromptConfig,
) -> tuple[jax.Array, jax.Array]:
    out, lse = (jax.new_ref(x) for x in results)
    # Zeros, which XLA does not know. It computes them with `ends`; a constant, or another shape, takes a kernel.
    claims = jax.new_ref(jnp.minimum(operands.ends, 0))
    kernel.attend(operands, out, lse, claims, problem, config)
    return jax.freeze(out), jax.freeze(lse)
