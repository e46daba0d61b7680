"""What the kernels over a lot of prompts share: which tokens a program takes, and tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels import lanes
from kvjax.kernels.aliases import DType, Ref, Scalar
from kvjax.kernels.launchable import ANY_LENGTH, Argument, Number
from kvjax.kernels.page_tokens import PageTokens
from kvjax.kernels.prompts import fp8
from kvjax.kernels.prompts.problem import TOKENS
from kvjax.kernels.prompts.tiled import FIELDS
from kvjax.spec import AttentionSpec

COUNTS = ("first_prompt", "num_tokens", "max_blocks", "table_stride", "last_block")
"""Of a kernel over the tokens of a lot: as in `schedule`, and `num_tokens` and `first_prompt` as in `TiledArrays`."""

NUMBERS = jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)

FOUND = tuple(Argument(name, NUMBERS) for name in ("block_table", "prompts", "header"))
"""The first arguments of such a kernel: the block table, and the schedule's results."""


def tile_arguments(spec: AttentionSpec, dtype: DType) -> tuple[Argument, ...]:
    """Tiles of keys and of values, and the bias, as in `TiledArrays`."""
    columns = spec.head_size, TOKENS if fp8.is_fp8(dtype) else spec.head_size_v
    return (
        *(
            Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH, size), dtype))
            for name, size in zip(("keys", "values"), columns, strict=True)
        ),
        Argument("bias", jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.float32)),
    )


@dataclasses.dataclass(frozen=True)
class LotTokens:
    """Neighbouring tokens of a prompt of a lot, which one program takes.

    Attributes:
      block_size: tokens of a block.
      counts: the kernel's.
      arrays: its arguments.
      tokens: how many they are.
      prompt: the prompt's index in the lot.
      position: the first token, counted as in the prompt's `FIELDS`.
    """

    block_size: int
    counts: Mapping[str, Number]
    arrays: Mapping[str, Ref]
    tokens: int
    prompt: Scalar
    position: Scalar

    @classmethod
    def of_program(
        cls, spec: AttentionSpec, counts: Mapping[str, Number], arrays: Mapping[str, Ref], tokens: int
    ) -> LotTokens:
        """The tokens of the calling program."""
        chunks = lax.div(jnp.int32(counts["num_tokens"]), jnp.int32(tokens))
        program = lax.axis_index("program")
        position = lax.rem(program, chunks) * tokens
        return cls(spec.block_size, counts, arrays, tokens, lax.div(program, chunks), position)

    @property
    def number(self) -> Scalar:
        """The prompt's number among all prompts of the step."""
        return self.counts["first_prompt"] + self.prompt

    @property
    def is_prompt(self) -> Scalar:
        """Whether there is such a prompt."""
        return self.number < self.arrays["header"][0]

    @property
    def is_stored(self) -> Scalar:
        """Whether, if `is_prompt`, the tokens are of a tile with a present token, or of the prompt's first tile."""
        stored = jnp.maximum(lax.div(self.field("end") + (TOKENS - 1), jnp.int32(TOKENS)), 1) * TOKENS
        return self.position < stored

    def field(self, name: str) -> Scalar:
        """A field of the prompt, as the schedule has found it."""
        return self.arrays["prompts"][self.number * len(FIELDS) + FIELDS.index(name)]

    def in_page(self, first: int | Scalar = 0, count: int | None = None) -> PageTokens:
        """`count` of the tokens from number `first` on, by default all; they are in one page."""
        arrays, counts, size = self.arrays, self.counts, jnp.int32(self.block_size)
        position = self.position + first
        column = self.field("first_block") + lax.div(position, size)
        is_entry = column < counts["max_blocks"]
        column = jnp.minimum(column, counts["max_blocks"] - 1)
        entry = arrays["block_table"][self.field("seq") * counts["table_stride"] + column]
        is_page = is_entry & (entry >= 0) & (entry <= counts["last_block"])
        num_valid = jnp.where(is_page, self.field("end") - position, 0)
        # Values before the first that a row sees may be NaN, which a weight of 0 does not remove.
        first_valid = None, self.field("first_seen") - position
        number = self.tokens if count is None else count
        return PageTokens(entry, lax.rem(position, size), number, num_valid, first_valid)

    def store_bias(self, num_valid: jax.Array) -> None:
        """Stores which of the tokens are present; there are at most as many tokens as threads."""
        thread = lanes.thread_index()
        bias = jnp.where(thread < num_valid, jnp.float32(0.0), jnp.float32(-jnp.inf))
        index = self.prompt * jnp.int32(self.counts["num_tokens"]) + self.position + thread
        lanes.store_global(self.arrays["bias"], index, bias, thread < self.tokens)
