"""The same model with dense bfloat16 caches and JAX's attention."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import serving, workload
from benchmarks.peers.attention_inputs import compiling, dense_implementation
from benchmarks.serving import Scenario, ServeJob
from benchmarks.timing import Timing
from examples import llama
from kvjax import KVCacheDType

NAME = "cuDNN, dense"


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, caches: Any, step: kvjax.StepMetadata, layer: int
) -> tuple[jax.Array, Any]:
    """Dense `llama.write_and_attend` for one token per sequence; caches are pairs of `[num_seqs, seq_len, ...]`."""
    lengths = jnp.asarray(step.seq_lens)
    at = jnp.arange(len(lengths)), lengths - 1
    pair = tuple(
        dense.at[at].set(new, unique_indices=True, mode="drop")
        for dense, new in zip(caches[layer], (key, value), strict=True)
    )
    options: Any = {"key_value_seq_lengths": lengths, "implementation": dense_implementation()}
    attended = jax.nn.dot_product_attention(query[:, None], *pair, **options)
    return attended[:, 0], (*caches[:layer], pair, *caches[layer + 1 :])


def step_of(params: Any, tokens: Any, previous: Any, step: Any, caches: Any, *, config: Any) -> tuple[jax.Array, Any]:
    tokens = jnp.where(tokens < 0, previous[jnp.maximum(~tokens, 0)], tokens)
    hidden, caches = llama.forward(params, config, tokens, step, caches, attend)
    return llama.next_tokens(params, hidden, step, previous), caches


def serves(job: ServeJob) -> bool:
    """Returns whether the job is in bfloat16, and in a row that has bars."""
    return job.dtype is KVCacheDType.BFLOAT16 and bool(job.rows)


@functools.cache
def program(of: Scenario, num_seqs: int) -> Future[Any]:
    """Compiles a step: `(params, tokens, previous, step, caches)`."""
    row = jax.ShapeDtypeStruct((num_seqs,), jnp.int32)
    shape = num_seqs, of.seq_len, of.config.num_key_value_heads, of.config.head_dim
    pair = (jax.ShapeDtypeStruct(shape, workload.INPUT_DTYPE),) * 2
    step = functools.partial(step_of, config=of.config)
    metadata = serving.step_struct(num_seqs, num_seqs, 1)
    caches = (pair,) * of.config.num_hidden_layers
    return compiling(jax.jit(step, donate_argnums=4), serving.param_structs(of, 1), row, row, metadata, caches)


def serve(job: ServeJob) -> Timing:
    """Times back-to-back steps without an engine or synchronization, each writing the last token of full sequences."""
    of, number, compiled = job.of, job.num_seqs, program(job.of, job.num_seqs).result()
    one = jax.random.normal(
        jax.random.key(7), (of.seq_len, of.config.num_key_value_heads, of.config.head_dim), workload.INPUT_DTYPE
    )
    filled = jax.jit(lambda x: jnp.tile(x, (number, 1, 1, 1)))
    caches = tuple((filled(one), filled(one)) for _ in range(of.config.num_hidden_layers))
    lengths = jnp.full(number, of.seq_len, jnp.int32)
    every = jnp.arange(number + 1, dtype=jnp.int32)
    step = kvjax.StepMetadata(jnp.zeros((number, 1), jnp.int32), lengths, every, jnp.zeros(number, jnp.int32))
    run = functools.partial(compiled, serving.params(of, 1))
    timed, caches = serving.steps_in_a_row(run, ~every[:-1], step, caches)
    if not np.isfinite(np.asarray(caches[0][0][:, -1], np.float32)).all():
        raise AssertionError("keys are not finite")
    return timed
