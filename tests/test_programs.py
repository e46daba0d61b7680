"""The programs that operations become: no larger for more layers, and the same under JAX's stricter rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.test_util
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import gpu_compile
from support.helpers import FP8_DTYPES, kv_tokens, matrix, poisoned, simple_spec

import kvjax
from kvjax import (
    STORED_KV_CACHE_DTYPES,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    copy_blocks,
    gather_kv,
    merge_attention_states,
    nvfp4_split_views,
    paged_attention,
    ragged_paged_attention,
    reshape_and_cache_flash,
    swap_blocks,
)

SLOTS, PAIRS = np.arange(5, dtype=np.int32), np.array([[0, 1]], np.int32)
TABLE, LENS = np.array([[0, 1], [2, 3]], np.int32), np.array([5, 9], np.int32)


def layers(caches: list[KVCache], key: Any, value: Any, query: Any) -> Any:
    """What a decoder asks of its caches in a step, layer by layer."""
    written, read = [], []
    for cache in caches:
        cache = reshape_and_cache_flash(key, value, cache, SLOTS)
        query = paged_attention(query, cache, TABLE, LENS)
        read.append(gather_kv(cache, TABLE, LENS))
        written.append(cache)
    return written, read, query


def lines_of_layers(dtype: KVCacheDType, num_layers: int) -> int:
    spec = simple_spec(dtype)
    caches = [KVCache(jax.ShapeDtypeStruct(spec.cache_shape(4), spec.array_dtype), spec) for _ in range(num_layers)]
    lowered = jax.jit(layers, donate_argnums=0).lower(caches, *kv_tokens(spec, 5), np.zeros((2, 4, 64), np.float32))
    return len(lowered.as_text().splitlines())


def test_layers_that_are_alike_are_lowered_once():
    lines = {}
    for dtype in (KVCacheDType.BFLOAT16, KVCacheDType.NVFP4):
        one, many = (lines_of_layers(dtype, num_layers) for num_layers in (1, 9))
        assert one > 100
        lines[dtype] = (many - one) / 8
        assert lines[dtype] < 60
    assert lines[KVCacheDType.NVFP4] <= 1.3 * lines[KVCacheDType.BFLOAT16]


def write_layers(caches: list[KVCache], key: Any, value: Any, slots: Any) -> list[KVCache]:
    return [reshape_and_cache_flash(key, value, cache, slots, unique_slots=True) for cache in caches]


NO_COMPILER = pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))


@pytest.mark.parametrize("target", [None, pytest.param("h100", marks=NO_COMPILER)], ids=["cpu", "h100"])
def test_layers_that_are_alike_are_written_in_place(target: str | None):
    """That a layer's program is called, and not written out, costs neither donation nor an operation on the device."""
    spec = simple_spec(KVCacheDType.NVFP4)
    kv = jax.ShapeDtypeStruct(spec.cache_shape(512), spec.array_dtype)
    args = [KVCache(kv, spec) for _ in range(3)], *kv_tokens(spec, 5, ml_dtypes.bfloat16), SLOTS
    if target is not None:
        program = gpu_compile.compile_for(target, write_layers, *args, donate_argnums=0)
        assert (program.device_ops, program.temp_size) == (("custom-call",) * 3, 0)
        assert program.alias_size == 3 * kv.size
    else:
        memory = jax.jit(write_layers, donate_argnums=0).lower(*args).compile().memory_analysis()
        assert memory.alias_size_in_bytes == 3 * kv.size
        assert memory.temp_size_in_bytes < kv.size / 16


def every_operation(cache: KVCache, other: KVCache, key: Any, value: Any, query: Any, scale: Any) -> Any:
    scales = {"k_scale": scale, "v_scale": scale}
    written = reshape_and_cache_flash(key, value, cache, SLOTS, **scales)
    views = nvfp4_split_views(written) if cache.spec.dtype is KVCacheDType.NVFP4 else ()
    options = {"sliding_window": 3, "logits_soft_cap": 9.0, "sinks": np.zeros(4, np.float32), "return_lse": True}
    attended, lse = paged_attention(query, written, TABLE, LENS, **options, **scales)
    attended = merge_attention_states((attended, attended), (lse, lse))
    copied = copy_blocks(written, PAIRS), swap_blocks(written, other, PAIRS)
    return gather_kv(written, TABLE, LENS, **scales), views, attended, copied


