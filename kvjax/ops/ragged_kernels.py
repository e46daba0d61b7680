"""Attention of a step by the kernels: rows of sequences that decode by the decode kernel, all others by `prompts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache import KVCache
from kvjax.kernels import attention as kernel
from kvjax.kernels import prompts as prompt_kernels
from kvjax.kernels.target import current
from kvjax.ops import prompt_kernel, prompts
from kvjax.ops.attention import as_read, attention_mosaic
from kvjax.ops.gather import in_one_layer
from kvjax.ops.options import Buckets
from kvjax.ops.route import Query, route
from kvjax.ops.trees import packed_words


class StaticOptions(NamedTuple):
    """The static part of a call.

    Attributes:
      limits: sizes that the program is compiled for; in XLA no result depends on them.
      softmax: as in `paged_attention`'s implementations.
      query: what decides which kernels serve the call.
    """

    limits: Buckets
    softmax: kernel.Softmax
    query: Query


def as_read_of_step(
    arrays: Sequence[Any], softmax: kernel.Softmax
) -> tuple[kernel.ReadArrays, jax.Array, jax.Array, kernel.Softmax]:
    """Returns an implementation's arrays without the bounds of sequences' rows, these bounds, and the options."""
    block_table, seq_lens, q_starts, q_ends, *others = arrays
    read, softmax = as_read((block_table, seq_lens, *others), softmax)
    return read, q_starts, q_ends, softmax


class StepRows(NamedTuple):
    """The sequences that rows of a step belong to. Shapes are static; the device computes which path serves a sequence.

    Attributes:
      rows: the sequence of each row.
      q_ends: int32 `[num_seqs]`, the row after a sequence's last.
      q_lens: int32 `[num_seqs]`, its rows.
      decode_q_len: most rows of a sequence that decodes.
    """

    rows: prompts.RowSequences
    q_ends: jax.Array
    q_lens: jax.Array
    decode_q_len: int

    @classmethod
    def of(cls, num_tokens: int, q_starts: jax.Array, q_ends: jax.Array, decode_q_len: int) -> StepRows:
        """Of `num_tokens` rows, for the first row of each sequence and the row after its last."""
        rows = prompts.RowSequences.of(num_tokens, q_starts, q_ends)
        return cls(rows, q_ends, jnp.maximum(q_ends - q_starts, 0), decode_q_len)

    @property
    def is_short(self) -> jax.Array:
        """Whether a sequence decodes, bool `[num_seqs]`."""
        return self.q_lens <= self.decode_q_len

    @property
    def from_end(self) -> jax.Array:
        """Rows from a row to the end of its sequence, int32 `[num_tokens]`."""
        return self.q_ends[self.rows.seq] - jnp.arange(len(self.rows.seq), dtype=jnp.int32)

    def decoding(self, seq_lens: jax.Array) -> jax.Array:
        """Lengths on the decode path: 0 for a sequence of the other path, and for one without rows."""
        return jnp.where(self.is_short & (self.q_lens > 0), seq_lens, 0)

    def packed(self, query: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The last `decode_q_len` rows of each sequence, `[num_seqs, decode_q_len, num_heads, head_size]`.

        Also returns which of them the sequence has, and their indices in `query`.
        """
        from_last = jnp.arange(-self.decode_q_len, 0)[None, :]
        is_row = self.q_lens[:, None] + from_last >= 0
        index = jnp.clip(self.q_ends[:, None] + from_last, 0, query.shape[0] - 1)
        packed = query[index]
        # Rows of other sequences would affect the rounding of this one's.
        return jnp.where(is_row[..., None, None], packed, jnp.zeros((), packed.dtype)), is_row, index


