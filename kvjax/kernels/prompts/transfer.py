"""Copies of rows of queries and results, and the kernel that places packed rows among those of a step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat, lanes
from kvjax.kernels.aliases import DType, Ref, Scalar
from kvjax.kernels.memory import ANY_LENGTH, AnyCount, Argument, Number, with_origin
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
        """Those of a row of so many elements, which is aligned to 4 bytes if its size is, unless not `is_aligned`."""
        num_bytes = elements * dtype.itemsize
        size = 4 if num_bytes % 4 == 0 and (is_aligned or dtype.itemsize == 4) else 2
        return cls(size, num_bytes // size)

    @property
    def dtype(self) -> DType:
        """The dtype that units are passed as."""
        return np.dtype(np.uint16 if self.size == 2 else np.int32)


def copy_units(
    source: Ref, start: Scalar, target: Any, to: Scalar, units: Units, thread: jax.Array, condition: Any
) -> None:
    """Copies a row from unit `start` on to unit `to` on; where `condition` does not hold, stores zeros."""

    def copy(i: jax.Array, _: None) -> None:
        indices = [thread + (i * _AT_ONCE + j) * THREADS for j in range(_AT_ONCE)]
        loaded = [lanes.load_global(source, start + index, (index < units.in_row) & condition) for index in indices]
        for index, unit in zip(indices, loaded, strict=True):
            lanes.store_global(target, to + index, lanes.bits(unit, jnp.int32), index < units.in_row)

    lax.fori_loop(0, -(-units.in_row // (_AT_ONCE * THREADS)), copy, None)


def fill_units(target: Any, start: Scalar, units: Units, thread: jax.Array) -> None:
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

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Any]) -> None:
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
