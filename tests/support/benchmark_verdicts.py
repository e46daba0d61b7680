"""Judges measurements of one table, for tests of benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks import bars
from benchmarks.measurement import Measurement, Rows
from benchmarks.timing import Clock, Timing


def timed(operation: str, job: Any, us: float, peer="kvjax", clock=Clock.DEVICE, **facts: Any) -> Measurement:
    times, copied = (Timing((each * 1e-6,), clock) for each in (us, 0.9))
    return Measurement(operation, job.subject, peer, times, 1, copied, facts)


def assert_verdicts(*pairs: tuple[Measurement, list[str]]) -> None:
    """Judges measurements of one table."""
    rows = Rows(m for m, _ in pairs)
    assert [bars.verdicts(m, rows) for m in rows] == [expected for _, expected in pairs]
