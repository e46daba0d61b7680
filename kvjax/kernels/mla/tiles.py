"""Rows of queries and of tokens in shared memory as `wgmma` reads them, and the copies that bring them there.

A row is a latent and a rope key. Rows are three matrices: the halves of the latents, each of which is the values of one
warpgroup, and the rope keys. A warpgroup copies its own tiles, 16 bytes per thread, into the layout of `wgmma`
(`kernels.tiles`). Eight threads take a run of 128 bytes of a row, and a warpgroup 16 rows at once. Rows that do not
exist are zeros, so that no data stored elsewhere, which may be NaN, is multiplied by a weight of 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, lanes, tiles
from kvjax.kernels.aliases import Barriers, DType, Ref, Scalar, ScratchType
from kvjax.kernels.mla import exchange
from kvjax.kernels.registers import LANES, THREADS, WARPS
from kvjax.spec import AttentionSpec

ROWS = 64
"""Query rows of a thread block: the rows of one `wgmma`."""

TOKENS = 64
"""Tokens of a tile."""

WARPGROUPS = 2
"""Each has a tile of its own in shared memory, and half of the results."""

PART = 128
"""Columns of latents that are multiplied at once: by larger matrices 128 query rows take 2% longer."""

PER_RUN = 8
"""Threads that copy a run of a row."""

AT_ONCE = THREADS // PER_RUN
"""Rows that a warpgroup copies at once: a lot of rows."""

NUMBERS = 4
"""Numbers of each query row that a warpgroup tells the other: what weights are relative to, whether that of any row has
changed, the sum of its weights, and its largest logit."""


def shared_bytes(spec: AttentionSpec) -> int:
    """Bytes of shared memory of a thread block."""
    row_bytes = sum(spec.part_sizes) * tiles.ITEMSIZE  # of each part a multiple of 32, so that tiles are aligned
    weights_bytes = 0 if _weights_replace_rope_keys(spec) else WARPGROUPS * ROWS * TOKENS * tiles.ITEMSIZE
    numbers_bytes = WARPGROUPS * NUMBERS * ROWS * 4
    return (ROWS + WARPGROUPS * TOKENS) * row_bytes + weights_bytes + numbers_bytes


def _weights_replace_rope_keys(spec: AttentionSpec) -> bool:
    """Whether weights are stored over the rope keys of their tile, which logits were the last to read."""
    return spec.part_sizes[1] == ROWS


def operand_dtypes(spec: AttentionSpec) -> tuple[DType, DType]:
    """The dtypes of the latents and of the rope keys of tiles, to which queries are converted.

    They hold what is stored exactly, without the layer's scale. No dtype of 16 bits does so for `fp8_ds_mla`: the
    products of elements and scales of blocks may be any float32, and bfloat16 has its range.
    """
    latents, rope = (
        np.dtype(part.info.exact_in or (jnp.bfloat16 if part.is_quantized else part.info.storage_dtype))
        for part in spec.parts
    )
    return latents, rope


def scratch_types(spec: AttentionSpec) -> list[ScratchType]:
    """The shared memory of `Tiles`."""
    rank, rope = spec.part_sizes
    half, (dtype, rope_dtype) = rank // WARPGROUPS, operand_dtypes(spec)
    shared: list[ScratchType] = []
    for count, rows in ((1, ROWS), (WARPGROUPS, TOKENS)):
        shared.append(plgpu.SMEM((count, WARPGROUPS, rows, half), dtype, transforms=tiles.transforms_of(half)))
        if rope:
            shared.append(tiles.shared(count, rows, rope, rope_dtype))
    if not _weights_replace_rope_keys(spec):
        shared.append(tiles.shared(WARPGROUPS, ROWS, TOKENS, dtype))
    shared.append(plgpu.SMEM((WARPGROUPS, NUMBERS, ROWS), jnp.float32))
    if compat.interpreting():
        shared += [plgpu.Barrier(num_arrivals=WARPGROUPS), plgpu.Barrier(num_barriers=2 * WARPGROUPS)]
    return shared


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows in global memory: for each thread, the row of which it copies a part.

    Attributes:
      ref: reference to pages, or to queries, of the tiles' dtype.
      page: int32 `[128]`, or uint32.
      page_bytes: bytes between pages.
      offset: int32 `[128]`, the byte in the page at which the row begins.
      is_row: bool `[128]`; where it does not hold, zeros are stored.
    """

    ref: Ref
    page: jax.Array
    page_bytes: int
    offset: jax.Array
    is_row: jax.Array


