"""What a layer's cache takes, to the byte, how layers come to share a pool, and what a budget holds."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.calibration import calibrate
from kvjax.dtypes import STORED_KV_CACHE_DTYPES, KVCacheDType, KVQuantMode
from kvjax.errors import KVCacheError, KVCacheTypeError, KVCacheValueError
from kvjax.layouts import CacheLayout, VScaleLayout
from kvjax.shared_pages import max_blocks, max_tokens, unify_page_sizes
from kvjax.spec import (
    AttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    spec_from_dict,
    spec_to_dict,
)

laws = settings(derandomize=True, max_examples=80)

FLOAT32, FLOAT16, BFLOAT16 = KVCacheDType.FLOAT32, KVCacheDType.FLOAT16, KVCacheDType.BFLOAT16
E4M3, E5M2, NVFP4 = KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2, KVCacheDType.NVFP4
FP8_ROWS, INT8_ROWS = KVCacheDType.FP8_PER_TOKEN_HEAD, KVCacheDType.INT8_PER_TOKEN_HEAD
NVFP4_4OVER6 = KVCacheDType.NVFP4_4OVER6


def full(dtype: KVCacheDType, *sizes: int, **fields: Any) -> FullAttentionSpec:
    """By default a layer of Llama 3.1 8B: 16 tokens a block, 8 KV heads of 128."""
    return FullAttentionSpec(*(sizes or (16, 8, 128)), dtype=dtype, **fields)


def sliding(dtype: KVCacheDType, *sizes: int, **fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(*(sizes or (16, 8, 128)), dtype=dtype, **{"sliding_window": 1024} | fields)


# The row of one head of one token: 128 elements, 4 bytes more with a scale of its own, or for NVFP4 64 bytes of codes
# and 8 of scales. A token has 16 such rows (8 heads, keys and values), a block 16 tokens.
@pytest.mark.parametrize(
    ("dtype", "storage_dtype", "array_dtype", "row", "bytes_per_token", "page_size_bytes"),
    [
        (FLOAT32, np.float32, np.float32, 128, 8192, 131072),
        (FLOAT16, np.float16, np.float16, 128, 4096, 65536),
        (BFLOAT16, ml_dtypes.bfloat16, ml_dtypes.bfloat16, 128, 4096, 65536),
        (E4M3, ml_dtypes.float8_e4m3fn, np.uint8, 128, 2048, 32768),
        (E5M2, ml_dtypes.float8_e5m2, np.uint8, 128, 2048, 32768),
        (FP8_ROWS, ml_dtypes.float8_e4m3fn, np.uint8, 132, 2112, 33792),
        (INT8_ROWS, np.int8, np.uint8, 132, 2112, 33792),
        (NVFP4, np.uint8, np.uint8, 72, 1152, 18432),
    ],
)
@pytest.mark.parametrize("kind", [full, sliding])
def test_every_dtype_has_its_shape_and_size_in_every_kind(
    kind, dtype, storage_dtype, array_dtype, row, bytes_per_token, page_size_bytes
):
    nhd, hnd = (kind(dtype, layout=layout) for layout in CacheLayout)
    assert nhd.cache_shape(5) == (5, 2, 16, 8, row)
    assert hnd.cache_shape(5) == (5, 2, 8, 16, row)
    for spec in (nhd, hnd):
        assert (spec.storage_dtype, spec.array_dtype) == (storage_dtype, array_dtype)
        assert (spec.bytes_per_token, spec.page_size_bytes) == (bytes_per_token, page_size_bytes)
        assert (spec.real_page_size_bytes, spec.page_padding_bytes) == (page_size_bytes, 0)


# MiMo-V2-Flash: keys of 192, values of 128; 4 heads in its full layers, 8 in its sliding ones. NVFP4 rows are 96 + 12
# and 64 + 8 bytes.
@pytest.mark.parametrize(
    ("dtype", "row", "bytes_per_token", "bytes_per_token_sliding"),
    [
        (FLOAT32, 320, 5120, 10240),
        (FLOAT16, 320, 2560, 5120),
        (BFLOAT16, 320, 2560, 5120),
        (E4M3, 320, 1280, 2560),
        (E5M2, 320, 1280, 2560),
        (FP8_ROWS, 328, 1312, 2624),
        (INT8_ROWS, 328, 1312, 2624),
        (NVFP4, 180, 720, 1440),
    ],
)
def test_values_may_have_their_own_head_size(dtype, row, bytes_per_token, bytes_per_token_sliding):
    for kind, heads, expected in [(full, 4, bytes_per_token), (sliding, 8, bytes_per_token_sliding)]:
        spec = kind(dtype, 16, heads, 192, 128)
        assert spec.is_diffkv
        assert spec.bytes_per_token == expected
        assert spec.page_size_bytes == 16 * expected
        assert spec.cache_shape(5) == (5, 16, heads, row)
        assert dataclasses.replace(spec, layout=CacheLayout.HND).cache_shape(5) == (5, heads, 16, row)


@pytest.mark.parametrize("v_scale_layout", VScaleLayout)
def test_swizzled_scales_take_the_same_bytes(v_scale_layout):
    spec = full(NVFP4, v_scale_layout=v_scale_layout)
    assert spec.page_size_bytes == 18432
    assert spec.is_swizzled == (v_scale_layout is VScaleLayout.SWIZZLED)


@pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES)
@pytest.mark.parametrize("kind", [full, sliding])
@pytest.mark.parametrize("head_size_v", [64, 128])
def test_a_pool_is_an_array_of_bytes(dtype, kind, head_size_v):
    spec = kind(dtype, 16, 8, 128, head_size_v)
    padded = dataclasses.replace(spec, page_size_padded=spec.page_size_bytes + 100)
    assert padded.cache_shape(5) == (5, spec.page_size_bytes + 100)
    assert padded.array_dtype == np.uint8
    assert padded.storage_dtype == spec.storage_dtype
    assert padded.page_size_bytes == spec.page_size_bytes + 100
    assert (padded.real_page_size_bytes, padded.page_padding_bytes) == (spec.page_size_bytes, 100)
    assert (padded.bytes_per_token, padded.regions) == (spec.bytes_per_token, spec.regions)


@pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES)
@pytest.mark.parametrize("layout", CacheLayout)
@pytest.mark.parametrize("head_size_v", [None, 48])
@pytest.mark.parametrize("page_size_padded", [None, 10_000])
def test_the_array_holds_the_pages_and_nothing_more(dtype, layout, head_size_v, page_size_padded):
    spec = full(dtype, 4, 3, 80, head_size_v, layout=layout, page_size_padded=page_size_padded)
    assert math.prod(spec.cache_shape(7)) * spec.array_dtype.itemsize == 7 * spec.page_size_bytes


@pytest.mark.parametrize(
    ("dtype", "quant_mode"),
    [
        *((dtype, KVQuantMode.NONE) for dtype in (FLOAT32, FLOAT16, BFLOAT16)),
        *((dtype, KVQuantMode.FP8_PER_TENSOR) for dtype in (E4M3, E5M2)),
        (FP8_ROWS, KVQuantMode.FP8_PER_TOKEN_HEAD),
        (INT8_ROWS, KVQuantMode.INT8_PER_TOKEN_HEAD),
        (NVFP4, KVQuantMode.NVFP4),
        (NVFP4_4OVER6, KVQuantMode.NVFP4),
    ],
)
def test_quantization_is_asked_of_the_layer(dtype, quant_mode):
    assert full(dtype).quant_mode is sliding(dtype).quant_mode is quant_mode


def test_fp8_keys_and_nvfp4_values_share_a_page():
    """Of 128 elements rows of 128 bytes, and of 64 and 8; `[K | V data | V scales]` of 16 tokens and 8 heads."""
    spec = full(KVCacheDType.FP8_K_NVFP4_V)
    assert (spec.storage_dtype, spec.array_dtype) == (np.uint8, np.uint8)
    assert (spec.bytes_per_token, spec.page_size_bytes) == (1600, 25600)
    assert spec.cache_shape(5) == (5, 16, 8, 200)
    assert dataclasses.replace(spec, layout=CacheLayout.HND).cache_shape(5) == (5, 8, 16, 200)
    assert [region.base for regions in spec.regions for region in regions] == [0, 16384, 24576]
    assert full(KVCacheDType.FP8_K_NVFP4_V, 16, 8, 72, 128).cache_shape(5) == (5, 16, 8, 144)  # rows of equal bytes
    with pytest.raises(KVCacheValueError, match="head_size_v: got 72, expected a multiple of 16 for 'nvfp4'"):
        full(KVCacheDType.FP8_K_NVFP4_V, 16, 8, 128, 72)
    with pytest.raises(KVCacheValueError, match="stores keys and values in different dtypes"):
        _ = spec.quant_mode


def test_axes_of_elements_are_those_of_unpooled_fp8_and_unquantized_arrays():
    without = [dtype for dtype in STORED_KV_CACHE_DTYPES if not full(dtype).has_head_axis]
    assert without == [
        *(FP8_ROWS, INT8_ROWS, NVFP4, NVFP4_4OVER6),
        *(KVCacheDType.FP8_K_NVFP4_V, KVCacheDType.FP8_K_NVFP4_4OVER6_V),
        *(KVCacheDType.INT8_K_NVFP4_V, KVCacheDType.INT8_K_NVFP4_4OVER6_V),
    ]
    assert without == [dtype for dtype in STORED_KV_CACHE_DTYPES if full(dtype).stores_scales]
    assert not full(BFLOAT16, page_size_padded=65536).has_head_axis


def test_head_size_v_is_head_size_where_it_is_not_given():
    assert full(BFLOAT16, 16, 8, 96).head_size_v == 96
    assert full(BFLOAT16, 16, 8, 96) == full(BFLOAT16, 16, 8, 96, 96)
    assert not full(BFLOAT16, 16, 8, 96).is_diffkv


def test_strings_become_enums():
    spec = full(NVFP4, layout="HND", v_scale_layout="swizzled")
    assert spec.layout is CacheLayout.HND
    assert spec.v_scale_layout is VScaleLayout.SWIZZLED
    assert spec == full(NVFP4, layout=CacheLayout.HND, v_scale_layout=VScaleLayout.SWIZZLED)


def test_specs_are_frozen_hashable_and_told_apart():
    spec = full(E4M3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 32
    assert hash(spec) == hash(full(E4M3))
    different = {
        *(spec, full(E5M2), full(E4M3, 32, 8, 128), full(E4M3, 16, 4, 128), full(E4M3, 16, 8, 64)),
        *(full(E4M3, 16, 8, 128, 64), full(E4M3, layout="HND"), full(E4M3, page_size_padded=32768)),
        *(sliding(E4M3), sliding(E4M3, sliding_window=512), full(NVFP4), full(NVFP4, v_scale_layout="swizzled")),
    }
    assert len(different) == 12


def test_sizes_of_numpy_count_as_python_does():
    """As uint8, 128 elements of two bytes would be none."""
    spec = full(BFLOAT16, *np.array([16, 8, 128], np.uint8), page_size_padded=np.int32(65536))
    assert spec == full(BFLOAT16, page_size_padded=65536)
    assert spec.real_page_size_bytes == 65536
    sizes = [spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.page_size_padded]
    assert {type(size) for size in sizes} == {int}


SIZE_FIELDS = ["block_size", "num_kv_heads", "head_size", "head_size_v", "sliding_window", "page_size_padded"]


@pytest.mark.parametrize("field", SIZE_FIELDS)
@pytest.mark.parametrize("value", [0, -16, np.int64(0)])
def test_sizes_below_one_are_refused_by_name(field, value):
    message = re.escape(f"SlidingWindowSpec.{field}: got {value}, expected an int of at least 1")
    with pytest.raises(KVCacheValueError, match=f"^{message}$"):
        dataclasses.replace(sliding(BFLOAT16), **{field: value})


@pytest.mark.parametrize("field", SIZE_FIELDS)
def test_sizes_that_no_memory_has_are_refused(field):
    message = re.escape(
        f"SlidingWindowSpec.{field}: got int too large to print, expected an int of at most {2**63 - 1}"
    )
    with pytest.raises(KVCacheValueError, match=f"^{message}$"):
        dataclasses.replace(sliding(BFLOAT16), **{field: 10**5000})


@pytest.mark.parametrize("field", SIZE_FIELDS)
@pytest.mark.parametrize("value", [16.0, "16", True, np.float32(16), [16]], ids=repr)
def test_sizes_that_are_no_ints_are_refused_by_type(field, value):
    message = re.escape(f"SlidingWindowSpec.{field}: got {value!r} of type {type(value).__name__}, expected an int")
    with pytest.raises(KVCacheTypeError, match=f"^{message}$"):
        dataclasses.replace(sliding(BFLOAT16), **{field: value})


def test_the_string_of_a_dtype_is_taken_for_it():
    for name, dtype in {"nvfp4": KVCacheDType.NVFP4, "fp8": E4M3, "bfloat16": BFLOAT16}.items():
        spec = full(name)
        assert spec == full(dtype)
        assert spec.dtype is dtype
        assert dataclasses.replace(full(FLOAT32), dtype=name) == spec


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        ("float8", KVCacheValueError, r"got 'float8', expected one of .* \(did you mean 'fp8'\?\)"),
        ("auto", KVCacheValueError, "AUTO has no storage"),
        (np.float32, KVCacheTypeError, "got <class 'numpy.float32'> of type type, expected a string or KVCacheDType"),
        (None, KVCacheTypeError, "got None of type NoneType, expected a string or KVCacheDType"),
    ],
    ids=repr,
)
def test_what_names_no_stored_dtype_is_refused(dtype, error, message):
    with pytest.raises(error, match=message if dtype == "auto" else f"^FullAttentionSpec.dtype: {message}$"):
        full(dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: full(KVCacheDType.AUTO), "AUTO has no storage: resolve it with resolve_kv_cache_dtype first"),
        (lambda: full(BFLOAT16, layout="nhd"), "layout: got 'nhd', expected one of NHD, HND"),
        (lambda: full(BFLOAT16, layout="NDH"), "layout: got 'NDH', expected one of NHD, HND"),
        (lambda: full(BFLOAT16, layout=None), "layout: got None, expected one of NHD, HND"),
        (
            lambda: full(NVFP4, v_scale_layout="swizzle"),
            "v_scale_layout: got 'swizzle', expected one of linear, swizzled (did you mean 'swizzled'?)",
        ),
        (
            lambda: full(E4M3, v_scale_layout="swizzled"),
            "v_scale_layout: got 'swizzled' with dtype 'fp8_e4m3', which has no block scales; expected 'linear'",
        ),
        (
            lambda: full(NVFP4, 6, 8, 128, v_scale_layout="swizzled"),
            "block_size: got 6, expected a multiple of 4 for v_scale_layout='swizzled'",
        ),
        (lambda: full(NVFP4, 16, 8, 72), "head_size: got 72, expected a multiple of 16 for 'nvfp4'"),
        (lambda: full(NVFP4, 16, 8, 64, 72), "head_size_v: got 72, expected a multiple of 16 for 'nvfp4'"),
        (
            lambda: full(NVFP4, page_size_padded=18431),
            "page_size_padded: got 18431, expected at least 18432, the bytes of one page of this spec",
        ),
        (
            lambda: full(BFLOAT16, sliding_window=128),
            "FullAttentionSpec.sliding_window: got 128, expected None (or a SlidingWindowSpec)",
        ),
        (
            lambda: sliding(BFLOAT16, sliding_window=None),
            "SlidingWindowSpec.sliding_window: got None, expected a positive int",
        ),
    ],
)
def test_what_no_cache_can_have_is_refused_by_name(make, message):
    with pytest.raises(KVCacheValueError) as raised:
        make()
    assert str(raised.value).removeprefix("KVCacheDType.") == message


def test_a_block_of_any_size_holds_linear_scales():
    assert full(NVFP4, 6, 8, 128).page_size_bytes == 6 * 1152


def pool(specs: tuple[AttentionSpec, ...]) -> list[tuple[int, int, int]]:
    return [(spec.block_size, spec.page_size_bytes, spec.page_padding_bytes) for spec in specs]


def test_layers_of_32_to_16_to_9_bytes_share_pages():
    """Two fp8 blocks fill a bfloat16 page; three NVFP4 blocks take 27 parts of its 32, and no fourth fits."""
    unified = unify_page_sizes([full(BFLOAT16), full(E4M3), full(NVFP4)])
    assert pool(unified) == [(16, 65536, 0), (32, 65536, 0), (48, 65536, 10240)]
    assert {spec.cache_shape(3) for spec in unified} == {(3, 65536)}
    assert {spec.array_dtype for spec in unified} == {np.dtype(np.uint8)}


def test_fp8_and_nvfp4_share_pages():
    """One NVFP4 block in a page of 16 parts leaves 7 of them."""
    assert pool(unify_page_sizes([full(E4M3), full(NVFP4)])) == [(16, 32768, 0), (16, 32768, 14336)]


def test_sliding_layers_keep_their_window_and_kind():
    """gpt-oss's pattern with its sliding layers left in bfloat16."""
    unified = unify_page_sizes([sliding(BFLOAT16, 16, 8, 64, sliding_window=128), full(E4M3, 16, 8, 64)] * 2)
    assert pool(unified) == [(16, 32768, 0), (32, 32768, 0)] * 2
    assert [type(spec) for spec in unified] == [SlidingWindowSpec, FullAttentionSpec] * 2
    assert [spec.sliding_window for spec in unified] == [128, None, 128, None]


