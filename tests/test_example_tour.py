"""The notebook's cells run one after the other, and show what their text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples/tour.ipynb").read_text())


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == kind]


def test_no_outputs_are_kept():
    assert len(cells("code")) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells("code"))


@pytest.mark.full
def test_the_cells_run_in_order(capsys):
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells("code")):
        exec(compile("".join(cell["source"]), f"examples/tour.ipynb, cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "in place: True" in printed
    assert "equal: True past the end: 0.0" in printed
    assert "tokens that need no computation: 32" in printed
    assert "zeros at a scale of 1: 100%" in printed
    assert "40 GiB hold 1,165,072 tokens" in printed  # README's number
    assert names["status"] == 0
    assert max(names["attention_error"], names["serve_error"]) < 2**-8  # rounded to bfloat16 once
    of_keys, of_attention = zip(*names["errors"].values(), strict=True)
    assert of_keys[0] == 0 < of_keys[1] < of_keys[2] <= of_keys[3] < of_keys[4] < of_keys[5] < 0.15
    assert of_attention[0] < 1e-5 < of_attention[1] < of_attention[2] < of_attention[5] < 0.3
