"""Sharing memory between torch and JAX: `to_jax` and `to_torch`. They never copy; what would need a copy raises."""

from __future__ import annotations

import contextlib
from types import MappingProxyType
from typing import Any

import jax
import torch
import torch.utils.dlpack

from kvjax import KVCacheTypeError, KVCacheValueError
from kvjax.ops.options import kind_of
from kvjax_torch.arguments.checks import check_strided, for_cache
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.launch import driver
from kvjax_torch.sharing.exports import Export

LENDABLE_DTYPES: tuple[torch.dtype, ...] = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
"""Element types that torch and JAX both have; those of 64 bits only with JAX's x64 mode on."""

# XLA on CPU copies arrays that are not aligned for vector loads; on GPUs, a program fails when it gets such an array.
ALIGNMENT = MappingProxyType({"cpu": 64, "cuda": 16})
"""The alignment, in bytes, that shared memory must have on each type of device."""


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A JAX array over the memory of `tensor`, of its shape, dtype and device.

    Either may be deleted first: the memory lives as long as one of the two does. A CPU tensor's storage can no longer
    be resized, as after `tensor.numpy()`. Resizing a CUDA storage frees the memory that the array reads: do not.

    JAX assumes that arrays are constant. Write into the tensor only when no pending JAX program reads the array. If the
    array is donated on CPU, XLA copies it and the tensor does not change: write through kvjax_torch instead. On CUDA,
    programs that read the array wait for what is queued on torch's current stream at this call; the host does not.

    Args:
      tensor: a dense CPU or CUDA tensor without gaps or repeated elements, in any order of dimensions, at any storage
        offset that keeps the device's alignment (64 bytes on CPU, 16 on CUDA). A `torch.float4_e2m1fn_x2` tensor
        becomes a uint8 array of its bytes, two codes each.

    Raises:
      KVCacheTypeError: not a plain dense tensor, or a dtype that JAX does not support (64 bits without x64, for
        example).
      KVCacheValueError: it needs a copy (strides, alignment, conjugation), requires grad, or JAX lacks its device.
    """
    _check_lendable(tensor)
    driver.start_jax()
    # The caller's tensor may get another storage (`set_`, `.data =`) while JAX reads this one.
    lent = tensor.detach()
    if lent.dtype is torch.float4_e2m1fn_x2:
        lent = lent.view(torch.uint8)
    if lent.device.type == "cpu":
        _forbid_resizing(lent)
    device = torch.cuda.device(lent.device) if lent.is_cuda else contextlib.nullcontext()
    try:
        with device:  # torch synchronizes with the current stream of the current device
            array = jax.dlpack.from_dlpack(lent, copy=False)
    except (BufferError, RuntimeError, ValueError) as error:
        raise KVCacheValueError(f"tensor: JAX cannot borrow a tensor on {tensor.device}: {error}") from error
    address = array.unsafe_buffer_pointer()
    _check_same_memory("tensor", lent.numel(), lent.data_ptr(), address)
    lent._kvjax_export = Export(address, lent.device.type)  # type: ignore[attr-defined]
    return array


def to_torch(array: jax.Array) -> torch.Tensor:
    """A torch tensor over the memory of `array`, of its shape, dtype and device.

    Either may be deleted first. JAX assumes that arrays are constant: write into the tensor only when JAX no longer
    reads the array, and donate the array only when torch no longer reads the tensor. On CUDA torch's current stream
    waits for the array, and the host does not; on CPU this call waits. JAX does not track torch's streams: on CUDA keep
    the tensor or the array until torch's queued work has read it, or JAX may reuse the memory.

    Raises:
      KVCacheTypeError: not a JAX array, a traced one, or a dtype that torch does not support (float4 and int4, of which
        JAX stores one a byte: pack them into uint8).
      KVCacheValueError: the array is deleted or donated, is on several devices, or torch lacks its device.
    """
    _check_exportable(array)
    is_on_gpu = driver.library() is not None and all(device.platform == "gpu" for device in array.devices())
    context = driver.unchanged_context() if is_on_gpu else contextlib.nullcontext()
    try:
        with context:  # JAX makes the array's context current to have torch's stream wait
            tensor = torch.utils.dlpack.from_dlpack(array)
    except (BufferError, RuntimeError, ValueError) as error:
        raise KVCacheValueError(f"array: torch cannot borrow an array on {array.sharding}: {error}") from error
    _check_same_memory("array", array.size, array.unsafe_buffer_pointer(), tensor.data_ptr())
    return tensor


def _check_lendable(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise KVCacheTypeError(f"tensor: got {kind_of(tensor)}, expected a torch.Tensor")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise KVCacheTypeError(
            f"tensor: got a {type(tensor).__name__}, expected a plain torch.Tensor with memory of its own"
            " (for a distributed tensor its local part; inside torch.compile use kvjax_torch's operations)"
        )
    if tensor.is_quantized:
        raise KVCacheTypeError(f"tensor: got a quantized one, {tensor.dtype}, expected its integers: tensor.int_repr()")
    check_strided("tensor", tensor)
    if tensor.device.type not in ALIGNMENT:
        raise KVCacheValueError(f"tensor: got device {tensor.device}, expected {' or '.join(ALIGNMENT)}")
    if tensor.requires_grad:
        raise KVCacheValueError("tensor: got requires_grad=True, which JAX would not follow; pass tensor.detach()")
    for flag, resolve in (("is_conj", "resolve_conj"), ("is_neg", "resolve_neg")):
        if getattr(tensor, flag)():
            raise KVCacheValueError(
                f"tensor: got {flag}()=True, so its memory does not hold its values; copy with tensor.{resolve}()"
            )
    _check_dtype(tensor.dtype)
    _check_compact(tensor)
    alignment = ALIGNMENT[tensor.device.type]
    if tensor.data_ptr() % alignment:
        raise KVCacheValueError(
            f"tensor: got address {tensor.data_ptr():#x} (storage offset {tensor.storage_offset()}), expected a"
            f" multiple of {alignment} bytes on {tensor.device.type}; lend the whole allocation, or copy with"
            " tensor.clone()"
        )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype is torch.float4_e2m1fn_x2:
        return
    if dtype not in LENDABLE_DTYPES:
        raise KVCacheTypeError(f"tensor: got dtype {dtype}, expected one of {', '.join(map(str, LENDABLE_DTYPES))}")
    wanted = numpy_dtype(dtype)
    held = jax.dtypes.canonicalize_dtype(wanted)
    if held != wanted:
        raise KVCacheTypeError(
            f"tensor: got dtype {dtype}, which JAX would convert to {held} with its x64 mode off;"
            f" pass tensor.to(torch.{held}), or turn on jax_enable_x64"
        )


def _check_compact(tensor: torch.Tensor) -> None:
    """Raises for gaps or repeated elements, which JAX arrays cannot have; permuted dimensions they can."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in dims:
        if stride != expected and tensor.numel():
            raise KVCacheValueError(
                f"tensor: got strides {tensor.stride()} for shape {tuple(tensor.shape)}, expected every element once"
                " and none between, in any order of dimensions; lend the whole allocation, or copy with"
                " tensor.contiguous()"
            )
        expected *= size


