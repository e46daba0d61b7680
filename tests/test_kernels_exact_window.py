"""Exact windows on a GPU: both parts are attended to by kernels, interpreted and compiled for H100, and in place."""

from __future__ import annotations

import collections
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
from support import gpu_compile
from support.exact_windows import Case, Server, cuts_of, random_tokens
from support.gpu_compile import compile_for
from support.interpret_mode import interpret_mode

import kvjax
from kvjax import ExactWindow, KVCache, StepMetadata
from kvjax.kernels import attention
from kvjax.kernels.target import Target, tracing_for
from kvjax.ops.route import Query, route, why_not_both

NUM_ROWS, NUM_SEQS, MAX_BLOCKS = 1024, 16, 256


def step(
    query: Any, key: Any, value: Any, cache: KVCache, window: ExactWindow, metadata: StepMetadata, **options: Any
) -> Any:
    return kvjax.attend(query, key, value, cache, metadata, exact_window=window, unique_slots=True, **options)


def abstract(cache: KVCache, num_blocks: int) -> KVCache:
    spec = cache.spec
    return KVCache(jax.ShapeDtypeStruct(spec.cache_shape(num_blocks), spec.array_dtype), spec)


def arguments(num_tokens: int, max_q_len: int = 1, **changes: Any) -> list[Any]:
    spec = kvjax.FullAttentionSpec(16, 8, 128, **{"dtype": "nvfp4"} | changes)
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(4096), spec.array_dtype), spec)
    small = ExactWindow.allocate(spec, 1, 64, max_q_len=max_q_len)
    window = ExactWindow(abstract(small.ring, NUM_ROWS * small.blocks_per_row), 64, max_q_len)
    shapes = (NUM_SEQS, MAX_BLOCKS), (NUM_SEQS,), (NUM_SEQS + 1,), (num_tokens,), (NUM_SEQS,)
    metadata = StepMetadata(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))
    query, key = (jax.ShapeDtypeStruct((num_tokens, heads, 128), jnp.bfloat16) for heads in (32, 8))
    return [query, key, key, cache, window, metadata]


DECODES = {"reshape_and_cache_flash": 1, "paged_attention": 1, "merge_paged_attention": 1}
"""A write to the pages and the ring, and an attention over both."""

CHUNKS = DECODES | {"reshape_and_cache_flash": 2, "gather_prompts": 2, "prompt_attention": 1, "join_rows": 1}
"""The step's tokens are also written to the copy of the ring's rows; rows of decodes are joined with prompts'."""


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize(
    ("num_tokens", "options", "kernels"),
    [
        pytest.param(NUM_SEQS, {"max_q_len": 1}, DECODES, marks=pytest.mark.full),
        pytest.param(4 * NUM_SEQS, {"max_q_len": 4}, DECODES, marks=pytest.mark.full),
        pytest.param(1024 + NUM_SEQS, {"max_q_len": 1024, "max_prompts": 1}, CHUNKS, marks=pytest.mark.full),
    ],
    ids=["decodes", "drafts", "chunks"],
)
def test_a_step_is_computed_by_kernels_and_updates_the_ring_in_place(
    num_tokens: int, options: Any, kernels: dict[str, int]
):
    args = arguments(num_tokens, max_q_len=4 if options["max_q_len"] == 4 else 1)
    run = functools.partial(step, implementation="mosaic", **options)
    program = compile_for("h100", run, *args, donate_argnums=(3, 4))
    names = [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in program.kernels]
    assert collections.Counter(names) == kernels
    assert program.alias_size == sum(x.size * x.dtype.itemsize for x in (args[3].kv, args[4].ring.kv))
    copied = re.findall(r" = \w+\[([\d,]*)\]\S* copy\(", program.hlo)
    assert max((np.prod([int(size) for size in dims.split(",") if size]) for dims in copied), default=0) < 4096


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize(
    ("num_tokens", "options", "kernels"),
    [(NUM_SEQS, {"max_q_len": 1}, DECODES), (512 + NUM_SEQS, {"max_q_len": 512, "max_prompts": 1}, CHUNKS)],
    ids=["decodes", "chunks"],
)
def test_each_device_attends_with_its_heads_by_the_same_kernels(num_tokens: int, options: Any, kernels: dict[str, int]):
    mesh = AbstractMesh((2,), ("tensor",), (AxisType.Auto,))

    def on(x: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*axes)))

    def divided(cache: KVCache) -> KVCache:
        kv = on(cache.kv, None, None, None, "tensor")
        return KVCache(kv, cache.spec, kv.sharding)

    query, key, value, cache, window, metadata = arguments(num_tokens)
    rows = (on(x, None, "tensor") for x in (query, key, value))
    caches = divided(cache), dataclasses.replace(window, ring=divided(window.ring))
    run = functools.partial(step, implementation="mosaic", **options)
    program = compile_for("h100", run, *rows, *caches, jax.tree.map(on, metadata), donate_argnums=(3, 4))
    names = [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in program.kernels]
    assert collections.Counter(names) == kernels
    assert not program.collectives


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_no_part_is_left_to_xla(capability: tuple[int, int]):
    """For queries in the model dtype, of steps with prompts and without."""
    target = Target(compute_capability=capability)
    for dtype in kvjax.STORED_KV_CACHE_DTYPES:
        spec = kvjax.FullAttentionSpec(16, 2, 128, dtype=dtype)
        for of_part in (spec, ExactWindow.allocate(spec, 1, 64).ring.spec):
            for has_prompts in (False, True):
                found = route(of_part, Query(np.dtype(jnp.bfloat16), has_prompts=has_prompts), target)
                assert found.why_no_decode_kernel is None
                assert found.why_no_kernels is None
        both = spec, ExactWindow.allocate(spec, 1, 64).ring.spec
        assert why_not_both(both, [Query(np.dtype(jnp.bfloat16))] * 2, target) is None
        for query in (Query(np.dtype(np.float32)), Query(np.dtype(jnp.bfloat16), is_window_static=False)):
            assert why_not_both(both, [query] * 2, target) == route(spec, query, target).why_no_kernels is not None
        for invariant in (False, True):
            options = {"batch_invariant": invariant, "target": target}
            sizes = attention.BatchSizes(num_seqs=64, q_len=4, group=4, max_blocks=512)
            assert attention.why_not_both(both, sizes, 6, **options) is None
            reason = attention.why_not_both(both, sizes._replace(num_seqs=2**20), 6, **options)
            assert "indexed in int32; got 1048576 sequences" in str(reason)


