"""Chooses each layer's dtype by the error of attention on samples, or by measured errors, under a budget of memory."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.calibration import calibrate
from kvjax.dtypes import KVCacheDType, parse_kv_cache_dtype
from kvjax.errors import KVCacheTypeError, KVCacheValueError, UnsupportedError, for_torch, kind_of, shown
from kvjax.model_config import ModelKVConfig
from kvjax.ops.arguments import INPUT_DTYPES
from kvjax.ops.hadamard import hadamard_transform
from kvjax.ops.options import as_bool, as_float, as_int
from kvjax.ops.rows import decode_rows, encode_rows
from kvjax.resolve import resolve_layer_specs
from kvjax.scales import KVScales
from kvjax.spec import AttentionSpec

OVERFLOWS = 1e30
"""Replaces the error of a dtype whose values overflow. It is finite; infinity marks sums that exceed the budget."""


class ErrorMeasure(enum.StrEnum):
    """The error of a layer; a choice of dtypes minimizes its sum over the layers."""

    ATTENTION = enum.auto()
    """The relative error of each layer's attention."""
    DIVERGENCE = enum.auto()
    """The divergence of the model's predictions with one layer quantized."""


type Sequences = Iterable[Iterable[Iterable[ArrayLike]]]
"""Sequences, each with `(query, key, value)` of every layer."""

type ErrorOf = Callable[[int | str, KVCacheDType, bool], float]
"""Returns the error with one layer stored in a dtype, given its index, the dtype, and whether its keys are rotated."""


@dataclasses.dataclass(frozen=True)
class DTypeChoice:
    """Chosen dtypes, and what they were chosen by.

    Attributes:
      dtypes: of each layer, by its index: a request for `resolve_layer_specs`.
      bits: mean bits of an element of keys and values, stored scales included.
      bytes_per_token: of all layers.
      errors: of each layer in order, the error with each allowed dtype.
      key_rotation: indices of the layers whose queries and keys to rotate by `hadamard_transform`.
      rotated_errors: the errors with rotated queries and keys; empty without `key_rotation=True`.
    """

    dtypes: Mapping[int | str, str | KVCacheDType]
    bits: float
    bytes_per_token: int
    errors: tuple[Mapping[KVCacheDType, float], ...]
    key_rotation: tuple[int | str, ...] = ()
    rotated_errors: tuple[Mapping[KVCacheDType, float], ...] = ()


