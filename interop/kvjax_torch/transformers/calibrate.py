"""Decode scales and dtypes for a transformers model's cache, from what it computes of a text: `kvjax calibrate`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvjax
from kvjax import (
    AttentionSpec,
    CalibrationMethod,
    DTypeChoice,
    KVCacheDType,
    KVCacheMemoryError,
    KVCacheValueError,
    KVScales,
    ModelKVConfig,
    UnsupportedError,
)
from kvjax_torch.hadamard import hadamard_transform
from kvjax_torch.sharing.borrow import to_jax
from kvjax_torch.transformers.attention import CACHE_ARGUMENT

LENGTH = 2048
"""Tokens of a sample, unless the model takes fewer."""

MAX_SAMPLES = 512
"""Samples of a long text, unless more are asked for."""

CHARACTERS = 2**20
"""The text is read and tokenized in pieces of this many characters."""

MAX_MESSAGE = 500
"""Most characters of another library's message."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to calibrate, and from which samples.

    `dtype`: of every layer, unless `choose_from` has some: then each layer gets the one of these that
    `kvjax.choose_layer_dtypes` chooses for at most `bits`, with rotated keys where they are better if `key_rotation`.
    `length`: tokens of a sample, None for `LENGTH`, or fewer if
    the model takes fewer. `num_samples`: None for as many as the text has, at most `MAX_SAMPLES`. `device`: None for a
    GPU if there is one. `model_dtype`: None for the checkpoint's. The others are those of `kvjax.calibrate`.
    """

    dtype: KVCacheDType
    choose_from: tuple[KVCacheDType, ...] = ()
    bits: float | None = None
    key_rotation: bool = False
    method: CalibrationMethod = CalibrationMethod.AMAX
    percentile: float = 99.99
    per_head: bool = False
    length: int | None = None
    num_samples: int | None = None
    device: str | None = None
    model_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class CalibratedLayer:
    """What was found of a layer: its index in the model, its dtype, its largest magnitudes and its scales.

    `k_amax` and `v_amax` are of keys and values, or of latents and rope keys if `is_mla`. The one scale of latents is
    `k_scale`.
    """

    index: int
    dtype: KVCacheDType
    sliding_window: int | None
    k_amax: float
    v_amax: float
    scales: KVScales
    is_mla: bool = False

    @property
    def scaled(self) -> tuple[bool, bool]:
        """Whether `k_scale` and `v_scale` are scales of the layer's dtype."""
        keys, values = self.dtype.parts
        return keys.takes_scale, values.takes_scale and not self.is_mla


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The layers that have a cache of their own, and what they were calibrated from; `choice` of their dtypes."""

    layers: tuple[CalibratedLayer, ...]
    num_samples: int
    length: int
    device: str
    choice: DTypeChoice | None = None


def calibrate_model(name: str, text: Path, options: Options) -> Calibration:
    """Runs a model over samples of a text and computes the scales of its cache, and chooses its dtypes if asked to.

    Shows progress if on a terminal. A choice reads the samples twice for each dtype, with rotated keys four times, and
    runs the model each time.

    The model's code is transformers' own (no remote code), its weights are safetensors.

    Args:
      name: a folder, or the name of a model on the Hugging Face hub.
      text: a file in UTF-8. Each sample is `length` consecutive tokens, of which the first is the tokenizer's token for
        the beginning of a sequence, if it adds one.
      options: what to calibrate.

    Raises:
      KVCacheValueError: a model that transformers cannot load, or of which kvjax cannot read the cache; a text that is
        empty, too short, or not UTF-8; a sample longer than the model takes; keys or values that are not finite; as
        `kvjax.calibrate` and `kvjax.choose_layer_dtypes`; for a choice, a model whose attention does not take
        transformers' interface.
      UnsupportedError: a choice for a model of multi-head latent attention.
      KVCacheMemoryError: the device's memory does not suffice.
      OSError: the text cannot be read.
    """
    device = _device(options.device)
    _check_name(name)
    with _errors_of("model", name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    stated = ModelKVConfig.from_hf_config(config.to_dict(), model_dtype=options.model_dtype)
    specs = kvjax.resolve_layer_specs(stated, options.dtype)
    if any(spec.is_mla for spec in specs):
        _check_for_latents(options)
    choice: DTypeChoice | None = None
    length = _length(options.length, config.get_text_config(decoder=True))
    with _errors_of("model", name):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    samples = _samples(tokenizer, text, length, options.num_samples)
    try:
        model = _load(name, options.model_dtype, device)
        _check_vocabulary(model, samples)
        if options.choose_from:
            choice = _choose(model, stated, specs, samples, options)
            specs = kvjax.resolve_layer_specs(stated, choice.dtypes)
        layers = _calibrate(model, stated.layer_indices, specs, samples, options, choice.key_rotation if choice else ())
    except torch.OutOfMemoryError as error:
        raise KVCacheMemoryError(
            f"device: {device} is out of memory for the model and {length} tokens, expected a smaller length"
        ) from error
    return Calibration(layers, len(samples), length, str(device), choice)


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

    Multiplied so that softmax's scale is `head_size ** -0.5`, whatever the model's is.
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


def _choose(
    model: Any,
    stated: ModelKVConfig,
    specs: Sequence[AttentionSpec],
    samples: Sequence[Sequence[int]],
    options: Options,
) -> DTypeChoice:
    """Chooses each layer's dtype by the error of its attention."""
    run, lend = _forward(model), _lender(model.device)
    indices = stated.layer_indices

    def sequences() -> Iterator[list[list[jax.Array | np.ndarray]]]:
        for number, ids in enumerate(samples):
            with torch.no_grad(), recorded_queries() as queries:
                stored = run(torch.tensor([ids], device=model.device))
                states = [_states(stored, index, spec) for index, spec in zip(indices, specs, strict=True)]
                largest = _largest(states)
            _check_finite(number, indices, specs, largest)
            if missing := [index for index in indices if index not in queries]:
                raise KVCacheValueError(
                    f"model: got no query of layer {missing[0]}, expected attention by transformers' interface"
                )
            bar.update()
            yield [
                [lend(x[0].transpose(0, 1).contiguous()) for x in (queries[index], *pair)]
                for index, pair in zip(indices, states, strict=True)
            ]

    total = (4 if options.key_rotation else 2) * len(dict.fromkeys(options.choose_from)) * len(samples)
    with tqdm(total=total, unit=" samples", desc="dtypes", disable=None, leave=False) as bar:
        return kvjax.choose_layer_dtypes(
            stated, sequences, options.choose_from, bits=options.bits, key_rotation=options.key_rotation
        )