@pytest.mark.full
def test_interpreted_prompts_without_a_row_see_no_exact_tokens():
    """As in XLA; their neighbours see theirs."""
    case = Case("bfloat16", size=6, num_kv_heads=1, model_dtype="bfloat16", query_dtype="bfloat16")
    tokens, _ = random_tokens(case, (15, 9))

    class WithoutARow(Server):
        def attend(self, new: Any, step: StepMetadata, **options: Any) -> Any:
            return super().attend(
                new, dataclasses.replace(step, window_rows=np.array([0, -1, -1], np.int32)), **options
            )

    def serve(implementation: str) -> Any:
        server = WithoutARow(case, tokens, num_tokens=(4, 20), max_length=16)
        return server.step([11, 9], implementation=implementation)

    expected = serve("xla")
    with interpret_mode(), tracing_for(Target(1)):
        got = serve("mosaic")
    for one, of_one in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, of_one, atol=0.03, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Case(size=6, sinks=True),
        Case("fp8_e4m3", size=3, sliding_window=7, max_q_len=2, cap=3.0),
    ],
    ids=["nvfp4", "fp8"],
)
def test_interpreted_kernels_match_float64(case: Case):
    """A prompt whose first queries see nothing in pages, beside one shorter than the window; decodes and drafts."""
    changes = {"num_kv_heads": 1, "model_dtype": "bfloat16", "query_dtype": "bfloat16"}
    case = dataclasses.replace(case, **changes)
    tokens, want = random_tokens(case, (15, 3))
    with interpret_mode(), tracing_for(Target(1)):
        server = Server(case, tokens, num_tokens=(4, 12), max_length=16)
        got = server.serve([[11, 1], [case.max_q_len, 1]], implementation="mosaic")
    for one, of_one in zip(got, want, strict=True):
        np.testing.assert_allclose(one, of_one[: len(one)], atol=0.03, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(size=64),
        Case("fp8_k_nvfp4_v", size=16, num_kv_heads=1, group=4, sinks=True, layout="HND"),
        Case("int8_k_nvfp4_4over6_v", size=12, sliding_window=19, max_q_len=4, cap=3.0),
        Case("bfloat16", size=33, sliding_window=12, max_q_len=2),
    ],
    ids=["nvfp4", "fp8 keys", "int8 keys, drafts", "unquantized, a shorter window"],
)
def test_on_a_gpu_kernels_match_float64_wherever_chunks_are_cut(case: Case):
    changes = {"head_size": 64, "block_size": 16, "model_dtype": "bfloat16", "query_dtype": "bfloat16"}
    case = dataclasses.replace(case, **changes)
    lengths = (61, 9, 40)
    tokens, want = random_tokens(case, lengths)
    for sizes in ((61, 9, 40), (17, 3, 8), (case.max_q_len,) * 3):
        got = Server(case, tokens).serve(cuts_of(lengths, sizes), implementation="mosaic")
        for one, of_one in zip(got, want, strict=True):
            np.testing.assert_allclose(one, of_one, atol=0.03, rtol=0)
