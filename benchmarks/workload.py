"""Tokens, slots and caches to write: fresh ones for every call, and the bytes that a write must leave behind."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import kvjax
from benchmarks.shapes import BLOCK_SIZE, Case
from kvjax import AttentionSpec, KVCache, KVCacheDType

INPUT_DTYPE = np.dtype(ml_dtypes.bfloat16)

POISON = 0xAB
"""A byte that fills a cache; as a float, a number that no token holds."""

MAX_BATCHES = 64
"""So many small batches stay in a GPU's L2, as the output of a layer's projection does."""

DISTINCT_ELEMENTS = (1 << 20) - 3
"""Random numbers are drawn this often and then repeated, for drawing takes longer than all else; a prime, so that no
two tokens are the same."""

GPU_CACHE_BYTES, HOST_CACHE_BYTES = 1 << 31, 1 << 25
"""What the cache of a case takes in bfloat16: far more than an L2, so that slots are as cold as in a server."""

GPU_ROTATION_BYTES, HOST_ROTATION_BYTES = 1 << 28, 1 << 22
"""Keys and values that calls rotate through: several times the 50 to 126 MB of a GPU's L2, which would hold fewer."""


def is_gpu() -> bool:
    """Whether times are those of a GPU."""
    return jax.default_backend() == "gpu"


@functools.cache
def scales() -> dict[str, jax.Array]:
    """Decode scales as a calibration gives them: no powers of two, for dividing by those might be cheaper."""
    return {"k_scale": jnp.float32(0.037), "v_scale": jnp.float32(0.052)}


class Batch(NamedTuple):
    """The tokens of one write."""

    key: jax.Array
    value: jax.Array
    slot_mapping: jax.Array


class Tokens:
    """Tokens of one layer in random slots of `num_blocks` pages: `max_tokens` of them, or as many more as fill memory.

    Both are normal numbers in bfloat16; `rotation_bytes` is what keys and values are to fill.
    """

    def __init__(self, case: Case, max_tokens: int, num_blocks: int, rotation_bytes: int) -> None:
        rng = np.random.default_rng(0)
        a_token = 2 * case.num_kv_heads * case.head_size * INPUT_DTYPE.itemsize
        shape = (max(rotation_bytes // a_token, max_tokens), case.num_kv_heads, case.head_size)
        self.max_tokens, self.num_blocks = max_tokens, num_blocks
        self.key, self.value = (
            np.resize(rng.standard_normal(DISTINCT_ELEMENTS, np.float32).astype(INPUT_DTYPE), shape) for _ in range(2)
        )
        self.slots = rng.permutation(np.arange(num_blocks * BLOCK_SIZE, dtype=np.int32))

    def batches(self, num_tokens: int) -> list[Batch]:
        """Batches of so many tokens each, on the device: all of different tokens, each with different slots."""
        starts = [i * num_tokens for i in range(min(len(self.key) // num_tokens, MAX_BATCHES))]
        return [self._batch(start, num_tokens) for start in starts]

    def _batch(self, start: int, num_tokens: int) -> Batch:
        tokens = slice(start, start + num_tokens)
        slots = self.slots.take(np.arange(tokens.start, tokens.stop), mode="wrap")
        return Batch(*jax.device_put((self.key[tokens], self.value[tokens], slots)))

    @functools.cached_property
    def longest(self) -> Batch:
        """The first `max_tokens` tokens."""
        return self._batch(0, self.max_tokens)

    def expected(self, spec: AttentionSpec, num_tokens: int) -> KVCache:
        """A poisoned cache with the first batch in it, written in XLA and not in place.

        The write is of `max_tokens` tokens, all but those of the batch padded away: one program for every number.
        """
        batch = self.longest
        slot_mapping = jnp.where(np.arange(self.max_tokens) < num_tokens, batch.slot_mapping, -1)
        return write_in_xla(batch.key, batch.value, self.poisoned(spec), slot_mapping, **scales())

    def poisoned(self, spec: AttentionSpec) -> KVCache:
        """A cache that shows every byte that was touched."""
        return KVCache(jnp.full(spec.cache_shape(self.num_blocks), POISON, spec.array_dtype), spec)


def make_tokens(case: Case, max_tokens: int) -> Tokens:
    """Tokens for every write of a case, of `max_tokens` at most, and as many pages as this device's caches have."""
    page = case.spec(KVCacheDType.BFLOAT16)
    cache_bytes = GPU_CACHE_BYTES if is_gpu() else HOST_CACHE_BYTES
    num_blocks = max(cache_bytes // page.page_size_bytes, -(-max_tokens // page.block_size))
    rotation_bytes = GPU_ROTATION_BYTES if is_gpu() else HOST_ROTATION_BYTES
    return Tokens(case, max_tokens, num_blocks, rotation_bytes)


write_in_xla = jax.jit(functools.partial(kvjax.reshape_and_cache_flash, implementation="xla"))


class Write:
    """Donated writes under `jit`, each into the cache that the one before returned."""

    def __init__(self, cache: KVCache, batches: Sequence[Batch], implementation: str | None) -> None:
        self.cache, self.batches = cache, batches
        write = jax.jit(
            functools.partial(kvjax.reshape_and_cache_flash, implementation=implementation), donate_argnames="cache"
        )
        first = batches[0]
        self.compiled = write.lower(first.key, first.value, cache, first.slot_mapping, **scales()).compile()

    def __call__(self, number: int) -> jax.Array:
        """Starts write `number`."""
        batch = self.batches[number % len(self.batches)]
        self.cache = self.compiled(batch.key, batch.value, self.cache, batch.slot_mapping, **scales())
        return self.cache.kv

    @property
    def temporary_bytes(self) -> int:
        """Memory that a write needs beside its arguments and its result."""
        analysis: Any = self.compiled.memory_analysis()
        return analysis.temp_size_in_bytes


def check_first_write(write: Write, expected: KVCache) -> None:
    """Runs the first write and compares every byte of the cache, and its place in memory.

    Raises:
      AssertionError: they differ.
    """
    before = write.cache.kv.unsafe_buffer_pointer()
    write(0)
    if write.cache.kv.unsafe_buffer_pointer() != before:
        raise AssertionError("the write was not in place: it returned a cache elsewhere in memory")
    check_same_bits(write.cache.kv, expected.kv)


def check_same_bits(got: jax.Array, expected: jax.Array) -> None:
    """Raises `AssertionError` where two arrays differ in a bit."""
    if different := int(_count_different(got, expected)):
        raise AssertionError(f"{different:,} of {got.size:,} elements differ from what they must be")


@jax.jit
def _count_different(got: jax.Array, expected: jax.Array) -> jax.Array:
    bits = np.dtype(f"uint{8 * got.dtype.itemsize}")
    differ = lax.bitcast_convert_type(got, bits) != lax.bitcast_convert_type(expected, bits)
    return jnp.sum(differ, dtype=jnp.uint32)


def bytes_moved(spec: AttentionSpec, num_tokens: int) -> int:
    """The fewest bytes that a write of bfloat16 tokens reads and writes: tokens, slots and what is stored."""
    elements = spec.num_kv_heads * (spec.head_size + spec.head_size_v)
    slot = np.dtype(np.int32).itemsize
    return num_tokens * (elements * INPUT_DTYPE.itemsize + slot + spec.bytes_per_token)
