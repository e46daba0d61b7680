"""How public operations call the registered ones.

torch's dispatcher takes as long as the rest of a call. It is skipped if nothing observes operations, and so are checks
and plans of a call like an earlier one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

import kvjax
from kvjax.ops.options import as_bool
from kvjax_torch import library
from kvjax_torch.arguments.checks import are_plain
from kvjax_torch.launch import tape


def launches_kernels(*tensors: torch.Tensor) -> bool:
    """Whether an operation on these tensors launches kernels itself; others go through torch's dispatcher."""
    return tensors[0].is_cuda and are_plain(*tensors)


def call(operation: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Calls an operation of `torch.ops.kvjax` with its positional arguments and all its options, in their order."""
    arguments = [*given, *options.values()]
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    if not launches_kernels(*tensors) or kvjax.is_checked():
        return operation.default(*given, **options)
    kernel, written = library.IMPLEMENTATIONS[operation]
    results = tape.call(functools.partial(kernel, *given, **options), [kernel, *arguments], written)
    return results if len(results) > 1 else results[0] if results else None


def call_attention(
    operations: tuple[Any, Any],
    given: tuple[Any, ...],
    options: Mapping[str, Any],
    out: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Calls the first of two operations, or the second one, which stores its results in `out`."""
    return_lse = as_bool("return_lse", return_lse)
    attend, attend_into = operations
    if out is None:
        out, lse = call(attend, given, options)
    else:
        lse = call(attend_into, (out, *given), options)
    return (out, lse) if return_lse else out
