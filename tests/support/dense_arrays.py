"""Arrays of `ragged_attention`, in NumPy, and its results in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Lengths(NamedTuple):
    """Query tokens and keys of each sequence."""

    q: tuple[int, ...]
    kv: tuple[int, ...]


STEP = Lengths((0, 3, 70, 1, 2, 40), (5, 7, 150, 9, 0, 33))
"""Sequences without rows, without keys and with more rows than keys among others."""

ON_A_GPU: dict[str, list[Any]] = {
    "heads": [(16, 16), (6, 2), (3, 1)],
    "sizes": [(192, 128), (128, 128), (64, 64), (80, 48), (256, 256)],
    "input_dtype": ["float16", "bfloat16"],
    "causal": [True, False],
}

MLA = {"heads": (2, 2), "sizes": (192, 128)}


class Arrays(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    cu_q_lens: np.ndarray
    cu_kv_lens: np.ndarray


def arrays(
    lengths: Lengths,
    dtype: Any = np.float32,
    *,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (32, 16),
    before: tuple[int, int] = (0, 0),
    padding: tuple[int, int] = (3, 5),
    seed: int = 0,
) -> Arrays:
    """A step, and rows and keys of no sequence, NaN: `before` the first sequence, and `padding` after the last."""
    rng = np.random.default_rng(seed)
    (num_heads, num_kv_heads), (size, size_v) = heads, sizes
    bounds = [np.cumsum([first, *each], dtype=np.int32) for first, each in zip(before, lengths, strict=True)]

    def rows(bounds: np.ndarray, padding: int, *shape: int) -> np.ndarray:
        array = rng.standard_normal((bounds[-1] + padding, *shape)).astype(dtype)
        array[: bounds[0]] = array[bounds[-1] :] = np.nan
        return array

    query = rows(bounds[0], padding[0], num_heads, size)
    key, value = (rows(bounds[1], padding[1], num_kv_heads, each) for each in (size, size_v))
    return Arrays(query, key, value, *bounds)


def attention(args: Arrays, causal: bool, sm_scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The results of all rows, in float64."""
    query, key, value = (x.astype(np.float64) for x in args[:3])
    num_tokens, num_heads, size = query.shape
    scale = size**-0.5 if sm_scale is None else sm_scale
    out, lse = np.zeros((num_tokens, num_heads, value.shape[2])), np.full((num_tokens, num_heads), -np.inf)
    group = num_heads // key.shape[1]
    for (start, stop), (first, end) in zip(*(np.stack([x[:-1], x[1:]], 1) for x in args[3:]), strict=True):
        keys, values = (np.repeat(x[first:end], group, axis=1) for x in (key, value))
        logits = np.einsum("nhd,mhd->nhm", query[start:stop], keys) * scale
        if causal:
            row, token = np.arange(stop - start)[:, None], np.arange(end - first)
            logits = np.where((token - row <= end - first - (stop - start))[:, None], logits, -np.inf)
        largest = np.max(logits, axis=-1, initial=-np.inf, keepdims=True)
        weights = np.exp(logits - np.where(largest == -np.inf, 0, largest))
        total = weights.sum(axis=-1)
        out[start:stop] = np.einsum("nhm,mhd->nhd", weights, values) / np.where(total > 0, total, 1)[..., None]
        with np.errstate(divide="ignore"):
            lse[start:stop] = largest[..., 0] + np.log(total)
    return out, lse


def check(args: Arrays, got: Sequence[Any], expected: Sequence[np.ndarray]) -> None:
    out, lse = map(np.asarray, got)
    assert (out.dtype, lse.dtype) == (args.query.dtype, np.float32)
    eps = float(ml_dtypes.finfo(out.dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), expected[0], atol=2 * eps + 1e-5, rtol=2 * eps)
    np.testing.assert_allclose(lse, expected[1], atol=1e-4, rtol=1e-5)
    for of_no_sequence in (slice(args.cu_q_lens[0]), slice(args.cu_q_lens[-1], None)):
        assert not out[of_no_sequence].astype(np.float32).any()  # also no NaN
        assert (lse[of_no_sequence] == -np.inf).all()