@dataclasses.dataclass(frozen=True)
class LatentRows:
    """Rows in shared memory.

    Attributes:
      latents: `[count, 2, rows, kv_lora_rank / 2]`.
      rope: `[count, rows, qk_rope_head_dim]`, None for none.
    """

    latents: Ref
    rope: Ref | None

    def columns(self, index: Scalar, matrix: Scalar) -> list[Ref]:
        """The columns of a matrix of latents, up to `PART` at once."""
        half = self.latents.shape[-1]
        size = math.gcd(half, PART)
        return [self.latents.at[index, matrix, :, pl.ds(start, size)] for start in range(0, half, size)]

    def rope_keys(self, index: Scalar) -> list[Ref]:
        """The rope keys, if there are any."""
        return [] if self.rope is None else [self.rope.at[index]]

    def copy_latents(self, index: Scalar, matrix: Scalar, lot: Scalar, source: Source) -> None:
        """Starts copies of half of the latents of a lot of rows."""
        _, matrices, rows, half = self.latents.shape
        column = matrix * half
        if compat.interpreting():
            _store_interpreted(self.latents, (index, matrix), lot, column, source)
        else:
            first = (index * matrices + matrix) * rows + lot * AT_ONCE
            _start_copies(self.latents, first, column * tiles.ITEMSIZE, source)

    def copy_rope_keys(self, index: Scalar, lot: Scalar, source: Source) -> None:
        """Starts copies of the rope keys of a lot of rows, if there are any."""
        if self.rope is None:
            return
        if compat.interpreting():
            _store_interpreted(self.rope, (index,), lot, 0, source)
        else:
            _start_copies(self.rope, index * self.rope.shape[1] + lot * AT_ONCE, 0, source)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The shared memory of a thread block: the queries, and a tile of tokens of each warpgroup.

    Warpgroups synchronize with two kinds of barriers, one of each kind for each warpgroup's tile: `announce` says that
    the tile's weights are stored, `release` that the other warpgroup has read them and the tile's latents.

    Attributes:
      queries: one set of rows.
      tokens: the rows of the two tiles.
      of_weights: 16 bits `[2, 64, 64]`, or the rope keys of `tokens` where weights are stored over these.
      numbers: float32 `[2, NUMBERS, 64]`.
      all_stored: in interpret mode a barrier, which completes when all warpgroups have arrived; else None.
      signals: in interpret mode the barriers of `announce` and `release`; else None.
    """

    queries: LatentRows
    tokens: LatentRows
    of_weights: Ref
    numbers: Ref
    all_stored: Barriers
    signals: Barriers

    @classmethod
    def of(cls, spec: AttentionSpec, refs: tuple[Ref, ...]) -> Tiles:
        """Those of `scratch_types`."""
        others = list(refs)
        queries, tokens = (LatentRows(others.pop(0), others.pop(0) if spec.part_sizes[1] else None) for _ in range(2))
        replaced = tokens.rope if _weights_replace_rope_keys(spec) else None
        weights = others.pop(0) if replaced is None else replaced
        numbers, *barriers = others
        return cls(queries, tokens, weights, numbers, *(barriers or (None, None)))

    def wait_for_block(self) -> None:
        """A barrier of all threads, after which tensor cores see the threads' stores and copies that had arrived."""
        if compat.interpreting():
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.all_stored)
            plgpu.barrier_wait(self.all_stored)
        else:
            lanes.show_to_tensor_cores()
            lanes.wait_for_block()

    def wait_for_own(self) -> None:
        """`wait_for_block` of a warpgroup alone."""
        lanes.show_to_tensor_cores()
        lanes.wait_for_warps(self._own_barrier(), WARPS)

    def any(self, mask: jax.Array) -> jax.Array:
        """Whether any row's bool holds; also a barrier of the warpgroup."""
        return exchange.any_of_warpgroup(mask, self._own_barrier())

    def _own_barrier(self) -> jax.Array:
        return lanes.splat(lax.axis_index("warpgroup") + 2 * WARPGROUPS, jnp.int32)

    def announce(self, warpgroup: Scalar) -> None:
        """Tells the other warpgroup that the weights of this one's tile are stored."""
        lanes.show_to_tensor_cores()
        self._arrive(warpgroup)

    def wait_for_announcement(self, warpgroup: Scalar) -> None:
        """Waits for `announce` by a warpgroup."""
        self._wait(warpgroup)

    def release(self, warpgroup: Scalar) -> None:
        """Tells a warpgroup that its tile, and the weights, have been read."""
        self._arrive(warpgroup + WARPGROUPS)

    def wait_for_release(self, warpgroup: Scalar) -> None:
        """Waits for `release` of the tile of `warpgroup`, the calling one."""
        self._wait(warpgroup + WARPGROUPS)

    def _arrive(self, signal: Scalar) -> None:
        if compat.interpreting():
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.signals.at[signal])
        else:
            lanes.arrive_for_warps(lanes.splat(signal, jnp.int32), WARPGROUPS * WARPS)

    def _wait(self, signal: Scalar) -> None:
        if compat.interpreting():
            plgpu.barrier_wait(self.signals.at[signal])
        else:
            lanes.wait_for_warps(lanes.splat(signal, jnp.int32), WARPGROUPS * WARPS)


