"""`ExactWindow` on torch tensors: a ring with the last tokens of each sequence, beside pages that stay complete.

The ring is a paged cache in the model dtype whose blocks form rows. The token at position p is in slot
`p % tokens_per_row` of its sequence's row, so block b of a sequence is block `b % blocks_per_row` of the row, and a
block table addresses it. `kvjax_torch.window_attention` attends to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch

import kvjax
from kvjax import AttentionSpec, KVCacheDType, KVCacheTypeError, KVCacheValueError
from kvjax.ops.options import MAX_WINDOW, WINDOW_BLOCK_SIZE, as_int, kind_of, num_reached_blocks, window_blocks
from kvjax_torch.arguments.checks import check_devices, check_index, check_tensors, on_host
from kvjax_torch.arguments.dtypes import INPUT_DTYPES, dtype_name
from kvjax_torch.arguments.plan import Encoding, ReadTensors
from kvjax_torch.arguments.reads import gather_plan
from kvjax_torch.arguments.scales import Scale, as_tensors
from kvjax_torch.eager.windows import PADDING_SLOT, existing_rows, lengths
from kvjax_torch.ops import gather_kv, reshape_and_cache_flash

MODEL_DTYPE = ("auto", 1.0, 1.0)
"""How a ring is stored: its tensors' dtype, without scales."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExactWindow:
    """The last tokens of running sequences in the model dtype, for one layer.

    Attributes:
      key_cache: `[num_rows * blocks_per_row, 16, num_kv_heads, head_size]`; row r has the blocks from
        `r * blocks_per_row` on. Operations write it in place.
      value_cache: likewise, with `head_size_v`.
      size: tokens that a query attends to in the ring, its own included.
      max_q_len: most new tokens of a sequence in a step that attends over the ring itself: 1 plus the number of drafts.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    size: int
    max_q_len: int = 1

    def __post_init__(self) -> None:
        check_tensors(**{f"exact_window.{name}": getattr(self, name) for name in ("key_cache", "value_cache")})
        keys, values, blocks = self.key_cache.shape, self.value_cache.shape, self.blocks_per_row
        is_ring = len(keys) == len(values) == 4 and keys[:3] == values[:3] and keys[1] == WINDOW_BLOCK_SIZE
        if not is_ring or keys[0] % blocks:
            raise KVCacheValueError(
                f"exact_window: got keys {tuple(keys)} and values {tuple(values)}, expected [num_rows * {blocks},"
                f" {WINDOW_BLOCK_SIZE}, num_kv_heads, head size], as ExactWindow.allocate makes them"
            )

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        head_size_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        max_q_len: int = 1,
    ) -> Self:
        """A window of zeros.

        Args:
          num_rows: number of sequences whose tokens it holds.
          size: tokens that a query attends to, any positive number.
          num_kv_heads: of the cache.
          head_size: of keys.
          head_size_v: of values, by default that of keys.
          dtype: of the model: float32, float16 or bfloat16.
          device: of the cache, by default torch's.
          max_q_len: as the attribute. Steps with longer chunks are served too, over a copy. Up to `max_q_len` of a
            step's tokens can be truncated after it.

        Raises:
          KVCacheValueError, KVCacheTypeError: a number that is not a positive int, more slots than int32 holds, or
            another dtype.
        """
        if dtype not in INPUT_DTYPES:
            raise KVCacheTypeError(f"dtype: got {dtype!r}, expected {' or '.join(map(str, INPUT_DTYPES))}")
        sizes = {"num_kv_heads": num_kv_heads, "head_size": head_size}
        sizes["head_size_v"] = head_size if head_size_v is None else head_size_v
        heads, *head_sizes = (as_int(name, number, least=1) for name, number in sizes.items())
        per_row = window_blocks(size, max_q_len)
        blocks = per_row * as_int("num_rows", num_rows, least=1, most=MAX_WINDOW // (per_row * WINDOW_BLOCK_SIZE))
        like = torch.empty(0, dtype=dtype, device=device)
        key_cache, value_cache = empty_pages(like, blocks, heads, head_sizes)
        return cls(key_cache.zero_(), value_cache.zero_(), int(size), int(max_q_len))

    @property
    def blocks_per_row(self) -> int:
        """Blocks of a row."""
        return window_blocks(self.size, self.max_q_len)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that a row holds: those that a query attends to, and room for `max_q_len - 1` more."""
        return self.blocks_per_row * WINDOW_BLOCK_SIZE

    @property
    def num_rows(self) -> int:
        """Sequences that it holds tokens of."""
        return self.key_cache.shape[0] // self.blocks_per_row


