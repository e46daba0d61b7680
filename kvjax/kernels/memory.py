"""What a kernel is told of memory: JAX's arrays, of which everything is known, or memory that somebody else owns.

Of the latter its strides are known when a kernel is compiled, but neither how much there is nor where it begins: those
are numbers that each launch brings along, so that one kernel serves every launch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels import compat
from kvjax.pages import PageRegion

MOST = 1 << 24
"""Tokens, slots or pages of memory of which nobody says how many there are: a size for references to have."""

Number = int | jax.Array


class Rows(NamedTuple):
    """Rows of tokens: those of token `t` begin `start` elements into `ref[t]`, at a multiple of `alignment` bytes."""

    ref: Any
    start: Number = 0
    alignment: int = compat.BASE_ALIGNMENT


class Pages(NamedTuple):
    """Pages: `p` begins `start` elements into `ref[p]`, at a multiple of `alignment` bytes; regions are in bytes."""

    ref: Any
    regions: Sequence[PageRegion]
    alignment: int
    start: Number = 0


@dataclasses.dataclass(frozen=True)
class RowMemory:
    """Keys or values that somebody else owns; the elements of a token are one run.

    Attributes:
      dtype: float32, float16 or bfloat16.
      token_stride: elements from a token to the next; even for NVFP4.
      alignment: bytes that each token's address is a multiple of; at least 4 for NVFP4.
    """

    dtype: np.dtype[Any]
    token_stride: int
    alignment: int


@dataclasses.dataclass(frozen=True)
class PageMemory:
    """Half a cache that somebody else owns: keys or values.

    Attributes:
      regions: where rows lie in a page, in bytes from its beginning: data and, for NVFP4, block scales.
      page_stride: bytes from a page to the next.
      alignment: bytes that each page's address is a multiple of: a whole number of elements.
    """

    regions: tuple[PageRegion, ...]
    page_stride: int
    alignment: int

    def argument(self, dtype: np.dtype[Any]) -> Argument:
        """The pages as an argument, in elements of `dtype`."""
        return Argument(jax.ShapeDtypeStruct((MOST, self.page_stride // dtype.itemsize), dtype), dtype.itemsize)

    def pages(self, ref: Any, start: Number) -> Pages:
        """The pages in a kernel."""
        return Pages(ref, self.regions, self.alignment, start)


class Argument(NamedTuple):
    """An array that a launch passes.

    Attributes:
      array: its shape and dtype, for tracing alone: nothing depends on the leading dimension.
      unit: its beginning is passed as so many of these bytes after an address; 0 if it begins at the address.
    """

    array: jax.ShapeDtypeStruct
    unit: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class AnyCount:
    """A kernel over memory that somebody else owns, for a launcher that passes addresses.

    The kernel's arguments are numbers in place of addresses (see `compat.number`), then arrays. The numbers are
    `counts` and, of each array that has a unit, where it begins.

    Attributes:
      body: what a program does: called with the counts, with `(reference, beginning)` of each array, and with what
        `kernel` allocates.
      kernel: makes a Pallas kernel of a function of references alone; takes its `grid`, the number of programs.
      counts: what the first numbers are.
      arguments: the arrays.
      num_written: how many of the last arrays the kernel writes.
      num_programs: how many programs a launch takes: for a write of the number of tokens, for a gather of that of
        entries in the block table.
    """

    body: Callable[..., None]
    kernel: Callable[..., Callable[..., Any]]
    counts: tuple[str, ...]
    arguments: tuple[Argument, ...]
    num_written: int
    num_programs: Callable[[int], int]

    @functools.cached_property
    def units(self) -> tuple[int, ...]:
        """The unit of each array."""
        return tuple(argument.unit for argument in self.arguments)

    @property
    def args(self) -> list[jax.ShapeDtypeStruct]:
        """What to trace the kernel with, called as a function."""
        numbers = len(self.counts) + sum(argument.unit > 0 for argument in self.arguments)
        return [jax.ShapeDtypeStruct((1,), jnp.int32)] * numbers + [argument.array for argument in self.arguments]

    def function(self, *arrays: jax.Array) -> list[jax.Array]:
        """A function of `args` that holds the kernel; returns the written arrays."""

        def body(*refs: Any) -> None:
            num_numbers = len(self.args) - len(self.arguments)
            self._run([compat.number(ref) for ref in refs[:num_numbers]], refs[num_numbers:])

        return self._call(self.kernel(body), arrays)

    def with_numbers(self, numbers: Sequence[int], amount: int, *arrays: jax.Array) -> list[jax.Array]:
        """The same with numbers that are known, of arrays as they are; `amount` is what `num_programs` takes."""

        def body(*refs: Any) -> None:
            self._run(numbers, refs)

        return self._call(self.kernel(body, grid=self.num_programs(amount)), arrays)

    def _call(self, kernel: Callable[..., Any], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        refs = [jax.new_ref(array) for array in arrays[-self.num_written :]]
        kernel(*arrays[: -self.num_written], *refs)
        return [jax.freeze(ref) for ref in refs]

    def _run(self, numbers: Sequence[Number], refs: Sequence[Any]) -> None:
        counts, beginnings = numbers[: len(self.counts)], iter(numbers[len(self.counts) :])
        started = [
            (ref, next(beginnings) if argument.unit else 0) for ref, argument in zip(refs, self.arguments, strict=False)
        ]
        self.body(counts, started, refs[len(self.arguments) :])
