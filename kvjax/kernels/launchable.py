"""Descriptions of the memory that kernels access, and kernels over it: over JAX arrays, or caller-owned memory.

For JAX arrays, sizes are known when a kernel is compiled. For caller-owned memory only strides and alignments are known
then. Sizes and addresses are known at launch, so one kernel serves every launch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels import compat, warpgroups
from kvjax.kernels.aliases import DType, Kernel, Ref
from kvjax.pages import PageRegion
from kvjax.spec import AttentionSpec

ANY_LENGTH = 1 << 24
"""Leading dimension of references to caller-owned memory, whose size is known at launch only. Nothing depends on it."""

Number = int | jax.Array

Amount = int | tuple[int, ...]
"""What a kernel's number of programs depends on."""

Operand = jax.Array | jax.ShapeDtypeStruct
"""A JAX array that a kernel is called with, or the type of one that it makes."""


class Rows(NamedTuple):
    """Rows of tokens: those of token `t` are `ref[t - first]`, aligned to `alignment` bytes."""

    ref: Ref
    alignment: int = compat.BASE_ALIGNMENT
    first: Number = 0


class Pages(NamedTuple):
    """Pages: page `p` is `ref[p]`, aligned to `alignment` bytes. Regions are in bytes."""

    ref: Ref
    regions: Sequence[PageRegion]
    alignment: int


@dataclasses.dataclass(frozen=True)
class RowMemory:
    """Keys, values or queries; the elements of a token are contiguous.

    Attributes:
      dtype: float32, float16 or bfloat16.
      token_stride: elements between tokens; even for NVFP4.
      alignment: alignment of each token's address in bytes; at least 4 for NVFP4.
    """

    dtype: DType
    token_stride: int
    alignment: int

    @classmethod
    def of(cls, x: Operand) -> RowMemory:
        """The memory of a JAX array `[num_tokens, ...]`."""
        token_stride = math.prod(x.shape[1:])
        return cls(x.dtype, token_stride, math.gcd(token_stride * x.dtype.itemsize, compat.BASE_ALIGNMENT))

    def argument(self, name: str, as_rows: Callable[[jax.Array], jax.Array]) -> Argument:
        """The rows as an argument, in the elements that `as_rows` makes of `[num_tokens, token_stride]`."""
        rows = jax.eval_shape(as_rows, jax.ShapeDtypeStruct((1, self.token_stride), self.dtype))
        return Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH, *rows.shape[1:]), rows.dtype))


def page_dtypes(spec: AttentionSpec) -> tuple[DType, DType]:
    """The dtypes of references to keys and to values in pages: elements, or bytes of what is beside scales."""
    keys, values = (
        spec.array_dtype if spec.stores_scales and part.is_quantized else part.info.storage_dtype for part in spec.parts
    )
    return keys, values


@dataclasses.dataclass(frozen=True)
class PageMemory:
    """Pages of keys or of values.

    Attributes:
      regions: offsets of rows in a page, in bytes: data and, where pages hold them, scales; or scales alone.
      page_stride: bytes between pages.
      alignment: alignment of each page's address in bytes, a multiple of the element size.
    """

    regions: tuple[PageRegion, ...]
    page_stride: int
    alignment: int

    def argument(self, name: str, dtype: DType) -> Argument:
        """The pages as an argument, in elements of `dtype`."""
        return Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH, self.page_stride // dtype.itemsize), dtype))

    def pages(self, ref: Ref) -> Pages:
        """The pages in a kernel."""
        return Pages(ref, self.regions, self.alignment)


def array_memory(spec: AttentionSpec) -> tuple[PageMemory, PageMemory]:
    """The pages of a JAX array, of keys and of values."""
    size = spec.page_size_bytes
    keys, values = (PageMemory(regions, size, math.gcd(size, compat.BASE_ALIGNMENT)) for regions in spec.regions)
    return keys, values


def why_not_elements(spec: AttentionSpec, pages: Sequence[PageMemory]) -> str | None:
    """Why no kernel reads elements of `page_dtypes` in pages: their addresses are not multiples of their size."""
    for memory, dtype in zip(pages, page_dtypes(spec), strict=False):
        places = {memory.alignment, memory.page_stride}
        places |= {place for each in memory.regions for place in (each.base, each.token_stride)}
        if any(place % dtype.itemsize for place in places):
            return f"got rows of {dtype} at addresses that {dtype.itemsize} does not divide"
    return None


class Argument(NamedTuple):
    """An argument of a kernel.

    Attributes:
      name: its name.
      array: shape and dtype for tracing; nothing depends on the leading dimension, the number of rows.
    """

    name: str
    array: jax.ShapeDtypeStruct


class Origin(NamedTuple):
    """What made a kernel: identifies it without tracing it, and lets another process make it again.

    Attributes:
      function: its module and name, `module:name`.
      arguments: its arguments by name, defaults included.
    """

    function: str
    arguments: Mapping[str, Any]

    def make(self) -> AnyCount:
        """Makes the kernel again."""
        module, _, name = self.function.partition(":")
        function: Any = getattr(importlib.import_module(module), name, None)
        if not getattr(function, "makes_kernels", False):
            raise ValueError(f"got {self.function!r}, expected a function of kvjax that makes kernels")
        kernel: AnyCount = function(**self.arguments)
        return kernel


