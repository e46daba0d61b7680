"""ragged_paged_attention passes tests/support/attention_suite.py with as many query rows as each sequence has."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental import checkify
from support import attention_suite as suite
from support import prompt_model
from support.attention_suite import Attend, Case
from support.helpers import assert_same_bytes, simple_spec
from support.ragged_suite import (
    BUCKETS,
    GRID,
    OPTIONS,
    PADDING,
    STATIC,
    build,
    check,
    check_hole,
    ragged,
    rows_in_turn,
    run,
    slack,
    step_by_step,
)

import kvjax
from kvjax import (
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    UnsupportedError,
    paged_attention,
    ragged_paged_attention,
)
from kvjax.kernels.prompts import problem as prompt_problem
from kvjax.kernels.target import Target
from kvjax.ops import options, prompt_kernel, prompts, ragged_kernels, select
from kvjax.ops.attention import _attention_xla
from kvjax.ops.gather import gather_xla

_run = jax.jit(ragged_paged_attention, static_argnames=STATIC)
_decode = jax.jit(
    functools.partial(paged_attention, return_lse=True),
    static_argnames=("sm_scale", "sliding_window", "logits_soft_cap", "implementation"),
)


@pytest.fixture(
    params=[
        "xla",
        "hopper",
        pytest.param("blackwell", marks=pytest.mark.full),
        pytest.param("mosaic", marks=pytest.mark.gpu),
    ]
)
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Each implementation; and on the CPU those of GPUs with and without the prompt kernel, with XLA for kernels."""
    by_stand_ins = request.param in ("hopper", "blackwell")
    if by_stand_ins:
        monkeypatch.setattr(prompt_kernel.kernel, "attend", prompt_model.attend)
        monkeypatch.setattr(prompt_kernel.kernel, "join", prompt_model.join)
        capability = (9, 0) if request.param == "hopper" else (10, 0)
        monkeypatch.setattr(ragged_kernels, "current", lambda: Target(compute_capability=capability))
        monkeypatch.setattr(ragged_kernels, "attention_mosaic", _attention_xla)
        monkeypatch.setattr(prompts, "gather_mosaic", gather_xla)
        choose = select.choose

        def by_kernels(operation: str, asked: Any, candidates: Any, cache: KVCache) -> Any:
            is_ragged = operation == "ragged_paged_attention"
            return candidates.mosaic if is_ragged else choose(operation, asked, candidates, cache)

        monkeypatch.setattr(select, "choose", by_kernels)

    def attend(query: Any, *args: Any, **options: Any) -> Any:
        options |= {"return_lse": True, "implementation": None if by_stand_ins else request.param}
        # float32 queries are XLA's: the kernels take none.
        if query.dtype == np.float32:
            if by_stand_ins:
                pytest.skip("XLA serves it")
            options["implementation"] = None
        static = tuple((name, options.pop(name)) for name in STATIC if name in options)
        return jitted(static)(query, *args, **options)

    @functools.cache
    def jitted(static: Any) -> Any:  # not one of another test's, which may have traced other kernels
        return jax.jit(functools.partial(ragged_paged_attention, **dict(static)))

    attend.by_kernels = request.param != "xla"
    attend.has_invariant_prompts = not by_stand_ins  # XLA's bits for the model depend on shapes
    attend.has_prompt_kernel = request.param not in ("xla", "blackwell")
    return attend


@pytest.mark.parametrize(
    "case",
    [
        ragged(**GRID, dtype="nvfp4", scales="scalar"),
        ragged(**GRID, dtype="fp8_e4m3", scales="per_head", layout="HND", sinks=True, window=127),
        *(pytest.param(ragged(**GRID, **options), marks=pytest.mark.full) for options in OPTIONS),
    ],
    ids=str,
)
def test_attention_matches_float64_for_a_serving_step(attend, case):
    check(case, attend)


TREES = {"lengths": (132, 18, 63, 17, 0, 5, 40, 9), "q_lens": (1, 5, 29, 0, 0, 4, 40, 6), "tree": True, "tree_rows": 6}
"""Trees of one to six tokens beside two prompts."""


