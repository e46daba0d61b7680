"""What every run tries of a matrix: every value of every axis, or every two values of two axes that meet anywhere."""

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


def test_every_value_is_taken_and_little_else():
    few, total = taken(matrix(AXES, valid=is_valid))
    assert [set(values) for values in zip(*few, strict=True)] == [set(values) for values in AXES.values()]
    assert (len(few), total) == (3, 3 * 2 * 3 - 2)


def test_every_two_values_that_meet_are_taken():
    few, total = taken(matrix(AXES, valid=is_valid, pairs=True))
    for a, b in itertools.combinations(range(3), 2):
        met = {(values[a], values[b]) for values in few}
        assert met == {pair for pair in itertools.product(*[*AXES.values()][a : b + 1 : b - a]) if pair != ("b", 8)}
    assert len(few) < total


def test_of_an_axis_there_may_be_few_values():
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
