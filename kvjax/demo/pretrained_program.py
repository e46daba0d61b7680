"""Runs the demo with a pretrained model: text through caches of every dtype, then a chat reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

import kvjax
from kvjax.demo import text
from kvjax.demo.divergence import Summary, diverge, summarize
from kvjax.demo.pretrained import BLOCK_SIZE, Attended, Pretrained, step_of

if TYPE_CHECKING:  # needs the extra `smollm2`
    from kvjax.demo.gguf_file import GGUFModel

BYTES_PER_TOKEN = 8
"""Bytes of text to encode for each token that is wanted: code has less than half as many per token."""

QUESTION = "In one sentence: why does a language model keep the keys and values of earlier tokens?"
REPLY_TOKENS = 48
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class PretrainedOptions:
    """The scope of a run: `sequences` texts of `tokens` tokens, in each of `dtypes`."""

    dtypes: Sequence[kvjax.KVCacheDType] = kvjax.STORED_KV_CACHE_DTYPES
    sequences: int = 2
    tokens: int = 128
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class PretrainedRow:
    """A dtype's cost, and how far predictions are from those with a float32 cache."""

    dtype: str
    bytes_per_token: int
    tokens_per_gib: int
    divergence: Summary


@dataclasses.dataclass(frozen=True)
class PretrainedResult:
    """The results of a run. The reply is greedy, from a cache of the last dtype."""

    model: str
    device: str
    sequences: int
    tokens: int
    perplexity: float
    rows: Sequence[PretrainedRow]
    question: str
    reply: str


def run(name: str, file: GGUFModel, options: PretrainedOptions) -> PretrainedResult:
    """Runs the demo; shows progress on stderr if that is a terminal.

    Raises:
      FileNotFoundError: this Python lacks its standard library's sources.
    """
    model = Pretrained.from_gguf(file)
    sample, *texts = _texts(file, options)
    calls = 2 + len(options.dtypes)
    with tqdm(total=calls, unit=" runs", disable=None, leave=False) as bar:
        _, attended = _run(model, None, [sample], ())
        bar.update()
        reference, _ = _run(model, None, texts, ())
        bar.update()
        targets = np.concatenate([each[1:] for each in texts])
        predicts = np.concatenate([np.arange(len(each)) < len(each) - 1 for each in texts])
        rows = []
        for dtype in options.dtypes:
            bar.set_description(dtype.value)
            logits, _ = _run(model, dtype, texts, [attended])
            specs = kvjax.resolve_layer_specs(model.kv_config, dtype)
            rows.append(
                PretrainedRow(
                    dtype=dtype.value,
                    bytes_per_token=sum(spec.bytes_per_token for spec in specs),
                    tokens_per_gib=kvjax.max_tokens(specs, GIB),
                    divergence=summarize([diverge(logits[predicts], reference[predicts], targets)]),
                )
            )
            bar.update()
    return PretrainedResult(
        model=name,
        device=jax.devices()[0].device_kind,
        sequences=len(texts),
        tokens=sum(map(len, texts)),
        perplexity=summarize([diverge(reference[predicts], reference[predicts], targets)]).perplexity,
        rows=rows,
        question=QUESTION,
        reply=_reply(model, file, dtype, [attended]),
    )


def _texts(file: GGUFModel, options: PretrainedOptions) -> list[np.ndarray]:
    """Returns a text to calibrate with, then those to measure: int32 `[options.tokens]`."""
    root = text.standard_library()
    _, held_out = text.split(text.source_files(root))
    lengths = [options.tokens * BYTES_PER_TOKEN] * (options.sequences + 1)
    pieces = text.excerpts(text.read(root, held_out), lengths, np.random.default_rng(options.seed))
    encoded = [file.tokenizer.encode(piece.tobytes().decode(errors="replace")).ids for piece in pieces]
    return [np.asarray(ids[: options.tokens], np.int32) for ids in encoded]


def _run(
    model: Pretrained,
    dtype: kvjax.KVCacheDType | None,
    texts: Sequence[np.ndarray],
    samples: Sequence[Sequence[Attended]],
) -> tuple[jax.Array, list[Attended]]:
    """Runs whole texts; None for a cache that loses nothing."""
    step, num_blocks = step_of([*map(len, texts)])
    caches = model.allocate(dtype or kvjax.KVCacheDType.FLOAT32, num_blocks, samples)
    return model.run(np.concatenate(texts), step, caches)


def _reply(model: Pretrained, file: GGUFModel, dtype: kvjax.KVCacheDType, samples: Sequence[Sequence[Attended]]) -> str:
    """Returns the greedy reply to `QUESTION`: a step of the prompt, then one of each token."""
    tokenizer = file.tokenizer
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    new, end = tokenizer.encode(prompt).ids, tokenizer.token_to_id("<|im_end|>")
    pool = kvjax.BlockPool(-(-(len(new) + REPLY_TOKENS) // BLOCK_SIZE), BLOCK_SIZE)
    caches, sequence = model.allocate(dtype, pool.num_blocks, samples), pool.sequence()
    reply: list[int] = []
    while len(reply) < REPLY_TOKENS:
        pool.append([sequence], [len(new)])
        step = kvjax.StepMetadata.from_sequences([sequence], [len(new)], max_blocks=pool.num_blocks)
        logits, _ = model.run(np.asarray(new, np.int32), step, caches)
        new = [int(logits[-1].argmax())]
        if new == [end]:
            break
        reply += new
    return tokenizer.decode(reply)
