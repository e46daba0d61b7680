"""Rotary position embedding as a step of the write: rotates queries and keys, or rope keys, before these are stored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, warpgroups
from kvjax.kernels.aliases import DType, Ref
from kvjax.kernels.codecs import codecs_of
from kvjax.kernels.launchable import ANY_LENGTH, Argument, Number, Operand, RowMemory, Rows
from kvjax.kernels.write.rotation import LoadedHeads, Rotation, store_heads
from kvjax.spec import AttentionSpec


class Rotated(NamedTuple):
    """What a write of JAX arrays rotates before it stores keys; it returns the rotated queries.

    Attributes:
      query: `[num_tokens, num_heads, head_size]`, of the dtype of the keys.
      positions: int32 `[num_tokens]`, each clipped to the rows of `table`.
      table: `[max_position, rot_dim]`, cosines then sines.
      is_neox: as in `Rotation`.
    """

    query: jax.Array
    positions: jax.Array
    table: jax.Array
    is_neox: bool

    @property
    def memory(self) -> RotatedMemory:
        """What the kernel is compiled for."""
        _, num_heads, head_size = self.query.shape
        table, positions = self.table.dtype, self.positions.dtype
        rotation = Rotation(self.query.dtype, head_size, self.table.shape[1], self.is_neox, table.itemsize)
        return RotatedMemory(rotation, num_heads, RowMemory.of(self.query), positions, table)

    @property
    def arrays(self) -> dict[str, Operand]:
        """The arguments of `RotatedMemory.arguments`."""
        rotated_query = jax.ShapeDtypeStruct(self.query.shape, self.query.dtype)
        given = {"query": self.query, "positions": self.positions, "cos_sin_cache": self.table}
        return given | {"rotated_query": rotated_query}


@dataclasses.dataclass(frozen=True)
class RotatedMemory:
    """What a write is compiled for that rotates queries and keys before it stores these.

    Attributes:
      rotation: how to rotate.
      num_heads: query heads.
      query: memory of the queries. Rotated queries go to a contiguous array of `rotation.dtype`.
      position_dtype: int32 or int64; positions are clipped to the rows of the table.
      table_dtype: dtype of cosines and sines. The table is contiguous and starts at a multiple of 16 bytes.
    """

    rotation: Rotation
    num_heads: int
    query: RowMemory
    position_dtype: DType
    table_dtype: DType

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Queries, positions, the table, and rotated queries."""
        rotated_query = dataclasses.replace(self.query, token_stride=self.num_heads * self.rotation.head_size)
        return (
            self.query.argument("query", self.rotation.as_columns),
            Argument("positions", jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)),
            Argument("cos_sin_cache", jax.ShapeDtypeStruct((ANY_LENGTH, self.rotation.rot_dim), self.table_dtype)),
            rotated_query.argument("rotated_query", self.rotation.as_columns),
        )

    def step(self, arrays: Mapping[str, Ref], last_position: Number, staged_keys: tuple[Any, Any]) -> RotationStep:
        """The step in a kernel, over the references of `arguments`."""
        words_per_position = self.position_dtype.itemsize // 4
        return RotationStep(
            Rows(arrays["query"], self.query.alignment),
            self.num_heads,
            Positions(arrays["positions"], words_per_position, last_position),
            Rows(arrays["cos_sin_cache"]),
            Rows(arrays["rotated_query"]),
            staged_keys,
            self.rotation,
        )


class Positions(NamedTuple):
    """The positions of a call in `ref`, as int32 words, low word first; that of token `t` is number `t`."""

    ref: Ref
    words_per_position: int
    last: Number

    def table_row(self, token: jax.Array) -> jax.Array:
        """The row of the table for a token: its position clipped to 0 and `last`."""
        word = token * self.words_per_position
        position = self.ref[word]
        if self.words_per_position == 2:
            high = self.ref[word + 1]
            exceeds_int32 = (high > 0) | ((high == 0) & (position < 0))
            position = jnp.where(exceeds_int32, self.last, jnp.where(high < 0, 0, position))
        return jnp.clip(position, 0, self.last)


