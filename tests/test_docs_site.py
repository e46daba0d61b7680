"""The site of the documentation has every page and every public name; `make docs` checks the rest."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MODULES = ("kvjax", "kvjax_torch", "kvjax_torch.transformers_cache")


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools/docs/public_names.py"))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_page(site, module: str):
    if module != "kvjax":
        pytest.importorskip("torch")
    if module.endswith("transformers_cache"):
        pytest.importorskip("transformers")
    members = vars(importlib.import_module(module))
    public = {name for name, value in members.items() if name[0] != "_" and not inspect.ismodule(value)}
    assert sorted(site["public_names"](site["MODULES"][module].read_text())) == sorted(public)


def test_every_page_is_in_the_navigation():
    pages = {
        str(path.relative_to(ROOT))
        for folder in (".", "benchmarks", "docs", "docs/notes")
        for path in (ROOT / folder).glob("*.md")
    }
    navigation = (ROOT / "tools/docs/mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"[\w/-]+\.md$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(pages | {"examples/tour.md"})  # made of the notebook


def test_links_are_replaced_but_for_those_in_code(site):
    page = "[a](b.md#c) and ![d](e.svg)\n```python\nf[0](g)\n```\n[h](i)\n"
    replaced = "[a](<b.md#c>) and ![d](<e.svg>)\n```python\nf[0](g)\n```\n[h](<i>)\n"
    assert site["with_links"](page, "<{}>".format) == replaced