def _forbid_resizing(tensor: torch.Tensor) -> None:
    # A numpy array pins the storage's memory. A DLPack capsule keeps the storage alive, but lets it be resized.
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()


def _check_exportable(array: Any) -> None:
    if isinstance(array, jax.core.Tracer):
        raise KVCacheTypeError("array: got one that is being traced, expected a concrete array: call outside jax.jit")
    if not isinstance(array, jax.Array):
        raise KVCacheTypeError(f"array: got a {type(array).__name__}, expected a jax.Array{for_cache(array)}")
    if array.is_deleted():
        raise KVCacheValueError("array: got a deleted one, expected a live one (was it donated?)")
    lendable = [numpy_dtype(dtype) for dtype in LENDABLE_DTYPES]
    if array.dtype not in lendable:
        accepted = ", ".join(dtype.name for dtype in lendable)
        raise KVCacheTypeError(
            f"array: got dtype {array.dtype}, expected one of {accepted} (pack four-bit elements two a byte, as uint8)"
        )
    if len(array.sharding.device_set) > 1:
        raise KVCacheValueError(
            f"array: got one on {len(array.sharding.device_set)} devices, expected one;"
            " lend each shard: array.addressable_shards[i].data"
        )


def _check_same_memory(what: str, size: int, lent: int, borrowed: int) -> None:
    if size and lent != borrowed:
        raise KVCacheValueError(
            f"{what}: its memory at {lent:#x} was copied to {borrowed:#x} instead of being lent; copy it yourself"
        )
