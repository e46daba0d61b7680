"""Rows of quantized latents: from memory to registers, and decoded to a tile of 16 bits.

A warpgroup prefetches its next tile while it computes logits, loads it before it multiplies weights, and decodes it
while the other warpgroup multiplies. Four threads decode a row in runs of 64 elements. Each has 16 of a run: a block of
NVFP4 with its scale, or an eighth of a block of `fp8_ds_mla`. e4m3 and NVFP4 are exact in float16 without the layer's
scale. The scales of `fp8_ds_mla` have float32's range, so that its latents become bfloat16, rounded once. Rope keys of
bfloat16 are unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
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
from kvjax.kernels.mla.tiles import TOKENS, WARPGROUPS, LatentRows, Source
from kvjax.kernels.registers import THREADS
from kvjax.spec import AttentionSpec

ELEMENTS = 16
"""Elements of a run that a thread decodes: a block of NVFP4."""

SHARERS = 4
"""Threads that decode a row."""

AT_ONCE = THREADS // SHARERS
"""Rows that a warpgroup decodes at once: a lot of rows."""

_RUN = SHARERS * ELEMENTS
"""Elements that are decoded at once: 128 bytes of 16-bit elements, as the layout of `wgmma` divides rows."""

_E2M1_FACTORS = int(np.float16(E2M1_FACTOR).view(np.uint16)) * 0x10001
"""A float16 pair: times this, block scales are less than 2**15, and exact."""


class Loaded(NamedTuple):
    """The bytes of a lot of rows: words of each thread's elements, and of all scales of its row."""

    runs: list[Registers]
    scales: Registers
    rope_keys: Registers


