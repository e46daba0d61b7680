"""The MLA kernel for few query rows: attention of up to 32 rows of a sequence, by warps that divide latents.

A query row is a head of a query token. Tokens and the dims of latents are the long sides of products: logits `[tokens,
rows] = keys @ query`, output `[dims, rows] += latents @ weights`, as in the decode kernel of keys and values, whose
loop, softmax and epilogue this is. So 16 rows are not padded to the 64 of `wgmma`.

The results of 512 dims do not fit a warp's registers. Two warps, or four for more than 16 rows, form a group, which
takes its own runs of 16 tokens. Each warp has a share of the dims and multiplies its share of keys. The warps exchange
these partial logits through shared memory. Each then computes the same weights and multiplies its share of latents by
them. Each stored element is thus decoded once, by one thread: the operand of keys, transposed in registers, is that of
latents.

Queries are kept in shared memory as operands, for all groups: registers hold the output and a run of tokens' latents.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.kernels import lanes
from kvjax.kernels.aliases import ABSENT, Ref, Registers
from kvjax.kernels.attention.keys import KeyRows
from kvjax.kernels.attention.loop import StageLoop, StageTokens
from kvjax.kernels.attention.problem import DecodeConfig, Problem, Refs
from kvjax.kernels.attention.query import Place, as_operand, loaded_for
from kvjax.kernels.attention.seen import Seen
from kvjax.kernels.attention.segments import Segments
from kvjax.kernels.attention.softmax import LOG2_E, State, capped, exponentials, margin, raised, weight_operands
from kvjax.kernels.attention.stages import TILE
from kvjax.kernels.attention.warp import Warp
from kvjax.kernels.mla.few_rows_stages import (
    STEP,
    WORD,
    LatentDims,
    LatentStages,
    latent_format,
    query_registers,
    query_terms,
    rope_format,
    rope_share,
)
from kvjax.kernels.registers import LANES

CHUNK = 4
"""Registers that a thread loads at once."""


@dataclasses.dataclass(frozen=True)
class LatentSegments(Segments):
    """The epilogue, in which each warp of one group stores its share of dims.

    Attributes:
      dims: those of the output, which are `rows`.
    """

    dims: LatentDims

    def scaled(self, output: Registers) -> Registers:
        """The output times the scale of the layer, and what products lack."""
        fmt = self.dims.format
        factor = self.warp.scale(fmt, self.refs.k_scale, 1) * np.float32(fmt.factor)
        return [x * factor for x in output]

    def store_row(self, ref: Ref, index: jax.Array, row: int, values: list[jax.Array], condition: jax.Array) -> None:
        """Stores the output of a row of the state as row `index` of `ref`, contiguous elements at once."""
        dtype, start = np.dtype(ref.dtype), index * self.problem.spec.part_sizes[0]
        for run in self.dims.runs():
            words = [values[pair] for pair in run]
            dim, exists = self.dims.dim(*divmod(run[0], 2))
            if dtype.itemsize == 2 and len(run) > 1:
                words = [lanes.half2(x, y, dtype) for x, y in zip(words[::2], words[1::2], strict=True)]
            if dtype.itemsize == 2 and len(run) == 1:
                lanes.store_global(ref, start + dim, words[0], condition & exists)
            else:
                lanes.store_global_words(ref, start + dim, words, condition & exists)

    @property
    def stores_sums(self) -> jax.Array:
        """As in `Segments`, but only in the first warp of a group; all have the same sums."""
        return (self.warp.row == 0) & (self.warp.head == 0)


class Factors(NamedTuple):
    """Factors of the sums of products, in units of the binary logarithm: of latents, and of rope keys."""

    latents: jax.Array
    rope: jax.Array


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Shared memory for queries, and for partial logits.

    Attributes:
      ref: uint8.
      warp: the warp.
      shares: warps of a group.
      counts: registers of a warp's query, for latents and for rope keys.
    """

    ref: Ref
    warp: Warp
    shares: int
    counts: tuple[int, int]

    def chunk(self, of_rope: bool, index: int) -> tuple[jax.Array, int]:
        """The byte of a chunk of the query's registers, and a constant to add."""
        chunks = [-(-count // CHUNK) for count in self.counts]
        at = (chunks[0] if of_rope else 0) + index
        return (self.warp.head * sum(chunks) * LANES + self.warp.lane) * (CHUNK * WORD), at * LANES * CHUNK * WORD

    @property
    def start(self) -> int:
        """The byte of the first partial logits."""
        return self.shares * sum(-(-count // CHUNK) for count in self.counts) * LANES * CHUNK * WORD

    def store_query(self, registers: Registers, *, of_rope: bool, condition: jax.Array) -> None:
        """Stores the query operands of a share, where `condition` holds."""
        for index in range(-(-len(registers) // CHUNK)):
            four = registers[CHUNK * index : CHUNK * (index + 1)]
            four += [lanes.splat(0, jnp.uint32)] * (CHUNK - len(four))
            offset, known = self.chunk(of_rope, index)
            lanes.store_shared(self.ref, offset + known, four, CHUNK * WORD, condition)

    def query(self, first: int, count: int, *, of_rope: bool) -> Registers:
        """Registers of the query operands."""
        chunks = range(first // CHUNK, -(-(first + count) // CHUNK))
        registers: Registers = []
        for index in chunks:
            offset, known = self.chunk(of_rope, index)
            registers += lanes.load_shared(self.ref, offset, CHUNK * WORD, known)
        skipped = first - chunks.start * CHUNK
        return registers[skipped : skipped + count]

    def store(self, logits: Registers, parity: jax.Array, warps: int) -> None:
        """Stores the warp's partial logits in one of two places."""
        own = self._of_warp(self.warp.number, parity, warps, len(logits))
        every = self.warp.lane >= 0
        for i in range(0, len(logits), CHUNK):
            lanes.store_shared(self.ref, own + i * LANES * WORD, logits[i : i + CHUNK], CHUNK * WORD, every)

    def sum(self, logits: Registers, parity: jax.Array, warps: int) -> Registers:
        """The sum of the partial logits of a group, with the same bits in all of its warps."""
        sums = self._plus(logits, 1, parity, warps)
        if self.shares == 2:
            return sums
        others = self._plus(self._of_other(2, parity, warps, len(logits)), 3, parity, warps)
        return [x + y for x, y in zip(sums, others, strict=True)]

    def _plus(self, logits: Registers, mask: int, parity: jax.Array, warps: int) -> Registers:
        others = self._of_other(mask, parity, warps, len(logits))
        return [x + y for x, y in zip(logits, others, strict=True)]

    def _of_other(self, mask: int, parity: jax.Array, warps: int, count: int) -> Registers:
        """The partial logits of the warp whose number is this one's xor `mask`."""
        start = self._of_warp(self.warp.number ^ mask, parity, warps, count)
        words: Registers = []
        for i in range(0, count, CHUNK):
            words += lanes.load_shared(self.ref, start, CHUNK * WORD, i * LANES * WORD)
        return [lanes.bits(word, jnp.float32) for word in words]

    def _of_warp(self, number: jax.Array, parity: jax.Array, warps: int, count: int) -> jax.Array:
        place = (number + parity * warps) * (count * LANES * WORD)
        return place + self.warp.lane * (CHUNK * WORD) + self.start


@dataclasses.dataclass(frozen=True)
class FewRows(StageLoop[Factors]):
    """The body of the kernel; one object per trace.

    Attributes:
      stages: the layout of a stage.
      latents: the rows of latents that the warp reads.
      rope: those of rope keys; None for none.
      exchange: shared memory for queries and partial logits.
    """

    stages: LatentStages
    latents: KeyRows
    rope: KeyRows | None
    exchange: Exchange

    @classmethod
    def of(cls, problem: Problem, config: DecodeConfig, refs: Refs, shared: tuple[Ref, Ref, Ref]) -> FewRows:
        """The body, for its shared memory: stages, queries and partial logits, barriers."""
        buffer, others, barriers = shared
        spec, shares = problem.spec, config.heads
        refs = refs._replace(pages=(refs.pages,))
        warp = Warp.of(config)
        warp = dataclasses.replace(warp, kv_head=warp.thread * 0)
        stages = LatentStages.of(problem, shares, config.groups * config.tiles)
        layout = stages.layout
        of_tokens = dataclasses.replace(warp, row=stages.token_row(warp.row))
        fmt = latent_format(spec, converts_e2m1=problem.converts_e2m1)
        latents = KeyRows(fmt, stages.latents, layout, of_tokens, buffer)
        rope = None
        if stages.rope:
            parts = spec.part_sizes[1] // rope_share(spec, shares)
            of_rope = dataclasses.replace(of_tokens, head=warp.head & (parts - 1))
            rope = KeyRows(rope_format(spec), stages.rope, layout, of_rope, buffer)
        ring = cls.ring_of(problem, config, layout, refs, (buffer, barriers), warp)
        dims = LatentDims(warp, spec.part_sizes[0] // shares, fmt, latents.unit)
        counts = query_registers(problem, shares)
        return cls(
            problem, config, refs, warp, ring, LatentSegments(problem, config, refs, warp, dims, buffer, dims),
            Seen(problem, layout, of_tokens, refs, ring.num_blocks), stages, latents, rope,
            Exchange(others, warp, shares, counts),
        )  # fmt: skip

    def query(self, sequence: jax.Array) -> Factors:
        """Stores the query's operands, and returns the factors of logits."""
        problem = self.problem
        rank, rope_size = problem.spec.part_sizes
        if self.config.groups == 1:  # else the epilogue has waited until all have read the previous query
            lanes.wait_for_block()
        own = self.warp.head * (rank // self.config.heads)
        latents = self.store_query(self.latents, self.place(sequence, own, of_rope=False), of_rope=False)
        rope = latents
        if self.rope is not None:
            size = rope_share(problem.spec, self.config.heads)
            place = self.place(sequence, self.rope.warp.head * size, of_rope=True)
            place = place._replace(exists=self.warp.head < rope_size // size)
            rope = self.store_query(self.rope, place, of_rope=True)
        lanes.wait_for_block()
        return Factors(latents, rope)

    def place(self, sequence: jax.Array, first: jax.Array, *, of_rope: bool) -> Place:
        """Where the elements from `first` on are in a part of a sequence's query."""
        (rank, rope), (a_sequence, a_token) = self.problem.spec.part_sizes, self.problem.query_strides
        if self.refs.query_pe is ABSENT:  # the parts of a row lie next to each other
            first = first + rank if of_rope else first
            return Place(self.refs.query, sequence * a_sequence, (a_token, rank + rope), first)
        if of_rope:  # `query_strides` are those of the other array; this one is contiguous
            a_token = self.problem.num_heads * rope
            return Place(self.refs.query_pe, sequence * (self.problem.q_len * a_token), (a_token, rope), first)
        return Place(self.refs.query, sequence * a_sequence, (a_token, rank), first)

    def store_query(self, rows: KeyRows, place: Place, *, of_rope: bool) -> jax.Array:
        """Stores the query's operands for rows, and returns the factor of their products."""
        loaded = loaded_for(rows, self.warp, self.problem, place)
        operand, power = as_operand(rows, loaded, self.problem.query_dtype)
        pairs = range(0, len(loaded[0]) // 2, 2)
        registers = [x for at in pairs for tile in operand for term in tile for x in term[at : at + 2]]
        is_first = self.warp.number < self.config.heads
        self.exchange.store_query(registers, of_rope=of_rope, condition=is_first)
        fmt = rows.format
        factor = self.warp.scale(fmt, self.refs.k_scale, 1) * np.float32(self.problem.sm_scale * LOG2_E * fmt.factor)
        return factor if power is None else factor * power

    def stage(self, slot: jax.Array, tokens: StageTokens, needs_look: jax.Array, query: Factors, state: State) -> State:
        """Attends to the warp's tiles of a stage."""
        for tile in range(self.config.tiles):
            state = self.tile(slot, tile, tokens, needs_look, query, state)
        return state

    def tile(
        self, slot: jax.Array, tile: int, tokens: StageTokens, needs_look: jax.Array, query: Factors, state: State
    ) -> State:
        """Attends to a tile: partial logits, weights, and the share of weighted latents."""
        config, problem, span = self.config, self.problem, tokens.span
        start = tokens.start + TILE * tile
        steps, logits, scales = self.products(slot, tile, query)
        if tile == config.tiles - 1:
            self.ring.release(slot)
        parity = (tokens.number * config.tiles + tile) & 1
        self.exchange.store(logits, parity, config.warps)
        steps = lax.cond(needs_look, lambda steps: self.seen_steps(start, tokens, steps), lambda steps: steps, steps)
        # Transposes some while the warp waits for others, the rest between products, which use another pipe.
        turned = [_turned(step) for step in steps[: len(steps) // 2]]
        lanes.wait_for_warps(self.warp.number // config.heads, config.heads)
        logits = [capped(x, problem.logits_soft_cap) for x in self.exchange.sum(logits, parity, config.warps)]
        logits = lax.cond(
            needs_look, lambda logits: self.seen.logits(start, tokens.entries, span, logits), list, logits
        )
        operand = self.latents.format.operand
        state = raised(state, [logits], margin(operand), has_top=problem.weight_dtype is not None)
        total, output = list(state.total), list(state.output)
        exponents = exponentials(logits, state.largest, total)
        if scales:
            scales = lax.cond(needs_look, lambda scales: self.seen_scales(start, tokens, scales), list, scales)
        runs = [weight_operands(exponents, operand, own) for own in scales] or [weight_operands(exponents, operand, [])]
        for product in range(len(steps)):
            if len(turned) < len(steps):
                turned.append(_turned(steps[len(turned)]))
            for columns, weight in enumerate(runs[product * len(runs) // len(steps)]):
                at = 4 * (columns * len(steps) + product)
                output[at : at + 4] = lanes.mma(output[at : at + 4], turned[product], weight, operand)
        return State(state.largest, total, state.top, output)

    def products(
        self, slot: jax.Array, tile: int, query: Factors
    ) -> tuple[list[Registers], Registers, list[Registers]]:
        """The operands of latents by step of 16 dims, partial logits, and for each run of dims the scales of tokens."""
        layout, rope = self.stages.layout, None
        if self.rope is not None:  # first, so that no warp waits for them when it exchanges logits
            _, [rope] = self.multiplied(self.rope, slot, tile, 1, of_rope=True)
        scales: list[Registers] = []
        if (rows := self.stages.scales) is not None:
            own = dataclasses.replace(self.latents.warp, head=self.warp.head // self.stages.scale_step)
            runs = range(0, rows.page.row_bytes, WORD)
            each = [dataclasses.replace(rows, start=rows.start + run) for run in runs]
            scales = [own.row_scales(layout, self.latents.buffer, slot, tile, one) for one in each]
        steps, sums = self.multiplied(self.latents, slot, tile, max(1, len(scales)), of_rope=False)
        if scales:
            sums = [[x * own[i // 2 % 2] for i, x in enumerate(run)] for run, own in zip(sums, scales, strict=True)]
        logits = [sum(each[1:], each[0]) * query.latents for each in zip(*sums, strict=True)]
        if rope is not None:
            logits = [x + y * query.rope for x, y in zip(logits, rope, strict=True)]
        return steps, logits, scales

    def multiplied(
        self, rows: KeyRows, slot: jax.Array, tile: int, runs: int, *, of_rope: bool
    ) -> tuple[list[Registers], list[Registers]]:
        """The operands of a tile's rows by step, and for each of `runs` of them the products with the query."""
        tiles, operand = self.problem.tiles, rows.format.operand
        terms = query_terms(rows.format, self.problem.query_dtype)
        zero = lanes.splat(0.0, jnp.float32)
        sums = [[[zero] * 4 for _ in range(tiles)] for _ in range(runs)]
        steps: list[Registers] = []
        total = rows.units * rows.unit_elements * 4 // STEP
        for unit in range(rows.units):
            for step in rows.operands(slot, tile, unit)[0]:
                count = 2 * tiles * terms
                query = self.exchange.query(len(steps) * count, count, of_rope=of_rope)
                own = sums[len(steps) * runs // total]
                for i in range(tiles * terms):
                    own[i // terms] = lanes.mma(own[i // terms], step, query[2 * i : 2 * i + 2], operand)
                steps.append(step)
        return steps, [[x for each in run for x in each] for run in sums]

    def seen_steps(self, start: jax.Array, tokens: StageTokens, steps: list[Registers]) -> list[Registers]:
        """Operands, zero for tokens that no row sees: they may be NaN, which a weight of 0 would not mask."""
        zero = lanes.splat(0, jnp.uint32)
        there = self.are_there(start, tokens)
        return [[jnp.where(there[i % 2], x, zero) for i, x in enumerate(step)] for step in steps]

    def seen_scales(self, start: jax.Array, tokens: StageTokens, scales: list[Registers]) -> list[Registers]:
        """Scales of tokens, zero for those that no row sees."""
        zero = lanes.splat(0.0, jnp.float32)
        there = self.are_there(start, tokens)
        return [[jnp.where(each, x, zero) for each, x in zip(there, run, strict=True)] for run in scales]

    def are_there(self, start: jax.Array, tokens: StageTokens) -> list[jax.Array]:
        """Whether a row sees the tokens of the thread's row of each half of a tile."""
        row = self.seen.warp.row
        return [self.seen.is_there(start, tokens.entries, tokens.span, row + 8 * half)[1] for half in range(2)]


def _turned(step: Registers) -> Registers:
    """The operand of a step of keys, 16 tokens by 16 dims, as that of latents, 16 dims by 16 tokens."""
    return [lanes.transpose(step[i]) for i in (0, 2, 1, 3)]
