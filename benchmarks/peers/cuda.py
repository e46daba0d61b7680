"""Plain CUDA kernels, built by nvcc when first used and launched on the memory of JAX arrays."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import jax

from benchmarks import timing
from kvjax import AttentionSpec, CacheLayout, KVCache, KVCacheDType

SOURCES = tuple(Path(__file__).with_name(name) for name in ("copy.cu", "reshape_and_cache.cu"))
ARCHITECTURE = "sm_90"  # later GPUs run what nvcc adds of it as PTX
COPY_BYTES = 16  # a copy by kernel is of a multiple of this
MEMCPY_CALLS = 20

WRITES: Mapping[KVCacheDType, str] = MappingProxyType(
    {KVCacheDType.BFLOAT16: "write_bfloat16", KVCacheDType.FP8_E4M3: "write_fp8_e4m3"}
)
"""The kernels that write bfloat16 tokens, by the dtype that they store."""

ELEMENTS_A_THREAD = 8  # bfloat16 elements in a load of 16 bytes


def nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


@functools.cache
def why_missing() -> str | None:
    """Why the kernels cannot be built and run here; `None` where they can, and then they are built."""
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    try:
        _library()
    except (RuntimeError, OSError) as error:
        return str(error)
    return None


def version() -> str:
    """What CUDA's compiler calls itself."""
    compiler = nvcc()
    if compiler is None:
        return "none"
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return next((line.strip() for line in said.splitlines() if "release" in line), "unknown")


def build(library: Path) -> None:
    """Compiles the kernels to a shared library.

    Raises:
      RuntimeError: there is no nvcc, or it fails; with what it said.
    """
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("nvcc: got none in PATH, CUDA_HOME/bin or /usr/local/cuda/bin, expected CUDA's compiler")
    command: list[str | Path] = [
        compiler,
        f"-arch={ARCHITECTURE}",
        "-O3",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        "-o",
        library,
    ]
    done = subprocess.run([*command, *SOURCES], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc failed:\n{done.stdout}{done.stderr}")


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peers.so"
        build(path)
        library = ctypes.CDLL(str(path))  # stays mapped when the file is gone
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


type ThreadCount = Callable[[int], int]  # threads of a block, by the elements of a token's keys


def vllm_threads(row_elements: int) -> int:
    """Threads of a block as vLLM launches its kernel of this name: one an element, most of them without work."""
    return min(row_elements, 512)


def fitted_threads(row_elements: int) -> int:
    """As many threads as a row has loads, in whole warps."""
    return min(-(-row_elements // ELEMENTS_A_THREAD // 32) * 32, 512)


def reshape_and_cache(
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    cache: KVCache,
    *,
    k_scale: jax.Array,
    v_scale: jax.Array,
    threads: ThreadCount,
) -> None:
    """Starts the write of bfloat16 tokens into `cache`, in place and behind JAX's back.

    Everything must be ready before, and nothing else may hold the cache's array. `synchronize` waits for the write.
    """
    num_tokens, row_elements = key.shape[0], key.shape[1] * key.shape[2]
    arrays = key, value, cache.kv, slot_mapping, k_scale, v_scale
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
    """Times `cudaMemcpyAsync`, each sample one of several in a row by CUDA's events: CUPTI's kernel records lack it."""
    pointers = [array.unsafe_buffer_pointer() for array in (source, target)]
    rotation, samples = source.nbytes // num_bytes, []
    for _ in range(timing.LIMITS.min_calls):
        seconds = ctypes.c_float()
        _check(_library().time_memcpy(*pointers, num_bytes, rotation, MEMCPY_CALLS, ctypes.byref(seconds)))
        samples.append(seconds.value)
    return timing.Timing(tuple(samples), timing.Clock.EVENTS)
