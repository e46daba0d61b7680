"""Checks an installed kvjax: python check_wheel.py CONFIG MODULE...

Run by the Python of an environment that has the wheel, outside the source tree: imports each module, looks for the
entry points and runs the command `kvjax plan` on CONFIG, a `config.json`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path


def main(config: str, *modules: str) -> None:
    """Raises where something is missing, or is not that of this environment."""
    packages = Path(sysconfig.get_path("purelib"))
    version = importlib.metadata.version("kvjax")
    for name in ("kvjax", *modules):
        file = importlib.import_module(name).__file__
        check(Path(str(file)).is_relative_to(packages), f"{name}: got {file}, expected a file in {packages}")
    check(sys.modules["kvjax"].__version__ == version, f"kvjax.__version__: expected {version}")
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvjax")
    check([plugin.value for plugin in plugins] == ["kvjax_vllm:register"], f"vllm.general_plugins: got {plugins}")
    check(all(callable(plugin.load()) for plugin in plugins), "vllm.general_plugins: expected a function")
    command = Path(sysconfig.get_path("scripts")) / "kvjax"
    plan = [command, "plan", "--config", config, "--kv-cache-dtype", "nvfp4", "--memory", "40GiB"]
    printed = subprocess.run(plan, check=True, capture_output=True, text=True).stdout
    check("40 GiB hold" in printed, f"kvjax plan: got {printed}")
    print("kvjax", version, *modules)


def check(holds: bool, otherwise: str) -> None:
    """Raises unless a condition holds."""
    if not holds:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    main(*sys.argv[1:])
