"""Tables of measurements: one line per measurement with its baselines, or all peers side by side."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import bars, shapes
from benchmarks.measurement import OWN, Column, Measurement, Rows, Word, escaped
from benchmarks.timing import CLOCK_WORDS, Timing
from kvjax import CacheLayout, KVCacheDType
from kvjax.table import markdown_table

HEADINGS = {"num_kv_heads": "KV heads", "prefix_len": "shared", "step": "each layer"}
"""Headings of fields that differ from the field name."""

TEXTS = ("call", "case", "dtype", "layout", "slots", "step", "steps")  # text fields; the others are numbers
ORDERS: Mapping[str, Sequence[str]] = {
    "case": [*shapes.CASES_BY_NAME],
    "slots": [each.value for each in shapes.Slots],
    "layout": [each.value for each in CacheLayout],
    "dtype": [each.value for each in KVCacheDType],
}
"""Sort orders of text fields."""


def heading(key: str) -> str:
    return HEADINGS.get(key, key.removeprefix("num_").replace("_", " "))


def about(key: str, named: str | None = None, is_text: bool = False) -> Column:
    form = "{}" if key in TEXTS else "{:,}"
    return Column(named or heading(key), lambda m, _: m.subject.get(key), form, is_text or key in TEXTS)


@dataclasses.dataclass(frozen=True)
class Lines:
    """A table with one line per measurement selected by `keep`, sorted by the fields in `order`."""

    title: str
    columns: Sequence[Column]
    note: str = ""
    keep: Callable[[Measurement], bool] = lambda m: m.peer == OWN
    order: Sequence[str] = ()

    def chosen(self, rows: Rows) -> list[Measurement]:
        def sort_key(m: Measurement) -> list[int]:
            return [
                ORDERS[key].index(str(m.subject[key])) if key in ORDERS else int(m.subject[key]) for key in self.order
            ]

        return sorted(filter(self.keep, rows), key=sort_key)

    def table(self, rows: Rows) -> str:
        """Returns the table, or an empty string if it has no lines."""
        cells = [[column.text(m, rows) for column in self.columns] for m in self.chosen(rows)]
        left = sum(column.is_text for column in self.columns)
        return table([column.heading for column in self.columns], cells, left=left) if cells else ""

    def bars(self, rows: Rows) -> str:
        """Returns a sentence with the number of bars that hold."""
        return bars.summary([verdict for m in self.chosen(rows) for verdict in bars.verdicts(m, rows)])


@dataclasses.dataclass(frozen=True)
class Operation:
    """How to report the measurements of an operation."""

    name: str  # as in files
    about: Sequence[str]  # the fields that identify a measurement, text before numbers
    found: Sequence[Column] = ()  # facts that have their own table
    lines: Lines | None = None  # the table of kvjax's times, with bars
    against: str | None = None  # the size on the x axis of plots, and in summaries
    along: Sequence[str] = ()  # sizes that vary with it
    short: Lines | None = None  # the summary table; by default kvjax compared with others
    is_headline: bool = False  # whether the summary page includes the operation


# Formatting.


def number(value: float) -> str:
    """Formats a time or rate with at least three significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:#.3g}"


def short(seconds: float) -> str:
    return number(seconds * 1e6)


def with_spread(times: Timing) -> str:
    return f"{short(times.seconds)} ({'-'.join(map(short, times.spread))})"


def rate(m: Measurement) -> str:
    if m.bytes_per_second is None:
        return "-"
    part = m.copy_share
    share = "" if part is None else f" ({part:.1%})" if part >= 0.01 else f" ({part:.2%})"
    return f"{number(m.bytes_per_second / 1e9)}{share}"


