"""Online softmax: the masked softmax of every attention in XLA.

Keys and values come in chunks, which bounds memory for any length. After each chunk a row has the largest logit so far,
the sum of `exp(logit - largest)`, and the sum of the values with these weights. The next chunk rescales both sums
(https://arxiv.org/abs/2205.14135, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache import KVCache
from kvjax.kernels.attention import TREE_DEPTHS, ReadArrays, Softmax
from kvjax.kernels.prompts import fp8
from kvjax.ops.gather import gather_xla, token_mask, units_of_blocks
from kvjax.spec import AttentionSpec

CHUNK_BYTES = 64 << 20
"""Limit on the keys, values and logits of a chunk together; a chunk of one block per sequence may exceed it."""

INVARIANT_TOKENS = 1024
"""Tokens in a chunk whose size must not depend on the batch; a single block may hold more."""


class Tree(NamedTuple):
    """Which query tokens rows see: `ReadArrays.tree`, the sequences' lengths, and the query tokens that it is for."""

    rows: jax.Array
    seq_lens: jax.Array
    num_tokens: int

    def sees(self, token: jax.Array, window: Any) -> jax.Array:
        """Whether rows see tokens `[num_tokens]` of their sequences, `[num_seqs, q_len, num_tokens]`.

        A window counts from a row's position: the number of tokens before the query plus the row's depth. The words
        already leave out query tokens that are not in the window.
        """
        depth, words = lax.bitcast_convert_type(self.rows[..., 0], jnp.int32), self.rows[..., TREE_DEPTHS:]
        number = token[None, :] - (self.seq_lens[:, None] - self.num_tokens)
        word = jnp.clip(number // 32, 0, words.shape[2] - 1)
        found = jnp.take_along_axis(words, word[:, None, :], axis=2)
        bit = (found >> (number % 32).astype(jnp.uint32)[:, None, :]) & 1
        in_window = True if window is None else depth[:, :, None] - number[:, None, :] < window
        return jnp.where((number < 0)[:, None, :], in_window, bit != 0)


class TokenChunks(NamedTuple):
    """The tokens of sequences, in chunks.

    Attributes:
      number: at least 1.
      read: returns a chunk by number: keys `[num_seqs, size, num_kv_heads, head_size]`, values and the mask of existing
        tokens, bool `[num_seqs, size]`; the chunk's tokens are at positions from `number * size` on.
      tree: what rows see of the query tokens; None if they see all that are not later.
      is_seen: whether a row sees a token of a chunk, by number; a chunk of which no row does is skipped. None if each
        is read.
    """

    number: int
    read: Callable[[jax.Array | int], tuple[jax.Array, jax.Array, jax.Array]]
    tree: Tree | None = None
    is_seen: Callable[[jax.Array], jax.Array] | None = None


class InFp8(NamedTuple):
    """Which sequences are attended to with the roundings of fp8 products.

    Attributes:
      is_any: bool `[num_seqs]`.
      first: int32 `[num_seqs]`, the first token that a row of the sequence sees.
    """

    is_any: jax.Array
    first: jax.Array


class PartialSoftmax(NamedTuple):
    """Per row, `[num_seqs, num_kv_heads, num_rows, group]`: the result of the chunks so far, in float32.

    `total` and `weighted` are in units of `_unit`.
    """

    largest: jax.Array
    total: jax.Array
    weighted: jax.Array


def sinks_of_heads(sinks: jax.Array | None, num_heads: int) -> jax.Array:
    """Returns the sink of each head, `[num_heads]`; -inf adds 0 to a denominator."""
    return jnp.full(num_heads, -jnp.inf, jnp.float32) if sinks is None else sinks


def attend(
    query: jax.Array,
    chunks: TokenChunks,
    positions: jax.Array,
    sinks: jax.Array | None,
    spec: AttentionSpec,
    softmax: Softmax,
    is_fp8: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends with each row, at its position, to the tokens of its sequence up to there.

    Products are of the keys' and values' dtype, summed in float32; in float32 with "highest" precision.

    Args:
      query: `[num_seqs, num_rows, num_heads, head_size]`.
      chunks: keys and values.
      positions: int32 `[num_seqs, num_rows]`; a row below 0 attends to nothing.
      sinks: float32 `[num_heads]`, -inf for a head without one; None for no sinks.
      spec: of the cache that they are of.
      softmax: the options.
      is_fp8: bool `[num_seqs]`, the sequences whose query and weights are rounded as fp8 products round them, like
        their keys and values; None for none.

    Returns:
      float32 `[num_seqs, num_rows, num_heads, head_size_v]` and `[num_seqs, num_rows, num_heads]`.
    """
    num_seqs, num_rows, num_heads, head_size = query.shape
    num_kv_heads, head_size_v, cap = spec.num_kv_heads, spec.head_size_v, softmax.logits_soft_cap
    group = num_heads // num_kv_heads
    grouped = jnp.swapaxes(query.reshape(num_seqs, num_rows, num_kv_heads, group, head_size), 1, 2)
    sink = sinks_of_heads(sinks, num_heads).reshape(1, num_kv_heads, 1, group)
    of_rows = None
    if is_fp8 is not None:
        grouped = jnp.where(is_fp8[:, None, None, None, None], fp8.rounded_rows(grouped), grouped.astype(jnp.float32))
        of_rows = is_fp8[:, None, None, None]

    first = chunks.read(0)
    unit = _unit(chunks.number * first[0].shape[1], first[1].dtype)

    def step(
        state: PartialSoftmax, number: jax.Array | int, chunk: tuple[jax.Array, jax.Array, jax.Array]
    ) -> PartialSoftmax:
        keys, values, there = chunk
        precision = "highest" if keys.dtype == np.float32 else None
        token = number * keys.shape[1] + jnp.arange(keys.shape[1])
        age = positions[:, :, None] - token[None, None, :]
        seen = (age >= 0) & there[:, None, :]
        if chunks.tree is not None:
            seen &= chunks.tree.sees(token, softmax.window)
        elif softmax.window is not None:
            seen &= age < softmax.window
        # Masked values may be NaN, which a weight of 0 does not remove.
        values = jnp.where(seen.any(axis=1)[:, :, None, None], values, jnp.zeros((), values.dtype))
        logits = softmax.sm_scale * jnp.einsum(
            "shqgd,sthd->shqgt",
            grouped.astype(keys.dtype),
            keys,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        if cap is not None:
            logits = cap * jnp.tanh(logits / cap)
        logits = jnp.where(seen[:, None, :, None, :], logits, -jnp.inf)
        largest = jnp.max(logits, axis=-1, initial=-jnp.inf)
        if of_rows is not None:
            largest = jnp.where(of_rows, fp8.power_above(largest), largest)
        largest = jnp.maximum(state.largest, largest)
        shift = jnp.where(largest == -jnp.inf, 0.0, largest)  # -inf if nothing is unmasked: inf - inf would be NaN
        kept, weights = jnp.exp(state.largest - shift), jnp.exp(logits - shift[..., None])
        if of_rows is not None:
            weights = jnp.where(of_rows[..., None], fp8.rounded_weights(weights), weights)
        weights *= unit
        weighted = jnp.einsum(
            "shqgt,sthd->shqgd",
            weights.astype(values.dtype),
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return PartialSoftmax(
            largest, state.total * kept + jnp.sum(weights, axis=-1), state.weighted * kept[..., None] + weighted
        )

    shape = grouped.shape[:-1]
    first_largest = sink if of_rows is None else jnp.where(of_rows, fp8.power_above(sink), sink)
    nothing = PartialSoftmax(
        jnp.broadcast_to(first_largest, shape),  # a sink is a logit without a value
        jnp.broadcast_to(jnp.where(sink == -jnp.inf, 0.0, jnp.exp(sink - first_largest) * unit), shape),
        jnp.zeros((*shape, head_size_v), jnp.float32),
    )
    # The first chunk is outside the loop: its result has the type that the loop carries, under shard_map too.
    state = step(nothing, 0, first)
    if chunks.number > 1:

        def next_step(state: PartialSoftmax, number: jax.Array) -> tuple[PartialSoftmax, None]:
            if chunks.is_seen is None:
                return step(state, number, chunks.read(number)), None
            is_seen = chunks.is_seen(number)
            return lax.cond(is_seen, lambda: step(state, number, chunks.read(number)), lambda: state), None

        state, _ = lax.scan(next_step, state, jnp.arange(1, chunks.number))
    is_none = state.total == 0.0
    total = jnp.where(is_none, 1.0, state.total)  # the gradient of log(0) would be NaN
    out = state.weighted / total[..., None]
    lse = jnp.where(is_none, -jnp.inf, state.largest + jnp.log(total / unit))
    out, lse = jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)
    return out.reshape(num_seqs, num_rows, num_heads, head_size_v), lse.reshape(num_seqs, num_rows, num_heads)


def _unit(num_tokens: int, dtype: np.dtype[Any]) -> np.float32:
    """Returns the power of two that a weight of 1 is represented by, so that no sum of weighted values overflows.

    The weights of all tokens and a sink add up to at most 1. Products with a power of two are exact, so that no bits
    of results depend on it. Sums of float16 do not overflow float32, and small weights would underflow in float16.
    """
    return np.float32(1.0 if dtype == np.float16 else 2.0 ** -num_tokens.bit_length())


def attend_pages(
    cache: KVCache,
    query: jax.Array,
    positions: jax.Array,
    arrays: ReadArrays,
    softmax: Softmax,
    in_fp8: InFp8 | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Calls `attend` on the pages of a cache of one layer, decoded to float32, and rounded where `in_fp8` says.

    The layer in `arrays` is not read; the other arguments are those of `attend`. With `batch_invariant` the size of
    chunks does not depend on the number and the lengths of sequences.
    """
    spec = cache.spec
    block_table, seq_lens, _, k_scale, v_scale, sinks, tree = arrays
    num_seqs, max_blocks = block_table.shape
    size = blocks_per_chunk(
        max_blocks, spec.block_size * num_seqs * 4 * (_token_elements(cache) + query.shape[1] * query.shape[2])
    )
    if softmax.batch_invariant:
        size = max(1, INVARIANT_TOKENS // spec.block_size)
    num_chunks = max(1, -(-max_blocks // size))
    table = jnp.pad(block_table, ((0, 0), (0, num_chunks * size - max_blocks)), constant_values=-1)

    units = None if in_fp8 is None else units_of_blocks(cache, block_table, jnp.maximum(seq_lens, 0), in_fp8.first)

    def read(number: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        blocks = lax.dynamic_slice_in_dim(table, number * size, size, axis=1)
        lengths = jnp.maximum(seq_lens, 0) - number * (size * spec.block_size)
        scales = (k_scale, v_scale) if in_fp8 is None else (jnp.float32(1.0), jnp.float32(1.0))
        stored = gather_xla(cache, blocks, lengths, None, *scales, dtype=np.dtype(np.float32))
        if in_fp8 is not None and units is not None:
            keys, values = (
                jnp.where(in_fp8.is_any[:, None, None, None], fp8.rounded(x, unit[:, None, :, None]), x) * scale
                for x, unit, scale in zip(stored, units, (k_scale, v_scale), strict=True)
            )
            stored = keys, values
        keys, values = _of_latents(*stored) if spec.is_mla else stored
        return keys, values, token_mask(blocks, lengths, cache.num_blocks, spec.block_size)

    own_tree = None if tree is None else Tree(tree, seq_lens, softmax.tree_tokens or query.shape[1])
    own = TokenChunks(num_chunks, read, own_tree)
    return attend(query, own, positions, sinks, spec, softmax, in_fp8 and in_fp8.is_any)


def _of_latents(latents: jax.Array, rope_keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values: latents are the values, and with the rope keys the keys."""
    return jnp.concatenate([latents, rope_keys], axis=-1), latents


def one_by_one(
    attend: Callable[..., tuple[jax.Array, jax.Array]], sequences: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Calls `attend` on one sequence at a time.

    The summation order of a batched product may depend on the size of the batch.
    """
    out, lse = lax.map(lambda one: attend(*(x[None] for x in one)), tuple(sequences))
    return out[:, 0], lse[:, 0]


def _token_elements(cache: KVCache) -> int:
    return cache.spec.num_kv_heads * (cache.spec.head_size + cache.spec.head_size_v)


def blocks_per_chunk(max_blocks: int, block_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Returns the blocks of each sequence in a chunk, at least 1, where one block of each takes `block_bytes`."""
    return max(1, min(max_blocks, chunk_bytes // max(block_bytes, 1)))