class Incoming(Protocol):
    """How a warpgroup brings its tiles to shared memory: `Copied`, or `packed.Packed` where they are decoded."""

    @property
    def lots(self) -> int:
        """Runs of rows into which a tile is divided: each thread takes part of a row of each."""

    @property
    def groups(self) -> int:
        """Groups of copies of a tile. The first of two brings the latents that only this warpgroup weights."""

    def row(self, lot: int) -> jax.Array:
        """For each thread, the row of a tile of which it takes a part in a lot, int32 `[128]`."""

    def expect(self, sources: Sequence[Source]) -> None:
        """Prepares for a tile, given the rows of each lot, well before `begin`."""

    def begin(self, sources: Sequence[Source]) -> Any:
        """What `bring` takes for a tile; loads it if it comes through registers."""

    def bring(self, begun: Any, is_tile: jax.Array, wait_for_release: Callable[[], None]) -> None:
        """Brings a tile, if it is one, in place of the one before, whose own latents the warpgroup has multiplied.

        `wait_for_release` waits until the other warpgroup has multiplied its latents of that tile, too.
        """


@dataclasses.dataclass(frozen=True)
class Copied:
    """Copies elements of 16 bits: first the latents that the warpgroup alone multiplies by weights.

    As in CUTLASS's pipelines, where a thread releases memory once it has waited for its `wgmma`, that wait covers the
    reads of all warps.

    Attributes:
      tokens: the rows of both tiles.
      rope_offset: the byte in a row at which its rope key begins.
    """

    tokens: LatentRows
    rope_offset: int
    lots: int = TOKENS // AT_ONCE
    groups: int = 2

    def row(self, lot: int) -> jax.Array:
        """See `Incoming`."""
        return rows_of_lot(lot)

    def expect(self, sources: Sequence[Source]) -> None:
        """See `Incoming`."""

    def begin(self, sources: Sequence[Source]) -> Sequence[Source]:
        """See `Incoming`."""
        return sources

    def bring(self, begun: Sequence[Source], is_tile: jax.Array, wait_for_release: Callable[[], None]) -> None:
        """See `Incoming`."""
        own, tokens = lax.axis_index("warpgroup"), self.tokens

        @pl.when(is_tile)
        def copy_own() -> None:
            for lot, source in enumerate(begun):
                tokens.copy_latents(own, own, lot, source)

        lanes.end_group_of_copies()
        wait_for_release()

        @pl.when(is_tile)
        def copy_others() -> None:
            for lot, source in enumerate(begun):
                tokens.copy_latents(own, 1 - own, lot, source)
                tokens.copy_rope_keys(own, lot, dataclasses.replace(source, offset=source.offset + self.rope_offset))

        lanes.end_group_of_copies()


def rows_of_lot(lot: Scalar) -> jax.Array:
    """For each thread, the row of which it copies a part in a lot, int32 `[128]`."""
    return (lanes.thread_index() >> PER_RUN.bit_length() - 1) + lot * AT_ONCE


def rows_by_lane() -> list[jax.Array]:
    """Rows of a tile, all of them in each warp, int32 `[128]` each."""
    return [(lanes.thread_index() & (LANES - 1)) + later for later in range(0, TOKENS, LANES)]


def _store_interpreted(ref: Ref, index: tuple[Scalar, ...], lot: Scalar, column: Scalar, source: Source) -> None:
    """Stores columns of rows, from `column` on, to a lot of rows of a matrix."""
    columns = ref.shape[-1]
    data = source.ref[...].reshape(-1)
    first = (source.page * source.page_bytes + source.offset)[::PER_RUN] // tiles.ITEMSIZE + column
    rows = jnp.take(data, first[:, None] + jnp.arange(columns), mode="fill")
    rows = lax.bitcast_convert_type(rows, ref.dtype)  # rope keys may have a dtype of their own
    ref[(*index, pl.ds(lot * AT_ONCE, AT_ONCE))] = jnp.where(
        source.is_row[::PER_RUN, None], rows, jnp.zeros((), ref.dtype)
    )


def _start_copies(ref: Ref, row: Scalar, start: Scalar, source: Source) -> None:
    """Starts copies of source rows, from byte `start` on, to the lot of a matrix that begins at row `row` of all."""
    width = ref.shape[-1]
    swizzle, row_bytes = tiles.swizzle_of(width), width * tiles.ITEMSIZE
    thread = lanes.thread_index()
    chunk, in_group, group = thread & (PER_RUN - 1), (thread >> 3) & (tiles.GROUP - 1), thread >> 6
    to = tiles.offset(in_group, chunk * (tiles.CHUNK // tiles.ITEMSIZE), width) + group * (tiles.GROUP * row_bytes)
    runs = [(run * tiles.GROUP * swizzle, run * swizzle) for run in range(row_bytes // swizzle)]
    in_run = swizzle // tiles.CHUNK
    condition = None if in_run == PER_RUN else chunk < in_run
    size = jnp.where(source.is_row, lanes.splat(tiles.CHUNK, jnp.int32), 0)
    offset = source.offset + chunk * tiles.CHUNK + start
    chunks = lanes.Chunks(to + row * row_bytes, source.page, source.page_bytes, offset, size, runs, condition)
    lanes.copy_or_clear(ref, tiles.transforms_of(width), source.ref, chunks)