@pytest.mark.parametrize(
    "case",
    [
        ragged(**TREES, dtype="nvfp4", sinks=True),
        ragged(**TREES, dtype="fp8_e4m3", scales="per_head", layout="HND", window=5),
        ragged(**TREES, dtype="bfloat16", window=20, block_size=8, cap=30.0),
        pytest.param(ragged(**TREES, dtype="float32", query_dtype="float32", window=1), marks=pytest.mark.full),
        pytest.param(ragged(**(TREES | {"tree_rows": 35}), dtype="float16", query_dtype="float16", window=30)),
        pytest.param(ragged(**(TREES | {"tree_rows": 1}), dtype="nvfp4", window=3), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_attention_matches_float64_for_trees_beside_prompts(attend, case):
    check(case, attend)


def test_a_mask_for_more_tokens_than_the_step_has_is_cut(attend):
    problem = build(ragged((2, 1), (18, 17), dtype="bfloat16", tree=True, tree_rows=9, window=3))
    suite.assert_right(problem, *run(problem, attend, padding=0), **slack(problem.case, attend))


def test_trees_of_one_branch_match_causal_attention(attend):
    problem = build(ragged((1, 4, 20, 3), (30, 9, 50, 3), dtype="bfloat16", window=7))
    options = {"decode_q_len": 4, "max_prompts": 1}
    mask = np.ones((4, 4), bool)
    plain, of_trees = (
        run(dataclasses.replace(problem, options=problem.options | options | tree), attend)
        for tree in ({}, {"tree_mask": mask})
    )
    for got, expected in zip(of_trees, plain, strict=True):
        np.testing.assert_allclose(
            np.concatenate(got).astype(np.float32), np.concatenate(expected).astype(np.float32), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (np.ones((4, 3), bool), {}, "tree_mask: got shape (4, 3), expected [decode_q_len=3, decode_q_len=3]"),
        (np.ones((4, 4), bool), {"decode_q_len": 2}, "tree_mask: got shape (4, 4), expected [decode_q_len=2, decode"),
        (np.ones((3, 4, 4), bool), {}, "tree_mask: got shape (3, 4, 4), expected [num_seqs=2, decode_q_len=4, deco"),
        (np.ones((2, 4, 4), np.int8), {}, "tree_mask: got dtype int8, expected bool"),
    ],
)
def test_a_wrong_tree_is_refused(mask, options, message):
    [query, cache, table, lens] = build(ragged((2, 1), (9, 4), dtype="bfloat16")).args
    with pytest.raises((KVCacheTypeError, KVCacheValueError)) as raised:
        ragged_paged_attention(
            np.concatenate(query), cache, table, lens, np.int32([0, 2, 3]), tree_mask=mask, **options
        )
    assert str(raised.value).startswith(message)


def test_a_chunk_may_begin_within_a_block_and_end_with_the_table(attend):
    check(ragged((50,), (63,), dtype="nvfp4"), attend)


def test_tokens_before_a_few_rows_are_attended_to_in_splits(attend, monkeypatch):
    monkeypatch.setattr(prompt_problem, "MIN_SPLIT_TOKENS", 32)
    splits: list[int] = []
    attend_in_place = prompt_kernel.kernel.attend

    def recorded_splits(*args: Any) -> Any:
        splits.append(args[-1])
        return attend_in_place(*args)

    monkeypatch.setattr(prompt_kernel.kernel, "attend", recorded_splits)
    check(ragged((20, 9, 12, 0, 1), (190, 130, 12, 0, 50), dtype="nvfp4", sinks=True), attend)
    assert set(splits) == ({6} if attend.has_prompt_kernel else set())


def test_prompts_that_take_too_much_memory_together_are_served_in_lots(attend, monkeypatch):
    monkeypatch.setattr(options, "DENSE_BYTES", 1)
    problem = build(ragged((20, 9, 12, 1), (190, 130, 12, 40), dtype="nvfp4", sinks=True))
    suite.assert_right(problem, *run(problem, attend), **slack(problem.case, attend))


def test_rows_outside_the_query_are_not_touched(attend):
    """As offsets of a mistaken scheduler would have it; the rows of other sequences are right."""
    problem = build(ragged((20, 30), (190, 130), dtype="nvfp4"))
    query, cache, table, lens = problem.args
    expected, _ = run(problem, attend)
    bounds = np.array([-5, 20, 50], np.int32)
    got, _ = attend(np.concatenate(query), cache, table, lens, jnp.asarray(bounds), **problem.options)
    np.testing.assert_array_equal(np.asarray(got)[20:], expected[1])


def test_without_the_prompt_kernel_a_window_gathers_only_its_blocks(attend, monkeypatch):
    gathered: list[int] = []

    def recorded(cache: KVCache, table: jax.Array, *args: Any, **options: Any) -> Any:
        gathered.append(table.shape[1])
        return gather_xla(cache, table, *args, **options)

    if attend.has_prompt_kernel or not attend.by_kernels:
        pytest.skip("another implementation")
    monkeypatch.setattr(prompts, "gather_mosaic", recorded)
    case = ragged((20, 9, 1), (190, 130, 40), dtype="nvfp4", block_size=16, window=17, sinks=True)
    check(case, attend)
    assert set(gathered) == {4}  # of 16 + 20 tokens, from any token of the first


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "window"), [("bfloat16", None), ("nvfp4", 700)])
def test_attention_matches_float64_for_long_chunks(attend, dtype, window):
    problem = build(ragged((1024, 1, 9), (4096, 300, 9), dtype=dtype, num_kv_heads=1, window=window))
    suite.assert_right(problem, *run(problem, attend), **slack(problem.case, attend))


