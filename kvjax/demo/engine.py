"""The transformer over paged caches: a compiled step that prefills a chunk, and one that decodes a batch.

Both write the new tokens' keys and values and then attend to the cache, so all of the demo's results go through it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.demo.model import Params, TransformerConfig, causal_attention, forward

PADDING_SLOT = -1
"""The slot of a padding token, which is computed but not written."""


class Batch(NamedTuple):
    """The tokens of one step, int32: several of one sequence (prefill), or one of each of several (decode)."""

    tokens: np.ndarray  # [tokens]
    positions: np.ndarray  # [tokens], in their sequences
    slots: np.ndarray  # [tokens]
    block_tables: np.ndarray  # [sequences, max_blocks]
    seq_lens: np.ndarray  # [sequences], including this step's tokens


class StepOutput(NamedTuple):
    """A step's results for each of its tokens. All but `logits` are per layer, `[layers, tokens, heads, dim]`.

    The unquantized query, key and value are the inputs of attention without a cache.
    """

    logits: np.ndarray  # [tokens, vocab_size]
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    attended: np.ndarray


@dataclasses.dataclass
class Engine:
    """A model and its caches, one per layer. A step donates `caches`, so writes are in place."""

    config: TransformerConfig
    params: Params
    caches: tuple[kvjax.KVCache, ...]

    @classmethod
    def allocate(
        cls,
        config: TransformerConfig,
        params: Params,
        specs: Sequence[kvjax.AttentionSpec],
        scales: Sequence[kvjax.KVScales],
        num_blocks: int,
    ) -> Engine:
        """Returns an engine with a cache of `num_blocks` blocks, and its scales, for every layer."""
        caches = tuple(
            kvjax.KVCache.allocate(spec, num_blocks, **layer_scales._asdict())
            for spec, layer_scales in zip(specs, scales, strict=True)
        )
        return cls(config, params, caches)

    def prefill(self, batch: Batch) -> StepOutput:
        """Runs several tokens of one sequence."""
        return self._step(batch, _attend_to_gathered)

    def decode(self, batch: Batch) -> StepOutput:
        """Runs one token of each sequence."""
        return self._step(batch, _attend_to_pages)

    def _step(self, batch: Batch, attend_cached: _AttendCached) -> StepOutput:
        output, self.caches = _run(self.caches, self.params, batch, config=self.config, attend_cached=attend_cached)
        return StepOutput(*jax.device_get(output))


type _AttendCached = Callable[[jax.Array, kvjax.KVCache, Batch, int | None], jax.Array]


def _attend_to_gathered(query: jax.Array, cache: kvjax.KVCache, batch: Batch, window: int | None) -> jax.Array:
    key, value = kvjax.gather_kv(cache, batch.block_tables, batch.seq_lens, dtype=query.dtype)
    return causal_attention(query, key[0], value[0], jnp.asarray(batch.positions), window)


def _attend_to_pages(query: jax.Array, cache: kvjax.KVCache, batch: Batch, window: int | None) -> jax.Array:
    return kvjax.paged_attention(
        query,
        cache,
        batch.block_tables,
        batch.seq_lens,
        sliding_window=window,
    )


@functools.partial(jax.jit, static_argnames=("config", "attend_cached"), donate_argnames=("caches",))
def _run(
    caches: tuple[kvjax.KVCache, ...],
    params: Params,
    batch: Batch,
    *,
    config: TransformerConfig,
    attend_cached: _AttendCached,
) -> tuple[tuple[jax.Array, ...], tuple[kvjax.KVCache, ...]]:
    written, trace = list(caches), []

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        written[layer] = kvjax.reshape_and_cache_flash(key, value, caches[layer], batch.slots)
        attended = attend_cached(query, written[layer], batch, config.window(layer))
        trace.append((query, key, value, attended))
        return attended

    # By default a GPU would multiply float32 matrices in TF32, whose rounding exceeds that of the 16-bit caches.
    with jax.default_matmul_precision("highest"):
        logits = forward(params, config, jnp.asarray(batch.tokens), jnp.asarray(batch.positions), attend)
    return (logits, *map(jnp.stack, zip(*trace, strict=True))), tuple(written)
