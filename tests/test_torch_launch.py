"""Launching kernels from torch: what is private to JAX, and what a launch is given. `test_torch_cuda.py` launches.

`test_kernels_any_count.py` compiles the kernels for GPUs that are not here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
from any_count import gather_kernel  # noqa: E402
from helpers import simple_spec  # noqa: E402

from kvjax import KVCacheDType  # noqa: E402
from kvjax_torch import launch  # noqa: E402

LOWERS = """
from any_count import attention_kernels, write_kernel
from helpers import simple_spec
from jax._src import xla_bridge
from kvjax import KVCacheDType
from kvjax_torch import launch

# A kernel of one program alone, whatever the number of tokens.
write = write_kernel(simple_spec(KVCacheDType.BFLOAT16, num_kv_heads=8, head_size=128), unique_slots=True)
attention = attention_kernels(simple_spec(KVCacheDType.NVFP4, num_kv_heads=8, head_size=128, block_size=16))
decode, merge, _ = attention.of(1, 64)
for kernel in (write, decode, merge):
    lowered = launch._lower(kernel.function, kernel.args, launch._Target("NVIDIA H200", "9.0", 232448))
    assert launch.given_integers(launch._kernel_module(lowered), len(kernel.args))
assert not xla_bridge.backends_are_initialized()

import jax
assert (jax.numpy.ones(3) + 1).sum() == 6
assert xla_bridge.backends_are_initialized()
"""


@pytest.mark.full
def test_jax_is_not_started_to_lower_a_kernel_and_can_be_later():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", "-c", LOWERS], check=True, env=env)


def test_what_mosaic_sees_of_jax_is_jax_again_whatever_fails():
    target = launch._Target("NVIDIA H200", "9.0", 232448)
    with launch._without_starting_jax(target):
        assert launch.mosaic.jax.local_devices() == [target]
        assert launch.mosaic.jax.jit is jax.jit
    assert launch.mosaic.jax is jax
    with pytest.raises(ZeroDivisionError), launch._without_starting_jax(target):
        raise ZeroDivisionError
    assert launch.mosaic.jax is jax


def test_mosaic_is_told_of_the_gpu_that_it_lowers_for():
    """Of none of JAX's: these kernels take no shared memory, which is more than this GPU has."""
    gather = gather_kernel(simple_spec(KVCacheDType.NVFP4))
    with pytest.raises(ValueError, match="exceeds available shared memory: smem_bytes=0 > max_smem_bytes=-1"):
        launch._lower(gather.function, gather.args, launch._Target("NVIDIA H200", "9.0", -1))


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, TypeError])
def test_without_a_client_of_the_host_nothing_is_launched(error: type[Exception], monkeypatch: pytest.MonkeyPatch):
    def make_cpu_client() -> None:
        raise error("it is taken away")

    monkeypatch.setattr(launch.xla_client, "make_cpu_client", make_cpu_client)
    monkeypatch.setattr(launch, "_host_device", functools.cache(launch._host_device.__wrapped__))
    with pytest.raises(launch.LaunchUnavailableError, match=r"has no CPU client.*it is taken away"):
        launch._host_device()


@pytest.mark.parametrize("jaxlib", [(0, 11), (0, 12)])
def test_host_code_is_called_as_jaxlib_has_it(jaxlib: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """With function, stream and list; since 0.12 with the compiled kernel before them and the device behind."""
    called = []
    pointer, entries = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)
    types = [pointer, pointer, entries] if jaxlib < (0, 12) else [pointer, pointer, pointer, entries, ctypes.c_int]

    def host_code(*args: Any) -> None:
        called.append([args[types.index(entries)][1] if i == types.index(entries) else x for i, x in enumerate(args)])

    callback = ctypes.CFUNCTYPE(None, *types)(host_code)
    compiled = (ctypes.c_void_p * 3)(0x10, ctypes.cast(callback, ctypes.c_void_p), 0x30)
    monkeypatch.setattr(launch, "_JAXLIB", jaxlib)
    launch._launcher(compiled, 5)(0x20, launch.struct.pack("=2Q", 7, 9))
    assert called == [[0x10, 0x20, 9] if jaxlib < (0, 12) else [0x30, 0x10, 0x20, 9, 5]]


def test_a_module_of_another_form_is_not_launched():
    with pytest.raises(launch.LaunchUnavailableError), launch._expecting_this_form():
        launch.given_integers(b"garbage", 3)


def test_the_list_that_a_launch_is_given(monkeypatch: pytest.MonkeyPatch):
    """The kernel's entries and then the number of programs, on torch's stream."""
    given = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(launch._thread, "has_context", True, raising=False)
    pack = launch.struct.Struct("=4Q").pack
    kernel = launch.Kernel(3, None, lambda stream, packed: given.append((stream, packed)), pack)
    kernel((7 | 9 << 32, 1 << 47, 5), 11)
    assert given == [(1003, np.array([7 | 9 << 32, 1 << 47, 5, 11], np.uint64).tobytes())]
