"""Scales that a cache carries: every operation uses them, and none mixes them up in silence."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import reference
from support.helpers import (
    assert_same_bytes,
    assert_same_floats,
    each_case,
    kv_tokens,
    page_bytes,
    poisoned,
    simple_spec,
)

from kvjax import (
    AttentionSpec,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    KVScales,
    calibrate,
    checked,
    copy_blocks,
    gather_kv,
    paged_attention,
    ragged_paged_attention,
    reshape_and_cache_flash,
    swap_blocks,
)

NUM_LAYERS = 3
FP8, NVFP4 = simple_spec(KVCacheDType.FP8_E4M3), simple_spec(KVCacheDType.NVFP4)
PER_HEAD = {"k_scale": np.float32([0.25, 3.1]), "v_scale": np.float32([0.07, 1.7])}
PER_TENSOR = {"k_scale": np.float32(0.037), "v_scale": np.float32(5.2)}
CASES = {"fp8": (FP8, PER_TENSOR), "fp8, per head": (FP8, PER_HEAD), "nvfp4": (NVFP4, PER_TENSOR)}
EACH_CASE = each_case(
    [{"name": name} for name in CASES],
    few={"name": ["fp8, per head"]},
    argument="case",
    make=lambda case: CASES[case["name"]],
)
SLOTS = np.array([3, -1, 30, 8, 9, 14], np.int32)
TABLE, LENS, ENDS = np.array([[1, 0], [3, -1]], np.int32), np.array([11, 5], np.int32), np.array([0, 1, 2], np.int32)
QUERY = np.random.default_rng(5).standard_normal((2, 6, 64)).astype(np.float32)


def carrying(cache: KVCache, scales: dict) -> KVCache:
    return dataclasses.replace(cache, **{name: jnp.asarray(scale) for name, scale in scales.items()})


READS = {
    "gather_kv": jax.jit(lambda cache, **by: gather_kv(cache, TABLE, LENS, dtype=np.float32, **by)),
    "paged_attention": jax.jit(lambda cache, **by: paged_attention(QUERY, cache, TABLE, LENS, **by)),
    "ragged_paged_attention": jax.jit(
        lambda cache, **by: ragged_paged_attention(QUERY, cache, TABLE, LENS, ENDS, max_q_len=1, **by)
    ),
}


def finite(spec: AttentionSpec, num_blocks: int = 4) -> KVCache:
    """Tokens in all slots of a cache of scale 1."""
    key, value = kv_tokens(spec, num_blocks * spec.block_size, specials=False)
    slots = np.arange(num_blocks * spec.block_size)
    return reshape_and_cache_flash(key, value, KVCache.allocate(spec, num_blocks), slots)


@EACH_CASE
@pytest.mark.parametrize("jitted", [False, True])
def test_a_write_uses_the_scales_of_the_cache(case, jitted):
    spec, scales = case
    cache, (key, value) = carrying(poisoned(spec, 4), scales), kv_tokens(spec, len(SLOTS))
    expected = reference.write(page_bytes(cache), spec, key, value, SLOTS, *scales.values())
    write = jax.jit(reshape_and_cache_flash, donate_argnums=2) if jitted else reshape_and_cache_flash
    written = write(key, value, cache, SLOTS)
    assert_same_bytes(page_bytes(written), expected)
    for name, scale in scales.items():
        assert_same_bytes(np.asarray(getattr(written, name)), scale)


@EACH_CASE
@pytest.mark.parametrize("operation", READS)
def test_a_read_uses_the_scales_of_the_cache(operation, case):
    spec, scales = case
    read, cache = READS[operation], finite(spec)
    of_the_cache, given = read(carrying(cache, scales)), read(cache, **scales)
    without = read(cache)
    for got, expected, other in zip(*map(jax.tree.leaves, (of_the_cache, given, without)), strict=True):
        assert_same_floats(np.asarray(got), np.asarray(expected))
        assert not np.array_equal(got, other)


@EACH_CASE
def test_given_scales_override_those_of_the_cache(case):
    spec, scales = case
    cache, (key, value) = carrying(poisoned(spec, 4), scales), kv_tokens(spec, len(SLOTS))
    expected = reference.write(page_bytes(cache), spec, key, value, SLOTS, 2.0, scales["v_scale"])
    written = reshape_and_cache_flash(key, value, cache, SLOTS, k_scale=2.0)
    assert_same_bytes(page_bytes(written), expected)
    assert written.k_scale is cache.k_scale
    full = finite(spec)
    for read in READS.values():
        pairs = zip(jax.tree.leaves(read(carrying(full, scales), v_scale=0.5)),
                    jax.tree.leaves(read(full, k_scale=scales["k_scale"], v_scale=0.5)), strict=True)  # fmt: skip
        for got, wanted in pairs:
            assert_same_floats(np.asarray(got), np.asarray(wanted))


@pytest.mark.full
@pytest.mark.parametrize("dtype", reference.PER_TOKEN_HEAD, ids=lambda dtype: dtype.value)
def test_a_scale_for_each_token_and_head_leaves_none_to_carry(dtype):
    """What `load_kv_scales` and `calibrate` have for such a layer is taken and not kept; nor is a call's used."""
    spec = simple_spec(dtype)
    [scales] = calibrate([spec], [[kv_tokens(spec, len(SLOTS), specials=False)]])
    cache = KVCache.allocate(spec, 4, **scales._asdict())
    assert (cache.k_scale, cache.v_scale) == (None, None)
    with pytest.raises(KVCacheValueError, match=r"^v_scale: got 0, expected between"):
        KVCache.allocate(spec, 4, v_scale=0)
    key, value = kv_tokens(spec, len(SLOTS))
    expected = reference.write(page_bytes(poisoned(spec, 4)), spec, key, value, SLOTS, 1.0, 1.0)
    for given in ({}, PER_TENSOR):
        written = reshape_and_cache_flash(key, value, poisoned(spec, 4), SLOTS, **given)
        assert_same_bytes(page_bytes(written), expected)
    full = finite(spec)
    for read in READS.values():
        for got, wanted in zip(jax.tree.leaves(read(full, **PER_TENSOR)), jax.tree.leaves(read(full)), strict=True):
            assert_same_floats(np.asarray(got), np.asarray(wanted))
    with pytest.raises(KVCacheValueError, match=rf"expected a scalar for dtype '{dtype.value}'"):
        gather_kv(full, TABLE, LENS, **PER_HEAD)


