"""Trees of drafts change the number of steps, not the tokens, and leave each token's keys and values in its slot."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from examples import llama
from examples.speculative import Speculator, lookup
from examples.tree_drafts import Branches, Tree, TreeSpeculator, lookups

CONFIG = llama.ModelConfig(7, 32, 48, 2, 4, 2, 16)  # of few tokens: its texts repeat themselves, but not exactly
SPEC = kvjax.FullAttentionSpec(4, 2, 16, dtype="float32")
NUM_BLOCKS, NUM_NEW = 48, 60
PROMPTS = [np.random.default_rng(seed).integers(0, 7, length).tolist() for seed, length in ((5, 9), (1, 14))]


@functools.cache
def params() -> llama.Params:
    return llama.random_params(CONFIG, jax.random.key(1), "float32")


def made(kind: type[Speculator], spec: kvjax.AttentionSpec = SPEC, **options: Any) -> tuple[Speculator, Any]:
    pool = kvjax.BlockPool(NUM_BLOCKS, groups=[spec])
    cache = kvjax.KVCache(jnp.full(spec.cache_shape(NUM_BLOCKS, 2), jnp.nan, "float32"), spec, num_layers=2)
    return kind(params(), CONFIG, cache, pool, max_blocks=24, **options), pool


@functools.cache
def without_drafts(spec: kvjax.AttentionSpec = SPEC) -> tuple[list[list[int]], Speculator, Any]:
    """The tokens, and the cache and the pool after them: what examples/speculative.py is tested against."""
    speculator, pool = made(Speculator, spec, num_drafts=0)
    return speculator.generate(PROMPTS, NUM_NEW), speculator, pool


def greedy(spec: kvjax.AttentionSpec = SPEC) -> list[list[int]]:
    return without_drafts(spec)[0]


def of_text(known: Sequence[int], most: int, spec: kvjax.AttentionSpec = SPEC) -> Sequence[int]:
    text = next(tokens for tokens in greedy(spec) if tokens[: len(known)] == list(known))
    return text[len(known) : len(known) + most]


def behind_a_wrong_branch(known: Sequence[int], most: int, spec: kvjax.AttentionSpec = SPEC) -> list[list[int]]:
    """The tokens that will follow, after others at every depth."""
    right = of_text(known, most, spec)
    return [[(token + 1) % 7 for token in right], list(right)]


def apart_later(known: Sequence[int], most: int) -> list[list[int]]:
    """Branches that begin alike; the right one is the last to leave, and is joined to the others."""
    right = list(of_text(known, most))
    return [[*right[:depth], *[(token + 1) % 7 for token in right[depth:]]] for depth in range(1, len(right) + 1)]


BRANCHES: dict[str, Branches] = {
    "none": lambda known, most: [],
    "wrong": lambda known, most: behind_a_wrong_branch(known, most)[:1],
    "behind a wrong branch": behind_a_wrong_branch,
    "apart later": apart_later,
    "of the text": lookups,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_tokens_and_pages_are_those_without_drafts(name):
    speculator, pool = made(TreeSpeculator, num_drafts=6, draft=BRANCHES[name])
    assert speculator.generate(PROMPTS, NUM_NEW) == greedy()
    assert pool.num_free == NUM_BLOCKS
    texts, plain, of_plain = without_drafts()
    for text in texts:
        kept = []
        for each, own_pool in ((speculator, pool), (plain, of_plain)):
            sequence = own_pool.sequence(text)
            assert sequence.num_tokens == (len(text) - 1) // 4 * 4
            cache = kvjax.KVCache(each._cache.kv[:, 1], SPEC)  # the last layer's
            kept.append(kvjax.gather_kv(cache, sequence.blocks[None], np.array([sequence.num_tokens])))
        np.testing.assert_allclose(kept[0], kept[1], rtol=0, atol=1e-5)
    steps = NUM_NEW - 1
    expected = {"none": steps, "wrong": steps, "behind a wrong branch": -(-steps // 4)}
    assert name not in expected or speculator.num_steps == expected[name]


def test_more_than_one_draft_a_step_is_right_where_a_text_repeats_itself():
    """And more than of one branch of as many tokens: the text goes on in two ways, which take turns."""
    found = {}
    for kind, draft in ((Speculator, functools.partial(lookup, ngram=1)), (TreeSpeculator, lookups)):
        speculator, _ = made(kind, num_drafts=6, draft=draft)
        [text] = speculator.generate(PROMPTS[:1], NUM_NEW)
        assert text == greedy()[0]
        found[kind] = speculator.num_steps
        assert speculator.num_accepted == NUM_NEW - 1 - speculator.num_steps
    assert speculator.num_accepted > 1.5 * speculator.num_steps
    assert found[TreeSpeculator] < found[Speculator]


def test_branches_are_joined_where_they_begin_alike():
    tree = Tree.of(5, [[1, 2, 3], [4], [1, 6, 3, 0]], 10)
    assert tree == ([5, 1, 4, 2, 6, 3, 3, 0], [-1, 0, 0, 1, 1, 3, 4, 6])
    assert Tree.of(5, [[1, 2, 3], [4], [1, 6, 3, 0]], 4) == (tree.tokens[:5], tree.parents[:5])
    assert Tree.of(5, [], 3) == ([5], [-1])
    seen = [np.flatnonzero(row).tolist() for row in tree.mask(9)]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 1, 3, 5], [0, 1, 4, 6], [0, 1, 4, 6, 7], [8]]


def test_the_longest_path_of_tokens_that_follow_is_accepted():
    tree = Tree.of(5, [[1, 2, 3], [4], [1, 6, 3, 0]], 10)
    assert tree.accepted([1, 6, 9, 9, 3, 9, 9, 9]) == [0, 1, 4, 6]
    assert tree.accepted([4, 6, 1, 9, 3, 9, 9, 9]) == [0, 2]
    assert tree.accepted([2, 2, 2, 2, 2, 2, 2, 2]) == [0]


def test_lookups_are_what_followed_in_different_ways():
    assert lookups([1, 2, 1, 3, 1, 3, 1], 2) == [[3, 1], [2, 1]]
    assert lookups([1, 2, 1, 3, 1], 9) == [[3, 1], [2, 1, 3, 1]]
    assert lookups([1, 2, 1], 0) == lookups([1, 2, 3], 4) == []


@pytest.mark.parametrize("window", [3, 6])
def test_tokens_are_those_without_drafts_where_layers_have_a_sliding_window(window):
    """Shorter than a branch, and as long as one that is accepted behind another: its rows see by their positions."""
    spec = kvjax.SlidingWindowSpec(4, 2, 16, dtype="float32", sliding_window=window)
    drafts = functools.partial(behind_a_wrong_branch, spec=spec)
    speculator, pool = made(TreeSpeculator, spec, num_drafts=6, draft=drafts)
    assert speculator.generate(PROMPTS, NUM_NEW) == greedy(spec) != greedy()
    assert speculator.num_steps == -(-(NUM_NEW - 1) // 4)
    assert pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("kind", [Speculator, TreeSpeculator])
def test_a_negative_number_of_drafts_and_an_empty_prompt_are_refused(kind):
    with pytest.raises(ValueError, match="num_drafts: got -1, expected at least 0"):
        made(kind, num_drafts=-1)
    speculator, pool = made(kind)
    with pytest.raises(ValueError, match=r"prompts\[1\]: got no tokens, expected at least one"):
        speculator.generate([PROMPTS[0], []], 3)
    assert pool.num_free == NUM_BLOCKS
