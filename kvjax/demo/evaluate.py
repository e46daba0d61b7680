"""Measures a KV cache dtype's cost and accuracy: one row of the demo's table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.demo.engine import Engine
from kvjax.demo.model import Params, TransformerConfig, bits_per_token, causal_attention, dense_logits
from kvjax.demo.samples import Samples
from kvjax.demo.serve import Request, ServeConfig, Served, pool_size, serve
from kvjax.demo.timing import seconds_per_written_token

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Model:
    """What is shared by all dtypes: the model, and samples of its keys and values for calibration."""

    config: TransformerConfig
    params: Params
    samples: Samples

    def layer_specs(self, dtype: kvjax.KVCacheDType, block_size: int) -> tuple[kvjax.AttentionSpec, ...]:
        """Returns the specs of its layers for a requested `dtype`, as for any Hugging Face model."""
        model = kvjax.ModelKVConfig.from_hf_config(dataclasses.asdict(self.config))
        return kvjax.resolve_layer_specs(model, dtype, block_size=block_size)

    def engine(self, dtype: kvjax.KVCacheDType, num_blocks: int, block_size: int) -> Engine:
        """Returns the model over caches of `dtype`."""
        specs = self.layer_specs(dtype, block_size)
        return Engine.allocate(self.config, self.params, specs, kvjax.calibrate(specs, self.samples), num_blocks)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Results of the float32 model without a cache on the same text.

    Attributes:
      bits_per_byte: its cross entropy on the text.
      greedy: per sequence, the most likely next token at each position: int `[length - 1]`.
    """

    bits_per_byte: float
    greedy: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Row:
    """A dtype's measurements; `attention_error` has the units of attention's outputs, as does their RMS."""

    dtype: str
    bytes_per_token: int
    tokens_per_gib: int
    bits_per_byte: float
    greedy_agreement: float
    attention_error: float
    attention_rms: float
    write_seconds_per_token: float
    blocks: int
    blocks_reused: int


def dense_reference(model: Model, texts: Sequence[np.ndarray], max_length: int) -> Reference:
    """Runs `texts` (uint8 `[length]`) through the model, each at once, without a cache."""
    # Padding to one length compiles once; with causal attention it has no effect on the tokens before.
    padded = [np.pad(text[:-1].astype(np.int32), (0, max_length - len(text))) for text in texts]
    all_logits = [np.asarray(_dense_logits(model.params, tokens, config=model.config)) for tokens in padded]
    logits = [one[: len(text) - 1] for one, text in zip(all_logits, texts, strict=True)]
    return Reference(bits_per_byte(logits, texts), [one.argmax(axis=1) for one in logits])


def evaluate(
    model: Model,
    dtype: kvjax.KVCacheDType,
    requests: Sequence[Request],
    reference: Reference,
    config: ServeConfig,
    *,
    block_size: int,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> Row:
    """Serves `requests` (teacher-forced) through caches of `dtype`, and measures the results."""
    pool = kvjax.BlockPool(pool_size(requests, config, block_size), block_size)
    engine = model.engine(dtype, pool.num_blocks, block_size)
    served = serve(engine, requests, pool, config, on_tokens)
    specs = [cache.spec for cache in engine.caches]
    agreement = [one.output.logits.argmax(axis=1) == best for one, best in zip(served, reference.greedy, strict=True)]
    errors, squares = zip(*(_attention_errors(one, model.config, config.max_length) for one in served), strict=True)
    return Row(
        dtype=specs[-1].dtype.value,
        bytes_per_token=sum(spec.bytes_per_token for spec in specs),
        tokens_per_gib=kvjax.max_tokens(specs, GIB),
        bits_per_byte=bits_per_byte([one.output.logits for one in served], [one.tokens for one in served]),
        greedy_agreement=float(np.concatenate(agreement).mean()),
        attention_error=max(errors),
        attention_rms=float(np.sqrt(np.mean(squares))),
        write_seconds_per_token=seconds_per_written_token(engine.caches[-1]),
        blocks=pool.num_blocks,
        blocks_reused=int(np.sum(np.bincount(np.concatenate([one.blocks for one in served])) > 1)),
    )


def bits_per_byte(logits: Sequence[np.ndarray], texts: Sequence[np.ndarray]) -> float:
    """Returns the mean bits of every byte except each text's first, under the logits of the byte before it."""
    all_logits, targets = np.concatenate(logits), np.concatenate([text[1:].astype(np.int32) for text in texts])
    return float(jnp.mean(bits_per_token(jnp.asarray(all_logits), jnp.asarray(targets))))


def _attention_errors(served: Served, config: TransformerConfig, max_length: int) -> tuple[float, float]:
    """Returns the largest difference, over layers and positions, from attention over the same run's unquantized keys
    and values, and the mean square of the latter.
    """
    _, *trace = served.output
    length = trace[0].shape[1]
    padding = [(0, 0), (0, max_length - length), (0, 0), (0, 0)]
    query, key, value = (np.pad(array, padding) for array in trace[:3])
    exact = np.asarray(_dense_attention(query, key, value, config=config))[:, :length]
    return float(np.max(np.abs(trace[3] - exact))), float(np.mean(exact**2))


@functools.partial(jax.jit, static_argnames=("config",))
def _dense_logits(params: Params, tokens: jax.Array, *, config: TransformerConfig) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return dense_logits(params, config, tokens)


@functools.partial(jax.jit, static_argnames=("config",))
def _dense_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, config: TransformerConfig) -> jax.Array:
    positions = jnp.arange(query.shape[1])
    with jax.default_matmul_precision("highest"):
        layers = [
            causal_attention(query[layer], key[layer], value[layer], positions, config.window(layer))
            for layer in range(config.num_hidden_layers)
        ]
    return jnp.stack(layers)
