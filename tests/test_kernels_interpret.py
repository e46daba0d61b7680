"""The bodies of the kernels, interpreted on the CPU: the bytes of the XLA form, and no races between programs.

Interpretation knows nothing of registers and lanes: `test_kernels_compile.py` holds those, and `test_kernels_gpu.py`
makes the same checks on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_cases
from support.helpers import (
    FEW_DTYPES,
    INPUT_DTYPES,
    KERNEL_DTYPES,
    SPECIALS,
    assert_same_bytes,
    can_write,
    each_case,
    kv_tokens,
    matrix,
    page_bytes,
    pairwise,
    poisoned,
    run_write,
    simple_spec,
)
from support.interpret_mode import interpret_mode

from kvjax import KVCache, KVCacheDType, UnsupportedError

SMALL_AXES = kernel_cases.FORMAT_AXES | {
    "head_size": [64, 80, 112, 128, 256],
    "head_size_v": ["same", "other"],
    "num_kv_heads": [1, 2, 3, 8],
    "block_size": [1, 8, 16],
}


def small(cases: list[kernel_cases.Case]) -> list[kernel_cases.Case]:
    """A program is compiled operation by operation: of wider tokens it takes ten seconds, and they run on a GPU."""
    return [case for case in cases if case["num_kv_heads"] * case["head_size"] <= 512]


WRITE_AXES = SMALL_AXES | kernel_cases.WRITE_AXES | {"num_tokens": [1, 3, 11]}
WRITE_CASES = small(pairwise(WRITE_AXES, kernel_cases.is_valid))
GATHER_CASES = small(pairwise(SMALL_AXES | kernel_cases.GATHER_AXES, kernel_cases.is_valid))
FEW_ROWS = {"head_size": [64, 80, 112], "num_kv_heads": [1, 2, 3]}


@each_case(WRITE_CASES, FEW_ROWS)
def test_an_interpreted_write_has_the_bytes_of_xla(case):
    with interpret_mode():
        kernel_cases.check_write(case)


@each_case(GATHER_CASES, FEW_ROWS)
def test_an_interpreted_gather_has_the_bits_of_xla(case):
    with interpret_mode():
        kernel_cases.check_gather(case)


@matrix({"dtype": KERNEL_DTYPES, "dense_dtype": INPUT_DTYPES})
def test_special_numbers_are_stored_as_xla_stores_them(dtype, dense_dtype):
    with np.errstate(over="ignore", under="ignore"):
        x = np.array(SPECIALS, np.float32).astype(INPUT_DTYPES[dense_dtype])
    with interpret_mode():
        kernel_cases.check_encoding(dtype, x, 0.0371)


@pytest.mark.full
@matrix({"dtype": KERNEL_DTYPES}, few={"dtype": [KVCacheDType.NVFP4]})
def test_the_first_and_the_last_blocks_of_a_cache_are_written_and_read(dtype):
    with interpret_mode():
        kernel_cases.check_ends(simple_spec(dtype), 12)


@pytest.mark.parametrize("axes", [kernel_cases.WRITE_AXES, kernel_cases.GATHER_AXES], ids=["write", "gather"])
def test_the_sweep_for_a_gpu_holds_every_format_with_every_value(axes):
    axes = kernel_cases.SHAPE_AXES | axes
    formats = kernel_cases.formats()
    # Layouts: unquantized, fp8, a scale for each token and head, NVFP4, fp8 and int8 keys beside NVFP4 values.
    per_dtype = 3 * 2 + 2 * 2 * 2 + 2 * 2 + 2 * 2 * 2 + 2 * (2 * 2 * 2)
    assert len(formats) == 3 * per_dtype  # dense dtypes
    cases = kernel_cases.covering(axes)
    for axis, values in axes.items():
        met = {(tuple(case[name] for name in kernel_cases.FORMAT_AXES), case[axis]) for case in cases}
        possible = [
            (tuple(format.values()), value)
            for format, value in itertools.product(formats, values)
            if (format["v_scale_layout"], axis, value) != ("swizzled", "block_size", 1)
        ]
        assert sorted(met) == sorted(possible)


@matrix({"check": ["write", "encoding", "gather", "ends"], "byte": [0, 50_000, -1]})
def test_the_checks_find_a_single_wrong_bit(check, byte, monkeypatch: pytest.MonkeyPatch):
    """Whether written, read or left alone, a byte of the kernel's result that differs in its last bit is found."""

    def flip(array: Any) -> np.ndarray:
        raw = np.array(array)
        raw.reshape(-1).view(np.uint8)[byte % raw.nbytes] ^= 1
        return raw

    def write_and_flip(implementation: str, *args: Any, **scales: Any) -> KVCache:
        cache = run_write(implementation, *args, **scales)
        return cache if implementation == "xla" else KVCache(jnp.asarray(flip(cache.kv)), cache.spec)

    def read_and_flip(implementation: str, *args: Any, **scales: Any) -> list[np.ndarray]:
        key, value = read(implementation, *args, **scales)
        return [key, value if implementation == "xla" else flip(value)]

    read = kernel_cases.read
    monkeypatch.setattr(kernel_cases, "run_write", write_and_flip)
    monkeypatch.setattr(kernel_cases, "read", read_and_flip)
    checks = {
        "write": lambda: kernel_cases.check_write(WRITE_CASES[0]),
        "encoding": lambda: kernel_cases.check_encoding(KVCacheDType.NVFP4, np.ones(128, np.float32), 1.0),
        "gather": lambda: kernel_cases.check_gather(GATHER_CASES[0] | {"sequences": "ragged"}),
        "ends": lambda: kernel_cases.check_ends(simple_spec(), 12),
    }
    with interpret_mode(), pytest.raises(AssertionError, match=r"bytes differ|Arrays are not equal"):
        checks[check]()


