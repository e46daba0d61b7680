"""Attention with an exact window is a mix of what was given and what pages store, whatever the steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import exact_windows
from support.exact_windows import Case, Server, cuts_of, random_tokens

LENGTHS = (61, 9, 40)


def assert_close(got, expected, tolerance: float = 2e-5) -> None:
    for one, of_one in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, of_one, atol=tolerance, rtol=0)


def test_decodes_and_prompts():
    case = Case()
    tokens, want = random_tokens(case, LENGTHS)
    for sizes in ((1, 1, 1), (17, 3, 8), (61, 9, 40)):
        assert_close(Server(case, tokens).serve(cuts_of(LENGTHS, sizes)), want)
