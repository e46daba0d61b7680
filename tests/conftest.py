"""What every test shares: devices, the markers `gpu`, `full` and `nightly`, and hypothesis' settings."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest
from support import deprecations


def _has_nvidia_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if not _has_nvidia_driver():
    # With CUDA's libraries installed (torch brings them) and no driver, the version check of jax's CUDA plugin ends the
    # process with a segmentation fault. Set before jax is imported, and inherited by the tests' subprocesses.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Tests spend most of their time in XLA's compiler. What one process compiled, others and later runs load.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build/jax-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")  # many processes would write these at once

# Tests count what is compiled, and a user's folder of compiled kernels is not theirs to fill.
os.environ["KVJAX_CACHE_DIR"] = "0"

# XLA's threads on the CPU, by default one for each core. Interpreted kernels whose warpgroups wait for each other take
# one for each warpgroup, and one for the program around.
os.environ.setdefault("NPROC", "16")

# Each process of the tests would take most of a GPU's memory for itself, though several run side by side.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def rotated_gpus(worker: str, gpus: Sequence[str]) -> list[str]:
    """Returns a machine's GPUs in the order for a process of pytest-xdist, "gw0": each begins with another.

    All see every GPU, for tests that need two; all other tests run on the first.
    """
    first = int(worker.removeprefix("gw")) % max(len(gpus), 1)
    return [*gpus[first:], *gpus[:first]]


if "PYTEST_XDIST_WORKER" in os.environ:
    if gpus := sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(gpus)).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(rotated_gpus(os.environ["PYTEST_XDIST_WORKER"], visible))
    # Set before torch is imported. Several processes with as many threads of torch's as there are cores wait for each
    # other: on two cores, three take ten times as long as with one thread each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The tests' processes compile side by side already; each that a call would begin imports jax anew.
    os.environ.setdefault("KVJAX_COMPILE_PROCESSES", "0")

# What jax traces is millions of objects, few of them garbage: looking for it takes a twentieth of the tests' time.
gc.set_threshold(50_000, 10, 10)

deprecations.find_uses()

# The first call of a jitted function compiles; a deadline would measure that.
hypothesis.settings.register_profile("kvjax", deadline=None)
hypothesis.settings.load_profile("kvjax")


@functools.cache
def _why_no_gpu() -> str | None:
    import jax

    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        devices = []
    if any(float(device.compute_capability) >= 9.0 for device in devices):
        return None
    seen = [f"{device.device_kind} (sm_{device.compute_capability.replace('.', '')})" for device in devices]
    return f"needs a CUDA GPU of compute capability 9.0 or later; jax sees {', '.join(seen) or 'no CUDA GPU'}"


@pytest.fixture(params=["xla", pytest.param("mosaic", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each implementation of the operations that store and read bytes: all run the same tests."""
    return request.param


OPTIMIZED = {
    *("test_determinism", "test_gather", "test_kernels_arithmetic", "test_quant"),
    *("test_sharded_compile", "test_torch_write", "test_write", "test_write_in_place"),
}
"""Modules of tests whose programs XLA optimizes in every run: they show that no optimization changes a stored byte."""


SAMPLED = {
    *("test_attention", "test_attention_ring", "test_benchmark_attention", "test_block_bytes", "test_block_groups"),
    *("test_blocks", "test_calibration", "test_checked", "test_exact_window", "test_gather"),
    *("test_kernels_any_count", "test_kernels_arithmetic", "test_kernels_attention", "test_kernels_compile"),
    *("test_kernels_gather", "test_kernels_interpret", "test_kernels_prompts", "test_layers"),
    *("test_migrating", "test_mixed_dtypes", "test_mla", "test_mla_formats", "test_quant", "test_ragged_attention"),
    *("test_sharded_compile", "test_step", "test_torch_prompts", "test_torch_ragged"),
    *("test_torch_write", "test_transformers_cache", "test_vllm_plugin", "test_write", "test_write_in_place"),
}
"""Modules whose cases each compile programs or import a library: an eighth of a test's cases is in every run."""


LONGEST_ON_A_GPU = {
    *("test_benchmark_exact_window", "test_benchmark_host_tier", "test_benchmark_mla"),
    *("test_benchmarks", "test_demo_cli", "test_fuzz_cache", "test_sharded", "test_torch_exact_window"),
    *("test_torch_restart", "test_transformers_attention", "test_transformers_exact_window"),
}
"""Modules of tests that take one to three minutes there: they begin first, or all others would wait for the last."""


@pytest.fixture(autouse=True, scope="module")
def compiles_as_needed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves optimizations out where they change nothing that a test looks at: compiling takes longer than running."""
    import jax

    if _has_nvidia_driver():
        yield
        return
    is_optimized = request.module.__name__ in OPTIMIZED
    if is_optimized:
        jax.clear_caches()  # of what other modules have compiled
    jax.config.update("jax_disable_most_optimizations", not is_optimized)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full matrices too: the tests marked full")
    parser.addoption("--nightly", action="store_true", help="run every test: those marked full or nightly too")


def leave_to(mark: str, tests: Iterable[pytest.Item], one_of: int, least: int) -> None:
    """Marks cases of each test with more than `least`, all but one of so many."""
    families: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in tests:
        families[item.nodeid.split("[")[0]].append(item)
    for name, cases in families.items():
        # Drawn, for every eighth one may have the same value along an axis. The same ones in every process.
        kept = random.Random(name).sample(range(len(cases)), -(-len(cases) // one_of))
        for i, case in enumerate(cases if len(cases) > least else ()):
            if i not in kept:
                case.add_marker(mark)


def mark_samples(items: Sequence[pytest.Item]) -> None:
    """Leaves most cases of `SAMPLED` to the full matrices, and of these most to nightly runs; none that needs a GPU."""
    here = [item for item in items if not item.get_closest_marker("gpu")]
    unmarked = [item for item in here if not (item.get_closest_marker("full") or item.get_closest_marker("nightly"))]
    leave_to("full", [item for item in unmarked if item.path.stem in SAMPLED], one_of=8, least=2)
    in_ci = [item for item in here if item.get_closest_marker("full") and not item.get_closest_marker("nightly")]
    leave_to("nightly", in_ci, one_of=8, least=1)


@pytest.hookimpl(tryfirst=True)  # before pytest's own, which looks for the marks that -m names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest first, and leaves out what is marked `full` or `nightly` unless an option or a name asks."""
    items.sort(key=lambda item: not (item.path.stem in LONGEST_ON_A_GPU and item.get_closest_marker("gpu")))
    if not config.option.keyword:
        mark_samples(items)
    if config.getoption("nightly") or any("::" in arg for arg in config.args):
        return
    marks = ("nightly",) if config.getoption("full") else ("full", "nightly")
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not any(item.get_closest_marker(mark) for mark in marks)]


def pytest_collection_finish() -> None:
    """Spares Python's garbage collector the modules and the tests: looking through them takes a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    if "support.gpu_compile" in sys.modules:
        sys.modules["support.gpu_compile"].end_compilers()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where torch's tensors are."""
    if request.param == "cuda" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs a torch that sees the CUDA GPU")
    return request.param
