"""Runs benchmark programs, and judges measurements of one table, for tests of benchmarks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import bars
from benchmarks.measurement import EVERY_FIELD, Measurement, Rows
from benchmarks.timing import Clock, Timing

ROOT = Path(__file__).parents[2]
type Expected = list[tuple[str, list[str], list[Any]]]
"""Operations, and the peers and dtypes that each is measured with."""


def run_and_read(tmp_path: Path, program: str, *flags: str, devices: int = 1) -> dict[str, Any]:
    """Runs a program, checks that it wrote the tables that it printed, and returns its JSON."""
    json_path, markdown_path = tmp_path / "measured.json", tmp_path / "tables.md"
    files = f"--json={json_path}", f"--markdown={markdown_path}", "--commit=a-commit"
    command = [sys.executable, "-m", f"benchmarks.{program}", *flags, *files]
    # Most of a smoke run's time goes to compiling, and nobody reads its figures.
    environment = os.environ | ({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if "--smoke" in flags else {})
    if devices > 1:
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert markdown_path.read_text() in done.stdout
    written = json.loads(json_path.read_text())
    assert (written["schema"], written["program"]) == (1, f"benchmarks.{program}")
    assert written["environment"]["command"].startswith(f"python -m benchmarks.{program} {flags[0]}")
    assert written["environment"]["commit"] == "a-commit"
    assert "a-commit" not in written["environment"]["command"]
    for each in written["measurements"]:
        assert each.keys() >= {*EVERY_FIELD}
        assert 0 < min(each["samples"]) <= each["seconds"] <= max(each["samples"])
    return written


def assert_measures(tmp_path: Path, program: str, expected: Expected, *flags: str, devices: int = 1) -> set[str]:
    """Checks what a smoke run measures, of torch where it is there, and returns what it skipped."""
    written = run_and_read(tmp_path, program, "--smoke", *flags, devices=devices)
    has_torch = importlib.util.find_spec("torch") is not None
    measured = {(each["operation"], each["peer"], each.get("dtype")) for each in written["measurements"]}
    skipped = {each["what"] for each in written["skipped"]}
    for operation, peers, dtypes in expected:
        there = [peer for peer in peers if has_torch or "torch" not in peer]
        assert measured >= {(operation, peer, dtype) for peer in there for dtype in dtypes}
    if has_torch and program != "bridge":
        assert not {what for what in skipped if "torch" in what}
    return skipped


def timed(operation: str, job: Any, us: float, peer="kvjax", clock=Clock.DEVICE, **facts: Any) -> Measurement:
    times, copied = (Timing((each * 1e-6,), clock) for each in (us, 0.9))
    return Measurement(operation, job.subject, peer, times, 1, copied, facts)


def assert_verdicts(*pairs: tuple[Measurement, list[str]]) -> None:
    """Judges measurements of one table."""
    rows = Rows(m for m, _ in pairs)
    assert [bars.verdicts(m, rows) for m in rows] == [expected for _, expected in pairs]
