"""Serving from paged caches: blocks are shared fairly, and where they lie changes nothing."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import FEW_DTYPES, matrix

import kvjax
from kvjax import BlockPool
from kvjax.demo.evaluate import Model
from kvjax.demo.model import FULL, SLIDING, Params, TransformerConfig, dense_logits, init_params
from kvjax.demo.samples import Samples
from kvjax.demo.serve import Request, ServeConfig, Served, follow, pool_size, sample, serve

CONFIG = TransformerConfig(
    hidden_size=32, intermediate_size=48, head_dim=16, sliding_window=6, layer_types=(SLIDING, FULL)
)
SERVE = ServeConfig(max_running=3, chunk=8, max_length=40)
BLOCK_SIZE = 4
LENGTHS = (40, 9, 27, 33, 14, 40, 2)
PROMPTS = (11, 8, 1, 30, 5, 16, 1)
NUM_BLOCKS = 29  # 10 + 10 + 9: what the three longest need


@pytest.fixture(scope="module")
def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length).astype(np.uint8) for length in LENGTHS]


@pytest.fixture(scope="module")
def model(texts) -> Model:
    params = init_params(CONFIG, jax.random.key(0))
    return Model(CONFIG, params, Samples(CONFIG, params, texts[:1]))


@pytest.fixture(scope="module")
def requests(texts) -> list[Request]:
    return [follow(text, prompt) for text, prompt in zip(texts, PROMPTS, strict=True)]


def poisoned(kv: jax.Array) -> jax.Array:
    """A cache like `kv` with every bit set, which in the floating dtypes is NaN."""
    return jnp.asarray(np.full(kv.nbytes, 0xFF, np.uint8).view(kv.dtype).reshape(kv.shape))


def serve_all(model: Model, dtype: kvjax.KVCacheDType, requests: list[Request]) -> tuple[list[Served], BlockPool]:
    """Serves from a poisoned pool, of one size for all tests, so that each dtype compiles once."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    engine = model.engine(dtype, pool.num_blocks, BLOCK_SIZE)
    caches = tuple(dataclasses.replace(cache, kv=poisoned(cache.kv)) for cache in engine.caches)
    engine = dataclasses.replace(engine, caches=caches)
    return serve(engine, requests, pool, SERVE), pool


@functools.partial(jax.jit, static_argnames="config")
def padded_logits(params: Params, tokens: jax.Array, config: TransformerConfig) -> jax.Array:
    return dense_logits(params, config, tokens)


def logits_without_a_cache(model: Model, tokens: np.ndarray) -> np.ndarray:
    padded = np.pad(tokens.astype(np.int32), (0, SERVE.max_length - len(tokens)))
    return np.asarray(padded_logits(model.params, padded, model.config))[: len(tokens)]


def test_blocks_are_interleaved_and_used_again(model, requests):
    served, pool = serve_all(model, kvjax.KVCacheDType.FLOAT32, requests)
    assert sum(len(one.blocks) for one in served) > pool.num_blocks == pool_size(requests, SERVE, BLOCK_SIZE)
    assert pool.num_free == pool.num_blocks
    longest = served[0].blocks
    assert np.any(np.diff(longest) != 1), longest
    assert set(served[1].blocks) & set(served[3].blocks), "the fourth sequence starts when the second ends"


@pytest.mark.full
@matrix({"dtype": FEW_DTYPES}, few={"dtype": [kvjax.KVCacheDType.BFLOAT16, kvjax.KVCacheDType.NVFP4]})
def test_where_blocks_lie_changes_no_bit(model, requests, dtype):
    together, _ = serve_all(model, dtype, requests)
    for request, among_others in zip(requests, together, strict=True):
        (alone,), _ = serve_all(model, dtype, [request])
        assert alone.blocks == tuple(range(len(alone.blocks)))
        np.testing.assert_array_equal(alone.tokens, among_others.tokens)
        for name, array in alone.output._asdict().items():
            np.testing.assert_array_equal(array, getattr(among_others.output, name), err_msg=name)