def choose_layer_dtypes(
    model: ModelKVConfig,
    samples: Sequences | Callable[[], Sequences] | None,
    dtypes: Sequence[str | KVCacheDType],
    *,
    bits: float | None = None,
    bytes_per_token: int | None = None,
    key_rotation: bool = False,
    error_of: ErrorOf | None = None,
) -> DTypeChoice:
    """Chooses one of `dtypes` for each layer, with the least sum of errors that fits a budget.

    `error_of` measures the errors, for example the divergence of the model's predictions with that layer alone
    quantized. By default they are errors of attention, which cost less to measure but say less about predictions. A
    layer's error of attention is relative. Let `o` be its causal attention over the samples' keys and values, and `o'`
    its attention over the same keys and values stored and read back, both in float32 with the layer's window and
    softmax's scale `head_size ** -0.5`. Then,

        error = sum((o' - o) ** 2) / sum(o ** 2)

    over all samples. Scales are those of `calibrate(method="amax")` on the same samples. The sum of errors over layers
    is minimized under `sum of the layers' bytes per token <= budget`, exactly: a knapsack with one dtype per layer,
    solved by dynamic programming over bytes. Of choices with equal sums, the one with fewer bytes is returned. A dtype
    whose values overflow has an infinite error, and is chosen only where no other fits.

    Soft caps, sinks and other scales of the softmax are not part of the error of attention.

    With `key_rotation`, a layer whose keys are quantized may also have its queries and keys rotated by
    `hadamard_transform`, if that makes its error smaller. The model must rotate them in the layers of the result's
    `key_rotation`, and use scales of rotated keys there. The samples here are never rotated.

    Args:
      model: its layers.
      samples: sequences, each with `(query, key, value)` for every layer, as attention takes them, RoPE applied:
        float32, float16 or bfloat16 `[tokens, heads, head_size]`. A list, or a function that returns them, since they
        are read twice for each dtype. None with `error_of`.
      dtypes: what layers may have; `"auto"` is the model's dtype.
      bits: the budget as mean bits of an element, stored scales included: NVFP4 has 4.5.
      bytes_per_token: the budget in bytes of all layers, instead of `bits`.
      key_rotation: whether layers may have rotated keys. Samples are then read four times for each dtype.
      error_of: a function of a layer's index, a dtype, and whether its keys are rotated, that returns the error: 0 or
        more, infinite for what must not be chosen. It is called once for each combination; with True only if
        `key_rotation` is set, and only for dtypes whose keys are quantized.

    Raises:
      KVCacheValueError: no dtype, no sample, samples that do not match the layers, or whose attention is not finite;
        not exactly one budget; one that the smallest dtypes exceed; samples and `error_of`, or neither; an error that
        is negative or NaN.
      KVCacheTypeError: another type of model, samples, budget, `error_of` or error; an iterator of samples.
      UnsupportedError: layers of multi-head latent attention.
    """
    key_rotation = as_bool("key_rotation", key_rotation)
    if not isinstance(model, ModelKVConfig):
        raise KVCacheTypeError(f"model: got {kind_of(model)}, expected a ModelKVConfig")
    if any(layer.is_mla for layer in model.layers):
        raise UnsupportedError("choose_layer_dtypes: got a model of multi-head latent attention (MLA)")
    if (bits is None) == (bytes_per_token is None):
        raise KVCacheValueError(f"bits, bytes_per_token: got {bits} and {bytes_per_token}, expected one of them")
    measure = _by_attention(samples) if error_of is None else _by_function(samples, error_of)
    allowed = dict.fromkeys(map(parse_kv_cache_dtype, dtypes))
    if not allowed:
        raise KVCacheValueError("dtypes: got none, expected at least one")
    by_dtype = [resolve_layer_specs(model, dtype) for dtype in allowed]
    elements = sum(spec.num_kv_heads * sum(spec.head_sizes) for spec in by_dtype[0])
    if bits is None:
        budget = as_int("bytes_per_token", bytes_per_token, least=1)
    else:
        budget = math.floor((as_float("bits", bits) or 0.0) * elements / 8)
    costs = np.array([[specs[layer].bytes_per_token for specs in by_dtype] for layer in range(len(model.layers))])
    if (least := int(costs.min(axis=1).sum())) > budget:
        raise KVCacheValueError(
            f"bytes_per_token: got {budget}, expected at least {least}, of the smallest dtypes"
            if bits is None
            else f"bits: got {bits:g}, expected at least {bits_in_words(8 * least / elements)}, of the smallest dtypes"
        )
    errors = np.stack([measure(model, specs, False) for specs in by_dtype], axis=1)
    rotated = np.full_like(errors, np.inf)
    if key_rotation:
        rotated = np.stack([measure(model, specs, True) for specs in by_dtype], axis=1)
    chosen = _least(np.minimum(errors, rotated), costs, budget)
    layers = range(len(model.layers))
    total = int(costs[layers, chosen].sum())
    is_rotated = (rotated < errors)[layers, chosen]

    def by_layer(found: np.ndarray) -> tuple[Mapping[KVCacheDType, float], ...]:
        return tuple(
            {specs[layer].dtype: float(error) for specs, error in zip(by_dtype, found[layer], strict=True)}
            for layer in layers
        )

    return DTypeChoice(
        dtypes={model.layer_indices[layer]: by_dtype[chosen[layer]][layer].dtype for layer in layers},
        bits=8 * total / elements,
        bytes_per_token=total,
        errors=by_layer(errors),
        key_rotation=tuple(model.layer_indices[layer] for layer in layers if is_rotated[layer]),
        rotated_errors=by_layer(rotated) if key_rotation else (),
    )


def bits_in_words(bits: float) -> str:
    """Two decimals, rounded up, so that as many bits are enough."""
    return f"{math.ceil(round(bits * 100, 6)) / 100:.2f}"


