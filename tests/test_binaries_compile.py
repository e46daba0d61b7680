"""Kernels compiled to CUDA binaries on a machine without a GPU, in this process and in others."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from support import gpu_compile
from support.any_count import attention_kernels, gather_kernel, write_kernel
from support.helpers import simple_spec

from kvjax import KVCacheDType, KVCacheValueError, binaries
from kvjax.binaries import Binary, Device, LaunchUnavailableError, Shape, compiling, lowering, module, workers
from kvjax.binaries.encoding import NoStableFormError, encode_kernel
from kvjax.binaries.folder import Folder
from kvjax.kernels.launchable import AnyCount

PATH = [os.path.abspath(folder) for folder in sys.path]
H200 = Device("NVIDIA H200", "9.0", 232448)
B200 = Device("NVIDIA B200", "10.0", 232448)
NVFP4 = simple_spec(KVCacheDType.NVFP4, num_kv_heads=8, head_size=128, block_size=16)

needs_plugin = pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))


def small_kernels() -> tuple[AnyCount, AnyCount]:
    """Two kernels that are compiled in half a second each, of this call alone: one without scales, one with."""
    gather = gather_kernel(simple_spec(KVCacheDType.BFLOAT16))
    return gather, gather_kernel(simple_spec(KVCacheDType.FP8_E5M2))


SCALED = tuple(range(10))
UNSCALED = (0, 1, 2, 3, 6, 7, 8, 9)  # without those at 4 and 5


@pytest.fixture(scope="module")
def here() -> tuple[AnyCount, Binary]:
    """A kernel, and what this process compiles of it."""
    kernel, _ = small_kernels()
    return kernel, compiling.compile_here(kernel.function, kernel.args, H200)


def assert_is_binary_of(binary: Binary, passed: tuple[int, ...]) -> None:
    machine = int.from_bytes(binary.code[18:20], "little")
    assert (binary.code[:4], machine) == (b"\x7fELF", 190)
    assert binary.name.startswith("gather_kv")
    assert f"\0.text.{binary.name}\0".encode() in binary.code
    assert binary.passed == passed
    assert binary.shape.block == (128, 1, 1)


@needs_plugin
def test_a_kernel_becomes_a_cuda_binary_without_a_gpu(here: tuple[AnyCount, Binary]):
    _, binary = here
    assert_is_binary_of(binary, UNSCALED)
    assert binary.shape == Shape((1, 1), (128, 1, 1), 0)
    assert Binary.from_bytes(binary.to_bytes()) == binary


@pytest.mark.full
@needs_plugin
def test_a_process_that_compiled_for_one_gpu_compiles_for_another_elsewhere(
    here: tuple[AnyCount, Binary], monkeypatch: pytest.MonkeyPatch
):
    assert compiling.can_compile_for(H200)
    assert not compiling.can_compile_for(B200)
    monkeypatch.setenv("KVJAX_COMPILE_PROCESSES", "0")
    with pytest.raises(LaunchUnavailableError, match="compiled kernels for another GPU than NVIDIA B200"):
        workers.compile_all([here[0]], B200)
    monkeypatch.setenv("KVJAX_COMPILE_PROCESSES", "1")
    [binary] = workers.compile_all([here[0]], B200)
    assert_is_binary_of(binary, UNSCALED)
    assert binary.code != here[1].code


@needs_plugin
def test_the_second_time_nothing_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By this process; damage is compiled again; and one process compiles while another does."""
    monkeypatch.setenv("KVJAX_CACHE_DIR", str(tmp_path / "kvjax"))
    monkeypatch.setenv("KVJAX_COMPILE_PROCESSES", "1")
    kernels, before = small_kernels(), binaries.num_compilations()
    first = binaries.compiled(kernels, H200)
    assert binaries.num_compilations() == before + 2
    for passed, binary in zip((UNSCALED, SCALED), first, strict=True):
        assert_is_binary_of(binary, passed)
    assert len(list((tmp_path / "kvjax").iterdir())) == 2

    compiled = []

    def compile_all(kernels: list[AnyCount], device: Device) -> list[Binary]:
        compiled.extend(kernels)
        return [first[0]] * len(kernels)

    monkeypatch.setattr(binaries, "compile_all", compile_all)
    again = small_kernels()
    assert binaries.compiled(again, H200) == first
    assert not compiled
    files = sorted((tmp_path / "kvjax").iterdir())
    assert binaries.compiled(again[:1], B200) == first[:1]  # of another GPU: compiled
    assert compiled == [again[0]]
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    assert binaries.compiled(again, H200) == [first[0]] * 2
    assert compiled[1:] == list(again)
    monkeypatch.setenv("KVJAX_CACHE_DIR", "0")
    binaries.compiled(again, H200)
    assert compiled[3:] == list(again)


