"""Measurements: programs create them, JSON files store them, and tables, bars and plots read them."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.timing import Clock, Timing

OWN = "kvjax"  # the peer that others are compared with
SCHEMA = 1  # of the JSON file; readers must accept unknown and missing fields


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The times of one job by one peer."""

    operation: str
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
    def copy_share(self) -> float | None:
        return self.copy.seconds / self.seconds if self.copy else None

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
            "about": [*self.subject],
        }


EVERY_FIELD = ("operation", "peer", "clock", "seconds", "samples", "bytes_moved", "copy_seconds", "kernels", "about")
"""Fields of every record; others belong to its subject, as `about` says, or to its facts."""


def from_record(record: Mapping[str, Any]) -> Measurement:
    about, clock, copied = record["about"], Clock(record["clock"]), record["copy_seconds"]
    return Measurement(
        record["operation"],
        {name: record[name] for name in about},
        record["peer"],
        Timing(tuple(record["samples"]), clock, tuple(record["kernels"])),
        record["bytes_moved"],
        None if copied is None else Timing((copied,), clock),
        {name: value for name, value in record.items() if name not in (*EVERY_FIELD, *about)},
    )


def read(path: Path) -> tuple[dict[str, str], Rows]:
    """Reads the environment and the measurements of a program's JSON file."""
    file = json.loads(path.read_bytes())
    if file["schema"] != SCHEMA:
        raise ValueError(f"{path}: schema: got {file['schema']}, expected {SCHEMA}")
    return file["environment"], Rows(map(from_record, file["measurements"]))


class Rows(list[Measurement]):
    """Measurements in which tables and bars look up baselines."""

    def like(self, of: Measurement, *, peer: str | None = None, **changes: str | int) -> Measurement | None:
        """Returns the measurement like `of` except for its peer and `changes` to its subject, or `None`."""
        subject = {**of.subject, **changes}
        return next((m for m in self if m.peer == (peer or of.peer) and m.subject == subject), None)

    def find(self, peer: str | None = None, **subject: str | int) -> Rows:
        """Returns the measurements by `peer` (any by default) whose subject contains these fields."""
        return Rows(m for m in self if m.peer == (peer or m.peer) and subject.items() <= m.subject.items())

    @property
    def fastest(self) -> Measurement | None:
        return min(self, key=lambda m: m.seconds, default=None)


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
