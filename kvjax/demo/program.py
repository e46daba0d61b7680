"""Runs the whole demo: loads the model, serves held-out text in every dtype, then generates a continuation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

import kvjax
from kvjax.demo import text, weights
from kvjax.demo.evaluate import Model, Row, dense_reference, evaluate
from kvjax.demo.samples import Samples
from kvjax.demo.scales import ScalesRow, compare_scales
from kvjax.demo.serve import Request, ServeConfig, Served, follow, pool_size, sample, serve

BLOCK_SIZE = 16
MAX_RUNNING = 6
PREFILL_CHUNK = 64
CALIBRATION_SHAPE = (8, 512)  # samples of the training part, bytes each
TEMPERATURE = 0.5


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """The scope of a run: `sequences` held-out texts of up to `tokens` bytes, in each of `dtypes`.

    With `scales`, also every way to find scales (`compare_scales`), over the same text.
    """

    dtypes: Sequence[kvjax.KVCacheDType] = kvjax.STORED_KV_CACHE_DTYPES
    sequences: int = 10
    tokens: int = 384
    seed: int = 0
    scales: bool = False


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A held-out prompt, and the model's continuation."""

    dtype: str
    prompt: str
    text: str


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of a run. All bits per byte are of the same held-out bytes. `scales` is empty unless asked for."""

    device: str
    training: Mapping[str, str]
    sequences: int
    tokens: int
    unigram_bits_per_byte: float
    dense_float32_bits_per_byte: float
    rows: Sequence[Row]
    scales: Sequence[ScalesRow]
    continuation: Continuation


def run(options: DemoOptions) -> Result:
    """Runs the demo; shows progress on stderr if that is a terminal.

    Raises:
      FileNotFoundError: this Python lacks its standard library's sources.
    """
    loaded = weights.load()
    training, held_out = _read_text()
    rng = np.random.default_rng(options.seed)
    model = _calibrated(loaded, training, rng)
    work = _work(held_out, options, rng)
    config = ServeConfig(MAX_RUNNING, PREFILL_CHUNK, options.tokens)
    reference = dense_reference(model, work.texts, options.tokens)
    total = len(options.dtypes) * sum(len(one) - 1 for one in work.texts) + options.tokens - 1
    rows = []
    with tqdm(total=total, unit=" tokens", disable=None, leave=False) as bar:
        for dtype in options.dtypes:
            bar.set_description(dtype.value)
            rows.append(
                evaluate(model, dtype, work.requests, reference, config, block_size=BLOCK_SIZE, on_tokens=bar.update)
            )
        scales: list[ScalesRow] = []
        if options.scales:
            bar.set_description("scales")
            scales = compare_scales(model, options.dtypes, work.texts, reference, options.tokens, BLOCK_SIZE)
        bar.set_description(f"{dtype.value}, generating")
        pool = kvjax.BlockPool(pool_size(work.requests, config, BLOCK_SIZE), BLOCK_SIZE)
        engine = model.engine(dtype, pool.num_blocks, BLOCK_SIZE)
        (written,) = serve(engine, [work.continuation], pool, config, bar.update)

    return Result(
        device=jax.devices()[0].device_kind,
        training=loaded.training,
        sequences=len(work.texts),
        tokens=sum(len(one) for one in work.texts),
        unigram_bits_per_byte=text.unigram_bits_per_byte(training, np.concatenate([one[1:] for one in work.texts])),
        dense_float32_bits_per_byte=reference.bits_per_byte,
        rows=rows,
        scales=scales,
        continuation=Continuation(rows[-1].dtype, *_split_text(written, work.continuation)),
    )


def _read_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the training and the held-out part of the standard library."""
    root = text.standard_library()
    training, held_out = text.split(text.source_files(root))
    return text.read(root, training), text.read(root, held_out)


def _calibrated(loaded: weights.Weights, training: np.ndarray, rng: np.random.Generator) -> Model:
    num_samples, length = CALIBRATION_SHAPE
    samples = jnp.asarray(text.excerpts(training, [length] * num_samples, rng), jnp.int32)
    return Model(loaded.config, loaded.params, Samples(loaded.config, loaded.params, samples))


@dataclasses.dataclass(frozen=True)
class _Work:
    texts: Sequence[np.ndarray]
    requests: Sequence[Request]
    continuation: Request


def _work(held_out: np.ndarray, options: DemoOptions, rng: np.random.Generator) -> _Work:
    """Returns texts of many lengths in random order, each a quarter to three quarters prompt, and one to continue."""
    lengths = np.linspace(options.tokens, options.tokens // 3, options.sequences).astype(int)
    texts = text.excerpts(held_out, rng.permutation(lengths).tolist(), rng)
    shares = rng.uniform(0.25, 0.75, len(texts))
    requests = [follow(one, int(share * len(one))) for one, share in zip(texts, shares, strict=True)]
    (prompt,) = text.excerpts(held_out, [options.tokens // 2], rng)
    written = options.tokens - len(prompt)
    return _Work(texts, requests, sample(prompt, written, temperature=TEMPERATURE, seed=options.seed))


def _split_text(served: Served, request: Request) -> tuple[str, str]:
    """Returns the prompt and its continuation, as text."""
    parts = np.split(served.tokens.astype(np.uint8), [len(request.prompt)])
    prompt, written = (part.tobytes().decode(errors="replace") for part in parts)
    return prompt, written