def _least(errors: np.ndarray, costs: np.ndarray, budget: int) -> np.ndarray:
    """Returns the index of each layer's dtype, `[layers]`, with the least sum of errors whose costs fit `budget`."""
    errors = np.where(np.isfinite(errors), errors, OVERFLOWS)
    unit = int(np.gcd.reduce(costs, axis=None))
    costs, capacity = costs // unit, min(budget // unit, int((costs // unit).max(axis=1).sum()))
    best = np.zeros(capacity + 1)  # by cost: the least sum of errors of the layers so far within it
    chosen = np.empty((len(costs), capacity + 1), int)
    for layer, (of_layer, of_dtypes) in enumerate(zip(errors, costs, strict=True)):
        sums = np.full((len(of_layer), capacity + 1), np.inf)
        for dtype, (error, cost) in enumerate(zip(of_layer, of_dtypes, strict=True)):
            if cost <= capacity:
                sums[dtype, cost:] = best[: capacity + 1 - cost] + error
        chosen[layer] = np.argmin(sums, axis=0)
        best = sums.min(axis=0)
    left = int(np.argmin(best))  # the first of the least: the fewest bytes
    result = np.empty(len(costs), int)
    for layer in reversed(range(len(costs))):
        result[layer] = chosen[layer, left]
        left -= costs[layer, result[layer]]
    return result


type Measure = Callable[[ModelKVConfig, Sequence[AttentionSpec], bool], np.ndarray]
"""Returns the error of each layer with the specs of a dtype, `[layers]`, with rotated keys or without.

That of rotated keys is infinite for layers that cannot have them.
"""


def _by_attention(samples: object) -> Measure:
    if not callable(samples) and not isinstance(samples, Iterable):
        raise KVCacheTypeError(f"samples: got {kind_of(samples)}, expected a list or a function, or else error_of")
    if not callable(samples) and iter(samples) is samples:
        raise KVCacheTypeError(
            f"samples: got a {type(samples).__name__}, which can be read only once, expected a list or a function"
        )
    read: Callable[[], Sequences] = samples if callable(samples) else lambda: samples
    return lambda model, specs, rotates: _errors(model.layer_indices, specs, read, rotates=rotates)


def _by_function(samples: object, error_of: ErrorOf) -> Measure:
    if samples is not None:
        raise KVCacheValueError(f"samples: got {kind_of(samples)} beside error_of, expected None")
    if not callable(error_of):
        raise KVCacheTypeError(f"error_of: got {kind_of(error_of)}, expected a function")

    def error(layer: int | str, dtype: KVCacheDType, rotates: bool) -> float:
        found = error_of(layer, dtype, rotates)
        what = f"error_of: got {shown(found)} for layer {shown(layer)}, {dtype.value}"
        if isinstance(found, bool) or not isinstance(found, numbers.Real):
            raise KVCacheTypeError(f"{what}, expected a float")
        if not found >= 0:
            raise KVCacheValueError(f"{what}, expected a number of 0 or more")
        return float(found)

    def measure(model: ModelKVConfig, specs: Sequence[AttentionSpec], rotates: bool) -> np.ndarray:
        has_error = [not rotates or _may_rotate(spec) for spec in specs]
        of_layers = zip(model.layer_indices, specs, has_error, strict=True)
        return np.array([error(layer, spec.dtype, rotates) if has else np.inf for layer, spec, has in of_layers])

    return measure


def _may_rotate(spec: AttentionSpec) -> bool:
    return spec.dtype.parts[0].is_quantized and spec.head_size % 2 == 0


def _errors(
    indices: Sequence[int | str], specs: Sequence[AttentionSpec], read: Callable[[], Sequences], *, rotates: bool
) -> np.ndarray:
    """Returns each layer's relative error of attention, `[layers]`; that of rotated keys is infinite without them."""
    checked = functools.partial(_checked, specs, read)
    has_rotation = [rotates and _may_rotate(spec) for spec in specs]

    def stored() -> Iterable[list[tuple[Any, Any]]]:
        for sequence in checked():
            # In float32, because rotated elements may exceed float16: the error is then infinite, instead of raised.
            yield [
                (hadamard_transform(jnp.asarray(key, jnp.float32)) if is_rotated else key, value)
                for (_, key, value), is_rotated in zip(sequence, has_rotation, strict=True)
            ]

    scales = calibrate(specs, stored, layer_indices=indices)
    sums = np.zeros((len(specs), 2))
    for sequence in checked():
        sums += [
            jax.device_get(_squares(*map(jnp.asarray, layer), of_layer, spec=spec, rotates=is_rotated))
            for layer, spec, of_layer, is_rotated in zip(sequence, specs, scales, has_rotation, strict=True)
        ]
    for index, total in zip(indices, sums[:, 1], strict=True):
        if not np.isfinite(total):
            raise KVCacheValueError(f"samples: got attention of layer {index} that is not finite")
    errors = np.divide(sums[:, 0], sums[:, 1], out=np.zeros(len(specs)), where=sums[:, 1] > 0)
    if rotates:
        errors = np.where(has_rotation, errors, np.inf)
    return np.where(np.isfinite(errors), errors, np.inf)


