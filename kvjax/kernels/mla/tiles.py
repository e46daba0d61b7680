"""Rows of queries and of tokens in shared memory as `wgmma` reads them, and the copies that bring them there.

A row is a latent and a rope key. Tiles of 64 rows are three matrices: the halves of the latents, each of which is the
values of one warpgroup, and the rope keys. One warpgroup copies, 16 bytes a thread, to where the layout of `wgmma` has
them (`kernels.tiles`); eight threads copy a run of 128 bytes of a row, 16 rows at once. What is no row is zeros, so
that nothing that is stored elsewhere, NaN included, is multiplied by a weight of 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

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

SLOTS = 2
"""Tiles of tokens of 16 bits in shared memory: one that is multiplied, and one that arrives."""

WARPGROUPS = 2

LOGITS = 0
"""The warpgroup that computes logits and weights."""

COPIES = 1
"""The warpgroup that copies, meanwhile."""

WEIGHTS_STORED = 0
"""The barrier of `Tiles.announce`."""

PART = 128
"""Columns of latents that are multiplied at once: by larger matrices 128 query rows take 2% longer."""

PER_RUN = 8
"""Threads that copy a run of a row."""

AT_ONCE = THREADS // PER_RUN
"""Rows that a warpgroup copies at once: a lot of rows."""

LOTS = ROWS // AT_ONCE


def shared_bytes(spec: AttentionSpec) -> int:
    """Bytes of shared memory of a thread block, without those of `Packed`."""
    row_bytes = (size * tiles.ITEMSIZE for size in spec.part_sizes)  # a multiple of 32, so that tiles are aligned
    weights_bytes = 0 if _weights_replace_rope_keys(spec) else ROWS * TOKENS * tiles.ITEMSIZE
    return sum((1 + num_slots(spec)) * ROWS * size for size in row_bytes) + weights_bytes


def _weights_replace_rope_keys(spec: AttentionSpec) -> bool:
    """Whether weights are stored over the rope keys of their tile, which logits were the last to read."""
    dtype, rope_dtype = operand_dtypes(spec)
    return spec.part_sizes[1] == TOKENS and dtype == rope_dtype


def num_slots(spec: AttentionSpec) -> int:
    """Tiles of tokens: one where bytes arrive elsewhere."""
    return 1 if spec.dtype.is_quantized else SLOTS


def operand_dtypes(spec: AttentionSpec) -> tuple[DType, DType]:
    """The dtypes of the latents and of the rope keys of tiles, to which queries are converted.

    They hold what is stored exactly, without the layer's scale. Of `fp8_ds_mla` none of 16 bits does: the products of
    elements and scales of blocks may be any float32, and bfloat16 has its range.
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
    count = 1 + num_slots(spec)
    shared: list[ScratchType] = [
        plgpu.SMEM((count, WARPGROUPS, ROWS, half), dtype, transforms=tiles.transforms_of(half)),
    ]
    if rope:
        shared.append(tiles.shared(count, ROWS, rope, rope_dtype))
    if not _weights_replace_rope_keys(spec):
        shared.append(tiles.shared(1, ROWS, TOKENS, dtype))
    if compat.interpreting():
        shared += [plgpu.Barrier(num_arrivals=WARPGROUPS), plgpu.SMEM((WARPGROUPS,), jnp.int32)]
    return shared


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows in global memory, for each thread the one that it copies a part of.

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
class Tiles:
    """The shared memory of a thread block. Index 0 is the queries', 1 and later are those of the slots of tokens.

    Attributes:
      latents: `[1 + num_slots, 2, 64, kv_lora_rank / 2]`.
      rope: `[1 + num_slots, 64, qk_rope_head_dim]`, None for none.
      of_weights: `[1, 64, 64]`, or `rope` where weights are stored over the rope keys of a slot.
      all_stored: in interpret mode a barrier, which completes when all warpgroups have stored their rows; else None.
      votes: in interpret mode int32 `[2]`, what each warpgroup has found; else None.
    """

    latents: Ref
    rope: Ref | None
    of_weights: Ref
    all_stored: Barriers
    votes: Barriers

    @classmethod
    def of(cls, spec: AttentionSpec, refs: tuple[Ref, ...]) -> Tiles:
        """Those of `scratch_types`."""
        latents, *others = refs
        rope = others.pop(0) if spec.part_sizes[1] else None
        weights = rope if rope is not None and _weights_replace_rope_keys(spec) else others.pop(0)
        return cls(latents, rope, weights, *(others or (None, None)))

    def parts(self, index: Scalar) -> list[Ref]:
        """Columns of a tile, up to `PART` at once, along which keys are summed: those of latents, then rope keys."""
        half = self.latents.shape[-1]
        size = math.gcd(half, PART)
        starts = itertools.product(range(WARPGROUPS), range(0, half, size))
        parts = [self.latents.at[index, matrix, :, pl.ds(start, size)] for matrix, start in starts]
        return parts if self.rope is None else [*parts, self.rope.at[index]]

    def values(self, slot: Scalar, warpgroup: Scalar) -> Ref:
        """The values of a slot that are a warpgroup's."""
        return self.latents.at[slot + 1, warpgroup]

    def weights(self, slot: Scalar) -> Ref:
        """The weights of the tokens of a slot."""
        return self.of_weights.at[slot + 1 if self.of_weights is self.rope else 0]

    def copy(self, index: Scalar, lot: int, latents: Source, rope: Source) -> None:
        """Starts copies of a lot of rows of a tile; without rope keys, `rope` is not read."""
        half = self.latents.shape[-1]
        columns = [i * half for i in range(WARPGROUPS)]
        if compat.interpreting():
            for i, column in enumerate(columns):
                _store_interpreted(self.latents, (index, i), lot, column, latents)
            if self.rope is not None:
                _store_interpreted(self.rope, (index,), lot, 0, rope)
            return
        _start_copies(self.latents, index, lot, columns, latents)
        if self.rope is not None:
            _start_copies(self.rope, index, lot, [0], rope)

    def wait_for_warpgroups(self) -> None:
        """A barrier of all threads, after which what they have stored is where tensor cores see it."""
        if compat.interpreting():
            self.wait_for_copies()
        else:
            lanes.wait_before_copies()

    def announce(self) -> None:
        """Tells the other warpgroup that what this one has stored is where tensor cores see it."""
        if compat.interpreting():
            self.wait_for_copies()
        else:
            lanes.arrive_for_warps(WEIGHTS_STORED, WARPGROUPS * WARPS)

    def wait_for_announcement(self) -> None:
        """Waits for `announce`."""
        if compat.interpreting():
            self.wait_for_copies()
        else:
            lanes.wait_for_warps(lanes.splat(WEIGHTS_STORED, jnp.int32), WARPGROUPS * WARPS)

    def any(self, mask: jax.Array) -> jax.Array:
        """Whether a row's bool holds in any warpgroup; a barrier of all threads."""
        if not compat.interpreting():
            return exchange.any_in_block(mask, WARPGROUPS * THREADS)
        self.votes[lax.axis_index("warpgroup")] = jnp.any(mask).astype(jnp.int32)
        self.wait_for_copies()
        found = (self.votes[0] | self.votes[1]) != 0
        self.wait_for_copies()
        return found

    def wait_for_copies(self) -> None:
        """Waits until all threads' copies have arrived where tensor cores see them, and for all warpgroups."""
        if compat.interpreting():
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.all_stored)
            plgpu.barrier_wait(self.all_stored)
        else:
            lanes.wait_for_copies_of_block()


