"""Text available with every Python: the standard library's sources, split into training and held-out files.

The split hashes each file's path relative to the library, so it is the same on every machine and in every Python
version: weights trained with one have not seen the held-out files of another.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256
"""Text is bytes; every byte is a token."""

HELD_OUT_PERCENT = 8
"""Percentage of the files that are excluded from training."""

_EXCLUDED_DIRS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})
# Generated tables, and modules that Linux distributions package separately, which would make the text vary.
_EXCLUDED_MODULES = frozenset(
    {
        "distutils",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "tkinter",
        "turtle",
        "turtledemo",
        "venv",
    }
)


def standard_library() -> Path:
    """Returns the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> tuple[str, ...]:
    """Returns the `.py` files of the standard library in `root`, as sorted POSIX paths relative to it.

    Raises:
      FileNotFoundError: `root` has none, as if Python was installed without its sources.
    """
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    files = tuple(sorted(path.as_posix() for path in paths if _is_text(path)))
    if not files:
        raise FileNotFoundError(f"no standard library sources under {root}: the demo's text is Python's own *.py files")
    return files


def _is_text(path: Path) -> bool:
    module = path.parts[0].removesuffix(".py")
    if module not in sys.stdlib_module_names or module in _EXCLUDED_MODULES:
        return False
    return _EXCLUDED_DIRS.isdisjoint(path.parts)


def is_held_out(path: str) -> bool:
    """Returns whether the file at `path` (relative, POSIX) is excluded from training."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def split(files: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns `files` as (training, held out), each in the given order."""
    return tuple(f for f in files if not is_held_out(f)), tuple(f for f in files if is_held_out(f))


def read(root: Path, files: Sequence[str]) -> np.ndarray:
    """Returns the concatenated bytes of `files`: uint8 `[num_bytes]`."""
    return np.frombuffer(b"".join((root / file).read_bytes() for file in files), np.uint8)


def excerpts(text: np.ndarray, lengths: Sequence[int], rng: np.random.Generator) -> list[np.ndarray]:
    """Returns random pieces of `text` of the given `lengths`, each from the start of a line."""
    line_starts = np.flatnonzero(text[: len(text) - max(lengths)] == ord("\n")) + 1
    starts = rng.choice(line_starts, len(lengths))
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def unigram_bits_per_byte(training: np.ndarray, text: np.ndarray) -> float:
    """Returns the bits per byte of `text` under the byte frequencies of `training`: a baseline without context.

    Frequencies are add-one smoothed, so a byte missing from `training` has finite cost.
    """
    counts = np.bincount(training, minlength=VOCAB_SIZE) + 1.0
    bits = np.log2(counts.sum()) - np.log2(counts)
    return float(bits[text].mean())
