"""paged_attention passes tests/support/attention_suite.py, and means what its documentation says beside that."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import attention_suite as suite
from support.attention_suite import Attend, Case
from support.helpers import INPUT_DTYPES, assert_same_bytes, simple_spec

import kvjax
from kvjax import (
    FullAttentionSpec,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    SlidingWindowSpec,
    UnsupportedError,
    merge_attention_states,
    paged_attention,
    ragged_paged_attention,
)
from kvjax.ops import softmax

STATIC = ("sm_scale", "sliding_window", "logits_soft_cap", "return_lse", "implementation", "batch_invariant")
_run = jax.jit(paged_attention, static_argnames=STATIC)


@pytest.fixture
def attend(implementation: str) -> Attend:
    """Each implementation under `jit`, as users call it."""

    def run(query: Any, *args: Any, **options: Any) -> Any:
        # float32 queries are XLA's.
        name = None if implementation == "mosaic" and query.dtype == np.float32 else implementation
        return _run(query, *args, **options, return_lse=True, implementation=name)

    return run


@pytest.mark.parametrize("case", [case for case in suite.cases(1) if case.lengths != "long"], ids=str)
def test_attention_matches_float64_in_each_case(attend, case):
    suite.check(case, attend)


@pytest.mark.parametrize(
    "case",
    [
        Case("int8_per_token_head", "bfloat16", window=9, group=4),
        Case("fp8_per_token_head", "float32", "HND", head_size=80, head_size_v=48, q_len=3, cap=4.0, sinks=True),
    ],
    ids=str,
)
def test_attention_applies_scales_of_each_token_and_head(attend, case):
    suite.check(case, attend)


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(0, 3, 9, 40), block_size=8, q_len=4, sinks=True, tree=True),
        Case("nvfp4", lengths=(5, 70, 33), group=4, q_len=8, cap=5.0, tree=True),  # in several passes over the pages
        Case("fp8_e4m3", "float16", lengths=(77, 5), num_kv_heads=1, q_len=40, window=20, tree=True),  # two words
        Case("float32", "float32", lengths=(9,), q_len=5, tree=True),
        Case("fp8_e4m3", lengths=(3, 40, 77, 0), q_len=8, window=3, tree=True, sinks=True),  # of fewer tokens than rows
        Case("nvfp4", lengths=(70, 9), group=4, q_len=8, window=1, tree=True),
        Case("bfloat16", lengths=(40, 300), num_kv_heads=1, q_len=20, window=18, block_size=8, tree=True),
    ],
    ids=str,
)
def test_attention_applies_tree_masks(attend, case):
    suite.check(case, attend)


@pytest.mark.parametrize("window", [None, 3, 9])
def test_a_tree_of_one_branch_gives_the_bits_of_causal_attention(window):
    args = suite.build(Case(lengths=(30, 3), q_len=4)).args
    run = functools.partial(_run, *args, sliding_window=window)
    expected = run()
    for mask in (np.tri(4, dtype=bool), np.ones((2, 4, 4), bool)):
        np.testing.assert_array_equal(run(tree_mask=mask), expected)
        np.testing.assert_array_equal(run(tree_mask=mask, batch_invariant=True), expected)


@pytest.mark.parametrize("window", [None, 1, 3, 6, *(pytest.param(x, marks=pytest.mark.nightly) for x in (2, 100))])
@pytest.mark.parametrize("is_traced", [False, True], ids=["int", "array"])
def test_a_row_of_a_tree_attends_to_what_its_branch_alone_would(window, is_traced):
    """Of three branches of different lengths: the branch is written after the context, and its last row compared."""
    parents = [-1, 0, 0, 1, 2, 3, 3, 6]
    mask = np.eye(8, dtype=bool)
    for row, parent in enumerate(parents[1:], 1):
        mask[row] |= mask[parent]
    spec, length = FullAttentionSpec(4, 1, 16, dtype="float32"), 13
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, length + 8, 1, 16)).astype(np.float32)
    query = rng.standard_normal((1, 8, 2, 16)).astype(np.float32)
    table = np.array([[3, 1, 4, 2, 5, 0]], np.int32)

    def attended(tokens: np.ndarray, rows: np.ndarray, window: Any, **options: Any) -> jax.Array:
        place = np.arange(len(tokens))
        slots = (table[0, place // 4] * 4 + place % 4).astype(np.int32)
        cache = KVCache(jnp.full(spec.cache_shape(6), jnp.nan, jnp.float32), spec)
        cache = kvjax.reshape_and_cache_flash(key[tokens], value[tokens], cache, slots)
        lens = np.array([len(tokens)], np.int32)
        return paged_attention(query[:, rows], cache, table, lens, sliding_window=window, **options)[0]

    of_tree = jnp.int32(window) if is_traced and window is not None else window
    out = attended(np.arange(length + 8), np.arange(8), of_tree, tree_mask=mask)
    for row in range(8):
        branch = np.flatnonzero(mask[row])
        expected = attended(np.concatenate([np.arange(length), length + branch]), branch, window)[-1]
        np.testing.assert_allclose(out[row], expected, rtol=0, atol=1e-5)


def test_a_window_of_no_tokens_masks_those_of_a_tree():
    args = suite.build(Case(lengths=(30, 3), q_len=4)).args
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]], bool)  # the last is less deep
    out, lse = paged_attention(*args, tree_mask=mask, sliding_window=jnp.int32(0), return_lse=True)
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((4, 4), np.int32), "tree_mask: got dtype int32, expected bool"),
        (np.ones((4, 3), bool), "tree_mask: got shape (4, 3), expected [q_len=4, q_len=4]"),
        (np.ones((3, 4, 4), bool), "tree_mask: got shape (3, 4, 4), expected [num_seqs=2, q_len=4, q_len=4]"),
    ],
)
def test_a_wrong_tree_is_refused(mask, message):
    args = suite.build(Case(lengths=(30, 3), q_len=4)).args
    with pytest.raises((KVCacheTypeError, KVCacheValueError)) as raised:
        paged_attention(*args, tree_mask=mask)
    assert str(raised.value).startswith(message)


@pytest.mark.full
def test_a_batch_may_hold_sequences_of_one_and_100_000_tokens(attend):
    problem = suite.build(Case("float32", lengths="long", num_kv_heads=1, block_size=32))
    suite.assert_right(problem, *problem.run(attend))


@pytest.mark.full
@pytest.mark.parametrize("case", suite.cases(2), ids=str)
def test_attention_matches_float64_for_each_pair_of_options(attend, case):
    suite.check(case, attend)


@settings(max_examples=15)
@given(
    lengths=st.tuples(*[st.integers(0, 48)] * 4),
    dtype=st.sampled_from(["bfloat16", "nvfp4"]),
    rows=st.sampled_from([(1, None), (3, 9)]),
    garbage=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 20), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_matches_float64_for_random_lengths_and_tables(lengths, dtype, rows, garbage, seed):
    q_len, window = rows
    case = Case(dtype, lengths=(*lengths, 48), block_size=8, q_len=q_len, window=window, sinks=window is not None)
    attend = functools.partial(_run, return_lse=True)
    problem = suite.build(case, seed=seed, garbage=garbage)
    suite.assert_right(problem, *problem.run(attend))


@pytest.mark.full
@settings(max_examples=30)
@given(data=st.data())
def test_attention_matches_float64_in_random_cases(data):
    drawn = {name: data.draw(st.sampled_from(values), name) for name, values in suite.AXES.items()}
    for name, least, most in (("block_size", 1, 40), ("group", 1, 17), ("q_len", 1, 9), ("num_kv_heads", 1, 4)):
        drawn[name] = data.draw(st.integers(least, most), name)
    drawn["lengths"] = tuple(data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=5), "lengths"))
    drawn["window"] = data.draw(st.none() | st.integers(1, 220), "window")
    if not suite.is_valid(drawn):
        drawn |= {"v_scale_layout": "linear", "scales": "scalar"}
    suite.check(
        Case(**drawn), functools.partial(_run, return_lse=True), seed=data.draw(st.integers(0, 2**32 - 1), "seed")
    )


WRONG = {
    "one more token": lambda run, query, cache, table, lens, **options: run(query, cache, table, lens + 1, **options),
    "a larger window": lambda run, *args, sliding_window, **options: run(*args, sliding_window=10, **options),
    "no cap": lambda run, *args, logits_soft_cap, **options: run(*args, **options),
    "scaled sinks": lambda run, *args, sinks, **options: run(*args, sinks=sinks / 8, **options),
    "rows in reverse": lambda run, *args, **options: [x[:, ::-1] for x in run(*args, **options)],
    "logarithms of base 2": lambda run, *args, **options: (
        run(*args, **options)[0],
        run(*args, **options)[1] / np.log(2),
    ),
    "weights of three bits": lambda run, *args, **options: [x * np.float32(1.06) for x in run(*args, **options)],
}


@pytest.mark.parametrize("mistake", WRONG)
def test_the_suite_finds_mistakes(mistake):
    case = Case("float32", "float32", block_size=8, lengths=(0, 3, 17, 33), q_len=2, window=9, cap=4.0, sinks=True)
    run = functools.partial(_run, return_lse=True)
    problem = suite.build(case)
    suite.assert_right(problem, *problem.run(run))
    with pytest.raises(AssertionError):
        suite.assert_right(problem, *map(np.asarray, problem.run(functools.partial(WRONG[mistake], run))))


def test_xla_rounds_only_the_result():
    problem = suite.build(Case("nvfp4", lengths=(5, 17, 40)))
    out, _ = problem.run(functools.partial(_run, return_lse=True, implementation="xla"))
    assert max(suite.error_shares(problem, out)) < 1


def test_a_sequence_has_close_results_alone_and_in_a_batch(attend):
    """Without `batch_invariant` nothing promises the same bits: XLA may multiply matrices of other shapes in another
    order, and the kernel divides a sequence where the rest of the batch has it do so."""
    problem = suite.build(Case("fp8_e4m3", lengths="mixed", q_len=2))
    query, cache, table, lens = problem.args
    whole, alone = problem.run(attend), attend(query[5:], cache, table[5:], lens[5:], **problem.options)
    for got, among in zip(alone, whole, strict=True):
        np.testing.assert_allclose(np.float32(got[0]), np.float32(among[5]), rtol=1e-2, atol=1e-5)


INVARIANT = [
    Case("nvfp4", lengths="mixed", q_len=2, sinks=True),
    Case("bfloat16", lengths=(700, 0, 2900, 513), num_kv_heads=1, group=3, window=600),
    Case("fp8_e4m3", "float16", lengths=(5000, 17), block_size=8, layout="HND"),
]


@pytest.mark.parametrize(
    "case", [INVARIANT[0], *(pytest.param(case, marks=pytest.mark.full) for case in INVARIANT[1:])], ids=str
)
def test_batch_invariant_results_have_the_same_bits_alone_and_in_a_batch(attend, case):
    """The same bits alone, in other places of other batches and of wider tables."""
    suite.check_alone(case, functools.partial(attend, batch_invariant=True), sequences=range(len(case.seq_lens)))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_query_without_tokens_gives_an_empty_result(batch_invariant):
    query, *rest = suite.build(Case("nvfp4")).args
    out = paged_attention(query[:, :0], *rest, batch_invariant=batch_invariant)
    assert out.shape == (len(query), 0, *query.shape[2:])


def test_batch_invariant_attention_matches_float64(attend):
    suite.check(
        Case("nvfp4", lengths=(1100, 0, 17), sinks=True, cap=5.0), functools.partial(attend, batch_invariant=True)
    )


def test_one_token_a_sequence_needs_no_axis_of_rows(attend):
    problem = suite.build(Case("nvfp4", window=9, sinks=True))
    query, *rest = problem.args
    expected = problem.run(attend)
    for got, rows in zip(attend(query[:, 0], *rest, **problem.options), expected, strict=True):
        assert_same_bytes(np.asarray(got), rows[:, 0])


def test_omitting_the_log_sum_exp_does_not_change_the_result(implementation):
    problem = suite.build(Case())
    run = functools.partial(_run, *problem.args, **problem.options, implementation=implementation)
    assert_same_bytes(np.asarray(run()), np.asarray(run(return_lse=True)[0]))


def test_rows_are_causal(attend):
    """Several rows see what single ones of shorter sequences do; before a sequence's start they see nothing."""
    problem = suite.build(Case("float32", "float32", q_len=4, window=6, sinks=True, lengths=(0, 2, 5, 33)))
    query, cache, table, lens = problem.args
    out, lse = problem.run(attend)
    for row in range(4):
        args = query[:, row], cache, table, np.maximum(lens - 3 + row, 0)
        for got, expected in zip(attend(*args, **problem.options), (out, lse), strict=True):
            np.testing.assert_allclose(got, expected[:, row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sm_scale", [1.0, 0.03, -2, 300.0], ids=str)
def test_logits_are_scaled_by_sm_scale(attend, sm_scale):
    suite.check(Case("float32", "float32", head_size=80, sm_scale=sm_scale), attend)


def sliding_problem(window: int | None) -> suite.Problem:
    """A problem of such a window, over a cache whose own is 6."""
    problem = suite.build(Case("float16", window=window))
    query, cache, *tables = problem.args
    sliding = KVCache(cache.kv, SlidingWindowSpec(**dataclasses.asdict(cache.spec) | {"sliding_window": 6}))
    return dataclasses.replace(problem, args=(query, sliding, *tables))


@pytest.mark.parametrize(
    ("argument", "window"), [("layer", 6), (None, None), (3, 3), (np.int32(9), 9), (2**70, None)], ids=str
)
def test_a_sliding_layer_has_its_own_window(attend, argument, window):
    problem = sliding_problem(window)
    got = attend(*problem.args, **problem.options | {"sliding_window": argument})
    suite.assert_right(problem, *map(np.asarray, got))


def test_the_default_window_is_that_of_the_layer(attend):
    problem = sliding_problem(6)
    got = attend(*problem.args, **{key: x for key, x in problem.options.items() if key != "sliding_window"})
    suite.assert_right(problem, *map(np.asarray, got))


def test_one_program_serves_every_window():
    """An array, as the layers of a scan have one for each of them; what is before a window is NaN."""
    traced = []

    @jax.jit
    def attend(window: jax.Array, query: jax.Array, cache: KVCache, *tables: jax.Array) -> Any:
        traced.append(cache.num_blocks)
        return paged_attention(query, cache, *tables, sliding_window=window, return_lse=True, **options)

    for window in (3, None, 6, 1):
        problem = sliding_problem(window)
        options = {key: x for key, x in problem.options.items() if key != "sliding_window"}
        got = attend(np.int32(2**31 - 1 if window is None else window), *problem.args)
        suite.assert_right(problem, *map(np.asarray, got))
    for nothing in (0, -1, -(2**31)):
        assert not np.asarray(attend(np.int32(nothing), *problem.args)[0]).any()
    assert len(traced) == len(set(traced)) < 4
    eager = paged_attention(*problem.args, sliding_window=jnp.int32(1), return_lse=True, **options)
    suite.assert_right(problem, *map(np.asarray, eager))


def test_the_kernel_is_not_asked_for_a_window_in_an_array():
    query, cache, *tables = sliding_problem(3).args
    with pytest.raises(kvjax.UnsupportedError, match=r"sliding_window: got an array, expected an int"):
        paged_attention(query, cache, *tables, sliding_window=jnp.int32(3), implementation="mosaic")


def test_tokens_of_no_block_are_not_seen(attend):
    """As if the sequence had never had them; a block of somebody else's stands next to each."""
    problem = suite.build(Case("float32", "float32", block_size=4, lengths=(11, 9)))
    query, cache, table, lens = problem.args
    for entry in (-1, cache.num_blocks, 2**31 - 1, -(2**31)):
        holed = table.copy()
        holed[0, 1] = entry
        keys, values = ([np.delete(x[0], slice(4, 8), axis=0), x[1]] for x in (problem.keys, problem.values))
        shorter = dataclasses.replace(problem, case=Case("float32", "float32", block_size=4, lengths=(7, 9)))
        shorter = dataclasses.replace(shorter, keys=keys, values=values)
        got = attend(query, cache, holed, lens, **problem.options)
        suite.assert_right(shorter, *map(np.asarray, got))


def test_a_nan_of_one_sequence_does_not_reach_others(attend):
    problem = suite.build(Case("float32", "float32", lengths=(17, 16, 5)))
    query, cache, table, lens = problem.args
    expected = problem.run(attend)
    spoilt = KVCache(cache.kv.at[table[0, 0]].set(jnp.nan), cache.spec)
    for got, was in zip(attend(query, spoilt, table, lens, **problem.options), expected, strict=True):
        assert np.isnan(got[0]).all()
        assert_same_bytes(np.asarray(got[1:]), was[1:])


def test_attention_accepts_empty_batches_and_tables(attend):
    cache, sinks = KVCache.allocate(simple_spec(head_size_v=32), 2), np.arange(4, dtype=np.float32)
    for num_seqs, q_len, max_blocks in ((0, 1, 3), (5, 2, 0), (0, 1, 0), (2, 0, 3)):
        query = np.ones((num_seqs, q_len, 4, 64), np.float16)
        tables = np.zeros((num_seqs, max_blocks), np.int32), np.zeros(num_seqs, np.int32)
        for tree in ({}, {"tree_mask": np.tri(q_len, dtype=bool)}):
            out, lse = attend(query, cache, *tables, sinks=sinks, **tree)
            assert out.shape == (num_seqs, q_len, 4, 32)
            assert not np.asarray(out).any()
            np.testing.assert_array_equal(lse, np.broadcast_to(sinks, (num_seqs, q_len, 4)))


@pytest.mark.full
def test_sinks_may_be_float64_as_jax_makes_them_with_x64():
    problem = suite.build(Case(sinks=True, lengths=(5, 17)))
    options = problem.options | {"return_lse": True}
    expected = paged_attention(*problem.args, **options)
    with jax.enable_x64(True):
        sinks = jnp.zeros(len(options["sinks"])) + options["sinks"]
        assert sinks.dtype == np.float64
        for given in (sinks, np.asarray(sinks)):
            for got, want in zip(paged_attention(*problem.args, **options | {"sinks": given}), expected, strict=True):
                assert_same_bytes(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mean_that_float32_holds_does_not_overflow(attend, dtype):
    suite.check_large_values(attend, dtype, 100)


@pytest.mark.full
def test_means_of_several_chunks_and_of_dense_16_bit_values_do_not_overflow(monkeypatch):
    monkeypatch.setattr(softmax, "CHUNK_BYTES", 1)
    suite.check_large_values(jax.jit(functools.partial(paged_attention, return_lse=True)), "bfloat16", 100)
    values = jnp.full((1, 64, 1, 16), 3e38, jnp.bfloat16)

    def read(number):
        return jnp.zeros_like(values), values, jnp.ones((1, 64), bool)

    rows, last, chunks = jnp.ones((1, 1, 2, 16)), jnp.full((1, 1), 127), softmax.TokenChunks(2, read)
    spec = FullAttentionSpec(64, 1, 16, dtype="bfloat16")
    out, lse = softmax.attend(rows, chunks, last, jnp.zeros(2), spec, softmax.Softmax(1.0))
    np.testing.assert_allclose(out, np.full(out.shape, np.float64(values[0, 0, 0, 0]) * 128 / 129), rtol=1e-6)
    np.testing.assert_allclose(lse, np.full(lse.shape, np.log(129)), rtol=1e-6)


def test_vmap_maps_over_queries_and_caches(attend):
    problem = suite.build(Case("nvfp4", q_len=2))
    query, cache, *tables = problem.args
    caches = jax.tree.map(lambda kv: jnp.stack([kv, jnp.zeros_like(kv), kv]), cache)
    queries = np.stack([query, query, query[::-1]])
    got = jax.vmap(lambda query, cache: attend(query, cache, *tables, **problem.options))(queries, caches)
    for i, kv in enumerate(caches.kv):
        one = attend(queries[i], KVCache(kv, cache.spec), *tables, **problem.options)
        for batched, single in zip(got, one, strict=True):
            np.testing.assert_allclose(np.float32(batched[i]), np.float32(single), rtol=1e-2, atol=1e-5)


def parts_of(problem: suite.Problem, attend: Attend, cut: int) -> Any:
    """Attention over the first `cut` blocks of each sequence, and over all the others."""
    query, cache, table, lens = problem.args
    size = cache.spec.block_size
    first = attend(query, cache, table[:, :cut], np.minimum(lens, cut * size), **problem.options)
    rest = attend(query, cache, table[:, cut:], np.maximum(lens - cut * size, 0), **problem.options)
    return zip(first, rest, strict=True)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_parts_of_sequences_merge_into_the_whole(name):
    problem = suite.build(Case("float32", name, block_size=8, lengths=(0, 3, 17, 33)))
    outs, lses = parts_of(problem, functools.partial(_run, return_lse=True), 1)
    merge = jax.jit(merge_attention_states)
    out, lse = merge(outs, lses)
    expected_out, expected_lse = problem.run(functools.partial(_run, return_lse=True))
    assert (out.dtype, lse.dtype) == (INPUT_DTYPES[name], np.float32)
    tolerance = 1e-5 + 2 * float(jnp.finfo(out.dtype).eps)
    np.testing.assert_allclose(np.float32(out), np.float32(expected_out), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    for got, stacked in zip(merge(jnp.stack(outs), np.stack(lses)), (out, lse), strict=True):
        assert_same_bytes(np.asarray(got), np.asarray(stacked))


@pytest.mark.parametrize("num_parts", [2, 3, 5])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_mean_of_parts_does_not_overflow(name, num_parts):
    out = np.full((4, 2, 8), 3e38).astype(INPUT_DTYPES[name])
    merged, lse = merge_attention_states([out] * num_parts, [np.zeros((4, 2), np.float32)] * num_parts)
    np.testing.assert_allclose(np.float64(merged), np.float64(out), rtol=1e-6)
    np.testing.assert_allclose(lse, np.full((4, 2), np.log(num_parts)), rtol=1e-6)


def test_merging_ignores_states_that_saw_no_tokens():
    """It counts for nothing, whatever it holds; and where nothing was seen the result is exactly that."""
    merge = jax.jit(merge_attention_states)
    seen, nothing = np.float32([[0.1, 3e38]]), np.full((1, 2), np.nan, np.float32)
    lse, none = np.float32([-1e4]), np.float32([-np.inf])
    for outs, lses in (([seen, nothing], [lse, none]), ([nothing, seen, nothing], [none, lse, none]), ([seen], [lse])):
        got = merge(outs, lses)
        assert_same_bytes(np.asarray(got[0]), seen)
        assert_same_bytes(np.asarray(got[1]), lse)
    out, total = merge([nothing] * 2, [none] * 2)
    assert_same_bytes(np.asarray(out), np.zeros((1, 2), np.float32))
    assert_same_bytes(np.asarray(total), none)
    _, total = merge([seen] * 4, [np.float32([200])] * 4)
    assert math.isclose(float(total[0]), 200 + math.log(4), rel_tol=1e-6)


F32 = np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], KVCacheValueError, "outs: got no parts, expected at least one"),
        (F32[:0], F32[:0, :, 0], KVCacheValueError, "outs: got no parts, expected at least one"),
        (F32[0], F32[0, :, 0], KVCacheValueError, "outs: got shape (3, 4), expected [num_parts, ..., num_heads, head"),
        (F32, F32, KVCacheValueError, "lses: got shape (2, 3, 4), expected (2, 3), that of outs without its last"),
        (F32.astype(np.float64), F32[..., 0], KVCacheTypeError, "outs: got dtype float64, expected one of float32"),
        (F32, F32[..., 0].astype(np.float16), KVCacheTypeError, "lses: got dtype float16, expected float32"),
        (F32, 3.0, KVCacheTypeError, "lses: got a float, expected an array or a sequence of arrays"),
        (F32, [1.0, 2.0], KVCacheTypeError, "lses[0]: got a float, expected an array"),
        ([F32, F32[:1]], [F32] * 2, KVCacheValueError, "outs[1]: got float32[1, 3, 4], expected float32[2, 3, 4] as o"),
    ],
)
def test_invalid_states_to_merge_are_refused(outs, lses, error, message):
    with pytest.raises(error) as raised:
        merge_attention_states(outs, lses)
    assert str(raised.value).startswith(message)


