"""The options of attention: which values are accepted, and the sizes that follow from a call's limits."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from kvjax import KVCacheTypeError, KVCacheValueError
from kvjax.ops import options
from kvjax.ops.options import Buckets, Limits


@pytest.mark.parametrize(
    ("limits", "num_tokens", "num_seqs", "expected"),
    [
        (Limits(), 0, 3, Buckets(0, 0, 1)),
        (Limits(), 8, 3, Buckets(8, 0, 8)),
        (Limits(), 9, 3, Buckets(9, 3, 1)),
        (Limits(), 9, 20, Buckets(9, 4, 1)),
        (Limits(max_q_len=4), 100, 3, Buckets(4, 0, 4)),
        (Limits(max_q_len=200, max_prompts=2), 100, 3, Buckets(100, 2, 1)),
        (Limits(decode_q_len=40), 9, 3, Buckets(9, 0, 9)),
        (Limits(decode_q_len=0), 2, 3, Buckets(2, 2, 0)),
    ],
)
def test_each_bucket_is_as_small_as_the_others_allow(limits, num_tokens, num_seqs, expected):
    assert options.buckets(limits, num_tokens, num_seqs) == expected


def test_buckets_hold_every_call_of_their_sizes():
    """No step of so many tokens and sequences, within the limits that were given, exceeds a bucket."""
    for num_tokens, limits in itertools.product(range(7), map(Limits, (None, 1, 3, 9), (None,), (None, 0, 1, 2, 9))):
        for q_lens in itertools.product(range(num_tokens + 1), repeat=2):
            longest = max(q_lens)
            if sum(q_lens) > num_tokens or longest > (limits.max_q_len or num_tokens):
                continue
            held = options.buckets(limits, num_tokens, 2)
            assert longest <= held.max_q_len
            assert sum(q_len > held.decode_q_len for q_len in q_lens) <= held.max_prompts


def test_buckets_of_a_batch_invariant_call_do_not_depend_on_the_number_of_tokens():
    limits = Limits(max_q_len=50, decode_q_len=4)
    found = {options.buckets(limits, num_tokens, 3, batch_invariant=True) for num_tokens in (4, 50, 900)}
    assert found == {Buckets(50, 3, 4)}


@pytest.mark.parametrize("number", [1, np.int64(1), 0.5, np.float16(0.5), Fraction(1, 2)])
def test_a_real_number_becomes_a_float(number):
    assert options.as_float("x", number) == float(number)


@pytest.mark.parametrize("number", [math.inf, math.nan, 1e39, 10**400])
def test_a_number_that_float32_does_not_hold_is_refused(number):
    with pytest.raises(KVCacheValueError, match=r"x: got .*, expected a number that is finite in float32"):
        options.as_float("x", number)


@pytest.mark.parametrize("number", [True, np.True_, "1", 1j, np.ones(1)])
def test_what_is_no_real_number_is_refused(number):
    with pytest.raises(KVCacheTypeError, match=r"x: got .*, expected a float or None"):
        options.as_float("x", number)


@pytest.mark.parametrize("cap", [0, -1.0, 1e-39])
def test_a_soft_cap_that_is_not_positive_in_float32_is_refused(cap):
    with pytest.raises(KVCacheValueError, match=r"logits_soft_cap: got .*, expected a positive number or None"):
        options.as_soft_cap(cap)


@pytest.mark.parametrize("cap", [None, 30.0, 2.0**-126])
def test_a_soft_cap_that_float32_holds_is_taken(cap):
    assert options.as_soft_cap(cap) == cap


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_no_tokens_is_refused(window):
    with pytest.raises(KVCacheValueError, match=rf"sliding_window: got {window}, expected a positive int or None"):
        options.as_window(window)


def test_a_window_that_no_sequence_exceeds_is_none():
    assert options.as_window(2**31 - 1) == 2**31 - 1
    assert options.as_window(2**31) is None
    assert options.as_window(None) is None


def test_a_window_restricts_tables_that_hold_more_tokens():
    assert options.restricting(64, 65) == 64
    assert options.restricting(64, 64) is None
    assert options.restricting(None, 64) is None


def test_reached_blocks_are_those_that_rows_see_at_the_worst_offset():
    size, max_blocks = 4, 6
    for window, q_len in itertools.product(range(1, 20), range(1, 10)):
        ends = range(q_len + window, q_len + window + size)  # of sequences that are longer than what rows see
        most = max((end - 1) // size - (end - q_len - (window - 1)) // size + 1 for end in ends)
        assert options.num_reached_blocks(window, q_len, max_blocks, size) == min(most, max_blocks)
    assert options.num_reached_blocks(None, 1, max_blocks, size) == max_blocks


@pytest.mark.parametrize(("prompt_bytes", "expected"), [(0, 5), (1, 5), (1 << 29, 2), (1 << 30, 1), (1 << 31, 1)])
def test_prompts_processed_at_once_fit_the_limit(prompt_bytes, expected):
    assert options.prompts_at_once(prompt_bytes, 5) == expected


@pytest.mark.parametrize(("num_rows", "num_heads", "head_size"), [(1, 1, 64), (2048, 32, 128), (70_000, 64, 128)])
def test_splits_are_as_many_as_their_results_fit_the_limit(num_rows, num_heads, head_size):
    splits = options.most_splits(num_rows, num_heads, head_size)
    of_one = num_rows * num_heads * (4 * head_size + 4)
    assert splits * of_one <= options.SPLIT_BYTES < (splits + 1) * of_one
