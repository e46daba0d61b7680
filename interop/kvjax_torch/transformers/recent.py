"""The last tokens of a `KvjaxCache`'s sequences in the model dtype, for one layer, beside its pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kvjax.ops.options import WINDOW_BLOCK_SIZE
from kvjax_torch.exact_window import ExactWindow, fill_exact_window
from kvjax_torch.transformers.block_table import AppendStep


class Selected(NamedTuple):
    """Rows that `RecentTokens.selected` copied, for `RecentTokens.replace`."""

    window: ExactWindow | None
    start: np.ndarray


class RecentTokens:
    """An exact window whose row i is that of sequence i.

    It knows from which position on each row holds its sequence's tokens. Rows that hold too few, after a deep crop, are
    filled from the pages.

    Args:
      size: tokens that a query attends to here, its own included.
      max_q_len: as of `ExactWindow.allocate`.

    Attributes:
      window: the window, allocated with the first tokens; None before.
    """

    def __init__(self, size: int, max_q_len: int) -> None:
        self.window: ExactWindow | None = None
        self._size, self._max_q_len = size, max_q_len
        self._start = np.zeros(0, np.int64)

    def begin(self, keys: torch.Tensor, on_host: AppendStep, step: AppendStep, stored: dict[str, Any]) -> ExactWindow:
        """Makes the window ready for a step: it holds what the first new token of each sequence sees.

        Args:
          keys: the step's keys, `[num_seqs, num_kv_heads, num_new_tokens, head_size]`, for sizes, dtype and device.
          on_host: the step on the host.
          step: the step on the device of `keys`.
          stored: the arguments of `fill_exact_window` that say where the pages are and how they are encoded.
        """
        num_seqs = len(keys)
        if self.window is None or self.window.num_rows < num_seqs:  # its sequences are new
            with torch.inference_mode(False):  # else steps outside inference mode could not write into it
                self.window = ExactWindow.allocate(
                    num_seqs,
                    self._size,
                    keys.shape[1],
                    keys.shape[3],
                    dtype=keys.dtype,
                    device=keys.device,
                    max_q_len=self._max_q_len,
                )
        lens, q_lens = on_host.seq_lens.numpy().astype(np.int64), np.diff(on_host.cu_q_lens.numpy())
        before = lens - q_lens
        start = self._start if len(self._start) == num_seqs else np.zeros(num_seqs, np.int64)
        start = np.where(before == 0, 0, start)
        is_lost = (q_lens > 0) & (start > np.maximum(before - self._size + 1, 0))
        if is_lost.any():
            rows = torch.from_numpy(np.where(is_lost, np.arange(num_seqs), -1)).to(keys.device)
            sequences: dict[str, Any] = {
                "block_table": step.block_table,
                "seq_lens": step.seq_lens,
                "cu_q_lens": step.cu_q_lens,
            }
            fill_exact_window(self.window, rows=rows, **sequences, **stored)
            start = np.where(is_lost, np.maximum(before - self._size, 0), start)
        # Recorded before the step writes: if it stops halfway, these tokens may or may not be overwritten.
        self._start = np.where(q_lens > 0, np.maximum(start, lens - self.window.tokens_per_row), start)
        return self.window

    def restore(self, window: ExactWindow, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces the last tokens of what was read back from the pages, in place.

        Args:
          window: what `begin` returned, with the step's tokens.
          keys: `[num_seqs, num_tokens, num_kv_heads, head_size]`, all tokens of sequences without padding.
          values: likewise.
        """
        num_seqs, end = keys.shape[:2]
        position = torch.arange(max(end - self._size, 0), end, device=keys.device)
        slot = position % window.tokens_per_row
        row = torch.arange(num_seqs, device=keys.device)[:, None] * window.blocks_per_row
        block = row + slot // WINDOW_BLOCK_SIZE
        for dense, ring in ((keys, window.key_cache), (values, window.value_cache)):
            dense[:, end - len(position) :] = ring[block, slot % WINDOW_BLOCK_SIZE]

    def selected(self, sequences: np.ndarray) -> Selected:
        """A copy of these sequences' rows, in this order; nothing has changed."""
        if self.window is None:
            return Selected(None, self._start)
        window, index = self.window, torch.from_numpy(sequences)
        with torch.inference_mode(False):
            copied = ExactWindow.allocate(
                max(len(sequences), 1),
                self._size,
                *window.key_cache.shape[2:],
                dtype=window.key_cache.dtype,
                device=window.key_cache.device,
                max_q_len=self._max_q_len,
            )
            by_row = (-1, window.blocks_per_row)
            for to, of in ((copied.key_cache, window.key_cache), (copied.value_cache, window.value_cache)):
                to.unflatten(0, by_row)[: len(index)] = of.unflatten(0, by_row)[index.to(of.device)]
        return Selected(copied, self._start[sequences])

    def replace(self, selected: Selected) -> None:
        """Continues with what `selected` returned."""
        self.window, self._start = selected
