"""Attention over latents of random formats, lengths and query rows by XLA, against float64.

Every run tries the same examples, more with `--nightly`; `FUZZ_SECONDS=900 pytest tests/test_fuzz_mla.py` others, for
that many seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.helpers import INPUT_DTYPES
from support.mla_cases import SM_SCALE, assert_right, build, queries, spec_of

from kvjax import MLA_KV_CACHE_DTYPES, mla_paged_attention, mla_ragged_paged_attention

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))

SIZES = [(512, 64), (256, 32), (128, 0)]
OTHER_SIZES = [(48, 2), (20, 5)]
"""What formats with scales of their own do not take, and NVFP4 only the first."""


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(MLA_KV_CACHE_DTYPES))
    is_plain = dtype.value not in ("fp8_ds_mla", "nvfp4", "nvfp4_4over6")
    return {
        "spec": spec_of(
            dtype,
            draw(st.sampled_from(SIZES + OTHER_SIZES if is_plain else SIZES)),
            draw(st.sampled_from([1, 3, 8, 16])),
        ),
        "lengths": draw(st.lists(st.sampled_from([0, 1, 2]) | st.integers(0, 90), min_size=1, max_size=4)),
        "heads": draw(st.sampled_from([1, 3, 16])),
        "query_dtype": draw(st.sampled_from(list(INPUT_DTYPES))),
        "window": draw(st.none() | st.integers(1, 40)),
        "cap": draw(st.none() | st.sampled_from([0.5, 3.0])),
    }


def check_last_tokens(problem: dict[str, Any], q_len: int) -> None:
    """What no row sees, and blocks of no sequence, are NaN."""
    spec, lengths, heads, query_dtype, window, cap = problem.values()
    made = build(spec, lengths, window and window + q_len - 1)
    q = queries(spec, (len(lengths), q_len, heads), query_dtype)
    options = {"sliding_window": window, "logits_soft_cap": cap, "scale": made.scale, "implementation": "xla"}
    read = made.cache, made.block_table, made.seq_lens
    out, lse = mla_paged_attention(*q, *read, sm_scale=SM_SCALE, return_lse=True, **options)
    for seq in range(len(lengths)):
        assert_right(made, [x[seq] for x in q], out[seq], lse[seq], seq, window=window, cap=cap)


def check_ragged(problem: dict[str, Any], q_lens: list[int], unused: int) -> None:
    """Rows of no sequence see nothing; a sequence may have more of them than tokens."""
    spec, lengths, heads, query_dtype, window, cap = problem.values()
    q_lens = np.resize(q_lens, len(lengths))
    made = build(spec, lengths, window and window + int(max(q_lens.max(), 1)) - 1)
    bounds = np.array([0, *np.cumsum(q_lens)], np.int32)
    q = queries(spec, (int(bounds[-1]) + unused, heads), query_dtype)
    options = {"sliding_window": window, "logits_soft_cap": cap, "scale": made.scale, "implementation": "xla"}
    read = made.cache, made.block_table, made.seq_lens, bounds
    out, lse = mla_ragged_paged_attention(*q, *read, sm_scale=SM_SCALE, return_lse=True, **options)
    for seq in range(len(lengths)):
        rows = slice(bounds[seq], bounds[seq + 1])
        assert_right(made, [x[rows] for x in q], out[rows], lse[rows], seq, window=window, cap=cap)
    assert not np.asarray(out[bounds[-1] :], np.float32).any()
    assert np.isneginf(lse[bounds[-1] :]).all()


CHECKS: dict[str, tuple[Callable[..., None], tuple[st.SearchStrategy[Any], ...]]] = {
    "last tokens": (check_last_tokens, (problems(), st.integers(1, 8))),
    "ragged": (
        check_ragged,
        (problems(), st.lists(st.sampled_from([0, 1, 1, 5, 40]), min_size=1, max_size=4), st.integers(0, 3)),
    ),
}
MOST = {"few": 8, "any": 60}


@pytest.mark.parametrize("of", ["few", pytest.param("any", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CHECKS)
def test_attention_is_that_of_float64(name: str, of: str):
    check, inputs = CHECKS[name]
    fuzz = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    if not SECONDS:
        settings(fuzz, derandomize=True, max_examples=MOST[of])(given(*inputs)(check))()
        return
    start = time.monotonic()
    while time.monotonic() - start < SECONDS:
        settings(fuzz, max_examples=10, phases=[Phase.generate])(given(*inputs)(check))()
        jax.clear_caches()
