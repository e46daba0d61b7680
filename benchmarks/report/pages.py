"""The Markdown of a page such as docs/benchmarks.md and of README.md's part, made of what was measured."""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.report import attention, serve
from benchmarks.report.records import ResultsError
from benchmarks.report.results import CASE, DTYPE, NUM_TOKENS, OWN, Measurement, Run
from benchmarks.report.slices import (
    Slice,
    by_case,
    constants,
    densest,
    grouped,
    headline,
    is_size,
    label,
    names,
    peers,
    values,
    varying,
)
from benchmarks.report.words import (
    calls,
    capitalized,
    details,
    escaped,
    fields,
    microseconds,
    number,
    rate,
    ratio,
    table,
    with_spread,
    word,
)

METHOD = Path(__file__).parents[1] / "README.md"

SUMMARY_SIZES, README_SIZES = 5, 3
"""In how many sizes summaries show a dtype."""

WIDTH = 120

README_FACTS = ("driver", "jax", "torch", "commit", "date")
"""What README says of where and when, as far as a file says it."""

INTRODUCTION = """\
# Benchmarks

What kvjax's operations take on the devices where they were measured, next to what a user would pick instead.
[The method]({method}) is told beside the programs, which run on any machine. This page is made by
`python -m benchmarks.report` from the files that they write.

| word | meaning |
| --- | --- |
| microseconds | the median of all calls; in brackets, what nine of ten calls lie between |
| MB moved | the fewest bytes that must be read and written, in 10^6 |
| copy | microseconds of a copy that moves as many bytes, in the same run |
| GB/s | MB moved over the median |
| share | the rate over the copy's: 100% is as fast as a copy |
| clock | what times were read from; only times by the same one stand in one table |"""

RATIOS = "Of all others, the time as a multiple of kvjax's: above 1 kvjax is faster."

COLUMNS = {
    "share": "Share: of the rate of a copy that moves as many bytes; of few tokens all times are latencies.",
    "kvjax, any slots": 'kvjax promises that no two tokens have one slot (`unique_slots=True`), "any slots" does not.',
    "CUDA fitted": "CUDA: a plain kernel in vLLM's launch geometry, fitted: with a thread for each 16 bytes.",
}
"""What README says of columns, by what stands in their headings."""


ROWS = {attention.OPERATION: attention.rows, serve.OPERATION: serve.rows}
"""What tells the rows of operations that have bars of their own."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation on one device, timed by one clock.

    Attributes:
      title: its name, with the clock where it was timed by several.
      environment: where and by what command it ran, as far as its file says.
      measurements: of every case.
    """

    device: str
    title: str
    clock: str
    environment: Mapping[str, str]
    measurements: Sequence[Measurement]

    @property
    def rows(self) -> list[str] | None:
        """A note and the table of an operation that is measured in rows with bars of their own; `None` of others."""
        tell = ROWS.get(self.measurements[0].operation)
        return None if tell is None else tell(self.measurements)

    @property
    def is_serving(self) -> bool:
        """Whether it is drawn as tokens a second."""
        return self.measurements[0].operation == serve.OPERATION

    @property
    def headline(self) -> str:
        """The case that was measured most."""
        return str(headline(self.measurements)[0].subject.get(CASE, ""))

    def plot_name(self, case: str) -> str:
        """The file of a plot."""
        words = " ".join([self.device, self.title, case]).lower()
        return re.sub(r"[^a-z0-9.]+", "-", words).strip("-") + ".png"

    def plot_title(self, case: str, of: Slice) -> str:
        """What stands above a plot."""
        about = [f"{label(name)} {value}" for name, value in of.fixed.items()]
        about += [f"{label(name)} vary" for name in of.along]
        about += [f"clock {self.clock}", "shaded: 9 of 10 calls"]
        return "\n".join([", ".join(filter(None, [self.title, case, self.device])), ", ".join(about)])


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that is told.

    Attributes:
      devices: the runs on each device.
      output: the page.
      plots: the folder of its plots.
    """

    devices: Mapping[str, Sequence[Run]]
    output: Path
    plots: Path

    @property
    def measurements(self) -> list[Measurement]:
        """Those of all devices."""
        return [each for runs in self.devices.values() for run in runs for each in run.measurements]

    def operations(self, device: str) -> list[Operation]:
        """What was measured on a device, in the order of the files."""
        of = [(run.environment, each) for run in self.devices[device] for each in run.measurements]
        environments = {id(each): environment for environment, each in of}
        by_clock = grouped((each for _, each in of), lambda each: (each.operation, each.clock))
        found = []
        for (name, clock), group in by_clock.items():
            is_only = sum(other == name for other, _ in by_clock) == 1
            title = name if is_only else f"{name} by {clock}"
            found.append(Operation(device, title, clock, environments[id(group[0])], group))
        return found

    def slices(self, operation: Operation) -> dict[str, Slice]:
        """What is drawn of an operation, by the case."""
        cases = by_case(operation.measurements)
        return {case: found for case, measurements in cases.items() if (found := densest(measurements))}

    def image(self, operation: Operation, case: str, on: Path) -> list[str]:
        """The plot of a case on a page, if there is one."""
        if case not in self.slices(operation):
            return []
        words = ", ".join(filter(None, [operation.title, case, operation.device]))
        return [f"![{escaped(words)}]({link(self.plots / operation.plot_name(case), on)})"]


def link(to: Path, page: Path) -> str:
    """How a page links to a file."""
    return Path(os.path.relpath(to.resolve(), page.resolve().parent)).as_posix()


def page(report: Report) -> str:
    """The Markdown of a page such as docs/benchmarks.md."""
    parts = [INTRODUCTION.format(method=link(METHOD, report.output))]
    for device, runs in report.devices.items():
        operations = report.operations(device)
        parts += [f"## {escaped(device)}", *environment(runs)]
        summaries = [part for operation in operations for part in summary(operation, SUMMARY_SIZES)]
        parts += ["### In short", *summaries] if summaries else []
        parts += [part for operation in operations for part in operation_section(report, operation)]
        parts += [*copies(runs), *skipped(runs)]
    return "\n\n".join(parts) + "\n"


def environment(runs: Sequence[Run]) -> list[str]:
    """The commands of some runs, and a table of machine and versions."""
    parts, rows = [], []
    if commands := [f"$ {run.environment['command']}" for run in runs if "command" in run.environment]:
        parts.append("\n".join(["```console", *commands, "```"]))
    for name in dict.fromkeys(name for run in runs for name in run.environment if name not in ("device", "command")):
        programs = programs_by_words((run.environment.get(name, "-"), run.short_program) for run in runs)
        rows.append([escaped(name), "; ".join(with_programs(programs)) if len(programs) > 1 else next(iter(programs))])
    return [*parts, table(["", "measured with"], rows, left=2)] if rows else parts


def programs_by_words(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The programs that each of some words comes with, from pairs of both."""
    groups: dict[str, dict[str, None]] = {}
    for words, program in pairs:
        groups.setdefault(escaped(words), {})[escaped(program)] = None
    return {words: [*programs] for words, programs in groups.items()}