def _calibrate(
    model: Any,
    indices: Sequence[int],
    specs: Sequence[AttentionSpec],
    samples: Sequence[Sequence[int]],
    options: Options,
    key_rotation: Collection[int | str],
) -> tuple[CalibratedLayer, ...]:
    """Calibrates layers with what they store, keys of layers of `key_rotation` as the model will rotate them."""
    amax = torch.zeros(len(specs), 2)
    run = _forward(model)
    lend = _lender(model.device)
    passes = 2 if options.method is CalibrationMethod.MSE else 1

    def batches() -> Iterator[list[list[jax.Array | np.ndarray]]]:
        for number, ids in enumerate(samples):
            with torch.no_grad():
                stored = run(torch.tensor([ids], device=model.device))
                states = [
                    (hadamard_transform(keys) if index in key_rotation else keys, values)
                    for index, spec in zip(indices, specs, strict=True)
                    for keys, values in [_states(stored, index, spec)]
                ]
                largest = _largest(states)
            _check_finite(number, indices, specs, largest)
            amax.copy_(torch.maximum(amax, largest))
            bar.update()
            yield [[lend(x.transpose(1, 2).contiguous()) for x in pair] for pair in states]

    with tqdm(total=passes * len(samples), unit=" samples", disable=None, leave=False) as bar:
        scales = kvjax.calibrate(
            specs, batches, method=options.method, percentile=options.percentile, per_head=options.per_head
        )
    return tuple(
        CalibratedLayer(index, spec.dtype, spec.sliding_window, k_amax, v_amax, of_layer, spec.is_mla)
        for index, spec, (k_amax, v_amax), of_layer in zip(indices, specs, amax.tolist(), scales, strict=True)
    )


def _load(name: str, dtype: str | None, device: torch.device) -> Any:
    with _errors_of("model", name):
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype or "auto", trust_remote_code=False, use_safetensors=True
        )
        return model.to(device)


