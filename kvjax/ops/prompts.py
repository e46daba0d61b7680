"""Attention of many query tokens of a sequence on a GPU: its pages made dense by the gather kernel, then cuDNN.

cuDNN has a row see the keys up to its own number, and no hole among them. So a sequence is attended to in two parts,
which its log-sum-exps join: the blocks in which its new tokens stand, causal, with the rows where their tokens are
among these keys; and all blocks before, without a mask. A sliding window needs one part alone, of the blocks that it
reaches. What cuDNN does not have (a soft cap, other head sizes, 16-bit pages of another dtype than the query's) the
running softmax of `ops.softmax` attends to, over the same dense keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache import KVCache
from kvjax.dtypes import KVQuantMode
from kvjax.kernels import compat
from kvjax.ops import softmax
from kvjax.ops.gather import gather_mosaic, tokens_there
from kvjax.ops.merge import merge_parts
from kvjax.spec import AttentionSpec

DENSE_BYTES = 1 << 30
"""What the rows, keys and values of the sequences that are attended to at once may take; those of one may take more."""

LOGITS_BYTES = 256 << 20
"""What the logits of a chunk may take where cuDNN does not serve: of fewer tokens, results are rescaled more often."""

MAX_HEAD_SIZE = 256
"""Of cuDNN's forward pass on sm_90, which is what jax asks of sm_100 as well."""


class Sequences(NamedTuple):
    """Sequences of a cache of one layer; one of no query tokens and length 0 is none.

    Attributes:
      table: int32 `[num_prompts, max_blocks]`, of any numbers: entries outside the cache hold no tokens.
      lens: int32 `[num_prompts]`, tokens of each, at least 0.
      q_ends: int32 `[num_prompts]`, the row after its last.
      q_lens: int32 `[num_prompts]`, its rows.
    """

    table: jax.Array
    lens: jax.Array
    q_ends: jax.Array
    q_lens: jax.Array


