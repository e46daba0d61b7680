"""The GPU's way of ragged_paged_attention: interpreted, and compiled for H100 and B200."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import attention_suite as suite
from support import gpu_compile, ragged_suite
from support.gpu_compile import TARGETS, compile_for
from support.helpers import simple_spec
from support.interpret_mode import interpret_mode
from support.ragged_suite import INTERPRETS_JOINS

from kvjax import KVCache, KVCacheDType, ragged_paged_attention, reshape_and_cache_flash
from kvjax.kernels.attention import choice
from kvjax.kernels.target import Target, tracing_for
from kvjax.ops import ragged_kernels

STATIC = ragged_suite.STATIC


def interpreted(*args: Any, **options: Any) -> Any:
    attend = functools.partial(ragged_paged_attention, return_lse=True, implementation="mosaic")
    with interpret_mode():
        return jax.tree.map(np.asarray, jax.jit(attend, static_argnames=STATIC)(*args, **options))


@INTERPRETS_JOINS
@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"sinks": True, "scales": "scalar"},
        {"window": 5},
        {"cap": 5.0},
        {"dtype": "int8_per_token_head"},
        {"tree": True, "tree_rows": 4, "window": 5},
        pytest.param({"dtype": "int8_k_nvfp4_v", "scales": "scalar"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_interpreted_attention_matches_float64(options):
    lengths, q_lens = (30, 7, 0, 3), (11, 1, 0, 3)
    case = ragged_suite.ragged(
        q_lens, lengths, **{"dtype": "nvfp4", "num_kv_heads": 1, "head_size": 32, "block_size": 8, **options}
    )
    problem = ragged_suite.build(case)
    suite.assert_right(problem, *ragged_suite.run(problem, interpreted), lse_factor=64, max_factor=1.5)


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 6])
def test_interpreted_trees_of_different_sizes_match_float64(window, monkeypatch):
    """In three passes over the pages, with padding that must not reach further back than the trees."""
    monkeypatch.setattr(choice, "MAX_TILES", 2)  # less to compile
    case = ragged_suite.ragged(
        (9, 1, 4, 0, 3), (40, 21, 17, 0, 2), dtype="bfloat16", num_kv_heads=1, head_size=32, group=4, block_size=8,
        tree=True, tree_rows=9, window=window,
    )  # fmt: skip
    problem = ragged_suite.build(case)
    options = problem.options | {"max_prompts": 0}
    results = ragged_suite.run(dataclasses.replace(problem, options=options), interpreted)
    suite.assert_right(problem, *results, max_factor=1.5)


def rows_of_both_kernels(dtype: str, query_dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The results of a sequence's last 8 rows, of a prompt of 40 and one by one."""
    spec = simple_spec(KVCacheDType(dtype), num_kv_heads=1, head_size=64, block_size=16)
    rng, num_tokens = np.random.default_rng(0), 150
    query, key, value = (jnp.asarray(rng.standard_normal((num_tokens, heads, 64)), query_dtype) for heads in (2, 1, 1))
    cache = reshape_and_cache_flash(key, value, KVCache.allocate(spec, 10), jnp.arange(num_tokens))
    table = np.tile(np.arange(10), (8, 1))
    lens = np.arange(num_tokens - 7, num_tokens + 1)
    attend = functools.partial(ragged_paged_attention, implementation="mosaic")
    prompt = attend(query[-40:], cache, table[:1], lens[-1:], np.int32([0, 40]), decode_q_len=0, max_prompts=1)
    decoded = attend(query[-8:], cache, table, lens, np.arange(9), max_q_len=1)
    return np.asarray(prompt[-8:], np.float32), np.asarray(decoded, np.float32)


