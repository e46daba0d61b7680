"""Attention over dense keys and values in torch, for calls that no kernel over pages supports."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvjax_torch.arguments.plan import AttentionPlan, DensePlan, GatherPlan
from kvjax_torch.eager import fp8
from kvjax_torch.eager.trees import TreeRows

MARGIN = 2.0**-28
"""Factor of weights in products of float32 and bfloat16, as in the decode kernel: a sum of up to 2**28 values does not
exceed the largest. Sums of float16 fit float32, and weights that small would not fit float16."""


class DenseTokens(NamedTuple):
    """Gathered keys and values, and what says which of them a sequence has.

    Attributes:
      keys: `[num_seqs, num_kv_heads, max_len, head_size]`: float32 or, on a GPU, float16 or bfloat16. If it is
        contiguous, no copy is made of it.
      values: `[num_seqs, num_kv_heads, max_len, head_size_v]` of the same dtype.
      block_table: as in `paged_attention`; tokens of entries that are not blocks are not seen.
      seq_lens: as in `paged_attention`.
      num_blocks: blocks of the cache.
      tree: what the rows see of the query tokens; None if they see all that are not later.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_blocks: int
    tree: TreeRows | None = None


def as_gather(plan: AttentionPlan) -> GatherPlan:
    """The gather of what a call attends to, in float32."""
    return GatherPlan(plan.cache, torch.float32, plan.scale_sizes)


