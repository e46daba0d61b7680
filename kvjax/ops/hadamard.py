"""The Hadamard rotation of queries and keys."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.errors import KVCacheValueError
from kvjax.ops.arguments import INPUT_DTYPES, check_array


def hadamard_transform(x: ArrayLike) -> jax.Array:
    """Rotates the last dimension by a normalized Hadamard matrix, which spreads an outlier over all elements.

    Rotated queries and keys have the same dot products as the original ones, so attention does not change, but keys
    with large channels may lose less in a quantized cache. Apply it after RoPE to both. Whether it helps depends on the
    model: `choose_layer_dtypes(key_rotation=True)` measures it.

    With `n` the largest power of two that divides the last dimension, each run of `n` elements becomes
    `run @ H / sqrt(n)`, where `H[i, j] = (-1) ** popcount(i & j)` (Sylvester's construction). The rotation is its own
    inverse.

    Args:
      x: float32, float16 or bfloat16 `[..., head_size]`.

    Returns:
      An array of the shape and dtype of `x`, with sums in float32.

    Raises:
      KVCacheTypeError: another dtype.
      KVCacheValueError: no dimension, or an odd `head_size`.
    """
    if not np.shape(x):
        raise KVCacheValueError("x: got shape [], expected [..., head_size]")
    check_array("x", x, [(f"dim {axis}", None) for axis in range(np.ndim(x) - 1)] + [("head_size", None)], INPUT_DTYPES)
    x = jnp.asarray(x)
    size = x.shape[-1]
    if size % 2 or not size:
        raise KVCacheValueError(f"x: got head_size={size}, expected a positive even number")
    n = size & -size
    runs = x.reshape(*x.shape[:-1], size // n, n)
    matrix, rest = _hadamard(n)
    rotated = jnp.matmul(
        runs, jnp.asarray(matrix, x.dtype), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return (rotated * rest).astype(x.dtype).reshape(x.shape)


@functools.cache
def _hadamard(n: int) -> tuple[np.ndarray, np.float32]:
    """Returns the matrix `[n, n]` times a power of two, which every dtype holds, and the rest of `n ** -0.5`.

    Sums are thus smaller than results, and overflow only where results do.
    """
    index = np.arange(n)
    signs = np.where(np.bitwise_count(index[:, None] & index) % 2, -1.0, 1.0)
    power = 2.0 ** -(n.bit_length() // 2)
    return signs * power, np.float32(n**-0.5 / power)
