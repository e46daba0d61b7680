"""Rows of fp8 latents: their bytes in shared memory, and their decoding to a tile of float16.

A thread decodes the bytes that it copied itself, so that it waits for its own copies alone. Bytes of two tiles arrive
ahead of the one tile of float16, which all threads store while none multiplies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, lanes, tiles
from kvjax.kernels.aliases import Ref, Scalar
from kvjax.kernels.attention.formats import from_e4m3
from kvjax.kernels.mla.tiles import AT_ONCE, OWN_ROWS, PER_RUN, TOKENS, WARPGROUPS, Source, Tiles
from kvjax.spec import AttentionSpec

SLOTS = 2
"""Tiles of bytes in shared memory."""

_RUN = PER_RUN * tiles.CHUNK


def shared_bytes(spec: AttentionSpec) -> int:
    """Bytes of shared memory of a thread block."""
    return SLOTS * TOKENS * spec.bytes_per_token


def scratch_type(spec: AttentionSpec) -> Any:
    """The shared memory of `Packed`."""
    return plgpu.SMEM((SLOTS, TOKENS, spec.bytes_per_token), jnp.uint8)


@dataclasses.dataclass(frozen=True)
class Packed:
    """The bytes of tiles, and the tile that they are decoded to.

    Attributes:
      ref: uint8 `[SLOTS, TOKENS, bytes_per_token]`.
      tiles: with one slot.
    """

    ref: Ref
    tiles: Tiles

    def copy(self, slot: Scalar, number: int, source: Source) -> None:
        """Starts copies of the bytes of the rows `own_rows()[number]` of a tile."""
        rank, rope, row_bytes = self._sizes()
        if compat.interpreting():
            first = (source.page * source.page_bytes + source.offset)[::PER_RUN]
            data = lax.bitcast_convert_type(source.ref[...], jnp.uint8).reshape(-1)
            rows = jnp.take(data, first[:, None] + jnp.arange(row_bytes), mode="clip")
            rows = jnp.where(source.is_row[::PER_RUN, None], rows, jnp.uint8(0))
            self.ref[slot, pl.ds(self._first_row(number), AT_ONCE)] = rows
            return
        chunk = self._chunk()
        to = self._place(slot, number)
        size = jnp.where(source.is_row, lanes.splat(tiles.CHUNK, jnp.int32), 0)
        place = source.page, source.page_bytes, source.offset + chunk * tiles.CHUNK, size
        runs = [(start, start) for start in range(0, rank, _RUN)]
        lanes.copy_or_clear(self.ref, (), source.ref, lanes.Chunks(to, *place, runs, None))
        if rope:
            chunks = lanes.Chunks(to, *place, [(rank, rank)], chunk < rope // tiles.CHUNK)
            lanes.copy_or_clear(self.ref, (), source.ref, chunks)

    def decode(self, slot: Scalar) -> None:
        """Decodes the bytes of a slot that the thread copied to the tile."""
        for number in range(OWN_ROWS // AT_ONCE):
            if compat.interpreting():
                self._decode_interpreted(slot, number)
            else:
                self._decode(slot, number)

    def _decode(self, slot: Scalar, number: int) -> None:
        rank, rope, _ = self._sizes()
        half, chunk = rank // WARPGROUPS, self._chunk()
        place = self._place(slot, number)
        everywhere = chunk >= 0
        for start in range(0, rank, _RUN):
            matrix, column = divmod(start, half)
            words = lanes.load_shared(self.ref, place, tiles.CHUNK, start)
            self._store(self.tiles.latents, WARPGROUPS + matrix, number, column, words, everywhere)
        if rope:
            is_chunk = chunk < rope // tiles.CHUNK
            words = lanes.load_shared(self.ref, jnp.where(is_chunk, place, 0), tiles.CHUNK, rank)
            self._store(self.tiles.rope, 1, number, 0, words, is_chunk)

    def _store(
        self, ref: Ref, matrix: int, number: int, column: int, words: list[jax.Array], condition: jax.Array
    ) -> None:
        """Stores the 16 elements of a chunk, those from `column` on being the first thread's, to a matrix of `ref`."""
        width = ref.shape[-1]
        row_bytes = width * tiles.ITEMSIZE
        row = self.tiles.own_rows()[number]
        group = (row >> 3) * (tiles.GROUP * row_bytes) + matrix * TOKENS * row_bytes
        for i in range(2):
            pairs = [from_e4m3(word, half) for word in words[2 * i : 2 * i + 2] for half in range(2)]
            element = self._chunk() * tiles.CHUNK + (column + 8 * i)
            to = group + tiles.offset(row & (tiles.GROUP - 1), element, width)
            lanes.store_shared(ref, to, pairs, tiles.CHUNK, condition, tiles.transforms_of(width))

    def _decode_interpreted(self, slot: Scalar, number: int) -> None:
        rank, rope, _ = self._sizes()
        rows = pl.ds(self._first_row(number), AT_ONCE)
        dense = lax.bitcast_convert_type(self.ref[slot, rows], jnp.float8_e4m3fn).astype(self.tiles.latents.dtype)
        half = rank // WARPGROUPS
        for i in range(WARPGROUPS):
            self.tiles.latents[1, i, rows] = dense[:, i * half : (i + 1) * half]
        if rope:
            self.tiles.rope[1, rows] = dense[:, rank:]

    def _sizes(self) -> tuple[int, int, int]:
        """Elements of a latent and of a rope key, and bytes of a row."""
        rope = self.tiles.rope
        return WARPGROUPS * self.tiles.latents.shape[-1], 0 if rope is None else rope.shape[-1], self.ref.shape[-1]

    def _chunk(self) -> jax.Array:
        return lanes.thread_index() & (PER_RUN - 1)

    def _first_row(self, number: int) -> Scalar:
        return lax.axis_index("warpgroup") * OWN_ROWS + number * AT_ONCE

    def _place(self, slot: Scalar, number: int) -> jax.Array:
        """The byte of the thread's first chunk of a row."""
        row_bytes = self.ref.shape[-1]
        row = self.tiles.own_rows()[number]
        return row * row_bytes + (self._chunk() * tiles.CHUNK + slot * (TOKENS * row_bytes))
