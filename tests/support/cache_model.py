"""What a cache has to hold after any calls: a dictionary from token to stored rows, kept in numpy alone.

Rows and their places are those of reference.py, of latents (MLA) of mla_reference.py. Whatever no token was written to
keeps the bytes it had.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from kvjax import AttentionSpec, KVCacheDType
from support import mla_reference, reference
from support.reference import KEYS, VALUES

Rows = tuple[list[np.ndarray], list[np.ndarray]]
"""Of one token, its keys and its values: data and, where there are some, scales, each `[num_kv_heads, bytes]`.

A latent and its rope keys are the data of keys, `[1, bytes_per_token]`, and there are no values.
"""

Scales = tuple[np.ndarray | float, np.ndarray | float]

LEAST_SCALE = 2.0**-117
"""The least scale whose products with nonzero codes are normal float32: the least code of e4m3 is `2**-9`."""


def _none_between_0_and(least: float, scales: np.ndarray) -> np.ndarray:
    """Whether no scale along the last axis has a nonzero magnitude below `least`."""
    return ~((scales != 0) & (np.abs(scales) < least)).any(axis=-1)


@functools.cache
def offsets(spec: AttentionSpec, half: int) -> list[np.ndarray]:
    """Where in a page the rows of every token lie: of each part `[block_size, num_kv_heads, bytes]`."""
    if spec.is_mla:
        every = np.arange(spec.block_size * spec.bytes_per_token)
        return [every.reshape(spec.block_size, 1, -1)] if half == KEYS else []
    tokens = [
        [reference.byte_offsets(spec, half, token, head) for head in range(spec.num_kv_heads)]
        for token in range(spec.block_size)
    ]
    return [np.array([[head[part] for head in token] for token in tokens]) for part in range(len(tokens[0][0]))]


def encode(spec: AttentionSpec, key: np.ndarray, value: np.ndarray, scales: Scales) -> list[Rows]:
    """The rows that each token is stored as; of latents, `key` are these and `value` rope keys."""
    if spec.is_mla:
        return [([row[None]], []) for row in mla_reference.rows(spec, key, value, float(np.float32(scales[0])))]
    keys, values = (
        reference.encode(x, reference.part(spec, half), scales[half]) for half, x in ((KEYS, key), (VALUES, value))
    )
    return [([part[i] for part in keys], [part[i] for part in values]) for i in range(len(key))]


def holds(page: np.ndarray, spec: AttentionSpec, token: int, rows: Rows) -> bool:
    """Whether a page's bytes hold these rows at a token's place."""
    return all(
        np.array_equal(page[at[token]], part)
        for half in (KEYS, VALUES)
        for at, part in zip(offsets(spec, half), rows[half], strict=True)
    )


class CacheModel:
    """The pages of a cache or, where several layers take turns with its blocks, of a pool.

    `under`: the bytes of the pages where no token lies. `tokens`: the rows of each `(block, token)`. `owner`: the layer
    whose tokens a block holds.
    """

    def __init__(self, pages: np.ndarray):
        self.under = pages.copy()
        self.tokens: dict[tuple[int, int], Rows] = {}
        self.owner: dict[int, AttentionSpec] = {}

    def __len__(self) -> int:
        return len(self.under)

    def write(self, spec: AttentionSpec, slots: Iterable[int], rows: Iterable[Rows]) -> None:
        """Puts tokens into their slots; those outside the cache nowhere."""
        for slot, token_rows in zip(slots, rows, strict=True):
            if 0 <= slot < len(self) * spec.block_size:
                block, token = divmod(int(slot), spec.block_size)
                self._take_over(block, spec)
                self.tokens[block, token] = token_rows

    def copy(self, source: CacheModel, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies blocks of `source`, which may be this one, as they were before; pairs outside either are left out."""
        inside = [(int(a), int(b)) for a, b in pairs if 0 <= a < len(source) and 0 <= b < len(self)]
        copies = [(b, source.page(a), source.owner.get(a), source._rows_of(a)) for a, b in inside]
        for block, page, owner, rows in copies:
            self._forget(block)
            self.under[block] = page
            if owner is not None:
                self.owner[block] = owner
                self.tokens |= {(block, token): token_rows for token, token_rows in rows.items()}

    def page(self, block: int) -> np.ndarray:
        """The bytes of a page."""
        page = self.under[block].copy()
        for token, rows in self._rows_of(block).items():
            for half in (KEYS, VALUES):
                for at, part in zip(offsets(self.owner[block], half), rows[half], strict=True):
                    page[at[token]] = part
        return page

    def pages(self) -> np.ndarray:
        """All bytes, `[num_blocks, page_size_bytes]`."""
        return np.stack([self.page(block) for block in range(len(self))])

    def read(
        self, spec: AttentionSpec, half: int, table: np.ndarray, lengths: np.ndarray, scale: Scales, dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray]:
        """What a gather of `dtype` gives: zeros from each length on, and where the table names no block.

        Also returns for which tokens and heads that is known. Bytes that were never written may be a float32 scale so
        small that XLA on a CPU flushes it, or its products with codes, to zero.
        """
        size, part = (spec.head_size, spec.head_size_v)[half], reference.part(spec, half)
        shape = *table.shape, spec.block_size, spec.num_kv_heads
        dense, is_known = np.zeros((*shape, size), dtype), np.ones(shape, bool)
        for seq, length in enumerate(lengths):
            for position in range(min(length, table.shape[1] * spec.block_size)):
                index, token = divmod(position, spec.block_size)
                if not 0 <= (block := int(table[seq, index])) < len(self):
                    continue
                rows = self._rows(spec, half, block, token)
                dense[seq, index, token] = reference.cast(reference.decode(rows, part, scale), dtype)
                if part.info.scale_dtype == np.float32:
                    is_known[seq, index, token] = _none_between_0_and(LEAST_SCALE, rows[1].copy().view(np.float32))
        whole = table.shape[0], table.shape[1] * spec.block_size, spec.num_kv_heads
        return dense.reshape(*whole, size), is_known.reshape(whole)

    def read_latents(
        self, spec: AttentionSpec, places: Iterable[tuple[int, int] | None], scale: Scales, dtype: np.dtype
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """What a gather of tokens gives, each a block and its index there, or None for none: latents and rope keys.

        And which of these rows are known: bytes that no write left may be a scale that XLA on a CPU flushes to zero.
        """
        places = [place if place is not None and 0 <= place[0] < len(self) else None for place in places]
        stored = np.zeros((len(places), spec.bytes_per_token), np.uint8)
        for row, place in zip(stored, places, strict=True):
            if place is not None:
                row[:] = self._rows(spec, KEYS, *place)[0][0]
        is_known = np.ones(len(places), bool)
        if spec.dtype is KVCacheDType.FP8_DS_MLA:
            scales = stored[:, (rank := spec.part_sizes[0]) : rank + rank // 32].copy().view(np.float32)
            is_known = _none_between_0_and(2.0**-126, scales)
        dense = [reference.cast(x, dtype) for x in mla_reference.decoded(spec, stored, float(np.float32(scale)))]
        for row, place in enumerate(places):
            if place is None:
                for x in dense:
                    x[row] = 0
        return dense, is_known

    def _rows(self, spec: AttentionSpec, half: int, block: int, token: int) -> list[np.ndarray]:
        if self.owner.get(block) == spec and (block, token) in self.tokens:
            return self.tokens[block, token][half]
        page = self.page(block)
        return [page[at[token]] for at in offsets(spec, half)]

    def _rows_of(self, block: int) -> dict[int, Rows]:
        return {token: rows for (of, token), rows in self.tokens.items() if of == block}

    def _take_over(self, block: int, spec: AttentionSpec) -> None:
        if self.owner.get(block) != spec:
            page = self.page(block)
            self._forget(block)
            self.under[block], self.owner[block] = page, spec

    def _forget(self, block: int) -> None:
        for token in self._rows_of(block):
            del self.tokens[block, token]
        self.owner.pop(block, None)
