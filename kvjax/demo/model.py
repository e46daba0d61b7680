"""A small decoder-only transformer in plain JAX: RoPE, grouped-query attention, SwiGLU, sliding and full layers.

`forward` takes attention as a function, so that training (dense) and serving (paged) run the same model. Parameters are
a flat dict of arrays, named as in the weights file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

SLIDING = "sliding_attention"
FULL = "full_attention"

type Params = Mapping[str, jax.Array]

type Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""`(layer, query [tokens, heads, head_dim], key, value [tokens, kv_heads, head_dim]) -> [tokens, heads, head_dim]`."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shape of the model. `dataclasses.asdict` of it is a Hugging Face `config.json`."""

    vocab_size: int = 256
    hidden_size: int = 192
    intermediate_size: int = 352
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    sliding_window: int = 64
    layer_types: tuple[str, ...] = (SLIDING, FULL, SLIDING, FULL)
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    dtype: str = "float32"
    num_hidden_layers: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_hidden_layers", len(self.layer_types))

    def window(self, layer: int) -> int | None:
        """Returns how many positions a query of `layer` attends to, its own included; None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Returns every parameter's name and shape. The embedding is also the output projection."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden), "norm": (hidden,)}
    for layer in range(config.num_hidden_layers):
        shapes |= {
            f"{layer}.attention.norm": (hidden,),
            f"{layer}.attention.query": (hidden, query),
            f"{layer}.attention.key": (hidden, kv),
            f"{layer}.attention.value": (hidden, kv),
            f"{layer}.attention.output": (query, hidden),
            f"{layer}.mlp.norm": (hidden,),
            f"{layer}.mlp.gate": (hidden, inner),
            f"{layer}.mlp.up": (hidden, inner),
            f"{layer}.mlp.down": (inner, hidden),
        }
    return shapes


def init_params(config: TransformerConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Returns initial float32 parameters: norms 1, matrices normal, residual projections scaled down by depth."""

    def init(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape)
        std = 0.02 if name == "embedding" else shape[0] ** -0.5
        if name.endswith((".output", ".down")):
            std /= math.sqrt(2 * config.num_hidden_layers)
        return std * jax.random.normal(key, shape)

    shapes = parameter_shapes(config)
    keys = jax.random.split(key, len(shapes))
    return {name: init(name, shape, keys[i]) for i, (name, shape) in enumerate(shapes.items())}


def forward(
    params: Params, config: TransformerConfig, tokens: jax.Array, positions: jax.Array, attend: Attend
) -> jax.Array:
    """Returns logits `[tokens, vocab_size]` in float32 for `tokens [tokens]` at `positions [tokens]`.

    Only attention, computed by `attend`, mixes tokens. The rest runs in the parameters' dtype.
    """
    x = params["embedding"][tokens]
    rotate = _rotary(positions, config)
    for layer in range(config.num_hidden_layers):

        def weight(name: str, layer: int = layer) -> jax.Array:
            return params[f"{layer}.{name}"]

        h = _rms_norm(x, weight("attention.norm"), config.rms_norm_eps)
        query, key, value = (
            (h @ weight(f"attention.{name}")).reshape(len(tokens), -1, config.head_dim)
            for name in ("query", "key", "value")
        )
        attended = attend(layer, rotate(query), rotate(key), value)
        x += attended.reshape(len(tokens), -1).astype(x.dtype) @ weight("attention.output")
        h = _rms_norm(x, weight("mlp.norm"), config.rms_norm_eps)
        x += (jax.nn.silu(h @ weight("mlp.gate")) * (h @ weight("mlp.up"))) @ weight("mlp.down")
    x = _rms_norm(x, params["norm"], config.rms_norm_eps)
    return jnp.dot(x, params["embedding"].T, preferred_element_type=jnp.float32)


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array, window: int | None
) -> jax.Array:
    """Attends with `query [tokens, heads, head_dim]` at `positions [tokens]` to keys that start at position 0.

    `key` and `value` are `[keys, kv_heads, head_dim]`; keys past a query's position are masked, so trailing padding has
    no effect.
    """
    distance = positions[:, None] - jnp.arange(len(key))
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return jax.nn.dot_product_attention(query[None], key[None], value[None], mask=visible[None, None])[0]


def dense_logits(params: Params, config: TransformerConfig, tokens: jax.Array) -> jax.Array:
    """Returns the logits `[tokens, vocab_size]` of a whole sequence, without a cache: for training and as reference."""
    positions = jnp.arange(len(tokens))

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return causal_attention(query, key, value, positions, config.window(layer))

    return forward(params, config, tokens, positions, attend)


def bits_per_token(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the cross entropy of each of `targets [tokens]` under `logits [tokens, vocab_size]`, in bits, float32."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, targets[:, None], axis=1)[:, 0] / math.log(2)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def _rotary(positions: jax.Array, config: TransformerConfig) -> Callable[[jax.Array], jax.Array]:
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half) / half)
    angles = positions[:, None, None] * frequencies
    return functools.partial(_rotate, cos=jnp.cos(angles), sin=jnp.sin(angles))


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
