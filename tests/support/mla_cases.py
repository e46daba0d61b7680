"""Sequences in caches of latents, with NaN wherever no sequence is, and queries for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from kvjax import KVCache, KVCacheDType, MLAAttentionSpec
from support import mla_reference
from support.helpers import INPUT_DTYPES, cache_from_bytes

SM_SCALE = 192**-0.5
NAN = 0xFF
"""As every byte, NaN in every dtype of elements and of scales."""


def spec_of(dtype: str, sizes: tuple[int, int] = (512, 64), block_size: int = 8, **fields: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size, *sizes, dtype=KVCacheDType(dtype), **fields)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sequences whose tokens are in the blocks of a cache, every other byte of which is NaN.

    `keys` are what is stored of each, `[tokens, head_size]` in float32, 0 before `first`.
    """

    spec: MLAAttentionSpec
    cache: KVCache
    block_table: np.ndarray
    seq_lens: np.ndarray
    keys: list[np.ndarray]
    scale: float


def build(
    spec: MLAAttentionSpec,
    seq_lens: Sequence[int],
    reach: int | None = None,
    fill: int = NAN,
    growth: float = 0,
    second: float | None = None,
) -> Problem:
    """With `reach`, only so many last tokens of each sequence are stored; before them are NaN, and no blocks.

    The first element of a latent grows by `growth` with every 64 tokens; the second is `second`, if it is given.
    """
    rng, scale, size = np.random.default_rng(0), 0.0021, spec.block_size
    max_blocks = max(-(-max(seq_lens) // size), 1) + 1
    num_blocks = sum(-(-length // size) for length in seq_lens) + 2
    free = iter(rng.permutation(np.arange(1, num_blocks)))
    table = np.resize(np.array([-1, 2**31 - 1, -7, 0], np.int32), (len(seq_lens), max_blocks))
    pages = np.full((num_blocks, spec.page_size_bytes), fill, np.uint8)
    keys = []
    for seq, length in enumerate(seq_lens):
        first = 0 if reach is None else max(0, length - reach)
        for column in range(first // size, -(-length // size)):
            table[seq, column] = next(free)
        position = np.arange(first, length)
        kv_c, k_pe = (rng.standard_normal((len(position), part)).astype(np.float32) for part in spec.part_sizes)
        kv_c[:, 0] += growth * (position // 64)
        if second is not None:
            kv_c[:, 1] = second
        stored = mla_reference.rows(spec, kv_c, k_pe, scale)
        if spec.dtype is KVCacheDType.FP8_DS_MLA:
            stored = _with_any_scales(stored, spec.kv_lora_rank)
        pages = mla_reference.write(pages, spec, stored, table[seq, position // size] * size + position % size)
        dense = np.zeros((length, spec.head_size), np.float32)
        dense[first:] = np.concatenate(mla_reference.decoded(spec, stored, scale), axis=1)
        keys.append(dense)
    return Problem(spec, cache_from_bytes(pages, spec, num_blocks), table, np.array(seq_lens, np.int32), keys, scale)


def _with_any_scales(stored: np.ndarray, rank: int) -> np.ndarray:
    """Rows of `fp8_ds_mla`, of every second token with scales that are no powers of two, as a cache may have them."""
    codes, scales, rope = np.split(stored, [rank, rank + rank // 32], axis=1)
    scales = np.ascontiguousarray(scales).view(np.float32).copy()
    scales[::2] *= np.random.default_rng(2).uniform(0.5, 1, scales[::2].shape).astype(np.float32)
    return np.concatenate([codes, mla_reference.raw(scales), rope], axis=1)


def queries(spec: MLAAttentionSpec, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    q_nope, q_pe = (
        rng.standard_normal((*shape, size)).astype(np.float32).astype(INPUT_DTYPES[dtype]) for size in spec.part_sizes
    )
    return q_nope, q_pe


def assert_right(problem: Problem, q: Sequence[np.ndarray], out: Any, lse: Any, seq: int, **options: Any) -> None:
    """Against float64 over what is stored: float32's roundings, and that of the result to the query's dtype."""
    query = np.concatenate([x.astype(np.float64) for x in q], axis=-1)
    rank = problem.spec.kv_lora_rank
    want, want_lse = mla_reference.attention(query, problem.keys[seq], rank, SM_SCALE, **options)
    out, lse = np.asarray(out), np.asarray(lse)
    assert (out.dtype, lse.dtype) == (q[0].dtype, np.float32)
    eps = float(ml_dtypes.finfo(q[0].dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=eps, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)
