"""Runs the kernel of a call from torch in interpret mode, on copies of the memory of its tensors."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from kvjax.kernels.launchable import Amount, AnyCount
from kvjax_torch.launch import running
from support.interpret_mode import interpret_mode


def run_interpreted(call: running.Call) -> None:
    """Runs a kernel on copies of its tensors' memory, and puts what it changed back."""
    before, given = [], []
    for tensor, argument in zip(call.tensors, call.kernel.arguments, strict=True):
        row_bytes = argument.array.dtype.itemsize * math.prod(argument.array.shape[1:])
        memory = np.full(-(-len(memory_of(tensor)) // row_bytes) * row_bytes, 0xFF, np.uint8)
        memory[: len(memory_of(tensor))] = memory_of(tensor)
        before.append(memory)
        given.append(jnp.asarray(memory))
    with interpret_mode():
        results = jax.block_until_ready(_program(call.kernel, tuple(call.counts), call.amount)(*given))
    for i, result in zip(call.kernel.written, results, strict=True):
        own, after = memory_of(call.tensors[i]), np.asarray(result).reshape(-1).view(np.uint8)
        changed = after != before[i]
        assert not changed[len(own) :].any()
        own[changed[: len(own)]] = after[changed]


@functools.lru_cache(maxsize=16)
def _program(kernel: AnyCount, counts: tuple[int, ...], amount: Amount) -> Callable[..., list[jax.Array]]:
    """Traced and compiled once for all calls of a kernel with the same counts."""
    return jax.jit(functools.partial(kernel.with_counts, counts, amount))


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes from a CPU tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    return np.frombuffer((ctypes.c_uint8 * size).from_address(tensor.data_ptr()), np.uint8)
