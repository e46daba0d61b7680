"""Kernels as JSON: the function that makes one, and its arguments, the same in every process.

Anything without such a form is refused, for example an object identified by its address or a function's source.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.kernels.launchable import AnyCount, Origin

_PACKAGE = "kvjax."


class NoStableFormError(ValueError):
    """A part of a kernel's description has no form that is the same in every process."""


def encode_kernel(kernel: AnyCount) -> Any:
    """A form of a kernel for `json.dumps`, from which `decode_kernel` makes it again.

    Raises:
      NoStableFormError: the kernel does not say what made it, or some of that has no stable form.
    """
    if kernel.origin is None:
        raise NoStableFormError("a kernel that does not say what made it")
    arguments = {name: encode(value) for name, value in kernel.origin.arguments.items()}
    return {"function": kernel.origin.function, "arguments": arguments}


def decode_kernel(encoded: Mapping[str, Any]) -> AnyCount:
    """The kernel that `encode_kernel` was given, made again."""
    arguments = {name: decode(value) for name, value in encoded["arguments"].items()}
    kernel: AnyCount = Origin(encoded["function"], arguments).make()
    return kernel


def encode(value: Any) -> Any:
    """A value of plain types, dtypes, and enumerations, named tuples and data classes of kvjax, for `json.dumps`.

    Raises:
      NoStableFormError: it is, or contains, something else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.dtype):
        return {"dtype": _dtype_name(value)}
    if isinstance(value, enum.Enum):
        return {"enum": _name_of(type(value)), "member": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": _name_of(type(value)), "fields": fields}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {"class": _name_of(type(value)), "fields": {name: encode(x) for name, x in value._asdict().items()}}
    if type(value) is tuple:
        return [encode(x) for x in value]
    raise NoStableFormError(f"{value!r} of type {type(value).__name__}")


def decode(encoded: Any) -> Any:
    """The value that `encode` was given."""
    if isinstance(encoded, list):
        return tuple(map(decode, encoded))
    if not isinstance(encoded, dict):
        return encoded
    if "dtype" in encoded:
        return np.dtype(encoded["dtype"])
    if "enum" in encoded:
        return _named(encoded["enum"])[encoded["member"]]
    kind = _named(encoded["class"])
    # Fields that others determine, such as the head sizes of latents, are not arguments.
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    derived = {field.name for field in fields if not field.init}
    return kind(**{name: decode(x) for name, x in encoded["fields"].items() if name not in derived})


def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.names is not None or np.dtype(dtype.name) != dtype:  # of structures and of other byte orders
        raise NoStableFormError(f"dtype {dtype!r}")
    return dtype.name


def _name_of(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not name.startswith(_PACKAGE) or "<" in name:
        raise NoStableFormError(f"an object of {name}")
    return name


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module.startswith(_PACKAGE):
        raise ValueError(f"got {name!r}, expected a name of kvjax")
    return getattr(importlib.import_module(module), attribute)
