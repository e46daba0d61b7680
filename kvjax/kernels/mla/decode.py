"""The MLA kernel: attention of 64 query rows of a sequence over its latents.

A query row is a head of a query token. A thread block takes 64 of them, and a share of all tokens, in tiles of 64. Its
two warpgroups copy the next tile while they multiply one. Each multiplies all keys with the queries, for a result of 64
by 512 takes the registers of two warpgroups, while logits that are shared take a barrier and shared memory that queries
and two tiles leave no room for. It weights its half of the latents.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, lanes, warpgroups
from kvjax.kernels.aliases import Carry, Ref, Scalar
from kvjax.kernels.attention.problem import Problem, Refs
from kvjax.kernels.attention.schedule import Sequences, serve_parts, serve_share
from kvjax.kernels.attention.softmax import LOG2_E, LOWEST, capped, margin
from kvjax.kernels.mla.packed import Packed
from kvjax.kernels.mla.problem import MLAConfig
from kvjax.kernels.mla.tiles import ROWS, SLOTS, TOKENS, Source, Tiles
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


@dataclasses.dataclass(frozen=True)
class LatentDecode:
    """The body of the kernel.

    Attributes:
      problem: the call's.
      config: the launch configuration.
      refs: the references. `query` is `[num_seqs * rows, head_size]`, `pages` `[num_pages, page_elements]`, `out` and
        `partial` are `[rows, 2, kv_lora_rank / 2]`, `partial_lse` is `[rows, 2]`; all others are one-dimensional.
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
        if self.config.part is not None:
            serve_parts(self, sequences, self.config.blocks, self.config.part, jnp.int32(0))
        else:
            serve_share(self, sequences, self.config.blocks, jnp.int32(0))

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
        self.copy_query(sequence)
        self.copy_tile(segment, first, self.entries(segment, first))
        ahead = 1
        if self.packed is not None:
            ahead = 2
            end_group()
            pl.when(count > 1)(lambda: self.copy_tile(segment, first + 1, self.entries(segment, first + 1)))
            end_group()
        half = self.tiles.latents.shape[-1]
        largest = compat.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        total = compat.layout_cast(jnp.full((ROWS,), 0, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        acc = compat.layout_cast(jnp.full((ROWS, half), 0, jnp.float32), plgpu.Layout.WGMMA)

        def body(i: jax.Array, carry: Carry) -> Carry:
            entries, state = carry
            self.wait_for_tile(first + i)

            @pl.when(i + ahead < count)
            def copy() -> None:
                self.copy_tile(segment, first + i + ahead, entries)

            if self.packed is not None:
                end_group()
            following = self.entries(segment, first + i + ahead + 1)
            return following, self.attend_to_tile(segment, first + i, state)

        carry = self.entries(segment, first + ahead), (acc, largest, total)
        _, state = lax.fori_loop(0, count, body, carry)
        return state, cursor

    def slot(self, tile: Scalar) -> Scalar:
        """The slot of a tile of 16 bits."""
        return jnp.int32(0) if self.packed is not None else tile & (SLOTS - 1)

    def wait_for_tile(self, tile: Scalar) -> None:
        """Waits until a tile is in its slot, and all warpgroups are done with the tile before."""
        if self.packed is None:
            self.tiles.wait_for_copies()
            return
        if not compat.interpreting():
            lanes.wait_for_own_copies(1)
        self.tiles.wait_for_warpgroups()
        self.packed.decode(tile & (SLOTS - 1))
        self.tiles.wait_for_warpgroups()

    def copy_query(self, sequence: jax.Array) -> None:
        """Starts copies of the query rows."""
        row_bytes = self.refs.query.shape[1] * self.refs.query.dtype.itemsize
        for number, row in enumerate(self.tiles.own_rows()):
            own = self.first_row + row
            index = jnp.minimum(own, self.num_rows - 1) + sequence * self.num_rows
            source = Source(self.refs.query, index, row_bytes, row * 0, own < self.num_rows)
            self.tiles.copy(0, number, source)

    def entries(self, segment: Segment, tile: Scalar, rows: list[jax.Array] | None = None) -> list[jax.Array]:
        """The entries of the block table for rows of a tile, by default those that the thread copies.

        They are -1 for what is no token.
        """
        found = []
        for row in self.tiles.own_rows() if rows is None else rows:
            position = row + tile * TOKENS
            is_token = (position >= segment.start) & (position < segment.end)
            index = segment.table + lax.div(position, jnp.int32(self.problem.spec.block_size))
            found.append(lanes.load_global(self.refs.table, index, is_token, -1))
        return found

    def copy_tile(self, segment: Segment, tile: Scalar, entries: list[jax.Array]) -> None:
        """Starts copies of a tile of tokens."""
        problem = self.problem
        num_blocks, layer = self.pages()
        for number, (row, entry) in enumerate(zip(self.tiles.own_rows(), entries, strict=True)):
            is_token = entry < num_blocks  # as unsigned: negative entries are large
            token = lax.rem(row + tile * TOKENS, jnp.int32(problem.spec.block_size))
            page = jnp.where(is_token, lanes.bits(entry, jnp.int32), 0) * problem.num_layers + layer
            page = jnp.where(is_token, page, 0)
            offset = token * problem.spec.bytes_per_token
            source = Source(self.refs.pages, page, problem.memory[0].page_stride, offset, is_token)
            self.tiles.store_bias(tile, number, is_token)
            if self.packed is None:
                self.tiles.copy(self.slot(tile) + 1, number, source)
            else:
                self.packed.copy(tile & (SLOTS - 1), number, source)

    def scale(self) -> Scalar:
        """The layer's scale, by which logits and results are multiplied; 1 for dtypes without."""
        return self.refs.k_scale[0] if self.problem.spec.dtype.takes_scale else np.float32(1)

    def attend_to_tile(self, segment: Segment, tile: Scalar, state: Carry) -> Carry:
        """One tile: logits, weights, and the weighted latents that are the warpgroup's."""
        acc, largest, total = state
        slot = self.slot(tile)
        # They arrive while products run.
        every = self.entries(segment, tile, self.tiles.rows_by_lane()) if self.tiles.bias is None else []
        problem, shape = self.problem, (ROWS, TOKENS)
        pairs = list(zip(self.tiles.matrices(0), self.tiles.matrices(slot + 1), strict=True))
        scale = np.float32(problem.sm_scale * LOG2_E)
        if problem.spec.dtype.takes_scale == problem.spec.parts[1].takes_scale or self.tiles.rope is None:
            logits = warpgroups.sum_of_products(pairs) * (scale * self.scale())
        else:  # the scale is of latents alone: to what they add up to in registers, rope keys are added
            *latents, rope = pairs
            logits = warpgroups.sum_of_products(latents) * self.scale()
            logits = warpgroups.product(*rope, lambda: None, logits, transposed=True) * scale
        logits = capped(logits, problem.logits_soft_cap, jnp.exp2)
        logits = logits + lax.broadcast_in_dim(self.bias(tile, every), shape, [1])
        if problem.q_len > 1:
            logits = self.masked(segment, tile, logits)
        dtype = self.tiles.latents.dtype
        raised = jnp.maximum(largest, jnp.max(logits, axis=1) + margin(dtype))
        shrink = jnp.exp2(largest - raised)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(raised, shape, [0]))
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        total = total * shrink + jnp.sum(weights, axis=1)
        operand = weights.astype(dtype)
        acc = warpgroups.product(operand, self.tiles.values(slot, lax.axis_index("warpgroup")), lambda: None, acc)
        return acc, raised, total

    def bias(self, tile: Scalar, every: list[jax.Array]) -> jax.Array:
        """0 for the tokens of a tile, -inf for what is no token: the columns of `plgpu.Layout.WGMMA`.

        Where shared memory does not have it, each warp makes it of the table's entries for all rows.
        """
        kept = self.tiles.load_bias(tile)
        if kept is not None:
            return kept
        num_blocks, _ = self.pages()
        low, high = (lanes.of_first_thread(lanes.ballot(entry < num_blocks)) for entry in every)
        row = compat.layout_cast(lax.iota(jnp.int32, TOKENS), plgpu.Layout.WGMMA.reduce(0))
        # Bits 1 and 2 of a thread's rows are its column: once they are shifted out, constants test the others.
        bits = jnp.where(row < LANES, low, high) >> (row & 6)
        is_token = bits >> (row & (LANES - 1 - 6)) & 1
        return jnp.where(is_token == 1, np.float32(0), np.float32(-np.inf))

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
        acc, largest, total = state
        warpgroup = lax.axis_index("warpgroup")
        stop = jnp.minimum(self.num_rows - self.first_row, ROWS)

        def store(ref: Ref, value: jax.Array, index: jax.Array) -> None:
            first = index * self.num_rows + self.first_row
            layout = plgpu.Layout.WGMMA if value.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)
            warpgroups.store_rows(ref, value.astype(ref.dtype), first, jnp.int32(0), stop, layout)

        @pl.when(whole)
        def store_result() -> None:
            weight = jnp.where(total > 0, self.scale() / jnp.where(total > 0, total, 1.0), 0.0)
            store(self.refs.out.at[:, warpgroup], acc * lax.broadcast_in_dim(weight, acc.shape, [0]), sequence)
            lse = (largest + jnp.log2(total)) * np.float32(1 / LOG2_E)
            pl.when(warpgroup == 0)(functools.partial(store, self.refs.lse, lse, sequence))

        @pl.when(~whole)
        def store_part() -> None:
            store(self.refs.partial.at[:, warpgroup], acc * self.scale(), part)

            @pl.when(warpgroup == 0)
            def store_sums() -> None:
                store(self.refs.partial_lse.at[:, 0], largest, part)
                store(self.refs.partial_lse.at[:, 1], total, part)
                if self.problem.sums > 2:
                    # The largest weight is a power of two, which is not rounded.
                    store(self.refs.partial_lse.at[:, 2], largest - margin(self.tiles.latents.dtype), part)

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