@INTERPRETS_JOINS
@pytest.mark.parametrize(
    ("dtype", "query_dtype"),
    [
        ("bfloat16", jnp.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("float16", jnp.float16), ("fp8_e4m3", jnp.bfloat16), ("nvfp4", jnp.bfloat16))
        ),
    ],
)
def test_interpreted_a_row_of_a_prompt_has_the_bits_that_it_has_decoding(dtype, query_dtype):
    """But for sums in another order: weights are rounded alike, though relative to other logits."""
    with interpret_mode(), tracing_for(Target(2)):
        prompt, decoded = rows_of_both_kernels(dtype, query_dtype)
    assert np.mean(prompt == decoded) > 0.98


@INTERPRETS_JOINS
@pytest.mark.full
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0)], ids=["query", "cache", "table"])
def test_interpreted_under_vmap_calls_share_nothing_that_they_store_to(axes):
    """Also not the queue of items, on one multiprocessor that takes those of two prompts."""
    spec, rng = (
        simple_spec(KVCacheDType.BFLOAT16, num_kv_heads=1, head_size=16, block_size=16),
        np.random.default_rng(0),
    )

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    caches = [
        reshape_and_cache_flash(normal(64, 1, 16), normal(64, 1, 16), KVCache.allocate(spec, 4), jnp.arange(64))
        for _ in range(2)
    ]
    tables = jnp.array([[[0, 1, 2, 3], [3, 2, 1, 0]], [[1, 2, 3, 0], [2, 3, 0, 1]]])
    both = normal(2, 40, 1, 16), jax.tree.map(lambda *kv: jnp.stack(kv), *caches), tables
    args = [x if axis == 0 else jax.tree.map(lambda y: y[0], x) for x, axis in zip(both, axes, strict=True)]
    lens, bounds = jnp.array([60, 50]), jnp.array([0, 22, 40])

    def mapped(implementation: str) -> Any:
        one = functools.partial(ragged_paged_attention, implementation=implementation, decode_q_len=0, max_prompts=2)
        return jax.jit(jax.vmap(lambda query, cache, table: one(query, cache, table, lens, bounds), axes))(*args)

    with interpret_mode(), tracing_for(Target(1)):
        got = np.asarray(mapped("mosaic"), np.float32)
    np.testing.assert_allclose(got, np.asarray(mapped("xla"), np.float32), atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "nvfp4"])
def test_a_row_of_a_prompt_has_the_bits_that_it_has_decoding(dtype):
    prompt, decoded = rows_of_both_kernels(dtype, jnp.bfloat16)
    assert np.mean(prompt == decoded) > 0.95


def attend(query: Any, cache: KVCache, table: Any, lens: Any, bounds: Any, layer: Any = None, **options: Any) -> Any:
    return ragged_paged_attention(
        query, cache, table, lens, bounds, layer=layer, return_lse=True, implementation="mosaic", **options
    )


def arguments(dtype: str, num_seqs: int, num_tokens: int, num_layers: int | None = None, **changes: Any) -> list[Any]:
    spec = simple_spec(KVCacheDType(dtype), **{"block_size": 16, "num_kv_heads": 8, "head_size": 128} | changes)
    shape = spec.cache_shape(4096)
    shape = shape if num_layers is None else (shape[0], num_layers, *shape[1:])
    cache = KVCache(jax.ShapeDtypeStruct(shape, spec.array_dtype), spec, num_layers=num_layers)
    query = jax.ShapeDtypeStruct((num_tokens, 4 * spec.num_kv_heads, spec.head_size), jnp.bfloat16)
    indices = [(num_seqs, 256), (num_seqs,), (num_seqs + 1,), *([()] if num_layers else [])]
    return [query, cache, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in indices)]


