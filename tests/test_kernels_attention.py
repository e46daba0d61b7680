"""The decode kernel: its parts against their definitions, the whole interpreted, and compiled for H100 and B200."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import attention_suite as suite
import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import Case
from gpu_compile import TARGETS, compile_for
from helpers import simple_spec
from interpret_mode import interpret_mode
from jax import lax

from kvjax import KVCache, KVCacheDType, UnsupportedError, paged_attention, quant
from kvjax.kernels.attention import choose, lanes, rows_a_pass, scratch, why_not
from kvjax.kernels.attention.formats import CONVERTED_WORDS, SERVED_DTYPES, Format
from kvjax.kernels.attention.problem import Problem
from kvjax.kernels.attention.stages import Ring
from kvjax.kernels.memory import PageMemory
from kvjax.kernels.registers import LANES, THREADS, WARPS

STATIC = ("sm_scale", "sliding_window", "logits_soft_cap")


def attend(query: Any, *args: Any, **options: Any) -> Any:
    run = jax.jit(functools.partial(paged_attention, return_lse=True, implementation="mosaic"), static_argnames=STATIC)
    with interpret_mode():
        return jax.tree.map(np.asarray, run(query, *args, **options))


@pytest.mark.parametrize(
    "case",
    [
        Case("nvfp4", lengths=(20, 0), num_kv_heads=2, window=19, sinks=True, cap=5.0, q_len=2),
        pytest.param(Case("fp8_e4m3", lengths=(37,), scales="per_head"), marks=pytest.mark.full),
        pytest.param(Case("float16", lengths=(20,), scales="scalar", group=5, q_len=4), marks=pytest.mark.full),
        pytest.param(Case("nvfp4", lengths=(1,), block_size=8, v_scale_layout="swizzled"), marks=pytest.mark.full),
        pytest.param(Case("fp8_e5m2", lengths=(37,), layout="HND"), marks=pytest.mark.full),
        pytest.param(Case("bfloat16", lengths=(37,), query_dtype="float16", block_size=8), marks=pytest.mark.full),
        pytest.param(Case("float16", lengths=(37,), head_size=80), marks=pytest.mark.full),
        pytest.param(Case("nvfp4", lengths=(37,), head_size=80, v_scale_layout="swizzled"), marks=pytest.mark.full),
        pytest.param(Case("nvfp4", lengths=(37,), head_size=128, query_dtype="float16"), marks=pytest.mark.full),
        pytest.param(Case("nvfp4", lengths=(37,), head_size=16, group=16), marks=pytest.mark.full),  # states fill more
    ],
    ids=str,
)
def test_interpreted_it_is_right(case):
    problem = suite.build(case)
    suite.assert_right(problem, *problem.run(attend))


def interpreted(function: Any, *registers: np.ndarray) -> list[np.ndarray]:
    """What the model of a primitive makes of registers."""
    with interpret_mode():
        return jax.tree.map(np.asarray, function(*map(jnp.asarray, registers)))


def halves(word: np.ndarray) -> np.ndarray:
    """The float16 in the lower and the upper half of words, `[..., 2]` float32."""
    return np.stack([word & 0xFFFF, word >> 16], axis=-1).astype(np.uint16).view(np.float16).astype(np.float32)


def decoded(words: np.ndarray, scale: float) -> np.ndarray:
    """`[THREADS, 8]`: the codes of words as kvjax.quant decodes them."""
    data = words.astype("<u4").view(np.uint8).reshape(THREADS, 4)
    scales = jnp.full((THREADS, 1), scale, jnp.float8_e4m3fn)
    both = jnp.concatenate([data, data], axis=1)  # a block has 8 bytes
    return np.asarray(quant.decode_nvfp4(both, scales, 1.0))[:, :8]


@pytest.mark.parametrize("scale", [1.0, 0.001953125, 448.0])
def test_each_code_of_a_key_is_decoded_exactly(scale):
    """Over all 256 pairs of codes in each place of a word, shifted and converted."""
    fmt = Format.of(KVCacheDType.NVFP4)
    low, high = np.divmod(np.arange(256, dtype=np.uint32), 16)
    for chunk in range(2):
        codes = (low | high << 4)[chunk * THREADS :][:THREADS] * np.uint32(0x01010101)
        word = codes ^ np.uint32(0x00F00F00)
        pair = np.full(THREADS, np.float16(scale).view(np.uint16), np.uint32) * np.uint32(0x10001)
        pairs = interpreted(lambda w, s: fmt.key_pairs([w] * 4, 16, [s, s]), word, pair)
        expected = decoded(word, scale)
        factors = fmt.key_factors(16)
        assert len(pairs) == len(fmt.key_dims(16)) == len(factors) == 16
        for got, dims, factor in zip(pairs, fmt.key_dims(16), factors, strict=True):
            both = halves(got) * np.float32(factor * fmt.factor)
            np.testing.assert_array_equal(both, expected[:, [dim % 8 for dim in dims]])
    assert CONVERTED_WORDS, "one of the two ways is not tested"


def test_each_code_of_a_value_is_decoded_exactly():
    fmt = Format.of(KVCacheDType.NVFP4)
    word = np.arange(THREADS, dtype=np.uint32) * np.uint32(0x02040811)
    scales = np.float16([0.5, 448.0]).view(np.uint16).astype(np.uint32)
    pair = np.full(THREADS, scales[0] | scales[1] << 16, np.uint32)
    pairs = interpreted(fmt.value_pairs, word, pair)
    first, second = decoded(word, 0.5), decoded(word, 448.0)
    for element, got in enumerate(pairs):
        expected = np.stack([first[:, element], second[:, element + 4]], axis=1)
        np.testing.assert_array_equal(halves(got) * np.float32(fmt.factor), expected)


@pytest.mark.parametrize("dtype", [KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2], ids=lambda dtype: dtype.value)
def test_each_fp8_byte_is_decoded_exactly(dtype):
    fmt = Format.of(dtype)
    data = np.arange(THREADS * 4, dtype=np.uint32).astype(np.uint8)
    word = data.view("<u4").astype(np.uint32)
    expected = np.asarray(data.view(dtype.info.storage_dtype), np.float32).reshape(THREADS, 4)
    pairs = interpreted(lambda w: fmt.key_pairs([w], 4, []), word)
    for got, dims in zip(pairs, fmt.key_dims(4), strict=True):
        np.testing.assert_array_equal(halves(got), expected[:, list(dims)])
    for element, got in enumerate(interpreted(lambda w: fmt.value_pairs(w, None), word)):
        np.testing.assert_array_equal(halves(got), expected[:, [element, element + 2]])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_model_of_a_product_multiplies_the_matrices_that_registers_hold(dtype):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (WARPS, 16, 16)), rng.integers(-8, 9, (WARPS, 16, 8))

    def words(pairs: np.ndarray) -> np.ndarray:  # [warps, 8, 4, 2]
        return lax.bitcast_convert_type(jnp.asarray(pairs, dtype), jnp.uint32).reshape(THREADS)

    def parts(matrix: np.ndarray) -> list[np.ndarray]:  # of [warps, rows, columns], rows in the threads' rows
        return [matrix[:, r : r + 8, c : c + 8].reshape(WARPS, 8, 4, 2) for c in (0, 8) for r in (0, 8)]

    left = [words(part) for part in parts(a)]
    right = [words(b.transpose(0, 2, 1)[:, :, k : k + 8].reshape(WARPS, 8, 4, 2)) for k in (0, 8)]
    zero = np.zeros(THREADS, np.float32)
    with interpret_mode():
        got = lanes.mma([jnp.asarray(zero)] * 4, left, right, dtype)
    got = np.stack([np.asarray(x).reshape(WARPS, 8, 4) for x in got], axis=-1)
    expected = (a @ b).reshape(WARPS, 2, 8, 4, 2)
    np.testing.assert_array_equal(got[..., :2], expected[:, 0])
    np.testing.assert_array_equal(got[..., 2:], expected[:, 1])


@pytest.mark.parametrize("half", [0, 1])
def test_the_model_of_both_halves_repeats_one(half):
    words = np.arange(THREADS, dtype=np.uint32) * np.uint32(0x02040811)
    expected = np.stack([words >> 16 * half & 0xFFFF] * 2, axis=-1).astype(np.uint16).view(np.uint32)[:, 0]
    np.testing.assert_array_equal(interpreted(lambda x: lanes.both_halves(x, half), words), expected)


def copied(
    which: str, rng: np.random.Generator, size: Any, condition: np.ndarray, where: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, np.ndarray]:
    """Shared memory after a copy of each thread to `where`; both sources, and which row and byte threads read."""
    sources = [rng.integers(1, 256, (4, 512), dtype=np.uint8) for _ in range(2)]
    row, offset = rng.integers(0, 4, THREADS), rng.integers(0, 16, THREADS) * 16
    if which == "copy_bulk":  # all threads of a warp have the same copy
        row, offset, where, condition = (
            np.repeat(x[:: THREADS // WARPS], LANES) for x in (row, offset, where, condition)
        )
    with interpret_mode():
        refs = [jax.new_ref(jnp.asarray(source)) for source in sources]
        shared = jax.new_ref(jnp.zeros(4096, jnp.uint8))
        registers = [jnp.asarray(x, jnp.int32) for x in (where, row, offset)]
        to, row_register, offset_register = registers
        size = size if isinstance(size, int) else jnp.asarray(size, jnp.int32)
        copy = lanes.Copy(1, to, 32, row_register, 512, offset_register, 64, size, jnp.asarray(condition))
        if which == "copy_bulk":
            lanes.copy_bulk(shared, refs, None, 0, [copy])
        else:
            lanes.copy_async(shared, refs, copy)
        return np.asarray(shared[...]), sources, row, offset


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_model_of_a_thread_s_copy_moves_its_bytes(size):
    rng = np.random.default_rng(size)
    condition, where = rng.random(THREADS) < 0.7, rng.permutation(THREADS) * 16
    got, sources, row, offset = copied("copy_async", rng, size, condition, where)
    expected = np.zeros_like(got)
    for thread in np.flatnonzero(condition):
        start = offset[thread] + 64
        expected[where[thread] + 32 :][:size] = sources[1][row[thread], start : start + size]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("sizes", [160, [16, 176, 32, 96]], ids=str)
def test_the_model_of_a_bulk_copy_moves_the_bytes_of_each_warp(sizes):
    rng = np.random.default_rng(0)
    condition, where = np.repeat([True, True, False, True], LANES), np.repeat(rng.permutation(WARPS) * 256, LANES)
    size = sizes if isinstance(sizes, int) else np.repeat(sizes, LANES)
    got, sources, row, offset = copied("copy_bulk", rng, size, condition, where)
    expected = np.zeros_like(got)
    for warp in (0, 1, 3):
        thread = warp * LANES
        length = sizes if isinstance(sizes, int) else sizes[warp]
        start = offset[thread] + 64
        expected[where[thread] + 32 :][:length] = sources[1][row[thread], start : start + length]
    np.testing.assert_array_equal(got, expected)


def test_the_largest_window_is_none():
    query, cache, table, lens = suite.build(Case(q_len=2)).args
    run = functools.partial(paged_attention, sliding_window=2**31 - 1)
    jax.jit(run).trace(query, cache, table, lens)  # which traces the kernel, on a CPU too


def test_what_it_cannot_serve_has_a_reason():
    spec = simple_spec(KVCacheDType.FLOAT32)
    assert why_not(spec) == "it reads no cache of dtype 'float32'"
    with pytest.raises(UnsupportedError, match="'mosaic' cannot serve this call: it reads no cache of dtype 'float32'"):
        suite.build(Case("float32")).run(functools.partial(paged_attention, implementation="mosaic"))
    with pytest.raises(UnsupportedError, match="its query is float16 or bfloat16; got float32"):
        suite.build(Case(query_dtype="float32")).run(functools.partial(paged_attention, implementation="mosaic"))


@pytest.mark.parametrize(
    ("dtype", "head_size", "head_size_v", "reason"),
    [
        ("float16", 40, 40, "16 elements of a key at once; got head_size=40"),
        ("fp8_e4m3", 64, 33, "values two bytes at once; got head_size_v=33, 33 bytes"),
        ("bfloat16", 1024, 1024, "64 rows of head_size=1024 and head_size_v=1024 fill shared memory"),
    ],
)
def test_rows_that_it_cannot_serve_have_a_reason_and_xla(dtype, head_size, head_size_v, reason):
    spec = simple_spec(KVCacheDType(dtype), num_kv_heads=1, head_size=head_size, head_size_v=head_size_v)
    assert reason in why_not(spec)
    problem = suite.build(Case(dtype, head_size=head_size, head_size_v=head_size_v, lengths=(3,)))
    with pytest.raises(UnsupportedError, match=reason):
        problem.run(functools.partial(paged_attention, implementation="mosaic"))
    suite.assert_right(problem, *problem.run(functools.partial(paged_attention, return_lse=True)))


SHARED_MEMORY = 227 * 1024
"""Bytes that a block of threads may have of an H100's."""


