"""Blocks on the host: bytes there and back, in the order of the calls and beside what the device runs."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.helpers import (
    HeldCopies,
    assert_same_bytes,
    compilations,
    kv_tokens,
    page_bytes,
    poison,
    poisoned,
    simple_spec,
)

import kvjax
from kvjax import (
    AttentionSpec,
    HostCaches,
    KVCache,
    KVCacheDType,
    KVCacheMemoryError,
    KVCacheTypeError,
    KVCacheValueError,
    UnsupportedError,
)
from kvjax.ops import host_caches, host_copies

NVFP4, FP8 = KVCacheDType.NVFP4, KVCacheDType.FP8_E4M3
NUM_BLOCKS, NUM_HOST_BLOCKS = 16, 12
OUT = np.array([[0, 1], [9, 2], [3, 11], [10, 0], [6, 7], [1, 9], [15, 8]], np.int32)
IN = np.array([[9, 4], [8, 0], [1, 15], [2, 3], [11, 9]], np.int32)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[jax.Device]:
    device = jax.local_devices(backend=request.param)[0]
    with jax.default_device(device):
        yield device


def of_layers(spec: AttentionSpec, num_blocks: int, seed: int) -> KVCache:
    layers = [poisoned(spec, num_blocks, seed + layer).kv for layer in range(3)]
    return KVCache(jnp.stack(layers, axis=1), spec, None, 3)


def bytes_of(cache: KVCache) -> np.ndarray:
    """Of all layers, `[num_blocks, bytes]`."""
    return np.asarray(cache.kv).copy().view(np.uint8).reshape(cache.num_blocks, -1)


def made(host: HostCaches, caches: Any, others: Any, num_out: int, num_in: int) -> list[np.ndarray]:
    """Copies first pairs out and in, to other caches; returns the bytes of these and what they should be."""
    is_cache = lambda each: isinstance(each, KVCache)  # noqa: E731
    expected = [bytes_of(each) for each in jax.tree.leaves(others, is_leaf=is_cache)]
    stored = {to: at for at, to in OUT[:num_out].tolist()}
    pairs = [pair for pair in IN.tolist() if pair[0] in stored][:num_in]
    host.store(caches, OUT[:num_out])
    written = host.load(np.array(pairs, np.int64).reshape(-1, 2)).into(others)
    for want, cache in zip(expected, jax.tree.leaves(caches, is_leaf=is_cache), strict=True):
        for at, to in pairs:
            want[to] = bytes_of(cache)[stored[at]]
    host.wait()
    for want, cache in zip(expected, jax.tree.leaves(written, is_leaf=is_cache), strict=True):
        assert_same_bytes(bytes_of(cache), want)
    return expected


@pytest.mark.parametrize("slab", [1, 2, None])
@pytest.mark.parametrize(("num_out", "num_in"), [(0, 0), (1, 0), (7, 1), (7, 5), (5, 3)])
@pytest.mark.parametrize("spec", [simple_spec(), simple_spec(NVFP4, layout="HND")], ids=["bfloat16", "nvfp4"])
def test_any_number_of_blocks_goes_to_the_host_and_back(
    device, spec, num_out, num_in, slab, monkeypatch: pytest.MonkeyPatch
):
    if slab:
        monkeypatch.setattr(host_caches, "SLAB_BYTES", slab * spec.page_size_bytes)
    cache, other = poisoned(spec, NUM_BLOCKS), poisoned(spec, NUM_BLOCKS, seed=1)
    made(poison(HostCaches(cache, NUM_HOST_BLOCKS)), cache, other, num_out, num_in)


def test_all_layers_of_caches_of_several_kinds_move_together(device):
    """Two are of one shape."""
    specs = {"first": simple_spec(), "second": simple_spec(FP8), "again": simple_spec()}
    caches: Any = {name: poisoned(spec, NUM_BLOCKS, 10 + i) for i, (name, spec) in enumerate(specs.items())}
    others: Any = {name: poisoned(spec, NUM_BLOCKS, 20 + i) for i, (name, spec) in enumerate(specs.items())}
    caches["third"], others["third"] = (of_layers(simple_spec(NVFP4), NUM_BLOCKS, seed) for seed in (3, 9))
    made(poison(HostCaches(caches, NUM_HOST_BLOCKS)), caches, others, 7, 5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [P(None, None, None, "heads"), P()], ids=["heads", "nothing"])
def test_caches_on_a_mesh_of_one_device_move(device, axes, axis_type):
    where = NamedSharding(jax.make_mesh((1,), ("heads",), (axis_type,), devices=[device]), axes)
    cache, other = (jax.device_put(poisoned(simple_spec(), NUM_BLOCKS, seed), where) for seed in (0, 1))
    host = poison(HostCaches(cache, NUM_HOST_BLOCKS))
    step = jax.jit(lambda cache: dataclasses.replace(cache, kv=cache.kv[::-1]), donate_argnums=0)
    made(host, step(cache), step(other), 7, 5)  # a step may name the same division in another way


def test_a_step_may_write_blocks_again_before_they_have_left(device, monkeypatch: pytest.MonkeyPatch):
    """It also may be given the caches for good, scales included."""
    spec = simple_spec(FP8)
    held, cache = HeldCopies(monkeypatch), KVCache.allocate(spec, 4, k_scale=0.5)
    cache = dataclasses.replace(cache, kv=poisoned(spec, 4).kv)
    before, host = page_bytes(cache), poison(HostCaches(cache, 4))
    host.store(cache, np.array([[1, 2], [3, 0]]))
    clear = jax.jit(lambda cache: dataclasses.replace(cache, kv=cache.kv * 0), donate_argnums=0)
    cleared = clear(cache)
    assert cache.kv.is_deleted()
    loading = host.load(np.array([[0, 0], [2, 1]]))
    assert not loading.is_ready()
    held.released.set()
    written = page_bytes(loading.into(cleared))
    assert loading.is_ready()
    assert_same_bytes(written[:2], before[[3, 1]])
    host.wait()


def test_calls_see_what_those_before_them_have_copied_and_nothing_later(device, monkeypatch: pytest.MonkeyPatch):
    spec, held = simple_spec(), HeldCopies(monkeypatch)
    first, second = poisoned(spec, 4), poisoned(spec, 4, seed=1)
    host = poison(HostCaches(first, 1))
    loads = []
    for cache, block in ((first, 2), (second, 3), (first, 0)):
        host.store(cache, np.array([[block, 0]]))
        loads.append(host.load(np.array([[0, block]])))
    held.released.set()
    written = poisoned(spec, 4, seed=2)
    for loading in reversed(loads):
        written = loading.into(written)
    expected = page_bytes(poisoned(spec, 4, seed=2))
    expected[2], expected[3], expected[0] = (page_bytes(x)[i] for x, i in ((first, 2), (second, 3), (first, 0)))
    assert_same_bytes(page_bytes(written), expected)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 40))])
def test_calls_in_any_order_do_what_numpy_does(device, seed, monkeypatch: pytest.MonkeyPatch):
    """Beside steps that write to the caches, with copies that take their time."""
    rng, start = np.random.default_rng(seed), host_copies.start
    spec = [simple_spec(), simple_spec(NVFP4), simple_spec(FP8, layout="HND")][seed % 3]
    delays = iter(rng.choice([0, 0, 0.002], size=999))

    def late(device: jax.Device, copies: Iterable[host_copies.HostCopy]) -> None:
        time.sleep(next(delays))
        start(device, copies)

    monkeypatch.setattr(host_copies, "start", late)
    monkeypatch.setattr(host_caches, "SLAB_BYTES", int(rng.choice([1, 2, 64])) * 2 * spec.page_size_bytes)
    caches = [poisoned(spec, 8, seed), poisoned(spec, 9, seed + 1)]
    host, stored = poison(HostCaches(caches, 6)), {}
    model: list[np.ndarray] = [page_bytes(each).copy() for each in caches]
    loads: list[tuple[Any, np.ndarray, list[list[np.ndarray]]]] = []
    for _ in range(60):
        number = rng.integers(0, 5)
        match rng.choice(["store", "load", "into", "step"]):
            case "store":
                pairs = np.stack([rng.integers(0, 8, number), rng.permutation(6)[:number]], axis=1)
                host.store(caches, pairs)
                stored |= {to: [each[at].copy() for each in model] for at, to in pairs.tolist()}
            case "load" if stored:
                from_ = rng.choice([*stored], number)
                pairs = np.stack([from_, rng.permutation(8)[:number]], axis=1)
                loads.append((host.load(pairs), pairs[:, 1], [stored[each] for each in from_.tolist()]))
            case "into" if loads:
                loading, blocks, pages = loads.pop(rng.integers(0, len(loads)))
                caches = loading.into(caches)
                for block, of_caches in zip(blocks.tolist(), pages, strict=True):
                    for each, page in zip(model, of_caches, strict=True):
                        each[block] = page
            case "step":
                pairs = rng.integers(0, 8, (2, 2))
                pairs[1, 1] = (pairs[0, 1] + 1) % 8
                caches = [kvjax.copy_blocks(each, pairs, donate=True) for each in caches]
                for each in model:
                    each[pairs[:, 1]] = each[pairs[:, 0]]
    host.wait()
    for cache, expected in zip(caches, model, strict=True):
        assert_same_bytes(page_bytes(cache), expected)


def test_caches_are_written_in_place(device):
    cache = KVCache.allocate(simple_spec(), 4)
    host = HostCaches(cache, 4)
    host.store(cache, np.array([[0, 0]]))
    at, loading = cache.kv.unsafe_buffer_pointer(), host.load(np.array([[0, 3]]))
    assert loading.into(cache).kv.unsafe_buffer_pointer() == at
    assert cache.kv.is_deleted()


@pytest.mark.parametrize("slab", [2, 8])
def test_numbers_of_blocks_share_their_programs(device, slab, monkeypatch: pytest.MonkeyPatch):
    spec = simple_spec(block_size=5, head_size=8 * (slab + 3))  # of no other test
    monkeypatch.setattr(host_caches, "SLAB_BYTES", slab * spec.page_size_bytes)
    cache = jax.device_put(poisoned(spec, NUM_BLOCKS), device)
    host = HostCaches(cache, NUM_HOST_BLOCKS)
    pairs = np.stack([np.arange(8), np.arange(8)[::-1]], axis=1)
    with compilations() as compiled:
        for num_pairs in (1, 7, 3, 5, 8, 2):
            host.store(cache, pairs[:num_pairs])
            cache = host.load(pairs[:num_pairs, ::-1]).into(cache)
    names = "jit(taken)", "jit(memory)", "jit(_put)"
    assert {name: compiled.count(name) for name in names} == dict.fromkeys(names, 1), compiled


def test_copies_go_to_neighbouring_blocks_at_once(device, monkeypatch: pytest.MonkeyPatch):
    """Of pages of one size, in any order of the pairs."""
    spec, sizes, start = simple_spec(), [], host_copies.start

    def recorded(device: jax.Device, copies: Iterable[host_copies.HostCopy]) -> None:
        copies = list(copies)
        sizes.append([each.num_bytes for each in copies])
        start(device, copies)

    monkeypatch.setattr(host_copies, "start", recorded)
    cache = poisoned(spec, NUM_BLOCKS)
    host = HostCaches(cache, NUM_HOST_BLOCKS)
    host.store(cache, np.array([[0, 5], [1, 4], [2, 9], [7, 6], [4, 1], [8, 0], [9, 2], [3, 8]]))
    host.wait()
    assert sizes == [[3 * spec.page_size_bytes, 3 * spec.page_size_bytes, 2 * spec.page_size_bytes]]


def test_a_copy_that_fails_is_reported_and_nothing_is_donated(device, monkeypatch: pytest.MonkeyPatch):
    cache, other = poisoned(simple_spec(), 4), poisoned(simple_spec(), 4, seed=1)
    host = HostCaches(cache, 4)
    host.store(cache, np.array([[0, 0]]))
    host.wait()

    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA's driver returned error 700")

    monkeypatch.setattr(host_copies, "start", fails)
    loading = host.load(np.array([[0, 1]]))
    with pytest.raises(RuntimeError, match="error 700"):
        loading.into(other)
    assert_same_bytes(page_bytes(other), page_bytes(poisoned(simple_spec(), 4, seed=1)))
    host.store(cache, np.array([[0, 0]]))
    with pytest.raises(RuntimeError, match="error 700"):
        host.wait()
    with pytest.raises(KVCacheValueError, match="pairs: got host block 0, expected one that something was stored in"):
        host.load(np.array([[0, 1]])).into(other)


def test_blocks_that_were_not_stored_after_all_are_not_loaded(device, monkeypatch: pytest.MonkeyPatch):
    """Both calls were made before the copies failed."""
    cache, other, start = poisoned(simple_spec(), 4), poisoned(simple_spec(), 4, seed=1), host_copies.start
    host, numbers = poison(HostCaches(cache, 4)), iter(range(9))

    def fails_once(device: jax.Device, copies: Iterable[host_copies.HostCopy]) -> None:
        if next(numbers) == 0:
            raise RuntimeError("CUDA's driver returned error 700")
        start(device, copies)

    monkeypatch.setattr(host_copies, "start", fails_once)
    held = HeldCopies(monkeypatch)
    host.store(cache, np.array([[0, 0]]))
    first = host.load(np.array([[0, 1]]))
    host.store(cache, np.array([[2, 0]]))
    second = host.load(np.array([[0, 1]]))
    held.released.set()
    with pytest.raises(RuntimeError, match="error 700"):
        first.into(other)
    for _ in range(2):
        with pytest.raises(KVCacheValueError, match="pairs: got host block 0, expected one that something was stored"):
            first.into(other)
    written = page_bytes(second.into(other))
    assert_same_bytes(written[1], page_bytes(cache)[2])


def test_blocks_of_other_scales_are_refused_by_the_next_call(device):
    spec = simple_spec(FP8)
    cache, other = (KVCache.allocate(spec, 4, k_scale=scale) for scale in (0.5, 0.25))
    host = HostCaches(cache, 4)
    message = r"caches: got a scale 0\.25, expected 0\.5"
    host.store(other, np.array([[0, 0]]))
    with pytest.raises(KVCacheValueError, match=message):
        host.wait()
    host.store(cache, np.array([[0, 0]]))
    host.load(np.array([[0, 0]])).into(other)
    with pytest.raises(KVCacheValueError, match=message):
        host.wait()
    with pytest.raises(
        KVCacheValueError, match=r"caches\[0\]\.scale_shapes: got \(None, None\), expected \(\(\), None\)"
    ):
        host.store(KVCache.allocate(spec, 4), np.array([[0, 0]]))


def test_scales_of_heads_are_compared_each_with_its_own(device):
    """Divided ones too, on a mesh of explicit axes."""
    mesh = jax.make_mesh((1,), ("heads",), (AxisType.Explicit,), devices=[device])
    spec, halves = simple_spec(FP8), np.float32([0.5, 0.25])
    where = NamedSharding(mesh, P(None, None, None, "heads"))
    cache = KVCache.allocate(spec, 4, sharding=where, k_scale=halves, v_scale=0.5)
    host, pairs = HostCaches(cache, 4), np.array([[0, 0]])
    host.store(cache, pairs)
    host.wait()
    with pytest.raises(KVCacheValueError, match=r"scale_shapes: got \(\(\), \(2,\)\), expected \(\(2,\), \(\)\)"):
        host.store(KVCache.allocate(spec, 4, sharding=where, k_scale=0.5, v_scale=halves), pairs)
    host.store(KVCache.allocate(spec, 4, sharding=where, k_scale=halves[::-1].copy(), v_scale=0.5), pairs)
    with pytest.raises(KVCacheValueError, match=r"caches: got a scale 0\.25, expected 0\.5"):
        host.wait()


def test_an_error_of_copies_that_end_during_a_call_is_not_lost(device):
    """They may end at any moment, also between two looks at them."""

    class Ending(concurrent.futures.Future[None]):
        looks = 0

        def done(self) -> bool:
            self.looks += 1
            return self.looks > 1

    host, ending = HostCaches(KVCache.allocate(simple_spec(), 4), 4), Ending()
    ending.set_exception(RuntimeError("error 700"))
    host._unchecked.append(ending)
    host._start_call()
    with pytest.raises(RuntimeError, match="error 700"):
        host._start_call()


def test_threads_share_the_stream_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Each waits for the copies on it."""
    made = []

    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            def call(*args: Any) -> int:
                if name == "cuStreamCreate":
                    time.sleep(0.05)
                    made.append(args)
                return 0

            return call

    monkeypatch.setattr(host_copies.ctypes, "CDLL", lambda _: Driver())
    host_copies._stream_and_context.cache_clear()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        streams = {id(stream) for _, stream in threads.map(host_copies._stream, [0] * 4)}
    host_copies._stream_and_context.cache_clear()
    assert len(streams) == len(made) == 1


