"""The rounding of products in fp8, as `kvjax.kernels.prompts.fp8` defines it, for float32 tensors.

So attention on CPU tensors has the errors of the kernel, except those of its sums.
"""

from __future__ import annotations

import math

import torch

_LARGEST = torch.finfo(torch.float8_e4m3fn).max

_WEIGHTS = 256.0
"""What weights are multiplied by before they are rounded."""

_LOG2_E = math.log2(math.e)


def unit_above(scales: torch.Tensor) -> torch.Tensor:
    """The power of two that NVFP4 is divided by, given the bytes of the largest block scale."""
    exponent = (scales.to(torch.int32) >> 3) - 12
    return ((exponent + 127) << 23).view(torch.float32)


def rounded(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Keys or values without their layer's scale."""
    return _to_e4m3(x / unit) * unit


def rounded_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a query, along the last dimension."""
    rows = rows.float()
    exponent = (rows.abs().amax(-1, keepdim=True).view(torch.int32) >> 23).clamp(min=8)  # biased
    power = ((exponent - 7) << 23).view(torch.float32)
    return _to_e4m3(rows / power) * power


def power_above(logits: torch.Tensor) -> torch.Tensor:
    """Rounds logits up to natural logarithms of powers of two."""
    return (logits * _LOG2_E).ceil() / _LOG2_E


def rounded_weights(weights: torch.Tensor) -> torch.Tensor:
    """Weights of at most 1, relative to a power of two."""
    return _to_e4m3(weights * _WEIGHTS) / _WEIGHTS


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float()
