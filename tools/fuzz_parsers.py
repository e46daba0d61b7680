"""Coverage-guided fuzzing of what reads configurations and files: `make fuzz`, or with libFuzzer's options

    JAX_PLATFORMS=cpu .venv-fuzz/bin/python tools/fuzz_parsers.py -max_total_time=600 -timeout=20 -rss_limit_mb=4096

atheris generates bytes, hypothesis turns them into JSON, and the properties are those of tests/test_fuzz_parsers.py. A
failing input ends the run with hypothesis' report and is saved in a file; pass that file to the same command to
reproduce it.
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
    properties.test_any_file_is_read_as_safetensors_reads_it_or_refused.hypothesis.fuzz_one_input,
    properties.test_any_index_gives_scales_or_a_documented_error.hypothesis.fuzz_one_input,
    properties.test_any_bytes_are_imported_as_blocks_or_refused.hypothesis.fuzz_one_input,
]


def run(data: bytes) -> None:
    """Passes an input to the property that its first byte selects."""
    if data:
        RUNS[data[0] % len(RUNS)](data[1:])


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
