"""Sequences that are served with an exact window, and what their attention is: in float64, of each query its own mix.

The reference knows neither rings nor pages: a query sees the last `size` tokens as they were given, rounded to the
model dtype, and earlier ones as the formulas of reference.py store and read them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import ExactWindow, KVCache, StepMetadata
from support import reference
from support.helpers import FP8_NAMES

NUM_SEQS = 3
"""The sequences that steps are padded to."""

STATIC = ("logits_soft_cap", "max_q_len", "implementation", "query_quantization")
_attend, _attend_within = (
    jax.jit(kvjax.attend, static_argnames=names, donate_argnames=("cache", "exact_window"))
    for names in (STATIC, (*STATIC, "sliding_window"))
)
_fill = jax.jit(kvjax.fill_exact_window, donate_argnames="exact_window")


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, its window and the options of its attention."""

    dtype: str = "nvfp4"
    size: int = 16
    max_q_len: int = 1
    model_dtype: str = "float32"
    query_dtype: str = "float32"
    block_size: int = 8
    num_kv_heads: int = 2
    group: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    layout: str = "NHD"
    sliding_window: int | None = None
    cap: float | None = None
    sinks: bool = False

    @property
    def spec(self) -> kvjax.AttentionSpec:
        """Of the cache."""
        make = kvjax.FullAttentionSpec if self.sliding_window is None else kvjax.SlidingWindowSpec
        options = {} if self.sliding_window is None else {"sliding_window": self.sliding_window}
        return make(
            self.block_size,
            self.num_kv_heads,
            self.head_size,
            self.head_size_v,
            dtype=kvjax.KVCacheDType(self.dtype),
            model_dtype=kvjax.KVCacheDType(self.model_dtype),
            layout=self.layout,
            **options,
        )

    @property
    def scales(self) -> dict[str, Any]:
        """Decode scales of the cache."""
        if not self.spec.dtype.takes_scale:
            return {}
        per_head = np.linspace(0.01, 0.02, self.num_kv_heads, dtype=np.float32)
        return {"k_scale": per_head if self.dtype in FP8_NAMES else np.float32(0.01), "v_scale": np.float32(0.015)}

    def sink_of(self, num_heads: int) -> np.ndarray | None:
        """A sink for each head."""
        return np.linspace(-1, 2, num_heads, dtype=np.float32) if self.sinks else None


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A sequence's queries, keys and values, `[length, heads, head_size]`."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray

    @classmethod
    def random(cls, case: Case, length: int, seed: int) -> Tokens:
        """Normal ones, keys such that the softmax is neither flat nor one-hot."""
        rng, spec = np.random.default_rng(seed), case.spec
        dtype = jax.numpy.dtype(case.query_dtype)
        sizes = [(spec.num_kv_heads * case.group, spec.head_size), *((spec.num_kv_heads, x) for x in spec.head_sizes)]
        return cls(*(rng.standard_normal((length, *size)).astype(dtype) for size in sizes))

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.query[part], self.key[part], self.value[part])


