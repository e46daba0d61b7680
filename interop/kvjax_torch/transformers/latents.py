"""A layer of `KvjaxCache` that keeps latents (MLA)."""

from __future__ import annotations

from typing import Any

import torch

from kvjax import KVCacheValueError, MLAAttentionSpec
from kvjax_torch.mla import concat_and_cache_mla, gather_and_maybe_dequant_cache
from kvjax_torch.transformers.block_table import AppendStep
from kvjax_torch.transformers.layer import NAME, KvjaxLayer, attends_to_pages


class LatentLayer(KvjaxLayer):
    """One layer's pages of latents and rope keys, which transformers stores as keys and values of one head.

    transformers expands them to keys and values of each head after its cache has returned them, so that attention
    cannot read the pages.
    """

    spec: MLAAttentionSpec

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_attention()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `KvjaxLayer.update`: latents `[num_seqs, 1, num_new_tokens, kv_lora_rank]`, and rope keys likewise."""
        self._check_attention()
        return super().update(key_states, value_states, *args, **kwargs)

    def _check_attention(self) -> None:
        if attends_to_pages(self._config):
            raise KVCacheValueError(
                f"attn_implementation: got {NAME!r} for a model of latents (MLA), expected another, such as 'sdpa':"
                " transformers expands latents between its cache and attention"
            )

    def _check_states(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        names = "key_states", "value_states"
        for name, states, size in zip(names, (key_states, value_states), self.spec.part_sizes, strict=True):
            if (got := (states.shape[1], states.shape[3])) != (1, size):
                raise KVCacheValueError(
                    f"{name}: got {got[0]} heads of size {got[1]}, expected one of size {size}: the latents and rope"
                    " keys of the configuration"
                )

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor, step: AppendStep) -> None:
        self._set_scales(key_states, value_states, step)
        latents, rope_keys = (states[:, 0].flatten(0, 1) for states in (key_states, value_states))
        concat_and_cache_mla(
            latents, rope_keys, self.kv, step.slot_mapping, self.spec.dtype, self.k_scale, unique_slots=True
        )

    def _read(self, step: AppendStep, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        num_seqs = len(step.seq_lens)
        rows = torch.empty((num_seqs * num_tokens, self.spec.head_size), dtype=dtype, device=self.kv.device)
        ends = torch.arange(num_seqs + 1, dtype=torch.int32, device=self.kv.device) * num_tokens
        gather_and_maybe_dequant_cache(
            self.kv, rows, step.block_table, ends, None, len(rows), self.spec.dtype, self.k_scale
        )
        latents, rope_keys = rows.view(num_seqs, num_tokens, 1, -1).split(self.spec.part_sizes, dim=-1)
        return latents, rope_keys
