"""The operands of the prompt kernel, and how it reads and writes them: here JAX's arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat
from kvjax.kernels.aliases import Barriers, Ref, Scalar
from kvjax.kernels.launchable import Number
from kvjax.kernels.prompts import fp8
from kvjax.kernels.prompts.problem import ROWS


class NearTokens[Array: (jax.Array, Ref)](NamedTuple):
    """Tokens that rows see beside others, each row the last ones up to its own.

    Attributes:
      keys: as in `Operands`, of the same dtype, and so are `values`, `positions` and `ends`. All before an end are
        present.
      values: likewise.
      positions: likewise.
      ends: likewise.
      factor: float32 `[1]`, the factor of the logits, positive.
    """

    keys: Array
    values: Array
    positions: Array
    ends: Array
    factor: Array


class Operands[Array: (jax.Array, Ref)](NamedTuple):
    """Arrays, or references to them.

    Attributes:
      query: float16 or bfloat16 `[num_tokens, num_heads, head_size]`, at least `ROWS` tokens.
      keys: float16 or bfloat16 `[num_prompts, num_tokens, num_kv_heads, head_size]`; the number of tokens is a multiple
        of `ALIGNMENT`, at least a tile. Queries are converted to their dtype.
      values: of their dtype, `[.., head_size_v]`; finite also where no row looks. For products in fp8 both are e4m3,
        and values `[num_prompts, num_kv_heads, head_size_v, num_tokens]`, tokens `warpgroups.in_order_of_products`.
      q_starts: int32 `[num_prompts]`, the first row of each sequence.
      q_lens: int32 `[num_prompts]`, its rows, at most `max_q_len`.
      positions: int32 `[num_prompts]`, the index of its first row's token among the dense ones; may be negative.
      bias: float32 `[num_prompts, num_tokens]`, 0, or -inf for tokens that are absent.
      first_absent: int32 `[num_prompts]`: all tokens before this one are present.
      ends: int32 `[num_prompts]`: no token from this one on is present.
      heads: float32 `[3, num_heads]` or, in fp8, `[num_prompts, 3, num_heads]`: a positive factor of the logits, one of
        the results, and the sink, -inf for none. With several splits there must be none: each would count it.
      near: near tokens, of which rows see the last ones, of 16 bits; None for none.
    """

    query: Array
    keys: Array
    values: Array
    q_starts: Array
    q_lens: Array
    positions: Array
    bias: Array
    first_absent: Array
    ends: Array
    heads: Array
    near: NearTokens[Array] | None = None


class RaggedOperands[Array: (jax.Array, Ref)](NamedTuple):
    """Keys and values of sequences one after the other, as a model computes them; as in `Operands` where not said.

    Attributes:
      query: likewise.
      keys: float16 or bfloat16 `[num_tokens, num_kv_heads, head_size]`; the number of tokens is a multiple of
        `ALIGNMENT`, at least a tile.
      values: of their dtype, `[num_tokens, num_kv_heads, head_size_v]`. Tokens of no sequence may be NaN.
      q_starts: int32 `[num_prompts]`, likewise.
      q_lens: likewise.
      positions: likewise.
      kv_starts: int32 `[num_prompts]`, the token that the others are counted from, a multiple of `ALIGNMENT`.
      first_present: int32 `[num_prompts]`, the sequence's first token, less than `ALIGNMENT`.
      ends: int32 `[num_prompts]`, the token after its last.
      heads: float32 `[3, num_heads]`, likewise.
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
    heads: Array


class Stage(NamedTuple):
    """Where a tile is copied to: slot `slot` of `buffer`, in shared memory; barrier `slot` of `full` says when."""

    buffer: Ref
    slot: Scalar
    full: Barriers


