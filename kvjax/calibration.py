"""Computes decode scales from samples of keys and values, batch by batch, in constant memory."""

from __future__ import annotations

import enum
import functools
import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax.dtypes import KVCacheDType
from kvjax.errors import KVCacheTypeError, KVCacheValueError, KVCacheWarning, for_torch, got_expected, shown, type_name
from kvjax.ops.arguments import INPUT_DTYPES
from kvjax.ops.rows import decode_rows, encode_rows
from kvjax.scale_values import MAX_SCALE, MIN_SCALE
from kvjax.scales import KVScales
from kvjax.spec import AttentionSpec, as_items, as_specs

type Batch = Iterable[Iterable[ArrayLike]]
"""Keys and values, `(key, value)`, of each layer."""

type Samples = Iterable[Batch] | Callable[[], Iterable[Batch]]
"""Batches, or a function that returns them."""


class CalibrationMethod(enum.StrEnum):
    """How scales are computed; see `calibrate`."""

    AMAX = "amax"
    PERCENTILE = "percentile"
    MSE = "mse"


def calibrate(
    specs: Sequence[AttentionSpec],
    samples: Samples,
    *,
    method: str | CalibrationMethod = CalibrationMethod.AMAX,
    percentile: float = 99.99,
    per_head: bool = False,
    layer_indices: Sequence[int | str] | None = None,
) -> tuple[KVScales, ...]:
    """Computes decode scales for caches of `specs` from representative keys and values.

    `method` is one of

    - `"amax"`: `largest magnitude / largest value of the dtype`, which is 448 for fp8_e4m3, 57344 for fp8_e5m2, 6 * 448
      for NVFP4. No sample is clamped.
    - `"percentile"`: the same with a percentile of the nonzero magnitudes, rounded up by at most 1/64. Below `2**-40`
      it is rounded up to that; from `2**40` on it is the largest magnitude. Larger values are clamped; all others are
      stored in finer steps.
    - `"mse"`: tries 33 scales, `2 ** (i / 8)` times that of `"amax"` for `i` from 8 to -24. For each it sums the
      squared errors of the samples after they are stored and read back. It takes the largest scale whose sum is within
      0.01% of the least. Reads the samples twice.

    Unquantized layers get 1; their samples are checked like those of others. Batches go through jitted functions, which
    compile once per shape. Device memory for the results is at most 33 numbers per scale, 40 KiB for a percentile.

    Args:
      specs: each layer's, as `resolve_layer_specs` returns them.
      samples: batches, each with `(key, value)` for every spec: float32, float16 or bfloat16
        `[..., num_kv_heads, head_size]` and `[..., num_kv_heads, head_size_v]`, as they are stored, keys rotated; for
        latents (MLA) `(kv_c, k_pe)`, `[..., kv_lora_rank]` and `[..., qk_rope_head_dim]`, whose one scale is
        `k_scale`. NaN is ignored. Or a function that returns such batches; `"mse"` needs that, or a re-iterable.
      method: as above.
      percentile: above 0 and at most 100.
      per_head: whether layers that take a scale per KV head (fp8) get one per head; others (NVFP4) get one.
      layer_indices: what errors and warnings call the layers, such as `ModelKVConfig.layer_indices`; by default their
        places in `specs`.

    Raises:
      KVCacheValueError: no batch; one that does not match the specs; infinite keys or values; an unknown method; a
        percentile out of range; `per_head` without a layer that takes a scale per head; `layer_indices` of another
        number.
      KVCacheTypeError: `specs` is not a sequence of specs; a batch of another type or dtype; for `"mse"` an iterator;
        `percentile` is not a number.

    Warns:
      KVCacheWarning: keys or values of a layer, or of one of its heads, are all 0: their scale is 1.
    """
    specs = as_specs(specs)
    indices = range(len(specs)) if layer_indices is None else as_items("layer_indices", layer_indices, "ints")
    if len(indices) != len(specs):
        raise KVCacheValueError(f"layer_indices: got {len(indices)}, expected {len(specs)}, one for each spec")
    if method not in list(CalibrationMethod):
        raise KVCacheValueError(got_expected("method", method, list(CalibrationMethod)))
    if isinstance(percentile, bool) or not isinstance(percentile, numbers.Real):
        raise KVCacheTypeError(
            f"percentile: got {shown(percentile)} of type {type_name(percentile)}, expected a number above 0 and at"
            " most 100"
        )
    if not 0 < percentile <= 100:
        raise KVCacheValueError(f"percentile: got {shown(percentile)}, expected above 0 and at most 100")
    if per_head and not any(part.info.takes_head_scales for spec in specs if not spec.is_mla for part in spec.parts):
        raise KVCacheValueError("per_head: got True, expected False: no layer's dtype takes a scale per KV head")
    if method == CalibrationMethod.MSE and not callable(samples) and iter(samples) is samples:
        raise KVCacheTypeError(
            f"samples: got a {type(samples).__name__}, which can be read only once, expected for method 'mse' a list or"
            " a function that returns the batches"
        )
    tensors = [
        _Tensor(layer, indices[layer], kv_index, spec, per_head and part.info.takes_head_scales and not spec.is_mla)
        for layer, spec in enumerate(specs)
        for kv_index, part in enumerate(spec.parts)
        if not (spec.is_mla and kv_index) or (part is not spec.parts[0] and spec.part_sizes[1])
    ]
    read = functools.partial(_read, tensors, specs, samples)
    scales = _from_percentile(read, percentile) if method == CalibrationMethod.PERCENTILE else _from_largest(read)
    if method == CalibrationMethod.MSE:
        scales = _with_least_error(read, scales)
    by_tensor = {
        (tensor.layer, tensor.kv_index): scale if tensor.per_head else scale[0] for tensor, scale in scales.items()
    }
    one = np.float32(1)
    return tuple(KVScales(by_tensor.get((i, 0), one), by_tensor.get((i, 1), one)) for i in range(len(specs)))


