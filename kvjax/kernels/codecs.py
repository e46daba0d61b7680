"""How kernels encode and decode the rows of each dtype: one object for writes and gathers.

`CODECS` has an entry for each dtype that keys or values may have in the pages that kernels write and gather
(`KVCacheDType.parts`). XLA serves any other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.dtypes import STORED_KV_CACHE_DTYPES, KVCacheDType
from kvjax.errors import UnsupportedError
from kvjax.kernels import arithmetic, compat, decoding, nvfp4
from kvjax.kernels.aliases import DType, DTypeLike, Layout, Ref, Scalar, ScratchType
from kvjax.kernels.launchable import Rows
from kvjax.kernels.registers import MAX_VECTOR_BYTES, lane_layout
from kvjax.kernels.target import Target
from kvjax.spec import AttentionSpec


class LoadedRows(NamedTuple):
    """Rows in registers and their layout: one array, or two, of the even and of the odd elements."""

    arrays: tuple[jax.Array, ...]
    layout: Layout


class GatheredPiece(Protocol):
    """Rows of a gather that are decoded together, tokens and heads first."""

    def along(self, axis: int) -> Layout:
        """The layout of an array that has only this axis."""

    def broadcast(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """Broadcasts `x`, which has only these axes, to all axes of the piece."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """Encodes rows in place, in registers: unquantized, or with the layer's scale.

    Attributes:
      dtype: of keys or of values.
      elements: maximum number of key (or value) elements of a program that writes. Measured on an H200
        (docs/notes/kernels.md): smaller programs leave threads idle or repeat computations that a larger program shares
        between tokens; larger ones use so many registers that fewer programs fit a multiprocessor.
    """

    dtype: KVCacheDType
    elements: int

    @property
    def num_staged(self) -> int:
        """Arrays of encoded rows that go through shared memory: data and then scales, or none."""
        return 0 if self.dtype.info.scale_dtype is None else 2

    @property
    def is_staged(self) -> bool:
        """Whether encoded rows go through shared memory."""
        return self.num_staged > 0

    @property
    def reads_words(self) -> bool:
        """Whether rows are read as uint32 words of two 16-bit elements."""
        return False

    def token_rows(self, x: jax.Array) -> jax.Array:
        """Keys or values as the write takes them, `[num_tokens, elements]`."""
        return x.reshape(x.shape[0], -1)

    def staging(self, tokens: int, heads: int, head_size: int) -> list[ScratchType]:
        """Shared memory for encoded rows."""
        return []

    def load(self, rows: Rows, first: jax.Array, num_tokens: int, staged: Sequence[Ref]) -> LoadedRows:
        """Loads the rows of tokens, to be staged."""
        raise NotImplementedError

    def encode(self, rows: LoadedRows, scale: jax.Array | None, dtype: DTypeLike) -> tuple[jax.Array, ...]:
        """Encodes loaded rows of elements of `dtype` to what is staged; `scale` is what `load_scale` loaded."""
        raise NotImplementedError

    def load_scale(self, scale: Ref) -> jax.Array | None:
        """The layer's scale; None for rows with scales of their own."""
        return scale[0]

    def row_encoder(self, scale: Ref, layout: Layout, columns: int) -> Callable[[jax.Array], jax.Array]:
        """Loads and inverts the scale; returns a function that encodes a token's rows in place, in registers."""
        if self.dtype.info.layer_scale is None:
            return functools.partial(arithmetic.cast, dtype=self.dtype.info.storage_dtype)
        if scale.shape[0] > 1:
            by_head = arithmetic.reciprocal(compat.load(scale, layout.reduce(1)))
            inverse = compat.broadcast_columns(by_head, columns, layout)
        else:
            inverse = arithmetic.reciprocal(scale[0])
        return functools.partial(arithmetic.encode_fp8, inverse=inverse, dtype=self.dtype)

    def dense_type(self, dims: tuple[int, ...], size: int, dtype: DType) -> jax.ShapeDtypeStruct:
        """The gather kernel's result for rows of `size` elements."""
        return jax.ShapeDtypeStruct((*dims, size), dtype)

    def decode(self, stored: Sequence[jax.Array], scale: Scalar, piece: GatheredPiece, dtype: DType) -> list[jax.Array]:
        """Decodes what a piece loaded, data and scales, to elements of `dtype`."""
        if self.dtype.info.layer_scale is None:
            return [decoding.cast(stored[0], dtype)]
        factor = piece.broadcast(compat.load(scale, piece.along(1)), (1,)) if scale.shape else scale
        return [decoding.decode_fp8(stored[0], factor, self.dtype, dtype)]


