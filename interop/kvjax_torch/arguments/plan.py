"""Plans: what of a call stays the same from one step of a serving loop to the next. Kernels are compiled for plans.

Plans hold no size that changes with the load: no number of tokens, sequences or blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import torch

import kvjax
from kvjax import kernels
from kvjax.ops.options import Limits as Limits


class WriteTensors(NamedTuple):
    """The tensors of a `reshape_and_cache_flash` call."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor


class WindowRoom(NamedTuple):
    """What queries see in place of a window's ring: copies of rows, and behind them a step's tokens.

    Attributes:
      num_tokens: rows of the step.
      num_old: blocks of a row that are copied.
    """

    num_tokens: int
    num_old: int


class WindowStep(NamedTuple):
    """A step beside an exact window.

    Attributes:
      seq_lens: int32 or int64 `[num_seqs]`, tokens of each sequence, the new ones included.
      cu_q_lens: likewise `[num_seqs + 1]`, the bounds of each sequence's new tokens.
      window_rows: likewise `[num_seqs]`, each sequence's row; it has none if the window has no such row.
      num_rows: rows of the window.
      size: tokens of the window that a query sees.
      blocks_per_row: blocks of a row.
      columns: the most blocks that the queries of a sequence see.
      decode_q_len: most rows of a sequence that decodes.
      room: what queries see; None if that is the ring itself.
    """

    seq_lens: torch.Tensor
    cu_q_lens: torch.Tensor
    window_rows: torch.Tensor
    num_rows: int
    size: int
    blocks_per_row: int
    columns: int
    decode_q_len: int
    room: WindowRoom | None


class WindowPlaces(NamedTuple):
    """Where a step's tokens are beside an exact window; int32.

    Attributes:
      near_lens: `[num_seqs]`, tokens from the block of the oldest one that a query sees in the window.
      far_lens: `[num_seqs]`, tokens before the last `size`.
      decoding_lens: `[num_seqs]`, the same, 0 for a sequence that does not decode.
      q_lens: `[num_seqs]`, new tokens.
      table: `[num_seqs, columns]`, the blocks for `near_lens`, -1 without a row.
      old: `[num_seqs, num_old]`, the blocks of the ring to copy; None without room.
      slots: `[num_tokens]`, where new tokens go behind the copies, or -1; None without room.
    """

    near_lens: torch.Tensor
    far_lens: torch.Tensor
    decoding_lens: torch.Tensor
    q_lens: torch.Tensor
    table: torch.Tensor
    old: torch.Tensor | None = None
    slots: torch.Tensor | None = None


class RingTensors(NamedTuple):
    """The ring of an exact window, and the step whose last tokens of each sequence it takes.

    Attributes:
      key_cache: `[num_rows * blocks_per_row, block_size, num_kv_heads, head_size]` in the model dtype.
      value_cache: likewise.
      seq_lens: int32 or int64 `[num_seqs]`, tokens of each sequence, the new ones included.
      cu_q_lens: likewise `[num_seqs + 1]`, the bounds of each sequence's new tokens.
      window_rows: likewise `[num_seqs]`, each sequence's row; it has none if the ring has no such row.
      blocks_per_row: blocks of a row.
      kept: most new tokens of a sequence to write, at most those of a row.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    seq_lens: torch.Tensor
    cu_q_lens: torch.Tensor
    window_rows: torch.Tensor
    blocks_per_row: int
    kept: int


class RopeInputs(NamedTuple):
    """What a `rope_and_cache` call takes besides the tensors of its write."""

    query: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    is_neox: bool


class ReadTensors(NamedTuple):
    """The tensors of a `gather_kv` call: a cache and the sequences to read. Attention reads the same."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.key_cache.shape[0]


class RangeTensors(NamedTuple):
    """The tensors of a gather of a range of tokens of each sequence, one after the other.

    Attributes:
      key_cache: keys, or latents.
      value_cache: values, or rope keys.
      block_table: int32 or int64 `[num_seqs, max_blocks]`.
      cu_seq_lens: int32 or int64 `[num_seqs + 1]`, the bounds of each sequence's rows.
      token_to_seq: int32 or int64, the sequence of each row or of more; None to find it.
      seq_starts: int32 or int64 `[num_seqs]`, the first token of each range; None for 0.
      k_scale: the layer's scale.
      v_scale: likewise.
      dst: `[num_rows, size]`, the rows to fill: keys, then values.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seq_lens: torch.Tensor
    token_to_seq: torch.Tensor | None
    seq_starts: torch.Tensor | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    dst: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.key_cache.shape[0]

    def at(self, block: torch.Tensor, token: torch.Tensor) -> RowTensors:
        """The gather of the rows' tokens."""
        return RowTensors(self.key_cache, self.value_cache, block, token, self.k_scale, self.v_scale, self.dst)


