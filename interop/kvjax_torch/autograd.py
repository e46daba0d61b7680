"""What autograd is told of the registered operations: that none has a gradient, and what each writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from kvjax_torch.arguments.checks import refuse_gradient


def tensors_of(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among arguments by name, those of lists included."""
    lists = {f"{name}[{i}]": x for name, each in given.items() if isinstance(each, list) for i, x in enumerate(each)}
    return {name: x for name, x in {**given, **lists}.items() if isinstance(x, torch.Tensor)}


def marks_writes(operation: torch._ops.OpOverload, first: int = 0) -> Callable[[Callable[..., Any]], Any]:
    """Has an implementation tell autograd what it wrote, so that a backward that needs what was there raises.

    `first` is the place of the operation's first argument.
    """
    arguments = enumerate(operation._schema.arguments, first)
    written = [(i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write]

    def marks_writes(implementation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            results = implementation(*args, **options)
            increment_version([args[i] if i < len(args) else options[name] for i, name in written])
            return results

        return run if written else implementation

    return marks_writes


def without_gradient(operation: torch._ops.OpOverload, what: str) -> Callable[..., Any]:
    """The operation under autograd, also of torch.func and of compiled code: raises where a gradient would be lost."""
    names = [argument.name for argument in operation._schema.arguments]

    @marks_writes(operation, first=1)  # of wrapped tensors, as torch.func has them; the kernel sees what they wrap
    def run(keyset: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        needs_gradient = torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **options)
        if needs_gradient or forward_ad._current_level >= 0:
            refuse_gradient(what, **tensors_of(dict(zip(names, args, strict=False)) | options))
        with torch._C._AutoDispatchBelowAutograd():
            return operation.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)

    return run
