"""The update of an exact window's ring: the last tokens of each sequence of a step, in the model dtype.

A program copies a few neighbouring tokens of one sequence and derives their places from the step's sequences, so that
nothing has to compute slots first. It is a kernel of its own, or some of the programs of a write to quantized pages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat
from kvjax.kernels.aliases import ABSENT, Layout, Ref
from kvjax.kernels.codecs import codecs_of
from kvjax.kernels.launchable import (
    ANY_LENGTH,
    AnyCount,
    Argument,
    Number,
    PageMemory,
    RowMemory,
    Rows,
    array_memory,
    with_origin,
)
from kvjax.kernels.target import Target
from kvjax.kernels.write import program
from kvjax.kernels.write.slots import Position
from kvjax.kernels.write.transfer import WriteOperand
from kvjax.spec import AttentionSpec

RING_PAGES = ("ring_keys", "ring_values")
"""Names of the arguments for the ring's pages."""

EXACT_ROWS = ("exact_keys", "exact_values")
"""Names of the arguments for a step's keys and values, in elements: those of a write may be words."""

SEQUENCES = ("seq_lens", "cu_q_lens", "window_rows")
"""Names of the arguments that say where tokens go."""

MAX_TOKENS = 4
"""Maximum tokens of a program. All that it loads is in registers."""


@dataclasses.dataclass(frozen=True)
class RingKind:
    """What the update of a ring is compiled for.

    Attributes:
      spec: the ring's, unquantized.
      rows: memory of keys and of values.
      pages: memory of the ring's pages.
      blocks_per_row: blocks of each sequence's row.
      kept: the most tokens of a sequence that are written, its last ones: no more than a row holds.
      tokens: tokens of a program, at most those of the call; see `tokens_of`.
      num_layers: layers whose pages lie next to each other in a block; None for one.
    """

    spec: AttentionSpec
    rows: tuple[RowMemory, RowMemory]
    pages: tuple[PageMemory, PageMemory]
    blocks_per_row: int
    kept: int
    tokens: int
    num_layers: int | None = None

    @property
    def programs_per_sequence(self) -> int:
        """Programs that copy the tokens of a sequence."""
        return -(-self.kept // self.tokens)

    def num_programs(self, num_seqs: Any) -> Any:
        """Programs of a call of so many sequences, both ints or both traced."""
        return num_seqs * self.programs_per_sequence

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the counts, beside the number of tokens."""
        return "num_seqs", "num_rows"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Keys, values, the ring's pages of either, and the step's sequences."""
        codecs, dtype = codecs_of(self.spec), self.spec.storage_dtype
        rows = zip(self.rows, EXACT_ROWS, codecs, strict=True)
        return (
            *(memory.argument(name, codec.token_rows) for memory, name, codec in rows),
            *(memory.argument(name, dtype) for memory, name in zip(self.pages, RING_PAGES, strict=True)),
            *(Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)) for name in SEQUENCES),
        )


class WindowRing(NamedTuple):
    """A ring in a JAX array, and a step that updates it.

    Attributes:
      kv: the ring's pages.
      spec: the ring's.
      num_layers: layers in `kv`; None for one.
      blocks_per_row: blocks of each sequence's row.
      longest: most new tokens of a sequence.
      seq_lens: int32 `[num_seqs]`, tokens of each sequence, the new ones included.
      cu_q_lens: int32 `[num_seqs + 1]`, the bounds of each sequence's new tokens.
      window_rows: int32 `[num_seqs]`, each sequence's row; it has none if the ring has no such row.
    """

    kv: jax.Array
    spec: AttentionSpec
    num_layers: int | None
    blocks_per_row: int
    longest: int
    seq_lens: jax.Array
    cu_q_lens: jax.Array
    window_rows: jax.Array

    @property
    def kept(self) -> int:
        """Most tokens of a sequence that its row keeps of the step."""
        return min(self.longest, self.blocks_per_row * self.spec.block_size)

    @property
    def num_rows(self) -> int:
        """Rows of the ring."""
        return self.kv.shape[0] // self.blocks_per_row

    @property
    def counts(self) -> tuple[int, int]:
        """The counts of `RingKind.counts`."""
        return self.seq_lens.shape[0], self.num_rows

    def kind(self, key: jax.Array, value: jax.Array) -> RingKind:
        """What the update with these tokens is compiled for."""
        rows, kept = (RowMemory.of(key), RowMemory.of(value)), self.kept
        tokens = tokens_of(kept, key.shape[0])
        return RingKind(
            self.spec, rows, array_memory(self.spec), self.blocks_per_row, kept, tokens, num_layers=self.num_layers
        )

    def arrays(self, key: jax.Array, value: jax.Array) -> dict[str, jax.Array]:
        """The arguments of `RingKind.arguments`."""
        rows = dict(zip(EXACT_ROWS, (key, value), strict=True))
        sequences = dict(zip(SEQUENCES, (self.seq_lens, self.cu_q_lens, self.window_rows), strict=True))
        return rows | dict.fromkeys(RING_PAGES, self.kv) | sequences