@matrix(
    {"dtype": KERNEL_DTYPES, "page_size_padded": [None, 9000, 9001]},
    few={"dtype": [KVCacheDType.BFLOAT16, KVCacheDType.NVFP4], "page_size_padded": [9000, 9001]},
    pairs=True,
)
def test_the_kernel_refuses_pages_of_no_whole_number_of_elements_alone(dtype, page_size_padded):
    """So that tests of the kernel leave nothing else to XLA."""
    spec = simple_spec(dtype, page_size_padded=page_size_padded)
    refused = pytest.raises(UnsupportedError, match="expected a multiple of")
    with interpret_mode(), contextlib.nullcontext() if can_write("mosaic", spec) else refused:
        run_write("mosaic", *kv_tokens(spec, 2), poisoned(spec, 2), np.array([3, 9], np.int32)).kv.block_until_ready()


DTYPES_AND_LAYOUTS = matrix({"dtype": KERNEL_DTYPES, "layout": ["NHD", "HND"]}, few={"dtype": FEW_DTYPES})


@DTYPES_AND_LAYOUTS
def test_programs_do_not_race_even_for_one_slot(dtype, layout):
    spec = simple_spec(dtype, layout=layout)
    slots = np.array([9, 8, 15, 0, -1, 7, 1, 8, 9, 100], np.int32)
    key, value = kv_tokens(spec, len(slots))
    with interpret_mode(detect_races=True):
        written = page_bytes(run_write("mosaic", key, value, poisoned(spec, 2), slots))
    assert_same_bytes(written, page_bytes(run_write("xla", key, value, poisoned(spec, 2), slots)))


@DTYPES_AND_LAYOUTS
def test_programs_that_are_told_of_unique_slots_are_seen_to_race_for_one(dtype, layout):
    spec = simple_spec(dtype, layout=layout)
    slots = np.array([9, 8, 15, 0, -1, 7, 1, 10, 9], np.int32)
    key, value = kv_tokens(spec, len(slots))
    with pytest.raises(RuntimeError, match="RACE DETECTED"), interpret_mode(detect_races=True):
        jax.block_until_ready(run_write("mosaic", key, value, poisoned(spec, 2), slots, unique_slots=True))
