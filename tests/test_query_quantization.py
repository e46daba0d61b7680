"""Products in fp8 (`query_quantization`): the gather, the prompt kernel and the option against their models in XLA."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_suite as suite
from support import gpu_compile, ragged_suite
from support import prompt_suite as of_prompts
from support.gpu_compile import compile_for
from support.helpers import assert_same_bytes
from support.interpret_mode import interpret_mode
from support.ragged_suite import INTERPRETS_JOINS

import kvjax
from kvjax import FullAttentionSpec, KVCache, KVCacheDType, StepMetadata, UnsupportedError, ragged_paged_attention
from kvjax.kernels import prompts
from kvjax.kernels.prompts import PromptConfig, PromptProblem, fp8
from kvjax.kernels.target import Target
from kvjax.kernels.warpgroups import in_order_of_products
from kvjax.ops.gather import token_mask, units_of_blocks

E4M3 = jnp.float8_e4m3fn
CONFIG = PromptConfig(128, 2)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("nvfp4", {"v_scale_layout": "swizzled", "layout": "HND", "block_size": 32}),
        pytest.param("nvfp4", {"head_size_v": 96}, marks=pytest.mark.nightly),
        pytest.param("fp8_e4m3", {"layout": "HND"}, marks=pytest.mark.full),
        pytest.param("fp8_k_nvfp4_4over6_v", {"head_size": 32}, marks=pytest.mark.nightly),
    ],
)
def test_keys_are_gathered_by_rows_and_values_transposed_each_rounded_once(dtype, changes):
    fields = {"block_size": 16, "num_kv_heads": 3, "head_size": 64, "dtype": KVCacheDType(dtype)} | changes
    spec, keys_of = FullAttentionSpec(**fields), jax.random.split(jax.random.key(0))
    num_tokens = 3 * spec.block_size - 5
    magnitudes = 2.0 ** jnp.arange(-8, 16, 8).reshape(1, 3, 1)  # of heads
    rows = [
        magnitudes * jax.random.normal(key, (num_tokens, 3, size), jnp.float32)
        for key, size in zip(keys_of, spec.head_sizes, strict=True)
    ]
    garbage = jnp.full_like(KVCache.allocate(spec, num_blocks=5).kv, 0xFF)
    cache = dataclasses.replace(KVCache.allocate(spec, num_blocks=5), kv=garbage)
    cache = kvjax.reshape_and_cache_flash(*rows, cache, spec.block_size + jnp.arange(num_tokens))
    table = jnp.array([[1, 2, 3], [9, 2, -1]], jnp.int32)
    lens, first = jnp.array([num_tokens, 2 * spec.block_size - 1], jnp.int32), jnp.array([5, 0], jnp.int32)
    units = units_of_blocks(cache, table, lens, first)
    ends, zero = jnp.array([num_tokens, 2 * spec.block_size], jnp.int32), jnp.zeros_like(lens)
    ends = jnp.minimum(ends, lens)
    fields = {"q_start": zero, "q_len": lens, "position": zero, "first_absent": zero, "end": ends}
    found = prompts.found_of(fields | {"first_block": zero, "first_seen": first}, jnp.int32(2))
    with interpret_mode():
        tiles = prompts.gather(prompts.LotPages(cache.kv, spec, table, found, prompts.TOKENS), np.dtype(E4M3))
    of_tokens = 3 * spec.block_size
    got = (
        jnp.moveaxis(tiles["keys"].reshape(2, 3, prompts.TOKENS, spec.head_size), 1, 2)[:, :of_tokens],
        tiles["values"].reshape(2, 3, spec.head_size_v, prompts.TOKENS)[..., :of_tokens],
    )
    one = {"k_scale": 1.0, "v_scale": 1.0, "dtype": jnp.float32, "implementation": "xla"}
    stored = kvjax.gather_kv(cache, table, lens, **one)
    of_rows = units[:, :, None, :, None]
    expected_keys, values = (fp8.rounded(x, unit) / unit for x, unit in zip(stored, of_rows, strict=True))
    values = values.at[0, :5].set(0.0)
    assert_same_bytes(np.float32(got[0]), np.float32(expected_keys))
    assert_same_bytes(np.float32(got[1]), np.float32(in_order_of_products(jnp.moveaxis(values, 1, 3))))
    is_present = np.asarray(token_mask(table, lens, 5, spec.block_size))
    bias = np.asarray(tiles["bias"]).reshape(2, -1)[:, :of_tokens]
    np.testing.assert_array_equal(bias, np.where(is_present, 0, -np.inf))
    for part, x in zip(spec.dtype.parts, got, strict=True):
        if part.byte_format is KVCacheDType.NVFP4:
            assert 150 <= np.abs(np.float32(x)).max() <= 448


@pytest.mark.parametrize(
    ("shapes", "problem", "config"),
    [
        ({"q_lens": (60,), "positions": (250,), "sinks": True, "query_dtype": jnp.bfloat16},
         PromptProblem(60, None, None), CONFIG),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (of_prompts.LENGTHS | {"heads": (4, 2)}, PromptProblem(70, 50, None),
                 PromptConfig(128, 3)),
                (of_prompts.LENGTHS | {"heads": (1, 1)}, PromptProblem(300, None, 5.0), PromptConfig(128, 2)),
                (of_prompts.LENGTHS, PromptProblem(70, None, None), PromptConfig(128, 2, 2)),
                ({"q_lens": (40,), "positions": (150,), "head_size": 96, "head_size_v": 32, "num_keys": 256},
                 PromptProblem(40, 33, 9.0), PromptConfig(128, 2)),
            )
        ),
    ],
)  # fmt: skip
def test_the_interpreted_kernel_matches_its_model(shapes, problem, config):
    of_prompts.check(of_prompts.operands(**{"query_dtype": np.float16} | shapes, dtype=E4M3), problem, config)


@pytest.mark.full
@pytest.mark.parametrize(("heads", "stages"), [((2, 1), 2), ((1, 1), 3)])
def test_warpgroups_that_compute_softmax_at_once_have_no_races(heads, stages):
    """In one thread block: interpret mode has no atomic addition."""
    args = of_prompts.operands(**of_prompts.LENGTHS, heads=heads, dtype=E4M3, query_dtype=jnp.bfloat16)
    config = PromptConfig(128, stages)
    of_prompts.check(args, PromptProblem(70, None, None), config, detect_races=True, multiprocessors=1)


def test_a_mean_of_equal_values_is_exact():
    """Which sums of weights that are not rounded would miss by up to 6%."""
    args = of_prompts.operands(
        (20,), (150,), num_keys=192, num_tokens=64, heads=(1, 1), dtype=E4M3, query_dtype=np.float16
    )
    args = args._replace(values=jnp.full_like(args.values, 1.75), v_scale=jnp.full(1, 2.0, jnp.float32))
    with interpret_mode():
        got, _ = of_prompts.run(args, PromptProblem(20, None, None), CONFIG, Target(1))
    np.testing.assert_array_equal(got[3:23], 3.5)


jitted = jax.jit(
    functools.partial(ragged_paged_attention, return_lse=True, query_quantization=True),
    static_argnames=ragged_suite.STATIC,
)


def interpreted(*args: Any, **options: Any) -> Any:
    with interpret_mode():
        return jax.tree.map(np.asarray, jitted(*args, **options, implementation="mosaic"))


def in_xla(*args: Any, **options: Any) -> Any:
    return jax.tree.map(np.asarray, jitted(*args, **options, implementation="xla"))


STEP = {"lengths": (90, 7, 0, 33), "q_lens": (20, 1, 0, 33)}
"""A chunk, a sequence that decodes, nothing, and a whole prompt."""

OPTIONS = [
    {"dtype": "nvfp4", "sinks": True, "scales": "scalar"},
    *(
        pytest.param(options, marks=pytest.mark.nightly)
        for options in (
            {"dtype": "fp8_e4m3", "scales": "per_head", "window": 21, "layout": "HND"},
            {"dtype": "nvfp4_4over6", "cap": 5.0, "query_dtype": "float16"},
            {"dtype": "fp8_k_nvfp4_v", "scales": "scalar", "window": 8},
        )
    ),
]


@INTERPRETS_JOINS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_interpreted_results_match_xla_whatever_unread_memory_holds(options):
    case = ragged_suite.ragged(**STEP, num_kv_heads=1, head_size=32, **options)
    problem = ragged_suite.build(case)
    got, want = ragged_suite.run(problem, interpreted), ragged_suite.run(problem, in_xla)
    for own, others in zip(got, want, strict=True):
        np.testing.assert_allclose(np.float32(np.concatenate(own)), np.float32(np.concatenate(others)), atol=1.6e-2)
    again = ragged_suite.run(ragged_suite.build(case, fill=suite.ZERO, garbage=(-1,)), interpreted)
    for own, others in zip(got, again, strict=True):
        assert_same_bytes(np.concatenate(own), np.concatenate(others))


@pytest.mark.parametrize("options", [x if isinstance(x, dict) else x.values[0] for x in OPTIONS], ids=str)
def test_errors_are_those_of_rounding_to_e4m3_and_decodes_have_none(options):
    problem = ragged_suite.build(ragged_suite.ragged(**STEP, **options))
    out, lse = ragged_suite.run(problem, in_xla)
    suite.assert_right(problem, out, lse, in_fp8=lambda q_len: q_len > 1)
    for seq, q_len in enumerate(STEP["q_lens"]):
        if q_len > 1:
            want = suite.expected(problem, seq).out
            assert 0.01 < np.sqrt(np.mean((np.float64(out[seq]) - want) ** 2) / np.mean(want**2)) < 0.07


@pytest.mark.parametrize(
    ("attend", "options"),
    [
        (in_xla, OPTIONS[0]),
        pytest.param(in_xla, OPTIONS[1].values[0], marks=pytest.mark.full),
        pytest.param(interpreted, OPTIONS[0], marks=[pytest.mark.full, INTERPRETS_JOINS]),
    ],
    ids=["XLA, nvfp4", "XLA, fp8_e4m3", "interpreted, nvfp4"],
)
def test_batch_invariant_results_have_the_same_bits_alone_and_in_a_batch(attend, options):
    """Its own divisor of NVFP4 included."""
    q_lens = (5, 18, 1)
    problem = ragged_suite.build(ragged_suite.ragged(q_lens, (40, 18, 7), num_kv_heads=1, head_size=32, **options))
    invariant = functools.partial(attend, batch_invariant=True, max_q_len=max(q_lens), decode_q_len=1)
    whole = ragged_suite.run(problem, invariant)
    suite.assert_right(problem, *whole, in_fp8=lambda q_len: q_len > 1)
    for order in ([0], [1, 0]) if attend is in_xla else ([0],):
        for got, want in zip(ragged_suite.rows_in_turn(problem, order, invariant), whole, strict=True):
            for seq, rows in zip(order, got, strict=True):
                assert_same_bytes(rows, want[seq])


@pytest.mark.parametrize("magnitude", [2.0**-5, 300.0])
def test_nvfp4_of_any_magnitude_has_the_same_error(magnitude):
    """A fixed unit would round small values to 0, and large ones would overflow."""
    case = ragged_suite.ragged((40,), (70,), dtype="nvfp4", num_kv_heads=1)
    [query], cache, table, lens = ragged_suite.build(case).args
    spec, slots = case.spec, 16 * jnp.asarray(table[0, :5]).repeat(16)[:70] + jnp.arange(70) % 16
    key, value = jax.random.normal(jax.random.key(0), (2, 70, 1, 64), jnp.float32)

    def attend(factor: float, **options: Any) -> np.ndarray:
        own = kvjax.reshape_and_cache_flash(key, factor * value, cache, slots)
        return np.float64(ragged_paged_attention(query, own, table, lens, jnp.array([0, 40]), **options)) / factor

    errors = [attend(x, query_quantization=True) - attend(x) for x in (1.0, magnitude)]
    ratio = np.sqrt(np.mean(errors[1] ** 2) / np.mean(errors[0] ** 2))
    assert 0.8 < ratio < 1.25
    assert spec.dtype is KVCacheDType.NVFP4


def test_attend_passes_query_quantization_on():
    spec = FullAttentionSpec(16, 1, 32, dtype=KVCacheDType.FP8_E4M3)
    query, key, value = jax.random.normal(jax.random.key(0), (3, 24, 1, 32), jnp.bfloat16)
    indices = {"slot_mapping": 16 + np.arange(24), "block_table": [[1, 2]], "seq_lens": [24], "cu_q_lens": [0, 24]}
    metadata = StepMetadata(**{name: jnp.asarray(x, jnp.int32) for name, x in indices.items()})
    outs = [
        kvjax.attend(query, key, value, KVCache.allocate(spec, 4), metadata, query_quantization=quantized)[0]
        for quantized in (False, True)
    ]
    direct = kvjax.reshape_and_cache_flash(key, value, KVCache.allocate(spec, 4), metadata.slot_mapping)
    sequences = metadata.block_table, metadata.seq_lens, metadata.cu_q_lens
    assert_same_bytes(outs[1], ragged_paged_attention(query, direct, *sequences, query_quantization=True))
    assert (outs[0] != outs[1]).any()


@pytest.mark.parametrize(
    ("fields", "query_dtype", "options", "message"),
    [
        ({"dtype": KVCacheDType.FP8_E5M2}, "bfloat16", {}, "got a cache with keys or values of fp8_e5m2"),
        ({"dtype": KVCacheDType.INT8_K_NVFP4_V}, "bfloat16", {}, "keys or values of int8_per_token_head"),
        ({"dtype": KVCacheDType.BFLOAT16}, "bfloat16", {}, "keys or values of bfloat16, expected fp8_e4m3, nvfp4"),
        ({"head_size": 80}, "bfloat16", {}, "got head size 80, expected a multiple of 32 up to 128"),
        ({"head_size_v": 256}, "bfloat16", {}, "got head size 256"),
        ({"block_size": 8}, "bfloat16", {}, "got block_size 8, expected a multiple of 16"),
        ({}, "float32", {}, "got a query of float32"),
        ({}, "bfloat16", {"sm_scale": -1.0}, "got sm_scale of 0 or less"),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_unsupported_caches_and_queries_are_refused(fields, query_dtype, options, message, implementation):
    spec = FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": KVCacheDType.NVFP4} | fields
    )
    cache = KVCache.allocate(spec, num_blocks=2)
    query = jnp.zeros((4, 1, spec.head_size), query_dtype)
    sequences = jnp.array([[1]]), jnp.array([4]), jnp.array([0, 4])
    with pytest.raises(UnsupportedError, match=f"query_quantization: .*{message}"):
        ragged_paged_attention(
            query, cache, *sequences, query_quantization=True, implementation=implementation, **options
        )
    with pytest.raises(kvjax.KVCacheTypeError, match="query_quantization"):
        ragged_paged_attention(query, cache, *sequences, query_quantization=1)


@pytest.mark.parametrize(
    ("dtype", "query_dtype", "option", "message"),
    [
        ("bfloat16", "bfloat16", True, "got a cache with keys or values of bfloat16"),
        ("nvfp4", "float32", True, "got a query of float32"),
        ("nvfp4", "bfloat16", "no", "got 'no' of type str"),
    ],
)
def test_beside_a_ring_that_has_all_that_queries_see_it_is_checked_too(dtype, query_dtype, option, message):
    spec = kvjax.SlidingWindowSpec(16, 1, 64, dtype=KVCacheDType(dtype), sliding_window=8)
    cache, window = KVCache.allocate(spec, 4), kvjax.ExactWindow.allocate(spec, 1, 64)
    query = jnp.zeros((4, 1, 64), query_dtype)
    step = StepMetadata(np.array([[1]]), np.array([4]), np.array([0, 4]), np.arange(16, 20), np.array([0]))
    with pytest.raises((UnsupportedError, kvjax.KVCacheTypeError), match=f"query_quantization: {message}"):
        kvjax.exact_window_attention(query, query, query, cache, window, step, query_quantization=option)


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize(
    ("dtype", "changes", "options"),
    [
        ("nvfp4", {}, {}),
        ("fp8_e4m3", {}, {"sliding_window": 256}),
        ("nvfp4_4over6", {"head_size": 64}, {"logits_soft_cap": 30.0}),
    ],
)
def test_compiled_no_register_is_spilled(dtype, changes, options):
    fields = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": KVCacheDType(dtype)} | changes
    spec = FullAttentionSpec(**fields)
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(512), spec.array_dtype), spec)
    query = jax.ShapeDtypeStruct((512, 32, spec.head_size), jnp.bfloat16)
    indices = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 256), (2,), (3,))]
    attend = functools.partial(
        ragged_paged_attention, query_quantization=True, implementation="mosaic", max_prompts=2, **options
    )
    kernels = {kernel.name: kernel for kernel in compile_for("h100", attend, query, cache, *indices).kernels}
    assert [kernel.spill_bytes for kernel in kernels.values()] == [0] * len(kernels)
    [attending] = [kernel for name, kernel in kernels.items() if "prompt_attention" in name]
    assert "e4m3.e4m3" in attending.ptx
    assert "serialized" not in attending.ptxas_log
    assert any("gather_prompts_fp8" in name for name in kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_on_a_gpu_the_kernel_matches_its_model(multiprocessors):
    shapes = of_prompts.LENGTHS | {"heads": (4, 2), "head_size": 128, "head_size_v": 64, "query_dtype": jnp.bfloat16}
    config = PromptConfig(128, 2)
    args = of_prompts.operands(**shapes, dtype=E4M3)
    limits = {"multiprocessors": multiprocessors, "on_gpu": True}
    of_prompts.check(args, PromptProblem(70, None, None), config, **limits)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "nvfp4", "sinks": True, "scales": "scalar"},
        {"dtype": "fp8_e4m3", "scales": "per_head"},
        {"dtype": "nvfp4_4over6", "window": 300},
        {"dtype": "fp8_k_nvfp4_v", "cap": 20.0},
    ],
    ids=str,
)
def test_on_a_gpu_errors_against_float64_are_those_of_rounding(options):
    problem = ragged_suite.build(ragged_suite.ragged(**ragged_suite.GRID, head_size=128, **options))
    by_kernels = functools.partial(
        ragged_paged_attention, return_lse=True, implementation="mosaic", query_quantization=True
    )
    found = ragged_suite.run(problem, jax.jit(by_kernels, static_argnames=ragged_suite.STATIC))
    suite.assert_right(problem, *found, in_fp8=lambda q_len: q_len > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["nvfp4", "fp8_e4m3"])
def test_on_a_gpu_results_match_xla(dtype):
    problem = ragged_suite.build(ragged_suite.ragged(**ragged_suite.GRID, dtype=dtype, head_size=128, sinks=True))
    by_kernels = functools.partial(
        ragged_paged_attention, return_lse=True, implementation="mosaic", query_quantization=True
    )
    got = ragged_suite.run(problem, jax.jit(by_kernels, static_argnames=ragged_suite.STATIC))
    for own, others in zip(got, ragged_suite.run(problem, in_xla), strict=True):
        own, others = (np.float32(np.concatenate(each)) for each in (own, others))
        np.testing.assert_allclose(own, others, atol=0.1)  # Hopper sums products in fp8 with some 14 bits
