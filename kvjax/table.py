"""Markdown tables that also read well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table of `rows`, each as long as `header`: the first `left` columns flush left, those of numbers right."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def line(words: Sequence[str]) -> str:
        aligned = (
            word.ljust(width) if column < left else word.rjust(width)
            for column, (word, width) in enumerate(zip(words, widths, strict=True))
        )
        return f"| {' | '.join(aligned)} |"

    return "\n".join(map(line, [header, rule, *rows]))
