"""The table of steps by dtype and number of sequences, with its bars: what the program prints, and the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from benchmarks import bars, output
from benchmarks.bars import BFLOAT16, FP8, NVFP4, Bar, Measure
from benchmarks.timing import Clock, spread
from kvjax import KVCacheDType

OPERATION, OWN = "serve", "kvjax"
MOST, SAME = "as many as fit", "the same number"
"""Rows that bars are about, as a file names them."""

HEADER = (
    *("dtype", "sequences", "row", "by", "tokens a second", "step, ms", "5-95%", "x bf16 tokens/s", "x bf16's step"),
    *("reading, ms", "x reading", "host, ms", "exposed", "bars", "reached"),
)
LEFT = 4
NOTE = (
    "A step decodes one token of each sequence. Reading: the time that"
    " weights and pages take at the rate of a kernel that only reads. Host: for how long the host is busy in a step"
    " while the device works on the one before; exposed: what a step of the engine takes beyond one in a row of steps"
    " that nobody waits for, as a share of it. kvjax's steps are those of an engine, from one step's tokens to the"
    " next's; peers have none, and their steps are such a row's."
)


class Measured(Protocol):
    """A measurement, as a program has it or as a file has it."""

    @property
    def subject(self) -> Mapping[str, Any]:
        """What it is about."""

    @property
    def peer(self) -> str:
        """Who did it."""

    @property
    def seconds(self) -> float:
        """The median."""


@dataclasses.dataclass(frozen=True)
class ServeTime:
    """One line.

    Attributes:
      rows: those of `MOST` and `SAME` that it is.
      seconds: median of a step.
      device_seconds: of one in a row that nobody waits for, where an engine ran.
      host_seconds: for how long the host was busy.
      read_seconds: what reading as many bytes takes.
      bfloat16: seconds of kvjax's bfloat16 step of as many sequences.
      bfloat16_rate: tokens a second of kvjax's bfloat16 row of `MOST`.
    """

    peer: str
    dtype: KVCacheDType
    num_seqs: int
    rows: str
    seconds: float
    samples: tuple[float, ...]
    device_seconds: float | None = None
    host_seconds: float | None = None
    read_seconds: float | None = None
    bfloat16: float | None = None
    bfloat16_rate: float | None = None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_seqs / self.seconds

    @property
    def exposed(self) -> float | None:
        """What the engine adds to a step, as a share of it."""
        return None if self.device_seconds is None else max(1 - self.device_seconds / self.seconds, 0.0)

    def value(self, measure: Measure) -> float | None:
        """A measure of this line, or `None` where what it is held against was not timed."""
        match measure:
            case Measure.TOKENS:
                return None if self.bfloat16_rate is None else self.rate / self.bfloat16_rate
            case Measure.BFLOAT16:
                return None if self.bfloat16 is None else self.seconds / self.bfloat16
            case Measure.READING_TIME:
                return None if self.read_seconds is None else self.seconds / self.read_seconds
            case _:
                return self.exposed


def serve_bars(line: ServeTime) -> list[Bar]:
    """The bars that a line is held to, where there is something to hold it against."""
    if line.peer != OWN or line.read_seconds is None:
        return []
    found = []
    if MOST in line.rows and line.dtype in bars.SERVE_TOKENS:
        found.append(Bar(Measure.TOKENS, bars.SERVE_TOKENS[line.dtype]))
    if SAME in line.rows and line.dtype is NVFP4:
        found.append(bars.SERVE_STEP)
    if line.rows and line.dtype is BFLOAT16:
        found.append(bars.SERVE_READING)
    if line.rows:
        found.append(bars.SERVE_HOST)
    return found


def times(measurements: Iterable[Measured], samples: Any, fact: Any) -> list[ServeTime]:
    """Lines in the order of dtypes, numbers of sequences, and peers as they were measured.

    Args:
      measurements: of all peers.
      samples: what takes a measurement and returns the seconds of each step.
      fact: what takes a measurement and a name and returns what else was found, or None.
    """
    found = [
        ServeTime(
            each.peer,
            KVCacheDType(each.subject["dtype"]),
            each.subject["num_seqs"],
            str(fact(each, "rows") or ""),
            each.seconds,
            tuple(samples(each)),
            *(
                None if (number := fact(each, name)) is None else number / 1e9
                for name in ("device_ns", "host_ns", "read_ns")
            ),
        )
        for each in measurements
    ]
    own = [line for line in found if line.peer == OWN and line.dtype is BFLOAT16]
    steps = {line.num_seqs: line.seconds for line in own}
    rate = next((line.rate for line in own if MOST in line.rows), None)
    dtypes = (BFLOAT16, FP8, NVFP4)
    found.sort(key=lambda line: (dtypes.index(line.dtype), line.num_seqs))
    return [dataclasses.replace(line, bfloat16=steps.get(line.num_seqs), bfloat16_rate=rate) for line in found]


def words(line: ServeTime) -> list[str]:
    """A line of the table."""
    measures = {measure: line.value(measure) for measure in (Measure.TOKENS, Measure.BFLOAT16, Measure.READING_TIME)}
    tokens, step, reading = ("-" if value is None else f"{value:.2f}" for value in measures.values())
    low, high = spread(line.samples)
    return [
        line.dtype.value,
        f"{line.num_seqs:,}",
        line.rows or "-",
        line.peer,
        f"{line.rate:,.0f}",
        _milliseconds(line.seconds),
        f"{_milliseconds(low)}-{_milliseconds(high)}",
        tokens,
        step,
        _milliseconds(line.read_seconds),
        reading,
        _milliseconds(line.host_seconds),
        output.share(line.exposed),
        ", ".join(map(str, serve_bars(line))) or "-",
        "; ".join(verdicts(line)) or "-",
    ]


def verdicts(line: ServeTime) -> list[str]:
    """Whether each of its bars holds."""
    return [bars.verdict(bar, line.value(bar.measure), Clock.HOST) for bar in serve_bars(line)]


def summary(lines: Iterable[ServeTime]) -> str:
    """How many bars hold."""
    return bars.summary([each for line in lines for each in verdicts(line) if each != "-"])


def rows(lines: Sequence[ServeTime]) -> list[list[str]]:
    """The whole table."""
    return [words(line) for line in lines]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.3g}"
