"""KerasHub over pages gives what KerasHub gives; `make test-clients` runs this."""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import numpy as np
import pytest

keras_hub = pytest.importorskip("keras_hub")

import kvjax  # noqa: E402
from examples.clients import kerashub  # noqa: E402
from examples.clients.tests import comparing  # noqa: E402
from examples.engine import Engine  # noqa: E402

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 4, 32, 12
MODELS = {"llama": ("LlamaBackbone", "LlamaCausalLM"), "qwen": ("QwenBackbone", "QwenCausalLM")}


@functools.cache
def language_model(dtype: str, name: str = "llama") -> Any:
    backbone_class, model_class = (getattr(keras_hub.models, each) for each in MODELS[name])
    backbone = backbone_class(
        vocabulary_size=comparing.VOCABULARY,
        num_layers=comparing.NUM_LAYERS,
        num_query_heads=comparing.NUM_HEADS,
        hidden_dim=comparing.NUM_HEADS * comparing.HEAD_SIZE,
        intermediate_dim=96,
        num_key_value_heads=comparing.NUM_KV_HEADS,
        dtype=dtype,
    )
    rng = np.random.default_rng(2)
    for variable in backbone.trainable_variables:
        if len(variable.shape) > 1:
            # As in trained models, what a layer adds is small beside what it is added to.
            scale = 1.0 if variable.path.endswith("embeddings") else 0.125
            variable.assign(scale * rng.standard_normal(variable.shape))
    model = model_class(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")
    return model


def caches(dtype: str, scales: Any = None) -> tuple[kvjax.KVCache, ...]:
    spec = kvjax.FullAttentionSpec(
        BLOCK_SIZE, comparing.NUM_KV_HEADS, comparing.HEAD_SIZE, dtype=kvjax.parse_kv_cache_dtype(dtype)
    )
    options = [each._asdict() for each in scales] if scales else [{}] * comparing.NUM_LAYERS
    return tuple(kvjax.KVCache.allocate(spec, NUM_BLOCKS, **each) for each in options)


@pytest.mark.parametrize("name", list(MODELS))
def test_float32_tokens_are_those_of_its_own_cache(name: str):
    model, expected = language_model("float32", name), []
    for prompt in comparing.prompts():
        tokens, mask = np.zeros((2, 1, len(prompt) + comparing.NUM_NEW), np.int32)
        tokens[0, : len(prompt)], mask[0, : len(prompt)] = prompt, 1
        inputs = {"token_ids": tokens, "padding_mask": mask.astype(bool)}
        with comparing.in_float32():
            found = model.generate(inputs, stop_token_ids=None)["token_ids"]
        expected.append(np.asarray(found)[0, len(prompt) :].tolist())

    pool = kvjax.BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(
        kerashub.Step(model.backbone), caches("float32"), pool, num_seqs=[4], max_blocks=MAX_BLOCKS, chunk=6
    )
    where = [cache.kv.unsafe_buffer_pointer() for cache in engine.caches]
    requests = [engine.submit(prompt.tolist(), comparing.NUM_NEW) for prompt in comparing.prompts()]
    with comparing.in_float32():
        while not engine.is_idle:
            engine.step()
    assert [request.generated for request in requests] == expected
    assert [cache.kv.unsafe_buffer_pointer() for cache in engine.caches] == where


@functools.cache
def own() -> tuple[np.ndarray, np.ndarray]:
    """Logits of the texts by its own cache, and that cache."""
    model, tokens = language_model("bfloat16"), comparing.texts()
    shape = (len(tokens), comparing.NUM_LAYERS, 2, tokens.shape[1], comparing.NUM_KV_HEADS, comparing.HEAD_SIZE)
    logits, _, cache = model.call_with_cache(tokens, jnp.zeros(shape, "bfloat16"), 0)
    return logits, cache


def jitted_forward() -> tuple[Any, Any]:
    """The weights, and `kerashub.forward` of them, tokens, a step and caches."""
    backbone = language_model("bfloat16").backbone
    return kerashub.Step(backbone).weights, jax.jit(functools.partial(kerashub.forward, backbone), donate_argnums=3)


def logits_by_pages(dtype: str, scales: Any) -> np.ndarray:
    """Each text in two chunks, then token by token; `[texts, tokens, vocabulary]`."""
    weights, forward = jitted_forward()
    found = []
    for text in comparing.texts():
        pool, of_text, parts = kvjax.BlockPool(NUM_BLOCKS, BLOCK_SIZE), caches(dtype, scales), []
        sequence = pool.sequence()
        for start, stop in [(0, 16), (16, 32), *((at, at + 1) for at in range(32, len(text)))]:
            pool.append([sequence], [stop - start])
            step = kvjax.StepMetadata.from_sequences([sequence], [stop - start], max_blocks=MAX_BLOCKS)
            logits, of_text = forward(weights, text[start:stop], step, of_text)
            parts.append(logits)
        found.append(np.concatenate([np.asarray(part, np.float32) for part in parts]))
    return np.stack(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "nvfp4"])
def test_teacher_forced_logits_are_near_those_of_its_own_cache(dtype: str):
    logits, cache = own()
    samples = [[(cache[:, layer, 0], cache[:, layer, 1]) for layer in range(comparing.NUM_LAYERS)]]
    specs = [pages.spec for pages in caches(dtype)]
    comparing.check(dtype, logits_by_pages(dtype, kvjax.calibrate(specs, samples)), logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "nvfp4"])
def test_a_gpu_runs_the_kernels(dtype: str):
    weights, forward = jitted_forward()
    pool = kvjax.BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    sequence = pool.sequence()
    pool.append([sequence], [1])
    step = kvjax.StepMetadata.from_sequences([sequence], [1], max_blocks=MAX_BLOCKS)
    comparing.check_kernels(forward, weights, np.ones(1, np.int32), step, caches(dtype))
