"""What a call of the attention kernels is: the problem, how it is launched, and the arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from kvjax.kernels.attention.formats import Format
from kvjax.kernels.attention.stages import TILE
from kvjax.kernels.memory import Number, PageMemory
from kvjax.spec import AttentionSpec

COLUMNS = 8
"""Query rows of one product."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the kernel is launched.

    Attributes:
      heads: KV heads of a block.
      warps: warps of a block, a multiple of 4.
      tiles: runs of 16 tokens that a warp takes of each stage.
      slots: stages in shared memory.
      blocks: blocks of threads that share the work.
      part: where sequences are divided at fixed tokens, the stages of a part, of which long sequences have a multiple;
        None where a sequence's parts end with the shares of blocks.
      merge_warps: warps that take the parts of one row by turns when they are merged: 1, or a multiple of 4.
    """

    heads: int
    warps: int
    tiles: int
    slots: int
    blocks: int
    part: int | None = None
    merge_warps: int = 1

    @property
    def groups(self) -> int:
        """Warps that take one head's tokens by turns."""
        return self.warps // self.heads

    @property
    def rows(self) -> int:
        """Token rows of a stage."""
        return TILE * self.tiles * self.groups


class Refs(NamedTuple):
    """What the kernel reads and writes, one-dimensional but for the pages: those of keys and those of values."""

    query: Any = None
    pages: Any = None
    table: Any = None
    seq_lens: Any = None
    layer: Any = None
    k_scale: Any = None
    v_scale: Any = None
    sinks: Any = None
    out: Any = None
    lse: Any = None
    partial: Any = None
    partial_lse: Any = None
    spans: Any = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is the same for every call that a kernel serves; of memory that somebody else owns a launch brings counts.

    Attributes:
      spec: the cache's.
      memory: where the rows of keys and of values lie in its pages.
      query_dtype: float16 or bfloat16.
      q_len: query tokens of a sequence.
      num_heads: query heads.
      num_seqs: sequences.
      max_blocks: entries of the block table for each sequence.
      table_stride: entries from a sequence's first to the next's.
      query_strides: elements from a sequence's first query token to the next's, and from a query token to the next.
      num_blocks: blocks.
      num_layers: pages of a block, one for each layer.
      has_layer: whether a call says which layer.
      sm_scale: factor of the logits.
      window: tokens that a query token sees, or None.
      logits_soft_cap: or None.
      scale_sizes: scales of keys and of values, 1 or one for each KV head.
      one_memory: whether keys and values are one array, so that a copy may bring bytes of both.
      has_sinks: whether heads have sinks.
      batch_invariant: whether the bits of a sequence's results are to depend on nothing but that sequence.
      converts_e2m1: whether the GPU has an instruction for that.
    """

    spec: AttentionSpec
    memory: tuple[PageMemory, PageMemory]
    query_dtype: Any
    q_len: int
    num_heads: int
    num_seqs: Number
    max_blocks: Number
    table_stride: Number
    query_strides: tuple[Number, Number]
    num_blocks: Number
    num_layers: int
    has_layer: bool
    sm_scale: float
    window: int | None
    logits_soft_cap: float | None
    scale_sizes: tuple[int, int]
    one_memory: bool
    has_sinks: bool
    batch_invariant: bool = False
    converts_e2m1: bool = False

    @property
    def format(self) -> Format:
        """How stored bytes become operands."""
        return Format.of(self.spec.dtype, converts_e2m1=self.converts_e2m1)

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.q_len * self.num_heads // self.spec.num_kv_heads

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.spec.num_kv_heads

    @property
    def tiles(self) -> int:
        """Products that all query rows of a KV head take."""
        return -(-self.rows // COLUMNS)