class _Tensor(NamedTuple):
    """The keys (`kv_index` 0) or the values (1) of a layer, or its latents (0) or rope keys (1).

    `layer` is its place among the specs, `name` its index in the model.

    If rope keys have the latents' dtype, they count as further elements of the latents.
    """

    layer: int
    name: int | str
    kv_index: int
    spec: AttentionSpec
    per_head: bool

    @property
    def num_scales(self) -> int:
        return self.spec.num_kv_heads if self.per_head else 1

    @property
    def dtype(self) -> KVCacheDType:
        return self.spec.parts[self.kv_index]

    def of(self, what: str, sample: tuple[Any, Any]) -> jax.Array:
        """Returns this tensor of a layer's sample, `(key, value)` or `(kv_c, k_pe)`, as `[..., heads, elements]`."""
        if not self.spec.is_mla:
            row = {"num_kv_heads": self.spec.num_kv_heads, "head_size": self.spec.head_sizes[self.kv_index]}
            return _checked(f"{what}, {self}", sample[self.kv_index], row)
        names, parts = self.spec.PART_NAMES, zip(self.spec.parts, sample, self.spec.part_sizes, strict=True)
        checked = [
            (part, size, _checked(f"{what}, {self}", x, {name: size}) if size else jnp.asarray(x))
            for name, (part, x, size) in zip(names, parts, strict=True)
        ]
        (_, _, kv_c), (_, rope, k_pe) = checked
        if k_pe.shape != (expected := (*kv_c.shape[:-1], rope)):
            raise KVCacheValueError(
                f"{what}, {self}, k_pe: got shape {k_pe.shape}, expected {expected}, the tokens of kv_c"
            )
        rows = [x for part, size, x in checked if part is self.dtype and size]
        return jnp.expand_dims(jnp.concatenate([x.astype(jnp.float32) for x in rows], axis=-1), -2)

    def __str__(self) -> str:
        names = ("latents", "rope keys") if self.spec.is_mla else ("keys", "values")
        return f"{names[self.kv_index]} of layer {self.name}"


type _State = tuple[jax.Array, ...]
type _Update = Callable[[jax.Array, _State, KVCacheDType, bool], _State]
type _Reader = Callable[[Callable[[_Tensor], _State], _Update], dict[_Tensor, tuple[np.ndarray, ...]]]
"""`(initial state of a tensor, update with a batch) -> final states`."""


