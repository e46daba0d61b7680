"""Attention of long query chunks on a GPU: the gather kernel makes a sequence's pages dense, then another attends.

On Hopper that is `kernels.prompts`, which stores the results of each row in place. Elsewhere it is cuDNN, whose causal
mask lets a row see the keys up to its own index, without gaps. So there a sequence is split in two parts,
merged by their log-sum-exps: the blocks that hold its new tokens, causal, with each row at the index of its token; and
all earlier blocks, without a mask, in segments where few rows would leave multiprocessors idle. With a sliding window
one part is enough, of the blocks within its reach. What cuDNN does not support (a soft cap, other head sizes, 16-bit
pages of another dtype than the query's) is computed by the online softmax of `ops.softmax` over the same dense keys and
values.
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
from kvjax.ops.gather import gather_mosaic, token_mask
from kvjax.ops.merge import merge_parts
from kvjax.spec import AttentionSpec

DENSE_BYTES = 1 << 30
"""Limit on the rows, keys and values of the sequences processed at once; a single sequence may exceed it."""

LOGITS_BYTES = 256 << 20
"""Limit on the logits of a chunk without cuDNN; fewer tokens would mean rescaling results more often."""

CUDNN_ROWS, THREAD_BLOCKS, MIN_SEGMENT = 128, 264, 512
"""Rows of a head in a thread block of cuDNN's; thread blocks that occupy a GPU; least tokens for one to attend to."""

MAX_HEAD_SIZE = 256
"""Of cuDNN's forward pass on sm_90; jax requires the same on sm_100."""


