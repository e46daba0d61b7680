"""The JSON files of benchmark runs, read and checked: what each measured, on which device."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report.records import Record, ResultsError

SCHEMA = 1

OWN = "kvjax"
"""The peer that all others are held against."""

CASE, DTYPE, NUM_TOKENS = "case", "dtype", "num_tokens"
SHAPE = ("num_kv_heads", "head_size")
"""What a case stands for."""

SUBJECT: Mapping[str, type] = {
    CASE: str,
    **dict.fromkeys(SHAPE, int),
    DTYPE: str,
    "layout": str,
    "slots": str,
    NUM_TOKENS: int,
}
"""What a measurement can be about."""

SIZES = ("num_*", "*_len")
"""Names of further fields of that kind. All others say what was found, unless they alone tell measurements apart."""

type Word = str | int


@dataclasses.dataclass(frozen=True)
class Timed:
    """Something that was repeated.

    Attributes:
      seconds: the median.
      samples: seconds of each repetition.
    """

    seconds: float
    samples: tuple[float, ...]

    @property
    def spread(self) -> tuple[float, float]:
        """Between which times nine of ten repetitions lie: the 5th and the 95th percentile."""
        low, high = np.percentile(self.samples, (5, 95))
        return float(low), float(high)


@dataclasses.dataclass(frozen=True)
class Copy(Timed):
    """A copy, and how many bytes it read and wrote."""

    bytes_moved: int


@dataclasses.dataclass(frozen=True)
class Measurement(Timed):
    """What one peer took for one thing.

    Attributes:
      operation: what was timed.
      clock: what the times were read from.
      peer: who did it.
      subject: the case, dtype and sizes that it was timed for; nothing that does not apply.
      bytes_moved: the fewest bytes that must be read and written.
      copy_seconds: a copy that moves as many.
      further: words and numbers that its file has besides.
      place: where in which file it stands.
    """

    operation: str
    clock: str
    peer: str
    subject: Mapping[str, Word]
    bytes_moved: int | None
    copy_seconds: float | None
    further: Mapping[str, Word]
    place: str

    @property
    def bytes_per_second(self) -> float | None:
        """How fast bytes were moved."""
        return None if self.bytes_moved is None else self.bytes_moved / self.seconds

    @property
    def copy_share(self) -> float | None:
        """This rate over that of the copy."""
        return None if self.copy_seconds is None else self.copy_seconds / self.seconds

    @property
    def key(self) -> tuple[object, ...]:
        """What no two measurements of a device have in common."""
        return self.operation, self.clock, self.peer, *sorted(self.subject.items())

    def __str__(self) -> str:
        return ", ".join([self.operation, *map(str, self.subject.values()), self.peer, f"by {self.clock}"])


@dataclasses.dataclass(frozen=True)
class Run:
    """One file: what a program measured on one device.

    Attributes:
      path: the file, as it was given.
      environment: device, driver, versions, commit, date and command.
      skipped: what was not measured, and why.
    """

    path: Path
    program: str
    environment: Mapping[str, str]
    copies: tuple[Copy, ...]
    measurements: tuple[Measurement, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def device(self) -> str:
        """What it was measured on."""
        return self.environment["device"]

    @property
    def short_program(self) -> str:
        """The program without its package."""
        return self.program.rpartition(".")[2]


def read(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """The runs in these files, by device, in the order given.

    Raises:
      ResultsError: a file cannot be read or is no such file, or two measure the same thing on the same device.
    """
    if not paths:
        raise ResultsError("expected JSON files of benchmark runs, got none")
    devices: dict[str, list[Run]] = {}
    seen: dict[tuple[object, ...], Measurement] = {}
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise ResultsError(f"{path}: given twice")
        run = read_run(path)
        devices.setdefault(run.device, []).append(run)
        for measurement in run.measurements:
            first = seen.setdefault((run.device, *measurement.key), measurement)
            if first is not measurement:
                raise ResultsError(
                    f"{measurement.place}: {run.device} has a measurement of the same already, {first.place}"
                    f" ({measurement}); expected one run of each"
                )
    if not seen:
        raise ResultsError(f"no measurements in {', '.join(map(str, paths))}")
    return devices


def read_run(path: Path) -> Run:
    """What one file holds.

    Raises:
      ResultsError: it cannot be read, or is no file of a benchmark run.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: not JSON: {error}") from error
    file = Record(content, str(path))
    if (schema := file.get("schema", int)) != SCHEMA:
        raise ResultsError(f"{path}: schema: got {schema}, expected {SCHEMA}")
    program = file.get("program", str)
    environment = file.record("environment")
    environment.get("device", str)
    return Run(
        path=path,
        program=program,
        environment={name: str(words) for name, words in environment.fields.items() if words is not None},
        copies=tuple(_copy(each) for each in file.records("copy_rates", optional=True)),
        measurements=tuple(_measurements(file)),
        skipped=tuple(
            (each.get("what", str), each.get("reason", str)) for each in file.records("skipped", optional=True)
        ),
    )


def _copy(record: Record) -> Copy:
    return Copy(*record.times(), record.get("bytes_moved", int))


def _measurements(file: Record) -> list[Measurement]:
    by_operation: dict[str, list[Measurement]] = {}
    for record in file.records("measurements"):
        measurement = _measurement(record)
        by_operation.setdefault(measurement.operation, []).append(measurement)
    return [each for measurements in by_operation.values() for each in told_apart(measurements)]


def _measurement(record: Record) -> Measurement:
    subject = {name: record.get(name, kind, optional=True) for name, kind in SUBJECT.items()}
    further = {
        name: value
        for name, value in record.fields.items()
        if name not in ("operation", "peer", "clock", "seconds", "copy_seconds", *SUBJECT)
        and isinstance(value, str | int)
        and not isinstance(value, bool)
    }
    sizes = {name: value for name, value in further.items() if any(fnmatch.fnmatchcase(name, size) for size in SIZES)}
    seconds, samples = record.times()
    return Measurement(
        operation=record.get("operation", str),
        clock=record.get("clock", str),
        peer=record.get("peer", str),
        subject={name: value for name, value in {**subject, **sizes}.items() if value is not None},
        seconds=seconds,
        samples=samples,
        bytes_moved=record.get("bytes_moved", int, optional=True),
        copy_seconds=record.get("copy_seconds", float, optional=True),
        further=further,
        place=record.place,
    )


def told_apart(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Measurements of one operation, each with those further fields in its subject that tell it from the others.

    Where these do not suffice, some are still about the same.
    """
    found = [*measurements]
    while len(keys := {each.key for each in found}) < len(found):
        names = dict.fromkeys(name for each in found for name in each.further if name not in each.subject)
        counts = {name: len({(each.key, each.further.get(name)) for each in found}) for name in names}
        best = max(counts, key=counts.__getitem__, default=None)
        if best is None or counts[best] == len(keys):
            break
        found = [
            dataclasses.replace(each, subject={**each.subject, best: each.further[best]})
            if best in each.further
            else each
            for each in found
        ]
    return found
