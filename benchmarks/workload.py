"""Tokens, slots and caches for writes, and the expected results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

import kvjax
from benchmarks.shapes import BLOCK_SIZE, Case, Slots
from kvjax import AttentionSpec, CacheLayout, KVCache, KVCacheDType

INPUT_DTYPE = np.dtype(ml_dtypes.bfloat16)

POISON = 0xAB  # a byte that fills caches; no token holds it as a float
MAX_BATCHES = 64  # this many small batches stay in L2, like the output of a layer's projection
DISTINCT_ELEMENTS = (1 << 20) - 3
"""Number of random values before they repeat, because generating them dominates the setup. It is prime, so that no two
tokens are equal."""


@dataclasses.dataclass
class Sizes:
    cache_bytes: int  # in bfloat16; on a GPU far more than L2, so that slots are as cold as in a server
    rotation_bytes: int  # inputs that calls rotate through; on a GPU several times its L2 of 50 to 126 MB


GPU_SIZES, HOST_SIZES = Sizes(1 << 31, 1 << 28), Sizes(1 << 26, 1 << 24)


def sizes() -> Sizes:
    return GPU_SIZES if is_gpu() else HOST_SIZES


def shrink() -> None:
    """Shrinks caches and inputs for smoke tests."""
    for each in (GPU_SIZES, HOST_SIZES):
        each.cache_bytes, each.rotation_bytes = 1 << 20, 1 << 18


CODES_APART = 1e-3  # fraction of codes that a peer may round differently


def is_gpu() -> bool:
    return jax.default_backend() == "gpu"


SCALES = (0.037, 0.052)
"""Decode scales of keys and values, which are not powers of two, because dividing by those might be cheaper."""


@functools.cache
def scales() -> dict[str, jax.Array]:
    return dict(zip(("k_scale", "v_scale"), map(jnp.float32, SCALES), strict=True))


class Batch(NamedTuple):
    key: jax.Array
    value: jax.Array
    slot_mapping: jax.Array


@dataclasses.dataclass(frozen=True)
class WriteJob:
    """One write to time. `num_blocks` is the size of its cache; `None` selects the default of the device."""

    case: Case
    dtype: KVCacheDType
    num_tokens: int
    layout: CacheLayout = CacheLayout.NHD
    slots: Slots = Slots.SCATTERED
    num_blocks: int | None = None

    @property
    def spec(self) -> AttentionSpec:
        return self.case.spec(self.dtype, self.layout)

    @property
    def subject(self) -> dict[str, Any]:
        sizes = {"slots": self.slots, "num_tokens": self.num_tokens}
        cache = {} if self.num_blocks is None else {"cache_bytes": self.num_blocks * self.spec.page_size_bytes}
        return {**self.case.subject(self.dtype, self.layout), **sizes, **cache}

    @property
    def bytes_moved(self) -> int:
        """The minimum bytes to read and write: tokens, slots and stored tokens, excluding padding."""
        written = self.num_tokens - self.slots.num_padded(self.num_tokens)
        elements = self.spec.num_kv_heads * (self.spec.head_size + self.spec.head_size_v)
        slots = self.num_tokens * np.dtype(np.int32).itemsize
        return slots + written * (elements * INPUT_DTYPE.itemsize + self.spec.bytes_per_token)


def default_pages(case: Case, max_tokens: int) -> int:
    """Returns the default number of pages on this device, enough for at least `max_tokens` tokens."""
    page = case.spec(KVCacheDType.BFLOAT16)
    return max(sizes().cache_bytes // page.page_size_bytes, -(-max_tokens // page.block_size))


class Tokens:
    """Tokens of one layer and their slots: at least `max_tokens` tokens, and enough to fill `rotation_bytes`.

    Keys and values are normal random numbers in bfloat16. `num_blocks` is the size of the cache. It and
    `rotation_bytes` default to the sizes of this device.
    """

    def __init__(
        self,
        case: Case,
        max_tokens: int,
        slots: Slots = Slots.SCATTERED,
        num_blocks: int | None = None,
        rotation_bytes: int | None = None,
    ) -> None:
        rng = np.random.default_rng(0)
        num_blocks = num_blocks or default_pages(case, max_tokens)
        rotation_bytes = sizes().rotation_bytes if rotation_bytes is None else rotation_bytes
        a_token = 2 * case.num_kv_heads * case.head_size * INPUT_DTYPE.itemsize
        shape = (max(rotation_bytes // a_token, max_tokens), case.num_kv_heads, case.head_size)
        self.max_tokens, self.num_blocks, self.pattern = max_tokens, num_blocks, slots
        self.key, self.value = (
            np.resize(rng.standard_normal(DISTINCT_ELEMENTS, np.float32).astype(INPUT_DTYPE), shape) for _ in range(2)
        )
        self.slots = np.arange(num_blocks * BLOCK_SIZE, dtype=np.int32)
        if slots is not Slots.CONTIGUOUS:
            self.slots = rng.permutation(self.slots)

    def batches(self, num_tokens: int) -> list[Batch]:
        """Returns batches of `num_tokens` tokens on the device, all with different tokens, each with unique slots."""
        starts = [i * num_tokens for i in range(min(len(self.key) // num_tokens, MAX_BATCHES))]
        return [self._batch(start, num_tokens) for start in starts]

    def _batch(self, start: int, num_tokens: int) -> Batch:
        tokens = slice(start, start + num_tokens)
        return Batch(*jax.device_put((self.key[tokens], self.value[tokens], self._slots(start, num_tokens))))

    def _slots(self, start: int, num_tokens: int) -> np.ndarray:
        slots = self.slots.take(np.arange(start, start + num_tokens), mode="wrap")
        slots[num_tokens - self.pattern.num_padded(num_tokens) :] = -1
        return slots

    @functools.cached_property
    def longest(self) -> Batch:
        return self._batch(0, self.max_tokens)

    def expected(self, spec: AttentionSpec, num_tokens: int) -> KVCache:
        """Returns a poisoned cache with the first batch, written by XLA out of place.

        Always writes `max_tokens` tokens and masks the others by padding, so that one program serves all batch sizes.
        """
        slot_mapping = np.full(self.max_tokens, -1, np.int32)
        slot_mapping[:num_tokens] = self._slots(0, num_tokens)
        return write_in_xla(self.longest.key, self.longest.value, self.poisoned(spec), slot_mapping, **scales())

    def poisoned(self, spec: AttentionSpec) -> KVCache:
        return KVCache(jnp.full(spec.cache_shape(self.num_blocks), POISON, spec.array_dtype), spec)


def random_tokens(spec: AttentionSpec, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns normal random keys and values in bfloat16."""
    distinct = np.random.default_rng(0).standard_normal(DISTINCT_ELEMENTS, np.float32)
    key = np.resize(distinct.astype(INPUT_DTYPE), (num_tokens, spec.num_kv_heads, spec.head_size))
    return jax.device_put((key, key[::-1]))


