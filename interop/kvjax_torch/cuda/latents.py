"""Operations on latents (MLA) of CUDA tensors, on torch's current stream: by the kernels for keys and values, and by
that of attention over latents."""

from __future__ import annotations

import dataclasses

import torch

from kvjax import UnsupportedError
from kvjax_torch.arguments.plan import CachePlan, GatherPlan, RaggedPlan, ReadTensors, WritePlan, WriteTensors
from kvjax_torch.calls import choosing, writing
from kvjax_torch.cuda import reads
from kvjax_torch.launch import running


def write(plan: WritePlan, tensors: WriteTensors, unique_slots: bool) -> None:
    """`concat_and_cache_mla` of CUDA tensors that `plan` describes.

    Raises:
      UnsupportedError: no kernel writes such latents.
    """
    running.check_capability(tensors.key_cache.get_device())
    check_has_kernels(plan.cache)
    with choosing.one_at_a_time:
        call = writing.write_call(plan, tensors, unique_slots)
    running.run(call)


def gather(plan: GatherPlan, tensors: ReadTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents and rope keys of a gather of CUDA tensors that `plan` describes.

    Raises:
      UnsupportedError: no kernel reads such latents.
    """
    check_has_kernels(plan.cache)
    return reads.gather(plan, tensors)


def check_has_kernels(cache: CachePlan) -> None:
    """Raises `UnsupportedError` unless the kernels for keys and values serve latents and rope keys of a cache."""
    spec = cache.as_keys_and_values.spec
    if spec.is_mla:
        rope = f" and qk_rope_head_dim={spec.part_sizes[1]}"
        raise UnsupportedError(
            f"got latents (MLA) of {spec.dtype.value!r}{rope} on a GPU, expected float32, float16, bfloat16 or fp8_e4m3"
            " with rope keys, or CPU tensors; JAX serves the others on memory that kvjax_torch.to_jax lends"
        )


def attend(
    plan: RaggedPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    cu_q_lens: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_ragged_paged_attention` of CUDA tensors that `plan` describes, into `out` if it is given.

    Every sequence is padded to `max_q_len` query tokens, its own last, so that the host need not know their numbers.
    """
    q_len, (num_tokens, num_heads, _) = plan.max_q_len, query.shape
    rank = plan.attention.cache.spec.head_size_v
    # One row more, for those of the padding.
    outs = query.new_zeros((num_tokens + 1, num_heads, rank))
    lses = query.new_full((num_tokens + 1, num_heads), -torch.inf, dtype=torch.float32)
    if num_tokens and tensors.block_table.numel():
        bounds = cu_q_lens.to(torch.int64).clamp(0, num_tokens)
        first, end = bounds[:-1, None], bounds[1:, None]
        row = end - q_len + torch.arange(q_len, device=query.device)
        is_own = (row >= first) & (end - first <= q_len)
        padded = query[row.clamp(0, num_tokens - 1)]
        results = reads.attend(dataclasses.replace(plan.attention, q_len=q_len), padded, tensors, None)
        index = torch.where(is_own, row, num_tokens).flatten()
        for whole, part in zip((outs, lses), results, strict=True):
            whole[index] = part.flatten(0, 1)
    lse = lses[:-1].clone()
    return outs[:-1].clone() if out is None else out.copy_(outs[:-1]), lse
