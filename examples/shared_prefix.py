"""Reads a prefix that sequences share, such as a system prompt, once: attends to it and to their own tokens separately.

    python examples/shared_prefix.py                                       # small, on any machine
    python examples/shared_prefix.py --sequences=64 --prefix=8192 --own=256 --heads=32 --kv-heads=8 --head-size=128

The rows of all sequences form one query over the prefix. They do not attend to each other: the positions of their own
tokens, after the prefix, have no block in that call's table. `merge_attention_states` joins the two results.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

BLOCK_SIZE = 16


def shared_prefix_attention(
    query: jax.Array,
    cache: kvjax.KVCache,
    prefix_table: jax.Array,
    table: jax.Array,
    own_lens: jax.Array,
    **options: Any,
) -> jax.Array:
    """Attends with one row per sequence, `[num_seqs, num_heads, head_size]`, to the prefix and its own tokens.

    `prefix_table` `[num_prefix_blocks]` has whole blocks; `table` `[num_seqs, max_blocks]` and `own_lens` describe the
    tokens after it. `options` go to both calls: scales, `sm_scale`, `logits_soft_cap`, `implementation`. Not `sinks` or
    `sliding_window`, which would apply to each part.
    """
    num_seqs, size = query.shape[0], cache.spec.block_size
    none = jnp.full(-(-num_seqs // size), -1, jnp.int32)  # the rows' own positions: no block
    prefix = kvjax.ragged_paged_attention(
        query,
        cache,
        jnp.concatenate([prefix_table, none])[None],
        jnp.array([prefix_table.shape[0] * size + num_seqs]),
        jnp.array([0, num_seqs]),
        max_q_len=num_seqs,
        decode_q_len=0,
        return_lse=True,
        **options,
    )
    own = kvjax.paged_attention(query, cache, table, own_lens, return_lse=True, **options)
    out, _ = kvjax.merge_attention_states(*zip(prefix, own, strict=True))
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("sequences", 16), ("prefix", 256), ("own", 40), ("heads", 8), ("kv-heads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", choices=[dtype.value for dtype in kvjax.STORED_KV_CACHE_DTYPES], default="nvfp4")
    given = parser.parse_args(arguments)

    if given.prefix % BLOCK_SIZE:
        parser.error(f"--prefix: got {given.prefix}, expected a multiple of the block size, {BLOCK_SIZE}")
    spec = kvjax.FullAttentionSpec(BLOCK_SIZE, given.kv_heads, given.head_size, dtype=kvjax.KVCacheDType(given.dtype))
    prefix_blocks, own_blocks = given.prefix // spec.block_size, -(-given.own // spec.block_size)
    num_blocks = prefix_blocks + given.sequences * own_blocks
    cache = kvjax.KVCache.allocate(spec, num_blocks)
    tokens = jax.random.normal(
        jax.random.key(0), (2, num_blocks * BLOCK_SIZE, given.kv_heads, given.head_size), jnp.bfloat16
    )
    write = jax.jit(kvjax.reshape_and_cache_flash, donate_argnums=2, static_argnames="unique_slots")
    cache = write(*tokens, cache, jnp.arange(num_blocks * BLOCK_SIZE), unique_slots=True)
    query = jax.random.normal(jax.random.key(1), (given.sequences, given.heads, given.head_size), jnp.bfloat16)

    prefix_table = jnp.arange(prefix_blocks, dtype=jnp.int32)
    table = prefix_blocks + jnp.arange(given.sequences * own_blocks, dtype=jnp.int32).reshape(given.sequences, -1)
    own_lens = jnp.full(given.sequences, given.own, jnp.int32)
    whole_table = jnp.concatenate([jnp.broadcast_to(prefix_table, (given.sequences, prefix_blocks)), table], axis=1)
    calls = {
        "each reads the prefix": functools.partial(
            jax.jit(kvjax.paged_attention), query, cache, whole_table, own_lens + given.prefix
        ),
        "all read it once": functools.partial(
            jax.jit(shared_prefix_attention), query, cache, prefix_table, table, own_lens
        ),
    }
    outs = []
    for name, call in calls.items():
        outs.append(np.asarray(call(), np.float32))  # compiles, too
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(10)])
        print(f"{name}: {1e5 * (time.perf_counter() - start):,.0f} us")
    print(f"largest difference: {np.abs(outs[0] - outs[1]).max():.2g}, of values up to {np.abs(outs[0]).max():.2g}")


if __name__ == "__main__":
    main()
