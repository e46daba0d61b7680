"""Shared parts of all benchmark programs: flags, the report, and the output files."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
from absl import flags
from absl.testing import absltest

from benchmarks import tables, timing, workload
from benchmarks.measurement import SCHEMA, Measurement, plain
from kvjax import KVCacheDType
from kvjax.ops.select import Implementation

IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, [*Implementation], "which implementation of kvjax to time (default: as kvjax chooses)"
)
SMOKE = flags.DEFINE_bool("smoke", False, "tiny sizes and hardly a repetition: whether it runs, not how fast")
JSON = flags.DEFINE_string("json", None, "also write everything measured to this file")
MARKDOWN = flags.DEFINE_string("markdown", None, "also write the tables to this file")
COMMIT = flags.DEFINE_string("commit", None, "the commit to name, where there is no git to ask")

ROOT = Path(__file__).parents[1]
LOADED = ("jax", "jaxlib", "torch", "vllm", "flashinfer")
"""Modules whose versions the environment reports if they are loaded."""

VERDICTS = {True: "holds", False: "FAILED", None: "not tried"}

SAVE_SECONDS = 10.0
"""Interval at which a running program saves the JSON file, so that an interrupted run keeps its results."""


def by_device[Value](*, gpu: Value, host: Value, smoke: Value) -> Value:
    return smoke if SMOKE.value else gpu if workload.is_gpu() else host


def shorten() -> None:
    """Switches to the smallest sizes and fewest repetitions for smoke tests."""
    timing.shorten()
    workload.shrink()


class _Words[Value](flags.ArgumentParser[list[Value]]):
    """Parses words with commas between them to the values that `make` returns, `None` for a wrong word."""

    def __init__(self, make: Callable[[str], Value | None], expected: str) -> None:
        super().__init__()
        self.make, self.expected = make, expected

    def parse(self, argument: str) -> list[Value]:
        words = flags.ListParser().parse(argument)
        values = [value for word in words if (value := self.make(word)) is not None]
        if not values or len(values) < len(words):
            raise ValueError(self.expected)
        return values


def define_words[Value](
    name: str, make: Callable[[str], Value | None], expected: str, text: str
) -> flags.FlagHolder[list[Value] | None]:
    return flags.DEFINE(_Words(make, expected), name, None, text)


def define_numbers(name: str, text: str, *, least: int) -> flags.FlagHolder[list[int] | None]:
    expected = f"expected numbers of at least {least} with commas between them"
    return define_words(
        name, lambda word: int(word) if word.isdecimal() and int(word) >= least else None, expected, text
    )


def define_some[Value](name: str, of: Mapping[str, Value], text: str) -> flags.FlagHolder[list[Value] | None]:
    return define_words(name, of.get, f"expected some of {[*of]}", text)


def define_dtypes(of: Iterable[KVCacheDType]) -> flags.FlagHolder[list[KVCacheDType] | None]:
    return define_some("dtypes", {dtype.value: dtype for dtype in of}, "dtypes of the caches")


flags.disclaim_key_flags()  # so that --help lists what is defined here as the program's


def environment(program: str) -> dict[str, str]:
    is_gpu = workload.is_gpu()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    arguments = [each for each in sys.argv[1:] if not each.lstrip("-").startswith("commit=")]
    return {
        "device": jax.devices()[0].device_kind if is_gpu else f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "driver": [*(_said(query) or "").split(), "unknown"][0] if is_gpu else "none",
        "python": platform.python_version(),
        **{name: getattr(sys.modules[name], "__version__", "unknown") for name in LOADED if name in sys.modules},
        "commit": COMMIT.value or commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", program, *arguments]),
    }


def commit() -> str:
    """Returns the current commit, with `+changes` if the working tree is dirty, or `unknown`."""
    head = _said(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if not head:
        return "unknown"
    return head.strip() + ("+changes" if _said(["git", "-C", str(ROOT), "status", "--porcelain"]) else "")


def _said(command: Sequence[str]) -> str | None:
    """Returns the output of a command, or `None` if the command is unavailable or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