class Workers:
    """In place of processes: they fail as told, and say what they were asked for."""

    def __init__(self, fail: bool) -> None:
        self.fail, self.asked, self.ended = fail, [], 0

    def __call__(self) -> Workers:
        return self

    def compile(self, kernel: AnyCount, device: Device) -> Binary:
        self.asked.append(kernel)
        if self.fail:
            raise workers._WorkerError("it ended")
        return binary_of(kernel)

    def end(self) -> None:
        self.ended += 1
        workers._live.discard(self)


def binary_of(kernel: AnyCount) -> Binary:
    return Binary(f"kernel {id(kernel)}", SCALED, Shape((1, 1), (128, 1, 1), 0), b"code")


def compile_here(kernels: list[AnyCount], done: list[AnyCount], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `compiling` make up what it compiles."""

    def compiled(function: object, args: object, device: Device) -> Binary:
        [kernel] = [kernel for kernel in kernels if kernel.function == function]
        done.append(kernel)
        return binary_of(kernel)

    monkeypatch.setattr(workers, "compile_here", compiled)


@pytest.mark.parametrize("fail", [False, True])
def test_kernels_that_no_process_compiles_are_compiled_in_this_one(fail: bool, monkeypatch: pytest.MonkeyPatch):
    kernels = [gather_kernel(simple_spec(KVCacheDType.BFLOAT16)) for _ in range(20)]
    here: list[AnyCount] = []
    compile_here(kernels, here, monkeypatch)
    made = Workers(fail)
    monkeypatch.setattr(workers, "_Worker", made)
    monkeypatch.setattr(workers, "can_compile_for", lambda device: True)
    monkeypatch.setenv("KVJAX_COMPILE_PROCESSES", "1")
    assert workers.compile_all(kernels, H200) == [binary_of(kernel) for kernel in kernels]
    assert made.ended
    assert not workers._live
    if fail:
        assert sorted(map(id, here)) == sorted(map(id, kernels))
    else:
        assert sorted(map(id, [*here, *made.asked])) == sorted(map(id, kernels))
    assert workers.compile_all([], H200) == []


def test_one_kernel_needs_no_process(monkeypatch: pytest.MonkeyPatch):
    kernels, here = [gather_kernel(NVFP4)], []
    compile_here(kernels, here, monkeypatch)
    monkeypatch.setattr(workers, "can_compile_for", lambda device: True)
    made = Workers(fail=True)
    monkeypatch.setattr(workers, "_Worker", made)
    workers.compile_all(kernels, H200)
    assert (here, made.asked) == (kernels, [])


def test_threads_compile_at_once_in_processes(monkeypatch: pytest.MonkeyPatch):
    kernels, here = [gather_kernel(NVFP4), write_kernel(NVFP4)], []
    compile_here(kernels, here, monkeypatch)
    monkeypatch.setattr(workers, "can_compile_for", lambda device: True)
    monkeypatch.setenv("KVJAX_COMPILE_PROCESSES", "1")
    made = Workers(fail=False)
    monkeypatch.setattr(workers, "_Worker", made)
    with compiling.in_turn:  # held by this thread, as while it compiles
        thread = threading.Thread(target=workers.compile_all, args=(kernels[:1], H200))
        thread.start()
        thread.join()
    assert (here, made.asked) == ([], kernels[:1])


def test_a_variable_limits_the_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert workers.processes_of({}) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert workers.processes_of({}) == workers.MOST_PROCESSES
    assert workers.processes_of({"KVJAX_COMPILE_PROCESSES": "0"}) == 0
    for text in ("", "-1", "two", "257"):
        with pytest.raises(
            KVCacheValueError, match=r"KVJAX_COMPILE_PROCESSES: got .*, expected a number from 0 to 256"
        ):
            workers.processes_of({"KVJAX_COMPILE_PROCESSES": text})


@needs_plugin
def test_a_process_says_what_it_cannot_compile_and_may_end_at_any_time(monkeypatch: pytest.MonkeyPatch):
    kernel = small_kernels()[0]
    worker = workers._Worker()
    try:
        with pytest.raises(workers._WorkerError, match="exceeds available shared memory"):
            worker.compile(kernel, Device("NVIDIA H200", "9.0", -1))
        with monkeypatch.context() as patched:
            patched.setattr(workers, "encode_kernel", lambda kernel: encode_kernel(kernel) | {"function": "os:system"})
            with pytest.raises(workers._WorkerError, match="makes kernels"):
                worker.compile(kernel, H200)
        with monkeypatch.context() as patched:
            patched.setattr(workers, "options", lambda: {"jax_unknown": 1})
            with pytest.raises(workers._WorkerError, match="JAX's options are not"):
                worker.compile(kernel, H200)
        with monkeypatch.context() as patched:
            patched.setattr(workers, "sources_digest", lambda folder: "of other sources")
            with pytest.raises(workers._WorkerError, match="sources are not those"):
                worker.compile(kernel, H200)
        with monkeypatch.context() as patched:
            patched.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0")
            with pytest.raises(workers._WorkerError, match="the environment changed"):
                worker.compile(kernel, H200)
        worker._process.kill()
        with pytest.raises(workers._WorkerError):
            worker.compile(kernel, H200)
    finally:
        worker.end()
    assert worker._process.poll() is not None


@needs_plugin
def test_a_process_does_not_import_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The current folder may hold a checkout with different sources."""
    for name in ("kvjax", "jax"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", PATH)
    worker = workers._Worker()
    try:
        assert worker.compile(small_kernels()[0], H200).code
    finally:
        worker.end()


def test_kernels_whose_sources_changed_are_compiled_in_this_process(monkeypatch: pytest.MonkeyPatch):
    """Another process would read the changed sources."""
    kernels, here = [gather_kernel(NVFP4), write_kernel(NVFP4)], []
    compile_here(kernels, here, monkeypatch)
    monkeypatch.setattr(workers, "can_compile_for", lambda device: True)
    monkeypatch.setenv("KVJAX_COMPILE_PROCESSES", "1")

    def changed(folder: Path) -> str:
        raise NoStableFormError("changed")

    monkeypatch.setattr(workers, "sources_digest", changed)
    workers.compile_all(kernels, H200)
    assert sorted(map(id, here)) == sorted(map(id, kernels))


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "_PATIENCE", 0.01)
    popen = subprocess.Popen
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(sleeps, **options))
    worker = workers._Worker()
    try:
        with pytest.raises(workers._WorkerError, match="it ended"):
            worker.compile(gather_kernel(NVFP4), H200)
    finally:
        worker.end()


