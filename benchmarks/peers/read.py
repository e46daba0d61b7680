"""A read-only kernel: a lower bound on the time of any kernel that reads the same number of bytes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat

THREADS = 128
VECTOR_WORDS = 4  # 4-byte words in the widest load
VECTORS = 8  # loads per thread, all in flight at once
LOAD_WORDS = THREADS * VECTOR_WORDS
BLOCK_WORDS = VECTORS * LOAD_WORDS
BLOCK_BYTES = 4 * BLOCK_WORDS
"""Bytes that one thread block reads; several blocks run concurrently on a multiprocessor."""


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def read(words: jax.Array) -> jax.Array:
    """Reads int32 words, a multiple of `BLOCK_WORDS`, and returns one word per block.

    Each thread combines its words by xor, and a block returns the sum over its threads, so no load can be elided.
    """
    return plgpu.kernel(
        read_alone,
        out_type=jax.ShapeDtypeStruct((words.size // BLOCK_WORDS,), jnp.int32),
        grid=(words.size // BLOCK_WORDS,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(words)


def read_alone(words: Any, found: Any) -> None:
    """The kernel's body; the kernel is named after it."""
    block = lax.axis_index("block")
    layout = plgpu.Layout.WG_STRIDED((LOAD_WORDS,), vec_size=VECTOR_WORDS)
    parts = [pl.ds(block * BLOCK_WORDS + number * LOAD_WORDS, LOAD_WORDS) for number in range(VECTORS)]
    loaded = [compat.load(words.at[part], layout) for part in parts]
    found[block] = jnp.sum(functools.reduce(jnp.bitwise_xor, loaded))


@functools.cache
def compiled(num_bytes: int) -> Any:
    """Compiles `read` for `num_bytes`, rounded up to whole thread blocks."""
    words = jax.ShapeDtypeStruct((num_blocks(num_bytes) * BLOCK_WORDS,), jnp.int32)
    return jax.jit(read).lower(words).compile()


@functools.partial(jax.jit, static_argnums=(0, 1))
def distinct_words(num_bytes: int, count: int) -> list[jax.Array]:
    """Returns `count` arrays of `num_bytes` with distinct words, which are faster to generate than random ones."""
    words = jnp.arange(num_blocks(num_bytes) * BLOCK_WORDS, dtype=jnp.int32)
    return [(words + first) * jnp.int32(-1_640_531_527) for first in range(count)]
