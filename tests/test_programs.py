"""The programs that operations become: no larger for more layers, and the same under JAX's stricter rules."""

from __future__ import annotations

from typing import Any

import gpu_compile
import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import kv_tokens, simple_spec
from jax.experimental import checkify
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import (
    STORED_KV_CACHE_DTYPES,
    KVCache,
    KVCacheDType,
    copy_blocks,
    gather_kv,
    merge_attention_states,
    nvfp4_split_views,
    paged_attention,
    reshape_and_cache_flash,
    reshape_and_cache_flash_diffkv,
    swap_blocks,
)

SLOTS, PAIRS = np.arange(5, dtype=np.int32), np.array([[0, 1]], np.int32)
TABLE, LENS = np.array([[0, 1], [2, 3]], np.int32), np.array([5, 9], np.int32)
FP8 = (KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2)


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
    written = reshape_and_cache_flash_diffkv(key, value, cache, SLOTS, **scales)
    views = nvfp4_split_views(written) if cache.spec.dtype is KVCacheDType.NVFP4 else ()
    options = {"sliding_window": 3, "logits_soft_cap": 9.0, "sinks": np.zeros(4, np.float32), "return_lse": True}
    attended, lse = paged_attention(query, written, TABLE, LENS, **options, **scales)
    attended = merge_attention_states((attended, attended), (lse, lse))
    copied = copy_blocks(written, PAIRS), swap_blocks(written, other, PAIRS)
    return gather_kv(written, TABLE, LENS, **scales), views, attended, copied


@pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
def test_operations_promote_no_ranks(dtype: KVCacheDType):
    """JAX refuses when it traces: implementations when it lowers, and those of both platforms."""
    swizzled = {"v_scale_layout": "swizzled"} if dtype is KVCacheDType.NVFP4 else {}
    scale = np.ones(2 if dtype in FP8 else (), np.float32)
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
