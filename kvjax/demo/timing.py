"""Measures the time of a write, which depends on being in place."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

NUM_TOKENS = 256
NUM_BLOCKS = 1024
NUM_CALLS = 50


def seconds_per_written_token(template: kvjax.KVCache) -> float:
    """Returns the median wall time per token of writes to a new cache of the template's spec and scales.

    A call writes `NUM_TOKENS` bfloat16 tokens to scattered slots of a donated cache; the time includes dispatch and
    waiting for the result.
    """
    spec, rng = template.spec, np.random.default_rng(0)
    shape = (NUM_TOKENS, spec.num_kv_heads, spec.head_size)
    key, value = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(2))
    cache = kvjax.KVCache.allocate(spec, NUM_BLOCKS, k_scale=template.k_scale, v_scale=template.v_scale)
    slots = jnp.asarray(rng.permutation(NUM_BLOCKS * spec.block_size)[:NUM_TOKENS], jnp.int32)

    @functools.partial(jax.jit, donate_argnames="cache")
    def write(cache: kvjax.KVCache, key: jax.Array, value: jax.Array, slots: jax.Array) -> kvjax.KVCache:
        return kvjax.reshape_and_cache_flash(key, value, cache, slots)

    cache = jax.block_until_ready(write(cache, key, value, slots))
    seconds = []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        cache = jax.block_until_ready(write(cache, key, value, slots))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)) / NUM_TOKENS
