"""The table of attention by row and dtype, with its bars: what the program prints, and the report of its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from benchmarks import bars, output, shapes
from benchmarks.bars import AttentionTime
from benchmarks.timing import Clock
from kvjax import KVCacheDType

OWN, READ = "kvjax", "read"
VARIANTS = (OWN, "kvjax xla")
"""Who is no peer."""

HEADER = (
    *("row", "dtype", "us", "5-95%", "reading us", "share", "next best", "its us", "fastest bf16", "bf16 us"),
    *("times as fast", "bars", "reached"),
)
LEFT = 2
NOTE = (
    "A row is sequences x tokens of each, 32 query heads over 8 KV heads of 128, one query token a sequence, NHD, where"
    " its name says nothing else. Share: of the rate of a kernel that only reads as many bytes as the pages hold. Next"
    " best: the fastest of the others in the same row and dtype. Fastest bf16: of anyone in this run, kvjax included,"
    " and how many times as fast kvjax is in this dtype."
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


def times(measurements: Iterable[Measured], samples: Any, clock: Any) -> list[AttentionTime]:
    """Lines of kvjax's times, in the order of the rows and dtypes as they were measured.

    Args:
      measurements: of all peers.
      samples: what takes a measurement and returns the seconds of each call.
      clock: what takes a measurement and returns its clock.
    """
    by_row: dict[tuple[str, KVCacheDType], dict[str, Measured]] = {}
    for each in measurements:
        by_row.setdefault((each.subject["case"], KVCacheDType(each.subject["dtype"])), {})[each.peer] = each
    lines = []
    for (row, dtype), by_peer in by_row.items():
        if OWN not in by_peer:
            continue
        own, read = by_peer[OWN], by_peer.get(READ)
        in_bfloat16 = {
            name: each.seconds for name, each in by_row.get((row, bars.BFLOAT16), {}).items() if name != READ
        }
        base = by_row.get((_base(row), dtype), {}).get(OWN)
        lines.append(
            AttentionTime(
                row=row,
                dtype=dtype,
                seconds=own.seconds,
                samples=tuple(samples(own)),
                clock=Clock(clock(own)),
                read_seconds=read.seconds if read else None,
                others={name: each.seconds for name, each in by_peer.items() if name not in (*VARIANTS, READ)},
                fastest_bfloat16=min(in_bfloat16.items(), key=lambda pair: pair[1], default=None),
                base_seconds=base.seconds if base else None,
            )
        )
    return lines


def _base(row: str) -> str:
    known = shapes.ATTENTION_ROWS_BY_NAME.get(row)
    return known.base or "" if known else ""


def words(line: AttentionTime) -> list[str]:
    """A line of the table."""
    best = min(line.others.items(), key=lambda pair: pair[1], default=None)
    held = bars.attention_bars(line)
    return [
        line.row,
        line.dtype.value,
        output.microseconds(line.seconds),
        output.spread(line.samples),
        output.microseconds(line.read_seconds),
        output.share(line.read_share),
        *_pair(best),
        *_pair(line.fastest_bfloat16),
        "-" if line.speedup is None else f"{line.speedup:.2f}",
        ", ".join(map(str, held)) or "-",
        "; ".join(verdicts(line)) or "-",
    ]


def verdicts(line: AttentionTime) -> list[str]:
    """Whether each of its bars holds."""
    return [bars.verdict(bar, line.value(bar.measure), line.clock) for bar in bars.attention_bars(line)]


def _pair(who: tuple[str, float] | None) -> Sequence[str]:
    return ("-", "-") if who is None else (who[0], output.microseconds(who[1]))


def summary(lines: Iterable[AttentionTime]) -> str:
    """How many bars hold."""
    return bars.summary([each for line in lines for each in verdicts(line)])
