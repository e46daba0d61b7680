"""Turns the JSON files of benchmark runs into a page with plots, such as docs/benchmarks.md, and a part of README.md.

`python -m benchmarks.report write.json gather.json`, from the source tree; needs the extra `bench`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.report import attention, pages, results
from benchmarks.report.pages import Report
from benchmarks.report.records import ResultsError

BEGIN, END = "<!-- benchmarks: begin -->\n", "<!-- benchmarks: end -->\n"
SERVE_BEGIN, SERVE_END = "<!-- serve: begin -->\n", "<!-- serve: end -->\n"
ATTENTION_BEGIN, ATTENTION_END = "<!-- attention: begin -->\n", "<!-- attention: end -->\n"

OUTPUT = flags.DEFINE_string("output", "bench/report.md", "Markdown file to write")
PLOTS = flags.DEFINE_string("plots", "bench/plots", "folder to put the plots in")
README = flags.DEFINE_string(
    "readme", None, "Markdown file to put a plot and a table of the first device into, between its benchmarks markers"
)
KERNELS = flags.DEFINE_string(
    "kernels", None, "Markdown file to put the table of attention of the first device into, between its markers"
)
SERVING = flags.DEFINE_string(
    "serving", None, "Markdown file to put tokens a second of the first device into, between its serve markers"
)


def replaced(readme: Path, part: str, begin_line: str = BEGIN, end_line: str = END) -> str:
    """The text of a Markdown file such as README, with a new part between its markers.

    Raises:
      ResultsError: it has not each of them once, one after the other.
      OSError: it cannot be read.
    """
    return replaced_in(readme, readme.read_text(), part, begin_line, end_line)


def replaced_in(readme: Path, text: str, part: str, begin_line: str, end_line: str) -> str:
    """The same of a text that is to be that file's."""
    before, begin, rest = text.partition(begin_line)
    _, end, after = rest.partition(end_line)
    if not end or text.count(begin_line) + text.count(end_line) > 2:
        raise ResultsError(f"{readme}: expected one line {begin_line.strip()}, and below it one {end_line.strip()}")
    return f"{before}{begin}{part}{end}{after}"


def write(report: Report, readme: Path | None, kernels: Path | None = None, serving: Path | None = None) -> list[Path]:
    """Writes the plots, the page, and the parts of other pages; nothing where one cannot be made.

    Returns:
      What was written.

    Raises:
      ResultsError: matplotlib is missing, or a page cannot take its part.
      OSError: a file cannot be read or written.
    """
    try:
        from benchmarks.report import plots
    except ModuleNotFoundError as error:
        raise ResultsError(f"plots need matplotlib, of the extra `bench`: {error}") from error
    texts = {report.output: pages.page(report)}
    if readme is not None:
        texts[readme] = replaced(readme, pages.readme_part(report, readme))
    if kernels is not None:
        part = attention.part(next(iter(report.devices.values())))
        texts[kernels] = replaced(kernels, part, ATTENTION_BEGIN, ATTENTION_END)
    if serving is not None:
        part = pages.serving_part(report, serving)
        text = texts.get(serving) or serving.read_text()
        texts[serving] = replaced_in(serving, text, part, SERVE_BEGIN, SERVE_END)
    styles = plots.styles(each.peer for each in report.measurements)
    for folder in (report.plots, report.output.parent):
        folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for operation in (each for device in report.devices for each in report.operations(device)):
        for case, found in report.slices(operation).items():
            drawn.append(report.plots / operation.plot_name(case))
            title = operation.plot_title(case, found)
            of_case = [each for each in operation.measurements if str(each.subject.get("case", "")) == case]
            figure = plots.draw_rates(of_case, title) if operation.is_serving else plots.draw(found, styles, title)
            plots.save(figure, drawn[-1])
    for path, text in texts.items():
        path.write_text(text)
    return [*drawn, *texts]


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        devices = results.read([Path(name) for name in argv[1:]])
        report = Report(devices, Path(OUTPUT.value), Path(PLOTS.value))
        others = (Path(flag.value) if flag.value else None for flag in (README, KERNELS, SERVING))
        written = write(report, *others)
    except (ResultsError, OSError, UnicodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    for path in sorted({*report.plots.glob("*.png")} - {*written}):
        print(f"of another report: {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    app.run(main)
