"""The scales of a call: as tensors on the caches' device, and as plans know them."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvjax import AttentionSpec, KVCacheDType, KVCacheTypeError, KVCacheValueError, check_scale
from kvjax_torch.arguments.caches import Facts
from kvjax_torch.arguments.checks import check_tensors, is_fake
from kvjax_torch.arguments.dtypes import has_scale_tensors, resolve_cache_dtype
from kvjax_torch.arguments.plan import Encoding, WriteTensors

MAX_CONSTANTS = 1024
_constants: dict[tuple[float, int], torch.Tensor] = {}

Scale = float | np.float32 | torch.Tensor
"""A decode scale from 2^-100 to 2^100: a number, or a float32 tensor of one element or, for fp8, `[num_kv_heads]`; or
the scales of each token and head, `[num_blocks, block_size, num_kv_heads]`. On a GPU prefer tensors: the host waits at
the first use of a number on a device."""


def as_tensors(k_scale: Scale, v_scale: Scale, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both scales as dense tensors."""
    scales = as_tensor("k_scale", k_scale, cache), as_tensor("v_scale", v_scale, cache)
    check_tensors(k_scale=scales[0], v_scale=scales[1])
    return scales


def as_tensor(what: str, scale: Scale, cache: torch.Tensor) -> torch.Tensor:
    """A scale as a tensor; a number on a GPU is copied there once."""
    if isinstance(scale, torch.Tensor):
        return scale
    is_traced = torch.compiler.is_compiling() or is_fake(cache)
    if type(scale) is float and not is_traced:  # the common case of numbers
        constant = _constants.get((scale, cache.get_device()))
        if constant is not None:
            return constant
    if isinstance(scale, (np.floating, np.integer)):  # of kvjax.load_kv_scales and kvjax.calibrate
        scale = float(scale)
    if torch.compiler.is_compiling() and isinstance(scale, np.ndarray) and not scale.ndim:  # what Dynamo makes of one
        return torch.as_tensor(scale, dtype=torch.float32, device=cache.device)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        hint = f": torch.as_tensor({what}, device=...)" if isinstance(scale, np.ndarray) else ""
        raise KVCacheTypeError(
            f"{what}: got {scale!r} of type {type(scale).__name__}, expected a number or a tensor{hint}"
        )
    if is_traced:
        return torch.full((), scale, dtype=torch.float32, device=cache.device)
    check_scale(what, scale)  # values on a GPU are not checked
    if not cache.is_cuda:
        return torch.full((), scale, dtype=torch.float32, device=cache.device)
    constant = _constants.get((scale, cache.get_device()))
    return _new_constant(scale, cache.device) if constant is None else constant


def _new_constant(scale: float, device: torch.device) -> torch.Tensor:
    """A number on a GPU, copied there once; the host waits for the copy, so that every stream may read it."""
    # During a capture the host must not wait, and memory of the graph's pool must not be kept. Constants are not freed
    # or replaced, since graphs may read them.
    if torch.cuda.is_current_stream_capturing() or len(_constants) >= MAX_CONSTANTS:
        return torch.full((), scale, dtype=torch.float32, device=device)
    constant = torch.tensor(scale, dtype=torch.float32, device=device)
    _constants[scale, constant.get_device()] = constant
    return constant


def scale_facts(scale: torch.Tensor) -> Facts:
    """What plans know of a scale; it has strides only if it is a tensor `[num_blocks, block_size, num_kv_heads]`."""
    return Facts(scale.dtype, scale.shape, scale.stride() if has_scale_tensors(scale) else ())


def scale_tensor_facts(k_scale: Facts, v_scale: Facts, dtype: KVCacheDType) -> tuple[Facts, Facts] | None:
    """The facts of the tensors with the scales of each token and head; None if there are no such tensors."""
    if not (dtype.is_per_token_head and (k_scale.strides or v_scale.strides)):
        return None
    for name, facts in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not facts.strides:
            raise KVCacheValueError(
                f"{name}: got shape {tuple(facts.shape)}, expected [num_blocks, block_size, num_kv_heads] as of the"
                " other scale"
            )
    return k_scale, v_scale


def scale_sizes(k_scale: Facts, v_scale: Facts, spec: AttentionSpec) -> tuple[int, int]:
    """Elements of both scales, 1 where they are scales of each token and head.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape or dtype.
    """
    for name, (dtype, shape, strides), part in zip(
        ("k_scale", "v_scale"), (k_scale, v_scale), spec.dtype.parts, strict=True
    ):
        takes_heads = part.info.takes_head_scales
        if dtype is not torch.float32:
            raise KVCacheTypeError(f"{name}: got dtype {dtype}, expected torch.float32")
        if spec.dtype.is_per_token_head and strides:
            continue
        if math.prod(shape) != 1 and not (takes_heads and shape == (spec.num_kv_heads,)):
            accepted = f"one element or [num_kv_heads={spec.num_kv_heads}]" if takes_heads else "one element"
            raise KVCacheValueError(f"{name}: got shape {tuple(shape)}, expected {accepted} for {spec.dtype.value!r}")
    if spec.dtype.is_per_token_head:
        return 1, 1
    return math.prod(k_scale.shape), math.prod(v_scale.shape)


def refuse_scale_tensors(name: str, tensors: WriteTensors, encoding: Encoding) -> None:
    """Raises `KVCacheTypeError` for tensors of scales that are written to, under a schema that does not mutate them."""
    stored = resolve_cache_dtype(encoding.kv_cache_dtype, tensors.key_cache.dtype)
    if has_scale_tensors(tensors.k_scale) and stored.is_per_token_head:
        raise KVCacheTypeError(
            f"torch.ops.kvjax.{name}: got k_scale of shape {tuple(tensors.k_scale.shape)} for"
            f" {encoding.kv_cache_dtype!r}, which is written to; expected torch.ops.kvjax.{name}_per_token_head"
        )
