"""How far a pretrained model's predictions are from those with an unquantized cache, by KV cache dtype and option.

Teacher-forced: a text is one step of `kvjax.attend`, whose queries read every key and value, their own included, from a
cache of the dtype. All else is float32. The reference is the same step over a float32 cache.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from absl.testing import absltest

import kvjax
from benchmarks import accuracy_table, accuracy_words, output
from benchmarks.accuracy_table import Row
from kvjax.demo import gguf_file, smollm2, text
from kvjax.demo.divergence import Divergence, diverge, summarize
from kvjax.demo.pretrained import Attended, Pretrained, step_of

DTYPES = output.define_dtypes(kvjax.STORED_KV_CACHE_DTYPES)
CHOOSE_BY = flags.DEFINE_enum_class(
    "choose_by", kvjax.ErrorMeasure.DIVERGENCE, kvjax.ErrorMeasure, "the error that chosen dtypes minimize"
)
BITS = flags.DEFINE_list("bits", ["5"], "budgets to choose layers' dtypes under, in bits of an element")
WINDOWS = output.define_numbers(
    "exact_windows",
    "tokens that stay exact beside NVFP4 with 4/6 block scales, and beside chosen dtypes (default: 64)",
    least=1,
)
POSITIONS = output.define_numbers("positions", "positions of RoPE that texts start at (default: 0, 6000)", least=0)
TEXTS = flags.DEFINE_integer("texts", 12, "texts, alternately documentation and code", lower_bound=1)
LISTS = flags.DEFINE_integer("lists", 16, "lists of words, given twice, for recall", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 512, "tokens of each", lower_bound=32)
SEED = flags.DEFINE_integer("seed", 0, "selects them", lower_bound=0)
MODEL = flags.DEFINE_string("model", None, "a GGUF file of a Llama, or a folder with one (default: SmolLM2-135M)")

MEASURED = (
    kvjax.KVCacheDType.FLOAT32,
    kvjax.KVCacheDType.BFLOAT16,
    kvjax.KVCacheDType.INT8_PER_TOKEN_HEAD,
    kvjax.KVCacheDType.FP8_E4M3,
    kvjax.KVCacheDType.INT8_K_NVFP4_4OVER6_V,
    kvjax.KVCacheDType.INT8_K_NVFP4_V,
    kvjax.KVCacheDType.FP8_K_NVFP4_4OVER6_V,
    kvjax.KVCacheDType.FP8_K_NVFP4_V,
    kvjax.KVCacheDType.NVFP4_4OVER6,
    kvjax.KVCacheDType.NVFP4,
)
CHOICES = (
    kvjax.KVCacheDType.INT8_K_NVFP4_4OVER6_V,
    kvjax.KVCacheDType.FP8_K_NVFP4_4OVER6_V,
    kvjax.KVCacheDType.NVFP4_4OVER6,
)
"""Dtypes that layers' are chosen of."""

ROTATED = (
    kvjax.KVCacheDType.FP8_E4M3,
    kvjax.KVCacheDType.FP8_K_NVFP4_4OVER6_V,
    kvjax.KVCacheDType.FP8_K_NVFP4_V,
)
"""Dtypes that are measured with all layers' keys rotated, too."""

WINDOWED = kvjax.KVCacheDType.NVFP4_4OVER6
"""The dtype that exact windows are measured with."""