@pytest.mark.full
@matrix({"dtype": STORED_KV_CACHE_DTYPES}, few={"dtype": [KVCacheDType.NVFP4]})
def test_operations_promote_no_ranks(dtype: KVCacheDType):
    """JAX refuses when it traces: implementations when it lowers, and those of both platforms."""
    swizzled = {"v_scale_layout": "swizzled"} if dtype is KVCacheDType.NVFP4 else {}
    scale = np.ones(2 if dtype in FP8_DTYPES else (), np.float32)
    by_block = NamedSharding(jax.make_mesh((1,), ("data",)), P("data"))
    for spec in (simple_spec(dtype, **swizzled), simple_spec(dtype, layout="HND", head_size_v=32)):
        for sharding in (None, by_block):
            caches = (KVCache.allocate(spec, 4, sharding=sharding) for _ in range(2))
            args = *caches, *kv_tokens(spec, 5), np.ones((2, 4, 64), np.float32), scale
            with jax.numpy_rank_promotion("raise"):
                lowered = jax.jit(every_operation).trace(*args).lower(lowering_platforms=("cpu", "cuda"))
                assert lowered.as_text().count("@mosaic_gpu") >= 2
                if sharding is None:
                    with kvjax.checked():
                        jax.jit(checkify.checkify(every_operation)).trace(*args)


def stored_cache(dtype: KVCacheDType) -> KVCache:
    """Of TABLE and LENS, what no sequence holds poisoned."""
    cache = poisoned(simple_spec(dtype), 4)
    slots = np.array([*range(5), *range(16, 25)], np.int32)
    tokens = (x.astype(np.float32) for x in np.random.default_rng(0).standard_normal((2, 14, 2, 64)))
    return reshape_and_cache_flash(*tokens, cache, slots, k_scale=0.5, v_scale=0.5)


READ = {
    "gather_kv": lambda query, cache, sinks, **scales: gather_kv(cache, TABLE, LENS, dtype=jnp.float32, **scales),
    "paged_attention": lambda query, cache, sinks, **scales: paged_attention(
        query, cache, TABLE, LENS, sinks=sinks, return_lse=True, **scales
    ),
    "ragged_paged_attention": lambda query, cache, sinks, **scales: ragged_paged_attention(
        query, cache, TABLE, LENS, np.array([0, 1, 2]), sinks=sinks, return_lse=True, **scales
    ),
}
DIFFERENTIATE: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x: jax.grad(f)(x),
    "jitted grad": lambda f, x: jax.jit(jax.grad(f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "grad of jit": lambda f, x: jax.grad(jax.jit(f))(x),
    "checkpoint": lambda f, x: jax.grad(jax.checkpoint(f))(x),
}


def read_arguments(dtype: KVCacheDType) -> dict[str, Any]:
    query, sinks = np.random.default_rng(1).standard_normal((2, 4, 64)), np.linspace(-1, 1, 4)
    arguments = {"query": query.astype(np.float32), "sinks": sinks.astype(np.float32)}
    scale = np.float32(0.5)
    return {key: jnp.asarray(x) for key, x in (arguments | {"k_scale": scale, "v_scale": scale}).items()} | {
        "cache": stored_cache(dtype)
    }


def total(arrays: Any) -> Any:
    """A sum in which no two elements weigh the same."""
    return sum((jnp.cos(jnp.arange(x.size, dtype=jnp.float32)) * x.ravel()).sum() for x in jax.tree.leaves(arrays))


@matrix({"operation": list(READ), "name": ["cache", "k_scale", "v_scale"], "derivative": list(DIFFERENTIATE)})
def test_a_gradient_with_respect_to_a_cache_or_its_scales_is_refused(operation, name, derivative):
    """Of the float32 cache itself; of fp8's bytes nobody can ask for one, but of its scales."""
    arguments = read_arguments(KVCacheDType.FLOAT32 if name == "cache" else KVCacheDType.FP8_E4M3)

    def loss(x: Any, stop: bool = False) -> Any:
        x = jax.lax.stop_gradient(x) if stop else x
        return total(READ[operation](**arguments | {name: x}))

    with pytest.raises(KVCacheTypeError, match=rf"^{operation}: .* respect to {name}; .*stop_gradient\({name}\)"):
        DIFFERENTIATE[derivative](loss, arguments[name])
    stopped = DIFFERENTIATE[derivative](lambda x: loss(x, stop=True), arguments[name])
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(stopped))


