"""Generates docs/benchmarks.md, notes with every time, and plots from the JSON files of benchmark runs.

Run `python -m benchmarks.report write.json gather.json` from the source tree. It needs the `bench` extra.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.measurement import ResultsError
from benchmarks.report import pages, results
from benchmarks.report.pages import Report

OUTPUT = flags.DEFINE_string("output", "bench/report.md", "Markdown file to write")
PLOTS = flags.DEFINE_string("plots", "bench/plots", "folder to put the plots in")
NOTES = flags.DEFINE_string("notes", None, "folder to put the full tables in (default: notes, beside the output)")
KERNELS = flags.DEFINE_string("kernels", None, "page to put the table of attention into, between its attention markers")


def write(report: Report) -> list[Path]:
    """Writes plots and pages. Generates all pages first, so that a failure there leaves no partial output.

    Returns:
      The paths of the written files.

    Raises:
      ResultsError: If matplotlib is missing, or the attention page lacks its markers.
      OSError: If a file cannot be read or written.
    """
    try:
        from benchmarks.report import plots
    except ModuleNotFoundError as error:
        raise ResultsError(f"plots need matplotlib, of the extra `bench`: {error}") from error
    texts = {report.output: pages.page(report)}
    texts |= {report.notes_page(device): pages.notes(report, device) for device in report.devices}
    if report.attention:
        texts[report.attention] = pages.replaced(report.attention, pages.every_row_of_attention(report))
    styles = plots.styles(each.peer for each in report.measurements)
    for folder in (report.plots, report.output.parent, report.notes):
        folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for timed in (each for device in report.devices for each in report.timed(device)):
        for case, rows in timed.plots().items():
            drawn.append(report.plots / timed.plot_name(case))
            plots.save(plots.figure(timed.of, rows, styles, timed.plot_title(case)), drawn[-1])
    for path, text in texts.items():
        path.write_text(text)
    return [*drawn, *texts]


def main(argv: Sequence[str]) -> int:
    try:
        devices, output = results.read([Path(name) for name in argv[1:]]), Path(OUTPUT.value)
        notes = Path(NOTES.value) if NOTES.value else output.parent / "notes"
        attention = Path(KERNELS.value) if KERNELS.value else None
        report = Report(devices, output, Path(PLOTS.value), notes, attention)
        written = write(report)
    except (ResultsError, OSError, UnicodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    for path in sorted({*report.plots.glob("*.png")} - {*written}):
        print(f"of another report: {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    app.run(main)
