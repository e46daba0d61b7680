"""The prompt kernel over pages, for any number of prompts, tokens and blocks.

Three kernels run one after another: `schedule` finds the prompts (for JAX arrays, XLA does), the gather converts their
pages to tiles, and the prompt kernel attends. Prompts are gathered and attended to in lots, so that tiles take a
limited amount of memory. Near tokens have another schedule, which finds them, and another gather, which converts them
to tiles.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvjax.dtypes import KVCacheDType
from kvjax.kernels import compat, tiles
from kvjax.kernels.aliases import DType, DTypeLike, Kernel, Ref, Scalar
from kvjax.kernels.codecs import codecs_of
from kvjax.kernels.gather import GatherConfig
from kvjax.kernels.launchable import (
    ANY_LENGTH,
    PAGES,
    SCALES,
    AnyCount,
    Argument,
    Number,
    PageMemory,
    RowMemory,
    RowScaleMemory,
    check_row_scales,
    page_arguments,
    row_scale_arguments,
    row_scales_of,
    scale_argument,
    with_origin,
)
from kvjax.kernels.page_tokens import GatherOperand, decode_tokens
from kvjax.kernels.prompts import fp8
from kvjax.kernels.prompts.launch import kernel_of
from kvjax.kernels.prompts.lot import COUNTS, FOUND, NUMBERS, LotTokens, tile_arguments
from kvjax.kernels.prompts.operands import PromptArrays
from kvjax.kernels.prompts.problem import TOKENS, PromptConfig, PromptProblem, choose, dense_dtype
from kvjax.kernels.prompts.rows import Scratch, run
from kvjax.kernels.prompts.tiled import TiledArrays
from kvjax.kernels.target import Target, tracing_for
from kvjax.spec import AttentionSpec


@functools.cache
@with_origin
def any_gather(
    spec: AttentionSpec,
    pages: tuple[PageMemory, PageMemory],
    dtype: DType,
    scale_pages: RowScaleMemory = (None, None),
) -> AnyCount:
    """The gather of a lot's pages to tiles of a dtype; scales of a layer or head are not applied.

    The arguments are the block table, the schedule's results, the keys' and the values' pages, the pages of the scales
    of each token and head where these are separate arrays, and the results: tiles of keys and of values, and the bias,
    as in `TiledArrays`. Tiles of which no token is present are not stored, except the first of a prompt. The counts are
    as in `schedule`, and `num_tokens` and `first_prompt` as in `TiledArrays`. The amount is the number of the tiles'
    tokens.
    """
    codecs_of(spec)
    check_row_scales(spec, pages, scale_pages)
    tokens = math.gcd(GatherConfig.choose(spec, dtype).tokens, TOKENS)

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], _: Sequence[Ref]) -> None:
        own = LotTokens.of_program(spec, counts, arrays, tokens)
        gather = functools.partial(_gather, spec, pages, scale_pages, dtype, own)
        pl.when(own.is_prompt)(lambda: pl.when(own.is_stored)(gather))

    tiles = tile_arguments(spec, dtype)
    return AnyCount(
        body,
        functools.partial(compat.program_kernel, "gather_prompts", grid=ANY_LENGTH),
        COUNTS,
        (
            *FOUND,
            *page_arguments(spec, pages),
            *row_scale_arguments(spec, scale_pages),
            *tiles,
        ),
        writes=tuple(argument.name for argument in tiles),
        num_programs=lambda num_tokens: num_tokens // tokens,
    )


def _gather(
    spec: AttentionSpec,
    pages: tuple[PageMemory, PageMemory],
    scale_pages: RowScaleMemory,
    dtype: DType,
    own: LotTokens,
) -> None:
    of_page, arrays = own.in_page(), own.arrays
    own.store_bias(of_page.num_valid)
    num_tokens = jnp.int32(own.counts["num_tokens"])
    operands = [
        GatherOperand(
            codec,
            memory.pages(arrays[name]),
            jnp.float32(1.0),
            _places(spec, codec.dtype, arrays[dense], own, num_tokens),
            scales,
        )
        for codec, memory, name, dense, scales in zip(
            codecs_of(spec), pages, PAGES, ("keys", "values"), row_scales_of(arrays, scale_pages), strict=True
        )
    ]
    decode_tokens(operands, of_page, spec, dtype)


def _places(spec: AttentionSpec, part: KVCacheDType, ref: Ref, own: LotTokens, num_tokens: Scalar) -> tiles.Places:
    """Where tokens of all heads belong; of blocks of elements in words, as their bytes are decoded."""
    columns, block = ref.shape[1], part.info.elements_per_scale
    row = own.prompt * spec.num_kv_heads * num_tokens + own.position
    axes = tiles.Axis(own.tokens, 1, 0), tiles.Axis(spec.num_kv_heads, num_tokens, 0)
    if block is None:
        return tiles.Places(ref, (*axes, tiles.Axis(columns, 0, 1)), row)
    blocks = tiles.Axis(columns // block, 0, block), tiles.Axis(block // 2, 0, 2)
    return tiles.Places(ref, (*axes, *blocks), row, elements=2)


@dataclasses.dataclass(frozen=True)
class PromptKind:
    """What a prompt kernel over tiles of pages is compiled for.

    Attributes:
      spec: the cache's; where pages are does not matter.
      query: the query's rows.
      num_heads: its heads.
      scale_sizes: elements of k_scale and v_scale: 1, or `num_kv_heads`.
      sm_scale: factor of the logits, positive.
      window: tokens that a row sees, its own included; None for all.
      logits_soft_cap: or None.
      has_sinks: whether heads have sinks.
      is_divided: whether there are several splits, of float32 results without sinks.
      query_quantization: whether products are in fp8, of the tiles of `any_fp8`.
      near: near tokens that a row sees; these are of the query's dtype and have their own tiles. None for none.
    """

    spec: AttentionSpec
    query: RowMemory
    num_heads: int
    scale_sizes: tuple[int, int]
    sm_scale: float
    window: int | None
    logits_soft_cap: float | None
    has_sinks: bool
    is_divided: bool
    query_quantization: bool = False
    near: int | None = None

    @property
    def dtype(self) -> DType:
        """The dtype of tiles."""
        if self.near is not None:
            return np.dtype(self.query.dtype)
        return fp8.DTYPE if self.query_quantization else dense_dtype(self.spec, self.query.dtype)

    @property
    def has_units(self) -> tuple[bool, bool]:
        """Whether tiles of keys and of values are in a unit of the prompt and head."""
        keys, values = (self.query_quantization and fp8.takes_unit(part) for part in self.spec.dtype.parts)
        return keys, values


def splits(
    spec: AttentionSpec,
    target: Target,
    *,
    num_prompts: int,
    max_q_len: int,
    num_heads: int,
    num_tokens: int,
    max_splits: int,
) -> int:
    """The splits of a call of at most `num_prompts` prompts of `max_q_len` rows and `num_tokens` tokens."""
    with tracing_for(target):
        return int(choose(spec, num_prompts, max_q_len, num_heads, num_tokens, max_splits).splits)


@functools.cache
@with_origin
def any_prompts(kind: PromptKind, target: Target, config: PromptConfig | None = None) -> AnyCount:
    """The prompt kernel, launched as `config` says, by default as `choose` does; its splits are a count.

    The arguments are the schedule's results; the query; tiles and bias; for NVFP4 in products in fp8, the units of
    `any_fp8.any_units`; k_scale and v_scale (each where its part of the dtype takes one); the sinks, if there are any;
    with near tokens, the prompts that their schedule found, their tiles and bias; and the results out and lse.
    `num_rows` are those of the query, at least `ROWS`; `prompts_at_once` are those of a lot; `near_tokens` is
    `num_tokens` of near tokens.
    """
    spec, dtype = kind.spec, kind.dtype
    with tracing_for(target):
        launched = config or choose(spec, 1, 1, kind.num_heads, 0, 1)
    scales = {
        name: scale_argument(name, size)
        for name, size, part in zip(SCALES, kind.scale_sizes, spec.dtype.parts, strict=True)
        if part.takes_scale
    }
    problem = PromptProblem(0, kind.window, kind.logits_soft_cap, kind.near)
    own_tiles = tile_arguments(spec, dtype)
    near_tiles = {each.name: each._replace(name=f"near_{each.name}") for each in (FOUND[1], *own_tiles)}

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        k_scale, v_scale = (arrays[name] if name in scales else None for name in SCALES)
        first = jnp.int32(counts["first_prompt"])
        found: dict[str, Any] = {
            name: arrays[name] for name in ("prompts", "header", "query", "keys", "values", "bias")
        }
        own = TiledArrays(
            num_heads=kind.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            num_rows=jnp.int32(counts["num_rows"]),
            num_tokens=jnp.int32(counts["num_tokens"]),
            first_prompt=first,
            num_prompts=jnp.minimum(arrays["header"][0] - first, counts["prompts_at_once"]),
            lot=jnp.int32(counts["lot"]),
            sm_scale=kind.sm_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=arrays["sinks"] if kind.has_sinks else None,
            units=[arrays["units"] if has_units else None for has_units in kind.has_units],
            out_ref=arrays["out"],
            lse_ref=arrays["lse"],
            **found,
        )
        if kind.near is not None:
            near: dict[str, Any] = {name: arrays[each.name] for name, each in near_tiles.items()}
            near |= {"k_scale": None, "v_scale": None, "sinks": None, "units": (None, None)}
            of_near = dataclasses.replace(own, num_tokens=jnp.int32(counts["near_tokens"]), **near)
            own = dataclasses.replace(own, near=of_near)
        splits = jnp.int32(counts["splits"]) if kind.is_divided else 1
        attend(problem, dataclasses.replace(launched, splits=splits), own, scratch)

    stored = jnp.float32 if kind.is_divided else kind.query.dtype
    results = result_arguments(kind.num_heads, spec.head_size_v, stored)
    arguments = (
        *FOUND[1:],
        kind.query.argument("query", lambda rows: rows),
        *own_tiles,
        *([Argument("units", NUMBERS)] if any(kind.has_units) else []),
        *scales.values(),
        *([Argument("sinks", jax.ShapeDtypeStruct((kind.num_heads,), jnp.float32))] if kind.has_sinks else []),
        *(near_tiles.values() if kind.near is not None else ()),
        *results,
    )
    near_counts = () if kind.near is None else ("near_tokens",)
    counts = "num_rows", "num_tokens", "first_prompt", "prompts_at_once", "lot", "splits", *near_counts
    return AnyCount(
        body,
        functools.partial(kernel_of_tiles, problem, launched, (spec.head_size, spec.head_size_v, dtype), target),
        counts,
        arguments,
        writes=("header", *(argument.name for argument in results)),
        num_programs=lambda _: target.multiprocessors,
    )


def attend(problem: PromptProblem, config: PromptConfig, arrays: PromptArrays, scratch: Sequence[Ref]) -> None:
    """The body of a kernel of `kernel_of_tiles`."""
    shared = Scratch(*scratch)
    tiles.begin((shared.keys_full, shared.values_full), lax.axis_index("warpgroup"))
    run(problem, config, arrays, shared)


def kernel_of_tiles(
    problem: PromptProblem,
    config: PromptConfig,
    sizes: tuple[int, int, DType],
    target: Target,
    body: Callable[..., None],
    **_: object,
) -> Kernel:
    """The prompt kernel of a body over tiles; `sizes` are columns of keys and of values, and their dtype."""
    return kernel_of(body, problem, config, sizes, tiles.barriers(config.stages), target.multiprocessors)


def result_arguments(num_heads: int, head_size_v: int, dtype: DTypeLike) -> tuple[Argument, Argument]:
    """Results and log-sum-exps of rows of the query."""
    heads = ANY_LENGTH, num_heads
    out, lse = jax.ShapeDtypeStruct((*heads, head_size_v), dtype), jax.ShapeDtypeStruct(heads, jnp.float32)
    return Argument("out", out), Argument("lse", lse)