def test_layers_with_other_heads_share_pages():
    """MiMo-V2-Flash: full layers have half the heads of sliding ones, so their blocks double."""
    unified = unify_page_sizes([full(BFLOAT16, 16, 4, 192, 128), sliding(BFLOAT16, 16, 8, 192, 128)])
    assert pool(unified) == [(32, 81920, 0), (16, 81920, 0)]


def test_a_grown_block_stays_swizzled():
    _, nvfp4 = unify_page_sizes([full(BFLOAT16, 4, 8, 128), full(NVFP4, 4, 8, 128, v_scale_layout="swizzled")])
    assert (nvfp4.block_size, nvfp4.is_swizzled) == (12, True)


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [full(NVFP4)],
        [full(BFLOAT16)] * 3,
        [full(BFLOAT16), sliding(BFLOAT16)],
        [full(E4M3), full(E5M2)],
        [full(NVFP4), full(NVFP4, v_scale_layout="swizzled")],
    ],
    ids=["none", "one", "equal", "full and sliding", "both fp8", "both scale layouts"],
)
def test_layers_with_one_array_shape_are_left_alone(specs):
    assert unify_page_sizes(specs) == tuple(specs)


@pytest.mark.parametrize("others", [[FLOAT16], [FLOAT16, BFLOAT16]])
def test_pages_of_one_size_and_several_element_types_become_bytes(others):
    unified = unify_page_sizes([full(BFLOAT16), *map(full, others)])
    assert pool(unified) == [(16, 65536, 0)] * (1 + len(others))
    assert {spec.cache_shape(3) for spec in unified} == {(3, 65536)}


