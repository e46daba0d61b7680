"""Starts the programs of this folder that need several devices: JAX fixes their number when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent


def run_program(name: str, *args: str, num_devices: int | None, seconds: int = 500) -> subprocess.Popen[str]:
    """Starts a program of this folder with so many simulated devices, or with those that there are."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    if num_devices is not None:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # what is compiled for eight devices runs once
    # jax.distributed traps what would end a process that waits for another: it is killed.
    command = ["timeout", "-s", "KILL", str(seconds), sys.executable, "-W", "error", PROGRAMS / name, *args]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
