"""The MLA kernel: attention of 64 query rows of a sequence over its latents.

A query row is a head of a query token. A thread block takes 64 of them, and a share of all tokens, in tiles. Results of
64 by 512 take the registers of two warpgroups, each of which multiplies half of the latents of every tile by weights.
Every second tile is a warpgroup's own: the warpgroup brings it to shared memory and computes its logits and weights for
both. While one computes weights or decodes, the other multiplies:

```
warpgroup 0    weighted 1    logits 2       weights 2    weighted 2    bring 4        weighted 3    logits 4 ...
warpgroup 1    weighted 1    bring 3        -            weighted 2    logits 3       weights 3     weighted 3 ...
```
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
from kvjax.kernels.mla.problem import MLAConfig
from kvjax.kernels.mla.tiles import (
    AT_ONCE,
    ROWS,
    TOKENS,
    WARPGROUPS,
    Incoming,
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
      table: the start of the sequence's entries in the block table.
      length: the sequence's tokens, those of the query included.
      start: the first token that a row sees.
      end: the token after the run's last one; later tokens belong to another thread block.
    """

    table: jax.Array
    length: jax.Array
    start: jax.Array
    end: jax.Array


class RowSums(NamedTuple):
    """What rows have seen, float32 `[64]` each, as `attention.softmax.Sums`: `total` and `top` only of own tiles."""

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
      incoming: how tiles come to shared memory.
    """

    problem: Problem
    config: MLAConfig
    refs: Refs
    tiles: Tiles
    incoming: Incoming

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
        most = lax.div(end - 1, jnp.int32(TOKENS)) + 1  # the sequence's tiles; for later ones, products may overflow
        end = jnp.where(first + count < most, (first + count) * TOKENS, end)
        segment = Segment(sequence * problem.table_stride, length, start, end)
        own = lax.axis_index("warpgroup")
        sources = self.sources(first + own, self.entries(segment, first + own))
        self.copy_query(sequence)
        lanes.end_group_of_copies()
        self.incoming.bring(self.incoming.begin(sources), own < count, lambda: None)
        lanes.wait_for_own_copies(self.incoming.groups)
        self.tiles.wait_for_block()
        half = self.tiles.tokens.latents.shape[-1]
        acc = compat.layout_cast(jnp.full((ROWS, half), 0, jnp.float32), plgpu.Layout.WGMMA)
        sums = RowSums(*(_of_rows(x) for x in (LOWEST, 0, LOWEST)))

        def body(i: jax.Array, carry: Carry) -> Carry:
            entries, *state = carry
            tile = WARPGROUPS * i + own
            following = tile + WARPGROUPS
            sources = self.sources(first + following, entries)
            self.incoming.expect(sources)
            state = lax.cond(tile > 0, self.follow, lambda *state: state, *state)
            state = self.lead(segment, first + tile, sources, following < count, *state)
            return self.entries(segment, first + following + WARPGROUPS), *state

        entries = self.entries(segment, first + own + WARPGROUPS)
        turns = lax.div(count - own + 1, jnp.int32(WARPGROUPS))
        _, *state = lax.fori_loop(0, turns, body, (entries, acc, *sums))
        is_last_of_other = (count > 0) & (((count - 1) & 1) != own)
        state = lax.cond(is_last_of_other, self.follow, lambda *state: state, *state)
        return self.joined(*state), cursor

    def copy_query(self, sequence: jax.Array) -> None:
        """Starts copies of the warpgroup's half of the query rows."""
        own, rows = lax.axis_index("warpgroup"), self.tiles.queries
        for i in range(ROWS // AT_ONCE // WARPGROUPS):
            lot = WARPGROUPS * i + own
            row = rows_of_lot(lot)
            mine = self.first_row + row
            index = jnp.minimum(mine, self.num_rows - 1) + sequence * self.num_rows
            refs = self.refs.query, *([] if rows.rope is None else [self.refs.query_pe])
            row_bytes = (ref.shape[1] * ref.dtype.itemsize for ref in refs)
            latents, *rope = (
                Source(ref, index, size, row * 0, mine < self.num_rows)
                for ref, size in zip(refs, row_bytes, strict=True)
            )
            for matrix in range(WARPGROUPS):
                rows.copy_latents(0, matrix, lot, latents)
            for source in rope:
                rows.copy_rope_keys(0, lot, source)

    def entries(self, segment: Segment, tile: Scalar, rows: list[jax.Array] | None = None) -> list[jax.Array]:
        """The entries of the block table for rows of a tile, by default those that the thread brings.

        They are -1 for rows that are not tokens.
        """
        found = []
        for row in map(self.incoming.row, range(self.incoming.lots)) if rows is None else rows:
            position = row + tile * TOKENS
            is_token = (position >= segment.start) & (position < segment.end)
            index = segment.table + lax.div(position, jnp.int32(self.problem.spec.block_size))
            found.append(lanes.load_global(self.refs.table, index, is_token, -1))
        return found

    def sources(self, tile: Scalar, entries: list[jax.Array]) -> list[Source]:
        """The tokens of each lot of rows of a tile."""
        problem = self.problem
        num_blocks, layer = self.pages()
        found = []
        for lot, entry in enumerate(entries):
            is_token = entry < num_blocks  # as unsigned: negative entries are large
            token = lax.rem(self.incoming.row(lot) + tile * TOKENS, jnp.int32(problem.spec.block_size))
            page = jnp.where(is_token, lanes.bits(entry, jnp.int32), 0) * problem.num_layers + layer
            page = jnp.where(is_token, page, 0)
            offset = token * problem.spec.bytes_per_token
            found.append(Source(self.refs.pages, page, problem.memory[0].page_stride, offset, is_token))
        return found

    def scale(self) -> Scalar:
        """The layer's scale, by which logits and results are multiplied; 1 for dtypes without."""
        return self.refs.k_scale[0] if self.problem.spec.dtype.takes_scale else np.float32(1)

    def logits(self, segment: Segment, tile: Scalar) -> jax.Array:
        """The logits of a tile of the warpgroup, binary logarithms: -inf for what rows do not see."""
        own, problem = lax.axis_index("warpgroup"), self.problem
        entries = self.entries(segment, tile, rows_by_lane())  # which arrive while products run
        queries, tokens = self.tiles.queries, self.tiles.tokens

        def columns(matrix: Scalar) -> list[tuple[Ref, Ref]]:
            return list(zip(queries.columns(0, matrix), tokens.columns(own, matrix), strict=True))

        def wait(later: int) -> None:
            lanes.wait_for_own_copies(later)
            self.tiles.wait_for_own()

        def wait_for_others() -> None:
            if self.incoming.groups:
                wait(0)

        wait(1)
        rope = list(zip(queries.rope_keys(0), tokens.rope_keys(own), strict=True))
        scale = np.float32(problem.sm_scale * LOG2_E)
        is_scale_of_all = problem.spec.dtype.takes_scale == problem.spec.parts[1].takes_scale or not rope
        others = columns(1 - own) + (rope if is_scale_of_all else [])
        logits = warpgroups.sum_of_products(columns(own), wait_for_others, others)
        logits *= scale * self.scale() if is_scale_of_all else self.scale()
        if not is_scale_of_all:  # it scales only the latents' sums, in registers; then rope keys' products are added
            [pair] = rope
            logits = warpgroups.product(*pair, lambda: None, logits, transposed=True) * scale
        logits = capped(logits, problem.logits_soft_cap, jnp.exp2)
        logits = self.of_tokens(logits, entries)
        return self.masked(segment, tile, logits) if problem.q_len > 1 else logits

    def lead(
        self, segment: Segment, tile: Scalar, following: list[Source], is_following: jax.Array, *state: jax.Array
    ) -> Carry:
        """Adds a tile of the warpgroup, and brings its next one.

        As in `attention.softmax.raised`, results are rescaled only where a logit exceeds the largest by `HEADROOM`.
        """
        own = lax.axis_index("warpgroup")
        above = margin(self.dtype)
        acc, *sums = state
        largest, total, top = sums
        logits = self.logits(segment, tile)
        highest = jnp.max(logits, axis=1)

        def raise_rows(acc: jax.Array, largest: jax.Array, total: jax.Array) -> Carry:
            near = highest + above if self.problem.weight_dtype is None else reference(highest, above)
            new = jnp.maximum(largest, near)
            shrink = jnp.exp2(largest - new)
            return acc * lax.broadcast_in_dim(shrink, acc.shape, [0]), new, total * shrink

        is_raised = self.tiles.any(highest > largest + np.float32(HEADROOM - above))
        acc, largest, total = lax.cond(is_raised, raise_rows, lambda *x: x, acc, largest, total)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(largest, logits.shape, [0]))
        operand = weights.astype(self.dtype)
        for i, numbers in enumerate((largest, _of_rows(is_raised.astype(jnp.float32)))):
            exchange.store_numbers(self.tiles.numbers.at[own, i], numbers)
        exchange.store_weights(self.tiles.of_weights.at[own], operand)
        self.tiles.announce(own)
        total += jnp.sum(weights, axis=1)
        begun = self.incoming.begin(following)
        acc = warpgroups.product(operand, self.tiles.tokens.latents.at[own, own], lambda: None, acc)
        self.incoming.bring(begun, is_following, lambda: self.tiles.wait_for_release(own))
        return acc, largest, total, jnp.maximum(top, highest)

    def follow(self, acc: jax.Array, largest: jax.Array, total: jax.Array, top: jax.Array) -> Carry:
        """Waits for the weights of the other warpgroup's tile, and adds the weighted latents."""
        own = lax.axis_index("warpgroup")
        other = 1 - own
        self.tiles.wait_for_announcement(other)
        new, is_raised = (exchange.load_numbers(self.tiles.numbers.at[other, i]) for i in range(2))

        def raise_rows(acc: jax.Array, total: jax.Array) -> Carry:
            shrink = jnp.exp2(largest - new)
            return acc * lax.broadcast_in_dim(shrink, acc.shape, [0]), total * shrink

        acc, total = lax.cond(exchange.is_set(is_raised), raise_rows, lambda *x: x, acc, total)
        latents = self.tiles.tokens.latents.at[other, own]
        weights = exchange.load_weights(self.tiles.of_weights.at[other], self.dtype)
        acc = warpgroups.product(weights, latents, lambda: None, acc)
        self.tiles.release(other)
        return acc, new, total, top

    def joined(self, acc: jax.Array, largest: jax.Array, total: jax.Array, top: jax.Array) -> Carry:
        """The sums of both warpgroups' tiles."""
        own, numbers = lax.axis_index("warpgroup"), self.tiles.numbers
        for i, value in enumerate((total, top), 2):
            exchange.store_numbers(numbers.at[own, i], value)
        self.tiles.wait_for_block()
        other_total, other_top = (exchange.load_numbers(numbers.at[1 - own, i]) for i in (2, 3))
        return acc, largest, total + other_total, jnp.maximum(top, other_top)

    @property
    def dtype(self) -> DType:
        """The dtype of latents and weights as operands."""
        return np.dtype(self.tiles.tokens.latents.dtype)

    def of_tokens(self, logits: jax.Array, entries: list[jax.Array]) -> jax.Array:
        """Logits, -inf for rows that are not tokens by the block table's entries; each warp has those of all rows."""
        num_blocks, _ = self.pages()
        low, high = (lanes.of_first_thread(lanes.ballot(entry < num_blocks)) for entry in entries)

        def mask(logits: jax.Array) -> jax.Array:
            row = compat.layout_cast(lax.iota(jnp.int32, TOKENS), plgpu.Layout.WGMMA.reduce(0))
            # Bits 1 and 2 of a thread's rows are its column. Once these are shifted out, constants test the others.
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
            weight = self.weight(RowSums(*sums))
            store(self.refs.out.at[:, warpgroup], acc * lax.broadcast_in_dim(weight, acc.shape, [0]), sequence)
            lse = (largest + jnp.log2(total)) * np.float32(1 / LOG2_E)
            pl.when(warpgroup == 0)(functools.partial(store, self.refs.lse, lse, sequence))

        @pl.when(~whole)
        def store_part() -> None:
            store(self.refs.partial.at[:, warpgroup], acc * self.scale(), part)

            @pl.when(warpgroup == 0)
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


def _of_rows(value: Scalar) -> jax.Array:
    return compat.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _rounded(x: jax.Array, dtype: DType) -> jax.Array:
    """`x` rounded to the precision of a dtype of 16 bits, within its normal range; jax 0.11 cannot convert just one."""
    dropped = jnp.finfo(jnp.float32).nmant - jnp.finfo(dtype).nmant
    bits = lax.bitcast_convert_type(x, jnp.int32)
    half = (1 << dropped - 1) - 1
    bits = bits + half + (bits >> dropped & 1) & -1 << dropped
    return lax.bitcast_convert_type(bits, jnp.float32)
