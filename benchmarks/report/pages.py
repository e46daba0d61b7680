"""Generates the Markdown of docs/benchmarks.md, of the notes with every time, and of the attention page."""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import tables
from benchmarks.measurement import Measurement, ResultsError, Rows, escaped
from benchmarks.operations import ATTENTION, OPERATIONS
from benchmarks.report.results import Run
from benchmarks.tables import Lines, Operation, capitalized, fields, number, table, with_spread

METHOD = Path(__file__).parents[1] / "README.md"

SUMMARY_SIZES = 5  # sizes per dtype in summaries
WIDTH = 120

FACTS = ("driver", "jax", "torch", "flashinfer", "commit", "date")
"""Environment fields to show, if the file has them."""

INTRODUCTION = """\
# Benchmarks

Times of kvjax's operations and of alternatives on each device, as medians;
[the method]({method}) says how they are taken. GB/s count the fewest bytes to read and write. The
share in brackets is of the rate of a copy of as many bytes in the same run: 100% is as fast as a copy. Full tables:
{links}. `python -m benchmarks.report` makes these pages from the files of the programs."""

NOTES = """\
# Every time on {device}

Each table of [benchmarks.md]({page}) in full. Microseconds are the median of all calls, in brackets what nine of ten
calls lie between. MB moved are the fewest bytes that must be read and written, in 10^6; copy is the time of a copy that
moves as many, in the same run; the share is the rate over the copy's. Times by different clocks have tables of their
own. [The method]({method})."""

