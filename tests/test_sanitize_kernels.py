"""The driver for sanitizers and profilers runs every kind of kernel, and the kernels themselves."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax
import pytest
from interpret_mode import interpret_mode

from kvjax import STORED_KV_CACHE_DTYPES, UnsupportedError

DRIVER = runpy.run_path(str(Path(__file__).parents[1] / "tools/sanitize_kernels.py"))


def test_every_kind_of_kernel_is_run_once():
    every = [(spec, shape) for spec, shape in DRIVER["kinds"](STORED_KV_CACHE_DTYPES, 2, 128)]
    assert len(set(every)) == len(every) == 3 * 2 + 2 * 2 * 2 + 2 * 2
    assert {spec.dtype for spec, _ in every} == set(STORED_KV_CACHE_DTYPES)


def test_it_says_what_it_ran(capsys: pytest.CaptureFixture[str]):
    with interpret_mode():
        DRIVER["main"](["--dtype", "fp8_e4m3", "--num-tokens", "9", "--num-kv-heads", "1"])
    assert capsys.readouterr().out.splitlines() == [
        f"wrote and gathered fp8_e4m3 {layout} linear, one {scales}"
        for layout in ("NHD", "HND")
        for scales in ("scale", "scale a head")
    ]


def test_where_no_kernel_can_run_it_fails():
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(UnsupportedError, match="this runs on cpu"):
        DRIVER["main"](["--num-tokens", "9"])
