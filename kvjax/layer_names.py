"""Layers by the names that checkpoints give their parts, and by the numbers that messages give them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_OTHER_MODELS = re.compile(
    r"(?:^|_)(?:vision|visual|vit|image|audio|speech|encoder|mtp|eagle|medusa|draft)(?:_|$)", re.IGNORECASE
)
"""Parts of the paths of layers that are not the language model's own: other modalities, and those that draft tokens."""

MOST_DIGITS = 19
"""Digits of a layer's index: no model has more layers, and Python reads no int of thousands of digits."""


class LayerName(NamedTuple):
    """`model.layers.3.self_attn.k_scale` is `("model.layers", 3, "self_attn.k_scale")`."""

    prefix: str
    layer: int
    rest: str

    @property
    def is_of_language_model(self) -> bool:
        """Whether nothing in the path names another model than the one whose layers are counted."""
        return not any(_OTHER_MODELS.search(part) for part in self.prefix.split("."))


def split_layer_name(name: str) -> LayerName | None:
    """Which layer a dotted name is of, by the first part that is a number; None for a name without one."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isascii() and part.isdecimal() and len(part) <= MOST_DIGITS:
            return LayerName(".".join(parts[:place]), int(part), ".".join(parts[place + 1 :]))
    return None


def in_ranges(layers: Sequence[int]) -> str:
    """`0-4, 6, 8-9`; of many ranges the first two and the last."""
    ranges: list[tuple[int, int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], layer)
        else:
            ranges.append((layer, layer))
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(words if len(words) <= 4 else [*words[:2], "...", words[-1]])
