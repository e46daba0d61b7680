"""Layers that share a pool: pages of one size, groups with a block table each, and how much a budget holds."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from kvjax.errors import KVCacheTypeError, KVCacheValueError, shown
from kvjax.spec import AttentionSpec, as_int, as_items, as_specs


def unify_page_sizes(specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    """Gives every layer's pages the same number of bytes, so that all layers can share one pool.

    A layer with smaller pages packs as many of its blocks into a page as fit (its `block_size` grows by that factor);
    the rest is padding, less than one original block, reported by `page_padding_bytes`. The largest pages are
    unchanged.

    Specs with equal array shapes and dtypes are returned unchanged; otherwise each result has `page_size_padded` set,
    which makes its cache a view of the shared pool.

    Raises:
      KVCacheTypeError: not a sequence of specs.
    """
    specs = as_specs(specs)
    if len({(spec.array_dtype, spec.cache_shape(1)) for spec in specs}) <= 1:
        return specs
    page = max(spec.page_size_bytes for spec in specs)
    return tuple(
        dataclasses.replace(
            spec, block_size=spec.block_size * (page // spec.real_page_size_bytes), page_size_padded=page
        )
        for spec in specs
    )


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table in a pool of several groups.

    Attributes:
      layers: their indices among the specs, in order. Layer `layers[i]` keeps its pages in array `i` of the pool, which
        it shares with layer `i` of every other group: a block number belongs to one group at a time, in all arrays.
      spec: the spec of each of them, with the pool's pages.
    """

    layers: tuple[int, ...]
    spec: AttentionSpec

    @property
    def block_size(self) -> int:
        """Tokens in a block of these layers."""
        return self.spec.block_size

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query of these layers sees, its own included; None for all."""
        return self.spec.sliding_window


def group_layers(specs: Sequence[AttentionSpec], layers_per_group: int | None = None) -> tuple[LayerGroup, ...]:
    """Groups a model's layers for a `BlockPool` of several block tables: layers of equal specs, in equal numbers.

    Specs get pages of one size first (`unify_page_sizes`). All groups then allocate from one pool of
    `max_group_blocks(groups, budget_bytes)` blocks, and another kind of layer can use the blocks that one kind frees,
    for example behind a window.

    Args:
      specs: one for each layer.
      layers_per_group: layers of a group, and arrays of the pool. Default: the largest number that divides every kind
        of layer equally. This wastes no page: the groups together hold `max_tokens` tokens. With more there are fewer
        tables, and groups with fewer layers than that leave pages unused.

    Raises:
      KVCacheValueError: no specs, or `layers_per_group` below 1.
      KVCacheTypeError: not a sequence of specs.
    """
    unified = unify_page_sizes(specs)
    if not unified:
        raise KVCacheValueError("group_layers: got no specs, expected one for each layer")
    kinds: dict[AttentionSpec, list[int]] = {}
    for index, spec in enumerate(unified):
        kinds.setdefault(spec, []).append(index)
    number = math.gcd(*map(len, kinds.values()))
    if layers_per_group is not None:
        number = as_int("layers_per_group", layers_per_group, least=1)
    return tuple(
        LayerGroup(tuple(layers[first : first + number]), spec)
        for spec, layers in kinds.items()
        for first in range(0, len(layers), number)
    )


def max_group_blocks(groups: Sequence[LayerGroup], budget_bytes: int) -> int:
    """Returns the most blocks that `budget_bytes` hold in a pool of several groups: `num_blocks` of its arrays.

    Raises:
      KVCacheValueError: no groups, or a negative budget.
      KVCacheTypeError: not groups of `group_layers`, or the budget is not an int.
    """
    groups = as_items("groups", groups, "what group_layers returns")
    for index, group in enumerate(groups):
        if not isinstance(group, LayerGroup):
            raise KVCacheTypeError(f"groups[{index}]: got {shown(group)}, expected one of group_layers")
    sizes = {group.spec.page_size_bytes for group in groups}
    if len(sizes) > 1:
        raise KVCacheValueError(f"groups: got pages of {shown(sorted(sizes))} bytes, expected those of group_layers")
    budget = _budget("max_group_blocks", [group.spec for group in groups], budget_bytes)
    return budget // (groups[0].spec.page_size_bytes * max(len(group.layers) for group in groups))


def max_tokens(specs: Sequence[AttentionSpec], budget_bytes: int) -> int:
    """Returns the most tokens of one sequence that `budget_bytes` hold, in whole pages of every layer.

    Sliding-window layers count every token too: freeing blocks behind the window is up to the block tables. For unified
    specs this is what an empty `BlockPool` of `group_layers(specs)` and `max_group_blocks` takes in one `append`.

    Raises:
      KVCacheValueError: no specs, or a negative budget.
      KVCacheTypeError: not a sequence of specs, or the budget is not an int.
    """
    budget = _budget("max_tokens", specs, budget_bytes)
    layers = collections.Counter((spec.block_size, spec.page_size_bytes) for spec in specs)

    def cost(num_tokens: int) -> int:
        return sum(-(-num_tokens // block_size) * page * count for (block_size, page), count in layers.items())

    # Not bisect: its ranges are limited to sys.maxsize.
    fits, most = 0, min(budget // spec.page_size_bytes * spec.block_size for spec in specs)
    while fits < most:
        middle = (fits + most + 1) // 2
        fits, most = (middle, most) if cost(middle) <= budget else (fits, middle - 1)
    return fits


def max_blocks(specs: Sequence[AttentionSpec], budget_bytes: int) -> int:
    """Returns the most blocks that `budget_bytes` hold in every layer: `num_blocks` for each cache and the `BlockPool`.

    Raises:
      KVCacheValueError: no specs, or a negative budget.
      KVCacheTypeError: not a sequence of specs, or the budget is not an int.
    """
    return _budget("max_blocks", specs, budget_bytes) // sum(spec.page_size_bytes for spec in specs)


def _budget(what: str, specs: Sequence[AttentionSpec], budget_bytes: object) -> int:
    if not as_specs(specs):
        raise KVCacheValueError(f"{what}: got no specs, expected one for each layer")
    return as_int("budget_bytes", budget_bytes, least=0)