def test_other_devices_than_cpus_and_gpus_of_cuda_are_refused(monkeypatch: pytest.MonkeyPatch):
    def fails(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(host_copies.ctypes, "CDLL", fails)
    for platform, reason in (("tpu", "it is a tpu"), ("gpu", "libcuda.so.1: cannot open")):
        with pytest.raises(UnsupportedError, match=f"expected a CPU or CUDA's GPUs: {reason}"):
            host_copies.check(mock.Mock(platform=platform))


CACHE = simple_spec()
CALLS: dict[str, tuple[Callable[[HostCaches, KVCache], Any], type[Exception], str]] = {
    "block": (
        lambda h, c: h.store(c, np.array([[4, 0]])),
        KVCacheValueError,
        "pairs: got block 4, expected from 0 to 3",
    ),
    "negative": (lambda h, c: h.store(c, np.array([[-1, 0]])), KVCacheValueError, "got block -1, expected from 0 to 3"),
    "host block": (
        lambda h, c: h.store(c, np.array([[0, 2]])),
        KVCacheValueError,
        "block 2, expected from 0 to 1",
    ),
    "twice": (
        lambda h, c: h.store(c, np.array([[0, 1], [2, 1]])),
        KVCacheValueError,
        "pairs: got block 1 as two destinations, expected one",
    ),
    "load twice": (
        lambda h, _: h.load(np.array([[0, 1], [0, 1]])),
        KVCacheValueError,
        "pairs: got block 1 as two destinations, expected one",
    ),
    "empty": (
        lambda h, _: h.load(np.array([[1, 1]])),
        KVCacheValueError,
        "pairs: got host block 1, expected one that something was stored in",
    ),
    "load negative": (lambda h, _: h.load(np.array([[0, -1]])), KVCacheValueError, "got block -1, expected from 0 to"),
    "into": (
        lambda h, c: h.load(np.array([[0, 4]])).into(c),
        KVCacheValueError,
        "pairs: got block 4, expected from 0 to 3",
    ),
    "shape": (lambda h, c: h.store(c, np.array([0, 1])), KVCacheValueError, r"pairs: got shape \(2,\), expected"),
    "dtype": (lambda h, c: h.store(c, np.array([[0.0, 1]])), KVCacheTypeError, "pairs: got dtype float64, expected"),
    "list": (lambda h, c: h.store(c, [[0, 1]]), KVCacheTypeError, "pairs: got a list, expected an array"),
    "tree": (lambda h, c: h.store([c], np.array([[0, 1]])), KVCacheValueError, "caches: got PyTreeDef"),
    "spec": (
        lambda h, _: h.store(KVCache.allocate(simple_spec(NVFP4), 4), np.array([[0, 1]])),
        KVCacheValueError,
        r"caches\[0\].spec: got .*NVFP4.* expected .*BFLOAT16.*, as HostCaches was given",
    ),
    "layers": (
        lambda h, _: h.store(KVCache.allocate(CACHE, 4, num_layers=1), np.array([[0, 1]])),
        KVCacheValueError,
        r"caches\[0\].num_layers: got 1, expected None, as HostCaches was given",
    ),
    "traced": (
        lambda h, c: jax.jit(lambda c: h.store(c, np.array([[0, 1]])))(c),
        UnsupportedError,
        "HostCaches: got a traced call, expected one outside jit",
    ),
    "closed over": (
        lambda h, c: jax.jit(lambda: h.store(c, np.array([[0, 1]])))(),
        UnsupportedError,
        "HostCaches: got a traced call, expected one outside jit",
    ),
    "differentiated": (
        lambda h, c: jax.grad(lambda kv: h.store(dataclasses.replace(c, kv=kv), np.array([[0, 1]])) or 0.0)(c.kv),
        UnsupportedError,
        "HostCaches: got a traced call, expected one outside jit",
    ),
    "wide": (
        lambda h, c: h.load(np.array([[0, 2**32 + 1]])),
        KVCacheValueError,
        f"pairs: got block {2**32 + 1}, expected from 0 to",
    ),
    "one cache twice": (
        lambda _, c: HostCaches([c, c], 2),
        KVCacheValueError,
        r"caches\[1\]: got the cache that is caches\[0\], expected another",
    ),
    "no cache": (lambda *_: HostCaches([], 2), KVCacheTypeError, "got a list without a KVCache, expected at least one"),
    "array": (
        lambda _, c: HostCaches([c.kv], 2),
        KVCacheTypeError,
        r"\[0\]: got a jax.Array, expected a KVCache",
    ),
    "none": (lambda _, c: HostCaches(c, 0), KVCacheValueError, "num_blocks: got 0, expected"),
    "float": (lambda _, c: HostCaches(c, 2.0), KVCacheTypeError, "num_blocks: got 2.0"),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_cannot_be_copied_is_refused_and_nothing_changes(device, call):
    cache = poisoned(CACHE, 4)
    host = HostCaches(cache, 2)
    host.store(cache, np.array([[3, 0]]))
    run, error, message = CALLS[call]
    with pytest.raises(error, match=message):
        run(host, cache)
    assert_same_bytes(page_bytes(cache), page_bytes(poisoned(CACHE, 4)))
    written = host.load(np.array([[0, 1]])).into(poisoned(CACHE, 4))
    assert_same_bytes(page_bytes(written)[1], page_bytes(cache)[3])


def test_blocks_are_written_once(device):
    cache = poisoned(CACHE, 4)
    host = HostCaches(cache, 2)
    host.store(cache, np.array([[3, 0]]))
    loading = host.load(np.array([[0, 1]]))
    cache = loading.into(cache)
    with pytest.raises(KVCacheValueError, match="into: got a second call, expected one"):
        loading.into(cache)
    assert not cache.kv.is_deleted()


def test_more_memory_than_there_is_on_the_host_is_refused(device):
    limit = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" if device.platform != "cpu" else "more memory than available"
    with pytest.raises(KVCacheMemoryError, match=limit):
        HostCaches(poisoned(CACHE, 4), 2**40)


TABLE, LENS = np.array([[1, 2]], np.int32), np.array([9], np.int32)
PAIRS = np.array([[0, 1]])
OPERATIONS: dict[str, Callable[[KVCache], Any]] = {
    "reshape_and_cache_flash": lambda cache: kvjax.reshape_and_cache_flash(
        *kv_tokens(cache.spec, 2), cache, np.array([3, 4], np.int32)
    ),
    "gather_kv": lambda cache: kvjax.gather_kv(cache, TABLE, LENS),
    "paged_attention": lambda cache: kvjax.paged_attention(jnp.zeros((1, 2, 64)), cache, TABLE, LENS),
    "copy_blocks": lambda cache: kvjax.copy_blocks(cache, PAIRS),
    "nvfp4_split_views": kvjax.nvfp4_split_views,
    "swap_blocks": lambda cache: kvjax.swap_blocks(cache, poisoned(cache.spec, 4), PAIRS),
    "HostCaches": lambda cache: HostCaches(cache, 2),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("is_jitted", [False, True], ids=["called", "jitted"])
def test_operations_refuse_caches_in_pinned_memory(device, operation, is_jitted):
    """XLA would copy all of such a cache in each call."""
    memory = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    cache = poisoned(simple_spec(NVFP4), 4)
    pinned = dataclasses.replace(cache, kv=jax.device_put(cache.kv, memory))
    run = jax.jit(OPERATIONS[operation]) if is_jitted else OPERATIONS[operation]
    with pytest.raises(UnsupportedError, match=r"got a cache in memory of kind 'pinned_host', expected .* HostCaches"):
        run(pinned)
    with pytest.raises(UnsupportedError, match="sharding: got memory of kind 'pinned_host', expected 'device'"):
        KVCache.allocate(CACHE, 4, sharding=memory)


@pytest.mark.gpu
def test_on_a_gpu_copies_run_beside_a_step():
    """Both ways they are made before a step has ended that was given to the GPU before they were asked for."""
    spec = simple_spec(NVFP4, block_size=16, num_kv_heads=8, head_size=128)
    cache = KVCache.allocate(spec, 64)
    host, pairs = HostCaches(cache, 64), np.stack([np.arange(32)] * 2, axis=1)
    matrix = jnp.ones((8192, 8192), jnp.bfloat16)

    @jax.jit
    def step(matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 200, lambda _, x: x @ matrix * 1e-4, matrix)

    for _ in range(2):  # the first compiles
        host.store(cache, pairs)
        cache = host.load(pairs).into(cache)
        jax.block_until_ready(step(matrix))
    host.store(cache, pairs)
    loading = host.load(pairs)
    running = step(matrix)
    host.wait()
    assert loading.is_ready()
    assert not running.is_ready()
