"""Measurements: programs create them, JSON files store them, and tables and plots show them."""

from __future__ import annotations

import dataclasses
import enum
import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.timing import Clock, Timing

OWN = "kvjax"  # the peer that others are compared with

type Word = str | int


class ResultsError(Exception):
    """Raised if results cannot be read or reported."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The times of one job by one peer."""

    operation: str  # a name in `operations.OPERATIONS`
    subject: Mapping[str, Any]  # shape, dtype and sizes
    peer: str
    times: Timing
    bytes_moved: int | None = None  # the minimum to read and write
    copy: Timing | None = None  # that moves as many bytes in the same run; only the median if read from a file
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # additional results

    def __post_init__(self) -> None:
        object.__setattr__(self, "subject", known(self.subject))

    @property
    def seconds(self) -> float:
        return self.times.seconds

    @property
    def clock(self) -> Clock:
        return self.times.clock

    @property
    def dtype(self) -> str:
        return str(self.subject.get("dtype", ""))

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.bytes_moved is None else self.bytes_moved / self.seconds

    @property
    def copy_share(self) -> float | None:
        return self.copy.seconds / self.seconds if self.copy else None

    @property
    def key(self) -> tuple[object, ...]:
        return self.operation, self.clock, self.peer, *sorted(self.subject.items())

    def __str__(self) -> str:
        return ", ".join([self.operation, *map(str, self.subject.values()), self.peer, f"by {self.clock}"])

    def record(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            **self.subject,
            "peer": self.peer,
            "clock": self.clock,
            "seconds": self.seconds,
            "samples": self.times.samples,
            "bytes_moved": self.bytes_moved,
            "copy_seconds": self.copy.seconds if self.copy else None,
            "kernels": self.times.kernels,
            **self.facts,
        }


EVERY_FIELD = ("operation", "peer", "clock", "seconds", "samples", "bytes_moved", "copy_seconds", "kernels")
"""Fields of every record; others belong to its subject or facts."""


def from_record(record: Mapping[str, Any], about: Sequence[str]) -> Measurement:
    """Reads a measurement whose subject has the fields `about`.

    Raises:
      KeyError, TypeError, ValueError: If a field is missing or invalid.
    """
    clock, copied = Clock(record["clock"]), record.get("copy_seconds")
    return Measurement(
        record["operation"],
        {name: record.get(name) for name in about},
        record["peer"],
        Timing(positive(record["samples"]), clock, tuple(record.get("kernels") or ())),
        record.get("bytes_moved"),
        None if copied is None else Timing(positive([copied]), clock),
        {name: value for name, value in record.items() if name not in (*EVERY_FIELD, *about)},
    )


def positive(samples: Sequence[float]) -> tuple[float, ...]:
    """Validates the seconds of each repetition.

    Raises:
      ValueError: If there are none, or one is not positive and finite.
    """
    if not samples or not all(0 < each < math.inf for each in samples):
        raise ValueError(f"samples: got {samples}, expected the seconds of each repetition")
    return tuple(samples)


class Rows(list[Measurement]):
    """Measurements in which tables and bars look up baselines."""

    def like(self, of: Measurement, *, peer: str | None = None, **changes: Word) -> Measurement | None:
        """Returns the measurement like `of` except for its peer and `changes` to its subject, or `None`."""
        subject = {**of.subject, **changes}
        return next((m for m in self if m.peer == (peer or of.peer) and m.subject == subject), None)

    def find(self, peer: str | None = None, **subject: Word) -> Rows:
        """Returns the measurements by `peer` (any by default) whose subject contains these fields."""
        return Rows(m for m in self if m.peer == (peer or m.peer) and subject.items() <= m.subject.items())

    @property
    def fastest(self) -> Measurement | None:
        return min(self, key=lambda m: m.seconds, default=None)


type Other = Callable[[Measurement, Rows], Measurement | None]  # selects a baseline


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table with one line per measurement."""

    heading: str
    value: Callable[[Measurement, Rows], Any]  # of a line, given all lines; None is shown as "-"
    form: str = "{:,.2f}"
    is_text: bool = False  # text instead of a number
    at_least: bool = False  # whether a bar is a minimum instead of a maximum

    def text(self, m: Measurement, rows: Rows) -> str:
        value = self.value(m, rows)
        return "-" if value is None else escaped(self.form.format(value))

    def of(self, heading: str, other: Other) -> Column:
        """Returns this column for the measurement that `other` selects."""

        def value(m: Measurement, rows: Rows) -> Any:
            found = other(m, rows)
            return self.value(found, rows) if found else None

        return Column(heading, value, self.form)

    def named(self, heading: str) -> Column:
        return dataclasses.replace(self, heading=heading)


def fact(heading: str, key: str, unit: float = 1, form: str = "{:,.2f}") -> Column:
    return Column(heading, lambda m, _: None if m.facts.get(key) is None else m.facts[key] * unit, form)


def escaped(text: object) -> str:
    """Escapes a value for Markdown."""
    return html.escape(" ".join(str(text).split()), quote=False).replace("|", "\\|")


def known(subject: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not `None`, as plain JSON values."""
    return {name: plain(value) for name, value in subject.items() if value is not None}


def plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
