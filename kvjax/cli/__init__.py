"""The `kvjax` command: `kvjax demo`, `kvjax plan`, `kvjax calibrate` and `kvjax cache`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import kvjax
from kvjax.cli import cache, calibrate, demo, plan

BROKEN_PIPE = 141
"""Exit status when the output's reader has closed it, as shells report SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's); returns the exit status.

    Raises:
      SystemExit: from argparse, on `--help` and on invalid arguments.
    """
    parser = argparse.ArgumentParser(
        prog="kvjax",
        description="A paged KV cache for JAX: memory plans, scales, compiled kernels, and a demo of every dtype.",
    )
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    demo.add_parser(subparsers)
    plan.add_parser(subparsers)
    calibrate.add_parser(subparsers)
    cache.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) is gone. Redirect Python's final flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status
