"""What a benchmark program prints and writes to files, with all that is needed to run it again."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
from absl import flags
from absl.testing import absltest

from benchmarks import timing, workload
from benchmarks.peers import cuda
from benchmarks.timing import Clock, Timing
from kvjax.ops.select import Implementation
from kvjax.table import markdown_table

SCHEMA = 1
"""Of the JSON file; a reader has to accept fields that it does not know, and to do without some."""

IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, [*Implementation], "which implementation of kvjax to time (default: as kvjax chooses)"
)
SMOKE = flags.DEFINE_bool("smoke", False, "tiny sizes and hardly a repetition: whether it runs, not how fast")
JSON = flags.DEFINE_string("json", None, "also write everything measured to this file")
MARKDOWN = flags.DEFINE_string("markdown", None, "also write the tables to this file")
COMMIT = flags.DEFINE_string("commit", None, "the commit to name, where there is no git to ask")

ROOT = Path(__file__).parents[1]
LOADED = ("jax", "jaxlib", "torch")
"""What the environment names the versions of, where a program has loaded it."""

PEERS = {"vllm": "vllm", "flashinfer": "flashinfer-python"}
"""The same where it could be imported: modules and the distributions that they come in."""

SAVE_SECONDS = 10.0
"""How often the JSON file is written while a program runs, so that one that is stopped leaves what it has."""


def shorten() -> None:
    """From now on does as little as there is to do."""
    timing.shorten()
    workload.shrink()


def define_numbers(name: str, words: str, *, least: int) -> flags.FlagHolder[list[str] | None]:
    """A flag that takes numbers with commas between them; `numbers` reads it."""
    holder = flags.DEFINE_list(name, None, words)
    flags.register_validator(
        name,
        lambda given: given is None or (given and all(word.isdecimal() and int(word) >= least for word in given)),
        f"expected numbers of at least {least} with commas between them",
    )
    return holder


def numbers(flag: flags.FlagHolder[list[str] | None]) -> tuple[int, ...] | None:
    """What a flag of `define_numbers` was given, if anything."""
    return None if flag.value is None else tuple(map(int, flag.value))


def define_some(name: str, of: Iterable[str], words: str) -> flags.FlagHolder[list[str] | None]:
    """A flag that takes some of these names with commas between them."""
    accepted = [*of]
    holder = flags.DEFINE_list(name, None, words)
    flags.register_validator(
        name, lambda given: given is None or (given and {*given} <= {*accepted}), f"expected some of {accepted}"
    )
    return holder


def environment(program: str) -> dict[str, str]:
    """Where and how a program ran."""
    return {
        "device": jax.devices()[0].device_kind if jax.default_backend() == "gpu" else _processor(),
        "driver": _driver() if jax.default_backend() == "gpu" else "none",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LOADED if name in sys.modules},
        **{module: _version(name) for module, name in PEERS.items() if importlib.util.find_spec(module)},
        "commit": COMMIT.value or commit(ROOT),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", program, *_without_commit(sys.argv[1:])]),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    versions = (_said(query) or "").split()
    return versions[0] if versions else "unknown"


def commit(folder: Path) -> str:
    """The commit that is checked out in a folder, with `+changes` where files differ from it, or `unknown`."""
    head = _said(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not head:
        return "unknown"
    return head.strip() + ("+changes" if _said(["git", "-C", str(folder), "status", "--porcelain"]) else "")


def _without_commit(arguments: Sequence[str]) -> list[str]:
    """A command's arguments for whoever repeats it, perhaps at another commit."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if name not in ("-commit", "--commit"):
            kept.append(argument)
        elif not equals:
            next(rest, None)
    return kept