@st.composite
def layers(draw: st.DrawFn) -> AttentionSpec:
    head_size = st.sampled_from([64, 80, 96, 112, 128, 192, 256])
    fields = {
        "block_size": 4 * draw(st.integers(1, 16)),
        "num_kv_heads": draw(st.integers(1, 16)),
        "head_size": draw(head_size),
        "head_size_v": draw(st.none() | head_size),
        "dtype": draw(st.sampled_from(STORED_KV_CACHE_DTYPES)),
        "layout": draw(st.sampled_from(CacheLayout)),
    }
    window = draw(st.none() | st.integers(1, 4096))
    return FullAttentionSpec(**fields) if window is None else SlidingWindowSpec(**fields, sliding_window=window)


MODELS = st.lists(layers(), min_size=1, max_size=6)


@laws
@given(MODELS)
def test_unified_pages_lose_less_than_a_block_each(specs: list[AttentionSpec]):
    unified = unify_page_sizes(specs)
    assert {spec.page_size_bytes for spec in unified} == {max(spec.page_size_bytes for spec in specs)}
    assert len({(spec.array_dtype, spec.cache_shape(3)) for spec in unified}) == 1
    for before, after in zip(specs, unified, strict=True):
        grown, rest = divmod(after.block_size, before.block_size)
        assert (grown >= 1, rest) == (True, 0)
        assert after.page_padding_bytes == after.page_size_bytes - grown * before.page_size_bytes
        assert 0 <= after.page_padding_bytes < before.page_size_bytes
        unchanged = {"block_size": before.block_size, "page_size_padded": before.page_size_padded}
        assert dataclasses.replace(after, **unchanged) == before


