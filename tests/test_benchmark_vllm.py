"""The program benchmarks.vllm without vLLM: what does not run is named, and what is compared is compared rightly."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_row_that_does_not_run_is_named_with_its_error(tmp_path: Path):
    file = tmp_path / "vllm.json"
    flags = ["--smoke", "--backends=nvfp4:KVJAX,auto:FLASH_ATTN", f"--json={file}", "--commit=a-commit"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm", *flags], cwd=ROOT, capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode  # a row of kvjax's own
    written = json.loads(file.read_text())
    assert written["measurements"] == []
    assert [(each["what"], each["reason"]) for each in written["skipped"]] == [
        (f"{backend}, 2 layers, decode", "ModuleNotFoundError: No module named 'vllm' (status 1)")
        for backend in ("KVJAX, nvfp4", "FLASH_ATTN, auto")
    ]


def test_log_probabilities_are_compared_token_by_token():
    from benchmarks import vllm

    of = {"prompts": [[[7, -1.0], [8, -2.0]]], "tops": [{"1": -0.5, "2": -1.0}, {"3": -0.25, "4": -3.0}]}
    other = {"prompts": [[[7, -1.5], [8, -2.0]]], "tops": [{"1": -0.9, "2": -0.8}, {"3": -0.25, "5": -3.0}]}
    found = vllm.compared(of, other)
    assert found.of_prompts == 0.25
    assert found.of_tops == pytest.approx((0.4 + 0.2 + 0.0) / 3)
    assert found.agreement == 0.5
    assert found.largest_gap == 0.5
    assert vllm.compared(of, of) == vllm.Compared(0.0, 0.0, 1.0, 0.0)


def test_drafts_follow_the_last_occurrence_of_the_newest_token():
    np = pytest.importorskip("numpy")
    from benchmarks.peers.serves_vllm import Drafts

    tokens = np.array([[5, 1, 2, 3, 4, 1, 9, 8, 7, 1, 0], [5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0]])
    assert Drafts(None).propose([[1], [7], []], np.array([10, 3, 0]), tokens) == [[9, 8, 7], [7, 7, 7], []]
