"""Uses of other packages' deprecated names by kvjax, which only the newest versions of these tell of.

pyproject.toml makes a warning an error where it names a file of kvjax or its tests. Two kinds name none: those of a
model's arguments, which name the file of torch that calls `forward`, and those that transformers logs.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

OURS = re.compile("kvjax|test|conftest|benchmarks|examples")
"""How names of modules begin whose warnings are errors, as in pyproject.toml."""


def find_uses() -> None:
    """Has warnings name who calls a module of torch, and makes what transformers logs of a deprecated name an error."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    modules = str(Path(torch.origin).parent / "nn/modules/module")
    warn = warnings.warn

    def warn_caller(
        message: Any,
        category: type[Warning] | None = None,
        stacklevel: int = 1,
        source: Any = None,
        *,
        skip_file_prefixes: tuple[str, ...] = (),
    ) -> None:
        kind = type(message) if isinstance(message, Warning) else category or UserWarning
        if stacklevel > 1 and issubclass(kind, DeprecationWarning | FutureWarning):
            skip_file_prefixes = (*skip_file_prefixes, modules)
        warn(message, category, stacklevel + 1, source, skip_file_prefixes=skip_file_prefixes)

    warnings.warn = warn_caller
    logging.getLogger("transformers").addHandler(_OfTransformers())


class _OfTransformers(logging.Handler):
    """Raises where code of kvjax uses what is logged to be deprecated; transformers may do so itself."""

    def emit(self, record: logging.LogRecord) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and re.match(r"logging|transformers\.utils|support\.deprecations", _module(frame)):
            frame = frame.f_back
        if frame is not None and "deprecated" in record.getMessage() and OURS.match(_module(frame)):
            raise FutureWarning(record.getMessage())


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