@laws
@given(MODELS)
def test_unified_layers_stay_as_they_are(specs: list[AttentionSpec]):
    unified = unify_page_sizes(specs)
    assert unify_page_sizes(unified) == unified


def test_a_model_dtype_is_any_name_of_one_and_goes_through_json():
    spec = full(NVFP4, model_dtype="mixed_float16")
    assert spec.model_dtype is FLOAT16
    assert spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == spec != full(NVFP4)
    with pytest.raises(KVCacheValueError, match="model dtype: got 'fp8', expected one of float32, float16, bfloat16"):
        full(NVFP4, model_dtype="fp8")


def bytes_for(specs: list[AttentionSpec], tokens: int) -> int:
    return sum(math.ceil(tokens / spec.block_size) * spec.page_size_bytes for spec in specs)


@laws
@given(MODELS, st.integers(0, 2**30), st.booleans())
def test_a_budget_is_kept_and_used_up(specs: list[AttentionSpec], budget: int, unify: bool):
    specs = list(unify_page_sizes(specs)) if unify else specs
    tokens = max_tokens(specs, budget)
    assert bytes_for(specs, tokens) <= budget < bytes_for(specs, tokens + 1)


@laws
@given(MODELS, st.integers(0, 2**30), st.integers(0, 2**20))
def test_more_memory_holds_no_fewer_tokens(specs: list[AttentionSpec], budget: int, more: int):
    assert max_tokens(specs, budget) <= max_tokens(specs, budget + more)