@pytest.mark.parametrize(
    "q_lens",
    [(3, 1, 0, 8), *(pytest.param(x, marks=pytest.mark.full) for x in ((1, 1, 0, 1), (4, 4, 4, 4), (9, 1, 0, 30)))],
)
def test_results_do_not_depend_on_buckets(attend, q_lens):
    """Whatever they are, as long as they hold the call."""
    problem = build(ragged(q_lens, (33, 5, 0, 64), dtype="nvfp4", block_size=8, window=20))
    longest = max(q_lens)
    for decode_q_len in {0, 1, min(longest, 4), longest, longest + 7}:
        prompts = sum(q_len > decode_q_len for q_len in q_lens)
        buckets = {"max_q_len": longest, "decode_q_len": decode_q_len, "max_prompts": prompts}
        suite.assert_right(problem, *run(problem, functools.partial(attend, **buckets)), **slack(problem.case, attend))


@pytest.mark.parametrize("window", [None, pytest.param(11, marks=pytest.mark.full)])
def test_chunks_of_any_size_match_decoding(attend, window):
    """A chunk's own keys and values are read as they were stored."""
    problem = build(ragged((45,), (45,), dtype="nvfp4", scales="scalar", window=window, block_size=8))
    want, factors = suite.expected(problem, 0), slack(problem.case, attend)
    for cuts in ([0], [0, 9, 10, 26, 40], range(45)):
        got = step_by_step(problem, attend, cuts)
        assert np.abs(got[..., :-1] - want.out).max() <= want.out_max
        assert np.abs(got[..., -1] - want.lse).max() <= want.lse_max * factors.get("lse_factor", 1)
    decoded, lse = attend_decoding(problem)
    assert np.abs(decoded - want.out).max() <= want.out_max
    assert np.abs(lse - want.lse).max() <= want.lse_max


def attend_decoding(problem: suite.Problem) -> tuple[np.ndarray, np.ndarray]:
    """What `paged_attention` makes of the rows of one sequence."""
    [query], *rest = problem.args
    out, lse = _decode(query[None], *rest, **problem.options)
    return np.float32(out)[0], np.float32(lse)[0]


def test_equal_lengths_are_paged_attention(attend):
    problem = suite.build(Case("nvfp4", q_len=3, lengths=(7, 0, 40), window=9, sinks=True))
    query, *rest = problem.args
    expected = _decode(query, *rest, **problem.options)
    flat = query.reshape(-1, *query.shape[2:])
    got = attend(flat, *rest, np.arange(0, 10, 3, dtype=np.int32), **problem.options, max_q_len=3)
    for ragged_rows, rows in zip(got, expected, strict=True):
        rows = np.float32(rows).reshape(ragged_rows.shape)
        np.testing.assert_allclose(np.float32(ragged_rows), rows, rtol=1e-2, atol=1e-5)