def with_programs(programs: Mapping[str, Sequence[str]]) -> list[str]:
    """What differs from program to program."""
    return [f"{words} ({', '.join(of)})" for words, of in programs.items()]


def summary(operation: Operation, num_sizes: int) -> list[str]:
    """A caption and a small table of kvjax next to the others; nothing where it is not compared in several sizes.

    Rows of attention and of serving have bars, and a table that tells them.
    """
    if (told := operation.rows) is not None:
        return [capitalized(escaped(operation.title)), *told] if told else []
    measurements = headline(operation.measurements)
    shown = densest(measurements)
    if shown is None or OWN not in (who := peers(shown.measurements)) or len(who) == 1:
        return []
    rows = []
    for dtype in shown.dtypes:
        lines = {line[0].peer: dict(zip(shown.sizes_of(line), line, strict=True)) for line in shown.lines(dtype)}
        for size, own in some([*lines.get(OWN, {}).items()], num_sizes):
            others = [ratio(lines.get(peer, {}).get(size), own) for peer in who[1:]]
            rows.append([word(dtype), word(size), microseconds(own.seconds), rate(own), *others])
    about = {name: value for name, value in constants(measurements).items() if name not in (DTYPE, *shown.fixed)}
    what = f"{capitalized(escaped(operation.title))}: {fields({**about, **shown.fixed})}"
    header = ["dtype", label(shown.size), f"{OWN}, microseconds", "GB/s (share)", *who[1:]]
    return [f"{what}; clock {escaped(operation.clock)}.\n{RATIOS}", table(header, rows)]


def some[Value](of: Sequence[Value], count: int) -> list[Value]:
    """At most so many of these, from the first to the last."""
    if len(of) <= count:
        return [*of]
    return [of[round(number * (len(of) - 1) / (count - 1))] for number in range(count)]


def operation_section(report: Report, operation: Operation) -> list[str]:
    """Every measurement of one operation, a case at a time."""
    clock = f"Medians of {calls(operation.measurements)} each; clock {escaped(operation.clock)}."
    parts = [f"### {capitalized(escaped(operation.title))}", clock]
    parts += report.image(operation, operation.headline, report.output)
    for case, measurements in by_case(operation.measurements).items():
        plot = report.image(operation, case, report.output) if case != operation.headline else []
        times = f"{len(measurements)} time{'s' if len(measurements) > 1 else ''}"
        parts.append(details(f"{case or operation.title}: {times}", [*plot, *tables(measurements)]))
    return parts


