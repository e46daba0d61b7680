"""`merge_attention_states` on torch tensors: the definition of `kvjax.merge_attention_states`, in torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kvjax import KVCacheTypeError, KVCacheValueError
from kvjax.ops.options import kind_of
from kvjax_torch.arguments.checks import check_tensors
from kvjax_torch.arguments.dtypes import INPUT_DTYPES


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attention_states` of lists of parts.

    Raises:
      KVCacheValueError, KVCacheTypeError: no part, or an invalid shape, dtype or device.
    """
    check(outs, lses)
    largest = functools.reduce(torch.maximum, lses)
    shift = torch.where(largest == -torch.inf, 0.0, largest)  # inf - inf would be NaN
    weights = [torch.exp(lse - shift) for lse in lses]
    total = functools.reduce(torch.add, weights)
    # Divided first: the mean of large outputs is finite, their sum may not be.
    divisor = torch.where(total == 0.0, 1.0, total)
    # A part without weight may be NaN.
    weighted = [
        torch.where((lse == -torch.inf)[..., None], 0.0, (weight / divisor)[..., None] * out.to(torch.float32))
        for out, lse, weight in zip(outs, lses, weights, strict=True)
    ]
    merged, lse = functools.reduce(torch.add, weighted).to(outs[0].dtype), shift + torch.log(total)
    return merged.contiguous(), lse.contiguous()  # sums have the strides of what is summed


def as_parts(what: str, parts: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts as a list, also of a stacked tensor.

    Raises:
      KVCacheValueError, KVCacheTypeError: no part, or neither tensors nor a tensor with a dimension of parts.
    """
    if isinstance(parts, torch.Tensor):
        check_tensors(**{what: parts})
        if not parts.ndim:
            raise KVCacheValueError(f"{what}: got shape (), expected [num_parts, ...]")
        parts = parts.unbind()
    if not isinstance(parts, (list, tuple)):
        raise KVCacheTypeError(f"{what}: got {kind_of(parts)}, expected a tensor or a sequence of tensors")
    _check_any(what, parts)  # torch's dispatcher cannot tell the device of an empty list
    check_tensors(**{f"{what}[{i}]": part for i, part in enumerate(parts)})
    return list(parts)


def check(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> None:
    """Raises unless parts can be merged."""
    for what, parts, dtypes in (("outs", outs, INPUT_DTYPES), ("lses", lses, (torch.float32,))):
        _check_any(what, parts)
        for i, part in enumerate(parts):
            if part.dtype not in dtypes:
                accepted = " or ".join(map(str, dtypes))
                raise KVCacheTypeError(f"{what}[{i}]: got dtype {part.dtype}, expected {accepted}")
            if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
                raise KVCacheValueError(
                    f"{what}[{i}]: got {part.dtype}{list(part.shape)}, expected"
                    f" {parts[0].dtype}{list(parts[0].shape)} as {what}[0]"
                )
            if part.device != outs[0].device:
                raise KVCacheValueError(
                    f"{what}[{i}]: got device {part.device}, expected {outs[0].device}, that of outs[0]"
                )
    shape = tuple(outs[0].shape)
    if len(shape) < 2:
        raise KVCacheValueError(f"outs[0]: got shape {shape}, expected [..., num_heads, head_size_v]")
    if (len(lses), *lses[0].shape) != (len(outs), *shape[:-1]):
        raise KVCacheValueError(
            f"lses: got shape {(len(lses), *lses[0].shape)}, expected {(len(outs), *shape[:-1])}, that of outs without"
            " its last dimension"
        )


def _check_any(what: str, parts: Sequence[torch.Tensor]) -> None:
    if not parts:
        raise KVCacheValueError(f"{what}: got no parts, expected at least one")