def test_one_scale_is_carried_without_the_other():
    key, value = kv_tokens(NVFP4, len(SLOTS))
    cache = carrying(poisoned(NVFP4, 4), {"v_scale": np.float32(3)})
    assert len(jax.tree.leaves(cache)) == 2
    expected = reference.write(page_bytes(cache), NVFP4, key, value, SLOTS, 1.0, 3.0)
    written = jax.jit(reshape_and_cache_flash, donate_argnums=2)(key, value, cache, SLOTS)
    assert (written.k_scale, float(written.v_scale)) == (None, 3)
    assert_same_bytes(page_bytes(written), expected)


LAYER_SCALES = {
    "scalar": (NVFP4, np.float32(0.5)),
    "layers": (NVFP4, np.float32([0.5, 3, 7])),
    "layers, fp8": (FP8, np.float32([0.5, 3, 7])),
    "layers and heads": (FP8, np.float32([[0.5, 3], [7, 0.1], [2, 9]])),
}


@each_case(
    [{"name": name, "traced": traced} for name in LAYER_SCALES for traced in (False, True)],
    few={"name": ["layers", "layers and heads"]},
    make=lambda case: (LAYER_SCALES[case["name"]], case["traced"]),
)
def test_a_layer_has_its_own_row(implementation, case):
    (spec, scales), traced = case
    key, value = kv_tokens(spec, len(SLOTS), specials=False)
    cache = KVCache.allocate(spec, 4, num_layers=NUM_LAYERS, k_scale=scales, v_scale=scales * 2)

    def step(cache, layer):
        cache = reshape_and_cache_flash(key, value, cache, SLOTS, layer=layer, implementation=implementation)
        return cache, gather_kv(cache, TABLE, LENS, layer=layer, implementation=implementation)

    if traced:
        cache, read = jax.jit(lambda cache: jax.lax.scan(step, cache, jnp.arange(NUM_LAYERS)), donate_argnums=0)(cache)
    else:
        each = []
        for layer in range(NUM_LAYERS):
            cache, of_layer = step(cache, layer)
            each.append(of_layer)
        read = [np.stack(x) for x in zip(*each, strict=True)]
    for layer in range(NUM_LAYERS):
        own = scales if scales.ndim == 0 else scales[layer]
        alone = np.zeros((4, spec.page_size_bytes), np.uint8)
        expected = reference.write(alone, spec, key, value, SLOTS, own, own * 2)
        assert_same_bytes(np.asarray(cache.kv[:, layer]).reshape(4, -1).view(np.uint8), expected)
        pages = KVCache(cache.kv[:, layer], spec)
        for got, wanted in zip(read, gather_kv(pages, TABLE, LENS, k_scale=own, v_scale=own * 2), strict=True):
            assert_same_floats(np.asarray(got[layer]), np.asarray(wanted))