def _read(
    tensors: Sequence[_Tensor],
    specs: Sequence[AttentionSpec],
    samples: Samples,
    start: Callable[[_Tensor], _State],
    update: _Update,
) -> dict[_Tensor, tuple[np.ndarray, ...]]:
    """Runs all batches through `update`; waits for the device only at the end.

    Tensors without a scale have no state. They are checked too: a wrong layer or an overflow in the model may show in
    these alone, and makes the scales of all layers doubtful.
    """
    states = {tensor: start(tensor) for tensor in tensors if tensor.dtype.takes_scale}
    largest: dict[_Tensor, _State] = {
        tensor: (jnp.zeros(1, jnp.float32),) for tensor in tensors if tensor not in states
    }
    number = -1
    for number, batch in enumerate(samples() if callable(samples) else samples):
        layers = _layers_of(number, batch, len(specs))
        for tensor, state in states.items():
            x = tensor.of(f"samples[{number}]", layers[tensor.layer])
            states[tensor] = update(x, state, tensor.dtype, tensor.per_head)
        for tensor, state in largest.items():
            x = tensor.of(f"samples[{number}]", layers[tensor.layer])
            largest[tensor] = _largest(x, state, tensor.dtype, False)
    if number < 0:
        raise KVCacheValueError("samples: got no batch, expected at least one")
    for tensor, (amax,) in largest.items():
        _check_finite(tensor, jax.device_get(amax))
    return {tensor: jax.device_get(state) for tensor, state in states.items()}


def _layers_of(number: int, batch: Any, count: int) -> list[tuple[Any, Any]]:
    try:
        layers = [(key, value) for key, value in batch]
    except (TypeError, ValueError):
        raise KVCacheTypeError(
            f"samples[{number}]: got a {type(batch).__name__}, expected (key, value) for each layer"
        ) from None
    if len(layers) != count:
        raise KVCacheValueError(
            f"samples[{number}]: got keys and values of {len(layers)} layers, expected {count}, one pair for each spec"
        )
    return layers


def _checked(what: str, x: Any, row: Mapping[str, int]) -> jax.Array:
    """Returns an array whose last dimensions are `row`'s, or raises."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise KVCacheTypeError(f"{what}: got a {type(x).__name__}, expected an array{for_torch(x)}")
    if x.dtype not in INPUT_DTYPES:
        raise KVCacheTypeError(f"{what}: got dtype {x.dtype}, expected one of {', '.join(map(str, INPUT_DTYPES))}")
    if x.shape[x.ndim - len(row) :] != (*row.values(),) or not x.size:
        expected = ", ".join(f"{name}={size}" for name, size in row.items())
        raise KVCacheValueError(f"{what}: got shape {x.shape}, expected [..., {expected}] and at least one token")
    return jnp.asarray(x)


def _from_largest(read: _Reader) -> dict[_Tensor, np.ndarray]:
    """Returns the scales that map the largest magnitudes to the dtype's largest value."""
    found = read(lambda tensor: (jnp.zeros(tensor.num_scales, jnp.float32),), _largest)
    return {tensor: _scales(tensor, amax, amax) for tensor, (amax,) in found.items()}


def _check_finite(tensor: _Tensor, amax: np.ndarray) -> None:
    if not np.isfinite(amax).all():
        raise KVCacheValueError(f"samples: got infinite {tensor}, expected finite values")


def _scales(tensor: _Tensor, magnitudes: np.ndarray, amax: np.ndarray) -> np.ndarray:
    _check_finite(tensor, amax)
    if not amax.all():
        heads = f", heads {np.flatnonzero(amax == 0).tolist()}," if tensor.per_head else ""
        warnings.warn(
            f"samples: the {tensor}{heads} are all 0, so their scale is 1",
            KVCacheWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),  # attribute it to the caller's line
        )
    scales = magnitudes / np.float32(tensor.dtype.info.max)
    return np.where(amax == 0, np.float32(1), np.clip(scales, np.float32(MIN_SCALE), np.float32(MAX_SCALE)))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _largest(x: jax.Array, state: _State, dtype: KVCacheDType, per_head: bool) -> _State:
    (amax,) = state
    return (jnp.maximum(amax, jnp.max(_by_scale(_magnitudes(x), per_head), axis=1)),)


def _magnitudes(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), 0.0, jnp.abs(x.astype(jnp.float32)))


def _by_scale(x: jax.Array, per_head: bool) -> jax.Array:
    """Reshapes `[..., num_kv_heads, head_size]` to `[scales, numbers of each]`."""
    return jnp.moveaxis(x, -2, 0).reshape(x.shape[-2], -1) if per_head else x.reshape(1, -1)


# A histogram's bins are float32 bit patterns without the lower 17 bits: 64 bins per power of two.
_BIN_SHIFT = 17
_FIRST_BIN = int(np.float32(2.0**-40).view(np.int32)) >> _BIN_SHIFT
NUM_BINS = (int(np.float32(2.0**40).view(np.int32)) >> _BIN_SHIFT) - _FIRST_BIN + 1
"""Magnitudes from 2^-40; the first bin also holds smaller ones, the last one all from 2^40 on."""


