"""Every test that docs/reliability.md names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids="::".join)
def test_files_and_tests_that_the_page_names_exist(file: str, test: str):
    assert (ROOT / file).is_file()
    if test:
        nodes = ast.parse((ROOT / file).read_text()).body
        assert test in [node.name for node in nodes if isinstance(node, ast.FunctionDef)]


def test_every_promise_names_a_test():
    table = PAGE.split("| --- | --- | --- |\n")[1].split("\n\n")[0]
    rows = [row.strip("|").split(" | ") for row in table.splitlines()]
    assert len(rows) > 15
    for promise, shown_by, *_ in rows:
        assert re.search(r"`tests/test_\w+\.py(::test_\w+)?`", shown_by) or "every test of a write" in shown_by, promise
