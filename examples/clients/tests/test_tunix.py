"""tunix's sampler over pages gives what it gives over its own cache; `make test-clients` runs this."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix")

from flax import nnx
from tunix.generate import sampler
from tunix.models.llama3 import model as llama3

import kvjax
from examples.clients import tunix
from examples.clients.tests import comparing

CACHE_SIZE = 64
SIZES = {
    "num_layers": comparing.NUM_LAYERS,
    "num_kv_heads": comparing.NUM_KV_HEADS,
    "head_dim": comparing.HEAD_SIZE,
}


class Numbers:
    """A tokenizer of numbers."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return comparing.VOCABULARY - 1

    def pad_id(self) -> int:
        return 0


def language_model(dtype: str) -> llama3.Llama3:
    config = llama3.ModelConfig(
        **SIZES,
        vocab_size=comparing.VOCABULARY,
        embed_dim=comparing.NUM_HEADS * comparing.HEAD_SIZE,
        hidden_dim=96,
        num_heads=comparing.NUM_HEADS,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    model = llama3.Llama3(config, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
    return model


def sampled(model: llama3.Llama3) -> tuple[list[list[int]], list[bool]]:
    """Tokens of the prompts, and whether the arrays of the cache stayed where they were."""
    own = sampler.Sampler(model, Numbers(), sampler.CacheConfig(cache_size=CACHE_SIZE, **SIZES))
    in_place = []

    def watched(run: Any) -> Any:
        def call(params: Any, state: Any, *others: Any, **options: Any) -> Any:
            where = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.cache)]
            state = run(params, state, *others, **options)
            in_place.append(where == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.cache)])
            return state

        return call

    own._compiled_prefill_fn, own._compiled_decode_fn = map(
        watched, (own._compiled_prefill_fn, own._compiled_decode_fn)
    )
    texts = [" ".join(map(str, prompt)) for prompt in comparing.prompts()]
    with comparing.in_float32():
        found = own(texts, max_generation_steps=comparing.NUM_NEW, eos_tokens=[Numbers().eos_id()])
    return [np.asarray(tokens).tolist() for tokens in found.tokens], in_place


@pytest.mark.filterwarnings("ignore:Using deprecated _init_cache")
def test_float32_tokens_are_those_of_its_own_cache():
    """Of prompts of several lengths, padded on the left."""
    expected, _ = sampled(language_model("float32"))
    model = language_model("float32")
    tunix.use_pages(model, "float32")
    found, in_place = sampled(model)
    assert found == expected
    assert {len(tokens) for tokens in found} == {comparing.NUM_NEW}
    assert in_place == [True, True]


def own_cache() -> dict[str, Any]:
    shape = len(comparing.texts()), CACHE_SIZE, comparing.NUM_KV_HEADS, comparing.HEAD_SIZE
    return {
        f"layer_{number}": {
            "k": jnp.zeros(shape, "bfloat16"),
            "v": jnp.zeros(shape, "bfloat16"),
            "end_index": jnp.zeros(shape[:1], jnp.int32),
        }
        for number in range(comparing.NUM_LAYERS)
    }


def jitted(model: llama3.Llama3) -> tuple[Any, Any]:
    """The model as a function of its state, tokens, positions, cache and mask; and that state."""
    graph, state = nnx.split(model)
    return jax.jit(lambda state, *arguments: nnx.merge(graph, state)(*arguments), donate_argnums=3), state


def logits_of(model: llama3.Llama3, cache: Any) -> tuple[np.ndarray, Any]:
    """The texts in two chunks, then token by token; `[texts, tokens, vocabulary]`, and the cache."""
    tokens = comparing.texts()
    run, state = jitted(model)
    parts = []
    for start, stop in [(0, 16), (16, 32), *((at, at + 1) for at in range(32, tokens.shape[1]))]:
        positions = np.broadcast_to(np.arange(start, stop), (len(tokens), stop - start))
        mask = np.arange(CACHE_SIZE)[None, None, :] <= positions[:, :, None]
        logits, cache = run(state, tokens[:, start:stop], positions, cache, mask)
        parts.append(np.asarray(logits, np.float32))
    return np.concatenate(parts, axis=1), cache


@functools.cache
def own() -> tuple[np.ndarray, list[tuple[Any, Any]]]:
    """Logits of the texts by its own cache, and the keys and values of each layer."""
    logits, cache = logits_of(language_model("bfloat16"), own_cache())
    length = comparing.texts().shape[1]
    return logits, [(layer["k"][:, :length], layer["v"][:, :length]) for layer in cache.values()]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "nvfp4"])
def test_teacher_forced_logits_are_near_those_of_its_own_cache(dtype: str):
    logits, samples = own()
    model = language_model("bfloat16")
    tunix.use_pages(model, dtype)
    specs = [cache.spec for cache in model.init_cache(1, 16, None).values()]
    tunix.use_pages(model, dtype, kvjax.calibrate(specs, [samples]))
    found, _ = logits_of(model, model.init_cache(len(logits), CACHE_SIZE, None))
    comparing.check(dtype, found, logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "nvfp4"])
def test_a_gpu_runs_the_kernels(dtype: str):
    model = language_model("bfloat16")
    tunix.use_pages(model, dtype)
    run, state = jitted(model)
    one = np.zeros((1, 1), np.int32)
    comparing.check_kernels(
        run, state, one, one, model.init_cache(1, CACHE_SIZE, None), np.ones((1, 1, CACHE_SIZE), bool)
    )
