"""Multi-head latent attention of a layer: vLLM's prefill, and `kvjax_torch` for writes and sequences that decode.

Pages are `[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]`, those of vLLM's own backends. Prompts attend to
expanded keys and values of each head, by a prefill backend of vLLM, which reads the context with vLLM's gather. kvjax
writes the pages, not vLLM, so that they have the bytes that kvjax's attention is tested with. It also writes them on a
CPU, where vLLM has no write.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

import kvjax_torch
from kvjax import UnsupportedError
from kvjax_vllm.scales import ScaledImpl
from kvjax_vllm.step import equal_q_len


@dataclasses.dataclass
class KvjaxMLADecodeMetadata(MLACommonDecodeMetadata):
    """The sequences that decode.

    Attributes:
      q_len: query tokens of each sequence; 0 if they differ.
      max_q_len: the most query tokens of a sequence.
      cu_q_lens: int32 `[num_seqs + 1]`.
    """

    q_len: int
    max_q_len: int
    cu_q_lens: torch.Tensor


class KvjaxMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Divides each batch as vLLM does; sequences with drafts of different lengths decode."""

    # The grid of decode kernels does not depend on the lengths of sequences.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def _build_decode(self, **given: Any) -> KvjaxMLADecodeMetadata:
        common = super()._build_decode(**given)
        q_len = equal_q_len(given["query_start_loc_cpu"], given["num_decode_tokens"])
        return KvjaxMLADecodeMetadata(
            **vars(common),
            q_len=q_len,
            max_q_len=given["max_query_len"],
            cu_q_lens=given["query_start_loc_device"],
        )


class KvjaxMLAImpl(ScaledImpl, MLACommonImpl[MLACommonMetadata]):
    """The attention of one layer of a model."""

    can_return_lse_for_decode: bool = True  # a natural logarithm, `lse_base_on_e`
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(MLACommonImpl.__init__).bind(self, *args, **kwargs).arguments
        # vLLM's prefill has none of these.
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
            if given[name]:
                raise UnsupportedError(f"{name}: got {given[name]}, expected None for latents (MLA) in vLLM")
        if (attn_type := given["attn_type"]) != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type: got {attn_type!r}, expected {AttentionType.DECODER.value!r}")
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # products are in 16 bits
        self.vllm_config = get_current_vllm_config_or_none()

    def reserve_workspace(self) -> None:
        """Resolves decode scales while vLLM measures memory."""
        self.known_scales()

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Writes a step's tokens; those beyond the slots are padding. `skip_scale` has no effect."""
        kvjax_torch.concat_and_cache_mla(
            kv_c_normed,
            k_pe.squeeze(1),
            kv_cache,
            slot_mapping.flatten(),
            kv_cache_dtype,
            self._scale(k_scale),
            unique_slots=True,
        )

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """vLLM's, with the scale that the context was written with."""
        tokens = q, kv_c_normed, k_pe, kv_c_and_k_pe_cache
        super().forward_mha(*tokens, attn_metadata, self._scale(k_scale), output, output_scale)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends to a layer's pages: latents `[num_tokens, num_heads, kv_lora_rank]`, and the log-sum-exp.

        Rows of padding are undefined. The query is `[num_tokens, num_heads, kv_lora_rank]` and
        `[.., qk_rope_head_dim]`, or both in one tensor.
        """
        of: KvjaxMLADecodeMetadata = attn_metadata.decode
        sizes = self.kv_lora_rank, self.qk_rope_head_dim
        # Of one tensor, from which later calls are launched without being planned.
        nope, rope = (torch.cat(q, dim=-1) if isinstance(q, tuple) else q).split(sizes, dim=-1)
        sequences = kv_c_and_k_pe_cache, of.block_table, of.seq_lens
        stored = self.kv_cache_dtype, self._scale(layer._k_scale)
        if not of.q_len:  # drafts of different lengths
            return kvjax_torch.mla_ragged_paged_attention(
                nope,
                rope,
                *sequences,
                of.cu_q_lens,
                *stored,
                sm_scale=self.scale,
                return_lse=True,
                max_q_len=of.max_q_len,
            )
        nope, rope = (part.unflatten(0, (-1, of.q_len)) for part in (nope, rope))
        latents, lse = kvjax_torch.mla_paged_attention(
            nope, rope, *sequences, *stored, sm_scale=self.scale, return_lse=True
        )
        return latents.flatten(0, 1), lse.flatten(0, 1)

    def _scale(self, k_scale: torch.Tensor) -> torch.Tensor:
        known = self.known_scales()
        return k_scale if known is None else known[0]
