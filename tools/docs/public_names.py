"""The public names of kvjax's packages, and the links of a page."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {
    "kvjax": ROOT / "kvjax/__init__.py",
    "kvjax_torch": ROOT / "interop/kvjax_torch/__init__.py",
    "kvjax_torch.transformers_cache": ROOT / "interop/kvjax_torch/transformers_cache.py",
}


def public_names(source: str) -> list[str]:
    """Returns what a module exports, by `from ... import name as name`."""
    return [
        alias.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]


def with_links(text: str, replaced: Callable[[str], str]) -> str:
    """Returns Markdown with the target of each link replaced, but for those in code blocks."""
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [
        re.sub(r"(\]\()([^)\s]+)(?=\))", lambda link: link[1] + replaced(link[2]), part) for part in parts[::2]
    ]
    return "".join(parts)
