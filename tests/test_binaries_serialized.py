"""Code found in what XLA serializes: records of Riegeli, Snappy's compression, and CUDA's ELF files."""

from __future__ import annotations

import random
import struct

import pytest

from kvjax.binaries import serialized
from kvjax.binaries.serialized import Code, find_code, snappy


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def compressed(data: bytes) -> bytes:
    """As literals of 1 to 100 bytes and copies of what came at most 100 bytes before, of every form."""
    random_ = random.Random(len(data))
    out, at = varint(len(data)), 0
    while at < len(data):
        offset = random_.randint(1, 100)
        length = 0
        while at >= offset and length < 64 and data[at + length : at + length + 1] == data[at + length - offset :][:1]:
            length += 1
            if at + length == len(data):
                break
        if length >= 4:
            form = random_.choice([1, 2, 3])
            if form == 1:
                length = min(length, 11)
                out += bytes([1 | length - 4 << 2 | offset >> 8 << 5, offset & 0xFF])
            else:
                out += bytes([form | length - 1 << 2]) + offset.to_bytes(2 if form == 2 else 4, "little")
        else:
            length = min(random_.randint(1, 100), len(data) - at)
            out += bytes([length - 1 << 2]) if length <= 60 else bytes([60 << 2, length - 1])
            out += data[at : at + length]
        at += length
    return out


def test_snappy_copies_overlap_and_literals_are_long():
    assert snappy(b"\x0a\x04ab" + bytes([1 | 4 << 2, 2]), 10) == b"ababababab"
    assert snappy(b"\x00", 0) == b""
    long = random.Random(0).randbytes(70_000)
    assert snappy(varint(70_000) + bytes([62 << 2]) + (69_999).to_bytes(3, "little") + long, 70_000) == long
    for size in (1, 60, 61, 1000, 5000):
        data = bytes(random.Random(size).choices(b"ab", k=size))
        assert snappy(compressed(data), size) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05",
        b"\x02\x00a",  # too short
        b"\x01\x04ab",  # too long
        b"\x04\x01\x01",  # a copy of what is not there
        b"\x05\x00a\x01\x00",  # of nothing
        b"\x05\x00a\x01",
        b"\xff\xff\xff\xff\x7f\x00a",
    ],
)
def test_what_is_not_of_snappys_form_is_refused(data: bytes):
    size = 0
    for i, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            break
    with pytest.raises((ValueError, IndexError)):
        snappy(data, size)


def elf(names: list[str], *, machine: int = 190, parameter_bytes: int = 24, entry: int = 0x10) -> bytes:
    """An ELF file with a symbol for each kernel and a section of information for the first."""
    symbol_names = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    symbols = bytes(24)
    at = 1
    for name in names:
        symbols += struct.pack("<IBBHQQ", at, 0x12, entry, 1, 0, 0)
        at += len(name) + 1
    first = names[0] if names else ""
    info = struct.pack("<BBHQ", 4, 0x0A, 8, 99) + struct.pack("<BBH", 3, 0x19, parameter_bytes)
    section_names = b"\0.strtab\0.symtab\0.nv.info." + first.encode() + b"\0.nv.shared\0"
    contents = b"", symbol_names, symbols, info, section_names, b""
    kinds, links = (0, 3, 2, 0x70000000, 3, 8), (0, 0, 1, 0, 0, 0)
    starts = (0, 1, 9, 17, 1, 17 + 10 + len(first))
    body, sections = b"", b""
    for name, kind, link, content in zip(starts, kinds, links, contents, strict=True):
        size = len(content) if kind != 8 else 1 << 40  # memory that the file does not hold
        sections += struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, 64 + len(body), size, link, 0, 1, 0)
        body += content
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, 64 + len(body), 0, 64, 56, 0, 64, len(kinds), 4)
    return header + body + sections


def chunk(records: list[bytes], kind: bytes = b"r", compression: bytes = b"\0") -> bytes:
    sizes, values = b"".join(varint(len(record)) for record in records), b"".join(records)
    if compression == b"s":
        sizes, values = (varint(len(part)) + compressed(part) for part in (sizes, values))
    data = compression + varint(len(sizes)) + sizes + values
    count_and_kind = kind + len(records).to_bytes(7, "little")
    return bytes(8) + len(data).to_bytes(8, "little") + bytes(8) + count_and_kind + bytes(8) + data


def file(chunks: list[bytes]) -> bytes:
    """Chunks in blocks, each with a header."""
    whole, blocks = chunk([], b"s") + b"".join(chunks), []
    for at in range(0, len(whole), (1 << 16) - 24):
        header = serialized._SIGNATURE.ljust(24, b"\0") if not at else b"\xee" * 24
        blocks.append(header + whole[at : at + (1 << 16) - 24])
    return b"".join(blocks)


CUBIN = elf(["gather_kv"])
CODE = Code("gather_kv", 24, CUBIN)


def test_a_file_is_found_whole_wherever_it_is():
    assert find_code(b"before" + CUBIN + b"after") == CODE
    host, no_kernel = elf(["main"], machine=62), elf([])
    assert find_code(host + b"..." + CUBIN + CUBIN[:50] + no_kernel) == CODE
    assert find_code(CUBIN + CUBIN) == CODE  # once for XLA, once for the host's code


@pytest.mark.parametrize("compression", [b"\0", b"s"])
def test_records_are_read_in_chunks_over_blocks_and_in_files_in_them(compression: bytes):
    padding = random.Random(1).randbytes(100_000)
    inner = file([chunk([b"", padding, b"x" * 300], compression=compression), chunk([CUBIN], compression=compression)])
    assert find_code(b"proto" + inner) == CODE
    outer = file([chunk([b"manifest"]), chunk([b"proto" + inner]), chunk([b"rest"])])
    assert find_code(b"version" + outer + b"tail") == CODE
    split = file([chunk([padding[:65_000], CUBIN], compression=compression)])  # over the end of a block
    assert CUBIN not in split or compression == b"\0"
    assert find_code(split) == CODE


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "with 0 kernels"),
        (CUBIN[:-1], "with 0 kernels"),
        (elf(["gather_kv"], machine=62), "with 0 kernels"),
        (elf(["gather_kv"], entry=0), "with 0 kernels"),
        (elf(["one", "two"]), "with 0 kernels"),
        (CUBIN + elf(["other"]), "with 2 kernels"),
        (file([chunk([CUBIN], compression=b"z")]), "compressed by b'z', expected Snappy"),
        (file([chunk([CUBIN])])[:-9], "with 0 kernels"),
        (file([chunk([CUBIN], compression=b"s")[:41] + b"\xff" * 400]), "."),
    ],
)
def test_what_has_another_form_is_refused(content: bytes, error: str):
    with pytest.raises(ValueError, match=error):
        find_code(content)
