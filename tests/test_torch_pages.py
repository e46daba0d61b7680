"""`split_kv_cache`: the views of pages that operations on tensors take."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import matrix

import kvjax
from kvjax import (
    STORED_KV_CACHE_DTYPES,
    CacheLayout,
    FullAttentionSpec,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    MLAAttentionSpec,
    VScaleLayout,
)

torch = pytest.importorskip("torch")
kvjax_torch = pytest.importorskip("kvjax_torch")

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, NUM_TOKENS = 3, 16, 2, 19
POISON = 0xA5


def spec_of(dtype: KVCacheDType = KVCacheDType.NVFP4, **changes: Any) -> FullAttentionSpec:
    fields: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": NUM_HEADS, "head_size": 64, "dtype": dtype}
    return FullAttentionSpec(**fields | changes)


def poisoned(spec: FullAttentionSpec) -> np.ndarray:
    size = np.prod(spec.cache_shape(NUM_BLOCKS)) * spec.array_dtype.itemsize
    return np.full(size, POISON, np.uint8).view(spec.array_dtype).reshape(spec.cache_shape(NUM_BLOCKS))


@matrix(
    {
        "dtype": STORED_KV_CACHE_DTYPES,
        "layout": [*CacheLayout],
        "changes": [{}, {"head_size_v": 32}, {"page_size_padded": 65_536}],
    },
    pairs=True,
)
def test_writes_through_the_views_store_the_bytes_that_jax_stores(
    dtype: KVCacheDType, layout: CacheLayout, changes: dict[str, Any]
):
    spec = spec_of(dtype, layout=layout, **changes)
    if dtype.parts[1].byte_format is KVCacheDType.NVFP4:
        spec = dataclasses.replace(spec, v_scale_layout=VScaleLayout.SWIZZLED)
    rng = np.random.default_rng(0)
    key, value = (rng.normal(size=(NUM_TOKENS, NUM_HEADS, size)).astype(np.float32) for size in spec.head_sizes)
    slots = rng.permutation(NUM_BLOCKS * BLOCK_SIZE)[:NUM_TOKENS].astype(np.int32)
    scales = np.float32(0.25), np.float32(0.5)

    given = (jnp.asarray(key), jnp.asarray(value), KVCache(jnp.asarray(poisoned(spec)), spec), jnp.asarray(slots))
    expected = kvjax.reshape_and_cache_flash(*given, k_scale=scales[0], v_scale=scales[1])

    pages = torch.from_numpy(poisoned(spec).view(np.uint8)).view(getattr(torch, spec.array_dtype.name, torch.uint8))
    key_cache, value_cache = kvjax_torch.split_kv_cache(pages.view(spec.cache_shape(NUM_BLOCKS)), spec)
    kvjax_torch.reshape_and_cache_flash(
        *(torch.from_numpy(x) for x in (key, value)),
        *(key_cache, value_cache, torch.from_numpy(slots), dtype.value, *scales),
        v_scale_layout=spec.v_scale_layout.value,
    )
    np.testing.assert_array_equal(pages.view(torch.uint8).numpy(), np.asarray(expected.kv).view(np.uint8))


@pytest.mark.parametrize(("padded", "start"), [(65_537, 0), (65_536, 1)])
def test_a_pool_whose_bytes_do_not_fit_elements_is_refused(padded: int, start: int):
    spec = spec_of(KVCacheDType.BFLOAT16, page_size_padded=padded)
    pages = torch.zeros(NUM_BLOCKS * padded + 2, dtype=torch.uint8)[start:][: NUM_BLOCKS * padded]
    with pytest.raises(KVCacheValueError, match=r"kv_cache: got address .*, expected multiples of 2"):
        kvjax_torch.split_kv_cache(pages.view(NUM_BLOCKS, padded), spec)


def test_they_are_views_of_pages_that_lie_apart():
    spec = spec_of()
    layers = torch.zeros(NUM_BLOCKS, 4, *spec.cache_shape(1)[1:], dtype=torch.uint8)
    key_cache, value_cache = kvjax_torch.split_kv_cache(layers[:, 1], spec)
    key_cache.fill_(1)
    value_cache.fill_(2)
    assert torch.equal(layers[:, 1, 0].unique(), torch.tensor([1], dtype=torch.uint8))
    assert torch.equal(layers[:, 1, 1].unique(), torch.tensor([2], dtype=torch.uint8))
    assert not layers[:, [0, 2, 3]].any()


PAGES = torch.zeros(spec_of().cache_shape(NUM_BLOCKS), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kv_cache", "spec", "error", "message"),
    [
        (PAGES.numpy(), spec_of(), KVCacheTypeError, "kv_cache: got a ndarray, expected a torch.Tensor"),
        (PAGES.short(), spec_of(), KVCacheTypeError, "kv_cache: got dtype torch.int16, expected .* uint8"),
        (PAGES[:, 0], spec_of(), KVCacheValueError, r"kv_cache: got shape \(3, 16, 2, 36\), expected \[num_blocks, 2"),
        (PAGES[0, 0, 0, 0, 0], spec_of(), KVCacheValueError, r"kv_cache: got shape \(\), expected \[num_blocks, 2"),
        (
            PAGES.transpose(2, 3).contiguous().transpose(2, 3),
            *(spec_of(), KVCacheValueError, "kv_cache: got strides .*, expected contiguous pages"),
        ),
        (PAGES, "nvfp4", KVCacheTypeError, "spec: got .*, expected an AttentionSpec"),
        (
            *(PAGES, MLAAttentionSpec(block_size=16, kv_lora_rank=512, qk_rope_head_dim=64, dtype=KVCacheDType.NVFP4)),
            *(KVCacheTypeError, "spec: got one of latents"),
        ),
    ],
)
def test_bad_input_is_named(kv_cache: Any, spec: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        kvjax_torch.split_kv_cache(kv_cache, spec)