def _checked(specs: Sequence[AttentionSpec], read: Callable[[], Sequences]) -> Iterable[list[tuple[Any, ...]]]:
    """Yields the sequences after checking their shapes."""
    for number, sequence in enumerate(read()):
        layers = [tuple(layer) for layer in sequence]
        if len(layers) != len(specs):
            raise KVCacheValueError(f"samples[{number}]: got {len(layers)} layers, expected {len(specs)}")
        for index, (layer, spec) in enumerate(zip(layers, specs, strict=True)):
            _check(f"samples[{number}], layer {index}", layer, spec)
        yield layers


def _check(what: str, layer: tuple[Any, ...], spec: AttentionSpec) -> None:
    if len(layer) != 3:
        raise KVCacheValueError(f"{what}: got {len(layer)} arrays, expected query, key and value")
    for name, x in zip(("query", "key", "value"), layer, strict=True):
        if not isinstance(x, (jax.Array, np.ndarray)) or x.dtype not in INPUT_DTYPES:
            raise KVCacheTypeError(
                f"{what}, {name}: got {kind_of(x)}, expected an array of one of"
                f" {', '.join(map(str, INPUT_DTYPES))}{for_torch(x)}"
            )
    query, key, value = layer
    tokens, heads, (size, size_v) = key.shape[0] if key.ndim else 0, spec.num_kv_heads, spec.head_sizes
    if key.shape != (tokens, heads, size) or value.shape != (tokens, heads, size_v) or not tokens:
        raise KVCacheValueError(
            f"{what}: got keys {key.shape} and values {value.shape}, expected [tokens, {heads}, {size}] and"
            f" [tokens, {heads}, {size_v}]"
        )
    if query.ndim != 3 or query.shape[::2] != (tokens, size) or not query.shape[1] or query.shape[1] % heads:
        raise KVCacheValueError(
            f"{what}, query: got shape {shown(query.shape)}, expected [tokens={tokens}, a multiple of {heads}, {size}]"
        )


@functools.partial(jax.jit, static_argnames=("spec", "rotates"))
def _squares(
    query: jax.Array, key: jax.Array, value: jax.Array, scales: KVScales, *, spec: AttentionSpec, rotates: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns sums of squares: of attention's error, with rotated queries and keys if `rotates`, and of attention."""
    exact = _attention(query, key, value, spec.sliding_window)
    if rotates:  # the rotation rounds to the samples' dtype, as in the model
        query, key = hadamard_transform(query), hadamard_transform(key)
    keys, values = (
        # Without the barrier, XLA on GPUs would cancel the conversions to float8 and back.
        decode_rows(lax.optimization_barrier(encode_rows(x, part, scale)), part, scale, np.dtype(np.float32))
        for x, part, scale in zip((key, value), spec.dtype.parts, scales, strict=True)
    )
    error = _attention(query, keys, values, spec.sliding_window) - exact
    return jnp.sum(error * error), jnp.sum(exact * exact)


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, window: int | None) -> jax.Array:
    """Returns causal attention in float32, `[kv_heads, group, tokens, head_size_v]`."""
    tokens, num_kv_heads, size = key.shape
    grouped = query.astype(jnp.float32).reshape(tokens, num_kv_heads, -1, size) * size**-0.5
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    visible = (distance >= 0) & (distance < (window or tokens))
    logits = jnp.einsum("tkgd,skd->kgts", grouped, key.astype(jnp.float32), precision="highest")
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
    return jnp.einsum("kgts,skd->kgtd", weights, value.astype(jnp.float32), precision="highest")
