"""The JSON files of benchmark runs, read and checked: what each measured, on which device."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measurement import Measurement, ResultsError, checked, field, from_record, samples
from benchmarks.operations import OPERATIONS
from benchmarks.output import SCHEMA
from benchmarks.tables import TEXTS
from benchmarks.timing import Clock, Timing


@dataclasses.dataclass(frozen=True)
class Run:
    """One file: what a program measured on one device.

    Attributes:
      path: the file, as it was given.
      environment: device, driver, versions, commit, date and command.
      copies: bytes moved, and the times of a copy of as many.
      skipped: what was not measured, and why.
    """

    path: Path
    program: str
    environment: Mapping[str, str]
    copies: tuple[tuple[int, Timing], ...]
    measurements: tuple[Measurement, ...]
    skipped: tuple[tuple[str, str], ...]

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
    seen: dict[tuple[object, ...], str] = {}
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise ResultsError(f"{path}: given twice")
        run = read_run(path)
        device = run.environment["device"]
        devices.setdefault(device, []).append(run)
        for place, measurement in enumerate(run.measurements):
            where = f"{path}: measurements[{place}]"
            if (first := seen.setdefault((device, *measurement.key), where)) != where:
                raise ResultsError(
                    f"{where}: {device} has a measurement of the same already, {first} ({measurement}); expected"
                    " one run of each"
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
        file = json.loads(path.read_bytes())
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: not JSON: {error}") from error
    if (schema := field(file, "schema", int, str(path))) != SCHEMA:
        raise ResultsError(f"{path}: schema: got {schema}, expected {SCHEMA}")
    environment = field(file, "environment", dict, str(path))
    field(environment, "device", str, f"{path}: environment")

    def records(name: str) -> list[tuple[Any, str]]:
        found = field(file, name, list, str(path), optional=name != "measurements") or []
        return [(each, f"{path}: {name}[{number}]") for number, each in enumerate(found)]

    return Run(
        path=path,
        program=field(file, "program", str, str(path)),
        environment={name: str(words) for name, words in environment.items() if words is not None},
        copies=tuple(
            (field(each, "bytes_moved", int, place), Timing(samples(each, place), Clock.WALL))
            for each, place in records("copy_rates")
        ),
        measurements=tuple(measurement(each, place) for each, place in records("measurements")),
        skipped=tuple(
            (field(each, "what", str, place), field(each, "reason", str, place)) for each, place in records("skipped")
        ),
    )


def measurement(record: Any, place: str) -> Measurement:
    """A measurement of an operation that is known.

    Raises:
      ResultsError: it is none.
    """
    name = field(checked(record, dict, place), "operation", str, place)
    if name not in OPERATIONS:
        raise ResultsError(f"{place}: 'operation': got {name!r}, expected one of {[*OPERATIONS]}")
    return from_record(record, place, {key: str if key in TEXTS else int for key in OPERATIONS[name].about})
