"""What a kernel is told of memory: JAX's arrays, of which everything is known, or memory that somebody else owns.

Of the latter its strides are known when a kernel is compiled, but neither how much there is nor where it begins: each
launch brings that along, so that one kernel serves every launch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat
from kvjax.pages import PageRegion
from kvjax.spec import AttentionSpec

MOST = 1 << 24
"""Tokens, slots or pages of memory of which nobody says how many there are: a size for references to have."""

Number = int | jax.Array


class Rows(NamedTuple):
    """Rows of tokens: those of `t` begin `start` elements into `ref[t - first]`, at a multiple of `alignment` bytes."""

    ref: Any
    start: Number = 0
    alignment: int = compat.BASE_ALIGNMENT
    first: Number = 0


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

    def argument(self, name: str, as_rows: Callable[[jax.Array], jax.Array]) -> Argument:
        """The rows as an argument, in the elements that `as_rows` makes of `[num_tokens, token_stride]`."""
        rows = jax.eval_shape(as_rows, jax.ShapeDtypeStruct((1, self.token_stride), self.dtype))
        array = jax.ShapeDtypeStruct((MOST, *rows.shape[1:]), rows.dtype)
        return Argument(name, array, array.dtype.itemsize * math.prod(array.shape[2:]))


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

    def argument(self, name: str, dtype: np.dtype[Any]) -> Argument:
        """The pages as an argument, in elements of `dtype`."""
        return Argument(name, jax.ShapeDtypeStruct((MOST, self.page_stride // dtype.itemsize), dtype), dtype.itemsize)

    def pages(self, ref: Any, start: Number) -> Pages:
        """The pages in a kernel."""
        return Pages(ref, self.regions, self.alignment, start)


class Argument(NamedTuple):
    """An array that a launch passes.

    Attributes:
      name: its name.
      array: its shape and dtype, for tracing alone: nothing depends on the leading dimension, the number of rows.
      unit: for `with_numbers` alone, which is told how far into JAX's array this one begins: so many times these bytes.
    """

    name: str
    array: jax.ShapeDtypeStruct
    unit: int


@dataclasses.dataclass(frozen=True, eq=False)
class AnyCount:
    """A kernel over memory that somebody else owns.

    Attributes:
      body: what a program does: called with the counts by name, with `(reference, start)` of each argument by name, and
        with the shared memory that `kernel` allocates.
      kernel: makes a Pallas kernel of a function of references alone; takes its `grid`, the number of programs.
      counts: what the counts are: int32, and not negative.
      arguments: the arrays. A write's scales come last: on sm_90 the first six entries of a launch lie in one line of
        constant memory, and a program that waits for another line takes 0.1 us longer.
      writes: names of the arguments that the kernel writes.
      num_programs: how many programs a launch takes along the last axis of its grid: for a write of the number of
        tokens, for a gather of that of entries in the block table, for a merge of that of sequences.
    """

    body: Callable[..., None]
    kernel: Callable[..., Callable[..., Any]]
    counts: tuple[str, ...]
    arguments: tuple[Argument, ...]
    writes: tuple[str, ...]
    num_programs: Callable[[int], int]

    @property
    def written(self) -> tuple[int, ...]:
        """Indices of the arguments that the kernel writes."""
        names = [argument.name for argument in self.arguments]
        return tuple(map(names.index, self.writes))

    @property
    def args(self) -> list[jax.ShapeDtypeStruct]:
        """What to trace `function` with."""
        numbers = [jax.ShapeDtypeStruct((2,), jnp.int32)] * -(-len(self.counts) // 2)
        return numbers + [argument.array for argument in self.arguments]

    def function(self, *arrays: jax.Array) -> list[jax.Array]:
        """A function of `args` that holds the kernel, for a launcher that compiles it; returns what it writes.

        JAX sees references. The launcher passes integers in their place: first what `packed` makes of the counts, then
        the arrays' addresses, whatever those are multiples of; of addresses the kernel would take for granted that they
        are multiples of `BASE_ALIGNMENT`.
        """
        num_packed = len(self.args) - len(self.arguments)

        def body(*refs: Any) -> None:
            numbers = [number for ref in refs[:num_packed] for number in compat.two_numbers(ref)]
            self._run(numbers[: len(self.counts)], [0] * len(self.arguments), refs[num_packed:])

        return self._call(self.kernel(body), arrays)

    def with_numbers(self, numbers: Sequence[int], amount: int, *arrays: jax.Array) -> list[jax.Array]:
        """The same on JAX's arrays.

        `numbers` are the counts and, of each array, where it begins; `amount` is what `num_programs` takes.
        """
        counts, beginnings = numbers[: len(self.counts)], numbers[len(self.counts) :]

        def body(*refs: Any) -> None:
            # An array may begin so late in its first row that its own rows reach into JAX's next ones. Of a constant
            # JAX would refuse that; the address is right all the same.
            late = [beginning and beginning + 0 * lax.axis_index("program") for beginning in beginnings]
            self._run(counts, late, refs)

        return self._call(self.kernel(body, grid=self.num_programs(amount)), arrays)

    def _call(self, kernel: Callable[..., Any], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        first = len(arrays) - len(self.arguments)
        refs = {first + i: jax.new_ref(arrays[first + i]) for i in self.written}
        kernel(*(refs.get(i, array) for i, array in enumerate(arrays)))
        return [jax.freeze(ref) for ref in refs.values()]

    def _run(self, counts: Sequence[Number], beginnings: Sequence[Number], refs: Sequence[Any]) -> None:
        names = [argument.name for argument in self.arguments]
        arrays, scratch = refs[: len(names)], refs[len(names) :]
        by_name = dict(zip(names, zip(arrays, beginnings, strict=True), strict=True))
        self.body(dict(zip(self.counts, counts, strict=True)), by_name, scratch)


PAGES = ("key_cache", "value_cache")
"""Names of the arguments for pages."""

SCALES = ("k_scale", "v_scale")
"""Names of the arguments for scales."""


def scale_argument(name: str, size: int) -> Argument:
    """One scale, or one for each head."""
    scales = jax.ShapeDtypeStruct((size,), jnp.float32)
    return Argument(name, scales, scales.dtype.itemsize)


def scale_arguments(spec: AttentionSpec, sizes: Sequence[int], memory: Sequence[PageMemory] | None) -> list[Argument]:
    """The arguments for scales, of so many elements; or for the memory of those of each token and head.

    Raises:
      ValueError: no memory where each token and head has a scale, or some where it has none.
    """
    if spec.quant_mode.is_per_token_head is (memory is None):
        raise ValueError(f"{memory=} does not fit {spec.dtype}")
    if memory is None:
        return [scale_argument(name, size) for name, size in zip(SCALES, sizes, strict=True)]
    return [each.argument(name, spec.array_dtype) for name, each in zip(SCALES, memory, strict=True)]


def scales_of(
    arrays: Mapping[str, tuple[Any, Number]], sizes: Sequence[int], memory: Sequence[PageMemory] | None
) -> tuple[list[Any], list[Pages | None]]:
    """The layer's scales in a kernel, of keys and of values, and the pages with those of each token and head."""
    refs = [arrays[name] for name in SCALES]
    if memory is None:
        return [ref.at[pl.ds(start, size)] for (ref, start), size in zip(refs, sizes, strict=True)], [None, None]
    return [None, None], [each.pages(*ref) for each, ref in zip(memory, refs, strict=True)]


def packed(counts: Sequence[int]) -> list[int]:
    """Counts as the entries that a launcher passes for them: two to one of 64 bits, the first in the lower half."""
    return [low | high << 32 for low, high in itertools.zip_longest(counts[::2], counts[1::2], fillvalue=0)]
