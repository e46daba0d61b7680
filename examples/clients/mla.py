"""Latent attention (MLA) of tpu-inference and sglang-jax over kvjax's pages: the signature that their models call.

Both stacks have a kernel for TPUs that writes a step's latents and attends; `cache_kv` is a `kvjax.KVCache` of an
`MLAAttentionSpec` here, so that a GPU serves, in kvjax's formats. In sglang-jax `cu_kv_lens` comes before
`distribution`, and the pages of a sequence follow those of the one before.
"""

from __future__ import annotations

from typing import Any

import jax

import kvjax

TUNING = frozenset(
    (
        "chunk_prefill_size",
        "num_kv_pages_per_block",
        "num_queries_per_block",
        "vmem_limit_bytes",
        "decode_batch_size",
        "decode_block_sizes",
        "prefill_block_sizes",
        "mask_value",
        "debug_mode",
    )
)
"""Keywords of the TPU's kernels that change how they compute, not what."""


def mla_ragged_paged_attention(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: kvjax.KVCache,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    *more: jax.Array,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    max_blocks: int | None = None,
    **tuning: Any,
) -> tuple[jax.Array, kvjax.KVCache]:
    """Writes `new_kv_c [T, rank]` and `new_k_pe [T, rope]`; attends with `ql_nope [T, H, rank]`, `q_pe [T, H, rope]`.

    `more` is `distribution [3]`, whose last entry is the number of sequences, or `cu_kv_lens, distribution`; with the
    latter `max_blocks`, the most pages of a sequence, is required. `k_scale` is the latents' decode scale, default the
    cache's. `tuning`, keywords of `TUNING`, has no effect.

    Raises:
      TypeError: another keyword, such as a `sparse_mask`: it may change the result.
      NotImplementedError: a quantized query, or a `v_scale` other than `k_scale`: values are latents.
    """
    if unknown := tuning.keys() - TUNING:
        raise TypeError(f"{', '.join(sorted(unknown))}: expected none but tuning: {', '.join(sorted(TUNING))}")
    if q_scale not in (None, 1) or v_scale not in (None, k_scale):
        raise NotImplementedError("a quantized query, or a scale of values that is not that of latents")
    *cu_kv_lens, distribution = more
    step = kvjax.StepMetadata.from_page_indices(
        page_indices,
        kv_lens,
        cu_q_lens,
        block_size=cache_kv.spec.block_size,
        num_tokens=len(ql_nope),
        max_blocks=max_blocks,
        cu_kv_lens=cu_kv_lens[0] if cu_kv_lens else None,
        num_seqs=distribution[-1],
    )
    cache = kvjax.concat_and_cache_mla(
        new_kv_c, new_k_pe, cache_kv, step.slot_mapping, scale=k_scale, unique_slots=True
    )
    read = step.block_table, step.seq_lens, step.cu_q_lens
    options: dict[str, Any] = {"logits_soft_cap": soft_cap, "scale": k_scale}
    if sliding_window is not None:  # else the layer's
        options["sliding_window"] = sliding_window
    return kvjax.mla_ragged_paged_attention(ql_nope, q_pe, cache, *read, sm_scale=sm_scale, **options), cache
