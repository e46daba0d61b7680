"""What ragged attention is checked by, whoever attends: steps, and checks of what was attended to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from support import attention_suite as suite
from support.attention_suite import Attend, Case
from support.helpers import assert_same_bytes

BUCKETS = ("max_q_len", "max_prompts", "decode_q_len")


STATIC = (
    *BUCKETS, "sm_scale", "sliding_window", "logits_soft_cap", "return_lse", "implementation", "batch_invariant",
    "query_quantization",
)  # fmt: skip


INTERPRETS_JOINS = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax before 0.12 interprets no kernel that joins rows of prompts"
)


PADDING = 3
"""Rows of no sequence in each call, of NaN."""


GRID = {"lengths": (1328, 18, 463, 17, 0, 2, 40), "q_lens": (1, 5, 129, 0, 0, 4, 40)}
"""What a serving step holds: decodes, short and long chunks, a whole prompt, and what batches are padded with."""


OPTIONS = (
    {},
    {"sinks": True},
    {"dtype": "bfloat16", "cap": 50.0, "window": 256},
    {"dtype": "float16", "query_dtype": "float16", "window": 16, "block_size": 8},
    {"dtype": "float16", "query_dtype": "bfloat16", "group": 5},
    {"dtype": "float32", "query_dtype": "float32", "block_size": 1},
    {"dtype": "fp8_e5m2", "query_dtype": "float16", "scales": "scalar", "head_size": 80},
    {"dtype": "fp8_e4m3", "head_size": 128, "head_size_v": 64},
    {"dtype": "nvfp4", "v_scale_layout": "swizzled", "head_size": 256, "num_kv_heads": 1},
    {"dtype": "nvfp4", "block_size": 784, "window": 1024, "sinks": True, "cap": 30.0},
    {"dtype": "fp8_e4m3", "sm_scale": -0.07, "window": 40},
    {"dtype": "nvfp4", "head_size": 112, "window": 1, "num_kv_heads": 3},
)
"""Of calls on `GRID`, in the full matrices."""


def ragged(q_lens: Sequence[int], lengths: Sequence[int], **options: Any) -> Case:
    options.setdefault("block_size", 16)
    return Case(lengths=tuple(lengths), q_lens=tuple(q_lens), q_len=max(1, *q_lens), **options)


def build(case: Case, **options: Any) -> suite.Problem:
    """A problem whose query is a list, of each sequence's rows."""
    problem = suite.build(case, **options)
    query, *rest = problem.args
    rows = [x[case.q_len - q_len :] for x, q_len in zip(query, case.q_lens, strict=True)]
    return dataclasses.replace(problem, args=(rows, *rest))


def run(problem: suite.Problem, attend: Attend, padding: int = PADDING) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The results of each sequence; those of rows of no sequence are looked at here."""
    query, cache, table, lens = problem.args
    ends = np.cumsum([0, *map(len, query)], dtype=np.int32)
    rows = np.concatenate([*query, np.full((padding, *query[0].shape[1:]), np.nan, query[0].dtype)])
    out, lse = map(np.asarray, attend(rows, cache, table, lens, ends, **problem.options))
    assert (out.shape, out.dtype) == ((*rows.shape[:-1], problem.case.spec.head_size_v), rows.dtype)
    assert (lse.shape, lse.dtype) == (rows.shape[:-1], np.float32)
    sinks = problem.options["sinks"]
    assert not out[ends[-1] :].astype(np.float32).any()
    np.testing.assert_array_equal(
        lse[ends[-1] :], np.broadcast_to(-np.inf if sinks is None else sinks, (padding, rows.shape[1]))
    )
    return np.split(out[: ends[-1]], ends[1:-1]), np.split(lse[: ends[-1]], ends[1:-1])


def check(case: Case, attend: Attend, *, seed: int = 0) -> None:
    """What `attention_suite.check` asks for."""
    problem = build(case, seed=seed)
    results = run(problem, attend)
    suite.assert_right(problem, *results, **slack(case, attend))
    for other in (
        problem,
        build(case, seed=seed, fill=suite.ZERO, garbage=(-1,)),
        build(case, seed=seed, garbage=(0, 7, -3)),
    ):
        for got, first in zip(run(other, attend), results, strict=True):
            assert_same_bytes(np.concatenate(got), np.concatenate(first))


def slack(case: Case, attend: Any) -> dict[str, float]:
    """What may be off by more, of `assert_right`, where prompts are attended to in 16 bits.

    The rounding of queries to float16, half of 2**-11, adds to the errors of logits, or that of keys with a scale of
    their row to the query's dtype.
    """
    if not attend.by_kernels:
        return {}
    if any(part.is_per_token_head for part in case.spec.dtype.parts):
        return {"lse_factor": 256 if case.query_dtype == "bfloat16" else 32}
    return {"lse_factor": 1 if case.scales == "one" else 64}


def step_by_step(problem: suite.Problem, attend: Attend, cuts: Sequence[int]) -> np.ndarray:
    """Results of one sequence's rows, attended to in chunks that begin at `cuts`; one program for all of them."""
    [query], cache, table, lens = problem.args
    outs = []
    for start, end in zip(cuts, [*cuts[1:], len(query)], strict=True):
        rows = np.concatenate([query[start:end], query])[: len(query)]
        length = lens - (len(query) - end)
        out, lse = attend(rows, cache, table, length, np.int32([0, end - start]), **problem.options)
        outs.append(np.concatenate([np.float32(out), np.float32(lse)[..., None]], axis=-1)[: end - start])
    return np.concatenate(outs)


def check_hole(attend: Attend, hole: int, window: int | None = None) -> None:
    """Checks a chunk of 20 tokens after 28 cached ones where one of the six blocks is not in the table."""
    problem = build(ragged((20,), (48,), dtype="bfloat16", block_size=8, window=window))
    [query], cache, table, lens = problem.args
    table = np.where(np.arange(table.shape[1]) == hole, -1, table)
    out, lse = attend(query, cache, table, lens, np.int32([0, 20]), **problem.options)
    kept = np.arange(48) // 8 != hole
    for row in range(20):
        seen = kept & (np.arange(48) <= 28 + row) & (np.arange(48) > 28 + row - (window or 48))
        one = dataclasses.replace(
            problem,
            case=dataclasses.replace(problem.case, window=None),
            args=([query[row : row + 1]], *problem.args[1:]),
            keys=[problem.keys[0][seen]],
            values=[problem.values[0][seen]],
        )
        want = suite.expected(one, 0)
        np.testing.assert_allclose(np.float32(out[row]), want.out[0], atol=4 * want.out_max)
        np.testing.assert_allclose(lse[row], want.lse[0], atol=1e-4)


def rows_in_turn(problem: suite.Problem, order: Sequence[int], attend: Attend) -> tuple[list[Any], list[Any]]:
    """The results of some sequences of a problem, as a call of these alone."""
    query, cache, table, lens = problem.args
    part = dataclasses.replace(problem, args=([query[i] for i in order], cache, table[order], lens[order]))
    return run(part, attend)
