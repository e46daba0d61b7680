"""How times, rates and the words of a file are put in Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.report.results import CASE, Measurement, Timed, Word
from benchmarks.report.slices import label
from kvjax.table import markdown_table


def number(value: float) -> str:
    """A time or a rate, in three digits or more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:#.3g}"


def microseconds(seconds: float) -> str:
    """A time."""
    return number(seconds * 1e6)


def with_spread(each: Timed) -> str:
    """A time and between which times nine of ten calls lie."""
    return f"{microseconds(each.seconds)} ({'-'.join(map(microseconds, each.spread))})"


def rate(each: Measurement) -> str:
    """GB/s and the share of the copy's rate."""
    if each.bytes_per_second is None:
        return "-"
    share = each.copy_share
    words = "" if share is None else f" ({share:.1%})" if share >= 0.01 else f" ({share:.2%})"
    return f"{number(each.bytes_per_second / 1e9)}{words}"


def ratio(other: Measurement | None, own: Measurement) -> str:
    """The time of another over kvjax's."""
    if other is None:
        return "-"
    times = other.seconds / own.seconds
    return f"{times:.2f}x" if times < 100 else f"{times:,.0f}x"


def calls(measurements: Iterable[Timed]) -> str:
    """How often each was timed."""
    counts = [len(each.samples) for each in measurements]
    least, most = min(counts), max(counts)
    return f"{least} to {most} calls" if least < most else f"{most} calls" if most > 1 else "1 call"


def escaped(words: object) -> str:
    """What a file says, where Markdown would take some of it for its own."""
    return html.escape(" ".join(str(words).split()), quote=False).replace("|", "\\|")


def word(value: Word | None) -> str:
    """The value of a field."""
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else escaped(value)


def fields(of: Mapping[str, Word]) -> str:
    """Fields and their values, a case without saying that it is one."""
    return ", ".join(
        word(value) if name == CASE else f"{escaped(label(name))} {word(value)}" for name, value in of.items()
    )


def capitalized(words: str) -> str:
    """The same as the beginning of a sentence."""
    return words[:1].upper() + words[1:]


def table(header: Iterable[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table, of which the first `left` columns are words."""
    return markdown_table([*map(escaped, header)], rows, left=left)


def details(summary: str, parts: Sequence[str]) -> str:
    """What is shown only when asked for."""
    return "\n\n".join([f"<details><summary>{escaped(summary)}</summary>", *parts, "</details>"])