write_in_xla = jax.jit(functools.partial(kvjax.reshape_and_cache_flash, implementation="xla"))


def cache_struct(spec: AttentionSpec, num_blocks: int, sharding: NamedSharding | None = None) -> KVCache:
    """Returns the shape of a cache, to lower programs with."""
    cache = jax.eval_shape(functools.partial(KVCache.allocate, spec, num_blocks, sharding=sharding))
    if sharding is None:
        return cache
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), cache, cache.shardings)


@functools.cache
def compiled_write(
    spec: AttentionSpec,
    num_blocks: int,
    sharding: NamedSharding | None,
    batch: Batch,
    implementation: str | None,
    donated: bool = True,
    unique_slots: bool = True,
) -> Any:
    """Compiles a write of a batch under `jit`, once for each combination of shapes and options."""
    write = jax.jit(
        functools.partial(kvjax.reshape_and_cache_flash, unique_slots=unique_slots, implementation=implementation),
        donate_argnames="cache" if donated else (),
    )
    cache = cache_struct(spec, num_blocks, sharding)
    return write.lower(batch.key, batch.value, cache, batch.slot_mapping, **scales()).compile()


class Write:
    """Writes under `jit`, each into the cache that the previous write returned.

    Options are those of `compiled_write`. By default the cache is `donated`, so that writes are in place, and
    `unique_slots` is set, as in an engine.
    """

    def __init__(self, cache: KVCache, batches: Sequence[Batch], implementation: str | None, **options: bool) -> None:
        self.cache, self.batches, self.donated = cache, batches, options.get("donated", True)
        self.first_pointers = pointers(cache)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batches[0])
        sizes = cache.spec, cache.num_blocks, cache.sharding
        self.compiled = compiled_write(*sizes, batch, implementation, **options)

    def __call__(self, number: int) -> jax.Array:
        batch = self.batches[number % len(self.batches)]
        self.cache = self.compiled(batch.key, batch.value, self.cache, batch.slot_mapping, **scales())
        return self.cache.kv

    def check(self, expected: KVCache) -> None:
        """Compares every byte of the cache after the first write, and checks that a donated cache has not moved."""
        if self.donated and pointers(self.cache) != self.first_pointers:
            raise AssertionError("the write was not in place: it returned a cache elsewhere in memory")
        check_same_bits(self.cache.kv, expected.kv)


