"""The decode kernels: their grids, shared memory, and the arrays that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat
from kvjax.kernels.aliases import Kernel, OutType, Ref, ScratchType
from kvjax.kernels.attention.any_batch import QUERY, vector
from kvjax.kernels.attention.problem import DecodeConfig, Problem, Refs
from kvjax.kernels.launchable import ANY_LENGTH, Argument, Number
from kvjax.kernels.mla import few_rows_stages
from kvjax.kernels.mla.decode import LatentDecode
from kvjax.kernels.mla.few_rows import FewRows
from kvjax.kernels.mla.packed import Packed
from kvjax.kernels.mla.problem import MLAConfig
from kvjax.kernels.mla.tiles import WARPGROUPS, Copied, Incoming, Tiles, operand_dtypes, scratch_types
from kvjax.kernels.registers import WARPS

type Config = MLAConfig | DecodeConfig

_COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,  # rows are reduced within warps
)


def rows_shape(problem: Problem, config: Config, rows: Number) -> tuple[Number, ...]:
    """The shape of rows of results: flat, or halves of a row for two warpgroups."""
    rank = problem.spec.head_size_v
    return (rows * rank,) if isinstance(config, DecodeConfig) else (rows, WARPGROUPS, rank // WARPGROUPS)


def query_arguments(problem: Problem, config: Config, *, joined: bool) -> list[Argument]:
    """The arguments for the parts of a query: flat for the kernel of few rows, rows for that of `wgmma`.

    `joined` is as `BatchKind.joined_query`.
    """
    spec = problem.spec
    if isinstance(config, DecodeConfig):
        sizes = [spec.head_size] if joined else spec.part_sizes
        return [vector(name, problem.query_dtype) for name, size in zip(QUERY, sizes, strict=False) if size]
    columns = [spec.head_size] * 2 if joined else spec.part_sizes
    parts = zip(QUERY, spec.part_sizes, columns, operand_dtypes(spec), strict=True)
    return [
        Argument(name, jax.ShapeDtypeStruct((ANY_LENGTH, width), dtype)) for name, size, width, dtype in parts if size
    ]


def run_decode(problem: Problem, config: Config, refs: Refs, shared: Sequence[Ref]) -> None:
    """The body of the decode kernel; `shared` is shared memory, as `decode_kernel` allocates it."""
    if isinstance(config, DecodeConfig):
        buffer, others, barriers = shared
        FewRows.of(problem, config, refs, (buffer, others, barriers)).run()
        return
    tiles = Tiles.of(problem.spec, tuple(shared))
    spec, tokens = problem.spec, tiles.tokens
    incoming: Incoming = Packed(spec, tokens)
    if not spec.dtype.is_quantized:
        incoming = Copied(tokens, spec.part_sizes[0] * refs.pages.dtype.itemsize)
    LatentDecode(problem, config, refs, tiles, incoming).run()


def decode_kernel(body: Callable[..., None], problem: Problem, config: Config, out_type: OutType = ()) -> Kernel:
    """The decode kernel of `body`, which stores results of whole sequences, and partial results for the merge."""
    spec, is_few = problem.spec, isinstance(config, DecodeConfig)
    if isinstance(config, DecodeConfig):
        buffer, others, barriers = few_rows_stages.scratch(problem, config)
        shared: list[ScratchType] = [plgpu.SMEM((size,), jnp.uint8) for size in (buffer, others)]
        shared.append(plgpu.SMEM((barriers // 4,), jnp.int32))
        grid, warpgroups = {"block": config.blocks, "heads": 1}, config.warps // WARPS
    else:
        shared = scratch_types(spec)
        grid, warpgroups = {"block": config.blocks, "rows": config.passes}, WARPGROUPS
    kernel: Kernel = plgpu.kernel(
        compat.named("mla_paged_attention", body),
        out_type=out_type,
        scratch_types=shared,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=compat.COMPILER_PARAMS if is_few else _COMPILER_PARAMS,
    )
    return kernel
