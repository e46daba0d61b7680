"""Keys of compiled kernels: the same in every process, and another for all that may change the code."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.any_count import (
    H200,
    KINDS,
    SPEC,
    all_kinds,
    gather_kernel,
)

from kvjax import started
from kvjax.binaries import encoding, keys
from kvjax.binaries.encoding import NoStableFormError, decode_kernel, encode, encode_kernel
from kvjax.binaries.keys import key_of, sources_digest
from kvjax.kernels.launchable import Origin

PRINTS_KEYS = """
import json, sys
import jax
jax.config.update("jax_disable_most_optimizations", json.loads(sys.argv[1]))
from support.any_count import H200, all_kinds
from kvjax.binaries.keys import key_of
print(json.dumps({name: key_of(kernel, H200) for name, kernel in all_kinds().items()}))
"""


def test_every_process_has_the_same_keys():
    mine = {name: key_of(kernel, H200) for name, kernel in all_kinds().items()}
    assert tuple(mine) == KINDS
    assert len(set(mine.values())) == len(mine)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    option = json.dumps(jax.config.values["jax_disable_most_optimizations"])
    command = [sys.executable, "-c", PRINTS_KEYS, option]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == mine


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_is_made_again_from_what_is_sent_of_it(kind: str):
    kernel = all_kinds()[kind]
    again = decode_kernel(json.loads(json.dumps(encode_kernel(kernel))))
    assert again.origin.arguments == kernel.origin.arguments
    assert again.args == kernel.args
    assert (again.counts, again.writes, again.written) == (kernel.counts, kernel.writes, kernel.written)
    assert key_of(again, H200) == key_of(kernel, H200)


def others_of(value: Any) -> Iterator[Any]:
    """Values that differ from one in a single place."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value + 1
    elif value is None:
        yield 3
    elif isinstance(value, np.dtype):
        yield np.dtype(np.float16)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            for other in others_of(getattr(value, field.name)):
                changed = object.__new__(type(value))
                vars(changed).update(vars(value) | {field.name: other})
                yield changed
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            for other in others_of(part):
                parts = (*value[:i], other, *value[i + 1 :])
                yield type(value)(*parts) if hasattr(value, "_fields") else parts
    else:
        yield next(member for member in type(value) if member is not value)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_kernel_is_made_of_is_in_its_key(kind: str):
    kernel = all_kinds()[kind]
    found = {json.dumps(encode_kernel(kernel), sort_keys=True)}
    count = 1
    for name, value in kernel.origin.arguments.items():
        for other in others_of(value):
            origin = Origin(kernel.origin.function, kernel.origin.arguments | {name: other})
            found.add(json.dumps(encode_kernel(dataclasses.replace(kernel, origin=origin)), sort_keys=True))
            count += 1
    assert len(found) == count > 20


def test_the_gpu_is_in_the_key():
    gather = gather_kernel(SPEC)
    devices = [H200, *others_of(dataclasses.replace(H200, platform=1, device_kind=1, compute_capability=1))]
    assert len({key_of(gather, device) for device in devices}) == len(devices) == 6


def test_options_of_jax_are_in_the_key_but_for_harmless_ones():
    gather = gather_kernel(SPEC)
    before = key_of(gather, H200)
    with jax.enable_x64(True):  # of this thread alone
        assert key_of(gather, H200) != before
    with jax.default_matmul_precision("highest"):
        assert key_of(gather, H200) != before
    with jax.log_compiles(True), jax.default_device(jax.devices("cpu")[0]):
        assert key_of(gather, H200) == before
    assert key_of(gather, H200) == before


def test_variables_and_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch):
    gather = gather_kernel(SPEC)
    before = key_of(gather, H200)
    for name in ("XLA_FLAGS", "MOSAIC_GPU_NEW"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "1")
            assert key_of(gather, H200) != before
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("KVJAX_CACHE_DIR", "/elsewhere")
    assert key_of(gather, H200) == before
    versions = dict(keys._versions())
    assert {"jax", "jaxlib"} <= set(versions)
    monkeypatch.setattr(keys, "_versions", lambda: [*(versions | {"jaxlib": "99"}).items()])
    assert key_of(gather, H200) != before


def test_sources_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert json.loads(key_of(gather_kernel(SPEC), H200))["sources"] == sources_digest(keys.SOURCES)
    assert keys.SOURCES / "kernels/gather.py" in keys.SOURCES.rglob("*.py")
    monkeypatch.setattr(started, "TIME", float("inf"))
    digests = []

    def copied(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(keys.SOURCES / "kernels/write", folder)
        return folder

    for name in ("same", "again", "byte", "name", "more"):
        folder = copied(name)
        if name == "byte":
            (folder / "slots.py").write_bytes((folder / "slots.py").read_bytes()[:-1] + b"#")
        elif name == "name":
            (folder / "slots.py").rename(folder / "places.py")
        elif name == "more":
            (folder / "empty.py").touch()
        digests.append(sources_digest(folder))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_sources_that_changed_after_the_start_have_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "new.py").touch()
    os.utime(tmp_path / "new.py", (1, 1))  # as a copy may have the times of what it copies
    monkeypatch.setattr(started, "TIME", 2.0)
    with pytest.raises(NoStableFormError, match="changed after this process began"):
        sources_digest(tmp_path)
    with pytest.raises(NoStableFormError, match="no sources"):
        sources_digest(tmp_path / "missing")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: None,
        [1],
        {"a": 1},
        np.float32(1),
        np.dtype([("a", np.int32)]),
        np.dtype(">i4"),
        (1, {2}),
        jnp.float32,
        Origin,
        Path("x"),
        dataclasses.make_dataclass("Local", ["a"])(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_stable_form_is_refused(value: Any):
    with pytest.raises(NoStableFormError):
        encode(value)


def test_a_kernel_of_unknown_origin_has_no_key():
    kernel = dataclasses.replace(gather_kernel(SPEC), origin=None)
    with pytest.raises(NoStableFormError, match="does not say what made it"):
        key_of(kernel, H200)


@pytest.mark.parametrize(
    "function",
    ["os:system", "kvjax.kernels.gather:Table", "kvjax.kernels.gather:missing", "kvjax.kernels:AnyCount"],
)
def test_only_what_makes_kernels_is_called(function: str):
    with pytest.raises(ValueError, match="expected a function of kvjax that makes kernels"):
        decode_kernel({"function": function, "arguments": {}})
    with pytest.raises(ValueError, match="expected a name of kvjax"):
        encoding.decode({"class": "os:system", "fields": {"command": "true"}})
