"""`make` finds a Python that is new enough, or says which it found; and what it makes of it runs jax anywhere."""

from __future__ import annotations

import _ctypes
import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OLD = '#!/bin/sh\ncase "$2" in *platform*) echo 3.11.2 ;; *) exit 1 ;; esac\n'
SHIM = "#!/bin/sh\nexit 127\n"


@pytest.fixture(scope="module")
def old_and_shim(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pythons")
    paths = [folder / "old", folder / "shim"]
    for path, script in zip(paths, (OLD, SHIM), strict=True):
        path.write_text(script)
        path.chmod(0o755)
    return paths


def setup_env(environment: Path, pythons: list[Path], **more: str) -> subprocess.CompletedProcess[str]:
    # pip itself is the requirement: it is there already, so that nothing is downloaded.
    command = [ROOT / "tools/setup_env.sh", environment, "pip"]
    variables = {"PATH": "/usr/bin:/bin", "PYTHON": " ".join(map(str, pythons)), **more}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, old_and_shim: list[Path]) -> tuple[Path, str]:
    """An environment, and what is printed while it is made."""
    environment = tmp_path_factory.mktemp("made") / "env"
    done = setup_env(environment, [*old_and_shim, Path(sys.executable)])
    assert done.returncode == 0, done.stderr
    return environment, done.stdout


def test_where_none_is_new_enough_it_says_what_it_found(tmp_path: Path, old_and_shim: list[Path]):
    old, shim = old_and_shim
    done = setup_env(tmp_path / "env", [old, shim, tmp_path / "absent"])
    assert done.returncode == 1
    assert "needs Python 3.12 or later" in done.stderr
    assert f"{old}: 3.11.2" in done.stderr
    assert f"{shim}: does not run" in done.stderr
    assert f"{tmp_path / 'absent'}: not found" in done.stderr
    assert not (tmp_path / "env").exists()


@pytest.mark.full
def test_it_makes_the_environment_once_with_the_first_that_is_new_enough(
    made: tuple[Path, str], old_and_shim: list[Path]
):
    environment, printed = made
    assert f"creating {environment} (python {platform.python_version()})" in printed
    again = setup_env(environment, old_and_shim)
    assert again.returncode == 0, again.stderr
    assert "creating" not in again.stdout


@pytest.mark.full
def test_pip_installs_locked_versions_where_uv_cannot(made: tuple[Path, str]):
    environment, _ = made
    lock = str(ROOT / "constraints.txt")
    done = setup_env(environment, [], PIP_CONSTRAINT=lock, PIP_NO_INDEX="1")  # so there is no uv
    assert (done.returncode, "uv failed, installing by pip" in done.stdout) == (0, True), done.stderr


@pytest.mark.full
def test_jax_looks_for_no_gpu_in_it_where_there_is_no_driver(made: tuple[Path, str], tmp_path: Path):
    environment, _ = made
    [packages] = environment.glob("lib/python*/site-packages")

    def platforms(**variables: str) -> str:
        command = [environment / "bin/python", "-c", "import os; print(os.environ.get('JAX_PLATFORMS'))"]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.strip()

    assert platforms() == "None"  # without a plugin there is nothing to keep jax from
    (packages / "jax_plugins/xla_cuda13").mkdir(parents=True)
    assert setup_env(environment, []).returncode == 0
    assert platforms(JAX_PLATFORMS="cuda") == "cuda"
    driver = tmp_path / "libcuda.so.1"
    shutil.copy(_ctypes.__file__, driver)  # some library
    assert platforms(LD_LIBRARY_PATH=str(tmp_path)) == "None"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert platforms() == "cpu"
