"""Steps of a model over a paged cache: every layer takes part in one before the next begins.

A step may stop halfway, out of memory or by an interrupt. Its plan ends with it, so that no later step takes that plan
for its own. Layers that it left at different lengths refuse to go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvjax import KVCacheValueError
from kvjax_torch.transformers.block_table import AppendStep, BlockTable
from kvjax_torch.transformers.recent import RecentTokens

ON_HOST = torch.device("cpu")


class Steps:
    """The lengths of a cache's layers, and the step under way.

    Args:
      tables: the block table of each layer, shared by layers with the same window.
      name: the cache in error messages.

    Attributes:
      tables: the block table of each layer.
      lengths: tokens of each sequence, padding included, by layer.
      pages: the pages of each layer, `[num_blocks, ...]`; `None` before its first tokens.
      recent: the exact window of each layer; `None` where it has none.
    """

    def __init__(self, tables: Sequence[BlockTable], name: str) -> None:
        self.tables, self._name = list(tables), name
        self.lengths = [0] * len(self.tables)
        self.pages: list[torch.Tensor | None] = [None] * len(self.tables)
        self.recent: list[RecentTokens | None] = [None] * len(self.tables)
        self._joined: set[int] = set()
        self._shape: tuple[int, int, int] | None = None
        self._paddings: list[np.ndarray | None] = []
        self._steps: dict[tuple[BlockTable, torch.device], AppendStep] = {}

    @property
    def num_seqs(self) -> int:
        """Sequences that hold tokens."""
        return self.tables[0].num_seqs

    def join(
        self,
        layer: int,
        num_seqs: int,
        num_new: int,
        device: torch.device,
        *,
        is_token: np.ndarray | None = None,
        free_passed: bool = False,
    ) -> AppendStep:
        """The step in which a layer appends `num_new` tokens to each sequence; `leave` says that it did.

        This is the step under way, if the layer has not joined it yet and appends the same tokens. Otherwise the next
        step begins, for which all tables allocate blocks.

        Args:
          layer: the layer's index.
          num_seqs: the number of sequences.
          num_new: new tokens of each, padding included.
          device: the device of the result's tensors.
          is_token: as in `BlockTable.plan`.
          free_passed: as in `BlockTable.plan`.

        Raises:
          KVCacheValueError: as `BlockTable.plan`, and for layers of different lengths; no table has changed then.
        """
        shape = num_seqs, self.lengths[layer], num_new
        if layer in self._joined or shape != self._shape or not self._is_padded_so(is_token):
            self._end()
            self.check_whole(layer)
            self._begin(shape, is_token, free_passed)
        self._joined.add(layer)
        table = self.tables[layer]
        if (table, device) not in self._steps:
            self._steps[table, device] = self._steps[table, ON_HOST].to(device)
        return self._steps[table, device]

    def on_host(self, layer: int) -> AppendStep:
        """The step that a layer has joined, on the host."""
        return self._steps[self.tables[layer], ON_HOST]

    def leave(self, layer: int, num_new: int) -> None:
        """Says that a layer has stored the `num_new` tokens of the step that it joined, and attended to them."""
        self.lengths[layer] += num_new

    def check_whole(self, layer: int) -> None:
        """Checks that no step stopped halfway, if what a layer does next is part of another step.

        Raises:
          KVCacheValueError: layers have different lengths, and this one has taken part in the last step.
        """
        if layer not in self._joined and self._shape is not None:
            return
        shortest, longest = min(self.lengths), max(self.lengths)
        if shortest != longest:
            raise KVCacheValueError(
                f"{self._name}: got layers of {shortest} to {longest} tokens, expected equally long ones: a step"
                f" stopped halfway; cache.crop({shortest - self.lengths[0]}) removes its tokens, cache.reset() all"
            )

    def keep(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` positions of every sequence.

        Raises:
          KVCacheValueError: as `BlockTable.check_length`; nothing is removed then.
        """
        tables = dict.fromkeys(self.tables)
        for table in tables:
            table.check_length(num_tokens, self.lengths[0])
            if not num_tokens:
                table.copied()  # nothing is left of what they are for
        self._end()
        for table in tables:
            table.truncate(num_tokens)
        self.lengths = [min(length, num_tokens) for length in self.lengths]

    def select(self, sequences: np.ndarray) -> None:
        """Replaces all sequences, as `BlockTable.select`; those without tokens are nothing to replace."""
        self._end()
        if not any(self.lengths):
            return
        rows = np.arange(self.num_seqs)[sequences]
        # Before anything changes, because the copies may not fit into memory.
        selected = [(recent, recent.selected(rows)) for recent in self.recent if recent is not None]
        for table in dict.fromkeys(self.tables):
            table.select(rows)
        for recent, copied in selected:
            recent.replace(copied)

    def _begin(self, shape: tuple[int, int, int], is_token: np.ndarray | None, free_passed: bool) -> None:
        num_seqs, start, num_new = shape
        growths = {
            table: table.plan(num_seqs, start, start + num_new, is_token=is_token, free_passed=free_passed)
            for table in dict.fromkeys(self.tables)
        }
        self._steps = {(table, ON_HOST): table.grow(growth) for table, growth in growths.items()}
        self._make_copies()
        self._shape, self._paddings = shape, [is_token]

    def _end(self) -> None:
        """Ends the step under way: what changes sequences, or begins another step, calls this first."""
        self._joined.clear()
        self._shape = None
        self._make_copies()

    def _make_copies(self) -> None:
        """Copies, in all layers, the blocks that `BlockTable.grow` has named; those cut short are repeated."""
        for table in dict.fromkeys(self.tables):
            if not len(table.copies):
                continue
            copy_from, copy_to = torch.from_numpy(table.copies).long().unbind(1)
            for of_layer, pages in zip(self.tables, self.pages, strict=True):
                if of_layer is table and pages is not None:
                    pages[copy_to.to(pages.device)] = pages[copy_from.to(pages.device)]
            table.copied()

    def _is_padded_so(self, is_token: np.ndarray | None) -> bool:
        """Whether `is_token` is the padding of the step under way; the bytes of each mask are compared once."""
        if any(_is_same(is_token, seen) for seen in self._paddings):
            return True
        first = self._paddings[0]
        if first is None or is_token is None or not np.array_equal(first, is_token):
            return False
        self._paddings.append(is_token)
        return True


def _is_same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether two masks are the same memory, or both None."""
    if one is None or other is None:
        return one is other
    return one.__array_interface__ == other.__array_interface__
