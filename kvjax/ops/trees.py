"""Query tokens that are a tree: masks of them, checked, and as the arrays that implementations take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.ops.arguments import check_array


def as_tree_mask(tree_mask: ArrayLike, num_seqs: int, q_len: int) -> jax.Array:
    """Returns a mask of all sequences, bool `[num_seqs, q_len, q_len]`, without tokens that follow a row's own."""
    dims: list[tuple[str, int | None]] = [("q_len", q_len), ("q_len", q_len)]
    if np.ndim(tree_mask) == 3:
        dims.insert(0, ("num_seqs", num_seqs))
    check_array("tree_mask", tree_mask, dims, (np.dtype(bool),))
    return jnp.broadcast_to(jnp.asarray(tree_mask), (num_seqs, q_len, q_len)) & np.tri(q_len, dtype=bool)


def tree_words(mask: jax.Array, window: int | jax.Array | None) -> jax.Array:
    """Returns a mask of `as_tree_mask` as `kernel.ReadArrays.tree`, without query tokens that are before the window.

    A query token's depth is the number of query tokens before it that it sees, and its position that much after the
    sequence's tokens before the query.
    """
    q_len = mask.shape[-1]
    depth = jnp.sum(mask & np.tri(q_len, k=-1, dtype=bool), axis=-1, dtype=jnp.int32)
    if window is not None:
        mask &= jnp.maximum(depth[..., :, None] - depth[..., None, :], 0) < window
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, -q_len % 32))).reshape(*mask.shape[:2], -1, 32)
    words = jnp.sum(bits.astype(jnp.uint32) << np.arange(32, dtype=np.uint32), axis=-1, dtype=jnp.uint32)
    return jnp.concatenate([depth[..., None].astype(jnp.uint32), words], axis=-1)
