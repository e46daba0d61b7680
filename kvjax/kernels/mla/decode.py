"""The MLA kernel: attention of 64 query rows of a sequence over its latents.

A query row is a head of a query token. A thread block takes 64 of them, and a share of all tokens, in tiles of 64. A
result of 64 by 512 takes the registers of two warpgroups, each of which weights its half of the latents. One of them
computes logits and weights, which it stores over the tile's rope keys, and the other copies the next tile meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, lanes, warpgroups
from kvjax.kernels.aliases import Carry, DType, Ref, Scalar
from kvjax.kernels.attention.problem import Problem, Refs
from kvjax.kernels.attention.schedule import Sequences, Workers, serve
from kvjax.kernels.attention.softmax import HEADROOM, LOG2_E, LOWEST, capped, margin, reference, rounding
from kvjax.kernels.mla import exchange
from kvjax.kernels.mla.packed import Packed
from kvjax.kernels.mla.problem import MLAConfig
from kvjax.kernels.mla.tiles import (
    COPIES,
    LOGITS,
    LOTS,
    ROWS,
    SLOTS,
    TOKENS,
    Source,
    Tiles,
    rows_by_lane,
    rows_of_lot,
)
from kvjax.kernels.registers import LANES


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of tiles of a sequence.

    Attributes:
      table: the start of its entries in the block table.
      length: its tokens, those of the query included.
      start: the first token that a row sees.
      end: the token after the last one.
    """

    table: jax.Array
    length: jax.Array
    start: jax.Array
    end: jax.Array


class RowSums(NamedTuple):
    """What rows have seen, float32 `[64]` each, as `attention.softmax.Sums`."""

    largest: jax.Array
    total: jax.Array
    top: jax.Array


