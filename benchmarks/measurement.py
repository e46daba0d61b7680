"""What was timed: every program makes `Measurement`s, JSON files hold them, and every table and plot reads them."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
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
    subject: Mapping[str, Word]  # the shape, dtype and sizes that it was timed for; nothing that does not apply
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
        """The rate of this over that of the copy."""
        return self.copy.seconds / self.seconds if self.copy else None

    @property
    def key(self) -> tuple[object, ...]:
        """What no two measurements of a device have in common."""
        return self.operation, self.clock, self.peer, *sorted(self.subject.items())

    def __str__(self) -> str:
        return ", ".join([self.operation, *map(str, self.subject.values()), self.peer, f"by {self.clock}"])

    def record(self) -> dict[str, Any]:
        """What the JSON file says of it."""
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


def from_record(record: Any, place: str, kinds: Mapping[str, type]) -> Measurement:
    """A measurement of a file.

    Args:
      record: the object, which stands at `place`.
      kinds: the fields of the subject, and what they are.

    Raises:
      ResultsError: a field is missing, or is not of its kind.
    """
    clock = field(record, "clock", str, place)
    if clock not in [*Clock]:
        raise ResultsError(f"{place}: 'clock': got {clock!r}, expected one of {[each.value for each in Clock]}")
    copy = field(record, "copy_seconds", float, place, optional=True)
    kernels = field(record, "kernels", list, place, optional=True) or []
    subject = {name: field(record, name, kind, place, optional=True) for name, kind in kinds.items()}
    return Measurement(
        field(record, "operation", str, place),
        subject,
        field(record, "peer", str, place),
        Timing(samples(record, place), Clock(clock), tuple(map(str, kernels))),
        field(record, "bytes_moved", int, place, optional=True),
        None if copy is None else Timing((copy,), Clock(clock)),
        {name: value for name, value in record.items() if name not in (*EVERY_FIELD, *kinds)},
    )


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


KINDS = {
    str: "a string",
    int: "a positive whole number",
    float: "a positive number",
    list: "a list",
    dict: "an object",
}


def checked(value: Any, kind: type, place: str) -> Any:
    """A value of a file, where no time and no size comes near 1e18.

    Raises:
      ResultsError: it is not of its kind.
    """
    fits = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
    if not fits or (kind in (int, float) and not 0 < value < 1e18):
        words = json.dumps(value)
        raise ResultsError(f"{place}: got {words[:40]}{'...' * (len(words) > 40)}, expected {KINDS[kind]}")
    return value


def field(record: Any, name: str, kind: type, place: str, *, optional: bool = False) -> Any:
    """A field of an object of a file; `None` where it is optional and missing or null."""
    value = checked(record, dict, place).get(name)
    if value is None and optional:
        return None
    if name not in record:
        raise ResultsError(f"{place}: {name!r} is missing")
    return checked(value, kind, f"{place}: {name!r}")


def samples(record: Any, place: str) -> tuple[float, ...]:
    """The samples of an object of a file."""
    found = field(record, "samples", list, place)
    if not found:
        raise ResultsError(f"{place}: 'samples': got none, expected the seconds of each repetition")
    return tuple(checked(sample, float, f"{place}: samples[{number}]") for number, sample in enumerate(found))


def known(subject: Mapping[str, Any]) -> dict[str, Any]:
    """Fields without those that do not apply, as JSON has them."""
    return {name: plain(value) for name, value in subject.items() if value is not None}


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
