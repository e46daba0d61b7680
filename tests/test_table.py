"""A table is Markdown, and its columns line up."""

from __future__ import annotations

import pytest

from kvjax.table import markdown_table


def test_words_stand_left_and_numbers_right():
    table = markdown_table(["dtype", "bytes"], [["float32", "8,192"], ["nvfp4", "576"]])
    assert table.splitlines() == [
        "| dtype   | bytes |",
        "| ------- | ----: |",
        "| float32 | 8,192 |",
        "| nvfp4   |   576 |",
    ]


def test_several_columns_may_be_aligned_left():
    table = markdown_table(["a", "long", "n"], [["wide", "b", "10"]], left=2)
    assert table.splitlines() == ["| a    | long |  n |", "| ---- | ---- | -: |", "| wide | b    | 10 |"]


def test_a_row_that_does_not_fit_the_header_is_refused():
    with pytest.raises(ValueError, match="zip"):
        markdown_table(["a", "b"], [["1"]])