def test_a_float32_cache_gives_the_logits_of_no_cache(model, requests, texts):
    served, _ = serve_all(model, kvjax.KVCacheDType.FLOAT32, requests)
    for one, text in zip(served, texts, strict=True):
        dense = logits_without_a_cache(model, text[:-1])
        np.testing.assert_allclose(one.output.logits, dense, atol=1e-4, rtol=1e-4)
        np.testing.assert_array_equal(one.tokens, text)


def test_greedy_tokens_are_those_of_the_largest_logits(model):
    prompt = np.frombuffer(b"def served(", np.uint8)
    greedy = sample(prompt, 20, temperature=0, seed=0)
    (written,), _ = serve_all(model, kvjax.KVCacheDType.FLOAT32, [greedy])
    assert written.tokens[: len(prompt)].tobytes() == prompt.astype(np.int32).tobytes()
    dense = logits_without_a_cache(model, written.tokens[:-1])
    np.testing.assert_array_equal(written.tokens[len(prompt) :], dense.argmax(axis=1)[len(prompt) - 1 :])


def test_sampling_repeats_with_its_seed(model):
    prompt = np.frombuffer(b"import ", np.uint8)

    def written(seed: int) -> list[int]:
        (one,), _ = serve_all(model, kvjax.KVCacheDType.BFLOAT16, [sample(prompt, 16, temperature=1.0, seed=seed)])
        return one.tokens.tolist()

    assert written(1) == written(1) != written(2)


def test_too_small_a_pool_is_refused(model, requests):
    pool = BlockPool(2, BLOCK_SIZE)
    engine = model.engine(kvjax.KVCacheDType.FLOAT32, pool.num_blocks, BLOCK_SIZE)
    with pytest.raises(kvjax.OutOfBlocksError, match="2 needed, and 0 of the pool's 2 are free"):
        serve(engine, requests, pool, SERVE)


@pytest.mark.parametrize(("prompt_length", "num_tokens"), [(0, 5), (5, 5)])
def test_a_request_has_a_prompt_and_something_after_it(prompt_length, num_tokens):
    with pytest.raises(ValueError, match=f"prompt: got {prompt_length} tokens, expected 1 to length - 1 = 4"):
        follow(np.zeros(num_tokens, np.uint8), prompt_length)


def test_a_request_that_the_engine_was_not_made_for_is_refused(model):
    engine = model.engine(kvjax.KVCacheDType.FLOAT32, NUM_BLOCKS, BLOCK_SIZE)
    with pytest.raises(ValueError, match=r"got lengths \[41\], expected at most config.max_length=40"):
        serve(engine, [follow(np.zeros(41, np.uint8), 5)], BlockPool(NUM_BLOCKS, BLOCK_SIZE), SERVE)


@matrix({"dtype": kvjax.STORED_KV_CACHE_DTYPES}, few={"dtype": [kvjax.KVCacheDType.BFLOAT16, kvjax.KVCacheDType.NVFP4]})
def test_scales_let_the_largest_fill_the_range(model, dtype):
    """Those of the engine: the largest key and value of what the sample text stores."""
    [stored] = model.samples
    engine = model.engine(dtype, NUM_BLOCKS, BLOCK_SIZE)
    for cache, layer in zip(engine.caches, stored, strict=True):
        for scale, x, part in zip((cache.k_scale, cache.v_scale), layer, dtype.parts, strict=True):
            if part.takes_scale:
                np.testing.assert_allclose(scale, np.abs(x).max() / np.float32(part.info.max), rtol=1e-6)
            else:
                assert scale is None


def test_samples_are_what_the_cache_stores(model, texts):
    """Keys rotated, values as they are: in a float32 cache, served in chunks, and in the samples, all at once."""
    served, _ = serve_all(model, kvjax.KVCacheDType.FLOAT32, [follow(texts[0], 11)])
    [stored] = model.samples
    for layer, (key, value) in enumerate(stored):
        np.testing.assert_allclose(served[0].output.key[layer], key[:-1], atol=1e-5)
        np.testing.assert_allclose(served[0].output.value[layer], value[:-1], atol=1e-5)
