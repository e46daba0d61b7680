"""Calls of the MLA kernels over caches that are NaN wherever no sequence is, and what they must return."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax import KVCacheDType, MLAAttentionSpec, mla_paged_attention
from kvjax.kernels import mla
from kvjax.kernels.attention import BatchSizes, ReadArrays, Softmax
from kvjax.kernels.attention.choice import plain_problem
from kvjax.kernels.attention.problem import DecodeConfig
from kvjax.kernels.mla import MLAConfig
from kvjax.kernels.target import Target
from support import mla_reference
from support.gpu_compile import CompiledProgram, compile_for
from support.interpret_mode import interpret_mode
from support.mla_cases import SM_SCALE, Problem, build, queries, spec_of

WIDE = KVCacheDType.BFLOAT16, KVCacheDType.FP8_DS_MLA
"""Dtypes of parts of rows that are multiplied in bfloat16."""

LENGTHS = (150, 1, 0, 64, 100)
"""Of three tiles, of one token, of none, of one whole tile, of two."""


def assert_near(
    problem: Problem,
    q: Sequence[np.ndarray],
    out: Any,
    lse: Any,
    *,
    is_few: bool = False,
    eps: float | None = None,
    **options: Any,
) -> None:
    """Within `eps`, by default the roundings of weights to 16 bits and of results.

    The kernel for many rows also rounds queries, and keys of `FP8_DS_MLA`, to the dtypes of products.
    """
    operand, rope = (ml_dtypes.bfloat16 if part in WIDE else np.float16 for part in problem.spec.parts)
    rounded = [x if is_few else x.astype(to) for x, to in zip(map(np.asarray, q), (operand, rope), strict=True)]
    query = np.concatenate([x.astype(np.float64) for x in rounded], axis=-1)
    out, lse = np.asarray(out), np.asarray(lse)
    assert (out.dtype, lse.dtype) == (q[0].dtype, np.float32)
    eps = eps or max(float(ml_dtypes.finfo(dtype).eps) for dtype in (operand, q[0].dtype))
    for seq, keys in enumerate(problem.keys):
        if problem.spec.dtype is KVCacheDType.FP8_DS_MLA and not is_few:
            keys = keys.astype(ml_dtypes.bfloat16)
        want, want_lse = mla_reference.attention(query[seq], keys, problem.spec.kv_lora_rank, SM_SCALE, **options)
        np.testing.assert_allclose(out[seq].astype(np.float64), want, rtol=eps, atol=2 * eps)
        np.testing.assert_allclose(lse[seq], want_lse, rtol=1e-4, atol=1e-4)


def attend(problem: Problem, q: Sequence[Any], softmax: Softmax, config: MLAConfig | DecodeConfig | None = None) -> Any:
    cache = problem.cache
    scale = jnp.float32(problem.scale)
    read = ReadArrays(jnp.asarray(problem.block_table), jnp.asarray(problem.seq_lens), None, scale, scale)
    query = jnp.concatenate([jnp.asarray(x) for x in q], axis=-1)
    pages = cache.kv.reshape(cache.num_pages, -1)
    return jax.block_until_ready(mla.decode(query, pages, read, problem.spec, softmax, config=config))


PARAMETERS = "dtype", "sizes", "block_size", "q_len", "heads", "query_dtype", "window", "cap"


def left_to_nights(cases: Sequence[Any], but: tuple[str, tuple[int, int]]) -> list[Any]:
    """The cases, those marked `full` of another dtype and sizes than `but` marked `nightly` instead."""
    kept = [not hasattr(case, "marks") or case.values[:2] == but for case in cases]
    return [
        case if is_kept else pytest.param(*case.values, marks=pytest.mark.nightly)
        for case, is_kept in zip(cases, kept, strict=True)
    ]


def check(
    dtype: str,
    sizes: tuple[int, int],
    block_size: int,
    q_len: int,
    heads: int,
    query_dtype: str,
    window: int | None,
    cap: float | None,
    *,
    on_gpu: bool = False,
    lengths: Sequence[int] = LENGTHS,
    config: MLAConfig | DecodeConfig | None = None,
    invariant: bool = False,
    kernel: Literal["many", "few"] = "many",
    growth: float = 0,
    eps: float | None = None,
) -> None:
    """What no row sees, and blocks of no sequence, are NaN.

    With `growth`, logits of later tokens are larger. If latents and results are bfloat16, one element of each latent is
    then 2**127, so that a sum of two with weights of 1 overflows.
    """
    spec = spec_of(dtype, sizes, block_size)
    if config is None and kernel == "many":
        passes = -(-q_len * heads // 64)
        config = MLAConfig(132 if on_gpu else 2, passes, part=8 if invariant else None)
    second = 2.0**127 if growth and dtype == query_dtype == "bfloat16" else None
    problem = build(spec, lengths, None if window is None else window + q_len - 1, growth=growth, second=second)
    q = queries(spec, (len(lengths), q_len, heads), query_dtype)
    if growth:
        q[0][..., :2] = 12, 0
    with contextlib.nullcontext() if on_gpu else interpret_mode():
        if config is None:
            max_blocks = 0 if on_gpu else 1  # of any length, so that stages have several tiles, or short
            call = plain_problem(spec, BatchSizes(num_seqs=1, q_len=1, group=q_len * heads, max_blocks=max_blocks))
            call = dataclasses.replace(call, batch_invariant=invariant)
            config = mla.problem.few_config(call, Target(), 132 if on_gpu else 2)
            assert config is not None
        out, lse = attend(problem, q, Softmax(SM_SCALE, window, cap, invariant), config)
        is_few = not isinstance(config, MLAConfig)
        assert_near(problem, q, out, lse, is_few=is_few, eps=eps, window=window, cap=cap)


def run_operation(spec: MLAAttentionSpec, num_layers: int | None, kv: Any, *args: Any) -> Any:
    q_nope, q_pe, table, lens, layer = args
    cache = kvjax.KVCache(kv, spec, num_layers=num_layers)
    options = {"sm_scale": SM_SCALE, "return_lse": True, "implementation": "mosaic"}
    return mla_paged_attention(q_nope, q_pe, cache, table, lens, layer=layer if num_layers else None, **options)


def compile_operation(target: str, spec: MLAAttentionSpec, q_len: int, heads: int) -> CompiledProgram:
    """The operation compiled over two layers and 64 sequences."""
    struct, num_layers = jax.ShapeDtypeStruct, 2
    cache = jax.eval_shape(functools.partial(kvjax.KVCache.allocate, spec, 128, num_layers=num_layers))
    return compile_for(
        target,
        functools.partial(run_operation, spec, num_layers),
        cache.kv,
        *[struct((64, q_len, heads, size), jnp.bfloat16) for size in spec.part_sizes],
        struct((64, 128), jnp.int32),
        struct((64,), jnp.int32),
        struct((), jnp.int32),
    )