LOWERS = """
import json, sys
from support.any_count import attention_kernels, write_kernel
from support.helpers import simple_spec
from jax._src import xla_bridge
from kvjax import KVCacheDType
from kvjax.binaries import Device, compiling

device = Device("NVIDIA H200", "9.0", 232448)
# A kernel of one program alone, whatever the number of tokens.
write = write_kernel(simple_spec(KVCacheDType.BFLOAT16, num_kv_heads=8, head_size=128), unique_slots=True)
attention = attention_kernels(simple_spec(KVCacheDType.NVFP4, num_kv_heads=8, head_size=128, block_size=16))
decode, merge, _ = attention.of(1, 64)
binaries = [compiling.compile_here(kernel.function, kernel.args, device) for kernel in (write, decode, merge)]
assert [binary.shape.grid for binary in binaries] == [(1, 1), (132, 1), (128, 1)], binaries
assert not xla_bridge.backends_are_initialized()

import jax
assert (jax.numpy.ones(3) + 1).sum() == 6
assert xla_bridge.backends_are_initialized()
from jaxlib import xla_client
assert xla_client.pjrt_plugin_loaded("cuda")  # by JAX, beside ours
"""


@needs_plugin
@pytest.mark.full
def test_jax_is_not_started_to_compile_and_can_be_later():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", LOWERS], check=True, env=env)


