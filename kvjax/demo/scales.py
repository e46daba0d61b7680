"""What each way to find scales keeps of keys and values, and of what the model says after it has read them back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.demo.evaluate import Model, Reference, bits_per_byte
from kvjax.demo.model import Params, TransformerConfig, causal_attention, forward

WAYS: Mapping[str, kvjax.KVScales | Mapping[str, Any]] = MappingProxyType(
    {
        "1": kvjax.KVScales(np.float32(1), np.float32(1)),
        # As scales of 1 are for keys 64 times and values a 4096th as large: both are powers of two.
        "1, other magnitudes": kvjax.KVScales(np.float32(1 / 64), np.float32(4096)),
        "amax": {"method": "amax"},
        "percentile 99.99": {"method": "percentile", "percentile": 99.99},
        "mse": {"method": "mse"},
        "amax, per head": {"method": "amax", "per_head": True},
        "mse, per head": {"method": "mse", "per_head": True},
    }
)
"""Scales of every layer, or what `kvjax.calibrate` is asked for."""


@dataclasses.dataclass(frozen=True)
class ScalesRow:
    """A dtype with scales found in one way.

    `key_error` and `value_error`: root mean square of what storing changes, over that of the keys or of the values.
    """

    dtype: str
    scales: str
    key_error: float
    value_error: float
    bits_per_byte: float
    greedy_agreement: float


def compare_scales(
    model: Model,
    dtypes: Sequence[kvjax.KVCacheDType],
    texts: Sequence[np.ndarray],
    reference: Reference,
    max_length: int,
    block_size: int,
) -> list[ScalesRow]:
    """A row for each quantized dtype and each way that it has, over `texts` (uint8 `[length]`)."""
    rows = []
    for dtype in dtypes:
        specs = model.layer_specs(dtype, block_size)
        for name, scales in _found(model, specs).items():
            read = [_read_back(model, specs, scales, text, max_length) for text in texts]
            errors = np.sqrt(sum(one.squared_errors for one in read) / sum(one.squares for one in read))
            agreement = [one.logits.argmax(axis=1) == best for one, best in zip(read, reference.greedy, strict=True)]
            rows.append(
                ScalesRow(
                    dtype=dtype.value,
                    scales=name,
                    key_error=float(errors[0]),
                    value_error=float(errors[1]),
                    bits_per_byte=bits_per_byte([one.logits for one in read], texts),
                    greedy_agreement=float(np.concatenate(agreement).mean()),
                )
            )
    return rows


def _found(model: Model, specs: Sequence[kvjax.AttentionSpec]) -> dict[str, tuple[kvjax.KVScales, ...]]:
    """The scales of each way that layers of these specs have."""
    if not any(spec.dtype.takes_scale for spec in specs):
        return {}
    has_heads = any(_has_scale_per_head(spec) for spec in specs)
    return {
        name: (way,) * len(specs) if isinstance(way, kvjax.KVScales) else kvjax.calibrate(specs, model.samples, **way)
        for name, way in WAYS.items()
        if has_heads or isinstance(way, kvjax.KVScales) or "per_head" not in way
    }


def _has_scale_per_head(spec: kvjax.AttentionSpec) -> bool:
    return spec.quant_mode is kvjax.KVQuantMode.FP8_PER_TENSOR


class _ReadBack(NamedTuple):
    """Of a text through the model over what caches gave back; `squared_errors` and `squares` of keys and values."""

    logits: np.ndarray
    squared_errors: np.ndarray
    squares: np.ndarray


def _read_back(
    model: Model,
    specs: tuple[kvjax.AttentionSpec, ...],
    scales: tuple[kvjax.KVScales, ...],
    text: np.ndarray,
    max_length: int,
) -> _ReadBack:
    # Of one length and with a scale for each head that may have one, all texts and ways share a program.
    shapes = [(spec.num_kv_heads,) if _has_scale_per_head(spec) else () for spec in specs]
    scales = tuple(
        kvjax.KVScales(*(np.broadcast_to(scale, shape) for scale in layer))
        for layer, shape in zip(scales, shapes, strict=True)
    )
    tokens = np.pad(text[:-1].astype(np.int32), (0, max_length - len(text)))
    run = _run(model.params, tokens, np.int32(len(text) - 1), scales, config=model.config, specs=specs)
    logits, squared_errors, squares = jax.device_get(run)
    return _ReadBack(logits[: len(text) - 1], squared_errors, squares)


@functools.partial(jax.jit, static_argnames=("config", "specs"))
def _run(
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    scales: tuple[kvjax.KVScales, ...],
    *,
    config: TransformerConfig,
    specs: tuple[kvjax.AttentionSpec, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    positions = jnp.arange(len(tokens))
    is_text = (positions < length)[:, None, None]
    squared_errors, squares = jnp.zeros(2), jnp.zeros(2)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        nonlocal squared_errors, squares
        read = _through_cache(key, value, specs[layer], scales[layer])
        for half, (stored, exact) in enumerate(zip(read, (key, value), strict=True)):
            squared_errors = squared_errors.at[half].add(jnp.sum(jnp.where(is_text, stored - exact, 0.0) ** 2))
            squares = squares.at[half].add(jnp.sum(jnp.where(is_text, exact, 0.0) ** 2))
        return causal_attention(query, *read, positions, config.window(layer))

    with jax.default_matmul_precision("highest"):
        logits = forward(params, config, tokens, positions, attend)
    return logits, squared_errors, squares


def _through_cache(
    key: jax.Array, value: jax.Array, spec: kvjax.AttentionSpec, scales: kvjax.KVScales
) -> tuple[jax.Array, jax.Array]:
    """Keys and values, `[tokens, kv_heads, head_dim]`, as a cache of their own gives them back."""
    num_tokens = len(key)
    num_blocks = -(-num_tokens // spec.block_size)
    cache = kvjax.KVCache.allocate(spec, num_blocks, **scales._asdict())
    cache = kvjax.reshape_and_cache_flash(key, value, cache, jnp.arange(num_tokens))
    table, lengths = jnp.arange(num_blocks)[None], jnp.full(1, num_tokens)
    keys, values = kvjax.gather_kv(cache, table, lengths, dtype=key.dtype)
    return keys[0, :num_tokens], values[0, :num_tokens]