def tables(measurements: Sequence[Measurement]) -> list[str]:
    """Every measurement of one case with the peers side by side: times, then rates where bytes were counted."""
    columns = [name for name in names(measurements) if name in (*varying(measurements), DTYPE, NUM_TOKENS)]
    same = {name: value for name, value in constants(measurements).items() if name not in (CASE, *columns)}
    who = peers(measurements)
    times, rates = [], []
    for line in lines(measurements, columns):
        about = [word(line[0].subject.get(name)) for name in columns]
        by_peer = {each.peer: each for each in line}
        times.append(about + [with_spread(by_peer[peer]) if peer in by_peer else "-" for peer in who])
        rates.append([*about, *moved(line), *(rate(by_peer[peer]) if peer in by_peer else "-" for peer in who)])
    header = [label(name) for name in columns]
    left = sum(not is_size(measurements, name) for name in columns)
    parts = [f"{capitalized(fields(same))}."] if same else []
    parts += ["Microseconds:", table([*header, *who], times, left=left)]
    if any(each.bytes_moved for each in measurements):
        heading = "GB/s (share):" if any(each.copy_seconds for each in measurements) else "GB/s:"
        parts += [heading, table([*header, "MB moved", "copy", *who], rates, left=left)]
    return parts


def lines(measurements: Sequence[Measurement], columns: Sequence[str]) -> list[list[Measurement]]:
    """Those about the same thing together, sorted by each of the columns."""
    ranks = {name: {value: rank for rank, value in enumerate(values(measurements, name))} for name in columns}
    groups = grouped(measurements, lambda each: tuple(ranks[name][each.subject.get(name)] for name in columns))
    return [groups[key] for key in sorted(groups)]


def moved(line: Sequence[Measurement]) -> list[str]:
    """Megabytes, and the microseconds of their copy; each once where it is the same for all peers."""
    megabytes = dict.fromkeys(number(each.bytes_moved / 1e6) for each in line if each.bytes_moved)
    copy = dict.fromkeys(microseconds(each.copy_seconds) for each in line if each.copy_seconds)
    return [" or ".join(megabytes) or "-", " or ".join(copy) or "-"]


def copies(runs: Sequence[Run]) -> list[str]:
    """The copies that shares are of."""
    rows = [
        [
            escaped(run.short_program),
            *map(number, (copy.bytes_moved / 1e6, copy.bytes_moved / copy.seconds / 1e9)),
            with_spread(copy),
        ]
        for run in runs
        for copy in sorted(run.copies, key=lambda copy: copy.bytes_moved)
    ]
    if not rows:
        return []
    header = ["measured by", "MB moved", "GB/s", "microseconds"]
    return ["### Copies", details(f"what shares are of: {len(rows)} times", [table(header, rows)])]


def skipped(runs: Sequence[Run]) -> list[str]:
    """What was not measured, and why."""
    pairs = [
        (f"{what}: {(reason.strip() or 'no reason given').splitlines()[0]}", run.short_program)
        for run in runs
        for what, reason in run.skipped
    ]
    lines = [f"- {words}" for words in with_programs(programs_by_words(pairs))]
    return ["### Not measured", "\n".join(lines)] if lines else []


def readme_part(report: Report, readme: Path) -> str:
    """What README.md shows: of the first device, the first operation that is compared.

    Raises:
      ResultsError: nothing is compared there.
    """
    device = next(iter(report.devices))
    for operation in report.operations(device):
        if operation.rows is None and (small := summary(operation, README_SIZES)):
            where = operation.environment
            command = [f"```console\n$ {where['command']}\n```"] if "command" in where else []
            facts = ", ".join(f"{name} {where[name]}" for name in README_FACTS if name in where)
            where_to = f"[All times]({link(report.output, readme)}), [the method]({link(METHOD, readme)})."
            end = f"{escaped(facts)}.\n{where_to}" if facts else where_to
            plot = report.image(operation, operation.headline, readme)
            columns = textwrap.fill(" ".join(words for heading, words in COLUMNS.items() if heading in small[1]), WIDTH)
            parts = [f"{escaped(device)}. {small[0]}", small[1], *filter(None, [columns]), *plot, *command, end]
            return "\n\n".join(parts) + "\n"
    raise ResultsError(f"nothing for {readme}: no operation on {device} has {OWN} next to another in several sizes")


def serving_part(report: Report, to: Path) -> str:
    """What a page such as docs/serving.md shows of tokens a second: of the first device that has some.

    Raises:
      ResultsError: none has.
    """
    for device in report.devices:
        for operation in report.operations(device):
            if operation.is_serving:
                where = operation.environment
                command = [f"```console\n$ {where['command']}\n```"] if "command" in where else []
                facts = ", ".join(f"{name} {where[name]}" for name in ("reading", *README_FACTS) if name in where)
                plot = report.image(operation, operation.headline, to)
                about = fields({**constants(operation.measurements)})
                first = f"{escaped(device)}: {about}."
                parts = [first, serve.short_rows(operation.measurements), *plot, *command, f"{escaped(facts)}."]
                return "\n\n".join(parts) + "\n"
    raise ResultsError("no measurements of serving")
