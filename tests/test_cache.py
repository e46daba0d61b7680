"""The cache as an array and as a pytree: shapes, bytes, the NVFP4 views, and what jit makes of its spec."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import reference
from support.helpers import assert_same_bytes, cache_from_bytes, page_bytes, poisoned, simple_spec

from kvjax import (
    STORED_KV_CACHE_DTYPES,
    KVCache,
    KVCacheDType,
    KVCacheMemoryError,
    KVCacheTypeError,
    KVCacheValueError,
    SlidingWindowSpec,
    memory,
    nvfp4_kv_cache_full_dim,
    nvfp4_split_views,
    partition,
)

NVFP4 = KVCacheDType.NVFP4
EACH_DTYPE = pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)


@pytest.mark.parametrize(
    ("dtype", "element", "changes", "shape"),
    [
        ("float32", np.float32, {}, (5, 2, 8, 3, 64)),
        ("float16", np.float16, {}, (5, 2, 8, 3, 64)),
        ("bfloat16", ml_dtypes.bfloat16, {}, (5, 2, 8, 3, 64)),
        ("bfloat16", ml_dtypes.bfloat16, {"layout": "HND"}, (5, 2, 3, 8, 64)),
        ("fp8_e4m3", np.uint8, {}, (5, 2, 8, 3, 64)),
        ("fp8_e5m2", np.uint8, {"layout": "HND"}, (5, 2, 3, 8, 64)),
        ("nvfp4", np.uint8, {}, (5, 2, 8, 3, 36)),
        ("nvfp4", np.uint8, {"layout": "HND", "v_scale_layout": "swizzled"}, (5, 2, 3, 8, 36)),
        ("bfloat16", ml_dtypes.bfloat16, {"head_size_v": 32}, (5, 8, 3, 96)),
        ("fp8_e4m3", np.uint8, {"head_size_v": 32, "layout": "HND"}, (5, 3, 8, 96)),
        ("nvfp4", np.uint8, {"head_size_v": 32}, (5, 8, 3, 54)),
        ("float32", np.uint8, {"page_size_padded": 20_000}, (5, 20_000)),
    ],
)
def test_an_allocated_cache_has_the_shape_and_dtype_of_its_spec(dtype, element, changes, shape):
    spec = simple_spec(KVCacheDType(dtype), num_kv_heads=3, **changes)
    cache = KVCache.allocate(spec, 5)
    assert (cache.kv.shape, cache.kv.dtype, cache.spec) == (shape, element, spec)
    assert (cache.num_blocks, cache.num_slots) == (5, 40)
    assert cache.kv.nbytes == 5 * spec.page_size_bytes
    assert not page_bytes(cache).any()
    cache.check()


def test_allocate_places_pages_as_the_sharding_says():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert KVCache.allocate(simple_spec(), 2, sharding=sharding).kv.sharding == sharding


@pytest.mark.parametrize(
    ("spec", "num_blocks", "error", "message"),
    [
        ("bfloat16", 2, KVCacheTypeError, "spec: got 'bfloat16' of type str, expected an AttentionSpec"),
        (None, 0, KVCacheValueError, "num_blocks: got 0, expected an int of at least 1"),
        (None, -3, KVCacheValueError, "num_blocks: got -3, expected an int of at least 1"),
        (None, 2.0, KVCacheTypeError, "num_blocks: got 2.0 of type float, expected an int"),
        (None, True, KVCacheTypeError, "num_blocks: got True of type bool, expected an int"),
    ],
)
def test_what_cannot_be_allocated_is_refused(spec, num_blocks, error, message):
    with pytest.raises(error) as raised:
        KVCache.allocate(spec or simple_spec(), num_blocks)
    assert str(raised.value) == message


SPEC = simple_spec(NVFP4)
TOO_MANY = 2**37  # more bytes than a process has addresses, so that nothing tries to be large


def test_the_error_of_a_cache_that_does_not_fit_says_what_was_requested():
    with pytest.raises(KVCacheMemoryError) as raised:
        KVCache.allocate(SPEC, TOO_MANY)
    message = str(raised.value)
    asked = (
        f"num_blocks: got {TOO_MANY}, which need {TOO_MANY * 1152:,} bytes (147,456.00 GiB), more memory than available"
    )
    assert message.startswith(asked)
    assert message.endswith(f"Each is a page of 1152 bytes of {SPEC}")
    assert isinstance(raised.value, MemoryError)
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


def test_sizes_beyond_64_bits_raise_the_same_error():
    with pytest.raises(KVCacheMemoryError, match=f"^num_blocks: got {2**60}, which need {2**60 * 1152:,} bytes"):
        KVCache.allocate(SPEC, 2**60)


def test_the_error_of_a_cache_that_does_not_fit_says_how_many_blocks_fit(monkeypatch: pytest.MonkeyPatch):
    device = jax.local_devices()[0]
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 100 * SPEC.page_size_bytes + 17)
    expected = f"; expected at most 100: 115,217 bytes (0.00 GiB) are free on {device}. Each is a page of 1152"
    for sharding in (None, jax.sharding.SingleDeviceSharding(device)):
        with pytest.raises(KVCacheMemoryError) as raised:
            KVCache.allocate(SPEC, TOO_MANY, sharding=sharding)
        assert expected in str(raised.value)
    for default in (device, "cpu"):
        with jax.default_device(default), pytest.raises(KVCacheMemoryError, match="expected at most 100: "):
            KVCache.allocate(SPEC, TOO_MANY)


def test_other_errors_of_the_runtime_are_not_replaced(monkeypatch: pytest.MonkeyPatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(memory.jnp, "zeros", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        KVCache.allocate(SPEC, 2)


@pytest.mark.gpu
def test_on_a_gpu_the_error_of_a_cache_that_does_not_fit_says_how_many_blocks_fit():
    device = jax.local_devices(backend="cuda")[0]
    limit = device.memory_stats()["bytes_limit"]
    too_many = 2 * limit // SPEC.page_size_bytes
    with jax.default_device(device):
        with pytest.raises(KVCacheMemoryError) as raised:
            KVCache.allocate(SPEC, too_many)
        fits = re.search(r"expected at most (\d+): [\d,]+ bytes \(.*\) are free on ", str(raised.value))
        assert 0 < int(fits[1]) <= limit // SPEC.page_size_bytes
        assert not page_bytes(KVCache.allocate(SPEC, 2)).any()


def test_a_cache_is_allocated_inside_jit_too():
    assert not page_bytes(jax.jit(lambda: KVCache.allocate(SPEC, 2))()).any()


@EACH_DTYPE
def test_a_cache_is_a_pytree_of_one_leaf(dtype):
    cache = poisoned(simple_spec(dtype), 2)
    [leaf], structure = jax.tree.flatten(cache)
    assert leaf is cache.kv
    restored = jax.tree.unflatten(structure, [leaf])
    assert (restored.kv, restored.spec) == (cache.kv, cache.spec)
    assert jax.tree_util.tree_leaves_with_path(cache)[0][0] == (jax.tree_util.GetAttrKey("kv"),)
    mapped = jax.tree.map(jnp.zeros_like, {"layer": [cache]})["layer"][0]
    assert mapped.spec == cache.spec
    assert not page_bytes(mapped).any()


def test_a_cache_is_frozen():
    cache = KVCache.allocate(simple_spec(), 2, num_layers=3)
    fields = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
    for name, value in fields.items():
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(cache, name, None)
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot delete field '{name}'"):
            delattr(cache, name)
        assert getattr(cache, name) is value
    with pytest.raises(AttributeError):
        cache.other = None
    other = dataclasses.replace(cache, num_layers=None)
    assert (other.kv, other.spec, other.sharding, other.num_layers) == (cache.kv, cache.spec, None, None)


def test_a_cache_is_equal_only_to_itself():
    cache = KVCache.allocate(simple_spec(), 2)
    same = dataclasses.replace(cache)
    assert cache == cache
    assert cache != same
    assert len({cache, same, cache}) == 2
    assert [same, cache].index(cache) == 1


def test_a_donated_cache_is_shown_and_taken_apart():
    cache = KVCache.allocate(simple_spec(), np.int64(2), num_layers=np.int32(3))
    shown = f"KVCache(bfloat16[2,3,2,8,2,64], {cache.spec!r}, num_layers=3)"
    assert (repr(cache), cache.num_layers) == (shown, 3)
    jax.jit(lambda cache: cache, donate_argnums=0)(cache)
    assert repr(cache) == shown.replace("64],", "64] (donated),")
    [leaf], structure = jax.tree.flatten(cache)
    assert leaf is cache.kv
    assert jax.tree.structure(jax.eval_shape(lambda: KVCache.allocate(cache.spec, 2, num_layers=3))) == structure
    assert repr(jax.tree.map(lambda _: None, cache)) == f"KVCache(None, {cache.spec!r}, num_layers=3)"
    assert repr(copy.deepcopy({"layer": [cache]})["layer"]) == f"[{cache!r}]"
    with pytest.raises(KVCacheValueError, match="was donated to an earlier call"):
        pickle.dumps(cache)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("num_layers", [None, 2])
def test_copies_and_pickles_hold_the_same(duplicate, num_layers):
    cache = dataclasses.replace(poisoned(SPEC, 4), num_layers=num_layers)
    if num_layers is not None:
        cache = dataclasses.replace(cache, kv=cache.kv.reshape(SPEC.cache_shape(2, 2)))
    other = duplicate(cache)
    other.check()
    assert (other.spec, other.sharding, other.num_layers) == (SPEC, None, num_layers)
    assert_same_bytes(np.asarray(other.kv), np.asarray(cache.kv))


@pytest.mark.parametrize("divided", [False, True])
def test_an_exported_program_takes_and_returns_caches(divided):
    pytest.importorskip("flatbuffers", reason="jax serializes exported programs with flatbuffers")
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), (AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", None, ("tensor",))) if divided else None
    spec = SlidingWindowSpec(8, 2, 64, 32, dtype=NVFP4, layout="HND", v_scale_layout="swizzled", sliding_window=9)
    cache = KVCache.allocate(spec, 4, num_layers=2, sharding=sharding)
    serialized = jax.export.export(jax.jit(lambda cache: cache))(cache).serialize()
    returned = jax.export.deserialize(serialized).call(cache)
    assert (returned.spec, returned.sharding, returned.num_layers) == (spec, cache.sharding, 2)


def test_a_sharding_over_devices_that_are_elsewhere_is_read_as_abstract():
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Explicit,))
    for spec in (P(), P("x"), P(None, ("x",))):
        described = partition.sharding_to_dict(NamedSharding(mesh, spec))
        assert partition.sharding_from_dict(described) == NamedSharding(mesh, spec)
        abstract = NamedSharding(AbstractMesh((1,), ("x",), (AxisType.Explicit,)), spec)
        for changes in ({"devices": [10**6]}, {"platform": "quantum"}, {"devices": None}):
            assert partition.sharding_from_dict(described | changes) == abstract
        assert partition.sharding_from_dict(partition.sharding_to_dict(abstract)) == abstract


def test_a_divided_cache_says_how_to_save_it():
    mesh = jax.make_mesh((1,), ("tensor",), (AxisType.Auto,))
    cache = KVCache.allocate(SPEC, 2, sharding=NamedSharding(mesh, P(None, None, None, "tensor")))
    with pytest.raises(KVCacheTypeError, match=r"^pickle: got a cache that is divided .*KVCache\(jax.device_put\("):
        pickle.dumps(cache)
    for other in (copy.copy(cache), copy.deepcopy(cache)):
        other.check()
        assert (other.spec, other.sharding) == (cache.spec, cache.sharding)


def test_only_another_spec_or_size_traces_again():
    traced = []

    @jax.jit
    def visit(cache):
        traced.append(cache.spec)
        return cache

    spec = simple_spec()
    visit(KVCache.allocate(spec, 2))
    visited = visit(visit(KVCache.allocate(simple_spec(), 2)))
    assert (len(traced), visited.spec) == (1, spec)
    # Each has an array of the same shape and dtype, so only the spec can tell them apart.
    others = [
        dataclasses.replace(spec, layout="HND", block_size=2, num_kv_heads=8),
        SlidingWindowSpec(**{**dataclasses.asdict(spec), "sliding_window": 4}),
        simple_spec(layout="HND", block_size=2, num_kv_heads=8, dtype=KVCacheDType.BFLOAT16),
    ]
    assert {other.cache_shape(2) for other in others} == {spec.cache_shape(2)}
    for other in others:
        visit(KVCache.allocate(other, 2))
    assert traced == [spec, *others[:2]]


@pytest.mark.parametrize(("head_size", "full_dim"), [(16, 9), (64, 36), (80, 45), (128, 72), (256, 144)])
def test_nvfp4_kv_cache_full_dim_returns_the_bytes_of_a_row(head_size, full_dim):
    assert nvfp4_kv_cache_full_dim(head_size) == full_dim
    assert KVCache.allocate(simple_spec(NVFP4, head_size=head_size), 1).kv.shape[-1] == full_dim


@pytest.mark.parametrize("head_size", [0, -16, 72])
def test_nvfp4_kv_cache_full_dim_refuses_invalid_head_sizes(head_size):
    with pytest.raises(KVCacheValueError, match=f"head_size: got {head_size}, expected a positive multiple of 16"):
        nvfp4_kv_cache_full_dim(head_size)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("changes", [{}, {"head_size_v": 96}, {"page_size_padded": 4000}], ids=str)
def test_nvfp4_views_hold_the_bytes_of_each_token(layout, changes):
    spec = simple_spec(NVFP4, num_kv_heads=3, layout=layout, **changes)
    cache = poisoned(spec, 3)
    pages = page_bytes(cache)
    for split in (nvfp4_split_views, jax.jit(nvfp4_split_views)):
        data, scales = split(cache)
        for half, size in ((reference.KEYS, spec.head_size), (reference.VALUES, spec.head_size_v)):
            inner = (8, 3) if layout == "NHD" else (3, 8)
            assert (data[half].shape, data[half].dtype) == ((3, *inner, size // 2), np.uint8)
            assert (scales[half].shape, scales[half].dtype) == ((3, *inner, size // 16), ml_dtypes.float8_e4m3fn)
            for token, head in np.ndindex(8, 3):
                where = (slice(None), token, head) if layout == "NHD" else (slice(None), head, token)
                in_data, in_scales = reference.byte_offsets(spec, half, token, head)
                assert_same_bytes(np.asarray(data[half])[where], pages[:, in_data])
                assert_same_bytes(np.asarray(scales[half])[where].view(np.uint8), pages[:, in_scales])


def test_nvfp4_views_of_swizzled_scales_come_as_stored():
    linear = simple_spec(NVFP4)
    cache = poisoned(linear, 2)
    swizzled = dataclasses.replace(cache, spec=dataclasses.replace(linear, v_scale_layout="swizzled"))
    for as_linear, as_swizzled in zip(
        jax.tree.leaves(nvfp4_split_views(cache)), jax.tree.leaves(nvfp4_split_views(swizzled)), strict=True
    ):
        assert_same_bytes(np.asarray(as_linear), np.asarray(as_swizzled))


def test_nvfp4_views_refuse_another_dtype():
    with pytest.raises(KVCacheValueError, match="nvfp4_split_views: got a 'bfloat16' cache, expected 'nvfp4'"):
        nvfp4_split_views(KVCache.allocate(simple_spec(), 1))


def test_check_names_what_does_not_fit_the_spec():
    spec = simple_spec()
    cases = [
        (np.zeros(spec.cache_shape(2)), KVCacheTypeError, "cache.kv: got a ndarray, expected a jax.Array"),
        (jnp.zeros(spec.cache_shape(2)), KVCacheTypeError, "cache.kv: got dtype float32, expected bfloat16 for"),
        (
            jnp.zeros((2, 2, 8, 2, 65), jnp.bfloat16),
            KVCacheValueError,
            "cache.kv: got shape (2, 2, 8, 2, 65), expected [num_blocks, 2, 8, 2, 64] for",
        ),
        (jnp.zeros((), jnp.bfloat16), KVCacheValueError, "cache.kv: got shape (), expected [num_blocks, 2, 8, 2, 64]"),
    ]
    for kv, error, message in cases:
        with pytest.raises(error) as raised:
            KVCache(kv, spec).check()
        assert str(raised.value).startswith(message)


def test_check_says_how_a_donated_cache_is_used():
    cache = KVCache.allocate(simple_spec(), 2)
    jax.jit(lambda cache: cache, donate_argnums=0)(cache)
    with pytest.raises(KVCacheValueError) as raised:
        cache.check()
    assert "was donated to an earlier call" in str(raised.value)
    assert "`cache = write(key, value, cache, slot_mapping)`" in str(raised.value)


def test_bytes_of_a_poisoned_cache_survive_the_way_to_the_device_and_back():
    for dtype in STORED_KV_CACHE_DTYPES:
        spec = simple_spec(dtype)
        raw = np.random.default_rng(0).integers(0, 256, (3, spec.page_size_bytes), np.uint8)
        assert_same_bytes(page_bytes(jax.tree.map(jnp.copy, cache_from_bytes(raw, spec, 3))), raw)


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (P("x"), f"expected a jax.sharding.Sharding, such as NamedSharding(mesh, {P('x')})"),
        (
            "cpu",
            "got 'cpu' of type str, expected a jax.sharding.Sharding, such as SingleDeviceSharding(jax.devices('cp",
        ),
        (4, "got 4 of type int, expected a jax.sharding.Sharding"),
    ],
    ids=["PartitionSpec", "str", "int"],
)
def test_arguments_that_are_no_sharding_are_refused(sharding, expected):
    with pytest.raises(KVCacheTypeError, match=rf"^sharding: .*{re.escape(expected)}"):
        KVCache.allocate(SPEC, 2, sharding=sharding)


def test_a_device_is_accepted_as_a_sharding():
    [device] = KVCache.allocate(SPEC, 2, sharding=jax.devices()[-1]).kv.devices()
    assert device == jax.devices()[-1]
