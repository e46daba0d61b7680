"""The `kvjax` command: `kvjax demo` and `kvjax plan`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import kvjax
from kvjax.cli import demo, plan

READER_GONE = 141
"""Exit status where nobody reads the output any more: what a shell says of a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (by default the process's own); returns the exit status.

    Raises:
      SystemExit: as argparse does, on `--help` and on arguments that it refuses.
    """
    parser = argparse.ArgumentParser(
        prog="kvjax", description="A paged KV cache for JAX: what it costs, and what it keeps."
    )
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    demo.add_parser(subparsers)
    plan.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read (`| head`) has had enough. Python flushes once more on its way out: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return status
