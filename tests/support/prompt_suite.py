"""What the prompt kernel is checked by: operands, and a comparison with its model."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels import prompts
from kvjax.kernels.prompts import NearTokens, Operands, PromptConfig, PromptProblem
from kvjax.kernels.target import Target, tracing_for
from support import prompt_model
from support.interpret_mode import interpret_mode

UNTOUCHED = 7.0
CONFIG = PromptConfig(tokens=64, stages=2)

LENGTHS = {"q_lens": (0, 60, -3, 70, 1, 0), "positions": (0, 0, 5, 130, 60, 9), "num_tokens": 150, "num_keys": 256}
"""Sequences without rows among those of one to four tiles."""


def operands(
    q_lens: tuple[int, ...],
    positions: tuple[int, ...],
    *,
    heads: tuple[int, int] = (2, 1),
    head_size: int = 64,
    head_size_v: int = 64,
    num_tokens: int = 101,
    num_keys: int = 320,
    first_row: int = 3,
    absent: slice = slice(0),
    sinks: bool = False,
    dtype: Any = np.float16,
    query_dtype: Any = None,
    near: int | None = None,
) -> Operands:
    """Random rows of sequences, the first of which begins at row `first_row`; NaN where no row looks.

    `near` are the near tokens before each sequence's first row, as far as its position has so many.
    """
    rng = np.random.default_rng(0)
    num_heads, num_kv_heads = heads

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    keys, values = (normal(len(q_lens), num_keys, num_kv_heads, size) for size in (head_size, head_size_v))
    if dtype == jnp.float8_e4m3fn:
        values = jnp.moveaxis(values, 1, 3)
    starts = np.cumsum([first_row, *(max(q_len, 0) for q_len in q_lens[:-1])])
    bias = np.zeros(keys.shape[:2], np.float32)
    bias[:, absent] = -np.inf
    keys = keys.at[:, absent].set(np.nan)
    lens = [max(q_len + position, 0) for q_len, position in zip(q_lens, positions, strict=True)]
    for prompt, length in enumerate(lens):
        keys = keys.at[prompt, length:].set(np.nan)
    of_near = None
    if near is not None:
        before = [max(min(near, position + 8), 0) for position in positions]
        ends = [max(one + q_len, 0) for one, q_len in zip(before, q_lens, strict=True)]
        num_near = -(-max(*ends, 128) // 8) * 8
        recent = [normal(len(q_lens), num_near, num_kv_heads, size) for size in (head_size, head_size_v)]
        for prompt, end in enumerate(ends):
            recent[0] = recent[0].at[prompt, end:].set(np.nan)
        numbers = (jnp.asarray(x, jnp.int32) for x in (before, ends))
        of_near = NearTokens(*recent, *numbers, jnp.full(1, 0.13, jnp.float32))
    return Operands(
        normal(num_tokens, num_heads, head_size).astype(query_dtype or dtype),
        keys,
        values,
        *(jnp.asarray(x, jnp.int32) for x in (starts, q_lens, positions)),
        jnp.asarray(bias),
        jnp.asarray([min(absent.start if absent.stop else num_keys, length) for length in lens], jnp.int32),
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(
            [
                rng.uniform(0.05, 0.2, num_heads),
                rng.uniform(0.5, 2, num_heads),
                rng.standard_normal(num_heads) if sinks else np.full(num_heads, -np.inf),
            ],
            jnp.float32,
        ),
        of_near,
    )


def run(attend: Any, args: Operands, problem: PromptProblem, config: PromptConfig) -> tuple[np.ndarray, np.ndarray]:
    shape = config.splits, *args.query.shape[:2]
    head_size_v = args.values.shape[2 if args.values.dtype == jnp.float8_e4m3fn else 3]
    out = jax.new_ref(jnp.full((*shape, head_size_v), UNTOUCHED, args.query.dtype))
    lse = jax.new_ref(jnp.full(shape, UNTOUCHED if config.splits == 1 else -np.inf, np.float32))
    attend(args, out, lse, jax.new_ref(jnp.zeros_like(args.ends)), problem, config)
    got, log = np.asarray(jax.freeze(out), np.float64), np.asarray(jax.freeze(lse))
    if config.splits == 1:
        return got[0], log[0]
    whole = np.logaddexp.reduce(log, axis=0)
    with np.errstate(invalid="ignore"):
        weights = np.where(log == -np.inf, 0, np.exp(log - whole))[..., None]
    return np.sum(np.where(weights > 0, weights * got, 0), axis=0), whole


def check(
    args: Operands,
    problem: PromptProblem,
    config: PromptConfig = CONFIG,
    *,
    detect_races: bool = False,
    multiprocessors: int = 132,
    on_gpu: bool = False,
) -> None:
    mode = contextlib.nullcontext() if on_gpu else interpret_mode(detect_races=detect_races)
    with mode, tracing_for(Target(multiprocessors)):
        got, log = run(prompts.attend, args, problem, config)
    near = args.near and args.near._replace(keys=jnp.nan_to_num(args.near.keys))
    finite = args._replace(keys=jnp.nan_to_num(args.keys), near=near)
    with jax.default_matmul_precision("highest"):
        expected, expected_log = run(prompt_model.attend, finite, problem, config)
    if on_gpu and args.keys.dtype == jnp.float8_e4m3fn:
        # Hopper sums products in fp8 with some 14 bits, the model in float32.
        assert np.sqrt(np.mean((got - expected) ** 2)) < 0.01 * np.sqrt(np.mean(expected[expected != UNTOUCHED] ** 2))
        np.testing.assert_allclose(log, expected_log, atol=6e-2)
    else:
        np.testing.assert_allclose(got, expected, atol=4e-3 if args.query.dtype == np.float16 else 3e-2)
        np.testing.assert_allclose(log, expected_log, atol=1e-3 if on_gpu else 1e-5)
    rows = np.zeros(len(got), bool)
    for start, count in zip(args.q_starts, args.q_lens, strict=True):
        rows[int(start) : int(start) + int(count)] = True
    if config.splits == 1:
        assert (got[~rows] == UNTOUCHED).all()
        assert (log[~rows] == UNTOUCHED).all()