COLUMNS = {
    "share": "Share: of the rate of a copy that moves as many bytes; of few tokens all times are latencies.",
    "kvjax, any slots": 'kvjax promises that no two tokens have one slot (`unique_slots=True`), "any slots" does not.',
    "CUDA fitted": "CUDA: a plain kernel in vLLM's launch geometry, fitted: with a thread for each 16 bytes.",
}
"""Explanations of columns, by a part of their headings."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """One operation on one device, timed by one clock.

    Attributes:
      title: The operation's name; includes the clock if several clocks timed it.
      environment: The environment of the run, as recorded in its file.
      rows: The measurements of all cases.
    """

    device: str
    title: str
    environment: Mapping[str, str]
    rows: Rows

    @property
    def of(self) -> Operation:
        return OPERATIONS[self.rows[0].operation]

    @property
    def clock(self) -> str:
        return self.rows[0].clock

    @property
    def headline(self) -> str:
        return str(tables.headline(self.rows)[0].subject.get("case", ""))

    @property
    def is_one_plot(self) -> bool:
        return self.of.name in ("attention", "serve")

    def plots(self) -> dict[str, Rows]:
        if self.is_one_plot:
            return {self.headline: self.rows}
        found = {case: tables.drawn(self.of, rows) for case, rows in tables.by_case(self.rows).items()}
        return {case: rows for case, rows in found.items() if rows}

    def plot_labels(self, case: str) -> list[str]:
        return [*filter(None, [self.title, "" if self.is_one_plot else case, self.device])]

    def plot_name(self, case: str) -> str:
        title, *middle, device = self.plot_labels(case)
        return re.sub(r"[^a-z0-9.]+", "-", " ".join([device, title, *middle]).lower()).strip("-") + ".png"

    def plot_title(self, case: str) -> str:
        about = [f"clock {self.clock}"]
        if not self.is_one_plot:
            first = self.plots()[case][0].subject
            hidden = ("case", "dtype", self.of.against, *self.of.along)
            about = [fields({key: value for key, value in first.items() if key not in hidden}), *about]
            about.append("shaded: 9 of 10 calls")
        return "\n".join([", ".join(self.plot_labels(case)), ", ".join(filter(None, about))])

    def command(self) -> list[str]:
        return [console([self.environment["command"]])] if "command" in self.environment else []

    def facts(self) -> str:
        return ", ".join(f"{name} {self.environment[name]}" for name in FACTS if name in self.environment)

    def lines(self, of: Lines) -> list[str]:
        """Returns a note and a table with bars, or an empty list if the table is empty."""
        found = of.table(self.rows)
        end = f"Medians of {tables.calls(self.rows)}; clock {self.clock}.{of.bars(self.rows)}"
        return [f"{of.note} {end}".strip(), found] if found else []

    def short(self, num_sizes: int) -> list[str]:
        """Returns a caption and a table for the summary page."""
        if self.of.short is None:
            return tables.summary(self.of, self.rows, num_sizes)
        note = f"{self.of.short.note} Medians of {tables.calls(self.rows)}; clock {self.clock}.".strip()
        found = self.of.short.table(self.rows)
        return [filled(note), found] if found else []


@dataclasses.dataclass(frozen=True)
class Report:
    """The runs to report and the paths to write.

    Attributes:
      devices: The runs on each device.
      output: The summary page.
      plots: The folder of the plots.
      notes: The folder of the pages with every time.
      attention: The page that contains every attention row, between its markers.
    """

    devices: Mapping[str, Sequence[Run]]
    output: Path
    plots: Path
    notes: Path
    attention: Path | None = None

    @property
    def measurements(self) -> list[Measurement]:
        return [each for runs in self.devices.values() for run in runs for each in run.measurements]

    def timed(self, device: str) -> list[Timed]:
        """Returns the measurements of a device by operation and clock, in the order of the files."""
        runs = self.devices[device]
        where = {id(each): run.environment for run in runs for each in run.measurements}
        rows = [each for run in runs for each in run.measurements]
        by_clock = tables.grouped(rows, lambda each: (each.operation, each.clock))
        found = []
        for (name, clock), group in by_clock.items():
            is_only = sum(other == name for other, _ in by_clock) == 1
            found.append(Timed(device, name if is_only else f"{name} by {clock}", where[id(group[0])], group))
        return found

    def headlines(self, device: str) -> list[Timed]:
        """Returns the operations on the summary page, in the order of `OPERATIONS`."""
        order = [*OPERATIONS]
        found = [each for each in self.timed(device) if each.of.is_headline and each.short(SUMMARY_SIZES)]
        return sorted(found, key=lambda each: order.index(each.of.name))

    def notes_page(self, device: str) -> Path:
        return self.notes / f"benchmarks-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.md"

    def image(self, of: Timed, case: str, on: Path) -> list[str]:
        text = escaped(", ".join(of.plot_labels(case)))
        return [f"![{text}]({link(self.plots / of.plot_name(case), on)})"] if case in of.plots() else []


def link(to: Path, page: Path) -> str:
    return Path(os.path.relpath(to.resolve(), page.resolve().parent)).as_posix()


def console(commands: Sequence[str]) -> str:
    return "\n".join(["```console", *(f"$ {command}" for command in commands), "```"])


def page(report: Report) -> str:
    """Returns the Markdown of docs/benchmarks.md: the summary tables of each device."""
    on = report.output
    links = ", ".join(f"[{escaped(device)}]({link(report.notes_page(device), on)})" for device in report.devices)
    title, text = INTRODUCTION.format(method=link(METHOD, on), links=links).split("\n\n")
    parts = [title, filled(text)]
    for device in report.devices:
        parts.append(f"## {escaped(device)}")
        for each in report.headlines(device):
            heading = each.of.short.title if each.of.short else capitalized(escaped(each.title))
            told, facts = each.short(SUMMARY_SIZES), each.facts()
            parts += [f"### {heading}", *told, *columns(told[1]), *report.image(each, each.headline, on)]
            parts += [*each.command(), *filter(None, [facts and f"{escaped(facts)}."])]
            if each.of.name == "attention" and report.attention:
                parts.append(f"[Every row, with its bars]({link(report.attention, on)}).")
    return "\n\n".join(parts) + "\n"


def columns(of: str) -> list[str]:
    header = of.split("\n")[0]
    text = " ".join(text for heading, text in COLUMNS.items() if heading in header)
    return [filled(text)] if text else []


def filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def notes(report: Report, device: str) -> str:
    """Returns the Markdown of a device's page with every time, except those on the attention page."""
    on = report.notes_page(device)
    timed = [each for each in report.timed(device) if each.of.name != "attention" or not report.attention]
    shown = [each.of.name for each in timed]
    runs = [run for run in report.devices[device] if any(m.operation in shown for m in run.measurements)]
    title, text = NOTES.format(device=escaped(device), page=link(report.output, on), method=link(METHOD, on)).split(
        "\n\n"
    )
    parts = [title, filled(text), *environment(runs)]
    on_page = [each.title for each in report.headlines(device)]
    for each in timed:
        parts += section(report, each, on, is_on_page=each.title in on_page)
    return "\n\n".join([*parts, *copies(runs), *skipped(runs)]) + "\n"


