"""Rotary position embedding in torch: the bytes of `kvjax.rope_and_cache`, for calls that its kernel does not take."""

from __future__ import annotations

import torch

_LEAST_NORMAL = 2.0**-126


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Queries or keys `[num_tokens, heads, head_size]`, rotated by their positions.

    Computes in float32. Products are rounded before they are added, since torch does not fuse eager operations.
    Subnormals of float32 become zeros, and every NaN becomes the canonical one.
    """
    half = cos_sin_cache.shape[1] // 2
    rows = cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1)].to(torch.float32)[:, None]
    cos, sin = map(_normal, rows.split(half, dim=-1))
    turned = x.new_empty(x.shape).copy_(x)
    if is_neox:
        pairs = turned[..., :half], turned[..., half : 2 * half]
    else:
        pairs = turned[..., 0 : 2 * half : 2], turned[..., 1 : 2 * half : 2]
    first, second = (_normal(each.to(torch.float32)) for each in pairs)
    rotated = (
        _normal(first * cos) - _normal(second * sin),
        _normal(second * cos) + _normal(first * sin),
    )
    for pair, values in zip(pairs, rotated, strict=True):
        pair.copy_(with_canonical_nan(_normal(values).to(x.dtype)))
    return turned


def with_canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """`x` with the canonical NaN, whose bits are all ones except the sign, in place of any other NaN."""
    bits = torch.int32 if x.dtype.itemsize == 4 else torch.int16
    return x.view(bits).masked_fill(x.isnan(), torch.iinfo(bits).max).view(x.dtype)


def _normal(x: torch.Tensor) -> torch.Tensor:
    """`x` with zeros of the same sign in place of float32's subnormals."""
    return torch.where(x.abs() < _LEAST_NORMAL, torch.zeros_like(x).copysign(x), x)