def keys_of_latents(latents: torch.Tensor, rope_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one head, `[num_seqs, 1, max_len, size]`, of what a gather returns: values are latents."""
    keys = torch.cat([latents, rope_keys], dim=-1).transpose(1, 2)
    return keys, keys[..., : latents.shape[-1]]


def attend(
    plan: AttentionPlan,
    query: torch.Tensor,
    tokens: DenseTokens,
    sinks: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    in_fp8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a `paged_attention` call that `plan` describes, from gathered keys and values.

    Products are of the keys' and values' dtype, summed in float32; the softmax is in float32. Runs on torch's current
    stream, without waiting for it.

    Args:
      plan: plan of the call.
      query: `[num_seqs, q_len, num_heads, head_size]`, converted to the keys' dtype.
      tokens: what it attends to.
      sinks: as in `paged_attention`.
      weight: float32 `[num_heads]` or `[1]`, a factor of the results.
      out: memory for the first result; by default it is allocated.
      in_fp8: whether query and weights are rounded as for products in fp8, like keys and values.

    Returns:
      `[num_seqs, q_len, num_heads, head_size_v]` of the plan's dtype, and float32 `[num_seqs, q_len, num_heads]`.
    """
    seen = SeenTokens(tokens.keys, tokens.values, seen_by(plan, query.shape[1], tokens))
    attended, lse = attend_seen(plan, query, seen, sinks, in_fp8)
    if out is None:
        out = torch.empty_like(attended, dtype=plan.dtype, memory_format=torch.contiguous_format)
    torch.mul(attended, 1.0 if weight is None else weight[:, None], out=out)
    return out, lse


def seen_by(plan: AttentionPlan, q_len: int, tokens: DenseTokens) -> torch.Tensor:
    """Which tokens the last `q_len` rows of each sequence see: bool `[num_seqs, q_len, max_len]`."""
    seq_lens, max_len, device = tokens.seq_lens, tokens.keys.shape[2], tokens.keys.device
    last = seq_lens.to(torch.int64).clamp(min=0)[:, None] - q_len + torch.arange(q_len, device=device)
    age = last[:, :, None] - torch.arange(max_len, device=device)
    of_block = is_block(tokens.block_table, tokens.num_blocks).repeat_interleave(plan.cache.spec.block_size, dim=1)
    seen = (age >= 0) & of_block[:, None]
    if tokens.tree is not None:
        return seen & tokens.tree.sees(seq_lens, max_len, plan.window)
    return seen if plan.window is None else seen & (age < plan.window)


class SeenTokens(NamedTuple):
    """Keys and values as in `DenseTokens`, and which rows see them: bool `[num_seqs, q_len, max_len]`."""

    keys: torch.Tensor
    values: torch.Tensor
    seen: torch.Tensor


def attend_seen(
    plan: AttentionPlan | DensePlan,
    query: torch.Tensor,
    tokens: SeenTokens,
    sinks: torch.Tensor | None = None,
    in_fp8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row to the tokens that it sees; arguments and results as in `attend`, in float32."""
    keys, values, seen = tokens
    num_seqs, q_len, num_heads, _ = query.shape
    num_kv_heads, max_len = keys.shape[1:3]
    group = num_heads // num_kv_heads
    # Values that no row sees may be NaN, and 0 * NaN is not 0. On a GPU the host does not look whether there are any.
    is_seen = seen.any(dim=1)
    if values.is_cuda or not is_seen.all():
        values = values.masked_fill(~is_seen[:, None, :, None], 0.0)
    if in_fp8:
        query = fp8.rounded_rows(query)
    # Rows of a KV head: by query token, then by query head.
    grouped = query.unflatten(2, (num_kv_heads, group)).transpose(1, 2).to(keys.dtype)
    cap, factor = plan.logits_soft_cap, plan.sm_scale
    products = product(
        grouped.reshape(num_seqs * num_kv_heads, q_len * group, keys.shape[-1]),
        keys.flatten(0, 1).transpose(1, 2),
        factor if cap is None else factor / cap,
    )
    logits = products.view(num_seqs, num_kv_heads, q_len, group, max_len)
    # In place: logits may take most of the memory, and reading them most of the time.
    if cap is not None:
        logits.tanh_().mul_(cap)
    logits.masked_fill_(~seen[:, None, :, None], -torch.inf)
    shift = logits.amax(-1, keepdim=True) if max_len else logits.new_zeros((*logits.shape[:-1], 1))
    shift = torch.where(shift == -torch.inf, 0.0, shift)
    if in_fp8:
        shift = fp8.power_above(shift)
    weights = logits.sub_(shift).exp_()
    if in_fp8:
        weights = fp8.rounded_weights(weights)
    total = weights.sum(-1, keepdim=True)
    margin = 1.0 if values.dtype is torch.float16 else MARGIN
    attended = product(weights.mul_(margin).to(values.dtype).flatten(2, 3).flatten(0, 1), values.flatten(0, 1))
    attended = attended.view(*logits.shape[:-1], values.shape[-1]) / torch.where(total > 0, total * margin, 1.0)
    lse = shift + torch.log(total)
    if sinks is not None:  # last: weights relative to a large sink would round to 0
        whole = torch.logaddexp(lse, sinks.view(num_kv_heads, 1, group, 1))
        attended *= torch.exp(lse - torch.where(whole == -torch.inf, 0.0, whole))
        lse = whole

    def by_token(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(2, 3)

    return by_token(attended), by_token(lse)[..., 0].contiguous()


def is_block(block_table: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Which entries of a table are blocks of a cache: bool, of the table's shape."""
    # torch converts a number to the table's dtype before it compares, and it may not fit.
    return (block_table >= 0) & (block_table <= min(num_blocks - 1, torch.iinfo(block_table.dtype).max))


def product(a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Matrix products `factor * (a @ b)`, float32 `[batch, m, n]`, of `[batch, m, k]` and `[batch, k, n]`.

    Args:
      a: float32 or, on a GPU, float16 or bfloat16.
      b: of the same dtype.
      factor: multiplies the sums, before they are stored.
    """
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=torch.float32)
    if a.dtype is torch.float32:
        return torch.baddbmm(out, a, b, beta=0, alpha=factor, out=out)
    return torch.baddbmm(out, a, b, out_dtype=torch.float32, beta=0, alpha=factor, out=out)
