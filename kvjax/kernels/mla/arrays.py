"""Attention over the latents in the pages of a JAX array."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.kernels.aliases import DType
from kvjax.kernels.attention.any_batch import BatchKind, attend
from kvjax.kernels.attention.problem import DecodeConfig, ReadArrays, Softmax
from kvjax.kernels.launchable import array_memory
from kvjax.kernels.mla.any_batch import any_batch
from kvjax.kernels.mla.launch import Config
from kvjax.kernels.mla.tiles import operand_dtypes
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
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the last tokens of each sequence.

    Args:
      query: float16 or bfloat16 `[num_seqs, q_len, num_heads, head_size]`.
      pages: `[num_blocks, ...]`, the array of a cache.
      read: the other arrays, without sinks.
      spec: the cache's.
      softmax: the options.
      num_layers: pages of a block, of which `read.layer` selects one.
      config: how the kernel is launched, by default `choose`'s.

    Returns:
      The output `[num_seqs, q_len, num_heads, kv_lora_rank]` in the query's dtype and the float32 log-sum-exp
      `[num_seqs, q_len, num_heads]`.
    """
    _, q_len, num_heads, _ = query.shape
    kind = BatchKind(
        spec,
        array_memory(spec),
        query.dtype,
        num_heads,
        q_len,
        (1, 1),
        softmax,
        one_memory=True,
        num_layers=None if read.layer is None else num_layers,
    )
    batch = any_batch(kind, current())
    config = config or batch.config(*read.block_table.shape)
    # If the parts were concatenated in the same program, XLA removes both the concatenation and this split.
    parts = [part for part in jnp.split(query, [spec.head_size_v], axis=-1) if part.shape[-1]]
    if not isinstance(config, DecodeConfig):
        parts = [_converted(part, dtype) for part, dtype in zip(parts, operand_dtypes(spec), strict=False)]
    return attend(batch, config, tuple(parts), pages, read)


def _converted(query: jax.Array, dtype: DType) -> jax.Array:
    """The query in the dtype of products, clamped to its range."""
    if query.dtype == dtype:
        return query
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(query.astype(jnp.float32), -most, most).astype(dtype)
