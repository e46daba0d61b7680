"""Attention over the pages of JAX arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.kernels.attention import any_joint
from kvjax.kernels.attention.any_batch import BatchKind, any_batch, attend
from kvjax.kernels.attention.any_joint import RingArrays, joint_batch
from kvjax.kernels.attention.choice import passes
from kvjax.kernels.attention.problem import TREE_DEPTHS, DecodeConfig, ReadArrays, Softmax
from kvjax.kernels.launchable import array_memory
from kvjax.kernels.target import current
from kvjax.spec import AttentionSpec


def decode(
    query: jax.Array,
    pages: jax.Array,
    read: ReadArrays,
    spec: AttentionSpec,
    softmax: Softmax,
    *,
    num_layers: int = 1,
    config: DecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the last tokens of each sequence.

    Args:
      query: float16 or bfloat16 `[num_seqs, q_len, num_heads, head_size]`.
      pages: `[num_blocks, ...]`, the array of a cache.
      read: the other arrays.
      spec: the cache's.
      softmax: the options.
      num_layers: pages of a block, of which `read.layer` selects one.
      config: how the kernel is launched, by default `choose`'s.

    Returns:
      The output `[num_seqs, q_len, num_heads, head_size_v]` in the query's dtype and the float32 log-sum-exp
      `[num_seqs, q_len, num_heads]`.
    """

    def attend_pass(query: jax.Array, one: Pass | None) -> tuple[jax.Array, jax.Array]:
        own, options = read, softmax._replace(tree_tokens=softmax.tree_tokens or query.shape[1])
        if one is not None:
            own = one.of(read)
            if own.tree is not None:  # a token sees none that follows
                own = own._replace(tree=own.tree[:, one.tokens, : TREE_DEPTHS + -(-one.tokens.stop // 32)])
            options = softmax._replace(tree_tokens=one.tokens.stop)
        batch = any_batch(kind_of(query, spec, own, options, num_layers), current())
        return attend(batch, config or batch.config(*own.block_table.shape), (query,), pages, own)

    return _by_passes(query, spec, attend_pass)


class OneCache(NamedTuple):
    """What is read of one of two caches.

    Attributes:
      kv: `[num_blocks, ...]`, the array of the cache.
      read: the other arrays.
      spec: the cache's.
      softmax: the options.
      num_layers: pages of a block, of which `read.layer` selects one.
    """

    kv: jax.Array
    read: ReadArrays
    spec: AttentionSpec
    softmax: Softmax
    num_layers: int


def decode_both(query: jax.Array, pages: OneCache, ring: OneCache, q_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of the last tokens of each sequence over two caches, which hold different tokens.

    Args:
      query: float16 or bfloat16 `[num_seqs, q_len, num_heads, head_size]`.
      pages: a cache, and the call's sinks.
      ring: a cache of the same heads, head sizes and layer, without sinks; of the options, only masks may differ.
      q_lens: int32 `[num_seqs]`, the query tokens of each sequence, the last ones of `q_len`.

    Returns:
      As `decode`; results are undefined for query tokens that a sequence does not have.
    """

    def attend_pass(query: jax.Array, one: Pass | None) -> tuple[jax.Array, jax.Array]:
        reads, own_q_lens = [pages.read, ring.read], q_lens
        if one is not None:
            own_q_lens = jnp.clip(q_lens - (one.q_len - one.tokens.stop), 0, query.shape[1])
            reads = [one.of(each) for each in reads]
            reads = [each._replace(seq_lens=jnp.where(own_q_lens > 0, each.seq_lens, 0)) for each in reads]
        of_pages, of_ring = reads
        kinds = [
            kind_of(query, each.spec, read, each.softmax, each.num_layers)
            for each, read in zip((pages, ring), reads, strict=True)
        ]
        batch = joint_batch(kinds[0], kinds[1], current())
        (num_seqs, max_blocks), ring_blocks = of_pages.block_table.shape, of_ring.block_table.shape[1]
        config = batch.config(num_seqs, max_blocks, ring_blocks)
        arrays = RingArrays(ring.kv, of_ring.block_table, of_ring.seq_lens, own_q_lens)
        return any_joint.attend(batch, config, query, pages.kv, of_pages, arrays)

    return _by_passes(query, pages.spec, attend_pass)


class Pass(NamedTuple):
    """One of several passes over the pages of a call.

    Attributes:
      heads: the query heads of each KV head that the pass serves.
      tokens: the query tokens that it serves.
      group: query heads of a KV head.
      q_len: query tokens.
    """

    heads: slice
    tokens: slice
    group: int
    q_len: int

    def of(self, read: ReadArrays) -> ReadArrays:
        """What the pass reads; earlier query tokens are treated as the last tokens of a shorter sequence."""
        lens, sinks = read.seq_lens, read.sinks
        lens = lens if self.tokens.stop == self.q_len else jnp.maximum(lens, 0) - (self.q_len - self.tokens.stop)
        own_sinks = None if sinks is None else sinks.reshape(-1, self.group)[:, self.heads].reshape(-1)
        return read._replace(seq_lens=lens, sinks=own_sinks)


def _by_passes(
    query: jax.Array,
    spec: AttentionSpec,
    attend_pass: Callable[[jax.Array, Pass | None], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Attends in one pass (None), or in as many passes as the rows of a KV head need."""
    num_seqs, q_len, num_heads, head_size = query.shape
    group = num_heads // spec.num_kv_heads
    divided = passes(spec, group, q_len)
    if len(divided) == 1 and len(divided[0][1]) == 1:
        return attend_pass(query, None)
    by_group = query.reshape(num_seqs, q_len, spec.num_kv_heads, group, head_size)
    outs, lses = [], []
    for heads, runs in divided:
        parts = []
        for tokens in runs:
            rows = by_group[:, tokens, :, heads].reshape(num_seqs, tokens.stop - tokens.start, -1, head_size)
            parts.append(attend_pass(rows, Pass(heads, tokens, group, q_len)))
        out, lse = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
        outs.append(out.reshape(num_seqs, q_len, spec.num_kv_heads, -1, spec.head_size_v))
        lses.append(lse.reshape(num_seqs, q_len, spec.num_kv_heads, -1))
    shape = num_seqs, q_len, num_heads
    return jnp.concatenate(outs, axis=3).reshape(*shape, -1), jnp.concatenate(lses, axis=3).reshape(shape)


def kind_of(query: jax.Array, spec: AttentionSpec, read: ReadArrays, softmax: Softmax, num_layers: int) -> BatchKind:
    """What the attention of a pass is compiled for."""
    return BatchKind(
        spec,
        array_memory(spec),
        query.dtype,
        query.shape[2],
        query.shape[1],
        (read.k_scale.size, read.v_scale.size),
        softmax,
        has_sinks=read.sinks is not None,
        one_memory=True,
        num_layers=None if read.layer is None else num_layers,
        tree=None if read.tree is None else softmax.tree_tokens,
    )
