"""Layer indices in tensor and module names, and in messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_OTHER_MODELS = re.compile(
    r"(?:^|_)(?:vision|visual|vit|image|audio|speech|encoder|mtp|eagle|medusa|draft)(?:_|$)", re.IGNORECASE
)
"""Path components of layers outside the language model: other modalities, and draft models."""

MAX_DIGITS = 19
"""Digits of a layer's index; limited because Python rejects ints of thousands of digits."""


class LayerName(NamedTuple):
    """`model.layers.3.self_attn.k_scale` is `("model.layers", 3, "self_attn.k_scale")`."""

    prefix: str
    layer: int
    rest: str

    @property
    def is_of_language_model(self) -> bool:
        """Whether the path belongs to the language model."""
        return not any(_OTHER_MODELS.search(part) for part in self.prefix.split("."))


def split_layer_name(name: str) -> LayerName | None:
    """Splits a dotted name at its first numeric part, the layer's index; None for a name without one."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isascii() and part.isdecimal() and len(part) <= MAX_DIGITS:
            return LayerName(".".join(parts[:i]), int(part), ".".join(parts[i + 1 :]))
    return None


def in_ranges(layers: Sequence[int]) -> str:
    """Formats indices as `0-4, 6, 8-9`; of more than four ranges, the first two and the last."""
    ranges: list[tuple[int, int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], layer)
        else:
            ranges.append((layer, layer))
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:2], "...", texts[-1]])
