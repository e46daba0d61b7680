"""Attention over pages and a ring at once: two calls of `attention_suite` with one query, whose results are merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels import attention
from support import attention_suite as suite
from support.attention_suite import Case, Problem
from support.helpers import assert_same_bytes

LAYERS, LAYER = 3, 1
"""Of caches of several layers, and the one that is read."""


@dataclasses.dataclass(frozen=True)
class JointCase:
    """A call over both.

    Attributes:
      pages: of the call over pages; its query and its sinks are those of both.
      ring: tokens of each sequence in the ring.
      window: tokens that a row sees there.
      layers: whether both caches have several layers.
      ring_dtype: of the ring.
    """

    pages: Case
    ring: tuple[int, ...]
    window: int
    layers: bool = False
    ring_dtype: str = "bfloat16"

    @property
    def of_ring(self) -> Case:
        """The call over the ring."""
        changes = {"dtype": self.ring_dtype, "v_scale_layout": "linear", "block_size": 16, "scales": "one"}
        changes |= {"lengths": self.ring, "window": self.window, "sinks": False}
        return dataclasses.replace(self.pages, **changes)

    def __str__(self) -> str:
        """What is of interest."""
        changed = f"-ring={self.ring}-{self.window}" + ("-layers" if self.layers else "")
        return f"{self.pages}{changed}" + (f"-{self.ring_dtype}" if self.ring_dtype != "bfloat16" else "")


def build(case: JointCase, **poison: Any) -> tuple[Problem, Problem]:
    """Both calls; `poison` is as `attention_suite.build` takes it."""
    pages, ring = suite.build(case.pages, **poison), suite.build(case.of_ring, seed=1, **poison)
    return pages, dataclasses.replace(ring, args=(pages.args[0], *ring.args[1:]))


def source(problem: Problem, *, layers: bool, batch_invariant: bool) -> attention.OneCache:
    """What the kernel reads of one of both."""
    case, options, (_, cache, table, lens) = problem.case, problem.options, problem.args
    scales = (jnp.asarray(options[name]) for name in ("k_scale", "v_scale"))
    kv, layer, sinks = jnp.asarray(cache.kv), None, options["sinks"]
    if layers:
        poison = jax.lax.bitcast_convert_type(jnp.full((*kv.shape, kv.dtype.itemsize), 0xFF, jnp.uint8), kv.dtype)
        kv, layer = jnp.stack([poison.reshape(kv.shape), kv, poison.reshape(kv.shape)], axis=1), jnp.int32(LAYER)
    sinks = None if sinks is None else jnp.asarray(sinks)
    read = attention.ReadArrays(jnp.asarray(table), jnp.asarray(lens), layer, *scales, sinks)
    sm_scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    softmax = attention.Softmax(sm_scale, case.window, case.cap, batch_invariant)
    return attention.OneCache(kv, read, case.spec, softmax, LAYERS if layers else 1)


def attend(
    case: JointCase, problems: tuple[Problem, Problem], *, batch_invariant: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The results of the kernels."""
    query, q_len = problems[0].args[0], problems[0].args[0].shape[1]
    q_lens = [q_len] * len(query) if case.pages.q_lens is None else case.pages.q_lens
    pages, ring = (source(each, layers=case.layers, batch_invariant=batch_invariant) for each in problems)

    @jax.jit
    def run(query: jax.Array, arrays: Any, q_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        sources = (one._replace(kv=kv, read=read) for one, (kv, read) in zip((pages, ring), arrays, strict=True))
        return attention.decode_both(query, *sources, q_lens)

    arrays = [(one.kv, one.read) for one in (pages, ring)]
    out, lse = jax.block_until_ready(run(jnp.asarray(query), arrays, jnp.asarray(q_lens, jnp.int32)))
    return np.asarray(out), np.asarray(lse)


def assert_right(
    case: JointCase, problems: tuple[Problem, Problem], out: np.ndarray, lse: np.ndarray, factor: float = 1
) -> None:
    """Holds results against both in float64, merged; errors are those of either."""
    for seq in range(len(out)):
        parts = [suite.expected(problem, seq) for problem in problems]
        first = 0 if case.pages.q_lens is None else case.pages.q_len - case.pages.q_lens[seq]
        lses = np.stack([part.lse[first:] for part in parts])
        with np.errstate(invalid="ignore", divide="ignore"):
            want_lse = np.logaddexp(*lses)
            weights = np.where(np.isneginf(lses), 0.0, np.exp(lses - want_lse))
        want = sum(weight[..., None] * part.out[first:] for weight, part in zip(weights, parts, strict=True))
        got, got_lse = out[seq, first:].astype(np.float64), lse[seq, first:]
        assert np.isfinite(got).all(), f"sequence {seq}"
        rounding = float(jnp.finfo(out.dtype).eps) / 2 * np.abs(want).max(initial=0)
        error, most = np.abs(got - want).max(initial=0), max(part.out_max for part in parts) + rounding
        assert error <= factor * most, (
            f"sequence {seq}: largest error {error:.3g}, expected at most {factor * most:.3g}"
        )
        has_any = ~np.isneginf(want_lse)
        np.testing.assert_array_equal(~np.isneginf(got_lse), has_any)
        lse_error = np.abs(got_lse[has_any] - want_lse[has_any]).max(initial=0)
        assert lse_error <= sum(part.lse_max for part in parts), f"sequence {seq}: of lse {lse_error:.3g}"


def check(case: JointCase, *, other_poison: bool = True) -> None:
    """Right, and the same bits whatever is where nobody may look."""
    problems = build(case)
    results = attend(case, problems)
    has_row_scales = case.pages.spec.dtype.parts[1].info.block == "row"
    assert_right(case, problems, *results, factor=1.5 if has_row_scales else 1)
    if other_poison:
        again = attend(case, build(case, fill=suite.ZERO, garbage=(-1,)))
        for seq, (got, first) in enumerate(zip(zip(*again, strict=True), zip(*results, strict=True), strict=True)):
            own = 0 if case.pages.q_lens is None else case.pages.q_len - case.pages.q_lens[seq]
            for one, other in zip(got, first, strict=True):
                assert_same_bytes(one[own:], other[own:])


def check_alone(case: JointCase, sequences: Sequence[int]) -> None:
    """A sequence has its bits in every batch, if asked."""
    problems = build(case)
    whole = attend(case, problems, batch_invariant=True)
    assert_right(case, problems, *whole)
    for seq in sequences:
        alone = [
            dataclasses.replace(each, args=(each.args[0][[seq]], each.args[1], *(x[[seq]] for x in each.args[2:])))
            for each in problems
        ]
        q_lens = case.pages.q_lens
        own = dataclasses.replace(case, pages=dataclasses.replace(case.pages, q_lens=q_lens and (q_lens[seq],)))
        for got, want in zip(attend(own, (alone[0], alone[1]), batch_invariant=True), whole, strict=True):
            assert_same_bytes(got[0], want[seq])
