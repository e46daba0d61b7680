"""Attention of long query chunks where no prompt kernel serves: pages made dense, then the online softmax in 16 bits.

On Hopper `ops.prompt_kernel` serves most calls. What its kernel does not take (head sizes above 256, unquantized pages
of another dtype than the query's, an `sm_scale` of 0 or less) and all calls on other GPUs are computed by XLA: products
of the dense rows, keys and values in 16 bits, sums in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache import KVCache
from kvjax.errors import UnsupportedError
from kvjax.ops import softmax
from kvjax.ops.gather import gather_mosaic, token_mask
from kvjax.ops.options import num_reached_blocks, prompts_at_once, restricting
from kvjax.spec import AttentionSpec

LOGITS_BYTES = 256 << 20
"""Limit on the logits of a chunk; fewer tokens would mean rescaling results more often."""


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
) -> tuple[jax.Array, jax.Array]:
    """Attends with the rows of some sequences, in batches of as many as `options.DENSE_BYTES` hold.

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
      The rows of each sequence from its first on: `[num_prompts, max_q_len, num_heads, head_size_v]` of the query's
      dtype, and the float32 log-sum-exp `[num_prompts, max_q_len, num_heads]`.
    """
    spec, (num_prompts, max_blocks) = cache.spec, sequences.table.shape
    window = restricting(window, max_blocks * spec.block_size)

    def attend_batch(batch: Sequences) -> tuple[jax.Array, jax.Array]:
        dense = Dense.of(cache, query, batch, k_scale)
        out, lse = _by_online_softmax(
            dense, sinks, max_q_len, sm_scale=sm_scale, window=window, logits_soft_cap=logits_soft_cap
        )
        if spec.dtype.is_quantized:
            out *= of_each_head(v_scale, spec, query.shape[1])[None, None, :, None]
        return out.astype(query.dtype), lse

    reached = num_reached_blocks(window, max_q_len, max_blocks, spec.block_size) * spec.block_size
    elements = (reached * spec.num_kv_heads + 3 * max_q_len * query.shape[1]) * (spec.head_size + spec.head_size_v)
    at_once = prompts_at_once(elements * Dense.dtype_of(cache, query).itemsize, num_prompts)
    if at_once == num_prompts:
        return attend_batch(sequences)
    out, lse = (lax.collapse(x, 0, 2)[:num_prompts] for x in lax.map(attend_batch, in_batches(sequences, at_once)))
    return out, lse


def in_batches(sequences: Sequences, at_once: int) -> Sequences:
    """Returns the sequences in batches, a leading dimension; the last one is padded."""

    def divided(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -len(x) % at_once), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, at_once, *x.shape[1:])

    return Sequences(*map(divided, sequences))


def reached_blocks(sequences: Sequences, max_q_len: int, window: int, block_size: int) -> tuple[jax.Array, jax.Array]:
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
        if not spec.dtype.is_quantized:
            return cls(cache, query, sequences, jnp.ones(num_heads, jnp.float32), k_scale, dtype)
        rest, exponent = jnp.frexp(k_scale)
        rest, power = 2 * rest, jnp.ldexp(jnp.ones_like(k_scale), exponent - 1)  # a scale of 1 becomes 1 and 1
        return cls(cache, query, sequences, of_each_head(rest, spec, num_heads), power, dtype)

    @staticmethod
    def dtype_of(cache: KVCache, query: jax.Array) -> np.dtype[Any]:
        """Returns the dtype of dense rows, keys and values."""
        if cache.spec.dtype.is_quantized:
            if (exact := cache.spec.dtype.exact_in) is None:
                raise UnsupportedError(f"dtype: got {cache.spec.dtype.value!r}, which no 16-bit dtype holds exactly")
            return exact
        return query.dtype if cache.spec.storage_dtype == query.dtype else np.dtype(np.float32)

    def rows(self, first: jax.Array, num_rows: int) -> jax.Array:
        """Returns the query's rows for positions from `first` on; arbitrary rows where a position has none."""
        _, lens, q_ends, _ = self.sequences
        row = (q_ends - lens + first)[:, None] + jnp.arange(num_rows)[None, :]
        rows = self.query[jnp.clip(row, 0, self.query.shape[0] - 1)]
        if not self.cache.spec.dtype.is_quantized:
            return rows.astype(self.dtype)
        most = float(np.finfo(np.float16).max)
        return jnp.clip(rows * self.factor[None, None, :, None], -most, most).astype(self.dtype)

    def gather(self, table: jax.Array, lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values of a table's blocks, zeros for entries without one."""
        one = jnp.ones((), jnp.float32)
        return gather_mosaic(self.cache, table, lens, None, self.k_scale, one, dtype=self.dtype)


def _by_online_softmax(
    dense: Dense,
    sinks: jax.Array | None,
    max_q_len: int,
    *,
    sm_scale: float,
    window: int | None,
    logits_soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of the first `max_q_len` rows of each sequence, before the scale of the values."""
    cache, sequences, num_heads = dense.cache, dense.sequences, dense.query.shape[1]
    spec, table, lens = cache.spec, sequences.table, sequences.lens
    first = lens - sequences.q_lens
    row = jnp.arange(max_q_len)[None, :]
    positions = jnp.where(row < sequences.q_lens[:, None], first[:, None] + row, -1)
    if window is not None:
        table, start = reached_blocks(sequences, max_q_len, window, spec.block_size)
        skipped = start // spec.block_size * spec.block_size
        lens, positions = lens - skipped, positions - skipped[:, None]
    num_prompts, max_blocks = table.shape
    logits_bytes = 4 * num_prompts * max_q_len * num_heads
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

    return softmax.attend(
        dense.rows(first, max_q_len),
        read,
        num_chunks,
        positions,
        sinks,
        num_kv_heads=spec.num_kv_heads,
        head_size_v=spec.head_size_v,
        sm_scale=sm_scale,
        window=window,
        logits_soft_cap=logits_soft_cap,
    )