def _said(command: Sequence[str]) -> str | None:
    """What a command printed; `None` where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one peer took for one thing.

    Attributes:
      operation: what was timed.
      subject: the shape, dtype and sizes that it was timed for.
      peer: who did it.
      times: its times.
      bytes_moved: the fewest bytes that it must read and write.
      copy: a copy that moves as many, in the same run.
      facts: what else was found out about it.
    """

    operation: str
    subject: Mapping[str, Any]
    peer: str
    times: Timing
    bytes_moved: int | None = None
    copy: Timing | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The median."""
        return self.times.seconds

    @property
    def clock(self) -> Clock:
        """What the times were read from."""
        return self.times.clock

    @property
    def copy_seconds(self) -> float | None:
        """The median of the copy."""
        return self.copy.seconds if self.copy else None

    @property
    def copy_share(self) -> float | None:
        """The rate of this over that of the copy."""
        return self.copy.seconds / self.seconds if self.copy else None

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
            "copy_seconds": self.copy_seconds,
            "kernels": self.times.kernels,
            **self.facts,
        }


@dataclasses.dataclass
class Report:
    """The tables of one run of a program, and all that they were made of."""

    program: str
    tables: list[str] = dataclasses.field(default_factory=list)
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    _bar: Any = dataclasses.field(default_factory=lambda: _progress_bar())
    _expected: int = 0
    _done: int = 0
    _saved: float = dataclasses.field(default_factory=time.monotonic)

    def expect(self, count: int) -> None:
        """Says how many more measurements are to come."""
        self._expected += count

    def add(self, measurement: Measurement) -> None:
        """Takes in what was measured."""
        self.measurements.append(measurement)
        subject = [str(plain(value)) for value in measurement.subject.values() if value is not None]
        self.step(
            " ".join([measurement.operation, *subject, measurement.peer, f"{microseconds(measurement.seconds)} us"])
        )
        if JSON.value and time.monotonic() - self._saved > SAVE_SECONDS:
            self.save(Path(JSON.value))

    def step(self, words: str, count: int = 1) -> None:
        """Moves the progress bar on, or says the same where there is none."""
        self._done += count
        if self._bar is None:
            print(f"[{self._done}/{self._expected}] {words}", file=sys.stderr, flush=True)
        else:
            self._bar.total = self._expected
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update(count)

    def skip(self, what: str, reason: str, *, asked_for: bool = False) -> None:
        """Says what is not measured, and why. What a flag asked for and cannot be had fails the program at its end."""
        first_line = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        if asked_for:
            self.missing.append(f"{what}: {first_line}")
        if what not in self.skipped:
            self.skipped[what] = reason
            self._say(f"skipped {what}: {first_line}")

    def _say(self, line: str) -> None:
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.write(line, file=sys.stderr)

    def table(
        self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, note: str, left: int = 1
    ) -> None:
        """Adds a table, of which the first `left` columns are words; none where it would have no rows."""
        if rows:
            self.tables.append("\n\n".join([f"### {title}", note, markdown_table(header, rows, left=left)]))

    def finish(self) -> None:
        """Prints the tables and writes the files that the flags ask for."""
        if self._bar is not None:
            self._bar.close()
        where = {**environment(self.program), **self.facts}
        facts = ", ".join(f"{name} {words}" for name, words in where.items() if name not in ("device", "command"))
        text = "\n\n".join(
            [f"`{where['command']}` on {where['device']}: {facts}.", *self.tables, *self._skipped_words()]
        )
        print(f"\n{text}", flush=True)
        if MARKDOWN.value:
            Path(MARKDOWN.value).write_text(f"{text}\n")
        if JSON.value:
            self.save(Path(JSON.value))

    def _skipped_words(self) -> list[str]:
        lines = [f"- {what}: {reason.strip().splitlines()[0]}" for what, reason in self.skipped.items()]
        return ["\n".join(["Skipped:", "", *lines])] if lines else []

    def save(self, path: Path) -> None:
        """Writes a JSON file, a line for each measurement."""
        copies = {m.bytes_moved: m.copy for m in self.measurements if m.copy}
        rates = [
            {"bytes_moved": moved, "seconds": copy.seconds, "samples": copy.samples, "clock": copy.clock}
            for moved, copy in copies.items()
        ]
        lists = {
            "copy_rates": rates,
            "measurements": [each.record() for each in self.measurements],
            "skipped": [{"what": what, "reason": reason} for what, reason in self.skipped.items()],
        }
        head = {
            "schema": SCHEMA,
            "program": self.program,
            "environment": {**environment(self.program), **self.facts},
        }
        parts = [f' "{name}": {json.dumps(plain(value))}' for name, value in head.items()]
        for name, entries in lists.items():
            lines = ",\n".join(f"  {json.dumps(plain(entry))}" for entry in entries)
            parts.append(f' "{name}": [\n{lines}\n ]' if lines else f' "{name}": []')
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        self._saved = time.monotonic()


def _progress_bar() -> Any:
    """tqdm's; `None` where stderr is no terminal, or tqdm not there."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return None
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(total=0, unit=" measurements", leave=False, dynamic_ncols=True, file=sys.stderr)


class Program(absltest.TestCase):
    """What all programs share: a report, a look at the clock, and failing where what a flag asked for is missing.

    No program fails because of how long something took. The tests run in the order of their names.
    """

    name: ClassVar[str]
    results: ClassVar[Report]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if SMOKE.value:
            shorten()
        cls.results = Report(cls.name)

    @classmethod
    def tearDownClass(cls) -> None:
        if cuda.why_missing() is None:
            cls.results.facts["cuda compiler"] = cuda.version()
        cls.results.finish()
        super().tearDownClass()

    def test_the_clock_tells_twice_the_work(self) -> None:
        """A harness that took no notice of how much is done would be worth nothing."""
        ratio = 0.0
        for _ in range(3):  # whatever else runs here only adds, and may pass
            once, twice = timing.once_and_twice()
            ratio = min(twice.samples) / min(once.samples)
            if 1.4 < ratio < 2.8:
                return
        self.fail(f"twice the work took {ratio:.2f} times as long: no time of this run is worth reading")

    def test_what_was_asked_for_is_there(self) -> None:
        if self.results.missing:
            self.fail("; ".join(self.results.missing))


def microseconds(seconds: float | None) -> str:
    """A time as the tables print it."""
    return "-" if seconds is None else f"{seconds * 1e6:,.2f}"


def spread(samples: Sequence[float] | None) -> str:
    """Between which times nine of ten calls lie, as the tables print it."""
    return "-" if not samples else "-".join(f"{seconds * 1e6:,.2f}" for seconds in timing.spread(samples))


def rate(seconds: float, bytes_moved: int) -> list[str]:
    """What was moved in a time and how fast, as the tables print them."""
    return [f"{bytes_moved / 1e6:,.3f}", f"{bytes_moved / seconds / 1e9:,.4g}"]


def share(value: float | None) -> str:
    """A share as the tables print it."""
    return "-" if value is None else f"{value:.1%}"


def clocks(timings: Iterable[Timing | Measurement]) -> str:
    """What these times were read from."""
    return " and ".join(dict.fromkeys(each.clock.words for each in timings)) or "no clock"


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
