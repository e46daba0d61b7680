"""Attention over caller-owned memory: the kernels of a call, for any number of sequences and blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.aliases import DType, DTypeLike, Ref
from kvjax.kernels.attention.choice import choose, restricting
from kvjax.kernels.attention.launch import decode_kernel, merge_kernel, run_decode, run_merge, workspace
from kvjax.kernels.attention.problem import MERGE_OF_MANY, DecodeConfig, Division, Problem, Refs, Softmax
from kvjax.kernels.launchable import (
    ANY_LENGTH,
    PAGES,
    AnyCount,
    Argument,
    Number,
    PageMemory,
    RowScaleMemory,
    row_scale_arguments,
    scale_arguments,
    with_origin,
)
from kvjax.kernels.target import Target
from kvjax.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class AnyBatch:
    """Attention over caller-owned memory, for any number of sequences and blocks.

    Attributes:
      problem: the description of a call; its counts are 0, because they are known at launch.
      target: the GPU.
    """

    problem: Problem
    target: Target

    def of(self, num_seqs: int, max_blocks: int) -> tuple[AnyCount, AnyCount, tuple[jax.ShapeDtypeStruct, ...]]:
        """The decode kernel and the merge for a number of sequences, and the workspace that they share.

        `max_blocks`, the entries of the block table for each sequence, determines the size of the workspace only.

        The arguments of the decode kernel are seq_lens, block_table (int32), query, the keys' and the values' pages,
        k_scale and v_scale (the layer's, or those pages that `scale_pages` describes), sinks if there are any, and the
        results: out, lse and the workspace. Its `num_blocks` is that of the cache. The arguments of the merge are
        seq_lens, sinks if there are any, the workspace, out and lse; its amount is the number of sequences.
        """
        problem = dataclasses.replace(self.problem, num_seqs=num_seqs)
        config = choose(problem, self.target)
        # The decode kernel does not depend on how the merge is launched.
        decode = _decode_of_any_count(self.problem, dataclasses.replace(config, merge=MERGE_OF_MANY))
        sized = dataclasses.replace(problem, max_blocks=max_blocks)
        return decode, merge_of_any_count(self.problem, config), workspace(sized, config)


@dataclasses.dataclass(frozen=True)
class BatchKind:
    """What the attention of one of `passes` over caller-owned memory is compiled for.

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
      scale_pages: of keys and of values that have a scale for each token and head, the memory of these.
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


def any_batch(kind: BatchKind, target: Target) -> AnyBatch:
    """The attention of a kind on a GPU."""
    return AnyBatch(problem_of(kind, target), target)


def problem_of(kind: BatchKind, target: Target) -> Problem:
    """The description of a call of a kind, with counts of 0."""
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
        num_layers=1,
        has_layer=False,
        sm_scale=softmax.sm_scale,
        window=restricting(softmax.window, kind.q_len),
        logits_soft_cap=softmax.logits_soft_cap,
        scale_sizes=kind.scale_sizes,
        one_memory=kind.one_memory,
        has_sinks=kind.has_sinks,
        batch_invariant=softmax.batch_invariant,
        converts_e2m1=target.converts_e2m1,
        scale_memory=kind.scale_pages,
    )


COUNTS = ("num_seqs", "max_blocks", "num_blocks", "table_stride", "query_stride_of_sequence", "query_stride_of_token")

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
        *(vector(name, dtype) for name, dtype in results.items()),
    )

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        known = dataclasses.replace(
            problem,
            num_seqs=counts["num_seqs"],
            max_blocks=counts["max_blocks"],
            num_blocks=counts["num_blocks"],
            table_stride=counts["table_stride"],
            query_strides=(counts["query_stride_of_sequence"], counts["query_stride_of_token"]),
        )
        refs = dict(arrays)
        keys, values = (refs.pop(name) for name in PAGES)
        pages: tuple[Ref, ...] = (keys, keys if problem.one_memory else values)
        pages += tuple(refs[argument.name] for argument in row_scale_arguments(spec, problem.scale_memory))
        run_decode(known, config, Refs(pages=pages, **refs), *scratch)

    return AnyCount(
        body,
        lambda body, **_: decode_kernel(body, problem, config),  # the grid does not depend on the counts
        COUNTS,
        arguments,
        writes=tuple(results),
        num_programs=lambda _: spec.num_kv_heads // config.heads,
    )


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
        lambda body, grid=ANY_LENGTH: merge_kernel(body, problem, config, grid),
        ("max_blocks",),
        arguments,
        writes=tuple(results),
        num_programs=lambda num_seqs: num_seqs,
    )


def vector(name: str, dtype: DTypeLike) -> Argument:
    """A one-dimensional argument."""
    return Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH,), dtype))