@laws
@given(MODELS, st.integers(0, 2**30), st.booleans())
def test_a_budget_is_kept_and_used_up_by_blocks_of_every_layer(specs: list[AttentionSpec], budget: int, unify: bool):
    specs = list(unify_page_sizes(specs)) if unify else specs
    blocks, together = max_blocks(specs, budget), sum(spec.page_size_bytes for spec in specs)
    assert blocks * together <= budget < (blocks + 1) * together


@laws
@given(MODELS, st.integers(1, 2**20))
def test_the_bytes_that_tokens_need_hold_them(specs: list[AttentionSpec], tokens: int):
    needed = bytes_for(specs, tokens)
    assert max_tokens(specs, needed - 1) < tokens <= max_tokens(specs, needed)


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        *((FLOAT32, 163_840), (FLOAT16, 327_680), (BFLOAT16, 327_680), (E4M3, 655_360), (E5M2, 655_360)),
        *((FP8_ROWS, 635_488), (INT8_ROWS, 635_488), (NVFP4, 1_165_072), (NVFP4_4OVER6, 1_165_072)),
    ],
)
def test_max_tokens_returns_the_tokens_of_llama_in_40_gib(dtype, tokens):
    assert max_tokens([full(dtype)] * 32, 40 * 2**30) == tokens


