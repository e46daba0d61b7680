"""Decode scales from sample text: the largest key and value that each layer shows there fill the dtype's range."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

import kvjax
from kvjax.demo.engine import LayerScales
from kvjax.demo.model import Params, TransformerConfig, causal_attention, forward


class Amax(NamedTuple):
    """Largest magnitudes of one layer's keys and values, float32 scalars."""

    key: jax.Array
    value: jax.Array


@functools.partial(jax.jit, static_argnames=("config",))
def largest_keys_and_values(params: Params, samples: jax.Array, *, config: TransformerConfig) -> tuple[Amax, ...]:
    """What each layer's keys and values reach on `samples [samples, tokens]`, each a sequence of its own."""

    def of_one(tokens: jax.Array) -> tuple[Amax, ...]:
        positions = jnp.arange(len(tokens))
        amax = []

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            amax.append(Amax(jnp.max(jnp.abs(key)), jnp.max(jnp.abs(value))))
            return causal_attention(query, key, value, positions, config.window(layer))

        forward(params, config, tokens, positions, attend)
        return tuple(amax)

    return jax.tree.map(jnp.max, jax.vmap(of_one)(samples))


def decode_scales(specs: Sequence[kvjax.AttentionSpec], amax: Sequence[Amax]) -> tuple[LayerScales, ...]:
    """`amax / largest value of the dtype` where a layer is quantized (448 for fp8_e4m3, 6 * 448 for nvfp4), else 1."""
    return tuple(
        LayerScales(*(jnp.float32(x / spec.dtype.info.max if spec.dtype.is_quantized else 1.0) for x in layer))
        for spec, layer in zip(specs, amax, strict=True)
    )
