"""The adapters in examples/clients: as short as docs/serving.md says, and for the versions that the Makefile installs.

Their behaviour is tested by `make test-clients`, in an environment for each library.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def num_code_lines(source: str) -> int:
    """Lines that hold code: neither empty nor comments nor docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in BLANK for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize(
    ("name", "most"), [("kerashub", 60), ("tunix", 60), ("sglang_jax", 75), ("skyrl_tx", 60), ("mla", 60)]
)
def test_an_adapter_is_short(name, most):
    assert num_code_lines((ROOT / f"examples/clients/{name}.py").read_text()) <= most


def test_only_code_is_counted():
    assert num_code_lines('"""A.\n\nB."""\n\n# c\nx = (\n    1,\n)\n\n\ndef f():\n    """D."""\n    return x\n') == 5


@pytest.mark.parametrize("name", ["kerashub", "tunix", "skyrl_tx"])
def test_an_adapter_is_for_the_version_that_is_installed(name):
    package = re.search(rf"^CLIENT_{name} := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    source = (ROOT / f"examples/clients/{name}.py").read_text()
    assert f"pip install {package}" in source.replace("'", "")
    assert f"For {package.replace('==', ' ')}." in source
    assert f"{package.split('==')[1]}](../examples/clients/{name}.py)" in (ROOT / "docs/serving.md").read_text()
