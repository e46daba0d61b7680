"""Divided caches as 8 B200 will hold them: a device's program is that of its own share, and nothing more."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import gpu_compile
from support.gpu_compile import compile_for
from support.helpers import FEW_DTYPES, KERNEL_DTYPES, matrix, simple_spec

from kvjax import (
    AttentionSpec,
    KVCache,
    KVCacheDType,
    gather_kv,
    paged_attention,
    reshape_and_cache_flash,
)

pytestmark = pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))

NUM_BLOCKS, NUM_TOKENS, NUM_SEQS = 4096, 64, 8
MESHES = {
    "heads": AbstractMesh((8,), ("tensor",), (AxisType.Explicit,)),
    "heads and blocks": AbstractMesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2),
}
OPERATIONS = {"gather_kv": gather_kv, "paged_attention": paged_attention}


def array(shape: tuple[int, ...], dtype: object, mesh: AbstractMesh, *axes: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


def cache_on(mesh: AbstractMesh, spec: AttentionSpec) -> KVCache:
    blocks = "data" if "data" in mesh.axis_names else None
    shape = spec.cache_shape(NUM_BLOCKS)  # without an axis of keys and values where their rows differ
    sharding = NamedSharding(mesh, P(blocks, *[None] * (len(shape) - 3), "tensor"))
    kv = jax.ShapeDtypeStruct(shape, spec.array_dtype, sharding=sharding)
    return KVCache(kv, spec, sharding)


def make_spec(dtype: KVCacheDType) -> AttentionSpec:
    return simple_spec(dtype, block_size=16, num_kv_heads=8, head_size=128)


def write(key, value, cache, slots, implementation="mosaic"):
    return reshape_and_cache_flash(key, value, cache, slots, k_scale=0.5, v_scale=2.0, implementation=implementation)


def compile_write(dtype: KVCacheDType, division: str, implementation: str | None):
    mesh = MESHES[division]
    rows = array((NUM_TOKENS, 8, 128), jnp.bfloat16, mesh, None, "tensor")
    args = rows, rows, cache_on(mesh, make_spec(dtype)), array((NUM_TOKENS,), jnp.int32, mesh)
    return compile_for("b200", functools.partial(write, implementation=implementation), *args, donate_argnums=2)


@matrix({"dtype": KERNEL_DTYPES, "division": MESHES}, few={"dtype": FEW_DTYPES})
def test_a_write_is_one_kernel_in_place_on_each_device(dtype, division):
    program = compile_write(dtype, division, None)
    assert not program.collectives
    assert [kernel.spill_bytes for kernel in program.kernels] == [0]
    assert program.alias_size == NUM_BLOCKS * make_spec(dtype).page_size_bytes // 8
    if division == "heads":
        assert program.device_ops == ("custom-call",)
        assert program.temp_size == 0
    else:  # and before it one that makes of slots those of its own blocks
        assert program.temp_size <= 4096
        assert len(program.device_ops) <= 3


@matrix({"dtype": FEW_DTYPES, "division": MESHES})
def test_xla_writes_in_place_on_each_device(dtype, division):
    program = compile_write(dtype, division, "xla")
    assert not program.collectives
    assert not program.kernels
    assert program.alias_size == NUM_BLOCKS * make_spec(dtype).page_size_bytes // 8
    assert program.temp_size < 16 * 2 * NUM_TOKENS * 8 * 128  # float64 quotients of its tokens, and their codes


@pytest.mark.full
@matrix(
    {"operation": OPERATIONS, "dtype": KERNEL_DTYPES, "division": MESHES},
    few={"dtype": FEW_DTYPES},
    valid=lambda case: case["operation"] == "gather_kv" or case["dtype"] in FEW_DTYPES,
)
def test_reads_need_no_communication_between_devices(operation, dtype, division):
    """Sequences are divided as blocks are, and the results by sequences and heads."""
    operation = OPERATIONS[operation]
    mesh = MESHES[division]
    seqs = "data" if "data" in mesh.axis_names else None
    tables = array((NUM_SEQS, 4), jnp.int32, mesh, seqs), array((NUM_SEQS,), jnp.int32, mesh, seqs)
    query = [array((NUM_SEQS, 16, 128), jnp.bfloat16, mesh, seqs, "tensor")] if operation is paged_attention else []
    program = compile_for("b200", operation, *query, cache_on(mesh, make_spec(dtype)), *tables)
    assert not program.collectives
    assert len(program.kernels) == (1 if operation is gather_kv else 2)  # attention, and the merge of its parts
    dense = NUM_SEQS * 4 * 16 * 8 * 128 // 8  # elements of keys on one device
    assert program.temp_size < 64 * dense < NUM_BLOCKS * make_spec(dtype).page_size_bytes


def write_layers(cache, keys, values, slots):
    def layer(cache, per_layer):
        key, value, layer = per_layer
        return reshape_and_cache_flash(key, value, cache, slots, layer=layer, implementation="mosaic"), None

    return jax.lax.scan(layer, cache, (keys, values, jnp.arange(cache.num_layers)))[0]


@pytest.mark.parametrize("division", MESHES)
def test_a_scan_over_layers_is_in_place_on_each_device(division):
    spec, num_layers = make_spec(KVCacheDType.NVFP4), 4
    given = MESHES[division]
    mesh = AbstractMesh(given.axis_sizes, given.axis_names, (AxisType.Auto,) * len(given.axis_names))
    sharding = NamedSharding(mesh, P("data" if "data" in mesh.axis_names else None, None, None, None, "tensor"))
    shape = spec.cache_shape(NUM_BLOCKS, num_layers)
    cache = KVCache(jax.ShapeDtypeStruct(shape, spec.array_dtype, sharding=sharding), spec, sharding, num_layers)
    rows = array((num_layers, NUM_TOKENS, 8, 128), jnp.bfloat16, mesh, None, None, "tensor")
    program = compile_for(
        "b200", write_layers, cache, rows, rows, array((NUM_TOKENS,), jnp.int32, mesh), donate_argnums=0
    )
    assert not program.collectives
    assert [kernel.spill_bytes for kernel in program.kernels] == [0]
    assert program.alias_size == num_layers * NUM_BLOCKS * spec.page_size_bytes // 8
    assert program.temp_size < 2**20 < program.alias_size


def write_unnamed(key, value, kv, slots, spec):
    return reshape_and_cache_flash(key, value, KVCache(kv, spec), slots, implementation="xla").kv


@pytest.mark.full
def test_communication_between_devices_is_reported():
    """A traced NVFP4 cache that does not say how it is divided is one whose pages hold the heads of all devices."""
    mesh, spec = MESHES["heads and blocks"], make_spec(KVCacheDType.NVFP4)
    rows = array((NUM_TOKENS, 8, 128), jnp.bfloat16, mesh, None, "tensor")
    args = rows, rows, cache_on(mesh, spec).kv, array((NUM_TOKENS,), jnp.int32, mesh)
    program = compile_for("b200", functools.partial(write_unnamed, spec=spec), *args, donate_argnums=2)
    assert program.collectives


def write_within(key, value, cache, slots, axis):
    spec = P(*(entry if entry == axis else None for entry in cache.sharding.spec))
    rows = P(None, axis if axis == "tensor" else None)
    return jax.shard_map(
        write,
        in_specs=(rows, rows, spec, P()),
        out_specs=spec,
        mesh=cache.sharding.mesh,
        axis_names={axis},
        check_vma=False,
    )(key, value, cache, slots)


@pytest.mark.full
@matrix({"sizes": [(2, 4), (1, 8)], "axis": ["data", "tensor"]})
def test_a_shard_map_over_some_axes_leaves_the_others_to_the_write(sizes, axis):
    mesh, spec = AbstractMesh(sizes, ("data", "tensor"), (AxisType.Auto,) * 2), make_spec(KVCacheDType.NVFP4)
    rows = array((NUM_TOKENS, 8, 128), jnp.bfloat16, mesh, None, "tensor")
    args = rows, rows, cache_on(mesh, spec), array((NUM_TOKENS,), jnp.int32, mesh)
    program = compile_for("b200", functools.partial(write_within, axis=axis), *args, donate_argnums=2)
    assert not program.collectives
    assert len(program.kernels) == 1
    assert program.alias_size == NUM_BLOCKS * spec.page_size_bytes // 8
