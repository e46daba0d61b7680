"""What the prompt kernel is checked by: operands, and a comparison with its model."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import AttentionSpec, FullAttentionSpec, KVCacheDType
from kvjax.kernels import compat, tiles
from kvjax.kernels.launchable import AnyCount, RowMemory
from kvjax.kernels.prompts import TOKENS as TILE
from kvjax.kernels.prompts import PromptConfig, PromptKind, PromptProblem, found_of
from kvjax.kernels.prompts.any_prompts import any_prompts
from kvjax.kernels.target import Target, tracing_for
from kvjax.kernels.warpgroups import in_order_of_products
from support import prompt_model
from support.interpret_mode import interpret_mode
from support.prompt_model import NearTokens, Operands

UNTOUCHED = 7.0
CONFIG = PromptConfig(tokens=64, stages=2)
E4M3 = jnp.float8_e4m3fn

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
    starts = np.cumsum([first_row, *(max(q_len, 0) for q_len in q_lens[:-1])])
    bias = np.zeros(keys.shape[:2], np.float32)
    bias[:, absent] = -np.inf
    keys = keys.at[:, absent].set(np.nan)
    lens = [max(q_len + position, 0) for q_len, position in zip(q_lens, positions, strict=True)]
    for prompt, length in enumerate(lens):
        keys = keys.at[prompt, length:].set(np.nan)
        bias[prompt, length:] = -np.inf
    of_near = None
    if near is not None:
        before = [max(min(near, position + 8), 0) for position in positions]
        ends = [max(one + q_len, 0) for one, q_len in zip(before, q_lens, strict=True)]
        recent = [normal(len(q_lens), max(*ends, 128), num_kv_heads, size) for size in (head_size, head_size_v)]
        for prompt, end in enumerate(ends):
            recent[0] = recent[0].at[prompt, end:].set(np.nan)
        of_near = NearTokens(recent[0], recent[1], *(jnp.asarray(x, jnp.int32) for x in (before, ends)))
    has_scales = dtype != jnp.bfloat16 and near is None
    return Operands(
        normal(num_tokens, num_heads, head_size).astype(query_dtype or dtype),
        keys,
        values,
        *(jnp.asarray(x, jnp.int32) for x in (starts, q_lens, positions)),
        jnp.asarray(bias),
        jnp.asarray([min(absent.start if absent.stop else num_keys, length) for length in lens], jnp.int32),
        jnp.asarray(lens, jnp.int32),
        0.13,
        *(
            jnp.asarray(rng.uniform(*bounds, num_kv_heads) if has_scales else np.ones(num_kv_heads), jnp.float32)
            for bounds in ((0.4, 1.5), (0.5, 2))
        ),
        jnp.asarray(rng.standard_normal(num_heads), jnp.float32) if sinks else None,
        of_near,
    )


def spec_of(args: Operands) -> AttentionSpec:
    """A cache whose pages become tiles of the operands' dtype: with scales, but for bfloat16 and beside near tokens."""
    has_scales = args.keys.dtype != jnp.bfloat16 and args.near is None
    dtype = KVCacheDType.FP8_E4M3 if has_scales else KVCacheDType(args.keys.dtype.name)
    _, _, num_kv_heads, head_size = args.keys.shape
    return FullAttentionSpec(16, num_kv_heads, head_size, args.values.shape[3], dtype=dtype)


def kernel_of(args: Operands, problem: PromptProblem, config: PromptConfig, target: Target) -> AnyCount:
    """The kernel with a configuration that may be another than a call's."""
    spec = spec_of(args)
    size = spec.num_kv_heads if spec.dtype.is_quantized else 1
    kind = PromptKind(
        spec,
        RowMemory.of(args.query),
        args.query.shape[1],
        (size, size),
        args.sm_scale,
        problem.window,
        problem.logits_soft_cap,
        has_sinks=args.sinks is not None,
        is_divided=int(config.splits) > 1,
        query_quantization=args.keys.dtype == E4M3,
        near=problem.near,
    )
    return any_prompts(kind, target, config)


def tiled(x: jax.Array) -> jax.Array:
    """`[.., rows, columns]` in the order of bytes that copies of tiles expect."""
    columns, itemsize = x.shape[-1], x.dtype.itemsize
    if compat.interpreting():
        return x
    row, column = np.arange(tiles.GROUP)[:, None], np.arange(columns)[None, :]
    place = tiles.offset(row, column, columns, itemsize) // itemsize
    order = np.argsort(np.broadcast_to(place, (tiles.GROUP, columns)).reshape(-1))
    return x.reshape(-1, tiles.GROUP * columns)[:, order].reshape(x.shape)


