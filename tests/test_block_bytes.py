"""Blocks as bytes: what is imported is what was exported, through bytes, files and sockets, and the rest is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import block_transfer
from support.helpers import FEW_DTYPES, assert_same_bytes, compilations, page_bytes, poisoned, simple_spec

import kvjax
from kvjax import (
    MLA_KV_CACHE_DTYPES,
    BlockPool,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    MLAAttentionSpec,
    UnsupportedError,
    export_blocks,
    import_blocks,
    open_blocks,
)
from kvjax.ops import block_bytes

NVFP4, FP8 = KVCacheDType.NVFP4, KVCacheDType.FP8_E4M3
FROM, TO = [5, 0, 3], [2, 6, 1]
HASHES = [bytes([number]) * 32 for number in (1, 2)]


def layers(spec: kvjax.AttentionSpec, num_layers: int, num_blocks: int, seed: int = 0, **scales: Any) -> KVCache:
    kv = jnp.stack([poisoned(spec, num_blocks, seed + layer).kv for layer in range(num_layers)], axis=1)
    return KVCache(kv, spec, None, num_layers, **{name: jnp.asarray(scale) for name, scale in scales.items()})


@pytest.mark.parametrize(
    "spec",
    [simple_spec(dtype) for dtype in FEW_DTYPES]
    + [simple_spec(NVFP4, v_scale_layout="swizzled", layout="HND"), simple_spec(page_size_padded=9001)]
    + [MLAAttentionSpec(8, 512, 64, dtype=dtype) for dtype in MLA_KV_CACHE_DTYPES]
    + [MLAAttentionSpec(8, 512, 64, dtype=NVFP4, page_size_padded=4000)],
    ids=lambda spec: f"{'latents-' * spec.is_mla}{spec.dtype.value}-{spec.layout.value}-{spec.page_size_bytes}",
)
def test_blocks_are_imported_as_they_were_exported(spec):
    sources = [poisoned(spec, 7), layers(spec, 3, 7, seed=5)]
    data = export_blocks(sources, FROM, hashes=HASHES)
    destinations = [poisoned(spec, 8, seed=1), layers(spec, 3, 8, seed=9)]
    expected = [page_bytes(cache) for cache in (poisoned(spec, 8, seed=1), layers(spec, 3, 8, seed=9))]
    before, pointers = [page_bytes(x) for x in sources], [x.kv.unsafe_buffer_pointer() for x in destinations]
    stored = open_blocks(data)
    assert (stored.num_blocks, stored.hashes) == (3, tuple(HASHES))
    written = import_blocks(stored, destinations, TO)
    for cache, wanted, source, pointer in zip(written, expected, before, pointers, strict=True):
        wanted[TO] = source[FROM]
        assert_same_bytes(page_bytes(cache), wanted)
        assert cache.kv.unsafe_buffer_pointer() == pointer
    assert all(cache.kv.is_deleted() for cache in destinations)
    for cache, same in zip(sources, before, strict=True):
        assert_same_bytes(page_bytes(cache), same)


def test_exported_bytes_have_the_documented_format():
    """From its description, by other means: what is stored today can be read tomorrow."""
    spec = simple_spec(FP8, block_size=2, head_size=16)
    cache = layers(spec, 2, 4, k_scale=np.float32([0.1, 0.25]))
    header = {
        "format": 1,
        "hash": "sha256-int64-1",
        "caches": [
            {
                "spec": {
                    "block_size": 2,
                    "num_kv_heads": 2,
                    "head_size": 16,
                    "head_size_v": 16,
                    "dtype": "fp8_e4m3",
                    "layout": "NHD",
                    "v_scale_layout": "linear",
                    "sliding_window": None,
                    "page_size_padded": None,
                    "model_dtype": "bfloat16",
                },
                "page_size_bytes": 128,
                "num_layers": 2,
                "k_scale": [[float(np.float32(0.1))] * 2, [0.25, 0.25]],
                "v_scale": 1.0,
            }
        ],
        "num_blocks": 2,
        "num_hashes": 1,
    }
    encoded = json.dumps(header).encode()
    expected = b"KVJAXBLK" + len(encoded).to_bytes(8, "little") + encoded + HASHES[0]
    expected += hashlib.sha256(expected).digest()
    expected += page_bytes(cache)[[3, 1]].tobytes()
    expected += hashlib.sha256(expected).digest()
    assert export_blocks(cache, np.array([3, 1]), hashes=HASHES[:1]) == expected


def test_block_hashes_follow_the_documented_formula():
    """Of ids and salt alone: stores and other processes keep them."""
    pool = BlockPool(4, 2)
    sequence = pool.sequence(salt=b"adapter")
    pool.append([sequence], [5])
    sequence.commit([1, 2, 3, 4, 5])
    root = hashlib.sha256(b"\0adapter").digest()
    first = hashlib.sha256(b"\1" + root + np.array([1, 2], "<i8").tobytes()).digest()
    second = hashlib.sha256(b"\1" + first + np.array([3, 4], "<i8").tobytes()).digest()
    assert sequence.block_hashes == (first, second)


def test_importing_keeps_the_tree_structure_of_caches():
    spec = simple_spec()
    caches = {"a": poisoned(spec, 4), "b": (poisoned(spec, 4, 1), poisoned(spec, 4, 2))}
    data = export_blocks(caches, [1])
    other = {"a": poisoned(spec, 3, 3), "b": (poisoned(spec, 3, 4), poisoned(spec, 3, 5))}
    written = import_blocks(data, other, [2])
    assert jax.tree.structure(written) == jax.tree.structure(other)
    assert_same_bytes(page_bytes(written["b"][1])[2], page_bytes(caches["b"][1])[1])


def test_blocks_of_latents_are_refused_by_other_caches():
    """Of another dtype, and of keys and values of the same page size."""
    spec = MLAAttentionSpec(8, 512, 64, dtype=KVCacheDType.BFLOAT16)
    data = export_blocks(poisoned(spec, 4), [1])
    same_size = simple_spec(num_kv_heads=1, head_size=288)
    assert same_size.page_size_bytes == spec.page_size_bytes
    for other in (MLAAttentionSpec(8, 512, 64, dtype=FP8), same_size):
        cache = poisoned(other, 4)
        before = page_bytes(cache)
        with pytest.raises(KVCacheValueError, match=r"^source: got caches\[0\]\.spec"):
            import_blocks(data, cache, [2])
        assert_same_bytes(page_bytes(cache), before)


def test_a_block_that_is_not_wanted_is_skipped():
    spec = simple_spec()
    expected = page_bytes(poisoned(spec, 4, 1))
    expected[3] = page_bytes(poisoned(spec, 4))[1]
    written = import_blocks(export_blocks(poisoned(spec, 4), [0, 1]), poisoned(spec, 4, 1), [-1, 3])
    assert_same_bytes(page_bytes(written), expected)


def test_exporting_and_importing_no_blocks_changes_nothing():
    written = import_blocks(export_blocks(poisoned(simple_spec(), 4), []), poisoned(simple_spec(), 4, 1), [])
    assert_same_bytes(page_bytes(written), page_bytes(poisoned(simple_spec(), 4, 1)))


class Trickle(io.RawIOBase):
    """A file that takes and gives few bytes at a time, as an unbuffered one may."""

    def __init__(self, data: bytes = b"") -> None:
        self.data, self.position = bytearray(data), 0

    def write(self, data: Any) -> int:
        self.data += bytes(data[:1000])
        return min(len(data), 1000)

    def read(self, size: int = -1) -> bytes:
        part = bytes(self.data[self.position : self.position + min(size, 999)])
        self.position += len(part)
        return part


def test_any_kind_of_file_is_exported_to_and_imported_from(tmp_path: Path):
    cache, expected = poisoned(simple_spec(), 7), page_bytes(poisoned(simple_spec(), 7))[FROM]
    data = export_blocks(cache, FROM)
    trickle, path = Trickle(), tmp_path / "blocks"
    assert export_blocks(cache, FROM, trickle) is None
    assert bytes(trickle.data) == data
    with path.open("wb") as file:
        export_blocks(cache, FROM, file)
        export_blocks(cache, FROM[:1], file)
    assert path.read_bytes() == data + export_blocks(cache, FROM[:1])
    with path.open("rb") as file:
        for blocks in (TO, TO[:1]):  # one after the other
            written = import_blocks(file, poisoned(simple_spec(), 7, 1), blocks)
            assert_same_bytes(page_bytes(written)[blocks], expected[: len(blocks)])
        assert file.read() == b""
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sources = [data, bytearray(data), memoryview(data), io.BytesIO(data), Trickle(data), mapped]
        for source in sources:
            written = import_blocks(source, poisoned(simple_spec(), 7, 1), TO)
            assert_same_bytes(page_bytes(written)[TO], expected)


def test_pages_move_in_parts_of_few_sizes(monkeypatch: pytest.MonkeyPatch):
    spec = simple_spec(block_size=3, head_size=40)  # of no other test
    monkeypatch.setattr(block_bytes, "CHUNK_BYTES", 5 * spec.page_size_bytes)
    cache, largest = poisoned(spec, 20), 0

    class Sink:
        def write(self, data: Any) -> None:
            nonlocal largest
            largest = max(largest, len(data))
            sink.append(bytes(data))

    with compilations() as compiled:
        for number in (13, 9, 10, 16):
            sink: list[bytes] = []
            export_blocks(cache, np.arange(number)[::-1], Sink())
            other = jax.device_put(poisoned(spec, 20, 1), jax.devices()[0])  # committed, as what a call returns
            written = import_blocks(b"".join(sink), other, np.arange(number))
            assert_same_bytes(page_bytes(written)[:number], page_bytes(cache)[:number][::-1])
    assert largest == 4 * spec.page_size_bytes
    assert compiled.count("jit(take)") == compiled.count("jit(put)") == 3  # 4, 2, 1


SPEC = simple_spec(FP8)


def destination(**changes: Any) -> KVCache:
    return poisoned(dataclasses.replace(SPEC, **changes), 8, seed=1)


def with_scale(cache: KVCache, **scales: Any) -> KVCache:
    return dataclasses.replace(cache, **{name: jnp.float32(scale) for name, scale in scales.items()})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: destination(dtype="fp8_e5m2"), "caches[0].spec.dtype='fp8_e4m3', expected 'fp8_e5m2', as the dest"),
        (lambda: destination(layout="HND"), "caches[0].spec.layout='NHD', expected 'HND'"),
        (lambda: destination(block_size=16), "caches[0].spec.block_size=8, expected 16"),
        (lambda: destination(num_kv_heads=1), "caches[0].spec.num_kv_heads=2, expected 1"),
        (lambda: destination(head_size_v=32), "caches[0].spec.head_size_v=64, expected 32"),
        (lambda: destination(page_size_padded=4096), "caches[0].spec.page_size_padded=None, expected 4096"),
        (lambda: layers(SPEC, 2, 8), "caches[0].num_layers=None, expected 2"),
        (lambda: with_scale(destination(), k_scale=0.5), "caches[0].k_scale=1.0, expected 0.5"),
        (lambda: with_scale(destination(), v_scale=[1, 2]), "caches[0].v_scale=1.0, expected [[1.0, 2.0]], as"),
        (lambda: [destination(), destination()], "len(caches)=1, expected 2"),
    ],
)
def test_an_export_that_does_not_fit_names_the_first_field(make, message):
    data, other = export_blocks(poisoned(SPEC, 7), FROM), make()
    with pytest.raises(KVCacheValueError) as raised:
        import_blocks(data, other, TO)
    assert str(raised.value).startswith(f"source: got {message}")
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(other))
    import_blocks(stored := open_blocks(io.BytesIO(data)), destination(), TO)
    with pytest.raises(KVCacheValueError, match="imported before"):
        import_blocks(stored, destination(), TO)


def test_equal_scales_fit_however_they_are_given():
    one = layers(SPEC, 2, 7, k_scale=np.float32([0.5, 0.25]))
    two = layers(SPEC, 2, 8, 1, k_scale=np.float32([[0.5, 0.5], [0.25, 0.25]]), v_scale=np.float32([1, 1]))
    assert_same_bytes(page_bytes(import_blocks(export_blocks(one, FROM), two, TO))[TO], page_bytes(one)[FROM])


def changed_header(data: bytes, **changes: Any) -> bytes:
    """The same with other values in the header, and right digests."""
    size = int.from_bytes(data[8:16], "little")
    header = json.loads(data[16 : 16 + size])
    end = 16 + size + 32 * header["num_hashes"]
    return resealed(json.dumps(header | changes).encode(), data[end + 32 : -32], data[16 + size : end])


def resealed(header: bytes, body: bytes, hashes: bytes = b"") -> bytes:
    start = b"KVJAXBLK" + len(header).to_bytes(8, "little") + header + hashes
    start += hashlib.sha256(start).digest() + body
    return start + hashlib.sha256(start).digest()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"", "got 0 of 16 bytes, expected all: it is torn"),
        (lambda data: data[:100], "bytes, expected all: it is torn"),
        (lambda data: data[:-1], "got 31 of 32 bytes, expected all: it is torn"),
        (lambda data: data + b"\0", "got bytes after the last page's digest, expected none"),
        (lambda data: b"PK\3\4" + data[4:], r"got bytes that start with b'PK\x03\x04XBLK', expected"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "got a header of 18,446,744,073,709,551,615 bytes, expected"),
        (lambda data: data[:60] + b"7" + data[61:], "of its header, expected"),
        (lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:], "of its pages, expected"),
        (lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:], "of its pages, expec"),
        (lambda data: resealed(b"[" * 100_000, b""), "got a header that is not JSON"),
        (lambda data: resealed(b"\xff", b""), "got a header that is not JS"),
        (lambda data: resealed(b"[]", b""), "got the versions [], expected {'format': 1"),
        (lambda data: changed_header(data, format=2), "got the versions {'format': 2, 'hash': 'sha256-int64-1'}, expe"),
        (lambda data: changed_header(data, hash="md5"), "got the versions {'format': 1, 'hash': 'md5'}, expected"),
        (lambda data: changed_header(data, num_blocks=True), "got num_blocks=True, expected an int of at least 0"),
        (lambda data: changed_header(data, num_blocks=2**70), "blocks: got 3, expected 1180591620717411303424"),
        (lambda data: changed_header(data, num_blocks=-1), "got num_blocks=-1, expected an int of at least 0"),
        (lambda data: changed_header(data, num_hashes="2"), "got num_hashes='2', expected an int from 0 to 3"),
        (lambda data: changed_header(data, num_hashes=4), "got num_hashes=4, expected an int from 0 to 3"),
        (
            lambda data: changed_header(data, num_blocks=2**60, num_hashes=2**60),
            "got num_hashes=1152921504606846976, expected an int from 0 to 1048576",
        ),
        (lambda data: changed_header(data, caches=None), "got caches=None, expected [{'spec'"),
        (lambda data: changed_header(data, num_blocks=2, caches=[{}]), "got caches[0]={}, expected"),
    ],
)
@pytest.mark.parametrize("as_file", [False, True], ids=["bytes", "file"])
def test_what_is_torn_foreign_or_changed_is_refused(spoil, message, as_file):
    data, cache = spoil(export_blocks(poisoned(SPEC, 7), FROM, hashes=HASHES)), destination()
    if as_file and "bytes after" in message:
        return  # a file may go on
    with pytest.raises(KVCacheValueError) as raised:
        import_blocks(io.BytesIO(data) if as_file else data, cache, TO)
    assert message in str(raised.value)
    assert not cache.kv.is_deleted()
    assert_same_bytes(page_bytes(cache), page_bytes(destination()))


def test_a_device_without_memory_changes_no_cache(monkeypatch: pytest.MonkeyPatch):
    data = export_blocks([poisoned(SPEC, 7), poisoned(SPEC, 7)], FROM)
    caches, put, calls = [destination(), destination()], block_bytes.pages_from_host, []

    def fails(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise MemoryError
        return put(*args)

    monkeypatch.setattr(block_bytes, "pages_from_host", fails)
    with pytest.raises(MemoryError):
        import_blocks(data, caches, TO)
    for cache in caches:
        assert_same_bytes(page_bytes(cache), page_bytes(destination()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda cache: export_blocks(cache, [8]), KVCacheValueError, "blocks: got 8, expected an int of at most 7"),
        (lambda cache: export_blocks(cache, [-1]), KVCacheValueError, "blocks: got -1, expected an int of at least 0"),
        (lambda cache: export_blocks(cache, [2**40]), KVCacheValueError, "blocks: got 1099511627776, expected an int"),
        (lambda cache: export_blocks(cache, [1.0]), KVCacheTypeError, "blocks: got dtype float64, expected integers"),
        (lambda cache: export_blocks(cache, 1), KVCacheValueError, r"blocks: got shape \(\), expected \[num_blocks\]"),
        (
            lambda cache: export_blocks(cache, [[1], [1, 2]]),
            KVCacheValueError,
            r"blocks: got \[\[1\], \[1, 2\]\], expected integers \[num_blocks\]",
        ),
        (lambda cache: import_blocks(b"", cache, [[1], [1, 2]]), KVCacheValueError, r"blocks: got \[\[1\], \[1, 2\]\]"),
        (lambda cache: export_blocks([], [1]), KVCacheValueError, r"caches: got \[\], expected at least one KVCache"),
        (
            lambda cache: export_blocks([cache, 3], [1]),
            KVCacheTypeError,
            r"caches\[1\]: got an int, expected a KVCache",
        ),
        (lambda cache: export_blocks([cache] * 2, [1]), KVCacheValueError, "caches: got a cache twice"),
        (
            lambda cache: export_blocks(cache, [1], hashes=None),
            KVCacheTypeError,
            "hashes: got None, expected a sequence",
        ),
        (
            lambda cache: export_blocks(cache, [1], hashes=b"a"),
            KVCacheTypeError,
            "hashes: got a bytes, expected a sequ",
        ),
        (lambda cache: export_blocks(cache, [1], hashes=HASHES), KVCacheValueError, "hashes: got 2, expected at most"),
        (lambda cache: export_blocks(cache, [1], hashes=["a"]), KVCacheTypeError, r"hashes\[0\]: got a str, expected"),
        (lambda cache: export_blocks(cache, [1], hashes=[b"a"]), KVCacheValueError, r"hashes\[0\]: got 1 bytes, expec"),
        (lambda cache: import_blocks(b"", cache, [1, 2, 1]), KVCacheValueError, "blocks: got block 1 more than once"),
        (lambda cache: import_blocks(b"", cache, [-2]), KVCacheValueError, "blocks: got -2, expected an int of at lea"),
        (lambda cache: import_blocks(7, cache, []), KVCacheTypeError, "source: got an int, expected bytes, or an obj"),
        (
            lambda cache: import_blocks(io.StringIO("a"), cache, []),
            KVCacheTypeError,
            "source.read: got a str, expected",
        ),
        (lambda cache: import_blocks(export_blocks(cache, [1]), cache, []), KVCacheValueError, "blocks: got 0, expec"),
        (lambda cache: jax.jit(lambda c: export_blocks(c, [1]))(cache), KVCacheTypeError, "got a traced cache"),
    ],
)
def test_invalid_arguments_are_refused(call, error, message):
    cache = destination()
    with pytest.raises(error, match=message):
        call(cache)
    assert_same_bytes(page_bytes(cache), page_bytes(destination()))


def test_memory_that_xla_does_not_write_in_place_is_refused():
    cache = destination()
    unpinned = KVCache(jax.device_put(cache.kv, cache.kv.sharding.with_memory_kind("unpinned_host")), cache.spec)
    with pytest.raises(UnsupportedError, match=r"^caches\[0\]: got memory of kind 'unpinned_host'"):
        export_blocks(unpinned, [1])


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path), **changes}


@pytest.mark.full
def test_divided_caches_export_the_pages_of_undivided_ones():
    program = Path(__file__).parent / "support/blocks_of_shares.py"
    flags = environment(XLA_FLAGS="--xla_force_host_platform_device_count=4")
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, env=flags)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.full
def test_a_prefix_prefilled_in_one_process_is_decoded_in_another():
    alone = block_transfer.tokens_alone()
    program = Path(block_transfer.__file__)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        port = str(server.getsockname()[1])
        prefill = subprocess.Popen(
            [sys.executable, program, port], stderr=subprocess.PIPE, text=True, env=environment()
        )
        try:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as file:
                tokens, received, pages = block_transfer.decode(file)
                sent = file.read()  # what follows the export: the sender's pages as NumPy has them
        finally:
            _, errors = prefill.communicate(timeout=60)
    assert prefill.returncode == 0, errors
    assert tokens == alone
    assert len(received) == len(block_transfer.PROMPT) // block_transfer.SPEC.block_size
    assert_same_bytes(pages, np.frombuffer(sent, np.uint8).reshape(pages.shape))
