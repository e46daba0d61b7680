"""The folder of compiled kernels: what it gives back is what was written for that key, whatever is in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from kvjax import KVCacheValueError, KVCacheWarning
from kvjax.binaries import folder as folders
from kvjax.binaries.folder import DEFAULT_SIZE, Folder, folder_of, size_of
from kvjax.cli import main

KEY, KERNEL = '{"kernel": "gather"}', bytes(range(256)) * 2


@pytest.fixture(autouse=True)
def every_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of which a warning was given before is warned of again."""
    monkeypatch.setattr(folders, "_warned", set())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kvjax")


def file_of(folder: Folder, key: str = KEY) -> Path:
    return folder.path / folders._name(key)


def test_what_was_written_is_read(folder: Folder):
    assert folder.read(KEY) is None
    folder.write(KEY, KERNEL)
    folder.write("other", b"")
    assert folder.read(KEY) == KERNEL
    assert folder.read("other") == b""
    assert folder.read("a third") is None
    folder.write(KEY, b"new")
    assert folder.read(KEY) == b"new"


def test_folder_and_files_are_the_users_alone(folder: Folder):
    before = os.umask(0)
    try:
        folder.write(KEY, KERNEL)
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert file_of(folder).stat().st_mode & 0o777 == 0o600


def test_a_changed_byte_anywhere_is_not_read(folder: Folder):
    folder.write(KEY, KERNEL[:64])
    content = file_of(folder).read_bytes()
    for i in range(len(content)):
        file_of(folder).write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        assert folder.read(KEY) is None, i
    file_of(folder).write_bytes(content)
    assert folder.read(KEY) == KERNEL[:64]


def test_a_file_that_was_cut_or_grew_is_not_read(folder: Folder):
    folder.write(KEY, KERNEL[:64])
    content = file_of(folder).read_bytes()
    for changed in (*(content[:end] for end in range(len(content))), content + b"\0", content + content, b"\x80\x04."):
        file_of(folder).write_bytes(changed)
        assert folder.read(KEY) is None, len(changed)
    folder.write(KEY, KERNEL)
    assert folder.read(KEY) == KERNEL


def test_the_kernel_of_another_key_under_this_name_is_not_read(folder: Folder):
    folder.write("other", KERNEL)
    file_of(folder, "other").rename(file_of(folder))
    assert folder.read(KEY) is None
    folder.write(KEY, b"own")
    assert folder.read(KEY) == b"own"


def test_a_file_of_another_version_is_compiled_again(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    folder.write(KEY, KERNEL)
    monkeypatch.setattr(folders, "_VERSION", 2)
    assert folder.read(KEY) is None
    folder.write(KEY, b"new")
    assert folder.read(KEY) == b"new"


def test_only_a_plain_file_that_others_cannot_write_is_read(folder: Folder, tmp_path: Path):
    folder.write(KEY, KERNEL)
    file = file_of(folder)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(elsewhere)
    assert folder.read(KEY) is None
    file.unlink()
    os.mkfifo(file)
    assert folder.read(KEY) is None  # and nothing waits for a writer
    file.unlink()
    file.mkdir()
    assert folder.read(KEY) is None
    file.rmdir()
    folder.write(KEY, KERNEL)
    file.chmod(0o660)
    assert folder.read(KEY) is None
    folder.write(KEY, b"new")
    assert folder.read(KEY) == b"new"
    assert elsewhere.exists()


def assert_unused(folder: Folder, why: str) -> None:
    """One warning says why; reads find nothing, and writes leave what is there as it is."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        folder.read(KEY)
        folder.write(KEY, KERNEL)
        folder.write(KEY, KERNEL)
        assert folder.read(KEY) is None
    [warning] = warned
    assert warning.category is KVCacheWarning
    assert re.search(why, str(warning.message))
    assert "KVJAX_CACHE_DIR names another folder, 0 none" in str(warning.message)


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used(folder: Folder, mode: int):
    folder.write(KEY, KERNEL)
    folder.path.chmod(mode)
    assert_unused(folder, rf"others may write to it \(mode {mode & 0o022:04o}\)")
    with pytest.raises(KVCacheValueError, match="others may write"):
        folder.clear()
    assert file_of(folder).exists()


def test_a_folder_of_another_user_is_not_used(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    folder.write(KEY, KERNEL)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert_unused(folder, f"it belongs to user {owner}, expected {owner + 1}")


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    assert_unused(Folder(tmp_path / "link"), "a symbolic link or a file")
    assert not list((tmp_path / "real").iterdir())


def test_a_folder_that_cannot_be_made_or_written_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("not a folder")
    assert_unused(Folder(tmp_path / "file"), "not (kept|read)")
    assert_unused(Folder(tmp_path / "file/below"), "not (kept|read)")
    full = Folder(tmp_path / "full")

    def replace(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        assert_unused(full, "not kept in .*: No space left on device")
    assert not list(full.path.iterdir())
    full.write(KEY, KERNEL)
    assert full.read(KEY) == KERNEL


def test_the_least_recently_used_kernels_are_removed_to_make_room(tmp_path: Path):
    folder = Folder(tmp_path / "kvjax")
    for i in range(4):
        folder.write(f"key {i}", bytes(1000))
        os.utime(file_of(folder, f"key {i}"), (i, i))
    size = sum(entry.size for entry in folder.entries())
    assert folder.read("key 0") is not None  # now the last used
    bounded = Folder(folder.path, size)
    bounded.write("key 4", bytes(1000))
    assert [i for i in range(5) if folder.read(f"key {i}") is not None] == [0, 2, 3, 4]
    Folder(folder.path, 1).write("key 5", bytes(1000))  # more than the bound alone: it is kept all the same
    assert [i for i in range(6) if folder.read(f"key {i}") is not None] == [5]


def test_files_of_ended_processes_are_removed_after_a_while_and_strangers_never(folder: Folder):
    folder.write(KEY, KERNEL)
    left = [folder.path / f".{file_of(folder).name}.{i:016x}" for i in range(2)]
    stranger = folder.path / "notes.txt"
    for file in (*left, stranger):
        file.write_bytes(b"half")
    os.utime(left[0], (0, 0))
    folder.write("other", KERNEL)
    assert [file.exists() for file in (*left, stranger)] == [False, True, True]
    assert len(folder.clear()) == 2
    assert list(folder.path.iterdir()) == [stranger]


WRITES_AND_READS = """
import sys
from pathlib import Path
from kvjax.binaries.folder import Folder
folder, seed = Folder(Path(sys.argv[1]), 40_000), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[3])):
    key = str(i % 3)
    folder.write(key, key.encode() * (2000 + (seed + i) % 7 * 1000))
    for key in "012":
        kernel = folder.read(key)
        assert kernel is None or set(kernel) == set(key.encode()) and len(kernel) % 1000 == 0, (key, kernel[:20])
