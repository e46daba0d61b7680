"""What is tried of a matrix: in every run each value of each axis, or each two of two axes; in full each two."""

from __future__ import annotations

import itertools

import pytest
from support.helpers import FEW_DTYPES, each_case, matrix, pairwise

from kvjax import STORED_KV_CACHE_DTYPES

AXES = {"dtype": ["a", "b", "c"], "layout": ["NHD", "HND"], "heads": [1, 2, 8]}


def is_valid(case: dict) -> bool:
    return (case["dtype"], case["heads"]) != ("b", 8)


def taken(mark: pytest.MarkDecorator) -> tuple[list[tuple], int]:
    """The values of the cases that are not left out, and how many there are in all."""
    params = mark.args[1]
    return [param.values for param in params if not param.marks], len(params)


def pairs_of(mark: pytest.MarkDecorator) -> set[tuple]:
    """Each two values of two axes that a case has, with the axes' numbers."""
    return {pair for param in mark.args[1] for pair in itertools.combinations(enumerate(param.values), 2)}


def test_few_cases_take_every_value():
    few, total = taken(matrix(AXES, valid=is_valid))
    assert [set(values) for values in zip(*few, strict=True)] == [set(values) for values in AXES.values()]
    assert len(few) == 3 < total


def test_in_full_every_two_values_that_meet_are_taken_and_few_other_cases():
    full, whole = matrix(AXES, valid=is_valid), matrix(AXES, valid=is_valid, whole=True)
    assert pairs_of(full) == pairs_of(whole)
    assert len(full.args[1]) < len(whole.args[1]) == 3 * 2 * 3 - 2


def test_dtypes_but_one_of_each_kind_meet_only_what_the_code_of_each_depends_on():
    full = matrix({"dtype": STORED_KV_CACHE_DTYPES, "layout": AXES["layout"], "heads": AXES["heads"]})
    met = pairs_of(full)
    for dtype in STORED_KV_CACHE_DTYPES:
        assert {((0, dtype), (1, layout)) for layout in AXES["layout"]} <= met
        has_all = {((0, dtype), (2, heads)) for heads in AXES["heads"]} <= met
        assert has_all == (dtype in FEW_DTYPES)


def test_every_two_values_that_meet_are_taken():
    few, total = taken(matrix(AXES, valid=is_valid, pairs=True))
    for a, b in itertools.combinations(range(3), 2):
        met = {(values[a], values[b]) for values in few}
        assert met == {pair for pair in itertools.product(*[*AXES.values()][a : b + 1 : b - a]) if pair != ("b", 8)}
    assert len(few) == total < 3 * 2 * 3 - 2


def test_an_axis_may_be_limited_to_few_values():
    few, _ = taken(matrix(AXES, few={"dtype": ["a"], "heads": [1, 8]}))
    assert {values[0] for values in few} == {"a"}
    assert {values[2] for values in few} == {1, 8}


def test_of_dtypes_one_of_each_kind_is_taken():
    names = [dtype.value for dtype in STORED_KV_CACHE_DTYPES]
    for values, kinds in ((STORED_KV_CACHE_DTYPES, FEW_DTYPES), (names, [dtype.value for dtype in FEW_DTYPES])):
        few, total = taken(matrix({"dtype": values, "layout": AXES["layout"]}))
        assert {values[0] for values in few} == set(kinds)
        assert (len(few), total) == (len(kinds), 2 * len(values))
        named, _ = taken(matrix({"dtype": values}, few={"dtype": values[:1]}))
        assert [values[0] for values in named] == [values[0]]


def test_cases_are_taken_as_combinations_are():
    cases = pairwise(AXES, is_valid)
    few, total = taken(each_case(cases))
    assert total == len(cases)
    for axis, values in AXES.items():
        assert {case[axis] for (case,) in few} == set(values)
