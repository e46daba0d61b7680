"""Decode scales and dtypes for a transformers model's cache, from what it computes of a text: `kvjax calibrate`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import kvjax
from kvjax import (
    CalibrationMethod,
    DTypeChoice,
    ErrorMeasure,
    KVCacheDType,
    KVCacheMemoryError,
    KVCacheValueError,
    KVCacheWarning,
    KVScales,
    ModelKVConfig,
    UnsupportedError,
)
from kvjax_torch.transformers import choosing
from kvjax_torch.transformers.choosing import Allowed as Allowed
from kvjax_torch.transformers.recording import Recorder

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

    `dtype`: of every layer, unless each gets one that is `allowed`. `length`: tokens of a sample, None for `LENGTH`, or
    fewer if the model takes fewer. `twice`: whether a sample is half as much text, and then the same again, of
    which predictions count for a choice by divergence.
    `num_samples`: None for as many as the text has, at most `MAX_SAMPLES`. `device`: None for a GPU if there is one.
    `model_dtype`: None for the checkpoint's. The others are those of `kvjax.calibrate`.
    """

    dtype: KVCacheDType
    allowed: Allowed | None = None
    method: CalibrationMethod = CalibrationMethod.AMAX
    percentile: float = 99.99
    per_head: bool = False
    length: int | None = None
    twice: bool = False
    num_samples: int | None = None
    device: str | None = None
    model_dtype: str | None = None

    @property
    def dtypes(self) -> tuple[KVCacheDType, ...]:
        """Those that a layer may get."""
        return (self.dtype,) if self.allowed is None else self.allowed.dtypes


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

    Shows progress if on a terminal. A choice runs the model over the samples again, as often as `choosing` says.

    The model's code is transformers' own (no remote code), its weights are safetensors.

    Args:
      name: a folder, or the name of a model on the Hugging Face hub.
      text: a file in UTF-8. Each sample is `length` consecutive tokens, of which the first is the tokenizer's token for
        the beginning of a sequence, if it adds one.
      options: what to calibrate.

    Raises:
      KVCacheValueError: a model that transformers cannot load, or not all weights of it, or of which kvjax cannot read
        the cache; a text that is empty, too short, or not UTF-8; a sample longer than the model takes; keys or values
        that are not finite; as `kvjax.calibrate` and `kvjax.choose_layer_dtypes`; for a choice, a model whose attention
        does not take transformers' interface.
      UnsupportedError: a choice for a model of multi-head latent attention.
      KVCacheMemoryError: the device's memory does not suffice.
      OSError: the text cannot be read.
    """
    device = _device(options.device)
    _check_name(name)
    with _errors_of("model", name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    stated = ModelKVConfig.from_hf_config(config.to_dict(), model_dtype=options.model_dtype)
    if any(layer.is_mla for layer in stated.layers):
        _check_for_latents(options)
    specs, *_ = [kvjax.resolve_layer_specs(stated, dtype) for dtype in options.dtypes]
    if options.per_head and not _take_head_scales(options.dtypes):
        raise KVCacheValueError("per_head: got True, expected False: no layer's dtype takes a scale per KV head")
    choice: DTypeChoice | None = None
    length = _length(options.length, config.get_text_config(decoder=True))
    with _errors_of("model", name):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    samples = _samples(tokenizer, text, length, options)
    try:
        model = _load(name, options, device)
        _check_vocabulary(model, samples)
        first_counted = (len(samples[0]) + 1) // 2 if options.twice else 0
        recorder = Recorder(model, stated.layer_indices, specs, samples, first_counted)
        if options.allowed is not None:
            choice = choosing.choose(recorder, stated, options.allowed)
            recorder = dataclasses.replace(recorder, specs=kvjax.resolve_layer_specs(stated, choice.dtypes))
            if options.per_head and not _take_head_scales(spec.dtype for spec in recorder.specs):
                message = "per_head: got True, but no layer's chosen dtype takes a scale per KV head; ignored"
                warnings.warn(message, KVCacheWarning, stacklevel=2)
                options = dataclasses.replace(options, per_head=False)
        layers = _calibrate(recorder, options, choice.key_rotation if choice else ())
    except torch.OutOfMemoryError as error:
        raise KVCacheMemoryError(
            f"device: {device} is out of memory for the model and {length} tokens, expected a smaller length"
        ) from error
    return Calibration(layers, len(samples), len(samples[0]), str(device), choice)


def _calibrate(
    recorder: Recorder, options: Options, key_rotation: Collection[int | str]
) -> tuple[CalibratedLayer, ...]:
    """Calibrates layers with what they store; keys of layers of `key_rotation` are rotated as the model will."""
    indices, specs = recorder.indices, recorder.specs
    amax = torch.zeros(len(specs), 2, dtype=torch.float32)
    passes = 2 if options.method is CalibrationMethod.MSE else 1

    def batches() -> Iterator[list[list[jax.Array | np.ndarray]]]:
        for states, largest in recorder.stored(key_rotation):
            amax.copy_(torch.maximum(amax, largest))
            bar.update()
            yield states

    with tqdm(total=passes * len(recorder.samples), unit=" samples", disable=None, leave=False) as bar:
        scales = kvjax.calibrate(
            specs,
            batches,
            method=options.method,
            percentile=options.percentile,
            per_head=options.per_head,
            layer_indices=indices,
        )
    return tuple(
        CalibratedLayer(index, spec.dtype, spec.sliding_window, k_amax, v_amax, of_layer, spec.is_mla)
        for index, spec, (k_amax, v_amax), of_layer in zip(indices, specs, amax.tolist(), scales, strict=True)
    )


def _take_head_scales(dtypes: Iterable[KVCacheDType]) -> bool:
    """Whether keys or values of any of the dtypes take a scale for each KV head."""
    return any(part.info.takes_head_scales for dtype in dtypes for part in dtype.parts)


def _load(name: str, options: Options, device: torch.device) -> Any:
    with _errors_of("model", name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=options.model_dtype or "auto",
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, found = loaded
    _check_loaded(name, model, options, found)
    with _errors_of("model", name):
        return model.to(device)


def _check_loaded(name: str, model: Any, options: Options, found: Mapping[str, Any]) -> None:
    """Refuses weights that transformers only warns of: random ones, and quantized ones without their scales."""
    missing = {*found["missing_keys"]}
    if options.allowed is None or options.allowed.by is not ErrorMeasure.DIVERGENCE:  # predictions are not read
        head = model.get_output_embeddings()
        of_head = {id(parameter) for parameter in head.parameters()} if head is not None else set()
        missing -= {key for key, parameter in model.named_parameters() if id(parameter) in of_head}
    if missing:
        raise KVCacheValueError(
            f"model: got {name!r} without the weights {_some(missing)}, expected all that transformers'"
            f" {type(model).__name__} has"
        )
    unread = {*found["unexpected_keys"]}  # also of modules that transformers drops, with their weights
    of_weights = {key: re.sub(r"(?<=weight)_scale(_inv|_2)?$", "", key) for key in unread}
    if scales := [key for key, weight in of_weights.items() if weight != key and weight not in unread]:
        raise KVCacheValueError(
            f"model: got {name!r} with quantized weights, whose scales {_some(scales)} transformers does not read;"
            " expected weights in 16 or 32 bits, or of a quantization that transformers loads"
        )


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return repr(first) + (f" and {len(rest):,} more" if rest else "")


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with _errors_of("device", device):
        return torch.zeros(1, device=device).device


def _check_name(name: str) -> None:
    # transformers asks the hub for any name that is not a folder.
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


def _samples(tokenizer: Any, text: Path, length: int, options: Options) -> list[list[int]]:
    """The first samples of a text, `length` tokens each."""
    encode = functools.partial(tokenizer, add_special_tokens=False, verbose=False)
    begin = [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]
    times, num_samples = 2 if options.twice else 1, options.num_samples
    of_text = (length - len(begin)) // times
    if of_text < 1:
        expected = f"more than the tokenizer's {len(begin)} special token" + (" and one, twice" if times > 1 else "")
        raise KVCacheValueError(f"length: got {length}, expected {expected}")
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
    return [begin + tokens[start : start + of_text] * times for start in starts]


def _check_for_latents(options: Options) -> None:
    if options.allowed is not None:
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
