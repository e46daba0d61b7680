"""Rows of quantized latents: their bytes in shared memory, and their decoding to a tile of 16 bits.

Bytes of two tiles arrive ahead of the one tile of 16 bits, which both warpgroups store while none multiplies. Eight threads
decode a row, in runs of 128 elements of which each has 16: a block of NVFP4 with its scale, an eighth of a block of
`fp8_ds_mla`. e4m3 and NVFP4 are exact in float16 without the layer's scale. The scales of `fp8_ds_mla` have float32's
range, so that its latents become bfloat16, rounded once. Rope keys of bfloat16 stay what they are.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.dtypes import KVCacheDType
from kvjax.kernels import compat, lanes, tiles
from kvjax.kernels.aliases import Ref, Scalar, ScratchType
from kvjax.kernels.attention.formats import E2M1_FACTOR, e2m1_in_order, from_e4m3, scaled
from kvjax.kernels.mla.tiles import AT_ONCE, LOTS, PER_RUN, TOKENS, WARPGROUPS, Source, Tiles, rows_of_lot
from kvjax.spec import AttentionSpec

SLOTS = 2
"""Tiles of bytes in shared memory."""

ELEMENTS = 16
"""Elements of a latent that a thread decodes at once."""

_RUN = PER_RUN * ELEMENTS
_COPIED = PER_RUN * tiles.CHUNK

_E2M1_FACTORS = int(np.float16(E2M1_FACTOR).view(np.uint16)) * 0x10001
"""A float16 pair: times this, block scales are less than 2**15, and exact."""


def shared_bytes(spec: AttentionSpec) -> int:
    """Bytes of shared memory of a thread block."""
    return SLOTS * TOKENS * spec.bytes_per_token


def scratch_type(spec: AttentionSpec) -> ScratchType:
    """The shared memory of `Packed`."""
    return plgpu.SMEM((SLOTS, TOKENS, spec.bytes_per_token), jnp.uint8)


@dataclasses.dataclass(frozen=True)
class Packed:
    """The bytes of tiles, and the tile that they are decoded to.

    Attributes:
      spec: the cache's.
      ref: uint8 `[SLOTS, TOKENS, bytes_per_token]`.
      tiles: with one slot.
    """

    spec: AttentionSpec
    ref: Ref
    tiles: Tiles

    def copy(self, slot: Scalar, lot: int, source: Source) -> None:
        """Starts copies of the bytes of a lot of rows of a tile."""
        row_bytes = self.spec.bytes_per_token
        if compat.interpreting():
            first = (source.page * source.page_bytes + source.offset)[::PER_RUN]
            data = lax.bitcast_convert_type(source.ref[...], jnp.uint8).reshape(-1)
            rows = jnp.take(data, first[:, None] + jnp.arange(row_bytes), mode="clip")
            rows = jnp.where(source.is_row[::PER_RUN, None], rows, jnp.uint8(0))
            self.ref[slot, pl.ds(lot * AT_ONCE, AT_ONCE)] = rows
            return
        chunk = self._chunk()
        to = self._row_start(slot, lot) + chunk * tiles.CHUNK
        size = jnp.where(source.is_row, lanes.splat(tiles.CHUNK, jnp.int32), 0)
        place = source.page, source.page_bytes, source.offset + chunk * tiles.CHUNK, size
        whole, rest = divmod(row_bytes, _COPIED)
        runs = [(run * _COPIED, run * _COPIED) for run in range(whole)]
        lanes.copy_or_clear(self.ref, (), source.ref, lanes.Chunks(to, *place, runs, None))
        if rest:
            last = [(whole * _COPIED, whole * _COPIED)]
            chunks = lanes.Chunks(to, *place, last, chunk < rest // tiles.CHUNK)
            lanes.copy_or_clear(self.ref, (), source.ref, chunks)

    def decode(self, slot: Scalar) -> None:
        """Decodes the bytes of a slot, which have arrived for all threads, to the tile."""
        rank, _ = self.spec.part_sizes
        half = rank // WARPGROUPS
        own = LOTS // WARPGROUPS
        for number in range(own):
            lot = lax.axis_index("warpgroup") * own + number
            for start in range(0, rank, _RUN):
                matrix, column = divmod(start, half)
                pairs = self._latents(slot, lot, start)
                self._store(self.tiles.latents, (1, matrix), lot, column, pairs)
            if self.tiles.rope is not None:
                self._store(self.tiles.rope, (1,), lot, 0, self._rope_keys(slot, lot))

    def _latents(self, slot: Scalar, lot: Scalar, start: int) -> list[jax.Array]:
        """The thread's elements of the run of a latent from element `start` on, in pairs."""
        chunk = self._chunk()
        data, *scales = self.spec.regions[0]
        dtype = self.spec.parts[0].byte_format
        size = ELEMENTS * dtype.info.bits // 8
        words = self._load(slot, lot, chunk * size, data.base + start * dtype.info.bits // 8, size)
        if dtype is KVCacheDType.NVFP4:
            [scale] = self._load(slot, lot, chunk, scales[0].base + start // ELEMENTS, 1)
            scale = scaled(from_e4m3(scale, 0), lanes.splat(_E2M1_FACTORS, jnp.uint32))
            both = lanes.both_halves(scale, 0)
            return [scaled(pair, both) for word in words for pair in e2m1_in_order(word)]
        pairs = [from_e4m3(word, i) for word in words for i in range(2)]
        if dtype is KVCacheDType.FP8_DS_MLA:
            block = start // (dtype.info.elements_per_scale or 1)
            [scale] = self._load(slot, lot, chunk * 0, scales[0].base + 4 * block, 4)
            return [_scaled_to_bfloat16(pair, lanes.bits(scale, jnp.float32)) for pair in pairs]
        return pairs

    def _rope_keys(self, slot: Scalar, lot: Scalar) -> list[jax.Array]:
        """The thread's elements of a rope key, in pairs."""
        [region] = self.spec.regions[1]
        chunk = self._chunk()
        is_chunk = chunk < region.row_bytes // tiles.CHUNK
        words = self._load(slot, lot, jnp.where(is_chunk, chunk * tiles.CHUNK, 0), region.base, tiles.CHUNK)
        if self.spec.parts[1] is KVCacheDType.BFLOAT16:
            return words
        return [from_e4m3(word, i) for word in words for i in range(2)]

    def _load(self, slot: Scalar, lot: Scalar, offset: jax.Array, first: int, size: int) -> list[jax.Array]:
        """Loads `size` bytes of each thread's row, from byte `first + offset` on, as words."""
        if compat.interpreting():
            rows = self.ref.at[slot, pl.ds(lot * AT_ONCE, AT_ONCE)]
            own = (lanes.thread_index() // PER_RUN) * self.spec.bytes_per_token
            return lanes.load_shared(rows, own + offset, size, first)
        return lanes.load_shared(self.ref, self._row_start(slot, lot) + offset, size, first)

    def _store(self, ref: Ref, index: tuple[int, ...], lot: Scalar, column: int, pairs: list[jax.Array]) -> None:
        """Stores each thread's elements, those from `column` on being the first one's, to a matrix of `ref`."""
        width, count = ref.shape[-1], 2 * len(pairs)
        num_threads = min(PER_RUN, width // count)
        if compat.interpreting():
            elements = lax.bitcast_convert_type(jnp.stack(pairs, axis=1), ref.dtype)
            elements = elements.reshape(AT_ONCE, PER_RUN * count)[:, : num_threads * count]
            rows = pl.ds(lot * AT_ONCE, AT_ONCE)
            ref[(*index, rows, pl.ds(column, num_threads * count))] = elements
            return
        chunk, row, row_bytes = self._chunk(), rows_of_lot(lot), width * tiles.ITEMSIZE
        matrix = index[0] * WARPGROUPS + index[1] if len(index) > 1 else index[0]
        group = (row >> 3) * (tiles.GROUP * row_bytes) + matrix * TOKENS * row_bytes
        for i in range(0, len(pairs), 4):
            element = chunk * count + (column + 2 * i)
            to = group + tiles.offset(row & (tiles.GROUP - 1), element, width)
            transforms = tiles.transforms_of(width)
            lanes.store_shared(ref, to, pairs[i : i + 4], tiles.CHUNK, chunk < num_threads, transforms)

    def _chunk(self) -> jax.Array:
        return lanes.thread_index() & (PER_RUN - 1)

    def _row_start(self, slot: Scalar, lot: Scalar) -> jax.Array:
        """The first byte of each thread's row."""
        row_bytes = self.spec.bytes_per_token
        return rows_of_lot(lot) * row_bytes + slot * (TOKENS * row_bytes)


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
