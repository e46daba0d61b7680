"""Attention with an exact window mixes what was given and what pages store, whatever a sequence's steps were."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import checkify
from support.exact_windows import NUM_TOKENS, Case, Server, Tokens, cuts_of, expected, random_tokens
from support.helpers import FEW_DTYPES, compilations, simple_spec

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
)

LENGTHS = (61, 9, 40)
CUTS = ((1, 1, 1), (17, 3, 8), (61, 9, 40), (24, 1, 33))
"""The most tokens of each sequence in a step."""

DRAFTS = Case(
    "fp8_e4m3", size=7, max_q_len=4, sliding_window=19, cap=3.0, sinks=True, layout="HND", block_size=4, head_size_v=16
)
CASES = {
    "nvfp4": Case(),
    "drafts": DRAFTS,
    **{
        name: pytest.param(case, marks=pytest.mark.full)
        for name, case in {
            "4over6, one head": Case("nvfp4_4over6", size=64, num_kv_heads=1, group=3),
            "int8": Case("int8_per_token_head", size=16, block_size=3, sinks=True),
            "fp8 keys": Case("fp8_k_nvfp4_v", size=1, cap=2.0),
            "window of the layer and of its size": Case("nvfp4", size=12, sliding_window=12, sinks=True),
            "shorter window": Case("fp8_e5m2", size=33, sliding_window=5, max_q_len=3),
            "window longer by one": Case("nvfp4", size=12, sliding_window=13, max_q_len=2),
            "blocks larger than windows": Case("nvfp4", size=5, block_size=64, max_q_len=3),
            "unquantized": Case("bfloat16", size=9),
            "window longer than texts": Case("nvfp4", size=500, max_q_len=2),
        }.items()
    },
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
    assert is_exact or all(np.abs(one - other).max() > 1e-2 for one, other in zip(want, stored, strict=True))


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
    for position, accepted in ((20, 0), (20, 1), (21, 3), (24, 4), (28, 2), (30, 4)):
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
    mixed = {name: np.concatenate([x[:32], getattr(other, name)[32:]]) for name, x in dataclasses.asdict(tokens).items()}
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


def test_fewer_rows_than_sequences():
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
