"""The write kernel: rows of keys and values, encoded and put into their pages.

A program takes `tokens` neighbouring tokens. It loads their slots and all of their rows before it needs any of them,
encodes, and stores each token's rows into its page, or none where the slot says so. Unquantized and fp8 rows stay in
registers from load to store, since encoding leaves every element where it is. Where pages hold scales, what shares one
is spread over more threads than its bytes are, so the program encodes all of its tokens together and lays the bytes out
in shared memory, where storing takes them from; of few such tokens a program takes keys or values alone.

`write` is for JAX's arrays. `any_count` is the same kernel for memory that somebody else owns: how many tokens and
blocks there are and where each array begins are numbers that a launch brings along, so that one kernel serves them all.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.dtypes import NVFP4_BLOCK_SIZE, KVCacheDType, KVQuantMode
from kvjax.kernels import arithmetic, compat
from kvjax.kernels.memory import (
    MOST,
    AnyCount,
    Argument,
    Number,
    PageMemory,
    Pages,
    RowMemory,
    Rows,
    scale_arguments,
    scales_of,
)
from kvjax.kernels.registers import MAX_VECTOR_BYTES, THREADS, lane_layout
from kvjax.kernels.rotation import Rotation, store_heads
from kvjax.pages import PageRegion, swizzled_position
from kvjax.spec import AttentionSpec

WORDS = NVFP4_BLOCK_SIZE // 2
"""Bytes of one block's codes, and pairs of elements that they encode."""

PROGRAMS = 264
"""What a launch has at least, if it has tokens enough: two for each multiprocessor of an H200."""

ELEMENTS = {KVQuantMode.NONE: 1024, KVQuantMode.FP8_PER_TENSOR: 2048, KVQuantMode.NVFP4: 3072}
ELEMENTS |= dict.fromkeys((KVQuantMode.FP8_PER_TOKEN_HEAD, KVQuantMode.INT8_PER_TOKEN_HEAD), 2048)
"""Keys or values that a program takes at most; of NVFP4 that is 2,048 where a token's are a power of two, and more for
head sizes such as 96. Measured on an H200 (docs/notes/kernels.md): smaller programs leave threads idle or, where
elements are encoded, compute again what a larger one shares; larger ones take registers from others beside them. With a
scale for each token and head, not measured: as fp8."""

SEARCHED = 16 * PROGRAMS
"""A write of fewer tokens finds out by itself which tokens are not the last of their slots: every program reads all
slots that come after its own. At 4,096 tokens that took 1.4 to 4.5 us; slots of more tokens are for the caller to make
unique."""

RUNGS = (1, 2, 4, 16, 64)
"""Tokens a program that a kernel for any number of tokens chooses from, and the most that there is use for."""

ROTATED = 4
"""Tokens a program at most of a kernel for any number of tokens that rotates: code for all of their heads is in it."""