def on_each_device(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array with `x` as the shard of every device: its dimensions with an axis of the mesh are longer."""
    divided = dict(enumerate(sharding.spec))
    shape = [size * (sharding.mesh.size if divided.get(dim) else 1) for dim, size in enumerate(x.shape)]
    parts = [jax.device_put(x, device) for device in sharding.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)


def pointers(of: Any) -> list[int]:
    """Returns the addresses of all arrays of a tree, on each of their devices."""
    return [shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(of) for shard in leaf.addressable_shards]


def temporary_bytes(compiled: Any) -> int:
    """Returns the temporary memory of a compiled program, excluding arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def check_same_bits(got: jax.Array, expected: jax.Array) -> None:
    """Raises `AssertionError` if any bit of two arrays differs."""
    if different := int(_count_different(got, expected)):
        raise AssertionError(f"{different:,} of {got.size:,} elements differ from what they must be")


@jax.jit
def _count_different(got: jax.Array, expected: jax.Array) -> jax.Array:
    bits = np.dtype(f"uint{8 * got.dtype.itemsize}")
    differ = lax.bitcast_convert_type(got, bits) != lax.bitcast_convert_type(expected, bits)
    return jnp.sum(differ, dtype=jnp.uint32)


def check_codes(got: jax.Array, expected: jax.Array, *, bits: int = 8) -> int:
    """Compares uint8 codes of a sign and a magnitude that is ordered like its value, in `bits` 4 two per byte.

    A peer may round a few codes differently, because it divides differently. Returns the number of codes that differ;
    `AssertionError` if one does by more than a step, or more than `CODES_APART` of the written ones differ.
    """
    different, far, written = map(int, _count_different_codes(got, expected, bits))
    if far or different > written * CODES_APART:
        raise AssertionError(
            f"{different:,} of {written:,} codes differ from what they must be, {far:,} by more than a step;"
            f" expected at most {CODES_APART:.1%}, by one step"
        )
    return different


@functools.partial(jax.jit, static_argnums=2)
def _count_different_codes(got: jax.Array, expected: jax.Array, bits: int) -> list[jax.Array]:
    def codes(stored: jax.Array) -> jax.Array:
        return jnp.stack([stored & 0xF, stored >> 4]) if bits == 4 else stored

    def in_order(codes: jax.Array) -> jax.Array:
        sign, codes = 1 << (bits - 1), codes.astype(jnp.int32)
        return jnp.where(codes & sign, -(codes & (sign - 1)), codes)

    steps = jnp.abs(in_order(codes(got)) - in_order(codes(expected)))
    different = codes(got) != codes(expected)
    return [jnp.sum(each, dtype=jnp.uint32) for each in (different, steps > 1, codes(expected ^ POISON) != 0)]
