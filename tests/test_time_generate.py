"""The program that times `generate` over each cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]


@pytest.mark.nightly
def test_program_prints_times_over_each_cache_and_bfloat16_pages_give_the_tokens_of_dynamic_cache():
    command = [sys.executable, ROOT / "tools/time_generate.py", "--sequences=2", "--tokens=20", "--layers=1"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'interop'}"}
    done = subprocess.run(
        [*command, "--repeats=1"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    names = ["DynamicCache, sdpa", "KvjaxCache, auto", "KvjaxCache, fp8", "KvjaxCache, nvfp4"]
    assert [row[0] for row in rows] == names
    assert all(float(cell.split()[0]) > 0 for row in rows for cell in row[1:3])
    assert [row[3] for row in rows[:2]] == ["100%", "100%"]
