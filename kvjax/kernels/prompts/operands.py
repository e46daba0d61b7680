"""How the prompt kernel reads and writes its operands; here JAX's dense keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat
from kvjax.kernels.aliases import Barriers, Ref, Scalar
from kvjax.kernels.launchable import Number
from kvjax.kernels.prompts.problem import ROWS


class RaggedOperands[Array: (jax.Array, Ref)](NamedTuple):
    """JAX's keys and values of sequences one after the other, as a model computes them; or references to them.

    Attributes:
      query: float16 or bfloat16 `[num_tokens, num_heads, head_size]`, at least `ROWS` tokens.
      keys: of its dtype, `[num_tokens, num_kv_heads, head_size]`; the number of tokens is a multiple of `ALIGNMENT`, at
        least a tile.
      values: likewise, `[num_tokens, num_kv_heads, head_size_v]`. Tokens of no sequence may be NaN.
      q_starts: int32 `[num_prompts]`, the first row of each sequence.
      q_lens: int32 `[num_prompts]`, its rows, at most `max_q_len`.
      positions: int32 `[num_prompts]`, the index of its first row's token; may be negative.
      kv_starts: int32 `[num_prompts]`, the token that the others are counted from, a multiple of `ALIGNMENT`.
      first_present: int32 `[num_prompts]`, the sequence's first token, less than `ALIGNMENT`.
      ends: int32 `[num_prompts]`, the token after its last.
      sm_scale: float32 `[1]`, the factor of the logits, positive.
    """

    query: Array
    keys: Array
    values: Array
    q_starts: Array
    q_lens: Array
    positions: Array
    kv_starts: Array
    first_present: Array
    ends: Array
    sm_scale: Array


class Stage(NamedTuple):
    """Where a tile is copied to: slot `slot` of `buffer`, in shared memory; barrier `slot` of `full` says when."""

    buffer: Ref
    slot: Scalar
    full: Barriers


class TokenArrays(Protocol):
    """Accesses to tokens. Indices of prompts, heads and tokens are int32 scalars."""

    def position(self, prompt: Scalar) -> jax.Array:
        """The index of the token of the prompt's first row; may be negative."""

    def end(self, prompt: Scalar) -> jax.Array:
        """The token from which on none is present."""

    def factor(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:
        """The factor of the logits."""

    def is_present(self, prompt: Scalar, first: Scalar, token: jax.Array) -> jax.Array:
        """Which of a tile's tokens are present; `token[i, j]` is `first + j`, in `plgpu.Layout.WGMMA`."""

    def first_token(self, prompt: Scalar, tile: Scalar, size: int) -> Scalar:
        """The first token that is copied for a tile; it is of an earlier tile where there are too few tokens."""

    def copy(self, values: bool, prompt: Scalar, kv_head: Scalar, first: Scalar, stage: Stage) -> None:
        """Starts the copy of a tile of keys or values."""


class PromptArrays(TokenArrays, Protocol):
    """Accesses to what the kernel reads and writes; indices of rows are int32 scalars too."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""

    @property
    def head_size_v(self) -> int:
        """Columns of values."""

    @property
    def num_prompts(self) -> Number:
        """Prompts, those without rows included."""

    @property
    def num_rows(self) -> Number:
        """Rows of the query, at least `ROWS`."""

    @property
    def is_aligned(self) -> bool:
        """Whether token 0 of each prompt is present, if any is, and the values of absent tokens are zeros."""

    @property
    def no_tile(self) -> int | None:
        """The tile for rows that see no token, after all tokens; None for any tile after what they would see."""

    @property
    def claims(self) -> Ref:
        """Reference to an int32 scalar."""

    @property
    def near(self) -> TokenArrays | None:
        """Near tokens, if any."""

    def q_start(self, prompt: Scalar) -> jax.Array:
        """The prompt's first row of the query."""

    def q_len(self, prompt: Scalar) -> jax.Array:
        """The prompt's number of rows; none if negative."""

    def first_present(self, prompt: Scalar) -> Scalar:
        """The first token that is present, unless `is_aligned`."""

    def first_absent(self, prompt: Scalar) -> jax.Array:
        """The first absent token after the first one that is present."""

    def weight(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:
        """The factor of the results."""

    def sink(self, prompt: Scalar, head: Scalar) -> Scalar:
        """A logit beside those of tokens; -inf for none, as with several splits, each of which would count it."""

    def load_query(self, first: Scalar, head: Scalar) -> jax.Array:
        """`ROWS` rows of a head."""

    def out(self, split: Scalar, head: Scalar) -> tuple[Ref, Ref, Scalar]:
        """References to a head's results and log-sum-exp, and their row that corresponds to row 0 of the query."""

    def wait(self, full: Barriers, slot: Scalar, times: Callable[[], Scalar]) -> None:
        """Waits for the copy to a slot, which was filled `times()` times before."""


@dataclasses.dataclass(frozen=True)
class RaggedArrays:
    """JAX's arrays of `RaggedOperands`: shapes are known, and copies have descriptors.

    Attributes:
      operands: the arrays.
      out_ref: `[splits, num_rows, num_heads, head_size_v]`.
      lse_ref: `[splits, num_rows, num_heads]`.
      claims_ref: int32, zeros; the kernel counts in the first one.
    """

    operands: RaggedOperands[Ref]
    out_ref: Ref
    lse_ref: Ref
    claims_ref: Ref

    @property
    def no_tile(self) -> int | None:  # noqa: D102
        return None

    @property
    def num_heads(self) -> int:  # noqa: D102
        return self.operands.query.shape[1]

    @property
    def num_kv_heads(self) -> int:  # noqa: D102
        return self.operands.keys.shape[1]

    @property
    def head_size_v(self) -> int:  # noqa: D102
        return self.operands.values.shape[2]

    @property
    def num_prompts(self) -> int:  # noqa: D102
        return self.operands.q_lens.shape[0]

    @property
    def num_rows(self) -> int:  # noqa: D102
        return self.operands.query.shape[0]

    @property
    def claims(self) -> Ref:  # noqa: D102
        return self.claims_ref.at[0]

    @property
    def near(self) -> None:  # noqa: D102
        return None

    @property
    def is_aligned(self) -> bool:  # noqa: D102
        return False

    def q_start(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.operands.q_starts[prompt]

    def q_len(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.operands.q_lens[prompt]

    def position(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.operands.positions[prompt]

    def end(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.operands.ends[prompt]

    def first_present(self, prompt: Scalar) -> Scalar:  # noqa: D102
        return self.operands.first_present[prompt]

    def first_absent(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.end(prompt)

    def factor(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:  # noqa: D102
        return self.operands.sm_scale[0]

    def weight(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:  # noqa: D102
        return jnp.float32(1.0)

    def sink(self, prompt: Scalar, head: Scalar) -> Scalar:  # noqa: D102
        return jnp.float32(-jnp.inf)

    def is_present(self, prompt: Scalar, first: Scalar, token: jax.Array) -> jax.Array:  # noqa: D102
        return (token >= self.first_present(prompt)) & (token < self.end(prompt))

    def first_token(self, prompt: Scalar, tile: Scalar, size: int) -> Scalar:
        """The last tile starts earlier, so that it ends with the tokens; what it shares with the tile before is masked.

        The result is counted from the prompt's first token, and may be negative.
        """
        return jnp.minimum(tile * size, self.operands.keys.shape[0] - size - self.operands.kv_starts[prompt])

    def copy(self, values: bool, prompt: Scalar, kv_head: Scalar, first: Scalar, stage: Stage) -> None:  # noqa: D102
        source = self.operands.values if values else self.operands.keys
        tokens = pl.ds(self.operands.kv_starts[prompt] + first, stage.buffer.shape[1])
        compat.copy_to_shared(source.at[tokens, kv_head], stage.buffer.at[stage.slot], stage.full.at[stage.slot])

    def load_query(self, first: Scalar, head: Scalar) -> jax.Array:  # noqa: D102
        return compat.load(self.operands.query.at[pl.ds(first, ROWS), head], plgpu.Layout.WGMMA)

    def out(self, split: Scalar, head: Scalar) -> tuple[Ref, Ref, Scalar]:  # noqa: D102
        return self.out_ref.at[split, :, head], self.lse_ref.at[split, :, head], 0

    def wait(self, full: Barriers, slot: Scalar, times: Callable[[], Scalar]) -> None:  # noqa: D102
        plgpu.barrier_wait(full.at[slot])
