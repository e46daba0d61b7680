"""What choosing a kernel takes everywhere: the GPU, the limits of its indices, and a lock."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from kvjax import AttentionSpec, kernels
from kvjax.ops.route import INT32_MAX as INT32_MAX

one_at_a_time = threading.Lock()
"""Held by calls that choose a kernel, so that threads that make the same first call choose the same one."""


def most_blocks(spec: AttentionSpec, width: int) -> int:
    """The entries of a block table of this width that lengths can reach."""
    return min(width, INT32_MAX // spec.block_size)


@functools.cache
def target_of(device: torch.device) -> kernels.Target:
    """The GPU that kernels for a device are made for."""
    if device.type != "cuda":
        return kernels.Target()
    properties: Any = torch.cuda.get_device_properties(device)  # not all versions declare all that they have
    capability = properties.major, properties.minor
    return kernels.Target(properties.multi_processor_count, capability, properties.shared_memory_per_block_optin)


def table(block_table: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, int]:
    """The block table of a cache as kernels read it, and the entries from one sequence's first to the next's."""
    num_seqs, width = block_table.shape
    own = int32(block_table, -1, min(num_blocks, INT32_MAX))
    stride = own.stride(0) if num_seqs > 1 else width
    if num_seqs * stride > INT32_MAX:
        return own.contiguous(), width
    return own, stride


def int32(indices: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Indices in int32, contiguous along the last dimension; those of 64 bits are clipped."""
    if indices.dtype is not torch.int32:
        indices = indices.clamp(least, most).to(torch.int32)
    return indices if indices.stride(-1) == 1 else indices.contiguous()