@pytest.mark.parametrize("dtype", SERVED_DTYPES, ids=lambda dtype: dtype.value)
def test_whatever_is_chosen_has_room_and_no_warp_waits_for_itself(dtype):
    for head_size, num_kv_heads, block_size, layout in itertools.product(
        (16, 64, 80, 256, 512), (1, 2, 3, 5, 8, 12), (8, 16, 784), ("NHD", "HND")
    ):
        shape = {"head_size": head_size, "num_kv_heads": num_kv_heads, "block_size": block_size, "layout": layout}
        spec = simple_spec(dtype, **shape)
        if why_not(spec) is not None:
            continue
        for max_blocks, rows in itertools.product((0, 8), {1, rows_a_pass(spec)}):
            memory = tuple(PageMemory(regions, spec.page_size_bytes, 256) for regions in spec.regions)
            problem = Problem(
                spec, memory, jnp.bfloat16, 1, rows * num_kv_heads, 1, max_blocks, max_blocks, (0, 0), 4, 1, False, 1.0,
                None, None, (1, 1), True, False,
            )  # fmt: skip
            config = choose(problem)
            buffer, barriers = scratch(problem, config)
            assert buffer + barriers <= SHARED_MEMORY - 1024, shape  # each begins at a multiple of 1,024
            assert barriers == 16 * config.slots > 0, shape
            ring = Ring(*([None] * 2), config.slots, *([None] * 9))
            assert 0 <= ring.ahead < config.slots, shape


