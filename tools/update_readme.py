"""Runs the demo and puts what it prints, up to the generated text, between the demo's markers in README.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- demo: begin -->\n", "<!-- demo: end -->\n"


def main() -> None:
    """Rewrites README.md in place."""
    printed = subprocess.run([sys.executable, "-m", "kvjax", "demo"], stdout=subprocess.PIPE, text=True, check=True)
    table, legend, *_ = printed.stdout.split("\n\n")
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}{table}\n\n```text\n{legend}\n```\n{END}{after}")


if __name__ == "__main__":
    main()
