"""The table of attention that docs/kernels.md has, made of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import attention_table
from benchmarks.report.records import ResultsError
from benchmarks.report.results import Measurement, Run
from benchmarks.report.words import calls, escaped, table

OPERATION = "attention"
FACTS = ("driver", "jax", "torch", "flashinfer", "commit", "date")
"""What is said of where and when, as far as a file says it."""


def rows(measurements: Sequence[Measurement]) -> list[str]:
    """A note and the table of kvjax's times with their bars; nothing where there are none."""
    lines = attention_table.times(measurements, lambda each: each.samples, lambda each: each.clock)
    if not lines:
        return []
    clocks = ", ".join(dict.fromkeys(escaped(each.clock) for each in measurements))
    note = f"{attention_table.NOTE} Medians of {calls(measurements)}; clock {clocks}.{attention_table.summary(lines)}"
    words = [[escaped(cell) for cell in attention_table.words(line)] for line in lines]
    return [note, table(attention_table.HEADER, words, left=attention_table.LEFT)]


def part(runs: Sequence[Run]) -> str:
    """What docs/kernels.md shows of the first run that has attention in it.

    Raises:
      ResultsError: none has.
    """
    for run in runs:
        if found := rows([each for each in run.measurements if each.operation == OPERATION]):
            facts = ", ".join(f"{name} {run.environment[name]}" for name in FACTS if name in run.environment)
            command = [f"```console\n$ {run.environment['command']}\n```"] if "command" in run.environment else []
            return "\n\n".join([f"{escaped(run.device)}: {escaped(facts)}.", *command, *found]) + "\n"
    raise ResultsError("no measurements of attention")