class RowTensors(NamedTuple):
    """The tensors of a gather of any tokens, one for each row of a result.

    Attributes:
      key_cache: keys, or latents.
      value_cache: values, or rope keys.
      block: int32 `[num_rows]`, the block of each row's token; -1 for none, whose row is zeros.
      token: likewise its index in the block.
      k_scale: the layer's scale.
      v_scale: likewise.
      dst: `[num_rows, size]`, the rows to fill: keys, then values.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block: torch.Tensor
    token: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    dst: torch.Tensor


class LatentQuery(NamedTuple):
    """The query of attention over latents (MLA).

    Attributes:
      nope: `[..., num_heads, kv_lora_rank]`, queries without positions, absorbed.
      pe: `[..., num_heads, qk_rope_head_dim]`, rotated.
    """

    nope: torch.Tensor
    pe: torch.Tensor

    @property
    def joined(self) -> torch.Tensor:
        """The query of whole keys, `[..., num_heads, kv_lora_rank + qk_rope_head_dim]`, contiguous.

        A view if both are the parts of such a tensor.
        """
        nope, pe = self
        shape = *nope.shape[:-1], nope.shape[-1] + pe.shape[-1]
        strides = *(math.prod(shape[i:]) for i in range(1, len(shape))), 1
        is_one = nope.untyped_storage().data_ptr() == pe.untyped_storage().data_ptr()
        is_behind = pe.storage_offset() == nope.storage_offset() + nope.shape[-1]
        if is_one and is_behind and nope.stride() == pe.stride() == strides:
            return nope.as_strided(shape, strides)
        return torch.cat(self, dim=-1)


class Encoding(NamedTuple):
    """How a cache's bytes are to be read, as the caller says it.

    Attributes:
      kv_cache_dtype: the name of a dtype.
      v_scale_layout: the order of NVFP4's V scales.
    """

    kv_cache_dtype: str
    v_scale_layout: str = "linear"


class SoftmaxOptions(NamedTuple):
    """The options of attention, named as callers name them.

    Attributes:
      sm_scale: factor on the logits; None for the default.
      sliding_window: tokens that a query token sees, its own included; None for all.
      logits_soft_cap: bound on the magnitude of logits; None for no bound.
      sinks: float32 `[num_heads]`, or None.
      batch_invariant: whether the bits of a sequence's results must not depend on the rest of the batch.
      tree_mask: which query tokens of a sequence its query tokens see, as `paged_attention` takes it; None for all.
    """

    sm_scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    batch_invariant: bool = False
    tree_mask: torch.Tensor | None = None


class BlockRows(NamedTuple):
    """The rows of a tensor's blocks: data, and scales if it holds any.

    Attributes:
      block_stride: bytes between blocks.
      regions: positions of rows in a block, from the tensor's first element.
    """

    block_stride: int
    regions: tuple[kernels.PageRegion, ...]


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """A paged cache that is passed as two tensors.

    Attributes:
      spec: dtype, layout, block size, heads and head sizes of the layer.
      keys: the rows of `key_cache`.
      values: the rows of `value_cache`.
      scales: the rows of `k_scale` and of `v_scale` where these hold a scale for each token and head, else None.
    """

    spec: kvjax.AttentionSpec
    keys: BlockRows
    values: BlockRows
    scales: tuple[BlockRows, BlockRows] | None = None

    @property
    def num_parts(self) -> int:
        """2: keys and values, or latents and rope keys; 1 for latents without rope keys."""
        return 1 + (self.spec.part_sizes[1] > 0)

    @functools.cached_property
    def last_value_start(self) -> int:
        """The most bytes from a block's keys to its values at which both are in one block; -1 if in none."""
        spec, stride = self.spec, self.values.block_stride
        if self.keys.block_stride != stride:
            return -1
        last = spec.block_size - 1, spec.num_kv_heads - 1
        ends = (
            row.base + last[0] * row.token_stride + last[1] * row.head_stride + row.row_bytes
            for row in self.values.regions
        )
        return stride - max(ends)

    @functools.cached_property
    def have_row_scales(self) -> tuple[bool, bool]:
        """Whether keys, and whether values, have a scale for each token and head."""
        keys, values = (part.info.has_row_scales for part in self.spec.dtype.parts)
        return keys, values

    def scale_tensors(self, tensors: WriteTensors | ReadTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that hold the scales of keys and of values.

        Each is the cache if its rows hold a scale for each token and head, else `k_scale` or `v_scale`.
        """
        keys, values = (of_rows and self.scales is None for of_rows in self.have_row_scales)
        return tensors.key_cache if keys else tensors.k_scale, tensors.value_cache if values else tensors.v_scale


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """One kind of `reshape_and_cache_flash` call.

    Attributes:
      cache: the cache it writes.
      dtype: element type of key and value.
      slot_dtype: int32 or int64.
      scale_sizes: elements of k_scale and v_scale: 1, or `num_kv_heads`.
    """

    cache: CachePlan
    dtype: torch.dtype
    slot_dtype: torch.dtype
    scale_sizes: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class RopePlan:
    """One kind of `rope_and_cache` call.

    Attributes:
      write: the write of rotated keys and of values.
      num_heads: heads of the query.
      rot_dim: the number of leading elements of a head that are rotated.
      is_neox: whether the two elements of a pair are half of `rot_dim` apart, else adjacent.
      position_dtype: int32 or int64.
      table_dtype: element type of cosines and sines.
    """

    write: WritePlan
    num_heads: int
    rot_dim: int
    is_neox: bool
    position_dtype: torch.dtype
    table_dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class GatherPlan:
    """One kind of `gather_kv` call.

    Attributes:
      cache: the cache it reads.
      dtype: element type of the results.
      scale_sizes: elements of k_scale and v_scale: 1, or `num_kv_heads`.
    """

    cache: CachePlan
    dtype: torch.dtype
    scale_sizes: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """One kind of `paged_attention` call.

    Attributes:
      cache: the cache it reads.
      dtype: element type of the query and of the result.
      num_heads: heads of the query.
      q_len: query tokens of each sequence.
      scale_sizes: elements of k_scale and v_scale: 1, or `num_kv_heads`.
      sm_scale: factor on the logits.
      window: tokens that a query token sees, its own included; None for all.
      logits_soft_cap: bound on the magnitude of logits; None for no bound.
      has_sinks: whether each head has a sink.
      batch_invariant: whether the bits of a sequence's results must not depend on the rest of the batch.
      tree: query tokens of a sequence that its rows may see or not see; None if each sees all before it.
    """

    cache: CachePlan
    dtype: torch.dtype
    num_heads: int
    q_len: int
    scale_sizes: tuple[int, int]
    sm_scale: float
    window: int | None
    logits_soft_cap: float | None
    has_sinks: bool
    batch_invariant: bool = False
    tree: int | None = None


@dataclasses.dataclass(frozen=True)
class RaggedPlan:
    """One kind of `ragged_paged_attention` call, and the limits of this call.

    Attributes:
      attention: the plan of sequences that decode; its `q_len` is the most query tokens of such a sequence.
      max_q_len: the most query tokens of a sequence.
      max_prompts: the most sequences with more than `attention.q_len` query tokens.
      query_quantization: whether prompts are attended to by products in fp8.
      returns_lse: whether the log-sum-exp is wanted; else that of prompts may be anything.
    """

    attention: AttentionPlan
    max_q_len: int
    max_prompts: int
    query_quantization: bool = False
    returns_lse: bool = True


@dataclasses.dataclass(frozen=True)
class DensePlan:
    """One kind of `ragged_attention` call.

    Attributes:
      spec: heads of keys and values and their sizes; blocks do not matter.
      dtype: element type of the query, of keys, of values and of the result.
      num_heads: heads of the query.
      sm_scale: factor on the logits.
      causal: whether rows see only tokens that are not after their own.
    """

    spec: kvjax.AttentionSpec
    dtype: torch.dtype
    num_heads: int
    sm_scale: float
    causal: bool
    logits_soft_cap: None = None


class DenseTensors(NamedTuple):
    """The tensors of a `ragged_attention` call, as there."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_q_lens: torch.Tensor
    cu_kv_lens: torch.Tensor
