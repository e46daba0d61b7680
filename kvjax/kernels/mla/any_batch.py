"""The kernels of a call over latents, for any number of sequences and blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from kvjax.kernels.aliases import Ref
from kvjax.kernels.attention.any_batch import COUNTS, AnyBatch, BatchKind, problem_of, vector, with_counts
from kvjax.kernels.attention.problem import DecodeConfig, Problem, Refs
from kvjax.kernels.launchable import ANY_LENGTH, PAGES, AnyCount, Argument, Number, scale_arguments, with_origin
from kvjax.kernels.mla.launch import Config, decode_kernel, query_arguments, rows_shape, run_decode
from kvjax.kernels.mla.problem import MLAConfig, choose
from kvjax.kernels.target import Target


@dataclasses.dataclass(frozen=True)
class AnyLatentBatch(AnyBatch):
    """Attention over latents, for any number of sequences and blocks.

    Arguments and counts are those of `AnyBatch.of`, so that launchers call both alike. The kernel does not read the
    values' pages and v_scale, which are the keys'. The query's arguments are `query_arguments`: the `wgmma` kernel
    requires both parts in the dtypes of products, and contiguous rows.
    """

    joined_query: bool = False

    def config(self, num_seqs: int, max_blocks: int) -> Config:
        """As that of `AnyBatch`."""
        return choose(dataclasses.replace(self.problem, num_seqs=num_seqs, max_blocks=max_blocks), self.target)

    def decode(self, config: Config) -> AnyCount:
        """The decode kernel."""
        return _decode_of_any_count(self.problem, config, self.joined_query)


def any_batch(kind: BatchKind, target: Target) -> AnyBatch:
    """The attention of a kind, whose spec is of latents, on a GPU; `query_dtype` is that of results."""
    return AnyLatentBatch(problem_of(kind, target), target, kind.joined_query)


@functools.cache
@with_origin
def _decode_of_any_count(problem: Problem, config: Config, joined_query: bool) -> AnyCount:
    spec, is_few = problem.spec, isinstance(config, DecodeConfig)
    row, sums = rows_shape(problem, config, 1)[1:], () if is_few else (problem.sums,)
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
        *query_arguments(problem, config, joined=joined_query),
        *(memory.argument(name, spec.array_dtype) for name, memory in zip(PAGES, problem.memory, strict=True)),
        *scale_arguments(spec, problem.scale_sizes, problem.scale_memory),
        *([vector("layer", jnp.int32)] if problem.has_layer else []),
        *(Argument(name, array) for name, array in results.items()),
    )

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], scratch: Sequence[Ref]) -> None:
        refs = dict(arrays)
        pages, _ = (refs.pop(name) for name in PAGES)
        run_decode(with_counts(problem, counts), config, Refs(pages=pages, **refs), scratch)

    return AnyCount(
        body,
        # The grid does not depend on the counts.
        lambda body, out_type=(), **_: decode_kernel(body, problem, config, out_type),
        COUNTS,
        arguments,
        writes=tuple(results),
        num_programs=lambda _: config.passes if isinstance(config, MLAConfig) else 1,
    )
