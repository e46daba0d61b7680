"""The prompt kernel of a body, and its launch over JAX's dense keys and values."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, tiles
from kvjax.kernels.aliases import DType, Kernel, Ref, ScratchType
from kvjax.kernels.prompts import fp8
from kvjax.kernels.prompts.operands import RaggedArrays, RaggedOperands
from kvjax.kernels.prompts.problem import ALIGNMENT, ROWS, WARPGROUPS, PromptConfig, PromptProblem, block_shape
from kvjax.kernels.prompts.queue import Claimed
from kvjax.kernels.prompts.rows import Scratch, run
from kvjax.kernels.target import current

_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def attend_dense(
    operands: RaggedOperands[jax.Array],
    results: tuple[jax.Array, jax.Array],
    problem: PromptProblem,
    config: PromptConfig,
) -> tuple[jax.Array, jax.Array]:
    """Stores results among `results`, in place where these are donated, and returns them.

    Args:
      operands: arrays.
      results: float16 or bfloat16 `[splits, num_tokens, num_heads, head_size_v]`, and the log-sum-exp, float32
        `[splits, num_tokens, num_heads]`, natural logarithms.
      problem: without near tokens.
      config: how to launch it.
    """
    query, keys, values = operands[:3]
    num_tokens, num_kv_heads, size = keys.shape
    if query.shape[0] < ROWS or num_tokens < config.tokens or num_tokens % ALIGNMENT:
        raise ValueError(f"got {query.shape[0]} rows and {num_tokens} tokens, expected what RaggedOperands describes")
    heads, rows = block_shape(query.shape[1], num_kv_heads)
    num_prompts = operands.q_lens.shape[0]
    most_items = num_prompts * -(-problem.max_q_len // rows) * (query.shape[1] // heads) * int(config.splits)
    count = len(operands)

    def body(*refs: Ref) -> None:
        arrays = RaggedArrays(RaggedOperands(*refs[:count]), *refs[count : count + 3])
        run(problem, config, arrays, Scratch(*refs[count + 3 :]))

    columns = size, values.shape[2], keys.dtype
    full = plgpu.Barrier(num_barriers=config.stages)
    kernel = kernel_of(body, problem, config, columns, full, max(1, min(most_items, current().multiprocessors)))
    out, lse = (jax.new_ref(x) for x in results)
    # Zeros that XLA does not recognize: it computes them with `ends`. A constant, or another shape, takes a kernel.
    claims = jax.new_ref(jnp.minimum(operands.ends, 0))
    kernel(*operands, out, lse, claims)
    return jax.freeze(out), jax.freeze(lse)


def kernel_of(
    body: Callable[..., None],
    problem: PromptProblem,
    config: PromptConfig,
    sizes: tuple[int, int, DType],
    full: ScratchType,
    num_blocks: int,
) -> Kernel:
    """The kernel of `body`, which gets its `Scratch` after references.

    Args:
      body: a function of references.
      problem: what it computes.
      config: how to launch it.
      sizes: columns of keys and of values, and their dtype.
      full: barriers that complete when copies have arrived: those of keys, and again of values.
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
            full,
            full,
            plgpu.Barrier(num_barriers=WARPGROUPS) if is_fp8 else plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=_COMPILER_PARAMS,
    )
    return kernel
