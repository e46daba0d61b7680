"""The model's keys and values on sample text, for `kvjax.calibrate`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from kvjax.demo.model import Params, TransformerConfig, causal_attention, forward

type LayerKeysAndValues = tuple[tuple[jax.Array, jax.Array], ...]
"""`(key, value)` of each layer, `[tokens, kv_heads, head_dim]`."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Runs the model over texts, `[texts, tokens]` integers, one at a time; can be iterated repeatedly."""

    config: TransformerConfig
    params: Params
    texts: Sequence[Sequence[int]] | jax.Array

    def __iter__(self) -> Iterator[LayerKeysAndValues]:
        for text in self.texts:
            yield keys_and_values(self.params, jnp.asarray(text, jnp.int32), config=self.config)


@functools.partial(jax.jit, static_argnames=("config",))
def keys_and_values(params: Params, tokens: jax.Array, *, config: TransformerConfig) -> LayerKeysAndValues:
    """Returns what each layer would store of one sequence `tokens [tokens]`: rotated keys and values."""
    positions = jnp.arange(len(tokens))
    stored = []

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        stored.append((key, value))
        return causal_attention(query, key, value, positions, config.window(layer))

    forward(params, config, tokens, positions, attend)
    return tuple(stored)