@pytest.mark.parametrize("layer", [-1, NUM_LAYERS])
def test_a_layer_out_of_range_writes_nothing(layer):
    cache = KVCache.allocate(FP8, 4, num_layers=NUM_LAYERS, k_scale=np.ones(NUM_LAYERS, np.float32))
    key, value = kv_tokens(FP8, len(SLOTS))
    assert not np.asarray(reshape_and_cache_flash(key, value, cache, SLOTS, layer=jnp.int32(layer)).kv).any()


def test_layers_that_are_not_quantized_keep_no_scale():
    spec = simple_spec()
    cache = KVCache.allocate(spec, 2, k_scale=2.0, v_scale=np.float32(3))
    assert (cache.k_scale, cache.v_scale, len(jax.tree.leaves(cache))) == (None, None, 1)
    with pytest.raises(KVCacheValueError, match=r"^k_scale: got -2\.0, expected between"):
        KVCache.allocate(spec, 2, k_scale=-2.0)


def test_what_calibration_finds_is_passed_straight_in():
    batches = [
        [kv_tokens(spec, 40, seed=seed, specials=False) for spec in (FP8, NVFP4, simple_spec())] for seed in (0, 1)
    ]
    scales = calibrate([FP8, NVFP4, simple_spec()], batches, per_head=True)
    fp8, nvfp4, plain = (
        KVCache.allocate(spec, 2, **one._asdict())
        for spec, one in zip((FP8, NVFP4, simple_spec()), scales, strict=True)
    )
    assert (fp8.k_scale.shape, nvfp4.v_scale.shape, plain.k_scale) == ((2,), (), None)
    stacked = KVScales.stack([scales[0], KVScales(np.float32(2), np.float32(3))])
    cache = KVCache.allocate(FP8, 2, num_layers=2, **stacked._asdict())
    assert_same_bytes(np.asarray(cache.k_scale), np.stack([scales[0].k_scale, np.float32([2, 2])]))
    assert_same_bytes(np.asarray(cache.v_scale), np.stack([scales[0].v_scale, np.float32([3, 3])]))


@pytest.mark.parametrize("scales", [[], [KVScales(np.ones(2, np.float32), np.ones(3, np.float32))]])
def test_scales_that_do_not_stack_are_refused(scales):
    with pytest.raises(KVCacheValueError, match=r"^scales: got "):
        KVScales.stack(scales)