STEPS = {
    "q_lens": st.tuples(*[st.integers(0, 20)] * 4),
    "lengths": st.tuples(*[st.integers(0, 48)] * 4),
    "dtype": st.sampled_from(["bfloat16", "nvfp4"]),
    "window": st.sampled_from([None, 9]),
    "garbage": st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 20), min_size=1, max_size=8),
    "seed": st.integers(0, 2**32 - 1),
}


def check_step(attend: Attend, q_lens: Any, lengths: Any, window: Any, garbage: Any, seed: int, **options: Any) -> None:
    options |= {"block_size": 8, "window": window, "sinks": window is not None}
    problem = build(ragged((*q_lens, 20), (*lengths, 48), **options), seed=seed, garbage=garbage)
    padding = PADDING + 80 - sum(q_lens)
    suite.assert_right(problem, *run(problem, attend, padding), **slack(problem.case, attend))


@pytest.mark.full
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**STEPS)
def test_attention_matches_float64_for_many_steps(attend, **step):
    check_step(attend, **step)


def test_memory_is_bounded(monkeypatch):
    """In chunks as small as they get the results are right, and the whole is never there."""
    problem = build(ragged((2, 70, 1), (300, 70, 17), dtype="nvfp4", window=90, sinks=True))
    monkeypatch.setattr(kvjax.ops.softmax, "CHUNK_BYTES", 1)
    attend = jax.jit(functools.partial(ragged_paged_attention, return_lse=True), static_argnames=STATIC)
    suite.assert_right(problem, *run(problem, attend))


@pytest.mark.parametrize("layer", [2, -1, pytest.param(0, marks=pytest.mark.full)])
def test_only_the_named_layer_is_attended_to(attend, layer):
    problem = build(ragged((5, 12, 1), (5, 40, 7), dtype="nvfp4"))
    query, cache, *rest = problem.args
    kv = jnp.stack([jnp.full_like(cache.kv, 0xFF)] * 3, axis=1)
    layers = KVCache(kv.at[:, max(int(layer), 0)].set(cache.kv), cache.spec, num_layers=3)
    number = layer if isinstance(layer, int) and layer >= 0 else jnp.int32(layer)
    got = dataclasses.replace(problem, args=(query, layers, *rest))
    out, lse = run(got, functools.partial(attend, layer=number))
    if layer >= 0:
        suite.assert_right(problem, out, lse, **slack(problem.case, attend))
    else:
        assert not np.concatenate(out).astype(np.float32).any()
        assert np.isneginf(np.concatenate(lse)).all()


@pytest.mark.parametrize("hole", [1, 4, *(pytest.param(x, marks=pytest.mark.full) for x in (0, 3, 5))])
def test_a_block_that_was_given_back_is_not_seen(attend, hole):
    check_hole(attend, hole)


@pytest.mark.full
def test_under_vmap_results_are_those_of_separate_calls(attend):
    problem = build(ragged((2, 12), (18, 40), dtype="nvfp4"))
    [first, second], cache, *rest = problem.args
    rows = np.concatenate([first, second])
    queries, bounds = np.stack([rows, rows[::-1]]), np.int32([0, 2, 14])
    caches = jax.tree.map(lambda kv: jnp.stack([kv, kv]), cache)
    got = jax.vmap(lambda query, cache: attend(query, cache, *rest, bounds, **problem.options))(queries, caches)
    for i in range(2):
        one = attend(queries[i], cache, *rest, bounds, **problem.options)
        for batched, single in zip(got, one, strict=True):
            np.testing.assert_allclose(np.float32(batched[i]), np.float32(single), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
def test_inside_shard_map_results_are_those_outside(check_vma):
    problem = build(ragged((2, 12, 0), (18, 40, 9), dtype="nvfp4"))
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.PartitionSpec()

    def attend(*args: Any, **options: Any) -> Any:
        body = functools.partial(ragged_paged_attention, return_lse=True, **options)
        shard = jax.sharding.PartitionSpec("x")
        specs = (shard, *[everywhere] * (len(args) - 1))
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=shard, check_vma=check_vma))(*args)

    suite.assert_right(problem, *run(problem, attend))


