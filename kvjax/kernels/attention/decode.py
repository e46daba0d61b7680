"""Attention of a few query tokens a sequence over its pages: the kernel.

A block of threads takes all KV heads of a group and a share of all tokens; its warps divide heads and tokens of each
stage among themselves. A warp has one KV head, whose query rows (the heads that share it, of each query token) are the
columns of its products: logits `[tokens, rows] = keys @ query`, output `[dims, rows] += values @ weights`. So a stored
row is decoded once for all query rows, into the operand that is distributed over all threads of the warp, and the few
query rows cost as little as the instruction allows.

The softmax runs in the registers of the logits. Its largest logit is raised only where one is more than `HEADROOM`
above it, for then no weight is past what float16 holds and the output need not be scaled again at every step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.dtypes import KVQuantMode
from kvjax.kernels.attention import formats, lanes
from kvjax.kernels.attention.formats import Format
from kvjax.kernels.attention.schedule import Sequences
from kvjax.kernels.attention.stages import TILE, Ring, SharedRows, StagePlan, divided
from kvjax.kernels.memory import Number, PageMemory
from kvjax.kernels.registers import LANES, THREADS, WARPS
from kvjax.pages import swizzled_position
from kvjax.spec import AttentionSpec

LOG2_E = math.log2(math.e)

HEADROOM = 8.0
"""How far a logit may be above the largest that weights are relative to, in powers of two."""

LOWEST = -1e30
"""Stands for the largest logit of a row that has seen nothing: lower than any, and finite, for differences of it."""

COLUMNS = 8
"""Query rows of one product."""

SHARED_BYTES = 220 * 1024
"""Shared memory that a ring may take."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the kernel is launched.

    Attributes:
      heads: KV heads of a block.
      warps: warps of a block, a multiple of 4.
      tiles: runs of 16 tokens that a warp takes of each stage.
      slots: stages in shared memory.
      blocks: blocks of threads that share the work.
      merge_warps: warps that take the parts of one row by turns when they are merged: 1, or a multiple of 4.
    """

    heads: int
    warps: int
    tiles: int
    slots: int
    blocks: int
    merge_warps: int = 1

    @property
    def groups(self) -> int:
        """Warps that take one head's tokens by turns."""
        return self.warps // self.heads

    @property
    def rows(self) -> int:
        """Token rows of a stage."""
        return TILE * self.tiles * self.groups