def fill_exact_window(
    exact_window: ExactWindow,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    rows: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    v_scale_layout: str = "linear",
) -> None:
    """Fills rows of a window, in place, from pages, with the last tokens before a step's first new token.

    This is for sequences whose last tokens are only in the pages: after a prefix hit, a swap or a fork, or if their row
    was given to another sequence. Call it before the step that attends with these rows. The host does not wait.

    Args:
      exact_window: of as many heads as the cache, of the same sizes.
      key_cache: as in `reshape_and_cache_flash`, with the tokens before the step's new ones. Tokens in no block, behind
        a sliding window, read as zeros.
      value_cache: likewise.
      block_table: as in `gather_kv`.
      seq_lens: int32 or int64 `[num_seqs]`: tokens of each sequence, the step's new ones included.
      cu_q_lens: as in `ragged_paged_attention`, of the step.
      rows: int32 or int64 `[num_seqs]`, the row to fill for each sequence; -1 for none.
      kv_cache_dtype: as in `reshape_and_cache_flash`.
      k_scale: the decode scale that the keys were written with.
      v_scale: the decode scale that the values were written with.
      v_scale_layout: the order that the V scales were written in.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `gather_kv`; a window of other heads than the cache's,
        or rows of another shape. In `kvjax.checked()` also a row that the window does not have, or `cu_q_lens` that
        decrease or do not begin with 0.
    """
    tensors = {"block_table": block_table, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens, "rows": rows}
    check_window(exact_window, key_cache, value_cache, tensors)
    scales = as_tensors(k_scale, v_scale, key_cache)
    read = ReadTensors(key_cache, value_cache, block_table, torch.zeros_like(seq_lens), *scales)
    encoding = Encoding(dtype_name(kv_cache_dtype), v_scale_layout)
    check_sizes(exact_window, gather_plan(read, encoding, exact_window.key_cache.dtype).cache.spec)
    if kvjax.is_checked():
        bounds = on_host("cu_q_lens", cu_q_lens).numpy()
        kvjax.check_query_lens(bounds, MAX_WINDOW, MAX_WINDOW, MAX_WINDOW, len(rows))
        check_rows("rows", rows, rows != -1, exact_window.num_rows)
    lens, q_lens = lengths(seq_lens, cu_q_lens)
    first = (lens - q_lens).clamp(min=0)
    row = existing_rows(rows, exact_window.num_rows)
    block_size, max_blocks = key_cache.shape[1], block_table.shape[1]
    start = (first - exact_window.size).clamp(min=0)
    columns = num_reached_blocks(exact_window.size, 1, max_blocks, block_size)
    column = (start // block_size)[:, None] + torch.arange(columns, device=rows.device)
    table = block_table.gather(1, column.clamp(max=max(max_blocks - 1, 0)))
    table = torch.where(column < max_blocks, table, -1)
    skipped = start // block_size * block_size
    key, value = gather_kv(
        key_cache,
        value_cache,
        table.int(),
        torch.where(row >= 0, first - skipped, 0).int(),
        kv_cache_dtype,
        k_scale,
        v_scale,
        v_scale_layout=v_scale_layout,
        dtype=exact_window.key_cache.dtype,
    )
    position = skipped[:, None] + torch.arange(key.shape[1], device=rows.device)
    is_token = (position >= start[:, None]) & (position < first[:, None]) & (row >= 0)[:, None]
    num_tokens = exact_window.tokens_per_row
    slots = torch.where(is_token, row[:, None] * num_tokens + position % num_tokens, PADDING_SLOT)
    pages = exact_window.key_cache, exact_window.value_cache
    write_recent(key.flatten(0, 1), value.flatten(0, 1), pages, slots.flatten())


def empty_pages(
    like: torch.Tensor, num_blocks: int, num_kv_heads: int, head_sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns empty blocks. Keys and values of equal sizes share one allocation, which kernels read faster."""
    rest = WINDOW_BLOCK_SIZE, num_kv_heads
    if head_sizes[0] == head_sizes[1]:
        pages = like.new_empty(num_blocks, 2, *rest, head_sizes[0])
        return pages[:, 0], pages[:, 1]
    return like.new_empty(num_blocks, *rest, head_sizes[0]), like.new_empty(num_blocks, *rest, head_sizes[1])


def write_recent(
    key: torch.Tensor, value: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """Writes tokens to blocks in the model dtype."""
    reshape_and_cache_flash(key, value, pages[0], pages[1], slots, *MODEL_DTYPE, unique_slots=True)


def check_type(window: object) -> None:
    """Raises if `window` is not an `ExactWindow`."""
    if not isinstance(window, ExactWindow):
        raise KVCacheTypeError(f"exact_window: got {kind_of(window)}, expected a kvjax_torch.ExactWindow")


def check_window(
    window: Any, key_cache: torch.Tensor, value_cache: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> None:
    """Raises if a window is not one of this cache, or tensors of a step have other shapes, dtypes or devices."""
    check_type(window)
    check_tensors(key_cache=key_cache, value_cache=value_cache, **tensors)
    check_devices(key_cache, **{"exact_window.key_cache": window.key_cache}, **tensors)
    for name, tensor in tensors.items():
        dims = ("num_seqs", "max_blocks") if name == "block_table" else ("num_seqs",)
        check_index(name, (tensor.dtype, tensor.ndim), dims)
    num_seqs = tensors["block_table"].shape[0]
    for name, tensor in tensors.items():
        expected = num_seqs + 1 if name == "cu_q_lens" else num_seqs
        if tensor.shape[0] != expected:
            raise KVCacheValueError(f"{name}: got {tensor.shape[0]} elements, expected {expected}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.ndim != 4 or cache.shape[2] != window.key_cache.shape[2]:
            raise KVCacheValueError(
                f"{name}: got shape {tuple(cache.shape)}, expected [num_blocks, block_size,"
                f" num_kv_heads={window.key_cache.shape[2]}, row], with the heads of exact_window"
            )


def check_sizes(window: ExactWindow, spec: AttentionSpec) -> None:
    """Raises if heads of a window have other sizes than those of the cache."""
    sizes = window.key_cache.shape[3], window.value_cache.shape[3]
    for name, got, expected in zip(("head_size", "head_size_v"), sizes, spec.head_sizes, strict=True):
        if got != expected:
            raise KVCacheValueError(f"exact_window: got {name}={got}, expected {expected}, that of the cache")


def check_rows(name: str, rows: torch.Tensor, is_used: torch.Tensor, num_rows: int) -> None:
    """Raises if a used row is none of the window's, or used twice; the host waits."""
    row, used = on_host(name, rows).long(), on_host(name, is_used)
    wrong = used & ((row < 0) | (row >= num_rows))
    if wrong.any():
        seq = int(wrong.int().argmax())
        raise KVCacheValueError(
            f"{name}[{seq}]: got {int(row[seq])}, expected between 0 and {num_rows - 1}, a row of the window"
        )
    if len(row[used].unique()) != len(row[used]):
        raise KVCacheValueError(f"{name}: got {row[used].tolist()}, expected each row once")