@pytest.mark.parametrize("tree", [{}, {"tree_mask": np.tri(2, dtype=bool)}], ids=["", "tree"])
@pytest.mark.parametrize(("num_tokens", "num_seqs", "max_blocks"), [(0, 2, 3), (4, 0, 3), (4, 2, 0), (0, 0, 0)])
def test_attention_accepts_empty_batches_and_tables(attend, num_tokens, num_seqs, max_blocks, tree):
    spec = simple_spec(KVCacheDType.NVFP4)
    query = np.ones((num_tokens, 4, 64), np.float16)
    table, lens = np.zeros((num_seqs, max_blocks), np.int32), np.full(num_seqs, 5, np.int32)
    bounds = np.minimum(np.arange(num_seqs + 1, dtype=np.int32), num_tokens)
    out, lse = attend(query, KVCache.allocate(spec, 4), table, lens, bounds, **tree)
    assert out.shape == query.shape
    if not max_blocks:
        assert not np.asarray(out).any()
        assert np.isneginf(np.asarray(lse)).all()


def small_call() -> dict[str, Any]:
    spec = simple_spec()
    return {
        "query": np.ones((6, 4, 64), np.float16),
        "cache": KVCache.allocate(spec, 4),
        "block_table": np.int32([[0, 1], [2, 3]]),
        "seq_lens": np.int32([9, 4]),
        "cu_q_lens": np.int32([0, 4, 6]),
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"query": np.ones((2, 3, 4, 64), np.float16)},
            KVCacheValueError,
            "query: got shape (2, 3, 4, 64), expected [n",
        ),
        (
            {"query": np.ones((6, 3, 64), np.float16)},
            KVCacheValueError,
            "query: got num_heads=3, expected a multiple of",
        ),
        ({"cu_q_lens": np.int32([0, 6])}, KVCacheValueError, "cu_q_lens: got shape (2,), expected [num_seqs + 1=3]"),
        ({"cu_q_lens": np.float32([0, 4, 6])}, KVCacheTypeError, "cu_q_lens: got dtype float32, expected one of int32"),
        ({"max_q_len": 0}, KVCacheValueError, "max_q_len: got 0, expected an int of at least 1"),
        ({"max_prompts": -1}, KVCacheValueError, "max_prompts: got -1, expected an int of at least 0"),
        ({"decode_q_len": 1.0}, KVCacheTypeError, "decode_q_len: got 1.0 of type float, expected an int"),
        ({"sinks": np.zeros(3, np.float32)}, KVCacheValueError, "sinks: got shape (3,), expected [num_heads=4]"),
        ({"return_lse": "no"}, KVCacheTypeError, "return_lse: got 'no' of type str, expected a bool"),
    ],
)
def test_invalid_arguments_are_refused(change, error, message):
    with pytest.raises(error) as raised:
        ragged_paged_attention(**small_call() | change)
    assert str(raised.value).startswith(message)


CHECKED = [
    ({"cu_q_lens": np.int32([1, 4, 6])}, "cu_q_lens[0]: got 1, expected 0 first"),
    ({"cu_q_lens": np.int32([0, 4, 3])}, "cu_q_lens[2]: got 3, expected 0 first, and then each between"),
    ({"cu_q_lens": np.int32([0, 4, 7])}, "cu_q_lens[2]: got 7, expected 0 first, and then each between the one"),
    ({"max_q_len": 3}, "cu_q_lens: got 4 query tokens for sequence 0, expected at most max_q_len=3"),
    ({"decode_q_len": 1, "max_prompts": 1}, "cu_q_lens: got 2 sequences with more than decode_q_len=1 query tokens"),
    ({"seq_lens": np.int32([9, 17])}, "seq_lens[1]: got 17, expected between 0 and 16"),
]


@pytest.mark.parametrize(("change", "message"), CHECKED)
def test_checked_mode_names_what_is_wrong(change, message):
    with kvjax.checked(), pytest.raises(KVCacheValueError) as raised:
        ragged_paged_attention(**small_call() | change)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"), [CHECKED[0], *(pytest.param(*case, marks=pytest.mark.full) for case in CHECKED[1:])]
)
def test_checked_mode_names_what_is_wrong_in_a_program(change, message):
    call = small_call() | change
    options = {name: call.pop(name) for name in BUCKETS if name in call}
    with kvjax.checked():
        attend = jax.jit(checkify.checkify(functools.partial(ragged_paged_attention, **options)))
        error, _ = attend(**call)
        with pytest.raises(checkify.JaxRuntimeError) as raised:
            error.throw()
    assert str(raised.value).startswith(message)


