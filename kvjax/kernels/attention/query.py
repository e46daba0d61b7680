"""The query of a sequence as the second matrix operand of products with keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.kernels import lanes
from kvjax.kernels.aliases import DType, DTypeLike, Ref
from kvjax.kernels.attention.keys import KeyRows, Keys
from kvjax.kernels.attention.problem import COLUMNS, Problem, Refs
from kvjax.kernels.attention.ring import divided, remainder
from kvjax.kernels.attention.softmax import LOG2_E
from kvjax.kernels.attention.warp import Warp
from kvjax.kernels.launchable import Number
from kvjax.kernels.registers import MAX_VECTOR_BYTES


def operand_of(keys: Keys, refs: Refs, sequence: jax.Array) -> tuple[list[list[list[jax.Array]]], jax.Array]:
    """The query as a matrix operand, and the factor of the logits, in units of the binary logarithm.

    The operand is registers by tile, by term and by pair of dims; the sum of the terms is the query.
    """
    problem, fmt, warp = keys.problem, keys.rows.format, keys.warp
    a_sequence, a_token = problem.query_strides
    first = warp.kv_head * problem.group * problem.spec.head_size
    place = Place(refs.query, sequence * a_sequence, (a_token, problem.spec.head_size), first)
    loaded = loaded_for(keys.rows, warp, problem, place)
    operand, power = as_operand(keys.rows, loaded, problem.query_dtype)
    k_scale = warp.scale(fmt, refs.k_scale, problem.scale_sizes[0])
    factor = k_scale * np.float32(problem.sm_scale * LOG2_E * fmt.factor)
    return operand, factor if power is None else factor * power


class Place(NamedTuple):
    """Where the elements of a sequence's query are.

    Attributes:
      ref: the array.
      start: the element at which the sequence begins.
      strides: elements between query tokens and between heads.
      first: the element of a query token at which its first row begins.
      exists: whether the elements exist; they are zeros otherwise. None if they always exist.
    """

    ref: Ref
    start: jax.Array
    strides: tuple[Number, int]
    first: jax.Array
    exists: jax.Array | None = None


def loaded_for(rows: KeyRows, warp: Warp, problem: Problem, place: Place) -> list[list[jax.Array]]:
    """For each tile of query rows, the elements for products with keys, each in the lower half of a register.

    A unit's elements are contiguous in the query too, whose rows are aligned to `MAX_VECTOR_BYTES`. They are loaded as
    words; the upper half of a register may hold another element of its word.
    """
    itemsize = np.dtype(problem.query_dtype).itemsize
    size = min(rows.unit_elements * itemsize, MAX_VECTOR_BYTES)
    starts = range(0, rows.unit_elements, size // itemsize)
    dims = [dim for pair in rows.format.key_dims(rows.unit) for dim in pair]
    loaded: list[list[jax.Array]] = []
    for tile in range(problem.tiles):
        row = warp.row + tile * COLUMNS
        token, head = divided(row, problem.group), remainder(row, problem.group)
        a_token, a_head = place.strides
        index = place.start + token * a_token + head * a_head
        index = index + place.first + warp.column * rows.unit_elements
        is_row = row < problem.rows
        is_row = is_row if place.exists is None else is_row & place.exists
        elements: list[jax.Array] = []
        for unit in range(rows.units):
            first = index + 4 * unit * rows.unit_elements
            words = [x for start in starts for x in lanes.load_global_words(place.ref, first + start, size, is_row)]
            elements += [words[dim // 2] >> 16 if dim % 2 else words[dim // 2] for dim in dims]
        loaded.append(elements)
    return loaded


def as_operand(
    rows: KeyRows, loaded: list[list[jax.Array]], query_dtype: DTypeLike
) -> tuple[list[list[list[jax.Array]]], jax.Array | None]:
    """Loaded elements of a dtype as an operand, and the power of two by which they were divided, or None."""
    fmt = rows.format
    operand, dtype = np.dtype(fmt.operand), np.dtype(query_dtype)
    if operand == dtype and not fmt.has_block_scales:
        words = [[lanes.permute(x, y, 0x5410) for x, y in zip(xs[::2], xs[1::2], strict=True)] for xs in loaded]
        return [[tile] for tile in words], None
    values = [[_to_float(x, dtype) for x in xs] for xs in loaded]
    if operand == np.float16:
        values, power = _within_float16(values)
        return [[_pairs(xs, operand)] for xs in values], power
    return [_in_two_terms(xs, operand) for xs in values], None


def _within_float16(values: list[list[jax.Array]]) -> tuple[list[list[jax.Array]], jax.Array]:
    """The values divided by a power of two, and that power.

    bfloat16 has a larger range than float16: the power scales the largest value of the warp to 2**14 or more.
    """
    largest = functools.reduce(jnp.maximum, (jnp.abs(x) for xs in values for x in xs))
    for mask in (1, 2, 4, 8, 16):
        largest = jnp.maximum(largest, lanes.shuffle_xor(largest, mask))
    exponent = lanes.bits(largest, jnp.uint32) >> 23
    exponent = jnp.minimum(jnp.maximum(exponent, jnp.uint32(30)), jnp.uint32(253))
    inverse = lanes.bits((jnp.uint32(254 + 14) - exponent) << 23, jnp.float32)
    power = lanes.bits((exponent - jnp.uint32(14)) << 23, jnp.float32)
    return [[x * inverse for x in xs] for xs in values], power


def _in_two_terms(values: list[jax.Array], dtype: DType) -> list[list[jax.Array]]:
    """Pairs of the rounded values, and pairs of the remainders: float16 has three bits more than bfloat16."""
    high = _pairs(values, dtype)
    halves = [high[i // 2] >> 16 if i % 2 else high[i // 2] & 0xFFFF for i in range(len(values))]
    rest = [x - _to_float(half, dtype) for x, half in zip(values, halves, strict=True)]
    return [high, _pairs(rest, dtype)]


def _to_float(x: jax.Array, dtype: DType) -> jax.Array:
    """A 16-bit element in the lower half of a register in float32."""
    if dtype == jnp.bfloat16:
        return lanes.bits(x << 16, jnp.float32)

    def model(x: jax.Array) -> list[jax.Array]:
        return [lax.bitcast_convert_type(x.astype(jnp.uint16), jnp.float16).astype(jnp.float32)]

    code = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    return lanes.asm(code, model, x, results=[jnp.float32])[0]


def _pairs(values: Sequence[jax.Array], dtype: DTypeLike) -> list[jax.Array]:
    return [lanes.half2(x, y, dtype) for x, y in zip(values[::2], values[1::2], strict=True)]