@dataclasses.dataclass(frozen=True)
class Packed:
    """Decodes tiles on their way to shared memory, see `Incoming`.

    Attributes:
      spec: the cache's.
      tokens: the rows of both tiles.
    """

    spec: AttentionSpec
    tokens: LatentRows
    lots: int = TOKENS // AT_ONCE
    groups: int = 0

    def row(self, lot: int) -> jax.Array:
        """See `Incoming`."""
        return _row() + lot * AT_ONCE

    def expect(self, sources: Sequence[Source]) -> None:
        """Prefetches the rows to the L2 cache."""
        for source in sources:
            first = _bytes_of(source)._replace(condition=source.is_row & (_chunk() == 0))
            lanes.prefetch_global_bytes(source.ref, first, self.spec.bytes_per_token)

    def begin(self, sources: Sequence[Source]) -> list[Loaded]:
        """Loads the rows."""
        return [self._load(source) for source in sources]

    def bring(self, begun: list[Loaded], is_tile: jax.Array, wait_for_release: Callable[[], None]) -> None:
        """See `Incoming`."""
        wait_for_release()

        @pl.when(is_tile)
        def store() -> None:
            for lot, loaded in enumerate(begun):
                self._store(lot, loaded)

    def _load(self, source: Source) -> Loaded:
        """Loads a lot of rows."""
        data, *scales = self.spec.regions[0]
        rank, bits = self.spec.part_sizes[0], self._dtype.info.bits
        own = dataclasses.replace(source, offset=source.offset + _chunk() * (ELEMENTS * bits // 8))
        runs = [_load(own, data.base + start * bits // 8, ELEMENTS * bits // 8) for start in range(0, rank, _RUN)]
        all_scales = [word for scale in scales for word in _load(source, scale.base, scale.row_bytes)]
        return Loaded(runs, all_scales, self._load_rope_keys(source))

    def _store(self, lot: int, loaded: Loaded) -> None:
        """Decodes a lot of rows to the warpgroup's tile."""
        own, tokens = lax.axis_index("warpgroup"), self.tokens
        half = self.spec.part_sizes[0] // WARPGROUPS
        for i, words in enumerate(loaded.runs):
            matrix, column = divmod(i * _RUN, half)
            _store(tokens.latents, (own, matrix), lot, column, self._latents(words, i, loaded.scales))
        if tokens.rope is not None:
            _store(tokens.rope, (own,), lot, 0, self._rope_keys(loaded.rope_keys))

    def _latents(self, words: Registers, run: int, scales: Registers) -> Registers:
        """A thread's elements of a run, in pairs."""
        match self._dtype:
            case KVCacheDType.NVFP4:
                # A word has the scales of the run's threads. Bytes above a thread's own do not matter.
                scale = scaled(from_e4m3(scales[run] >> 8 * _chunk(), 0), lanes.splat(_E2M1_FACTORS, jnp.uint32))
                both = lanes.both_halves(scale, 0)
                return [scaled(pair, both) for word in words for pair in e2m1_in_order(word)]
            case KVCacheDType.FP8_DS_MLA:
                scale = lanes.bits(scales[run * _RUN // (self._dtype.info.elements_per_scale or 1)], jnp.float32)
                return [_scaled_to_bfloat16(pair, scale) for pair in _from_bytes(words)]
            case KVCacheDType.FP8_E4M3:
                return _from_bytes(words)
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

    def _load_rope_keys(self, source: Source) -> Registers:
        """The words of the thread's elements of a rope key, of which some threads may have none."""
        if not self.spec.part_sizes[1]:
            return []
        [region] = self.spec.regions[1]
        size = ELEMENTS * region.row_bytes // self.spec.part_sizes[1]
        offset = _chunk() * size
        is_own = offset < region.row_bytes
        own = dataclasses.replace(source, offset=source.offset + offset, is_row=source.is_row & is_own)
        return _load(own, region.base, size)


def _store(ref: Ref, index: tuple[Scalar, *tuple[int, ...]], lot: int, column: int, pairs: Registers) -> None:
    """Stores each thread's elements to a matrix of `ref`, in the run from `column` on."""
    rows, width = ref.shape[-2:]
    run = min(_RUN, width)
    if compat.interpreting():
        elements = lax.bitcast_convert_type(jnp.stack(pairs, axis=1), ref.dtype).reshape(AT_ONCE, _RUN)
        ref[(*index, pl.ds(lot * AT_ONCE, AT_ONCE), pl.ds(column, run))] = elements[:, :run]
        return
    row, row_bytes = _row(), width * tiles.ITEMSIZE
    tile, *matrix = index
    start = tile * (math.prod(ref.shape[1:]) * tiles.ITEMSIZE)
    # Rows of two neighbours and the four chunks that their threads store at once lie in different banks.
    first = (sum(matrix) * rows + lot * AT_ONCE) * row_bytes + column * (tiles.GROUP * tiles.ITEMSIZE)
    for i in range(0, len(pairs), 4):
        to = tiles.offset(row & (tiles.GROUP - 1), _chunk() * ELEMENTS + 2 * i, width)
        to = to + (row >> tiles.GROUP.bit_length() - 1) * (tiles.GROUP * row_bytes) + start
        is_stored = _chunk() < run // ELEMENTS
        chunk = pairs[i : i + 4]
        lanes.store_shared(ref, to, chunk, tiles.CHUNK, is_stored, tiles.transforms_of(width), first)


def _row() -> jax.Array:
    """The row of the first lot that each thread decodes a part of."""
    return lanes.thread_index() >> SHARERS.bit_length() - 1


def _bytes_of(source: Source) -> lanes.Bytes:
    return lanes.Bytes(source.page, source.page_bytes, source.offset, source.is_row)


def _load(source: Source, first: int, size: int) -> Registers:
    """Loads `size` bytes of each thread's row, from byte `first` on, as words."""
    starts = range(0, size, tiles.CHUNK)
    where = _bytes_of(source)
    return [
        word
        for start in starts
        for word in lanes.load_global_bytes(source.ref, where, min(size - start, tiles.CHUNK), first + start)
    ]


def _chunk() -> jax.Array:
    """Which elements of a run each thread has."""
    return lanes.thread_index() & (SHARERS - 1)


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
