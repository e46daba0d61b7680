"""Attention over caller-owned latents: the kernels of a call, for any number of sequences and blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from kvjax.errors import UnsupportedError
from kvjax.kernels.aliases import Kernel, Ref
from kvjax.kernels.attention.any_batch import COUNTS, AnyBatch, BatchKind, merge_of_any_count, problem_of, vector
from kvjax.kernels.attention.choice import too_many_parts
from kvjax.kernels.attention.problem import MERGE_OF_MANY, DecodeConfig, Problem, Refs
from kvjax.kernels.launchable import ANY_LENGTH, PAGES, AnyCount, Argument, Number, scale_arguments, with_origin
from kvjax.kernels.mla.arrays import Config, decode_kernel, read_dtype, rows_shape, run_decode
from kvjax.kernels.mla.problem import MLAConfig, choose, num_parts
from kvjax.kernels.target import Target

MAX_INDEX = 2**31 - 1
"""The largest index of the merge, which is int32."""


class AnyLatentBatch(AnyBatch):
    """Attention over caller-owned latents, for any number of sequences and blocks."""

    def of(self, num_seqs: int, max_blocks: int) -> tuple[AnyCount, AnyCount, tuple[jax.ShapeDtypeStruct, ...]]:
        """The decode kernel and the merge for a number of sequences, and the workspace that they share.

        Arguments and counts are those of `AnyBatch.of`, so that launchers call both alike; of these the kernel does not
        read the values' pages and v_scale, which are the keys'. The query is contiguous, of the dtype of the kernel's
        argument.
        """
        problem = dataclasses.replace(self.problem, num_seqs=num_seqs, max_blocks=max_blocks)
        config = choose(problem, self.target)
        parts, rank = num_parts(problem, config), problem.spec.head_size_v
        if parts * rank > MAX_INDEX:
            raise UnsupportedError(
                f"mla_paged_attention: the kernel cannot serve this call: {too_many_parts(num_seqs)}"
            )
        # The decode kernel does not depend on how the merge is launched.
        decode = _decode_of_any_count(self.problem, dataclasses.replace(config, merge=MERGE_OF_MANY))
        workspace = (
            jax.ShapeDtypeStruct((parts * rank,), jnp.float32),
            jax.ShapeDtypeStruct((parts * problem.sums,), jnp.float32),
            jax.ShapeDtypeStruct((2 * num_seqs,), jnp.int32),
        )
        return decode, merge_of_any_count(self.problem, config), workspace


def any_batch(kind: BatchKind, target: Target) -> AnyBatch:
    """The attention of a kind, whose spec is of latents, on a GPU; `query_dtype` is that of results."""
    return AnyLatentBatch(problem_of(kind, target), target)


@functools.cache
@with_origin
def _decode_of_any_count(problem: Problem, config: Config) -> AnyCount:
    spec, is_few = problem.spec, isinstance(config, DecodeConfig)
    row, of_query, sums = (
        rows_shape(problem, config, 1)[1:],
        () if is_few else (spec.head_size,),
        () if is_few else (problem.sums,),
    )
    results = {
        "out": jax.ShapeDtypeStruct((ANY_LENGTH, *row), problem.query_dtype),
        "lse": jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.float32),
        "partial": jax.ShapeDtypeStruct((ANY_LENGTH, *row), jnp.float32),
        "partial_lse": jax.ShapeDtypeStruct((ANY_LENGTH, *sums), jnp.float32),
        "spans": jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32),
    }
    arguments = (
        vector("seq_lens", jnp.int32),
        vector("table", jnp.int32),
        Argument("query", jax.ShapeDtypeStruct((ANY_LENGTH, *of_query), read_dtype(problem, config))),
        *(memory.argument(name, spec.array_dtype) for name, memory in zip(PAGES, problem.memory, strict=True)),
        *scale_arguments(spec, problem.scale_sizes, problem.scale_memory),
        *(Argument(name, array) for name, array in results.items()),
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
        pages, _ = (refs.pop(name) for name in PAGES)
        run_decode(known, config, Refs(pages=pages, **refs), scratch)

    def kernel(body: Kernel, **_: object) -> Kernel:  # the grid does not depend on the counts
        return decode_kernel(body, problem, config)

    return AnyCount(
        body,
        kernel,
        COUNTS,
        arguments,
        writes=tuple(results),
        num_programs=lambda _: config.passes if isinstance(config, MLAConfig) else 1,
    )
