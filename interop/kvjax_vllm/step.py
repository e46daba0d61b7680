"""The metadata of a step: which of its rows decode and which are prompts."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from kvjax import UnsupportedError


@dataclasses.dataclass
class StepSequences:
    """The sequences of one attention call, and their rows of the step's query.

    Attributes:
      rows: the rows.
      block_table: int32 `[num_seqs, max_blocks]`.
      seq_lens: int32 `[num_seqs]`; 0 is padding.
      q_len: query tokens of each sequence; 0 if they differ.
      max_q_len: the most query tokens of a sequence.
      cu_q_lens: int32 `[num_seqs + 1]`, from 0.
    """

    rows: slice
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    q_len: int
    max_q_len: int
    cu_q_lens: torch.Tensor

    @property
    def num_seqs(self) -> int:
        """Sequences, padding included."""
        return self.seq_lens.shape[0]


@dataclasses.dataclass
class KvjaxMetadata(AttentionMetadata):
    """A step: the sequences that decode, with or without drafts, come first; then prompts. Either may be None."""

    decodes: StepSequences | None
    prompts: StepSequences | None


class KvjaxMetadataBuilder(AttentionMetadataBuilder[KvjaxMetadata]):
    """Divides each batch, which vLLM has ordered by the query lengths."""

    # The grid of decode kernels does not depend on the lengths of sequences.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        drafting = vllm_config.speculative_config
        # A draft model's first pass adds tokens to sequences, but not to the upper bound of their lengths.
        self._draft_margin = 0 if drafting is None else drafting.num_speculative_tokens + 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KvjaxMetadata:
        """The metadata of a batch; the first argument and the last have no effect.

        Raises:
          UnsupportedError: attention that is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("causal: got attention that is not causal, expected True")
        num_decodes, num_prompts, num_rows, _ = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        num_tokens, bounds = common.num_actual_tokens, common.query_start_loc
        decodes = prompts = None
        if num_decodes:
            decodes = StepSequences(
                slice(0, num_rows),
                common.block_table_tensor[:num_decodes],
                common.seq_lens[:num_decodes],
                equal_q_len(common.query_start_loc_cpu[: num_decodes + 1], num_rows),
                min(common.max_query_len, self.reorder_batch_threshold),
                bounds[: num_decodes + 1],
            )
        if num_prompts:
            # A prompt's dense keys and values take memory for every column of the table.
            upper = common.seq_lens_cpu_upper_bound
            max_seq_len = common.max_seq_len
            if upper is not None:
                max_seq_len = min(max_seq_len, int(upper[num_decodes:].max()) + self._draft_margin)
            max_blocks = max(-(-max_seq_len // self.kv_cache_spec.block_size), 1)
            prompts = StepSequences(
                slice(num_rows, num_tokens),
                common.block_table_tensor[num_decodes:, :max_blocks],
                common.seq_lens[num_decodes:],
                0,
                common.max_query_len,
                bounds[num_decodes:] - num_rows if num_rows else bounds[num_decodes:],
            )
        return KvjaxMetadata(decodes, prompts)


def equal_q_len(bounds: torch.Tensor, num_rows: int) -> int:
    """The query tokens of every sequence; 0 if they differ.

    A batch that is padded for a graph has rows for its last sequences too, of which `bounds` do not tell.
    """
    num_seqs = bounds.shape[0] - 1
    q_len, rest = divmod(num_rows, num_seqs)
    even = (torch.arange(num_seqs + 1, dtype=bounds.dtype) * q_len).clamp_(max=int(bounds[-1]))
    return 0 if rest or not torch.equal(bounds, even) else q_len