def test_mosaics_jax_module_is_restored_even_after_an_error():
    with lowering.without_starting_jax(H200):
        assert lowering.mosaic.jax.local_devices() == [H200]
        assert lowering.mosaic.jax.jit is jax.jit
    assert lowering.mosaic.jax is jax
    with pytest.raises(ZeroDivisionError), lowering.without_starting_jax(H200):
        raise ZeroDivisionError
    assert lowering.mosaic.jax is jax


def test_mosaic_is_told_of_the_gpu_that_it_lowers_for():
    """Of none of JAX's: these kernels take no shared memory, which is more than this GPU has."""
    gather = gather_kernel(simple_spec(KVCacheDType.NVFP4))
    with pytest.raises(ValueError, match="exceeds available shared memory: smem_bytes=0 > max_smem_bytes=-1"):
        lowering.lower(gather.function, gather.args, Device("NVIDIA H200", "9.0", -1))


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, TypeError])
def test_without_a_client_of_the_host_nothing_is_launched(error: type[Exception], monkeypatch: pytest.MonkeyPatch):
    def make_cpu_client() -> None:
        raise error("it is taken away")

    monkeypatch.setattr(lowering.xla_client, "make_cpu_client", make_cpu_client)
    monkeypatch.setattr(lowering, "host_device", functools.cache(lowering.host_device.__wrapped__))
    with pytest.raises(LaunchUnavailableError, match=r"has no CPU client.*it is taken away"):
        lowering.host_device()


def test_without_a_plugin_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "PLUGINS", ("jax_plugins.missing",))
    monkeypatch.setattr(compiling, "_plugin", functools.cache(compiling._plugin.__wrapped__))
    with pytest.raises(LaunchUnavailableError, match=r"no CUDA plugin here: pip install 'kvjax\[cuda13\]'"):
        compiling._plugin()


def test_a_module_of_another_form_is_not_launched():
    with pytest.raises(LaunchUnavailableError), module.expecting_this_form():
        module.given_integers(b"garbage", 3)


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b"\2\0\0\0{}", b"\xff\xff\0\0", json.dumps({}).encode()])
def test_bytes_of_another_form_are_no_binary(content: bytes):
    with pytest.raises(ValueError, match="not a kernel"):
        Binary.from_bytes(content)


def test_attention_has_a_grid_of_two_axes():
    """What the constants of a launch are read from; `test_torch_launch` passes them on."""
    _, merge, _ = attention_kernels(NVFP4).of(1, 64)
    kernel = lowering.kernel_of(lowering.lower(merge.function, merge.args, H200))
    shape = module.rewritten(kernel.module, len(merge.args)).shape
    assert shape.grid == (128, 1)
    assert shape.block[1:] == (1, 1)
    assert shape.shared_bytes > 0
    with pytest.raises(LaunchUnavailableError, match="passes arguments of Mosaic GPU kernels in another form"):
        module.rewritten(kernel.module, len(merge.args) - 1)
    with pytest.raises(LaunchUnavailableError, match="passes arguments of Mosaic GPU kernels in another form"):
        module.rewritten(kernel.module, len(merge.args) + 9)