@dataclasses.dataclass(frozen=True)
class LatentDecode:
    """The body of the kernel.

    Attributes:
      problem: the call's.
      config: the launch configuration.
      refs: the references. `query` is `[num_seqs * rows, columns]`, and `query_pe` likewise, if there are rope keys;
        `pages` is `[num_pages, page_elements]`, `out` and `partial` are `[rows, 2, kv_lora_rank / 2]`, `partial_lse` is
        `[rows, Problem.sums]`; all others are one-dimensional.
      tiles: shared memory.
      packed: the bytes of quantized tiles, or None.
    """

    problem: Problem
    config: MLAConfig
    refs: Refs
    tiles: Tiles
    packed: Packed | None

    def run(self) -> None:
        """Runs the body."""
        sequences = Sequences(self.problem, self.config.rows, self.refs.seq_lens)
        workers = Workers(lax.axis_index("block"), self.config.blocks)
        serve(self, sequences, workers, self.config.part, jnp.int32(0))

    @property
    def num_rows(self) -> int:
        """Query rows of a sequence."""
        return self.problem.q_len * self.problem.num_heads

    @property
    def first_row(self) -> jax.Array:
        """The first query row of the thread block."""
        return lax.axis_index("rows") * ROWS

    def pages(self) -> tuple[jax.Array, jax.Array]:
        """The number of blocks, uint32 `[128]`, 0 for a layer out of range; and the layer."""
        problem = self.problem
        layer, num_blocks = jnp.int32(0), jnp.int32(problem.num_blocks)
        if problem.has_layer:
            layer = self.refs.layer[0]
            num_blocks = jnp.where((layer >= 0) & (layer < problem.num_layers), num_blocks, 0)
        return lanes.splat(num_blocks, jnp.uint32), layer

    def attend(
        self, sequence: jax.Array, length: jax.Array, first: jax.Array, count: jax.Array, cursor: Carry
    ) -> tuple[Carry, Carry]:
        """Attends to tiles `first` to `first + count` of a sequence; returns the results so far."""
        problem = self.problem
        start = length * 0
        if problem.reach is not None:
            start = jnp.maximum(length - problem.reach, 0)
        end = jnp.minimum(length, problem.max_blocks * problem.spec.block_size)
        segment = Segment(sequence * problem.table_stride, length, start, end)
        self.tiles.wait_for_copies()  # until all have read the tiles of the segment before
        warpgroup = lax.axis_index("warpgroup")
        ahead = 1 if self.packed is None else 2
        pl.when(warpgroup == COPIES)(lambda: self.copy_first(sequence, segment, first, count))
        half = self.tiles.latents.shape[-1]
        acc = compat.layout_cast(jnp.full((ROWS, half), 0, jnp.float32), plgpu.Layout.WGMMA)
        sums = RowSums(*(_of_rows(x) for x in (LOWEST, 0, LOWEST)))

        def body(i: jax.Array, carry: Carry) -> Carry:
            entries, acc, *sums = carry
            tile = first + i
            if self.packed is not None:
                self.packed.decode(tile & (SLOTS - 1))
                self.tiles.wait_for_warpgroups()

            def copy() -> Carry:
                pl.when(i + ahead < count)(lambda: self.copy_tile(tile + ahead, entries))
                if self.packed is not None:
                    end_group()
                following = self.entries(segment, tile + ahead + 1)
                return following, self.follow(tile, acc), *sums

            def lead() -> Carry:
                return entries, *self.lead(segment, tile, acc, RowSums(*sums))

            return tuple(lax.cond(warpgroup == COPIES, copy, lead))

        entries = self.entries(segment, first + ahead)
        self.wait_for_tile()
        _, *state = lax.fori_loop(0, count, body, (entries, acc, *sums))
        return state, cursor

    def copy_first(self, sequence: jax.Array, segment: Segment, first: jax.Array, count: jax.Array) -> None:
        """Starts copies of the query rows and of the tiles that are ahead of the loop."""
        self.copy_query(sequence)
        self.copy_tile(first, self.entries(segment, first))
        if self.packed is not None:
            end_group()
            pl.when(count > 1)(lambda: self.copy_tile(first + 1, self.entries(segment, first + 1)))
            end_group()

    def slot(self, tile: Scalar) -> Scalar:
        """The slot of a tile of 16 bits."""
        return jnp.int32(0) if self.packed is not None else tile & (SLOTS - 1)

    def wait_for_tile(self) -> None:
        """Waits until the next tile has arrived, and the warpgroup of logits is done with the one before.

        The other may still multiply that one, until it takes part in `Tiles.any`.
        """
        if self.packed is None:
            self.tiles.wait_for_copies()
            return
        if not compat.interpreting():
            lanes.wait_for_own_copies(1)
        self.tiles.wait_for_warpgroups()

    def copy_query(self, sequence: jax.Array) -> None:
        """Starts copies of the query rows."""
        for lot in range(LOTS):
            row = rows_of_lot(lot)
            own = self.first_row + row
            index = jnp.minimum(own, self.num_rows - 1) + sequence * self.num_rows
            refs = self.refs.query, *([] if self.tiles.rope is None else [self.refs.query_pe])
            row_bytes = (ref.shape[1] * ref.dtype.itemsize for ref in refs)
            sources = [
                Source(ref, index, size, row * 0, own < self.num_rows)
                for ref, size in zip(refs, row_bytes, strict=True)
            ]
            self.tiles.copy(0, lot, sources[0], sources[-1])

    def entries(self, segment: Segment, tile: Scalar, rows: list[jax.Array] | None = None) -> list[jax.Array]:
        """The entries of the block table for rows of a tile, by default those that the thread copies.

        They are -1 for what is no token.
        """
        found = []
        for row in map(rows_of_lot, range(LOTS)) if rows is None else rows:
            position = row + tile * TOKENS
            is_token = (position >= segment.start) & (position < segment.end)
            index = segment.table + lax.div(position, jnp.int32(self.problem.spec.block_size))
            found.append(lanes.load_global(self.refs.table, index, is_token, -1))
        return found

    def copy_tile(self, tile: Scalar, entries: list[jax.Array]) -> None:
        """Starts copies of a tile of tokens."""
        for lot, entry in enumerate(entries):
            source = self.source(tile, lot, entry)
            if self.packed is None:
                start = self.problem.spec.part_sizes[0] * self.refs.pages.dtype.itemsize
                rope = dataclasses.replace(source, offset=source.offset + start)
                self.tiles.copy(self.slot(tile) + 1, lot, source, rope)
            else:
                self.packed.copy(tile & (SLOTS - 1), lot, source)

    def source(self, tile: Scalar, lot: int, entry: jax.Array) -> Source:
        """The tokens of a lot of rows of a tile."""
        problem = self.problem
        num_blocks, layer = self.pages()
        is_token = entry < num_blocks  # as unsigned: negative entries are large
        token = lax.rem(rows_of_lot(lot) + tile * TOKENS, jnp.int32(problem.spec.block_size))
        page = jnp.where(is_token, lanes.bits(entry, jnp.int32), 0) * problem.num_layers + layer
        page = jnp.where(is_token, page, 0)
        offset = token * problem.spec.bytes_per_token
        return Source(self.refs.pages, page, problem.memory[0].page_stride, offset, is_token)

    def scale(self) -> Scalar:
        """The layer's scale, by which logits and results are multiplied; 1 for dtypes without."""
        return self.refs.k_scale[0] if self.problem.spec.dtype.takes_scale else np.float32(1)

    def logits(self, segment: Segment, tile: Scalar) -> jax.Array:
        """The logits of a tile, binary logarithms: -inf for what rows do not see."""
        slot = self.slot(tile)
        entries = self.entries(segment, tile, rows_by_lane())  # which arrive while products run
        problem = self.problem
        pairs = list(zip(self.tiles.parts(0), self.tiles.parts(slot + 1), strict=True))
        scale = np.float32(problem.sm_scale * LOG2_E)
        if problem.spec.dtype.takes_scale == problem.spec.parts[1].takes_scale or self.tiles.rope is None:
            logits = warpgroups.sum_of_products(pairs) * (scale * self.scale())
        else:  # the scale is of latents alone: to what they add up to in registers, rope keys are added
            *latents, rope = pairs
            logits = warpgroups.sum_of_products(latents) * self.scale()
            logits = warpgroups.product(*rope, lambda: None, logits, transposed=True) * scale
        logits = capped(logits, problem.logits_soft_cap, jnp.exp2)
        logits = self.of_tokens(logits, entries)
        return self.masked(segment, tile, logits) if problem.q_len > 1 else logits

    def lead(self, segment: Segment, tile: Scalar, acc: jax.Array, sums: RowSums) -> Carry:
        """Computes a tile's weights, which the other warpgroup waits for, and adds its own weighted latents.

        As in `attention.softmax.raised`, results are rescaled only where a logit exceeds the largest by `HEADROOM`.
        """
        logits = self.logits(segment, tile)
        above = margin(self.dtype)
        highest = jnp.max(logits, axis=1)

        def raise_rows(acc: jax.Array, largest: jax.Array, total: jax.Array) -> Carry:
            near = highest + above if self.problem.weight_dtype is None else reference(highest, above)
            new = jnp.maximum(largest, near)
            shrink = jnp.exp2(largest - new)
            return self.rescale(tile, acc, shrink), new, total * shrink

        is_raised = self.tiles.any(highest > sums.largest + np.float32(HEADROOM - above))
        acc, largest, total = lax.cond(is_raised, raise_rows, lambda *x: x, acc, sums.largest, sums.total)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(largest, logits.shape, [0]))
        operand = weights.astype(self.dtype)
        exchange.store_weights(self.tiles.weights(self.slot(tile)), operand)
        self.tiles.announce()
        total += jnp.sum(weights, axis=1)
        top = jnp.maximum(sums.top, highest)
        acc = warpgroups.product(operand, self.tiles.values(self.slot(tile), LOGITS), lambda: None, acc)
        self.wait_for_tile()
        return acc, largest, total, top

    def follow(self, tile: Scalar, acc: jax.Array) -> jax.Array:
        """Waits for a tile's weights, and adds the weighted latents of the warpgroup that has none of its own."""
        is_raised = self.tiles.any(_of_rows(0) != 0)
        acc = lax.cond(is_raised, lambda acc: self.rescale(tile, acc, None), lambda acc: acc, acc)
        self.tiles.wait_for_announcement()
        slot = self.slot(tile)
        operands = self.tiles.weights(slot), self.tiles.values(slot, COPIES)
        # The next tile is in another slot. Copies to this one start after the product: as in CUTLASS's pipelines,
        # where a thread that has waited for its `wgmma` releases memory, the wait is for all warps' reads.
        if self.packed is None:
            return warpgroups.product(*operands, self.wait_for_tile, acc)
        acc = warpgroups.product(*operands, lambda: None, acc)
        self.wait_for_tile()
        return acc

    def rescale(self, tile: Scalar, acc: jax.Array, shrink: jax.Array | None) -> jax.Array:
        """Results times a factor of each row, which the warpgroup of logits passes to the other."""
        shared = self.tiles.weights(self.slot(tile))
        if shrink is not None:
            exchange.store_factors(shared, shrink)
        self.tiles.wait_for_warpgroups()
        if shrink is None:
            shrink = exchange.load_factors(shared, ROWS)
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        self.tiles.wait_for_warpgroups()  # until weights may be stored there
        return acc

    @property
    def dtype(self) -> DType:
        """That of latents and weights as operands."""
        return np.dtype(self.tiles.latents.dtype)

    def of_tokens(self, logits: jax.Array, entries: list[jax.Array]) -> jax.Array:
        """Logits, -inf for what is no token by the block table's entries, which each warp has for all rows."""
        num_blocks, _ = self.pages()
        low, high = (lanes.of_first_thread(lanes.ballot(entry < num_blocks)) for entry in entries)

        def mask(logits: jax.Array) -> jax.Array:
            row = compat.layout_cast(lax.iota(jnp.int32, TOKENS), plgpu.Layout.WGMMA.reduce(0))
            # Bits 1 and 2 of a thread's rows are its column: once they are shifted out, constants test the others.
            bits = jnp.where(row < LANES, low, high) >> (row & 6)
            is_token = bits >> (row & (LANES - 1 - 6)) & 1
            bias = jnp.where(is_token == 1, np.float32(0), np.float32(-np.inf))
            return logits + lax.broadcast_in_dim(bias, logits.shape, [1])

        masked: jax.Array = lax.cond((low & high) != -1, mask, lambda logits: logits, logits)
        return masked

    def masked(self, segment: Segment, tile: Scalar, logits: jax.Array) -> jax.Array:
        """Logits, -inf for the tokens that a row does not see but others do."""
        problem, shape = self.problem, logits.shape
        first_token = tile * TOKENS
        is_mixed = first_token + TOKENS > segment.length - problem.q_len + 1
        if problem.window is not None:
            is_mixed |= first_token < segment.length - problem.window

        def mask(logits: jax.Array) -> jax.Array:
            row = compat.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA) + self.first_row
            token = compat.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), plgpu.Layout.WGMMA) + first_token
            position = lax.div(row, jnp.full_like(row, problem.num_heads)) + (segment.length - problem.q_len)
            sees = token <= position
            if problem.window is not None:
                sees &= token > position - problem.window
            return jnp.where(sees, logits, -jnp.inf)

        masked: jax.Array = lax.cond(is_mixed, mask, lambda logits: logits, logits)
        return masked

    def finish(self, sequence: jax.Array, state: Carry, whole: jax.Array, part: jax.Array) -> None:
        """Stores the result of a sequence, or a part of it for the merge."""
        acc, *sums = state
        largest, total, top = sums
        warpgroup = lax.axis_index("warpgroup")
        stop = jnp.minimum(self.num_rows - self.first_row, ROWS)

        def store(ref: Ref, value: jax.Array, index: jax.Array) -> None:
            first = index * self.num_rows + self.first_row
            layout = plgpu.Layout.WGMMA if value.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)
            warpgroups.store_rows(ref, value.astype(ref.dtype), first, jnp.int32(0), stop, layout)

        @pl.when(whole)
        def store_result() -> None:
            self.tiles.wait_for_warpgroups()  # until both have read the last weights
            shared = self.tiles.weights(0)
            pl.when(warpgroup == LOGITS)(lambda: exchange.store_factors(shared, self.weight(RowSums(*sums))))
            self.tiles.wait_for_warpgroups()
            weight = exchange.load_factors(shared, ROWS)
            store(self.refs.out.at[:, warpgroup], acc * lax.broadcast_in_dim(weight, acc.shape, [0]), sequence)
            lse = (largest + jnp.log2(total)) * np.float32(1 / LOG2_E)
            pl.when(warpgroup == LOGITS)(functools.partial(store, self.refs.lse, lse, sequence))

        @pl.when(~whole)
        def store_part() -> None:
            store(self.refs.partial.at[:, warpgroup], acc * self.scale(), part)

            @pl.when(warpgroup == LOGITS)
            def store_sums() -> None:
                for i, value in enumerate((largest, total, top)[: self.problem.sums]):
                    store(self.refs.partial_lse.at[:, i], value, part)

    def weight(self, sums: RowSums) -> jax.Array:
        """What the result of each row is multiplied by."""
        total = jnp.where(sums.total > 0, sums.total, 1.0)
        weight = jnp.where(sums.total > 0, self.scale() / total, 0.0)
        if self.problem.weight_dtype is None:
            return weight
        largest_weight = jnp.exp2(sums.top - sums.largest)
        return weight * rounding(largest_weight, _rounded(largest_weight, self.dtype), sums.total)

    def store_span(self, sequence: jax.Array, first: jax.Array, last: jax.Array) -> None:
        """Stores the range of thread blocks that have parts of a sequence."""
        thread = lanes.thread_index()

        @pl.when((lax.axis_index("warpgroup") == 0) & (lax.axis_index("rows") == 0))
        def store() -> None:
            for i, value in enumerate((first, last)):
                index = thread * 0 + (2 * sequence + i)
                lanes.store_global(self.refs.spans, index, lanes.splat(value, jnp.int32), thread == 0)


def end_group() -> None:
    """Ends a group of copies, of which interpret mode has none."""
    if not compat.interpreting():
        lanes.end_group_of_copies()


def _of_rows(value: float) -> jax.Array:
    return compat.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _rounded(x: jax.Array, dtype: DType) -> jax.Array:
    """`x` rounded to the precision of a dtype of 16 bits, within its normal range; jax 0.11 converts no single one."""
    dropped = jnp.finfo(jnp.float32).nmant - jnp.finfo(dtype).nmant
    bits = lax.bitcast_convert_type(x, jnp.int32)
    half = (1 << dropped - 1) - 1
    bits = bits + half + (bits >> dropped & 1) & -1 << dropped
    return lax.bitcast_convert_type(bits, jnp.float32)
