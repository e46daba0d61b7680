"""Copies of rows of queries and results, and the kernels that place packed rows among those of a step.

`any_placement` copies each packed row to its place; the other rows of a step have their results already. `join` goes
through a step's rows, looks up where the results of each are, and also stores those of rows that see nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat, lanes
from kvjax.kernels.aliases import DType, Ref, Scalar
from kvjax.kernels.launchable import ANY_LENGTH, AnyCount, Argument, Number, with_origin
from kvjax.kernels.registers import THREADS

_AT_ONCE = 8
"""Units that a thread loads before it stores any."""


class Units(NamedTuple):
    """A row as units that a thread copies at once.

    Attributes:
      size: bytes of a unit, 2 or 4.
      in_row: units of a row.
    """

    size: int
    in_row: int

    @classmethod
    def of(cls, elements: int, dtype: DType, is_aligned: bool = True) -> Units:
        """The units of a row of `elements` elements; if `is_aligned`, it is aligned to 4 bytes where its size is."""
        num_bytes = elements * dtype.itemsize
        size = 4 if num_bytes % 4 == 0 and (is_aligned or dtype.itemsize == 4) else 2
        return cls(size, num_bytes // size)

    @property
    def dtype(self) -> DType:
        """The dtype that units are passed as."""
        return np.dtype(np.uint16 if self.size == 2 else np.int32)


def copy_units(
    source: Ref, start: Scalar, target: Ref, to: Scalar, units: Units, thread: jax.Array, condition: jax.Array | bool
) -> None:
    """Copies a row from unit `start` on to unit `to` on; where `condition` does not hold, stores zeros."""

    def copy(i: jax.Array, _: None) -> None:
        indices = [thread + (i * _AT_ONCE + j) * THREADS for j in range(_AT_ONCE)]
        loaded = [lanes.load_global(source, start + index, (index < units.in_row) & condition) for index in indices]
        for index, unit in zip(indices, loaded, strict=True):
            lanes.store_global(target, to + index, lanes.bits(unit, jnp.int32), index < units.in_row)

    lax.fori_loop(0, -(-units.in_row // (_AT_ONCE * THREADS)), copy, None)


def fill_units(target: Ref, start: Scalar, units: Units, thread: jax.Array) -> None:
    """Stores zeros in a row."""

    def fill(i: jax.Array, _: None) -> None:
        index = thread + i * THREADS
        lanes.store_global(target, start + index, lanes.splat(0, jnp.int32), index < units.in_row)

    lax.fori_loop(0, -(-units.in_row // THREADS), fill, None)


@functools.cache
@with_origin
def any_placement(results: Units, num_heads: int) -> AnyCount:
    """Stores packed results where they belong.

    The arguments are `places`, int32, for each packed row its row of the results, or -1; the packed `rows` and their
    log-sum-exp `lses`; and the results `out` and `lse`. The amount is the number of packed rows.
    """
    written = "out", "lse"

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Ref]) -> None:
        packed, thread = lax.axis_index("program"), lanes.thread_index()
        row = arrays["places"][packed]

        @pl.when(row >= 0)
        def place() -> None:
            of_row = packed * results.in_row, arrays["out"], row * results.in_row, results
            copy_units(arrays["rows"], *of_row, thread, True)

            def copy(i: jax.Array, _: None) -> None:
                head = thread + i * THREADS
                loaded = lanes.load_global(arrays["lses"], packed * num_heads + head, head < num_heads)
                lse = lanes.bits(loaded, jnp.float32)
                lanes.store_global(arrays["lse"], row * num_heads + head, lse, head < num_heads)

            lax.fori_loop(0, -(-num_heads // THREADS), copy, None)

    kernel = functools.partial(compat.program_kernel, "place_rows", grid=ANY_LENGTH)
    float32 = np.dtype(np.float32)
    dtypes = {
        "places": np.dtype(np.int32), "rows": results.dtype, "lses": float32, "out": results.dtype, "lse": float32,
    }  # fmt: skip
    arguments = tuple(Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH,), dtype)) for name, dtype in dtypes.items())
    return AnyCount(body, kernel, (), arguments, writes=written, num_programs=lambda num_rows: num_rows)


LEFT = -2
"""A row whose results another kernel stores."""

_JOINED = _AT_ONCE * THREADS
"""Elements of a row that a program copies."""


def join(
    source: jax.Array,
    packed: tuple[jax.Array, jax.Array] | None,
    sinks: jax.Array | None,
    result: jax.ShapeDtypeStruct,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of a step's rows: those of packed rows, and of rows that see nothing 0 and the sink or -inf.

    Args:
      source: int32 `[num_rows]`, for each row the packed row with its results; below 0 for one that sees nothing.
        The results of a row of `LEFT` are arbitrary, except the log-sum-exp, which is that of a row that sees nothing.
      packed: rows `[n, num_heads, head_size_v]` and their log-sum-exp, float32 `[n, num_heads]`; None for none.
      sinks: float32 `[num_heads]`, or None.
      result: float16 or bfloat16 `[num_rows, num_heads, head_size_v]`.

    Returns:
      Arrays of `result`, and float32 `[num_rows, num_heads]`.
    """
    num_rows, num_heads, head_size_v = result.shape
    in_row = num_heads * head_size_v
    parts = -(-in_row // _JOINED)
    at_once = 1 if num_rows <= 1024 else 16  # if rows are few, each is a program and waits for one load
    given = [source, *(x.reshape(-1) for x in packed or ()), *([] if sinks is None else [sinks])]

    def body(*refs: Ref) -> None:
        inputs, (out, lse) = iter(refs[: len(given)]), refs[len(given) :]
        source = next(inputs)
        rows, lses = (next(inputs), next(inputs)) if packed else (None, None)
        program, thread = lax.axis_index("program"), lanes.thread_index()
        part = lax.rem(program, jnp.int32(parts))
        first = lax.div(program, jnp.int32(parts)) * at_once
        columns = [part * _JOINED + thread + j * THREADS for j in range(_AT_ONCE)]
        own_sinks = None if sinks is None else next(inputs)

        def take(row: jax.Array, _: None) -> None:
            index = source[row]
            is_packed = index >= 0
            if rows is None:
                values = [lanes.splat(0.0, jnp.float32)] * _AT_ONCE
            else:
                start = jnp.maximum(index, 0) * in_row
                loaded = [lanes.load_global(rows, start + i, (i < in_row) & is_packed) for i in columns]
                values = [lanes.lower_half(x, result.dtype) for x in loaded]

            @pl.when(index != LEFT)
            def store() -> None:
                for i, value in zip(columns, values, strict=True):
                    lanes.store_global(out, row * in_row + i, value, i < in_row)

            @pl.when(part == 0)
            def store_lse() -> None:
                def of_heads(i: jax.Array, _: None) -> None:
                    head = thread + i * THREADS
                    is_head = head < num_heads
                    value = lanes.splat(-jnp.inf, jnp.float32)
                    if own_sinks is not None:
                        value = lanes.bits(lanes.load_global(own_sinks, head, is_head), jnp.float32)
                    if lses is not None:
                        found = lanes.load_global(lses, jnp.maximum(index, 0) * num_heads + head, is_head & is_packed)
                        value = jnp.where(is_packed, lanes.bits(found, jnp.float32), value)
                    lanes.store_global(lse, row * num_heads + head, value, is_head)

                lax.fori_loop(0, -(-num_heads // THREADS), of_heads, None)

        lax.fori_loop(first, jnp.minimum(first + at_once, num_rows), take, None)

    out_type = (
        jax.ShapeDtypeStruct((num_rows * in_row,), result.dtype),
        jax.ShapeDtypeStruct((num_rows * num_heads,), jnp.float32),
    )
    out, lse = compat.program_kernel("join_rows", body, -(-num_rows // at_once) * parts, out_type)(*given)
    return out.reshape(result.shape), lse.reshape(num_rows, num_heads)
