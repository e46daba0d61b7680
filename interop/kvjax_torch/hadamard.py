"""The Hadamard rotation of queries and keys, as `kvjax.hadamard_transform`."""

from __future__ import annotations

import contextlib
import functools

import torch

from kvjax import KVCacheTypeError, KVCacheValueError
from kvjax_torch.arguments.checks import check_tensors, is_fake
from kvjax_torch.arguments.dtypes import INPUT_DTYPES


def hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    """Rotates the last dimension by a normalized Hadamard matrix, with the values of `kvjax.hadamard_transform`.

    Apply it after RoPE to queries and to keys: their products do not change. The rotation is its own inverse.

    Args:
      x: float32, float16 or bfloat16 `[..., head_size]`. Gradients pass through.

    Returns:
      A tensor of the shape and dtype of `x`, with sums in at least float32, whatever precision torch is set to use.

    Raises:
      KVCacheTypeError: another dtype, or no tensor.
      KVCacheValueError: no dimension, or an odd `head_size`.
    """
    check_tensors(x=x)
    if x.dtype not in INPUT_DTYPES:
        raise KVCacheTypeError(f"x: got dtype {x.dtype}, expected {' or '.join(map(str, INPUT_DTYPES))}")
    if not x.ndim:
        raise KVCacheValueError("x: got shape [], expected [..., head_size]")
    size = x.shape[-1]
    if size % 2 or not size:
        raise KVCacheValueError(f"x: got head_size={size}, expected a positive even number")
    n = 2
    while size % (2 * n) == 0:  # torch.compile has no `size & -size` of a size that varies
        n *= 2
    # Products of bfloat16 are exact in whatever torch uses for float32, TF32 too; those of other dtypes are not.
    wide = torch.float32 if x.dtype == torch.bfloat16 else torch.float64
    matrix = (_hadamard if is_fake(x) else _kept_hadamard)(n, wide, x.device)
    exact = contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
    with exact:
        rotated = x.unflatten(-1, (size // n, n)).to(wide) @ matrix
        return (rotated * (n**-0.5 / _power(n))).to(x.dtype).flatten(-2)


def _power(n: int) -> float:
    """A power of two of at most `n ** -0.5`: sums of products with it overflow only where results do."""
    return 2.0 ** -(n.bit_length() // 2)


def _hadamard(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The matrix `[n, n]` of 1 and -1 by Sylvester's construction, times `_power(n)`."""
    with torch.inference_mode(False):  # else no gradient could pass it later
        matrix = torch.full((1, 1), _power(n), dtype=dtype)
        while len(matrix) < n:
            matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
        return matrix.to(device)


_kept_hadamard = functools.cache(_hadamard)