def tokens_of(kept: int, num_tokens: int) -> int:
    """Tokens of a program in a call of `num_tokens`: a power of two, so that few kernels serve all calls."""
    return 1 << min(MAX_TOKENS, kept, num_tokens).bit_length() - 1


LAYER = Argument("layer", jax.ShapeDtypeStruct((1,), jnp.int32))
"""Which of several layers to write."""


@with_origin
def any_ring(kind: RingKind, target: Target | None = None) -> AnyCount:
    """The update of a ring by itself, for any number of tokens and sequences; its amount is the number of sequences.

    Returns:
      A kernel that takes keys, values, the ring's keys and values, `seq_lens`, `cu_q_lens`, `window_rows`, and the
      layer if there are several.
    """

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Any]) -> None:
        update(kind, counts, arrays, lax.axis_index("program"))

    layers = () if kind.num_layers is None else (LAYER,)
    return AnyCount(
        body,
        functools.partial(_ring_kernel, grid=ANY_LENGTH),
        ("num_tokens", *kind.counts),
        (*kind.arguments, *layers),
        writes=RING_PAGES,
        num_programs=kind.num_programs,
    )


def _ring_kernel(body: Callable[..., None], grid: int, out_type: Sequence[jax.ShapeDtypeStruct] = ()) -> Any:
    return compat.program_kernel("write_exact_window", body, grid, tuple(out_type))


def update(kind: RingKind, counts: Mapping[str, Number], arrays: Mapping[str, Ref], index: jax.Array) -> None:
    """What program `index` does."""
    per_sequence, num_tokens = jnp.int32(kind.programs_per_sequence), counts["num_tokens"]
    sequence = lax.div(index, per_sequence)
    length, row = arrays["seq_lens"][sequence], arrays["window_rows"][sequence]
    begin, end = (arrays["cu_q_lens"][sequence + i] for i in range(2))
    stop = end - lax.rem(index, per_sequence) * kind.tokens
    first_owned = jnp.maximum(stop - kind.tokens, begin)
    layer = 0 if kind.num_layers is None else arrays["layer"][0]
    slots = RingSlots(kind, length, end, stop, row, layer)
    operands = [
        WriteOperand(codec, Rows(arrays[name], memory.alignment), ABSENT, pages.pages(arrays[ring]))
        for codec, name, memory, pages, ring in zip(
            codecs_of(kind.spec), EXACT_ROWS, kind.rows, kind.pages, RING_PAGES, strict=True
        )
    ]

    # Most sequences of a step with prompts have one token, and most programs none.
    @pl.when((stop > first_owned) & (row >= 0) & (row < counts["num_rows"]))
    def _() -> None:
        first = jnp.clip(stop - kind.tokens, 0, num_tokens - kind.tokens)
        dtype = kind.rows[0].dtype
        program.write_rows(program.Program(kind.spec, dtype, slots, kind.tokens, first, first_owned), operands)


class RingSlots(NamedTuple):
    """Where the tokens of a program go.

    Attributes:
      kind: of the ring.
      length: tokens of the sequence, the new ones included.
      end: the index after its last new token.
      stop: the index after the program's last token.
      row: the sequence's row.
      layer: the layer to write.
    """

    kind: RingKind
    length: jax.Array
    end: jax.Array
    stop: jax.Array
    row: jax.Array
    layer: Number

    def position(
        self, token: jax.Array, condition: jax.Array, spec: AttentionSpec, layout: Layout | None = None
    ) -> Position:
        """Where a token goes: the one at position p is token `p % row_tokens` of its row."""
        row_tokens, block_size = jnp.int32(self.kind.blocks_per_row * spec.block_size), jnp.int32(spec.block_size)
        position = self.length - (self.end - token)
        written = condition & (token < self.stop) & (position >= 0)
        in_row = lax.rem(position, row_tokens)
        page = self.row * self.kind.blocks_per_row + lax.div(in_row, block_size)
        if self.kind.num_layers is not None:
            written &= (self.layer >= 0) & (self.layer < self.kind.num_layers)
            page = page * jnp.int32(self.kind.num_layers) + self.layer
        return Position(written, page, lax.rem(in_row, block_size))

    def repeated(self, first: jax.Array, tokens: int) -> None:
        """None: each token has a place of its own."""
