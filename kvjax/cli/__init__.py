"""The `kvjax` command: `kvjax demo` and `kvjax plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import kvjax
from kvjax.cli import demo, plan


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
    status: int = args.run(args)
    return status