def test_blocks_before_a_window_are_not_checked():
    """Checked mode names blocks that are needed alone."""
    problem = suite.build(Case(window=9, lengths=(40, 17)), garbage=[-7, 2**31 - 1])
    query, *rest = problem.args

    def run(**options: Any) -> jax.Array:
        return jax.jit(lambda query: paged_attention(query, *rest, **problem.options | options))(query)

    with kvjax.checked():
        run()
        with pytest.raises(KVCacheValueError, match=r"^block_table\[0, 0\]: got -7, expected between"):
            run(sliding_window=None)


@pytest.mark.parametrize(
    ("operation", "query", "table", "is_served"),
    [
        (paged_attention, (2**17 - 1, 128, 128), (2**17 - 1, 2), True),
        (paged_attention, (2**17, 128, 128), (2**17, 2), False),
        (paged_attention, (4, 128, 128), (4, 2**29), False),
        (paged_attention, (2, 128, 128), (2, 2**27), False),
        (ragged_paged_attention, (2**17, 128, 128), (2, 2), False),
        (ragged_paged_attention, (8, 128, 128), (2**17, 2), False),
    ],
)
def test_kernels_refuse_what_int32_does_not_index(operation: Any, query: Any, table: Any, is_served: bool):
    """By default XLA serves such calls."""
    spec, array = simple_spec(KVCacheDType.NVFP4, num_kv_heads=8, head_size=128, block_size=16), jax.ShapeDtypeStruct
    cache = KVCache(array(spec.cache_shape(8), spec.array_dtype), spec)
    args = [array(query, jnp.bfloat16), cache, array(table, jnp.int32), array(table[:1], jnp.int32)]
    if operation is ragged_paged_attention:
        args.append(array((table[0] + 1,), jnp.int32))

    def lower(implementation: str | None) -> Any:
        traced = jax.jit(functools.partial(operation, implementation=implementation)).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    if is_served:
        assert "mosaic_gpu" in lower("mosaic")
        return
    with pytest.raises(UnsupportedError, match="exceed 2147483647, the most that int32 indexes"):
        lower("mosaic")
    assert "mosaic_gpu" not in lower(None)
