"""Divided caches on eight devices: by heads, by blocks, and under explicit axes (docs/scaling.md).

XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python examples/several_devices.py
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax

mesh = jax.make_mesh((2, 4), ("data", "tensor"))
spec = kvjax.FullAttentionSpec(16, 8, 128, dtype=kvjax.KVCacheDType.NVFP4)
by_head = NamedSharding(mesh, P(None, None, None, "tensor"))
cache = kvjax.KVCache.allocate(spec, num_blocks=64, sharding=by_head)  # two heads on each device

write = jax.jit(kvjax.reshape_and_cache_flash, donate_argnums=2)
key, value = jax.random.normal(jax.random.key(0), (2, 20, 8, 128), jnp.bfloat16)
cache = write(key, value, cache, jnp.arange(20))
keys, values = kvjax.gather_kv(cache, jnp.array([[0, 1]]), jnp.array([20]))  # divided by heads as the cache is

# More devices than KV heads: devices that hold copies divide the query heads.
heads = P(None, ("tensor", "data"))  # the query heads of a KV head, divided among the devices that hold it
attend = jax.shard_map(
    kvjax.paged_attention,
    mesh=mesh,
    in_specs=(heads, cache.partition_specs, P(), P()),
    out_specs=heads,
    check_vma=False,
)
query = jax.device_put(jnp.ones((1, 32, 128), jnp.bfloat16), NamedSharding(mesh, heads))
whole = NamedSharding(mesh, P())
attended = jax.jit(attend)(query, cache, *jax.device_put((jnp.array([[0, 1]]), jnp.array([20])), whole))

# Data parallel with a scheduler for each engine: slots begin at 0 on each device.
by_block = NamedSharding(mesh, P("data", None, None, "tensor"))
engines = kvjax.KVCache.allocate(spec, num_blocks=64, sharding=by_block)  # 32 blocks in each of two engines

tokens = P("data", "tensor")
step = jax.shard_map(
    kvjax.reshape_and_cache_flash,
    mesh=mesh,
    in_specs=(tokens, tokens, engines.partition_specs, P("data")),
    out_specs=engines.sharding.spec,
    check_vma=False,  # lets kernels run
)
key, value = (jax.device_put(x, NamedSharding(mesh, tokens)) for x in (key, value))  # ten tokens of each engine
slots = jax.device_put(jnp.tile(jnp.arange(10), 2), NamedSharding(mesh, P("data")))
engines = jax.jit(step, donate_argnums=2)(key, value, engines, slots)

# Under explicit axes tokens are gathered before a write with the slots of the whole cache.
with jax.set_mesh(mesh):
    key, value = (jax.reshard(x, P(None, "tensor", None)) for x in (key, value))
    slots = jnp.concatenate([jnp.arange(10), 32 * 16 + jnp.arange(10)])  # of the whole cache
    engines = write(key, value, engines, slots)