@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_through_copies_of_blocks_is_refused(jit):
    cache, other = (stored_cache(KVCacheDType.FLOAT32) for _ in range(2))
    copies: dict[str, Callable[[KVCache], Any]] = {
        "copy_blocks: .* cache": lambda x: copy_blocks(x, PAIRS),
        "swap_blocks: .* source": lambda x: swap_blocks(x, other, PAIRS),
        "swap_blocks: .* destination": lambda x: swap_blocks(other, x, PAIRS),
    }
    for message, copy in copies.items():
        grad = jax.grad(lambda x, copy=copy: total(copy(x)))
        with pytest.raises(KVCacheTypeError, match=message):
            (jax.jit(grad) if jit else grad)(cache)


@matrix(
    {
        "operation": ["paged_attention", "ragged_paged_attention"],
        "dtype": [KVCacheDType.FLOAT32, KVCacheDType.NVFP4],
        "jit": [True, False],
    },
    few={"operation": ["ragged_paged_attention"], "jit": [True], "dtype": [KVCacheDType.NVFP4]},
)
def test_gradients_with_respect_to_queries_and_sinks_are_right(operation, dtype, jit):
    """Beside what no sequence holds, which is NaN."""
    arguments = read_arguments(dtype)

    def loss(query: Any, sinks: Any) -> Any:
        return total(READ[operation](**arguments | {"query": query, "sinks": sinks}))

    inputs = arguments["query"], arguments["sinks"]
    jax.test_util.check_grads(jax.jit(loss) if jit else loss, inputs, order=1, atol=1e-2, rtol=1e-2, eps=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("jit", [True, False])
def test_what_is_carried_past_what_is_differentiated_is_not_refused(jit):
    """Through a scan over layers that carries a float32 cache, and `jax.checkpoint`, with respect to the queries."""
    arguments = read_arguments(KVCacheDType.FLOAT32)
    spec = arguments["cache"].spec
    cache = KVCache(jnp.stack([arguments["cache"].kv] * 2, axis=1), spec, num_layers=2)
    key, value = (jnp.asarray(x) for x in kv_tokens(spec, 5, specials=False))

    def loss(query: Any, cache: KVCache, written: bool) -> Any:
        @jax.checkpoint
        def layer(carry: Any, number: Any) -> Any:
            query, cache = carry
            if written:
                rows = jax.lax.stop_gradient((key + query.sum(), value))
                cache = reshape_and_cache_flash(*rows, cache, SLOTS, layer=number)
            return (query + paged_attention(query, cache, TABLE, LENS, layer=number), cache), None

        (query, cache), _ = jax.lax.scan(layer, (query, cache), jnp.arange(2))
        return total(query)

    def plain(query: Any) -> Any:
        for _ in range(2):
            query = query + paged_attention(query, arguments["cache"], TABLE, LENS)
        return total(query)

    grad = jax.jit(jax.grad(loss), static_argnums=2) if jit else jax.grad(loss)
    np.testing.assert_allclose(
        grad(arguments["query"], cache, False), jax.grad(plain)(arguments["query"]), rtol=1e-4, atol=1e-4
    )
    assert np.asarray(grad(arguments["query"], cache, True)).all()
