"""How the prompt kernel reads and writes caller-owned memory, or JAX arrays likewise: keys and values in tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, tiles
from kvjax.kernels.aliases import Barriers, Ref, Scalar
from kvjax.kernels.prompts import fp8
from kvjax.kernels.prompts.operands import Stage
from kvjax.kernels.prompts.problem import ROWS, TOKENS

FIELDS = "seq", "q_start", "q_len", "position", "first_absent", "end", "first_block", "first_seen"
"""What is known of a prompt: a row of int32 numbers.

`seq` is its sequence, `q_start` to `end` are as in `PromptArrays`, tokens counted from the first one of block
`first_block` of its row of the block table on. `first_seen` is the first token that a row sees.
"""


_NO_TILE = 1 << 23


@dataclasses.dataclass(frozen=True)
class _CallerArrays:
    """Memory whose copies take no descriptors.

    Attributes:
      num_heads: as in `PromptArrays`.
      num_kv_heads: likewise.
      head_size: columns of keys.
      head_size_v: columns of values.
      num_rows: rows of the query, at least `ROWS`.
      num_prompts: as in `PromptArrays`.
      sm_scale: factor of the logits.
      query: `[num_rows, stride]`.
      keys: tiles, `[any number, head_size]`.
      values: likewise.
      out_ref: `[num_splits * num_rows, num_heads, head_size_v]`.
      lse_ref: `[num_splits * num_rows, num_heads]`.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    num_rows: Scalar
    num_prompts: Scalar
    sm_scale: float
    query: Ref
    keys: Ref
    values: Ref
    out_ref: Ref
    lse_ref: Ref

    def _field(self, prompt: Scalar, name: str) -> jax.Array:
        """A number of a prompt, by its name in `FIELDS` or `RAGGED_FIELDS`."""
        raise NotImplementedError

    def q_start(self, prompt: Scalar) -> jax.Array:
        return self._field(prompt, "q_start")

    def q_len(self, prompt: Scalar) -> jax.Array:
        return self._field(prompt, "q_len")

    def position(self, prompt: Scalar) -> jax.Array:
        return self._field(prompt, "position")

    def end(self, prompt: Scalar) -> jax.Array:
        return self._field(prompt, "end")

    @property
    def no_tile(self) -> int | None:
        """Tile 0 is copied, which is always stored; so the end of the tokens need not be read for each tile."""
        return _NO_TILE

    def first_token(self, prompt: Scalar, tile: Scalar, size: int) -> Scalar:
        return (tile & (_NO_TILE - 1)) * size

    def load_query(self, first: Scalar, head: Scalar) -> jax.Array:
        columns = pl.ds(head * self.head_size, self.head_size)
        return compat.load(self.query.at[pl.ds(first, ROWS), columns], plgpu.Layout.WGMMA)

    def out(self, split: Scalar, head: Scalar) -> tuple[Ref, Ref, Scalar]:
        return self.out_ref.at[:, head], self.lse_ref.at[:, head], split * self.num_rows

    def wait(self, full: Barriers, slot: Scalar, times: Callable[[], Scalar]) -> None:
        tiles.wait(full, slot, times())


