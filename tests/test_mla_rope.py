"""`rope_and_cache_mla`: the bytes of rotating and then writing, by XLA and by the kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gpu_compile
from support.gpu_compile import TARGETS, compile_for
from support.helpers import INPUT_DTYPES, assert_same_bytes, cache_from_bytes, matrix, page_bytes
from support.interpret_mode import interpret_mode
from support.mla_cases import spec_of

import kvjax
from kvjax import (
    MLA_KV_CACHE_DTYPES,
    KVCache,
    KVCacheTypeError,
    KVCacheValueError,
    MLAAttentionSpec,
    concat_and_cache_mla,
    quant,
    rope_and_cache_mla,
)
from kvjax.kernels.write import launch_config

NAMES = [dtype.value for dtype in MLA_KV_CACHE_DTYPES]
SLOTS = np.array([3, -1, 30, 8, 3, 99, 9, 10, 11], np.int32)
POSITIONS = np.array([0, 5, 19, 7, 2, 11, 20, -1, 3], np.int32)
"""Two of them not of the table, which are clamped."""


def poisoned(spec: MLAAttentionSpec) -> KVCache:
    return cache_from_bytes(np.full((4, spec.page_size_bytes), 0xAB, np.uint8), spec, 4)


def given(spec: MLAAttentionSpec, dtype: Any, rot_dim: int, num_heads: int = 3) -> dict[str, Any]:
    rng, (rank, rope) = np.random.default_rng(0), spec.part_sizes
    shapes = {"q_pe": (9, num_heads, rope), "kv_c": (9, rank), "k_pe": (9, rope)}
    rows = {name: rng.standard_normal(shape).astype(np.float32).astype(dtype) for name, shape in shapes.items()}
    angles = rng.uniform(0, 6.28, (20, rot_dim // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return rows | {"slot_mapping": SLOTS, "positions": POSITIONS, "cos_sin_cache": table}


def rotated_first(call: dict[str, Any], is_neox: bool, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rotates, and writes after."""
    rows = jnp.asarray(call["cos_sin_cache"])[np.clip(POSITIONS, 0, 19)]
    cos, sin = jnp.split(rows, 2, axis=1)
    q_pe, k_pe = (quant.rotate(jnp.asarray(x), cos, sin, is_neox) for x in (call["q_pe"], call["k_pe"][:, None]))
    written = concat_and_cache_mla(call["kv_c"], k_pe[:, 0], call["cache"], SLOTS, implementation="xla", **options)
    return np.asarray(q_pe), page_bytes(written)


def check(implementation: str | None, name: str, rope: tuple[int, int], dtype: Any, is_neox: bool) -> None:
    spec = spec_of(name, (128, rope[0]))
    call = given(spec, dtype, rope[1]) | {"cache": poisoned(spec)}
    expected = rotated_first(call, is_neox, scale=0.037)
    q_pe, cache = rope_and_cache_mla(**call, is_neox=is_neox, scale=0.037, implementation=implementation)
    for got, want in zip((np.asarray(q_pe), page_bytes(cache)), expected, strict=True):
        assert_same_bytes(got, want)


AXES = {"name": NAMES, "rope": [(16, 16), (64, 64), (32, 16)], "input_dtype": [*INPUT_DTYPES], "is_neox": [True, False]}


@matrix(AXES, few={"name": ["bfloat16", "nvfp4"], "input_dtype": ["bfloat16"]}, pairs=True)
def test_bytes_are_those_of_rotating_and_writing(name, rope, input_dtype, is_neox):
    check(None, name, rope, INPUT_DTYPES[input_dtype], is_neox)


@matrix(
    AXES | {"programs": [264, 2]},
    few={"name": ["fp8_e4m3", "fp8_ds_mla", "nvfp4"], "rope": [(32, 16)], "input_dtype": ["bfloat16"]},
)
def test_the_interpreted_kernel_writes_the_same(name, rope, input_dtype, is_neox, programs, monkeypatch):
    """Without races; by programs of one token and of several."""
    monkeypatch.setattr(launch_config, "PROGRAMS", programs)
    with interpret_mode(detect_races=True):
        check("mosaic", name, rope, INPUT_DTYPES[input_dtype], is_neox)


def rotate_and_write(q_pe, kv_c, k_pe, cache, slot_mapping, positions, table):
    return rope_and_cache_mla(
        *(q_pe, kv_c, k_pe, cache, slot_mapping, positions, table),
        is_neox=False,
        unique_slots=True,
        implementation="mosaic",
    )


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@matrix(
    {"name": NAMES, "target": list(TARGETS), "num_tokens": [1, 9000]},
    few={"name": ["nvfp4"], "target": ["h100"], "num_tokens": [9000]},
    pairs=True,
)
def test_it_is_one_kernel_in_place_without_spills(name: str, target: str, num_tokens: int):
    spec = spec_of(name, (512, 64), 64)
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(32), spec.array_dtype), spec)
    rows = [jax.ShapeDtypeStruct((num_tokens, *shape), jnp.bfloat16) for shape in ((16, 64), (512,), (64,))]
    index, table = jax.ShapeDtypeStruct((num_tokens,), jnp.int32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    program = compile_for(target, rotate_and_write, *rows, cache, index, index, table, donate_argnums=3)
    assert program.device_ops.count("custom-call") == 1
    assert [kernel.spill_bytes for kernel in program.kernels] == [0]
    assert program.alias_size == 32 * spec.page_size_bytes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_pe": np.ones((9, 3, 32), np.float32)}, KVCacheTypeError, "q_pe: got dtype float32, expected bfloat16"),
        ({"q_pe": np.ones((9, 3, 16), jnp.bfloat16)}, KVCacheValueError, r"q_pe: got shape \(9, 3, 16\), expected"),
        ({"positions": POSITIONS[1:]}, KVCacheValueError, r"positions: got shape \(8,\), expected \[num_tokens=9\]"),
        (
            {"cos_sin_cache": np.ones((20, 34), np.float32)},
            KVCacheValueError,
            r"cos_sin_cache: got shape \(20, 34\), expected .* rot_dim of 2 to qk_rope_head_dim=32",
        ),
        ({"is_neox": 1}, KVCacheTypeError, "is_neox: got 1 of type int, expected a bool"),
        ({"cache": poisoned(spec_of("bfloat16", (128, 0)))}, KVCacheValueError, "cache: got qk_rope_head_dim=0, expec"),
        (
            {"cache": kvjax.KVCache.allocate(kvjax.FullAttentionSpec(8, 1, 64, dtype="bfloat16"), 2)},
            KVCacheValueError,
            "rope_and_cache_mla: got a cache of keys and values",
        ),
    ],
)
def test_invalid_arguments_are_refused_by_name(changes: dict[str, Any], error: type[Exception], message: str):
    spec = spec_of("bfloat16", (128, 32))
    call = given(spec, jnp.bfloat16, 32) | {"cache": poisoned(spec)} | changes
    with pytest.raises(error, match=message):
        rope_and_cache_mla(**call)


def test_checked_mode_names_a_position_without_a_row():
    spec = spec_of("bfloat16", (128, 32))
    call = given(spec, jnp.bfloat16, 32) | {"cache": poisoned(spec), "slot_mapping": np.arange(9, dtype=np.int32)}
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=r"positions\[6\]: got 20, expected"):
        rope_and_cache_mla(**call)
