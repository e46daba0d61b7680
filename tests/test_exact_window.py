"""Attention with an exact window mixes what was given and what pages store, whatever a sequence's steps were."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify
from support.exact_windows import Case, Server, Tokens, cuts_of, expected, random_tokens
from support.helpers import simple_spec

import kvjax
from kvjax import (
    ExactWindow,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    StepMetadata,
    UnsupportedError,
    WindowRows,
    window_attention,
)

LENGTHS = (61, 9, 40)
CUTS = ((1, 1, 1), (17, 3, 8), (61, 9, 40), (24, 1, 33))
"""The most tokens of each sequence in a step."""

DRAFTS = Case(
    "fp8_e4m3", size=13, max_q_len=4, sliding_window=19, cap=3.0, sinks=True, layout="HND", block_size=4, head_size_v=16
)
CASES = {
    "nvfp4": Case(size=37),
    "drafts": DRAFTS,
    **{
        name: pytest.param(case, marks=pytest.mark.full)
        for name, case in {
            "4over6, one head": Case("nvfp4_4over6", size=64, num_kv_heads=1, group=3),
            "int8": Case("int8_per_token_head", size=16, block_size=3, sinks=True),
            "fp8 keys": Case("fp8_k_nvfp4_v", size=1, cap=2.0),
            "window of the layer and of its size": Case("nvfp4", size=12, sliding_window=12, sinks=True),
            "shorter window": Case("fp8_e5m2", size=33, sliding_window=5, max_q_len=3),
            "blocks larger than windows": Case("nvfp4", size=5, block_size=64, max_q_len=3),
            "unquantized": Case("bfloat16", size=9),
            "window longer than texts": Case("nvfp4", size=500, max_q_len=2),
        }.items()
    },
    "window longer by one": pytest.param(
        Case("nvfp4", size=12, sliding_window=13, max_q_len=2), marks=pytest.mark.nightly
    ),
}


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for one, of_one in zip(got, want, strict=True):
        np.testing.assert_allclose(one, of_one, atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_query_sees_its_last_tokens_exactly_wherever_chunks_are_cut(case: Case):
    tokens, want = random_tokens(case, LENGTHS)
    for sizes in (*CUTS, (case.max_q_len,) * 3):
        assert_close(Server(case, tokens).serve(cuts_of(LENGTHS, sizes)), want)
    stored = [expected(case, one, exact_from=len(one.key)) for one in tokens]
    is_exact = case.dtype == "bfloat16"
    assert is_exact or all(np.abs(one - other).max() > 1e-3 for one, other in zip(want, stored, strict=True))


@pytest.mark.full
def test_the_ring_rounds_to_the_model_dtype():
    case = Case(model_dtype="bfloat16")
    tokens, want = random_tokens(case, LENGTHS)
    assert_close(Server(case, tokens).serve(cuts_of(LENGTHS, (30, 1, 7))), want)
    case = Case(model_dtype="bfloat16", query_dtype="bfloat16")
    tokens, want = random_tokens(case, LENGTHS)
    assert_close(Server(case, tokens).serve(cuts_of(LENGTHS, (30, 1, 7))), want, 0.02)


def test_drafts_are_truncated():
    """A step of a token and three drafts, of which any number are rejected, and then others are given."""
    tokens, want = random_tokens(DRAFTS, LENGTHS[:2])
    other = Tokens.random(DRAFTS, LENGTHS[0], 7)
    server = Server(DRAFTS, tokens)
    server.step([20, 5])
    server.sequences[0].truncate(16)
    for position, accepted in ((16, 4), (20, 0), (20, 1), (21, 3), (24, 4), (28, 2), (30, 4)):
        drafted = {
            name: np.concatenate([of[: position + accepted], getattr(other, name)[position + accepted :]])
            for name, of in dataclasses.asdict(tokens[0]).items()
        }
        server.tokens[0] = Tokens(**drafted)
        results = server.step([4, 0])
        assert not server.filled
        assert_close([results[0][:accepted]], [want[0][position : position + accepted]])
        server.sequences[0].truncate(position + accepted)
    server.tokens[0] = tokens[0]
    assert_close(server.step([27, 4]), [want[0][34:], want[1][5:]])


def served_prompt(case: Case) -> tuple[Server, Tokens]:
    """A server whose only sequence has 40 committed tokens."""
    (tokens,), _ = random_tokens(case, (61,))
    server = Server(case, [tokens])
    server.step([40])
    server.sequences[0].commit(np.arange(40))
    return server, tokens


def test_after_a_prefix_hit_the_window_is_filled_from_the_pages():
    case = Case()
    server, tokens = served_prompt(case)
    server.sequences.append(server.pool.sequence([*range(35), *range(100, 120)]))
    other = Tokens.random(case, 61, 8)
    mixed = {
        name: np.concatenate([x[:32], getattr(other, name)[32:]]) for name, x in dataclasses.asdict(tokens).items()
    }
    server.tokens.append(Tokens(**mixed))
    results = server.serve([[1, 20], [1, 1], [0, 1], [1, 1]])
    assert_close(results, [expected(case, tokens)[40:43], expected(case, server.tokens[1], exact_from=32)[32:55]])
    assert not server.filled


def test_a_fork_copies_its_row_or_fills_it_from_the_pages():
    case = Case()
    want = None
    for copies in (True, False):
        server, tokens = served_prompt(case)
        child = server.sequences[0].fork()
        if copies:
            pairs = server.rows.fork(server.sequences[0], child)
            assert len(pairs) == 1
            server.window = kvjax.copy_window_rows(server.window, pairs, donate=True)
        server.sequences.append(child)
        server.tokens.append(tokens)
        results = server.serve([[1, 1], [1, 0], [1, 7]])
        want = expected(case, tokens), expected(case, tokens, exact_from=0 if copies else 40)
        assert_close(results, [want[0][40:43], want[1][40:48]])


@pytest.mark.parametrize("keeps_row", [False, pytest.param(True, marks=pytest.mark.full)])
def test_after_a_swap_the_window_is_filled_from_the_pages_unless_its_row_is_left(keeps_row: bool):
    """Pages come back to other blocks, and to none that a sequence that ran in between has written."""
    case = Case("fp8_e4m3", block_size=4)
    tokens, _ = random_tokens(case, (61, 61))
    server = Server(case, tokens)
    server.pool = kvjax.BlockPool(server.cache.num_blocks, case.block_size, num_host_blocks=8)
    server.sequences = [server.pool.sequence() for _ in tokens]
    server.rows.num_rows = 1 + keeps_row
    host = KVCache.allocate(case.spec, 8, **case.scales)
    server.step([30, 0])
    swapped, before = server.sequences[0], [*server.sequences[0].blocks]
    swapped.swap_out()
    host = kvjax.swap_blocks(server.cache, host, server.pool.take_swaps().to_host)
    nan = jnp.full(server.cache.kv.shape, 0xFF, server.cache.kv.dtype)
    server.cache = dataclasses.replace(server.cache, kv=nan)
    del server.sequences[0], server.tokens[0]
    [meanwhile] = server.step([30])
    swapped.swap_in()
    server.cache = kvjax.swap_blocks(host, server.cache, server.pool.take_swaps().from_host)
    assert [*swapped.blocks] != before
    server.sequences, server.tokens = [swapped], [tokens[0]]
    [first] = server.step([1])
    assert server.filled == ([] if keeps_row else [0])
    want = expected(case, tokens[0], exact_from=0 if keeps_row else 30)
    results = [first, *server.serve([[20], [1]])]
    assert_close([meanwhile, np.concatenate(results)], [expected(case, tokens[1])[:30], want[30:52]])


def test_sequences_take_turns_if_there_are_fewer_rows():
    """Sequences that run in turns have rows in turns, and those that lost theirs read their last tokens from pages."""
    case = Case()
    tokens, _ = random_tokens(case, (61, 61, 61))
    server = Server(case, tokens)
    server.rows.num_rows = 2
    server.step([30, 30, 0])
    server.step([0, 1, 30])
    assert server.filled == []
    results = server.step([1, 0, 1])  # the first has lost its row, and gets that of the second
    assert server.filled == [0]
    want = [expected(case, tokens[0], exact_from=30)[30:31], np.zeros((0, 4, 32)), expected(case, tokens[2])[30:31]]
    assert_close(results, want)
    with pytest.raises(KVCacheValueError, match="sequences: got 3 with new tokens, expected at most 2, the rows of"):
        server.step([1, 1, 1])


SHORT = Case("bfloat16", size=1)
ROOM_SEQS, ROOM_TOKENS = 6, 48


@jax.jit
def room(seq_lens: jax.Array, cu_q_lens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The table of a step's copy of the ring, the slots of new tokens there, and the number of its slots."""
    window = ExactWindow.allocate(SHORT.spec, ROOM_SEQS, SHORT.size)
    table, slots = jnp.zeros((ROOM_SEQS, 1), jnp.int32), jnp.zeros(ROOM_TOKENS, jnp.int32)
    metadata = StepMetadata(table, seq_lens, cu_q_lens, slots, jnp.arange(ROOM_SEQS))
    step = window_attention._Step.of(window, metadata)
    cache, table, slots = window_attention._with_room(window.ring, step, ROOM_TOKENS, None)
    return table, slots, jnp.int32(cache.num_slots)