class Refs(NamedTuple):
    """What the kernel reads and writes, one-dimensional but for the pages: those of keys and those of values."""

    query: Any = None
    pages: Any = None
    table: Any = None
    seq_lens: Any = None
    layer: Any = None
    k_scale: Any = None
    v_scale: Any = None
    sinks: Any = None
    out: Any = None
    lse: Any = None
    partial: Any = None
    partial_lse: Any = None
    spans: Any = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is the same for every call that a kernel serves; of memory that somebody else owns a launch brings counts.

    Attributes:
      spec: the cache's.
      memory: where the rows of keys and of values lie in its pages.
      query_dtype: float16 or bfloat16.
      q_len: query tokens of a sequence.
      num_heads: query heads.
      num_seqs: sequences.
      max_blocks: entries of the block table for each sequence.
      table_stride: entries from a sequence's first to the next's.
      query_strides: elements from a sequence's first query token to the next's, and from a query token to the next.
      num_blocks: blocks.
      num_layers: pages of a block, one for each layer.
      has_layer: whether a call says which layer.
      sm_scale: factor of the logits.
      window: tokens that a query token sees, or None.
      logits_soft_cap: or None.
      scale_sizes: scales of keys and of values, 1 or one for each KV head.
      one_memory: whether keys and values are one array, so that a copy may bring bytes of both.
      has_sinks: whether heads have sinks.
    """

    spec: AttentionSpec
    memory: tuple[PageMemory, PageMemory]
    query_dtype: Any
    q_len: int
    num_heads: int
    num_seqs: Number
    max_blocks: Number
    table_stride: Number
    query_strides: tuple[Number, Number]
    num_blocks: Number
    num_layers: int
    has_layer: bool
    sm_scale: float
    window: int | None
    logits_soft_cap: float | None
    scale_sizes: tuple[int, int]
    one_memory: bool
    has_sinks: bool

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.q_len * self.num_heads // self.spec.num_kv_heads

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.spec.num_kv_heads

    @property
    def tiles(self) -> int:
        """Products that all query rows of a KV head take."""
        return -(-self.rows // COLUMNS)


class Values(NamedTuple):
    """Values of a tile: of each run of eight 16-bit units of a row a register for tokens 0 to 7 and one for 8 to 15.

    `scales`: NVFP4: their block scales, each two tokens' as a float16 pair.
    """

    words: list[list[jax.Array]]
    scales: list[list[jax.Array]]


class State(NamedTuple):
    """A warp's softmax and output, of the rows `2c` and `2c + 1` of each tile of query rows.

    `largest` and `total` have two registers a tile; `output` has four for each product of 16 dims, as `lanes.mma` has
    them, tile after tile.
    """

    largest: list[jax.Array]
    total: list[jax.Array]
    output: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Decode:
    """The body of the kernel; one object a trace."""

    problem: Problem
    config: DecodeConfig
    plan: StagePlan
    refs: Refs
    buffer: Any
    barriers: Any

    @functools.cached_property
    def format(self) -> Format:
        """How stored bytes become operands."""
        return Format.of(self.problem.spec.dtype)

    @functools.cached_property
    def ring(self) -> Ring:
        """The stages."""
        refs, config, problem = self.refs, self.config, self.problem
        layer, num_blocks = jnp.int32(0), jnp.int32(problem.num_blocks)
        if problem.has_layer:
            layer = refs.layer[0]
            num_blocks = jnp.where((layer >= 0) & (layer < problem.num_layers), num_blocks, 0)
        return Ring(
            self.plan, config.warps, config.slots, self.buffer, self.barriers, refs.pages, refs.table,
            lanes.splat(num_blocks, jnp.uint32), problem.num_layers, layer, lax.axis_index("heads") * config.heads,
            lax.axis_index("warpgroup") * THREADS + self.thread,
        )  # fmt: skip

    @staticmethod
    def registers(problem: Problem) -> int:
        """Registers of a warp's state: largest logits, totals and output."""
        fmt, size = Format.of(problem.spec.dtype), problem.spec.head_size_v
        runs = -(-size * fmt.bits // (16 * 8)) * fmt.elements_a_unit  # of eight dims
        return problem.tiles * (4 + 4 * -(-runs // 2))

    # Which thread this is.

    @functools.cached_property
    def thread(self) -> jax.Array:
        """The thread's number in its warpgroup."""
        return lanes.thread_index()

    @functools.cached_property
    def warp(self) -> jax.Array:
        """The warp's number in the block."""
        return lax.axis_index("warpgroup") * WARPS + (self.thread >> 5)

    @functools.cached_property
    def row(self) -> jax.Array:
        """The thread's row in its warp, `g`."""
        return (self.thread >> 2) & 7

    @functools.cached_property
    def column(self) -> jax.Array:
        """The thread's column in its warp, `c`."""
        return self.thread & 3

    @functools.cached_property
    def head(self) -> jax.Array:
        """The warp's KV head in the block's group."""
        return self.warp % self.config.heads

    @functools.cached_property
    def first_tile(self) -> jax.Array:
        """The stage's first tile that is this warp's; a warp that has none of its own reads another's."""
        config = self.config
        return self.warp % (config.heads * config.groups) // config.heads * config.tiles

    def place(self, slot: jax.Array, rows: SharedRows) -> jax.Array:
        """Where what the warp reads of a stage begins, of one kind of rows."""
        return slot * self.plan.stage_bytes + (self.first_tile * rows.tile_stride + self.head * rows.head_stride)

    @functools.cached_property
    def works(self) -> jax.Array:
        """Whether there is anything for this warp."""
        return self.warp < self.config.heads * self.config.groups

    @functools.cached_property
    def kv_head(self) -> jax.Array:
        """The warp's KV head."""
        return self.head + lax.axis_index("heads") * self.config.heads

    def run(self) -> None:
        """What a block does."""
        # These are traced once, here, and used within loops.
        for register in ("thread", "warp", "row", "column", "head", "first_tile", "works", "kv_head", "ring"):
            getattr(self, register)
        self.ring.begin()
        sequences = Sequences(self.problem, self.config.rows, self.refs.seq_lens)
        share = sequences.share(lax.axis_index("block"), self.config.blocks)

        def body(carry: Any) -> Any:
            sequence, skipped, left, turn = carry
            length = jnp.maximum(self.refs.seq_lens[sequence], 0)
            first, count = sequences.stages(length)
            num_stages = jnp.minimum(count - skipped, left)
            begins, ends = skipped == 0, skipped + num_stages == count
            last_block = lax.div(share.end - left + count - 1, share.size)
            state, turn = self.attend(sequence, length, first + skipped, num_stages, turn)
            self.finish(sequence, state, begins, ends, last_block)
            return sequence + 1, jnp.int32(0), left - num_stages, turn

        turn = jnp.int32(0), jnp.int32(0)
        lax.while_loop(lambda carry: carry[2] > 0, body, (share.sequence, share.skipped, share.num_stages, turn))

    def attend(self, sequence: jax.Array, length: jax.Array, first: jax.Array, count: jax.Array, turn: Any) -> Any:
        """Stages `first` to `first + count` of a sequence.

        `turn` is the slot of the first stage and its parity; returns the state and that of the stage after the last.
        """
        config, ring = self.config, self.ring
        span = self.span(length)
        entries = sequence * self.problem.table_stride
        # Past the end nothing is looked for, nor copied.
        end = jnp.minimum(span.end, (first + count) * config.rows)

        def position(stage: Any) -> jax.Array:
            return (first + stage) * config.rows

        def blocks(stage: Any) -> list[jax.Array]:
            return ring.blocks(entries, position(stage), span.start, end)

        def fill(stage: Any, carry: Any) -> Any:
            (slot, parity), found = carry
            ring.fill(slot, parity, position(stage), found)
            return ring.next(slot, parity), blocks(stage + 1)

        ahead = jnp.minimum(ring.ahead, count)
        filled = lax.fori_loop(0, ahead, fill, (turn, blocks(0)))
        lacks = ring.lacks_blocks(entries, jnp.maximum(span.start, position(0)), end)
        query, factor = self.query(sequence)

        def body(i: jax.Array, carry: Any) -> Any:
            ((next_slot, next_parity), found), (slot, parity), state = carry

            @pl.when(i + ahead < count)
            def _() -> None:
                ring.fill(next_slot, next_parity, position(i + ahead), found)

            filled = ring.next(next_slot, next_parity), blocks(i + ahead + 1)
            start = position(i) + self.first_tile * TILE
            is_plain = (start >= span.sees_all_from) & (start + TILE * config.tiles <= span.sees_all_to)
            needs_look = lanes.any_in_warp(~is_plain) | lacks
            ring.wait(slot, parity)
            state = self.stage(slot, start, entries, span, needs_look, query, factor, state)
            ring.release(slot)
            return filled, ring.next(slot, parity), state

        _, turn, state = lax.fori_loop(0, count, body, (filled, turn, self.initial_state()))
        return state, turn

    # The query.

    @functools.cached_property
    def key_unit(self) -> int:
        """Bytes of a key row that a thread takes at once."""
        rows = self.plan.keys[0]
        share = rows.page.row_bytes // 4
        return min(16, share & -share, rows.alignment)

    @functools.cached_property
    def key_units(self) -> int:
        """Units of a key row that a thread takes."""
        return self.plan.keys[0].page.row_bytes // 4 // self.key_unit

    def query(self, sequence: jax.Array) -> tuple[list[list[list[jax.Array]]], jax.Array]:
        """The query as the other operand of the keys, and what logits have to be multiplied by, in powers of two.

        Returns registers by tile, by term and by pair of dims; the sum of the terms is the query.
        """
        problem = self.problem
        head_size, group = problem.spec.head_size, problem.group
        unit_elements = self.key_unit * 8 // self.format.bits
        dims = [
            (4 * unit * unit_elements + low, 4 * unit * unit_elements + high)
            for unit in range(self.key_units)
            for low, high in self.format.key_dims(self.key_unit)
        ]
        loaded: list[list[jax.Array]] = []
        for tile in range(problem.tiles):
            row = self.row + tile * COLUMNS
            token, head = row // group, row % group
            a_sequence, a_token = problem.query_strides
            index = sequence * a_sequence + token * a_token + (self.kv_head * group + head) * head_size
            index = index + self.column * unit_elements
            is_row = row < problem.rows
            loaded.append([lanes.load_global(self.refs.query, index + dim, is_row) for pair in dims for dim in pair])
        factors = self.format.key_factors(self.key_unit) * self.key_units
        k_scale = self.scale(self.refs.k_scale, problem.scale_sizes[0])
        factor = k_scale * np.float32(problem.sm_scale * LOG2_E * self.format.factor)
        operand, dtype = np.dtype(self.format.operand), np.dtype(problem.query_dtype)
        if operand == dtype and not self.format.has_block_scales:
            words = [[lanes.permute(x, y, 0x5410) for x, y in zip(xs[::2], xs[1::2], strict=True)] for xs in loaded]
            return [[tile] for tile in words], factor
        values = [[_to_float(x, dtype) for x in xs] for xs in loaded]
        if operand == np.float16:  # bfloat16 reaches further: a power of two brings the largest to 2**14 or more
            largest = functools.reduce(jnp.maximum, (jnp.abs(x) for xs in values for x in xs))
            for mask in (1, 2, 4, 8, 16):
                largest = jnp.maximum(largest, lanes.shuffle_xor(largest, mask))
            exponent = lanes.bits(largest, jnp.uint32) >> 23
            exponent = jnp.minimum(jnp.maximum(exponent, jnp.uint32(30)), jnp.uint32(253))
            power = lanes.bits((jnp.uint32(254 + 14) - exponent) << 23, jnp.float32)
            factor = factor * lanes.bits((exponent - jnp.uint32(14)) << 23, jnp.float32)
            values = [[x * (power * np.float32(factors[i // 2])) for i, x in enumerate(xs)] for xs in values]
            return [[_pairs(xs, operand)] for xs in values], factor
        # float16 has three bits more than bfloat16: a second term brings them.
        tiles = []
        for xs in values:
            high = _pairs(xs, operand)
            rest = [
                x - _to_float(high[i // 2] >> 16 if i % 2 else high[i // 2] & 0xFFFF, operand) for i, x in enumerate(xs)
            ]
            tiles.append([high, _pairs(rest, operand)])
        return tiles, factor

    def scale(self, ref: Any, size: int) -> jax.Array:
        """A decode scale of the warp's head, float32; 1 where the layer is not quantized and so has none."""
        if self.problem.spec.quant_mode is KVQuantMode.NONE:
            return lanes.splat(1.0, jnp.float32)
        return lanes.bits(lanes.load_global(ref, self.kv_head if size > 1 else self.thread * 0), jnp.float32)

    # The sequence.

    def span(self, length: jax.Array) -> Span:
        """Which positions of a sequence are seen."""
        problem = self.problem
        q_len, window = problem.q_len, problem.window
        start = jnp.int32(0) if window is None else jnp.maximum(length - (q_len - 1 + window), 0)
        all_from = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
        end = jnp.minimum(length, problem.max_blocks * problem.spec.block_size)
        return Span(length, start, end, all_from, jnp.minimum(length - (q_len - 1), end))

    # A stage.

    def initial_state(self) -> State:
        """The state of rows that have seen nothing."""
        zero = lanes.splat(0.0, jnp.float32)
        tiles = self.problem.tiles
        return State(
            [lanes.splat(LOWEST, jnp.float32)] * 2 * tiles,
            [zero] * 2 * tiles,
            [zero] * 4 * tiles * self.value_products,
        )

    def stage(
        self,
        slot: jax.Array,
        start: jax.Array,
        entries: jax.Array,
        span: Span,
        needs_look: jax.Array,
        query: list[list[list[jax.Array]]],
        factor: jax.Array,
        state: State,
    ) -> State:
        """One stage, whose first token is at `start`: all tiles of the warp's tokens."""
        problem, config = self.problem, self.config
        logits = [self.logits(slot, tile, query) for tile in range(config.tiles)]
        logits = [[self.capped(x * factor) for x in registers] for registers in logits]
        values = self.values(slot, 0)  # before they are needed

        def masked(logits: Any) -> Any:
            return [self.masked(start + TILE * tile, entries, span, each) for tile, each in enumerate(logits)]

        logits = lax.cond(needs_look, masked, list, logits)
        # Column `j` of a tile of query rows has registers j and j + 2 of the tile's four.
        state = self.raised(state, logits)
        total, output = list(state.total), list(state.output)
        for tile, registers in enumerate(logits):
            if tile:
                values = self.values(slot, tile)
            seen_values = functools.partial(self.seen_values, start + TILE * tile, entries, span)
            values = lax.cond(needs_look, seen_values, lambda values: values, values)
            weights: list[list[jax.Array]] = []
            for rows in range(problem.tiles):
                four = registers[4 * rows : 4 * rows + 4]
                four = [lanes.exp2(x - state.largest[2 * rows + i % 2]) for i, x in enumerate(four)]
                for i in range(2):
                    total[2 * rows + i] = total[2 * rows + i] + (four[i] + four[i + 2])
                operand = self.format.operand
                halves = lanes.half2(four[0], four[1], operand), lanes.half2(four[2], four[3], operand)
                weights.append([lanes.transpose(half) for half in halves])
            self.accumulate(values, weights, output)
        return State(state.largest, total, output)

    def capped(self, x: jax.Array) -> jax.Array:
        """`cap * tanh(x / cap)` where there is a cap; logits are in powers of two, as the cap then is."""
        cap = self.problem.logits_soft_cap
        if cap is None:
            return x
        # tanh(y) = 1 - 2 / (e**(2 y) + 1), with y = x / (cap * log2(e)) and so e**(2 y) = 2 ** (2 x / cap).
        power = lanes.exp2(x * np.float32(2.0 / cap))
        return np.float32(cap * LOG2_E) * (1.0 - 2.0 / (power + 1.0))

    def raised(self, state: State, logits: list[list[jax.Array]]) -> State:
        """The state with its largest logits raised where one is too far above them."""
        tiles = self.problem.tiles
        tops = [
            functools.reduce(jnp.maximum, [xs[4 * (i // 2) + i % 2 + j] for xs in logits for j in (0, 2)])
            for i in range(2 * tiles)
        ]
        too_far = functools.reduce(
            jnp.logical_or, [top > large + HEADROOM for top, large in zip(tops, state.largest, strict=True)]
        )

        def raise_all(*flat: jax.Array) -> list[jax.Array]:
            largest, total = list(flat[: 2 * tiles]), list(flat[2 * tiles : 4 * tiles])
            output = list(flat[4 * tiles :])
            products = self.value_products
            for i in range(2 * tiles):
                new = jnp.maximum(largest[i], lanes.max_over_rows(tops[i]))
                shrink = lanes.exp2(largest[i] - new)
                largest[i], total[i] = new, total[i] * shrink
                for product in range(products):
                    start = 4 * (i // 2 * products + product)
                    for j in (i % 2, i % 2 + 2):
                        output[start + j] = output[start + j] * shrink
            return [*largest, *total, *output]

        flat = [*state.largest, *state.total, *state.output]
        flat = lax.cond(lanes.any_in_warp(too_far), raise_all, lambda *xs: list(xs), *flat)
        return State(flat[: 2 * tiles], flat[2 * tiles : 4 * tiles], flat[4 * tiles :])

    # Keys.

    def logits(self, slot: jax.Array, tile: int, query: list[list[list[jax.Array]]]) -> list[jax.Array]:
        """Four registers for each tile of query rows."""
        problem = self.problem
        data, unit = self.plan.keys[0], self.key_unit
        start = self.place(slot, data) + data.offset(self.row) + self.column * unit
        zero = lanes.splat(0.0, jnp.float32)
        sums = [[zero] * 4 for _ in range(problem.tiles)]
        for i in range(self.key_units):
            pairs = []
            scales = self.key_scales(slot, tile, i) if self.format.has_block_scales else [[], []]
            for half in range(2):
                step = tile * data.tile_stride + half * data.half_pitch
                words = lanes.load_shared(self.buffer, start, unit, step + 4 * i * unit)
                pairs.append(self.format.key_pairs(words, unit, scales[half]))
            upper, lower = pairs
            for step in range(0, len(upper), 2):
                operand = [upper[step], lower[step], upper[step + 1], lower[step + 1]]
                at = i * len(upper) + step
                for rows_tile, terms in enumerate(query):
                    for term in terms:
                        sums[rows_tile] = lanes.mma(sums[rows_tile], operand, term[at : at + 2], self.format.operand)
        return [x for each in sums for x in each]

    def key_scales(self, slot: jax.Array, tile: int, unit: int) -> list[list[jax.Array]]:
        """The block scales of a unit of two key rows, each in both halves of a pair."""
        rows, size = self.plan.keys[1], self.key_unit
        steps = [tile * rows.tile_stride + half * rows.half_pitch for half in range(2)]
        base = self.place(slot, rows)
        if size == 16:  # two blocks
            start = base + rows.offset(self.row) + 2 * self.column
            pairs = [lanes.load_shared(self.buffer, start, 2, step + 8 * unit)[0] for step in steps]
            pairs = [formats.scale_pairs(pair)[0] for pair in pairs]
            return [[lanes.both_halves(pair, half) for half in range(2)] for pair in pairs]
        start = base + rows.offset(self.row) + ((4 * unit + self.column) * size) // 8
        found = [lanes.load_shared(self.buffer, start, 1, step)[0] for step in steps]
        return [[formats.scale_pairs(byte | byte << 8)[0]] for byte in found]

    # What is not seen.

    def is_there(self, start: jax.Array, entries: jax.Array, span: Span, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The position of a row of the tile that begins at `start`, and whether any query row sees it."""
        position = start + row
        seen = (position >= span.start) & (position < span.end)
        entry = entries + divided(position, self.plan.block_size)
        block = lanes.load_global(self.refs.table, entry, seen, -1)
        return position, block < self.ring.num_blocks

    def masked(self, start: jax.Array, entries: jax.Array, span: Span, logits: list[jax.Array]) -> list[jax.Array]:
        """Logits of a tile with -inf where a query row does not see a token."""
        problem = self.problem
        none = lanes.splat(-jnp.inf, jnp.float32)
        logits = list(logits)
        for half in range(2):
            position, is_there = self.is_there(start, entries, span, self.plan.token(self.row, half))
            for columns in range(problem.tiles):
                for i in range(2):
                    query_row = columns * COLUMNS + 2 * self.column + i
                    end = span.length - (problem.q_len - 1) + query_row // problem.group
                    seen = is_there & (position < end)
                    if problem.window is not None:
                        seen &= position >= end - problem.window
                    at = 4 * columns + 2 * half + i
                    logits[at] = jnp.where(seen, logits[at], none)
        return logits

    def seen_values(self, start: jax.Array, entries: jax.Array, span: Span, values: Values) -> Values:
        """Values of a tile with zeros where no query row sees a token.

        They may be NaN there, which a weight of 0 does not remove. Of NVFP4 block scales are cleared: a code is always
        finite.
        """
        zero = lanes.splat(0, jnp.uint32)
        masks = []
        for half in range(2):
            mask = zero
            for i in range(2):
                _, seen = self.is_there(start, entries, span, self.plan.token(2 * self.column + i, half))
                mask = mask | jnp.where(seen, lanes.splat(0xFFFF << 16 * i, jnp.uint32), zero)
            masks.append(mask)

        def kept(rows: list[list[jax.Array]]) -> list[list[jax.Array]]:
            return [[x & mask for x, mask in zip(both, masks, strict=True)] for both in rows]

        words, scales = values
        return Values(words, kept(scales)) if self.format.has_block_scales else Values(kept(words), scales)

    # Values.

    @functools.cached_property
    def value_units(self) -> int:
        """Units of 16 bits of a value row."""
        return self.plan.values[0].page.row_bytes // 2

    @functools.cached_property
    def value_tiles(self) -> int:
        """Runs of eight units of a value row."""
        return -(-self.value_units // 8)

    @functools.cached_property
    def value_products(self) -> int:
        """Products of 16 dims that a value row takes."""
        return -(-self.value_tiles * self.format.elements_a_unit // 2)

    def value_dim(self, product: int, half: int) -> tuple[jax.Array, jax.Array]:
        """Which dim row `8 * half + g` of a product is, and whether there is such a dim."""
        each = self.format.elements_a_unit
        tile, element = divmod(2 * product + half, each)
        unit = 8 * tile + self.row
        return unit * each + element, unit < self.value_units

    def values(self, slot: jax.Array, tile: int) -> Values:
        """A tile's values as they are stored."""
        words = self.value_words(slot, tile)
        return Values(words, self.value_scales(slot, tile) if self.format.has_block_scales else [])

    def accumulate(self, values: Values, weights: list[list[jax.Array]], output: list[jax.Array]) -> None:
        """Adds a tile's values, weighted, to `output`."""
        zero = lanes.splat(0, jnp.uint32)
        rows: list[list[jax.Array]] = []  # by run of eight dims: tokens 0 to 7, tokens 8 to 15
        products, done = self.value_products, 0
        for index, words in enumerate(values.words):
            pairs = [
                self.format.value_pairs(word, values.scales[index][half] if values.scales else None)
                for half, word in enumerate(words)
            ]
            rows += [list(both) for both in zip(*pairs, strict=True)]
            if index == self.value_tiles - 1 and len(rows) % 2:
                rows.append([zero, zero])
            while len(rows) >= 2:
                (first, first_later), (second, second_later), *rows = rows
                operand = [first, second, first_later, second_later]
                for columns, weight in enumerate(weights):
                    at = 4 * (columns * products + done)
                    output[at : at + 4] = lanes.mma(output[at : at + 4], operand, weight, self.format.operand)
                done += 1

    def value_words(self, slot: jax.Array, tile: int) -> list[list[jax.Array]]:
        """Of each run of eight units two registers, of tokens 0 to 7 and of 8 to 15."""
        result = []
        rows = self.plan.values[0]
        base, known = self.place(slot, rows), tile * rows.tile_stride
        if rows.alignment % 16 == 0 and rows.page.row_bytes % 16 == 0:
            lane = self.thread & (LANES - 1)
            start = base + rows.offset(lane & 7, (lane >> 3) & 1) + (lane >> 4) * 16
            for index in range(0, self.value_tiles, 2):
                count = min(2, self.value_tiles - index)
                words = lanes.load_transposed(self.buffer, start, 2 * count, known + 16 * index)
                result += [words[2 * i : 2 * i + 2] for i in range(count)]
            return result
        start = base + rows.offset(2 * self.column)
        zero = lanes.splat(0, jnp.uint32)
        for index in range(self.value_tiles):
            unit = jnp.minimum(8 * index + self.row, self.value_units - 1)
            is_unit = 8 * index + self.row < self.value_units
            four = [
                lanes.load_shared(self.buffer, start + 2 * unit, 2, known + i * rows.pitch + half * rows.half_pitch)[0]
                for half in range(2)
                for i in range(2)
            ]
            words = [lanes.permute(four[2 * i], four[2 * i + 1], 0x5410) for i in range(2)]
            result.append([jnp.where(is_unit, word, zero) for word in words])
        return result

    def value_scales(self, slot: jax.Array, tile: int) -> list[list[jax.Array]]:
        """By run of eight units, of tokens 0 to 7 and of 8 to 15: the block scales of two tokens as a pair.

        A run has two blocks: that of the first four units and that of the others.
        """
        rows = self.plan.values[1]
        base, known, count = self.place(slot, rows), tile * rows.tile_stride, rows.page.row_bytes
        half_of_run = self.row >> 2
        scales: list[list[jax.Array]] = []
        if rows.page.swizzled:  # the scales of four tokens lie side by side
            return [
                self.swizzled_scales(base, known, rows, 2 * index + half_of_run) for index in range(self.value_tiles)
            ]
        start = base + rows.offset(2 * self.column)
        steps = [known + i * rows.pitch + half * rows.half_pitch for half in range(2) for i in range(2)]
        size = math.gcd(count, rows.alignment, 8)
        if size < 4:
            for index in range(self.value_tiles):
                block = jnp.minimum(2 * index + half_of_run, count - 1)
                four = [lanes.load_shared(self.buffer, start + block, 1, step)[0] for step in steps]
                scales.append([formats.scale_pairs(four[2 * i] | four[2 * i + 1] << 8)[0] for i in range(2)])
            return scales
        selector = jnp.where(half_of_run == 0, jnp.uint32(0x6240), jnp.uint32(0x7351))
        for first in range(0, count, size):
            loaded = [lanes.load_shared(self.buffer, start, size, step + first) for step in steps]
            for word in range(size // 4):
                halves = [
                    formats.scale_pairs(lanes.permute(loaded[2 * i][word], loaded[2 * i + 1][word], selector))
                    for i in range(2)
                ]
                scales += [[halves[0][j], halves[1][j]] for j in range(2)]
        return scales

    def swizzled_scales(self, base: jax.Array, known: int, rows: SharedRows, block: jax.Array) -> list[jax.Array]:
        """The scales of a block, of tokens of the first and of the other half."""
        count = rows.page.row_bytes
        block = jnp.minimum(block, count - 1)

        def load(token: jax.Array, size: int) -> jax.Array:
            tile_row, column = swizzled_position(token, block, count)
            row, half = (tile_row // 2, tile_row % 2) if self.plan.interleaved else (tile_row % 8, tile_row // 8)
            return lanes.load_shared(self.buffer, base + rows.offset(row, half) + column, size, known)[0]

        if self.plan.interleaved:  # columns have four tokens of a group
            four = load(4 * self.column, 4)
            return [formats.scale_pairs(lanes.permute(four, four, selector))[0] for selector in (0x0020, 0x0031)]
        return [formats.scale_pairs(load(2 * self.column + 8 * half, 2))[0] for half in range(2)]

    # The end of a segment.

    def finish(
        self,
        sequence: jax.Array,
        state: State,
        begins: jax.Array,
        ends: jax.Array,
        last_block: jax.Array,
    ) -> None:
        """Joins what warps of a head have, and stores it: the result, or a part of it for `merge`."""
        problem, config = self.problem, self.config
        total = [lanes.sum_over_rows(x) for x in state.total]
        registers = [*state.largest, *total, *state.output]
        if config.groups > 1:
            registers = self.joined(registers)
        rows = 2 * problem.tiles
        largest, total, output = registers[:rows], registers[rows : 2 * rows], registers[2 * rows :]
        stores = self.works & (self.warp < config.heads)
        whole = begins & ends
        v_factor = self.scale(self.refs.v_scale, problem.scale_sizes[1]) * np.float32(self.format.factor)
        output = [x * v_factor for x in output]

        @pl.when(whole)
        def _() -> None:
            self.store_result(sequence, largest, total, output, stores)

        @pl.when(~whole)
        def _() -> None:
            part = lax.axis_index("block") * 2 + jnp.where(begins, 1, 0)
            self.store_part(part, largest, total, output, stores)

        @pl.when(begins)
        def _() -> None:
            is_one = (self.thread == 0) & (lax.axis_index("warpgroup") == 0) & (lax.axis_index("heads") == 0)
            for i, value in enumerate((lax.axis_index("block"), last_block)):
                index = self.thread * 0 + (2 * sequence + i)
                lanes.store_global(self.refs.spans, index, lanes.splat(value, jnp.int32), is_one)

    def joined(self, registers: list[jax.Array]) -> list[jax.Array]:
        """The state of all warps of a head, in the first of them."""
        problem, config = self.problem, self.config
        lane = self.thread & (LANES - 1)
        count, rows = len(registers), 2 * problem.tiles

        def place(warp: Any, register: int) -> jax.Array:
            return (((warp - config.heads) * count + register) * LANES + lane) * 4

        lanes.wait_for_block()  # all stages have been read
        others = self.works & (self.warp >= config.heads)
        for i, x in enumerate(registers):
            lanes.store_shared(self.buffer, place(self.warp, i), [x], 4, others)
        lanes.wait_for_block()

        def body(group: jax.Array, mine: list[jax.Array]) -> list[jax.Array]:
            warp = self.head + group * config.heads
            other = [
                lanes.bits(lanes.load_shared(self.buffer, place(warp, i), 4)[0], jnp.float32) for i in range(count)
            ]
            result = list(mine)
            for row in range(rows):
                largest = jnp.maximum(mine[row], other[row])
                shrink, shrink_other = lanes.exp2(mine[row] - largest), lanes.exp2(other[row] - largest)
                result[row] = largest
                for i in [rows + row, *self.registers_of_row(row)]:
                    result[i] = mine[i] * shrink + other[i] * shrink_other
            return result

        registers = lax.fori_loop(1, config.groups, body, registers)
        lanes.wait_before_copies()
        return list(registers)

    def registers_of_row(self, row: int) -> list[int]:
        """Which of a state's registers are output of one of its two rows a tile."""
        start = 4 * self.problem.tiles
        tile, i = divmod(row, 2)
        products = self.value_products
        return [start + 4 * (tile * products + product) + j for product in range(products) for j in (i, i + 2)]

    def _rows(self) -> Any:
        """Of each row of the state: its number, the query row, whether there is one, and its query head and token."""
        problem = self.problem
        for row in range(2 * problem.tiles):
            query_row = row // 2 * COLUMNS + 2 * self.column + row % 2
            token, head = query_row // problem.group, self.kv_head * problem.group + query_row % problem.group
            yield row, query_row < problem.rows, token, head

    def store_result(
        self,
        sequence: jax.Array,
        largest: list[jax.Array],
        total: list[jax.Array],
        output: list[jax.Array],
        stores: jax.Array,
    ) -> None:
        """Stores the output and log-sum-exp of a sequence."""
        problem = self.problem
        size = problem.spec.head_size_v
        start = 4 * problem.tiles
        for row, is_row, token, head in self._rows():
            index = (sequence * problem.q_len + token) * problem.num_heads + head
            inverse, lse = self.normalized(largest[row], total[row], head, is_row)
            here = stores & is_row
            lanes.store_global(self.refs.lse, index, lse, here & (self.row == 0))
            for i in self.registers_of_row(row):
                product, j = divmod((i - start) % (4 * self.value_products), 4)
                dim, is_dim = self.value_dim(product, j // 2)
                lanes.store_global(self.refs.out, index * size + dim, output[i - start] * inverse, here & is_dim)

    def normalized(
        self, largest: jax.Array, total: jax.Array, head: jax.Array, is_row: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What the output of a row has to be multiplied by, and its log-sum-exp."""
        return normalized(largest, total, sink(self.problem, self.refs, head, is_row))

    def store_part(
        self,
        part: jax.Array,
        largest: list[jax.Array],
        total: list[jax.Array],
        output: list[jax.Array],
        stores: jax.Array,
    ) -> None:
        """Stores a part of a sequence: the output before it is normalized, the largest logit and the total."""
        problem = self.problem
        size, start = problem.spec.head_size_v, 4 * problem.tiles
        for row, is_row, token, head in self._rows():
            index = (part * problem.q_len + token) * problem.num_heads + head
            here = stores & is_row
            for i, x in enumerate((largest[row], total[row])):
                lanes.store_global(self.refs.partial_lse, index * 2 + i, x, here & (self.row == 0))
            for i in self.registers_of_row(row):
                product, j = divmod((i - start) % (4 * self.value_products), 4)
                dim, is_dim = self.value_dim(product, j // 2)
                lanes.store_global(self.refs.partial, index * size + dim, output[i - start], here & is_dim)


class Span(NamedTuple):
    """Which positions of a sequence are seen.

    Attributes:
      length: the sequence's: its query tokens stand at the last positions before it.
      start: the first that any query row sees.
      end: from there on nothing is stored.
      sees_all_from: from there on all query rows see what any sees ...
      sees_all_to: ... up to there.
    """

    length: jax.Array
    start: jax.Array
    end: jax.Array
    sees_all_from: jax.Array
    sees_all_to: jax.Array


def sink(problem: Problem, refs: Refs, head: jax.Array, is_row: jax.Array) -> jax.Array:
    """The sinks of rows of these heads, -inf where there are none."""
    if not problem.has_sinks:
        return lanes.splat(-jnp.inf, jnp.float32)
    return lanes.bits(lanes.load_global(refs.sinks, head, is_row), jnp.float32)


def normalized(largest: jax.Array, total: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a row's output has to be multiplied by, and its log-sum-exp, of its largest logit and total.

    Logits are in powers of two, but for the sink; the log-sum-exp is natural. A row that has seen nothing is 0 and has
    the sink's logit, -inf without one.
    """
    sink = sink * np.float32(LOG2_E)
    raised = jnp.maximum(largest, sink)
    shrink = lanes.exp2(largest - raised)
    whole = total * shrink + lanes.exp2(sink - raised)
    zero = lanes.splat(0.0, jnp.float32)
    inverse = shrink / jnp.where(whole == 0.0, zero + 1.0, whole)
    return jnp.where(total == 0.0, zero, inverse), (raised + _log2(whole)) * np.float32(1 / LOG2_E)


def _log2(x: jax.Array) -> jax.Array:
    return lanes.asm("lg2.approx.ftz.f32 $0, $1;", lambda x: [jnp.log2(x)], x, results=[jnp.float32])[0]


def _to_float(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """A 16-bit element in the lower half of a register in float32."""
    if dtype == jnp.bfloat16:
        return lanes.bits(x << 16, jnp.float32)

    def model(x: jax.Array) -> list[jax.Array]:
        return [lax.bitcast_convert_type(x.astype(jnp.uint16), jnp.float16).astype(jnp.float32)]

    code = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    return lanes.asm(code, model, x, results=[jnp.float32])[0]


def _pairs(values: Sequence[jax.Array], dtype: Any) -> list[jax.Array]:
    return [lanes.half2(x, y, dtype) for x, y in zip(values[::2], values[1::2], strict=True)]
