"""KerasHub's Llama and Qwen over kvjax's pages, through KerasHub's hook for vLLM. For keras-hub 0.32.0.

    pip install keras-hub==0.32.0 jax && export KERAS_BACKEND=jax

Attention layers pass queries, keys, values and the layer's cache to the function of a serving context
(`keras_hub.src.vllm`), if there is one. `Step.__call__` is a step for `examples.engine.Engine`.

- Tokens are a batch of sequences of one, `[num_tokens, 1]`; the context holds their positions.
- There is one cache per layer, in the order in which layers attend; the context returns the new ones.
- Pass the model's variables to the jitted step, or XLA compiles the weights as constants.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from keras_hub.src.vllm.context import get_vllm_context, vllm_context_scope

import kvjax


def attend(step: kvjax.StepMetadata, cache: kvjax.KVCache, query: Any, key: Any, value: Any, scale: float, *sizes: int,
           sliding_window: int | None = None, soft_cap: float | None = None) -> tuple[kvjax.KVCache, Any]:  # fmt: skip
    """Writes, then attends; rows are `[num_tokens, heads * head_size]`."""
    head_size, _, _ = sizes
    query, key, value = (x.reshape(len(x), -1, head_size) for x in (query, key, value))
    options = {"sm_scale": float(scale), "sliding_window": sliding_window, "logits_soft_cap": soft_cap}
    out, cache = kvjax.attend(query, key, value, cache, step, unique_slots=True, **options)
    return cache, out.reshape(len(out), -1)


def forward(backbone: Any, weights: Any, tokens: Any, step: kvjax.StepMetadata, caches: Sequence[kvjax.KVCache]) -> Any:
    """Logits `[num_tokens, vocabulary_size]` of a step's tokens, and the caches."""
    with vllm_context_scope(functools.partial(attend, step), jnp.maximum(step.token_rows()[1], 0), caches):
        inputs = {"token_ids": tokens[:, None], "padding_mask": jnp.ones((len(tokens), 1), bool)}
        hidden, _ = backbone.stateless_call(*weights, inputs, training=False)
        new = tuple(get_vllm_context().updated_kv_caches)
    embedding = backbone.token_embedding
    own = {id(variable): value for variable, value in zip(backbone.trainable_variables, weights[0], strict=True)}
    mine = [own[id(variable)] for variable in embedding.trainable_variables]
    return embedding.stateless_call(mine, [], hidden[:, 0], reverse=True)[0], new


class Step:
    """A step for `Engine`: the most likely next token of each sequence."""

    def __init__(self, backbone: Any) -> None:
        variables = backbone.trainable_variables, backbone.non_trainable_variables
        self.weights = [[variable.value for variable in each] for each in variables]
        self.run = jax.jit(functools.partial(_next_tokens, backbone), donate_argnums=4)

    def __call__(self, tokens: Any, previous: Any, step: Any, caches: Any, **_: int) -> Any:
        return self.run(self.weights, tokens, previous, step, caches)


def _next_tokens(backbone: Any, weights: Any, tokens: Any, previous: Any, step: Any, caches: Any) -> Any:
    tokens, previous = jnp.where(tokens < 0, previous[jnp.maximum(~tokens, 0)], tokens), jnp.asarray(previous)
    logits, caches = forward(backbone, weights, tokens, step, caches)
    last = logits[jnp.maximum(jnp.asarray(step.cu_q_lens)[1:] - 1, 0)]
    return previous.at[: len(last)].set(jnp.argmax(last, axis=-1).astype(jnp.int32)), caches