@dataclasses.dataclass
class Report:
    """Measurements of one program run, and what it skipped."""

    program: str
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    _saved: float = dataclasses.field(default_factory=time.monotonic)

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        say(f"[{len(self.measurements)}] {measurement}: {measurement.seconds * 1e6:,.2f} us")
        if JSON.value and time.monotonic() - self._saved > SAVE_SECONDS:
            self.save(Path(JSON.value))

    def skip(self, what: str, reason: str, *, asked_for: bool = False) -> None:
        """Reports what is skipped and why. The program fails at its end if a flag asked for it (`asked_for`)."""
        line = first_line(reason)
        if asked_for:
            self.missing.append(f"{what}: {line}")
        if what not in self.skipped:
            self.skipped[what] = reason
            say(f"skipped {what}: {line}")

    def check(self, what: str, holds: bool | None, text: str) -> None:
        """Reports whether something holds, `None` if that could not be tried, in a line."""
        self.checks.append({"what": what, "holds": holds, "text": text})
        say(f"{VERDICTS[holds]} {what}: {text}")

    def attempt[Value](self, what: str, make: Callable[..., Value], *args: Any, own: bool) -> Value | None:
        """Returns `make(*args)`, or `None` if it fails, and then lists `what` as skipped.

        An exception of kvjax's (`own`) is raised, unless it is a lack of memory.
        """
        try:
            return make(*args)
        except Exception as error:
            is_memory = is_exhausted(error)
            kind = "wrong" if isinstance(error, AssertionError) else type(error).__name__
            self.skip(what, f"{'too little memory' if is_memory else kind}: {error}")
            if own and not is_memory:
                error.add_note(traceback.format_exc())
                raise error.with_traceback(None) from None  # its frames would keep caches alive
        return None

    def finish(self) -> None:
        """Prints the tables and writes the files that the flags ask for."""
        where = {**environment(self.program), **self.facts}
        facts = ", ".join(f"{name} {text}" for name, text in where.items() if name not in ("device", "command"))
        parts = [f"`{where['command']}` on {where['device']}: {facts}."]
        parts += tables.of_operations(self.measurements)
        checks = [f"- {VERDICTS[each['holds']]}: {each['what']}: {each['text']}" for each in self.checks]
        skipped = [f"- {what}: {first_line(reason)}" for what, reason in self.skipped.items()]
        parts += [
            "\n".join([head, "", *lines]) for head, lines in (("Checks:", checks), ("Skipped:", skipped)) if lines
        ]
        text = "\n\n".join(parts)
        print(f"\n{text}", flush=True)
        if MARKDOWN.value:
            Path(MARKDOWN.value).write_text(f"{text}\n")
        if JSON.value:
            self.save(Path(JSON.value))

    def save(self, path: Path) -> None:
        """Writes a JSON file with a line for each measurement, so that it can be searched and compared by line."""
        written = {
            "schema": SCHEMA,
            "program": self.program,
            "environment": {**environment(self.program), **self.facts},
            "measurements": [each.record() for each in self.measurements],
            "skipped": [{"what": what, "reason": reason} for what, reason in self.skipped.items()],
            **({"checks": self.checks} if self.checks else {}),
        }
        path.write_text(json.dumps(plain(written)).replace('{"operation": ', '\n{"operation": ') + "\n")
        self._saved = time.monotonic()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def is_exhausted(error: BaseException) -> bool:
    """Returns whether an error of Python, XLA, torch or CUDA means out of memory."""
    return isinstance(error, MemoryError) or any(
        message in str(error) for message in ("RESOURCE_EXHAUSTED", "out of memory", "can't allocate memory")
    )


def first_line(reason: str) -> str:
    return (reason.strip() or "no reason given").splitlines()[0]


class Program(absltest.TestCase):
    """Base class of all programs: owns the report and checks the clock and the requested peers.

    A program fails if a result is wrong, never because of a time. Tests run in the order of their names.
    """

    results: ClassVar[Report]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if SMOKE.value:
            shorten()
        cls.results = Report(f"benchmarks.{Path(sys.argv[0]).stem}")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.results.finish()
        super().tearDownClass()

    def test_the_clock_tells_twice_the_work(self) -> None:
        """Checks that the clock detects twice the work."""
        ratio = 0.0
        for _ in range(3):  # interference from other programs may be temporary
            once, twice = timing.once_and_twice()
            ratio = min(twice.samples) / min(once.samples)
            if 1.4 < ratio < 2.8:
                return
        self.fail(f"twice the work took {ratio:.2f} times as long: no time of this run is worth reading")

    def test_what_was_asked_for_is_there(self) -> None:
        if self.results.missing:
            self.fail("; ".join(self.results.missing))
