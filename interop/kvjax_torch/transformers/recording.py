"""What a transformers model's layers store of a text, and what their attention gets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvjax import AttentionSpec, KVCacheValueError
from kvjax_torch.hadamard import hadamard_transform
from kvjax_torch.sharing.borrow import to_jax
from kvjax_torch.transformers.attention import CACHE_ARGUMENT


class RecordingCache(DynamicCache):
    """transformers' own cache, which also keeps what is stored, tokens behind a window too.

    Attributes:
      stored: of each layer its keys and values, `[num_seqs, num_heads, num_tokens, head_size]` of each update.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.stored: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps new tokens; returns what transformers' own cache does."""
        self.stored.setdefault(layer_idx, []).append((key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@contextlib.contextmanager
def recorded_queries() -> Iterator[dict[int, torch.Tensor]]:
    """Within it, the query of each layer's last attention, `[num_seqs, num_heads, num_tokens, head_size]`.

    Queries are multiplied so that softmax's scale is `head_size ** -0.5`, whatever the model's is.
    """
    queries: dict[int, torch.Tensor] = {}
    get_interface = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_recording(*args: Any, **kwargs: Any) -> Any:
        attend = get_interface(*args, **kwargs)

        @functools.wraps(attend)
        def record(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
            scaling = options.get("scaling")
            factor = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5
            if (layer := getattr(module, "layer_idx", None)) is not None:
                queries[layer] = query if factor == 1.0 else query * factor
            return attend(module, query, *rest, **options)

        return record

    ALL_ATTENTION_FUNCTIONS.get_interface = get_recording  # type: ignore[method-assign]
    try:
        yield queries
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A model and samples to run it over.

    Attributes:
      model: on its device.
      indices: of the layers with a cache of their own.
      specs: theirs; only heads and sizes matter.
      samples: token ids.
      first_counted: the first position whose predictions count.
    """

    model: Any
    indices: Sequence[int]
    specs: Sequence[AttentionSpec]
    samples: Sequence[Sequence[int]]
    first_counted: int = 0

    def stored(
        self, key_rotation: Collection[int | str] = ()
    ) -> Iterator[tuple[list[list[jax.Array | np.ndarray]], torch.Tensor]]:
        """Yields what layers store of each sample, as `kvjax.calibrate` takes it, and the largest magnitudes.

        Keys of layers of `key_rotation` are rotated. Magnitudes are `[num_layers, 2]`.
        """
        lend = lender(self.model.device)
        for number in range(len(self.samples)):
            states, largest = self._run(number, key_rotation)
            yield [[lend(x.transpose(1, 2).contiguous()) for x in pair] for pair in states], largest

    def attended(self) -> Iterator[list[list[jax.Array | np.ndarray]]]:
        """Yields what each layer's attention gets, for each sample, as `kvjax.choose_layer_dtypes` takes it."""
        lend = lender(self.model.device)
        for number in range(len(self.samples)):
            with recorded_queries() as queries:
                states, _ = self._run(number)
            if missing := [index for index in self.indices if index not in queries]:
                raise KVCacheValueError(
                    f"model: got no query of layer {missing[0]}, expected attention by transformers' interface"
                )
            yield [
                [lend(x[0].transpose(0, 1).contiguous()) for x in (queries[index], *pair)]
                for index, pair in zip(self.indices, states, strict=True)
            ]

    def _run(
        self, number: int, key_rotation: Collection[int | str] = ()
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        with torch.no_grad():
            cache = RecordingCache(self.model.config)
            run(self.model, self.samples[number], cache, num_logits=1)
            states = []
            for index, spec in zip(self.indices, self.specs, strict=True):
                keys, values = _states_of(cache.stored, index, spec)
                states.append((hadamard_transform(keys) if index in key_rotation else keys, values))
            largest = _largest_of(states)
        _check_finite(number, self.indices, self.specs, largest)
        return states, largest


def run(model: Any, ids: Sequence[int], cache: DynamicCache, num_logits: int | None = None) -> torch.Tensor:
    """The logits of a sample `[tokens, vocabulary]`, of the last `num_logits` tokens if the model has that option."""
    has_option = "logits_to_keep" in inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": num_logits} if has_option and num_logits is not None else {}
    options |= {"use_cache": True, CACHE_ARGUMENT: cache}
    logits: torch.Tensor = model(input_ids=torch.tensor([ids], device=model.device), **options).logits[0]
    return logits


def _states_of(
    stored: dict[int, list[tuple[torch.Tensor, torch.Tensor]]], index: int, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer stored, `[num_seqs, num_kv_heads, num_tokens, head_size]`.

    Keys and values, or latents and rope keys, which transformers stores as keys and values of one head.
    """
    if index not in stored:
        raise KVCacheValueError(
            f"model: got no keys and values of layer {index}, expected them in transformers' cache as the configuration"
            " says"
        )
    keys, values = (torch.cat(parts, dim=2) for parts in zip(*stored[index], strict=True))
    sizes = spec.part_sizes if spec.is_mla else spec.head_sizes
    for kind, x, head_size in zip(_kinds_of(spec), (keys, values), sizes, strict=True):
        if x.shape[1] % spec.num_kv_heads or x.shape[3] != head_size:
            raise KVCacheValueError(
                f"model: got {kind} of layer {index} with {x.shape[1]} heads of size {x.shape[3]}, expected"
                f" {spec.num_kv_heads} of size {head_size} as its configuration says"
            )
    # Some models store each KV head once for every query head that reads it.
    repeats = keys.shape[1] // spec.num_kv_heads
    return keys[:, ::repeats], values[:, ::repeats]


def _kinds_of(spec: AttentionSpec) -> tuple[str, str]:
    return ("latents", "rope keys") if spec.is_mla else ("keys", "values")


def _largest_of(states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The largest magnitudes of what layers stored, `[num_layers, 2]`; 0 of rope keys without elements."""
    largest = [x.abs().amax() if x.numel() else x.new_zeros(()) for pair in states for x in pair]
    return torch.stack(largest).float().cpu().reshape(-1, 2)


def _check_finite(number: int, indices: Sequence[int], specs: Sequence[AttentionSpec], largest: torch.Tensor) -> None:
    for index, spec, of_layer in zip(indices, specs, largest.tolist(), strict=True):
        for kind, magnitude in zip(_kinds_of(spec), of_layer, strict=True):
            if not np.isfinite(magnitude):
                raise KVCacheValueError(
                    f"model: got {'NaN' if np.isnan(magnitude) else 'infinite'} {kind} of layer {index} for sample"
                    f" {number}, expected finite numbers, which a wider model dtype may give (float32)"
                )


def lender(device: torch.device) -> Callable[[torch.Tensor], jax.Array | np.ndarray]:
    """Returns a function from tensors to arrays: without a copy where JAX has the device, else on the host."""

    def on_host(x: torch.Tensor) -> np.ndarray:
        array: np.ndarray = x.float().numpy(force=True)
        return array

    try:
        to_jax(torch.zeros(1, device=device))
    except KVCacheValueError:
        return on_host
    return lambda x: to_jax(x if x.dtype in (torch.float16, torch.bfloat16) else x.float())