@pytest.mark.parametrize(
    ("spec", "num_layers", "scale", "error", "message"),
    [
        (
            FP8,
            None,
            np.ones(3, np.float32),
            KVCacheValueError,
            "got shape (3,), expected a scalar or [num_kv_heads=2] ",
        ),
        (NVFP4, None, np.ones(2, np.float32), KVCacheValueError, "got shape (2,), expected a scalar for dtype 'nvfp4'"),
        (
            NVFP4,
            3,
            np.ones(2, np.float32),
            KVCacheValueError,
            "got shape (2,), expected a scalar or [num_layers=3] for",
        ),
        # One for each head is not one for each layer, whatever else is asked for.
        (FP8, 3, np.ones(2, np.float32), KVCacheValueError, "or [num_layers=3] or [num_layers=3, num_kv_heads=2] for"),
        (FP8, None, [1.0, 2.0], KVCacheTypeError, "got [1.0, 2.0] of type list, expected a number or an array"),
        (FP8, None, jnp.float32(0), KVCacheValueError, "got 0.0, expected between"),
        (FP8, None, float("nan"), KVCacheValueError, "got nan, expected between"),
    ],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_no_cache_has_are_refused(name, spec, num_layers, scale, error, message):
    with pytest.raises(error) as raised:
        KVCache.allocate(spec, 2, num_layers=num_layers, **{name: scale})
    assert str(raised.value).startswith(f"{name}: got ")
    assert message in str(raised.value)
    if error is KVCacheTypeError or message.startswith("got shape") or message.startswith("or"):
        by_hand = dataclasses.replace(KVCache.allocate(spec, 2, num_layers=num_layers), **{name: scale})
        with pytest.raises(error) as raised:
            by_hand.check("mine")
        assert str(raised.value).startswith(f"mine.{name}: got ")
        assert message in str(raised.value)


def test_scales_are_leaves_that_jit_does_not_compile_for():
    traced = []

    @functools.partial(jax.jit, donate_argnums=0)
    def visit(cache):
        traced.append(cache)
        return cache

    cache = KVCache.allocate(FP8, 2, **PER_HEAD)
    [kv, *_], structure = jax.tree.flatten(cache)
    paths = [path for [path], _ in jax.tree_util.tree_leaves_with_path(cache)]
    assert paths == [jax.tree_util.GetAttrKey(name) for name in ("kv", "k_scale", "v_scale")]
    assert kv is cache.kv
    assert jax.tree.structure(visit(cache)) == structure
    other = visit(KVCache.allocate(FP8, 2, k_scale=PER_HEAD["v_scale"], v_scale=PER_HEAD["k_scale"]))
    assert len(traced) == 1
    assert_same_bytes(np.asarray(other.k_scale), PER_HEAD["v_scale"])
    with pytest.raises(KVCacheValueError, match=r"^cache\.kv: got an array that was donated"):
        cache.check()
    with pytest.raises(KVCacheValueError, match=r"^cache\.k_scale: got an array that was donated"):
        dataclasses.replace(other, k_scale=cache.k_scale).check()


def test_an_array_of_scales_serves_many_caches():
    scale = jnp.float32(2)
    caches = [KVCache.allocate(NVFP4, 2, k_scale=scale, v_scale=scale) for _ in range(2)]
    donated = jax.jit(lambda caches: caches, donate_argnums=0)(caches)
    assert [float(cache.v_scale) for cache in donated] == [2, 2]
    assert float(scale) == 2


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_and_pickles_carry_scales(duplicate):
    cache = KVCache.allocate(FP8, 2, **PER_HEAD)
    other = duplicate(cache)
    other.check()
    for name, scale in PER_HEAD.items():
        assert_same_bytes(np.asarray(getattr(other, name)), scale)
    shown = f"KVCache(uint8[2,2,8,2,64], {FP8!r}, k_scale=float32[2], v_scale=float32[2])"
    assert repr(other) == shown


def test_an_exported_program_takes_and_returns_scales():
    pytest.importorskip("flatbuffers", reason="jax serializes exported programs with flatbuffers")
    key, value = kv_tokens(NVFP4, len(SLOTS))
    cache = carrying(poisoned(NVFP4, 4), PER_TENSOR)
    write = jax.jit(functools.partial(reshape_and_cache_flash, implementation="xla"))
    checks = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    program = jax.export.export(write, disabled_checks=checks)(key, value, cache, SLOTS).serialize()
    written = jax.export.deserialize(program).call(key, value, cache, SLOTS)
    expected = reference.write(page_bytes(cache), NVFP4, key, value, SLOTS, *PER_TENSOR.values())
    assert_same_bytes(page_bytes(written), expected)
    assert float(written.v_scale) == PER_TENSOR["v_scale"]


def test_a_gradient_with_respect_to_carried_scales_is_refused():
    cache = finite(NVFP4)

    def loss(scale):
        keys, _ = gather_kv(dataclasses.replace(cache, k_scale=scale), TABLE, LENS)
        return keys.sum()

    with pytest.raises(KVCacheTypeError, match="gather_kv: cannot differentiate with respect to k_scale"):
        jax.grad(loss)(jnp.float32(2))


def test_checked_mode_names_a_scale_of_the_cache():
    cache = carrying(finite(NVFP4), {"k_scale": np.float32(0)})
    with checked():
        with pytest.raises(KVCacheValueError, match=r"^cache\.k_scale: got 0\.0, expected between"):
            gather_kv(cache, TABLE, LENS)
        layers = KVCache.allocate(NVFP4, 4, num_layers=2, k_scale=np.float32([1, 2]))
        layers = dataclasses.replace(layers, k_scale=jnp.float32([1, 0]))
        traced = checkify.checkify(lambda layers, layer: gather_kv(layers, TABLE, LENS, layer=layer))
        error, _ = jax.jit(traced)(layers, 1)
        fine, _ = jax.jit(traced)(layers, 0)
    fine.throw()
    with pytest.raises(checkify.JaxRuntimeError, match=r"cache\.k_scale: got 0\.0, expected between"):
        error.throw()


PAIRS = np.array([[0, 1]], np.int32)


def test_copies_of_blocks_carry_scales():
    cache = carrying(poisoned(NVFP4, 4), PER_TENSOR)
    for copied in (copy_blocks(cache, PAIRS), jax.jit(copy_blocks)(cache, PAIRS)):
        assert float(copied.k_scale) == PER_TENSOR["k_scale"]


@pytest.mark.parametrize(
    ("num_layers", "old", "new", "message"),
    [
        (None, None, np.float32(2), "destination.k_scale: got 2.0, expected 1.0, as source.k_scale has it"),
        (None, np.float32(2), None, "destination.k_scale: got 1.0, expected 2.0"),
        (None, np.float32(2), np.float32([2, 3]), "destination.k_scale: got 3.0, expected 2.0"),
        (3, np.float32([2, 3, 4]), np.float32(3), "destination.k_scale: got 3.0, expected 2.0"),
        (3, np.float32([2, 3, 4]), np.float32([[2, 2], [3, 5], [4, 4]]), "destination.k_scale: got 5.0, expected 3.0"),
        (None, None, np.float32(1), None),
        (None, np.float32(2), np.float32([2, 2]), None),
        (3, np.float32([2, 3, 4]), np.float32([[2, 2], [3, 3], [4, 4]]), None),
    ],
)
def test_pages_do_not_move_to_a_cache_of_other_scales(num_layers, old, new, message):
    source, destination = (KVCache.allocate(FP8, 2, num_layers=num_layers, k_scale=scale) for scale in (old, new))
    if message is None:
        swapped = swap_blocks(source, destination, PAIRS)
        assert swapped.k_scale is destination.k_scale
        return
    with pytest.raises(KVCacheValueError) as raised:
        swap_blocks(source, destination, PAIRS)
    assert str(raised.value).startswith(message)
    destination.check()  # it was not donated


def test_traced_pages_do_not_move_to_a_cache_of_other_scales():
    one, two, none = (KVCache.allocate(FP8, 2, v_scale=scale) for scale in (1.0, 2.0, None))
    swap = jax.jit(swap_blocks)
    with pytest.raises(KVCacheValueError, match=r"^destination\.v_scale: got none, expected one, as source"):
        swap(one, none, PAIRS)
    with pytest.raises(KVCacheValueError, match=r"^destination\.v_scale: got one, expected none, as source"):
        swap(none, one, PAIRS)
    with checked():
        error, _ = jax.jit(checkify.checkify(swap_blocks))(one, two, PAIRS)
        fine, swapped = jax.jit(checkify.checkify(swap_blocks))(two, copy.deepcopy(two), PAIRS)
    fine.throw()
    assert float(swapped.v_scale) == 2
    with pytest.raises(checkify.JaxRuntimeError, match=r"destination\.v_scale: got 2\.0, expected 1\.0"):
        error.throw()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shardings_describe_each_leaf(kind):
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), (kind,) * 2)
    sharding = NamedSharding(mesh, P("data", None, None, None, "tensor"))
    cache = KVCache.allocate(FP8, 2, num_layers=2, sharding=sharding, k_scale=np.ones((2, 2), np.float32), v_scale=2.0)
    specs = cache.partition_specs
    assert (specs.kv, specs.k_scale, specs.v_scale) == (cache.sharding.spec, P(None, "tensor"), P())
    moved = jax.device_put(jax.device_get(cache), cache.shardings)
    assert [leaf.sharding for leaf in jax.tree.leaves(moved)] == [leaf.sharding for leaf in jax.tree.leaves(cache)]
    moved.check()
    undivided = KVCache.allocate(FP8, 2, k_scale=2.0)
    assert (undivided.shardings, jax.tree.leaves(undivided.partition_specs)) == (None, [P(), P()])