def decode_rows(
    cache: KVCache, query: jax.Array, read: kernel.ReadArrays, step: StepRows, softmax: kernel.Softmax
) -> tuple[jax.Array, jax.Array]:
    """Attends with the last `decode_q_len` rows of each sequence that decodes.

    Returns `[num_seqs * decode_q_len, num_heads, head_size_v]` and the log-sum-exp; both are undefined for rows that a
    sequence does not have.
    """
    packed, is_row, index = step.packed(query)
    own, decode_q_len = read._replace(seq_lens=step.decoding(read.seq_lens)), step.decode_q_len
    if read.tree is not None:
        own = own._replace(tree=packed_words(read.tree, index, is_row))
    if softmax.window is None or decode_q_len == 1 or read.tree is not None:
        out, lse = attention_mosaic(cache, packed, *own, None, softmax=softmax)
    else:
        # A padding row would reach further back than the sequence's own rows, to tokens that may be NaN.
        lens = jnp.where(is_row, own.seq_lens[:, None] + 1 + jnp.arange(-decode_q_len, 0)[None, :], 0)
        own = own._replace(block_table=jnp.repeat(own.block_table, decode_q_len, axis=0), seq_lens=lens.reshape(-1))
        out, lse = attention_mosaic(cache, packed.reshape(-1, 1, *query.shape[1:]), *own, None, softmax=softmax)
    return lax.collapse(out, 0, 2), lax.collapse(lse, 0, 2)


class NearCache(NamedTuple):
    """Tokens that the rows of prompts see beside those of their cache, each row the last `window` up to its own."""

    cache: KVCache
    read: kernel.ReadArrays
    window: int


def with_prompts(
    cache: KVCache,
    query: jax.Array,
    read: kernel.ReadArrays,
    step: StepRows,
    decoded: tuple[jax.Array, jax.Array] | None,
    options: StaticOptions,
    near: NearCache | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends with the rows of prompts, over `near` too, and joins these with what `decode_rows` returns.

    `near` needs the prompt kernel, which then multiplies in its dtype, the query's. Without `decoded`, rows that decode
    attend to nothing. Returns `[num_tokens, num_heads, head_size_v]` and the log-sum-exp.
    """
    max_q_len, max_prompts, decode_q_len = options.limits
    num_tokens, num_seqs = query.shape[0], read.block_table.shape[0]
    rows, is_short, q_lens, sinks = step.rows, step.is_short, step.q_lens, read.sinks
    source, short = jnp.full(num_tokens, -1, jnp.int32), prompts.of_no_tokens(query, sinks, cache.spec.head_size_v)
    if decoded is not None:
        index = rows.seq * decode_q_len + decode_q_len - step.from_end
        source = jnp.where(rows.is_any & is_short[rows.seq], index, source)
        short = prompts.where_rows(source >= 0, decoded, source, short)
    if not max_prompts:
        return short

    (chosen,) = jnp.nonzero(~is_short, size=max_prompts, fill_value=num_seqs)
    chosen_route = route(cache.spec, options.query, current())
    # Near tokens are exact in their dtype, and so are stored elements without their layer's scale.
    dtype = chosen_route.dense_dtype if near is None else query.dtype

    def prompts_over(cache: KVCache, read: kernel.ReadArrays) -> prompts.Prompts:
        cache, block_table = in_one_layer(cache, read.layer, read.block_table)
        sequences = prompts.LayerSequences(
            block_table.at[chosen].get(mode="fill", fill_value=-1),
            jnp.maximum(read.seq_lens, 0).at[chosen].get(mode="fill", fill_value=0),
            step.q_ends.at[chosen].get(mode="fill", fill_value=0),
            q_lens.at[chosen].get(mode="fill", fill_value=0),
        )
        scales = read.k_scale, read.v_scale
        return prompts.Prompts(cache, query, sequences, max_q_len, *scales, sinks, dtype=dtype)

    long = prompts_over(cache, read)
    rank, row = (jnp.cumsum(~is_short) - 1)[rows.seq], q_lens[rows.seq] - step.from_end
    is_long = rows.is_any & ~is_short[rows.seq] & (rank < max_prompts) & (row < max_q_len)
    if chosen_route.why_no_prompt_kernel is None:
        others = () if near is None else (prompts_over(near.cache, near.read), near.window)
        launch = prompt_kernel.Launch.of(long, options.softmax, *others)
        if not launch.reads_results:
            source = jnp.where(is_long, prompt_kernels.LEFT, source)
        result = jax.ShapeDtypeStruct(short[0].shape, short[0].dtype)
        return prompt_kernel.attend(launch, prompt_kernels.join(source, decoded, sinks, result))
    found = prompts.attend(long, options.softmax)
    return prompts.where_rows(is_long, [lax.collapse(x, 0, 2) for x in found], rank * max_q_len + row, short)
