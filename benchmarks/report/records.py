"""Objects of a JSON file, whose fields are checked as they are read."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator
from typing import Any

ROUNDING = 1e-4
"""Relative; files have their numbers in few digits."""

MOST = 1e18
"""No time and no size comes near it."""


class ResultsError(Exception):
    """A file that cannot be reported, and why."""


KINDS = {
    str: "a string",
    int: "a positive whole number",
    float: "a positive number",
    list: "a list",
    dict: "an object",
}


@dataclasses.dataclass(frozen=True)
class Record:
    """An object of a file, and where it stands there."""

    fields: Any
    place: str

    def __post_init__(self) -> None:
        self._check(self.fields, dict, self.place)

    def get(self, name: str, kind: type, *, optional: bool = False) -> Any:
        """A field; `None` where it is optional and missing or null."""
        value = self.fields.get(name)
        if value is None and optional:
            return None
        if name not in self.fields:
            raise ResultsError(f"{self.place}: {name!r} is missing")
        return self._check(value, kind, f"{self.place}: {name!r}")

    def record(self, name: str) -> Record:
        """A field that is an object."""
        return Record(self.get(name, dict), f"{self.place}: {name}")

    def records(self, name: str, *, optional: bool = False) -> Iterator[Record]:
        """A field that is a list of objects."""
        for number, fields in enumerate(self.get(name, list, optional=optional) or []):
            yield Record(fields, f"{self.place}: {name}[{number}]")

    def times(self) -> tuple[float, tuple[float, ...]]:
        """The median and the samples that it is of."""
        seconds: float = self.get("seconds", float)
        samples = tuple(
            self._check(sample, float, f"{self.place}: samples[{number}]")
            for number, sample in enumerate(self.get("samples", list))
        )
        if not samples:
            raise ResultsError(f"{self.place}: 'samples': got none, expected the seconds of each repetition")
        if not math.isclose(seconds, median := statistics.median(samples), rel_tol=ROUNDING):
            raise ResultsError(
                f"{self.place}: 'seconds': got {seconds:g}, expected {median:g}, the median of {len(samples)} samples"
            )
        return seconds, samples

    @staticmethod
    def _check(value: Any, kind: type, place: str) -> Any:
        accepted = int | float if kind is float else kind
        fits = isinstance(value, accepted) and not isinstance(value, bool)
        if not fits or (kind in (int, float) and not 0 < value < MOST):
            raise ResultsError(f"{place}: got {_shortened(value)}, expected {KINDS[kind]}")
        return value


def _shortened(value: Any) -> str:
    words = json.dumps(value)
    return words if len(words) <= 40 else f"{words[:40]}..."