SEARCH_LOADS = 4
"""Slots that a thread loads before it compares any: the slots of a decode step are loaded at once."""


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """How the write is launched.

    Attributes:
      tokens: tokens a program takes.
      halves_apart: whether one program takes their keys and another their values.
    """

    tokens: int
    halves_apart: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"{self.tokens=} must be positive")

    @classmethod
    def ladder(cls, spec: AttentionSpec) -> dict[int, WriteConfig]:
        """What writes are launched as, from so many tokens on: with more work a program, but `PROGRAMS` programs first.

        See `ELEMENTS` for how much work. Of few tokens programs that encode scales take keys or values, for a warp
        encodes one after the other, and nothing hides that.
        """
        most = ELEMENTS[spec.quant_mode] // (spec.num_kv_heads * max(spec.head_size, spec.head_size_v))
        few = cls(1, halves_apart=spec.stores_scales)
        more = [cls(1 << i) for i in range(1, max(1, most).bit_length())] or [cls(1)]
        return {1: few} | {max(config.tokens, 2) * PROGRAMS: config for config in more if config != few}

    @classmethod
    def choose(cls, spec: AttentionSpec, num_tokens: int) -> WriteConfig:
        """What a write of a known number of tokens is launched as."""
        return max((least, config) for least, config in cls.ladder(spec).items() if least <= max(num_tokens, 1))[1]

    def num_programs(self, num_tokens: int) -> int:
        """Programs of a launch."""
        return -(-num_tokens // self.tokens) * (2 if self.halves_apart else 1)


class _Rung(NamedTuple):
    """How to launch a write of `least` tokens, or of more up to the next rung's."""

    least: int
    config: WriteConfig


class _Loaded(NamedTuple):
    arrays: tuple[jax.Array, ...]
    layout: Any


class Position(NamedTuple):
    """Where a token goes; `written` is false for one that goes nowhere."""

    written: jax.Array
    page: jax.Array
    token: jax.Array


class Slots(NamedTuple):
    """Slots, of one or two int32 words each, the low one first; that of token `t` is number `start + t` in `ref`.

    `searched` is how many tokens to look through for later ones of the same slot, None for slots that are unique. Of
    several layers' pages, those of a block one after the other, `layer` is the one that slots are of.
    """

    ref: Any
    words: int
    last_slot: Number
    searched: Number | None
    start: Number = 0
    layer: Number = 0
    num_layers: int = 1

    def position(
        self, read: Callable[[jax.Array], jax.Array], token: jax.Array, condition: jax.Array, spec: AttentionSpec
    ) -> Position:
        """Where a token goes, or several; `read` reads words of `ref`."""
        word = (self.start + token) * self.words
        slot = read(word)
        written = condition & (slot >= 0) & (slot <= self.last_slot)
        if self.words == 2:
            written &= read(word + 1) == 0
        block_size = jnp.int32(spec.block_size)
        page = lax.div(slot, block_size)
        if not isinstance(self.layer, int):
            page = page * jnp.int32(self.num_layers) + self.layer
        return Position(written, page, lax.rem(slot, block_size))

    def repeated(self, first: jax.Array, tokens: int) -> jax.Array | None:
        """A bit for each of up to 32 tokens, set where a thread sees a later token with its slot, written instead.

        The bits of all threads together (`compat.any_thread`) say it of all later tokens; None if slots are unique.
        """
        if self.searched is None or (isinstance(self.searched, int) and self.searched < 2):
            return None
        width, loads = (8, 1) if compat.interpreting() else (THREADS, SEARCH_LOADS)
        layout = lane_layout((width,), 1)
        lane = plgpu.layout_cast(lax.iota(jnp.int32, width), layout)
        own = [self.ref[(self.start + first + i) * self.words] for i in range(tokens)]
        count, last = self.searched, self.searched - 1

        def search(step: Number, mask: jax.Array) -> jax.Array:
            others = [first + 1 + (step * loads + i) * width + lane for i in range(loads)]
            words = [(self.start + jnp.minimum(other, last)) * self.words for other in others]
            slots = [compat.load_each(self.ref, word, layout) for word in words]
            are_tokens = [other < count for other in others]
            if self.words == 2:
                highs = [compat.load_each(self.ref, word + 1, layout) for word in words]
                are_tokens = [is_token & (high == 0) for is_token, high in zip(are_tokens, highs, strict=True)]
            for other, slot, is_token in zip(others, slots, are_tokens, strict=True):
                for i, slot_of_mine in enumerate(own):
                    is_repeated = is_token & (slot == slot_of_mine) & (other > first + i)
                    mask |= jnp.where(is_repeated, jnp.int32(1 << i), 0)
            return mask

        def search_more(step: jax.Array, mask: jax.Array) -> jax.Array:
            compat.keep_rolled()
            return search(step, mask)

        none = plgpu.layout_cast(jnp.zeros((width,), jnp.int32), layout)
        # The first step, for most writes the only one, is outside the loop: its loads wait for nothing.
        found = search(0, none)
        steps = lax.div(jnp.maximum(count - first + width * loads - 2, 0), jnp.int32(width * loads))
        return lax.fori_loop(1, steps, search_more, found)


class Half(NamedTuple):
    """Keys or values of a call: rows, their scale and the pages they go to.

    `scale_pages`: where the scales of each token and head go, if not behind the data in its pages.
    """

    rows: Rows
    scale: Any
    pages: Pages
    scale_pages: Pages | None = None

    @property
    def destinations(self) -> list[tuple[Pages, int]]:
        """Where data and scales go: pages and which of their regions."""
        return [(self.pages, 0), (self.pages, 1) if self.scale_pages is None else (self.scale_pages, 0)]


@dataclasses.dataclass(frozen=True)
class RowMove:
    """How one region's rows of a token get into a page: `rows` runs of `columns` elements, `region` in elements too.

    Attributes:
      region: where rows lie in a page.
      rows: heads, or 1 where the heads of a token are one run.
      columns: elements of a run.
      widest: the most elements that a thread may move at once.
    """

    region: PageRegion
    rows: int
    columns: int
    widest: int

    @classmethod
    def of(cls, spec: AttentionSpec, pages: Pages, which: int, itemsize: int, *, by_head: bool = False) -> RowMove:
        """The move of a region of `pages`, in elements of `itemsize` bytes; by head where each head has a scale."""
        region, heads = pages.regions[which], spec.num_kv_heads
        alignment = math.gcd(pages.alignment, region.base, region.token_stride, region.head_stride, MAX_VECTOR_BYTES)
        elements = dataclasses.replace(
            region,
            **{
                name: getattr(region, name) // itemsize for name in ("base", "token_stride", "head_stride", "row_bytes")
            },
        )
        row = elements.row_bytes
        is_run = heads == 1 or (region.head_stride == region.row_bytes and not by_head)
        rows, columns = (1, heads * row) if is_run and not region.swizzled else (heads, row)
        return cls(elements, rows, columns, max(1, alignment // itemsize))

    def start(self, token: jax.Array, row: Number, column: Number) -> jax.Array:
        """Where an element lies in the page."""
        region = self.region
        if region.swizzled:
            token, column = swizzled_position(token, column, region.row_bytes)
        start: jax.Array = region.base + token * region.token_stride + row * region.head_stride + column
        return start

    @property
    def layout(self) -> Any:
        """The registers that hold a token's rows on their way."""
        return lane_layout((self.rows, self.columns), self.widest)

    def load(self, source: Rows, token: Number) -> jax.Array:
        """The rows of a token."""
        rows = source.ref.at[token - source.first, pl.ds(source.start, self.rows * self.columns)]
        return compat.load(rows, self.layout, (self.rows, self.columns))

    def store(self, rows: jax.Array, pages: Pages, position: Position) -> None:
        """Puts encoded rows into their page."""
        starts = [pages.start + self.start(position.token, row, 0) for row in range(self.rows)]
        if compat.interpreting():  # which knows no reshaped references
            for start, row in zip(starts, rows, strict=True):
                compat.store(pages.ref.at[position.page, pl.ds(start, self.columns)], row)
            return
        # From row to row, so past the page's end perhaps, but nothing is stored there.
        stride = self.columns if self.rows == 1 else self.region.head_stride
        run = pages.ref.at[position.page, pl.ds(starts[0], self.rows * stride)].reshape(self.rows, stride)
        compat.store(run.at[:, pl.ds(0, self.columns)], rows)


@dataclasses.dataclass(frozen=True)
class Scatter:
    """How one region's bytes of all of a program's tokens get from shared memory into pages, a piece a thread."""

    move: RowMove
    tokens: int

    @property
    def piece(self) -> int:
        """Bytes of a piece."""
        if self.move.region.swizzled:
            return 1
        return self.move.columns if compat.interpreting() else math.gcd(self.move.columns, self.move.widest)

    @property
    def pieces(self) -> int:
        """Pieces of one token."""
        return self.move.rows * self.move.columns // self.piece

    @property
    def layout(self) -> Any:
        """The registers that hold a number for each piece, and for as many more as fill the last threads."""
        return lane_layout((self._padded,), 1)

    @property
    def _padded(self) -> int:
        pieces = self.tokens * self.pieces
        return pieces if compat.interpreting() else -(-pieces // THREADS) * THREADS

    def positions(self, slots: Slots, first: jax.Array, mine: jax.Array, spec: AttentionSpec) -> Position:
        """Where the token of each piece goes; `first` is the program's first token, `mine` that of its own."""
        piece = self._indices()
        token = first + jnp.minimum(lax.div(piece, jnp.int32(self.pieces)), self.tokens - 1)
        is_piece = (piece < self.tokens * self.pieces) & (token >= mine)
        read = functools.partial(compat.load_each, slots.ref, layout=self.layout)
        return slots.position(read, token, is_piece, spec)

    def store(self, stage: Any, pages: Pages, positions: Position, skipped: jax.Array | None) -> None:
        """Stores all pieces of `stage` `[tokens, bytes]`, but not of tokens whose bit in `skipped` is set."""
        piece = self._indices()
        written = positions.written
        if skipped is not None:
            token = lax.div(piece, jnp.int32(self.pieces))
            written &= lax.shift_right_logical(lax.broadcast(skipped, token.shape), token) & 1 == 0
        byte = lax.rem(piece, jnp.int32(self.pieces)) * self.piece
        row, column = lax.div(byte, jnp.int32(self.move.columns)), lax.rem(byte, jnp.int32(self.move.columns))
        starts = pages.start + self.move.start(positions.token, row, column)
        compat.copy_each(stage, piece * self.piece, pages.ref, positions.page, starts, written, self.piece, self.layout)

    def _indices(self) -> jax.Array:
        return plgpu.layout_cast(lax.iota(jnp.int32, self._padded), self.layout)


class Rotated(NamedTuple):
    """What a write rotates before it stores keys: queries as well, which it returns.

    `query` is `[num_tokens, num_heads, head_size]` of the dtype of the keys, `positions` int32 `[num_tokens]`, each the
    row of `table` `[max_position, rot_dim]` that it takes, or past an end the last.
    """

    query: jax.Array
    positions: jax.Array
    table: jax.Array
    rotation: Rotation


@dataclasses.dataclass(frozen=True)
class RotatedMemory:
    """What a write into memory that somebody else owns rotates before it stores keys: these queries as well.

    Attributes:
      rotation: how.
      num_heads: of the queries.
      query: their memory, and the same of `rotation.dtype` that rotated ones go to, one token after the other.
      position_dtype: int32 or int64; one that is no row of the table takes its first or its last.
      table_dtype: of cosines and sines, whose rows lie one after the other from a multiple of 16 bytes on.
    """

    rotation: Rotation
    num_heads: int
    query: RowMemory
    position_dtype: np.dtype[Any]
    table_dtype: np.dtype[Any]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Queries, positions, the table, and rotated queries."""
        words = self.position_dtype.itemsize // 4
        table = jax.ShapeDtypeStruct((MOST, self.rotation.rot_dim), self.table_dtype)
        packed_rows = dataclasses.replace(self.query, token_stride=self.num_heads * self.rotation.head_size)
        return (
            _argument_of(self.query, self.rotation.as_columns),
            Argument(jax.ShapeDtypeStruct((MOST,), jnp.int32), 4 * words),
            Argument(table, table.dtype.itemsize),
            _argument_of(packed_rows, self.rotation.as_columns),
        )

    def turn(self, arrays: Sequence[tuple[Any, Number]], last_position: Number, staged: tuple[Any, Any]) -> _Turn:
        """What a kernel does of `arguments`."""
        query, (positions, first), table, rotated_query = arrays
        words = self.position_dtype.itemsize // 4
        return _Turn(
            Rows(*query, self.query.alignment),
            self.num_heads,
            Positions(positions, words, last_position, first),
            Rows(*table),
            Rows(*rotated_query),
            staged,
            self.rotation,
        )


class Positions(NamedTuple):
    """Positions, of one or two int32 words each, the low one first; that of token `t` is number `start + t`."""

    ref: Any
    words: int
    last: Number
    start: Number = 0

    def row(self, token: jax.Array) -> jax.Array:
        """The row of the table for a token: from 0 to `last`."""
        word = (self.start + token) * self.words
        position = self.ref[word]
        if self.words == 2:
            high = self.ref[word + 1]
            past = (high > 0) | ((high == 0) & (position < 0))
            position = jnp.where(past, self.last, jnp.where(high < 0, 0, position))
        return jnp.clip(position, 0, self.last)


class _Turn(NamedTuple):
    """`Rotated` in a kernel: `staged` is where rotated keys go, as words and as elements of the same memory."""

    query: Rows
    num_heads: int
    positions: Positions
    table: Rows
    rotated_query: Rows
    staged: tuple[Any, Any]
    rotation: Rotation

    def rows(self, spec: AttentionSpec, first: jax.Array) -> Rows:
        """The keys of a program's tokens, for all that stores them."""
        return Rows(self.staged[0 if spec.quant_mode is KVQuantMode.NVFP4 else 1], first=first)

    def keys(self, key: Rows, spec: AttentionSpec, tokens: int, first: jax.Array) -> None:
        """Rotates the keys of a program's tokens into shared memory."""
        rotation, heads = self.rotation, spec.num_kv_heads
        for i in range(tokens):

            def store(values: jax.Array, column: int, i: int = i) -> None:
                store_heads(Rows(self.staged[rotation.is_neox]), i, rotation.columns, values, column)

            rotation.rotate(key, first + i, heads, self.table, self.positions.row(first + i), store)
        if compat.interpreting():  # where the two are not the same memory
            staged = self.staged[rotation.is_neox][:tokens]
            pairs = staged.reshape(tokens, -1, 2) if rotation.is_neox else staged
            other = lax.bitcast_convert_type(pairs, jnp.uint32 if rotation.is_neox else rotation.dtype)
            self.staged[1 - rotation.is_neox][:tokens] = other.reshape(tokens, -1)

    def queries(self, tokens: int, first: jax.Array, program_first: jax.Array) -> None:
        """Rotates the queries of a program's own tokens."""
        rotation = self.rotation
        for i in range(tokens):

            @pl.when(first + i >= program_first)
            def _(token: jax.Array = first + i) -> None:
                store = functools.partial(store_heads, self.rotated_query, token, rotation.columns)
                rotation.rotate(self.query, token, self.num_heads, self.table, self.positions.row(token), store)


def write(
    pages: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    spec: AttentionSpec,
    config: WriteConfig,
    *,
    unique_slots: bool,
    layer: jax.Array | None = None,
    num_layers: int = 1,
    rotated: Rotated | None = None,
) -> Any:
    """Writes tokens into flat pages `[num_blocks, page_elements]`, in place where they are donated.

    `slot_mapping` is int32 `[num_tokens]`, or int64 where x64 is on; scales are float32, `[1]` or `[num_kv_heads]`.
    Slots are unique if `unique_slots` says so and from `SEARCHED` tokens on; else the last token of a slot is written.
    Of `num_layers` layers the pages are `[num_blocks * num_layers, page_elements]`, and `layer` is an int32 scalar:
    the kernel reads it, so that no pages are sliced and one kernel serves every layer. One out of range has no slots.

    Returns the pages; with `rotated`, where keys are rotated first, the rotated queries and the pages.
    """
    num_tokens, num_blocks = key.shape[0], pages.shape[0] // num_layers
    last_slot = min(num_blocks * spec.block_size, 1 << 31) - 1
    words = slot_mapping.dtype.itemsize // 4
    if words == 2:
        slot_mapping = lax.bitcast_convert_type(slot_mapping, jnp.int32).reshape(-1)

    def body(slots: Any, key: Any, value: Any, k_scale: Any, v_scale: Any, pages: Any, *others: Any) -> None:
        halves = [
            Half(Rows(rows), scale, Pages(pages, regions, spec.page_size_bytes))
            for rows, scale, regions in zip((key, value), (k_scale, v_scale), spec.regions, strict=True)
        ]
        searched = None if unique_slots or num_tokens >= SEARCHED else num_tokens
        own_slots, staged = Slots(slots, words, last_slot, searched), list(others)
        if layer is not None:
            number, staged = others[0][0], staged[1:]
            last = jnp.where((number >= 0) & (number < num_layers), jnp.int32(last_slot), jnp.int32(-1))
            own_slots = own_slots._replace(last_slot=last, layer=number, num_layers=num_layers)
        turn = None
        if rotated is not None:
            query, positions, table, rotated_query, *staged, keys = staged
            turn = _Turn(
                Rows(query),
                rotated.query.shape[1],
                Positions(positions, 1, rotated.table.shape[0] - 1),
                Rows(table),
                Rows(rotated_query),
                keys,
                rotated.rotation,
            )
        _write_tokens(own_slots, halves, staged, spec, config, num_tokens, dtype, turn)

    dtype = key.dtype
    key_rows = _token_rows(key, spec) if rotated is None else rotated.rotation.as_columns(key)
    arrays = slot_mapping, key_rows, _token_rows(value, spec), k_scale, v_scale
    turned: list[jax.Array] = []
    if rotated is not None:
        turned = [rotated.rotation.as_columns(rotated.query), rotated.positions, rotated.table]
    kernel = _kernel(
        body,
        spec,
        config.tokens,
        grid=config.num_programs(num_tokens),
        out_type=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in turned[:1]],
        staged_dtype=dtype if turned else None,
    )
    layers = [] if layer is None else [lax.optimization_barrier(layer.reshape(1))]
    # XLA on GPUs may fuse slices of stacked arrays, before or after a kernel, with the kernel, and forgets then that
    # the kernel writes in place: what it leaves as it was would be lost. Nothing is fused across a barrier.
    ref = jax.new_ref(lax.optimization_barrier(pages))
    query = kernel(*map(lax.optimization_barrier, arrays), ref, *layers, *map(lax.optimization_barrier, turned))
    written = lax.optimization_barrier(jax.freeze(ref))
    return written if rotated is None else (rotated.rotation.from_columns(query[0], rotated.query.shape), written)


def any_count(
    spec: AttentionSpec,
    rows: tuple[RowMemory, RowMemory],
    pages: tuple[PageMemory, PageMemory],
    slot_dtype: np.dtype[Any],
    scale_sizes: tuple[int, int],
    *,
    unique_slots: bool,
    scale_pages: tuple[PageMemory, PageMemory] | None = None,
    rotated: RotatedMemory | None = None,
) -> AnyCount:
    """The write into memory that somebody else owns, given for keys and for values.

    Slots are unique if `unique_slots` says so, and from `SEARCHED` tokens on. The arrays are slots, keys, values, the
    keys' and values' pages, those of `rotated` if keys are rotated first, k_scale, v_scale. Where each token and head
    has a scale, the last two are instead the memory that these are written to, `scale_pages`, in which they are the one
    region.
    """
    words = np.dtype(slot_dtype).itemsize // 4
    rungs = _rungs(spec, unique_slots, RUNGS[-1] if rotated is None else ROTATED)
    leasts = [rung.least for rung in rungs]
    turned = () if rotated is None else rotated.arguments

    def body(counts: Sequence[Number], arrays: Sequence[tuple[Any, Number]], staged: Sequence[Any]) -> None:
        num_tokens, last_slot = counts[:2]
        (slots, start), key, value, key_pages, value_pages, *others = arrays
        turned_arrays, scale_arrays = others[: len(turned)], others[len(turned) :]
        destinations = [memory.pages(*array) for memory, array in zip(pages, (key_pages, value_pages), strict=True)]
        turn = None
        if rotated is not None:
            *staged, keys = staged
            turn = rotated.turn(turned_arrays, counts[2], keys)
        scales, of_tokens = scales_of(scale_arrays, scale_sizes, scale_pages)
        halves = [
            Half(Rows(*source, row_memory.alignment), scale, destination, of_token)
            for source, row_memory, destination, scale, of_token in zip(
                (key, value), rows, destinations, scales, of_tokens, strict=True
            )
        ]

        def write_by(rung: _Rung, *others: _Rung) -> None:
            def write_here() -> None:
                searched = None if unique_slots or rung.least >= SEARCHED else num_tokens
                all_slots = Slots(slots, words, last_slot, searched, start)
                _write_tokens(all_slots, halves, staged, spec, rung.config, num_tokens, rows[0].dtype, turn)

            # One inside the other, not one after the other: a program that is done ends.
            more = num_tokens >= others[0].least if others else False
            later = f"from {others[0].least} tokens on" if others else ""
            _either(more, later, lambda: write_by(*others), f"from {rung.least} tokens on", write_here)

        write_by(*rungs)

    as_rows = functools.partial(_token_rows, spec=spec)

    def num_programs(num_tokens: int) -> int:
        return rungs[bisect.bisect_right(leasts, num_tokens) - 1].config.num_programs(num_tokens)

    return AnyCount(
        body,
        functools.partial(
            _kernel,
            spec=spec,
            tokens=max(rung.config.tokens for rung in rungs),
            grid=MOST,
            staged_dtype=None if rotated is None else rows[0].dtype,
        ),
        ("num_tokens", "last_slot", *(["last_position"] if turned else [])),
        (
            Argument(jax.ShapeDtypeStruct((MOST,), jnp.int32), 4 * words),
            _argument_of(rows[0], as_rows if rotated is None else rotated.rotation.as_columns),
            _argument_of(rows[1], as_rows),
            *(memory.argument(spec.array_dtype) for memory in pages),
            *turned,
            *scale_arguments(spec, scale_sizes, scale_pages),
        ),
        written=(3, 4, *([8] if turned else []), *(range(5 + len(turned), 7 + len(turned)) if scale_pages else ())),
        num_programs=num_programs,
    )


def _rungs(spec: AttentionSpec, unique_slots: bool, most_tokens: int = RUNGS[-1]) -> list[_Rung]:
    """What a kernel for any count chooses from: `RUNGS` of the ladder and its last, of at most so many tokens.

    Where slots may repeat there is one more, from which on they do not. fp8 of 1,024 elements a token always takes one
    token a program: of few tokens not to choose gains more than it loses of very many (docs/notes/kernels.md).
    """
    ladder = {least: config for least, config in WriteConfig.ladder(spec).items() if config.tokens <= most_tokens}
    elements = spec.num_kv_heads * max(spec.head_size, spec.head_size_v)
    if spec.quant_mode is KVQuantMode.FP8_PER_TENSOR and elements >= ELEMENTS[KVQuantMode.NONE]:
        ladder = {1: ladder[1]}
    [*_, most] = ladder.values()
    configs = {least: config for least, config in ladder.items() if config.tokens in RUNGS or config is most}
    leasts = sorted(configs if unique_slots else {*configs, SEARCHED})
    return [_Rung(least, configs[max(below for below in configs if below <= least)]) for least in leasts]


def _either(
    condition: bool | jax.Array, name: str, then: Callable[[], None], other: str, otherwise: Callable[[], None]
) -> None:
    """Runs one of two branches, whose names tell them apart in all that is compiled."""

    def ending(name: str, run: Callable[[], None]) -> Callable[[], None]:
        def branch() -> None:
            run()
            compat.end_branch(name)

        return branch

    if isinstance(condition, bool):
        (then if condition else otherwise)()
    else:
        lax.cond(condition, ending(name, then), ending(other, otherwise))


def _argument_of(memory: RowMemory, as_rows: Callable[[jax.Array], jax.Array]) -> Argument:
    rows = jax.eval_shape(as_rows, jax.ShapeDtypeStruct((1, memory.token_stride), memory.dtype))
    array = jax.ShapeDtypeStruct((MOST, *rows.shape[1:]), rows.dtype)
    return Argument(array, array.dtype.itemsize * math.prod(array.shape[2:]))


def _kernel(
    body: Callable[..., None],
    spec: AttentionSpec,
    tokens: int,
    grid: int,
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    staged_dtype: np.dtype[Any] | None = None,
) -> Callable[..., Any]:
    """`staged_dtype`: that of keys which a program holds in shared memory, 16 bits wide; None where it does not."""
    staged: list[Any] = [
        memory
        for size in (spec.head_size, spec.head_size_v)
        for memory in _staged(spec, tokens, *spec.dtype.info.row_bytes(size))
        if spec.stores_scales
    ]
    if staged_dtype is not None:
        row = spec.num_kv_heads * spec.head_size
        views = plgpu.SMEM((tokens, row // 2), jnp.uint32), plgpu.SMEM((tokens, row), staged_dtype)
        # The interpreter reads through no other view than was written.
        staged.append(views if compat.interpreting() else plgpu.RefUnion(*views))
    kernel: Callable[..., Any] = plgpu.kernel(
        compat.named("reshape_and_cache_flash", body),
        out_type=tuple(out_type),
        grid=(grid,),
        grid_names=("program",),
        scratch_types=staged,
        compiler_params=compat.COMPILER_PARAMS,
    )
    return kernel


def _staged(spec: AttentionSpec, tokens: int, data: int, scales: int) -> tuple[Any, Any]:
    """Shared memory for rows of so many bytes of data and of scales: bytes, but words for scales of float32."""
    heads = spec.num_kv_heads
    of_scales = ((tokens, heads * scales), jnp.uint8)
    if spec.quant_mode.is_per_token_head:
        of_scales = ((tokens, heads), jnp.int32)
    return plgpu.SMEM((tokens, heads * data), jnp.uint8), plgpu.SMEM(*of_scales)


def _write_tokens(
    slots: Slots,
    halves: Sequence[Half],
    staged: Sequence[Any],
    spec: AttentionSpec,
    config: WriteConfig,
    num_tokens: Number,
    dtype: Any,
    turn: _Turn | None = None,
) -> None:
    """What a program does; `dtype` is that of the rows' elements."""
    program = lax.axis_index("program")
    half = lax.rem(program, jnp.int32(2)) if config.halves_apart else None
    program_first = (lax.div(program, jnp.int32(2)) if config.halves_apart else program) * config.tokens
    # The last program starts early instead of reading past the end; tokens of the one before are not its to write.
    first = program_first if config.tokens == 1 else jnp.minimum(program_first, num_tokens - config.tokens)
    if staged:
        staged_halves = list(zip(halves, itertools.batched(staged, 2), strict=True))
        if turn is not None:
            halves = _turned(turn, halves, spec, config.tokens, first, program_first, half)
            staged_halves = list(zip(halves, itertools.batched(staged, 2), strict=True))
        write_staged = functools.partial(_write_staged, slots, spec, config.tokens, first, program_first, dtype)
        if half is None:
            write_staged(staged_halves)
        else:
            keys, values = staged_halves
            _either(half == 0, "keys", lambda: write_staged([keys]), "values", lambda: write_staged([values]))
        return
    tokens = [first + i for i in range(config.tokens)]
    positions = [slots.position(lambda word: slots.ref[word], token, token >= program_first, spec) for token in tokens]
    moves = [_row_move(spec, half, dtype) for half in halves]
    if turn is None:
        loaded = [[move.load(half.rows, token) for move, half in zip(moves, halves, strict=True)] for token in tokens]
    else:  # values are on their way while keys are rotated
        value_rows = [moves[1].load(halves[1].rows, token) for token in tokens]
        halves = _turned(turn, halves, spec, config.tokens, first, program_first, None)
        loaded = [[moves[0].load(halves[0].rows, token), row] for token, row in zip(tokens, value_rows, strict=True)]
    if config.tokens > 1:
        encodes = [_encoder(spec, half, move) for half, move in zip(halves, moves, strict=True)]
    # Rows are stored where slots say so, and would be loaded there, after the slots: but no load moves past a barrier.
    compat.wait_for_threads()
    # Scales of one token are loaded behind it: their addresses may lie in another line of constant memory, for which
    # its rows need not wait. Of several tokens that would take registers.
    if config.tokens == 1:
        encodes = [_encoder(spec, half, move) for half, move in zip(halves, moves, strict=True)]
    repeated = slots.repeated(first, config.tokens)
    encoded = [[encode(row) for encode, row in zip(encodes, rows, strict=True)] for rows in loaded]
    skipped = 0 if repeated is None else compat.any_thread(repeated, config.tokens)
    for i, (position, rows) in enumerate(zip(positions, encoded, strict=True)):

        @pl.when(position.written & ((skipped >> i) & 1 == 0))
        def _(position: Position = position, rows: list[jax.Array] = rows) -> None:
            for move, half, row in zip(moves, halves, rows, strict=True):
                move.store(row, half.pages, position)


def _turned(
    turn: _Turn,
    halves: Sequence[Half],
    spec: AttentionSpec,
    tokens: int,
    first: jax.Array,
    program_first: jax.Array,
    half: jax.Array | None,
) -> list[Half]:
    """Rotates what a program has to: queries, keys or, with `half`, whichever of them goes with the half it writes.

    Returns the halves, of which the keys are rotated ones.
    """
    keys, values = halves
    rotate_keys = functools.partial(turn.keys, keys.rows, spec, tokens, first)
    rotate_queries = functools.partial(turn.queries, tokens, first, program_first)
    if half is None:
        rotate_keys()
        rotate_queries()
    else:
        _either(half == 0, "rotated keys", rotate_keys, "rotated queries", rotate_queries)
    compat.wait_for_threads()
    return [keys._replace(rows=turn.rows(spec, first)), values]


def _write_staged(
    slots: Slots,
    spec: AttentionSpec,
    tokens: int,
    first: jax.Array,
    program_first: jax.Array,
    dtype: Any,
    halves: Sequence[tuple[Half, Sequence[Any]]],
) -> None:
    """What a program does that encodes scales: of `halves`, each with where to put data and scales together."""
    # Of few tokens the search is hidden behind their loads; of many it would take registers from programs beside it.
    if tokens > 1:
        repeated = slots.repeated(first, tokens)
    scatters = [
        [Scatter(RowMove.of(spec, pages, which, 1), tokens) for pages, which in half.destinations] for half, _ in halves
    ]
    positions = [[scatter.positions(slots, first, program_first, spec) for scatter in pair] for pair in scatters]
    in_blocks = spec.quant_mode is KVQuantMode.NVFP4
    load = _load_blocks if in_blocks else _load_heads
    loaded = [load(half.rows, first, tokens, stage, spec, dtype) for half, stage in halves]
    if tokens == 1:
        compat.wait_for_threads()  # as in `_write_tokens`
    layer_scales = [half.scale[0] if in_blocks else None for half, _ in halves]
    if tokens == 1:
        repeated = slots.repeated(first, tokens)
    for rows, layer_scale, (_, stage) in zip(loaded, layer_scales, halves, strict=True):
        encoded = _encode_heads(rows, spec) if layer_scale is None else _encode_blocks(rows, layer_scale, dtype, spec)
        for stored, ref in zip(encoded, stage, strict=True):
            compat.store(ref.at[pl.ds(0, tokens)], stored)
    if repeated is None:
        compat.wait_for_threads()
    skipped = None if repeated is None else compat.any_thread(repeated, tokens)
    for (half, stage), pair, pair_positions in zip(halves, scatters, positions, strict=True):
        for scatter, ref, (pages, _), position in zip(pair, stage, half.destinations, pair_positions, strict=True):
            scatter.store(ref, pages, position, skipped)


def _token_rows(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    """`[num_tokens, elements]`; for NVFP4 words of two 16-bit elements each, or pairs of float32."""
    if spec.quant_mode is not KVQuantMode.NVFP4:
        return x.reshape(x.shape[0], -1)
    pairs = x.reshape(x.shape[0], -1, 2)
    return pairs if x.dtype.itemsize == 4 else lax.bitcast_convert_type(pairs, jnp.uint32)


def _row_move(spec: AttentionSpec, half: Half, dtype: Any) -> RowMove:
    """The move of rows that keep their elements where they are."""
    move = RowMove.of(spec, half.pages, 0, jnp.dtype(half.pages.ref.dtype).itemsize, by_head=half.scale.shape[0] > 1)
    return dataclasses.replace(move, widest=min(move.widest, half.rows.alignment // jnp.dtype(dtype).itemsize))


def _encoder(spec: AttentionSpec, half: Half, move: RowMove) -> Callable[[jax.Array], jax.Array]:
    """What encodes the rows of a token, with the scale loaded and inverted."""
    if not spec.dtype.is_quantized:
        return functools.partial(arithmetic.cast, dtype=spec.storage_dtype)
    if half.scale.shape[0] > 1:
        by_head = arithmetic.reciprocal(compat.load(half.scale, move.layout.reduce(1)))
        inverse = compat.spread(by_head, move.columns, move.layout)
    else:
        inverse = arithmetic.reciprocal(half.scale[0])
    return functools.partial(arithmetic.encode_fp8, inverse=inverse, dtype=spec.dtype)


def _load_blocks(
    rows: Rows, first: jax.Array, num_tokens: int, stage: Sequence[Any], spec: AttentionSpec, dtype: Any
) -> _Loaded:
    """The blocks of a program's tokens, `[num_tokens, num_blocks, 8]`: words of two elements, or both halves."""
    num_blocks = stage[1].shape[1]
    shape = num_tokens, num_blocks, WORDS
    words = rows.ref.at[pl.ds(first - rows.first, num_tokens), pl.ds(rows.start, num_blocks * WORDS)]
    is_wide = dtype == jnp.float32  # pairs are neighbours in memory, so that each half is read with gaps
    layout = lane_layout(shape, 1 if is_wide else min(WORDS, rows.alignment // 4))
    refs = [words.at[:, :, i] for i in range(2)] if is_wide else [words]
    return _Loaded(tuple(compat.load(ref, layout, shape) for ref in refs), layout)


def _load_heads(
    rows: Rows, first: jax.Array, num_tokens: int, stage: Sequence[Any], spec: AttentionSpec, dtype: Any
) -> _Loaded:
    """The rows of a program's tokens, `[num_tokens, num_kv_heads, head_size]`."""
    elements = stage[0].shape[1]
    shape = num_tokens, spec.num_kv_heads, elements // spec.num_kv_heads
    ref = rows.ref.at[pl.ds(first - rows.first, num_tokens), pl.ds(rows.start, elements)]
    widest = min(rows.alignment, MAX_VECTOR_BYTES) // jnp.dtype(dtype).itemsize
    layout = lane_layout(shape, widest, whole_rows=True)
    return _Loaded((compat.load(ref, layout, shape),), layout)


def _encode_heads(rows: _Loaded, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    [x] = rows.arrays
    spread = functools.partial(compat.spread, columns=x.shape[-1], layout=rows.layout)
    return arithmetic.encode_per_token_head(x.astype(jnp.float32), spec.dtype, spread)


def _encode_blocks(blocks: _Loaded, scale: jax.Array, dtype: Any, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    spread = functools.partial(compat.spread, columns=WORDS, layout=blocks.layout)
    is_either = spec.dtype is KVCacheDType.NVFP4_4OVER6
    encode = arithmetic.encode_nvfp4_4over6 if is_either else arithmetic.encode_nvfp4
    return encode(blocks.arrays, np.dtype(dtype), scale, spread)
