"""The prompt kernel: attention of long query chunks over dense keys and values, on Hopper's tensor cores.

Two warpgroups take 64 query rows of a head each and take turns, so that one computes its softmax while the other
multiplies, as in FlashAttention-3 (https://arxiv.org/abs/2407.08608). Where a KV head has an even number of query
heads, the two take neighbouring heads of the same rows; otherwise the same head of neighbouring rows. The turns also
order reads of shared memory and the copies that replace what was read: the second warpgroup issues these. (A third
warpgroup for copies would leave each thread 168 registers, because ptxas ignores `setmaxnreg` here.)

Each multiprocessor gets one thread block, which takes one item after another: rows of heads, the longest work of a
prompt first. Before it is done with an item it claims the next one from a queue that all blocks
share. The ring of tiles is not drained between items: while a block multiplies the last tiles of an item, it copies the
first ones of the next, and it loads the next query rows while it stores results.

Rows of a sequence are consecutive rows of the query. Results are stored in place, in rows of the same index; the rows
of other sequences are not touched. A row sees the tokens up to its position, within its window, but for those whose
bias is -inf. Only tiles that some row does not see as a whole are masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat, tiles
from kvjax.kernels.aliases import Kernel, Ref
from kvjax.kernels.prompts import fp8 as fp8
from kvjax.kernels.prompts.memory import ArrayMemory, RaggedMemory
from kvjax.kernels.prompts.memory import Operands as Operands
from kvjax.kernels.prompts.memory import RaggedOperands as RaggedOperands
from kvjax.kernels.prompts.problem import ALIGNMENT as ALIGNMENT
from kvjax.kernels.prompts.problem import MAX_HEAD_SIZE as MAX_HEAD_SIZE
from kvjax.kernels.prompts.problem import ROWS as ROWS
from kvjax.kernels.prompts.problem import TOKENS as TOKENS
from kvjax.kernels.prompts.problem import WARPGROUPS, block_shape
from kvjax.kernels.prompts.problem import PromptConfig as PromptConfig
from kvjax.kernels.prompts.problem import PromptProblem as PromptProblem
from kvjax.kernels.prompts.problem import choose as choose
from kvjax.kernels.prompts.problem import why_not as why_not
from kvjax.kernels.prompts.queue import Claimed
from kvjax.kernels.prompts.rows import Scratch, run
from kvjax.kernels.prompts.transfer import LEFT as LEFT
from kvjax.kernels.prompts.transfer import join as join
from kvjax.kernels.target import current

_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def attend(
    operands: Operands | RaggedOperands, out: Ref, lse: Ref, claims: Ref, problem: PromptProblem, config: PromptConfig
) -> None:
    """Attends and stores results in place.

    Args:
      operands: arrays.
      out: reference to float16 or bfloat16 `[segments, num_tokens, num_heads, head_size_v]`.
      lse: reference to float32 `[segments, num_tokens, num_heads]`, natural logarithms.
      claims: reference to int32 `[num_prompts]`, 0; the kernel counts in the first one.
      problem: see there.
      config: how to launch it.
    """
    query, keys, values = operands[:3]
    num_tokens, num_kv_heads, size = keys.shape[-3:]
    if query.shape[0] < ROWS or num_tokens < config.tokens or num_tokens % ALIGNMENT:
        raise ValueError(f"got {query.shape[0]} rows and {num_tokens} tokens, expected what Operands describes")
    heads, rows = block_shape(query.shape[1], num_kv_heads)
    num_prompts = operands.q_lens.shape[0]
    most_items = num_prompts * -(-problem.max_q_len // rows) * (query.shape[1] // heads) * config.segments
    is_ragged = isinstance(operands, RaggedOperands)
    kinds: Any = (RaggedOperands, RaggedMemory) if is_ragged else (Operands, ArrayMemory)

    def body(*refs: Ref) -> None:
        names, memory = kinds
        count = len(names._fields)
        arrays = memory(names(*refs[:count]), *refs[count : count + 3])
        run(problem, config, arrays, Scratch(*refs[count + 3 :]))

    sizes = size, values.shape[-2 if fp8.is_fp8(keys.dtype) else -1], keys.dtype
    ready = plgpu.Barrier(num_barriers=config.stages)
    kernel = kernel_of(body, config, sizes, ready, max(1, min(most_items, current().multiprocessors)))
    kernel(*operands, out, lse, claims)


def kernel_of(
    body: Callable[..., None], config: PromptConfig, sizes: tuple[int, int, Any], ready: Ref, num_blocks: int
) -> Kernel:
    """The kernel of `body`, which gets its `Scratch` after references.

    Args:
      body: a function of references.
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
            plgpu.SMEM((len(Claimed._fields),), np.dtype(np.int32)),
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
