"""Drafts change the number of steps, not the tokens, whatever they are and whatever a window frees."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from examples import llama
from examples.speculative import Draft, Speculator, lookup
from kvjax import KVCacheValueError, OutOfBlocksError

CONFIG = llama.ModelConfig(61, 32, 48, 2, 4, 2, 16)
SPECS = {
    None: kvjax.FullAttentionSpec(4, 2, 16, dtype="float32"),
    6: kvjax.SlidingWindowSpec(4, 2, 16, dtype="float32", sliding_window=6),
}
NUM_BLOCKS, MAX_BLOCKS, NUM_NEW = 24, 12, 14
PROMPTS = [np.random.default_rng(seed).integers(0, 61, length).tolist() for seed, length in enumerate((9, 15))]


@functools.cache
def params() -> llama.Params:
    return llama.random_params(CONFIG, jax.random.key(0), "float32")


def speculator(window: int | None, draft: Draft, num_drafts: int = 3) -> tuple[Speculator, kvjax.BlockPool]:
    spec = SPECS[window]
    pool = kvjax.BlockPool(NUM_BLOCKS, groups=[spec])
    cache = kvjax.KVCache.allocate(spec, NUM_BLOCKS, num_layers=2)
    cache = kvjax.KVCache(jnp.full_like(cache.kv, jnp.nan), spec, num_layers=2)
    made = Speculator(params(), CONFIG, cache, pool, draft=draft, num_drafts=num_drafts, max_blocks=MAX_BLOCKS)
    return made, pool


@functools.cache
def greedy(window: int | None) -> list[list[int]]:
    """Token by token, each time from the whole text and nothing kept: no drafts, nothing freed, nothing taken back."""
    attend = functools.partial(jax.jit(llama.greedy_step, static_argnames="config"), params(), config=CONFIG)
    found = []
    for prompt in PROMPTS:
        known = list(prompt)
        for _ in range(NUM_NEW):
            pool = kvjax.BlockPool(MAX_BLOCKS, 4)
            sequence = pool.sequence()
            pool.append([sequence], [len(known)])
            step = kvjax.StepMetadata.from_sequences([sequence], [len(known)], num_tokens=32, max_blocks=MAX_BLOCKS)
            cache = kvjax.KVCache.allocate(SPECS[window], MAX_BLOCKS, num_layers=2)
            tokens = np.pad(known, (0, 32 - len(known))).astype(np.int32)
            following, _ = attend(tokens, np.zeros(1, np.int32), step, cache)
            known.append(int(following[0]))
        found.append(known)
    return found


def of_text(window: int | None, wrong_every: int) -> Draft:
    """The tokens that will follow, but for every so many of them."""

    def draft(known: Sequence[int], most: int) -> Sequence[int]:
        text = next(tokens for tokens in greedy(window) if tokens[: len(known)] == list(known))
        following = text[len(known) : len(known) + most]
        return [(t + 1) % 61 if (len(known) + i) % wrong_every == 0 else t for i, t in enumerate(following)]

    return draft


@pytest.mark.full
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.full), 6])
def test_tokens_are_those_of_greedy_decoding(window):
    expected, steps = greedy(window), {}
    assert all(len(set(tokens[-NUM_NEW:])) > 3 for tokens in expected), "the text is not one token again and again"
    drafts = {"none": lambda known, most: [], "lookup": lookup, "wrong": of_text(window, 1)}
    drafts |= {"some": of_text(window, 3), "right": of_text(window, 10**6)}
    for name, draft in drafts.items():
        made, pool = speculator(window, draft)
        assert made.generate(PROMPTS, NUM_NEW) == expected, name
        assert pool.num_free == NUM_BLOCKS
        steps[name] = made.num_steps
        # What it has left in the cache is found again, and is right.
        assert made.generate(PROMPTS, NUM_NEW) == expected, name
    assert steps["none"] == steps["wrong"] == NUM_NEW - 1
    assert steps["right"] == -(-(NUM_NEW - 1) // 4)
    assert steps["right"] < steps["some"] < steps["none"]


def test_no_new_tokens_are_accepted_and_a_negative_number_is_refused():
    made, pool = speculator(None, lookup)
    assert made.generate(PROMPTS, 0) == PROMPTS
    assert (pool.num_free, pool.num_cached, made.num_steps) == (NUM_BLOCKS, 0, 0)
    with pytest.raises(ValueError, match="num_new_tokens: got -1, expected at least 0"):
        made.generate(PROMPTS, -1)


@pytest.mark.parametrize("num_own", [20, 16], ids=["a prompt", "a step"])
def test_a_pool_that_runs_out_of_blocks_keeps_none_of_them(num_own):
    made, pool = speculator(None, lookup)
    own = pool.sequence()
    pool.append([own], [4 * num_own])
    before = own.blocks.tolist()
    with pytest.raises(OutOfBlocksError):
        made.generate(PROMPTS, NUM_NEW)
    assert (pool.num_free, own.blocks.tolist()) == (NUM_BLOCKS - num_own, before)
    own.free()
    assert made.generate(PROMPTS, NUM_NEW) == speculator(None, lookup)[0].generate(PROMPTS, NUM_NEW)


def test_truncate_commit_and_free_before_may_be_called_in_the_documented_order():
    """In a pool that knows no window: what may be taken back is not freed, and what is committed is not taken back."""
    window, pool = 5, kvjax.BlockPool(16, 2)
    sequence = pool.sequence()
    pool.append([sequence], [9])
    sequence.commit(range(9))
    for accepted in (2, 0, 1, 3):
        start = sequence.num_tokens
        sequence.free_before(start - window + 1)
        pool.append([sequence], [4])
        assert (sequence.blocks[(start - window + 1) // 2 :] >= 0).all()
        sequence.truncate(start + 1 + accepted)
        sequence.commit(range(start, start + 1 + accepted))
        assert sequence.token_ids.tolist() == list(range(start + 1 + accepted))
        assert pool.num_cached_tokens(range(start + 9)) == (start + 1 + accepted) // 2 * 2
    start = sequence.num_tokens
    pool.append([sequence], [4])
    sequence.free_before(start + 3 - window + 1 + 4)  # after the drafts, for a query behind them
    with pytest.raises(KVCacheValueError, match="the blocks of the earlier tokens were freed"):
        sequence.truncate(start + 1)


def test_lookup_guesses_what_followed_before():
    assert lookup([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert lookup([1, 2, 9, 1, 2, 3, 1, 2], 1) == [3]
    assert list(lookup([1, 2, 3], 4)) == list(lookup([1], 4)) == []
