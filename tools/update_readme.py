"""Runs the demo and inserts its tables between the markers of README.md and docs/notes/benchmarks-scales.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Rewrites both in place."""
    command = [sys.executable, "-m", "kvjax", "demo", "--no-pretrained", "--scales"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    table, legend, scales, scales_legend, *_ = printed.stdout.split("\n\n")
    _replace(ROOT / "README.md", "demo", table, legend)
    _replace(ROOT / "docs/notes/benchmarks-scales.md", "scales", scales, scales_legend)


def _replace(page: Path, name: str, table: str, legend: str) -> None:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}{table}\n\n```text\n{legend}\n```\n{end}{after}")


if __name__ == "__main__":
    main()