@pytest.mark.parametrize("query_quantization", [False, True])
def test_it_lowers_with_64_bit_integers(query_quantization):
    run = functools.partial(attend, max_q_len=100, max_prompts=2, query_quantization=query_quantization)
    with jax.enable_x64(True):
        lowered = jax.jit(run).trace(*arguments("nvfp4", 4, 200)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in lowered


ALL_TARGETS = [
    pytest.param(name, marks={"h100": (), "b200": pytest.mark.nightly}.get(name, pytest.mark.full)) for name in TARGETS
]


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize(
    ("dtype", "changes", "options"),
    [
        ("nvfp4", {}, {"max_q_len": 512, "max_prompts": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("bfloat16", {}, {"max_q_len": 512, "max_prompts": 2, "sliding_window": 256}),
                ("fp8_e4m3", {"layout": "HND", "num_layers": 3}, {"max_q_len": 300, "max_prompts": 1}),
                ("int8_per_token_head", {}, {"max_q_len": 512, "max_prompts": 2}),
                ("fp8_e4m3", {}, {"max_prompts": 2, "tree_mask": np.tri(8, dtype=bool), "sliding_window": 256}),
            )
        ),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("nvfp4", {"v_scale_layout": "swizzled"}, {"max_q_len": 512, "logits_soft_cap": 30.0}),
                ("nvfp4", {}, {"max_q_len": 4}),
                ("nvfp4", {}, {"decode_q_len": 4}),
                ("nvfp4", {}, {"max_q_len": 512, "max_prompts": 2, "tree_mask": np.tri(8, dtype=bool)}),
            )
        ),
    ],
    ids=str,
)
def test_it_compiles_and_the_prompt_kernel_copies_nothing(target, dtype, changes, options):
    program = compile_for(target, functools.partial(attend, **options), *arguments(dtype, 16, 1024, **changes))
    is_kernel = target == "h100" and options != {"max_q_len": 4}
    assert sum("prompt_attention" in kernel.name for kernel in program.kernels) == is_kernel
    copied = re.findall(r" = \w+\[([\d,]*)\]\S* copy\(", program.hlo)
    sizes = [int(np.prod([int(size) for size in dims.split(",") if size])) for dims in copied]
    assert not is_kernel or max(sizes, default=0) < 4096, "an array is copied"


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
def test_a_share_of_the_heads_is_attended_to_without_communication():
    mesh = AbstractMesh((8,), ("tensor",), (AxisType.Auto,))
    query, cache, *rest = arguments("nvfp4", 4, 512)

    def on(x: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*axes)))

    kv = on(cache.kv, None, None, None, "tensor")
    args = on(query, None, "tensor"), KVCache(kv, cache.spec, kv.sharding), *(on(x) for x in rest)
    program = compile_for("b200", functools.partial(attend, max_q_len=256, max_prompts=1), *args)
    assert not program.collectives


@pytest.mark.parametrize("query_quantization", [False, True])
def test_it_lowers_with_64_bit_integers_and_without_rank_promotion(query_quantization):
    run = functools.partial(attend, max_q_len=100, max_prompts=2, query_quantization=query_quantization)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        traced = jax.jit(run).trace(*arguments("nvfp4", 4, 200))
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    # For products in fp8 one finds what to divide by.
    assert lowered.count("mosaic_gpu_v2") == 5 + query_quantization


@pytest.mark.parametrize(
    ("axes", "window"),
    [((0, 0, None, None, None), None), ((1, None, 0, 0, 0), 64)],
)
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.full
def test_under_vmap_no_call_is_repeated(axes, window, capability, monkeypatch):
    monkeypatch.setattr(ragged_kernels, "current", lambda: Target(compute_capability=capability))
    jax.clear_caches()  # of what was traced for another target

    def batched(x: Any, axis: int | None) -> Any:
        shape = x.shape if axis is None else (*x.shape[:axis], 3, *x.shape[axis:])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    run = functools.partial(attend, max_q_len=100, max_prompts=2, sliding_window=window)
    args = [
        jax.tree.map(functools.partial(batched, axis=axis), x)
        for x, axis in zip(arguments("nvfp4", 4, 200), axes, strict=True)
    ]
    traced = jax.jit(jax.vmap(run, in_axes=axes)).trace(*args)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    # The decode kernel, its merge and the gather; on Hopper also what joins rows, and the prompt kernel.
    assert lowered.count("mosaic_gpu_v2") == (5 if capability == (9, 0) else 3)