def with_origin[**Given](make: Callable[Given, AnyCount]) -> Callable[Given, AnyCount]:
    """Sets `origin` of the kernels that a function makes; nothing but its arguments may decide what they do."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapper(*args: Given.args, **kwargs: Given.kwargs) -> AnyCount:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        origin = Origin(f"{make.__module__}:{make.__qualname__}", given.arguments)
        return dataclasses.replace(make(*args, **kwargs), origin=origin)

    wrapper.makes_kernels = True  # type: ignore[attr-defined]
    return wrapper


@dataclasses.dataclass(frozen=True, eq=False)
class AnyCount:
    """A kernel for any number of tokens, sequences and blocks, over caller-owned memory or JAX arrays.

    Attributes:
      body: what a program does: called with the counts by name, with the reference of each argument by name, and with
        the shared memory that `kernel` allocates.
      kernel: makes a Pallas kernel of a function of references; takes its `grid`, the number of programs, and for JAX
        arrays `out_type`, the types of those that it makes.
      counts: names of the counts, which are int32 and not negative.
      arguments: the arrays. A write's scales come last: on sm_90 the first six entries of a launch are in one line of
        constant memory, and a program that waits for another line takes 0.1 us longer.
      writes: names of the arguments that the kernel writes.
      num_programs: number of programs along the last axis of the grid, given a number: of tokens for a write, of block
        table entries for a gather, of rows for a gather of ranges, of sequences for a merge. A kernel may document that
        it takes several numbers.
      origin: what made it.
    """

    body: Callable[..., None]
    kernel: Callable[..., Kernel]
    counts: tuple[str, ...]
    arguments: tuple[Argument, ...]
    writes: tuple[str, ...]
    num_programs: Callable[[Any], int]
    origin: Origin | None = None

    @property
    def written(self) -> tuple[int, ...]:
        """Indices of the arguments that the kernel writes."""
        names = [argument.name for argument in self.arguments]
        return tuple(map(names.index, self.writes))

    @property
    def args(self) -> list[jax.ShapeDtypeStruct]:
        """The arguments to trace `function` with."""
        numbers = [jax.ShapeDtypeStruct((2,), jnp.int32)] * -(-len(self.counts) // 2)
        return numbers + [argument.array for argument in self.arguments]

    def function(self, *arrays: jax.Array) -> list[jax.Array]:
        """A function of `args` that contains the kernel, for a launcher to compile; returns the written arrays.

        JAX sees references. The launcher passes integers instead: the counts as `packed` returns them, then the
        addresses of the arrays. Passed as addresses, they would be assumed to be multiples of `BASE_ALIGNMENT`.
        """
        num_packed = len(self.args) - len(self.arguments)

        def body(*refs: Ref) -> None:
            numbers = [number for ref in refs[:num_packed] for number in warpgroups.two_numbers(ref)]
            first_shared = num_packed + len(self.arguments)
            self._run(numbers[: len(self.counts)], refs[num_packed:first_shared], refs[first_shared:])

        refs = {num_packed + i: jax.new_ref(arrays[num_packed + i]) for i in self.written}
        self.kernel(body)(*(refs.get(i, array) for i, array in enumerate(arrays)))
        return [jax.freeze(ref) for ref in refs.values()]

    def with_counts(self, counts: Sequence[int], amount: Amount, *arrays: Operand) -> list[jax.Array]:
        """Runs the kernel on JAX arrays, compiled for their sizes and for these counts.

        Args:
          counts: known when the kernel is traced, so that branches on them are decided then.
          amount: the argument of `num_programs`.
          arrays: one for each argument, of any shape and dtype whose bytes are the argument's in the same order; int64
            slots are twice as many int32, low halves first. A `jax.ShapeDtypeStruct` makes a new array. Several
            arguments of one type that get the same array share its memory.

        Returns:
          The written arrays in the order of `writes`, each in the shape and dtype in which it was given; in place where
          it is donated.
        """
        types = [((-1, *argument.array.shape[1:]), argument.array.dtype) for argument in self.arguments]
        first: dict[tuple[int, tuple[int, ...], DType], int] = {}
        memory = []  # of each argument, the first one with the same memory
        given: dict[int, jax.Array] = {}
        new: dict[int, jax.ShapeDtypeStruct] = {}
        for i, (x, (shape, dtype)) in enumerate(zip(arrays, types, strict=True)):
            if isinstance(x, jax.ShapeDtypeStruct):
                memory.append(i)
                new[i] = jax.eval_shape(functools.partial(_bytes_as, shape=shape, dtype=dtype), x)
                continue
            memory.append(first.setdefault((id(x), shape, dtype), i))
            if memory[i] == i:
                given[i] = _bytes_as(x, shape, dtype)
        in_place = {memory[i] for i in self.written} - new.keys()
        if in_place:
            # XLA on GPUs may fuse slices of stacked arrays with a kernel before or after them, and then forgets that
            # the kernel writes in place: bytes that it leaves unchanged would be lost. Nothing is fused across a
            # barrier.
            given = {i: lax.optimization_barrier(x) for i, x in given.items()}
        refs = {i: jax.new_ref(given[i]) for i in in_place}

        def body(*refs: Ref) -> None:
            known = dict(zip((*given, *new), refs, strict=False))
            self._run(counts, [known[i] for i in memory], refs[len(known) :])

        kernel = self.kernel(body, grid=self.num_programs(amount), out_type=tuple(new.values()))
        written = dict(zip(new, kernel(*(refs.get(i, x) for i, x in given.items())) or (), strict=True))
        written |= {i: lax.optimization_barrier(jax.freeze(ref)) for i, ref in refs.items()}
        return [_bytes_as(written[memory[i]], arrays[i].shape, arrays[i].dtype) for i in self.written]

    def of_arrays(self, counts: Sequence[int], amount: Amount, arrays: Mapping[str, Operand]) -> dict[str, jax.Array]:
        """`with_counts` of arrays by name, among which may be others; returns the written ones by name."""
        written = self.with_counts(counts, amount, *(arrays[argument.name] for argument in self.arguments))
        return dict(zip(self.writes, written, strict=True))

    def _run(self, counts: Sequence[Number], refs: Sequence[Ref], shared: Sequence[Ref]) -> None:
        names = [argument.name for argument in self.arguments]
        self.body(dict(zip(self.counts, counts, strict=True)), dict(zip(names, refs, strict=True)), shared)


def _bytes_as(x: jax.Array, shape: tuple[int, ...], dtype: DType) -> jax.Array:
    """An array of the bytes of `x`, in the same order; -1 in `shape` is inferred from the rest."""
    if x.dtype == dtype:
        return x.reshape(shape)
    if dtype.itemsize > x.dtype.itemsize:
        x = x.reshape(*shape, dtype.itemsize // x.dtype.itemsize)
    return lax.bitcast_convert_type(x, dtype).reshape(shape)


PAGES = ("key_cache", "value_cache")
"""Names of the arguments for pages."""

SCALES = ("k_scale", "v_scale")
"""Names of the arguments for scales."""


def page_arguments(spec: AttentionSpec, pages: Sequence[PageMemory]) -> list[Argument]:
    """The arguments for pages that are read."""
    named = zip(PAGES, page_dtypes(spec), strict=True)
    return [memory.argument(*each) for memory, each in zip(pages, named, strict=False)]


def scale_argument(name: str, size: int) -> Argument:
    """One scale, or one for each head."""
    return Argument(name, jax.ShapeDtypeStruct((size,), jnp.float32))


type RowScaleMemory = tuple[PageMemory | None, PageMemory | None]
"""For keys and for values, the memory of the scales of each token and head. None where there are no such scales, or
where they are the second region of the pages."""


def check_row_scales(spec: AttentionSpec, pages: Sequence[PageMemory], memory: RowScaleMemory) -> None:
    """Checks the memory of scales of each token and head.

    Raises:
      ValueError: `memory` is missing for keys or values with such scales that are not in `pages`, or given for others.
    """
    for part, data, scales in zip(spec.parts, pages, memory, strict=False):
        if (part.info.has_row_scales and len(data.regions) == 1) != (scales is not None):
            raise ValueError(f"{memory=} does not fit {spec.dtype}")


def row_scale_arguments(spec: AttentionSpec, memory: RowScaleMemory) -> list[Argument]:
    """The arguments for scales of each token and head in memory of their own."""
    named = zip(SCALES, memory, strict=True)
    return [each.argument(name, spec.array_dtype) for name, each in named if each is not None]


def scale_arguments(spec: AttentionSpec, sizes: Sequence[int], memory: RowScaleMemory) -> list[Argument]:
    """The arguments for scales of keys and of values: the layer's, of `sizes` elements, or those in `memory`."""
    of_rows = {argument.name: argument for argument in row_scale_arguments(spec, memory)}
    return [of_rows.get(name) or scale_argument(name, size) for name, size in zip(SCALES, sizes, strict=True)]


def row_scales_of(arrays: Mapping[str, Ref], memory: RowScaleMemory) -> list[Pages | None]:
    """In a kernel, the pages for scales of each token and head, of keys and of values; None where there are none."""
    named = zip(SCALES, memory, strict=True)
    return [None if each is None else each.pages(arrays[name]) for name, each in named]


def scales_of(arrays: Mapping[str, Ref], memory: RowScaleMemory) -> tuple[list[Ref | None], list[Pages | None]]:
    """In a kernel, the layer's scales of keys and of values, None where `row_scales_of` has pages; and these pages."""
    pages = row_scales_of(arrays, memory)
    named = zip(SCALES, memory, strict=True)
    return [arrays[name] if each is None else None for name, each in named], pages


def packed(counts: Sequence[int]) -> list[int]:
    """Counts as a launcher passes them: two in one 64-bit integer, the first in the lower half."""
    return [low | high << 32 for low, high in itertools.zip_longest(counts[::2], counts[1::2], fillvalue=0)]
