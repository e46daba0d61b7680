"""Chooses each layer's dtype for a transformers model, by the error of attention or by divergence of predictions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers.cache_utils import DynamicCache

import kvjax
from kvjax import AttentionSpec, DTypeChoice, ErrorMeasure, KVCacheDType, KVCacheValueError, KVScales, ModelKVConfig
from kvjax_torch.arguments.dtypes import torch_dtype
from kvjax_torch.hadamard import hadamard_transform
from kvjax_torch.ops import gather_kv, reshape_and_cache_flash
from kvjax_torch.transformers.recording import Recorder, run

LOGIT_ROWS = 256
"""Number of positions whose probabilities are compared at once."""


class Allowed(NamedTuple):
    """The dtypes and options to choose from, and the criterion.

    Attributes:
      dtypes: of which each layer gets one.
      bits: the most bits of an element, as a mean of all layers.
      key_rotation: whether layers may have rotated keys.
      by: the error to minimize.
    """

    dtypes: tuple[KVCacheDType, ...]
    bits: float
    key_rotation: bool = False
    by: ErrorMeasure = ErrorMeasure.ATTENTION


def choose(recorder: Recorder, stated: ModelKVConfig, allowed: Allowed) -> DTypeChoice:
    """Chooses each layer's dtype; shows progress if on a terminal.

    By attention, the model runs over the samples twice for each dtype. By divergence it runs once for each dtype, for
    scales, and once for each layer and dtype. With rotated keys it runs twice as often.
    """
    if allowed.by is ErrorMeasure.ATTENTION:
        return _by_attention(recorder, stated, allowed)
    errors = functools.cache(lambda: _divergences(recorder, stated, allowed))  # after the budget is checked
    return kvjax.choose_layer_dtypes(
        stated,
        None,
        allowed.dtypes,
        bits=allowed.bits,
        key_rotation=allowed.key_rotation,
        error_of=lambda *layer: errors()[layer],
    )


def _by_attention(recorder: Recorder, stated: ModelKVConfig, allowed: Allowed) -> DTypeChoice:
    def sequences() -> Iterator[list[list[jax.Array | np.ndarray]]]:
        for sequence in recorder.attended():
            bar.update()
            yield sequence

    total = (4 if allowed.key_rotation else 2) * len(dict.fromkeys(allowed.dtypes)) * len(recorder.samples)
    with _progress(total=total) as bar:
        return kvjax.choose_layer_dtypes(
            stated, sequences, allowed.dtypes, bits=allowed.bits, key_rotation=allowed.key_rotation
        )


type Layer = tuple[int | str, KVCacheDType, bool]
"""A layer's index, its dtype, and whether its keys are rotated."""


def _divergences(recorder: Recorder, stated: ModelKVConfig, allowed: Allowed) -> dict[Layer, float]:
    """The mean divergence of the model's predictions with one layer's keys and values read back from a cache.

    It is the Kullback-Leibler divergence from the predictions of the model as it is, in nats.
    """
    stores: dict[Layer, StoredLayer] = {}
    for dtype, rotates in itertools.product(dict.fromkeys(allowed.dtypes), (False, True)[: 1 + allowed.key_rotation]):
        specs = kvjax.resolve_layer_specs(stated, dtype)
        indices = [*stated.layer_indices]
        batches = (states for states, _ in recorder.stored(indices if rotates else ()))
        for index, spec, scales in zip(
            indices, specs, kvjax.calibrate(specs, batches, layer_indices=indices), strict=True
        ):
            stores[index, spec.dtype, rotates] = StoredLayer(spec, scales, rotates)
    sums = dict.fromkeys(stores, 0.0)
    config, model = recorder.model.config, recorder.model
    with _progress(total=len(stores) * len(recorder.samples)) as bar, torch.no_grad():
        for number, ids in enumerate(recorder.samples):
            counted = len(ids) - recorder.first_counted
            reference = run(model, ids, DynamicCache(config=config), counted)[-counted:]
            for layer, store in stores.items():
                logits = run(model, ids, StoringCache(config, layer[0], store), counted)[-counted:]
                found = divergence(reference, logits)
                if not np.isfinite(found):
                    found = np.inf if torch.isfinite(reference).all() else np.nan
                if np.isnan(found):
                    raise KVCacheValueError(f"model: got logits of sample {number} that are not finite")
                sums[layer] += found / len(recorder.samples)
                bar.update()
    return sums


def divergence(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """The mean over positions of `sum(p * log(p / q))`, of predictions with logits `[positions, vocabulary]`.

    0 where rounding would make it negative.
    """
    total = 0.0
    for start in range(0, len(logits), LOGIT_ROWS):
        expected, got = (x[start : start + LOGIT_ROWS].float().log_softmax(-1) for x in (reference, logits))
        total += float((expected.exp() * (expected - got)).sum())
    return max(total, 0.0) / len(logits) if np.isfinite(total) else total


class StoredLayer(NamedTuple):
    """How a layer is stored: its spec, its scales, and whether its keys are rotated."""

    spec: AttentionSpec
    scales: KVScales
    rotates: bool

    def read_back(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values `[1, num_heads, num_tokens, head_size]` to pages and reads them back.

        Some models store each KV head once for every query head that reads it.
        """
        spec, device, num_tokens = self.spec, keys.device, keys.shape[2]
        repeats = keys.shape[1] // spec.num_kv_heads
        rows = [x[0, ::repeats].transpose(0, 1) for x in (keys, values)]
        if self.rotates:
            rows[0] = hadamard_transform(rows[0])
        num_blocks, dtype = -(-num_tokens // spec.block_size), torch_dtype(spec.array_dtype)
        pages = [
            torch.zeros(
                (num_blocks, spec.block_size, spec.num_kv_heads, sum(row_bytes) // dtype.itemsize),
                dtype=dtype,
                device=device,
            )
            for row_bytes in spec.row_bytes
        ]
        k_scale, v_scale = (torch.as_tensor(np.asarray(scale), device=device) for scale in self.scales)
        stored: dict[str, Any] = {"key_cache": pages[0], "value_cache": pages[1]}
        stored |= {"kv_cache_dtype": spec.dtype, "k_scale": k_scale, "v_scale": v_scale}
        slots = torch.arange(num_tokens, device=device)
        reshape_and_cache_flash(rows[0], rows[1], slot_mapping=slots, **stored)
        table, length = slots[None, :num_blocks], slots.new_full((1,), num_tokens)
        read = gather_kv(block_table=table, seq_lens=length, dtype=keys.dtype, **stored)
        key, value = (x[0, :num_tokens] for x in read)
        if self.rotates:
            key = hadamard_transform(key)
        key, value = (x.transpose(0, 1).repeat_interleave(repeats, dim=0)[None] for x in (key, value))
        return key, value


class StoringCache(DynamicCache):
    """A `DynamicCache` in which one layer holds keys and values that were written to pages and read back."""

    def __init__(self, config: Any, layer: int | str, store: StoredLayer) -> None:
        super().__init__(config=config)
        self._layer, self._store = layer, store

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds new tokens; returns what transformers' own cache does."""
        if layer_idx == self._layer:
            key_states, value_states = self._store.read_back(key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


_progress = functools.partial(tqdm, unit=" samples", desc="dtypes", disable=None, leave=False)
