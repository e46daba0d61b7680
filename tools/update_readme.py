"""Inserts generated tables between the markers of README.md and docs/notes/benchmarks-scales.md.

Without an argument it runs the demo for its tables. With a file that `benchmarks.accuracy --json` wrote, README's table
of accuracy is that file's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str]) -> None:
    """Rewrites the files in place."""
    if arguments:
        sys.path.append(str(Path(__file__).parents[1]))
        from benchmarks.accuracy_table import as_markdown

        _replace(ROOT / "README.md", "accuracy", as_markdown(json.loads(Path(arguments[0]).read_text())))
        return
    command = [sys.executable, "-m", "kvjax", "demo", "--no-pretrained", "--scales"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    table, legend, scales, scales_legend, *_ = printed.stdout.split("\n\n")
    _replace(ROOT / "README.md", "demo", f"{table}\n\n```text\n{legend}\n```")
    _replace(ROOT / "docs/notes/benchmarks-scales.md", "scales", f"{scales}\n\n```text\n{scales_legend}\n```")


def _replace(page: Path, name: str, text: str) -> None:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
