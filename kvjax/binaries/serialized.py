"""Finds a kernel's code in what XLA serializes of a compiled program.

XLA writes records in the Riegeli format, compressed by Snappy: chunks, which contain records, are laid over blocks of
64 KiB that begin with a header. The record of a program is such a file itself. Both formats are public. In the records,
the code is an ELF file of the machine CUDA. That file says where it ends and what its kernels are called.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_BLOCK, _BLOCK_HEADER = 1 << 16, 24
_CHUNK_HEADER = struct.Struct(
    "<8xQ8xQQ"
)  # hash; bytes of data; hash; type, and number of records above it; decoded bytes
_SIGNATURE = bytes.fromhex("83af70d10d884a3f")  # the hash of the header of a file's first block
_MOST = 1 << 28

_ELF, _CUDA_MACHINE = b"\x7fELF\x02\x01\x01", 190
_ELF_HEADER = struct.Struct("<16xHH4x8xQQ4xHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS, _NO_BITS, _FUNCTION, _ENTRY = 2, 8, 2, 0x10
_INFO = b".nv.info."
_SIZED_VALUE, _PARAMETER_BYTES = 4, 0x19


class Code(NamedTuple):
    """The code of a kernel.

    Attributes:
      name: its symbol.
      parameter_bytes: the size of its parameters.
      elf: the ELF file.
    """

    name: str
    parameter_bytes: int
    elf: bytes


def find_code(serialized: bytes) -> Code:
    """The only kernel in a serialized program.

    Raises:
      ValueError: there is another number of kernels, or the bytes have another form.
    """
    try:
        found = {code for record in _all_records(serialized) for code in _codes(record)}
    except (IndexError, struct.error) as error:
        raise ValueError(f"a compiled program of another form: {error}") from error
    if len(found) != 1:
        raise ValueError(f"a compiled program with {len(found)} kernels, expected 1")
    return found.pop()


def _all_records(content: bytes) -> Iterator[bytes]:
    """The records of a file that begins anywhere in `content`, and of files nested in these; or `content` itself."""
    if (start := content.find(_SIGNATURE)) < 0:
        yield content
        return
    for record in _records(content[start:]):
        yield from _all_records(record)


def _records(file: bytes) -> Iterator[bytes]:
    """The records of a file."""
    chunks = b"".join(file[at + _BLOCK_HEADER : at + _BLOCK] for at in range(0, len(file), _BLOCK))
    at = 0
    while at + _CHUNK_HEADER.size <= len(chunks):
        size, kind, _ = _CHUNK_HEADER.unpack_from(chunks, at)
        at += _CHUNK_HEADER.size
        if size > len(chunks) - at:
            return  # what follows the file
        if kind & 0xFF == ord("r"):
            yield from _records_of_chunk(chunks[at : at + size], kind >> 8)
        at += size


def _records_of_chunk(data: bytes, count: int) -> Iterator[bytes]:
    compression = data[:1]
    size, at = _varint(data, 1)
    sizes, values = (_decompressed(part, compression) for part in (data[at : at + size], data[at + size :]))
    start = at = 0
    for _ in range(count):
        length, at = _varint(sizes, at)
        yield values[start : start + length]
        start += length


def _decompressed(data: bytes, compression: bytes) -> bytes:
    if compression == b"\0":
        return data
    if compression != b"s":
        raise ValueError(f"a compiled program compressed by {compression!r}, expected Snappy")
    size, at = _varint(data, 0)
    return snappy(data[at:], size)


def snappy(data: bytes, size: int) -> bytes:
    """Decompresses Snappy's raw format, whose first bytes may say the size again.

    Raises:
      ValueError, IndexError: the data is not of this format or not of this size.
    """
    stated, at = _varint(data, 0)
    if stated != size or size > _MOST:
        raise ValueError(f"a compressed record of {stated} bytes, expected {size}")
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        kind, length = tag & 3, (tag >> 2) + 1
        if kind == 0:
            if length > 60:
                num_bytes = length - 60
                length = int.from_bytes(data[at : at + num_bytes], "little") + 1
                at += num_bytes
            out += data[at : at + length]
            at += length
            continue
        if kind == 1:
            length, offset = (tag >> 2 & 7) + 4, tag >> 5 << 8 | data[at]
            at += 1
        else:
            num_bytes = 2 if kind == 2 else 4
            offset = int.from_bytes(data[at : at + num_bytes], "little")
            at += num_bytes
        if not 0 < offset <= len(out):
            raise ValueError(f"a compressed record that refers {offset} bytes back of {len(out)}")
        run = bytes(out[len(out) - offset : len(out) - offset + length])
        out += (run * (-(-length // len(run))))[:length]
    if len(out) != size:
        raise ValueError(f"a compressed record of {len(out)} bytes, expected {size}")
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7


def _codes(record: bytes) -> Iterator[Code]:
    at = record.find(_ELF)
    while at >= 0:
        try:
            code = _code(record[at:])
        except (ValueError, LookupError, struct.error):
            code = None  # not CUDA's, or these bytes by chance
        if code is not None:
            yield code
        at = record.find(_ELF, at + len(_ELF))


def _code(content: bytes) -> Code | None:
    """The ELF file that `content` begins with, if it is CUDA's and has one kernel."""
    _, machine, segments, sections, _, segment_size, num_segments, section_size, num_sections, names_at = (
        _ELF_HEADER.unpack_from(content)
    )
    if machine != _CUDA_MACHINE or section_size != _SECTION.size:
        return None
    tables = [_SECTION.unpack_from(content, sections + i * section_size) for i in range(num_sections)]
    ends = [offset + size for _, kind, _, _, offset, size, *_ in tables if kind != _NO_BITS]
    end = max(segments + num_segments * segment_size, sections + num_sections * section_size, *ends)
    kernels = []
    for _, kind, _, _, offset, size, link, *_ in tables:
        for place in range(offset, offset + size, _SYMBOL.size) if kind == _SYMBOLS else ():
            name, info, other, *_ = _SYMBOL.unpack_from(content, place)
            if info & 0xF == _FUNCTION and other & _ENTRY:
                kernels.append(_text(content, tables[link][4] + name))
    infos = {_text(content, tables[names_at][4] + name): (at, at + size) for name, _, _, _, at, size, *_ in tables}
    if len(kernels) != 1 or end > len(content):
        return None
    [kernel] = kernels
    start, stop = infos[_INFO + kernel]
    return Code(kernel.decode(), _parameter_bytes(content[start:stop]), content[:end])


def _text(content: bytes, start: int) -> bytes:
    return content[start : content.index(b"\0", start)]


def _parameter_bytes(info: bytes) -> int:
    """The size of a kernel's parameters, from the list of attributes in its information section."""
    at = found = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        if attribute == _PARAMETER_BYTES:
            found = value
        at += 4 + (value if form == _SIZED_VALUE else 0)
    return found
