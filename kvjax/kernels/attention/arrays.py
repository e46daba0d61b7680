"""Attention over the pages of a JAX array."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.kernels.attention.any_batch import BatchKind, any_batch, attend
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
    num_seqs, q_len, num_heads, head_size = query.shape
    group = num_heads // spec.num_kv_heads
    block_table, seq_lens, layer, k_scale, v_scale, sinks, tree = read
    divided = passes(spec, group, q_len)
    if len(divided) > 1 or len(divided[0][1]) > 1:
        by_group = query.reshape(num_seqs, q_len, spec.num_kv_heads, group, head_size)
        outs, lses = [], []
        for heads, runs in divided:
            parts = []
            own_sinks = None if sinks is None else sinks.reshape(-1, group)[:, heads].reshape(-1)
            for tokens in runs:  # earlier query tokens are the last tokens of a shorter sequence
                rows = by_group[:, tokens, :, heads].reshape(num_seqs, tokens.stop - tokens.start, -1, head_size)
                lens = seq_lens if tokens.stop == q_len else jnp.maximum(seq_lens, 0) - (q_len - tokens.stop)
                own = read._replace(seq_lens=lens, sinks=own_sinks)
                if tree is not None:  # a token sees none that follows
                    own = own._replace(tree=tree[:, tokens, : TREE_DEPTHS + -(-tokens.stop // 32)])
                options = softmax._replace(tree_tokens=tokens.stop)
                parts.append(decode(rows, pages, own, spec, options, num_layers=num_layers))
            out, lse = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
            outs.append(out.reshape(num_seqs, q_len, spec.num_kv_heads, -1, spec.head_size_v))
            lses.append(lse.reshape(num_seqs, q_len, spec.num_kv_heads, -1))
        shape = num_seqs, q_len, num_heads
        return jnp.concatenate(outs, axis=3).reshape(*shape, -1), jnp.concatenate(lses, axis=3).reshape(shape)
    kind = BatchKind(
        spec,
        array_memory(spec),
        query.dtype,
        num_heads,
        q_len,
        (k_scale.size, v_scale.size),
        softmax,
        has_sinks=sinks is not None,
        one_memory=True,
        num_layers=None if layer is None else num_layers,
        tree=None if tree is None else softmax.tree_tokens or q_len,
    )
    batch = any_batch(kind, current())
    return attend(batch, config or batch.config(*block_table.shape), (query,), pages, read)
