"""Exports from and imports into caches divided among four simulated CPU devices, by heads, by blocks and by both."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import KVCache, KVCacheDType
from support.helpers import kv_tokens, simple_spec

MESH = jax.make_mesh((2, 2), ("blocks", "heads"))
BY_HEADS = P(None, None, None, "heads")
FROM, TO = np.array([3, 0, 6]), np.array([5, 4, 1])


def states_of_shares() -> None:
    states = np.random.default_rng(0).standard_normal((6, 4, 3)).astype(np.float32)
    cache = KVCache.allocate(simple_spec(num_kv_heads=4), 8)
    whole = kvjax.export_blocks([cache, states], [], state=3)
    for axes in (P(), P(None, "heads"), P("blocks"), P("blocks", "heads")):
        divided = jax.device_put(states, NamedSharding(MESH, axes))
        assert kvjax.export_blocks([cache, divided], [], state=3) == whole, axes
        cache, written = kvjax.import_blocks(whole, [cache, divided], [], state=5)
        assert written.sharding.is_equivalent_to(NamedSharding(MESH, axes), 3), axes
        np.testing.assert_array_equal(np.asarray(written), np.concatenate([states[:5], states[3:4]]))


def main() -> None:
    states_of_shares()
    write = jax.jit(kvjax.reshape_and_cache_flash, donate_argnums=2)
    for dtype in (KVCacheDType.BFLOAT16, KVCacheDType.NVFP4):
        spec = simple_spec(dtype, num_kv_heads=4)
        key, value = kv_tokens(spec, 8 * spec.block_size, specials=False)
        slots = np.arange(8 * spec.block_size, dtype=np.int32)
        whole = export = None
        for axes in (None, BY_HEADS, P("blocks"), P("blocks", None, None, "heads")):
            where = None if axes is None else NamedSharding(MESH, axes)
            cache = write(key, value, KVCache.allocate(spec, 8, sharding=where), slots)
            export = kvjax.export_blocks(cache, FROM)
            whole = whole or export
            assert export == whole, (dtype, axes)
            written = kvjax.import_blocks(whole, KVCache.allocate(spec, 8, sharding=where), TO)
            assert written.sharding == cache.sharding
            expected = kvjax.gather_kv(cache, np.tile(FROM, (2, 1)), np.full(2, 3 * spec.block_size, np.int32))
            assert kvjax.export_blocks(written, TO) == whole, (dtype, axes)
            if axes is None or axes == BY_HEADS:  # a sequence's blocks are in one share
                got = kvjax.gather_kv(written, np.tile(TO, (2, 1)), np.full(2, 3 * spec.block_size, np.int32))
                for one, two in zip(got, expected, strict=True):
                    np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(two, np.float32))


if __name__ == "__main__":
    main()
