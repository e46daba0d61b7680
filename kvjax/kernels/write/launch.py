"""The Pallas kernel: grid, shared memory and name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from kvjax.kernels import compat
from kvjax.kernels.aliases import DType, Kernel
from kvjax.kernels.codecs import codecs_of
from kvjax.kernels.target import Target
from kvjax.kernels.write.rotation_step import key_staging, rotated_part
from kvjax.spec import AttentionSpec


def write_kernel(
    body: Callable[..., None],
    spec: AttentionSpec,
    tokens: int,
    grid: int,
    rotated_dtype: DType | None = None,
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
) -> Kernel:
    """A kernel of `body` over programs of up to `tokens` tokens.

    `body` takes the references and then the shared memory: data and scales of keys, data and scales of values, of those
    that are staged; and rotated keys of `rotated_dtype`, 16 bits wide, if that is given.
    """
    shared_memory: list[Any] = [
        memory
        for codec, size in zip(codecs_of(spec), spec.part_sizes, strict=False)
        for memory in codec.staging(tokens, spec.num_kv_heads, size)
    ]
    if rotated_dtype is not None:
        shared_memory.append(key_staging(spec, tokens, rotated_dtype))
    name = "concat_and_cache_mla" if spec.is_mla else "reshape_and_cache_flash"
    return compat.program_kernel(name, body, grid, tuple(out_type), shared_memory)


_ARRAY_ALIGNMENT = 1024
"""Alignment of arrays in shared memory."""


def why_no_staging(spec: AttentionSpec, target: Target | None = None, *, rotates: bool = False) -> str | None:
    """Why shared memory cannot stage the rows of a token; None where it can, or where there are none to stage.

    If `target` is None, the GPU is unknown, and taken to have the most shared memory of any.
    """
    row_bytes = spec.part_sizes[rotated_part(spec)] * 2 if rotates else 0  # rotated keys, 16 bits wide
    row_bytes += sum(sum(row) for codec, row in zip(codecs_of(spec), spec.row_bytes, strict=False) if codec.is_staged)
    token_bytes, limit = spec.num_kv_heads * row_bytes, (target or Target()).shared_bytes - 5 * _ARRAY_ALIGNMENT
    if token_bytes <= limit:
        return None
    return f"a token's rows, {token_bytes} bytes, do not fit in the {limit} bytes of shared memory that a program has"
