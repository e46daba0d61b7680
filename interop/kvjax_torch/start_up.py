"""Compiles the kernels of later calls, several at once: of keys and values, latents, and dense keys and values."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kvjax import KVCacheDType, KVCacheValueError
from kvjax.ops.options import as_bool, as_int
from kvjax_torch.arguments.checks import check_tensors
from kvjax_torch.arguments.dense import dense_plan
from kvjax_torch.arguments.dtypes import check_dtype, dtype_name, has_scale_tensors
from kvjax_torch.arguments.latents import (
    GatheredRows,
    LatentPages,
    latent_attention_plan,
    latent_gather_plan,
    latent_write_plan,
)
from kvjax_torch.arguments.plan import DenseTensors, Encoding, LatentQuery, ReadTensors, SoftmaxOptions
from kvjax_torch.arguments.scales import Scale, as_tensor, as_tensors
from kvjax_torch.cuda import dense_prompts, latents, writes
from kvjax_torch.eager import host
from kvjax_torch.mla import MLAOptions, concat_and_cache_mla, gather_and_maybe_dequant_cache, mla_paged_attention
from kvjax_torch.ops import gather_kv, reshape_and_cache_flash


def warm_up(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    v_scale_layout: str = "linear",
    unique_slots: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Compiles the kernels of `reshape_and_cache_flash` and `gather_kv` for such tensors; the cache does not change.

    Call it before the first request, and before `torch.cuda.graph` records a call. Then calls with any number of
    tokens, slots, sequences and blocks do not compile, on the caches' device and with tensors of the same dtypes,
    strides and alignment and the same `unique_slots`. Layers that are alike need one call.

    Args:
      key: as in `reshape_and_cache_flash`, with the strides of the model's keys and any contents. At least two tokens,
        since the strides of one do not show those of more.
      value: the same for the values.
      key_cache: as in `reshape_and_cache_flash`.
      value_cache: as in `reshape_and_cache_flash`.
      slot_mapping: a tensor of the dtype that the slots will have; its contents are ignored.
      kv_cache_dtype: as in `reshape_and_cache_flash`.
      k_scale: as in `reshape_and_cache_flash`.
      v_scale: as in `reshape_and_cache_flash`.
      v_scale_layout: as in `reshape_and_cache_flash`.
      unique_slots: as in `reshape_and_cache_flash`; writes with and without it are two kernels.
      dtype: the `dtype` of later `gather_kv` calls.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as the two operations.
    """
    check_tensors(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    _check_strides_show(key=key, value=value)
    one_key, one_value = _one_token(key), _one_token(value)
    # On a GPU a kernel is compiled for the memory that it is launched on, and the launch may write nothing.
    slots, table, lengths = slot_mapping.new_full((1,), -1), slot_mapping.new_zeros((1, 1)), slot_mapping.new_zeros(1)
    steps = [(key, value, slots, lengths), (one_key, one_value, slots, lengths)]
    if key_cache.is_cuda:
        read = ReadTensors(key_cache, value_cache, table, lengths, *as_tensors(k_scale, v_scale, key_cache))
        rows, encoding = [(step[0], step[1]) for step in steps], Encoding(dtype_name(kv_cache_dtype), v_scale_layout)
        writes.compile_writes_and_gathers(rows, read, slots, encoding, unique_slots, dtype)
    else:
        # A call without work compiles nothing. Any memory serves; few tokens and many are compiled separately.
        counts = 1, host.FEW_TOKENS + 1
        blocks = -(-counts[1] // key_cache.shape[1])
        key_cache, value_cache = key_cache[:1].repeat(blocks, 1, 1, 1), value_cache[:1].repeat(blocks, 1, 1, 1)
        k_scale, v_scale = (
            scale[:1].repeat(blocks, 1, 1) if isinstance(scale, torch.Tensor) and has_scale_tensors(scale) else scale
            for scale in (k_scale, v_scale)
        )
        every = torch.arange(counts[1], device="cpu").to(slot_mapping.dtype)
        table = every[None, :blocks]
        steps = [
            (one_key.expand(count, -1, -1), one_value.expand(count, -1, -1), every[:count], every[:1] + count)
            for count in counts
        ]
    stored_as = kv_cache_dtype, k_scale, v_scale
    write = functools.partial(reshape_and_cache_flash, v_scale_layout=v_scale_layout, unique_slots=unique_slots)
    for step_key, step_value, step_slots, step_lengths in steps:
        write(step_key, step_value, key_cache, value_cache, step_slots, *stored_as)
        gather_kv(key_cache, value_cache, table, step_lengths, *stored_as, v_scale_layout=v_scale_layout, dtype=dtype)


def warm_up_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    scale: Scale,
    *,
    num_heads: int,
    sm_scale: float,
    q_lens: Sequence[int] = (1,),
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    batch_invariant: bool = False,
    unique_slots: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Compiles the kernels of the operations on latents for such tensors, several at once; the cache does not change.

    What `warm_up` is for keys and values: call it before the first request, and before `torch.cuda.graph` records a
    call. Then `concat_and_cache_mla`, `gather_and_maybe_dequant_cache` and attention with these options do not compile,
    whatever the numbers of tokens, slots, sequences and blocks, for tensors of the same dtypes, strides and alignment.
    Layers that are alike need one call.

    Args:
      kv_c: as in `concat_and_cache_mla`, with the strides of the model's latents and any contents. At least two tokens,
        since the strides of one do not show those of more. Queries will have its dtype.
      k_pe: the same for the rope keys.
      kv_cache: as in `concat_and_cache_mla`.
      slot_mapping: a tensor of the dtype that the slots will have; its contents are ignored.
      kv_cache_dtype: as in `concat_and_cache_mla`.
      scale: as in `concat_and_cache_mla`.
      num_heads: heads of the query.
      sm_scale: as in `mla_paged_attention`.
      q_lens: the numbers of query tokens of a sequence in later calls: for `mla_ragged_paged_attention`, its
        `max_q_len`, rounded up to a power of two.
      sliding_window: as in `mla_paged_attention`.
      logits_soft_cap: as in `mla_paged_attention`.
      batch_invariant: as in `mla_paged_attention`.
      unique_slots: as in `concat_and_cache_mla`; writes with and without it are two kernels.
      dtype: of the `dst` of later gathers; by default `kv_c`'s.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as the operations.
    """
    check_tensors(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        if rows.ndim != 2 or rows.shape[0] < 2:
            raise KVCacheValueError(
                f"{name}: got shape {tuple(rows.shape)}, expected 2 dimensions and at least 2 tokens, which show their"
                " strides"
            )
    num_heads = as_int("num_heads", num_heads, least=1)
    if not isinstance(q_lens, Sequence) or not q_lens:
        raise KVCacheValueError(f"q_lens: got {q_lens!r}, expected a sequence of at least one int")
    shapes = [(1, as_int("q_lens", q_len, least=1), num_heads) for q_len in q_lens]
    check_dtype(dtype)
    stored_as = dtype_name(kv_cache_dtype), as_tensor("scale", scale, kv_cache)
    slots = slot_mapping.new_full((1,), -1)
    given = kv_c, k_pe
    one = _one_token(kv_c), _one_token(k_pe)
    # Also the checks of all arguments of a write.
    writes = [latent_write_plan(*rows, LatentPages(kv_cache, *stored_as), slots) for rows in (given, one)]
    queries = [LatentQuery(*(rows.new_zeros(*shape, rows.shape[1]) for rows in one)) for shape in shapes]
    softmax = SoftmaxOptions(sm_scale, sliding_window, logits_soft_cap, None, batch_invariant)
    unique_slots = as_bool("unique_slots", unique_slots)
    # On a CPU few tokens and many are compiled apart, in any memory. A GPU's kernels are compiled for the memory that
    # they are launched on, and the launches may write nothing.
    counts = (0,) if kv_cache.is_cuda else (1, host.FEW_TOKENS + 1)
    num_blocks = -(-(host.FEW_TOKENS + 1) // kv_cache.shape[1])
    table = torch.zeros((1, num_blocks), dtype=torch.int32, device=kv_cache.device)
    dst = kv_c.new_empty((max(counts[-1], 1), kv_c.shape[1] + k_pe.shape[1]), dtype=dtype)
    if kv_cache.is_cuda:
        pages, empty = LatentPages(kv_cache, *stored_as), table.new_zeros(2)
        latents.compile_kernels(
            writes,
            latent_gather_plan(pages, GatheredRows(dst, None, 1), table, empty, None),
            [latent_attention_plan(query, pages, table, empty[:1], softmax) for query in queries],
            unique_slots,
        )
        steps = [(rows, slots, 0) for rows in (given, one)]
    else:
        kv_cache = kv_cache[:1].repeat(num_blocks, 1, 1)
        every = torch.arange(counts[-1], device="cpu").to(slot_mapping.dtype)
        steps = [((one[0].expand(count, -1), one[1].expand(count, -1)), every[:count], count) for count in counts]
    options = MLAOptions(
        sliding_window=sliding_window, logits_soft_cap=logits_soft_cap, batch_invariant=batch_invariant
    )
    for step_rows, step_slots, count in steps:
        bounds = torch.tensor([0, count], dtype=torch.int32).to(kv_cache.device)
        concat_and_cache_mla(*step_rows, kv_cache, step_slots, *stored_as, unique_slots=unique_slots)
        gather_and_maybe_dequant_cache(kv_cache, dst, table, bounds, None, max(count, 1), *stored_as)
        for query in queries:
            mla_paged_attention(*query, kv_cache, table, bounds[1:], *stored_as, sm_scale=sm_scale, **options)


def warm_up_ragged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, sm_scale: float | None = None
) -> None:
    """Compiles the kernels of `ragged_attention` for such tensors, several at once.

    Call it before the first request, and before `torch.cuda.graph` records a call. Then calls with any numbers of
    sequences, query rows and tokens do not compile, causal or not, for tensors of the same dtype, strides and alignment
    on the same device. Where torch attends there is nothing to compile: on a CPU, and where the prompt kernel does not
    serve.

    Args:
      query: as in `ragged_attention`, with the strides of the model's queries and any contents. At least two tokens,
        since the strides of one do not show those of more.
      key: the same for the keys.
      value: the same for the values.
      sm_scale: as in `ragged_attention`.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `ragged_attention`.
    """
    given = {"query": query, "key": key, "value": value}
    check_tensors(**given)
    bounds = torch.zeros(2, dtype=torch.int32, device=query.device)
    plan = dense_plan(DenseTensors(query, key, value, bounds, bounds), True, sm_scale)
    _check_strides_show(**given)
    if query.is_cuda:
        one = _one_token(query), _one_token(key), _one_token(value)
        every = [(plan, DenseTensors(*rows, bounds, bounds)) for rows in ((query, key, value), one)]
        dense_prompts.compile_kernels(every)


def _check_strides_show(**tensors: torch.Tensor) -> None:
    """Raises `KVCacheValueError` if there are too few tokens to show their strides."""
    for name, rows in tensors.items():
        if rows.shape[0] < 2:
            raise KVCacheValueError(
                f"{name}: got {rows.shape[0]} tokens, expected at least 2, which show their strides"
            )


def _one_token(rows: torch.Tensor) -> torch.Tensor:
    """The first token, with the strides of a contiguous tensor of one token."""
    return rows[:1].reshape(-1).view(1, *rows.shape[1:])
