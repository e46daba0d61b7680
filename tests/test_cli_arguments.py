"""What a command reads from a word, and what it says of one that it refuses."""

from __future__ import annotations

import argparse
import re

import pytest

import kvjax
from kvjax.cli.arguments import argument_of, at_least, memory


@pytest.mark.parametrize(
    ("word", "size"),
    [
        *(("0", 0), ("17", 17), ("17B", 17), ("1KB", 1000), ("1KiB", 1024), ("512MiB", 512 * 2**20)),
        *(("40GB", 40 * 10**9), ("40GiB", 40 * 2**30), ("2TB", 2 * 10**12), ("2TiB", 2 * 2**40)),
        *(("40 GiB", 40 * 2**30), (" 40gib ", 40 * 2**30), ("1.5GiB", 3 * 2**29), ("0.1KiB", 102)),
        # As a float, the last digits would be lost.
        ("123456789.123456789GB", 123456789123456789),
        (f"{2**63 - 1}", 2**63 - 1),
    ],
)
def test_an_amount_of_memory_is_parsed(word: str, size: int):
    assert memory(word) == size


@pytest.mark.parametrize("word", ["", "GiB", "40G", "40 gigabytes", "-1GiB", "1e9", "1,000", "1.GiB", "0x10", "٤GiB"])
def test_invalid_amounts_of_memory_are_refused(word: str):
    message = (
        f"got {word!r}, expected a number of bytes, or a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB,"
        " as in 40GiB"
    )
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{re.escape(message)}$"):
        memory(word)


@pytest.mark.parametrize(("word", "size"), [(f"{2**63}", 2**63), ("8388608TiB", 2**63), ("9" * 400, int("9" * 400))])
def test_more_memory_than_there_is_anywhere_is_refused(word: str, size: int):
    with pytest.raises(argparse.ArgumentTypeError, match=f"^got {size}, expected at most {2**63 - 1}$"):
        memory(word)


def test_an_argument_below_the_least_is_refused():
    assert [at_least(1)(word) for word in ("1", "16")] == [1, 16]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("0", "got 0, expected at least 1"),
        ("-8", "got -8, expected at least 1"),
        ("many", "got 'many', expected an integer of at least 1"),
        ("1.5", "got '1.5', expected an integer of at least 1"),
        (f"{2**63}", f"got {2**63}, expected at most {2**63 - 1}"),
    ],
)
def test_invalid_numbers_are_refused(word: str, message: str):
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{re.escape(message)}$"):
        at_least(1)(word)


def test_what_kvjax_refuses_is_told_but_for_the_name_that_argparse_tells():
    read = argument_of(kvjax.parse_kv_cache_dtype)
    assert read("half") is kvjax.KVCacheDType.FLOAT16
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        read("nvpf4")
    with pytest.raises(kvjax.KVCacheValueError) as raised:
        kvjax.parse_kv_cache_dtype("nvpf4")
    assert f"kv_cache_dtype: {refused.value}" == str(raised.value)
