"""Checks the arguments of gathers and turns them into plans."""

from __future__ import annotations

import functools

import torch

import kvjax
from kvjax import KVCacheValueError
from kvjax_torch.arguments.caches import Facts, cache_plan, check_apart, check_caches
from kvjax_torch.arguments.checks import (
    IndexFacts,
    check_addresses,
    check_devices,
    check_index,
    check_scale_values,
    on_host,
)
from kvjax_torch.arguments.dtypes import gathered_dtype, resolve_cache_dtype, row_head_size
from kvjax_torch.arguments.plan import Encoding, GatherPlan, ReadTensors
from kvjax_torch.arguments.scales import scale_facts, scale_sizes, scale_tensor_facts


def gather_plan(
    tensors: ReadTensors,
    encoding: Encoding,
    dtype: torch.dtype | None,
    last_tokens: int | torch.Tensor | None = None,
) -> GatherPlan:
    """The plan of a `gather_kv` call.

    If only the `last_tokens` of each sequence are read, checked mode checks only their blocks. `last_tokens` may be a
    tensor on the host, with a number for each sequence.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    key_cache, value_cache, block_table, seq_lens, k_scale, v_scale = tensors
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_devices(**tensors._asdict())
    plan = _gather_plan(
        (Facts.of(key_cache), Facts.of(value_cache)),
        (block_table.dtype, block_table.ndim),
        (seq_lens.dtype, seq_lens.ndim),
        encoding,
        (scale_facts(k_scale), scale_facts(v_scale)),
        dtype,
    )
    if seq_lens.shape[0] != block_table.shape[0]:
        raise KVCacheValueError(
            f"seq_lens: got shape {tuple(seq_lens.shape)}, expected [num_seqs={block_table.shape[0]}]"
        )
    check_addresses(caches | ({} if plan.cache.scales is None else scales))
    check_apart(caches, is_written=False)
    if plan.cache.scales is None:
        check_scale_values(scales)
    if kvjax.is_checked():
        block_size = plan.cache.spec.block_size
        blocks, lengths = on_host("block_table", block_table), on_host("seq_lens", seq_lens)
        if last_tokens is not None:
            ends = block_size * torch.arange(1, blocks.shape[1] + 1)
            reach = torch.as_tensor(last_tokens).reshape(-1, 1)
            blocks = blocks.masked_fill(lengths[:, None] - ends >= reach, -1)
        kvjax.check_sequences(blocks.numpy(), lengths.numpy(), key_cache.shape[0], block_size)
    return plan


@functools.lru_cache(maxsize=1024)
def _gather_plan(
    caches: tuple[Facts, Facts],
    block_table: IndexFacts,
    seq_lens: IndexFacts,
    encoding: Encoding,
    scales: tuple[Facts, Facts],
    dtype: torch.dtype | None,
) -> GatherPlan:
    check_caches(*caches)
    check_index("block_table", block_table, ("num_seqs", "max_blocks"))
    check_index("seq_lens", seq_lens, ("num_seqs",))
    cache_dtype = resolve_cache_dtype(encoding.kv_cache_dtype, caches[0].dtype)
    apart = scale_tensor_facts(*scales, cache_dtype)
    key_size, value_size = (
        row_head_size(name, cache.shape[3] * cache.dtype.itemsize, part, scales_apart=apart is not None)
        for name, cache, part in zip(("key_cache", "value_cache"), caches, cache_dtype.parts, strict=True)
    )
    num_heads, order = caches[0].shape[2], encoding.v_scale_layout
    cache = cache_plan(*caches, num_heads, (key_size, value_size), cache_dtype, order, apart)
    return GatherPlan(cache, gathered_dtype(dtype, cache_dtype), scale_sizes(*scales, cache.spec))
