"""Fuzzes what reads configurations, led by what it covers in kvjax: `make fuzz`, or with libFuzzer's options

    JAX_PLATFORMS=cpu .venv-fuzz/bin/python tools/fuzz_parsers.py -max_total_time=600 -timeout=20 -rss_limit_mb=4096

atheris makes the bytes, hypothesis makes JSON of them, and the properties are those of tests/test_fuzz_parsers.py. An
input that breaks one ends the run with hypothesis' report of it, and is kept in a file that the same command, given
that file, runs again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

with atheris.instrument_imports(include=["kvjax"]):
    import test_fuzz_parsers as properties

    import kvjax
    import kvjax.cli  # noqa: F401

RUNS = [
    properties.test_parsers_give_a_result_or_a_documented_error.hypothesis.fuzz_one_input,
    properties.test_plan_prints_a_plan_or_one_line_of_error.hypothesis.fuzz_one_input,
]


def run(data: bytes) -> None:
    """Hands one input to the property that its first byte names."""
    if data:
        RUNS[data[0] % len(RUNS)](data[1:])


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