@dataclasses.dataclass(frozen=True)
class TiledArrays(_CallerArrays):
    """Tiles of each prompt of a lot, made of pages.

    Attributes:
      num_tokens: tokens of each prompt's tiles.
      first_prompt: the first prompt that there are tiles of; `num_prompts` are those from there on.
      lot: the index of the claims of these prompts.
      prompts: reference to int32, the 8 `FIELDS` of each prompt of the step.
      header: reference to int32, the number of prompts, and the claims of each lot.
      keys: `[num_prompts * num_kv_heads * num_tokens, head_size]`.
      values: `[num_prompts * num_kv_heads * num_tokens, head_size_v]`; for products in fp8 transposed, each tile apart,
        `[num_prompts * num_kv_heads * num_tokens // TOKENS * head_size_v, TOKENS]`.
      bias: float32 `[num_prompts * num_tokens]`.
      k_scale: float32 `[1]` or `[num_kv_heads]`; None for 1.
      v_scale: likewise.
      sinks: float32 `[num_heads]`, or None.
      near: tiles of near tokens, of which all before the end are present; None for none.
      units: the bits of block scales of keys and of values, int32 `[2 * num_kv_heads]` for each prompt of the step;
        tiles are in units of their `fp8.unit_above`. None where tiles are in no unit.
    """

    num_tokens: Scalar
    first_prompt: Scalar
    lot: Scalar
    prompts: Ref
    header: Ref
    bias: Ref
    k_scale: Ref | None
    v_scale: Ref | None
    sinks: Ref | None
    units: Sequence[Ref | None]
    near: TiledArrays | None = None

    @property
    def claims(self) -> Ref:  # noqa: D102
        return self.header.at[1 + self.lot]

    @property
    def is_aligned(self) -> bool:  # noqa: D102
        return True

    def _field(self, prompt: Scalar, name: str) -> jax.Array:
        return self.prompts[(self.first_prompt + prompt) * len(FIELDS) + FIELDS.index(name)]

    def first_present(self, prompt: Scalar) -> Scalar:  # noqa: D102
        return 0

    def first_absent(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self._field(prompt, "first_absent")

    def factor(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:  # noqa: D102
        return _scale(self.k_scale, kv_head) * np.float32(self.sm_scale) * self._unit(False, prompt, kv_head)

    def weight(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:  # noqa: D102
        return _scale(self.v_scale, kv_head) * self._unit(True, prompt, kv_head)

    def _unit(self, values: bool, prompt: Scalar, kv_head: Scalar) -> Scalar:
        units = self.units[values]
        if units is None:
            return np.float32(1.0)
        index = ((self.first_prompt + prompt) * 2 + int(values)) * self.num_kv_heads + kv_head
        return fp8.unit_above(units[index])

    def sink(self, prompt: Scalar, head: Scalar) -> Scalar:  # noqa: D102
        return jnp.float32(-jnp.inf) if self.sinks is None else self.sinks[head]

    def is_present(self, prompt: Scalar, first: Scalar, token: jax.Array) -> jax.Array:  # noqa: D102
        start = prompt * self.num_tokens + first
        of_tile = compat.load(self.bias.at[pl.ds(start, token.shape[1])], plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(of_tile, token.shape, [1]) == 0

    def copy(self, values: bool, prompt: Scalar, kv_head: Scalar, first: Scalar, stage: Stage) -> None:  # noqa: D102
        row = (prompt * self.num_kv_heads + kv_head) * self.num_tokens + first
        if values and fp8.is_fp8(self.values.dtype):
            row = lax.div(row, jnp.int32(TOKENS)) * self.head_size_v
            tiles.copy(self.values, row, *stage, num_rows=self.head_size_v)
        else:
            tiles.copy(self.values if values else self.keys, row, *stage)


RAGGED_FIELDS = "q_start", "q_len", "position", "base", "first_present", "end"
"""What is known of a prompt of `RaggedTiles`: a row of int32 numbers.

`base` is the token that the others are counted from, a multiple of `ALIGNMENT`, `first_present` the sequence's first
one and `end` the one after its last; the others are as in `PromptArrays`.
"""


@dataclasses.dataclass(frozen=True)
class RaggedTiles(_CallerArrays):
    """Tiles of the keys and values of sequences one after the other, as a model computes them; no near tokens.

    Attributes:
      head_rows: rows of the tiles of a head, a multiple of `ALIGNMENT`, a tile more than there are tokens.
      prompts: reference to int32 `[num_prompts * 6 + 1]`, for each the `RAGGED_FIELDS`, and last the claims.
      keys: `[num_kv_heads * head_rows, head_size]`.
      values: `[num_kv_heads * head_rows, head_size_v]`. Values of no sequence may be NaN.
    """

    head_rows: Scalar
    prompts: Ref

    @property
    def claims(self) -> Ref:  # noqa: D102
        return self.prompts.at[self.num_prompts * len(RAGGED_FIELDS)]

    @property
    def near(self) -> None:  # noqa: D102
        return None

    @property
    def is_aligned(self) -> bool:  # noqa: D102
        return False

    def _field(self, prompt: Scalar, name: str) -> jax.Array:
        return self.prompts[prompt * len(RAGGED_FIELDS) + RAGGED_FIELDS.index(name)]

    def first_present(self, prompt: Scalar) -> Scalar:  # noqa: D102
        return self._field(prompt, "first_present")

    def first_absent(self, prompt: Scalar) -> jax.Array:  # noqa: D102
        return self.end(prompt)

    def factor(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:  # noqa: D102
        return jnp.float32(self.sm_scale)

    def weight(self, prompt: Scalar, head: Scalar, kv_head: Scalar) -> Scalar:  # noqa: D102
        return jnp.float32(1.0)

    def sink(self, prompt: Scalar, head: Scalar) -> Scalar:  # noqa: D102
        return jnp.float32(-jnp.inf)

    def is_present(self, prompt: Scalar, first: Scalar, token: jax.Array) -> jax.Array:  # noqa: D102
        return (token >= self.first_present(prompt)) & (token < self.end(prompt))

    def copy(self, values: bool, prompt: Scalar, kv_head: Scalar, first: Scalar, stage: Stage) -> None:  # noqa: D102
        row = kv_head * self.head_rows + self._field(prompt, "base") + first
        tiles.copy(self.values if values else self.keys, row, *stage)


def _scale(scale: Ref | None, kv_head: Scalar) -> Scalar:
    if scale is None:
        return jnp.float32(1.0)
    return scale[0] if scale.shape[0] == 1 else scale[kv_head]
