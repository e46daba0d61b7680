"""Loading and launching kernels from torch, with a driver made up where there is none. `test_torch_cuda.py` launches.

`test_binaries_compile.py` compiles; `test_kernels_any_count.py` looks at the code.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.any_count import gather_kernel  # noqa: E402
from support.helpers import simple_spec  # noqa: E402

from kvjax import KVCacheDType, UnsupportedError, binaries  # noqa: E402
from kvjax.kernels import AnyCount  # noqa: E402
from kvjax_torch.launch import driver, loading, running, tape  # noqa: E402

CUDA3 = torch.device("cuda", 3)
SHAPE = binaries.Shape((132, 5), (256, 3, 2), 168960)
CODE = b"\x7fELF code with \0 in it"


class Driver:
    """The functions of the CUDA driver that launching uses. Launches are read as the driver reads them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[dict[str, Any]] = []
        self.error = 0
        self.num_arguments = 3

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:  # noqa: N802
        module._obj.value = 0x10
        self.calls.append(("load", code))
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = 0x20
        self.calls.append(("function", module.value, name))
        return 500 if name == b"missing" else 0

    def cuModuleUnload(self, module: Any) -> int:  # noqa: N802
        self.calls.append(("unload", module.value))
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        self.calls.append(("attribute", function.value, attribute, value))
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.calls.append(("context", context.value))
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, parameters: int, extra: None) -> int:  # noqa: N802
        sizes = np.frombuffer(ctypes.string_at(config, 28), np.uint32).tolist()
        stream, attributes = np.frombuffer(ctypes.string_at(config + 32, 16), np.uint64).tolist()
        [num_attributes] = np.frombuffer(ctypes.string_at(config + 48, 4), np.uint32).tolist()
        [parameter] = np.frombuffer(ctypes.string_at(parameters, 8), np.uint64).tolist()
        assert (attributes, num_attributes, extra) == (0, 0, None)
        arguments = np.frombuffer(ctypes.string_at(parameter, 8 * self.num_arguments), np.uint64).tolist()
        launched = {"sizes": sizes, "stream": stream, "function": function, "arguments": arguments}
        self.launches.append(launched)
        return self.error


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with four GPUs, of which torch has cuda:3 current."""
    fake = Driver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "primary_context", lambda index: ctypes.c_void_p(0x1000 + index))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(loading, "_thread", threading.local())
    monkeypatch.setattr(loading, "device_of", lambda device: f"properties of {device}")
    return fake


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[AnyCount]]:
    """What is compiled together."""
    calls: list[list[AnyCount]] = []

    def compile_together(kernels: list[AnyCount], device: str) -> list[binaries.Binary]:
        assert device == "properties of cuda:3"
        calls.append(list(kernels))
        return [binaries.Binary("gather_kv_kernel", (0, 1, 2), SHAPE, CODE) for _ in kernels]

    monkeypatch.setattr(binaries, "compiled", compile_together)
    return calls


def new_kernels(count: int) -> list[AnyCount]:
    return [gather_kernel(simple_spec(KVCacheDType.NVFP4)) for _ in range(count)]


def test_a_launch_passes_sizes_stream_and_arguments_to_the_driver(fake_driver: Driver, compiled: list[list[AnyCount]]):
    [gather] = new_kernels(1)
    kernel = loading.compile_kernel(gather, CUDA3)
    steps = ("load", CODE), ("function", 0x10, b"gather_kv_kernel"), ("attribute", 0x20, 8, 168960)
    assert [call for call in fake_driver.calls if call[0] != "context"] == [*steps]
    assert fake_driver.calls[0] == ("context", 0x1003)
    for num_programs in (1, 2**31 - 1):
        kernel((7 | 9 << 32, 1 << 47, 2**64 - 1), num_programs)
        assert fake_driver.launches.pop() == {
            "sizes": [num_programs, 132, 5, 256, 3, 2, 168960],
            "stream": 1003,
            "function": 0x20,
            "arguments": [7 | 9 << 32, 1 << 47, 2**64 - 1],
        }
    assert not fake_driver.launches


@pytest.mark.parametrize("passed", [(), (1,), (0, 2), (0, 1, 2), (0, 1, 4), (3, 1, 0, 2, 4)])
def test_a_kernel_gets_the_arguments_that_it_uses(passed: tuple[int, ...], fake_driver: Driver):
    fake_driver.num_arguments = len(passed)
    run = driver.launcher(0x20, 5, passed, *dataclasses.astuple(SHAPE))
    run(1, (10, 11, 12, 13, 14), 1)
    assert [launched["arguments"] for launched in fake_driver.launches] == [[10 + i for i in passed]]


def test_a_kernel_is_compiled_and_loaded_once(fake_driver: Driver, compiled: list[list[AnyCount]]):
    [gather] = new_kernels(1)
    found: list[loading.Kernel] = []
    threads = [threading.Thread(target=lambda: found.append(loading.compile_kernel(gather, CUDA3))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert compiled == [[gather]]
    assert len([call for call in fake_driver.calls if call[0] == "load"]) == 1


def test_kernels_that_are_compiled_ahead_are_compiled_together(fake_driver: Driver, compiled: list[list[AnyCount]]):
    kernels = new_kernels(4)
    loading.compile_kernel(kernels[0], CUDA3)
    loading.compile_ahead([*kernels, kernels[1]], CUDA3)
    assert compiled == [kernels[:1], kernels[1:]]
    assert len([call for call in fake_driver.calls if call[0] == "load"]) == 1
    for kernel in kernels:
        loading.compile_kernel(kernel, CUDA3)
    loading.compile_ahead(kernels, CUDA3)
    assert len(compiled) == 2
    assert len([call for call in fake_driver.calls if call[0] == "load"]) == 4


def test_threads_and_interrupted_launches_share_no_memory(fake_driver: Driver):
    """A launch in the middle of another, as in a finalizer, changes nothing of it."""
    run = driver.launcher(0x20, 3, (0, 1, 2), *dataclasses.astuple(SHAPE))
    enqueue, depth = fake_driver.cuLaunchKernelEx, 0

    def interrupted(*args: Any) -> int:
        nonlocal depth
        depth += 1
        if depth < 4:
            run(10 + depth, (depth, depth, depth), depth)
        return enqueue(*args)

    fake_driver.cuLaunchKernelEx = interrupted  # type: ignore[method-assign]
    run = driver.launcher(0x20, 3, (0, 1, 2), *dataclasses.astuple(SHAPE))
    run(10, (0, 0, 0), 9)
    assert [(x["stream"], x["arguments"], x["sizes"][0]) for x in fake_driver.launches] == [
        (13, [3, 3, 3], 3),
        (12, [2, 2, 2], 2),
        (11, [1, 1, 1], 1),
        (10, [0, 0, 0], 9),
    ]


def test_errors_of_the_driver_are_raised(fake_driver: Driver, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RuntimeError, match="cuModuleGetFunction of the CUDA driver returned error 500"):
        driver.load(CODE, "missing", 0)
    assert fake_driver.calls[-1] == ("unload", 0x10)
    run = driver.launcher(0x20, 3, (0, 1, 2), *dataclasses.astuple(SHAPE))
    fake_driver.error = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx of the CUDA driver returned error 700"):
        run(0, (1, 2, 3), 1)
    fake_driver.error = 0
    run(0, (4, 5, 6), 1)
    assert fake_driver.launches[-1]["arguments"] == [4, 5, 6]


def test_what_cannot_be_compiled_is_said_with_the_tested_versions(fake_driver: Driver, monkeypatch: pytest.MonkeyPatch):
    def unavailable(*_: Any) -> list[binaries.Binary]:
        raise binaries.LaunchUnavailableError("JAX lacks something")

    monkeypatch.setattr(binaries, "compiled", unavailable)
    for compile_them in (
        lambda: running.launcher(new_kernels(1)[0], CUDA3),
        lambda: running.compile_all(new_kernels(2), CUDA3),
    ):
        with pytest.raises(UnsupportedError, match=r"JAX lacks something; tested with jax"):
            compile_them()
    with pytest.raises(binaries.LaunchUnavailableError):
        loading.compile_kernel(new_kernels(1)[0], CUDA3)


def test_kernels_of_several_operations_are_compiled_at_once(
    fake_driver: Driver, compiled: list[list[AnyCount]], monkeypatch: pytest.MonkeyPatch
):
    """Each operation stops before its first launch; nothing is launched or recorded."""
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    first, second, third, later = new_kernels(4)
    tensors = (torch.zeros(1),) * 3
    monkeypatch.setattr(running.Call, "device", CUDA3)
    monkeypatch.setattr(tape, "_tapes", {})

    def of_two() -> None:
        running.compile_all([first, second], CUDA3)
        running.run(running.Call(first, (), tensors, 1))
        running.run(running.Call(later, (), tensors, 1))

    def taped() -> None:
        tape.call(lambda: running.run(running.Call(third, (), tensors, 1)) or (), (taped, *tensors))

    running.compile_operations([of_two, lambda: running.compile_once((second,), CUDA3), taped, lambda: None], CUDA3)
    assert compiled == [[first, second, third]]
    assert not fake_driver.launches
    assert not tape._tapes
    running.run(running.Call(third, (), tensors, 1))
    assert len(fake_driver.launches) == 1
    assert len(compiled) == 1

    def fails() -> None:
        raise ValueError("no")

    fourth, fifth = new_kernels(2)
    with pytest.raises(ValueError, match="no"):
        running.compile_operations([lambda: running.compile_once((fourth, fifth), CUDA3), fails], CUDA3)
    running.compile_once((fourth, fifth), CUDA3)  # not remembered as compiled
    assert compiled[1:] == [[fourth, fifth]]
