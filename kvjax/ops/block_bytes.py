"""Blocks and states as bytes: `export_blocks` and `import_blocks`, for a cache on disk or between processes.

The format, version 1. Integers are little-endian, digests are SHA-256.

    8 bytes          b"KVJAXBLK"
    8 bytes          size of the header
    header           JSON: the format's version, the caches (spec, layers, scales), the numbers of blocks and of hashes;
                     with a state its dtype and shape in each array of states
    32 bytes each    the hashes of the first blocks
    32 bytes         digest of everything so far
    pages            by cache, then by block, then by layer, as they are stored
    state            by array of states
    32 bytes         digest of everything so far

Nothing is built from a header's values. Except for the blocks, a header must equal the one that the destination would
export. So the destination determines the size of the pages before any page is read.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, overload

import jax
import numpy as np
from jax.typing import ArrayLike

from kvjax.block_pool import HASH_BYTES, HASH_VERSION
from kvjax.cache import SCALES, KVCache
from kvjax.errors import KVCacheTypeError, KVCacheValueError, UnsupportedError, kind_of, shown
from kvjax.memory import check_memory, without_mesh
from kvjax.ops.arguments import check_cache
from kvjax.ops.blocks import is_traced, pages_from_host, pages_to_host, put_pages, scale_on_host
from kvjax.ops.state_bytes import (
    check_states,
    is_states,
    num_state_bytes,
    put_state,
    state_description,
    state_from_host,
    state_to_host,
)
from kvjax.spec import as_int, as_items, spec_to_dict

FORMAT = 1
MAGIC = b"KVJAXBLK"
MAX_HEADER_BYTES = 2 * 2**20
"""Limit on the JSON, which takes 25 times as much memory when parsed; fits the scales of 300 heads of 300 layers."""

MAX_HASHES = 2**20
"""Limit on the hashes: 32 MiB, which are read before their digest is checked."""

CHUNK_BYTES = 16 * 2**20
"""Pages that are moved at once; at least one block of one cache."""

_DIGEST_BYTES = hashlib.sha256().digest_size
_READ_BYTES = 2**20

type Caches = Any
"""A `KVCache`, or a list, tuple or dictionary of several whose blocks have the same numbers, and of states' arrays."""

type Source = bytes | bytearray | memoryview | BinaryIO
"""Anything with a buffer of bytes, such as an `mmap`, or with `read(size)`."""


class _Parts(NamedTuple):
    """The leaves of caches, by their place: caches of pages, and arrays of states with a sequence's slot in them."""

    caches: dict[int, KVCache]
    states: dict[int, Any]
    slot: int


@overload
def export_blocks(
    caches: Caches, blocks: ArrayLike, file: None = None, *, hashes: Sequence[bytes] = (), state: int | None = None
) -> bytes: ...


@overload
def export_blocks(
    caches: Caches, blocks: ArrayLike, file: BinaryIO, *, hashes: Sequence[bytes] = (), state: int | None = None
) -> None: ...