def _from_percentile(read: _Reader, percentile: float) -> dict[_Tensor, np.ndarray]:
    """Returns the scales that represent this percentage of the magnitudes without clamping."""

    def start(tensor: _Tensor) -> _State:
        counts = jnp.zeros((2, tensor.num_scales, NUM_BINS), jnp.uint32)
        return jnp.zeros(tensor.num_scales, jnp.float32), counts

    scales = {}
    for tensor, (amax, counts) in read(start, _count).items():
        low, high = counts.astype(np.uint64)
        up_to = np.cumsum(low + (high << np.uint64(32)), axis=1)
        wanted = np.ceil(up_to[:, -1] * (percentile / 100))
        last = np.argmax(up_to >= wanted[:, None], axis=1)
        ends = ((last + 1 + _FIRST_BIN) << _BIN_SHIFT).astype(np.int32).view(np.float32)
        ends = np.where(last == NUM_BINS - 1, amax, ends)
        scales[tensor] = _scales(tensor, np.minimum(ends, amax), amax)
    return scales


@functools.partial(jax.jit, static_argnums=(2, 3))
def _count(x: jax.Array, state: _State, dtype: KVCacheDType, per_head: bool) -> _State:
    amax, (low, high) = state
    magnitudes = _by_scale(_magnitudes(x), per_head)
    bits = lax.bitcast_convert_type(magnitudes, jnp.int32) >> _BIN_SHIFT
    bins = jnp.where(magnitudes > 0, jnp.clip(bits - _FIRST_BIN, 0, NUM_BINS - 1), NUM_BINS)
    scales = jnp.arange(len(bins), dtype=jnp.int32)[:, None]
    counted = low.at[scales, bins].add(jnp.uint32(1), mode="drop")
    # A bin gains fewer than 2^32 per batch, so it overflowed if it decreased.
    return jnp.maximum(amax, jnp.max(magnitudes, axis=1)), jnp.stack([counted, high + (counted < low)])


_RATIOS = np.exp2(np.arange(8, -25, -1) / 8).astype(np.float32)
"""Candidate scales relative to that of the largest magnitude, in decreasing order.

Within a power of two they differ in rounding; ratios below 1 clamp the largest values.
"""


_SAME_ERROR = 1e-4
"""Relative differences below this are ignored: the sums' last bits depend on how samples are batched."""


def _with_least_error(read: _Reader, scales: Mapping[_Tensor, np.ndarray]) -> dict[_Tensor, np.ndarray]:
    """Returns for each scale the one of `_RATIOS` with the least sum of squared errors of the samples.

    Where all sums are equal, as those of zeros are, it is the scale itself.
    """

    def start(tensor: _Tensor) -> _State:
        tried = np.clip(_RATIOS[:, None] * scales[tensor], MIN_SCALE, MAX_SCALE)
        per_unit = np.ldexp(np.float32(1), -np.frexp(scales[tensor])[1])
        return jnp.zeros(tried.shape, jnp.float32), jnp.asarray(tried), jnp.asarray(per_unit)

    best = {}
    for tensor, (errors, tried, _) in read(start, _add_errors).items():
        least = errors.min(axis=0)
        first = np.argmax(errors <= least * (1 + _SAME_ERROR), axis=0)
        first = np.where(errors.max(axis=0) == least, np.flatnonzero(_RATIOS == 1), first)
        best[tensor] = np.take_along_axis(tried, first[None], axis=0)[0]
    return best


@functools.partial(jax.jit, static_argnums=(2, 3))
def _add_errors(x: jax.Array, state: _State, dtype: KVCacheDType, per_head: bool) -> _State:
    errors, tried, per_unit = state

    def squared_error(scale: jax.Array) -> jax.Array:
        scale = scale[:, None] if per_head else scale[0]
        # Without the barrier, XLA on GPUs would cancel the conversions to float8 and back.
        stored = lax.optimization_barrier(encode_rows(x, dtype, scale))
        read = decode_rows(stored, dtype, scale, np.dtype(np.float32))
        error = jnp.where(jnp.isnan(x), 0.0, read - x.astype(jnp.float32))
        # In units near the scale, squares do not underflow or overflow. The units are powers of two: no bit is lost.
        error = error * (per_unit[:, None] if per_head else per_unit[0])
        return jnp.sum(_by_scale(error * error, per_head), axis=1)

    return errors + lax.map(squared_error, tried), tried, per_unit
