"""The Pallas kernel: grid, shared memory and name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat
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


def _operand_staging(spec: AttentionSpec, tokens: int, data_bytes: int, scale_bytes: int) -> tuple[Any, Any]:
    """Shared memory for the data and the scales of rows, as bytes; float32 scales are int32 words."""
    heads = spec.num_kv_heads
    scales = ((tokens, heads * scale_bytes), jnp.uint8)
    if spec.quant_mode.is_per_token_head:
        scales = ((tokens, heads), jnp.int32)
    return plgpu.SMEM((tokens, heads * data_bytes), jnp.uint8), plgpu.SMEM(*scales)
