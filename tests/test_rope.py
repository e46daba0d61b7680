"""`rope_and_cache`: the queries and every byte of the cache are those of rotating, rounding and writing."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gpu_compile, reference
from support.helpers import (
    FEW_DTYPES,
    INPUT_DTYPES,
    KERNEL_DTYPES,
    assert_same_bytes,
    each_case,
    kv_tokens,
    matrix,
    page_bytes,
    pairwise,
    poisoned,
    simple_spec,
    tokens,
)
from support.interpret_mode import interpret_mode

from kvjax import (
    STORED_KV_CACHE_DTYPES,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    checked,
    reshape_and_cache_flash,
    rope_and_cache,
)
from kvjax.kernels.write import launch_config

AXES = {
    "dtype": [dtype.value for dtype in STORED_KV_CACHE_DTYPES],
    "input_dtype": list(INPUT_DTYPES),
    "table_dtype": list(INPUT_DTYPES),
    "is_neox": [True, False],
    "layout": ["NHD", "HND"],
    "heads": [(1, 1), (6, 2), (8, 8), (15, 3)],
    "head_size": [64, 80, 112, 256],
    "head_size_v": [None, 32],
    "rotated": [1.0, 0.5, 0.25],
    "num_tokens": [1, 2, 9],
    "indices": ["int32", "int64"],
}
CASES = pairwise(AXES, lambda case: True)
FEW_CASES = pairwise(AXES | {"num_tokens": [2], "heads": [(6, 2)], "head_size": [64, 80]}, lambda case: True)

_rope = jax.jit(rope_and_cache, static_argnames=("is_neox", "unique_slots", "implementation"), donate_argnames="cache")


def rounded_rot_dim(case: dict[str, Any]) -> int:
    return int(case["head_size"] * case["rotated"]) // 2 * 2


def check(implementation: str, case: dict[str, Any]) -> None:
    num_heads, num_kv_heads = case["heads"]
    spec = simple_spec(
        KVCacheDType(case["dtype"]),
        num_kv_heads=num_kv_heads,
        head_size=case["head_size"],
        head_size_v=case["head_size_v"],
        layout=case["layout"],
    )
    dtype, num_tokens, indices = INPUT_DTYPES[case["input_dtype"]], case["num_tokens"], np.dtype(case["indices"])
    key, value = kv_tokens(spec, num_tokens, dtype)
    query = tokens(np.random.default_rng(5), (num_tokens, num_heads, spec.head_size), dtype)
    table = reference.cos_sin(rounded_rot_dim(case), INPUT_DTYPES[case["table_dtype"]])
    slots = np.array([11, 3, -1, 7, 3, 15, 2, 31, 4], indices)[:num_tokens]
    positions = np.array([7, reference.POSITIONS - 1, 99, -3, 0, 1, 2, 30, np.iinfo(indices).max], indices)[:num_tokens]
    before = poisoned(spec, 4)
    expected = page_bytes(before)
    with jax.enable_x64(case["indices"] == "int64"):
        given = (query, key, value, before, slots, positions, table)
        scales = {"k_scale": np.float32(0.37), "v_scale": np.float32(0.52)}
        rotated, cache = _rope(*given, is_neox=case["is_neox"], implementation=implementation, **scales)
        rotated, written = np.asarray(rotated), page_bytes(cache)
    assert_same_bytes(rotated, reference.rotate(query, table, positions, case["is_neox"]))
    rotated_key = reference.rotate(key, table, positions, case["is_neox"])
    assert_same_bytes(written, reference.write(expected, spec, rotated_key, value, slots, 0.37, 0.52))


@each_case(CASES, few={"head_size": [64, 80], "head_size_v": [None], "heads": [(6, 2)], "num_tokens": [2, 9]})
def test_bytes_are_those_of_rotating_and_writing(implementation, case):
    check(implementation, case)


@pytest.mark.full
@each_case(
    FEW_CASES,
    few={"input_dtype": ["float16", "bfloat16"], "head_size_v": [None], "layout": ["NHD"], "rotated": [0.5]},
)
def test_the_interpreted_kernel_writes_the_same_without_races(case):
    with interpret_mode(detect_races=True):
        check("mosaic", case)


@pytest.mark.full
@pytest.mark.parametrize(
    ("head_size", "num_tokens", "each"), [(128, 4, 1), pytest.param(64, 9, 2, marks=pytest.mark.full)]
)
def test_interpreted_programs_of_whole_tokens_write_the_same_without_races(head_size, num_tokens, each, monkeypatch):
    monkeypatch.setattr(launch_config, "PROGRAMS", 2)
    case = {axis: values[0] for axis, values in AXES.items()} | {"dtype": "bfloat16", "heads": (8, 8)}
    case |= {"input_dtype": "bfloat16", "head_size": head_size, "num_tokens": num_tokens}
    spec = simple_spec(KVCacheDType.BFLOAT16, num_kv_heads=8, head_size=head_size)
    assert launch_config.WriteConfig.choose(spec, num_tokens, rotates=True) == launch_config.WriteConfig(each)
    with interpret_mode(detect_races=True):
        check("mosaic", case)


@pytest.mark.gpu
@matrix(
    {"dtype": STORED_KV_CACHE_DTYPES, "is_neox": [True, False], "num_tokens": [64, 1000, 9001]},
    valid=lambda case: case["dtype"] in FEW_DTYPES or case["num_tokens"] == 9001,
    pairs=True,
)
def test_on_a_gpu_many_tokens_have_the_bytes_of_xla(dtype, is_neox, num_tokens):
    """Programs of several tokens, of which the last takes some of the one before."""
    spec = simple_spec(dtype, num_kv_heads=8, head_size=128, block_size=16)
    bfloat16 = INPUT_DTYPES["bfloat16"]
    key, value = kv_tokens(spec, num_tokens, bfloat16)
    query = tokens(np.random.default_rng(5), (num_tokens, 32, 128), bfloat16)
    num_blocks = num_tokens // 16 + 2
    slots = np.random.default_rng(1).permutation(num_blocks * 16)[:num_tokens].astype(np.int32)
    positions = np.random.default_rng(2).integers(0, reference.POSITIONS, num_tokens).astype(np.int32)
    got = {}
    for implementation in ("xla", "mosaic"):
        given = (query, key, value, poisoned(spec, num_blocks), slots, positions, reference.cos_sin(128))
        with jax.default_device(jax.devices("cpu")[0]) if implementation == "xla" else contextlib.nullcontext():
            rotated, cache = _rope(*given, is_neox=is_neox, implementation=implementation, unique_slots=True)
            got[implementation] = np.asarray(rotated), page_bytes(cache)
    for mine, expected in zip(got["mosaic"], got["xla"], strict=True):
        assert_same_bytes(mine, expected)


def test_tokens_may_have_two_dimensions():
    spec = simple_spec()
    key, value = kv_tokens(spec, 6)
    query, table = tokens(np.random.default_rng(5), (6, 4, 64), np.float32), reference.cos_sin(64)
    slots, positions = np.arange(6, dtype=np.int32), np.arange(6, dtype=np.int32)
    flat = _rope(query, key, value, poisoned(spec, 2), slots, positions, table)
    folded = [x.reshape(2, 3, *x.shape[1:]) for x in (query, key, value, slots, positions)]
    got = _rope(*folded[:3], poisoned(spec, 2), *folded[3:], table)
    assert got[0].shape == (2, 3, 4, 64)
    assert_same_bytes(np.asarray(got[0]).reshape(6, 4, 64), np.asarray(flat[0]))
    assert_same_bytes(page_bytes(got[1]), page_bytes(flat[1]))


def test_one_layer_of_several_is_written():
    spec = simple_spec()
    cache = KVCache.allocate(spec, 2, num_layers=3)
    key, value = kv_tokens(spec, 6)
    query, table = tokens(np.random.default_rng(5), (6, 4, 64), np.float32), reference.cos_sin(64)
    slots = positions = np.arange(6, dtype=np.int32)
    _, written = _rope(query, key, value, cache, slots, positions, table, layer=1)
    rotated = reference.rotate(key, table, positions, True)
    expected = reshape_and_cache_flash(rotated, value, KVCache.allocate(spec, 2, num_layers=3), slots, layer=1)
    assert_same_bytes(page_bytes(written), page_bytes(expected))


GOOD: dict[str, Any] = {
    "query": np.zeros((3, 4, 64), np.float32),
    "key": np.zeros((3, 2, 64), np.float32),
    "value": np.zeros((3, 2, 64), np.float32),
    "slot_mapping": np.arange(3, dtype=np.int32),
    "positions": np.arange(3, dtype=np.int32),
    "cos_sin_cache": reference.cos_sin(64),
}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"query": np.zeros((3, 4, 32), np.float32)}, KVCacheValueError, "query: got shape (3, 4, 32), expected"),
        ({"query": np.zeros((3, 4, 64), np.float16)}, KVCacheTypeError, "query: got dtype float16, expected float32"),
        ({"positions": np.arange(4)}, KVCacheValueError, "positions: got shape (4,), expected [num_tokens=3]"),
        ({"positions": np.zeros(3)}, KVCacheTypeError, "positions: got dtype float64, expected one of int32, int64"),
        ({"cos_sin_cache": np.zeros((9, 63), np.float32)}, KVCacheValueError, "cos_sin_cache: got shape (9, 63)"),
        ({"cos_sin_cache": np.zeros((9, 66), np.float32)}, KVCacheValueError, "even rot_dim of 2 to head_size=64"),
        ({"cos_sin_cache": np.zeros((0, 64), np.float32)}, KVCacheValueError, "cos_sin_cache: got shape (0, 64)"),
        ({"is_neox": 1}, KVCacheTypeError, "is_neox: got 1 of type int, expected a bool"),
    ],
)
def test_invalid_arguments_are_refused_by_name(wrong, error, message):
    with pytest.raises(error) as raised:
        rope_and_cache(cache=KVCache.allocate(simple_spec(), 2), **GOOD | wrong)
    assert message in str(raised.value)


def test_checked_mode_names_a_position_without_a_row():
    cache = KVCache.allocate(simple_spec(), 2)
    padded = {
        "slot_mapping": np.array([4, -1, 5], np.int32),
        "positions": np.array([0, 99, reference.POSITIONS], np.int32),
    }
    rope_and_cache(cache=cache, **GOOD | padded)
    with (
        checked(),
        pytest.raises(
            KVCacheValueError, match=rf"positions\[2\]: got {reference.POSITIONS}, expected between 0 and 49"
        ),
    ):
        rope_and_cache(cache=cache, **GOOD | padded)


COMPILED = pairwise(
    {
        "dtype": [dtype.value for dtype in KERNEL_DTYPES],
        "input_dtype": ["float16", "bfloat16"],
        "is_neox": [True, False],
        "heads": [(1, 1), (8, 2), (32, 8), (15, 3)],
        "head_size": [64, 80, 128, 256],
        "rotated": [1.0, 0.5],
        "num_tokens": [1, 64, 9001],
        "target": list(gpu_compile.TARGETS),
    },
    lambda case: True,
)


# Runs of 20 elements divide so that a thread has of each head its own columns: more than it has registers for, in
# programs of one token, which load all of it first.
SPILLS = {("b200", (15, 3), 80, 0.5): 368}


def _rope_of_three(tokens: Any, cache: KVCache, indices: Any, table: Any, is_neox: bool) -> Any:
    return rope_and_cache(*tokens, cache, *indices, table, is_neox=is_neox, unique_slots=True, implementation="mosaic")


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@each_case(COMPILED, few={"dtype": ["nvfp4"], "heads": [(8, 2)], "num_tokens": [64], "target": ["h100"]})
def test_it_is_one_kernel_in_place_without_spills(case):
    spec = simple_spec(
        KVCacheDType(case["dtype"]), num_kv_heads=case["heads"][1], head_size=case["head_size"], block_size=16
    )
    num_tokens, dtype = case["num_tokens"], INPUT_DTYPES[case["input_dtype"]]
    rows = [
        jax.ShapeDtypeStruct((num_tokens, heads, spec.head_size), dtype) for heads in (*case["heads"], case["heads"][1])
    ]
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(1000), spec.array_dtype), spec)
    indices = [jax.ShapeDtypeStruct((num_tokens,), jnp.int32)] * 2
    table = jax.ShapeDtypeStruct((4096, rounded_rot_dim(case)), jnp.float32)
    rope = functools.partial(_rope_of_three, is_neox=case["is_neox"])
    program = gpu_compile.compile_for(case["target"], rope, rows, cache, indices, table, donate_argnums=1)
    assert program.device_ops == ("custom-call",)
    assert program.alias_size == spec.page_size_bytes * 1000
    [kernel] = program.kernels
    assert kernel.spill_bytes <= SPILLS.get((case["target"], case["heads"], case["head_size"], case["rotated"]), 0)