def export_blocks(
    caches: Caches,
    blocks: ArrayLike,
    file: BinaryIO | None = None,
    *,
    hashes: Sequence[bytes] = (),
    state: int | None = None,
) -> bytes | None:
    """Returns blocks as bytes that `import_blocks` reads, or writes them to `file`, at most 16 MiB of pages at a time.

    The pages of a divided cache, and the state of a divided array, are exported whole, in the order of an undivided
    one.

    A write that fails, or a reader that goes away, leaves a part of an export, which `import_blocks` refuses.

    Args:
      caches: a cache, or a list, tuple or dictionary of the caches that share a block table. Beside them may be arrays
        of states, `[num_states, ...]`, of JAX or NumPy.
      blocks: the blocks' numbers, integers `[num_blocks]`, in the order of the sequence's tokens.
      file: anything with `write(bytes)`, such as an open file or `socket.makefile("wb")`; not flushed.
      hashes: of the first blocks, as `PagedSequence.block_hashes` returns them; the importer finds them in
        `open_blocks`.
      state: the sequence's slot in the arrays of states, `PagedSequence.state`; None without such arrays.

    Raises:
      KVCacheValueError, KVCacheTypeError: a block that a cache does not have, a slot that an array of states does not
        have, invalid hashes, or no caches.
      UnsupportedError: a cache in memory other than its device's default, or of which other processes hold a part.
    """
    found = _as_parts(caches, state, is_written=False)
    numbers = _as_blocks(blocks, found, least=0)
    hashes = as_items("hashes", hashes, "a sequence of bytes")
    _check_hashes(hashes, len(numbers))
    header = {**_described(found), "num_blocks": len(numbers), "num_hashes": len(hashes)}
    # Without states the header is that of versions before states existed.
    encoded = json.dumps({name: value for name, value in header.items() if value is not None}).encode()
    if len(encoded) > MAX_HEADER_BYTES:
        raise KVCacheValueError(
            f"caches: got {len(found.caches)} that a header of {len(encoded):,} bytes describes, expected at most"
            f" {MAX_HEADER_BYTES:,}: export fewer caches at once"
        )
    to = io.BytesIO() if file is None else file
    digest = hashlib.sha256()

    def write(data: Any) -> None:
        digest.update(data)
        _write(to, data)

    write(MAGIC + len(encoded).to_bytes(8, "little") + encoded)
    write(b"".join(hashes))
    write(digest.digest())
    with without_mesh():
        for cache in found.caches.values():
            for chunk in _chunks(cache, len(numbers)):
                write(pages_to_host(cache, numbers[chunk]).reshape(-1).data)
        for states in found.states.values():
            write(state_to_host(states, found.slot).data)
    _write(to, digest.digest())
    return to.getvalue() if isinstance(to, io.BytesIO) and file is None else None


