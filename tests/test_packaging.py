"""The wheel holds its import packages with their data, and works without the source tree."""

from __future__ import annotations

import configparser
import contextlib
import email
import itertools
import re
import subprocess
import sys
import tomllib
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "kvjax": ROOT / "kvjax",
    "kvjax_torch": ROOT / "interop/kvjax_torch",
    "kvjax_vllm": ROOT / "interop/kvjax_vllm",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--wheel-dir", folder, ROOT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("kvjax-*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def files_below(folder: Path) -> set[Path]:
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", ".ruff_cache", ".mypy_cache"} & {*path.parts}
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_file_of_each_package(unpacked: Path, package: str):
    assert files_below(unpacked / package) == files_below(PACKAGES[package])


def test_the_wheel_holds_the_demo_weights_and_the_type_marker(unpacked: Path):
    [weights] = (unpacked / "kvjax/demo").glob("*.safetensors")
    assert 0 < weights.stat().st_size <= 3 * 2**20
    assert (unpacked / "kvjax/py.typed").exists()


def test_the_wheel_holds_nothing_beside_the_packages(unpacked: Path):
    metadata, *packages = sorted((path.name for path in unpacked.iterdir()), key=lambda name: name in PACKAGES)
    assert sorted(packages) == sorted(PACKAGES)
    assert metadata.endswith(".dist-info")


def test_the_wheel_requires_jax_and_numpy_alone(unpacked: Path):
    [path] = unpacked.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(path.read_text())
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(required) == ["jax<0.13,>=0.11.1", "ml-dtypes>=0.5", "numpy>=2.0"]
    assert metadata["Requires-Python"] == ">=3.12"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"cuda12", "cuda13", "torch", "test", "bench"} <= {*metadata.get_all("Provides-Extra", [])}


def run_on_the_wheel(unpacked: Path, code: str, *arguments: str) -> str:
    """Runs code isolated from the environment, with the wheel in place of the source tree on `sys.path`."""
    sources = [str(folder.parent) for folder in PACKAGES.values()]
    replace_path = f"import sys; sys.path = [{str(unpacked)!r}] + [p for p in sys.path if p not in {sources!r}]\n"
    command = [sys.executable, "-I", "-W", "error", "-c", replace_path + code, *arguments]
    done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_of_the_wheel_imports_from_it(unpacked: Path):
    modules = ["kvjax"] + [
        ".".join(path.relative_to(unpacked).with_suffix("").parts)
        for path in sorted((unpacked / "kvjax").rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]
    code = "import importlib; print(*[importlib.import_module(name).__file__ for name in sys.argv[1:]], sep='\\n')"
    files = run_on_the_wheel(unpacked, code, *modules).splitlines()
    assert len(files) == len(modules) > 10
    assert all(Path(file).is_relative_to(unpacked) for file in files)


@pytest.mark.full
def test_the_torch_bridge_of_the_wheel_imports_from_it(unpacked: Path):
    pytest.importorskip("torch")
    file = run_on_the_wheel(unpacked, "import kvjax_torch; print(kvjax_torch.__file__)")
    assert Path(file) == unpacked / "kvjax_torch/__init__.py"


def test_vllm_finds_its_plugin_in_the_wheel(unpacked: Path):
    [path] = unpacked.glob("*.dist-info/entry_points.txt")
    entry_points = configparser.ConfigParser()
    entry_points.read(path)
    assert dict(entry_points["vllm.general_plugins"]) == {"kvjax": "kvjax_vllm:register"}
    code = "import kvjax_vllm; print(kvjax_vllm.register, {'kvjax', 'jax', 'torch', 'vllm'} & {*sys.modules})"
    shown = run_on_the_wheel(unpacked, code)
    assert "register" in shown
    assert shown.endswith("set()")


@pytest.mark.full
def test_the_command_of_the_wheel_runs_and_knows_its_version(wheel: Path, unpacked: Path):
    [path] = unpacked.glob("*.dist-info/entry_points.txt")
    entry_points = configparser.ConfigParser()
    entry_points.read(path)
    module, function = entry_points["console_scripts"]["kvjax"].split(":")
    command = f"from {module} import {function}; {function}()"
    version = wheel.name.split("-")[1]
    assert run_on_the_wheel(unpacked, command, "--version") == f"kvjax {version}"
    shown = run_on_the_wheel(unpacked, command, "--help")
    assert "demo" in shown
    assert "plan" in shown


def test_the_check_of_an_installed_wheel_refuses_a_source_tree():
    command = [sys.executable, "-I", ROOT / "tools/check_wheel.py", ROOT / "tests/data/configs/gpt-oss-20b.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "expected a file in" in done.stderr


LOCKED_EXTRAS = ("test", "transformers", "lint", "docs", "train", "fuzz", "setup", "cuda12", "cuda13")


def requirements_of(project: dict[str, Any], extras: Iterable[str]) -> Iterator[Requirement]:
    """What kvjax with these extras requires, with what extras that they name require."""
    optional = project["optional-dependencies"]
    for line in itertools.chain(project["dependencies"], *(optional[extra] for extra in extras)):
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            yield from requirements_of(project, requirement.extras)
        else:
            yield requirement


@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_lock_has_a_version_that_each_requirement_allows(python: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    requirements = list(requirements_of(project, LOCKED_EXTRAS))
    assert len(requirements) > 20
    for requirement in requirements:
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_makefile_locks_every_extra_that_its_environments_install():
    makefile = (ROOT / "Makefile").read_text()
    [locked] = re.findall(r"^LOCKED_EXTRAS := (.*)$", makefile, re.MULTILINE)
    assert locked.split() == list(LOCKED_EXTRAS)
    installed = re.findall(r"\$\(LOCKED\) tools/setup_env.sh \S+ -e '\.\[(.*)\]'", makefile)
    assert installed == ["smollm2", "$(subst $() ,,$(DEV_EXTRAS))", "test,fuzz", "docs,lint"]
    assert {"demo", "torch"} & set(LOCKED_EXTRAS) == set()  # `test` and `transformers` require these


def test_nightly_workflow_runs_each_part_of_test_compat():
    workflow, makefile = ((ROOT / name).read_text() for name in (".github/workflows/nightly.yml", "Makefile"))
    [targets] = re.findall(r"target: \[(.*)\]", workflow)
    [versions] = re.findall(r"^COMPAT_JAX := (.*)$", makefile, re.MULTILINE)
    assert targets.split(", ") == [*(f"test-jax-{version}" for version in versions.split()), "test-oldest-transformers"]
    assert "test-compat: $(COMPAT_JAX:%=test-jax-%) test-oldest-transformers\n" in makefile


@pytest.mark.parametrize(
    ("module", "is_error"),
    [("kvjax.ops.write", True), ("kvjax_torch", True), ("test_quant", True), ("transformers.utils", False)],
)
def test_warnings_are_errors_only_where_kvjax_causes_them(module: str, is_error: bool):
    with pytest.raises(FutureWarning) if is_error else contextlib.nullcontext():
        warnings.warn_explicit("a name is deprecated", FutureWarning, "file.py", 1, module=module, registry={})