COMPILED = [
    ("nvfp4", {}, {}),
    ("bfloat16", {}, {}),
    ("fp8_e4m3", {"layout": "HND", "num_layers": 4}, {"sliding_window": 1024, "logits_soft_cap": 50.0}),
    ("nvfp4", {"v_scale_layout": "swizzled", "head_size": 256, "num_kv_heads": 2}, {"q_len": 4}),
    ("fp8_e5m2", {"head_size": 80, "num_kv_heads": 3, "block_size": 784}, {}),
    ("float16", {"head_size": 64, "num_kv_heads": 32}, {"q_len": 8}),
]


def run(query: Any, cache: KVCache, table: Any, lens: Any, layer: Any = None, **options: Any) -> Any:
    return paged_attention(query, cache, table, lens, layer=layer, implementation="mosaic", **options)


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize(
    "target", ["h100", *(pytest.param(each, marks=pytest.mark.full) for each in TARGETS if each != "h100")]
)
@pytest.mark.parametrize(
    ("dtype", "spec", "options"),
    [COMPILED[0], *(pytest.param(*case, marks=pytest.mark.full) for case in COMPILED[1:])],
)
def test_it_compiles_without_spills(target, dtype, spec, options):
    spec, options = dict(spec), dict(options)
    num_layers, q_len = spec.pop("num_layers", None), options.pop("q_len", 1)
    spec = simple_spec(KVCacheDType(dtype), **{"block_size": 16, "num_kv_heads": 8, "head_size": 128} | spec)
    shape = spec.cache_shape(4096)
    shape = shape if num_layers is None else (shape[0], num_layers, *shape[1:])
    cache = KVCache(jax.ShapeDtypeStruct(shape, spec.array_dtype), spec, num_layers=num_layers)
    query = jax.ShapeDtypeStruct((64, q_len, 4 * spec.num_kv_heads, spec.head_size), jnp.bfloat16)
    table, lens = jax.ShapeDtypeStruct((64, 64), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.int32)
    layer = None if num_layers is None else jax.ShapeDtypeStruct((), jnp.int32)
    program = compile_for(target, functools.partial(run, **options), query, cache, table, lens, layer)
    attention = [kernel for kernel in program.kernels if kernel.name.startswith("paged_attention")]
    merges = [kernel for kernel in program.kernels if kernel.name.startswith("merge_paged_attention")]
    assert attention, "there is no kernel"
    assert len(attention) == len(merges)
    assert [kernel.spill_bytes for kernel in program.kernels] == [0] * len(program.kernels)
    for kernel in attention:  # bulk copies do not go by barriers alone
        made = kernel.ptx.index("fence.mbarrier_init.release.cluster;", kernel.ptx.index("mbarrier.init"))
        copied = kernel.ptx.find("cp.async.bulk.shared")
        assert copied < 0 or made < copied
        assert "fence.proxy.async.shared::cta; bar.sync 0;" in kernel.ptx or "st.shared" not in kernel.ptx
    # Nothing copies the cache.
    assert program.temp_size < 64 * 2**20
