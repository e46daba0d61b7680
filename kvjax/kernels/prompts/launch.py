"""Launches the prompt kernel."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, tiles
from kvjax.kernels.aliases import DType, Kernel, Ref, ScratchType
from kvjax.kernels.prompts import fp8
from kvjax.kernels.prompts.operands import DenseArrays, Operands, RaggedArrays, RaggedOperands
from kvjax.kernels.prompts.problem import ALIGNMENT, ROWS, WARPGROUPS, PromptConfig, PromptProblem, block_shape
from kvjax.kernels.prompts.queue import Claimed
from kvjax.kernels.prompts.rows import Scratch, run
from kvjax.kernels.target import current

_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def attend(
    operands: Operands[jax.Array] | RaggedOperands[jax.Array],
    out: jax.Ref,
    lse: jax.Ref,
    claims: jax.Ref,
    problem: PromptProblem,
    config: PromptConfig,
) -> None:
    """Attends and stores results in place.

    Args:
      operands: arrays.
      out: reference to float16 or bfloat16 `[splits, num_tokens, num_heads, head_size_v]`.
      lse: reference to float32 `[splits, num_tokens, num_heads]`, natural logarithms.
      claims: reference to int32 `[num_prompts]`, 0; the kernel counts in the first one.
      problem: see there.
      config: how to launch it.
    """
    query, keys, values = operands[:3]
    near = operands.near if isinstance(operands, Operands) else None
    num_tokens, num_kv_heads, size = keys.shape[-3:]
    sizes = num_tokens, *(() if near is None else (near.keys.shape[1],))
    if query.shape[0] < ROWS or min(sizes) < config.tokens or any(each % ALIGNMENT for each in sizes):
        raise ValueError(f"got {query.shape[0]} rows and {sizes} tokens, expected what Operands describes")
    if (near is None) != (problem.near is None):
        raise ValueError(f"{problem.near=} and {near=}, expected both or neither")
    heads, rows = block_shape(query.shape[1], num_kv_heads)
    num_prompts = operands.q_lens.shape[0]
    most_items = num_prompts * -(-problem.max_q_len // rows) * (query.shape[1] // heads) * int(config.splits)
    flat, structure = jax.tree.flatten(operands)
    count = len(flat)

    def body(*refs: Ref) -> None:
        own, results, scratch = refs[:count], refs[count : count + 3], Scratch(*refs[count + 3 :])
        given = jax.tree.unflatten(structure, own)
        arrays = (RaggedArrays if isinstance(operands, RaggedOperands) else DenseArrays)(given, *results)
        run(problem, config, arrays, scratch)

    columns = size, values.shape[-2 if fp8.is_fp8(keys.dtype) else -1], keys.dtype
    ready = plgpu.Barrier(num_barriers=config.stages)
    kernel = kernel_of(body, problem, config, columns, ready, max(1, min(most_items, current().multiprocessors)))
    kernel(*flat, out, lse, claims)


def kernel_of(
    body: Callable[..., None],
    problem: PromptProblem,
    config: PromptConfig,
    sizes: tuple[int, int, DType],
    ready: ScratchType,
    num_blocks: int,
) -> Kernel:
    """The kernel of `body`, which gets its `Scratch` after references.

    Args:
      body: a function of references.
      problem: what it computes.
      config: how to launch it.
      sizes: columns of keys and of values, and their dtype.
      ready: shared memory of the barriers of copies.
      num_blocks: thread blocks.
    """
    size, size_v, dtype = sizes
    is_fp8 = fp8.is_fp8(dtype)
    values = (size_v + tiles.GROUP, config.tokens) if is_fp8 else (config.tokens, size_v)
    kernel: Kernel = plgpu.kernel(
        compat.named("prompt_attention", body),
        out_type=(),
        scratch_types=[
            tiles.shared(WARPGROUPS, ROWS, size, dtype),
            tiles.shared(config.stages, config.tokens, size, dtype),
            tiles.shared(config.stages, *values, dtype),
            plgpu.SMEM((Claimed.num_numbers(problem),), np.dtype(np.int32)),
            ready,
            ready,
            plgpu.Barrier(num_barriers=WARPGROUPS) if is_fp8 else plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=_COMPILER_PARAMS,
    )
    return kernel
