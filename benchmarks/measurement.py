"""What was timed: every program makes `Measurement`s, JSON files hold them, and every table and plot reads them."""

from __future__ import annotations

import dataclasses
import enum
import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.timing import Clock, Timing

OWN = "kvjax"  # the peer that all others are compared with

type Word = str | int


class ResultsError(Exception):
    """A file that cannot be reported, and why."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one peer took for one thing."""

    operation: str  # that was timed; `operations.OPERATIONS` declares it
    subject: Mapping[str, Any]  # the shape, dtype and sizes that it was timed for; nothing that does not apply
    peer: str  # who did it
    times: Timing
    bytes_moved: int | None = None  # the fewest that it must read and write
    copy: Timing | None = None  # of as many, in the same run; from a file, its median alone
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # what else was found out about it

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
"""What every record has; others are of its subject or facts."""


def from_record(record: Mapping[str, Any], about: Sequence[str]) -> Measurement:
    """A measurement of a file, whose subject has the fields `about`.

    Raises:
      KeyError, TypeError, ValueError: a field is missing, or is not of its kind.
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
    """The seconds of each repetition.

    Raises:
      ValueError: there are none, or one is not positive and finite.
    """
    if not samples or not all(0 < each < math.inf for each in samples):
        raise ValueError(f"samples: got {samples}, expected the seconds of each repetition")
    return tuple(samples)


class Rows(list[Measurement]):
    """Measurements among which a table or a bar looks for what a line is compared with."""

    def like(self, of: Measurement, *, peer: str | None = None, **changes: Word) -> Measurement | None:
        """The measurement whose peer and subject differ from another's in these."""
        subject = {**of.subject, **changes}
        return next((m for m in self if m.peer == (peer or of.peer) and m.subject == subject), None)

    def find(self, peer: str | None = None, **subject: Word) -> Rows:
        """Those by a peer with these fields in their subject."""
        return Rows(m for m in self if m.peer == (peer or m.peer) and subject.items() <= m.subject.items())

    @property
    def fastest(self) -> Measurement | None:
        return min(self, key=lambda m: m.seconds, default=None)


type Other = Callable[[Measurement, Rows], Measurement | None]  # what a line is compared with


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table with a line for each of some measurements."""

    heading: str
    value: Callable[[Measurement, Rows], Any]  # of a line, which may look among all others; None is shown as "-"
    form: str = "{:,.2f}"
    is_text: bool = False  # words rather than a number
    at_least: bool = False  # whether a bar on it is to be reached; else it is not to be exceeded

    def words(self, m: Measurement, rows: Rows) -> str:
        value = self.value(m, rows)
        return "-" if value is None else escaped(self.form.format(value))

    def of(self, heading: str, other: Other) -> Column:
        """The same of another measurement."""

        def value(m: Measurement, rows: Rows) -> Any:
            found = other(m, rows)
            return self.value(found, rows) if found else None

        return Column(heading, value, self.form)

    def named(self, heading: str) -> Column:
        return dataclasses.replace(self, heading=heading)


def fact(heading: str, key: str, unit: float = 1, form: str = "{:,.2f}") -> Column:
    return Column(heading, lambda m, _: None if m.facts.get(key) is None else m.facts[key] * unit, form)


def escaped(words: object) -> str:
    """What a file says, where Markdown would take some of it for its own."""
    return html.escape(" ".join(str(words).split()), quote=False).replace("|", "\\|")


def known(subject: Mapping[str, Any]) -> dict[str, Any]:
    """Fields without those that do not apply, as JSON has them."""
    return {name: plain(value) for name, value in subject.items() if value is not None}


def plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
