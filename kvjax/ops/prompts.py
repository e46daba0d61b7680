"""Attention of long query chunks where no prompt kernel serves: pages made dense, then the online softmax in 16 bits.

On Hopper `ops.prompt_kernel` serves most calls. What its kernel does not take (head sizes above 256, unquantized pages
of another dtype than the query's, an `sm_scale` of 0 or less) and all calls on other GPUs are computed by XLA: products
of the dense rows, keys and values in 16 bits, sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache import KVCache
from kvjax.kernels.attention import Softmax
from kvjax.ops import softmax
from kvjax.ops.gather import gather_mosaic, token_mask
from kvjax.ops.options import num_reached_blocks, prompts_at_once, restricting
from kvjax.spec import AttentionSpec

LOGITS_BYTES = 256 << 20
"""Limit on the logits of a chunk; fewer tokens would mean rescaling results more often."""


TILE_ROWS = 64
"""Rows of a sequence that XLA processes at once: larger tiles decode pages less often but pad short sequences more."""


class RowSequences(NamedTuple):
    """For each row of a query, `[num_tokens]`: its sequence, and whether it has one."""

    seq: jax.Array
    is_any: jax.Array

    @classmethod
    def of(cls, num_tokens: int, q_starts: jax.Array, q_ends: jax.Array) -> RowSequences:
        """Returns the rows of sequences `[num_seqs]`, which are in order but may start past row 0."""
        token = jnp.arange(num_tokens)
        seq = jnp.sum(token[:, None] >= q_ends[None, :], axis=1, dtype=jnp.int32)
        seq = jnp.minimum(seq, q_ends.shape[0] - 1)
        return cls(seq, (token >= q_starts[seq]) & (token < q_ends[seq]))


class RowTile(NamedTuple):
    """A tile of rows of each of several sequences.

    Attributes:
      seq: int32 `[num_tiles]`, the sequence of each.
      query: `[num_tiles, num_rows, num_heads, head_size]`, zeros where there is no row.
      from_end: int32 `[num_tiles, num_rows]`, 1 for the last row of a sequence, 2 for the one before.
      is_row: bool `[num_tiles, num_rows]`, whether there is such a row.
    """

    seq: jax.Array
    query: jax.Array
    from_end: jax.Array
    is_row: jax.Array


def by_tiles(
    attend: Callable[[RowTile], tuple[jax.Array, jax.Array]],
    query: jax.Array,
    bounds: tuple[jax.Array, jax.Array],
    nothing: tuple[jax.Array, jax.Array],
    max_q_len: int,
    *,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends with the rows of sequences, up to `TILE_ROWS` at a time.

    Args:
      attend: returns the results of a tile, `[num_tiles, num_rows, num_heads, head_size_v]`, and the log-sum-exp.
      query: `[num_tokens, num_heads, head_size]`.
      bounds: int32 `[num_seqs]`, the first row of each sequence, in order, and the row after its last.
      nothing: results of rows of no sequence, `[num_tokens, ..]`.
      max_q_len: an estimate of the longest sequence's rows, which no result depends on.
      batch_invariant: whether to attend with one tile at a time.
    """
    q_starts, q_ends = bounds
    num_tokens, num_seqs = query.shape[0], len(q_starts)
    size = min(1 << (max_q_len - 1).bit_length(), TILE_ROWS)
    at_once = 1 if batch_invariant else TILE_ROWS // size
    num_tiles = (jnp.maximum(q_ends - q_starts, 0) + size - 1) // size
    last_tile = jnp.cumsum(num_tiles)
    first_tile = last_tile - num_tiles

    def attend_tiles(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        tile = first + jnp.arange(at_once)
        seq = jnp.sum(tile[:, None] >= last_tile[None, :], axis=1, dtype=jnp.int32)
        seq = jnp.minimum(seq, num_seqs - 1)
        row = (q_starts[seq] + (tile - first_tile[seq]) * size)[:, None] + jnp.arange(size)[None, :]
        is_row = (row >= 0) & (row < jnp.minimum(q_ends[seq], num_tokens)[:, None])
        # Other rows may be NaN, and so would be gradients of keys.
        rows = jnp.where(is_row[:, :, None, None], query[jnp.clip(row, 0, num_tokens - 1)], jnp.zeros((), query.dtype))
        out, lse = attend(RowTile(seq, rows, q_ends[seq][:, None] - row, is_row))
        return out.astype(query.dtype), lse

    # The last tile of a sequence may hold a single row.
    most_tiles = (num_tokens + num_seqs * (size - 1)) // size
    out, lse = lax.map(attend_tiles, jnp.arange(0, most_tiles, at_once))
    rows = RowSequences.of(num_tokens, q_starts, q_ends)
    index = first_tile[rows.seq] * size + jnp.arange(num_tokens) - q_starts[rows.seq]
    return where_rows(rows.is_any, (lax.collapse(out, 0, 3), lax.collapse(lse, 0, 3)), index, nothing)


def of_no_tokens(query: jax.Array, sinks: jax.Array | None, head_size_v: int) -> tuple[jax.Array, jax.Array]:
    """Returns the results of rows that attend to nothing."""
    num_tokens, num_heads, _ = query.shape
    lse = jnp.broadcast_to(softmax.sinks_of_heads(sinks, num_heads)[None], (num_tokens, num_heads))
    return jnp.zeros((num_tokens, num_heads, head_size_v), query.dtype), lse


def where_rows(
    condition: jax.Array, found: Sequence[jax.Array], index: jax.Array, otherwise: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns `found[index]` for each row where the condition holds."""
    out, lse = (
        jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x[jnp.clip(index, 0, x.shape[0] - 1)], other)
        for x, other in zip(found, otherwise, strict=True)
    )
    return out, lse


class LayerSequences(NamedTuple):
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


class Prompts(NamedTuple):
    """The rows of prompts, and what they attend to.

    Attributes:
      cache: of one layer, on one device.
      query: float16 or bfloat16 `[num_tokens, num_heads, head_size]`.
      sequences: whose rows they are.
      max_q_len: most rows of a sequence; of one with more, the last rows may be left out.
      k_scale: float32 `[]` or, for fp8, `[num_kv_heads, 1]`.
      v_scale: likewise.
      sinks: float32 `[num_heads]`, -inf for a head without one; None for no sinks.
      dtype: of dense rows, keys and values: that of `Route.dense_dtype`; with near tokens, the query's.
    """

    cache: KVCache
    query: jax.Array
    sequences: LayerSequences
    max_q_len: int
    k_scale: jax.Array
    v_scale: jax.Array
    sinks: jax.Array | None
    dtype: np.dtype[Any]

    @property
    def max_tokens(self) -> int:
        """The tokens that a row of the block table holds."""
        return self.sequences.table.shape[1] * self.cache.spec.block_size

    def max_reached(self, window: int | None) -> int:
        """The most tokens in the blocks that the rows of a sequence reach."""
        size = self.cache.spec.block_size
        return num_reached_blocks(window, self.max_q_len, self.sequences.table.shape[1], size) * size


def attend(prompts: Prompts, options: Softmax) -> tuple[jax.Array, jax.Array]:
    """Attends with the rows of prompts, in lots whose dense keys and values fit in `DENSE_BYTES` of `ops.options`.

    Returns:
      The rows of each sequence from its first on: `[num_prompts, max_q_len, num_heads, head_size_v]` of the query's
      dtype, and the float32 log-sum-exp `[num_prompts, max_q_len, num_heads]`.
    """
    cache, query, sequences, max_q_len, *_ = prompts
    spec = cache.spec
    options = options._replace(window=restricting(options.window, prompts.max_tokens))

    def attend_lot(carried: None, lot: LayerSequences) -> tuple[None, tuple[jax.Array, jax.Array]]:
        out, lse = _by_online_softmax(Dense.of(prompts, lot), options)
        if spec.dtype.parts[1].info.layer_scale is not None:
            out *= of_each_head(prompts.v_scale, spec, query.shape[1])[None, None, :, None]
        return carried, (out.astype(query.dtype), lse)

    rows = prompts.max_reached(options.window) * spec.num_kv_heads + 3 * max_q_len * query.shape[1]
    lot_bytes = rows * (spec.head_size + spec.head_size_v) * prompts.dtype.itemsize
    _, found = by_lots(attend_lot, None, sequences, prompts_at_once(lot_bytes, len(sequences.lens)))
    return found


def by_lots[Carried, Found, Sequences](
    attend: Callable[[Carried, Sequences], tuple[Carried, Found]],
    carried: Carried,
    sequences: Sequences,
    at_once: int,
) -> tuple[Carried, Found]:
    """Calls `attend` with what is carried and `at_once` sequences at a time, the last of which may be padding.

    `sequences` is a pytree of `LayerSequences`. Returns what is carried in the end, and what was found for each
    sequence.
    """
    num_seqs = len(jax.tree.leaves(sequences)[0])
    if at_once == num_seqs:
        return attend(carried, sequences)

    def divided(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -len(x) % at_once), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, at_once, *x.shape[1:])

    carried, found = lax.scan(attend, carried, jax.tree.map(divided, sequences))
    return carried, jax.tree.map(lambda x: lax.collapse(x, 0, 2)[:num_seqs], found)


def reached_blocks(
    sequences: LayerSequences, max_q_len: int, window: int, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the table of the blocks that the rows of sequences reach, and the first token that they see."""
    start = jnp.maximum(sequences.lens - sequences.q_lens - (window - 1), 0)
    num_blocks = num_reached_blocks(window, max_q_len, sequences.table.shape[1], block_size)
    column = (start // block_size)[:, None] + jnp.arange(num_blocks)[None, :]
    return jnp.take_along_axis(sequences.table, column, axis=1, mode="fill", fill_value=-1), start


def of_each_head(scale: jax.Array, spec: AttentionSpec, num_heads: int) -> jax.Array:
    """Returns a scale `[]` or `[num_kv_heads, 1]` as `[num_heads]`, per query head."""
    shape = spec.num_kv_heads, num_heads // spec.num_kv_heads
    return jnp.broadcast_to(scale.reshape(-1, 1), shape).reshape(num_heads)


class Dense(NamedTuple):
    """Dense rows, keys and values in 16 bits, which represent stored elements exactly where the layer has a scale.

    Such elements fit float16, which has three mantissa bits more than bfloat16, but their products with a scale may
    not. So the keys are multiplied by the power of two of their scale, and the query by the rest, rounded to float16.
    (Keys below 2**-24 are flushed to 0; none exceeds 65,504.) The caller applies the scale of the values to the result.
    Elements with a scale of their token and head are decoded and rounded to the query's dtype. If unquantized pages
    have the query's dtype, it is kept; otherwise all is float32.

    Attributes:
      prompts: the call.
      sequences: whose rows these are.
      factor: per query head, float32 `[num_heads]`.
      k_scale: float32, a power of two.
    """

    prompts: Prompts
    sequences: LayerSequences
    factor: jax.Array
    k_scale: jax.Array

    @classmethod
    def of(cls, prompts: Prompts, sequences: LayerSequences) -> Dense:
        """The rows, keys and values of some of the sequences."""
        spec, k_scale, num_heads = prompts.cache.spec, prompts.k_scale, prompts.query.shape[1]
        if spec.dtype.parts[0].info.layer_scale is None:
            return cls(prompts, sequences, jnp.ones(num_heads, jnp.float32), k_scale)
        rest, exponent = jnp.frexp(k_scale)
        rest, power = 2 * rest, jnp.ldexp(jnp.ones_like(k_scale), exponent - 1)  # a scale of 1 becomes 1 and 1
        return cls(prompts, sequences, of_each_head(rest, spec, num_heads), power)

    def rows(self, first: jax.Array, num_rows: int) -> jax.Array:
        """Returns the query's rows for positions from `first` on; arbitrary rows where a position has none."""
        _, lens, q_ends, _ = self.sequences
        row = (q_ends - lens + first)[:, None] + jnp.arange(num_rows)[None, :]
        query, dtype = self.prompts.query, self.prompts.dtype
        rows = query[jnp.clip(row, 0, query.shape[0] - 1)]
        if self.prompts.cache.spec.dtype.parts[0].info.layer_scale is None:
            return rows.astype(dtype)
        most = float(np.finfo(np.float16).max)
        return jnp.clip(rows * self.factor[None, None, :, None], -most, most).astype(dtype)

    def gather(self, table: jax.Array, lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values of a table's blocks, zeros for entries without one."""
        one = jnp.ones((), jnp.float32)
        return gather_mosaic(self.prompts.cache, table, lens, None, self.k_scale, one, dtype=self.prompts.dtype)


def _by_online_softmax(dense: Dense, options: Softmax) -> tuple[jax.Array, jax.Array]:
    """Returns the results of the first `max_q_len` rows of each sequence, before the scale of the values."""
    sequences, (cache, query, _, max_q_len, *_) = dense.sequences, dense.prompts
    spec, table, lens = cache.spec, sequences.table, sequences.lens
    first = lens - sequences.q_lens
    row = jnp.arange(max_q_len)[None, :]
    positions = jnp.where(row < sequences.q_lens[:, None], first[:, None] + row, -1)
    if options.window is not None:
        table, start = reached_blocks(sequences, max_q_len, options.window, spec.block_size)
        skipped = start // spec.block_size * spec.block_size
        lens, positions = lens - skipped, positions - skipped[:, None]
    num_prompts, max_blocks = table.shape
    logits_bytes = 4 * num_prompts * max_q_len * query.shape[1]
    size = softmax.blocks_per_chunk(max_blocks, logits_bytes * spec.block_size, LOGITS_BYTES)
    num_chunks = -(-max_blocks // size)
    table = jnp.pad(table, ((0, 0), (0, num_chunks * size - max_blocks)), constant_values=-1)
    keys, values = dense.gather(table, lens)
    there = token_mask(table, lens, cache.num_blocks, spec.block_size)

    def read(number: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        length = size * spec.block_size
        key, value, is_there = (
            lax.dynamic_slice_in_dim(x, number * length, length, axis=1) for x in (keys, values, there)
        )
        return key, value, is_there

    chunks = softmax.TokenChunks(num_chunks, read)
    return softmax.attend(dense.rows(first, max_q_len), chunks, positions, dense.prompts.sinks, spec, options)