def test_torch_says_how_it_gets_a_cache_with_scales():
    kvjax_torch = pytest.importorskip("kvjax_torch", reason="needs torch")
    torch = pytest.importorskip("torch")
    cache, (key, value) = KVCache.allocate(FP8, 4, **PER_TENSOR), kv_tokens(FP8, len(SLOTS), specials=False)
    for refused in (
        lambda: kvjax_torch.to_torch(cache),
        lambda: kvjax_torch.gather_kv(cache, cache, torch.tensor(TABLE), torch.tensor(LENS), "fp8", 1.0, 1.0),
    ):
        with pytest.raises(KVCacheTypeError, match=r"got a KVCache, .*to_torch\(cache\.k_scale\)"):
            refused()
    cache = reshape_and_cache_flash(key, value, cache, SLOTS)
    kv, *scales = (kvjax_torch.to_torch(leaf) for leaf in jax.tree.leaves(cache))
    read = kvjax_torch.gather_kv(kv[:, 0], kv[:, 1], torch.tensor(TABLE), torch.tensor(LENS), "fp8", *scales)
    for by_torch, by_jax in zip(read, gather_kv(cache, TABLE, LENS, dtype=jnp.bfloat16), strict=True):
        np.testing.assert_array_equal(by_torch.float().numpy(), np.asarray(by_jax, np.float32))
    back = KVCache(kvjax_torch.to_jax(kv), FP8, None, None, *map(kvjax_torch.to_jax, scales))
    for got, expected in zip(gather_kv(back, TABLE, LENS), gather_kv(cache, TABLE, LENS), strict=True):
        assert_same_floats(np.asarray(got), np.asarray(expected))
