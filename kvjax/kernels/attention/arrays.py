"""Attention over the pages of a JAX array."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels.aliases import Ref
from kvjax.kernels.attention.choice import array_memory, choose, passes, restricting
from kvjax.kernels.attention.launch import decode_kernel, merge_kernel, run_decode, run_merge, workspace
from kvjax.kernels.attention.problem import (
    DecodeConfig,
    Problem,
    ReadArrays,
    Refs,
    Softmax,
)
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
      pages: `[num_blocks * num_layers, page_elements]`, the pages of a block side by side.
      read: the other arrays.
      spec: the cache's.
      softmax: the options.
      num_layers: pages of a block.
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
                    own = own._replace(tree=tree[:, tokens, : -(-tokens.stop // 32)])
                options = softmax._replace(tree_tokens=tokens.stop)
                parts.append(decode(rows, pages, own, spec, options, num_layers=num_layers))
            out, lse = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
            outs.append(out.reshape(num_seqs, q_len, spec.num_kv_heads, -1, spec.head_size_v))
            lses.append(lse.reshape(num_seqs, q_len, spec.num_kv_heads, -1))
        shape = num_seqs, q_len, num_heads
        return jnp.concatenate(outs, axis=3).reshape(*shape, -1), jnp.concatenate(lses, axis=3).reshape(shape)
    target = current()
    problem = Problem(
        spec=spec,
        memory=array_memory(spec),
        query_dtype=query.dtype,
        q_len=q_len,
        num_heads=num_heads,
        num_seqs=num_seqs,
        max_blocks=block_table.shape[1],
        table_stride=block_table.shape[1],
        query_strides=(q_len * num_heads * head_size, num_heads * head_size),
        num_blocks=pages.shape[0] // num_layers,
        num_layers=num_layers,
        has_layer=layer is not None,
        sm_scale=softmax.sm_scale,
        window=restricting(softmax.window, q_len),
        logits_soft_cap=softmax.logits_soft_cap,
        scale_sizes=(k_scale.size, v_scale.size),
        one_memory=True,
        has_sinks=sinks is not None,
        batch_invariant=softmax.batch_invariant,
        converts_e2m1=target.converts_e2m1,
        tree=None if tree is None else softmax.tree_tokens or q_len,
    )
    # Placeholders for an absent layer, absent sinks and no tree, which the kernel does not read.
    number, sinks = seq_lens if layer is None else layer.reshape(1), k_scale.reshape(-1) if sinks is None else sinks
    tree = lax.bitcast_convert_type(seq_lens, jnp.uint32) if tree is None else tree
    return _attend(
        problem,
        config or choose(problem, target),
        query,
        pages,
        block_table,
        seq_lens,
        number,
        k_scale,
        v_scale,
        sinks,
        tree,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers of a program
def _attend(
    problem: Problem, config: DecodeConfig, query: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    spec = problem.spec
    rows = problem.num_seqs * problem.q_len * problem.num_heads
    out_types = (
        jax.ShapeDtypeStruct((rows * spec.head_size_v,), query.dtype),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        *workspace(problem, config),
    )
    pages, block_table, seq_lens, layer, k_scale, v_scale, sinks, tree = arrays

    def decode_body(*refs: Ref) -> None:
        query, pages, *others, buffer, barriers = refs
        run_decode(problem, config, Refs(query, (pages, pages), *others), buffer, barriers)

    kernel = decode_kernel(decode_body, problem, config, out_types)
    out, lse, partial, partial_lse, spans = kernel(
        query.reshape(-1), pages, block_table.reshape(-1), seq_lens, layer, k_scale.reshape(-1), v_scale.reshape(-1),
        sinks, tree.reshape(-1),
    )  # fmt: skip
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)

    def merge_body(*refs: Ref) -> None:
        seq_lens, sinks, partial, partial_lse, spans, out, lse, *shared = refs
        known = {"partial": partial, "partial_lse": partial_lse, "spans": spans, "out": out, "lse": lse}
        run_merge(problem, config, Refs(seq_lens=seq_lens, sinks=sinks, **known), shared)

    merge = merge_kernel(merge_body, problem, config, seq_lens.shape[0])
    merge(seq_lens, sinks, partial, partial_lse, spans, out_ref, lse_ref)
    shape = problem.num_seqs, problem.q_len, problem.num_heads
    return jax.freeze(out_ref).reshape(*shape, spec.head_size_v), jax.freeze(lse_ref).reshape(shape)
