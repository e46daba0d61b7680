"""Plain CUDA kernels, built by nvcc on first use and launched on the memory of JAX arrays."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks import timing, workload
from kvjax import AttentionSpec, CacheLayout, KVCache, KVCacheDType

SOURCES = tuple(Path(__file__).with_name(name) for name in ("copy.cu", "reshape_and_cache.cu"))
ARCHITECTURE = "sm_90"  # nvcc also embeds PTX, which later GPUs compile
COPY_BYTES = 16  # kernels copy multiples of this
MEMCPY_CALLS = 20

WRITES = {KVCacheDType.BFLOAT16: "write_bfloat16", KVCacheDType.FP8_E4M3: "write_fp8_e4m3"}
"""The kernels that write bfloat16 tokens, by stored dtype."""

ELEMENTS_A_THREAD = 8  # bfloat16 elements in a 16-byte load


def nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


@functools.cache
def why_missing() -> str | None:
    """Builds the kernels and returns why they cannot run here, or `None`."""
    if not workload.is_gpu():
        return "needs an NVIDIA GPU"
    try:
        _library()
    except (RuntimeError, OSError) as error:
        return str(error)
    return None


def build(library: Path) -> None:
    """Compiles the kernels to a shared library; `RuntimeError` if nvcc is missing or fails."""
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("nvcc: got none in PATH, CUDA_HOME/bin or /usr/local/cuda/bin, expected CUDA's compiler")
    command = [compiler, f"-arch={ARCHITECTURE}", "-O3", "-shared", "-Xcompiler", "-fPIC", "-o", str(library)]
    done = subprocess.run([*command, *SOURCES], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc failed:\n{done.stdout}{done.stderr}")


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peers.so"
        build(path)
        library = ctypes.CDLL(str(path))  # stays mapped after the file is deleted
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.error_string.restype = ctypes.c_char_p
    library.copy_by_kernel.argtypes = [pointer, pointer, size]
    library.time_memcpy.argtypes = [pointer, pointer, size, *[ctypes.c_int] * 2, ctypes.POINTER(ctypes.c_float)]
    for name in WRITES.values():
        getattr(library, name).argtypes = [*[pointer] * 6, *[ctypes.c_int] * 5]
    return library


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA: {_library().error_string(error).decode()}")


def synchronize(_: object = None) -> None:
    _check(_library().synchronize())


def serves(spec: AttentionSpec) -> bool:
    return spec.dtype in WRITES and spec.layout is CacheLayout.NHD and not spec.is_diffkv


type ThreadCount = Callable[[int], int]  # maps the elements of a token's keys to threads per block


def vllm_threads(row_elements: int) -> int:
    """Returns vLLM's threads per block: one per element, most of them idle."""
    return min(row_elements, 512)


def fitted_threads(row_elements: int) -> int:
    """Returns one thread per 16-byte load of a row, rounded up to whole warps."""
    return min(-(-row_elements // ELEMENTS_A_THREAD // 32) * 32, 512)


def reshape_and_cache(batch: workload.Batch, cache: KVCache, *, threads: ThreadCount) -> None:
    """Launches an in-place write of bfloat16 tokens into `cache`, without JAX's knowledge.

    All arrays must be ready, and nothing else may reference the cache's array. `synchronize` waits for the write.
    """
    num_tokens, row_elements = batch.key.shape[0], batch.key.shape[1] * batch.key.shape[2]
    arrays = batch.key, batch.value, cache.kv, batch.slot_mapping, *workload.scales().values()
    pointers = [array.unsafe_buffer_pointer() for array in arrays]
    launch = getattr(_library(), WRITES[cache.spec.dtype])
    sizes = num_tokens, cache.num_slots, cache.spec.block_size, row_elements, threads(row_elements)
    _check(launch(*pointers, *sizes))


def measure_copy_by_kernel(source: jax.Array, target: jax.Array, num_bytes: int) -> timing.Timing:
    """Times a kernel that copies `num_bytes`, rotating through two buffers of equal size."""
    starts = [array.unsafe_buffer_pointer() for array in (source, target)]
    rotation = source.nbytes // num_bytes

    def call(number: int) -> None:
        offset = number % rotation * num_bytes
        _check(_library().copy_by_kernel(*(start + offset for start in starts), num_bytes))

    return timing.measure(call, wait=synchronize)


def measure_memcpy(source: jax.Array, target: jax.Array, num_bytes: int) -> timing.Timing:
    """Times `cudaMemcpyAsync` by CUDA events around back-to-back calls, because CUPTI's kernel records omit it."""
    pointers = [array.unsafe_buffer_pointer() for array in (source, target)]
    rotation, samples = source.nbytes // num_bytes, []
    for _ in range(timing.LIMITS.min_calls):
        seconds = ctypes.c_float()
        _check(_library().time_memcpy(*pointers, num_bytes, rotation, MEMCPY_CALLS, ctypes.byref(seconds)))
        samples.append(seconds.value)
    return timing.Timing(tuple(samples), timing.Clock.EVENTS)
