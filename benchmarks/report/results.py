"""Reads and validates the JSON files of benchmark runs."""

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
    """The contents of one file: the measurements of one program on one device.

    Attributes:
      environment: Device, driver, versions, commit, date and command.
      copies: Pairs of bytes moved and the times of a copy that moves them.
      skipped: Pairs of what was skipped and the reason.
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
    """Reads runs and groups them by device, in the given order.

    Raises:
      ResultsError: If a file cannot be read, is not a benchmark run, or repeats a measurement on the same device.
    """
    if not paths:
        raise ResultsError("expected JSON files of benchmark runs, got none")
    devices: dict[str, list[Run]] = {}
    seen: dict[tuple[object, ...], str] = {}
    for path in paths:
        run = read_run(path)
        device = run.environment["device"]
        devices.setdefault(device, []).append(run)
        for index, measurement in enumerate(run.measurements):
            where = f"{path}: measurements[{index}]"
            if (first := seen.setdefault((device, *measurement.key), where)) != where:
                raise ResultsError(
                    f"{where}: {device} has a measurement of the same already, {first} ({measurement}); expected"
                    " one run of each"
                )
    if not seen:
        raise ResultsError(f"no measurements in {', '.join(map(str, paths))}")
    return devices


def read_run(path: Path) -> Run:
    """Reads one file.

    Raises:
      ResultsError: If the file cannot be read or is not a benchmark run.
    """
    where = str(path)
    try:
        file = json.loads(path.read_bytes())
        if file["schema"] != SCHEMA:
            raise ValueError(f"schema: got {file['schema']}, expected {SCHEMA}")
        environment = {name: str(value) for name, value in file["environment"].items() if value is not None}
        if "device" not in environment:
            raise KeyError("device")
        copies = [
            (each["bytes_moved"], Timing(positive(each["samples"]), Clock.WALL))
            for each in file.get("copy_rates") or []
        ]
        skipped = [(each["what"], each["reason"]) for each in file.get("skipped") or []]
        measurements = []
        for number, record in enumerate(file["measurements"]):
            where = f"{path}: measurements[{number}]"
            if record["operation"] not in OPERATIONS:
                raise ValueError(f"operation: got {record['operation']!r}, expected one of {[*OPERATIONS]}")
            measurements.append(from_record(record, OPERATIONS[record["operation"]].about))
        return Run(file["program"], environment, copies, measurements, skipped)
    except OSError as error:
        raise ResultsError(f"{where}: {error.strerror}") from error
    except KeyError as error:
        raise ResultsError(f"{where}: {error} is missing") from error
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ResultsError(f"{where}: not as a benchmark run writes it: {error}") from error