@dataclasses.dataclass(frozen=True)
class BytesCodec(Codec):
    """Encodes unquantized rows beside rows with scales, in pages of bytes, to which shared memory is copied."""

    @property
    def num_staged(self) -> int:
        """One: there are no scales."""
        return 1

    def staging(self, tokens: int, heads: int, head_size: int) -> list[ScratchType]:
        """Shared memory for elements."""
        return [plgpu.SMEM((tokens, heads * head_size), self.dtype.info.storage_dtype)]

    def load(self, rows: Rows, first: jax.Array, num_tokens: int, staged: Sequence[Ref]) -> LoadedRows:
        """Loads the rows of tokens, `[num_tokens, elements]`."""
        shape = num_tokens, staged[0].shape[1]
        ref = rows.ref.at[pl.ds(first - rows.first, num_tokens), pl.ds(0, shape[1])]
        max_vector = min(rows.alignment, MAX_VECTOR_BYTES) // jnp.dtype(ref.dtype).itemsize
        layout = lane_layout(shape, max_vector, min_vector=2)
        return LoadedRows((compat.load(ref, layout),), layout)

    def load_scale(self, scale: Ref) -> jax.Array | None:
        """None: unquantized rows have no scale."""
        return None

    def encode(self, rows: LoadedRows, scale: jax.Array | None, dtype: DTypeLike) -> tuple[jax.Array, ...]:
        """The elements in the stored dtype."""
        return (arithmetic.cast(rows.arrays[0], self.dtype.info.storage_dtype),)