class TokenArrays(Protocol):
    """Accesses to tokens. Indices of prompts, heads and tokens are int32 scalars."""

    def position(self, prompt: Scalar) -> jax.Array:
        """As in `Operands`, here and below."""

    def end(self, prompt: Scalar) -> jax.Array: ...  # noqa: D102

    def factor(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:
        """The factor of the logits."""

    def is_present(self, prompt: Scalar, first: Scalar, token: jax.Array) -> jax.Array:
        """Which of a tile's tokens are present, `token[i, j]` of which is `first + j`, in `plgpu.Layout.WGMMA`."""

    def first_token(self, prompt: Scalar, tile: Scalar, size: int) -> Scalar:
        """The first token that is copied of a tile: of an earlier tile where there are too few."""

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
        """Whether token 0 of each prompt is present, if any is, and what is absent has values of zeros."""

    @property
    def no_tile(self) -> int | None:
        """The tile of rows that see no token, after every token; None for any that is after what they would see."""

    @property
    def claims(self) -> Ref:
        """Reference to an int32 scalar."""

    @property
    def near(self) -> TokenArrays | None:
        """Near tokens, if any."""

    def q_start(self, prompt: Scalar) -> jax.Array: ...  # noqa: D102

    def q_len(self, prompt: Scalar) -> jax.Array: ...  # noqa: D102

    def first_present(self, prompt: Scalar) -> Scalar:
        """The first token that is present, unless `is_aligned`."""

    def first_absent(self, prompt: Scalar) -> jax.Array: ...  # noqa: D102

    def weight(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:
        """The factor of the results."""

    def sink(self, prompt: Scalar, head: Scalar) -> Scalar: ...  # noqa: D102

    def load_query(self, first: Scalar, head: Scalar) -> jax.Array:
        """`ROWS` rows of a head."""

    def out(self, split: Scalar, head: Scalar) -> tuple[Ref, Ref, Scalar]:
        """References to a head's results and log-sum-exp, and their row that corresponds to row 0 of the query."""

    def wait(self, full: Barriers, slot: Scalar, times: Callable[[], Scalar]) -> None:
        """Waits for the copy to a slot, which was filled `times()` times before."""


def by_bias(bias: Ref, start: Scalar, token: jax.Array) -> jax.Array:
    """Whether tokens have a bias of 0, the first of which is that of `bias[start]`."""
    of_tile = compat.load(bias.at[pl.ds(start, token.shape[1])], plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(of_tile, token.shape, [1]) == 0


@dataclasses.dataclass(frozen=True)
class _JaxArrays[Given: (Operands[Ref], RaggedOperands[Ref])]:
    """JAX's arrays: shapes are known, and copies have descriptors."""

    operands: Given
    out_ref: Ref
    lse_ref: Ref
    claims_ref: Ref

    @property
    def no_tile(self) -> int | None:
        return None

    @property
    def num_heads(self) -> int:
        return self.operands.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.operands.keys.shape[-2]

    @property
    def head_size_v(self) -> int:
        return self.operands.values.shape[-2 if self._is_fp8 else -1]

    @property
    def _is_fp8(self) -> bool:
        return fp8.is_fp8(self.operands.values.dtype)

    @property
    def num_prompts(self) -> int:
        return self.operands.q_lens.shape[0]

    @property
    def num_rows(self) -> int:
        return self.operands.query.shape[0]

    @property
    def claims(self) -> Ref:
        return self.claims_ref.at[0]

    def q_start(self, prompt: Scalar) -> jax.Array:
        return self.operands.q_starts[prompt]

    def q_len(self, prompt: Scalar) -> jax.Array:
        return self.operands.q_lens[prompt]

    def position(self, prompt: Scalar) -> jax.Array:
        return self.operands.positions[prompt]

    def end(self, prompt: Scalar) -> jax.Array:
        return self.operands.ends[prompt]

    def _of_head(self, index: int, prompt: Scalar, head: Scalar) -> Scalar:
        heads = self.operands.heads
        return heads[index, head] if heads.ndim == 2 else heads[prompt, index, head]

    def factor(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:
        return self._of_head(0, prompt, head)

    def weight(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:
        return self._of_head(1, prompt, head)

    def sink(self, prompt: Scalar, head: Scalar) -> Scalar:
        return self._of_head(2, prompt, head)

    def load_query(self, first: Scalar, head: Scalar) -> jax.Array:
        return compat.load(self.operands.query.at[pl.ds(first, ROWS), head], plgpu.Layout.WGMMA)

    def out(self, split: Scalar, head: Scalar) -> tuple[Ref, Ref, Scalar]:
        return self.out_ref.at[split, :, head], self.lse_ref.at[split, :, head], 0

    def wait(self, full: Barriers, slot: Scalar, times: Callable[[], Scalar]) -> None:
        plgpu.barrier_wait(full.at[slot])


@dataclasses.dataclass(frozen=True)
class NearArrays:
    """JAX's arrays of `NearTokens`."""

    tokens: NearTokens[Ref]

    def position(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.tokens.positions[prompt]

    def end(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.tokens.ends[prompt]

    def factor(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:  # noqa: D102
        return self.tokens.factor[0]

    def is_present(self, prompt: Scalar, first: Scalar, token: jax.Array) -> jax.Array:  # noqa: D102
        return token < self.end(prompt)

    def first_token(self, prompt: Scalar, tile: Scalar, size: int) -> Scalar:  # noqa: D102
        return _tile_within(tile, size, self.tokens.keys)

    def copy(self, values: bool, prompt: Scalar, kv_head: Scalar, first: Scalar, stage: Stage) -> None:  # noqa: D102
        _copy_tokens(self.tokens.values if values else self.tokens.keys, prompt, kv_head, first, stage)


def _tile_within(tile: Scalar, size: int, dense: Ref) -> Scalar:
    """The first token of a tile; the last tile starts earlier, to end with the dense tokens.

    What it shares with the tile before is masked.
    """
    return jnp.minimum(tile * size, dense.shape[1] - size)


def _copy_tokens(source: Ref, prompt: Scalar, kv_head: Scalar, first: Scalar, stage: Stage) -> None:
    buffer, slot, full = stage
    tokens = pl.ds(first, buffer.shape[1])
    compat.copy_to_shared(source.at[prompt, tokens, kv_head], buffer.at[slot], full.at[slot])


@dataclasses.dataclass(frozen=True)
class DenseArrays(_JaxArrays[Operands[Ref]]):
    """JAX's arrays of `Operands`."""

    @property
    def near(self) -> NearArrays | None:  # noqa: D102
        return None if self.operands.near is None else NearArrays(self.operands.near)

    @property
    def is_aligned(self) -> bool:  # noqa: D102
        return True

    def first_present(self, prompt: Scalar) -> Scalar:  # noqa: D102
        return 0

    def first_absent(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.operands.first_absent[prompt]

    def is_present(self, prompt: Scalar, first: Scalar, token: jax.Array) -> jax.Array:  # noqa: D102
        return by_bias(self.operands.bias.at[prompt], first, token)

    def first_token(self, prompt: Scalar, tile: Scalar, size: int) -> Scalar:  # noqa: D102
        return _tile_within(tile, size, self.operands.keys)

    def copy(self, values: bool, prompt: Scalar, kv_head: Scalar, first: Scalar, stage: Stage) -> None:  # noqa: D102
        source = self.operands.values if values else self.operands.keys
        buffer, slot, full = stage
        if values and self._is_fp8:
            source = source.at[prompt, kv_head, :, pl.ds(first, buffer.shape[2])]
            buffer = buffer.at[slot, pl.ds(0, self.head_size_v)]
            compat.copy_to_shared(source, buffer, full.at[slot])
            return
        _copy_tokens(source, prompt, kv_head, first, stage)


@dataclasses.dataclass(frozen=True)
class RaggedArrays(_JaxArrays[RaggedOperands[Ref]]):
    """JAX's arrays of `RaggedOperands`."""

    @property
    def near(self) -> None:  # noqa: D102
        return None

    @property
    def is_aligned(self) -> bool:  # noqa: D102
        return False

    def first_present(self, prompt: Scalar) -> Scalar:  # noqa: D102
        return self.operands.first_present[prompt]

    def first_absent(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.end(prompt)

    def is_present(self, prompt: Scalar, first: Scalar, token: jax.Array) -> jax.Array:  # noqa: D102
        return (token >= self.first_present(prompt)) & (token < self.end(prompt))

    def first_token(self, prompt: Scalar, tile: Scalar, size: int) -> Scalar:
        """As for other arrays; counted from the prompt's first one, it may be negative."""
        return jnp.minimum(tile * size, self.operands.keys.shape[0] - size - self.operands.kv_starts[prompt])

    def copy(self, values: bool, prompt: Scalar, kv_head: Scalar, first: Scalar, stage: Stage) -> None:  # noqa: D102
        source = self.operands.values if values else self.operands.keys
        tokens = pl.ds(self.operands.kv_starts[prompt] + first, stage.buffer.shape[1])
        compat.copy_to_shared(source.at[tokens, kv_head], stage.buffer.at[stage.slot], stage.full.at[stage.slot])
