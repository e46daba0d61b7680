"""The table of tokens a second, and where its plot goes, made of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import serve_table
from benchmarks.report.results import Measurement
from benchmarks.report.words import calls, escaped, table

OPERATION = serve_table.OPERATION
SHORT = ("dtype", "sequences", "row", "by", "tokens a second", "x bf16 tokens/s", "step, ms", "x bf16's step")
"""What a page that has little room shows."""


def lines(measurements: Sequence[Measurement]) -> list[serve_table.ServeTime]:
    """Those of every dtype, number of sequences and peer."""
    return serve_table.times(measurements, lambda each: each.samples, lambda each, name: each.further.get(name))


def rows(measurements: Sequence[Measurement]) -> list[str]:
    """A note and the table with its bars."""
    found = lines(measurements)
    clocks = ", ".join(dict.fromkeys(escaped(each.clock) for each in measurements))
    note = f"{serve_table.NOTE} Medians of {calls(measurements)}; clock {clocks}.{serve_table.summary(found)}"
    words = [[escaped(cell) for cell in line] for line in serve_table.rows(found)]
    return [note, table(serve_table.HEADER, words, left=serve_table.LEFT)]


def short_rows(measurements: Sequence[Measurement]) -> str:
    """The rows that bars are about and those of peers, without the bars."""
    shown = [line for line in lines(measurements) if line.rows]
    columns = [serve_table.HEADER.index(name) for name in SHORT]
    words = [serve_table.words(line) for line in shown]
    return table(SHORT, [[escaped(line[column]) for column in columns] for line in words], left=serve_table.LEFT)