class StoredBlocks:
    """An export whose header has been read and checked; see `open_blocks`.

    Attributes:
      num_blocks: how many blocks it has.
      hashes: of its first blocks, as they were given to `export_blocks`; possibly none.
    """

    def __init__(self, source: Source) -> None:
        self._read, self._is_whole = _reader(source)
        self._digest = hashlib.sha256()
        start = self._take(16)
        if start[:8] != MAGIC:
            raise KVCacheValueError(f"source: got bytes that start with {shown(bytes(start[:8]))}, expected {MAGIC!r}")
        size = int.from_bytes(start[8:], "little")
        if size > MAX_HEADER_BYTES:
            raise KVCacheValueError(f"source: got a header of {size:,} bytes, expected at most {MAX_HEADER_BYTES:,}")
        self._header = _parsed(self._take(size))
        self.num_blocks: int = self._header["num_blocks"]
        hashes = bytes(self._take(self._header["num_hashes"] * HASH_BYTES))
        self._check_digest("header")
        self.hashes = tuple(hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
        self._is_read = False

    def read_into(self, parts: _Parts, numbers: np.ndarray) -> list[Any]:
        """Does what `import_blocks` says, for checked caches and blocks; returns the leaves of the caches."""
        if self._is_read:
            raise KVCacheValueError("source: got blocks that were imported before, expected to open them again")
        for name, expected in _described(parts).items():
            _check_equal(name, self._header.get(name), expected)
        if len(numbers) != self.num_blocks:
            raise KVCacheValueError(f"blocks: got {len(numbers)}, expected {self.num_blocks}, as source has them")
        self._is_read = True
        pages = {i: self._take(len(numbers) * _block_bytes(cache)) for i, cache in parts.caches.items()}
        states = {i: np.frombuffer(self._take(num_state_bytes(each)), np.uint8) for i, each in parts.states.items()}
        self._check_digest("pages")
        if self._is_whole and self._read(1):
            raise KVCacheValueError("source: got bytes after the last page's digest, expected none")
        wanted = np.flatnonzero(numbers >= 0)
        written = parts.caches | parts.states
        # All are on their devices before the first is written: without memory for one, no cache has changed.
        placed = [
            (i, numbers[wanted[part]], pages_from_host(cache, _rows(pages[i], len(numbers))[wanted[part]]))
            for i, cache in parts.caches.items()
            for part in _chunks(cache, len(wanted))
        ]
        placed_states = {i: state_from_host(written[i], state) for i, state in states.items()}
        jax.block_until_ready((placed, placed_states))
        for i, to_blocks, of_chunk in placed:
            written[i] = put_pages(f"caches[{i}]", written[i], of_chunk, to_blocks)
        for i, state in placed_states.items():
            written[i] = put_state(f"caches[{i}]", written[i], state, parts.slot)
        return [written[i] for i in sorted(written)]

    def _take(self, size: int) -> bytearray:
        """Reads exactly `size` bytes. Memory grows with what is read, not with what a file claims to hold."""
        taken = bytearray()
        while len(taken) < size:
            part = self._read(min(size - len(taken), _READ_BYTES))
            if not part:
                raise KVCacheValueError(f"source: got {len(taken):,} of {size:,} bytes, expected all: it is torn")
            taken += part
        self._digest.update(taken)
        return taken

    def _check_digest(self, what: str) -> None:
        expected = self._digest.digest()
        got = bytes(self._take(_DIGEST_BYTES))
        if got != expected:
            raise KVCacheValueError(
                f"source: got the digest {got.hex()} of its {what}, expected {expected.hex()}: bytes were changed"
            )


def open_blocks(source: Source) -> StoredBlocks:
    """Reads and checks the header of an export, for its number of blocks and hashes; pass it to `import_blocks`.

    Args:
      source: the bytes of one export, or anything with a buffer of them, such as an `mmap`; or an object with
        `read(size)`, such as an open file or `socket.makefile("rb")`, of which nothing after the export is read.

    Raises:
      KVCacheValueError: not an export, of another version of the format or of the hashes, torn, or changed.
      KVCacheTypeError: neither bytes nor an object with `read`.
    """
    return StoredBlocks(source)


def import_blocks(
    source: Source | StoredBlocks, caches: Caches, blocks: ArrayLike, *, state: int | None = None
) -> Caches:
    """Writes exported blocks into blocks of caches that store the same; returns these caches.

    **The caches are donated**, and so written in place, as NumPy's states are: use the returned ones. If the call
    raises, they have not changed and are not donated, unless a device fails while it writes. For this the pages stay in
    host memory until their digest is checked, then on the devices until all are there. To need less memory, export
    fewer blocks at once.

    Args:
      source: as in `open_blocks`, or what it returned. Bytes must end with the export.
      caches: like those exported: as many, in the same order, of equal specs, layers and scales; likewise arrays of
        states, of equal dtypes and shapes but for `num_states`. They may be divided in any other way.
      blocks: the block that each exported block goes to, integers `[num_blocks]`, each at most once; -1 for one that is
        not needed.
      state: the slot that an exported state goes to; None without arrays of states.

    Raises:
      KVCacheValueError: as `open_blocks`; an export that does not fit the caches, naming the first field that differs;
        a block or a slot that a cache does not have, or a repeated block.
      KVCacheTypeError: arguments of another kind.
      UnsupportedError: a cache in memory other than its device's default, or of which other processes hold a part.
    """
    found = _as_parts(caches, state, is_written=True)
    numbers = _as_blocks(blocks, found, least=-1)
    wanted = numbers[numbers >= 0]
    if len(np.unique(wanted)) != len(wanted):
        first = next(number for number in wanted.tolist() if (wanted == number).sum() > 1)
        raise KVCacheValueError(f"blocks: got block {first} more than once, expected each once")
    stored = source if isinstance(source, StoredBlocks) else open_blocks(source)
    with without_mesh():
        return jax.tree.unflatten(jax.tree.structure(caches, is_leaf=_is_cache), stored.read_into(found, numbers))


def _is_cache(value: object) -> bool:
    return isinstance(value, KVCache)


def _as_parts(caches: Caches, state: int | None, *, is_written: bool) -> _Parts:
    leaves = enumerate(jax.tree.leaves(caches, is_leaf=lambda value: not isinstance(value, (list, tuple, dict))))
    found = _Parts({}, {}, -1)
    for index, leaf in leaves:
        if is_states(leaf):
            check_states(f"caches[{index}]", leaf, is_written=is_written)
            found.states[index] = leaf
        else:
            _check_pages(f"caches[{index}]", leaf)
            found.caches[index] = leaf
    if not found.caches:
        raise KVCacheValueError(f"caches: got {shown(caches)}, expected at least one KVCache")
    arrays = [*(cache.kv for cache in found.caches.values()), *found.states.values()]
    if len({id(array) for array in arrays}) != len(arrays):
        raise KVCacheValueError("caches: got a cache twice, expected each once")
    if not found.states:
        if state is not None:
            raise KVCacheValueError(f"state: got {shown(state)}, expected None: caches has no arrays of states")
        return found
    if state is None:
        raise KVCacheValueError("state: got None, expected the slot of a sequence: caches has arrays of states")
    slot = as_int("state", state, least=0, most=min(map(len, found.states.values())) - 1)
    return found._replace(slot=slot)


def _check_pages(what: str, cache: Any) -> None:
    check_cache(cache, what)
    if is_traced(*jax.tree.leaves(cache)):
        raise KVCacheTypeError(f"{what}: got a traced cache, expected a call outside jit")
    if not cache.kv.is_fully_addressable:
        raise UnsupportedError(f"{what}: got a cache of several processes, expected one whose devices are all here")
    check_memory(what, cache.kv.sharding)


def _as_blocks(blocks: Any, parts: _Parts, *, least: int) -> np.ndarray:
    """Returns the blocks' numbers, int32, after checking that every cache has them."""
    try:
        numbers = np.asarray(blocks)
    except ValueError:  # lists of different lengths
        raise KVCacheValueError(f"blocks: got {shown(blocks)}, expected integers [num_blocks]") from None
    if numbers.ndim != 1:
        raise KVCacheValueError(f"blocks: got shape {numbers.shape}, expected [num_blocks]")
    if numbers.size and numbers.dtype.kind not in "iu":
        raise KVCacheTypeError(f"blocks: got dtype {numbers.dtype}, expected integers")
    for number in (numbers.min(), numbers.max()) if numbers.size else ():
        as_int("blocks", number, least=least, most=min(cache.num_blocks for cache in parts.caches.values()) - 1)
    return numbers.astype(np.int32)


def _check_hashes(hashes: Sequence[bytes], num_blocks: int) -> None:
    if len(hashes) > num_blocks:
        raise KVCacheValueError(f"hashes: got {len(hashes)}, expected at most one for each of {num_blocks} blocks")
    if len(hashes) > MAX_HASHES:
        raise KVCacheValueError(
            f"hashes: got {len(hashes):,}, expected at most {MAX_HASHES:,}: export fewer blocks at once"
        )
    for index, block_hash in enumerate(hashes):
        if not isinstance(block_hash, bytes):
            raise KVCacheTypeError(f"hashes[{index}]: got {kind_of(block_hash)}, expected bytes")
        if len(block_hash) != HASH_BYTES:
            raise KVCacheValueError(f"hashes[{index}]: got {len(block_hash)} bytes, expected {HASH_BYTES}")


def _described(parts: _Parts) -> dict[str, Any]:
    """Returns what an export of these caches says of them, as JSON values: equal for caches of equal bytes."""
    of_caches = [
        {
            "spec": {name: value for name, value in spec_to_dict(cache.spec).items() if name != "kind"},
            "page_size_bytes": cache.spec.page_size_bytes,
            "num_layers": cache.num_layers,
            **{what: _scale_values(getattr(cache, what), cache) for what in SCALES},
        }
        for cache in parts.caches.values()
    ]
    of_states = [state_description(states) for states in parts.states.values()] or None
    return {"format": FORMAT, "hash": HASH_VERSION, "caches": json.loads(json.dumps(of_caches)), "states": of_states}


def _scale_values(scale: Any, cache: KVCache) -> Any:
    """Returns a scale's values: a number if all are equal, else `[num_layers, num_kv_heads]`; without layers 1."""
    values = scale_on_host(scale)
    if cache.num_layers is not None and values.ndim == 1:
        values = values[:, None]
    values = np.broadcast_to(values, (cache.num_layers or 1, cache.spec.num_kv_heads)).astype(np.float32)
    return values.tolist() if (values != values[0, 0]).any() else values[0, 0].item()


def _check_equal(name: str, got: Any, expected: Any) -> None:
    """Raises `KVCacheValueError` for the first value of an export that is not that of the destination."""
    if isinstance(expected, dict) and isinstance(got, dict) and got.keys() == expected.keys():
        for key in expected:
            _check_equal(f"{name}.{key}", got[key], expected[key])
    elif isinstance(expected, list) and isinstance(got, list) and len(got) == len(expected):
        for index in range(len(expected)):
            _check_equal(f"{name}[{index}]", got[index], expected[index])
    elif type(got) is not type(expected) or got != expected:
        if isinstance(got, list) and isinstance(expected, list):
            name, got, expected = f"len({name})", len(got), len(expected)
        raise KVCacheValueError(
            f"source: got {name}={shown(got)}, expected {shown(expected)}, as the destination has it"
        )


def _parsed(encoded: bytearray) -> dict[str, Any]:
    """Returns a header after checking what does not depend on a destination."""
    try:
        header = json.loads(encoded.decode())
    except (ValueError, RecursionError):
        raise KVCacheValueError("source: got a header that is not JSON, expected that of export_blocks") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("hash") != HASH_VERSION:
        versions = {name: header.get(name) for name in ("format", "hash")} if isinstance(header, dict) else header
        expected = {"format": FORMAT, "hash": HASH_VERSION}
        raise KVCacheValueError(f"source: got the versions {shown(versions)}, expected {expected}")
    num_blocks, num_hashes = header.get("num_blocks"), header.get("num_hashes")
    if type(num_blocks) is not int or num_blocks < 0:
        raise KVCacheValueError(f"source: got num_blocks={shown(num_blocks)}, expected an int of at least 0")
    most = min(num_blocks, MAX_HASHES)
    if type(num_hashes) is not int or not 0 <= num_hashes <= most:
        raise KVCacheValueError(f"source: got num_hashes={shown(num_hashes)}, expected an int from 0 to {most}")
    return header


def _rows(data: bytearray, number: int) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(number, -1)


def _block_bytes(cache: KVCache) -> int:
    return cache.spec.page_size_bytes * (cache.num_layers or 1)


def _chunks(cache: KVCache, num_blocks: int) -> Iterator[slice]:
    """Yields the blocks that are moved at once, a power of two of them: few sizes are compiled."""
    most = 1 << max(CHUNK_BYTES // _block_bytes(cache), 1).bit_length() - 1
    for first in range(0, num_blocks, most):
        yield slice(first, min(first + most, num_blocks))


def _write(file: Any, data: Any) -> None:
    view = memoryview(data)
    while view:
        written = file.write(view)
        if written == 0 or (written is None and isinstance(file, io.RawIOBase)):  # of one that does not block
            raise BlockingIOError("file: it took no bytes, expected one that waits until it can")
        view = view[len(view) if written is None else written :]


def _reader(source: Any) -> tuple[Callable[[int], bytes], bool]:
    """Returns a function that reads at most so many bytes, and whether it must end with the export."""
    if hasattr(source, "read") and not hasattr(source, "__buffer__"):

        def read(size: int) -> bytes:
            part = source.read(size)
            if not isinstance(part, (bytes, bytearray, memoryview)):
                raise KVCacheTypeError(f"source.read: got {kind_of(part)}, expected bytes")
            if len(part) > size:
                raise KVCacheValueError(f"source.read: got {len(part)} bytes, expected at most {size}")
            return bytes(part)

        return read, False
    try:
        left = memoryview(source).cast("B")
    except TypeError:
        raise KVCacheTypeError(
            f"source: got {kind_of(source)}, expected bytes, or an object with read(size) that returns them"
        ) from None
    position = 0

    def read_view(size: int) -> bytes:
        nonlocal position
        part = bytes(left[position : position + size])
        position += len(part)
        return part

    return read_view, True
