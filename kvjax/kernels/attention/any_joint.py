"""The kernels of a call over pages and a ring, for any number of sequences and blocks, as `any_batch` for one cache."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.kernels.aliases import Ref
from kvjax.kernels.attention import joint
from kvjax.kernels.attention.any_batch import (
    COUNTS,
    WORKSPACE,
    BatchKind,
    problem_of,
    refs_of,
    vector,
    with_counts,
)
from kvjax.kernels.attention.joint import JointConfig, JointSource
from kvjax.kernels.attention.launch import decode_kernel, merge_kernel
from kvjax.kernels.attention.problem import MERGE_OF_MANY, Problem, ReadArrays, Refs
from kvjax.kernels.launchable import (
    ANY_LENGTH,
    PAGES,
    AnyCount,
    Argument,
    Number,
    Operand,
    scale_arguments,
    with_origin,
)
from kvjax.kernels.target import Target

RING = "ring_"
"""What the names of arguments and counts of the ring begin with."""

RING_COUNTS = tuple(RING + name for name in ("max_blocks", "num_blocks", "table_stride"))


class RingArrays(NamedTuple):
    """The arrays of a ring, beside those of pages.

    Attributes:
      pages: `[num_blocks, ...]`, those of the ring.
      block_table: int32 `[num_seqs, columns]`, as in `ReadArrays`.
      seq_lens: int32 `[num_seqs]`, likewise.
      q_lens: int32 `[num_seqs]`, how many query tokens each sequence has: the last ones of the call's.
    """

    pages: jax.Array
    block_table: jax.Array
    seq_lens: jax.Array
    q_lens: jax.Array


@dataclasses.dataclass(frozen=True)
class JointBatch:
    """Attention over pages and a ring, for any number of sequences and blocks.

    Attributes:
      pages: the description of the call over pages; its counts are 0, because they are known at launch.
      ring: the description of the call over the ring, with the same query.
      target: the GPU.
    """

    pages: Problem
    ring: Problem
    target: Target

    def sized(self, num_seqs: int, max_blocks: int, ring_blocks: int) -> tuple[Problem, Problem]:
        """Both problems, for the given numbers of sequences and of entries of each block table."""
        pages = dataclasses.replace(self.pages, num_seqs=num_seqs, max_blocks=max_blocks)
        return pages, dataclasses.replace(self.ring, num_seqs=num_seqs, max_blocks=ring_blocks)

    def config(self, num_seqs: int, max_blocks: int, ring_blocks: int) -> JointConfig:
        """How the kernels are launched; a number of blocks is 0 if it is known only at launch."""
        return joint.choose(*self.sized(num_seqs, max_blocks, ring_blocks), self.target)

    def why_not(self, num_seqs: int, max_blocks: int, ring_blocks: int) -> str | None:
        """Why there is no workspace for so many sequences; None where there is."""
        return joint.why_no_workspace(*self.sized(num_seqs, max_blocks, ring_blocks), self.config(num_seqs, 0, 0))

    def of(
        self, num_seqs: int, max_blocks: int, ring_blocks: int, config: JointConfig | None = None
    ) -> tuple[AnyCount, AnyCount, tuple[jax.ShapeDtypeStruct, ...]]:
        """The decode kernel and the merge for a number of sequences, and the workspace that they share.

        As `AnyBatch.of`. The decode kernel's arguments are seq_lens, block_table (int32), query, pages, scales and the
        layer as there; ring_seq_lens, ring_table, the ring's keys and values; q_lens if there are several query tokens;
        and the workspace. Those of the merge are seq_lens, ring_seq_lens, sinks if there are any, the workspace, out
        and lse.
        """
        config = config or self.config(num_seqs, 0, 0)
        # The decode kernel does not depend on how the merge is launched.
        plain = (dataclasses.replace(each, merge=MERGE_OF_MANY) for each in (config.pages, config.ring))
        decode = _decode_of_any_count(self.pages, self.ring, JointConfig(*plain))
        sized = self.sized(num_seqs, max_blocks, ring_blocks)
        return decode, _merge_of_any_count(self.pages, self.ring, config), joint.workspace(*sized, config)


def joint_batch(pages: BatchKind, ring: BatchKind, target: Target) -> JointBatch:
    """The attention over pages and a ring of two kinds, which have the same query, on a GPU."""
    return JointBatch(problem_of(pages, target), problem_of(ring, target), target)


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers of a program
def attend(
    batch: JointBatch, config: JointConfig, query: jax.Array, pages: jax.Array, read: ReadArrays, ring: RingArrays
) -> tuple[jax.Array, jax.Array]:
    """Attention over the pages of a JAX array and those of a ring.

    Args:
      batch: what the kernels are compiled for.
      config: how they are launched.
      query: `[num_seqs, q_len, num_heads, head_size]`.
      pages: `[num_blocks, ...]`, the array of a cache.
      read: the other arrays. The layer also applies to the ring.
      ring: the arrays of the ring.

    Returns:
      The output `[num_seqs, q_len, num_heads, head_size_v]` and the float32 log-sum-exp `[num_seqs, q_len, num_heads]`.
    """
    (num_seqs, max_blocks), ring_blocks, shape = read.block_table.shape, ring.block_table.shape[1], query.shape
    rows, problem = shape[:-1], batch.pages
    decode, merge, workspace = batch.of(num_seqs, max_blocks, ring_blocks, config)
    arrays = dict[str, Operand](read._asdict(), table=read.block_table, query=query, q_lens=ring.q_lens)
    arrays |= dict.fromkeys(PAGES, pages) | dict.fromkeys((RING + name for name in PAGES), ring.pages)
    arrays |= {RING + "seq_lens": ring.seq_lens, RING + "table": ring.block_table}
    arrays |= zip(WORKSPACE, workspace, strict=True)
    arrays["out"] = jax.ShapeDtypeStruct((*rows, problem.spec.head_size_v), problem.query_dtype)
    arrays["lse"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    counts = num_seqs, max_blocks, pages.shape[0], max_blocks, math.prod(shape[1:]), math.prod(shape[2:])
    arrays |= decode.of_arrays((*counts, ring_blocks, ring.pages.shape[0], ring_blocks), num_seqs, arrays)
    merged = merge.of_arrays((num_seqs, max_blocks, ring_blocks), num_seqs, arrays)
    return merged["out"], merged["lse"]


def _page_arguments(problem: Problem, prefix: str = "") -> tuple[Argument, ...]:
    dtype = problem.spec.array_dtype
    return tuple(memory.argument(prefix + name, dtype) for name, memory in zip(PAGES, problem.memory, strict=True))


def _of_both[Named](named: Mapping[str, Named]) -> tuple[dict[str, Named], dict[str, Named]]:
    """Splits items by name into those of a call over pages, and those of one over the ring: shared ones and its own."""
    of_pages = {name: x for name, x in named.items() if not name.startswith(RING)}
    return of_pages, of_pages | {name.removeprefix(RING): x for name, x in named.items() if name.startswith(RING)}


@functools.cache
@with_origin
def _decode_of_any_count(pages: Problem, ring: Problem, config: JointConfig) -> AnyCount:
    arguments = (
        vector("seq_lens", jnp.int32),
        vector("table", jnp.int32),
        vector("query", pages.query_dtype),
        *_page_arguments(pages),
        *scale_arguments(pages.spec, pages.scale_sizes, pages.scale_memory),
        *([vector("layer", jnp.int32)] if pages.has_layer or ring.has_layer else []),
        vector(RING + "seq_lens", jnp.int32),
        vector(RING + "table", jnp.int32),
        *_page_arguments(ring, RING),
        *([vector("q_lens", jnp.int32)] if pages.q_len > 1 else []),
        *(vector(name, dtype) for name, dtype in WORKSPACE.items()),
    )

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        each = zip((pages, ring), config.both, _of_both(counts), _of_both(arrays), strict=True)
        sources = [
            JointSource(with_counts(problem, own), how, refs_of(problem, refs)) for problem, how, own, refs in each
        ]
        joint.run_decode(sources, *scratch)

    shared = joint.shared_bytes(pages, ring, config)
    return AnyCount(
        body,
        # The grid does not depend on the counts.
        lambda body, out_type=(), **_: decode_kernel(body, pages, config.pages, out_type, shared),
        (*COUNTS, *RING_COUNTS),
        arguments,
        writes=tuple(WORKSPACE),
        num_programs=lambda _: pages.spec.num_kv_heads // config.pages.heads,
    )


@functools.cache
@with_origin
def _merge_of_any_count(pages: Problem, ring: Problem, config: JointConfig) -> AnyCount:
    results = {"out": pages.query_dtype, "lse": jnp.float32}
    arguments = (
        vector("seq_lens", jnp.int32),
        vector(RING + "seq_lens", jnp.int32),
        *([vector("sinks", jnp.float32)] if pages.has_sinks else []),
        *(vector(name, dtype) for name, dtype in (WORKSPACE | results).items()),
    )

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        each = zip((pages, ring), config.both, _of_both(counts), _of_both(arrays), strict=True)
        of_pages, of_ring = (
            JointSource(
                dataclasses.replace(problem, num_seqs=own["num_seqs"], max_blocks=own["max_blocks"]), how, Refs(**refs)
            )
            for problem, how, own, refs in each
        )
        joint.run_merge((of_pages, of_ring), config, scratch)

    return AnyCount(
        body,
        lambda body, grid=ANY_LENGTH, out_type=(): merge_kernel(body, pages, config, grid, out_type),
        ("num_seqs", "max_blocks", RING + "max_blocks"),
        arguments,
        writes=tuple(results),
        num_programs=lambda num_seqs: num_seqs,
    )