def _forward(model: Any) -> Callable[[torch.Tensor], dict[int, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Returns a function that runs the model over ids `[1, length]` and returns what each layer stored."""
    parameters = inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def run(ids: torch.Tensor) -> dict[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        cache = RecordingCache(model.config)
        model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **options)
        return cache.stored

    return run


def _states(
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
    for kind, x, head_size in zip(_kinds(spec), (keys, values), sizes, strict=True):
        if x.shape[1] % spec.num_kv_heads or x.shape[3] != head_size:
            raise KVCacheValueError(
                f"model: got {kind} of layer {index} with {x.shape[1]} heads of size {x.shape[3]}, expected"
                f" {spec.num_kv_heads} of size {head_size} as its configuration says"
            )
    # Some models store each KV head once for every query head that reads it.
    repeats = keys.shape[1] // spec.num_kv_heads
    return keys[:, ::repeats], values[:, ::repeats]


def _kinds(spec: AttentionSpec) -> tuple[str, str]:
    return ("latents", "rope keys") if spec.is_mla else ("keys", "values")


def _largest(states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The largest magnitudes of what layers stored, `[num_layers, 2]`; 0 of rope keys without elements."""
    largest = [x.abs().amax() if x.numel() else x.new_zeros(()) for pair in states for x in pair]
    return torch.stack(largest).float().cpu().reshape(-1, 2)


def _check_finite(number: int, indices: Sequence[int], specs: Sequence[AttentionSpec], largest: torch.Tensor) -> None:
    for index, spec, of_layer in zip(indices, specs, largest.tolist(), strict=True):
        for kind, magnitude in zip(_kinds(spec), of_layer, strict=True):
            if not np.isfinite(magnitude):
                raise KVCacheValueError(
                    f"model: got {'NaN' if np.isnan(magnitude) else 'infinite'} {kind} of layer {index} for sample"
                    f" {number}, expected finite numbers, which a wider model dtype may give (float32)"
                )


def _lender(device: torch.device) -> Callable[[torch.Tensor], jax.Array | np.ndarray]:
    """Returns what makes arrays of tensors: without a copy where JAX has the device, else on the host."""

    def on_host(x: torch.Tensor) -> np.ndarray:
        array: np.ndarray = x.float().numpy(force=True)
        return array

    try:
        to_jax(torch.zeros(1, device=device))
    except KVCacheValueError:
        return on_host
    return lambda x: to_jax(x if x.dtype in (torch.float16, torch.bfloat16) else x.float())


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with _errors_of("device", device):
        return torch.zeros(1, device=device).device


def _check_name(name: str) -> None:
    # transformers asks the hub for any name that is no folder.
    is_path = os.path.lexists(name) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    if is_path and not os.path.isdir(name):
        raise KVCacheValueError(
            f"model: got {name!r}, which is no folder, expected a model's folder, or its name on the Hugging Face hub"
        )


@contextlib.contextmanager
def _errors_of(what: str, value: str) -> Iterator[None]:
    """Turns whatever torch and transformers raise for a user's value into one line that names it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        raise KVCacheValueError(f"{what}: got {value!r}: {type(error).__name__}: {message}") from error


def _length(length: int | None, text_config: Any) -> int:
    longest = getattr(text_config, "max_position_embeddings", None)
    if length is None:
        return min(LENGTH, longest or LENGTH)
    if longest is not None and length > longest:
        raise KVCacheValueError(
            f"length: got {length}, expected at most {longest}, the model's max_position_embeddings"
        )
    return length


def _samples(tokenizer: Any, text: Path, length: int, num_samples: int | None) -> list[list[int]]:
    """The first samples of a text, `length` tokens each."""
    encode = functools.partial(tokenizer, add_special_tokens=False, verbose=False)
    begin = [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]
    of_text = length - len(begin)
    if of_text < 1:
        raise KVCacheValueError(f"length: got {length}, expected more than the tokenizer's {len(begin)} special token")
    wanted = of_text * (MAX_SAMPLES if num_samples is None else num_samples)
    tokens: list[int] = []
    try:
        with text.open(encoding="utf-8") as file:
            while len(tokens) < wanted and (piece := file.read(CHARACTERS)):
                tokens += encode(piece)["input_ids"]
    except UnicodeDecodeError as error:
        raise KVCacheValueError(f"text: got {str(text)!r}, which is not UTF-8 ({error.reason})") from None
    if not tokens:
        raise KVCacheValueError(f"text: got {str(text)!r}, which is empty, expected some text")
    if len(tokens) < of_text * (num_samples or 1):
        raise KVCacheValueError(
            f"text: got {str(text)!r} of {len(tokens):,} tokens, expected at least {of_text * (num_samples or 1):,} for"
            f" {num_samples or 1} samples of {length}: pass a longer text, a smaller length or fewer samples"
        )
    starts = range(0, min(len(tokens), wanted) - of_text + 1, of_text)
    return [begin + tokens[start : start + of_text] for start in starts]


def _check_for_latents(options: Options) -> None:
    if options.choose_from:
        raise UnsupportedError(
            "--choose: got a model of multi-head latent attention (MLA), expected --dtype: one dtype for all layers"
        )
    if options.per_head:
        raise KVCacheValueError("per_head: got True, expected False: latents (MLA) have one scale for all heads")


def _check_vocabulary(model: Any, samples: Sequence[Sequence[int]]) -> None:
    size, largest = model.get_input_embeddings().weight.shape[0], max(map(max, samples))
    if largest >= size:
        raise KVCacheValueError(
            f"model: got the token {largest} from the tokenizer, expected tokens below {size}, the model's vocabulary"
        )