class RotationStep(NamedTuple):
    """The rotation in a kernel.

    `staged_keys` are two views of the shared memory that rotated keys go to: of uint32 words, and of elements.
    """

    query: Rows
    num_heads: int
    positions: Positions
    table: Rows
    rotated_query: Rows
    staged_keys: tuple[Any, Any]
    rotation: Rotation

    def rotated_keys(self, spec: AttentionSpec, first: jax.Array) -> Rows:
        """The rotated keys of a program's tokens, as the encoding reads them."""
        return Rows(self.staged_keys[0 if codecs_of(spec)[rotated_part(spec)].reads_words else 1], first=first)

    def rotate_token(self, key: Rows | None, spec: AttentionSpec, token: jax.Array, with_query: bool) -> None:
        """Rotates the key, unless that is None, and the query of a program's only token, if asked for.

        With few tokens, the latency of loads dominates. All loads but those of cosines and sines, which wait for the
        position, are issued before the first is waited for. Compilers would move them after uses of the others, but
        move none past a barrier.
        """
        keys = None if key is None else self.rotation.load(key, token, spec.num_kv_heads)
        queries = self.rotation.load(self.query, token, self.num_heads) if with_query else None
        position = self.positions.table_row(token)
        warpgroups.barrier()
        if keys is not None:
            self._rotate_key(keys, 0, position)
            self._copy_between_views(1)
        if queries is not None:
            self._rotate_query(queries, token, position)

    def rotate_keys(self, key: Rows, spec: AttentionSpec, tokens: int, first: jax.Array) -> None:
        """Rotates the keys of a program's tokens into shared memory."""
        for i in range(tokens):
            keys = self.rotation.load(key, first + i, spec.num_kv_heads)
            self._rotate_key(keys, i, self.positions.table_row(first + i))
        self._copy_between_views(tokens)

    def rotate_queries(self, tokens: int, first: jax.Array, first_owned: jax.Array) -> None:
        """Rotates the queries of the tokens that the program owns."""
        for i in range(tokens):

            @pl.when(first + i >= first_owned)
            def _(token: jax.Array = first + i) -> None:
                queries = self.rotation.load(self.query, token, self.num_heads)
                self._rotate_query(queries, token, self.positions.table_row(token))

    def _rotate_key(self, keys: LoadedHeads, i: int, position: jax.Array) -> None:
        """Rotates the keys of token `i` of the program."""
        staged = Rows(self.staged_keys[self.rotation.is_neox])
        store = functools.partial(store_heads, staged, i, self.rotation.columns)
        self.rotation.rotate(keys, self.table, position, store)

    def _rotate_query(self, queries: LoadedHeads, token: jax.Array, position: jax.Array) -> None:
        store = functools.partial(store_heads, self.rotated_query, token, self.rotation.columns)
        self.rotation.rotate(queries, self.table, position, store)

    def _copy_between_views(self, tokens: int) -> None:
        """Copies staged keys to their other view in interpret mode, where the two are separate memory."""
        if not compat.interpreting():
            return
        rotation = self.rotation
        staged = self.staged_keys[rotation.is_neox][:tokens]
        pairs = staged.reshape(tokens, -1, 2) if rotation.is_neox else staged
        other = lax.bitcast_convert_type(pairs, jnp.uint32 if rotation.is_neox else rotation.dtype)
        self.staged_keys[1 - rotation.is_neox][:tokens] = other.reshape(tokens, -1)


def rotated_part(spec: AttentionSpec) -> int:
    """Which of a token's rows is rotated: its key or, for latents, its rope key."""
    return int(spec.is_mla)


def key_staging(spec: AttentionSpec, tokens: int, dtype: DType) -> Any:
    """Shared memory for rotated keys of `dtype`, 16 bits wide, as words and as elements."""
    row = spec.num_kv_heads * spec.part_sizes[rotated_part(spec)]
    views = plgpu.SMEM((tokens, row // 2), jnp.uint32), plgpu.SMEM((tokens, row), dtype)
    # The interpreter cannot read through another view than the one that was written.
    return views if compat.interpreting() else plgpu.RefUnion(*views)