SCHEMA = 2
BYTES_PER_TOKEN = 8
"""Of text to encode for a token that is wanted."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """int32 `[tokens]` each. `repeated`: lists of words, then the same again. `calibration`: other text."""

    plain: list[np.ndarray]
    repeated: list[np.ndarray]
    calibration: list[np.ndarray]


def sizes() -> tuple[int, int, int]:
    """Returns the number of texts, of word lists, and of the tokens of each."""
    return (1, 2, 32) if output.SMOKE.value else (TEXTS.value, LISTS.value, TOKENS.value)


@functools.cache
def model_file() -> gguf_file.GGUFModel:
    path = Path(MODEL.value) if MODEL.value else smollm2.fetch()
    if path.is_dir():
        [path] = path.rglob("*.gguf")
    return gguf_file.read(path)


def texts() -> Texts:
    """Returns documentation and code of this Python, which every machine with this version of it has."""
    rng, encode = np.random.default_rng(SEED.value), model_file().tokenizer.encode
    root = text.standard_library()
    _, held_out = text.split(text.source_files(root))
    topics = importlib.import_module("pydoc_data.topics").topics
    documentation = "\n".join(topics[name] for name in sorted(topics))
    sources = [np.frombuffer(documentation.encode(), np.uint8), text.read(root, held_out)]
    num_texts, num_lists, num_tokens = sizes()
    plain = []
    for number in range(num_texts + 2):
        [piece] = text.excerpts(sources[number % 2], [num_tokens * BYTES_PER_TOKEN], rng)
        plain.append(np.asarray(encode(piece.tobytes().decode(errors="replace")).ids[:num_tokens], np.int32))
    repeated = accuracy_words.repeated(
        accuracy_words.running_words(documentation),
        lambda words: encode(words, add_special_tokens=False).ids,  # a list begins with a word, both times
        num_lists=num_lists,
        num_tokens=num_tokens,
        seed=SEED.value,
    )
    return Texts(plain[2:], repeated, plain[:2])


class Request(NamedTuple):
    """What to measure.

    Attributes:
      dtype: a request for `kvjax.resolve_layer_specs`.
      exact_window: the size of an exact window beside the pages.
      key_rotation: layers with rotated keys.
    """

    dtype: Any
    exact_window: int | None = None
    key_rotation: tuple[Any, ...] = ()


FLOAT32 = Request(kvjax.KVCacheDType.FLOAT32)


def run(
    model: Pretrained, request: Request, tokens: np.ndarray, position: int, samples: Sequence[Sequence[Attended]]
) -> tuple[jax.Array, list[Attended]]:
    step, num_blocks = step_of([len(tokens)])
    caches = model.allocate(request.dtype, num_blocks, samples, request.key_rotation)
    return model.run(
        tokens,
        step,
        caches,
        first_position=position,
        exact_window=request.exact_window,
        key_rotation=request.key_rotation,
    )


def choose(
    model: Pretrained, position: int, texts: list[np.ndarray], samples: list[list[Attended]]
) -> Callable[[float, bool], Request]:
    """Returns a function that chooses layers' dtypes for bits of an element, with rotated keys or without.

    By divergence, the error is that of predictions in the second half of a text that is given twice, which recall the
    first: as `kvjax calibrate --choose-by divergence --twice` measures it.
    """
    every, half = model.kv_config.layer_indices, len(texts[0]) // 2
    twice = [np.concatenate([text[:half]] * 2) for text in texts]

    def logits(tokens: np.ndarray, request: Request) -> jax.Array:
        return run(model, request, tokens, position, samples)[0][half:-1]

    @functools.cache
    def references() -> list[jax.Array]:
        return [logits(tokens, FLOAT32) for tokens in twice]

    @functools.cache
    def error_of(layer: int | str, dtype: kvjax.KVCacheDType, rotates: bool) -> float:
        output.say(f"position {position}, layer {layer}, {dtype.value}{', keys rotated' if rotates else ''}")
        alone = Request({each: dtype if each == layer else FLOAT32.dtype for each in every}, None, (layer,) * rotates)
        pairs = zip(twice, references(), strict=True)
        parts = [diverge(logits(tokens, alone), reference, tokens[half + 1 :]) for tokens, reference in pairs]
        return max(summarize(parts).kl, 0.0)  # which rounding may make negative

    by_divergence = CHOOSE_BY.value is kvjax.ErrorMeasure.DIVERGENCE
    by: dict[str, Any] = {"samples": None, "error_of": error_of} if by_divergence else {"samples": samples}

    def chosen(bits: float, rotates: bool) -> Request:
        found = kvjax.choose_layer_dtypes(model.kv_config, dtypes=CHOICES, bits=bits, key_rotation=rotates, **by)
        return Request(found.dtypes, key_rotation=found.key_rotation)

    return chosen


def requests(layers: tuple[Any, ...], chosen: Callable[[float, bool], Request]) -> dict[str, Request]:
    """Returns what to measure of a model with these `layers`, by name."""
    dtypes = DTYPES.value or list(MEASURED)
    wanted = {dtype.value: Request(dtype) for dtype in dtypes}
    for dtype in ROTATED:
        if dtype in dtypes:
            wanted[f"{dtype.value}, keys rotated"] = Request(dtype, key_rotation=layers)
    windows = WINDOWS.value or (64,)
    for size in windows:
        wanted[f"{WINDOWED.value}, {size} exact"] = Request(WINDOWED, size)
    for bits in map(float, BITS.value):
        for rotates in (False, True):
            name = f"chosen, at most {bits:g} bits" + (", keys rotated" if rotates else "")
            wanted[name] = request = chosen(bits, rotates)
            for size in windows:
                wanted[f"{name}, {size} exact"] = request._replace(exact_window=size)
    return wanted


def measure(model: Pretrained, position: int, of: Texts, samples: list[list[Attended]]) -> list[Row]:
    """Returns a row for each request, with scales and choices by `samples`."""
    wanted = requests(model.kv_config.layer_indices, choose(model, position, of.calibration, samples))
    plain: dict[str, list[Divergence]] = {name: [] for name in wanted}
    recall: dict[str, list[Divergence]] = {name: [] for name in wanted}
    for results, texts_of, first_share in ((plain, of.plain, 0), (recall, of.repeated, 0.5)):
        for number, tokens in enumerate(texts_of):
            predicted = slice(int(first_share * len(tokens)), len(tokens) - 1)
            reference = run(model, FLOAT32, tokens, position, ())[0][predicted]
            for name, request in wanted.items():
                logits = run(model, request, tokens, position, samples)[0][predicted]
                results[name].append(diverge(logits, reference, tokens[predicted.start + 1 :]))
                shown = summarize(results[name][-1:])
                output.say(f"position {position}, text {number}, {name}: {accuracy_table.divergence(shown)}")
    return [
        Row(name, bits_of(model, request.dtype), position, summarize(plain[name]), summarize(recall[name]))
        for name, request in wanted.items()
    ]


def bits_of(model: Pretrained, dtype: Any) -> float:
    """Returns the mean bits of an element in pages, stored scales included."""
    specs = kvjax.resolve_layer_specs(model.kv_config, dtype)
    elements = sum(spec.num_kv_heads * sum(spec.head_sizes) for spec in specs)
    return 8 * sum(spec.bytes_per_token for spec in specs) / elements


def environment() -> dict[str, str]:
    where = output.environment("benchmarks.accuracy")
    return where | {"model": MODEL.value or smollm2.FILE_NAME, "kvjax": kvjax.__version__}


class AccuracyBenchmark(absltest.TestCase):
    def test_divergence(self) -> None:
        model, of = Pretrained.from_gguf(model_file()), texts()
        rows = []
        for position in POSITIONS.value or (0, 6000):
            samples = [run(model, FLOAT32, tokens, position, ())[1] for tokens in of.calibration]
            rows += measure(model, position, of, samples)
        for row in rows:
            assert np.isfinite([*row.text, *row.recall]).all(), row
        document = {
            "schema": SCHEMA,
            "program": "benchmarks.accuracy",
            "environment": environment(),
            **dict(zip(("texts", "lists", "tokens"), sizes(), strict=True)),
            "rows": [
                dataclasses.asdict(row) | {"text": row.text._asdict(), "recall": row.recall._asdict()} for row in rows
            ],
        }
        shown = accuracy_table.as_markdown(document)
        print(f"\n{shown}", flush=True)
        if output.JSON.value:
            Path(output.JSON.value).write_text(json.dumps(document, indent=1) + "\n")
        if output.MARKDOWN.value:
            Path(output.MARKDOWN.value).write_text(f"{shown}\n")


if __name__ == "__main__":
    absltest.main()
