"""The program benchmarks.vllm without vLLM: what does not run is named, and what is compared is compared rightly."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.full
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
    from benchmarks import vllm_checks

    of = {"prompts": [[[7, -1.0], [8, -2.0]]], "tops": [{"1": -0.5, "2": -1.0}, {"3": -0.25, "4": -3.0}]}
    other = {"prompts": [[[7, -1.5], [8, -2.0]]], "tops": [{"1": -0.9, "2": -0.8}, {"3": -0.25, "5": -3.0}]}
    found = vllm_checks.compared(of, other)
    assert found.of_prompts == 0.25
    assert found.of_tops == pytest.approx((0.4 + 0.2 + 0.0) / 3)
    assert found.agreement == 0.5
    assert found.largest_gap == 0.5
    assert vllm_checks.compared(of, of) == vllm_checks.Compared(0.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        ("(Worker pid=7) ERROR: ValueError: no scales\n\nRuntimeError: Engine core initialization failed. See root"
         " cause above. Failed core proc(s): {}\n", "ValueError: no scales"),
        ("Traceback\nKeyError: 'a'\nkvjax.errors.UnsupportedError: vllm: got 1\nbye\n",
         "kvjax.errors.UnsupportedError: vllm: got 1"),
        ("RuntimeError: Engine core initialization failed.\n", "RuntimeError: Engine core initialization failed."),
        ("pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, no sleep [type=x]\n",
         "Value error, no sleep [type=x]"),
        ("Killed\n\n", "Killed"),
        ("", "no error"),
    ],
)  # fmt: skip
def test_a_process_that_failed_is_named_by_its_own_error(printed: str, error: str):
    from benchmarks import vllm

    assert vllm.error_of(printed) == error


LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(int(sys.stdin.read()))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("seconds", "status"), [(0, 0), (600, None)])
def test_a_process_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, status: int | None
):
    from benchmarks import vllm

    (tmp_path / "leaves_a_child.py").write_text(LEAVES_A_CHILD)
    monkeypatch.setattr(vllm, "LIMIT", SimpleNamespace(value=20 if status == 0 else 3))
    found, text = vllm.run_alone("leaves_a_child", seconds, {"PYTHONPATH": str(tmp_path)})
    assert found == status
    child = Path(f"/proc/{int(text)}/stat")
    until = time.monotonic() + 20
    while child.exists() and " Z " not in child.read_text():  # a zombie waits to be reaped
        assert time.monotonic() < until
        time.sleep(0.05)


SAME = [{"3": -0.1, "4": -0.2}] * 20


def results(changed: dict[str, Any], model: str = "KEYS_AND_VALUES") -> Any:
    """What the processes of `--check` find if all is well, but for changes by the name of a job."""
    from benchmarks import vllm_checks

    tops = [[{"5": -0.5, "6": -0.51}, {"7": -0.1, "8": -3.0}]]
    job = {
        "generated": {"tokens": [[5, 7]], "tops": tops},
        "logprobs": {"prompts": [[[7, -1.0]]], "tops": [{"1": -0.1, "2": -9.0}, *SAME], "uncached": 0},
        "requests": {"ended": 9, "blocks_free": True, "memory_grew": 0, "preempted": 3, "errors": [[0.01]]},
        "asleep": {"same": True, "freed": 2**30},
    }
    plan = vllm_checks.plan(getattr(vllm_checks, model), requests=9, longest=100, is_small=False)
    found: dict[Any, Any] = {
        key: {"ready": 20.0, **{name: {"seconds": 1.0, **job[name]} for name in jobs}}
        for key, (_, jobs) in plan.items()
    }
    for (key, name), change in changed.items():
        found[vllm_checks.Key(*key)][name] |= change
    return found


def verdicts(found: Any, failed: Any = None, model: str = "KEYS_AND_VALUES") -> dict[str, bool | None]:
    from benchmarks import vllm_checks

    judged = vllm_checks.judge(getattr(vllm_checks, model), found, failed or {}, requests=9, is_small=False)
    return {check.name: check.holds for check in judged}


@pytest.mark.parametrize("model", ["KEYS_AND_VALUES", "LATENTS"])
def test_checks_pass_for_equal_results(model):
    assert {*verdicts(results({}, model), model=model).values()} == {True}


@pytest.mark.parametrize(
    ("key", "job", "change", "failing"),
    [
        (("fp8", "KVJAX", "eager"), "generated", {"tokens": [[5, 8]]}, "graphs give the tokens of eager steps, fp8"),
        (("auto", "KVJAX"), "logprobs", {"tops": [{"1": -9.0, "2": -0.1}, *SAME]}, "bfloat16's likeliest"),
        (("auto", "KVJAX"), "logprobs", {"uncached": 1}, "bfloat16's likeliest"),
        (("fp8", "KVJAX"), "logprobs", {"prompts": [[[7, -1.1]]]}, "fp8 is as close"),
        (("auto", "KVJAX"), "requests", {"ended": 8}, "random requests end and leave nothing behind, KVJAX"),
        (("auto", "KVJAX"), "requests", {"blocks_free": False}, "random requests end and leave nothing behind, KVJAX"),
        (
            ("auto", "KVJAX"),
            "requests",
            {"memory_grew": 1 << 30},
            "random requests end and leave nothing behind, KVJAX",
        ),
        (("auto", "KVJAX"), "requests", {"preempted": 0}, "random requests end and leave nothing behind, KVJAX"),
        (("auto", "KVJAX"), "requests", {"errors": [[0.02]]}, "random requests deviate"),
        (("nvfp4", "KVJAX", "asleep"), "asleep", {"same": False}, "sleep keeps"),
    ],
)
def test_a_check_fails_for_a_wrong_result(key: Any, job: str, change: Any, failing: str):
    found = results({(key, job): change})
    [failed] = [name for name, holds in verdicts(found).items() if not holds]
    assert failed.startswith(failing)


def test_another_token_that_is_as_likely_is_no_difference():
    found = results({(("auto", "KVJAX", "eager"), "generated"): {"tokens": [[6, 7]]}})
    assert {*verdicts(found).values()} == {True}


def test_a_process_of_kvjax_that_failed_fails_its_checks_and_one_of_a_peer_is_named():
    from benchmarks.vllm_checks import KEYS_AND_VALUES, Key, judge

    found = results({})
    own, peer = Key("nvfp4", "KVJAX"), Key("auto", "FLASH_ATTN")
    failed = {key: "ValueError: no" for key in (own, peer) if found.pop(key)}
    checks = [*judge(KEYS_AND_VALUES, found, failed, requests=9, is_small=False)]
    assert [check.name.rpartition(", ")[2] for check in checks if check.holds is False] == [
        "nvfp4",
        "nvfp4 next to bfloat16",
    ]
    assert "auto:FLASH_ATTN, graphs: ValueError: no" in [check.text for check in checks if check.holds is None]


def test_drafts_follow_the_last_occurrence_of_the_newest_token():
    np = pytest.importorskip("numpy")
    from benchmarks.peers.serves_vllm import Drafts

    tokens = np.array([[5, 1, 2, 3, 4, 1, 9, 8, 7, 1, 0], [5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0]])
    assert Drafts(None).propose([[1], [7], []], np.array([10, 3, 0]), tokens) == [[9, 8, 7], [7, 7, 7], []]