def tiles_of(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tiles of dense keys and values."""

    def of_heads(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), (0, 0), (0, 0)))
        return jnp.moveaxis(padded, 2, 1)  # prompts, heads, tokens, columns

    keys, values = of_heads(keys), of_heads(values)
    if values.dtype == E4M3:
        values = jnp.swapaxes(values.reshape(*values.shape[:2], -1, TILE, values.shape[3]), -1, -2)
        values = in_order_of_products(values)
    return tiled(keys), tiled(values)


def attend(
    args: Operands, results: tuple[jax.Array, jax.Array], kernel: AnyCount, splits: int
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel of `kernel_of`."""
    num_prompts = len(args.q_lens)
    fields = {
        "q_start": args.q_starts, "q_len": args.q_lens, "position": args.positions, "first_absent": args.first_absent,
        "end": args.ends, "first_block": jnp.zeros_like(args.ends), "first_seen": jnp.zeros_like(args.ends),
    }  # fmt: skip
    found = found_of(fields, jnp.int32(num_prompts)).reshape(-1)
    keys, values = tiles_of(args.keys, args.values)
    num_tokens = keys.shape[2]
    bias = jnp.pad(args.bias, ((0, 0), (0, num_tokens - args.bias.shape[1])), constant_values=-np.inf)
    arrays = {"prompts": found, "header": found, "query": args.query, "keys": keys, "values": values, "bias": bias}
    arrays |= {"k_scale": args.k_scale, "v_scale": args.v_scale, "out": results[0], "lse": results[1]}
    if args.sinks is not None:
        arrays["sinks"] = args.sinks
    counts = [len(args.query), num_tokens, 1, num_prompts, 0, splits]
    if args.near is not None:
        near_keys, near_values = tiles_of(args.near.keys, args.near.values)
        near = fields | {"position": args.near.positions, "end": args.near.ends, "first_absent": args.near.ends}
        counts.append(near_keys.shape[2])
        arrays |= {
            "near_prompts": found_of(near, jnp.int32(num_prompts)),
            "near_keys": near_keys,
            "near_values": near_values,
            "near_bias": jnp.zeros((num_prompts, near_keys.shape[2])),  # not read
        }
    written = kernel.of_arrays(counts, 1, arrays)
    return written["out"], written["lse"]


def results_for(args: Operands, splits: int) -> tuple[jax.Array, jax.Array]:
    """Results of all rows, to be stored among."""
    shape = splits, *args.query.shape[:2]
    out = jnp.full((*shape, args.values.shape[3]), UNTOUCHED, args.query.dtype if splits == 1 else jnp.float32)
    return out, jnp.full(shape, UNTOUCHED if splits == 1 else -np.inf, np.float32)


def run(args: Operands, problem: PromptProblem, config: PromptConfig, target: Target) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel makes of operands, its splits merged."""
    splits = int(config.splits)
    kernel = kernel_of(args, problem, config, target)
    with tracing_for(target):
        out, lse = attend(args, results_for(args, splits), kernel, splits)
    return merged(out, lse)


def merged(out: jax.Array, lse: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Results of whole rows, of those of splits; zeros where none has any."""
    got, log = np.asarray(out, np.float64), np.asarray(lse)
    whole = np.logaddexp.reduce(log, axis=0)
    with np.errstate(invalid="ignore"):
        weights = np.where(log == -np.inf, 0, np.exp(log - whole))[..., None]
    return np.sum(np.where(weights > 0, weights * got, 0), axis=0), whole


def run_model(args: Operands, problem: PromptProblem, splits: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """What the model makes of them."""
    out, lse = (x[0] for x in results_for(args, splits))
    out, lse = prompt_model.attend_dense(args, (out, lse), problem)
    return merged(out[None], lse[None])


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
    with mode:
        got, log = run(args, problem, config, Target(multiprocessors))
    near = args.near and args.near._replace(keys=jnp.nan_to_num(args.near.keys))
    finite = args._replace(keys=jnp.nan_to_num(args.keys), near=near)
    with jax.default_matmul_precision("highest"):
        expected, expected_log = run_model(finite, problem, int(config.splits))
    if on_gpu and args.keys.dtype == E4M3:
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
