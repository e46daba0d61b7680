"""Two runs of one program store the same bytes: in one process, compiled anew, and in processes of their own.

`python tests/test_determinism.py xla nvfp4` prints what such a process stores, on one core.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support import kernel_cases
from support.helpers import FEW_DTYPES, INPUT_DTYPES, page_bytes, poisoned, run_write, simple_spec
from support.interpret_mode import interpret_mode

from kvjax import STORED_KV_CACHE_DTYPES, KVCacheDType

ROOT = Path(__file__).parents[1]
CONTEXTS = {"xla": contextlib.nullcontext, "mosaic": contextlib.nullcontext, "interpreted": interpret_mode}
RUNS = [
    pytest.param("xla", FEW_DTYPES[1:], id="xla"),
    pytest.param("xla", STORED_KV_CACHE_DTYPES, id="xla-every-dtype", marks=pytest.mark.full),
    pytest.param("mosaic", STORED_KV_CACHE_DTYPES, id="mosaic", marks=pytest.mark.gpu),
]
INTERPRETED = [pytest.param("interpreted", FEW_DTYPES, id="interpreted", marks=pytest.mark.full)]


@pytest.fixture(autouse=True)
def compiles_anew() -> Iterator[None]:
    """Without the programs that other tests, and other runs of these, have compiled."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def digests(name: str, dtypes: Sequence[KVCacheDType]) -> list[str]:
    """Of each dtype, the bytes after two writes, the second over some of the first, and those that are then read."""
    implementation = "xla" if name == "xla" else "mosaic"
    found = []
    for dtype in dtypes:
        i = STORED_KV_CACHE_DTYPES.index(dtype)
        spec, dense = simple_spec(dtype, layout=("NHD", "HND")[i % 2]), list(INPUT_DTYPES)[i % 3]
        cache, scales = poisoned(spec, 3), {"k_scale": np.float32(0.037), "v_scale": np.float32(0.052)}
        key, value = kernel_cases.make_kv(spec, 11, np.dtype(INPUT_DTYPES[dense]))
        with CONTEXTS[name]():
            for step in (1, -1):
                slots = np.random.default_rng(step + 1).permutation(24)[: len(key)].astype(np.int32)
                cache = run_write(implementation, key[::step], value[::step], cache, slots, **scales)
            tables = np.array([[2, 0, 1]], np.int32), np.array([23], np.int32)
            read = kernel_cases.read(implementation, cache, *tables, dense, **scales)
        stored = b"".join(np.ascontiguousarray(x).tobytes() for x in (page_bytes(cache), *read))
        found.append(f"{dtype.value} {hashlib.sha256(stored).hexdigest()}")
    return found


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtypes"), RUNS + INTERPRETED)
def test_two_runs_store_the_same_bytes(name, dtypes):
    first = digests(name, dtypes)
    assert len(set(first)) == len(dtypes)
    jax.clear_caches()
    assert digests(name, dtypes) == first


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtypes"), RUNS)
def test_two_processes_store_the_same_bytes(name, dtypes):
    """Each compiles for itself, with a hash seed of its own; the other one has a single core."""
    other = subprocess.Popen(
        [sys.executable, __file__, name, *(dtype.value for dtype in dtypes)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    expected = digests(name, dtypes)
    printed = other.communicate(timeout=300)
    assert other.returncode == 0, printed
    assert printed[0].splitlines() == expected


if __name__ == "__main__":
    name, *dtypes = sys.argv[1:]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before jax starts its threads
    print("\n".join(digests(name, [KVCacheDType(dtype) for dtype in dtypes])))