def section(report: Report, each: Timed, on: Path, *, is_on_page: bool) -> list[str]:
    """Returns every measurement of one operation, grouped by case."""
    calls = f"Medians of {tables.calls(each.rows)} each; clock {escaped(each.clock)}."
    parts = [f"## {capitalized(escaped(each.title))}", calls, *report.image(each, each.headline, on)]
    if each.of.short:
        parts += each.lines(each.of.lines) if each.of.lines else []
    elif not is_on_page:
        parts += each.short(SUMMARY_SIZES)
    for case, rows in tables.by_case(each.rows).items():
        plot = report.image(each, case, on) if case != each.headline else []
        times = f"{len(rows)} time{'s' if len(rows) > 1 else ''}"
        parts.append(details(f"{case or each.title}: {times}", [*plot, *tables.side_by_side(each.of, rows)]))
    return parts


def details(summary: str, parts: Sequence[str]) -> str:
    return "\n\n".join([f"<details><summary>{escaped(summary)}</summary>", *parts, "</details>"])


def environment(runs: Sequence[Run]) -> list[str]:
    """Returns the commands of the runs, and a table of their environments."""
    commands, rows = [run.environment["command"] for run in runs if "command" in run.environment], []
    for name in dict.fromkeys(name for run in runs for name in run.environment if name not in ("device", "command")):
        programs = programs_by_text((run.environment.get(name, "-"), run.short_program) for run in runs)
        rows.append([escaped(name), "; ".join(with_programs(programs)) if len(programs) > 1 else next(iter(programs))])
    parts = [console(commands)] if commands else []
    return [*parts, table(["", "measured with"], rows, left=2)] if rows else parts


def programs_by_text(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Groups (text, program) pairs by text."""
    groups: dict[str, dict[str, None]] = {}
    for text, program in pairs:
        groups.setdefault(escaped(text), {})[escaped(program)] = None
    return {text: [*programs] for text, programs in groups.items()}


def with_programs(programs: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{text} ({', '.join(of)})" for text, of in programs.items()]


def copies(runs: Sequence[Run]) -> list[str]:
    rows = [
        [escaped(run.short_program), number(moved / 1e6), number(moved / times.seconds / 1e9), with_spread(times)]
        for run in runs
        for moved, times in sorted(run.copies, key=lambda pair: pair[0])
    ]
    if not rows:
        return []
    header = ["measured by", "MB moved", "GB/s", "microseconds"]
    return ["## Copies", details(f"what shares are of: {len(rows)} times", [table(header, rows)])]


def skipped(runs: Sequence[Run]) -> list[str]:
    pairs = [
        (f"{what}: {(reason.strip() or 'no reason given').splitlines()[0]}", run.short_program)
        for run in runs
        for what, reason in run.skipped
    ]
    lines = [f"- {text}" for text in with_programs(programs_by_text(pairs))]
    return ["## Not measured", "\n".join(lines)] if lines else []


def every_row_of_attention(report: Report) -> str:
    """Returns the part of the attention page between its markers: every row with its bars."""
    found = [each for device in report.devices for each in report.timed(device) if each.of.name == "attention"]
    if not found:
        raise ResultsError("no measurements of attention")
    each = found[0]
    first = f"{escaped(each.device)}: {escaped(each.facts())}."
    return "\n\n".join([first, *each.command(), *each.lines(ATTENTION)]) + "\n"


def replaced(path: Path, part: str) -> str:
    """Returns the text of a page with `part` between its attention markers.

    Raises:
      ResultsError: If the page does not contain each marker exactly once, in order.
    """
    text, begin_line, end_line = path.read_text(), "<!-- attention: begin -->\n", "<!-- attention: end -->\n"
    before, begin, rest = text.partition(begin_line)
    _, end, after = rest.partition(end_line)
    if not end or text.count(begin_line) + text.count(end_line) > 2:
        raise ResultsError(f"{path}: expected one line {begin_line.strip()}, and below it one {end_line.strip()}")
    return f"{before}{begin}{part}{end}{after}"
