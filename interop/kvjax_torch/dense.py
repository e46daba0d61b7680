"""Attention over dense keys and values in torch, for calls that no kernel over pages supports."""

from __future__ import annotations

import torch

from kvjax_torch.plan import AttentionPlan


def attend(
    plan: AttentionPlan,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a `paged_attention` call that `plan` describes, from keys and values gathered in float32.

    Runs on torch's current stream, without waiting for it.

    Args:
      plan: plan of the call.
      query: `[num_seqs, q_len, num_heads, head_size]`.
      keys: float32 `[num_seqs, max_len, num_kv_heads, head_size]`.
      values: float32 `[num_seqs, max_len, num_kv_heads, head_size_v]`.
      block_table: as in `paged_attention`; tokens of entries that are not blocks are not seen.
      seq_lens: as in `paged_attention`.
      num_blocks: blocks of the cache.
      sinks: as in `paged_attention`.
    """
    num_seqs, q_len, num_heads, head_size = query.shape
    max_len, num_kv_heads = keys.shape[1:3]
    device = query.device
    is_block = (block_table >= 0) & (block_table < num_blocks)
    last = seq_lens.to(torch.int64).clamp(min=0)[:, None] - q_len + torch.arange(q_len, device=device)
    age = last[:, :, None] - torch.arange(max_len, device=device)
    seen = (age >= 0) & is_block.repeat_interleave(plan.cache.spec.block_size, dim=1)[:, None]
    if plan.window is not None:
        seen &= age < plan.window
    # Values that no row sees may be NaN, and 0 * NaN is not 0.
    values = values.masked_fill(~seen.any(dim=1)[:, :, None, None], 0.0)
    grouped = query.to(torch.float32).reshape(num_seqs, q_len, num_kv_heads, num_heads // num_kv_heads, head_size)
    logits = torch.einsum("sqhgd,sthd->sqhgt", grouped, keys) * plan.sm_scale
    if plan.logits_soft_cap is not None:
        logits = plan.logits_soft_cap * torch.tanh(logits / plan.logits_soft_cap)
    logits = logits.masked_fill(~seen[:, :, None, None], -torch.inf)
    sink = logits.new_full((num_heads,), -torch.inf) if sinks is None else sinks
    sink = sink.reshape(num_kv_heads, -1, 1).expand(*logits.shape[:-1], 1)
    lse = torch.logsumexp(torch.cat([logits, sink], dim=-1), dim=-1)
    weights = torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    attended = torch.einsum("sqhgt,sthd->sqhgd", weights, values)
    # An einsum's result may have any strides; the operation returns a contiguous one.
    out = query.new_empty((num_seqs, q_len, num_heads, values.shape[-1]))
    return out.copy_(attended.reshape(out.shape)), lse.reshape(num_seqs, q_len, num_heads)
