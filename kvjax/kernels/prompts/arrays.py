"""Prompts over the pages of JAX arrays: the gather of a lot's pages to tiles, and the prompt kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels.aliases import DType
from kvjax.kernels.launchable import PAGES, Operand, array_memory
from kvjax.kernels.prompts import fp8
from kvjax.kernels.prompts.any_fp8 import any_fp8_gather, any_units
from kvjax.kernels.prompts.any_prompts import PromptKind, any_gather, any_prompts
from kvjax.kernels.prompts.lot import tile_arguments
from kvjax.kernels.prompts.problem import block_shape
from kvjax.kernels.prompts.tiled import FIELDS
from kvjax.kernels.target import current
from kvjax.spec import AttentionSpec

_FIRST = 1
"""The number of a lot's first prompt: the header takes the place of prompt 0, so that both are one array."""


class PromptRows(NamedTuple):
    """The rows of a step, and what belongs to their heads.

    Attributes:
      query: float16 or bfloat16 `[num_rows, num_heads, head_size]`, at least `ROWS` rows.
      max_q_len: most rows of a prompt.
      k_scale: float32, one or one for each KV head.
      v_scale: likewise.
      sinks: float32 `[num_heads]`; read if `PromptKind.has_sinks`.
    """

    query: jax.Array
    max_q_len: int
    k_scale: jax.Array
    v_scale: jax.Array
    sinks: jax.Array | None


class LotPages(NamedTuple):
    """Pages, and what the prompts of a lot see of them.

    Attributes:
      kv: `[num_blocks, ...]`, the array of a cache of one layer.
      spec: the cache's.
      table: int32 `[num_prompts, max_blocks]`, the blocks of each prompt; entries may be any number.
      found: as `found_of` returns it.
      num_tokens: tokens of each prompt's tiles, a multiple of `TOKENS`.
    """

    kv: jax.Array
    spec: AttentionSpec
    table: jax.Array
    found: jax.Array
    num_tokens: int


def found_of(fields: Mapping[str, jax.Array], count: jax.Array) -> jax.Array:
    """What a schedule finds, int32 `[1 + num_prompts, len(FIELDS)]`: the header, then the fields of each prompt.

    Args:
      fields: int32 `[num_prompts]`, by their names in `FIELDS`. `seq` is not given.
      count: the number of prompts, int32; entries that are no prompts come last.
    """
    [num_prompts] = fields["q_len"].shape
    seq = lax.iota(jnp.int32, num_prompts)
    rows = jnp.stack([seq if name == "seq" else fields[name] for name in FIELDS], axis=1)
    # The first number is the header's, of prompts; the second counts the kernel's claims.
    header = jnp.pad((count + _FIRST).reshape(1, 1), ((0, 0), (0, len(FIELDS) - 1)))
    return jnp.concatenate([header, rows])


def attend(
    kind: PromptKind,
    rows: PromptRows,
    pages: LotPages,
    near: LotPages | None,
    results: tuple[jax.Array, jax.Array],
    splits: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Stores results of a lot's prompts among `results`, in place where these are donated, and returns them.

    Args:
      kind: what the kernel is compiled for.
      rows: the rows.
      pages: what they see.
      near: what they see of near tokens; None if `kind.near` is.
      results: `[splits, num_rows, num_heads, head_size_v]` of the query's dtype, float32 if `kind.is_divided`, and the
        float32 log-sum-exp `[splits, num_rows, num_heads]`.
      splits: parts that a row's tokens are divided into, 1 unless `kind.is_divided`.
    """
    heads, at_once = block_shape(kind.num_heads, kind.spec.num_kv_heads)
    num_prompts = pages.table.shape[0]
    most_items = num_prompts * -(-rows.max_q_len // at_once) * (kind.num_heads // heads) * splits
    target = current()
    target = dataclasses.replace(target, multiprocessors=max(1, min(most_items, target.multiprocessors)))
    tiles = gather(pages, kind.dtype)
    counts = [rows.query.shape[0], pages.num_tokens, _FIRST, num_prompts, 0, splits]
    arrays = {**tiles, "query": rows.query, "k_scale": rows.k_scale, "v_scale": rows.v_scale}
    if rows.sinks is not None:
        arrays["sinks"] = rows.sinks
    if near is not None:
        arrays |= {f"near_{name}": x for name, x in gather(near, kind.dtype).items()}
        counts.append(near.num_tokens)
    out, lse = results
    written = any_prompts(kind, target).of_arrays(counts, 1, {**arrays, "out": out, "lse": lse})
    return written["out"], written["lse"]


def gather(pages: LotPages, dtype: DType) -> dict[str, jax.Array]:
    """Tiles, bias and units of a lot by the names of the prompt kernel's arguments, and what was found."""
    kv, spec, table, found, num_tokens = pages
    (num_prompts, max_blocks), heads, memory = table.shape, spec.num_kv_heads, array_memory(spec)
    found, amount = found.reshape(-1), num_prompts * num_tokens
    arrays = dict[str, Operand](block_table=table, prompts=found, header=found, **dict.fromkeys(PAGES, kv))
    sizes = {"keys": heads * spec.head_size, "values": heads * spec.head_size_v, "bias": 1}
    for argument in tile_arguments(spec, dtype):
        columns = argument.array.shape[1:]
        shape = amount * sizes[argument.name] // math.prod(columns), *columns
        arrays[argument.name] = jax.ShapeDtypeStruct(shape, argument.array.dtype)
    counts, units = (_FIRST, num_tokens, max_blocks, max_blocks, kv.shape[0] - 1), dict[str, jax.Array]()
    if not fp8.is_fp8(dtype):
        kernel = any_gather(spec, memory, dtype)
    else:
        kernel = any_fp8_gather(spec, memory)
        if any(map(fp8.takes_unit, spec.dtype.parts)):
            zeros = jnp.zeros((_FIRST + num_prompts) * 2 * heads, jnp.int32)
            units = any_units(spec, memory).of_arrays(counts, amount, arrays | {"units": zeros})
    return {"prompts": found, "header": found, **kernel.of_arrays(counts, amount, arrays | units), **units}
