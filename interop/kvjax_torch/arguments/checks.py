"""Checks of single arguments: types, devices, addresses and, in `kvjax.checked()`, values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.autograd import forward_ad

import kvjax
from kvjax import KVCache, KVCacheTypeError, KVCacheValueError, UnsupportedError
from kvjax.ops.options import kind_of
from kvjax_torch.arguments.dtypes import INDEX_DTYPES

IndexFacts = tuple[torch.dtype, int]
"""Dtype and number of dimensions of a tensor of slots, blocks or lengths."""


def for_cache(value: object) -> str:
    """The end of an error message about a value that is not a tensor: how to pass it if it is a `KVCache`."""
    if not isinstance(value, KVCache):
        return ""
    return (
        "; lend its array, to_torch(cache.kv), and give each call the scales that it carries, to_torch(cache.k_scale)"
        " and to_torch(cache.v_scale), or 1 where it carries none"
    )


def check_tensors(**tensors: object) -> None:
    """Raises `KVCacheTypeError` for anything but dense tensors that are not quantized by torch."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise KVCacheTypeError(f"{name}: got {kind_of(tensor)}, expected a torch.Tensor{for_cache(tensor)}")
        check_strided(name, tensor)
        if tensor.is_quantized:
            raise KVCacheTypeError(f"{name}: got a quantized tensor, expected its numbers: {name}.dequantize()")


def check_strided(name: str, tensor: torch.Tensor) -> None:
    """Raises `KVCacheTypeError` for sparse and nested tensors."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise KVCacheTypeError(f"{name}: got layout {kind}, expected torch.strided: {name}.to_dense()")


def check_in_place(name: str, tensor: torch.Tensor) -> None:
    """Raises `KVCacheValueError` for a tensor of inference mode outside of it, which torch does not write in place."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise KVCacheValueError(
            f"{name}: got a tensor of inference mode outside of it, expected one that may be written in place: make it"
            " outside torch.inference_mode(), or call inside"
        )


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of `FakeTensorMode`, without memory. What is computed from it must not be cached."""
    return getattr(tensor, "fake_mode", None) is not None


def refuse_gradient(what: str, /, **tensors: torch.Tensor) -> None:
    """Raises `KVCacheTypeError` if autograd would need a gradient, or differentiates forward."""
    for name, tensor in tensors.items():
        is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
        if is_dual or (tensor.requires_grad and torch.is_grad_enabled()):
            raise KVCacheTypeError(
                f"{name}: got {'a tangent' if is_dual else 'requires_grad=True'}, but {what} has no gradient;"
                f" pass {name}.detach(){'' if is_dual else ', or call under torch.no_grad()'}"
            )


def check_devices(key_cache: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raises `KVCacheValueError` if a tensor is on another device than the cache."""
    check_same_device("key_cache", key_cache, tensors)


def check_same_device(cache_name: str, cache: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `KVCacheValueError` if a tensor is on another device than the cache of that name."""
    device = cache.device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise KVCacheValueError(f"{name}: got device {tensor.device}, expected {device}, that of {cache_name}")


def check_index(name: str, index: IndexFacts, dims: tuple[str, ...]) -> None:
    """Raises unless slots, blocks or lengths are int32 or int64 and have the dimensions `dims`."""
    dtype, ndim = index
    if dtype not in INDEX_DTYPES:
        raise KVCacheTypeError(f"{name}: got dtype {dtype}, expected {' or '.join(map(str, INDEX_DTYPES))}")
    if ndim != len(dims):
        raise KVCacheValueError(f"{name}: got {ndim} dimensions, expected [{', '.join(dims)}]")


def check_addresses(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `KVCacheValueError` for tensors at addresses that their elements do not fit."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % tensor.element_size():
            raise KVCacheValueError(
                f"{name}: got address {tensor.data_ptr():#x}, expected a multiple of {tensor.dtype.itemsize},"
                f" the bytes of a {tensor.dtype}"
            )


def check_scale_values(scales: Mapping[str, torch.Tensor]) -> None:
    """Raises `KVCacheValueError` if `kvjax.check_scale` rejects a scale.

    Scales on a GPU are read only in `kvjax.checked()`; the host waits for them.
    """
    for name, scale in scales.items():
        if scale.device.type == "cpu" or kvjax.is_checked():
            kvjax.check_scale(name, on_host(name, scale).detach().numpy())


def on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host, to check its values; the host waits for it. Raises `UnsupportedError` in a capture."""
    if not tensor.is_cuda:
        return tensor
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"kvjax.checked() reads {name} on the host, which cannot wait while a CUDA graph is captured; leave it for"
            " the capture, with kvjax.checked(False)"
        )
    return tensor.cpu()


def are_plain(*tensors: torch.Tensor) -> bool:
    """Whether nothing would intercept an operation on these tensors: no subclass, lazy negation, mode, transformation,
    autograd, tracer or compiler.
    """
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.is_neg():
            return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    return not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
