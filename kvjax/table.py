"""Markdown tables that are also readable in a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Returns a table of `rows`, each as long as `header`: the first `left` columns left-aligned, the others right."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def line(values: Sequence[str]) -> str:
        aligned = (
            value.ljust(width) if column < left else value.rjust(width)
            for column, (value, width) in enumerate(zip(values, widths, strict=True))
        )
        return f"| {' | '.join(aligned)} |"

    return "\n".join(map(line, [header, rule, *rows]))
