"""Compares calibration methods: the error of stored keys and values, and the model's results with them."""

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

METHODS: Mapping[str, kvjax.KVScales | Mapping[str, Any]] = MappingProxyType(
    {
        "1": kvjax.KVScales(np.float32(1), np.float32(1)),
        # Equivalent to scales of 1 for keys 64 times and values a 4096th as large: both are powers of two.
        "1, other magnitudes": kvjax.KVScales(np.float32(1 / 64), np.float32(4096)),
        "amax": {"method": "amax"},
        "percentile 99.99": {"method": "percentile", "percentile": 99.99},
        "mse": {"method": "mse"},
        "amax, per head": {"method": "amax", "per_head": True},
        "mse, per head": {"method": "mse", "per_head": True},
    }
)
"""Scales of every layer, or arguments of `kvjax.calibrate`."""


@dataclasses.dataclass(frozen=True)
class ScalesRow:
    """Results of a dtype with one method's scales.

    `key_error` and `value_error`: root mean square of the storage error, relative to that of the keys or the values.
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
    """Returns a row for each quantized dtype and each of its methods, over `texts` (uint8 `[length]`)."""
    rows = []
    for dtype in dtypes:
        specs = model.layer_specs(dtype, block_size)
        for name, scales in _scales_by_method(model, specs).items():
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


def _scales_by_method(model: Model, specs: Sequence[kvjax.AttentionSpec]) -> dict[str, tuple[kvjax.KVScales, ...]]:
    """Returns the scales of each method that applies to these specs."""
    if not any(spec.dtype.takes_scale for spec in specs):
        return {}
    has_heads = any(part.info.takes_head_scales for spec in specs for part in spec.dtype.parts)
    return {
        name: (method,) * len(specs)
        if isinstance(method, kvjax.KVScales)
        else kvjax.calibrate(specs, model.samples, **method)
        for name, method in METHODS.items()
        if has_heads or isinstance(method, kvjax.KVScales) or "per_head" not in method
    }


class _ReadBack(NamedTuple):
    """A text's results with keys and values read from caches; `squared_errors` and `squares` of keys and values."""

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
    # With one length, and a scale per head wherever possible, all texts and methods share a program.
    scales = tuple(
        kvjax.KVScales(
            *(
                np.broadcast_to(scale, (spec.num_kv_heads,) if part.info.takes_head_scales else ())
                for scale, part in zip(layer, spec.dtype.parts, strict=True)
            )
        )
        for layer, spec in zip(scales, specs, strict=True)
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
        for kv_index, (stored, exact) in enumerate(zip(read, (key, value), strict=True)):
            squared_errors = squared_errors.at[kv_index].add(jnp.sum(jnp.where(is_text, stored - exact, 0.0) ** 2))
            squares = squares.at[kv_index].add(jnp.sum(jnp.where(is_text, exact, 0.0) ** 2))
        return causal_attention(query, *read, positions, config.window(layer))

    with jax.default_matmul_precision("highest"):
        logits = forward(params, config, tokens, positions, attend)
    return logits, squared_errors, squares


def _through_cache(
    key: jax.Array, value: jax.Array, spec: kvjax.AttentionSpec, scales: kvjax.KVScales
) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values, `[tokens, kv_heads, head_dim]`, written to a new cache and read back."""
    num_tokens = len(key)
    num_blocks = -(-num_tokens // spec.block_size)
    cache = kvjax.KVCache.allocate(spec, num_blocks, **scales._asdict())
    cache = kvjax.reshape_and_cache_flash(key, value, cache, jnp.arange(num_tokens))
    table, lengths = jnp.arange(num_blocks)[None], jnp.full(1, num_tokens)
    keys, values = kvjax.gather_kv(cache, table, lengths, dtype=key.dtype)
    return keys[0, :num_tokens], values[0, :num_tokens]
