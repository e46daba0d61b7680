"""Argument types of the command line."""

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


def argument_of[T](parse: Callable[[str], T]) -> Callable[[str], T]:
    """Returns `parse` as an argument's type: kvjax's error becomes argparse's, which names the option itself."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except kvjax.KVCacheValueError as error:
            raise argparse.ArgumentTypeError(re.sub(r"^[\w ]+: (?=got )", "", str(error))) from None

    return read


def kv_cache_dtypes(text: str) -> RequestedKVCacheDType:
    """Parses a dtype, or dtypes by layers as in `resolve_layer_dtypes`: `"0-3=bfloat16,sliding_window=fp8,*=nvfp4"`."""
    parse = argument_of(kvjax.parse_kv_cache_dtype)
    if "=" not in text:
        return parse(text)
    dtypes: dict[int | str, str | kvjax.KVCacheDType] = {}
    for entry in text.split(","):
        layers, equals, dtype = (part.strip() for part in entry.partition("="))
        if not equals:
            raise argparse.ArgumentTypeError(f"got {entry!r}, expected layers=dtype, as in '0-3=bfloat16,*=nvfp4'")
        if layers in dtypes:
            raise argparse.ArgumentTypeError(f"got {layers!r} twice, expected each key once")
        dtypes[layers] = parse(dtype)
    return dtypes


def at_least(least: int, most: int = MAX_SIZE) -> Callable[[str], int]:
    """Returns the type of an integer between `least` and `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least {least}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"got {shown(value)}, expected at least {least}")
        return _at_most(value, most)

    return read


def percentage(text: str) -> float:
    """Parses a number above 0 and at most 100."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0 and at most 100")
    return value


def memory(text: str) -> int:
    """Parses bytes: `"40GiB"`, `"1.5 TB"`, `"512MiB"`, or a plain number of bytes. Rounds down to whole bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip().lower(), re.ASCII)
    size = {name.lower(): size for name, size in _UNITS.items()}.get(match[2] or "b") if match else None
    if match is None or size is None:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a number of bytes, or a number and one of {', '.join(_UNITS)}, as in 40GiB"
        )
    return _at_most(int(Fraction(match[1]) * size))


def _at_most(value: int, most: int = MAX_SIZE) -> int:
    if value > most:
        raise argparse.ArgumentTypeError(f"got {shown(value)}, expected at most {most}")
    return value
