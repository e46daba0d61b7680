"""Slots: where each token goes, and which tokens are not the last with their slot."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels import compat, warpgroups
from kvjax.kernels.aliases import Layout, Ref
from kvjax.kernels.launchable import Number
from kvjax.kernels.registers import THREADS, lane_layout
from kvjax.spec import AttentionSpec

SEARCH_LOADS = 4
"""Slots that a thread loads before it compares any, so that all slots of a decode step are loaded at once."""


class Position(NamedTuple):
    """Where a token goes: its page and its index there. `written` is false for a token that is not written."""

    written: jax.Array
    page: jax.Array
    token: jax.Array


class TokenSlots(Protocol):
    """Where the tokens of a program go."""

    def position(
        self, token: jax.Array, condition: jax.Array, spec: AttentionSpec, layout: Layout | None = None
    ) -> Position:
        """Where a token goes, or an array of tokens in registers in `layout`; only those that `condition` names."""

    def repeated(self, first: jax.Array, tokens: int) -> jax.Array | None:
        """The tokens that are not the last with their slot, as in `Slots`."""


class Slots(NamedTuple):
    """The slots of a call in `ref`, as int32 words; the slot of token `t` is number `t`.

    Attributes:
      ref: reference to int32 words.
      words_per_slot: 1 for int32 slots, 2 for int64 slots, low word first.
      last_slot: tokens with a slot above it are not written.
      num_searched: the tokens to search for repeated slots; None if slots are unique.
      layer: in a cache of several layers, whose pages lie next to each other in a block, the layer to write.
      num_layers: layers of the cache.
    """

    ref: Ref
    words_per_slot: int
    last_slot: Number
    num_searched: Number | None
    layer: Number = 0
    num_layers: int = 1

    def of_layer(self, layer: jax.Array, num_layers: int) -> Slots:
        """The slots of one of several layers; for a layer out of range none is written."""
        last = jnp.where((layer >= 0) & (layer < num_layers), jnp.int32(self.last_slot), jnp.int32(-1))
        return self._replace(last_slot=last, layer=layer, num_layers=num_layers)

    def position(
        self, token: jax.Array, condition: jax.Array, spec: AttentionSpec, layout: Layout | None = None
    ) -> Position:
        """Where a token goes, or an array of tokens in registers in `layout`."""

        def read(word: jax.Array) -> jax.Array:
            return self.ref[word] if layout is None else warpgroups.load_each(self.ref, word, layout)

        word = token * self.words_per_slot
        slot = read(word)
        written = condition & (slot >= 0) & (slot <= self.last_slot)
        if self.words_per_slot == 2:
            written &= read(word + 1) == 0
        block_size = jnp.int32(spec.block_size)
        page = lax.div(slot, block_size)
        if not isinstance(self.layer, int):
            page = page * jnp.int32(self.num_layers) + self.layer
        return Position(written, page, lax.rem(slot, block_size))

    def repeated(self, first: jax.Array, tokens: int) -> jax.Array | None:
        """A bit mask of up to 32 tokens: those for which this thread sees a later token with the same slot.

        The bits of all threads or-ed together (`warpgroups.any_thread`) cover all later tokens. None for unique slots.
        """
        if self.num_searched is None or (isinstance(self.num_searched, int) and self.num_searched < 2):
            return None
        width, loads = (8, 1) if compat.interpreting() else (THREADS, SEARCH_LOADS)
        layout = lane_layout((width,), 1)
        lane = compat.layout_cast(lax.iota(jnp.int32, width), layout)
        own_slots = [self.ref[(first + i) * self.words_per_slot] for i in range(tokens)]
        count, last = self.num_searched, self.num_searched - 1

        def search(step: Number, mask: jax.Array) -> jax.Array:
            others = [first + 1 + (step * loads + i) * width + lane for i in range(loads)]
            words = [jnp.minimum(other, last) * self.words_per_slot for other in others]
            slots = [warpgroups.load_each(self.ref, word, layout) for word in words]
            are_tokens = [other < count for other in others]
            if self.words_per_slot == 2:
                highs = [warpgroups.load_each(self.ref, word + 1, layout) for word in words]
                are_tokens = [is_token & (high == 0) for is_token, high in zip(are_tokens, highs, strict=True)]
            for other, slot, is_token in zip(others, slots, are_tokens, strict=True):
                for i, own_slot in enumerate(own_slots):
                    is_repeated = is_token & (slot == own_slot) & (other > first + i)
                    mask |= jnp.where(is_repeated, jnp.int32(1 << i), 0)
            return mask

        def search_rolled(step: jax.Array, mask: jax.Array) -> jax.Array:
            warpgroups.disable_unrolling()
            return search(step, mask)

        empty = compat.layout_cast(jnp.zeros((width,), jnp.int32), layout)
        # The first step, for most writes the only one, is outside the loop, so that its loads wait for nothing.
        mask = search(0, empty)
        steps = lax.div(jnp.maximum(count - first + width * loads - 2, 0), jnp.int32(width * loads))
        return lax.fori_loop(1, steps, search_rolled, mask)
