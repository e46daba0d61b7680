"""SkyRL tx generates over pages what it generates over dense arrays; `make test-client-skyrl_tx` runs this."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("skyrl.tx")

from flax import nnx
from skyrl.tinker.types import SamplingParams
from skyrl.tx.layers import attention
from skyrl.tx.models import llama3, qwen3
from skyrl.tx.models.configs import ModelConfig
from skyrl.tx.utils.generator import GeneratorMixin, KVCache
from transformers import LlamaConfig, Qwen3Config

import kvjax
from examples.clients import skyrl_tx
from examples.clients.tests import comparing

CHUNK, MAX_LENGTH = 16, 64
MODELS = {"llama": (llama3.Llama3ForCausalLM, LlamaConfig), "qwen3": (qwen3.Qwen3ForCausalLM, Qwen3Config)}


@pytest.fixture(autouse=True)
def dense_again() -> Iterator[None]:
    """One device, as SkyRL names its axes; afterwards models attend over dense arrays again."""
    with jax.set_mesh(jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        yield
    KVCache.pad_to_length, KVCache.update_layer = skyrl_tx._pad, staticmethod(skyrl_tx._update)
    for model in skyrl_tx.MODELS:
        model.dot_product_attention = attention.dot_product_attention
    GeneratorMixin._prefill_and_decode.clear_cache()


@functools.cache
def language_model(dtype: str, name: str = "llama") -> Any:
    model, config = MODELS[name]
    own = config(
        vocab_size=comparing.VOCABULARY,
        num_hidden_layers=comparing.NUM_LAYERS,
        hidden_size=comparing.NUM_HEADS * comparing.HEAD_SIZE,
        head_dim=comparing.HEAD_SIZE,
        intermediate_size=96,
        num_attention_heads=comparing.NUM_HEADS,
        num_key_value_heads=comparing.NUM_KV_HEADS,
        tie_word_embeddings=False,
    )
    limits = {"max_lora_adapters": 0, "max_lora_rank": 0, "shard_attention_heads": True}
    return model(ModelConfig(own, **limits), dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))


def generated(model: Any) -> Any:
    """Of prompts of several lengths, padded on the right."""
    prompts = comparing.prompts()
    length = max(map(len, prompts))
    ids = np.stack([np.pad(prompt, (0, length - len(prompt))) for prompt in prompts])
    mask = np.stack([np.arange(length) < len(prompt) for prompt in prompts]).astype(np.int32)
    sampling = [SamplingParams(temperature=0.0, max_tokens=comparing.NUM_NEW, seed=0)] * len(prompts)
    with comparing.in_float32():
        return model.generate(jnp.asarray(ids), jnp.asarray(mask), sampling_params=sampling, prompt_logprobs=True)


@pytest.mark.parametrize("name", list(MODELS))
def test_float32_tokens_and_their_probabilities_are_those_of_dense_arrays(name: str):
    model = language_model("float32", name)
    expected = generated(model)
    skyrl_tx.use_pages("float32")
    found = generated(model)
    assert found.generated_ids == expected.generated_ids
    assert {len(tokens) for tokens in found.generated_ids} == {comparing.NUM_NEW}
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
    for mine, theirs in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
        np.testing.assert_array_equal(mine, theirs)  # the prompt is dense in both


def step_of(model: Any) -> Any:
    """A step of one token as a function of the model's state, tokens, positions, mask and cache; and that state."""
    graph, state = nnx.split(model)

    def step(state: Any, tokens: Any, positions: Any, mask: Any, cache: Any) -> tuple[Any, Any]:
        model = nnx.merge(graph, state)
        out = model(tokens, attention_mask=mask, positions=positions, kv_cache=cache)
        return model.compute_logits(out.last_hidden_state), out.kv_cache

    return jax.jit(step, donate_argnums=4), state


def prefilled(model: Any) -> tuple[np.ndarray, KVCache, np.ndarray]:
    tokens = comparing.texts()
    mask = np.ones((len(tokens), CHUNK), np.int32)
    out = model(jnp.asarray(tokens[:, :CHUNK]), attention_mask=jnp.asarray(mask))
    return np.asarray(model.compute_logits(out.last_hidden_state), np.float32), out.kv_cache, mask


def logits_of(model: Any, pad: Any) -> np.ndarray:
    """The texts as a prompt of 16 tokens, then token by token; `[texts, tokens, vocabulary]`."""
    tokens = comparing.texts()
    logits, cache, _ = prefilled(model)
    parts, cache = [logits], pad(cache, MAX_LENGTH)
    run, state = step_of(model)
    for at in range(CHUNK, tokens.shape[1]):
        mask = np.broadcast_to(np.arange(MAX_LENGTH) <= at, (len(tokens), MAX_LENGTH)).astype(np.int32)
        out, cache = run(state, tokens[:, at : at + 1], np.full((len(tokens), 1), at), mask, cache)
        parts.append(np.asarray(out, np.float32))
    return np.concatenate(parts, axis=1)


def scales_of(model: Any) -> list[tuple[float, float]]:
    _, cache, _ = prefilled(model)
    spec = kvjax.FullAttentionSpec(16, comparing.NUM_KV_HEADS, comparing.HEAD_SIZE, dtype=kvjax.KVCacheDType.NVFP4)
    found = kvjax.calibrate([spec] * len(cache.keys), [list(zip(cache.keys, cache.values, strict=True))])
    return [(float(one.k_scale), float(one.v_scale)) for one in found]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "nvfp4"])
def test_logits_are_near_those_of_dense_arrays(dtype: str):
    model = language_model("bfloat16")
    expected = logits_of(model, skyrl_tx._pad)
    scales = scales_of(model) if dtype == "nvfp4" else None
    skyrl_tx.use_pages(dtype, scales)
    comparing.check(dtype, logits_of(model, KVCache.pad_to_length), expected)


def test_kernels_attend():
    model = language_model("bfloat16")
    skyrl_tx.use_pages("nvfp4")
    _, cache, _ = prefilled(model)
    run, state = step_of(model)
    num_texts = len(comparing.texts())
    tokens = np.zeros((num_texts, 1), np.int32)
    mask = np.ones((num_texts, MAX_LENGTH), np.int32)
    comparing.check_kernels(run, state, tokens, tokens + CHUNK, mask, cache.pad_to_length(MAX_LENGTH))


def test_training_gradients_do_not_change():
    model = language_model("float32")
    graph, state = nnx.split(model)

    def loss(state: Any) -> Any:
        tokens = comparing.texts()
        model = nnx.merge(graph, state)
        out = model(tokens, attention_mask=np.ones_like(tokens), is_training=True)
        return jnp.mean(model.compute_logits(out.last_hidden_state) ** 2)

    expected = jax.grad(loss)(state)
    skyrl_tx.use_pages("nvfp4")
    for mine, theirs in zip(*map(jax.tree.leaves, (jax.grad(loss)(state), expected)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
