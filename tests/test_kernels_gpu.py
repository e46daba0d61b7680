"""The kernels on a GPU, over all that they serve: each byte that they write and each bit that they read is XLA's.

`make test-gpu` runs these tests, and with the kernels as `implementation` those that hold every implementation.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.hard_numbers import adversarial_blocks, all_values, around_midpoints, finite_values, nearly_tied_blocks
from support.helpers import (
    INPUT_DTYPES,
    KERNEL_DTYPES,
    assert_same_bytes,
    each_case,
    kv_tokens,
    matrix,
    page_bytes,
    poisoned,
    run_write,
    simple_spec,
)
from support.kernel_cases import (
    GATHER_AXES,
    SHAPE_AXES,
    WRITE_AXES,
    check_encoding,
    check_ends,
    check_gather,
    check_write,
    compare_gathers,
    compare_writes,
    covering,
    reciprocals,
)

from kvjax import KVCacheDType
from kvjax.scale_values import MAX_SCALE, MIN_SCALE

pytestmark = pytest.mark.gpu


@each_case(covering(SHAPE_AXES | WRITE_AXES), pairs=True, whole=True)
def test_a_write_has_the_bytes_of_xla(case):
    check_write(case)


@each_case(covering(SHAPE_AXES | GATHER_AXES), pairs=True, whole=True)
def test_a_gather_has_the_bits_of_xla(case):
    check_gather(case)


@pytest.mark.parametrize("exponent", [-124, -1, 0, 77, 123])
def test_a_reciprocal_is_rounded_right_for_every_mantissa(exponent):
    x = np.ldexp(np.arange(2**23, 2**24).astype(np.float32), exponent - 23)
    expected = (1 / x.astype(np.float64)).astype(np.float32)
    assert_same_bytes(np.asarray(jax.jit(reciprocals)(x)), expected)


@matrix({"dtype": KERNEL_DTYPES, "num_tokens": [64, 3000, 20_000]}, whole=True)
def test_of_eight_tokens_for_each_slot_the_last_is_written_whole(dtype, num_tokens):
    spec, num_blocks = simple_spec(dtype, num_kv_heads=4, head_size=128), num_tokens // 64
    key, value = kv_tokens(spec, num_tokens, jnp.bfloat16)
    slots = np.random.default_rng(7).integers(0, num_tokens // 8, num_tokens, np.int32)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = page_bytes(run_write("xla", key, value, poisoned(spec, num_blocks), slots))
    caches = [poisoned(spec, num_blocks) for _ in range(20)]  # written one behind the other: the GPU is never idle
    written = [run_write("mosaic", key, value, cache, slots) for cache in caches]
    for cache in written:
        assert_same_bytes(page_bytes(cache), expected)


def numbers_next_to_roundings(dtype: KVCacheDType, source: np.dtype, scale: float) -> np.ndarray:
    """Those on and beside the roundings to a stored dtype, and every number of 16 bits, or a million of 32."""
    if dtype is KVCacheDType.NVFP4:
        near = adversarial_blocks(scale).reshape(-1)
    elif dtype is KVCacheDType.FLOAT32:  # to which nothing is rounded
        near = np.zeros(0, np.float32)
    else:
        near = around_midpoints(finite_values(dtype.info.storage_dtype)) * np.float32(scale)
    every = all_values(source) if source.itemsize == 2 else np.arange(0, 2**32, 4093).astype(np.uint32).view(source)
    return np.concatenate([near.astype(source), every])


@matrix(
    {"dtype": KERNEL_DTYPES, "scale": [1.0, 0.0173, 3.7, MIN_SCALE, MAX_SCALE], "dense_dtype": INPUT_DTYPES},
    valid=lambda case: case["dtype"].is_quantized or case["scale"] == 1,
    pairs=True,
    whole=True,
)
def test_every_rounding_is_that_of_xla(dtype, scale, dense_dtype):
    with np.errstate(over="ignore", under="ignore"):
        x = numbers_next_to_roundings(dtype, np.dtype(INPUT_DTYPES[dense_dtype]), scale)
    check_encoding(dtype, x, scale)


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_four_over_six_compares_sums_to_the_last_bit(implementation):
    check_encoding(KVCacheDType.NVFP4_4OVER6, nearly_tied_blocks(0.0173), 0.0173, implementation)


@matrix({"source": ["float16", "bfloat16"], "scale": [1.0, 0.0173]}, pairs=True)
def test_threads_that_hold_whole_blocks_encode_four_over_six_as_xla_does(source, scale):
    """Eight heads of 1,200 tokens: two tokens a program, 128 blocks of keys and of values."""
    spec = simple_spec(KVCacheDType.NVFP4_4OVER6, num_kv_heads=8, head_size=128)
    with np.errstate(over="ignore", under="ignore"):
        blocks = [nearly_tied_blocks(scale), adversarial_blocks(scale)]
        x = np.concatenate(blocks).astype(INPUT_DTYPES[source])
    key = np.resize(x, (1200, 8, 128))
    value = np.random.default_rng(0).standard_normal(key.shape).astype(np.float32).astype(x.dtype)
    slots = np.arange(len(key), dtype=np.int32)
    scales = {name: np.float32(scale) for name in ("k_scale", "v_scale")}
    compare_writes(spec, -(-len(key) // spec.block_size), key, value, slots, **scales)


@matrix({"dtype": KERNEL_DTYPES, "dense_dtype": INPUT_DTYPES})
def test_every_stored_pattern_is_read_as_xla_reads_it(dtype, dense_dtype):
    """Eight megabytes hold each number of 16 bits, and each NVFP4 byte with each block scale, dozens of times."""
    spec = simple_spec(dtype)
    num_blocks = 2**23 // spec.page_size_bytes
    table, lengths = np.arange(num_blocks, dtype=np.int32)[None], np.array([num_blocks * spec.block_size], np.int32)
    scale = np.float32(0.0371)
    compare_gathers(poisoned(spec, num_blocks), table, lengths, dense_dtype, k_scale=scale, v_scale=scale)


@pytest.fixture
def room_on_the_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Bytes of the GPU that are free, while no other worker of this run asks the same."""
    with (tmp_path_factory.getbasetemp().parent / "room_on_the_gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        [device] = jax.local_devices(backend="cuda")[:1]
        query = ["nvidia-smi", f"--id={device.local_hardware_id}"]
        query += ["--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        yield int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20


def run_apart(function: Callable[..., None], *args: Any) -> None:
    """Calls it in a process of its own, whose memory the GPU has back after it; JAX keeps a process's memory."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
        process.submit(function, *args).result()


# Under `--dist loadgroup` one worker makes all of these, and no others wait for their turn.
@pytest.mark.xdist_group("caches of 9 GiB")
@matrix({"dtype": KERNEL_DTYPES, "layout": ["NHD", "HND"]})
def test_both_ends_of_a_cache_beyond_32_bit_addresses_are_written_and_read(dtype, layout, room_on_the_gpu):
    num_bytes = 9 * 2**30
    needed = 3 * num_bytes  # it makes two, and leaves as much to what other workers do meanwhile
    if room_on_the_gpu < needed:
        pytest.skip(f"needs {needed:,} bytes of free GPU memory, has {room_on_the_gpu:,}")
    spec = simple_spec(dtype, layout=layout, block_size=16)
    run_apart(check_ends, spec, num_bytes // spec.page_size_bytes)
