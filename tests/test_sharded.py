"""Caches divided among devices: what is refused here, all else in programs with several devices or processes."""

from __future__ import annotations

import dataclasses
import socket
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from support import reference
from support.helpers import assert_same_bytes, kv_tokens, page_bytes, simple_spec
from support.programs import run_program

from kvjax import KVCache, KVCacheDType, KVCacheTypeError, KVCacheValueError, reshape_and_cache_flash

QUICK = "within_shard_map", "layers", "checked_values", "blocks_out_of_range_are_not_read"


@pytest.mark.parametrize(
    ("axis_type", "formats", "checks"),
    [
        ("Auto", "few", QUICK),
        pytest.param("Explicit", "few", (), marks=pytest.mark.nightly),
        pytest.param("Auto", "few", (), marks=pytest.mark.nightly),
        pytest.param("Explicit", "full", (), marks=pytest.mark.nightly),
    ],
)
def test_eight_devices_serve_as_one_does(axis_type, formats, checks):
    """A dtype of each kind, at night every dtype and layout, by heads, by blocks and both: see `sharded_caches.py`."""
    program = run_program("sharded_caches.py", axis_type, "2", "4", formats, *checks, num_devices=8)
    output, _ = program.communicate()
    assert program.returncode == 0, output


@pytest.mark.gpu
@pytest.mark.parametrize(("axis_type", "data", "tensor"), [("Auto", "1", "2"), ("Explicit", "2", "1")])
def test_two_gpus_serve_as_one_does(axis_type, data, tensor):
    """The same on two GPUs, by heads or by blocks, of both implementations."""
    if jax.device_count("cuda") < 2:
        pytest.skip("needs two GPUs")
    checks = "every_format", "within_shard_map", "transformations", "programs_are_reused", "split_views"
    program = run_program("sharded_caches.py", axis_type, data, tensor, "full", *checks, num_devices=None)
    output, _ = program.communicate()
    assert program.returncode == 0, output


@pytest.mark.full
def test_devices_of_two_processes_serve_as_one_does():
    """Devices of two processes (`jax.distributed`), of which each checks its own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    programs = [run_program("two_processes.py", port, str(i), num_devices=4, seconds=200) for i in range(2)]
    outputs = [program.communicate()[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], "\n".join(outputs)


TENSOR_8 = AbstractMesh((8,), ("tensor",))
POOL = {"page_size_padded": 20_000}


REPLICAS = AbstractMesh((2, 8), ("replica", "tensor"), (AxisType.Auto,) * 2)
REFUSED = [
    (
        {},
        TENSOR_8,
        P(None, None, "tensor"),
        "sharding: got P(None, None, 'tensor') for an array of 5 dimensions, expected one that divides blocks"
        " (dimension 0), KV heads (dimension 3) or both, such as P('data', None, None, 'tensor')",
    ),
    ({"layout": "HND"}, TENSOR_8, P(None, None, None, "tensor"), "KV heads (dimension 2) or both, such as P('data', N"),
    ({"head_size_v": 32}, TENSOR_8, P(None, "tensor"), "of 4 dimensions, expected one that divides blocks (dimension"),
    ({}, REPLICAS, P(None, None, None, P.UNCONSTRAINED), "expected one that divides blocks"),
    ({}, TENSOR_8, P(*[None] * 5, "tensor"), "for an array of 5 dimensions"),
    (POOL, TENSOR_8, P(None, "tensor"), "a pool of 2 dimensions that layers share, expected one that divides blocks"),
    (
        {},
        REPLICAS,
        P(None, None, None, ("replica", "tensor")),
        "sharding: got 16 devices along replica/tensor for num_kv_heads=8, expected a divisor of it. To replicate"
        " heads over more devices than heads, use a mesh of two axes",
    ),
    ({}, TENSOR_8, P("tensor"), "num_blocks: got 12, expected a multiple of 8, the number of shares in P('tensor',)"),
]


@pytest.mark.parametrize(("changes", "mesh", "spec", "message"), REFUSED)
@pytest.mark.parametrize("dtype", [KVCacheDType.BFLOAT16, KVCacheDType.NVFP4], ids=lambda dtype: dtype.value)
def test_what_cannot_be_divided_so_is_refused(dtype, changes, mesh, spec, message):
    with pytest.raises(KVCacheValueError) as raised:
        KVCache.allocate(simple_spec(dtype, num_kv_heads=8, **changes), 12, sharding=NamedSharding(mesh, spec))
    assert message in str(raised.value)


def test_several_devices_need_a_sharding_with_names():
    several = mock.Mock(spec=Sharding, num_devices=2)
    with pytest.raises(KVCacheTypeError, match="for several devices, expected a NamedSharding"):
        KVCache.allocate(simple_spec(), 4, sharding=several)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_cache_on_a_mesh_of_one_device_is_written(axis_type, by_hand):
    """Of explicit axes a type divides what one device has whole."""
    spec = simple_spec(KVCacheDType.NVFP4)
    sharding = NamedSharding(jax.make_mesh((1,), ("tensor",), (axis_type,)), P(None, None, None, "tensor"))
    cache = KVCache.allocate(spec, 4, sharding=sharding)
    assert cache.local_spec == spec
    cache = KVCache(cache.kv, spec) if by_hand else cache
    tokens, slots = kv_tokens(spec, 3), np.array([3, -1, 9], np.int32)
    expected = reference.write(page_bytes(cache), spec, *tokens, slots, 1.0, 1.0)
    assert_same_bytes(page_bytes(jax.jit(reshape_and_cache_flash)(*tokens, cache, slots)), expected)


def test_the_spec_of_a_device_has_its_heads():
    spec = simple_spec(KVCacheDType.NVFP4, num_kv_heads=8)
    sharding = NamedSharding(TENSOR_8, P(None, None, None, "tensor"))
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(4), spec.array_dtype), spec, sharding)
    assert cache.local_spec == dataclasses.replace(spec, num_kv_heads=1)
    assert 8 * cache.local_spec.page_size_bytes == spec.page_size_bytes


def test_two_devices_divide_a_model():
    program = run_program("divided_llama.py", num_devices=2)
    output, _ = program.communicate()
    assert program.returncode == 0, output
