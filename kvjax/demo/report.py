"""Formats the demo's results: as Markdown tables with legends, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap

from kvjax.demo import pretrained_program, program, timing
from kvjax.demo.evaluate import Row
from kvjax.demo.scales import ScalesRow
from kvjax.table import markdown_table

_COLUMNS = (
    "dtype",
    "bytes/token",
    "tokens/GiB",
    "bits/byte",
    "greedy agreement",
    "largest attention error",
    "write us/token",
)


_SCALES_COLUMNS = ("dtype", "scales", "key error", "value error", "bits/byte", "greedy agreement")


_PRETRAINED_COLUMNS = ("dtype", "bytes/token", "tokens/GiB", "divergence", "greedy agreement", "perplexity")


def as_json(result: program.Result | pretrained_program.PretrainedResult) -> str:
    """Returns `result` as one JSON document, keyed by field names."""
    return json.dumps(dataclasses.asdict(result), indent=2)


def as_text(result: program.Result) -> str:
    """Returns the table with its legend, the same for scales if dtypes take them, and the continuation."""
    parts = [markdown_table(_COLUMNS, [_cells(row) for row in result.rows]), _legend(result)]
    if result.scales:
        parts += [
            markdown_table(_SCALES_COLUMNS, [_scales_cells(row) for row in result.scales], left=2),
            _SCALES_LEGEND,
        ]
    return "\n\n".join([*parts, _continuation(result.continuation)])


def pretrained_as_text(result: pretrained_program.PretrainedResult) -> str:
    """Returns the table of a pretrained model with its legend, and its reply."""
    rows = [
        (
            row.dtype,
            f"{row.bytes_per_token:,}",
            f"{row.tokens_per_gib:,}",
            f"{row.divergence.kl * 1e3:.2f} +- {row.divergence.kl_error * 1e3:.2f}",
            f"{row.divergence.agreement:.2%}",
            f"{row.divergence.perplexity:.3f}",
        )
        for row in result.rows
    ]
    legend = _filled(
        f"model: {result.model}. text: {result.sequences} pieces of standard library source, {result.tokens:,} tokens,"
        f" teacher forced on {result.device}; every key and value is read from the cache.",
        "divergence: Kullback-Leibler divergence from the predictions with a float32 cache, in thousandths of a nat,"
        " with its standard error.",
        "greedy agreement: positions whose likeliest next token is that with a float32 cache.",
        f"perplexity: of the text; {result.perplexity:.3f} with a float32 cache.",
        "scales, where a dtype takes them: one per layer for keys and one for values, by the largest magnitude in"
        " another piece.",
    )
    chat = "\n".join(
        [
            "--- question",
            result.question,
            f"--- reply by the model, from a {result.rows[-1].dtype} cache (greedy)",
            result.reply,
        ]
    )
    return "\n\n".join([markdown_table(_PRETRAINED_COLUMNS, rows), legend, chat])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.dtype,
        f"{row.bytes_per_token:,}",
        f"{row.tokens_per_gib:,}",
        f"{row.bits_per_byte:.4f}",
        f"{row.greedy_agreement:.2%}",
        f"{row.attention_error:.2g}",
        f"{row.write_seconds_per_token * 1e6:.2f}",
    )


def _scales_cells(row: ScalesRow) -> tuple[str, ...]:
    return (
        row.dtype,
        row.scales,
        f"{row.key_error:.3%}",
        f"{row.value_error:.3%}",
        f"{row.bits_per_byte:.4f}",
        f"{row.greedy_agreement:.2%}",
    )


def _legend(result: program.Result) -> str:
    row = result.rows[0]
    lines = (
        f"text: {result.sequences} pieces of held-out standard library source, {result.tokens:,} bytes, prefilled in"
        f" chunks of {program.PREFILL_CHUNK} and decoded {program.MAX_RUNNING} at a time on {result.device};"
        f" {row.blocks_reused} of {row.blocks} blocks of {program.BLOCK_SIZE} tokens were reused.",
        f"bits/byte: teacher forced; {result.dense_float32_bits_per_byte:.4f} in float32 without a cache,"
        f" {result.unigram_bits_per_byte:.4f} for byte frequencies alone.",
        "greedy agreement: positions whose likeliest next byte is that of float32 without a cache.",
        "largest attention error: over layers and positions, against float32 attention over the same keys and values"
        f" before they were stored; the outputs' root mean square is {row.attention_rms:.2g}.",
        f"write us/token: median wall time of a jitted, donated call that writes {timing.NUM_TOKENS} tokens to one"
        " layer, per token.",
        "scales, where a dtype takes them: one per layer for keys and one for values, by the largest magnitude in"
        f" {program.CALIBRATION_SHAPE[0]} x {program.CALIBRATION_SHAPE[1]} bytes of training text.",
    )
    return _filled(*lines)


def _filled(*lines: str) -> str:
    return "\n".join(textwrap.fill(line, 118, subsequent_indent="  ") for line in lines)


_SCALES_LEGEND = _filled(
    "scales: how kvjax.calibrate computed them from the same training text; the table above uses amax.",
    "1: not calibrated. other magnitudes: of an equivalent model whose keys are 64 times as large and whose values a"
    " 4096th, for which every calibration method gives the same results as here.",
    "key error, value error: root mean square error of the held-out text's stored keys and values, relative to theirs.",
    "bits/byte, greedy agreement: as above, with every key and value through the cache, each text at once.",
)


def _continuation(continuation: program.Continuation) -> str:
    return "\n".join(
        [
            f"--- held-out prompt, prefilled into a {continuation.dtype} cache",
            continuation.prompt,
            f"--- continuation by the model, from that cache (temperature {program.TEMPERATURE})",
            continuation.text,
        ]
    )
