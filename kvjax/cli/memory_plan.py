"""A memory plan: the cost of each layer's cache and what a memory budget holds, as values, text and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import kvjax
from kvjax import (
    AttentionKind,
    AttentionSpec,
    CacheLayout,
    DTypeSource,
    KVCacheDType,
    KVCacheValueError,
    MLAAttentionSpec,
    ModelKVConfig,
    ResolvedKVCacheDType,
    VScaleLayout,
)
from kvjax.layer_names import in_ranges, split_layer_name
from kvjax.scales import LayerScales
from kvjax.table import markdown_table

BASELINE = KVCacheDType.BFLOAT16
"""The dtype that a plan is compared with, in every layer."""


@dataclasses.dataclass(frozen=True)
class EqualLayers:
    """Layers with equal caches; all numbers are per layer and device.

    `layers`: their indices. `sliding_window`: tokens that a query attends to, None for all. `source`: where the dtype
    comes from. `kv_lora_rank`, `qk_rope_head_dim`: elements of a latent and of a rope key, None without latents (MLA).
    `skipped`: `skip_layers` keeps these layers at the model dtype. `per_head_scales`: the checkpoint holds
    a scale per KV head. `scales`: the names of the scales of keys and of values, after the layer's index; empty if the
    layers need none or the checkpoint holds none, None if there are no weights. `block_size`: tokens of a page, more
    than requested if other layers have larger pages. `page_bytes`: the same in every group; `padding_bytes` of them are
    unused.
    """

    layers: tuple[int, ...]
    attention: AttentionKind
    sliding_window: int | None
    num_kv_heads: int
    head_size: int
    head_size_v: int
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    dtype: str
    source: DTypeSource
    skipped: bool
    per_head_scales: bool
    scales: tuple[str, ...] | None
    layout: CacheLayout
    v_scale_layout: VScaleLayout
    block_size: int
    bytes_per_token: int
    page_bytes: int
    padding_bytes: int


class Layer(NamedTuple):
    """A layer to plan.

    Attributes:
      spec: its cache's, before page sizes are unified.
      resolved: its dtype.
      scales: what the checkpoint holds for it, None without weights.
      skipped: whether `skip_layers` changes its dtype.
    """

    spec: AttentionSpec
    resolved: ResolvedKVCacheDType
    scales: LayerScales | None
    skipped: bool


@dataclasses.dataclass(frozen=True)
class Totals:
    """All layers of one device: `tokens` is how many the budget holds, in whole pages of a pool that layers share.

    `one_table_tokens`: the same where every layer has a cache of its own, and one block table serves all.
    """

    bytes_per_token: int
    tokens: int
    one_table_tokens: int


@dataclasses.dataclass(frozen=True)
class WindowPlan:
    """Exact windows: those of all quantized layers take `bytes` of the budget, for `max_seqs` sequences of one device.

    `size`: tokens that a query attends to in the window.
    """

    size: int
    max_seqs: int
    bytes: int

    @classmethod
    def of(cls, specs: Sequence[AttentionSpec], size: int, max_seqs: int) -> Self:
        """Returns the plan for windows beside the quantized layers of `specs`.

        Raises:
          UnsupportedError: a layer of latents (MLA).
        """
        quantized = [spec for spec in specs if spec.dtype.is_quantized]
        return cls(size, max_seqs, sum(kvjax.ExactWindow.num_bytes(spec, max_seqs, size) for spec in quantized))


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The cost of a model's KV cache; the fields are the keys of `kvjax plan --json`.

    `warnings`: what was assumed about the model, or ignored. `layers_without_cache`: indices of layers without keys and
    values of their own. `tensor_parallel`: devices that share each layer's KV heads. `memory_bytes`: the budget of one
    device. `state_bytes`: what recurrent layers keep of a sequence on one device, None if unknown. `max_seqs`: how many
    sequences' states are taken from the budget, and have exact windows. `bfloat16`: the totals with every layer in
    bfloat16. `ratio`: `totals.tokens` relative to those, None if those are 0. `exact_window`: None without one; its
    bytes are part of `memory_bytes`, not of `totals`.
    """

    warnings: tuple[str, ...]
    num_layers: int
    layers_without_cache: tuple[int, ...]
    model_dtype: str
    tensor_parallel: int
    memory_bytes: int
    state_bytes: int | None
    max_seqs: int
    groups: tuple[EqualLayers, ...]
    totals: Totals
    bfloat16: Totals
    ratio: float | None
    exact_window: WindowPlan | None

    @classmethod
    def make(
        cls,
        model: ModelKVConfig,
        layers: Sequence[Layer],
        *,
        tensor_parallel: int,
        memory_bytes: int,
        max_seqs: int = 0,
        exact_window: WindowPlan | None = None,
    ) -> Self:
        """Makes the plan of one device's share of a model.

        Args:
          model: the share, as `ModelKVConfig.shard` returns it.
          layers: its layers.
          tensor_parallel: number of devices with such a share.
          memory_bytes: the budget of one device.
          max_seqs: how many sequences' states the budget holds besides; 0 if the size of a state is unknown.
          exact_window: the windows of `layers`; their bytes are not available for pages.

        Raises:
          KVCacheValueError: the budget does not hold the states, or the windows.
        """
        specs = [layer.spec for layer in layers]
        for_pages = memory_bytes - (model.state_bytes or 0) * max_seqs
        if for_pages < 0:
            raise KVCacheValueError(
                f"max_seqs: got {max_seqs} with states of {model.state_bytes:,} bytes each, expected at most"
                f" {memory_bytes // (model.state_bytes or 1)}, which {memory_bytes:,} bytes hold"
            )
        unified = kvjax.unify_page_sizes(specs)
        # Skipped layers are bfloat16 here too: the baseline is an unquantized cache.
        baseline = kvjax.resolve_layer_specs(model, BASELINE, block_size=specs[0].block_size, layout=specs[0].layout)
        groups: dict[tuple[AttentionSpec, ResolvedKVCacheDType, tuple[str, ...] | None, bool], list[int]] = {}
        for index, spec, layer in zip(model.layer_indices, unified, layers, strict=True):
            names = None if layer.scales is None else _scale_names(layer.scales)
            groups.setdefault((spec, layer.resolved, names, layer.skipped), []).append(index)
        left = for_pages - (exact_window.bytes if exact_window else 0)
        if exact_window and left < 0:
            raise KVCacheValueError(
                f"exact_window: got {exact_window.bytes:,} bytes for {exact_window.max_seqs:,} sequences, expected at"
                f" most {for_pages:,}, which the budget leaves"
            )
        totals, bfloat16 = (_totals(every, budget) for every, budget in ((specs, left), (baseline, for_pages)))
        return cls(
            warnings=(),
            num_layers=model.num_hidden_layers,
            layers_without_cache=model.layers_without_cache,
            model_dtype=model.dtype.value,
            tensor_parallel=tensor_parallel,
            memory_bytes=memory_bytes,
            state_bytes=model.state_bytes,
            max_seqs=max_seqs,
            groups=tuple(_group(indices, *facts) for facts, indices in groups.items()),
            totals=totals,
            bfloat16=bfloat16,
            ratio=totals.tokens / bfloat16.tokens if bfloat16.tokens else None,
            exact_window=exact_window,
        )

    def as_json(self) -> str:
        """Returns one JSON document."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def as_text(self) -> str:
        """Returns a table of the groups, and below it what the budget holds."""
        header = ("layers", "attention", "dtype", "from", "KV heads", "block", "bytes/token", "page bytes", "padding")
        devices = f", one of {self.tensor_parallel} devices" if self.tensor_parallel > 1 else ""
        ratio = f" (ratio {self.ratio:.2f})" if self.ratio is not None else ""
        lines = [f"warning: {warning}" for warning in self.warnings]
        lines += [
            f"{self.num_layers} layers, model dtype {self.model_dtype}{devices}; bytes, pages and blocks of one layer:",
            "",
            markdown_table(header, [_cells(group) for group in self.groups], left=5),
            "",
            f"all layers: {self.totals.bytes_per_token:,} bytes/token; with bfloat16 in every layer"
            f" {self.bfloat16.bytes_per_token:,}",
            f"{self.memory_bytes / 2**30:,.4g} GiB hold {self.totals.tokens:,} tokens; with bfloat16 in every layer"
            f" {self.bfloat16.tokens:,}{ratio}",
        ]
        if self.totals.one_table_tokens != self.totals.tokens:
            lines.append(
                "a cache for each layer, without shared pages, and one block table hold"
                f" {self.totals.one_table_tokens:,} tokens"
            )
        if self.exact_window is not None:
            lines.append(
                f"exact windows of {self.exact_window.size:,} tokens of {self.exact_window.max_seqs:,} sequences:"
                f" {self.exact_window.bytes:,} bytes of these, in quantized layers"
            )
        lines += [
            f"scales of layers {in_ranges(group.layers)}: {' and '.join(group.scales) or 'none, so 1'}"
            for group in self.groups
            if group.scales is not None and KVCacheDType(group.dtype).takes_scale
        ]
        if self.layers_without_cache:
            lines.append(
                f"{len(self.layers_without_cache)} layers have no KV cache of their own:"
                f" {in_ranges(self.layers_without_cache)}"
            )
        if self.state_bytes is None:
            lines.append("recurrent layers keep a state of unknown size of each sequence, which is not counted")
        elif self.state_bytes:
            lines.append(
                f"recurrent layers keep {self.state_bytes:,} bytes of each sequence;"
                f" {self.max_seqs * self.state_bytes:,} bytes, of {self.max_seqs} sequences, are counted"
            )
        if any(group.sliding_window for group in self.groups):
            lines.append("sliding layers count every token: blocks behind a window are not freed here")
        return "\n".join(lines)


def _totals(specs: Sequence[AttentionSpec], budget: int) -> Totals:
    """Returns what a budget holds of layers with equal block sizes."""
    return Totals(
        bytes_per_token=sum(spec.bytes_per_token for spec in specs),
        tokens=kvjax.max_tokens(kvjax.unify_page_sizes(specs), budget),
        one_table_tokens=kvjax.max_blocks(specs, budget) * specs[0].block_size,
    )


def _scale_names(layer: LayerScales) -> tuple[str, ...]:
    """Returns the distinct names of a layer's scales, after the layer's index."""
    parts = [split_layer_name(name) for name in layer.names if name]
    return tuple(dict.fromkeys(part.rest for part in parts if part))


def _group(
    layers: Iterable[int],
    spec: AttentionSpec,
    resolved: ResolvedKVCacheDType,
    scales: tuple[str, ...] | None,
    skipped: bool,
) -> EqualLayers:
    return EqualLayers(
        layers=tuple(layers),
        attention=AttentionKind.FULL_ATTENTION if spec.sliding_window is None else AttentionKind.SLIDING_WINDOW,
        sliding_window=spec.sliding_window,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        kv_lora_rank=spec.kv_lora_rank if isinstance(spec, MLAAttentionSpec) else None,
        qk_rope_head_dim=spec.qk_rope_head_dim if isinstance(spec, MLAAttentionSpec) else None,
        dtype=resolved.dtype.value,
        source=resolved.source,
        skipped=skipped,
        per_head_scales=resolved.per_head_scales,
        scales=scales,
        layout=spec.layout,
        v_scale_layout=spec.v_scale_layout,
        block_size=spec.block_size,
        bytes_per_token=spec.bytes_per_token,
        page_bytes=spec.page_size_bytes,
        padding_bytes=spec.page_padding_bytes,
    )


def _cells(group: EqualLayers) -> tuple[str, ...]:
    sizes = f"{group.head_size}" if group.head_size == group.head_size_v else f"{group.head_size}/{group.head_size_v}"
    heads = f"{group.num_kv_heads} x {sizes}"
    if group.kv_lora_rank is not None:
        heads = f"latent {group.kv_lora_rank} + {group.qk_rope_head_dim}"
    return (
        f"{len(group.layers)}: {in_ranges(group.layers)}",
        f"{group.attention} {group.sliding_window or ''}".rstrip(),
        group.dtype + (" (scale per head)" if group.per_head_scales else ""),
        group.source + (" (skipped)" if group.skipped else ""),
        heads,
        f"{group.block_size}",
        f"{group.bytes_per_token:,}",
        f"{group.page_bytes:,}",
        f"{group.padding_bytes:,} ({group.padding_bytes / group.page_bytes:.1%})" if group.padding_bytes else "0",
    )
