"""examples/prefix_on_disk.py: another process reads a prefix instead of computing it, and nothing that is damaged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import kvjax
from examples.prefix_on_disk import PrefixFolder, main, prompt_of, serve

ROOT = Path(__file__).parents[1]
NUM_PROMPT, NUM_NEW, BLOCK_SIZE = 55, 8, 8
NUM_COMPUTED = NUM_PROMPT + NUM_NEW - 1
PREFIX_BLOCKS = 50 // BLOCK_SIZE


def prefix_files(folder: Path) -> list[Path]:
    """The files of the blocks that questions have in common, in the order of their tokens."""
    hashes = kvjax.BlockPool(1, BLOCK_SIZE).block_hashes(prompt_of(1)[:50])
    return [folder / f"{block_hash.hex()}.kv" for block_hash in hashes]


def test_another_process_computes_only_what_follows_the_prefix(tmp_path):
    command = [sys.executable, "-m", "examples.prefix_on_disk", str(tmp_path / "shared"), "--question=1"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    found = subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert f"steps computed {NUM_COMPUTED} tokens" in found.stdout

    expected, num_computed = serve(tmp_path / "empty", [prompt_of(2)])
    assert (len(expected[0]), num_computed) == (NUM_NEW, NUM_COMPUTED)
    with warnings.catch_warnings(action="error"):
        assert serve(tmp_path / "shared", [prompt_of(2)]) == (expected, NUM_COMPUTED - PREFIX_BLOCKS * BLOCK_SIZE)


@pytest.mark.parametrize(
    ("folder", "options", "said"),
    [
        ("file", [], r"folder: got '.*file', expected a folder, or where one can be made: File exists"),
        ("file/below", [], r"folder: got '.*below', expected a folder, or where one can be made: Not a directory"),
        ("new", ["--question=-1"], "argument --question: got -1, expected at least 0"),
        ("new", ["--question=x"], "argument --question: invalid int value: 'x'"),
    ],
)
def test_a_wrong_argument_ends_with_what_is_right(tmp_path, capsys, folder, options, said):
    (tmp_path / "file").write_bytes(b"of someone")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / folder), *options])
    assert re.search(said, capsys.readouterr().err.splitlines()[-1])
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"of someone")]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def rename(path: Path) -> None:
    """Has it hold what the block before it does: right in itself, but under another hash."""
    before = prefix_files(path.parent)
    path.write_bytes(before[before.index(path) - 1].read_bytes())


def of_another_dtype(path: Path) -> None:
    spec = kvjax.FullAttentionSpec(BLOCK_SIZE, 2, 16, dtype="bfloat16")
    cache = kvjax.KVCache.allocate(spec, 1, num_layers=2)
    path.write_bytes(kvjax.export_blocks(cache, [0], hashes=[bytes.fromhex(path.stem)]))


@pytest.mark.parametrize("damage", [cut, change, empty, rename, of_another_dtype], ids=lambda f: f.__name__)
def test_a_damaged_or_foreign_file_is_computed_again_and_replaced(tmp_path, damage: Callable[[Path], None]):
    expected, _ = serve(tmp_path, [prompt_of(2)])
    files = prefix_files(tmp_path)
    intact = [path.read_bytes() for path in files]
    damage(files[3])
    with pytest.warns(UserWarning, match=f"{files[3].name}: not read, and computed again: "):
        assert serve(tmp_path, [prompt_of(2)]) == (expected, NUM_COMPUTED - 3 * BLOCK_SIZE)
    assert [path.read_bytes() for path in files][:3] == intact[:3]
    with warnings.catch_warnings(action="error"):
        _, num_computed = serve(tmp_path, [prompt_of(2)])
    assert num_computed == NUM_COMPUTED - PREFIX_BLOCKS * BLOCK_SIZE


def test_the_folder_keeps_the_beginnings_of_what_was_used_last(tmp_path):
    serve(tmp_path, [prompt_of(1)])
    files = prefix_files(tmp_path)
    size = files[0].stat().st_size
    of_killed_process = tmp_path / f"{'0' * 64}.1.tmp"
    of_killed_process.write_bytes(bytes(size))
    os.utime(of_killed_process, (0, 0))
    other = [(token + 1) % 61 for token in prompt_of(1)]
    serve(tmp_path, [other], max_bytes=9 * size)
    assert len(list(tmp_path.iterdir())) == 9
    assert [path.exists() for path in files] == [True] * 2 + [False] * 4
    assert serve(tmp_path, [prompt_of(1)])[1] == NUM_COMPUTED - 2 * BLOCK_SIZE


def test_a_full_pool_reads_what_it_has_room_for(tmp_path):
    serve(tmp_path, [prompt_of(1)])
    spec = kvjax.FullAttentionSpec(BLOCK_SIZE, 2, 16, dtype="float32")
    pool, cache = kvjax.BlockPool(5, BLOCK_SIZE), kvjax.KVCache.allocate(spec, 5, num_layers=2)
    held = pool.sequence()
    pool.append([held], [2 * BLOCK_SIZE])
    PrefixFolder(tmp_path, pool, 2**20).load(cache, prompt_of(1))
    assert pool.num_cached_tokens(prompt_of(1)) == 3 * BLOCK_SIZE
    assert pool.num_free == 3


def test_a_write_that_fails_is_a_warning(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match="not written: .*No space left on device"):
        tokens, _ = serve(tmp_path, [prompt_of(1)])
    assert len(tokens[0]) == NUM_NEW


def test_other_files_of_the_folder_stay_and_do_not_count(tmp_path):
    names = "notes.txt", "model.1.tmp", "cache.kv"
    for name in names:
        (tmp_path / name).write_bytes(bytes(2**20))
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "folder").mkdir()
    serve(tmp_path, [prompt_of(1)])
    assert all(path.exists() for path in prefix_files(tmp_path))
    serve(tmp_path, [prompt_of(1)], max_bytes=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "folder"])


def test_a_folder_that_only_others_may_write_is_read(tmp_path, monkeypatch):
    expected, _ = serve(tmp_path, [prompt_of(2)])
    serve(tmp_path, [prompt_of(1)])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    for owner, name in ((os, "utime"), (Path, "write_bytes"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, refuse)
    files = sorted(tmp_path.iterdir())
    with warnings.catch_warnings(action="error"):  # all blocks are there
        found = serve(tmp_path, [prompt_of(2)], max_bytes=0)
    assert found == (expected, NUM_COMPUTED - PREFIX_BLOCKS * BLOCK_SIZE)
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize(("name", "got"), [("num_host_blocks", "2 blocks on the host and 0"), ("num_states", "and 2")])
def test_a_pool_with_blocks_on_the_host_or_states_is_refused(tmp_path, name, got):
    with pytest.raises(ValueError, match=f"got 1 groups, .*{got} states, expected one group"):
        PrefixFolder(tmp_path, kvjax.BlockPool(2, 4, **{name: 2}), 1)