def word(value: Word | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else escaped(value)


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def clocks(rows: Iterable[Measurement]) -> str:
    return " and ".join(dict.fromkeys(CLOCK_WORDS[each.clock] for each in rows))


def calls(rows: Iterable[Measurement]) -> str:
    counts = [len(each.times.samples) for each in rows]
    least, most = min(counts), max(counts)
    return f"{least} to {most} calls" if least < most else f"{most} calls" if most > 1 else "1 call"


def table(header: Iterable[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Returns a Markdown table whose first `left` columns are left-aligned text."""
    return markdown_table([*map(escaped, header)], rows, left=left)


# Peers side by side.


def grouped[Key: Hashable](rows: Iterable[Measurement], key: Callable[[Measurement], Key]) -> dict[Key, Rows]:
    """Groups measurements by a key, in order of first appearance."""
    groups: dict[Key, Rows] = {}
    for each in rows:
        groups.setdefault(key(each), Rows()).append(each)
    return groups


def by_case(rows: Iterable[Measurement]) -> dict[str, Rows]:
    """Groups measurements by case; `""` for those without a case."""
    return grouped(rows, lambda each: str(each.subject.get("case", "")))


def peers(rows: Iterable[Measurement]) -> list[str]:
    """Returns the peers, kvjax first, then in order of first appearance."""
    return sorted(dict.fromkeys(each.peer for each in rows), key=lambda peer: peer != OWN)


def values(rows: Iterable[Measurement], key: str) -> list[Word | None]:
    """Returns the values of a field: numbers sorted, text in order of first appearance."""
    found = dict.fromkeys(each.subject.get(key) for each in rows)
    return sorted(found, key=lambda value: value if isinstance(value, int) else -1)


def constants(of: Operation, rows: Sequence[Measurement]) -> dict[str, Word]:
    """Returns the fields that have the same value in all rows."""
    subject = rows[0].subject
    return {key: subject[key] for key in of.about if len(values(rows, key)) == 1 and key in subject}


def fields(subject: Mapping[str, Word]) -> str:
    """Formats fields and their values; a case appears without its field name."""
    return ", ".join(
        word(value) if key == "case" else f"{heading(key)} {word(value)}" for key, value in subject.items()
    )


ALWAYS = ("dtype", "num_tokens")  # fields that are columns even if constant


def side_by_side(of: Operation, rows: Rows) -> list[str]:
    """Returns tables of one case with the peers side by side: times, then rates if bytes are known, then facts."""
    same = {key: value for key, value in constants(of, rows).items() if key not in ALWAYS}
    present = [key for key in of.about if any(key in m.subject for m in rows)]
    columns = [key for key in present if key not in (*same, "case")]
    about = {key: value for key, value in same.items() if key != "case"}
    ranks = {key: values(rows, key) for key in columns}
    groups = grouped(rows, lambda m: tuple(ranks[key].index(m.subject.get(key)) for key in columns))
    lines = [{m.peer: m for m in groups[ranking]} for ranking in sorted(groups)]
    who = peers(rows)

    def made(cell: Callable[[Measurement], str], header: Sequence[str] = (), extra: Any = lambda line: []) -> str:
        cells = []
        for line in lines:
            head = [word(next(iter(line.values())).subject.get(key)) for key in columns]
            cells.append([*head, *extra(line.values()), *(cell(line[peer]) if peer in line else "-" for peer in who)])
        left = sum(key in TEXTS for key in columns)
        return table([*map(heading, columns), *header, *who], cells, left=left)

    parts = [f"{capitalized(fields(about))}."] if about else []
    parts += ["Microseconds:", made(lambda m: with_spread(m.times))]
    if any(m.bytes_moved for m in rows):
        title = "GB/s (share):" if any(m.copy for m in rows) else "GB/s:"
        parts += [title, made(rate, ["MB moved", "copy"], moved)]
    for fact in of.found:
        if any(fact.value(m, rows) is not None for m in rows):
            parts += [f"{capitalized(fact.heading)}:", made(lambda m, fact=fact: fact.text(m, rows))]  # type: ignore[misc]
    return parts


def moved(line: Iterable[Measurement]) -> list[str]:
    megabytes = dict.fromkeys(number(each.bytes_moved / 1e6) for each in line if each.bytes_moved)
    copies = dict.fromkeys(short(each.copy.seconds) for each in line if each.copy)
    return [" or ".join(megabytes) or "-", " or ".join(copies) or "-"]


# kvjax next to the others.


def drawn(of: Operation, rows: Rows) -> Rows:
    """Selects the measurements to plot: one case, varying only in dtype, peer and size.

    Other fields keep the value of the first measurement. Keeps only the dtypes with the most sizes. Returns no rows if
    there are fewer than two sizes.
    """
    size, found = of.against, rows
    if size is None:
        return Rows()
    for key in of.about:
        if found and key not in (size, "dtype", *of.along):
            first = found[0].subject.get(key)
            found = Rows(m for m in found if m.subject.get(key) == first)
    points = {(m.dtype, m.peer, m.subject[size]) for m in found}
    counts = collections.Counter(dtype for dtype, _ in {(m.dtype, m.subject[size]) for m in found})
    most = max(counts.values(), default=0)
    if most < 2 or len(points) < len(found):
        return Rows()
    return Rows(m for m in found if counts[m.dtype] == most)


def headline(rows: Rows) -> Rows:
    return max(by_case(rows).values(), key=len)


RATIOS = "Of all others, the time as a multiple of kvjax's: above 1 kvjax is faster."


def summary(of: Operation, rows: Rows, num_sizes: int) -> list[str]:
    """Returns a caption and a small table of kvjax and its peers, or an empty list if there is nothing to compare."""
    shown = drawn(of, headline(rows))
    who, size, cells = peers(shown), of.against, []
    if size is None or OWN not in who or len(who) == 1:
        return []
    for dtype in values(shown, "dtype"):
        own = sorted((m for m in shown if (m.peer, m.dtype) == (OWN, dtype)), key=lambda m: m.subject[size])
        for m in some(own, num_sizes):
            others = [bars.over(other, m) if (other := shown.like(m, peer=peer)) else None for peer in who[1:]]
            ratios = ["-" if each is None else f"{each:.2f}x" if each < 100 else f"{each:,.0f}x" for each in others]
            cells.append([word(dtype), word(m.subject[size]), short(m.seconds), rate(m), *ratios])
    about = {key: value for key, value in constants(of, shown).items() if key not in (size, "dtype", *of.along)}
    caption = f"{capitalized(escaped(of.name))}: {fields(about)}; clock {escaped(shown[0].clock)}."
    header = ["dtype", heading(size), f"{OWN}, microseconds", "GB/s (share)", *who[1:]]
    return [f"{caption}\n{RATIOS}", table(header, cells)]


def some[Value](of: Sequence[Value], count: int) -> list[Value]:
    """Returns at most `count` evenly spaced elements, including the first and the last."""
    if len(of) <= count:
        return [*of]
    return [of[round(index * (len(of) - 1) / (count - 1))] for index in range(count)]