@dataclasses.dataclass(frozen=True)
class RowCodec(Codec):
    """Encodes whole rows, with a float32 scale for each token and head, or for each block of a row.

    Attributes:
      encode_row: the encoding of `arithmetic`.
      decode_row: the decoding of `decoding`.
    """

    encode_row: Callable[..., tuple[jax.Array, jax.Array]]
    decode_row: Callable[..., jax.Array]

    def staging(self, tokens: int, heads: int, head_size: int) -> list[ScratchType]:
        """Shared memory for bytes, and for scales as int32 words."""
        data, scales = self.dtype.info.row_bytes(head_size)
        return [plgpu.SMEM((tokens, heads * data), jnp.uint8), plgpu.SMEM((tokens, heads * scales // 4), jnp.int32)]

    def load(self, rows: Rows, first: jax.Array, num_tokens: int, staged: Sequence[Ref]) -> LoadedRows:
        """Loads rows, `[num_tokens, scales, elements of a scale]`; elements that share a scale are in one warp."""
        (_, elements), (_, num_scales) = (ref.shape for ref in staged)
        shape = num_tokens, num_scales, elements // num_scales
        ref = rows.ref.at[pl.ds(first - rows.first, num_tokens), pl.ds(0, elements)]
        max_vector = min(rows.alignment, MAX_VECTOR_BYTES) // jnp.dtype(ref.dtype).itemsize
        layout = lane_layout(shape, max_vector, whole_rows=True)
        return LoadedRows((compat.load(ref, layout, shape),), layout)

    def load_scale(self, scale: Ref) -> jax.Array | None:
        """None: each row or block has a scale."""
        return None

    def encode(self, rows: LoadedRows, scale: jax.Array | None, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Codes and scales."""
        [x] = rows.arrays
        broadcast = functools.partial(compat.broadcast_columns, columns=x.shape[-1], layout=rows.layout)
        return self.encode_row(x.astype(jnp.float32), self.dtype, broadcast)

    def blocks(self, size: int) -> tuple[int, ...]:
        """The shape in which a row of `size` elements is decoded: the row, or blocks that each have a scale."""
        block = self.dtype.info.elements_per_scale
        return (size,) if block is None else (size // block, block)

    def dense_type(self, dims: tuple[int, ...], size: int, dtype: DType) -> jax.ShapeDtypeStruct:
        """A row, or the blocks of a row."""
        return jax.ShapeDtypeStruct((*dims, *self.blocks(size)), dtype)

    def decode(self, stored: Sequence[jax.Array], scale: Scalar, piece: GatheredPiece, dtype: DType) -> list[jax.Array]:
        """Decodes codes and scales."""
        codes, scales = stored
        broadcast = functools.partial(piece.broadcast, axes=tuple(range(codes.ndim - 1)))
        return [self.decode_row(codes, scales, self.dtype, dtype, broadcast)]


@dataclasses.dataclass(frozen=True)
class BlockCodec(Codec):
    """Encodes pairs of elements as bytes, in blocks with a scale of one byte each.

    Attributes:
      encode_block: the encoding of `arithmetic`.
      decode_block: the decoding of `decoding`.
    """

    encode_block: Callable[..., tuple[jax.Array, jax.Array]]
    decode_block: Callable[..., list[jax.Array]]

    @property
    def pairs(self) -> int:
        """Pairs of elements of a block; the codes of a pair are one byte."""
        return (self.dtype.info.elements_per_scale or 0) // 2

    @property
    def reads_words(self) -> bool:
        """The two elements of a pair are read together."""
        return True

    def token_rows(self, x: jax.Array) -> jax.Array:
        """uint32 words of two 16-bit elements, or `[num_tokens, pairs, 2]` float32."""
        pairs = x.reshape(x.shape[0], -1, 2)
        return pairs if x.dtype.itemsize == 4 else lax.bitcast_convert_type(pairs, jnp.uint32)

    def staging(self, tokens: int, heads: int, head_size: int) -> list[ScratchType]:
        """Shared memory for bytes of codes and of scales."""
        return [plgpu.SMEM((tokens, heads * size), jnp.uint8) for size in self.dtype.info.row_bytes(head_size)]

    def load(self, rows: Rows, first: jax.Array, num_tokens: int, staged: Sequence[Ref]) -> LoadedRows:
        """Loads the blocks of tokens, `[num_tokens, num_blocks, pairs]`: words of two elements, or two arrays."""
        num_blocks = staged[1].shape[1]
        shape = num_tokens, num_blocks, self.pairs
        words = rows.ref.at[pl.ds(first - rows.first, num_tokens), pl.ds(0, num_blocks * self.pairs)]
        is_float32 = words.dtype == jnp.float32  # the elements of a pair are adjacent: each load has a stride of two
        layout = lane_layout(shape, 1 if is_float32 else min(self.pairs, rows.alignment // 4))
        refs = [words.at[:, :, i] for i in range(2)] if is_float32 else [words]
        return LoadedRows(tuple(compat.load(ref, layout, shape) for ref in refs), layout)

    def encode(self, rows: LoadedRows, scale: jax.Array | None, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Codes and block scales."""
        broadcast = functools.partial(compat.broadcast_columns, columns=self.pairs, layout=rows.layout)
        return self.encode_block(rows.arrays, np.dtype(dtype), scale, broadcast)

    def dense_type(self, dims: tuple[int, ...], size: int, dtype: DType) -> jax.ShapeDtypeStruct:
        """A word of two elements, or two float32, for each byte of a block."""
        blocks = (*dims, size // (2 * self.pairs), self.pairs)
        if np.dtype(dtype).itemsize == 4:
            return jax.ShapeDtypeStruct((*blocks, 2), dtype)
        return jax.ShapeDtypeStruct(blocks, jnp.uint32)

    def decode(self, stored: Sequence[jax.Array], scale: Scalar, piece: GatheredPiece, dtype: DType) -> list[jax.Array]:
        """Decodes codes and block scales."""
        data, block_scales = stored
        broadcast = functools.partial(piece.broadcast, axes=tuple(range(data.ndim - 1)))
        return self.decode_block(data, block_scales, scale, dtype, broadcast)


CODECS: dict[KVCacheDType, Codec] = {
    codec.dtype: codec
    for codec in (
        *(Codec(dtype, 1024) for dtype in (KVCacheDType.FLOAT32, KVCacheDType.FLOAT16, KVCacheDType.BFLOAT16)),
        *(Codec(dtype, 2048) for dtype in (KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2)),
        # Measured for fp8 only.
        *(
            RowCodec(dtype, 2048, arithmetic.encode_per_token_head, decoding.decode_per_token_head)
            for dtype in (KVCacheDType.FP8_PER_TOKEN_HEAD, KVCacheDType.INT8_PER_TOKEN_HEAD)
        ),
        RowCodec(KVCacheDType.FP8_DS_MLA, 2048, arithmetic.encode_fp8_ds_mla, decoding.decode_fp8_ds_mla),
        # 2,048 where the elements of a token are a power of two, and more for head sizes such as 96.
        BlockCodec(KVCacheDType.NVFP4, 3072, nvfp4.encode_nvfp4, decoding.decode_nvfp4),
        # Two candidates for each block scale share more between tokens.
        BlockCodec(KVCacheDType.NVFP4_4OVER6, 4096, nvfp4.encode_nvfp4_4over6, decoding.decode_nvfp4),
    )
}

DTYPES = frozenset(dtype for dtype in STORED_KV_CACHE_DTYPES if all(part in CODECS for part in dtype.parts))
"""Dtypes of the caches that kernels write and gather."""


def codecs_of(spec: AttentionSpec) -> tuple[Codec, ...]:
    """The codecs of keys and of values, or of latents and of rope keys; the latter may have no elements and no codec.

    Raises:
      UnsupportedError: no kernel writes or gathers the dtype.
    """
    if reason := why_not_dtype(spec):
        raise UnsupportedError(reason)
    in_bytes = [spec.stores_scales and not part.is_quantized for part in spec.parts]
    return tuple(
        BytesCodec(part, 4096) if is_in_bytes else CODECS[part]
        for part, size, is_in_bytes in zip(spec.parts, spec.part_sizes, in_bytes, strict=True)
        if size
    )


def why_not_dtype(spec: AttentionSpec) -> str | None:
    """Why no kernel writes or gathers the dtype of a spec; None where one does."""
    is_served = all(part in CODECS for part in spec.parts)
    return None if is_served else f"dtype: got {spec.dtype.value!r}, which no kernel encodes or decodes"


def why_not_pages(spec: AttentionSpec, target: Target | None = None) -> str | None:
    """Why no kernel writes or gathers pages of a spec in a JAX array; None where one does, on any `target`."""
    if spec.page_size_bytes % (itemsize := spec.storage_dtype.itemsize):
        return (
            f"page_size_bytes: got {spec.page_size_bytes}, expected a multiple of {itemsize}, the bytes of an element"
        )
    return why_not_dtype(spec)
