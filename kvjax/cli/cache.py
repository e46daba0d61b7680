"""`kvjax cache`: shows or clears the folder of kernels compiled for torch."""

from __future__ import annotations

import argparse
import functools
import os
from typing import TYPE_CHECKING

from kvjax import KVCacheValueError
from kvjax.binaries.folder import FOLDER_VARIABLE, SIZE_VARIABLE, Folder, folder_of, size_of

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `kvjax`'s parser."""
    parser = subparsers.add_parser(
        "cache",
        help="show or clear the kernels compiled for torch",
        description=f"Shows the folder that keeps kernels compiled for torch, which {FOLDER_VARIABLE} names; with"
        f" --clear, empties it. {SIZE_VARIABLE} is the MiB that they may take.",
    )
    parser.add_argument("--clear", action="store_true", help="remove all kernels")
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    path = folder_of(os.environ)
    if path is None:
        print(f"kernels compiled for torch are not kept: {FOLDER_VARIABLE} is {os.environ.get(FOLDER_VARIABLE, '')!r}")
        return 0
    try:
        folder = Folder(path, size_of(os.environ))
        entries = folder.clear() if args.clear else folder.entries()
    except KVCacheValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{path}: {error.strerror}")
    noun = "kernel" if len(entries) == 1 else "kernels"
    held = f"{len(entries)} {noun}, {sum(entry.size for entry in entries) / 2**20:.1f} MiB"
    print(f"{path}: removed {held}" if args.clear else f"{path}: {held} of {folder.max_bytes >> 20} MiB")
    return 0
