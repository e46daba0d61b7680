"""`kvjax demo`: serves real text from a paged cache in every dtype, and prints each one's cost and accuracy."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import kvjax
from kvjax.cli.arguments import argument_of, at_least

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXTRA_MODULES = frozenset({"safetensors", "tqdm"})
"""Modules that the extra `demo` installs."""

MISSING_EXTRA = 2
"""Exit status if the extra is not installed."""

NO_TEXT = 1
"""Exit status if this Python lacks its standard library's sources."""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `kvjax`'s parser."""
    parser = subparsers.add_parser(
        "demo",
        help="serve held-out text through a paged cache in every dtype and compare them",
        description="Serves held-out text with a small included transformer from a paged KV cache, in every dtype, and"
        " prints each dtype's cost and accuracy; then generates a continuation.",
    )
    parser.add_argument(
        "--dtype",
        dest="dtypes",
        action="append",
        type=argument_of(kvjax.parse_kv_cache_dtype),
        metavar="DTYPE",
        help=f"KV cache dtype, repeatable (default: all); one of {', '.join(kvjax.ACCEPTED_KV_CACHE_DTYPES)}",
    )
    parser.add_argument("--sequences", type=at_least(1), default=10, help="number of texts (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=at_least(32), default=384, help="bytes of the longest text (default: %(default)s)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="selects the texts (default: %(default)s)")
    parser.add_argument(
        "--scales", action="store_true", help="also compare the ways to find scales, in a second table: twice the time"
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo and prints its result; returns the exit status."""
    try:
        from kvjax.demo import program, report
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        print(f"kvjax demo: {error.name} is not installed: pip install 'kvjax[demo]'", file=sys.stderr)
        return MISSING_EXTRA
    dtypes = tuple(dict.fromkeys(args.dtypes or kvjax.STORED_KV_CACHE_DTYPES))
    try:
        result = program.run(program.Options(dtypes, args.sequences, args.tokens, args.seed, args.scales))
    except FileNotFoundError as error:
        print(f"kvjax demo: {error}", file=sys.stderr)
        return NO_TEXT
    print(report.as_json(result) if args.json else report.as_text(result))
    return 0
