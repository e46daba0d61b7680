"""The two kernels of a call: their grids, workspace and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.errors import UnsupportedError
from kvjax.kernels import compat
from kvjax.kernels.aliases import ABSENT, Kernel, OutType, Ref
from kvjax.kernels.attention.choice import num_parts, scratch, stage_layout, too_many_parts
from kvjax.kernels.attention.decode import Decode
from kvjax.kernels.attention.merge import Merge, blocks_per_row, elements_per_thread
from kvjax.kernels.attention.problem import (
    DecodeConfig,
    Division,
    Problem,
    Refs,
)
from kvjax.kernels.registers import LANES, WARPS


def workspace(problem: Problem, config: Division) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The workspace of a call, which the merge reads: `partial`, `partial_lse` and `spans`."""
    parts = num_parts(problem, config)
    if parts * problem.spec.head_size_v > np.iinfo(np.int32).max:  # for launchers, which do not ask `why_not`
        raise UnsupportedError(
            f"{'mla_' if problem.spec.is_mla else ''}paged_attention: the kernel cannot serve this call:"
            f" {too_many_parts(problem.num_seqs)}"
        )
    return (
        jax.ShapeDtypeStruct((parts * problem.spec.head_size_v,), jnp.float32),
        jax.ShapeDtypeStruct((parts * problem.sums,), jnp.float32),
        jax.ShapeDtypeStruct((2 * problem.num_seqs,), jnp.int32),
    )


def run_decode(problem: Problem, config: DecodeConfig, refs: Refs, buffer: Ref, barriers: Ref) -> None:
    """The body of the decode kernel; `buffer` and `barriers` are shared memory."""
    layout = stage_layout(problem, config.heads, config.groups * config.tiles)
    Decode.of(problem, config, layout, refs, buffer, barriers).run()


def decode_kernel(
    body: Callable[..., None],
    problem: Problem,
    config: DecodeConfig,
    out_type: OutType = (),
    shared: tuple[int, int] | None = None,
) -> Kernel:
    """The decode kernel of `body`, which stores results of whole sequences, and partial results for the merge.

    `shared` are the bytes of its shared memory, by default `scratch`'s.
    """
    buffer, barriers = shared or scratch(problem, config)
    kernel: Kernel = plgpu.kernel(
        compat.named("paged_attention", body),
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((buffer,), jnp.uint8),
            plgpu.SMEM((barriers // 4,), jnp.int32),
        ],
        grid=(config.blocks, problem.spec.num_kv_heads // config.heads),
        grid_names=("block", "heads"),
        num_threads=config.warps // WARPS,
        thread_name="warpgroup",
        compiler_params=compat.COMPILER_PARAMS,
    )
    return kernel


def run_merge(problem: Problem, config: Division, refs: Refs, shared: Sequence[Ref]) -> None:
    """The body of the merge; `shared` is shared memory, where warps share rows."""
    Merge(problem, config, refs, shared[0] if shared else ABSENT).run()


def merge_kernel(
    body: Callable[..., None], problem: Problem, config: Division, num_seqs: int, out_type: OutType = ()
) -> Kernel:
    """The merge kernel of `body`, which stores the results of sequences that several thread blocks attended to."""
    warps_per_row = config.merge.warps
    several = warps_per_row > 1
    registers = problem.sums + elements_per_thread(problem, config)
    rows, per_row = problem.q_len * problem.num_heads, blocks_per_row(problem, config)
    kernel: Kernel = plgpu.kernel(
        compat.named("merge_paged_attention", body),
        out_type=out_type,
        scratch_types=[plgpu.SMEM((warps_per_row * registers * LANES * 4,), jnp.uint8)] if several else [],
        # Only the last axis of a grid may be long.
        grid=((rows if several else -(-rows // WARPS)) * per_row, num_seqs),
        grid_names=("rows", "sequence"),
        num_threads=max(1, warps_per_row // WARPS),
        thread_name="warpgroup",
        compiler_params=compat.COMPILER_PARAMS,
    )
    return kernel