class Sequences(NamedTuple):
    """Sequences of a cache of one layer; padding has no query tokens and length 0.

    Attributes:
      table: int32 `[num_prompts, max_blocks]`, unchecked: entries outside the cache hold no tokens.
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
    """Attends with the rows of some sequences, in batches of as many as `DENSE_BYTES` hold.

    Args:
      cache: of one layer, on one device.
      query: float16 or bfloat16 `[num_tokens, num_heads, head_size]`.
      sequences: whose rows they are; beyond `max_q_len` the last rows may be left out.
      k_scale: float32 `[]` or, for fp8, `[num_kv_heads, 1]`.
      v_scale: likewise.
      sinks: float32 `[num_heads]`, -inf for a head without one; None for no sinks.
      max_q_len: most rows of a sequence.
      sm_scale: factor on the logits.
      window: tokens that a row attends to, its own included.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`.

    Returns:
      For each sequence, rows at consecutive positions: `[num_prompts, num_rows, num_heads, head_size_v]` of the query's
      dtype, the float32 log-sum-exp `[num_prompts, num_rows, num_heads]`, and the position of the first row,
      `[num_prompts]`.
    """
    num_prompts, max_blocks = sequences.table.shape
    if window is not None and window >= max_blocks * cache.spec.block_size:
        window = None
    # cuDNN takes the maximum before it multiplies by sm_scale, so a scale that is not positive would break it.
    by_cudnn = sm_scale > 0 and logits_soft_cap is None and why_not_cudnn(cache.spec, query.dtype) is None
    plan = _Plan(by_cudnn, max_q_len, sm_scale, window, logits_soft_cap)

    def attend_batch(batch: Sequences) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _attend_batch(cache, query, batch, k_scale, v_scale, sinks, plan)

    heads, num_rows = query.shape[1], max_q_len + 2 * cache.spec.block_size + (window or 0)
    itemsize = Dense.dtype_of(cache, query).itemsize
    prompt_bytes = itemsize * (
        max_blocks * cache.spec.block_size * cache.spec.num_kv_heads + 3 * num_rows * heads
    ) * (cache.spec.head_size + cache.spec.head_size_v)  # fmt: skip
    at_once = max(1, min(num_prompts, DENSE_BYTES // prompt_bytes))
    if at_once == num_prompts:
        return attend_batch(sequences)
    num_batches = -(-num_prompts // at_once)

    def divided(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, num_batches * at_once - num_prompts), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(num_batches, at_once, *x.shape[1:])

    batches = lax.map(attend_batch, jax.tree.map(divided, sequences))
    out, lse, first = (lax.collapse(x, 0, 2)[:num_prompts] for x in batches)
    return out, lse, first


def why_not_cudnn(spec: AttentionSpec, dtype: np.dtype[Any]) -> str | None:
    """Returns why cuDNN cannot attend with queries of a dtype over pages of a spec; None if it can."""
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


def _attend_batch(
    cache: KVCache,
    query: jax.Array,
    sequences: Sequences,
    k_scale: jax.Array,
    v_scale: jax.Array,
    sinks: jax.Array | None,
    plan: _Plan,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    dense = Dense.of(cache, query, sequences, k_scale)
    parts, first = (_by_cudnn if plan.by_cudnn else _by_online_softmax)(dense, plan)
    num_heads, head_size_v = query.shape[1], cache.spec.head_size_v
    if sinks is not None:
        no_value = jnp.zeros((1, 1, 1, head_size_v), query.dtype)
        parts.append((no_value, jnp.broadcast_to(sinks[None, None, :], parts[0][1].shape)))
    outs, lses = zip(*parts, strict=True)
    out, lse = merge_parts(outs, lses)
    if cache.spec.quant_mode is not KVQuantMode.NONE:
        out *= of_each_head(v_scale, cache.spec, num_heads)[None, None, :, None]
    return out.astype(query.dtype), lse, first


def of_each_head(scale: jax.Array, spec: AttentionSpec, num_heads: int) -> jax.Array:
    """Returns a scale `[]` or `[num_kv_heads, 1]` as `[num_heads]`, per query head."""
    shape = spec.num_kv_heads, num_heads // spec.num_kv_heads
    return jnp.broadcast_to(scale.reshape(-1, 1), shape).reshape(num_heads)


class Dense(NamedTuple):
    """Dense rows, keys and values in 16 bits, which represent stored elements exactly.

    Quantized elements fit float16, which has three mantissa bits more than bfloat16, but not times any scale. So the
    keys are multiplied by the power of two of their scale, and the query by the rest, rounded to float16. (Keys below
    2**-24 are flushed to 0; none exceeds 65,504.) The caller applies the scale of the values to the result.
    Unquantized pages keep the query's dtype if it is theirs, else all is float32.

    Attributes:
      cache: of one layer.
      query: `[num_tokens, num_heads, head_size]`.
      sequences: whose rows these are.
      factor: per query head, float32 `[num_heads]`.
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
    def of(cls, cache: KVCache, query: jax.Array, sequences: Sequences, k_scale: jax.Array) -> Dense:
        """The rows, keys and values of sequences; `k_scale` as in `attend`."""
        spec, num_heads, dtype = cache.spec, query.shape[1], cls.dtype_of(cache, query)
        if spec.quant_mode is KVQuantMode.NONE:
            return cls(cache, query, sequences, jnp.ones(num_heads, jnp.float32), k_scale, dtype)
        rest, exponent = jnp.frexp(k_scale)
        rest, power = 2 * rest, jnp.ldexp(jnp.ones_like(k_scale), exponent - 1)  # a scale of 1 becomes 1 and 1
        return cls(cache, query, sequences, of_each_head(rest, spec, num_heads), power, dtype)

    @staticmethod
    def dtype_of(cache: KVCache, query: jax.Array) -> np.dtype[Any]:
        """Returns the dtype of dense rows, keys and values."""
        if cache.spec.quant_mode is not KVQuantMode.NONE:
            return np.dtype(np.float16)
        return query.dtype if cache.spec.storage_dtype == query.dtype else np.dtype(np.float32)

    def rows(self, first: jax.Array, num_rows: int) -> jax.Array:
        """Returns the query's rows for positions from `first` on; arbitrary rows where a position has none."""
        _, lens, q_ends, _ = self.sequences
        row = (q_ends - lens + first)[:, None] + jnp.arange(num_rows)[None, :]
        rows = self.query[jnp.clip(row, 0, self.query.shape[0] - 1)]
        if self.cache.spec.quant_mode is KVQuantMode.NONE:
            return rows.astype(self.dtype)
        most = float(np.finfo(np.float16).max)
        return jnp.clip(rows * self.factor[None, None, :, None], -most, most).astype(self.dtype)

    def gather(self, table: jax.Array, lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values of a table's blocks, zeros for entries without one."""
        one = jnp.ones((), jnp.float32)
        return gather_mosaic(self.cache, table, lens, None, self.k_scale, one, dtype=self.dtype)


Parts = list[tuple[jax.Array, jax.Array]]


def _by_cudnn(dense: Dense, plan: _Plan) -> tuple[Parts, jax.Array]:
    """Returns the parts of each sequence's attention, and the position of the first row."""
    cache, sequences = dense.cache, dense.sequences
    size, (_, max_blocks) = cache.spec.block_size, sequences.table.shape
    before = 0 if plan.window is None else plan.window - 1
    start = jnp.maximum(sequences.lens - sequences.q_lens - before, 0)  # the first token of the first part
    first_block = start // size
    # Enough blocks for so many tokens at any offset in the first block.
    num_blocks = min(-(-(before + plan.max_q_len + size - 1) // size), max_blocks)
    column = first_block[:, None] + jnp.arange(num_blocks)[None, :]
    table = jnp.take_along_axis(sequences.table, column, axis=1, mode="fill", fill_value=-1)
    first, num_rows = first_block * size, num_blocks * size
    lens = sequences.lens - first
    rows = dense.rows(first, num_rows)
    num_used = jnp.clip(lens, 1, num_rows)  # cuDNN's result for no rows or no tokens is undefined
    keys, values = dense.gather(table, lens)
    if plan.window is not None:
        keys, values = (without_tokens_before(x, start - first, size) for x in (keys, values))
    own = compat.cudnn_attention(
        rows, keys, values, num_used, num_used, sm_scale=plan.sm_scale, is_causal=True, window=plan.window
    )
    is_block = (table >= 0) & (table < cache.num_blocks)
    own = _without_holes(*own, is_block, size, plan.window)
    if plan.window is not None:
        return [own], first
    # No more rows than requested: cuDNN computes 128 or more at a time, used or not.
    num_rows = min(plan.max_q_len, num_rows)
    earlier = _blocks_before(cache, sequences.table, first_block)
    return [_rows_from(own, start - first, num_rows), *_unmasked(dense, plan, *earlier, start, num_rows)], start


def without_tokens_before(dense: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Returns dense keys or values with zeros for tokens before `start`, less than the block size `size`.

    Tokens before a window may be NaN, which a weight of 0 does not remove.
    """
    is_reached = (jnp.arange(size)[None, :] >= start[:, None])[:, :, None, None]
    block = jnp.where(is_reached, dense[:, :size], jnp.zeros((), dense.dtype))
    # Computed before the update, or XLA would copy the whole array first.
    return dense.at[:, :size].set(lax.optimization_barrier(block))


def _unmasked(dense: Dense, plan: _Plan, table: jax.Array, lens: jax.Array, start: jax.Array, num_rows: int) -> Parts:
    """Returns the attention of rows from position `start` on to all tokens of a table, in segments of its tokens."""
    size, (num_prompts, max_blocks) = dense.cache.spec.block_size, table.shape
    count = _num_segments(num_prompts * dense.query.shape[1], num_rows, max_blocks * size)
    blocks = -(-max_blocks // count)
    count = -(-max_blocks // blocks)  # rounded up, fewer segments may hold all blocks
    table = jnp.pad(table, ((0, 0), (0, count * blocks - max_blocks)), constant_values=-1)
    keys, values = (x.reshape(-1, blocks * size, *x.shape[2:]) for x in dense.gather(table, lens))

    def for_each(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], (num_prompts, count, *x.shape[1:])).reshape(-1, *x.shape[1:])

    lens = jnp.clip(lens[:, None] - np.arange(count, dtype=np.int32) * (blocks * size), 0, blocks * size).reshape(-1)
    out, lse = compat.cudnn_attention(
        for_each(dense.rows(start, num_rows)),
        keys,
        values,
        for_each(jnp.clip(dense.sequences.q_lens, 1, num_rows)),
        jnp.maximum(lens, 1),
        sm_scale=plan.sm_scale,
        is_causal=False,
    )
    lse = jnp.where(lens[:, None, None] > 0, lse, -jnp.inf)
    return [(out[i::count], lse[i::count]) for i in range(count)]


def _num_segments(num_heads: int, num_rows: int, num_tokens: int) -> int:
    """Returns into how many segments to divide the tokens: cuDNN gives 128 rows of a head to one thread block."""
    blocks = num_heads * -(-num_rows // CUDNN_ROWS)
    return max(1, min(THREAD_BLOCKS // blocks, num_tokens // MIN_SEGMENT))


def _rows_from(part: tuple[jax.Array, jax.Array], first: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns `num_rows` rows per sequence from its row `first` on; past the end, the last row repeats."""
    row = jnp.clip(first[:, None] + jnp.arange(num_rows)[None, :], 0, part[0].shape[1] - 1)
    seq = jnp.arange(len(first))[:, None]
    out, lse = (x[seq, row] for x in part)
    return out, lse


def _blocks_before(cache: KVCache, table: jax.Array, first_block: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns compacted tables of the cache's blocks before a column, and the number of tokens they hold."""
    column = jnp.arange(table.shape[1])[None, :]
    is_kept = (column < first_block[:, None]) & (table >= 0) & (table < cache.num_blocks)
    index = jnp.where(is_kept, jnp.cumsum(is_kept, axis=1) - 1, table.shape[1])
    seq = jnp.broadcast_to(jnp.arange(table.shape[0])[:, None], table.shape)
    compacted = jnp.full_like(table, -1).at[seq, index].set(table, mode="drop")
    return compacted, jnp.sum(is_kept, axis=1, dtype=jnp.int32) * cache.spec.block_size


def _without_holes(
    out: jax.Array, lse: jax.Array, is_block: jax.Array, size: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Removes missing blocks, of `size` tokens, from the result of causal attention that read them as zeros.

    Each of their tokens had logit 0 and value 0, so it added 1 to the denominator and nothing else. There are such
    blocks if a cache does not hold a sequence's newest ones, as in a table of a shared prefix. Precision drops with
    their share of the denominator; without any, the result is unchanged.
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
    share = jnp.where(holes > 0, 1.0 - holes * jnp.exp(-lse), 1.0)  # fraction of the denominator that remains
    share = jnp.maximum(share, np.finfo(np.float32).eps)
    scaled = jnp.where((holes > 0)[..., None], out / share[..., None], out).astype(out.dtype)
    return scaled, jnp.where(is_all, -jnp.inf, lse + jnp.log(share))


def _by_online_softmax(dense: Dense, plan: _Plan) -> tuple[Parts, jax.Array]:
    """Returns one part, and the position of the first row, a sequence's first query token."""
    cache, sequences, num_heads = dense.cache, dense.sequences, dense.query.shape[1]
    spec, (num_prompts, max_blocks) = cache.spec, sequences.table.shape
    first = sequences.lens - sequences.q_lens
    row = jnp.arange(plan.max_q_len)[None, :]
    positions = jnp.where(row < sequences.q_lens[:, None], first[:, None] + row, -1)
    logits_bytes = 4 * num_prompts * plan.max_q_len * num_heads
    size = softmax.blocks_per_chunk(max_blocks, logits_bytes * spec.block_size, LOGITS_BYTES)
    num_chunks = -(-max_blocks // size)
    table = jnp.pad(sequences.table, ((0, 0), (0, num_chunks * size - max_blocks)), constant_values=-1)
    keys, values = dense.gather(table, sequences.lens)
    there = token_mask(table, sequences.lens, cache.num_blocks, spec.block_size)

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
