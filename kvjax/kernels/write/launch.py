"""The Pallas kernel: grid, shared memory and name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat
from kvjax.kernels.target import Target
from kvjax.kernels.write.rotation_step import key_staging
from kvjax.spec import AttentionSpec


def write_kernel(
    body: Callable[..., None],
    spec: AttentionSpec,
    tokens: int,
    grid: int,
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    rotated_dtype: np.dtype[Any] | None = None,
) -> Callable[..., Any]:
    """A kernel of `body` over programs of up to `tokens` tokens.

    `body` takes the references and then the shared memory: data and scales of keys, data and scales of values, if pages
    hold scales; and rotated keys of `rotated_dtype`, 16 bits wide, if that is given.
    """
    shared_memory: list[Any] = [
        memory
        for size in (spec.head_size, spec.head_size_v)
        for memory in _operand_staging(spec, tokens, *spec.dtype.info.row_bytes(size))
        if spec.stores_scales
    ]
    if rotated_dtype is not None:
        shared_memory.append(key_staging(spec, tokens, rotated_dtype))
    kernel: Callable[..., Any] = plgpu.kernel(
        compat.named("reshape_and_cache_flash", body),
        out_type=tuple(out_type),
        grid=(grid,),
        grid_names=("program",),
        scratch_types=shared_memory,
        compiler_params=compat.COMPILER_PARAMS,
    )
    return kernel


_ARRAY_ALIGNMENT = 1024
"""Alignment of arrays in shared memory."""


def why_no_staging(spec: AttentionSpec, target: Target | None = None, *, rotates: bool = False) -> str | None:
    """Why no shared memory stages the rows of a token; None where some does, as without rows to stage.

    `target` is None where the GPU is unknown: then it is one with the most shared memory.
    """
    row_bytes = spec.head_size * 2 if rotates else 0  # rotated keys, 16 bits wide
    if spec.stores_scales:
        row_bytes += sum(sum(spec.dtype.info.row_bytes(size)) for size in (spec.head_size, spec.head_size_v))
    token_bytes, limit = spec.num_kv_heads * row_bytes, (target or Target()).shared_bytes - 5 * _ARRAY_ALIGNMENT
    if token_bytes <= limit:
        return None
    return f"a token's rows, {token_bytes} bytes, do not fit in the {limit} bytes of shared memory that a program has"


def _operand_staging(spec: AttentionSpec, tokens: int, data_bytes: int, scale_bytes: int) -> tuple[Any, Any]:
    """Shared memory for the data and the scales of rows, as bytes; float32 scales are int32 words."""
    heads = spec.num_kv_heads
    scales = ((tokens, heads * scale_bytes), jnp.uint8)
    if spec.quant_mode.is_per_token_head:
        scales = ((tokens, heads), jnp.int32)
    return plgpu.SMEM((tokens, heads * data_bytes), jnp.uint8), plgpu.SMEM(*scales)