def expected(case: Case, tokens: Tokens, exact_from: int = 0) -> np.ndarray:
    """Attention of a whole sequence in float64; tokens before `exact_from` are read as the pages store them."""
    spec, length = case.spec, len(tokens.key)
    exact, stored = [], []
    for half, x in enumerate((tokens.key, tokens.value)):
        scale = case.scales.get(("k_scale", "v_scale")[half], np.float32(1))
        part = reference.part(spec, half)
        exact.append(reference.cast(x, reference.ELEMENT[spec.model_dtype]).astype(np.float64))
        stored.append(reference.decode(reference.encode(x, part, scale), part, scale).astype(np.float64))
    out = np.zeros((length, tokens.query.shape[1], spec.head_size_v))
    sinks = case.sink_of(out.shape[1])
    for position in range(length):
        first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
        is_exact = np.arange(first, position + 1) >= max(position - case.size + 1, exact_from)
        for head in range(out.shape[1]):
            key, value = (
                np.where(
                    is_exact[:, None], *(x[half][first : position + 1, head // case.group] for x in (exact, stored))
                )
                for half in (0, 1)
            )
            logits = key @ tokens.query[position, head].astype(np.float64) / np.sqrt(spec.head_size)
            if case.cap is not None:
                logits = case.cap * np.tanh(logits / case.cap)
            logits = logits if sinks is None else np.append(logits, sinks[head])
            weights = np.exp(logits - logits.max())
            out[position, head] = weights[: len(key)] / weights.sum() @ value
    return out


class Server:
    """Serves sequences step by step, over pages and a window that are NaN where nothing was written.

    Its `sequences` and `tokens` may be changed between steps. Steps are padded to the numbers of tokens that are given
    for those without chunks and with, and their block tables to `max_length` tokens.
    """

    def __init__(
        self, case: Case, tokens: Sequence[Tokens], *, num_tokens: tuple[int, int] = (14, 120), max_length: int = 64
    ) -> None:
        self.case, self.tokens = case, [*tokens]
        self.num_tokens, self.max_blocks = num_tokens, -(-max_length // case.block_size)
        num_blocks = NUM_SEQS * self.max_blocks
        self.pool = kvjax.BlockPool(num_blocks, case.block_size)
        self.sequences = [self.pool.sequence() for _ in tokens]
        cache = KVCache.allocate(case.spec, num_blocks, **case.scales)
        window = ExactWindow.allocate(case.spec, NUM_SEQS, case.size, max_q_len=case.max_q_len)
        nan = np.full(cache.kv.nbytes, 0xFF, np.uint8).view(cache.kv.dtype).reshape(cache.kv.shape)
        self.cache = dataclasses.replace(cache, kv=jax.numpy.array(nan))
        ring = dataclasses.replace(window.ring, kv=jax.numpy.full_like(window.ring.kv, np.nan))
        self.window = dataclasses.replace(window, ring=ring)
        self.rows = kvjax.WindowRows(self.window)
        self.filled: list[int] = []

    def step(self, q_lens: Sequence[int], **options: Any) -> list[np.ndarray]:
        """Appends so many tokens to each sequence; returns the results of each.

        With at most the window's `max_q_len` of each, queries attend over the ring itself.
        """
        self.cache = kvjax.copy_blocks(self.cache, self.pool.append(self.sequences, q_lens))
        rows, fills = self.rows.assign(self.sequences, q_lens)
        is_chunk = max(q_lens) > self.case.max_q_len
        options.setdefault("max_q_len", self.num_tokens[True] if is_chunk else self.case.max_q_len)
        step = StepMetadata.from_sequences(
            self.sequences,
            q_lens,
            num_tokens=self.num_tokens[is_chunk],
            num_seqs=NUM_SEQS,
            max_blocks=self.max_blocks,
            window_rows=rows,
        )
        padding = len(step.slot_mapping) - sum(q_lens)
        self.filled = [i for i, row in enumerate(fills) if row >= 0]
        if self.filled:
            fills = np.pad(fills, (0, NUM_SEQS - len(fills)), constant_values=-1)
            self.fill(step, fills)
        starts = [one.num_tokens - q_len for one, q_len in zip(self.sequences, q_lens, strict=True)]
        parts = [one[start : start + q_len] for one, start, q_len in zip(self.tokens, starts, q_lens, strict=True)]
        new = [
            np.concatenate(
                [*(getattr(part, name) for part in parts), np.full((padding, *of.shape[1:]), np.nan, of.dtype)]
            )
            for name, of in dataclasses.asdict(self.tokens[0]).items()
        ]
        heads = new[0].shape[1]
        out = self.attend(new, step, logits_soft_cap=self.case.cap, sinks=self.case.sink_of(heads), **options)
        assert not out[sum(q_lens) :].any()
        return np.split(out[: sum(q_lens)].astype(np.float64), np.cumsum(q_lens)[:-1])

    def fill(self, step: StepMetadata, fills: np.ndarray) -> None:
        """Fills rows of the window from the pages."""
        self.window = _fill(self.window, self.cache, step, fills)

    def attend(self, new: Sequence[np.ndarray], step: StepMetadata, **options: Any) -> np.ndarray:
        """Writes a step's tokens and attends."""
        attend = _attend_within if isinstance(options.get("sliding_window"), int) else _attend
        out, self.cache, self.window = attend(*new, self.cache, step, exact_window=self.window, **options)
        return np.asarray(out)

    def serve(self, steps: Sequence[Sequence[int]], **options: Any) -> list[np.ndarray]:
        """Runs steps; returns the results of each sequence's tokens in them."""
        results = [self.step(q_lens, **options) for q_lens in steps]
        return [np.concatenate(of_one) for of_one in zip(*results, strict=True)]


def cuts_of(lengths: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Steps of which each takes up to `sizes[i]` tokens of sequence i."""
    left, steps = [*lengths], []
    while any(left):
        steps.append([min(size, number) for size, number in zip(sizes, left, strict=True)])
        left = [number - took for number, took in zip(left, steps[-1], strict=True)]
    return steps


@functools.cache
def random_tokens(case: Case, lengths: tuple[int, ...]) -> tuple[tuple[Tokens, ...], tuple[np.ndarray, ...]]:
    """Sequences, and what their attention is."""
    tokens = tuple(Tokens.random(case, length, seed) for seed, length in enumerate(lengths))
    return tokens, tuple(expected(case, one) for one in tokens)
