"""The bodies of the kernels, interpreted on the CPU: the bytes of the XLA form, and no races between programs.

Interpretation knows nothing of registers and lanes: `test_kernels_compile.py` holds those.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers import INPUT_DTYPES, assert_same_bytes, kv_tokens, page_bytes, pairwise, poisoned, run_write, simple_spec
from interpret_mode import interpret_mode

from kvjax import STORED_KV_CACHE_DTYPES, AttentionSpec, KVCacheDType, gather_kv

NUM_BLOCKS = 4
HEAD_SIZE_V = {64: 80, 80: 64, 112: 16, 128: 96, 256: 32}

AXES = {
    "dtype": [dtype.value for dtype in STORED_KV_CACHE_DTYPES],
    "input_dtype": list(INPUT_DTYPES),
    "layout": ["NHD", "HND"],
    "v_scale_layout": ["linear", "swizzled"],
    "head_size": [64, 80, 112, 128, 256],
    "head_size_v": ["same", "other"],
    "num_kv_heads": [1, 2, 3, 8],
    "block_size": [1, 8, 16],
    "num_tokens": [1, 3, 11],
    "scales": ["scalar", "per_head"],
}


def is_valid(case: dict) -> bool:
    can_swizzle = case["dtype"] == "nvfp4" and case["block_size"] % 4 == 0
    takes_per_head = case["dtype"].startswith("fp8")
    return (can_swizzle or case["v_scale_layout"] == "linear") and (takes_per_head or case["scales"] == "scalar")


def make_spec(case: dict) -> AttentionSpec:
    return simple_spec(
        KVCacheDType(case["dtype"]),
        block_size=case["block_size"],
        num_kv_heads=case["num_kv_heads"],
        head_size=case["head_size"],
        head_size_v=None if case["head_size_v"] == "same" else HEAD_SIZE_V[case["head_size"]],
        layout=case["layout"],
        v_scale_layout=case["v_scale_layout"],
    )


def make_scales(case: dict) -> dict[str, np.ndarray]:
    shape = (case["num_kv_heads"],) if case["scales"] == "per_head" else ()
    k_scale, v_scale = np.exp2(np.random.default_rng(3).uniform(-7, 2, (2, *shape))).astype(np.float32)
    return {"k_scale": k_scale, "v_scale": v_scale}


def make_slots(num_tokens: int, num_slots: int) -> np.ndarray:
    """Distinct slots in no order, but for every fourth token none and for every sixth one past the cache."""
    slots = np.random.default_rng(2).permutation(max(num_slots, num_tokens))[:num_tokens].astype(np.int32)
    slots[3::4] = -1
    slots[5::6] = num_slots + 3
    return slots


@pytest.mark.parametrize("case", pairwise(AXES, is_valid), ids=lambda case: "-".join(map(str, case.values())))
def test_an_interpreted_write_has_the_bytes_of_xla(case):
    spec = make_spec(case)
    key, value = kv_tokens(spec, case["num_tokens"], INPUT_DTYPES[case["input_dtype"]])
    slots, scales = make_slots(case["num_tokens"], NUM_BLOCKS * spec.block_size), make_scales(case)
    expected = page_bytes(run_write("xla", key, value, poisoned(spec, NUM_BLOCKS), slots, **scales))
    with interpret_mode():
        written = page_bytes(run_write("mosaic", key, value, poisoned(spec, NUM_BLOCKS), slots, **scales))
    assert_same_bytes(written, expected)


RACE_CASES = [
    pytest.param(dtype, layout, id=f"{dtype.value}-{layout}")
    for dtype in STORED_KV_CACHE_DTYPES
    for layout in ("NHD", "HND")
]


@pytest.mark.parametrize(("dtype", "layout"), RACE_CASES)
def test_programs_that_write_different_slots_do_not_race(dtype, layout):
    spec = simple_spec(dtype, layout=layout)
    slots = np.array([9, 8, 15, 0, -1, 7, 1, 10, 100], np.int32)
    key, value = kv_tokens(spec, len(slots))
    with interpret_mode(detect_races=True):
        written = page_bytes(run_write("mosaic", key, value, poisoned(spec, 2), slots))
    assert_same_bytes(written, page_bytes(run_write("xla", key, value, poisoned(spec, 2), slots)))


@pytest.mark.parametrize(("dtype", "layout"), RACE_CASES)
def test_programs_that_write_one_slot_are_seen_to_race(dtype, layout):
    spec = simple_spec(dtype, layout=layout)
    slots = np.array([9, 8, 15, 0, -1, 7, 1, 10, 9], np.int32)
    key, value = kv_tokens(spec, len(slots))
    with pytest.raises(RuntimeError, match="RACE DETECTED"), interpret_mode(detect_races=True):
        jax.block_until_ready(run_write("mosaic", key, value, poisoned(spec, 2), slots))


GATHER_AXES = {name: values for name, values in AXES.items() if name not in ("input_dtype", "num_tokens")}
GATHER_AXES["output_dtype"] = list(INPUT_DTYPES)


@pytest.mark.parametrize("case", pairwise(GATHER_AXES, is_valid), ids=lambda case: "-".join(map(str, case.values())))
def test_an_interpreted_gather_has_the_bytes_of_xla(case):
    spec = make_spec(case)
    cache = poisoned(spec, NUM_BLOCKS)
    table = np.array([[2, 0], [3, 99], [-7, 0]], np.int32)
    lengths = np.array([2 * spec.block_size, spec.block_size // 2 + 1, 0], np.int32)
    options = make_scales(case) | {"dtype": INPUT_DTYPES[case["output_dtype"]]}
    expected = gather_kv(cache, table, lengths, implementation="xla", **options)
    with interpret_mode():
        read = jax.block_until_ready(gather_kv(cache, table, lengths, implementation="mosaic", **options))
    for got, want in zip(read, expected, strict=True):
        assert_same_bytes(np.asarray(got), np.asarray(want))
