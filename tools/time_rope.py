"""Times `rope_and_cache` on this GPU, and for comparison the write, a copy of the queries, and a lookup.

The lookup stores the table's row of each token's position, and nothing else: no rotation can take less.

    PYTHONPATH=. python tools/time_rope.py [--dtype=bfloat16 nvfp4] [--in-cache]

Times are device times (CUPTI) of calls whose keys, values and queries are in memory, not in the L2 cache: calls
alternate between batches of 128 MiB together. With --in-cache there are four batches, which the L2 cache holds if
tokens are few. 32 query heads, 8 KV heads of 128, a table of 4,096 positions. Fails if bytes differ from XLA's on the
CPU; times are not checked.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

import kvjax
from benchmarks import copies, timing
from kvjax.kernels import compat

HEADS, KV_HEADS, HEAD_SIZE, POSITIONS = 32, 8, 128, 4096
TOTAL_BYTES = 128 << 20
MIN_BATCHES = 4
BARS = {64: "<= 1.30 x the write", 16_384: "<= 1.15 x the write, and a copy of the queries"}
STATIC = ("is_neox", "implementation")

_rope = jax.jit(
    functools.partial(kvjax.rope_and_cache, unique_slots=True), static_argnames=STATIC, donate_argnames="cache"
)
_write = jax.jit(functools.partial(kvjax.reshape_and_cache_flash, unique_slots=True), donate_argnames="cache")


@jax.jit
def _look_up(positions: jax.Array, table: jax.Array) -> jax.Array:
    """The rows `[num_tokens, HEAD_SIZE]` of a table, a program for each."""

    def look_up(positions: Any, table: Any, out: Any) -> None:
        token = lax.axis_index("token")
        row = compat.load(table.at[positions[token]], plgpu.Layout.WG_STRIDED((HEAD_SIZE,), vec_size=1))
        compat.store(out.at[token], row)

    kernel = plgpu.kernel(
        look_up,
        out_type=jax.ShapeDtypeStruct((positions.size, HEAD_SIZE), table.dtype),
        grid=(positions.size,),
        grid_names=("token",),
        compiler_params=compat.COMPILER_PARAMS,
    )
    return kernel(positions, table)


def time_case(dtype: kvjax.KVCacheDType, num_tokens: int, is_neox: bool, in_cache: bool) -> str:
    """Returns a line of the table."""
    spec = kvjax.FullAttentionSpec(16, KV_HEADS, HEAD_SIZE, dtype=dtype)
    rng = np.random.default_rng(0)
    num_blocks = max(4 * num_tokens // spec.block_size, 64)

    def batch(seed: int) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        shapes = [(num_tokens, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        keys = jax.random.split(jax.random.key(seed), 3)
        rows = tuple(jax.random.normal(*each, jnp.bfloat16) for each in zip(keys, shapes, strict=True))
        slots = rng.permutation(num_blocks * spec.block_size)[:num_tokens].astype(np.int32)
        return rows, jnp.asarray(slots), jnp.asarray(rng.integers(0, POSITIONS, num_tokens).astype(np.int32))

    row_bytes = num_tokens * (HEADS + 2 * KV_HEADS) * HEAD_SIZE * 2
    num_batches = MIN_BATCHES if in_cache else max(MIN_BATCHES, TOTAL_BYTES // row_bytes)
    batches = [batch(seed) for seed in range(num_batches)]
    angles = np.arange(POSITIONS)[:, None] / 10000.0 ** (np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    table = jnp.asarray(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), jnp.float32)
    cache = kvjax.KVCache.allocate(spec, num_blocks)

    def rope(number: int) -> Any:
        nonlocal cache
        rows, slots, positions = batches[number % num_batches]
        query, cache = _rope(*rows, cache, slots, positions, table, is_neox=is_neox, implementation="mosaic")
        return query

    def write(number: int) -> Any:
        nonlocal cache
        (_, key, value), slots, _ = batches[number % num_batches]
        cache = _write(key, value, cache, slots)
        return cache.kv

    def look_up(number: int) -> Any:
        return _look_up(batches[number % num_batches][2], table)

    query, written = np.asarray(rope(0)), np.asarray(cache.kv)
    with jax.default_device(jax.devices("cpu")[0]):
        rows, slots, positions = batches[0]
        given = [jnp.asarray(np.asarray(x)) for x in (*rows, slots, positions, table)]
        expected = _rope(
            *given[:3], kvjax.KVCache.allocate(spec, num_blocks), *given[3:], is_neox=is_neox, implementation="xla"
        )
    if (
        query.tobytes() != np.asarray(expected[0]).tobytes()
        or written.tobytes() != np.asarray(expected[1].kv).tobytes()
    ):
        raise AssertionError(f"{dtype.value}, {num_tokens} tokens, {is_neox=}: the kernel's bytes are not those of XLA")
    both, alone = timing.measure(rope), timing.measure(write)
    copied = copies.measure(2 * rows[0].nbytes)
    looked_up = timing.measure(look_up)
    bound = 1.3 * alone.seconds if num_tokens == 64 else 1.15 * alone.seconds + copied.seconds
    reached = "pass" if both.seconds <= bound else "falls short"
    return (
        f"{dtype.value:12} {num_tokens:6} {'NeoX ' if is_neox else 'GPT-J'}"
        f" rope_and_cache {both.seconds * 1e6:7.2f} us, write {alone.seconds * 1e6:7.2f} us,"
        f" copy of queries {copied.seconds * 1e6:7.2f} us,"
        f" lookup {looked_up.seconds * 1e6:7.2f} us, {both.clock}; bar"
        f" {BARS[num_tokens]}: {bound * 1e6:.2f} us, {reached}"
    )


def main() -> None:
    """Times each requested dtype, for few and many tokens, in both pairings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stored = [dtype.value for dtype in kvjax.STORED_KV_CACHE_DTYPES]
    parser.add_argument("--dtype", nargs="*", choices=stored, default=["bfloat16", "fp8_e4m3", "nvfp4"])
    parser.add_argument("--in-cache", action="store_true", help="four batches, which the L2 cache may hold")
    flags = parser.parse_args()
    for name in flags.dtype:
        for num_tokens in BARS:
            for is_neox in (True, False):
                print(time_case(kvjax.KVCacheDType(name), num_tokens, is_neox, flags.in_cache), flush=True)


if __name__ == "__main__":
    main()