@pytest.mark.full
def test_checked_mode_takes_what_is_right():
    """Garbage before a window and past a length included."""
    problem = build(ragged((2, 12), (18, 40), dtype="nvfp4", window=9, block_size=8), garbage=[-7, 2**31 - 1])

    def attend(*args: Any, **options: Any) -> Any:
        error, results = checkify.checkify(functools.partial(_run, return_lse=True))(*args, **options)
        error.throw()
        return results

    with kvjax.checked():
        suite.assert_right(problem, *run(problem, attend))


def test_what_the_kernels_cannot_serve_has_a_reason():
    with pytest.raises(
        UnsupportedError, match="'mosaic' cannot serve this call: query: got float32, expected float16 or bfloat16"
    ):
        ragged_paged_attention(**small_call() | {"query": np.ones((6, 4, 64), np.float32)}, implementation="mosaic")


@pytest.mark.parametrize("options", [{}, pytest.param({"window": 9, "cap": 4.0}, marks=pytest.mark.full)], ids=len)
def test_batch_invariant_results_have_the_same_bits_alone_and_in_a_batch(options, attend):
    """A sequence has the same bits alone and in any order of a batch."""
    q_lens = (1, 33, 2, 0, 70) if attend.has_invariant_prompts else (1, 3, 2, 0, 1)
    problem = build(ragged(q_lens, (40, 70, 2, 5, 1100), dtype="nvfp4", **options))
    numbers = {"max_q_len": max(q_lens), "decode_q_len": 4, "batch_invariant": True}
    invariant = functools.partial(attend, **numbers)
    invariant.by_kernels = attend.by_kernels
    whole = run(problem, invariant)
    suite.assert_right(problem, *whole, **slack(problem.case, invariant))
    for order in ([4, 2, 0, 3, 1], [0], [4], [2, 2, 1]):
        for got, expected in zip(rows_in_turn(problem, order, invariant), whole, strict=True):
            for seq, rows in zip(order, got, strict=True):
                assert_same_bytes(rows, expected[seq])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_step_without_tokens_gives_no_rows(batch_invariant):
    call = small_call() | {"query": np.ones((0, 4, 64), np.float16), "cu_q_lens": np.zeros(3, np.int32)}
    call |= {"seq_lens": np.zeros(2, np.int32), "batch_invariant": batch_invariant}
    assert ragged_paged_attention(**call).shape == (0, 4, 64)


def test_batch_invariant_prompts_are_not_divided_into_splits(attend, monkeypatch):
    """Of which there are more the fewer rows a batch has."""
    if not attend.has_prompt_kernel:
        pytest.skip("another implementation")
    monkeypatch.setattr(prompt_problem, "MIN_SPLIT_TOKENS", 32)
    attend_in_place, seen = prompt_kernel.kernel.attend, []

    def recorded(kind: Any, *args: Any) -> Any:
        seen.append((args[-1], kind.is_divided))
        return attend_in_place(kind, *args)

    monkeypatch.setattr(prompt_kernel.kernel, "attend", recorded)
    problem = build(ragged((20, 9, 12), (190, 130, 12), dtype="nvfp4", sinks=True))
    invariant = functools.partial(attend, batch_invariant=True, max_q_len=20)
    suite.assert_right(problem, *run(problem, invariant), **slack(problem.case, attend))
    assert set(seen) == {(1, False)}


def test_prompts_without_the_prompt_kernel_are_not_batch_invariant():
    problem = build(ragged((9,), (20,), head_size=272))
    asked = {"implementation": "mosaic", "batch_invariant": True}
    with pytest.raises(UnsupportedError, match="depend on the batch; batch_invariant=True needs max_prompts=0"):
        run(problem, functools.partial(_run, **asked))
    query, cache, table, lens = problem.args
    ends = np.int32([0, 9])
    traced = functools.partial(ragged_paged_attention, **asked, max_prompts=0)
    jax.jit(traced).trace(query[0], cache, table, lens, ends)
