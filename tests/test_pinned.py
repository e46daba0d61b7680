"""Caches in pinned host memory: pages copied to and from them, bytes and memory, and what does not take them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support import gpu_compile
from support.gpu_compile import compile_for
from support.helpers import assert_same_bytes, compilations, copied, kv_tokens, page_bytes, poisoned, simple_spec

import kvjax
from kvjax import (
    AttentionSpec,
    KVCache,
    KVCacheDType,
    KVCacheMemoryError,
    KVCacheTypeError,
    KVCacheValueError,
    UnsupportedError,
    copy_blocks,
    export_blocks,
    import_blocks,
    swap_blocks,
)
from kvjax.ops import blocks as blocks_module
from kvjax.ops import pinned

NVFP4 = KVCacheDType.NVFP4
NUM_BLOCKS, NUM_HOST_BLOCKS = 16, 12
# Eleven pairs, of which seven copy: padding of every kind.
PAIRS = np.array(
    [[0, 1], [-1, 5], [9, 2], [3, 11], [16, 4], [10, 0], [5, 12], [2, 6], [6, 7], [2**31 - 1, 3], [1, 9]], np.int32
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def memory(request: pytest.FixtureRequest):
    """Pinned host memory of the device that is the default."""
    device = jax.local_devices(backend=request.param)[0]
    with jax.default_device(device):
        yield SingleDeviceSharding(device, memory_kind="pinned_host")


def moved(cache: KVCache, memory: SingleDeviceSharding) -> KVCache:
    """The cache in pinned memory that no NumPy array shares, so that JAX writes it in place."""
    return dataclasses.replace(cache, kv=jax.device_put(cache.kv, memory))


def of_layers(spec: AttentionSpec, num_blocks: int, seed: int) -> KVCache:
    layers = [poisoned(spec, num_blocks, seed + layer).kv for layer in range(3)]
    return KVCache(jnp.stack(layers, axis=1), spec, None, 3)


@pytest.mark.parametrize("num_pairs", [0, 1, 2, 11])
@pytest.mark.parametrize("spec", [simple_spec(), simple_spec(NVFP4, layout="HND")], ids=["bfloat16", "nvfp4"])
def test_any_number_of_pages_is_swapped_out_and_back(memory, spec, num_pairs):
    cache, host = poisoned(spec, NUM_BLOCKS), moved(poisoned(spec, NUM_HOST_BLOCKS, seed=1), memory)
    before, host_before = page_bytes(cache), page_bytes(poisoned(spec, NUM_HOST_BLOCKS, seed=1))
    pairs = PAIRS[:num_pairs]
    pointer = host.kv.unsafe_buffer_pointer()
    swapped = swap_blocks(cache, host, pairs)
    assert swapped.kv.sharding == memory
    assert swapped.kv.unsafe_buffer_pointer() == pointer
    assert host.kv.is_deleted() == (num_pairs > 0)
    after = copied(before, host_before, pairs)
    assert_same_bytes(page_bytes(cache), before)

    other = poisoned(spec, NUM_BLOCKS, seed=2)
    expected = copied(after, page_bytes(other), pairs[:, ::-1])
    back = swap_blocks(swapped, other, pairs[:, ::-1])
    assert back.kv.sharding == cache.kv.sharding
    assert_same_bytes(page_bytes(back), expected)
    assert_same_bytes(page_bytes(swapped), after)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [P(None, None, None, "heads"), P()], ids=["heads", "nothing"])
def test_caches_on_a_mesh_of_one_device_are_swapped(memory, axes, axis_type):
    """A type that shows pinned memory would have XLA on a GPU scatter on the host."""
    mesh = jax.make_mesh((1,), ("heads",), (axis_type,), devices=[*memory.device_set])
    spec, where = simple_spec(), NamedSharding(mesh, axes)
    cache, host = (
        jax.device_put(poisoned(spec, number, seed), to)
        for number, seed, to in ((NUM_BLOCKS, 0, where), (NUM_HOST_BLOCKS, 1, where.with_memory_kind("pinned_host")))
    )
    own = pinned._of_one_device(host.kv.addressable_shards[0].data)
    assert jax.typeof(own).memory_space == jax.memory.Space.Device
    pointer = host.kv.unsafe_buffer_pointer()
    assert own.unsafe_buffer_pointer() == pointer
    del own
    swapped = swap_blocks(cache, host, PAIRS)
    assert swapped.kv.sharding == host.kv.sharding
    assert swapped.kv.unsafe_buffer_pointer() == pointer
    expected = copied(page_bytes(cache), page_bytes(poisoned(spec, NUM_HOST_BLOCKS, seed=1)), PAIRS)
    back = swap_blocks(swapped, jax.device_put(poisoned(spec, NUM_BLOCKS, seed=2), where), PAIRS[:, ::-1])
    wanted = copied(expected, page_bytes(poisoned(spec, NUM_BLOCKS, seed=2)), PAIRS[:, ::-1])
    assert_same_bytes(page_bytes(back), wanted)
    assert_same_bytes(page_bytes(swapped), expected)


@pytest.mark.parametrize("layer", [None, 2, jnp.int32(0), jnp.int32(3)], ids=["all", "2", "array", "none"])
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_pages_of_one_layer_or_of_all_are_swapped(memory, layer, x64):
    """A layer that is an array may be one that the caches do not have."""
    spec = simple_spec(NVFP4)
    cache, host = of_layers(spec, NUM_BLOCKS, 0), moved(of_layers(spec, NUM_HOST_BLOCKS, 5), memory)
    before, host_before = (np.asarray(of_layers(spec, *of).kv) for of in ((NUM_BLOCKS, 0), (NUM_HOST_BLOCKS, 5)))
    at = slice(None) if layer is None else slice(int(layer), int(layer) + 1)
    expected = host_before.copy()
    expected[:, at] = copied(before[:, at], host_before[:, at], PAIRS)
    pairs = PAIRS.astype(np.int64) if x64 else PAIRS
    with jax.enable_x64(x64):
        swapped = swap_blocks(cache, host, pairs, layer=layer)
        back = swap_blocks(swapped, of_layers(spec, NUM_BLOCKS, 9), pairs[:, ::-1], layer=layer)
    wanted = np.asarray(of_layers(spec, NUM_BLOCKS, 9).kv).copy()
    wanted[:, at] = copied(expected[:, at], wanted[:, at], PAIRS[:, ::-1])
    assert_same_bytes(np.asarray(swapped.kv), expected)
    assert_same_bytes(np.asarray(back.kv), wanted)


def test_separate_layers_are_swapped_to_and_between_pinned_caches(memory):
    specs = {"first": simple_spec(), "second": simple_spec(KVCacheDType.FP8_E4M3)}
    caches = {name: poisoned(spec, 4) for name, spec in specs.items()}
    hosts = {name: moved(poisoned(spec, 4, seed=1), memory) for name, spec in specs.items()}
    pairs = np.array([[3, 0], [1, 2], [0, 3]])
    is_cache = lambda value: isinstance(value, KVCache)  # noqa: E731
    swapped = jax.tree.map(lambda *two: swap_blocks(*two, pairs), caches, hosts, is_leaf=is_cache)
    for name, spec in specs.items():
        expected = copied(page_bytes(caches[name]), page_bytes(poisoned(spec, 4, seed=1)), pairs)
        other = moved(poisoned(spec, 4, seed=2), memory)
        between = swap_blocks(swapped[name], other, pairs[:, ::-1])
        assert between.kv.sharding == memory
        assert_same_bytes(page_bytes(between), copied(expected, page_bytes(poisoned(spec, 4, seed=2)), pairs[:, ::-1]))
        assert_same_bytes(page_bytes(swapped[name]), expected)


def test_numbers_of_pairs_share_their_programs(memory):
    spec = simple_spec(block_size=5, head_size=40)  # of no other test
    cache = jax.device_put(poisoned(spec, NUM_BLOCKS), *memory.device_set)  # committed, as results are
    host = moved(poisoned(spec, NUM_HOST_BLOCKS), memory)
    pairs = np.stack([np.arange(8), np.arange(8)[::-1]], axis=1)
    with compilations() as compiled:
        for num_pairs in (1, 7, 3, 5, 8, 2):
            host = swap_blocks(cache, host, pairs[:num_pairs])
            cache = swap_blocks(host, cache, pairs[:num_pairs, ::-1])
    names = "jit(_take)", "jit(_put)", "jit(take)", "jit(_scatter)"  # from and to device memory, from and to the host
    expected = dict.fromkeys(names, 4)
    assert {name: compiled.count(name) for name in expected} == expected, compiled


def test_pinned_memory_is_recognized_where_the_type_does_not_show_it(memory):
    """What `out_shardings` put into pinned memory has the type of an array in device memory."""
    spec = simple_spec()
    before, cache = page_bytes(poisoned(spec, 4)), poisoned(spec, 4)
    host = dataclasses.replace(cache, kv=jax.jit(lambda kv: kv + 0, out_shardings=memory)(jnp.zeros_like(cache.kv)))
    assert host.kv.sharding == memory
    swapped = swap_blocks(cache, host, np.array([[1, 0], [3, 2]]))
    expected = np.zeros_like(before)
    expected[[0, 2]] = before[[1, 3]]
    back = swap_blocks(swapped, poisoned(spec, 4, seed=1), np.array([[2, 0]]))
    assert_same_bytes(page_bytes(swapped), expected)
    assert_same_bytes(page_bytes(back)[0], before[3])
    with pytest.raises(UnsupportedError, match="pinned_host"):
        copy_blocks(host if not host.kv.is_deleted() else swapped, np.array([[0, 1]]))


def test_a_copy_that_fails_leaves_both_as_they_were(memory, monkeypatch: pytest.MonkeyPatch):
    """Of seven pages in three parts, the last part finds no memory."""
    spec, taken, calls = simple_spec(), blocks_module.taken_pages, []

    def fails(*args: Any) -> jax.Array:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        return taken(*args)

    monkeypatch.setattr(blocks_module, "taken_pages", fails)
    cache, host = poisoned(spec, NUM_BLOCKS), moved(poisoned(spec, NUM_HOST_BLOCKS, seed=1), memory)
    for source, destination, pairs in ((cache, host, PAIRS), (host, cache, PAIRS[:, ::-1])):
        calls.clear()
        with pytest.raises(MemoryError):
            swap_blocks(source, destination, pairs)
        assert_same_bytes(page_bytes(cache), page_bytes(poisoned(spec, NUM_BLOCKS)))
        assert_same_bytes(page_bytes(host), page_bytes(poisoned(spec, NUM_HOST_BLOCKS, seed=1)))


@pytest.mark.parametrize("dtype", [KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, NVFP4])
def test_an_allocated_cache_holds_zeros_and_its_scales_are_in_device_memory(memory, dtype):
    spec = simple_spec(dtype)
    host = KVCache.allocate(spec, 5, num_layers=2, sharding=memory, k_scale=np.float32([2, 0.5]))
    assert host.kv.sharding == memory
    # Of a copy: XLA does not write in place what a NumPy array views.
    assert not page_bytes(dataclasses.replace(host, kv=jax.device_put(host.kv, jax.memory.Space.Device))).any()
    cache = KVCache.allocate(spec, 3, num_layers=2, k_scale=np.float32([2, 0.5]))
    assert (host.k_scale is None) == (dtype is KVCacheDType.BFLOAT16)
    if host.k_scale is not None:
        assert host.k_scale.sharding.memory_kind == "device"
    host = swap_blocks(cache, host, np.array([[0, 4]]))
    assert host.kv.sharding == memory
    with pytest.raises(KVCacheMemoryError, match=r"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB .* limits pinned host memory"):
        KVCache.allocate(spec, 2**40, sharding=memory)


def test_what_numpy_views_does_not_change(memory):
    """A GPU's runtime donates no array that NumPy views; a CPU's writes into a copy of it."""
    spec, pairs = simple_spec(), np.array([[0, 1]])
    cache, host = poisoned(spec, 4), moved(poisoned(spec, 4, seed=1), memory)
    before, view = page_bytes(poisoned(spec, 4, seed=1)), np.asarray(host.kv)
    if cache.kv.device.platform == "cpu":
        swapped = swap_blocks(cache, host, pairs)
        assert_same_bytes(page_bytes(swapped), copied(page_bytes(cache), before, pairs))
    else:
        with pytest.raises(
            KVCacheValueError, match=r"^destination\.kv: got an array that NumPy or another library views, "
        ):
            swap_blocks(cache, host, pairs)
        assert not host.kv.is_deleted()
    assert_same_bytes(view.view(np.uint8).reshape(before.shape), before)


def test_only_errors_about_external_references_are_replaced(memory, monkeypatch: pytest.MonkeyPatch):
    """On a CPU, whose runtime copies what is viewed; any other error is raised as it is."""
    cache, host = poisoned(simple_spec(), 4), moved(poisoned(simple_spec(), 4, seed=1), memory)
    view = "INVALID_ARGUMENT: Donation requested for buffer with external reference"
    for message, error in ((view, KVCacheValueError), ("INTERNAL: another", jax.errors.JaxRuntimeError)):

        def fails(*_: Any, message: str = message) -> jax.Array:
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr(pinned, "put", fails)
        with pytest.raises(error) as raised:
            swap_blocks(cache, host, np.array([[0, 1]]))
        assert type(raised.value) is error
        assert not host.kv.is_deleted()


def test_an_import_pads_with_a_block_out_of_range(memory, monkeypatch: pytest.MonkeyPatch):
    """What a block holds that is written twice is unspecified."""
    blocks, put = [], pinned.put

    def recorded(kv: jax.Array, parts: Sequence[tuple[jax.Array, np.ndarray]], layer: Any) -> jax.Array:
        blocks.extend(to_blocks for _, to_blocks in parts)
        return put(kv, parts, layer)

    monkeypatch.setattr(pinned, "put", recorded)
    host = moved(poisoned(simple_spec(), NUM_BLOCKS), memory)
    import_blocks(export_blocks(cache_of_16_bits(), [3, 0, 5]), host, [15, 2, 4])
    assert [each.tolist() for each in blocks] == [[15, 2, 4, NUM_BLOCKS]]


def test_exports_and_imports_are_those_of_device_memory(memory):
    spec = simple_spec(NVFP4)
    cache, host = poisoned(spec, NUM_BLOCKS), moved(poisoned(spec, NUM_BLOCKS), memory)
    blocks = [3, 0, 7, 12, 5]
    data = export_blocks([cache, cache_of_16_bits()], blocks)
    assert data == export_blocks([host, moved(cache_of_16_bits(), memory)], blocks)
    to = np.array([4, -1, 2, 9, -1])
    written = import_blocks(data, [host, moved(poisoned(simple_spec(), NUM_BLOCKS, seed=1), memory)], to)
    expected = page_bytes(cache)
    expected[[4, 2, 9]] = expected[[3, 7, 12]]
    assert [each.kv.sharding for each in written] == [memory] * 2
    assert_same_bytes(page_bytes(written[0]), expected)
    assert export_blocks(written[1], [4, 2, 9]) == export_blocks(cache_of_16_bits(), [3, 7, 12])


def test_a_state_is_exported_and_imported_as_that_of_device_memory(memory):
    states = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 3)), jnp.bfloat16)
    other = jax.device_put(states * 2, memory)
    data = export_blocks([cache_of_16_bits(), states], [], state=2)
    assert data == export_blocks([cache_of_16_bits(), jax.device_put(states, memory)], [], state=2)
    _, written = import_blocks(data, [cache_of_16_bits(), other], [], state=1)
    assert written.sharding == memory
    expected = (states * 2).at[1].set(states[2])
    assert_same_bytes(np.asarray(written).view(np.uint16), np.asarray(expected).view(np.uint16))


def cache_of_16_bits() -> KVCache:
    return poisoned(simple_spec(), NUM_BLOCKS, seed=3)


TABLE, LENS = np.array([[1, 2]], np.int32), np.array([9], np.int32)
OPERATIONS: dict[str, Callable[[KVCache], Any]] = {
    "reshape_and_cache_flash": lambda cache: kvjax.reshape_and_cache_flash(
        *kv_tokens(cache.spec, 2), cache, np.array([3, 4], np.int32)
    ),
    "gather_kv": lambda cache: kvjax.gather_kv(cache, TABLE, LENS),
    "paged_attention": lambda cache: kvjax.paged_attention(jnp.zeros((1, 2, 64)), cache, TABLE, LENS),
    "copy_blocks": lambda cache: copy_blocks(cache, np.array([[0, 1]])),
    "nvfp4_split_views": kvjax.nvfp4_split_views,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("is_jitted", [False, True], ids=["called", "jitted"])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_other_operations_refuse_pinned_caches(memory, operation, is_jitted, is_swapped):
    cache = moved(poisoned(simple_spec(NVFP4), 4), memory)
    if is_swapped:
        cache = swap_blocks(poisoned(simple_spec(NVFP4), 4), cache, np.array([[0, 1]]))
    run = jax.jit(OPERATIONS[operation]) if is_jitted else OPERATIONS[operation]
    with pytest.raises(UnsupportedError) as raised:
        run(cache)
    message = "cache: got a cache in memory of kind 'pinned_host', which swap_blocks, export_blocks and import_blocks"
    assert str(raised.value).startswith(message)
    assert "swap the blocks into one first" in str(raised.value)


def test_traced_swaps_refuse_pinned_caches(memory):
    spec, pairs = simple_spec(), np.array([[0, 1]])
    cache, host = poisoned(spec, 4), moved(poisoned(spec, 4), memory)
    for name, caches in (("source", (host, cache)), ("destination", (cache, host))):
        swaps = {
            "caches": lambda caches=caches: jax.jit(swap_blocks)(*caches, pairs),
            "pairs": lambda caches=caches: jax.jit(lambda pairs: swap_blocks(*caches, pairs))(pairs),
            "nothing": lambda caches=caches: jax.jit(lambda: swap_blocks(*caches, pairs))(),
        }
        for swap in swaps.values():
            with pytest.raises(UnsupportedError, match=f"^{name}: got a cache in memory of kind 'pinned_host'"):
                swap()
    assert not host.kv.is_deleted()


def test_memory_whose_blocks_devices_divide_is_refused(memory):
    mesh = jax.make_mesh((1,), ("data",), devices=[*memory.device_set])
    divided = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    spec, message = simple_spec(), "in memory of kind 'pinned_host', expected blocks that are not divided"
    with pytest.raises(UnsupportedError, match=f"^sharding: got .*{message}"):
        KVCache.allocate(spec, 4, sharding=divided)
    cache = poisoned(spec, 4)
    by_hand = KVCache(jax.device_put(cache.kv, divided), spec)
    for name, caches in (("source", (by_hand, cache)), ("destination", (cache, by_hand))):
        with pytest.raises(UnsupportedError, match=f"^{name}: got .*{message}"):
            swap_blocks(*caches, PAIRS)
    if "cuda" in str(mesh.devices[0]):
        with pytest.raises(UnsupportedError, match=f"^like: got .*{message}"):
            kvjax.host_sharding(NamedSharding(mesh, P("data")))


def test_host_memory_is_that_of_the_default_device_or_of_a_sharding(memory):
    [device] = memory.device_set
    mesh = jax.make_mesh((1,), ("heads",), devices=[device])
    by_heads = NamedSharding(mesh, P(None, None, None, "heads"))
    kind = "device" if device.platform == "cpu" else "pinned_host"
    for like in (None, device, SingleDeviceSharding(device), by_heads):
        expected = by_heads if like is by_heads else SingleDeviceSharding(device)
        assert kvjax.host_sharding(like) == expected.with_memory_kind(kind)
    with pytest.raises(KVCacheTypeError, match=r"^like: got P.* expected a jax.sharding.Sharding, such"):
        kvjax.host_sharding(P())


def test_powers_of_two_add_up_to_every_number():
    for number in range(40):
        sizes = [len(part) for part in pinned.parts(np.arange(number))]
        assert sum(sizes) == number
        assert sizes == sorted({size for size in sizes if not size & (size - 1)}, reverse=True)
        assert [*np.concatenate([np.zeros(0, int), *pinned.parts(np.arange(number))])] == [*range(number)]


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("layer", [None, np.int32(2)], ids=["all", "one"])
@pytest.mark.parametrize("dtype", [KVCacheDType.BFLOAT16, NVFP4])
def test_a_gpu_moves_pages_by_one_kernel_without_temporary_memory(dtype, layer):
    """A kernel that reads or writes over the bus itself; compiled for other memory, for there is no type of this."""
    spec = simple_spec(dtype)
    kv = jax.ShapeDtypeStruct(spec.cache_shape(NUM_BLOCKS, 3), spec.array_dtype)
    blocks, part = np.arange(4, dtype=np.int32), kv.shape[1:] if layer is None else kv.shape[2:]
    pages = jax.ShapeDtypeStruct((4, *part), f"uint{8 * kv.dtype.itemsize}")
    read = compile_for("h100", pinned.take, kv, blocks, layer, compiler_options=pinned.COMPILER_OPTIONS)
    written = compile_for("h100", pinned._scatter, kv, pages, blocks, layer, donate_argnums=0)
    for program in (read, written):
        assert (program.device_ops, program.temp_size) == (("fusion",), 0), program.hlo
    assert written.alias_size == written.output_size
    # A page of a layer, or of all, is one window of a scatter whose indices do not repeat: the fast ones of docs/notes.
    row = f"u8[{NUM_BLOCKS},{{}}]" if dtype is NVFP4 else f"u16[{NUM_BLOCKS},{{}}]"
    row = row.format(math.prod(kv.shape[1:]) if layer is None else f"3,{math.prod(kv.shape[2:])}")
    [scatter] = [line for line in written.hlo.splitlines() if " scatter(" in line]
    assert f" = {row}" in scatter
    assert "unique_indices=true" in scatter


@pytest.mark.parametrize("dtype", [KVCacheDType.BFLOAT16, NVFP4])
def test_pages_are_stored_in_device_memory_without_atomic_operations(dtype):
    """XLA takes them where indices may repeat: pages from pinned memory came at 76% of a copy's rate, not 88."""
    spec = simple_spec(dtype)
    kv = jax.ShapeDtypeStruct(spec.cache_shape(NUM_BLOCKS, 3), spec.array_dtype)
    pages = jax.ShapeDtypeStruct((4, *kv.shape[1:]), f"uint{8 * kv.dtype.itemsize}")
    stored = compile_for("h100", blocks_module._put, kv, pages, np.arange(4, dtype=np.int32), None, donate_argnums=0)
    [scatter] = [line for line in stored.hlo.splitlines() if " scatter(" in line]
    assert "unique_indices=true" in scatter
    assert stored.alias_size == stored.output_size


@pytest.mark.gpu
def test_on_a_gpu_a_swap_does_not_wait_for_the_step_before_it():
    """The host is back before the GPU has finished what it was given; a busy host may be late once."""
    spec = simple_spec(NVFP4, block_size=16, num_kv_heads=8, head_size=128)
    cache, host = (KVCache.allocate(spec, 64, sharding=where) for where in (None, kvjax.host_sharding()))
    pairs = np.stack([np.arange(32)] * 2, axis=1)
    matrix = jnp.ones((8192, 8192), jnp.bfloat16)

    @jax.jit
    def step(matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 200, lambda _, x: x @ matrix * 1e-4, matrix)

    jax.block_until_ready(step(matrix))
    ahead = 0
    for _ in range(4):
        running = step(matrix)
        host = swap_blocks(cache, host, pairs)
        cache = swap_blocks(host, cache, pairs)
        ahead += not running.is_ready()
        jax.block_until_ready((running, host.kv, cache.kv))
    assert ahead >= 2  # the first compiles
