"""`ragged_attention` in torch, one sequence after the other: of CPU tensors, and where no kernel serves a GPU's."""

from __future__ import annotations

import itertools

import torch

from kvjax_torch.arguments.plan import DensePlan, DenseTensors
from kvjax_torch.eager import dense

LOGITS_BYTES = 16 << 20
"""Limit on the float32 logits of a tile of rows; those of a single row may exceed it."""


def attend(
    plan: DensePlan, tensors: DenseTensors, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_attention` that `plan` describes, into `out` if it is given; the host reads the bounds."""
    query, key, value, *bounds = tensors
    num_tokens, num_heads, _ = query.shape
    out = query.new_zeros((num_tokens, num_heads, value.shape[2])) if out is None else out.zero_()
    lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    # Only on a GPU does torch multiply 16 bits with sums of float32.
    dtype = plan.dtype if query.is_cuda else torch.float32
    ends = zip(bounds, (num_tokens, key.shape[0]), strict=True)
    sequences = (itertools.pairwise(each.clamp(0, most).tolist()) for each, most in ends)
    for (first, stop), (first_token, end) in zip(*sequences, strict=True):
        if first >= stop or first_token >= end:
            continue
        keys, values = (x[first_token:end].to(dtype).transpose(0, 1)[None] for x in (key, value))
        num_keys, tile = end - first_token, max(1, LOGITS_BYTES // (4 * num_heads * (end - first_token)))
        for start in range(first, stop, tile):
            row = torch.arange(start, min(start + tile, stop), device=query.device)
            # How many tokens each row sees.
            number = num_keys - (stop - 1 - row) if plan.causal else torch.full_like(row, num_keys)
            longest = max(num_keys - (stop - min(start + tile, stop)), 0) if plan.causal else num_keys
            seen = torch.arange(longest, device=query.device) < number[:, None]
            tokens = dense.SeenTokens(keys[:, :, :longest], values[:, :, :longest], seen[None])
            found = dense.attend_seen(plan, query[None, start : start + len(row)], tokens)
            for whole, part in zip((out, lse), found, strict=True):
                whole[start : start + len(row)] = part[0]
    return out, lse
