"""Rows of quantized latents: from memory to registers, and decoded to a tile of 16 bits.

A warpgroup loads its next tile before it multiplies weights, and decodes it while the other warpgroup multiplies. Four
threads decode a row, and load neighbouring chunks of 16 bytes of it at once. e4m3 and NVFP4 are exact in float16
without the layer's scale. The scales of `fp8_ds_mla` have float32's range, so that its latents become bfloat16, rounded
once. Rope keys of bfloat16 stay what they are.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.dtypes import KVCacheDType
from kvjax.errors import UnsupportedError
from kvjax.kernels import compat, lanes, tiles
from kvjax.kernels.aliases import Ref, Registers, Scalar
from kvjax.kernels.attention.formats import E2M1_FACTOR, e2m1_in_order, from_e4m3, scaled
from kvjax.kernels.mla.tiles import TOKENS, WARPGROUPS, Source, Tiles
from kvjax.kernels.registers import THREADS, WARPS
from kvjax.spec import AttentionSpec

SHARERS = 4
"""Threads that decode a row."""

AT_ONCE = THREADS // SHARERS
"""Rows that a warpgroup decodes at once: a lot of rows."""

LOTS = TOKENS // AT_ONCE

_LOADED = SHARERS * tiles.CHUNK
"""Bytes of a row that are loaded at once."""

_E2M1_FACTORS = int(np.float16(E2M1_FACTOR).view(np.uint16)) * 0x10001
"""A float16 pair: times this, block scales are less than 2**15, and exact."""


class Loaded(NamedTuple):
    """The words of a lot of rows: each thread's chunks of latents and of rope keys, and all scales of its row."""

    latents: list[Registers]
    scales: Registers
    rope_keys: list[Registers]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Decodes rows to the tiles of a thread block.

    Attributes:
      spec: the cache's.
      tiles: those of the thread block.
    """

    spec: AttentionSpec
    tiles: Tiles

    def prefetch(self, source: Source) -> None:
        """Asks for a lot of rows."""
        first = source.is_row & (_chunk() == 0)
        lanes.prefetch_global_bytes(source.ref, _bytes_of(source)._replace(condition=first), self.spec.bytes_per_token)

    def load(self, source: Source) -> Loaded:
        """Loads a lot of rows."""
        data, *scales = self.spec.regions[0]
        where = _bytes_of(source)
        all_scales = [
            word
            for scale in scales
            for start in range(0, scale.row_bytes, tiles.CHUNK)
            for word in lanes.load_global_bytes(source.ref, where, tiles.CHUNK, scale.base + start)
        ]
        rope_keys = [_chunks(source, region.base, region.row_bytes) for region in self.spec.regions[1]]
        return Loaded(_chunks(source, data.base, data.row_bytes), all_scales, *(rope_keys or [[]]))

    def store(self, lot: int, loaded: Loaded) -> None:
        """Decodes a lot of rows to the warpgroup's tile."""
        own, tokens = lax.axis_index("warpgroup"), self.tiles.tokens
        half = self.spec.part_sizes[0] // WARPGROUPS
        for i, words in enumerate(loaded.latents):
            pairs = self._latents(words, i, loaded.scales)
            matrix, column = divmod(i * SHARERS * 2 * len(pairs), half)
            _store(tokens.latents, (own, matrix), lot, column, pairs)
        for i, words in enumerate(loaded.rope_keys):
            pairs = self._rope_keys(words)
            _store(tokens.rope, (own,), lot, i * SHARERS * 2 * len(pairs), pairs)

    def _latents(self, words: Registers, index: int, scales: Registers) -> Registers:
        """The elements of the chunk that is loaded as number `index`, in pairs."""
        match self._dtype:
            case KVCacheDType.NVFP4:  # two blocks, whose scales are half of a word
                low, high = scales[2 * index : 2 * index + 2]
                both = jnp.where(_chunk() < SHARERS // 2, low, high) >> 16 * (_chunk() & 1)
                both = scaled(from_e4m3(both, 0), lanes.splat(_E2M1_FACTORS, jnp.uint32))
                factors = [lanes.both_halves(both, half) for half in range(2)]
                return [scaled(pair, factors[i // 2]) for i, word in enumerate(words) for pair in e2m1_in_order(word)]
            case KVCacheDType.FP8_DS_MLA:
                scale = lanes.bits(scales[index * _LOADED // (self._dtype.info.elements_per_scale or 1)], jnp.float32)
                return [_scaled_to_bfloat16(pair, scale) for pair in _from_bytes(words)]
            case KVCacheDType.FP8_E4M3:
                return _from_bytes(words)
        raise UnsupportedError(f"latents: got dtype {self._dtype.value!r}, expected fp8_e4m3, fp8_ds_mla or nvfp4")

    def _rope_keys(self, words: Registers) -> Registers:
        """The elements of a chunk of rope keys, in pairs."""
        match dtype := self.spec.parts[1]:
            case KVCacheDType.BFLOAT16:
                return words
            case KVCacheDType.FP8_E4M3:
                return _from_bytes(words)
        raise UnsupportedError(f"rope keys: got dtype {dtype.value!r}, expected bfloat16 or fp8_e4m3")

    @property
    def _dtype(self) -> KVCacheDType:
        return self.spec.parts[0].byte_format


def rows_of_lot(lot: int) -> jax.Array:
    """The rows of a tile in a lot, for each thread the one that it decodes a part of, int32 `[128]`.

    Eight neighbouring threads have eight rows, so that what they store at once lies in different banks.
    """
    thread = lanes.thread_index()
    return (thread & (tiles.GROUP - 1)) + (thread >> 5) * tiles.GROUP + lot * AT_ONCE


def _chunk() -> jax.Array:
    """Which of the chunks of its row that are loaded at once each thread has."""
    return lanes.thread_index() >> 3 & (SHARERS - 1)


def _bytes_of(source: Source) -> lanes.Bytes:
    return lanes.Bytes(source.page, source.page_bytes, source.offset, source.is_row)


def _chunks(source: Source, first: int, size: int) -> list[Registers]:
    """Each thread's chunks of the `size` bytes of its row from byte `first` on."""
    offset = _chunk() * tiles.CHUNK
    where = _bytes_of(source)._replace(offset=source.offset + offset)
    loaded = []
    for start in range(0, size, _LOADED):
        is_own = where if start + _LOADED <= size else where._replace(condition=source.is_row & (offset < size - start))
        loaded.append(lanes.load_global_bytes(source.ref, is_own, tiles.CHUNK, first + start))
    return loaded


def _store(ref: Ref, index: tuple[Scalar, *tuple[int, ...]], lot: int, column: int, pairs: Registers) -> None:
    """Stores the elements of each thread's chunk to a matrix of `ref`; the first thread's begin at `column`."""
    rows, width = ref.shape[-2:]
    size = 2 * len(pairs)
    if compat.interpreting():
        elements = lax.bitcast_convert_type(jnp.stack(pairs, axis=1), ref.dtype)
        elements = elements.reshape(WARPS, SHARERS, tiles.GROUP, size).swapaxes(1, 2).reshape(AT_ONCE, -1)
        columns = min(elements.shape[1], width - column)
        ref[(*index, pl.ds(lot * AT_ONCE, AT_ONCE), pl.ds(column, columns))] = elements[:, :columns]
        return
    row, row_bytes = rows_of_lot(0), width * tiles.ITEMSIZE
    tile, *matrix = index
    in_run = column % (tiles.swizzle_of(width) // tiles.ITEMSIZE)
    start = tile * (math.prod(ref.shape[1:]) * tiles.ITEMSIZE)
    start = start + (row >> tiles.GROUP.bit_length() - 1) * (tiles.GROUP * row_bytes)
    immediate = (sum(matrix) * rows + lot * AT_ONCE) * row_bytes + (column - in_run) * (tiles.GROUP * tiles.ITEMSIZE)
    own = in_run + _chunk() * size
    for i in range(0, len(pairs), 4):
        to = start + tiles.offset(row & (tiles.GROUP - 1), own + 2 * i, width)
        is_stored = own + 2 * i < width - (column - in_run)
        lanes.store_shared(ref, to, pairs[i : i + 4], tiles.CHUNK, is_stored, tiles.transforms_of(width), immediate)


def _from_bytes(words: Registers) -> Registers:
    """Pairs of float16 of words of e4m3."""
    return [from_e4m3(word, half) for word in words for half in range(2)]


def _scaled_to_bfloat16(pair: jax.Array, scale: jax.Array) -> jax.Array:
    """A float16 pair times a float32, a bfloat16 pair: rounded once."""

    def model(pair: jax.Array, scale: jax.Array) -> list[jax.Array]:
        halves = lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)
        products = (halves * scale[:, None]).astype(jnp.bfloat16)
        return [lax.bitcast_convert_type(products, jnp.uint32)]

    code = (
        "{ .reg .b16 x<2>; .reg .f32 y<2>; mov.b32 {x0, x1}, $1; cvt.f32.f16 y0, x0; cvt.f32.f16 y1, x1;"
        " mul.rn.f32 y0, y0, $2; mul.rn.f32 y1, y1, $2; cvt.rn.bf16x2.f32 $0, y1, y0; }"
    )
    return lanes.asm(code, model, pair, scale, results=[jnp.uint32])[0]