def test_max_tokens_counts_pages_by_the_block_size_of_each_layer():
    """17 tokens take two pages of 16 tokens and one of 32."""
    bfloat16, fp8 = specs = unify_page_sizes([full(BFLOAT16), full(E4M3)])
    assert (bfloat16.block_size, fp8.block_size) == (16, 32)
    assert [max_tokens(specs, pages * 65536) for pages in range(6)] == [0, 0, 16, 32, 32, 48]


@pytest.mark.parametrize(
    "specs", [full(BFLOAT16), ["bfloat16"], None, "fp8"], ids=["spec", "strings", "none", "string"]
)
@pytest.mark.parametrize(
    "use",
    [
        unify_page_sizes,
        lambda specs: max_tokens(specs, 1),
        lambda specs: max_blocks(specs, 1),
        lambda specs: calibrate(specs, [[]]),
    ],
    ids=["unify", "tokens", "blocks", "calibrate"],
)
def test_specs_that_are_no_sequence_are_refused(use, specs):
    with pytest.raises(KVCacheTypeError, match=r"^specs: got .*, expected a sequence of specs, one for each layer$"):
        use(specs)


def test_a_budget_of_any_size_is_counted():
    assert max_tokens([full(BFLOAT16)], 2**100) == 2**100 // 65536 * 16
    assert max_tokens([full(BFLOAT16)], np.int64(65536)) == 16
    assert max_tokens([full(BFLOAT16)], 0) == 0


@pytest.mark.parametrize(
    ("specs", "budget", "error", "message"),
    [
        ([], 1, KVCacheValueError, "max_tokens: got no specs, expected one for each layer"),
        ([full(E4M3)], -1, KVCacheValueError, "budget_bytes: got -1, expected an int of at least 0"),
        ([full(E4M3)], 4e10, KVCacheTypeError, "budget_bytes: got 40000000000.0 of type float, expected an int"),
        ([full(E4M3)], "40GiB", KVCacheTypeError, "budget_bytes: got '40GiB' of type str, expected an int"),
    ],
)
def test_invalid_budgets_are_refused(specs, budget, error: type[KVCacheError], message: str):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        max_tokens(specs, budget)
    with pytest.raises(error, match=f"^{re.escape(message.replace('max_tokens', 'max_blocks'))}$"):
        max_blocks(specs, budget)