@needs_plugin
def test_processes_that_were_started_ahead_compile_next_and_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVJAX_COMPILE_PROCESSES", "2")
    workers.start_ahead()
    ahead = list(workers._waiting)
    assert len(ahead) == 2
    workers.start_ahead()  # there are as many as there may be
    assert workers._waiting == ahead
    used: list[workers._Worker] = []

    def compile_there(worker: workers._Worker, kernel: AnyCount, device: Device) -> Binary:
        used.append(worker)
        return compile_of(worker, kernel, device)

    compile_of = workers._Worker.compile
    monkeypatch.setattr(workers._Worker, "compile", compile_there)
    monkeypatch.setattr(workers, "compile_here", None)  # not in this process
    [binary] = workers.compile_all(small_kernels()[:1], H200)
    assert_is_binary_of(binary, UNSCALED)
    assert len(used) == 1
    assert used[0] in ahead
    assert not workers._waiting
    assert not workers._live
    assert None not in [worker._process.poll() for worker in ahead]


def test_processes_that_nothing_needs_end(monkeypatch: pytest.MonkeyPatch):
    """As where all kernels are found in the folder, or nothing is compiled for ten minutes."""
    monkeypatch.setenv("KVJAX_COMPILE_PROCESSES", "1")
    workers.start_ahead()
    [worker] = workers._waiting
    workers.compile_all([], H200)
    assert worker._process.poll() is not None
    assert not workers._live
    monkeypatch.setattr(workers, "_AHEAD", 0.0)
    made: list[workers._Worker] = []
    begin = workers._Worker.__init__

    def begins(worker: workers._Worker) -> None:
        begin(worker)
        made.append(worker)

    monkeypatch.setattr(workers._Worker, "__init__", begins)
    workers.start_ahead()
    deadline = time.monotonic() + 30
    while workers._live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [worker._process.wait(30) for worker in made] == [-signal.SIGKILL]
    assert not workers._live


def test_processes_are_not_those_of_a_forked_process():
    """Nor does it wait for a lock that another thread of its parent's held."""
    code = """
import os
from kvjax.binaries import workers
workers._live.add("a process")
workers._waiting.append("a process")
workers._live_lock.acquire()
if not (child := os.fork()):
    os._exit(len(workers._live) + len(workers._waiting) + (not workers._live_lock.acquire(blocking=False)))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(PATH), "JAX_PLATFORMS": "cpu"}
    assert subprocess.run([sys.executable, "-c", code], env=variables, check=False).returncode == 0


@needs_plugin
def test_processes_of_another_environment_are_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVJAX_COMPILE_PROCESSES", "1")
    workers.start_ahead()
    [ahead] = workers._waiting
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0")
    monkeypatch.setattr(workers, "can_compile_for", lambda device: False)  # so that a process must
    assert workers.compile_all(small_kernels()[:1], H200)[0].code
    assert ahead._process.poll() is not None
    assert not workers._live


def test_processes_are_started_ahead_only_of_a_folder_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[None] = []
    monkeypatch.setattr(binaries, "start_ahead", lambda: calls.append(None))
    folder = tmp_path / "kvjax"
    monkeypatch.setenv("KVJAX_CACHE_DIR", str(folder))
    binaries.prepare()
    assert len(calls) == 1
    Folder(folder).write("a key", b"a kernel")
    binaries.prepare()
    assert len(calls) == 1
    monkeypatch.setenv("KVJAX_CACHE_DIR", "0")
    binaries.prepare()
    folder.chmod(0o777)  # not used, because others may write there
    monkeypatch.setenv("KVJAX_CACHE_DIR", str(folder))
    binaries.prepare()
    assert len(calls) == 3
