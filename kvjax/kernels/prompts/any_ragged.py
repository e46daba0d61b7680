"""The prompt kernel over caller-owned keys and values of sequences one after the other, of any number and length.

Two kernels run one after another: one makes tiles of the keys and values of each head, and the prompt kernel attends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat, lanes, tiles
from kvjax.kernels.aliases import DType, Ref, Scalar
from kvjax.kernels.launchable import ANY_LENGTH, AnyCount, Argument, Number, RowMemory, with_origin
from kvjax.kernels.prompts.any_prompts import attend, kernel_of_tiles, result_arguments
from kvjax.kernels.prompts.lot import NUMBERS
from kvjax.kernels.prompts.problem import ALIGNMENT, PromptProblem, choose
from kvjax.kernels.prompts.tiled import RAGGED_FIELDS, RaggedTiles
from kvjax.kernels.registers import MAX_VECTOR_BYTES, THREADS, lane_layout
from kvjax.kernels.target import Target, tracing_for
from kvjax.spec import AttentionSpec

TILE_TOKENS = 64
"""Tokens of a head that a program stores."""

_OTHERS = 2
"""Prompts without tokens, of the rows that no sequence has: those after the last sequence, those before the first."""


def prompts_size(num_seqs: int) -> int:
    """The int32 numbers of `prompts`."""
    return (num_seqs + _OTHERS) * len(RAGGED_FIELDS) + 1


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """Keys or values of each token and head, float16 or bfloat16, at multiples of 16 bytes.

    Attributes:
      dtype: of the elements.
      size: elements of a head, a multiple of 16.
      token_stride: elements between tokens, at least those of a token.
      head_stride: elements between heads.
    """

    dtype: DType
    size: int
    token_stride: int
    head_stride: int


@functools.cache
@with_origin
def any_tiles(num_kv_heads: int, keys: HeadRows, values: HeadRows) -> AnyCount:
    """The copy of keys and values to tiles, and what the prompt kernel has to know of sequences.

    The arguments are the keys and the values, the bounds of sequences' rows and of their tokens, `[num_seqs + 1]` any
    numbers, and the results, as in `RaggedTiles`: tiles of keys and of values, and the prompts, `prompts_size` numbers.
    The last two prompts have the rows of no sequence, and no tokens. `num_rows` are those of the query; `num_tokens`
    tokens belong to sequences, and `num_copied` exist, at least `TILE_TOKENS`. `causal` is 1 if rows see only tokens
    that are not after their own. The amount is `num_copied`.
    """
    operands = {"key": keys, "value": values}

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Ref]) -> None:
        program = lax.axis_index("program")
        pl.when(program == 0)(functools.partial(_schedule, counts, arrays))
        head = lax.rem(program, jnp.int32(num_kv_heads))
        # The last programs of a head also take tokens of other programs, because there is no memory after the tokens.
        last = jnp.int32(counts["num_copied"]) - TILE_TOKENS
        token = jnp.minimum(lax.div(program, jnp.int32(num_kv_heads)) * TILE_TOKENS, last)
        loaded = []
        for name, rows in operands.items():
            source = arrays[name].at[pl.ds(token, TILE_TOKENS), pl.ds(head * rows.head_stride, rows.size)]
            layout = lane_layout((TILE_TOKENS, rows.size), MAX_VECTOR_BYTES // tiles.ITEMSIZE)
            loaded.append((f"{name}_tiles", compat.load(source, layout), layout))
        for name, elements, layout in loaded:
            axes = tiles.Axis(TILE_TOKENS, 1, 0), tiles.Axis(elements.shape[1], 0, 1)
            row = head * jnp.int32(counts["head_rows"]) + token
            tiles.Places(arrays[name], axes, row).store(elements, layout)

    given = (
        Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH, rows.token_stride), rows.dtype))
        for name, rows in operands.items()
    )
    results = *_tile_arguments(keys.dtype, keys.size, values.size), Argument("prompts", NUMBERS)
    return AnyCount(
        body,
        functools.partial(compat.program_kernel, "tile_rows", grid=ANY_LENGTH),
        ("num_seqs", "num_rows", "num_tokens", "num_copied", "head_rows", "causal"),
        (*given, *(Argument(name, NUMBERS) for name in ("q_bounds", "kv_bounds")), *results),
        writes=tuple(argument.name for argument in results),
        num_programs=lambda num_copied: -(-num_copied // TILE_TOKENS) * num_kv_heads,
    )


def _schedule(counts: Mapping[str, Number], arrays: Mapping[str, Ref]) -> None:
    """Stores the prompts; each thread stores one at a time."""
    num_seqs, thread = jnp.int32(counts["num_seqs"]), lanes.thread_index()
    num_prompts = num_seqs + _OTHERS
    zero = lanes.splat(0, jnp.int32)

    def bounds(name: str, prompt: jax.Array, most: Number) -> tuple[jax.Array, jax.Array]:
        first, end = (
            jnp.clip(lanes.bits(lanes.load_global(arrays[name], jnp.minimum(index, num_seqs)), jnp.int32), 0, most)
            for index in (prompt, prompt + 1)
        )
        return first, jnp.maximum(first, end)

    def store(i: Scalar, _: None) -> None:
        prompt = thread + i * THREADS
        start, end = bounds("q_bounds", prompt, counts["num_rows"])
        first = bounds("q_bounds", zero, counts["num_rows"])[0]
        start = jnp.where(prompt > num_seqs, 0, start)
        end = jnp.where(prompt > num_seqs, first, jnp.where(prompt == num_seqs, counts["num_rows"], end))
        q_len = end - start
        first_token, end_token = bounds("kv_bounds", prompt, counts["num_tokens"])
        base = first_token & -ALIGNMENT
        end = end_token - base
        position = end - jnp.where(counts["causal"] != 0, q_len, 0)
        fields = start, q_len, position, base, first_token - base, end
        for index, field in enumerate(fields):
            place = prompt * len(RAGGED_FIELDS) + index
            lanes.store_global(arrays["prompts"], place, field, prompt < num_prompts)

    lax.fori_loop(0, lax.div(num_prompts - 1, jnp.int32(THREADS)) + 1, store, None)
    claims = thread + num_prompts * len(RAGGED_FIELDS)
    lanes.store_global(arrays["prompts"], claims, zero, thread == 0)


def _tile_arguments(dtype: DType, *sizes: int) -> tuple[Argument, ...]:
    names = "key_tiles", "value_tiles"
    return tuple(
        Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH, size), dtype)) for name, size in zip(names, sizes, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class RaggedKind:
    """What a prompt kernel over keys and values of sequences one after the other is compiled for.

    Attributes:
      spec: heads and their sizes; blocks do not matter.
      query: the query's rows, of the dtype of keys and values.
      num_heads: its heads.
      sm_scale: factor of the logits, positive.
      is_divided: whether there are several splits.
    """

    spec: AttentionSpec
    query: RowMemory
    num_heads: int
    sm_scale: float
    is_divided: bool


@functools.cache
@with_origin
def any_ragged(kind: RaggedKind, target: Target) -> AnyCount:
    """The prompt kernel.

    The arguments are the query, what `any_tiles` has stored, and the results out and lse. All rows of results are
    stored, with several splits those of each. `num_rows` are those of the query, at least `ROWS`; with several splits,
    they are as many as results have.
    """
    spec, dtype = kind.spec, np.dtype(kind.query.dtype)
    with tracing_for(target):
        config = choose(spec, 1, 1, kind.num_heads, 0, 1)

    problem = PromptProblem(0, None, None)

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        numbers = {name: jnp.int32(count) for name, count in counts.items()}
        own = RaggedTiles(
            num_heads=kind.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            num_rows=numbers["num_rows"],
            num_prompts=numbers["num_seqs"] + _OTHERS,
            sm_scale=kind.sm_scale,
            head_rows=numbers["head_rows"],
            prompts=arrays["prompts"],
            query=arrays["query"],
            keys=arrays["key_tiles"],
            values=arrays["value_tiles"],
            out_ref=arrays["out"],
            lse_ref=arrays["lse"],
        )
        splits = numbers["splits"] if kind.is_divided else 1
        attend(problem, dataclasses.replace(config, splits=splits), own, scratch)

    results = result_arguments(kind.num_heads, spec.head_size_v, jnp.float32 if kind.is_divided else dtype)
    return AnyCount(
        body,
        functools.partial(kernel_of_tiles, problem, config, (spec.head_size, spec.head_size_v, dtype), target),
        ("num_seqs", "num_rows", "head_rows", "splits"),
        (
            kind.query.argument("query", lambda rows: rows),
            *_tile_arguments(dtype, *spec.head_sizes),
            Argument("prompts", NUMBERS),
            *results,
        ),
        writes=("prompts", *(argument.name for argument in results)),
        num_programs=lambda _: target.multiprocessors,
    )
