"""paged_attention against attention in float64 over the values that the cache's bytes stand for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import INPUT_DTYPES, kv_tokens, page_bytes, poisoned, run_write, simple_spec

from kvjax import STORED_KV_CACHE_DTYPES, AttentionSpec, KVCache, KVCacheDType, SlidingWindowSpec, paged_attention

EACH_DTYPE = pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
SCALES = {"k_scale": 0.37, "v_scale": 2.3}

SEQ_LENS = np.array([11, 0, 24, 1, 8], np.int32)
BLOCK_TABLE = np.array([[4, 9, 77], [-5, 77, 77], [2, 0, 5], [7, 77, 77], [3, 77, 77]], np.int32)
NUM_BLOCKS = 10


@pytest.fixture
def implementation() -> str:
    """Attention has no kernel."""
    return "xla"


def written_cache(spec: AttentionSpec) -> KVCache:
    """A poisoned cache that holds the tokens of `SEQ_LENS`: what lies past a length, or in no table, is garbage."""
    slots = [
        BLOCK_TABLE[seq, position // spec.block_size] * spec.block_size + position % spec.block_size
        for seq, length in enumerate(SEQ_LENS)
        for position in range(length)
    ]
    rng = np.random.default_rng(3)
    key, value = (
        rng.standard_normal((len(slots), spec.num_kv_heads, size)).astype(np.float32)
        for size in (spec.head_size, spec.head_size_v)
    )
    return run_write("xla", key, value, poisoned(spec, NUM_BLOCKS), np.array(slots, np.int32), **SCALES)


def make_query(spec: AttentionSpec, group: int, dtype=np.float32) -> np.ndarray:
    shape = (len(SEQ_LENS), spec.num_kv_heads * group, spec.head_size)
    return (2 * np.random.default_rng(4).standard_normal(shape)).astype(dtype)


def attend(query: np.ndarray, cache: KVCache, window: int | None, sm_scale: float | None = None) -> np.ndarray:
    spec, pages, num_heads = cache.spec, page_bytes(cache), query.shape[1]
    keys, values = (
        reference.read(pages, spec, half, BLOCK_TABLE, SEQ_LENS, scale, np.dtype(np.float32)).astype(np.float64)
        for half, scale in enumerate(SCALES.values())
    )
    attended = np.zeros((len(SEQ_LENS), num_heads, spec.head_size_v))
    for seq, length in enumerate(SEQ_LENS):
        if length:
            seen = slice(max(0, length - (window or length)), length)
            for head in range(num_heads):
                kv_head = head // (num_heads // spec.num_kv_heads)
                logits = keys[seq, seen, kv_head] @ query[seq, head].astype(np.float64)
                logits *= spec.head_size**-0.5 if sm_scale is None else sm_scale
                weights = np.exp(logits - logits.max())
                attended[seq, head] = weights / weights.sum() @ values[seq, seen, kv_head]
    return attended


def check(spec: AttentionSpec, implementation: str, *, group: int = 1, dtype=np.float32, window=None, **arguments):
    cache, query = written_cache(spec), make_query(spec, group, dtype)
    run = jax.jit(paged_attention, static_argnames=("sm_scale", "sliding_window", "implementation"))
    got = run(query, cache, BLOCK_TABLE, SEQ_LENS, **SCALES, **arguments, implementation=implementation)
    expected = attend(query, cache, window, arguments.get("sm_scale"))
    assert (got.shape, got.dtype) == (expected.shape, np.dtype(dtype))
    # float32 arithmetic, then one rounding to the query's dtype.
    tolerance = 1e-5 + float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)
    assert not np.asarray(got, np.float32)[SEQ_LENS == 0].any()


@EACH_DTYPE
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_each_dtype(implementation, dtype, layout):
    check(simple_spec(dtype, layout=layout), implementation, group=4)


@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (1, 8), (3, 1), (5, 2), (8, 4)])
def test_grouped_queries(implementation, num_kv_heads, group):
    check(simple_spec(num_kv_heads=num_kv_heads), implementation, group=group)


@pytest.mark.parametrize("name", INPUT_DTYPES)
def test_query_dtypes(implementation, name):
    check(simple_spec(KVCacheDType.FP8_E4M3), implementation, group=2, dtype=INPUT_DTYPES[name])


@pytest.mark.parametrize("sm_scale", [None, 1.0, 0.03])
def test_sm_scale(implementation, sm_scale):
    check(simple_spec(head_size=80), implementation, sm_scale=sm_scale)


@pytest.mark.parametrize("window", [1, 5, 8, 24, 1000])
def test_sliding_window_argument(implementation, window):
    check(simple_spec(KVCacheDType.NVFP4), implementation, group=2, window=window, sliding_window=window)


@pytest.mark.parametrize(("argument", "window"), [(None, 6), (3, 3), (100, 100)])
def test_a_sliding_layer_has_its_own_window(implementation, argument, window):
    spec = SlidingWindowSpec(8, 2, 64, dtype=KVCacheDType.FLOAT16, sliding_window=6)
    check(spec, implementation, window=window, sliding_window=argument)


@EACH_DTYPE
def test_values_of_another_head_size(implementation, dtype):
    check(simple_spec(dtype, head_size=96, head_size_v=32), implementation, group=2)


def test_swizzled_scales(implementation):
    check(simple_spec(KVCacheDType.NVFP4, v_scale_layout="swizzled", num_kv_heads=3), implementation, group=2)


def test_per_head_scales(implementation):
    spec = simple_spec(KVCacheDType.FP8_E5M2, num_kv_heads=3)
    cache, query = written_cache(spec), make_query(spec, 2)
    factors = np.float32([0.5, 2, 8])  # powers of two, so that a head's scale moves its logits and values exactly
    scales = {name: np.float32(scale) * factors for name, scale in SCALES.items()}
    got = paged_attention(query, cache, BLOCK_TABLE, SEQ_LENS, **scales, implementation=implementation)
    by_head = factors.repeat(2)[:, None]
    expected = attend(query * by_head, cache, None) * by_head
    np.testing.assert_allclose(np.asarray(got), expected, rtol=3e-6, atol=3e-5)


def test_logits_too_large_for_exp(implementation):
    check(simple_spec(KVCacheDType.FLOAT32), implementation, sm_scale=300.0)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_what_lies_behind_the_window_is_not_seen(implementation, garbage):
    """Blocks behind a window are given back and hold another sequence's tokens, or anything."""
    spec = SlidingWindowSpec(8, 2, 64, dtype=KVCacheDType.FLOAT32, sliding_window=3)
    cache, query = written_cache(spec), make_query(spec, 2)
    expected = paged_attention(query, cache, BLOCK_TABLE, SEQ_LENS, implementation=implementation)
    assert SEQ_LENS[2] - spec.sliding_window >= 16  # of the third sequence only the last block is in the window
    given_back = np.array([block * 8 + token for block in BLOCK_TABLE[2, :2] for token in range(8)], np.int32)
    key, value = (np.full_like(x, garbage) for x in kv_tokens(spec, len(given_back)))
    cache = run_write("xla", key, value, cache, given_back)
    got = paged_attention(query, cache, BLOCK_TABLE, SEQ_LENS, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_no_sequences_and_no_blocks(implementation):
    cache = written_cache(simple_spec())
    query = make_query(cache.spec, 2)
    for num_seqs, max_blocks in ((0, 3), (5, 0), (0, 0)):
        tables = BLOCK_TABLE[:num_seqs, :max_blocks], np.zeros(num_seqs, np.int32)
        got = paged_attention(query[:num_seqs], cache, *tables, implementation=implementation)
        assert got.shape == (num_seqs, 4, 64)
        assert not np.asarray(got).any()
