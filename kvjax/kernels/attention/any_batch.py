"""The kernels of a call, for any number of sequences and blocks, over caller-owned memory or JAX arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.aliases import DType, DTypeLike, Ref
from kvjax.kernels.attention.choice import choose, restricting
from kvjax.kernels.attention.launch import decode_kernel, merge_kernel, run_decode, run_merge, workspace
from kvjax.kernels.attention.problem import (
    MERGE_OF_MANY,
    DecodeConfig,
    Division,
    Problem,
    ReadArrays,
    Refs,
    Softmax,
)
from kvjax.kernels.launchable import (
    ANY_LENGTH,
    PAGES,
    AnyCount,
    Argument,
    Number,
    Operand,
    PageMemory,
    RowScaleMemory,
    check_row_scales,
    row_scale_arguments,
    scale_arguments,
    with_origin,
)
from kvjax.kernels.target import Target
from kvjax.spec import AttentionSpec

Launch = Any
"""How both kernels are launched: a `Division` with the fields that the decode kernel reads."""


@dataclasses.dataclass(frozen=True)
class AnyBatch:
    """Attention, for any number of sequences and blocks.

    Attributes:
      problem: the description of a call; its counts are 0, because they are known at launch.
      target: the GPU.
    """

    problem: Problem
    target: Target

    def config(self, num_seqs: int, max_blocks: int) -> Launch:
        """How the kernels are launched for sizes of the block table; `max_blocks` is 0 if known only at launch."""
        return choose(dataclasses.replace(self.problem, num_seqs=num_seqs, max_blocks=max_blocks), self.target)

    def decode(self, config: Launch) -> AnyCount:
        """The decode kernel."""
        return _decode_of_any_count(self.problem, config)

    def of(
        self, num_seqs: int, max_blocks: int, config: Launch | None = None
    ) -> tuple[AnyCount, AnyCount, tuple[jax.ShapeDtypeStruct, ...]]:
        """The decode kernel and the merge for a number of sequences, and the workspace that they share.

        `max_blocks`, the entries of the block table for each sequence, determines the size of the workspace only.

        The arguments of the decode kernel are seq_lens, block_table (int32), query, the keys' and the values' pages,
        k_scale and v_scale (the layer's, or those pages that `scale_pages` describes), sinks, the layer and the tree if
        there are any, and the results: out, lse and the workspace. Its `num_blocks` is that of the cache. The arguments
        of the merge are seq_lens, sinks if there are any, the workspace, out and lse; its amount is the number of
        sequences.
        """
        config = config or self.config(num_seqs, 0)
        # The decode kernel does not depend on how the merge is launched.
        decode = self.decode(dataclasses.replace(config, merge=MERGE_OF_MANY))
        sized = dataclasses.replace(self.problem, num_seqs=num_seqs, max_blocks=max_blocks)
        return decode, merge_of_any_count(self.problem, config), workspace(sized, config)


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers of a program
def attend(
    batch: AnyBatch, config: Launch, query: tuple[jax.Array, ...], pages: jax.Array, read: ReadArrays
) -> tuple[jax.Array, jax.Array]:
    """Attention over the pages of a JAX array.

    Args:
      batch: what the kernels are compiled for.
      config: how they are launched.
      query: `[num_seqs, q_len, num_heads, head_size]`, as the decode kernel takes it: whole, or its parts.
      pages: `[num_blocks, ...]`, the array of a cache.
      read: the other arrays.

    Returns:
      The output `[num_seqs, q_len, num_heads, head_size_v]` and the float32 log-sum-exp `[num_seqs, q_len, num_heads]`.
    """
    (num_seqs, max_blocks), problem, shape = read.block_table.shape, batch.problem, query[0].shape
    rows = shape[:-1]
    decode, merge, workspace = batch.of(num_seqs, max_blocks, config)
    arrays = dict[str, Operand](read._asdict(), table=read.block_table, **dict.fromkeys(PAGES, pages))
    arrays |= zip(QUERY, query, strict=False)
    arrays |= zip(WORKSPACE, workspace, strict=True)
    arrays["out"] = jax.ShapeDtypeStruct((*rows, problem.spec.head_size_v), problem.query_dtype)
    arrays["lse"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    strides = math.prod(shape[1:]), math.prod(shape[2:])
    arrays |= decode.of_arrays((num_seqs, max_blocks, pages.shape[0], max_blocks, *strides), num_seqs, arrays)
    merged = merge.of_arrays((max_blocks,), num_seqs, arrays)
    return merged["out"], merged["lse"]


@dataclasses.dataclass(frozen=True)
class BatchKind:
    """What the attention of one of `passes` is compiled for.

    Attributes:
      spec: the cache's.
      pages: memory of the keys' and of the values' pages.
      query_dtype: float16 or bfloat16.
      num_heads: heads of the query.
      q_len: query tokens of each sequence.
      scale_sizes: elements of k_scale and v_scale: 1, or `num_kv_heads`.
      softmax: the options.
      has_sinks: whether heads have sinks.
      one_memory: whether values are in the pages of keys, and so are the positions of their rows. The kernel then does
        not read its argument for values.
      scale_pages: memory of the scales of keys and of values that have a scale for each token and head; None for scales
        beside the data.
      num_layers: layers whose pages lie next to each other in a block, one of which a call selects; None for one.
      tree: as in `Problem`.
      joined_query: over latents, whether both parts of a query row are adjacent, in an array of `head_size` columns.
        The kernel for few rows then takes only this array; the `wgmma` kernel also takes the array from the second part
        on. Otherwise the parts are two contiguous arrays.
    """

    spec: AttentionSpec
    pages: tuple[PageMemory, PageMemory]
    query_dtype: DType
    num_heads: int
    q_len: int
    scale_sizes: tuple[int, int]
    softmax: Softmax
    has_sinks: bool = False
    one_memory: bool = False
    scale_pages: RowScaleMemory = (None, None)
    num_layers: int | None = None
    tree: int | None = None
    joined_query: bool = False


def any_batch(kind: BatchKind, target: Target) -> AnyBatch:
    """The attention of a kind on a GPU."""
    return AnyBatch(problem_of(kind, target), target)


def problem_of(kind: BatchKind, target: Target) -> Problem:
    """The description of a call of a kind, with counts of 0.

    Raises:
      ValueError: as `check_row_scales`.
    """
    check_row_scales(kind.spec, kind.pages, kind.scale_pages)
    softmax = kind.softmax
    return Problem(
        spec=kind.spec,
        memory=kind.pages,
        query_dtype=np.dtype(kind.query_dtype),
        q_len=kind.q_len,
        num_heads=kind.num_heads,
        num_seqs=0,
        max_blocks=0,
        table_stride=0,
        query_strides=(0, 0),
        num_blocks=0,
        num_layers=kind.num_layers or 1,
        has_layer=kind.num_layers is not None,
        sm_scale=softmax.sm_scale,
        window=restricting(softmax.window, max(kind.q_len, kind.tree or 0)),
        logits_soft_cap=softmax.logits_soft_cap,
        scale_sizes=kind.scale_sizes,
        one_memory=kind.one_memory,
        has_sinks=kind.has_sinks,
        batch_invariant=softmax.batch_invariant,
        converts_e2m1=target.converts_e2m1,
        scale_memory=kind.scale_pages,
        tree=kind.tree,
    )


COUNTS = ("num_seqs", "max_blocks", "num_blocks", "table_stride", "query_stride_of_sequence", "query_stride_of_token")


def with_counts(problem: Problem, counts: Mapping[str, Number]) -> Problem:
    """A problem with the counts of a call, those of `COUNTS`."""
    num_seqs, max_blocks, num_blocks, table_stride, *query_strides = (counts[name] for name in COUNTS)
    return dataclasses.replace(
        problem,
        num_seqs=num_seqs,
        max_blocks=max_blocks,
        num_blocks=num_blocks,
        table_stride=table_stride,
        query_strides=(query_strides[0], query_strides[1]),
    )


QUERY = ("query", "query_pe")
"""Names of the arguments for a query: whole, or its parts."""

WORKSPACE = {"partial": jnp.float32, "partial_lse": jnp.float32, "spans": jnp.int32}
"""Names and dtypes of the workspace."""


@functools.cache
@with_origin
def _decode_of_any_count(problem: Problem, config: DecodeConfig) -> AnyCount:
    spec = problem.spec
    results = {"out": problem.query_dtype, "lse": jnp.float32, **WORKSPACE}
    arguments = (
        vector("seq_lens", jnp.int32),
        vector("table", jnp.int32),
        vector("query", problem.query_dtype),
        *(memory.argument(name, spec.array_dtype) for name, memory in zip(PAGES, problem.memory, strict=True)),
        *scale_arguments(spec, problem.scale_sizes, problem.scale_memory),
        *([vector("sinks", jnp.float32)] if problem.has_sinks else []),
        *([vector("layer", jnp.int32)] if problem.has_layer else []),
        *([vector("tree", jnp.uint32)] if problem.tree else []),
        *(vector(name, dtype) for name, dtype in results.items()),
    )

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        run_decode(with_counts(problem, counts), config, refs_of(problem, arrays), *scratch)

    return AnyCount(
        body,
        # The grid does not depend on the counts.
        lambda body, out_type=(), **_: decode_kernel(body, problem, config, out_type),
        COUNTS,
        arguments,
        writes=tuple(results),
        num_programs=lambda _: spec.num_kv_heads // config.heads,
    )


def refs_of(problem: Problem, arrays: Mapping[str, Ref]) -> Refs:
    """The references of a body, of arguments by name."""
    refs = dict(arrays)
    keys, values = (refs.pop(name) for name in PAGES)
    pages: tuple[Ref, ...] = (keys, keys if problem.one_memory else values)
    pages += tuple(refs[argument.name] for argument in row_scale_arguments(problem.spec, problem.scale_memory))
    return Refs(pages=pages, **refs)


@functools.cache
@with_origin
def merge_of_any_count(problem: Problem, config: Division) -> AnyCount:
    """The merge of the parts that a decode kernel left in the workspace."""
    results = {"out": problem.query_dtype, "lse": jnp.float32}
    arguments = (
        vector("seq_lens", jnp.int32),
        *([vector("sinks", jnp.float32)] if problem.has_sinks else []),
        *(vector(name, dtype) for name, dtype in (WORKSPACE | results).items()),
    )

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        known = dataclasses.replace(problem, max_blocks=counts["max_blocks"])
        run_merge(known, config, Refs(**arrays), scratch)

    return AnyCount(
        body,
        lambda body, grid=ANY_LENGTH, **_: merge_kernel(body, problem, config, grid),
        ("max_blocks",),
        arguments,
        writes=tuple(results),
        num_programs=lambda num_seqs: num_seqs,
    )


def vector(name: str, dtype: DTypeLike) -> Argument:
    """A one-dimensional argument."""
    return Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH,), dtype))
