"""The benchmarks of blocks on the host: their programs run, and their verdicts; no test asserts a time."""

from __future__ import annotations

import pytest
from support.benchmark_checks import assert_measures, assert_verdicts, timed

from benchmarks import bars
from benchmarks.serving import LLAMA_8B, ServeJob
from benchmarks.shapes import TIMED_DTYPES
from benchmarks.timing import Clock
from kvjax import KVCacheDType

DTYPES = [dtype.value for dtype in TIMED_DTYPES]


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "operations", "peers"),
    [
        ("swap", ["swap"], ["kvjax"]),
        pytest.param(
            "host_tier",
            ["host tier users", "host tier sequence"],
            ["kvjax", "computed again"],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_programs_measure_what_they_say(tmp_path, program, operations, peers):
    assert_measures(tmp_path, program, [(operation, peers, DTYPES) for operation in operations])


def test_verdicts_compare_a_host_tier_with_its_target():
    job = ServeJob(LLAMA_8B, KVCacheDType.BFLOAT16, 1)
    assert_verdicts(
        (timed("host tier sequence", job, 25e3, clock=Clock.HOST), ["0.10 x computed again: pass"]),
        (timed("host tier sequence", job, 250e3, bars.COMPUTED_AGAIN, Clock.HOST), []),
    )
