"""Query tokens that are a tree: masks of them, checked, and as the arrays that implementations take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.kernels.attention import TREE_DEPTHS
from kvjax.ops.arguments import check_array
from kvjax.ops.prompts import RowSequences


def as_tree_mask(tree_mask: ArrayLike, num_seqs: int, size: tuple[str, int | None]) -> jax.Array:
    """Returns a mask of all sequences, bool `[num_seqs, tokens, tokens]`, without tokens that follow a row's own.

    `size` names the number of query tokens that it is for, and gives it if it is known.
    """
    name, number = size
    if number is None and np.ndim(tree_mask):
        number = np.shape(tree_mask)[-1]
    dims: list[tuple[str, int | None]] = [(name, number), (name, number)]
    if np.ndim(tree_mask) == 3:
        dims.insert(0, ("num_seqs", num_seqs))
    check_array("tree_mask", tree_mask, dims, (np.dtype(bool),))
    mask = jnp.asarray(tree_mask)
    return jnp.broadcast_to(mask, (num_seqs, *mask.shape[-2:])) & np.tri(mask.shape[-1], dtype=bool)


def tree_words(mask: jax.Array, window: int | jax.Array | None) -> jax.Array:
    """Returns a mask of `as_tree_mask` as `kernel.ReadArrays.tree`."""
    depth = _depths(mask)
    return _words(mask, depth, depth[:, None, :], jnp.zeros_like(depth), window)


def words_of_rows(
    mask: jax.Array, q_starts: jax.Array, q_ends: jax.Array, num_tokens: int, window: int | jax.Array | None
) -> jax.Array:
    """Returns `kernel.ReadArrays.tree` for each row of a ragged query, `[num_tokens, 2 + words]`.

    It covers as many last tokens of a sequence as `mask`, `[num_seqs, tokens, tokens]`, has query tokens. If a sequence
    has fewer, the first are context, which is a chain. A sequence with more has no tree: it is a chain, too.
    """
    most = mask.shape[-1]
    if not num_tokens or not len(mask) or not most:  # which JAX cannot index
        return jnp.zeros((num_tokens, TREE_DEPTHS + -(-most // 32)), jnp.uint32)
    seq = RowSequences.of(num_tokens, q_starts, q_ends).seq
    q_len = (q_ends - q_starts)[seq]
    row = jnp.arange(num_tokens) - q_starts[seq]
    first = most - q_len
    column = jnp.arange(most) - first[:, None]  # the query tokens by number, negative in the context
    own, at = jnp.clip(row, 0, most - 1), jnp.clip(column, 0, most - 1)
    of_tree = (q_len <= most)[:, None] & (column >= 0)
    depths = _depths(mask)[seq]
    seen = jnp.where(of_tree, jnp.take_along_axis(mask[seq, own], at, axis=1), column <= row[:, None])
    depth = jnp.where(q_len <= most, jnp.take_along_axis(depths, own[:, None], axis=1)[:, 0], row)
    of_columns = jnp.where(of_tree, jnp.take_along_axis(depths, at, axis=1), column)
    return _words(seen, first + depth, first[:, None] + of_columns, first, window)


def packed_words(of_rows: jax.Array, index: jax.Array, is_row: jax.Array) -> jax.Array:
    """Returns `of_rows[index]`, `[num_seqs, tokens, 2 + words]`, where a sequence has a row.

    Rows of padding precede the others. They are at the position of the first real row: tokens further back may be NaN.
    """
    first = jnp.sum(~is_row, axis=1, dtype=jnp.uint32)[:, None, None]
    padding = jnp.where(np.arange(of_rows.shape[1]) < TREE_DEPTHS, first, jnp.uint32(0))
    return jnp.where(is_row[..., None], of_rows[index], padding)


def _depths(mask: jax.Array) -> jax.Array:
    """Returns of each query token the number of those before it that it sees."""
    return jnp.sum(mask & np.tri(mask.shape[-1], k=-1, dtype=bool), axis=-1, dtype=jnp.int32)


def _words(
    seen: jax.Array, depth: jax.Array, of_tokens: jax.Array, first: jax.Array, window: int | jax.Array | None
) -> jax.Array:
    """Returns rows' depths, those of their sequences' first rows, and the bits of what they see of tokens in a window.

    `of_tokens` are the depths of the tokens.
    """
    if window is not None:
        seen &= jnp.maximum(depth[..., None] - of_tokens, 0) < window
    padded = jnp.pad(seen, [(0, 0)] * (seen.ndim - 1) + [(0, -seen.shape[-1] % 32)])
    words = padded.reshape(*seen.shape[:-1], padded.shape[-1] // 32, 32)
    bits = words.astype(jnp.uint32) << np.arange(32, dtype=np.uint32)
    numbers = lax.bitcast_convert_type(jnp.stack([depth, first], axis=-1), jnp.uint32)
    return jnp.concatenate([numbers, jnp.sum(bits, axis=-1, dtype=jnp.uint32)], axis=-1)