def attend(
    cache: KVCache,
    query: jax.Array,
    sequences: Sequences,
    k_scale: jax.Array,
    v_scale: jax.Array,
    sinks: jax.Array | None,
    *,
    max_q_len: int,
    sm_scale: float,
    window: int | None,
    logits_soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of the rows of some sequences, in lots of as many as `DENSE_BYTES` hold.

    Args:
      cache: of one layer, on one device.
      query: float16 or bfloat16 `[num_tokens, num_heads, head_size]`.
      sequences: whose rows they are; of more than `max_q_len` the last ones may be left out.
      k_scale: float32 `[]` or, for fp8, `[num_kv_heads, 1]`.
      v_scale: likewise.
      sinks: float32 `[num_heads]`, -inf where there is none; None for none at all.
      max_q_len: most rows of a sequence.
      sm_scale: factor of the logits.
      window: tokens that a row sees, its own included.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`.

    Returns:
      Of each sequence rows that stand at positions in order: `[num_prompts, num_rows, num_heads, head_size_v]` of the
      query's dtype, the float32 log-sum-exp `[num_prompts, num_rows, num_heads]`, and at which position the first one
      does, `[num_prompts]`.
    """
    num_prompts, max_blocks = sequences.table.shape
    if window is not None and window >= max_blocks * cache.spec.block_size:
        window = None
    # A flash kernel takes the largest logit before the scale, which has to leave it the largest.
    by_cudnn = sm_scale > 0 and logits_soft_cap is None and why_not_cudnn(cache.spec, query.dtype) is None
    plan = _Plan(by_cudnn, max_q_len, sm_scale, window, logits_soft_cap)

    def attend_lot(lot: Sequences) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _attend_lot(cache, query, lot, k_scale, v_scale, sinks, plan)

    heads, num_rows = query.shape[1], max_q_len + 2 * cache.spec.block_size + (window or 0)
    itemsize = _Dense.dtype_of(cache, query).itemsize
    prompt_bytes = itemsize * (
        max_blocks * cache.spec.block_size * cache.spec.num_kv_heads + 3 * num_rows * heads
    ) * (cache.spec.head_size + cache.spec.head_size_v)  # fmt: skip
    at_once = max(1, min(num_prompts, DENSE_BYTES // prompt_bytes))
    if at_once == num_prompts:
        return attend_lot(sequences)
    num_lots = -(-num_prompts // at_once)

    def divided(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, num_lots * at_once - num_prompts), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(num_lots, at_once, *x.shape[1:])

    lots = lax.map(attend_lot, jax.tree.map(divided, sequences))
    out, lse, first = (lax.collapse(x, 0, 2)[:num_prompts] for x in lots)
    return out, lse, first


def why_not_cudnn(spec: AttentionSpec, dtype: np.dtype[Any]) -> str | None:
    """Why cuDNN cannot attend with queries of a dtype over pages of a spec; None where it can."""
    if spec.quant_mode is KVQuantMode.NONE and spec.storage_dtype != dtype:
        return f"its keys, values and queries are of one dtype; got {spec.storage_dtype} pages and {dtype} queries"
    if spec.head_size_v != spec.head_size:
        return f"its keys and values are of one size; got {spec.head_size} and {spec.head_size_v}"
    if spec.head_size > MAX_HEAD_SIZE or spec.head_size % 8:
        return f"its head size is a multiple of 8 up to {MAX_HEAD_SIZE}; got {spec.head_size}"
    return None


class _Plan(NamedTuple):
    by_cudnn: bool
    max_q_len: int
    sm_scale: float
    window: int | None
    logits_soft_cap: float | None


def _attend_lot(
    cache: KVCache,
    query: jax.Array,
    sequences: Sequences,
    k_scale: jax.Array,
    v_scale: jax.Array,
    sinks: jax.Array | None,
    plan: _Plan,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    dense = _Dense.of(cache, query, sequences, k_scale)
    parts, first = (_by_cudnn if plan.by_cudnn else _by_running_softmax)(dense, plan)
    num_heads, head_size_v = query.shape[1], cache.spec.head_size_v
    if sinks is not None:
        no_value = jnp.zeros((1, 1, 1, head_size_v), query.dtype)
        parts.append((no_value, jnp.broadcast_to(sinks[None, None, :], parts[0][1].shape)))
    outs, lses = zip(*parts, strict=True)
    out, lse = merge_parts(outs, lses)
    if cache.spec.quant_mode is not KVQuantMode.NONE:
        out *= _of_each_head(v_scale, cache.spec, num_heads)[None, None, :, None]
    return out.astype(query.dtype), lse, first


def _of_each_head(scale: jax.Array, spec: AttentionSpec, num_heads: int) -> jax.Array:
    """A scale `[]` or `[num_kv_heads, 1]` as `[num_heads]`, for query heads."""
    shape = spec.num_kv_heads, num_heads // spec.num_kv_heads
    return jnp.broadcast_to(scale.reshape(-1, 1), shape).reshape(num_heads)


class _Dense(NamedTuple):
    """Sequences whose rows, keys and values are made dense in 16 bits, which hold stored elements exactly.

    What is quantized fits float16, which has three bits more than bfloat16, but not with any scale: of the scale of the
    keys these get the power of two, and the query the rest, which rounds it to float16. (What is left of a key below
    2**-24 is lost, and there is none past 65,504.) The scale of the values is left to whoever has the result.
    Unquantized pages are of the query's dtype, or else all becomes float32.

    Attributes:
      cache: of one layer.
      query: `[num_tokens, num_heads, head_size]`.
      sequences: whose rows these are.
      factor: of each query head, float32 `[num_heads]`.
      k_scale: float32, a power of two.
      dtype: of rows, keys and values.
    """

    cache: KVCache
    query: jax.Array
    sequences: Sequences
    factor: jax.Array
    k_scale: jax.Array
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, cache: KVCache, query: jax.Array, sequences: Sequences, k_scale: jax.Array) -> _Dense:
        spec, num_heads, dtype = cache.spec, query.shape[1], cls.dtype_of(cache, query)
        if spec.quant_mode is KVQuantMode.NONE:
            return cls(cache, query, sequences, jnp.ones(num_heads, jnp.float32), k_scale, dtype)
        rest, exponent = jnp.frexp(k_scale)
        rest, power = 2 * rest, jnp.ldexp(jnp.ones_like(k_scale), exponent - 1)  # 1 and 1 of a scale of 1
        return cls(cache, query, sequences, _of_each_head(rest, spec, num_heads), power, dtype)

    @staticmethod
    def dtype_of(cache: KVCache, query: jax.Array) -> np.dtype[Any]:
        """That of dense rows, keys and values."""
        if cache.spec.quant_mode is not KVQuantMode.NONE:
            return np.dtype(np.float16)
        return query.dtype if cache.spec.storage_dtype == query.dtype else np.dtype(np.float32)

    def rows(self, first: jax.Array, num_rows: int) -> jax.Array:
        """The query's rows of each sequence's positions from `first` on; of those without, any other row."""
        _, lens, q_ends, _ = self.sequences
        row = (q_ends - lens + first)[:, None] + jnp.arange(num_rows)[None, :]
        rows = self.query[jnp.clip(row, 0, self.query.shape[0] - 1)]
        if self.cache.spec.quant_mode is KVQuantMode.NONE:
            return rows.astype(self.dtype)
        most = float(np.finfo(np.float16).max)
        return jnp.clip(rows * self.factor[None, None, :, None], -most, most).astype(self.dtype)

    def gather(self, table: jax.Array, lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the blocks of a table, zeros where it has none."""
        one = jnp.ones((), jnp.float32)
        return gather_mosaic(self.cache, table, lens, None, self.k_scale, one, dtype=self.dtype)


Parts = list[tuple[jax.Array, jax.Array]]


def _by_cudnn(dense: _Dense, plan: _Plan) -> tuple[Parts, jax.Array]:
    """The parts of the attention of each sequence's rows, and the position of the first row."""
    cache, sequences = dense.cache, dense.sequences
    size, (_, max_blocks) = cache.spec.block_size, sequences.table.shape
    before = 0 if plan.window is None else plan.window - 1
    start = jnp.maximum(sequences.lens - sequences.q_lens - before, 0)  # the first token of the first part
    first_block = start // size
    # The least number of blocks that hold so many tokens wherever they begin.
    num_blocks = min(-(-(before + plan.max_q_len + size - 1) // size), max_blocks)
    column = first_block[:, None] + jnp.arange(num_blocks)[None, :]
    table = jnp.take_along_axis(sequences.table, column, axis=1, mode="fill", fill_value=-1)
    first, num_rows = first_block * size, num_blocks * size
    lens = sequences.lens - first
    rows = dense.rows(first, num_rows)
    num_used = jnp.clip(lens, 1, num_rows)  # of no rows, or no tokens, cuDNN may make anything
    keys, values = dense.gather(table, lens)
    if plan.window is not None:  # what is before the window may be NaN, which no weight of 0 makes 0
        is_reached = (jnp.arange(size)[None, :] >= (start - first)[:, None])[:, :, None, None]
        blocks = (jnp.where(is_reached, x[:, :size], jnp.zeros((), x.dtype)) for x in (keys, values))
        # Made before anything is stored, or XLA would copy the whole array first.
        blocks = lax.optimization_barrier(tuple(blocks))
        keys, values = (x.at[:, :size].set(block) for x, block in zip((keys, values), blocks, strict=True))
    own = compat.cudnn_attention(
        rows, keys, values, num_used, num_used, sm_scale=plan.sm_scale, is_causal=True, window=plan.window
    )
    is_block = (table >= 0) & (table < cache.num_blocks)
    own = _without_holes(*own, is_block, size, plan.window)
    if plan.window is not None:
        return [own], first
    table, lens = _blocks_before(cache, sequences.table, first_block)
    keys, values = dense.gather(table, lens)
    # No more rows than are asked for: cuDNN takes 128 or more at a time, whether there are any or not.
    num_rows = min(plan.max_q_len, num_rows)
    out, lse = compat.cudnn_attention(
        dense.rows(start, num_rows),
        keys,
        values,
        jnp.clip(sequences.q_lens, 1, num_rows),
        jnp.maximum(lens, 1),
        sm_scale=plan.sm_scale,
        is_causal=False,
    )
    lse = jnp.where(lens[:, None, None] > 0, lse, -jnp.inf)
    return [_rows_from(own, start - first, num_rows), (out, lse)], start


def _rows_from(part: tuple[jax.Array, jax.Array], first: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Of each sequence `num_rows` rows from a row of its own on; past the last one, that again."""
    row = jnp.clip(first[:, None] + jnp.arange(num_rows)[None, :], 0, part[0].shape[1] - 1)
    seq = jnp.arange(len(first))[:, None]
    out, lse = (x[seq, row] for x in part)
    return out, lse


def _blocks_before(cache: KVCache, table: jax.Array, first_block: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tables of the blocks of the cache that stand before a column, without holes, and how many tokens they hold."""
    column = jnp.arange(table.shape[1])[None, :]
    is_kept = (column < first_block[:, None]) & (table >= 0) & (table < cache.num_blocks)
    place = jnp.where(is_kept, jnp.cumsum(is_kept, axis=1) - 1, table.shape[1])
    seq = jnp.broadcast_to(jnp.arange(table.shape[0])[:, None], table.shape)
    closed_up = jnp.full_like(table, -1).at[seq, place].set(table, mode="drop")
    return closed_up, jnp.sum(is_kept, axis=1, dtype=jnp.int32) * cache.spec.block_size


def _without_holes(
    out: jax.Array, lse: jax.Array, is_block: jax.Array, size: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Causal attention over blocks of `size` tokens of which some are not there, given what it came to with zeros.

    The logit of such a token was 0, its value too: each added 1 to the denominator, and nothing else. There are some
    where a cache does not hold a sequence's newest blocks, as in a table of a shared prefix. Where there are none
    nothing changes; the result is the less precise the more of the denominator they were.
    """
    row, column = np.arange(out.shape[1]), np.arange(is_block.shape[1])

    def holes_up_to(row: np.ndarray) -> jax.Array:
        tokens = np.clip(row[:, None] + 1 - column[None, :] * size, 0, size)  # of each block
        return jnp.sum(jnp.where(is_block[:, None, :], 0, tokens[None]), axis=2, dtype=jnp.int32)

    holes, span = holes_up_to(row), row + 1
    if window is not None:
        holes -= holes_up_to(row - window)
        span = np.minimum(span, window)
    is_all, holes = (holes == span[None, :])[:, :, None], holes[:, :, None]
    share = jnp.where(holes > 0, 1.0 - holes * jnp.exp(-lse), 1.0)  # of the denominator that remains
    share = jnp.maximum(share, np.finfo(np.float32).eps)
    scaled = jnp.where((holes > 0)[..., None], out / share[..., None], out).astype(out.dtype)
    return scaled, jnp.where(is_all, -jnp.inf, lse + jnp.log(share))


def _by_running_softmax(dense: _Dense, plan: _Plan) -> tuple[Parts, jax.Array]:
    """One part, and the position of the first row, which is that of a sequence's first query token."""
    cache, sequences, num_heads = dense.cache, dense.sequences, dense.query.shape[1]
    spec, (num_prompts, max_blocks) = cache.spec, sequences.table.shape
    first = sequences.lens - sequences.q_lens
    row = jnp.arange(plan.max_q_len)[None, :]
    positions = jnp.where(row < sequences.q_lens[:, None], first[:, None] + row, -1)
    logits_bytes = 4 * num_prompts * plan.max_q_len * num_heads
    size = softmax.blocks_a_chunk(max_blocks, logits_bytes * spec.block_size, LOGITS_BYTES)
    num_chunks = -(-max_blocks // size)
    table = jnp.pad(sequences.table, ((0, 0), (0, num_chunks * size - max_blocks)), constant_values=-1)
    keys, values = dense.gather(table, sequences.lens)
    there = tokens_there(table, sequences.lens, cache.num_blocks, spec.block_size)

    def read(number: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        length = size * spec.block_size
        key, value, is_there = (
            lax.dynamic_slice_in_dim(x, number * length, length, axis=1) for x in (keys, values, there)
        )
        return key, value, is_there

    out, lse = softmax.attend(
        dense.rows(first, plan.max_q_len),
        read,
        num_chunks,
        positions,
        jnp.full(num_heads, -jnp.inf, jnp.float32),
        num_kv_heads=spec.num_kv_heads,
        head_size_v=spec.head_size_v,
        sm_scale=plan.sm_scale,
        window=plan.window,
        logits_soft_cap=plan.logits_soft_cap,
    )
    return [(out, lse)], first
