"""Errors of attention of prompts by products in 16 bits and in fp8 (`query_quantization`), against float64.

    JAX_PLATFORMS=cpu python -m benchmarks.product_accuracy --texts=2

On a GPU the kernels attend, elsewhere models of their roundings. The error is the root mean square of the difference
over that of the results, of each layer; the table has the mean over layers and texts. Queries, keys and values are in
bfloat16, as a model has them, and so are results, which rounds these by 0.17%. "stored" is the difference from
attention over what the cache stores, "unquantized" from that over what was written; of the log-sum-exp the largest.

- Random: standard normal elements of 8,192 tokens, of which the last 64 are rows, heads of 128, scales of 1.
- A model: what each of its layers attends with where caches are float32, in the texts of `benchmarks.accuracy`, with
  scales of 1, and with those that `kvjax.calibrate` computes from other texts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import kvjax
from benchmarks import accuracy, output, workload
from kvjax.demo.pretrained import Pretrained
from kvjax.kernels.attention import Softmax
from kvjax.ops import softmax
from kvjax.table import markdown_table

MEASURED = (
    kvjax.KVCacheDType.FP8_E4M3,
    kvjax.KVCacheDType.FP8_K_NVFP4_V,
    kvjax.KVCacheDType.NVFP4_4OVER6,
    kvjax.KVCacheDType.NVFP4,
)
BLOCK_SIZE = 16
ONE = kvjax.KVScales(np.float32(1), np.float32(1))


class Layer(NamedTuple):
    """A layer's inputs of attention, bfloat16 `[tokens, heads, head_size]`; the query has the last ones' rows."""

    query: jax.Array
    key: jax.Array
    value: jax.Array

    @classmethod
    def of(cls, *arrays: Any) -> Layer:
        query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in arrays)
        return cls(query, key, value)


class Errors(NamedTuple):
    """Relative errors of a layer by products in 16 bits and in fp8, and the largest of the log-sum-exp, stored."""

    stored: float
    stored_in_fp8: float
    unquantized: float
    unquantized_in_fp8: float
    lse_in_fp8: float


def random_layer(factor: float) -> Layer:
    """Returns random tokens; `factor` multiplies the query."""
    num_tokens, num_rows = (64, 16) if output.SMOKE.value else (8192, 64)
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((count, 2, 128)) for count in (num_rows, num_tokens, num_tokens))
    return Layer.of(factor * query, key, value)


def spec_of(layer: Layer, dtype: kvjax.KVCacheDType) -> kvjax.FullAttentionSpec:
    _, num_kv_heads, head_size = layer.key.shape
    return kvjax.FullAttentionSpec(BLOCK_SIZE, num_kv_heads, head_size, layer.value.shape[2], dtype=dtype)


def errors(layer: Layer, dtype: kvjax.KVCacheDType, scales: kvjax.KVScales = ONE) -> Errors:
    spec = spec_of(layer, dtype)
    stored, in_16_bits, (in_fp8, lse) = _attended(*layer, *scales, spec=spec, by_kernels=workload.is_gpu())
    (of_stored, lse_of_stored), (of_written, _) = (in_float64(layer.query, *tokens) for tokens in (stored, layer[1:]))
    return Errors(
        relative(in_16_bits, of_stored),
        relative(in_fp8, of_stored),
        relative(in_16_bits, of_written),
        relative(in_fp8, of_written),
        float(np.abs(np.float64(lse) - lse_of_stored).max()),
    )


def relative(found: Any, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(np.float64(found) - wanted) / np.linalg.norm(wanted))


def in_float64(query: Any, keys: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns attention and its log-sum-exp."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    num_rows, num_heads, head_size = query.shape
    group = num_heads // keys.shape[1]
    is_later = np.arange(len(keys)) > np.arange(len(keys) - num_rows, len(keys))[:, None]
    out, lse = np.empty((num_rows, num_heads, values.shape[2])), np.empty((num_rows, num_heads))
    for head in range(num_heads):
        logits = query[:, head] @ keys[:, head // group].T / np.sqrt(head_size)
        logits[is_later] = -np.inf
        largest = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - largest)
        total = weights.sum(axis=1)
        out[:, head] = weights @ values[:, head // group] / total[:, None]
        lse[:, head] = largest[:, 0] + np.log(total)
    return out, lse


@functools.partial(jax.jit, static_argnames=("spec", "by_kernels"))
def _attended(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    k_scale: Any,
    v_scale: Any,
    *,
    spec: kvjax.FullAttentionSpec,
    by_kernels: bool,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns keys and values as stored, float32, and attention by products in 16 bits, and in fp8 with its lse."""
    num_tokens, num_blocks = len(key), -(-len(key) // BLOCK_SIZE)
    cache = kvjax.KVCache.allocate(spec, num_blocks, k_scale=k_scale, v_scale=v_scale)
    cache = kvjax.reshape_and_cache_flash(key, value, cache, jnp.arange(num_tokens))
    sequence = jnp.arange(num_blocks)[None], jnp.array([num_tokens])
    keys, values = (x[0, :num_tokens] for x in kvjax.gather_kv(cache, *sequence, dtype=jnp.float32))
    bounds = jnp.array([0, len(query)])
    attend: Any = functools.partial(
        kvjax.ragged_paged_attention,
        query,
        cache,
        *sequence,
        bounds,
        decode_q_len=0,
        implementation="mosaic" if by_kernels else "xla",
    )
    in_16_bits = attend() if by_kernels else _in_16_bits(query, (keys, values), (k_scale, v_scale), spec)
    return (keys, values), in_16_bits, attend(query_quantization=True, return_lse=True)


def _in_16_bits(
    query: jax.Array, tokens: tuple[jax.Array, jax.Array], scales: tuple[Any, Any], spec: kvjax.FullAttentionSpec
) -> jax.Array:
    """Returns what the kernels compute but for the order of sums: stored elements, query and weights in float16."""
    k_scale, v_scale = scales
    keys, values = ((x / scale).astype(jnp.float16)[None] for x, scale in zip(tokens, scales, strict=True))
    num_tokens = keys.shape[1]
    chunks = softmax.TokenChunks(1, lambda _: (keys, values, jnp.ones((1, num_tokens), bool)))
    positions = jnp.arange(num_tokens - len(query), num_tokens)[None]
    options: Any = Softmax(sm_scale=query.shape[2] ** -0.5 * k_scale)
    out, _ = softmax.attend(query.astype(jnp.float16)[None], chunks, positions, None, spec, options)
    result: jax.Array = (out[0] * v_scale).astype(query.dtype)
    return result


def samples() -> tuple[list[list[Layer]], list[list[Layer]]]:
    """Returns what a model's layers attend with in texts, and in others to compute scales from."""
    model, of = Pretrained.from_gguf(accuracy.model_file()), accuracy.texts()

    def layers_in(texts: Sequence[np.ndarray]) -> list[list[Layer]]:
        found = []
        for number, tokens in enumerate(texts):
            _, attended = accuracy.run(model, accuracy.FLOAT32, tokens, 0, ())
            found.append([Layer.of(*layer) for layer in attended])
            output.say(f"text {number} of {len(texts)}: {len(tokens)} tokens")
        return found

    return layers_in(of.plain), layers_in(of.calibration)


def measured() -> Iterator[tuple[str, kvjax.KVCacheDType, list[Errors]]]:
    """Yields what was measured, of which dtype, and the errors of each layer."""
    dtypes = accuracy.DTYPES.value or MEASURED
    for name, factor in (("random", 1), ("random, queries times 4", 4)):
        for dtype in dtypes:
            yield name, dtype, [errors(random_layer(factor), dtype)]
    texts, calibration = samples()
    for is_calibrated in (False, True):
        for dtype in dtypes:
            scales: Sequence[kvjax.KVScales] = [ONE] * len(texts[0])
            if is_calibrated:
                specs = [spec_of(layer, dtype) for layer in texts[0]]
                scales = kvjax.calibrate(specs, [[layer[1:] for layer in text] for text in calibration])
            found = [errors(layer, dtype, own) for text in texts for layer, own in zip(text, scales, strict=True)]
            yield f"model, {'calibrated' if is_calibrated else 'scales 1'}", dtype, found


def as_markdown(rows: Sequence[tuple[str, kvjax.KVCacheDType, list[Errors]]]) -> str:
    """Returns the table of docs/attention.md, and how it was made."""
    header = "tokens", "dtype", "stored: 16 bits", "fp8", "unquantized: 16 bits", "fp8", "log-sum-exp, fp8"
    cells = []
    for name, dtype, found in rows:
        *relative_errors, lse_errors = zip(*found, strict=True)
        shown = (f"{np.mean(each):.2%}" for each in relative_errors)
        cells.append((name, dtype.value, *shown, f"{max(lse_errors):.3f}"))
    where, (texts, _, tokens) = accuracy.environment(), accuracy.sizes()
    versions = ", ".join(f"{name} {where[name]}" for name in ("python", "jax", "kvjax", "commit", "date"))
    command = where["command"].replace("benchmarks.accuracy", "benchmarks.product_accuracy")
    products = "the kernels" if workload.is_gpu() else "models of the kernels' roundings"
    facts = (
        f"`{command}`: {products} on {where['device']}, {versions}. Model: {where['model']}, {texts} texts of {tokens}"
        " tokens."
    )
    return f"{markdown_table(header, cells, left=2)}\n\n{facts}"


class ProductAccuracyBenchmark(absltest.TestCase):
    def test_products(self) -> None:
        rows = []
        for name, dtype, found in measured():
            rows.append((name, dtype, found))
            output.say(f"{name}, {dtype.value}: {Errors(*np.mean(found, axis=0))}")
        for *what, found in rows:
            assert np.isfinite(found).all(), what
        shown = as_markdown(rows)
        print(f"\n{shown}", flush=True)
        if output.MARKDOWN.value:
            Path(output.MARKDOWN.value).write_text(f"{shown}\n")


if __name__ == "__main__":
    absltest.main()
