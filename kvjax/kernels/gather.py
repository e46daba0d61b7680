"""The gather kernel: pages of whole sequences as dense, dequantized keys and values.

A program takes `tokens` neighbouring tokens of one block of one sequence. It issues all loads of their rows before it
uses any, decodes in registers, and stores the rows, which are contiguous in the result. Tokens past the sequence's
length are zeros, and so are tokens of entries of the block table that are no block of the cache; programs with only
such tokens read nothing.

"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.errors import UnsupportedError
from kvjax.kernels import compat
from kvjax.kernels.aliases import DType, Ref
from kvjax.kernels.codecs import codecs_of
from kvjax.kernels.launchable import (
    ANY_LENGTH,
    PAGES,
    AnyCount,
    Argument,
    Number,
    PageMemory,
    RowScaleMemory,
    check_row_scales,
    page_arguments,
    scale_arguments,
    scales_of,
    why_not_elements,
    with_origin,
)
from kvjax.kernels.page_tokens import GatherOperand, PageTokens, decode_tokens
from kvjax.pages import SWIZZLE_TOKENS
from kvjax.spec import AttentionSpec

PROGRAM_BYTES = 32 << 10
"""Bytes that a program stores: 16 vectors per thread, enough loads to hide their latency, in enough registers."""


@dataclasses.dataclass(frozen=True)
class GatherConfig:
    """How the gather is launched.

    Attributes:
      tokens: tokens per program; divides the block size, and is a multiple of 4 where V scales are swizzled.
    """

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"{self.tokens=} must be positive")

    @classmethod
    def choose(cls, spec: AttentionSpec, dtype: DType) -> GatherConfig:
        """As many tokens as `PROGRAM_BYTES` hold, rounded down to a power of two, which threads divide evenly."""
        token_bytes = spec.num_kv_heads * sum(spec.part_sizes) * np.dtype(dtype).itemsize
        least = SWIZZLE_TOKENS if spec.is_swizzled else 1
        most = max(least, PROGRAM_BYTES // token_bytes)
        return cls(math.gcd(spec.block_size, 1 << most.bit_length() - 1))


class Table(NamedTuple):
    """The block table: each sequence has `max_blocks` entries of `ref`, `stride` after those of the previous one.

    In a cache of several layers, whose pages lie next to each other in a block, `layer` is the layer to read.
    """

    ref: Ref
    max_blocks: Number
    stride: Number
    last_block: Number
    layer: Number = 0
    num_layers: int = 1

    def page(self, seq: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The page of a sequence's block, and whether it is in the cache."""
        return self.page_of(self.ref[seq * self.stride + index])

    def page_of(self, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The page of an entry, and whether it is in the cache; entries may be any number."""
        is_block = (entry >= 0) & (entry <= self.last_block)
        if isinstance(self.layer, int):
            return entry, is_block
        is_layer = (self.layer >= 0) & (self.layer < self.num_layers)
        return entry * jnp.int32(self.num_layers) + self.layer, is_block & is_layer


@with_origin
def any_count(
    spec: AttentionSpec,
    pages: tuple[PageMemory, ...],
    dtype: DType,
    scale_sizes: tuple[int, int],
    scale_pages: RowScaleMemory = (None, None),
    num_layers: int | None = None,
    config: GatherConfig | None = None,
) -> AnyCount:
    """The gather from memory given for keys and for values, or for latents and for rope keys if any.

    The arguments are the block table and the lengths, int32, k_scale, v_scale, the keys' and the values' pages, with
    `num_layers` the layer to read, and the dense keys and values. `scale_pages` and `num_layers` are as in the write.
    `table_stride` is the number of entries from one sequence's first to the next sequence's first.

    Raises:
      UnsupportedError: no kernel decodes the dtype, or reads elements at such addresses.
      ValueError: as `check_row_scales`.
    """
    check_row_scales(spec, pages, scale_pages)
    if reason := why_not_elements(spec, pages):
        raise UnsupportedError(f"gather_kv: {reason}")
    codecs = codecs_of(spec)
    config = config or GatherConfig.choose(spec, dtype)
    layers = () if num_layers is None else (Argument("layer", jax.ShapeDtypeStruct((1,), jnp.int32)),)
    indices = jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)
    dense_names = "key", "value"

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Any]) -> None:
        scales, of_tokens = scales_of(arrays, scale_pages)
        operands = [
            GatherOperand(codec, memory.pages(arrays[name]), scale, arrays[dense_name], of_token)
            for codec, memory, name, scale, dense_name, of_token in zip(
                codecs, pages, PAGES, scales, dense_names, of_tokens, strict=False
            )
        ]
        table = Table(arrays["block_table"], counts["max_blocks"], counts["table_stride"], counts["last_block"])
        if num_layers is not None:
            table = table._replace(layer=arrays["layer"][0], num_layers=num_layers)
        _gather_tokens(table, arrays["seq_lens"], operands, spec, config, dtype)

    return AnyCount(
        body,
        functools.partial(_kernel, grid=ANY_LENGTH),
        ("max_blocks", "table_stride", "last_block"),
        (
            Argument("block_table", indices),
            Argument("seq_lens", indices),
            *scale_arguments(spec, scale_sizes, scale_pages),
            *page_arguments(spec, pages),
            *layers,
            # The body assumes that results, which are new arrays, are aligned as JAX's are.
            *(
                Argument(name, dense)
                for name, dense in zip(dense_names, dense_types(spec, ANY_LENGTH, dtype), strict=False)
            ),
        ),
        writes=dense_names[: len(codecs)],
        num_programs=lambda num_entries: num_entries * (spec.block_size // config.tokens),
    )


_kernel = functools.partial(compat.program_kernel, "gather_kv")


def dense_types(spec: AttentionSpec, num_tokens: int, dtype: DType) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The kernel's results for keys and for values."""
    dims = num_tokens, spec.num_kv_heads
    return tuple(
        codec.dense_type(dims, size, dtype) for codec, size in zip(codecs_of(spec), spec.part_sizes, strict=False)
    )


def _gather_tokens(
    table: Table,
    seq_lens: Ref,
    operands: Sequence[GatherOperand],
    spec: AttentionSpec,
    config: GatherConfig,
    dtype: DType,
) -> None:
    """The body of the kernel."""
    chunks_per_block = spec.block_size // config.tokens
    seq, chunk = _divmod(lax.axis_index("program"), table.max_blocks * chunks_per_block)
    index, part = _divmod(chunk, chunks_per_block)
    position = chunk * config.tokens
    page, is_page = table.page(seq, index)
    num_valid = jnp.where(is_page, jnp.maximum(seq_lens[seq], 0) - position, 0)
    first = seq * (table.max_blocks * spec.block_size) + position
    operands = [each._replace(dense=each.dense.at[pl.ds(first, config.tokens)]) for each in operands]
    decode_tokens(operands, PageTokens(page, part * config.tokens, config.tokens, num_valid), spec, dtype)


def _divmod(x: jax.Array, divisor: Number) -> tuple[jax.Array, jax.Array]:
    divisor = jnp.int32(divisor)
    return lax.div(x, divisor), lax.rem(x, divisor)
