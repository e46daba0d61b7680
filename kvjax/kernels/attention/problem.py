"""The description of a call of the attention kernels: the problem, the launch configuration, and the arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax

from kvjax.kernels.aliases import ABSENT, DType, DTypeLike, Ref
from kvjax.kernels.attention.formats import DECODED, Format
from kvjax.kernels.attention.stages import TILE
from kvjax.kernels.launchable import Number, PageMemory, RowScaleMemory
from kvjax.spec import AttentionSpec

COLUMNS = 8
"""Query rows of one product."""


TREE_DEPTHS = 2
"""Elements of a query token in `ReadArrays.tree` before the words."""


class MergeConfig(NamedTuple):
    """How the merge is launched.

    Attributes:
      warps: warps of a thread block that share a row: 1, or a multiple of 4.
      elements: maximum elements of a row per thread. The elements of a longer row are divided among thread blocks.
      at_once: parts that a warp loads before it uses any.
    """

    warps: int
    elements: int
    at_once: int


MERGE_OF_MANY = MergeConfig(1, 4, 4)


class Division(Protocol):
    """How sequences are divided among thread blocks and their parts merged: what the merge kernel reads of a config."""

    @property
    def rows(self) -> int:
        """Tokens of a stage."""

    @property
    def blocks(self) -> int:
        """Thread blocks that share the work."""

    @property
    def part(self) -> int | None:
        """As in `DecodeConfig`, and so is `merge`."""

    @property
    def merge(self) -> MergeConfig: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the kernel is launched.

    Attributes:
      heads: KV heads of a thread block.
      warps: warps of a block, a multiple of 4.
      tiles: runs of 16 tokens per warp in each stage.
      slots: stages of the pipeline in shared memory.
      blocks: thread blocks that share the work.
      part: for batch-invariant calls the stages of a part, of which long sequences take a multiple; None where the
        shares of thread blocks divide sequences into parts.
      merge: how the merge is launched.
    """

    heads: int
    warps: int
    tiles: int
    slots: int
    blocks: int
    part: int | None = None
    merge: MergeConfig = MERGE_OF_MANY

    @property
    def groups(self) -> int:
        """Warps that share the tokens of one head."""
        return self.warps // self.heads

    @property
    def rows(self) -> int:
        """Token rows of a stage."""
        return TILE * self.tiles * self.groups


class Softmax(NamedTuple):
    """The options of attention.

    Attributes:
      sm_scale: factor of the logits, finite.
      window: tokens that a query token sees, its own included; an int32 scalar on the device only in XLA. None for all.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`, positive and finite; None for no cap.
      batch_invariant: whether a sequence has the same bits whatever else is in the batch.
      tree_tokens: query tokens that `ReadArrays.tree` has bits for; None for those of the query.
      query_quantization: whether prompts are attended to by products in fp8; the decode kernel ignores it.
    """

    sm_scale: float
    window: Any = None
    logits_soft_cap: float | None = None
    batch_invariant: bool = False
    tree_tokens: int | None = None
    query_quantization: bool = False


class ReadArrays(NamedTuple):
    """The arrays of a read of sequences, unchecked.

    Attributes:
      block_table: int32 `[num_seqs, max_blocks]`, of any numbers: entries outside the cache hold no tokens.
      seq_lens: int32 `[num_seqs]`; negative means 0. Past `max_blocks * block_size` there are no tokens, but positions
        of query tokens count from the given length.
      layer: int32 `[]`, which of a block's pages; one out of range holds no tokens. None where a block has one.
      k_scale: float32 `[]` or, for fp8, one for each KV head.
      v_scale: likewise.
      sinks: float32 `[num_heads]`, -inf for a head without one; None for no sinks.
      tree: uint32 `[num_seqs, q_len, 2 + words]`: for each query token its depth (its position minus the number of
        tokens before the query), then that of the sequence's first row, the least one, then words: bit `i % 32` of word
        `i // 32` says whether it sees query token `i`, in its window and not later. None if each is at its place in the
        sequence and sees all that are not later.
    """

    block_table: jax.Array
    seq_lens: jax.Array
    layer: jax.Array | None
    k_scale: jax.Array
    v_scale: jax.Array
    sinks: jax.Array | None = None
    tree: jax.Array | None = None


