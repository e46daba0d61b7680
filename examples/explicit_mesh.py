"""A step of attention on a mesh of explicit axes, with heads divided over two devices (docs/serving.md).

XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu python examples/explicit_mesh.py
"""

import functools

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 16

mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Explicit,))
by_head = NamedSharding(mesh, P(None, None, None, "tensor"))
spec = kvjax.FullAttentionSpec(16, NUM_KV_HEADS, HEAD_SIZE, dtype=kvjax.parse_kv_cache_dtype("fp8"))
cache = kvjax.KVCache.allocate(spec, num_blocks=8, sharding=by_head)
step = kvjax.StepMetadata(np.array([[0, 1]]), np.array([20]), np.array([0, 20]), np.arange(20))


@functools.partial(jax.jit, donate_argnums=3)
def attend(query, key, value, cache, step):
    step = jax.tree.map(lambda x: jax.reshard(x, P()), step)  # whole on every device
    cache = kvjax.reshape_and_cache_flash(key, value, cache, step.slot_mapping, unique_slots=True)
    return kvjax.ragged_paged_attention(query, cache, step.block_table, step.seq_lens, step.cu_q_lens), cache


with jax.set_mesh(mesh):
    heads = [
        jax.device_put(np.ones((20, number, HEAD_SIZE), np.float32), NamedSharding(mesh, P(None, "tensor", None)))
        for number in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    ]
    attended, cache = attend(*heads, cache, step)  # divided by heads, as the query is