def rows_of_lot(lot: Scalar) -> jax.Array:
    """The rows of a tile in a lot, for each thread the one that it copies or decodes a part of, int32 `[128]`."""
    return (lanes.thread_index() >> PER_RUN.bit_length() - 1) + lot * AT_ONCE


def rows_by_lane() -> list[jax.Array]:
    """Rows of a tile, all of them in each warp, int32 `[128]` each."""
    return [(lanes.thread_index() & (LANES - 1)) + later for later in range(0, TOKENS, LANES)]


def _store_interpreted(ref: Ref, index: tuple[Scalar, ...], lot: int, column: int, source: Source) -> None:
    """Stores columns of rows, from `column` on, to a lot of rows of a matrix."""
    columns = ref.shape[-1]
    data = source.ref[...].reshape(-1)
    first = (source.page * source.page_bytes + source.offset)[::PER_RUN] // tiles.ITEMSIZE + column
    rows = jnp.take(data, first[:, None] + jnp.arange(columns), mode="clip")
    rows = lax.bitcast_convert_type(rows, ref.dtype)  # rope keys may have a dtype of their own
    ref[(*index, pl.ds(lot * AT_ONCE, AT_ONCE))] = jnp.where(
        source.is_row[::PER_RUN, None], rows, jnp.zeros((), ref.dtype)
    )


def _start_copies(ref: Ref, index: Scalar, lot: int, columns: list[int], source: Source) -> None:
    """Starts copies to the matrices of a tile, each of which has the columns of rows from one of `columns` on."""
    width = ref.shape[-1]
    swizzle, row_bytes = tiles.swizzle_of(width), width * tiles.ITEMSIZE
    thread = lanes.thread_index()
    chunk, in_group, group = thread & (PER_RUN - 1), (thread >> 3) & (tiles.GROUP - 1), thread >> 6
    to = tiles.offset(in_group, chunk * (tiles.CHUNK // tiles.ITEMSIZE), width) + group * (tiles.GROUP * row_bytes)
    to = to + index * (len(columns) * ROWS * row_bytes)
    firsts = [(i * ROWS + lot * AT_ONCE) * row_bytes for i in range(len(columns))]
    runs = [
        (first + run * tiles.GROUP * swizzle, column * tiles.ITEMSIZE + run * swizzle)
        for first, column in zip(firsts, columns, strict=True)
        for run in range(row_bytes // swizzle)
    ]
    in_run = swizzle // tiles.CHUNK
    condition = None if in_run == PER_RUN else chunk < in_run
    size = jnp.where(source.is_row, lanes.splat(tiles.CHUNK, jnp.int32), 0)
    offset = source.offset + chunk * tiles.CHUNK
    chunks = lanes.Chunks(to, source.page, source.page_bytes, offset, size, runs, condition)
    lanes.copy_or_clear(ref, tiles.transforms_of(width), source.ref, chunks)
