"""The plugin kvjax_vllm where vLLM has another interface than was tested: a stand-in for vLLM, of a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax
import kvjax_vllm

ROOT = Path(__file__).parents[1]


def run(folder: Path, version: str, code: str) -> list[str]:
    """Runs code where vLLM is a package without modules, of a version: the lines that it printed."""
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").touch()
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "interop")))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_plugin_names_every_dtype_of_kvjax_whose_keys_and_values_differ():
    mixed = {dtype.value for dtype in kvjax.STORED_KV_CACHE_DTYPES if len({*dtype.parts}) > 1}
    assert {*kvjax_vllm.MIXED_DTYPES} == mixed


@pytest.mark.full
@pytest.mark.parametrize(("version", "reason"), [("0.34.0", ""), ("0.33.9", " (No module named 'vllm.config')")])
def test_a_vllm_of_another_interface_is_told_both_versions(tmp_path: Path, version: str, reason: str):
    """It goes on without the backend, which is an error where it is chosen."""
    pytest.importorskip("torch")
    code = """
import warnings, kvjax_vllm
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kvjax_vllm.register()
print(caught[-1].category.__name__, caught[-1].message)
import kvjax
try:
    import kvjax_vllm.backend
except kvjax.UnsupportedError as error:
    print(error)
"""
    warned, error = run(tmp_path, version, code)
    expected = "expected 0.33.*, as tested with 0.33.0: pip install 'vllm==0.33.*'"
    got = f"vllm: got version {version}{reason}, {expected}"
    assert warned == f"RuntimeWarning vLLM runs without the attention backends KVJAX and KVJAX_MLA: {got}"
    assert error.startswith(f"vllm: got version {version}")
    assert error.endswith(expected)
