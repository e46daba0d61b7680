"""The Markdown table of an operation: one line for each measurement."""

from __future__ import annotations

import html
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from benchmarks import bars
from benchmarks.measurement import OWN, Measurement, Rows
from benchmarks.timing import CLOCK_WORDS
from kvjax.table import markdown_table

HEADINGS = {"num_kv_heads": "KV heads", "num_seqs": "sequences", "index_copy_ratio": "x index_copy_"}
"""Headings of fields that differ from the field's name."""


def heading(key: str) -> str:
    return HEADINGS.get(key, key.removeprefix("num_").replace("_", " "))


def grouped[Key: Hashable](rows: Iterable[Measurement], key: Callable[[Measurement], Key]) -> dict[Key, Rows]:
    """Groups measurements by a key, in order of first appearance."""
    groups: dict[Key, Rows] = {}
    for each in rows:
        groups.setdefault(key(each), Rows()).append(each)
    return groups


def of_operations(rows: Iterable[Measurement]) -> list[str]:
    """Returns a heading, a caption and a table for each operation and clock."""
    parts = []
    for (operation, clock), some in grouped(rows, lambda m: (m.operation, m.clock)).items():
        constants = ", ".join(f"{heading(key)} {value}" for key, value in _constants(some).items())
        caption = f"{constants[:1].upper()}{constants[1:]}. " if constants else ""
        verdicts = [verdict for m in some for verdict in bars.verdicts(m, some)]
        caption += f"Medians of {_calls(some)}, by {CLOCK_WORDS[clock]}.{bars.summary(verdicts)}"
        parts += [f"### {operation.capitalize()}", caption, table(some)]
    return parts


def table(rows: Rows) -> str:
    """Returns the table of an operation: what a line is of, who was timed, times, rates, facts and bars.

    Fields that are the same in every line are left out; the caption has them.
    """
    constants = _constants(rows)
    subject = [key for key in dict.fromkeys(key for m in rows for key in m.subject) if key not in constants]
    facts = dict.fromkeys(key for m in rows for key, value in m.facts.items() if isinstance(value, (int, float, str)))
    columns: list[tuple[str, Callable[[Measurement], Any]]] = [
        *((heading(key), lambda m, key=key: m.subject.get(key)) for key in subject),
        ("by", lambda m: m.peer),
        ("us", lambda m: f"{m.seconds * 1e6:,.2f}"),
        ("5-95%", lambda m: "-".join(f"{each * 1e6:,.2f}" for each in m.times.spread)),
        ("x kvjax", lambda m: _ratio(m, rows)),
        ("MB moved", lambda m: m.bytes_moved and f"{m.bytes_moved / 1e6:,.3f}"),
        ("GB/s", lambda m: m.bytes_moved and f"{m.bytes_moved / m.seconds / 1e9:,.4g}"),
        ("of copy", lambda m: m.copy_share and f"{m.copy_share:.1%}"),
        ("kernels", lambda m: len(m.times.kernels) or None),
        *((heading(key), lambda m, key=key: m.facts.get(key)) for key in facts),
        ("bars", lambda m: "; ".join(map(str, bars.of(m)))),
        ("reached", lambda m: "; ".join(bars.verdicts(m, rows))),
    ]
    ordered = [m for some in grouped(rows, lambda m: tuple(m.subject.items())).values() for m in some]
    cells = [(name, [_word(value(m)) for m in ordered]) for name, value in columns]
    shown = [(name, words) for name, words in cells if {*words} != {"-"}]
    lines = [*zip(*(words for _, words in shown), strict=True)]
    return markdown_table([name for name, _ in shown], lines, left=len(subject) + 1)


def _constants(rows: Rows) -> dict[str, Any]:
    first = rows[0].subject
    every = {key: value for key, value in first.items() if all(m.subject.get(key) == value for m in rows)}
    return every if len(rows) > 1 else {}


def _ratio(m: Measurement, rows: Rows) -> str | None:
    own = rows.like(m, peer=OWN)
    return f"{m.seconds / own.seconds:.2f}" if own and m.peer != OWN else None


def _calls(rows: Sequence[Measurement]) -> str:
    counts = [len(m.times.samples) for m in rows]
    least, most = min(counts), max(counts)
    return f"{least} to {most} calls" if least < most else f"{most} call{'s' if most > 1 else ''}"


def _word(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
