"""The JSON files of benchmark runs, read and checked: what each measured, on which device."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measurement import Measurement, ResultsError, from_record, positive
from benchmarks.operations import OPERATIONS
from benchmarks.output import SCHEMA
from benchmarks.timing import Clock, Timing


@dataclasses.dataclass(frozen=True)
class Run:
    """One file: what a program measured on one device.

    Attributes:
      environment: device, driver, versions, commit, date and command.
      copies: bytes moved, and the times of a copy of as many.
      skipped: what was not measured, and why.
    """

    program: str
    environment: Mapping[str, str]
    copies: Sequence[tuple[int, Timing]]
    measurements: Sequence[Measurement]
    skipped: Sequence[tuple[str, str]]

    @property
    def short_program(self) -> str:
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
    for path in paths:
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
    place = str(path)
    try:
        file = json.loads(path.read_bytes())
        if file["schema"] != SCHEMA:
            raise ValueError(f"schema: got {file['schema']}, expected {SCHEMA}")
        environment = {name: str(words) for name, words in file["environment"].items() if words is not None}
        if "device" not in environment:
            raise KeyError("device")
        copies = [
            (each["bytes_moved"], Timing(positive(each["samples"]), Clock.WALL))
            for each in file.get("copy_rates") or []
        ]
        skipped = [(each["what"], each["reason"]) for each in file.get("skipped") or []]
        measurements = []
        for number, record in enumerate(file["measurements"]):
            place = f"{path}: measurements[{number}]"
            if record["operation"] not in OPERATIONS:
                raise ValueError(f"operation: got {record['operation']!r}, expected one of {[*OPERATIONS]}")
            measurements.append(from_record(record, OPERATIONS[record["operation"]].about))
        return Run(file["program"], environment, copies, measurements, skipped)
    except OSError as error:
        raise ResultsError(f"{place}: {error.strerror}") from error
    except KeyError as error:
        raise ResultsError(f"{place}: {error} is missing") from error
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ResultsError(f"{place}: not as a benchmark run writes it: {error}") from error
