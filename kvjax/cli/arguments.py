"""Types of command line arguments: each reads a word, or says in argparse's way what it would have taken."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from fractions import Fraction

import kvjax
from kvjax.errors import shown
from kvjax.resolve import RequestedKVCacheDType
from kvjax.spec import MAX_SIZE

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


def word_of[T](parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argument's type: what kvjax says of a word that it refuses reaches the user whole."""

    def read(word: str) -> T:
        try:
            return parse(word)
        except kvjax.KVCacheValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def kv_cache_dtypes(word: str) -> RequestedKVCacheDType:
    """A dtype, or dtypes by layers, for `resolve_layer_dtypes`: `"0-3=bfloat16,sliding_window=fp8,*=nvfp4"`."""
    parse = word_of(kvjax.parse_kv_cache_dtype)
    if "=" not in word:
        return parse(word)
    dtypes: dict[int | str, str | kvjax.KVCacheDType] = {}
    for entry in word.split(","):
        layers, equals, dtype = (part.strip() for part in entry.partition("="))
        if not equals:
            raise argparse.ArgumentTypeError(f"got {entry!r}, expected layers=dtype, as in '0-3=bfloat16,*=nvfp4'")
        if layers in dtypes:
            raise argparse.ArgumentTypeError(f"got {layers!r} twice, expected each word once")
        dtypes[layers] = parse(dtype)
    return dtypes


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number that is not below `least`, nor above `MAX_SIZE`."""

    def read(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {word!r}, expected a whole number of at least {least}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"got {shown(value)}, expected at least {least}")
        return _at_most(value)

    return read


def memory(word: str) -> int:
    """Bytes: `"40GiB"`, `"1.5 TB"`, `"512MiB"`, or a plain number of them. A fraction of a byte is dropped."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", word.strip().lower(), re.ASCII)
    size = {name.lower(): size for name, size in _UNITS.items()}.get(match[2] or "b") if match else None
    if match is None or size is None:
        raise argparse.ArgumentTypeError(
            f"got {word!r}, expected a number of bytes, or a number and one of {', '.join(_UNITS)}, as in 40GiB"
        )
    return _at_most(int(Fraction(match[1]) * size))


def _at_most(value: int) -> int:
    if value > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"got {shown(value)}, expected at most {MAX_SIZE}")
    return value