@given(data=st.data())
def test_a_copy_has_room_for_every_token(data: st.DataObject):
    """Many short chunks, each of which ends in a block of its own, and few long ones."""
    bounds = sorted(data.draw(st.lists(st.integers(0, ROOM_TOKENS), min_size=ROOM_SEQS, max_size=ROOM_SEQS)))
    bounds = data.draw(st.sampled_from([bounds, [2 * i for i in range(1, 7)], [8 * i for i in range(1, 7)]]))
    q_lens = np.diff([0, *bounds])
    before = data.draw(st.lists(st.sampled_from([0, 14, 15, 16, 17, 31, 100]), min_size=ROOM_SEQS, max_size=ROOM_SEQS))
    table, slots, num_slots = map(np.asarray, room(np.int32(q_lens + before), np.int32([0, *bounds])))
    used = slots[: bounds[-1]]
    assert len(set(used.tolist())) == len(used)
    assert ((used >= 0) & (used < num_slots)).all()
    assert (slots[bounds[-1] :] == -1).all()
    for seq, (start, end) in enumerate(itertools.pairwise([0, *bounds])):
        block = before[seq] // 16  # a query sees itself alone
        positions = np.arange(before[seq], before[seq] + end - start)
        np.testing.assert_array_equal(slots[start:end], table[seq, positions // 16 - block] * 16 + positions % 16)


@pytest.mark.full
def test_within_a_shorter_sliding_window_pages_are_not_read():
    case = Case(sliding_window=13)
    tokens, want = random_tokens(case, LENGTHS)
    server, results = Server(case, tokens), []
    for q_lens in cuts_of(LENGTHS, (30, 1, 7)):
        results.append(server.step(q_lens))
        nan = jnp.full(server.cache.kv.shape, 0xFF, server.cache.kv.dtype)
        server.cache = dataclasses.replace(server.cache, kv=nan)
    assert_close([np.concatenate(of_one) for of_one in zip(*results, strict=True)], want)


NUM_LAYERS = 2


def attend_to_layers(query, key, value, cache, window, step, **options):
    """A step of a model, whose layers are a scan over one cache and one window."""

    def run(carried, layer):
        cache, window = carried
        out, cache, window = kvjax.attend(
            query, key, value, cache, step, exact_window=window, layer=layer, unique_slots=True, **options
        )
        return (cache, window), out

    return jax.lax.scan(run, (cache, window), jnp.arange(NUM_LAYERS))


@pytest.mark.parametrize("max_q_len", [2, pytest.param(16, marks=pytest.mark.full)])
def test_a_scan_over_layers_is_in_place(max_q_len: int):
    """Over a copy of the row, and over the ring."""
    case = Case("int8_per_token_head", size=10, max_q_len=max_q_len)
    (tokens,), (want,) = random_tokens(case, (24,))
    cache = KVCache.allocate(case.spec, 4, num_layers=NUM_LAYERS)
    window = ExactWindow.allocate(case.spec, 300, case.size, max_q_len=max_q_len, num_layers=NUM_LAYERS)
    pool, rows = kvjax.BlockPool(4, case.block_size), WindowRows(window)
    sequence = pool.sequence()
    addresses = [x.kv.unsafe_buffer_pointer() for x in (cache, window.ring)]
    run = jax.jit(attend_to_layers, donate_argnums=(3, 4), static_argnames="max_q_len")
    for start, stop in ((0, 15), (15, 17), (17, 18)):
        q_lens = [stop - start]
        pool.append([sequence], q_lens)
        row, _ = rows.assign([sequence], q_lens)
        step = StepMetadata.from_sequences([sequence], q_lens, num_tokens=16, max_blocks=3, window_rows=row)
        new = [np.pad(x[start:stop], ((0, 16 - q_lens[0]), (0, 0), (0, 0))) for x in vars(tokens).values()]
        compiled = run.lower(*new, cache, window, step, max_q_len=16).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < window.ring.kv.nbytes / 2
        (cache, window), out = compiled(*new, cache, window, step)
        assert_close(out[:, : q_lens[0]], [want[start:stop]] * NUM_LAYERS)
    assert [x.kv.unsafe_buffer_pointer() for x in (cache, window.ring)] == addresses


SPEC = kvjax.FullAttentionSpec(8, 2, 32, dtype="nvfp4")
ROWS = np.ones((4, 2, 32), np.float32)
STEP = StepMetadata(
    np.int32([[0], [1]]), np.int32([3, 2]), np.int32([0, 2, 4]), np.int32([1, 2, 8, 9]), np.int32([2, 0])
)


def attend(window: Any = None, step: StepMetadata = STEP, query: Any = ROWS, **options: Any) -> Any:
    window = ExactWindow.allocate(SPEC, 3, 5) if window is None else window
    return kvjax.attend(query, ROWS, ROWS, KVCache.allocate(SPEC, 2), step, exact_window=window, **options)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("layer", [NUM_LAYERS, -1])
def test_an_array_of_a_layer_out_of_range_writes_nothing_and_reads_no_tokens(layer: int, q_len: int):
    """Over the ring, and over a copy with room for a longer chunk."""
    cache = KVCache.allocate(SPEC, 1, num_layers=NUM_LAYERS)
    window = ExactWindow.allocate(SPEC, 1, 4, num_layers=NUM_LAYERS)
    arrays = [[0]], [q_len], [0, q_len], np.arange(q_len), [0]
    step = StepMetadata(*(np.array(x, np.int32) for x in arrays))
    for run in (kvjax.attend, jax.jit(kvjax.attend)):
        rows = (ROWS[:q_len],) * 3
        out, *written = run(*rows, cache, step, exact_window=window, layer=jnp.int32(layer))
        assert not np.any(out)
        assert not any(np.any(x) for x in jax.tree.leaves(written))


def test_an_int64_length_below_int32_is_that_of_no_tokens():
    """It never wraps."""
    cache, window = KVCache.allocate(SPEC, 1), ExactWindow.allocate(SPEC, 1, 4)
    with jax.enable_x64(True):
        step = StepMetadata(*(jnp.array(x) for x in ([[0]], [3 - 2**32], [0, 1], [-1], [0])))
        results = kvjax.attend(*(ROWS[:1],) * 3, cache, step, exact_window=window)
    assert not any(np.any(x) for x in jax.tree.leaves(results))


@pytest.mark.full
def test_batched_tokens_and_a_window_in_an_array_give_the_same_results():
    """Those of a static window, of `[num_tokens]`; windows that reach the pages, and that do not."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((4, 2, 32), np.float32)
    batched = kvjax.attend(
        *(x.reshape(2, 2, 2, 32) for x in (query, ROWS, ROWS)),
        KVCache.allocate(SPEC, 2),
        STEP,
        exact_window=ExactWindow.allocate(SPEC, 3, 1),
    )
    flat = attend(ExactWindow.allocate(SPEC, 3, 1), query=query)
    np.testing.assert_array_equal(batched[0].reshape(4, 2, 32), flat[0])
    np.testing.assert_array_equal(batched[2].ring.kv, flat[2].ring.kv)
    case = Case(size=6)
    tokens, _ = random_tokens(case, (30, 30))
    for sliding in (6, 7):
        static, on_device = Server(case, tokens), Server(case, tokens)
        for q_lens in ([13, 4], [1, 1], [3, 20]):
            got = on_device.step(q_lens, sliding_window=jnp.int32(sliding))
            assert_close(got, static.step(q_lens, sliding_window=sliding))


@pytest.mark.full
def test_traced_values_are_checked_in_checked_mode():
    run = jax.jit(checkify.checkify(attend))
    with kvjax.checked():
        error, _ = run()
        error.throw()
        error, _ = run(step=dataclasses.replace(STEP, window_rows=np.int32([1, 1])))
    with pytest.raises(checkify.JaxRuntimeError, match=r"metadata.window_rows\[1\]: got 1, expected a unique row"):
        error.throw()


def window_of(**changes: Any) -> ExactWindow:
    options = {"num_kv_heads": 2, "head_size": 32} | changes
    num_layers = options.pop("num_layers", None)
    return ExactWindow.allocate(simple_spec(**options), 3, 5, num_layers=num_layers)


def with_rows(*rows: int, dtype: Any = np.int32) -> StepMetadata:
    return dataclasses.replace(STEP, window_rows=np.array(rows, dtype))


ALLOCATE = functools.partial(ExactWindow.allocate, SPEC)
INVALID = {
    "no window": (lambda: attend(SPEC), KVCacheTypeError, "exact_window: got .*, expected an ExactWindow"),
    "other heads": (
        lambda: attend(window_of(num_kv_heads=4)),
        KVCacheValueError,
        "exact_window: got num_kv_heads=4, expected 2 as the cache",
    ),
    "other head sizes": (
        lambda: attend(window_of(head_size_v=16)),
        KVCacheValueError,
        "exact_window: got head_size_v=16, expected 32 as the cache",
    ),
    "layers": (
        lambda: attend(window_of(num_layers=2)),
        KVCacheValueError,
        "exact_window: got num_layers=2, expected None as the cache",
    ),
    "no rows": (
        lambda: attend(step=dataclasses.replace(STEP, window_rows=None)),
        KVCacheValueError,
        "metadata.window_rows: got None, expected each sequence's row of the window",
    ),
    "shape of rows": (
        lambda: attend(step=with_rows(0)),
        KVCacheValueError,
        r"metadata.window_rows: got shape \(1,\), expected \[num_seqs=2\]",
    ),
    "dtype of rows": (
        lambda: attend(step=with_rows(0, 1, dtype=np.float32)),
        KVCacheTypeError,
        "metadata.window_rows: got dtype float32, expected one of int32, int64",
    ),
    "no size": (lambda: ALLOCATE(3, 0), KVCacheValueError, "size: got 0, expected an int of at least 1"),
    "a float": (lambda: ALLOCATE(3, 1.5), KVCacheTypeError, "size: got 1.5 of type float, expected an int"),
    "no rows of it": (lambda: ALLOCATE(0, 4), KVCacheValueError, "num_rows: got 0, expected an int of at least 1"),
    "no query": (
        lambda: ALLOCATE(3, 4, max_q_len=0),
        KVCacheValueError,
        "max_q_len: got 0, expected an int of at least 1",
    ),
    "too many slots": (
        lambda: ALLOCATE(2**27, 17),
        KVCacheValueError,
        "num_rows: got 134217728, expected an int of at most 67108863",
    ),
    "no spec": (lambda: ExactWindow.allocate("nvfp4", 3, 4), KVCacheTypeError, "spec: got 'nvfp4' of type str, expec"),
    "latents": (
        lambda: ExactWindow.num_bytes(kvjax.MLAAttentionSpec(16, 512, 64, dtype="nvfp4"), 3, 4),
        UnsupportedError,
        "ExactWindow: got a spec of latents .MLA., expected one of keys and values",
    ),
    "pairs": (
        lambda: kvjax.copy_window_rows(ALLOCATE(3, 4), np.zeros(2, np.int32)),
        KVCacheValueError,
        r"pairs: got shape \(2,\), expected \[num_pairs, rows=2\]",
    ),
    "rows to fill": (
        lambda: kvjax.fill_exact_window(ALLOCATE(3, 4), KVCache.allocate(SPEC, 2), STEP, np.zeros(3, np.int32)),
        KVCacheValueError,
        r"rows: got shape \(3,\), expected \[num_seqs=2\]",
    ),
    "metadata": (
        lambda: kvjax.fill_exact_window(ALLOCATE(3, 4), KVCache.allocate(SPEC, 2), None, np.zeros(2, np.int32)),
        KVCacheTypeError,
        "metadata: got None, expected a StepMetadata",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_are_refused_by_name(name: str):
    call, error, message = INVALID[name]
    with pytest.raises(error, match=message):
        call()


def test_rows_that_a_window_does_not_have_are_named_in_checked_mode():
    for rows, message in (
        ((3, 0), r"\[0\]: got 3, expected between 0 and 2"),
        ((0, 0), r"\[1\]: got 0, expected a uni"),
    ):
        with kvjax.checked(), pytest.raises(KVCacheValueError, match=f"metadata.window_rows{message}"):
            attend(step=with_rows(*rows))
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=r"rows\[1\]: got -2, expected between 0 and 2"):
        kvjax.fill_exact_window(ALLOCATE(3, 4), KVCache.allocate(SPEC, 2), STEP, np.int32([-1, -2]))


@pytest.mark.full
def test_a_row_that_a_window_does_not_have_changes_nothing():
    """Not even the row that the low half of an int64 is."""
    window = ALLOCATE(3, 5)
    window = dataclasses.replace(window, ring=dataclasses.replace(window.ring, kv=window.ring.kv + 7))
    rows = with_rows(2**32, 3, dtype=np.int64)
    np.testing.assert_array_equal(attend(window, rows)[2].ring.kv, window.ring.kv)


def test_num_bytes_returns_the_size_of_the_ring():
    for size, max_q_len, tokens in ((64, 1, 64), (64, 2, 80), (128, 1, 128), (1, 1, 16), (17, 16, 32)):
        window = ALLOCATE(5, size, max_q_len=max_q_len, num_layers=3)
        assert (window.num_rows, window.tokens_per_row) == (5, tokens)
        assert window.ring.spec.dtype is KVCacheDType.BFLOAT16
        assert window.ring.kv.nbytes == 3 * ExactWindow.num_bytes(SPEC, 5, size, max_q_len=max_q_len)
        assert window.ring.kv.nbytes == 3 * 5 * tokens * 2 * (32 + 32) * 2


def test_padding_without_sequences_sees_nothing():
    spec = kvjax.FullAttentionSpec(8, 2, 32, dtype=kvjax.KVCacheDType.NVFP4)
    cache, window = kvjax.KVCache.allocate(spec, 4), ExactWindow.allocate(spec, 2, 20)
    none = np.zeros(0, np.int32)
    step = StepMetadata(np.zeros((0, 3), np.int32), none, np.zeros(1, np.int32), np.full(3, -1, np.int32), none)
    query, key = np.ones((3, 4, 32), np.float32), np.ones((3, 2, 32), np.float32)
    out, cache, window = kvjax.attend(query, key, key, cache, step, exact_window=window)
    assert not np.any(out)
    assert not np.any(window.ring.kv)