class Refs(NamedTuple):
    """The kernels' references: pages are a tuple, as in `Ring`, all others are one-dimensional.

    `q_lens` has the number of query tokens of each sequence, the last of `Problem.q_len`; absent where each has all.

    `query_pe` is the part of queries over latents for rope keys, unless `query` has both parts.

    `partial_lse` has for each row of a part the logit that its weights are relative to, the sum of its weights and,
    unless `Problem.weight_dtype` is None, its largest logit.
    """

    query: Ref = ABSENT
    query_pe: Ref = ABSENT
    pages: Any = ABSENT
    table: Ref = ABSENT
    seq_lens: Ref = ABSENT
    q_lens: Ref = ABSENT
    layer: Ref = ABSENT
    k_scale: Ref = ABSENT
    v_scale: Ref = ABSENT
    sinks: Ref = ABSENT
    tree: Ref = ABSENT
    out: Ref = ABSENT
    lse: Ref = ABSENT
    partial: Ref = ABSENT
    partial_lse: Ref = ABSENT
    spans: Ref = ABSENT


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is compiled for. For caller-owned memory, counts are values in the kernel.

    Attributes:
      spec: the cache's.
      memory: layout of the rows of keys and of values in its pages.
      query_dtype: float16 or bfloat16.
      q_len: query tokens of a sequence.
      num_heads: query heads.
      num_seqs: sequences.
      max_blocks: entries of the block table for each sequence.
      table_stride: entries between sequences.
      query_strides: elements between sequences and between query tokens.
      num_blocks: blocks.
      num_layers: pages of a block, one for each layer.
      has_layer: whether a call selects a layer.
      sm_scale: factor of the logits.
      window: tokens that a query token sees, or None.
      logits_soft_cap: or None.
      scale_sizes: scales of keys and of values, 1 or one for each KV head.
      one_memory: whether keys and values are one array, so that a copy may contain bytes of both.
      has_sinks: whether heads have sinks.
      batch_invariant: whether the bits of a sequence's results must depend on that sequence only.
      converts_e2m1: whether the GPU has an instruction that converts e2m1.
      tree: query tokens of a sequence that `Refs.tree` has bits for: those of the call, while a pass over the pages may
        have only the last ones; None without a tree.
      scale_memory: layout of the scales of each token and head, of keys and of values, where these are separate arrays;
        None otherwise.
    """

    spec: AttentionSpec
    memory: tuple[PageMemory, PageMemory]
    query_dtype: DTypeLike
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
    scale_memory: RowScaleMemory = (None, None)
    tree: int | None = None

    @property
    def key_format(self) -> Format:
        """How stored bytes of keys become operands."""
        return Format.of(self.spec.dtype.parts[0], converts_e2m1=self.converts_e2m1)

    @property
    def value_format(self) -> Format:
        """How stored bytes of values become operands."""
        return Format.of(self.spec.dtype.parts[1], converts_e2m1=self.converts_e2m1)

    @property
    def weight_dtype(self) -> DType | None:
        """The dtype that weights are rounded to, where results make up for the rounding of a row's largest weight.

        None where values have a scale for their token: weights are multiplied by it before they are rounded.
        """
        values = (self.spec.parts[0] if self.spec.is_mla else self.spec.dtype.parts[1]).byte_format
        if values not in DECODED:  # latents of `FP8_DS_MLA`, whose runs of dims have scales of the token
            return None
        fmt = Format.of(values)
        return None if fmt.has_row_scales else fmt.operand

    @property
    def sums(self) -> int:
        """Numbers of a row in a part, besides its results: see `Refs.partial_lse`."""
        return 2 if self.weight_dtype is None else 3

    @property
    def tree_size(self) -> int:
        """Elements of a query token in `Refs.tree`."""
        return TREE_DEPTHS + -(-(self.tree or 0) // 32)

    @property
    def reach(self) -> int | None:
        """How many last tokens of a sequence include all that query rows see; None for any number."""
        return None if self.window is None else max(self.q_len, self.tree or 0) - 1 + self.window

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
        """Matrix products for all query rows of a KV head."""
        return -(-self.rows // COLUMNS)
