"""What a benchmark program prints and writes to files, with all that is needed to run it again."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from absl import flags

from benchmarks.timing import Clock
from kvjax.ops.select import Implementation
from kvjax.table import markdown_table

IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, [*Implementation], "which implementation to time (default: as kvjax chooses)"
)
JSON = flags.DEFINE_string("json", None, "also write everything measured to this file")
MARKDOWN = flags.DEFINE_string("markdown", None, "also write the tables to this file")

PACKAGES = ("jax", "jaxlib", "torch")
"""What tables name the versions of, where a program has loaded it."""


def define_numbers(name: str, words: str, *, least: int) -> flags.FlagHolder[list[str] | None]:
    """A flag that takes numbers with commas between them; `numbers` reads it."""
    holder = flags.DEFINE_list(name, None, words)
    flags.register_validator(
        name,
        lambda given: given is None or all(word.isdecimal() and int(word) >= least for word in given),
        f"expected numbers of at least {least} with commas between them",
    )
    return holder


def numbers(flag: flags.FlagHolder[list[str] | None]) -> tuple[int, ...] | None:
    """What a flag of `define_numbers` was given, if anything."""
    return None if flag.value is None else tuple(map(int, flag.value))


def environment(program: str) -> dict[str, str]:
    """Where and how a program ran."""
    return {
        "device": jax.devices()[0].device_kind if jax.default_backend() == "gpu" else _processor(),
        "driver": _driver() if jax.default_backend() == "gpu" else "none",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES if name in sys.modules},
        "command": shlex.join(["python", "-m", program, *sys.argv[1:]]),
    }


def _processor() -> str:
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    versions = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return versions[0] if versions else "unknown"


@dataclasses.dataclass
class Report:
    """The tables of one run of `benchmarks.<program>`."""

    program: str
    tables: list[str] = dataclasses.field(default_factory=list)
    measured: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)

    def add(
        self,
        name: str,
        title: str,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        measured: Sequence[Any],
        *,
        note: str,
        left: int = 1,
    ) -> None:
        """Adds a table, of which the first `left` columns are words, and the dataclasses that it was made of."""
        self.tables.append("\n\n".join([f"### {title}", note, markdown_table(header, rows, left=left)]))
        self.measured[name] = [_plain(dataclasses.asdict(each)) for each in measured]

    def finish(self) -> None:
        """Prints the tables and writes the files that the flags ask for."""
        where = environment(self.program)
        facts = ", ".join(f"{name} {version}" for name, version in where.items() if name not in ("device", "command"))
        text = "\n\n".join([f"`{where['command']}` on {where['device']}: {facts}.", *self.tables])
        print(f"\n{text}", flush=True)
        if MARKDOWN.value:
            Path(MARKDOWN.value).write_text(f"{text}\n")
        if JSON.value:
            Path(JSON.value).write_text(json.dumps({"environment": where, "measured": self.measured}, indent=1))


def progress(words: str) -> None:
    """Says on stderr what was just measured."""
    print(words, file=sys.stderr, flush=True)


def microseconds(seconds: float | None) -> str:
    """A time as the tables print it."""
    return "-" if seconds is None else f"{seconds * 1e6:,.2f}"


def rate(seconds: float, bytes_moved: int) -> list[str]:
    """A time, what was moved in it and how fast, as the tables print them."""
    return [microseconds(seconds), f"{bytes_moved / 1e6:,.3f}", f"{bytes_moved / seconds / 1e9:,.0f}"]


def share(value: float | None) -> str:
    """A share as the tables print it."""
    return "-" if value is None else f"{value:.1%}"


class Timed(Protocol):
    """A measured line."""

    @property
    def clock(self) -> Clock: ...


def clocks(lines: Sequence[Timed]) -> str:
    """What the times of these lines were read from."""
    return " and ".join(dict.fromkeys(line.clock.value for line in lines)) or "no clock"


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
