"""Rows of quantized latents: their bytes in shared memory, and their decoding to a tile of 16 bits.

Bytes of a tile arrive while the warpgroup multiplies the one before; it decodes them while the other multiplies. Four
threads decode a row, in runs of 64 elements of which each has 16: a block of NVFP4 with its scale, an eighth of a block
of `fp8_ds_mla`. e4m3 and NVFP4 are exact in float16 without the layer's scale. The scales of `fp8_ds_mla` have
float32's range, so that its latents become bfloat16, rounded once. Rope keys of bfloat16 stay what they are.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.dtypes import KVCacheDType
from kvjax.errors import UnsupportedError
from kvjax.kernels import compat, lanes, tiles
from kvjax.kernels.aliases import Ref, Registers, Scalar, ScratchType
from kvjax.kernels.attention.formats import E2M1_FACTOR, e2m1_in_order, from_e4m3, scaled
from kvjax.kernels.mla.tiles import AT_ONCE, PER_RUN, WARPGROUPS, Source, Tiles, rows_of_lot, tile_tokens
from kvjax.spec import AttentionSpec

ELEMENTS = 16
"""Elements of a run that a thread decodes: a block of NVFP4."""

SHARERS = 4
"""Threads that decode a row."""

_RUN = SHARERS * ELEMENTS
"""Elements that are decoded at once: 128 bytes of 16-bit elements, as the layout of `wgmma` divides rows."""

_COPIED = PER_RUN * tiles.CHUNK

_E2M1_FACTORS = int(np.float16(E2M1_FACTOR).view(np.uint16)) * 0x10001
"""A float16 pair: times this, block scales are less than 2**15, and exact."""


def shared_bytes(spec: AttentionSpec) -> int:
    """Bytes of shared memory of a thread block."""
    return WARPGROUPS * tile_tokens(spec) * spec.bytes_per_token


def scratch_type(spec: AttentionSpec) -> ScratchType:
    """The shared memory of `Packed`."""
    return plgpu.SMEM((WARPGROUPS, tile_tokens(spec), spec.bytes_per_token), jnp.uint8)


@dataclasses.dataclass(frozen=True)
class Packed:
    """The bytes of the tiles of both warpgroups, and the tiles that they are decoded to.

    Attributes:
      spec: the cache's.
      ref: uint8 `[2, tokens, bytes_per_token]`.
      tiles: those of the thread block.
    """

    spec: AttentionSpec
    ref: Ref
    tiles: Tiles

    def copy(self, lot: int, source: Source) -> None:
        """Starts copies of the bytes of a lot of rows of a tile."""
        row_bytes, slot = self.spec.bytes_per_token, lax.axis_index("warpgroup")
        if compat.interpreting():
            first = (source.page * source.page_bytes + source.offset)[::PER_RUN]
            data = lax.bitcast_convert_type(source.ref[...], jnp.uint8).reshape(-1)
            rows = jnp.take(data, first[:, None] + jnp.arange(row_bytes), mode="clip")
            rows = jnp.where(source.is_row[::PER_RUN, None], rows, jnp.uint8(0))
            self.ref[slot, pl.ds(lot * AT_ONCE, AT_ONCE)] = rows
            return
        chunk = lanes.thread_index() & (PER_RUN - 1)
        to = rows_of_lot(lot) * row_bytes + slot * (self.ref.shape[1] * row_bytes) + chunk * tiles.CHUNK
        size = jnp.where(source.is_row, lanes.splat(tiles.CHUNK, jnp.int32), 0)
        place = source.page, source.page_bytes, source.offset + chunk * tiles.CHUNK, size
        whole, rest = divmod(row_bytes, _COPIED)
        runs = [(run * _COPIED, run * _COPIED) for run in range(whole)]
        lanes.copy_or_clear(self.ref, (), source.ref, lanes.Chunks(to, *place, runs, None))
        if rest:
            last = [(whole * _COPIED, whole * _COPIED)]
            chunks = lanes.Chunks(to, *place, last, chunk < rest // tiles.CHUNK)
            lanes.copy_or_clear(self.ref, (), source.ref, chunks)

    def decode(self) -> None:
        """Decodes the bytes of the warpgroup's tile, which have arrived for all its threads."""
        rank, rope = self.spec.part_sizes
        half = rank // WARPGROUPS
        starts = range(0, rank, _RUN)
        # All are loaded before any is stored: the compiler knows no better than that a store may change what is loaded.
        loaded = [self._load_latents(start) for start in starts]
        rope_keys = self._load_rope_keys() if rope else []
        own = lax.axis_index("warpgroup")
        for start, registers in zip(starts, loaded, strict=True):
            matrix, column = divmod(start, half)
            self._store(self.tiles.tokens.latents, (own, matrix), column, self._latents(registers))
        if self.tiles.tokens.rope is not None:
            self._store(self.tiles.tokens.rope, (own,), 0, self._rope_keys(rope_keys))

    def _load_latents(self, start: int) -> Registers:
        """The bytes of the thread's elements of the run of a latent from element `start` on, and their scale."""
        data, *scales = self.spec.regions[0]
        dtype, chunk = self._dtype, _chunk()
        size = ELEMENTS * dtype.info.bits // 8
        words = self._load(chunk * size, data.base + start * dtype.info.bits // 8, size)
        if dtype is KVCacheDType.NVFP4:
            words += self._load(chunk, scales[0].base + start // ELEMENTS, 1)
        elif dtype is KVCacheDType.FP8_DS_MLA:
            block = start // (dtype.info.elements_per_scale or 1)
            words += self._load(chunk * 0, scales[0].base + 4 * block, 4)
        return words

    def _latents(self, loaded: Registers) -> Registers:
        """The elements of what `_load_latents` has loaded, in pairs."""
        match self._dtype:
            case KVCacheDType.NVFP4:
                *words, scale = loaded
                scale = scaled(from_e4m3(scale, 0), lanes.splat(_E2M1_FACTORS, jnp.uint32))
                both = lanes.both_halves(scale, 0)
                return [scaled(pair, both) for word in words for pair in e2m1_in_order(word)]
            case KVCacheDType.FP8_DS_MLA:
                *words, scale = loaded
                return [_scaled_to_bfloat16(pair, lanes.bits(scale, jnp.float32)) for pair in _from_bytes(words)]
            case KVCacheDType.FP8_E4M3:
                return _from_bytes(loaded)
        raise UnsupportedError(f"latents: got dtype {self._dtype.value!r}, expected fp8_e4m3, fp8_ds_mla or nvfp4")

    def _rope_keys(self, loaded: Registers) -> Registers:
        """The elements of what `_load_rope_keys` has loaded, in pairs."""
        match dtype := self.spec.parts[1]:
            case KVCacheDType.BFLOAT16:
                return loaded
            case KVCacheDType.FP8_E4M3:
                return _from_bytes(loaded)
        raise UnsupportedError(f"rope keys: got dtype {dtype.value!r}, expected bfloat16 or fp8_e4m3")

    @property
    def _dtype(self) -> KVCacheDType:
        return self.spec.parts[0].byte_format

    def _load_rope_keys(self) -> Registers:
        """The bytes of the thread's elements of a rope key, of which some threads may have none."""
        [region] = self.spec.regions[1]
        size = ELEMENTS * region.row_bytes // self.spec.part_sizes[1]
        offset = _chunk() * size
        offset = jnp.where(offset < region.row_bytes, offset, 0)
        return [
            word
            for first in range(0, size, tiles.CHUNK)
            for word in self._load(offset, region.base + first, min(size, tiles.CHUNK))
        ]

    def _load(self, offset: jax.Array, first: int, size: int) -> Registers:
        """Loads `size` bytes of each thread's row, from byte `first + offset` on, as words."""
        row_bytes, own = self.spec.bytes_per_token, lax.axis_index("warpgroup")
        start = _own_row() * row_bytes
        if compat.interpreting():
            return lanes.load_shared(self.ref.at[own], start + offset, size, first)
        return lanes.load_shared(self.ref, start + own * (self.ref.shape[1] * row_bytes) + offset, size, first)

    def _store(self, ref: Ref, index: tuple[Scalar, *tuple[int, ...]], column: int, pairs: Registers) -> None:
        """Stores each thread's elements to a matrix of `ref`, in the run from `column` on."""
        rows, width = ref.shape[-2:]
        run = min(_RUN, width)
        if compat.interpreting():
            elements = lax.bitcast_convert_type(jnp.stack(pairs, axis=1), ref.dtype).reshape(rows, _RUN)
            ref[(*index, pl.ds(0, rows), pl.ds(column, run))] = elements[:, :run]
            return
        row, row_bytes = _own_row(), width * tiles.ITEMSIZE
        tile, *matrix = index
        start = tile * (math.prod(ref.shape[1:]) * tiles.ITEMSIZE)
        # Rows of two neighbours and the four chunks that their threads store at once lie in different banks.
        immediate = sum(matrix) * rows * row_bytes + column * (tiles.GROUP * tiles.ITEMSIZE)
        for i in range(0, len(pairs), 4):
            to = tiles.offset(row & (tiles.GROUP - 1), _chunk() * ELEMENTS + 2 * i, width)
            to = to + (row >> tiles.GROUP.bit_length() - 1) * (tiles.GROUP * row_bytes) + start
            is_stored = _chunk() < run // ELEMENTS
            chunk = pairs[i : i + 4]
            lanes.store_shared(ref, to, chunk, tiles.CHUNK, is_stored, tiles.transforms_of(width), immediate)


def _chunk() -> jax.Array:
    """Which elements of a run each thread has."""
    return lanes.thread_index() & (SHARERS - 1)


def _own_row() -> jax.Array:
    """The row that each thread decodes a part of."""
    return lanes.thread_index() >> SHARERS.bit_length() - 1


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