"""


@pytest.mark.full
def test_processes_share_a_folder_and_one_that_is_killed_leaves_it_whole(folder: Folder):
    command = [sys.executable, "-W", "error", "-c", WRITES_AND_READS, str(folder.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    counts = "150", "1000000000"
    running = [subprocess.Popen([*command, str(seed), count], **pipes) for seed, count in enumerate(counts)]
    try:
        for process in running:
            assert process.stdout.readline() == "ready\n"
        for process in running:
            process.stdin.write("\n")
            process.stdin.flush()
        assert running[0].wait() == 0
        running[1].send_signal(signal.SIGKILL)
        assert running[1].wait() == -signal.SIGKILL
    finally:
        for process in running:
            process.kill()
            process.communicate()
    for key in "012":
        folder.write(key, key.encode())
        assert folder.read(key) == key.encode()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "HOME/.cache/kvjax"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/kvjax"),
        ({"XDG_CACHE_HOME": "relative"}, "HOME/.cache/kvjax"),
        ({"KVJAX_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"KVJAX_CACHE_DIR": "~/own"}, "HOME/own"),
        ({"KVJAX_CACHE_DIR": ""}, None),
        ({"KVJAX_CACHE_DIR": "0"}, None),
    ],
)
def test_variables_name_the_folder(variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert folder_of(variables) == (expected and Path(expected.replace("HOME", "/home/someone")))


def test_a_variable_bounds_the_folder():
    assert size_of({}) == DEFAULT_SIZE << 20 == 512 << 20
    assert size_of({"KVJAX_CACHE_SIZE": "3"}) == 3 << 20
    for text in ("", "0", "-1", "1.5", "1GB", "9" * 10, "٣"):
        with pytest.raises(KVCacheValueError, match=r"KVJAX_CACHE_SIZE: got .*, expected a whole number of MiB"):
            size_of({"KVJAX_CACHE_SIZE": text})


def test_the_command_shows_and_clears(folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("KVJAX_CACHE_DIR", str(folder.path))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{folder.path}: 0 kernels, 0.0 MiB of 512 MiB\n"
    assert not folder.path.exists()
    folder.write(KEY, bytes(3 << 19))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{folder.path}: 1 kernel, 1.5 MiB of 512 MiB\n"
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"{folder.path}: removed 1 kernel, 1.5 MiB\n"
    assert folder.entries() == []
    monkeypatch.setenv("KVJAX_CACHE_DIR", "0")
    assert main(["cache", "--clear"]) == 0
    assert "not kept: KVJAX_CACHE_DIR is '0'" in capsys.readouterr().out


def test_the_command_reports_an_unsafe_folder_and_an_invalid_size(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    folder.write(KEY, KERNEL)
    folder.path.chmod(0o777)
    monkeypatch.setenv("KVJAX_CACHE_DIR", str(folder.path))
    for arguments in (["cache"], ["cache", "--clear"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert "others may write to it" in capsys.readouterr().err
    monkeypatch.setenv("KVJAX_CACHE_SIZE", "much")
    with pytest.raises(SystemExit, match="2"):
        main(["cache"])
    assert "KVJAX_CACHE_SIZE: got 'much'" in capsys.readouterr().err
    assert file_of(folder).exists()


def test_a_hit_marks_the_kernel_as_used(folder: Folder):
    folder.write(KEY, KERNEL)
    os.utime(file_of(folder), (0, 0))
    before = time.time() - 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder.read(KEY) == KERNEL
    assert file_of(folder).stat().st_mtime > before
